"""Memory that one rank needs to train a model, for any strategy, precision and optimizer, and decisions that follow.

The model may lie on the meta device; nothing is allocated. `estimate` adds up the bytes of its parameters ("Mixed
Precision Training", arXiv:1710.03740; "ZeRO", arXiv:1910.02054, section 3), with the strategy's `Layout` of elements.
Not counted: workspace of kernels, fragmentation, the device's runtime, and activations without a sample. The rows are
not all full at one moment, so the total is above the peak.

Example:
    >>> easymp.memory.estimate(1_000_000, strategy="fsdp", world=8).states  # bytes
    1000000
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from .. import conflicts
from ..base.units import columns, size, unit
from ..errors import SettingError, check_whole, is_whole, nearest
from ..logging import get_logger
from ..plan import candidates
from ..precision import ALIASES, PRECISIONS
from ..precision.policies import LOW, rounded_weights
from ..protocols import Choice, Layout, Precision, Source, Strategy
from ..registry import PrecisionName, StrategyName
from ..settings import Settings, as_record
from ..strategies import STRATEGIES
from ..strategies.transforms import read_which
from .activations import count_activations
from .state import Run

logger = get_logger(__name__)

# Tensors of a parameter's size that an optimizer keeps for it, by the options of its group; the names are of torch's
# classes.
STATES: dict[str, Callable[[Mapping[str, Any]], int]] = {
    **dict.fromkeys(("adadelta", "adamax", "lamb", "nadam", "radam", "rprop"), lambda group: 2),
    **dict.fromkeys(("adagrad", "asgd", "lion", "muon", "sgd momentum"), lambda group: 1),
    **dict.fromkeys(("adam", "adamw"), lambda group: 2 + bool(group.get("amsgrad"))),
    "rmsprop": lambda group: 1 + bool(group.get("momentum")) + bool(group.get("centered")),
    "sgd": lambda group: int(bool(group.get("momentum"))),
}
FP32, BF16 = 4, 2
SPARE = 0.2  # part of a rank's memory left to activations and workspace, which are not known when models are prepared
NO_SAMPLE = "activations are not counted: pass a sample batch"

Optimizer = str | int | type[torch.optim.Optimizer] | torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
Models = Sequence[nn.Module]
Optimizers = Sequence[torch.optim.Optimizer]


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank needs; of the fullest rank, where they differ.

    Attributes:
        strategy: its name.
        precision: its name.
        world: number of ranks.
        weights: parameters, or this rank's shards of them.
        buffers: the model's buffers, whole.
        gradients: in the type of the weights, and once more in fp32 for masters.
        states: the optimizer's states.
        masters: fp32 master weights, where the precision keeps some beside low-precision weights.
        copies: autocast's low-precision copies of the weights of matrix layers, alive from forward to backward.
        gathered: other ranks' weights that are here for a while, in the precision's compute type, at the peak.
        reducing: whole gradients and those in communication, beside those in `gradients`, at the peak.
        activations: what forward keeps for backward, and gradients of these, at the peak; None where no sample was
            given.
        notes: figures that are approximate, or not counted.
        largest: the ten largest activations at the peak, each with its bytes, shape and module, and the word that
            removes it.

    Example:
        >>> need = easymp.memory.estimate(nn.Linear(2, 1), optimizer="sgd")
        >>> need.rows, need.total, need.lasting
        ({'weights': 12, 'gradients': 12}, 24, 24)
    """

    strategy: str
    precision: str
    world: int
    weights: int
    buffers: int
    gradients: int
    states: int
    masters: int
    copies: int
    gathered: int
    reducing: int
    activations: int | None
    notes: tuple[str, ...] = ()
    largest: tuple[dict[str, Any], ...] = ()

    @property
    def rows(self) -> dict[str, int]:
        """The rows that hold something, by name."""
        return {name: size for name in ROWS if (size := getattr(self, name))}

    @property
    def total(self) -> int:
        """The sum of the rows."""
        return sum(self.rows.values())

    @property
    def lasting(self) -> int:
        """Bytes that stay from one step to the next: weights, buffers, gradients, states, masters."""
        return self.weights + self.buffers + self.gradients + self.states + self.masters

    def __add__(self, second: Memory) -> Memory:
        """Two models at once, under one strategy and precision."""
        pairs = {row: (getattr(self, row), getattr(second, row)) for row in ROWS}
        sums = {row: None if None in pair else sum(pair) for row, pair in pairs.items()}
        notes = tuple(dict.fromkeys(self.notes + second.notes))
        rows = sorted(self.largest + second.largest, key=lambda row: -row["bytes"])[:10]
        return replace(self, **sums, notes=notes, largest=tuple(rows))  # type: ignore[arg-type]

    def __str__(self) -> str:
        ranks = f"{self.world} ranks" if self.world > 1 else "one rank"
        name, scale = unit(self.total)
        rows = {**self.rows, "total": self.total}
        cells = [[row, f"{number / scale:,.2f}"] for row, number in rows.items()]
        lines = [f"{line} {name}" for line in columns(cells)]
        return "\n".join([f"{self.strategy}, {self.precision}, {ranks}; a rank needs", *lines, *self.notes])


