"""Memory that one rank needs to train a model, for any strategy, precision and optimizer, and the decisions that follow from it.

The model may lie on the meta device; nothing is allocated. Bytes of a rank, summed over parameters of n elements, where `layout` is the
strategy's and b(x) are bytes of an element ("Mixed Precision Training", arXiv:1710.03740; "ZeRO", arXiv:1910.02054, section 3):

    weights     layout.weights(n) × b(stored)               masters   layout.weights(n) × 4, of low-precision weights
    gradients   layout.gradients(n) × (b(stored) + master)  states    layout.states(n) × (STATES × b(stepped) + 4 for an average)
    copies      layout.copies(n) × b(compute), of matrix layers under autocast; × 1, of weights that are rounded to fp8 once an update
    gathered    layout.gathered × b(gathered)               reducing  layout.unreduced × b(gathered) + layout.reducing × b(reduced)

Not counted: workspace of kernels, fragmentation, the device's runtime, and activations without a sample. The rows are not all full at
one moment, so the total is above the peak.

Example:
    >>> easymp.memory.estimate(1_000_000, strategy="fsdp", world=8).states  # bytes
    1000000
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from inspect import signature
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from .. import optim
from ..base.units import columns, size, unit
from ..errors import EasympError, SettingError, nearest
from ..hardware import gpus
from ..logging import get_logger
from ..plan import candidates
from ..precision import ALIASES, PRECISIONS
from ..precision.policies import LOW, product_type, rounded_weights
from ..protocols import Choice, Layout, Precision, Source, Strategy
from ..registry import PrecisionName, StrategyName
from ..settings import Settings, as_record
from ..strategies import STRATEGIES
from ..strategies.single import refuse_words
from ..strategies.transforms import read_which
from .activations import bytes_saved as bytes_saved
from .activations import count_activations
from .state import Run

logger = get_logger(__name__)

# Tensors of a parameter's size that an optimizer keeps for it, by the options of its group; the names are of torch's classes.
STATES: dict[str, Callable[[Mapping[str, Any]], int]] = {
    **dict.fromkeys(("adadelta", "adamax", "lamb", "nadam", "radam", "rprop"), lambda group: 2),
    **dict.fromkeys(("adagrad", "asgd", "lion", "muon", "sgd momentum"), lambda group: 1),
    **dict.fromkeys(("adam", "adamw"), lambda group: 2 + bool(group.get("amsgrad"))),
    "rmsprop": lambda group: 1 + bool(group.get("momentum")) + bool(group.get("centered")),
    "sgd": lambda group: int(bool(group.get("momentum"))),
}
FP32 = 4
SPARE = 0.2  # part of a rank's memory left to activations and workspace, which are not known when models are prepared
NO_SAMPLE = "activations are not counted: pass a sample batch"

Optimizer = str | int | type[torch.optim.Optimizer] | torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
Models = Sequence[nn.Module]
Optimizers = Sequence[torch.optim.Optimizer]
Sample = tuple[Tensor, ...] | None


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
        activations: what forward keeps for backward, and gradients of these, at the peak; None where no sample was given.
        notes: figures that are approximate, or not counted.
        flops: floating-point operations of products and attention on the sample, in forward and in backward; None likewise.

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
    flops: tuple[int, int] | None = None

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

    def __add__(self, other: Memory) -> Memory:
        """Two models at once, under one strategy and precision."""
        both = {row: (getattr(self, row), getattr(other, row)) for row in ROWS}
        sums = {row: None if None in pair else sum(pair) for row, pair in both.items()}
        flops = self.flops and other.flops and tuple(map(add, self.flops, other.flops))
        notes = tuple(dict.fromkeys(self.notes + other.notes))
        return replace(self, **sums, notes=notes, flops=flops)  # type: ignore[arg-type]

    def __str__(self) -> str:
        many = f"{self.world} ranks" if self.world > 1 else "one rank"
        name, scale = unit(self.total)
        rows = {**self.rows, "total": self.total}
        cells = [[row, f"{number / scale:,.2f}"] for row, number in rows.items()]
        lines = [f"{line} {name}" for line in columns(cells)]
        return "\n".join([f"{self.strategy}, {self.precision}, {many}; a rank needs", *lines, *self.notes])


ROWS = tuple(f.name for f in fields(Memory)[3:-2])


@dataclass(frozen=True)
class Table:
    """Estimates side by side, one a line. ``print`` shows them aligned.

    Attributes:
        lines: one for each strategy and precision; ``table["fsdp", "bf16"]`` is the one of that pair.

    Example:
        >>> for need in easymp.memory.table(1_000_000, precisions=["bf16"]):
        ...     print(need.strategy, need.total)
        ddp 18000000
        zero1 11000000
        fsdp 2000000
    """

    lines: tuple[Memory, ...]

    def __iter__(self) -> Iterator[Memory]:
        return iter(self.lines)

    def __getitem__(self, key: tuple[str, str]) -> Memory:
        """The line of a strategy and a precision."""
        return next(line for line in self.lines if (line.strategy, line.precision) == key)

    def __str__(self) -> str:
        name, scale = unit(max(line.total for line in self.lines))
        shown = [row for row in ROWS if any(getattr(line, row) for line in self.lines)]
        cells = [["strategy", "precision", *shown, "total"]]
        for line in self.lines:
            sizes = [*(getattr(line, row) for row in shown), line.total]
            cells.append([line.strategy, line.precision, *(f"{s / scale:,.2f}" if s else "–" for s in sizes)])
        notes: dict[str, list[str]] = {}
        for line in self.lines:
            for note in line.notes:
                notes.setdefault(note, []).append(line.strategy)
        every = {line.strategy for line in self.lines}
        said = [n if every == {*s} else f"{', '.join(dict.fromkeys(s))}: {n}" for n, s in notes.items()]
        return "\n".join([*columns(cells, 2), f"{name} a rank", *said])


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
        optimizer: a name of `STATES`, a class of torch.optim, how many tensors of its size are kept for a parameter, or one
            or several optimizers of this model: parameters that none of them holds have no states. An optimizer of a class
            that is not in `STATES` counts with two.
        options: of the strategy: its record or a dict of its fields.
        sample: one rank's micro-batch: positional arguments in a tuple, keyword arguments in a dict, or one tensor. With it, a
            forward is followed as in `easymp.memory.bytes_saved`, and a backward from the sum of its outputs; a loss outside of the model
            is not counted. Activations are those of the whole model: where a strategy splits layers or stages, a rank keeps fewer.
        activations: bytes of activations, if they are known already; or an estimate with a sample, whose activations, operations and
            copies (at most as many) are taken.
        averages: moving averages of the weights are kept (``Accelerator(ema_decay=...)``), in fp32, among the states.
        activation_checkpointing: as ``Accelerator(activation_checkpointing=...)`` takes it, for the activations of `sample`, and for
            the copies that are alive at their peak.
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
    kind, policy = _named(STRATEGIES, strategy, "strategy"), precision
    if isinstance(policy, str):
        policy = _named(PRECISIONS, ALIASES.get(policy, policy), "precision")
    for name, number in (("world", world), ("per_node", world if per_node is None else per_node)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise SettingError(f"{name}={number!r} is not a whole number of at least 1")
    refuse_words(kind, activation_offload, optimizer_in_backward)
    module = model if isinstance(model, nn.Module) else Counted(model)
    read = as_record(kind.Options, f"strategy {kind.name!r}", options)
    layout: Layout = kind.layout(module, read, world, min(world, per_node or world))
    states, rounds = _states(optimizer, module), _rounds(optimizer)
    low = policy.compute.itemsize < FP32 and policy.param.itemsize == FP32
    copied = _matrices(module) if low and not layout.gathers and not policy.swaps else set()
    rounds_once: Collection[int] = ()
    if policy.rounds:
        rounds_once = {id(module.all)} if isinstance(module, Counted) else rounded_weights(module)
        rounds_once = layout.rounded if layout.gathers else rounds_once
    sums = dict.fromkeys(ROWS, 0)
    widest, gradients = 1, [0]
    for name, parameter in module.named_parameters():  # a tied one once
        size = _stored(parameter, policy)
        widest = max(widest, size)
        sums["weights"] += layout.weights(name, parameter) * size
        if id(parameter) in copied and size > policy.compute.itemsize:
            sums["copies"] += layout.copies(name, parameter) * policy.compute.itemsize
        if id(parameter) in rounds_once:  # fp8: one byte
            sums["copies"] += (layout.weights if layout.gathers else layout.copies)(name, parameter)
        if parameter.requires_grad:
            wide = FP32 if size < FP32 and policy.keeps_updates and (policy.masters or not rounds) else 0
            gradients.append(layout.gradients(name, parameter) * (size + wide))
            sums["masters"] += layout.weights(name, parameter) * wide  # zero1 cuts the states alone
            kept = states(parameter) * (wide or size) + FP32 * averages
            sums["states"] += layout.states(name, parameter) * kept
    sums["gradients"] = sum(gradients)
    if optimizer_in_backward:
        sums["gradients"] = min(sum(gradients), layout.early * widest or max(gradients))
        if not layout.gathers:  # ddp sums a flat copy of the bucket
            layout = layout._replace(reducing=layout.early)
    notes, flops = [layout.note] if layout.note else [], None
    if policy.swaps:
        words = "activations are counted as under autocast, which is more"
        notes.append(f"{policy.name} {words}")
    if module is model:
        there = policy.compute.itemsize if low and layout.gathers and widest <= FP32 else widest
        sums["gathered"] = layout.gathered * there - layout.gathered_once * (there - 1) * policy.rounds
        sums["reducing"] = layout.unreduced * there + layout.reducing * policy.reduce.itemsize
    else:
        notes.append("from a count alone: weights that are gathered at a time are not counted")
    sums["buffers"] = sum(b.numel() * b.element_size() for b in module.buffers())
    if isinstance(activations, Memory):
        sums["copies"], flops = min(sums["copies"], activations.copies), activations.flops
        activations = activations.activations
    if activations is None and sample is not None:
        which: Any = activation_checkpointing
        asked = read_which(Settings(activation_checkpointing=which).activation_checkpointing)
        below = asked.below if asked else None
        found = count_activations(
            module, policy, sample, asked, (below or 0) - sum(sums.values()), activation_offload
        )
        activations = -(-found.bytes // (share := getattr(read, "context_parallel", 1)))
        flops = found.flops
        if asked:  # recomputation frees copies, too
            sums["copies"] = min(sums["copies"], found.copies)
        if share > 1:
            notes.append(f"activations of 1/{share} of each sequence")
        if below:
            notes.append(str(found))
    if activations is None:
        notes.append(NO_SAMPLE)
    elif activation_offload:
        notes.append("activations that forward keeps are in the host's memory")
    sums["activations"] = activations  # type: ignore[assignment]
    return Memory(kind.name, policy.name, world, **sums, notes=tuple(notes), flops=flops)


def table(
    model: nn.Module | int,
    *,
    strategies: Sequence[StrategyName] = ("ddp", "zero1", "fsdp"),
    precisions: Sequence[PrecisionName] = ("fp32", "bf16"),
    world: int = 8,
    per_node: int | None = None,
    optimizer: Optimizer = "adamw",
    sample: Any = None,
) -> Table:
    """Estimate the memory of a rank under each strategy and precision.

    Args:
        model: any module, or a number of parameters.
        strategies: names.
        precisions: names.
        world: number of ranks.
        per_node: ranks of a node; None means one node.
        optimizer: as in `estimate`.
        sample: one rank's micro-batch, as in `estimate`.

    Returns:
        The estimates; ``print`` shows them aligned.

    Raises:
        SettingError: a wrong name or value.

    Example:
        >>> easymp.memory.table(1_000_000, world=8)["fsdp", "fp32"].states
        1000000
    """
    lines: dict[tuple[str, str], Memory] = {}
    how: Any = {"world": world, "per_node": per_node, "optimizer": optimizer, "sample": sample}
    for precision in precisions:
        activations = None  # the same for each strategy
        for strategy in strategies:
            line = estimate(model, strategy=strategy, precision=precision, activations=activations, **how)
            activations, lines[strategy, precision] = line.activations, line
    return Table(tuple(lines[strategy, precision] for strategy in strategies for precision in precisions))


class Counted(nn.Module):
    """A model of which only the number of parameters is known."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        if isinstance(parameters, bool) or not isinstance(parameters, int) or parameters < 0:
            raise SettingError(f"model={parameters!r} is neither a module nor a number of parameters")
        self.all = nn.Parameter(torch.empty(parameters, device="meta"))


