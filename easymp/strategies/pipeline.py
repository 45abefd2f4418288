"""pipeline: the model in stages, one a rank; each batch goes through them in micro-batches.

The script stays as it is: ``loss_fn(model(x), y)`` and ``backward(loss)`` on every rank. All ranks see the same batch. The last stage's
outputs are sent to all, so losses and metrics are the same everywhere, and the outputs carry a backward that sends gradients through
the stages. That is also what it costs: the outputs of the whole batch are sent to every rank.

Two schedules. ``"gpipe"``: ``model(x)`` runs all forwards, backward all backwards; a rank holds the activations of all micro-batches in
between. ``"1f1b"`` takes turns, so that a rank holds those of as many micro-batches as there are stages, at most; but the first backward
needs the loss, which needs all outputs. So ``model(x)`` runs a forward that keeps nothing, and backward runs another one, with the same
random numbers and buffers: less memory, for the time of a second forward.

The stages are run here and not by torch.distributed.pipelining: its schedules take the loss function inside, want one shape for good, and
its tracing fixes one mode. What a rank sends and computes in which order is theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..base.rebinding import follow
from ..distributed import World
from ..errors import PrepareError, RefusedError, SettingError, StepError
from ..optim.norms import multiply, values
from ..protocols import Counting, Facts, Layout, Manner, Refusal
from .cuts import Cuts, balance, candidates, choose, survey
from .materialising import LEFT
from .norms import counting
from .schedule import Pipelined, Shared

SCHEDULES = ("gpipe", "1f1b")


@dataclass(frozen=True)
class PipelineOptions:
    """Options of strategy "pipeline".

    Attributes:
        splits: names of the modules at whose first call stages 1, 2 … begin, one less than processes. All that is computed before and
            needed after must be passed to that module. None finds places that divide the parameters evenly.
        microbatches: parts of each batch, along dimension 0; None: as many as processes. More of them keep the stages busier. Batch-norm
            sees one at a time.
        schedule: "gpipe", or "1f1b", which needs less memory and computes the forward twice.
    """

    splits: tuple[str, ...] | None = None
    microbatches: int | None = None
    schedule: str = "gpipe"

    def __post_init__(self) -> None:
        if isinstance(self.splits, list):
            object.__setattr__(self, "splits", tuple(self.splits))
        splits = self.splits
        if splits is not None and not (
            isinstance(splits, tuple) and splits and all(isinstance(name, str) for name in splits)
        ):
            raise SettingError(
                f"splits={splits!r} is neither None nor a tuple of module names such as ('blocks.2', 'blocks.4')"
            )
        if splits is not None and len(set(splits)) != len(splits):
            raise SettingError(f"splits={splits!r} names a module twice: each stage begins at another one")
        count = self.microbatches
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise SettingError(f"microbatches={count!r} is neither None nor a whole number of at least 1")
        if self.schedule not in SCHEDULES:
            raise SettingError(f"schedule={self.schedule!r} is neither 'gpipe' nor '1f1b'")


class Pipeline:
    """One stage a rank.

    The model is cut at its first call, when the order of its modules shows: one forward without values. Until then every rank holds
    it whole, where it was built, with rank 0's values. From then on, in place: parameters and buffers of other stages are on the meta
    device, which takes no memory; they stay the same objects under the same names, get no gradients and no optimizer state. This rank's
    are moved to its device. So `state_dict` holds this rank's stage, and meta tensors in place of the others'; loading a whole state fills
    what is here. Whole weights are in `save_model` and `get_state_dict`, whole trainings in `save_state`, which any strategy loads.
    While the model runs, calls of its modules are intercepted.

    Weights that several stages use (a tied embedding) lie on each of these, and get the sum of the gradients: by a hook on the parameter,
    and an average over these ranks after each backward that is not under `no_sync`.

    Gradients of low-precision parameters add up in their own type under accumulation, without fp32 sums; precisions with fp32 masters are
    refused.

    A stage draws random numbers from a stream of its own, seeded at each call from the one that all ranks share.
    """

    name: ClassVar[str] = "pipeline"
    Options: ClassVar[type] = PipelineOptions
    whole: ClassVar[bool] = True
    apart: ClassVar[bool] = False
    alike: ClassVar[bool] = False
    masters: ClassVar[bool] = False  # optimizers take them before it shows which parameters are here
    sums = False  # likewise
    early: ClassVar[bool] = False
    sharded: ClassVar[bool] = False
    once = (
        "under pipeline gradients travel between stages without a graph. Use strategy='ddp', or a loss without the gradient of a "
        "gradient"
    )
    only_forward = "divides forward into stages, and no other method"
    data_rank = 0
    data_size = 1
    data_group = None

    def __init__(self, world: World, options: PipelineOptions) -> None:
        if options.splits is not None and len(options.splits) != world.size - 1:
            raise SettingError(
                f"splits={options.splits!r} make {len(options.splits) + 1} stages, and there are {world.size} processes: name "
                f"{world.size - 1} modules, or leave splits out"
            )
        self._world = world
        self._options = options
        self._optimizers: list[torch.optim.Optimizer] = []
        self._homes: dict[int, int] = {}  # id of a parameter in a stage → the first rank that holds it

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        if facts.world_size == 1:
            return Refusal(
                "strategy 'pipeline' gives each process a stage of the model, and there is one process",
                "start several (`easymp launch --processes N script.py`), or use 'auto'",
            )
        return None

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        """The fullest stage, taking modules to be called in the order in which they were registered."""
        places = candidates(model, options.splits or ())
        order = {
            id(p): i
            for i, module in enumerate(places.values(), 1)
            for p in reversed(list(module.parameters()))
        }
        parameters = [(name, p, order.get(id(p), 0)) for name, p in model.named_parameters()]
        weights = [
            sum(p.numel() for _, p, i in parameters if i == segment) for segment in range(len(places) + 1)
        ]
        if options.splits is not None:
            at = sorted(list(places).index(name) + 1 for name in options.splits)
        else:
            at = balance(weights, range(1, len(places) + 1), size)
        stages = {name: sum(segment >= cut for cut in at) for name, _, segment in parameters}
        sums = [sum(p.numel() for name, p, _ in parameters if stages[name] == stage) for stage in range(size)]
        fullest = sums.index(max(sums))

        def cut(name: str, parameter: Tensor) -> int:
            return parameter.numel() if stages.get(name) == fullest else 0

        return Layout(cut, cut, cut, cut, note="the fullest stage, as far as it shows without a batch")

    def wrap(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], manner: Manner
    ) -> nn.Module:
        if type(model) in (nn.ModuleList, nn.ModuleDict):
            raise PrepareError(
                f"a {type(model).__name__} cannot be called, so it has no stages: put it into a module with a forward"
            )
        policy = manner.policy
        policy.decide(model)
        model = policy.convert(model)
        places = candidates(model, self._options.splits or ())
        inside = {id(part) for place in places.values() for part in place.modules()}
        for name, part in model.named_modules():
            if id(part) not in inside and (
                "_orig_mod" in part._modules or vars(part).get("_compiled_call_impl") is not None
            ):
                raise PrepareError(
                    f"{name or 'the model'} is compiled, as one function, and stages begin and end inside of it: pass it uncompiled, or "
                    "compile its blocks"
                )
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                if tensor.numel():
                    tensor.copy_(self._world.broadcast(tensor))
        module = policy.forward(model, self._world.device)
        options, stages = self._options, self._world.size

        def divide(args: Any, kwargs: Any) -> tuple[Cuts, list[Shared]]:
            watch = survey(model, module, places, args, kwargs)
            cuts = choose(model, watch, options.splits, stages)
            return cuts, self._divide(model, cuts, manner)

        return Pipelined(
            module,
            model,
            places,
            self._world,
            options.microbatches or stages,
            options.schedule == "1f1b",
            divide,
        )

    def spread(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self._optimizers.append(optimizer)
        return optimizer

    def _divide(self, model: nn.Module, cuts: Cuts, manner: Manner) -> list[Shared]:
        """Keep this rank's stage of `model`; the parameters that others hold, too."""
        rank = self._world.rank
        shared = []
        groups: dict[tuple[int, ...], Any] = {tuple(range(self._world.size)): None}
        kept: list[nn.Module] = []
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                users = cuts.users[name]
                if rank not in users:
                    self._let_go(name, tensor)
                elif manner.place:
                    tensor.data = tensor.data.to(self._world.device)
                if isinstance(tensor, nn.Parameter):
                    self._homes[id(tensor)] = users[0]
                    if len(users) > 1:
                        if users not in groups:
                            groups[users] = self._world.group(users)
                        if rank in users:
                            shared.append(Shared(tensor, len(users), groups[users]))
        LEFT.add(model)
        for optimizer in self._optimizers:
            for parameter in list(optimizer.state):
                if isinstance(parameter, Tensor) and parameter.is_meta:
                    del optimizer.state[parameter]
            follow(optimizer, {})
        for module in candidates(model, cuts.begins).values():
            mine = [*module.parameters(), *module.buffers()]
            if mine and not any(t.is_meta for t in mine):
                kept.append(module)
        for module in kept:
            manner.compile(module)
        return shared

    @staticmethod
    def _let_go(name: str, tensor: Tensor) -> None:
        nothing: Any = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            tensor.grad = None
            nothing = nn.Parameter(nothing, tensor.requires_grad)
        try:
            torch.utils.swap_tensors(tensor, nothing)
        except RuntimeError as error:
            raise PrepareError(
                f"{name!r} belongs to another rank's stage and cannot be let go of here ({error}): call a prepared model before anything "
                "else keeps its parameters, such as a graph of an earlier forward or a weak reference"
            ) from error

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with _of(model).summing(False):
            yield

    @contextmanager
    def force_sync(self, model: nn.Module) -> Iterator[None]:
        with _of(model).summing(True):
            yield

    def average(self, models: Sequence[nn.Module], gradients: Sequence[Tensor]) -> None:
        raise AssertionError("no sums are kept for it")

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        raise RefusedError(
            "strategy 'pipeline' cannot join uneven inputs: every batch goes through the stages of all ranks, which all see the same ones. "
            "There is nothing to join: leave join_uneven_inputs out"
        )

    @property
    def counting(self) -> Counting:
        rank, size, homes = self._world.rank, self._world.size, self._homes

        def copies(parameter: Tensor) -> int:
            home = homes.get(id(parameter))
            return size if home is None else int(home == rank)  # of no stage: the same on all ranks

        return counting(self._world)._replace(copies=copies)

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        rank = self._world.rank
        grads = [(self._homes.get(id(p)), p.grad) for p in parameters if p.grad is not None]
        zero = torch.zeros((), device=self._world.device)
        here = [values(grad) for home, grad in grads if home == rank]
        alike = [values(grad) for home, grad in grads if home is None]  # of no stage: the same on all ranks
        norms = self._world.gather(nn.utils.get_total_norm(here, norm_type).to(zero) if here else zero)
        if alike:
            norms = torch.cat([norms, nn.utils.get_total_norm(alike, norm_type)[None].to(norms.device)])
        total = torch.linalg.vector_norm(norms, norm_type)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        multiply([grad for _, grad in grads], factor)
        return total

    def release(self, model: nn.Module, alone: nn.Module) -> nn.Module:
        pipelined = _of(model)
        for shared in pipelined.shared:
            shared.let_go()
        self._optimizers.clear()
        self._homes.clear()
        return Released() if pipelined.stage is not None else alone


class Released(nn.Module):
    """What is called in place of a model whose run has let go of it: one rank has one stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StepError(
            "this model is one stage of a run that has let go of it (close, free_memory), and one rank alone cannot call it: call it "
            "before, or build it anew"
        )


def _of(model: nn.Module) -> Pipelined:
    assert isinstance(model, Pipelined), "what wrap made"
    return model
