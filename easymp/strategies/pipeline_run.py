"""A pipelined model: runs batches through the stages of this rank, by torch's schedules, or forward and backward by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from ..base.pytree import concatenate, find_batch_size, leaves, map_leaves, slice_tensors
from ..base.rng import isolated, mix, seed_all
from ..distributed import World, odd_one_out
from ..errors import BatchError, RefusedError, StepError, WorldError
from .pipeline_cuts import Batch, Cuts, StageForward, Survey, survey
from .single import Reducing

# torch's classes by our names: for one stage a rank, and for a list of them.
CLASSES = {
    "gpipe": ("ScheduleGPipe", "ScheduleLoopedBFS"),
    "1f1b": ("Schedule1F1B", None),
    "interleaved_1f1b": (None, "ScheduleInterleaved1F1B"),
    "zero_bubble": (None, "ScheduleInterleavedZeroBubble"),
}


class SharedParameter:
    """A parameter that several ranks use: each gets the sum of its gradients.

    Gradients are averaged over these ranks, as in DDP, so that those of earlier backwards, which are averaged already, do not change.
    A hook multiplies each rank's own part by the number of ranks first.
    """

    def __init__(self, parameter: nn.Parameter, count: int, group: Any) -> None:
        self.parameter, self.count, self.group = parameter, count, group
        trained = parameter.requires_grad
        self.hook = parameter.requires_grad_().register_hook(lambda grad: grad * count)
        parameter.requires_grad_(trained)  # it may be unfrozen later

    def sum(self) -> None:
        if self.parameter.requires_grad:
            if self.parameter.grad is None:
                self.parameter.grad = torch.zeros_like(self.parameter)
            dist.all_reduce(self.parameter.grad, group=self.group)
            self.parameter.grad /= self.count


class Seed(torch.autograd.Function):
    """A scalar whose backward gives each of `outputs` its gradient of `grads`."""

    @staticmethod
    def forward(ctx: Any, grads: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.grads = grads
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.grads


class Deferred(torch.autograd.Function):
    """`values`, whose backward calls ``run(*gradients)``, once."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, values: list[Tensor], run: Callable[..., None]) -> Any:
        ctx.run = run
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.run is None:
            raise StepError(
                "a second backward through one forward of a pipelined model: call the model again"
            )
        run, ctx.run = ctx.run, None
        run(*grads)
        return None, None, None


