"""pipeline: the model in stages; each batch goes through them in micro-batches, by the schedules of torch.distributed.pipelining.

All ranks see the same batch, and call the whole model. ``accelerator.forward_backward(model, loss_fn, inputs, target=...)`` runs every
schedule: the last stage computes the loss of each micro-batch, and only the batch's loss is sent to all ranks. ``loss_fn(model(x), y)`` and
``backward(loss)`` run under "gpipe": ``model(x)`` runs all forwards and sends the outputs to every rank, backward runs all backwards.
Evaluation is ``model(x)`` under no_grad. fsdp inside the stages is not offered: torch's schedules shard a stage that is an FSDP module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.dtensor import follow
from ..base.lazy import modules_at_first_use
from ..distributed import World
from ..errors import PrepareError, SettingError
from ..options import check_fields, check_word
from ..protocols import Layout, WrapContext
from .meta_init import LEFT
from .pipeline_cuts import Cuts, Survey, balance, candidates, choose
from .single import Call, Released, Spread, take_rank_0s

if TYPE_CHECKING:
    from . import pipeline_run

modules_at_first_use(globals(), "pipeline_run")  # options need no torch.distributed.pipelining

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
SCHEDULES = get_args(Schedule)


@dataclass(frozen=True)
class PipelineOptions:
    """Options of strategy "pipeline".

    Attributes:
        splits: names of the modules at whose first call stages 1, 2 … begin, one less than stages. Tensors that are computed before and
            needed after must be passed to that module. None finds places that divide the parameters evenly.
        microbatches: parts of each batch, along dimension 0; None: as many as processes. More of them keep the stages busier. Batch-norm
            sees one at a time. A batch with fewer samples has fewer.
        schedule: "gpipe": all forwards, then all backwards; a rank holds the activations of all micro-batches. "1f1b": forwards and
            backwards take turns, so that a rank holds those of at most as many micro-batches as there are stages. "interleaved_1f1b":
            the same with several stages a rank, which waits less and sends more. "zero_bubble": gradients of weights are computed while a
            rank would wait for others. All but "gpipe" need `Accelerator.forward_backward`.
        stages_per_rank: stages that each process has; None: 2 for "interleaved_1f1b", else 1. "gpipe" and "1f1b" take 1.

    Raises:
        SettingError: a value of another type, or `stages_per_rank` of a schedule with one stage a process.

    Example:
        >>> options = PipelineOptions(schedule="interleaved_1f1b", microbatches=8)
        >>> options.stages(ranks=4), options.takes(count=8, ranks=4)
        (8, True)
    """

    splits: tuple[str, ...] | None = None
    microbatches: int | None = field(default=None, metadata={"least": 1})
    schedule: Schedule = "gpipe"
    stages_per_rank: int | None = field(default=None, metadata={"least": 1})

    def __post_init__(self) -> None:
        if isinstance(self.splits, list):
            object.__setattr__(self, "splits", tuple(self.splits))
        splits = self.splits
        names = isinstance(splits, tuple) and splits and all(isinstance(name, str) for name in splits)
        if splits is not None and not names:
            raise SettingError(
                f"splits={splits!r} is neither None nor a tuple of module names such as ('blocks.2', 'blocks.4')"
            )
        if len(set(splits or ())) != len(splits or ()):
            raise SettingError(f"splits={splits!r} names a module twice: each stage begins at another one")
        check_fields(self)
        check_word("schedule", self.schedule, SCHEDULES)
        if self.schedule in ("gpipe", "1f1b") and self.stages_per_rank not in (None, 1):
            raise SettingError(
                f"stages_per_rank={self.stages_per_rank} with schedule={self.schedule!r}, which has one stage a process: "
                "use 'interleaved_1f1b' or 'zero_bubble'"
            )

    def stages(self, ranks: int) -> int:
        """Count the stages.

        Args:
            ranks: of the pipeline.

        Returns:
            The number of stages on all ranks.
        """
        return ranks * (self.stages_per_rank or (2 if self.schedule == "interleaved_1f1b" else 1))

    def takes(self, count: int, ranks: int) -> bool:
        """Tell whether torch's schedule runs a number of micro-batches. Some schedules run them in rounds of equal size.

        Args:
            count: of micro-batches.
            ranks: of the pipeline.

        Returns:
            True or False.
        """
        rounds = self.schedule in ("interleaved_1f1b", "zero_bubble")
        return not rounds or count % max(1, count // ranks) == 0


class Pipeline(Spread):
    """Stages of the model, one or several a rank.

    The model is cut at its first call. Until then every rank holds it whole, where it was built, with rank 0's values. From then on, in
    place: parameters and buffers of other ranks' stages are on the meta device, which takes no memory; they stay the same objects under
    the same names, and get no gradients and no optimizer state. This rank's are moved to its device. So `state_dict` has meta tensors for
    the others' stages, and loading a whole state fills this rank's. `save_model`, `get_state_dict` and `save_state` have everything.
    While the model runs, calls of its modules are intercepted.

    Each stage that uses a tied weight holds it, and gets the sum of the gradients: by a hook on the parameter, and an average over these
    ranks after each backward that is not under `no_sync`.

    Gradients of low-precision parameters add up in their own dtype under accumulation; precisions with fp32 masters are refused. A stage
    draws random numbers from a stream of its own, seeded at each call from the one that all ranks share.
    """

    name: ClassVar[str] = "pipeline"
    traffic = None
    late_loss: ClassVar[bool] = True
    several: ClassVar[str] = "gives each process a stage of the model"
    no_join: ClassVar[str] = "every batch goes through the stages of all ranks"
    Options: ClassVar[type] = PipelineOptions
    replicated: ClassVar[bool] = False
    masters: ClassVar[bool] = False  # optimizers take them before it shows which parameters are here
    sums = False  # likewise
    no_double_backward = (
        "under pipeline gradients travel between stages without a graph. Use strategy='ddp', or a loss without the gradient of a "
        "gradient"
    )
    no_offload = "runs forward and backward of its micro-batches in one call"
    no_step_in_backward = "adds up the gradients of its micro-batches"
    only_forward = "divides forward into stages, and no other method"

    def __init__(self, world: World, options: PipelineOptions) -> None:
        stages = options.stages(world.size)
        if options.splits is not None and len(options.splits) != stages - 1:
            raise SettingError(
                f"splits={options.splits!r} make {len(options.splits) + 1} stages, and there are {world.size} processes with "
                f"{stages // world.size} each: name {stages - 1} modules, or leave splits out"
            )
        if options.microbatches and not options.takes(options.microbatches, world.size):
            raise SettingError(
                f"microbatches={options.microbatches} with schedule={options.schedule!r}, which has rounds: use a multiple of {world.size}"
            )
        super().__init__(world, options)
        self._optimizers: list[Optimizer] = []
        self._homes: dict[int, int] = {}  # id of a parameter in a stage → the first rank that holds it

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        """The layout of the fullest rank, if modules are called in the order in which they were registered."""
        places = candidates(model, options.splits or ())
        order = {id(p): i for i, module in enumerate(places.values(), 1) for p in module.parameters()}
        segments = {name: (order.get(id(p), 0), p.numel()) for name, p in model.named_parameters()}
        weights = [sum(n for i, n in segments.values() if i == at) for at in range(len(places) + 1)]
        if options.splits is not None:
            at = sorted(list(places).index(name) + 1 for name in options.splits)
        else:
            at = balance(weights, range(1, len(places) + 1), options.stages(size))
        ranks = {name: sum(segment >= cut for cut in at) % size for name, (segment, _) in segments.items()}
        sums = [sum(n for name, (_, n) in segments.items() if ranks[name] == rank) for rank in range(size)]
        fullest = sums.index(max(sums))

        def cut(name: str, parameter: Tensor) -> int:
            return parameter.numel() if ranks.get(name) == fullest else 0

        return Layout(cut, cut, cut, cut, note="the fullest rank, as far as it shows without a batch")

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer], context: WrapContext) -> nn.Module:
        if type(model) in (nn.ModuleList, nn.ModuleDict):
            raise PrepareError(
                f"a {type(model).__name__} cannot be called, so it has no stages: put it into a module with a forward"
            )
        policy = context.policy
        policy.decide(model)
        model = policy.convert(model)
        places = candidates(model, self.options.splits or ())
        inside = {id(part) for place in places.values() for part in place.modules()}
        for name, part in model.named_modules():
            compiled = "_orig_mod" in part._modules or vars(part).get("_compiled_call_impl") is not None
            if compiled and id(part) not in inside:
                raise PrepareError(
                    f"{name or 'the model'} is compiled, as one function, and stages begin inside of it: compile its blocks instead"
                )
        take_rank_0s(model, self._world)
        module = policy.forward(model, self._world.device)

        def divide(found: Survey) -> tuple[Cuts, list[pipeline_run.SharedParameter]]:
            cuts = choose(model, found, self.options.splits, self.options.stages(self._world.size))
            return cuts, self._divide(model, cuts, context)

        return pipeline_run.Pipelined(module, model, places, self._world, self.options, divide)

    def loss(
        self, module: nn.Module, call: Call, loss_fn: Call, args: Any, kwargs: Any, target: Any, summed: bool
    ) -> Tensor:
        return _of(module).loss(loss_fn, tuple(args), dict(kwargs), target, summed)

    def spread(self, optimizer: Optimizer) -> Optimizer:
        self._optimizers.append(optimizer)
        return optimizer

    def _divide(
        self, model: nn.Module, cuts: Cuts, context: WrapContext
    ) -> list[pipeline_run.SharedParameter]:
        """Keep this rank's stages of `model`; returns the parameters that other ranks hold, too."""
        rank, size = self._world.rank, self._world.size
        shared = []
        groups: dict[tuple[int, ...], Any] = {tuple(range(size)): None}
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                users = tuple(sorted({stage % size for stage in cuts.users[name]}))
                if rank not in users:
                    self._let_go(name, tensor)
                elif context.place:
                    tensor.data = tensor.data.to(self._world.device)
                if isinstance(tensor, nn.Parameter):
                    self._homes[id(tensor)] = users[0]
                    if len(users) > 1:
                        if users not in groups:
                            groups[users] = self._world.group(users)
                        if rank in users and (tensor.is_floating_point() or tensor.is_complex()):
                            shared.append(pipeline_run.SharedParameter(tensor, len(users), groups[users]))
        LEFT.add(model)
        for optimizer in self._optimizers:
            for parameter in list(optimizer.state):
                if isinstance(parameter, Tensor) and parameter.is_meta:
                    del optimizer.state[parameter]
            follow(optimizer, {})
        for module in candidates(model, cuts.begins).values():
            mine = [*module.parameters(), *module.buffers()]
            if mine and not any(t.is_meta for t in mine):
                context.compile(module)
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

    def _copies(self) -> Callable[[Tensor], int]:
        rank, size, homes = self._world.rank, self._world.size, self._homes
        # A parameter of no stage is on all ranks.
        return lambda p: int(homes[id(p)] == rank) if id(p) in homes else size

    def release(self, model: nn.Module, alone: nn.Module) -> nn.Module:
        pipelined = _of(model)
        for shared in pipelined.shared:
            shared.hook.remove()
        self._optimizers.clear()
        self._homes.clear()
        return Released("this model is one stage") if pipelined.cuts is not None else alone


def _of(model: nn.Module) -> pipeline_run.Pipelined:
    assert isinstance(model, pipeline_run.Pipelined), "what wrap made"
    return model
