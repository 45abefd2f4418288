"""pipeline: the model in stages, through which each batch goes in micro-batches, by torch.distributed.pipelining.

All ranks see the same batch, and call the whole model. ``accelerator.forward_backward(model, loss_fn, inputs,
target=...)`` runs every schedule. ``loss_fn(model(x), y)`` and ``backward(loss)`` run under "gpipe": ``model(x)`` runs
all forwards and sends the outputs to every rank, backward runs all backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.dtensor import follow
from ..base.lazy import modules_at_first_use
from ..distributed import World
from ..errors import PrepareError, SettingError
from ..options import Record, option
from ..protocols import Conflict, Layout, WrapContext
from .blocks import refuse_uncallable
from .meta_init import LEFT
from .pipeline_cuts import Cuts, Survey, balance, candidates, choose
from .single import Call, Released, Remedy, Single, broadcast_model, without_masters

if TYPE_CHECKING:
    from . import pipeline_run

modules_at_first_use(globals(), "pipeline_run")  # options need no torch.distributed.pipelining

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]


@dataclass(frozen=True)
class PipelineOptions(Record):
    """Options of strategy "pipeline".

    Raises:
        SettingError: a value of another type, or `stages_per_rank` of a schedule with one stage a process.

    Example:
        >>> options = PipelineOptions(schedule="interleaved_1f1b", microbatches=8)
        >>> options.stages(ranks=4), options.takes(count=8, ranks=4)
        (8, True)
    """

    splits: tuple[str, ...] | None = option(
        None,
        "names of the modules at whose first call stages 1, 2 … begin, one less than stages. Tensors that are computed "
        "before and needed after must be passed to that module. None finds places that divide the parameters evenly",
    )
    microbatches: int | None = option(
        None,
        "parts of each batch, along dimension 0; None: as many as processes. More of them keep the stages busier. "
        "Batch-norm sees one at a time. A batch with fewer samples has fewer",
        least=1,
    )
    schedule: Schedule = option(
        "gpipe",
        '"gpipe": all forwards, then all backwards; a rank holds the activations of all micro-batches. "1f1b": '
        "forwards and backwards take turns, so that a rank holds those of at most as many micro-batches as there are "
        'stages. "interleaved_1f1b": the same with several stages a rank, which waits less and sends more. '
        '"zero_bubble": gradients of weights are computed while a rank would wait for others. All but "gpipe" need '
        "`Accelerator.forward_backward`",
        choices=get_args(Schedule),
    )
    stages_per_rank: int | None = option(
        None, 'stages that each process has; None: 2 for "interleaved_1f1b", else 1. "gpipe" and "1f1b" take 1', least=1
    )

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
        super().__post_init__()
        if self.schedule in ("gpipe", "1f1b") and self.stages_per_rank not in (None, 1):
            subject = f"stages_per_rank={self.stages_per_rank} with schedule={self.schedule!r}"
            raise SettingError(f"{subject}, which has one stage a process: use 'interleaved_1f1b' or 'zero_bubble'")

    def stages(self, ranks: int) -> int:
        """Count the stages.

        Args:
            ranks: of the pipeline.

        Returns:
            The number of stages on all ranks.
        """
        return ranks * (self.stages_per_rank or (2 if self.schedule == "interleaved_1f1b" else 1))

    def takes(self, count: int, ranks: int) -> bool:
        """Tell whether torch's schedule runs a number of micro-batches.

        Some schedules run them in rounds of equal size.

        Args:
            count: of micro-batches.
            ranks: of the pipeline.

        Returns:
            True or False.
        """
        rounds = self.schedule in ("interleaved_1f1b", "zero_bubble")
        return not rounds or count % max(1, count // ranks) == 0


class Pipeline(Single):
    """Stages of the model, one or several a rank.

    The model is cut at its first call. Until then every rank holds it whole, with rank 0's values. From then on, in
    place: parameters and buffers of other ranks' stages are on the meta device; they stay the same objects under the
    same names, without gradients and optimizer state. This rank's are moved to its device.

    Each stage that uses a tied weight holds it, and gets the sum of the gradients: by a hook on the parameter, and an
    average over these ranks after each backward that is not under `no_sync`. A stage draws random numbers from a stream
    of its own, seeded at each call from the one that all ranks share.
    """

    name: ClassVar[str] = "pipeline"
    late_loss: ClassVar[bool] = True
    several: ClassVar[str] = "gives each process a stage of the model"
    Options: ClassVar[type] = PipelineOptions
    replicated: ClassVar[bool] = False
    sums = False  # optimizers are prepared before it shows which parameters are here
    conflicts: ClassVar[Sequence[Conflict]] = (
        Conflict("pipeline", "join_uneven_inputs()", "every batch goes through the stages of all ranks", Remedy.JOIN),
        Conflict("pipeline", "create_graph=True", "gradients travel between stages without a graph", Remedy.GRAPH),
        Conflict(
            "pipeline",
            "change of gradients",
            "between backward and step a rank has the gradients of its stage alone, and torch's clips take their norm",
            "Call acc.clip_grad_norm_ or acc.clip_grad_value_, and change gradients otherwise in hooks of parameters",
        ),
        Conflict("pipeline", "optimizer_in_backward", "it adds up gradients of micro-batches", Remedy.IN_BACKWARD),
        Conflict("pipeline", "forward_methods", "it divides forward into stages, and no other method", Remedy.FORWARD),
        *without_masters("pipeline", "fp32 masters are taken before the model is divided"),
    )

    def __init__(self, world: World, options: PipelineOptions) -> None:
        stages = options.stages(world.size)
        if options.splits is not None and len(options.splits) != stages - 1:
            raise SettingError(
                f"splits={options.splits!r} make {len(options.splits) + 1} stages, and there are {world.size} "
                f"processes with {stages // world.size} each: name {stages - 1} modules, or leave splits out"
            )
        if options.microbatches and not options.takes(options.microbatches, world.size):
            subject = f"microbatches={options.microbatches} with schedule={options.schedule!r}"
            raise SettingError(f"{subject}, which has rounds: use a multiple of {world.size}")
        super().__init__(world, options)
        self.data_rank, self.data_size = 0, 1
        self._optimizers: list[Optimizer] = []
        self._owners: dict[int, int] = {}  # id of a parameter in a stage → the first rank that holds it
        rank, size, owners = world.rank, world.size, self._owners
        # A parameter of no stage is on all ranks.
        self._copies = lambda p: int(owners[id(p)] == rank) if id(p) in owners else size

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        """The layout of the fullest rank, if modules are called in the order in which they were registered."""
        modules = candidates(model, options.splits or ())
        order = {id(p): i for i, module in enumerate(modules.values(), 1) for p in module.parameters()}
        segments = {name: (order.get(id(p), 0), p.numel()) for name, p in model.named_parameters()}
        weights = [sum(n for i, n in segments.values() if i == number) for number in range(len(modules) + 1)]
        if options.splits is not None:
            cuts = sorted(list(modules).index(name) + 1 for name in options.splits)
        else:
            cuts = balance(weights, range(1, len(modules) + 1), options.stages(size))
        ranks = {name: sum(segment >= cut for cut in cuts) % size for name, (segment, _) in segments.items()}
        sums = [sum(n for name, (_, n) in segments.items() if ranks[name] == rank) for rank in range(size)]
        fullest = sums.index(max(sums))

        def on_rank(name: str, parameter: Tensor) -> int:
            return parameter.numel() if ranks.get(name) == fullest else 0

        return Layout(
            weights=on_rank,
            gradients=on_rank,
            states=on_rank,
            copies=on_rank,
            note="the fullest rank, as far as it shows without a batch",
        )

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer], context: WrapContext) -> nn.Module:
        refuse_uncallable(model)
        policy = context.policy
        model = policy.convert(model)
        modules = candidates(model, self.options.splits or ())
        cuttable = {id(part) for module in modules.values() for part in module.modules()}
        for name, part in model.named_modules():
            compiled = "_orig_mod" in part._modules or vars(part).get("_compiled_call_impl") is not None
            if compiled and id(part) not in cuttable:
                raise PrepareError(
                    f"{name or 'the model'} is compiled, as one function, and stages begin inside of it: compile its "
                    "blocks instead"
                )
        broadcast_model(model, self._world)
        module = policy.forward(model, self._world.device)

        def divide(record: Survey) -> Cuts:
            cuts = choose(model, record, self.options.splits, self.options.stages(self._world.size))
            self._divide(model, cuts, context, pipelined)
            return cuts

        pipelined = pipeline_run.Pipelined(module, model, modules, self._world, self.options, divide)
        return pipelined

    def loss(
        self, module: nn.Module, call: Call, loss_fn: Call, args: Any, kwargs: Any, target: Any, summed: bool
    ) -> Tensor:
        assert isinstance(module, pipeline_run.Pipelined), "the result of wrap"
        return module.loss(loss_fn, tuple(args), dict(kwargs), target, summed)

    def spread(self, optimizer: Optimizer) -> Optimizer:
        self._optimizers.append(optimizer)
        return optimizer

    def _divide(self, model: nn.Module, cuts: Cuts, context: WrapContext, pipelined: pipeline_run.Pipelined) -> None:
        """Keep this rank's stages of `model`; tell `pipelined` the parameters that other ranks hold, too."""
        rank, size = self._world.rank, self._world.size
        groups: dict[tuple[int, ...], Any] = {tuple(range(size)): None}
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                users = tuple(sorted({stage % size for stage in cuts.users[name]}))
                if rank not in users:
                    self._move_to_meta(name, tensor)
                elif context.place:
                    tensor.data = tensor.data.to(self._world.device)
                if not isinstance(tensor, nn.Parameter):
                    continue
                self._owners[id(tensor)] = users[0]
                if len(users) > 1 and users not in groups:
                    groups[users] = self._world.group(users)
                if len(users) > 1 and rank in users and (tensor.is_floating_point() or tensor.is_complex()):
                    pipelined.share(tensor, len(users), groups[users])
        LEFT.add(model)
        for optimizer in self._optimizers:
            for parameter in list(optimizer.state):
                if isinstance(parameter, Tensor) and parameter.is_meta:
                    del optimizer.state[parameter]
            follow(optimizer, {})
        for module in candidates(model, cuts.begins).values():
            tensors = [*module.parameters(), *module.buffers()]
            if tensors and not any(t.is_meta for t in tensors):
                context.compile(module)

    @staticmethod
    def _move_to_meta(name: str, tensor: Tensor) -> None:
        meta: Any = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            tensor.grad = None
            meta = nn.Parameter(meta, tensor.requires_grad)
        try:
            torch.utils.swap_tensors(tensor, meta)
        except RuntimeError as error:
            raise PrepareError(
                f"{name!r} belongs to another rank's stage and cannot be let go of here ({error}): call a prepared "
                "model before anything else keeps its parameters, such as a graph of an earlier forward"
            ) from error

    def release(self, model: nn.Module, module: nn.Module) -> nn.Module:
        assert isinstance(model, pipeline_run.Pipelined), "the result of wrap"
        super().release(model, module)
        self._optimizers.clear()
        self._owners.clear()
        return Released("this model is one stage") if model.cuts is not None else module