def _named(known: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in known:
        raise SettingError(f"{what}={name!r} is not one of {', '.join(known)}{nearest(name, known)}")
    return known[name]


def _stored(parameter: Tensor, policy: Precision | type[Precision]) -> int:
    """Bytes of an element as the precision stores it."""
    raised = policy.raises and parameter.requires_grad and parameter.dtype in LOW
    converts = raised or (policy.param != torch.float32 and parameter.is_floating_point())
    return policy.param.itemsize if converts else parameter.element_size()


def _matrices(model: nn.Module) -> set[int]:
    """ids of the parameters that autocast copies: weights and biases of layers that compute in half precision."""
    found: set[int] = set()
    for module in model.modules():
        own = [p for p in module._parameters.values() if p is not None]
        if isinstance(module, Counted):
            found.update(map(id, own))
        elif not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and any(p.ndim > 1 for p in own):
            wide = (p for p in own if p.dtype == torch.float32 or (p.requires_grad and p.dtype in LOW))
            found.update(map(id, wide))
    return found


def _states(optimizer: Optimizer, model: nn.Module) -> Callable[[Tensor], int]:
    """Number of state tensors of a parameter's size that the optimizer keeps for each parameter."""
    if isinstance(optimizer, int) and not isinstance(optimizer, bool) and optimizer >= 0:
        return lambda parameter: optimizer
    if isinstance(optimizer, (str, type)):
        name = optimizer if isinstance(optimizer, str) else optimizer.__name__
        short = name.lower().removeprefix("fused")
        if short not in STATES:
            raise SettingError(
                f"the states of optimizer {name.lower()!r} are not known{nearest(short, STATES)}: pass the number of tensors of a "
                f"parameter's size that it keeps, such as optimizer=2. Known: {', '.join(STATES)}"
            )
        number = STATES[short]({})
        return lambda parameter: number
    each = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    if not isinstance(each, (list, tuple)) or not all(isinstance(o, torch.optim.Optimizer) for o in each):
        words = "is not a name, class, number of states or torch optimizer"
        raise SettingError(f"optimizer={optimizer!r} {words}")
    counts: dict[int, int] = {}
    for one in each:
        keeps = STATES.get(type(one).__name__.lower().removeprefix("fused"), STATES["adam"])
        counts.update((id(p), keeps(group)) for group in one.param_groups for p in group["params"])
    if counts and not any(id(p) in counts for p in model.parameters()):
        raise SettingError("none of the optimizers holds a parameter of this model: pass those built from it")
    return lambda parameter: counts.get(id(parameter), 0)


def _rounds(optimizer: Optimizer) -> bool:
    """Whether bf16 parameters are stepped with stochastic rounding and without masters: by easymp's optimizers."""
    each = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    kinds = [one if isinstance(one, type) else type(one) for one in each]
    # LARC has no rule, and does not let the optimizer inside round.
    rules = [issubclass(kind, optim.FusedOptimizer) and getattr(kind, "rule", None) for kind in kinds]
    return all(rule and rule.counts for rule in rules)


class Prediction(NamedTuple):
    """Predicted seconds of an update.

    Attributes:
        seconds: of the whole update; None where it is not known.
        compute: of forward and backward.
        links: of collectives, as far as neither hides them; all of them where `need` has no `flops`.
        optimizer: of the step's reads and writes.
        why: the reason why it is not known.
    """

    seconds: float | None
    compute: float = 0
    links: float = 0
    optimizer: float = 0
    why: str = ""

    def __str__(self) -> str:
        parts = {"forward and backward": self.compute, "links": self.links, "optimizer": self.optimizer}
        said = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in parts.items())
        return self.why if self.seconds is None else f"{self.seconds:.2g} s an update ({said})"

    def of(self, micro_batches: int) -> Prediction:
        """The same of an update of more micro-batches: links and optimizer work once an update."""
        again = self.compute * (micro_batches - 1)
        seconds = None if self.seconds is None else self.seconds + again
        return self._replace(seconds=seconds, compute=self.compute + again)