class Pipelined(Reducing):
    """Calls the stages. Backward sums the gradients of shared parameters while it `reduces`.

    Args:
        places: modules at which the user's `root` may be cut, by name.
        divide: called once, with a survey: cuts the model and keeps this rank's part; returns `Cuts` and the shared parameters.
    """

    def __init__(
        self, module: nn.Module, root: nn.Module, places: Any, world: World, options: Any, divide: Any
    ) -> None:
        super().__init__()
        self.module, self.root, self.world, self.options = module, root, world, options
        self.cuts: Cuts | None = None
        self.shared: list[SharedParameter] = []
        self._places, self._divide = dict(places), divide
        self._surveys: dict[Any, Survey] = {}  # by form of micro-batch
        self._schedules: dict[int, tuple[Any, list[Stage]]] = {}  # by number of micro-batches

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        batch = self._batch(args, kwargs)
        if batch.trains and self.options.schedule != "gpipe":
            raise RefusedError(
                f"the model was called to be trained under schedule={self.options.schedule!r}, which needs the loss function inside: "
                "use accelerator.forward_backward(model, loss_fn, inputs, target=...), or schedule='gpipe'"
            )
        check_outputs(batch)
        stages = self._forwards(batch)
        tensors, tree = self._share(batch)
        wanted = [i for i, t in enumerate(tensors) if batch.trains and t.requires_grad]
        tensors = [t.detach() for t in tensors]
        if wanted:
            run = lambda *grads: self._backwards(batch, stages, grads)  # noqa: E731
            for i, tensor in zip(wanted, Deferred.apply(self._anchor(), [tensors[i] for i in wanted], run)):
                tensors[i] = tensor
        given = iter(tensors)
        return map_leaves(lambda leaf: next(given) if isinstance(leaf, Tensor) else leaf, tree)

    def loss(self, loss_fn: Callable[..., Any], args: Any, kwargs: Any, target: Any, summed: bool) -> Tensor:
        """The loss of a batch. Its backward runs all micro-batches, forward and backward, and gives it its value."""
        batch = self._batch(args, kwargs, target)
        batch.loss_fn, batch.summed = loss_fn, summed
        anchor = self._anchor().requires_grad_(batch.trains)
        value = torch.ones_like(anchor, requires_grad=False)
        loss: Tensor
        (loss,) = Deferred.apply(anchor, [value], lambda factor: self._scheduled(batch, factor, detached))
        detached = loss.detach()
        return loss

    def _anchor(self) -> Tensor:
        return torch.zeros((), device=self.world.device, requires_grad=True)

    def _batch(self, args: Any, kwargs: Any, target: Any = None) -> Batch:
        root, device = self.root, self.world.device
        parts = split((args, kwargs, target), self._count)
        flags = tuple(p.requires_grad for p in root.parameters())
        trains = torch.is_grad_enabled() and any(flags)
        if trains and any(isinstance(t, Tensor) and t.requires_grad for t in leaves((args, kwargs))):
            raise StepError(
                "an input of a pipelined model requires a gradient, which only the first stage could compute: detach it"
            )
        autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        context = (root.training, flags, autocast, trains)
        seed = int(torch.randint(1 << 62, (), device="cpu"))
        with own_stream(0, 0, device):  # a survey may draw numbers
            surveys = [self._survey(*part[:2], context) for part in parts]
        rows = [find_batch_size(part) or 0 for part in parts]
        return Batch(parts, rows, surveys, self.begins, trains, self.options.schedule == "zero_bubble", seed)

    def _count(self, rows: int) -> int:
        """Micro-batches for `rows` samples: as many as asked for, or the next lower number that the schedule can take."""
        count = min(self.options.microbatches or self.world.size, rows)
        while not self.options.takes(count, self.world.size):
            count -= 1
        return count

    def _survey(self, args: Any, kwargs: Any, context: Any) -> Survey:
        """The survey of a micro-batch of this form. The first one divides the model."""
        form = form_of((args, kwargs))
        if self.cuts is None:
            seen = self.world.gather_objects((str(form), self.root.training))
            if any(s != seen[0] for s in seen):
                raise WorldError(
                    f"the ranks call the model with different batches: {odd_one_out(seen)}. Prepare the loaders: all ranks see the same"
                )
        if (context, form) not in self._surveys:
            found = survey(self.root, self.module, self._places, args, kwargs, self.world.device)
            if self.cuts is None:
                self.cuts, self.shared = self._divide(found)
            missing = [name for name in self.begins if name not in found.crossing]
            if missing:
                raise StepError(
                    f"the forward does not call {missing[0]!r}, where a stage begins, for a batch of this form: use one course for all"
                )
            self._surveys[context, form] = found
        return self._surveys[context, form]

    @property
    def begins(self) -> tuple[str, ...]:
        return self.cuts.begins if self.cuts is not None else ()

    def _make_stages(self) -> list[Stage]:
        assert self.cuts is not None
        cuts, mine = self.cuts, range(self.world.rank, len(self.begins) + 1, self.world.size)
        return [Stage(StageForward(self.module, self.root, cuts, self._places, i), self.world) for i in mine]

    def _scheduled(self, batch: Batch, factor: Tensor, loss: Tensor) -> None:
        """Run all micro-batches by torch's schedule; `loss` gets the batch's loss."""
        count = len(batch.parts)
        batch.factor, batch.total = factor, torch.zeros((), device=self.world.device)
        if count not in self._schedules:
            stages = self._make_stages()
            one, several = CLASSES[self.options.schedule]
            single = len(stages) == 1 and one is not None
            kind: Any = getattr(torch_schedules, str(one if single else several))
            many = max(count, self.world.size)  # as few as torch takes; with fewer its schedule is not used
            given = stages[0] if single else stages
            made = kind(given, many, loss_fn=lambda loss, _: loss, scale_grads=False)
            self._schedules[count] = made, stages
        schedule, stages = self._schedules[count]
        for stage in stages:
            stage.take(batch)
        try:
            with self._running("the stages of a pipeline", batch):
                if count < self.world.size:
                    self._without_turns(batch, stages)
                else:
                    schedule._step_microbatches([()] * count, [{}] * count, [None] * count, None)
        except BaseException:
            self._schedules.clear()
            raise
        schedule._internal_losses.clear()
        failed = batch.total.new_tensor(float(batch.error is not None))
        total, failures = self.world.reduce(torch.stack([batch.total, failed]))
        if batch.error is not None:
            raise batch.error
        if failures:
            raise WorldError(
                "a stage of the pipeline failed on another rank: the error of that rank says why"
            )
        loss.copy_(total)
        self._sum_shared()

    def _without_turns(self, batch: Batch, stages: list[Stage]) -> None:
        """Run all forwards, then all backwards: fewer micro-batches than ranks leave no turns to take."""
        sends = list(chain.from_iterable(_forward(stage, batch) for stage in stages))
        for stage in reversed(stages):
            sends.extend(_backward(stage, batch, lambda chunk, last=stage: last.outputs(chunk)[0]))
        wait(sends)

    def _forwards(self, batch: Batch) -> list[Stage]:
        """Run all forwards. The outputs are in `batch`, on the rank with the last stage."""
        stages = self._make_stages()
        with self._running("the forward of a pipeline", batch, torch.is_grad_enabled()):
            for stage in stages:
                stage.take(batch)
            wait(list(chain.from_iterable(_forward(stage, batch) for stage in stages)))
        return stages

    def _backwards(self, batch: Batch, stages: list[Stage], grads: Sequence[Tensor]) -> None:
        """Run all backwards, from the gradients of the outputs that require one."""
        (stage,) = stages
        parts = list(zip(*(grad.split(batch.rows) for grad in grads)))

        def seed(chunk: int) -> Tensor:
            return Seed.apply(parts[chunk], *(t for t in stage.outputs(chunk) if t.requires_grad))

        with self._running("the backward of a pipeline", batch):
            wait(list(_backward(stage, batch, seed)))
        batch.outputs.clear()
        self._sum_shared()

    @contextmanager
    def _running(self, what: str, batch: Batch, grad: bool = True) -> Iterator[None]:
        """A context in which stages draw from their own random streams, and errors are raised without torch's wrapping."""
        world, cause = self.world, None
        own = own_stream(batch.seed, world.rank, world.device)
        with world.explained(what), own, torch.set_grad_enabled(grad):
            try:
                yield
            except RuntimeError as error:
                cause = error.__cause__ if "ailed to run" in str(error) else None
                if not isinstance(cause, Exception):
                    raise
            if cause is not None:
                raise cause  # here, so that it does not hold torch's frames, and by them connections

    def _sum_shared(self) -> None:
        if self.reduces and self.shared:
            with self.world.explained("gradients of shared parameters"), torch.no_grad():
                for shared in self.shared:
                    shared.sum()

    def _share(self, batch: Batch) -> tuple[list[Tensor], Any]:
        """The tensors of the whole batch's output on every rank, and the tree that holds them."""
        tree = batch.surveys[0].outputs
        forms = [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]
        if batch.outputs:
            outputs = [batch.outputs[chunk] for chunk in sorted(batch.outputs)]
            rest = [
                form_of(map_leaves(lambda t: "a tensor" if isinstance(t, Tensor) else t, o))
                for o in (tree, *outputs)
            ]
            if any(form != rest[0] for form in rest):
                raise StepError(
                    "the model's output has another form than in a forward without values: shapes must follow from the inputs'"
                )
            whole = concatenate(outputs)
            tensors = [leaf.detach().contiguous() for leaf in leaves(whole) if isinstance(leaf, Tensor)]
        else:
            rows, device = sum(batch.rows), self.world.device
            tensors = [torch.empty((rows, *f.shape[1:]), dtype=f.dtype, device=device) for f in forms]
        with self.world.explained("the outputs of the last stage"):
            for tensor in tensors:
                if tensor.numel():
                    dist.broadcast(as_bytes(tensor), len(self.begins) % self.world.size)
        return [t.requires_grad_(f.requires_grad) for t, f in zip(tensors, forms, strict=True)], tree