ROWS = tuple(f.name for f in fields(Memory)[3:-2])


def estimate(
    model: nn.Module | int,
    *,
    strategy: StrategyName = "ddp",
    precision: PrecisionName | Precision = "fp32",
    world: int = 1,
    per_node: int | None = None,
    optimizer: Optimizer = "adamw",
    options: Any = None,
    sample: Any = None,
    activations: int | Memory | None = None,
    averages: bool = False,
    stochastic_rounding: bool = False,
    activation_checkpointing: bool | str | Sequence[str] = False,
    activation_offload: bool = False,
    optimizer_in_backward: bool = False,
) -> Memory:
    """Estimate the memory that one of `world` ranks needs to train `model`.

    Args:
        model: any module, or a number of parameters (fp32, all trained).
        strategy: a name that ``Accelerator(strategy=...)`` takes, save "auto".
        precision: a name that ``Accelerator(mixed_precision=...)`` takes, save "auto"; or a precision.
        world: number of ranks.
        per_node: ranks of a node; None means one node.
        optimizer: a name of `STATES`, a class of torch.optim, how many tensors of its size are kept for a parameter, or
            one or several optimizers of this model: parameters that none of them holds have no states. An optimizer of
            a class that is not in `STATES` counts with two.
        options: of the strategy: its record or a dict of its fields.
        sample: one rank's micro-batch: positional arguments in a tuple, keyword arguments in a dict, or one tensor.
            With it, a forward is followed by shapes alone, and a backward from the sum of its outputs; a loss outside
            of the model is not counted, and a GPU's kernels may save something else (fused attention, recurrent
            layers). Activations are those of the whole model: where a strategy splits layers or stages, a rank keeps
            fewer.
        activations: bytes of activations, if they are known already; or an estimate with a sample, whose activations
            and copies (at most as many) are taken.
        stochastic_rounding: states are bf16, and bf16 weights have no masters.
        averages: moving averages of the weights are kept (``Accelerator(ema_decay=...)``), in fp32, among the states.
        activation_checkpointing: as ``Accelerator(activation_checkpointing=...)`` takes it, for the activations of
            `sample`, and for the copies that are alive at their peak.
        activation_offload: kept activations are in the host's memory.
        optimizer_in_backward: gradients are freed as they come, and only those that are there at once count.

    Returns:
        The estimate; ``print`` shows its rows.

    Raises:
        SettingError: a wrong name or value.
        RefusedError: the strategy has no `activation_offload` or `optimizer_in_backward`.
        PrepareError: there is nothing in `model` that `activation_checkpointing` means.
        BatchError: the model's forward cannot be followed on `sample`.

    Example:
        >>> model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
        >>> need = easymp.memory.estimate(model, strategy="fsdp", world=8, sample=torch.ones(32, 256))
        >>> need.activations  # bytes: the input, both outputs of ReLU's layer, and gradients of both
        425984
    """
    kind, policy = _lookup(STRATEGIES, strategy, "strategy"), precision
    if isinstance(policy, str):
        policy = _lookup(PRECISIONS, ALIASES.get(policy, policy), "precision")
    for name, number in (("world", world), ("per_node", world if per_node is None else per_node)):
        check_whole(f"{name}={number!r}", number)
    settings = Settings(activation_offload=activation_offload, optimizer_in_backward=optimizer_in_backward)
    conflicts.check({kind.name, *conflicts.words_of(settings)}, conflicts.rows_of(kind, policy, settings))
    module = model if isinstance(model, nn.Module) else Counted(model)
    read = as_record(kind.Options, f"strategy {kind.name!r}", options)
    layout: Layout = kind.layout(module, read, world, min(world, per_node or world))
    states = _states(optimizer, module)
    low = policy.compute.itemsize < FP32 and policy.param.itemsize == FP32
    copied = _matrices(module) if low and not layout.gathers and not policy.swaps else set()
    rounds_once: Collection[int] = ()
    if policy.rounds and not layout.gathers:
        rounds_once = {id(module.all)} if isinstance(module, Counted) else rounded_weights(module)
    sums = dict.fromkeys(ROWS, 0)
    widest, gradients = 1, [0]
    for name, parameter in module.named_parameters():  # a tied one once
        raised = policy.raises and parameter.requires_grad and parameter.dtype in LOW
        converted = raised or (policy.param != torch.float32 and parameter.is_floating_point())
        size = policy.param.itemsize if converted else parameter.element_size()  # of an element, as it is stored
        widest = max(widest, size)
        sums["weights"] += layout.weights(name, parameter) * size
        if id(parameter) in copied and size > policy.compute.itemsize:
            sums["copies"] += layout.copies(name, parameter) * policy.compute.itemsize
        if id(parameter) in rounds_once:  # fp8: one byte
            sums["copies"] += layout.copies(name, parameter)
        if parameter.requires_grad:
            wide = FP32 if size < FP32 and policy.keeps_updates and (policy.masters or not stochastic_rounding) else 0
            gradients.append(layout.gradients(name, parameter) * (size + wide))
            sums["masters"] += layout.weights(name, parameter) * wide  # zero1 cuts the states alone
            states_size = states(parameter) * (BF16 if stochastic_rounding else wide or size) + FP32 * averages
            sums["states"] += layout.states(name, parameter) * states_size
    sums["gradients"] = sum(gradients)
    if optimizer_in_backward:
        sums["gradients"] = min(sum(gradients), layout.early * widest or max(gradients))
    notes = [layout.note] if layout.note else []
    if policy.swaps:
        notes.append(f"{policy.name} activations are counted as under autocast, which is more")
    if module is model:
        gathered_size = policy.compute.itemsize if low and layout.gathers and widest <= FP32 else widest
        sums["gathered"] = layout.gathered * gathered_size
        sums["reducing"] = layout.unreduced * gathered_size + layout.reducing * policy.reduce.itemsize
    else:
        notes.append("from a count alone: weights that are gathered at a time are not counted")
    sums["buffers"] = sum(b.numel() * b.element_size() for b in module.buffers())
    rows: tuple[dict[str, Any], ...] = ()
    if isinstance(activations, Memory):
        sums["copies"], rows = min(sums["copies"], activations.copies), activations.largest
        activations = activations.activations
    if activations is None and sample is not None:
        checkpointing: Any = activation_checkpointing
        recomputed = read_which(Settings(activation_checkpointing=checkpointing).activation_checkpointing)
        below = recomputed.below if recomputed else None
        spare = (below or 0) - sum(sums.values())
        counted = count_activations(module, policy, sample, recomputed, spare, activation_offload)
        activations, rows = -(-counted.bytes // (share := getattr(read, "context_parallel", 1))), tuple(counted.largest)
        if recomputed:  # recomputation frees copies, too
            sums["copies"] = min(sums["copies"], counted.copies)
        if share > 1:
            notes.append(f"activations of 1/{share} of each sequence")
        if below:
            notes.append(str(counted))
    if activations is None:
        notes.append(NO_SAMPLE)
    elif activation_offload:
        notes.append("activations that forward keeps are in the host's memory")
    sums["activations"] = activations  # type: ignore[assignment]
    return Memory(kind.name, policy.name, world, **sums, notes=tuple(notes), largest=rows)


REMOVED = {
    **dict.fromkeys(("predict", "Prediction"), "easymp compare measures the time of an update"),
    **dict.fromkeys(("table", "Table"), "call easymp.memory.estimate for each strategy, or run easymp estimate"),
    "bytes_saved": "easymp.memory.estimate(model, sample=...).activations counts a whole step",
}


def __getattr__(name: str) -> Any:
    if name in REMOVED:
        raise AttributeError(f"easymp.memory.{name} was removed: {REMOVED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Counted(nn.Module):
    """A model of which only the number of parameters is known."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        if not is_whole(parameters, 0):
            raise SettingError(f"model={parameters!r} is neither a module nor a number of parameters")
        self.all = nn.Parameter(torch.empty(parameters, device="meta"))


def _lookup(table: Mapping[str, Any], name: str, label: str) -> Any:
    if name not in table:
        raise SettingError(f"{label}={name!r} is not one of {', '.join(table)}{nearest(name, table)}")
    return table[name]


def _matrices(model: nn.Module) -> set[int]:
    """ids of the parameters that autocast copies: weights and biases of layers that compute in half precision."""
    matrix_ids: set[int] = set()
    for module in model.modules():
        parameters = [p for p in module._parameters.values() if p is not None]
        if isinstance(module, Counted):
            matrix_ids.update(map(id, parameters))
        elif not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and any(p.ndim > 1 for p in parameters):
            wide = (p for p in parameters if p.dtype == torch.float32 or (p.requires_grad and p.dtype in LOW))
            matrix_ids.update(map(id, wide))
    return matrix_ids


def _states(optimizer: Optimizer, model: nn.Module) -> Callable[[Tensor], int]:
    """Number of state tensors of a parameter's size that the optimizer keeps for each parameter."""
    if is_whole(optimizer, 0):
        return lambda parameter: optimizer  # type: ignore[return-value]
    if isinstance(optimizer, (str, type)):
        name = optimizer if isinstance(optimizer, str) else optimizer.__name__
        class_name = name.lower().removeprefix("fused")
        if class_name not in STATES:
            raise SettingError(
                f"the states of optimizer {name.lower()!r} are not known{nearest(class_name, STATES)}: pass the number "
                f"of tensors of a parameter's size that it keeps, such as optimizer=2. Known: {', '.join(STATES)}"
            )
        number = STATES[class_name]({})
        return lambda parameter: number
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    if not isinstance(optimizers, (list, tuple)) or not all(isinstance(o, torch.optim.Optimizer) for o in optimizers):
        remedy = "is not a name, class, number of states or torch optimizer"
        raise SettingError(f"optimizer={optimizer!r} {remedy}")
    counts: dict[int, int] = {}
    for one in optimizers:
        count_states = STATES.get(type(one).__name__.lower().removeprefix("fused"), STATES["adam"])
        counts.update((id(p), count_states(group)) for group in one.param_groups for p in group["params"])
    if counts and not any(id(p) in counts for p in model.parameters()):
        raise SettingError("none of the optimizers holds a parameter of this model: pass those built from it")
    return lambda parameter: counts.get(id(parameter), 0)


def fits(need: Memory, available: int) -> bool:
    """Tell whether a rank has enough memory, with a fifth of it to spare for what is not counted.

    Args:
        need: an estimate.
        available: bytes of the rank.

    Returns:
        Whether `need` is at most four fifths of `available`.

    Example:
        >>> easymp.memory.fits(easymp.memory.estimate(7_000_000_000), available=80 * 2**30)
        False
    """
    return need.total <= available * (1 - SPARE)


# -- Strategy "auto": decided by the memory that the first models need, before they are wrapped.


def by_memory(needs: Mapping[str, Memory], available: int) -> Choice[str]:
    """Choose the first of `needs` that fits into `available` bytes, or the last one; the reason has the arithmetic."""
    limit = int(available * (1 - SPARE))
    sentences: list[str] = []
    for name, need in needs.items():
        rows = ", ".join(f"{row} {size(number)}" for row, number in need.rows.items())
        sentences.append(f"{name} needs {size(need.total)} a rank ({rows})")
        if fits(need, available):
            break
    sentences[0] += f" of {size(limit)} ({size(available)}, less {SPARE:.0%} for activations and workspace)"
    if not fits(need, available):
        remedy = "training may run out of memory, so use more processes or a smaller model"
        sentences.append(f"{size(need.total - limit)} too much: {remedy}")
    return Choice(need.strategy, "; ".join(sentences), Source.DETECTED)


class AutoStrategy:
    """Chooses the strategy of a run by memory. The planned one stays where its options were given."""

    def __init__(self, run: Run) -> None:
        self._run, self._free = run, run.plan.settings.strategy_options is None
        self._planned = run.plan.strategy
        self.total_need: Memory | None = None  # of all models so far

    def choose(self, models: Models, optimizers: Optimizers, strategy: Strategy) -> Strategy:
        """The first strategy whose memory suffices for `models`. Once models are wrapped, the strategy stays."""
        plan, world, name = self._run.plan, self._run.world, strategy.name
        if self.total_need is not None:
            self.total_need += self.need(name, models, optimizers)
            if not fits(self.total_need, plan.memory):
                reason = by_memory({name: self.total_need}, plan.memory).reason
                logger.warning("strategy %s stays, for models are wrapped already; with this one %s", name, reason)
            return strategy
        names = candidates(plan) if self._free else [name]
        needs = {name: self.need(name, models, optimizers) for name in names}
        by_rank = world.gather_objects((plan.memory, needs))
        available = min(memory for memory, _ in by_rank)
        _, needs = by_rank[0]  # the same figures on all ranks
        fitting = {name: fits(need, available) for name, need in needs.items()}
        if next(iter(fitting.values())):
            choice = replace(self._planned, reason=f"{self._planned.reason}; the fewest moving parts, and it fits")
        else:
            choice = by_memory(needs, available)
            if not self._free:
                reason = f"{choice.reason}; options of {choice.value} were given, so it stays"
                choice = replace(choice, reason=reason)
            log = logger.info if any(fitting.values()) else logger.warning
            log("strategy %s: %s", choice.value, choice.reason)
        self.total_need = needs[choice.value]
        rows: list[dict[str, Any]] = []
        for name, need in needs.items():
            reason = f"{size(need.total)} a rank without activations, {'fits' if fitting[name] else 'too much'}"
            rows.append({"strategy": name, "bytes": need.total, "fits": fitting[name], "reason": reason})
        self._run.plan = replace(plan, strategy=choice, candidates=tuple(rows))
        if choice.value == strategy.name:
            return strategy
        kind = STRATEGIES[choice.value]
        return kind(world, kind.Options())  # type: ignore[call-arg]

    def reduce_early(self, models: Models, optimizers: Optimizers, strategy: Strategy, accumulates: bool) -> None:
        """Decide whether `strategy` reduces gradients at each micro-batch, if its options leave it open; collective."""
        plan, arithmetic = self._run.plan, ""
        if strategy.reduces_each is None:
            need = self.need(strategy.name, models, optimizers, strategy.options)
            whole_bytes = sum(p.numel() * FP32 for model in models for p in model.parameters() if p.requires_grad)
            available = min(self._run.world.gather_objects(plan.memory))
            strategy.reduces_each = not fits(replace(need, reducing=need.reducing + whole_bytes), available)
            fit = "do not fit" if strategy.reduces_each else "fit"
            limit = size(int(available * (1 - SPARE)))
            arithmetic = f": {size(whole_bytes)} of whole gradients {fit} beside {size(need.total)} a rank of {limit}"
        choice = plan.accumulation
        if accumulates and strategy.sharded and "gradients" not in choice.reason:
            fate = (
                "are reduced to shards at each" if strategy.reduces_each else "stay whole and are reduced at the last"
            )
            self._run.refine("accumulation", f"{choice.reason}; gradients {fate}{arithmetic}")

    def need(self, name: str, models: Models, optimizers: Optimizers, options: Any = None, **arguments: Any) -> Memory:
        """What a rank needs for `models` under the strategy of this name, with further `arguments` of `estimate`."""
        world, settings = self._run.world, self._run.plan.settings
        needs = []
        for model in models:
            ids = {id(parameter) for parameter in model.parameters()}
            stepping = [o for o in optimizers if any(id(p) in ids for g in o.param_groups for p in g["params"])]
            need = estimate(
                model,
                strategy=name,  # type: ignore[arg-type]
                precision=self._run.precision,
                world=world.size,
                per_node=world.local_size,
                optimizer=stepping or "adamw",  # one that is prepared later is taken for the usual one
                options=options,
                averages=settings.ema_decay is not None,
                stochastic_rounding=settings.stochastic_rounding,
                **arguments,
            )
            needs.append(need)
        return reduce(add, needs)