def predict(
    model: nn.Module | int, need: Memory, device: str, per_node: int | None = None, options: Any = None
) -> Prediction:
    """Predict the time of an update of one micro-batch on each rank, by a roofline.

    - Forward and backward: ``need.flops`` at `hardware.gpus.ATTAINED` of the vendor's rate, whatever bounds each kernel.
    - Links: the strategy's collectives by `hardware.gpus.collective_seconds`, each as one message ("ZeRO", arXiv:1910.02054, section 7):
      gradients once around the ranks in backward, under zero1 weights after the step, under fsdp weights in forward and backward. Those
      of forward and backward run beside these, and only what is longer counts; hsdp averages shards of gradients between groups.
    - Optimizer: this rank's weights, states and masters are read and written and its gradients read, by `hardware.gpus.copy_seconds`.

    Not counted: the input, the host, imbalance, and what a kernel launch costs, so small models are slower.

    Args:
        model: as for `estimate`, on the same `options`.
        need: the estimate, with `flops`.
        device: the GPU's name, as the driver or a person calls it.
        per_node: ranks of a node; None means one node.
        options: of the strategy.

    Returns:
        The prediction.

    Example:
        >>> from dataclasses import replace
        >>> need = replace(easymp.memory.estimate(1_000_000_000, world=8, precision="bf16"), flops=(10**13, 2 * 10**13))
        >>> print(easymp.memory.predict(1_000_000_000, need, "H100"))
        0.071 s an update (forward and backward 0.061 s, links 0 s, optimizer 0.01 s)
    """
    kind, policy = STRATEGIES[need.strategy], PRECISIONS[need.precision]
    rate = gpus.peak_flops(device, word := product_type(policy))
    if rate is None:
        return Prediction(None, why=f"{device or 'this device'} has no known rate of {word} products")
    read: Any = as_record(kind.Options, f"strategy {kind.name!r}", options)
    usual = kind.Options()
    others = ("comm_hook", "cpu_offload", "context_parallel")
    changed = [name for name in others if getattr(read, name, None) != getattr(usual, name, None)]
    if kind.traffic is None or changed:
        words = f" with {', '.join(changed)}" if changed else ""
        return Prediction(None, why=f"the traffic of {kind.name}{words} is not predicted")
    module = model if isinstance(model, nn.Module) else Counted(model)
    near = min(need.world, per_node or need.world)
    layout = kind.layout(module, read, need.world, near)
    shards = need.world // layout.states("", torch.empty(need.world, device="meta"))  # ranks of one copy
    group = shards if layout.gathers else need.world
    trained = [p for p in module.parameters() if p.requires_grad]
    stored = sum(p.numel() * _stored(p, policy) for p in trained)
    widest = policy.compute.itemsize if layout.gathers else FP32  # of what is gathered
    weights = sum(p.numel() * min(widest, _stored(p, policy)) for p in module.parameters())
    reduced = sum(p.numel() for p in trained) * policy.reduce.itemsize if layout.gathers else stored

    def send(what: str, size: int, ranks: int, nodes: int) -> float:
        return (ranks > 1 and gpus.collective_seconds(what, size, ranks, nodes, device)) or 0.0

    def phase(name: str) -> float:
        there = name == "backward" and not getattr(read, "reshard_after_forward", True)  # from forward
        sizes = {"all_gather": 0 if there else weights}
        calls = (kind.traffic or {}).get(name, ())
        return sum(send(what, sizes.get(what, reduced), group, -(-group // near)) for what in calls)

    copies, nodes = need.world // group, -(-need.world // near)
    forward, backward = (number / rate / gpus.ATTAINED for number in need.flops or (0, 0))
    averaging = phase("backward") + send("all_reduce", reduced // group, copies, min(copies, nodes))
    links = max(0, phase("forward") - forward) + max(0, averaging - backward) + phase("step")
    optimizer = gpus.copy_seconds(2 * (need.states + need.masters) + 3 * stored // shards, device) or 0.0
    if need.flops is None:
        return Prediction(None, 0, links, optimizer, "the operations are not counted: pass a sample batch")
    return Prediction(forward + backward + links + optimizer, forward + backward, links, optimizer)


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


def first_batch(models: Models, loaders: Sequence[Any], share: int) -> Sample:
    """A rank's micro-batch for the one model, on the meta device; None where `loaders` do not tell it without reading.

    The first one tells it if its data are tensors; a rank gets 1/`share` of a batch.
    """
    if len(models) > 1 or isinstance(models[0], torch.jit.ScriptModule):
        return None
    every = signature(models[0].forward).parameters.values()
    wants = sum(p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD for p in every)
    for loader in loaders[:1]:
        known = type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate
        if known and loader.batch_size and 0 < wants <= len(loader.dataset.tensors):
            rows = max(1, loader.batch_size // share)
            return tuple(
                t.new_empty((rows, *t.shape[1:]), device="meta") for t in loader.dataset.tensors[:wants]
            )
    return None


def by_memory(needs: Mapping[str, Memory], available: int) -> Choice[str]:
    """Choose the first of `needs` that fits into `available` bytes, or the last one; the reason has the arithmetic."""
    most = int(available * (1 - SPARE))
    said: list[str] = []
    for name, need in needs.items():
        rows = ", ".join(f"{row} {size(number)}" for row, number in need.rows.items())
        said.append(f"{name} needs {size(need.total)} a rank ({rows})")
        if fits(need, available):
            break
    said[0] += f" of {size(most)} ({size(available)}, less {SPARE:.0%} for activations and workspace)"
    if not fits(need, available):
        words = "training may run out of memory, so use more processes or a smaller model"
        said.append(f"{size(need.total - most)} too much: {words}")
    return Choice(need.strategy, "; ".join(said), Source.DETECTED)


class AutoStrategy:
    """Chooses the strategy of a run by memory; where it is not `free`, options of the planned one were given, and it stays."""

    def __init__(self, run: Run, precision: Precision, free: bool) -> None:
        self._run, self._precision, self._free = run, precision, free
        self._planned = run.plan.strategy
        self.needs: Memory | None = None  # of all models so far

    def choose(self, models: Models, optimizers: Optimizers, strategy: Strategy, sample: Sample) -> Strategy:
        """The strategy for `models`, which are not yet wrapped; only the first models can change it. A collective for the first ones.

        The first candidate that fits has the fewest moving parts. Predicted times are told, and do not choose.
        """
        plan, world, name = self._run.plan, self._run.world, strategy.name
        if self.needs is not None:
            self.needs += self.need(name, models, optimizers)
            if not fits(self.needs, plan.memory):
                short = by_memory({name: self.needs}, plan.memory).reason
                words = "strategy %s stays, for models are wrapped already; with this one %s"
                logger.warning(words, name, short)
            return strategy
        names = candidates(plan) if self._free else [name]
        plain = {name: self.need(name, models, optimizers) for name in names}
        found = None if world.rank else self._follow(plain, models, optimizers, sample)
        batch = len(sample[0]) if found and sample else 0
        here = plan.memory, found or {(name, ""): plain[name] for name in plain}, batch
        seen = world.gather_objects(here)
        available, (_, each, batch) = min(have for have, *_ in seen), seen[0]  # the same figures on all ranks
        needs = {f"{n} with {word} recomputed" if word else n: need for (n, word), need in each.items()}
        choice = self._planned
        if fits(next(iter(needs.values())), available):
            choice = replace(choice, reason=f"{choice.reason}; the fewest moving parts, and it fits")
        else:
            choice = by_memory(needs, available)
            first = next((word for (_, word), need in each.items() if fits(need, available)), None)
            if again := first and not plan.settings.activation_checkpointing:
                reason = f"{choice.reason}, and nothing without: pass activation_checkpointing={first!r}"
                choice = replace(choice, reason=reason)
            if not self._free:
                reason = f"{choice.reason}; options of {choice.value} were given, so it stays"
                choice = replace(choice, reason=reason)
            tell = logger.warning if first is None or again else logger.info
            tell("strategy %s: %s", choice.value, choice.reason)
        self.needs = plain[choice.value]
        told = [
            self._told(models, word, batch, need, fits(need, available)) for (_, word), need in each.items()
        ]
        self._run.plan = replace(plan, strategy=choice, candidates=tuple(told))
        if choice.value == strategy.name:
            return strategy
        kind = STRATEGIES[choice.value]
        return kind(world, kind.Options())  # type: ignore[call-arg]

    def _follow(
        self, plain: Mapping[str, Memory], models: Models, optimizers: Optimizers, sample: Sample
    ) -> dict[tuple[str, str], Memory]:
        """`plain` with activations and operations, by strategy and what is recomputed; nothing where they are not known.

        Small models are not followed: that would take longer than preparing them.
        """
        settings, found = self._run.plan.settings, dict[tuple[str, str], Memory]()
        asked = read_which(settings.activation_checkpointing)
        small = next(iter(plain.values())).total < self._run.plan.memory / 4
        if sample is None or small or (asked and asked.below):
            return found
        for word in [str(settings.activation_checkpointing)] if asked else ["", "blocks"]:
            how: Any = {"activation_offload": settings.activation_offload, "sample": sample}
            how["activation_checkpointing"] = word or False
            for name in plain:
                try:
                    need = self.need(name, models, optimizers, **how)
                except EasympError:  # forward depends on values, or the model has no repeated blocks
                    break
                found[name, word] = need
                how |= {"sample": None, "activations": need}  # the same for each strategy
        return found

    def _told(self, models: Models, word: str, batch: int, need: Memory, fit: bool) -> dict[str, Any]:
        """A candidate for the plan."""
        plan, time = self._run.plan, {}
        counted = f"in micro-batches of {batch}" if batch else "without activations"
        said = f"{size(need.total)} a rank {counted}, {'fits' if fit else 'too much'}"
        if gpus.find(chip := plan.device.reason):  # an accelerator's name
            told = predict(nn.ModuleList(models), need, chip, self._run.world.local_size)
            time = (told := told.of(plan.accumulation.value))._asdict()
            parts = f"{told.links:.2g} s of links at most, {told.optimizer:.2g} s of optimizer an update"
            said += f"; {told if told.seconds else parts}"
        facts = {"strategy": need.strategy, "recomputed": word, "bytes": need.total}
        return {**facts, "activations": need.activations, "fits": fit, "time": time, "reason": said}

    def look_alone(self, models: Models, optimizers: Optimizers, name: str) -> None:
        """On one process, where nothing can be chosen: say in the plan and the log if memory is short for all of `models`."""
        plan = self._run.plan
        need = self.need(name, models, optimizers)
        if not fits(need, plan.memory):
            choice = by_memory({name: need}, plan.memory)
            logger.warning("strategy %s: %s", name, choice.reason)
            self._run.plan = replace(plan, strategy=choice)

    def reduce_early(self, models: Models, optimizers: Optimizers, strategy: Strategy, say: bool) -> None:
        """Decide whether `strategy` reduces gradients at each micro-batch, if its options leave that open; a collective.

        With `say`, micro-batches are accumulated, and the plan tells how.
        """
        plan, words = self._run.plan, ""
        if strategy.reduces_each is None:
            need = self.need(strategy.name, models, optimizers, strategy.options)
            whole = sum(p.numel() * FP32 for model in models for p in model.parameters() if p.requires_grad)
            available = min(self._run.world.gather_objects(plan.memory))
            strategy.reduces_each = not fits(replace(need, reducing=need.reducing + whole), available)
            fit = "do not fit" if strategy.reduces_each else "fit"
            words = f": {size(whole)} of whole gradients {fit} beside {size(need.total)} a rank of "
            words += size(int(available * (1 - SPARE)))
        choice = plan.accumulation
        if say and strategy.sharded and "gradients" not in choice.reason:
            early, late = "are reduced to shards at each", "stay whole and are reduced at the last"
            reason = f"{choice.reason}; gradients {early if strategy.reduces_each else late}{words}"
            self._run.plan = replace(plan, accumulation=replace(choice, reason=reason))

    def need(
        self, name: str, models: Models, optimizers: Optimizers, options: Any = None, **words: Any
    ) -> Memory:
        """What a rank needs for `models` under the strategy of this name, without activations; `words` of `estimate`."""
        world, averages = self._run.world, self._run.plan.settings.ema_decay is not None
        how: Any = {"strategy": name, "precision": self._precision, "options": options, "averages": averages}
        how |= {"world": world.size, "per_node": world.local_size, **words}
        needs = []
        for model in models:
            own = {id(p) for p in model.parameters()}
            mine = [o for o in optimizers if any(id(p) in own for g in o.param_groups for p in g["params"])]
            how["optimizer"] = mine or "adamw"  # one that is prepared later is taken for the usual one
            needs.append(estimate(model, **how))
        return reduce(add, needs)
