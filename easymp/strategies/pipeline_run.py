"""A pipelined model: runs batches through the stages of this rank, by torch's schedules or all forwards first."""

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

from ..base.pytree import concatenate, find_batch_size, leaf_paths, leaves, map_leaves, slice_tensors
from ..base.rng import isolated, mix, seed_all
from ..distributed import World, odd_one_out
from ..errors import BatchError, RefusedError, StepError, WorldError
from .pipeline_cuts import SAME_COURSE, Batch, Cuts, StageForward, Survey, survey
from .single import Reducing

# torch's classes by our names: for one stage a rank, and for a list of them.
CLASSES = {
    "gpipe": ("ScheduleGPipe", "ScheduleLoopedBFS"),
    "1f1b": ("Schedule1F1B", None),
    "interleaved_1f1b": (None, "ScheduleInterleaved1F1B"),
    "zero_bubble": (None, "ScheduleInterleavedZeroBubble"),
}


class Deferred(torch.autograd.Function):
    """`values`, whose backward calls ``run(*gradients)``, once."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, values: list[Tensor], run: Callable[..., None]) -> Any:
        ctx.run = run
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.run is None:
            raise StepError("a second backward through one forward of a pipelined model: call the model again")
        run, ctx.run = ctx.run, None
        run(*grads)
        return None, None, None


class Pipelined(Reducing):
    """Calls the stages. Backward sums the gradients of shared parameters while it `reduces`.

    `divide` is called once, with a survey: it cuts the user's `root` at some of `candidates`, and keeps this rank's
    part.
    """

    def __init__(
        self, module: nn.Module, root: nn.Module, candidates: Mapping[str, nn.Module], world: World, options: Any,
        divide: Callable[[Survey], Cuts],
    ) -> None:  # fmt: skip
        super().__init__(module, root, world, False)
        self.options = options
        self.cuts: Cuts | None = None
        self._shared: list[tuple[nn.Parameter, dist.ProcessGroup | None]] = []
        self._candidates, self._divide = dict(candidates), divide
        self._surveys: dict[Any, Survey] = {}  # by form of micro-batch
        self._schedules: dict[int, tuple[Any, list[Stage]]] = {}  # by number of micro-batches

    def share(self, parameter: nn.Parameter, count: int, group: dist.ProcessGroup | None) -> None:
        """Give each of the `count` ranks of `group`, which all use `parameter`, the sum of its gradients.

        They are averaged, which leaves averages of earlier backwards as they are; a hook first multiplies this rank's
        part by the number of ranks.
        """
        requires_grad = parameter.requires_grad
        self.hooks.append(parameter.requires_grad_().register_hook(lambda grad: grad * count))
        parameter.requires_grad_(requires_grad)  # it may train later
        self._shared.append((parameter, group))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        batch = self._batch(args, kwargs)
        if batch.trains and self.options.schedule != "gpipe":
            raise RefusedError(
                f"the model was called to be trained under schedule={self.options.schedule!r}, which needs the loss "
                "function inside: use accelerator.forward_backward(model, loss_fn, inputs, target=...), or "
                "schedule='gpipe'"
            )
        check_outputs(batch)
        stages = self._make_stages()
        with self._running("the forward of a pipeline", batch, torch.is_grad_enabled()):
            for stage in stages:
                stage.begin(batch)
            wait(list(chain.from_iterable(run_forward(stage, batch) for stage in stages)))
        tensors, tree = self._broadcast_outputs(batch)
        trained = [i for i, t in enumerate(tensors) if batch.trains and t.requires_grad]
        tensors = [t.detach() for t in tensors]
        if trained:
            outputs = self._defer(
                [tensors[i] for i in trained], lambda *grads: self._run_backward(batch, stages, grads)
            )
            for i, output in zip(trained, outputs):
                tensors[i] = output
        remaining = iter(tensors)
        return map_leaves(lambda leaf: next(remaining) if isinstance(leaf, Tensor) else leaf, tree)

    def loss(self, loss_fn: Callable[..., Any], args: Any, kwargs: Any, target: Any, summed: bool) -> Tensor:
        """The loss of a batch. Its backward runs all micro-batches, forward and backward, and gives it its value."""
        batch = self._batch(args, kwargs, target)
        batch.loss_fn, batch.summed = loss_fn, summed
        value = torch.ones((), device=self.world.device)

        def run(factor: Tensor) -> None:
            detached.copy_(self._run_schedule(batch, factor))

        loss: Tensor = self._defer([value], run, batch.trains)[0]
        detached = loss.detach()
        return loss

    def _defer(self, values: list[Tensor], run: Callable[..., None], trains: bool = True) -> Any:
        anchor = torch.zeros((), device=self.world.device, requires_grad=trains)
        return Deferred.apply(anchor, values, run)  # type: ignore[no-untyped-call]  # untyped in torch

    def _batch(self, args: Any, kwargs: Any, target: Any = None) -> Batch:
        root, device = self.root, self.world.device
        parts = split((args, kwargs, target), self._count)
        trainable = tuple(p.requires_grad for p in root.parameters())
        trains = torch.is_grad_enabled() and any(trainable)
        if trains and any(isinstance(t, Tensor) and t.requires_grad for t in leaves((args, kwargs))):
            raise StepError(
                "an input of a pipelined model requires a gradient, which only the first stage could compute: detach it"
            )
        autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        context = (root.training, trainable, autocast, trains)
        seed = int(torch.randint(1 << 62, (), device="cpu"))
        with own_stream(0, 0, device):  # a survey may draw numbers
            surveys = [self._survey(args, kwargs, context) for args, kwargs, _ in parts]
        rows = [find_batch_size(part) or 0 for part in parts]
        return Batch(parts, rows, surveys, self.begins, trains, self.options.schedule == "zero_bubble", seed)

    def _count(self, rows: int) -> int:
        """Micro-batches for `rows` samples: `microbatches`, or the next lower number that the schedule can take."""
        count = min(self.options.microbatches or self.world.size, rows)
        while not self.options.takes(count, self.world.size):
            count -= 1
        return count

    def _survey(self, args: Any, kwargs: Any, context: Any) -> Survey:
        """The survey of a micro-batch of this form. The first one divides the model."""
        form = form_of((args, kwargs))
        if self.cuts is None:
            calls = self.world.gather_objects((str(form), self.root.training))
            if any(call != calls[0] for call in calls):
                difference = odd_one_out(calls)
                raise WorldError(f"the ranks call the model with different batches: {difference}. Prepare the loaders")
        if (context, form) not in self._surveys:
            record = survey(self.root, self.module, self._candidates, args, kwargs, self.world.device)
            if self.cuts is None:
                self.cuts = self._divide(record)
            missing = [name for name in self.begins if name not in record.crossing]
            if missing:
                raise StepError(f"the forward does not call {missing[0]!r}, where a stage begins: {SAME_COURSE}")
            self._surveys[context, form] = record
        return self._surveys[context, form]

    @property
    def begins(self) -> tuple[str, ...]:
        return self.cuts.begins if self.cuts is not None else ()

    def _make_stages(self) -> list[Stage]:
        assert self.cuts is not None
        cuts, indices = self.cuts, range(self.world.rank, len(self.begins) + 1, self.world.size)
        return [Stage(StageForward(self.module, self.root, cuts, self._candidates, i), self.world) for i in indices]

    def _run_schedule(self, batch: Batch, factor: Tensor) -> Any:
        """Run all micro-batches by torch's schedule. Returns the batch's loss."""
        count = len(batch.parts)
        batch.factor, batch.total = factor, torch.zeros((), device=self.world.device)
        if count not in self._schedules:
            stages = self._make_stages()
            # Fewer micro-batches than ranks leave no turns to take.
            one_stage, multi_stage = CLASSES[self.options.schedule if count >= self.world.size else "gpipe"]
            single = len(stages) == 1 and one_stage is not None
            kind: Any = getattr(torch_schedules, str(one_stage if single else multi_stage))
            schedule = kind(stages[0] if single else stages, count, loss_fn=lambda loss, _: loss, scale_grads=False)
            self._schedules[count] = schedule, stages
        schedule, stages = self._schedules[count]
        for stage in stages:
            stage.begin(batch)
        try:
            with self._running("the stages of a pipeline", batch):
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
            raise WorldError("a stage of the pipeline failed on another rank: the error of that rank says why")
        self._sum_shared()
        return total

    def _run_backward(self, batch: Batch, stages: Sequence[Stage], grads: Sequence[Tensor]) -> None:
        """Run all backwards, from the gradients of the outputs that require one."""
        (stage,) = stages
        parts = list(zip(*(grad.split(batch.rows) for grad in grads)))

        def weighted_sum(chunk: int) -> Any:
            """A scalar whose gradients are those of the outputs."""
            outputs = [t for t in stage.outputs(chunk) if t.requires_grad]
            return sum((t * grad.conj()).real.sum() for t, grad in zip(outputs, parts[chunk]))

        with self._running("the backward of a pipeline", batch):
            wait(list(run_backward(stage, batch, weighted_sum)))
        batch.outputs.clear()
        self._sum_shared()

    @contextmanager
    def _running(self, call: str, batch: Batch, grad: bool = True) -> Iterator[None]:
        """A context in which stages draw from their own random streams; errors are raised without torch's wrapping."""
        cause = None
        stream = own_stream(batch.seed, self.world.rank, self.world.device)
        with self.world.explained(call), stream, torch.set_grad_enabled(grad):
            try:
                yield
            except RuntimeError as error:
                cause = error.__cause__ if "ailed to run" in str(error) else None
                if not isinstance(cause, Exception):
                    raise
            if cause is not None:
                raise cause  # here, so that it does not hold torch's frames, and by them connections

    @torch.no_grad()
    def _sum_shared(self) -> None:
        for parameter, group in self._shared if self.reduces else ():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self.world.average_([parameter.grad], group)

    def _broadcast_outputs(self, batch: Batch) -> tuple[list[Tensor], Any]:
        """The tensors of the whole batch's output on every rank, and the tree that holds them."""
        tree = batch.surveys[0].outputs
        forms = [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]
        if batch.outputs:
            outputs = [batch.outputs[chunk] for chunk in sorted(batch.outputs)]
            structures = [
                form_of(map_leaves(lambda t: Tensor if isinstance(t, Tensor) else t, o)) for o in (tree, *outputs)
            ]
            if any(structure != structures[0] for structure in structures):
                raise StepError(f"the model's output has another form than in a forward without values: {SAME_COURSE}")
            tensors = [t.detach().contiguous() for t in leaves(concatenate(outputs)) if isinstance(t, Tensor)]
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

    def begin(self, batch: Batch) -> None:
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
        submodule: Any = self.submod
        submodule.current = self.batch, fwd_chunk_id  # arguments would be inputs of backward before torch 2.13
        return super().forward_one_chunk(fwd_chunk_id, (), {})

    def outputs(self, chunk: int) -> Sequence[Tensor]:
        """The outputs of a micro-batch's forward, until its backward."""
        states: Any = getattr(self, "_forward_chunk_states", None)  # since torch 2.15
        outputs: Sequence[Tensor] = self.fwd_cache[chunk][0] if states is None else states[chunk].live_outputs
        return outputs

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not full_backward:
            # torch finds the parameters of a split backward between the inputs and the output: there must be inputs,
            # and one output.
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

    def _buffer(self, form: Tensor) -> Tensor:
        return torch.empty(form.shape, dtype=form.dtype, device=self.device)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        arriving = [self._buffer(f) for _, f in self.batch.crossing(fwd_chunk_id, self.stage_index)]
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
        returning = [self._buffer(f) if self.batch.returns(f) else None for _, f in forms]
        self._returning[bwd_chunk_id] = returning
        return self._transfers(dist.irecv, returning, 1)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        return tuple(self._returning.pop(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        forms = self.batch.crossing(bwd_chunk_id, self.stage_index)
        grads = [
            self._buffer(f).zero_() if grad is None else grad
            for (_, f), grad in zip(forms, self.bwd_cache.pop(bwd_chunk_id))
            if self.batch.returns(f)
        ]
        return self._transfers(dist.isend, grads, -1)

    def _transfers(self, op: Any, tensors: Sequence[Tensor | None], step: int) -> list[dist.P2POp]:
        peer = (self.stage_index + step) % self.group_size
        return [dist.P2POp(op, as_bytes(t), peer) for t in tensors if t is not None and t.numel()]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def run_forward(stage: Stage, batch: Batch) -> Iterator[Any]:
    """Run the forwards of all micro-batches in one stage. Yields the transfers that are under way."""
    for chunk in range(len(batch.parts)):
        wait(start(stage.get_fwd_recv_ops(chunk)))
        stage.forward_one_chunk(chunk)
        yield from start(stage.get_fwd_send_ops(chunk))


def run_backward(stage: Stage, batch: Batch, loss: Callable[[int], Tensor]) -> Iterator[Any]:
    """Run the backwards of all micro-batches in one stage, from `loss` in the last one. Yields as `run_forward`."""
    last = len(batch.parts) - 1
    for chunk in range(last + 1):
        wait(start(stage.get_bwd_recv_ops(chunk)))
        stage.backward_one_chunk(chunk, loss(chunk) if stage.is_last else None, last_backward=chunk == last)
        yield from start(stage.get_bwd_send_ops(chunk))


def start(transfers: list[dist.P2POp]) -> list[Any]:
    return dist.batch_isend_irecv(transfers) if transfers else []


def wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def check_outputs(batch: Batch) -> None:
    """Raises BatchError for outputs that cannot be joined along dimension 0."""
    for record, rows in zip(batch.surveys, batch.rows):
        for leaf in leaves(record.outputs):
            if isinstance(leaf, Tensor) and (not leaf.ndim or leaf.shape[0] != rows):
                raise BatchError(
                    f"the model returns a tensor of shape {tuple(leaf.shape)} for {rows} samples: micro-batches are "
                    "joined along dimension 0. Return one value a sample, or use accelerator.forward_backward()"
                )
            if not (leaf is None or isinstance(leaf, (Tensor, bool, int, float, str))):
                raise BatchError(
                    f"the model returns a {type(leaf).__name__}, which cannot be joined: return tensors, lists, dicts"
                )


def form_of(tree: Any) -> Any:
    """Structure, shapes, dtypes, and values of plain leaves: calls of one form compute the same shapes."""

    def form(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return tuple(leaf.shape), leaf.dtype
        return (type(leaf), leaf) if leaf is None or isinstance(leaf, (bool, int, float, str)) else type(leaf)

    return tuple((path, form(leaf)) for path, leaf in leaf_paths(tree))


def split(tree: Any, count: Callable[[int], int]) -> list[Any]:
    """`tree` in ``count(samples)`` parts along dimension 0 of all tensors."""
    tensors = [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor) and leaf.ndim]
    lengths = {t.shape[0] for t in tensors}
    if len(lengths) != 1 or not max(lengths):
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise BatchError(
            "strategy 'pipeline' cuts a batch into micro-batches along dimension 0, and the model was called with "
            f"shapes ({shapes}): pass tensors with one row a sample; other tensors (a mask) go into buffers of the "
            "model"
        )
    rows, number = max(lengths), count(max(lengths))
    ends = [rows // number * i + min(i, rows % number) for i in range(number + 1)]
    return [slice_tensors(tree, slice(begin, end)) for begin, end in pairwise(ends)]


@contextmanager
def own_stream(seed: int, index: int, device: torch.device) -> Iterator[None]:
    """A context with the random stream of stage `index`, f(seed, index). The outer streams do not move."""
    devices = [] if device.type == "cpu" else [device]
    with isolated(), torch.random.fork_rng(devices, device_type=device.type):
        seed_all(mix(seed, "stage", index))
        yield