class Stage(_PipelineStageBase):
    """torch's stage, with transfers of any number of tensors, as bytes: not every backend knows every dtype."""

    def __init__(self, forward: StageForward, world: World) -> None:
        super().__init__(forward, forward.index, forward.last + 1, world.device)
        self.batch: Any = None
        self._arriving: dict[int, list[Tensor]] = {}
        self._returning: dict[int, list[Tensor | None]] = {}
        self._unsplit: set[int] = set()  # micro-batches whose backward runs as a whole

    def take(self, batch: Batch) -> None:
        """Begin `batch`."""
        self.clear_runtime_states()
        self.batch, self.chunks, self.has_backward = batch, len(batch.parts), batch.trains
        meta = getattr(self, "_stage_meta", None)  # torch 2.13 counts the arguments there
        if meta is not None:
            meta.inputs = tuple(f for _, f in batch.crossing(0, self.stage_index))

    def _prepare_forward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> Any:
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())
        return ()

    def _prepare_backward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> Any:
        return None

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        return ()

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Nothing: before torch 2.13 it compares what the script passes with shapes that this stage does not have."""

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Likewise."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.submod.now = self.batch, fwd_chunk_id  # arguments would be inputs of backward before torch 2.13
        return super().forward_one_chunk(fwd_chunk_id, (), {})

    def outputs(self, chunk: int) -> Sequence[Tensor]:
        """What the forward of a micro-batch has made, until its backward."""
        states = getattr(self, "_forward_chunk_states", None)  # since torch 2.15
        return self.fwd_cache[chunk][0] if states is None else states[chunk].live_outputs

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not full_backward:
            # torch finds the parameters of a split backward between the inputs and the output: there must be inputs, and one output.
            forms = self.batch.crossing(bwd_chunk_id, self.stage_index)
            outputs = [t for t in self.outputs(bwd_chunk_id) if t.requires_grad]
            if not any(self.batch.returns(f) for _, f in forms) or (len(outputs) > 1 and not self.is_last):
                full_backward = True
                self._unsplit.add(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if bwd_chunk_id in self._unsplit:
            self._unsplit.remove(bwd_chunk_id)
        else:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)

    def _room(self, form: Tensor) -> Tensor:
        return torch.empty(form.shape, dtype=form.dtype, device=self.device)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        arriving = [self._room(f) for _, f in self.batch.crossing(fwd_chunk_id, self.stage_index)]
        self._arriving[fwd_chunk_id] = arriving
        return self._transfers(dist.irecv, arriving, -1)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        forms = self.batch.crossing(fwd_chunk_id, self.stage_index)
        arrived = self._arriving.pop(fwd_chunk_id)
        return tuple(t.requires_grad_(self.batch.returns(f)) for t, (_, f) in zip(arrived, forms))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return [] if self.is_last else self._transfers(dist.isend, self.outputs(fwd_chunk_id), 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        forms = self.batch.crossing(bwd_chunk_id, self.stage_index + 1)
        returning = [self._room(f) if self.batch.returns(f) else None for _, f in forms]
        self._returning[bwd_chunk_id] = returning
        return self._transfers(dist.irecv, returning, 1)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        return tuple(self._returning.pop(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        forms = self.batch.crossing(bwd_chunk_id, self.stage_index)
        grads = [
            self._room(f).zero_() if grad is None else grad
            for (_, f), grad in zip(forms, self.bwd_cache.pop(bwd_chunk_id))
            if self.batch.returns(f)
        ]
        return self._transfers(dist.isend, grads, -1)

    def _transfers(self, op: Any, tensors: Sequence[Tensor | None], step: int) -> list[dist.P2POp]:
        peer = (self.stage_index + step) % self.group_size
        return [dist.P2POp(op, as_bytes(t), peer) for t in tensors if t is not None and t.numel()]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _forward(stage: Stage, batch: Batch) -> Iterator[Any]:
    """The forwards of all micro-batches in one stage; gives what is being sent."""
    for chunk in range(len(batch.parts)):
        wait(start(stage.get_fwd_recv_ops(chunk)))
        stage.forward_one_chunk(chunk)
        yield from start(stage.get_fwd_send_ops(chunk))


def _backward(stage: Stage, batch: Batch, loss: Callable[[int], Tensor]) -> Iterator[Any]:
    """The backwards of all micro-batches in one stage, from `loss` in the last one; gives what is being sent."""
    last = len(batch.parts) - 1
    for chunk in range(last + 1):
        wait(start(stage.get_bwd_recv_ops(chunk)))
        end = loss(chunk) if stage.is_last else None
        stage.backward_one_chunk(chunk, loss=end, last_backward=chunk == last)
        yield from start(stage.get_bwd_send_ops(chunk))


def start(transfers: list[dist.P2POp]) -> list[Any]:
    return dist.batch_isend_irecv(transfers) if transfers else []


def wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def check_outputs(batch: Batch) -> None:
    """Raises BatchError for outputs that cannot be joined along dimension 0."""
    for found, rows in zip(batch.surveys, batch.rows):
        for leaf in leaves(found.outputs):
            if isinstance(leaf, Tensor) and (not leaf.ndim or leaf.shape[0] != rows):
                raise BatchError(
                    f"the model returns a tensor of shape {tuple(leaf.shape)} for {rows} samples: micro-batches are joined along dimension "
                    "0. Return one value a sample, and reduce it outside (the loss, for example), or use accelerator.forward_backward()"
                )
            if not (leaf is None or isinstance(leaf, (Tensor, bool, int, float, str))):
                raise BatchError(
                    f"the model returns a {type(leaf).__name__}, which no micro-batches make up: return tensors, or lists or dicts of them"
                )


def form_of(tree: Any) -> Any:
    """Structure, shapes, dtypes, and values of plain leaves: calls of one form compute the same shapes."""
    if isinstance(tree, Tensor):
        return (tuple(tree.shape), tree.dtype)
    if isinstance(tree, Mapping):
        return (type(tree), *((key, form_of(value)) for key, value in tree.items()))
    if type(tree) in (list, tuple):
        return (type(tree), *map(form_of, tree))
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return (type(tree), tree)
    inner = list(leaves(tree))
    return (type(tree), *(() if len(inner) == 1 and inner[0] is tree else map(form_of, inner)))


def split(tree: Any, count: Callable[[int], int]) -> list[Any]:
    """`tree` in ``count(samples)`` parts along dimension 0 of all tensors."""
    tensors = [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor) and leaf.ndim]
    lengths = {t.shape[0] for t in tensors}
    if len(lengths) != 1 or not max(lengths):
        said = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise BatchError(
            f"strategy 'pipeline' cuts a batch into micro-batches along dimension 0, and the model was called with tensors of shapes "
            f"({said}): pass tensors with one row a sample; what is not part of the batch (a mask) goes into a buffer of the model"
        )
    rows, number = max(lengths), count(max(lengths))
    ends = [rows // number * i + min(i, rows % number) for i in range(number + 1)]
    return [slice_tensors(tree, slice(begin, end)) for begin, end in pairwise(ends)]


@contextmanager
def own_stream(seed: int, index: int, device: torch.device) -> Iterator[None]:
    """A context with the random stream of stage `index`, f(seed, index). The outer streams do not move."""
    there = [] if device.type == "cpu" else [device]
    with isolated(), torch.random.fork_rng(there, device_type=device.type):
        seed_all(mix(seed, "stage", index))
        yield
