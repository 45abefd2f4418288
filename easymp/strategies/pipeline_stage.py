"""The stages of one rank, on torch.distributed.pipelining: torch's schedules, torch's stages, and a forward that is the user's own.

No model is traced, so train and eval, changing shapes, keyword arguments and any Python in a forward stay what they are. Every rank calls
the whole model. What lies before a stage has no values: modules there are stood in for by blank tensors of the right shape. At the
module where the stage begins, blank arguments become the ones received from the stage before. Where the next stage begins, the forward
is left, and the arguments of that module are what the next stage receives.

What crosses a cut is known on every rank, by one forward without values for each form of micro-batch (`survey`). So micro-batches may
differ in length, and nothing about shapes is sent.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..base.pytree import concatenate, leaves, map_leaves, slice_tensors
from ..base.rng import mix, seed_all
from ..distributed import World, odd_one_out
from ..errors import BatchError, EasympError, RefusedError, StepError, WorldError
from .pipeline_cuts import Blanks, Cuts, Survey, blank, call_of, holds_tensors, intercepted, survey

# Schedules by our words: torch's class, and whether it takes one stage a rank or a list of them.
CLASSES = {
    "gpipe": ("ScheduleGPipe", "ScheduleLoopedBFS"),
    "1f1b": ("Schedule1F1B", None),
    "interleaved_1f1b": (None, "ScheduleInterleaved1F1B"),
    "zero_bubble": (None, "ScheduleInterleavedZeroBubble"),
}


class SharedParameter:
    """A parameter that several ranks use: each gets the sum of its gradients.

    As in DDP, gradients are averaged over the ranks that hold it, which leaves alone what has been averaged before; so each rank's own
    part is multiplied by their number first.
    """

    def __init__(self, parameter: nn.Parameter, count: int, group: Any) -> None:
        self.parameter, self.count, self.group = parameter, count, group
        self._hook: Any = None

    def watch(self) -> None:
        """To be called before a forward: the parameter may have been unfrozen since the last one."""
        if self._hook is None and self.parameter.requires_grad:
            count = self.count
            self._hook = self.parameter.register_hook(lambda grad: grad * count)

    def sum(self) -> None:
        if self.parameter.requires_grad:
            if self.parameter.grad is None:
                self.parameter.grad = torch.zeros_like(self.parameter)
            dist.all_reduce(self.parameter.grad, group=self.group)
            self.parameter.grad /= self.count

    def release(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


# -- the forward of one stage ------------------------------------------------------------------------------------------


class Departure(BaseException):
    """Leaves the model's forward where the next stage begins. No Exception: a model's own ``except`` must let it through."""

    def __init__(self, values: Any) -> None:
        super().__init__()
        self.values = values


class Arrival(torch.autograd.Function):
    """A received value as no leaf, so that a model may work on it in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, data: list[Tensor]) -> Tensor:
        return data[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class StageForward(nn.Module):
    """Calls a model for the part that is one stage; what torch's stage calls its submodule.

    Args:
        module: what is called: `root`, or `root` under autocast.
        root: the user's model.
        cuts: where the stages begin, and what they use.
        places: all modules whose calls are intercepted, by name.
        index: which stage.
    """

    def __init__(
        self, module: nn.Module, root: nn.Module, cuts: Cuts, places: Mapping[str, nn.Module], index: int
    ) -> None:
        super().__init__()
        self.index, self.last, self.names = index, len(cuts.begins), cuts.begins
        self._module = (module,)  # a tuple: what is called is no part of this
        self._own = tuple(p for name, p in root.named_parameters() if index in cuts.users[name])
        self._everything = frozenset(id(t) for t in (*root.parameters(), *root.buffers()))
        self._begins = [places[name] for name in cuts.begins]
        self._calls = {place: self._intercept(place, call_of(place)) for place in places.values()}
        self._remembered: dict[Any, Any] = {}
        self._blanks: Blanks | None = None
        self._at = 0  # the stage that the running forward has reached
        self._received: Sequence[Tensor] = ()
        self._positions: Sequence[int] = ()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(self._own)

    @property
    def where(self) -> str:
        begins = f"begins at {self.names[self.index - 1]!r}" if self.index else "is the first"
        return f"stage {self.index} of {self.last + 1} ({begins})"

    def forward(self, *received: Tensor, batch: Batch, chunk: int) -> Any:
        """Micro-batch `chunk` of `batch`; what the next stage receives, or what `batch` makes of the model's output."""
        self._received = [Arrival.apply(t, [t.detach()]) if t.requires_grad else t for t in received]
        self._positions = [i for i, _ in batch.crossing(chunk, self.index)]
        try:
            ended, result = self._run(*batch.parts[chunk][:2])
        finally:
            self._received = ()
        if ended:
            return batch.ended(chunk, result)
        tensors = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        sent = []
        for i, expected in batch.crossing(chunk, self.index + 1):
            tensor = tensors[i] if i < len(tensors) else None
            if tensor is None or tensor.shape != expected.shape or tensor.dtype != expected.dtype:
                raise StepError(
                    f"what {self.where} passes on was {tuple(expected.shape)} {expected.dtype} in a forward without values, and is "
                    f"{'nothing' if tensor is None else (tuple(tensor.shape), tensor.dtype)}: strategy 'pipeline' needs shapes that "
                    "follow from the inputs' shapes"
                )
            # torch cuts graphs at what is passed on, in place, which views and leaves do not allow.
            sent.append(tensor.clone() if tensor._is_view() or tensor.is_leaf else tensor)
        return tuple(sent)

    def _run(self, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Whether the forward ended in this stage, and the model's output, or else the arguments that the next stage begins with."""
        self._at = 0
        if self.index:
            self._blanks = Blanks(self._everything)
            self._blanks.__enter__()
        try:
            with intercepted(self._calls):
                outputs = self._module[0](*args, **kwargs)
        except Departure as departure:
            return False, departure.values
        except (RuntimeError, TypeError, ValueError) as error:
            if not isinstance(error, EasympError):
                error.add_note(
                    f"in {self.where}: only what is passed to the module at which a stage begins, and what follows from the model's inputs "
                    "alone, has values there"
                )
            raise
        finally:
            self._leave_blanks()
        if self._at != self.last:
            raise StepError(
                f"the forward ended in {self.where} before it called {self.names[self._at]!r}, where the next stage begins"
            )
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves(outputs)):
            raise StepError(
                f"an output of the model is computed before {self.names[-1]!r}, where the last stage begins, and not passed to it: split "
                "elsewhere, or return less"
            )
        return True, outputs

    def _leave_blanks(self) -> None:
        if self._blanks is not None:
            blanks, self._blanks = self._blanks, None
            blanks.__exit__(None, None, None)

    def _intercept(self, module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        def through(*args: Any, **kwargs: Any) -> Any:
            if self._at < self.last and module is self._begins[self._at]:
                self._at += 1
                if self._at == self.index:
                    args, kwargs = self._begin((args, kwargs))
                elif self._at > self.index:
                    raise Departure((args, kwargs))
            if self._at < self.index:
                return self._stand_in(module, call, args, kwargs)
            return call(*args, **kwargs)

        return through

    def _begin(self, values: Any) -> Any:
        """`values`, which the stage begins with, with the received ones in place."""
        if _get_current_dispatch_mode() is self._blanks:  # else a mode of the model's lies above: ours stays
            self._leave_blanks()
        torch.clear_autocast_cache()  # it may hold blank copies of parameters that this stage shares with an earlier one
        tensors = [leaf for leaf in leaves(values) if isinstance(leaf, Tensor)]
        if any(t.is_meta for i, t in enumerate(tensors) if i not in self._positions):
            raise StepError(
                f"{self.where} begins with a tensor that a forward without values did not pass there: the forward takes another course, on "
                "something else than its inputs' shapes"
            )
        if self._received and any(t.requires_grad for t in self._received) and not torch.is_grad_enabled():
            raise StepError(
                "a stage begins inside no_grad, but what is computed before needs gradients: split elsewhere (a checkpoint needs "
                "use_reentrant=False)"
            )
        new = dict(zip(self._positions, self._received, strict=True))
        arrived = iter([_become(t, new[i], self.where) if i in new else t for i, t in enumerate(tensors)])
        return map_leaves(lambda leaf: next(arrived) if isinstance(leaf, Tensor) else leaf, values)

    def _stand_in(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The output of a module of an earlier stage, blank; worked out once for each form of the arguments."""
        if not holds_tensors(module):
            return call(*args, **kwargs)
        args, kwargs = map_leaves(blank, args), map_leaves(blank, kwargs)
        key = (id(module), module.training, form_of((args, kwargs)))
        output = self._remembered.get(key)
        if output is None:
            with torch.no_grad():
                output = call(*args, **kwargs)
            if any(not isinstance(leaf, Tensor) or not leaf.is_meta for leaf in leaves(output)):
                return output  # holds what may be another the next time
            self._remembered[key] = output
        return map_leaves(torch.empty_like, output)


def _become(old: Tensor, new: Tensor, where: str) -> Tensor:
    """`old`, with all that `new` is, so that whatever holds `old` holds it too.

    Raises:
        StepError: torch cannot do that, for something beside Python variables holds `old`.
    """
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError as error:
        raise StepError(
            f"{where} cannot have the values that it begins with, for something else keeps what is passed there: a view of it, or a "
            "checkpoint around that module. Put checkpoints inside of modules, or split elsewhere"
        ) from error
    return old


def form_of(tree: Any) -> Any:
    """What two calls have in common that compute the same shapes: structure, shapes and dtypes, and values of what is no tensor."""
    if isinstance(tree, Tensor):
        return (tuple(tree.shape), tree.dtype, tree.is_meta)
    if isinstance(tree, Mapping):
        return (type(tree), *((key, form_of(value)) for key, value in tree.items()))
    if type(tree) in (list, tuple):
        return (type(tree), *map(form_of, tree))
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return (type(tree), tree)
    inner = list(leaves(tree))
    return (type(tree), *(() if len(inner) == 1 and inner[0] is tree else map(form_of, inner)))


# -- torch's stage, with transfers of our own ---------------------------------------------------------------------------


class Stage(_PipelineStageBase):
    """torch's stage, which sends and receives what crosses the cuts for each micro-batch, whatever its length.

    Tensors travel as bytes, for not every backend knows every dtype.
    """

    def __init__(self, forward: StageForward, world: World) -> None:
        super().__init__(forward, forward.index, forward.last + 1, world.device)
        self.batch: Any = None
        self._arriving: dict[int, list[Tensor]] = {}
        self._returning: dict[int, list[Tensor | None]] = {}
        self._whole: set[int] = set()  # micro-batches whose backward is not to be split

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

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        return super().forward_one_chunk(fwd_chunk_id, (), {"batch": self.batch, "chunk": fwd_chunk_id})

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not full_backward:
            # torch finds the parameters of a split backward on the way from the inputs to the output: there must be both, and one output.
            forms = self.batch.crossing(bwd_chunk_id, self.stage_index)
            outputs = [t for t in self.fwd_cache[bwd_chunk_id][0] if t.requires_grad]
            if not any(self.batch.returns(f) for _, f in forms) or (len(outputs) > 1 and not self.is_last):
                full_backward = True
                self._whole.add(bwd_chunk_id)
        super().backward_one_chunk(
            bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if bwd_chunk_id in self._whole:
            self._whole.remove(bwd_chunk_id)
        else:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        forms = self.batch.crossing(fwd_chunk_id, self.stage_index)
        arriving = [torch.empty(f.shape, dtype=f.dtype, device=self.device) for _, f in forms]
        self._arriving[fwd_chunk_id] = arriving
        return self._transfers(dist.irecv, arriving, -1)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        forms = self.batch.crossing(fwd_chunk_id, self.stage_index)
        arrived = self._arriving.pop(fwd_chunk_id)
        return tuple(t.requires_grad_(self.batch.returns(f)) for t, (_, f) in zip(arrived, forms))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return [] if self.is_last else self._transfers(dist.isend, self.fwd_cache[fwd_chunk_id][0], 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        forms = self.batch.crossing(bwd_chunk_id, self.stage_index + 1)
        self._returning[bwd_chunk_id] = [
            torch.empty(f.shape, dtype=f.dtype, device=self.device) if self.batch.returns(f) else None
            for _, f in forms
        ]
        return self._transfers(dist.irecv, self._returning[bwd_chunk_id], 1)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        return tuple(self._returning.pop(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        forms = self.batch.crossing(bwd_chunk_id, self.stage_index)
        grads = [
            torch.zeros(f.shape, dtype=f.dtype, device=self.device) if grad is None else grad
            for (_, f), grad in zip(forms, self.bwd_cache.pop(bwd_chunk_id))
            if self.batch.returns(f)
        ]
        return self._transfers(dist.isend, grads, -1)

    def _transfers(self, op: Any, tensors: Sequence[Tensor | None], step: int) -> list[dist.P2POp]:
        peer = (self.stage_index + step) % self.group_size
        return [dist.P2POp(op, _bytes(t), peer) for t in tensors if t is not None and t.numel()]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _start(transfers: list[dist.P2POp]) -> list[Any]:
    return dist.batch_isend_irecv(transfers) if transfers else []


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


# -- a batch -----------------------------------------------------------------------------------------------------------


class Seed(torch.autograd.Function):
    """A scalar whose backward gives each of `outputs` its gradient of `grads`."""

    @staticmethod
    def forward(ctx: Any, grads: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.grads = grads
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.grads


class Outputs(torch.autograd.Function):
    """Outputs of the last stage, on every rank, whose backward runs that of the stages."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, values: list[Tensor], batch: Batch) -> tuple[Tensor, ...]:
        ctx.batch = batch
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _once(ctx).backward(grads)
        return None, None, None


class ScheduledLoss(torch.autograd.Function):
    """The loss of a batch, whose backward runs forward and backward of all micro-batches in turns, and which has its value then."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, batch: Batch) -> Tensor:
        ctx.batch = batch
        loss = torch.ones_like(anchor)
        batch.loss = loss.detach()
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _once(ctx).run(grads[0])
        return None, None


def _once(ctx: Any) -> Batch:
    batch, ctx.batch = ctx.batch, None
    if batch is None:
        raise StepError(
            "a second backward through one forward of a pipelined model: its activations are gone. Call the model again"
        )
    found: Batch = batch
    return found


class Batch:
    """One batch on its way through the stages.

    Attributes:
        parts: the micro-batches, each args, kwargs and target.
        trains: whether gradients are wanted.
        loss: of the whole batch, where a schedule runs it.
    """

    def __init__(self, pipelined: Pipelined, args: Any, kwargs: Any, target: Any = None) -> None:
        self._pipelined = pipelined
        root, device = pipelined.root, pipelined.world.device
        self.parts = split((args, kwargs, target), pipelined.count)
        self.rows = [length(part) for part in self.parts]
        flags = tuple(p.requires_grad for p in root.parameters())
        self.trains = torch.is_grad_enabled() and any(flags)
        if self.trains and any(isinstance(t, Tensor) and t.requires_grad for t in leaves((args, kwargs))):
            raise StepError(
                "an input of a pipelined model requires a gradient, which only the first stage could compute: detach it"
            )
        autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        context = (root.training, flags, autocast, self.trains)
        self._key = int(torch.randint(1 << 62, (), device="cpu"))
        with own_stream(0, 0, device):  # a survey may draw numbers
            self._surveys = [pipelined.survey(*part[:2], context) for part in self.parts]
        self.loss: Any = None
        self._loss_fn: Callable[..., Any] | None = None
        self._summed = False
        self._total: Any = None
        self._factor: Any = None
        self._outputs: dict[int, Any] = {}
        self._stages: list[Stage] = []

    def crossing(self, chunk: int, stage: int) -> list[tuple[int, Tensor]]:
        """Position and form of each tensor that comes to `stage` from the one before."""
        names = self._pipelined.begins
        return self._surveys[chunk].crossing[names[stage - 1]] if 0 < stage <= len(names) else []

    def returns(self, form: Tensor) -> bool:
        """Whether a gradient comes back for what crosses in that form. Zero bubble needs them all, to find the parameters of a stage."""
        if not self.trains or not (form.is_floating_point() or form.is_complex()):
            return False
        return form.requires_grad or self._pipelined.schedule == "zero_bubble"

    def ended(self, chunk: int, outputs: Any) -> Any:
        """What the last stage makes of the model's output for a micro-batch: a loss to run backward on, or the tensors."""
        target = self.parts[chunk][2]
        if self._loss_fn is None:
            self._outputs[chunk] = outputs
            return tuple(leaf for leaf in leaves(outputs) if isinstance(leaf, Tensor))
        loss = self._loss_fn(outputs) if target is None else self._loss_fn(outputs, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise StepError(f"loss_fn returned a value of {what}: return one number, the mean over the batch")
        if not self._summed:
            loss = loss * (self.rows[chunk] / sum(self.rows))
        self._total += loss.detach().reshape(())
        return loss.reshape(()) * self._factor

    # -- by a schedule of torch's, forwards and backwards in turns ------------------------------------------------------

    def scheduled(self, loss_fn: Callable[..., Any], summed: bool) -> Tensor:
        """The loss, with its value once backward has run.

        Args:
            summed: micro-batches' losses are sums, and so is the batch's; else means.
        """
        self._loss_fn, self._summed = loss_fn, summed
        anchor = torch.zeros((), device=self._pipelined.world.device, requires_grad=self.trains)
        loss: Tensor = ScheduledLoss.apply(anchor, self)
        return loss

    def run(self, factor: Tensor) -> None:
        """All micro-batches, forward and backward; `factor` multiplies the loss."""
        there, count = self._pipelined, len(self.parts)
        self._factor, self._total = factor, torch.zeros((), device=there.world.device)
        schedule, stages = there.scheduled(count)
        for stage in stages:
            stage.take(self)

        def take_turns() -> None:
            schedule._step_microbatches([()] * count, [{}] * count, [None] * count, None)

        try:
            self._run("the stages of a pipeline", take_turns)
        except BaseException:
            there.forget_schedules()
            raise
        schedule._internal_losses.clear()
        self.loss.copy_(there.world.broadcast(self._total, there.last_rank))
        there.sum_shared()

    # -- forward, and backward later ------------------------------------------------------------------------------------

    def forward(self) -> list[Any]:
        """The outputs, one a micro-batch, on the rank with the last stage; nothing elsewhere."""
        self._stages = self._pipelined.make_stages()
        sends: list[Any] = []

        def all_forwards() -> None:
            for stage in self._stages:
                stage.take(self)
                for chunk in range(len(self.parts)):
                    _wait(_start(stage.get_fwd_recv_ops(chunk)))
                    stage.forward_one_chunk(chunk)
                    sends.extend(_start(stage.get_fwd_send_ops(chunk)))
            _wait(sends)

        self._run("the forward of a pipeline", all_forwards, torch.is_grad_enabled())
        return [self._outputs[chunk] for chunk in sorted(self._outputs)]

    def backward(self, grads: Sequence[Tensor]) -> None:
        """Gradients of this rank's parameters, from those of the outputs that require some."""
        there, (stage,) = self._pipelined, self._stages
        pieces = list(zip(*(grad.split(self.rows) for grad in grads)))
        sends: list[Any] = []

        def all_backwards() -> None:
            for chunk, piece in enumerate(pieces):
                _wait(_start(stage.get_bwd_recv_ops(chunk)))
                loss = None
                if stage.is_last:
                    outputs = [t for t in stage.fwd_cache[chunk][0] if t.requires_grad]
                    loss = Seed.apply(piece, *outputs)
                stage.backward_one_chunk(chunk, loss=loss, last_backward=chunk == len(pieces) - 1)
                sends.extend(_start(stage.get_bwd_send_ops(chunk)))
            _wait(sends)

        self._run("the backward of a pipeline", all_backwards)
        self._outputs.clear()
        self._stages = []
        there.sum_shared()

    def _run(self, what: str, work: Callable[[], None], grad: bool = True) -> None:
        """Do `work`, in which stages draw from streams of their own; errors are the user's, without torch's around them."""
        world = self._pipelined.world
        with (
            world.explained(what),
            own_stream(self._key, world.rank, world.device),
            torch.set_grad_enabled(grad),
        ):
            try:
                return work()
            except RuntimeError as error:
                cause = error.__cause__ if "ailed to run" in str(error) else None
                if not isinstance(cause, Exception):
                    raise
            raise cause  # here, so that it does not hold torch's frames, and by them connections


class Pipelined(nn.Module):
    """Calls the stages.

    Args:
        module: what is called: `root`, or `root` under autocast.
        root: the user's model.
        places: modules at which it may be cut, by name.
        schedule: a word of `CLASSES`.
        count: micro-batches of a batch.
        divide: called once, with a survey: cuts the model and keeps this rank's part.
    """

    def __init__(
        self,
        module: nn.Module,
        root: nn.Module,
        places: Mapping[str, nn.Module],
        world: World,
        schedule: str,
        count: int,
        divide: Callable[[Survey], tuple[Cuts, list[SharedParameter]]],
    ) -> None:
        super().__init__()
        self.module, self.root, self.world = module, root, world
        self.schedule, self._most = schedule, count
        self.sums = True  # whether backward sums the gradients of shared parameters
        self.cuts: Cuts | None = None
        self.shared: list[SharedParameter] = []
        self._places, self._divide = dict(places), divide
        self._surveys: dict[Any, Survey] = {}  # by form of micro-batch
        self._schedules: dict[int, tuple[Any, list[Stage]]] = {}  # by number of micro-batches

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        batch = Batch(self, args, kwargs)
        if batch.trains and self.schedule != "gpipe":
            raise RefusedError(
                f"the model was called to be trained under schedule={self.schedule!r}, which runs backwards between forwards and needs the "
                "loss function for it: use accelerator.forward_backward(model, loss_fn, inputs, target=...) in place of the call, the "
                "loss and backward(); or schedule='gpipe'"
            )
        self._check_outputs(batch)
        self._begin()
        outputs = batch.forward()
        tensors, tree = self._share(outputs, batch)
        wanted = [i for i, t in enumerate(tensors) if batch.trains and t.requires_grad]
        tensors = [t.detach() for t in tensors]
        if wanted:
            anchor = torch.zeros((), device=self.world.device, requires_grad=True)
            for i, tensor in zip(wanted, Outputs.apply(anchor, [tensors[i] for i in wanted], batch)):
                tensors[i] = tensor
        given = iter(tensors)
        return map_leaves(lambda leaf: next(given) if isinstance(leaf, Tensor) else leaf, tree)

    def loss(self, loss_fn: Callable[..., Any], args: Any, kwargs: Any, target: Any, summed: bool) -> Tensor:
        """The loss of a batch, which has its value once backward has run; see `Batch.scheduled`."""
        batch = Batch(self, args, kwargs, target)
        self._begin()
        return batch.scheduled(loss_fn, summed)

    def _begin(self) -> None:
        for shared in self.shared:
            shared.watch()

    def survey(self, args: Any, kwargs: Any, context: Any) -> Survey:
        """What crosses the cuts for a micro-batch of this form. The first one divides the model."""
        key = (context, form_of((args, kwargs)))
        if self.cuts is None:
            seen = self.world.gather_objects((str(form_of((args, kwargs))), self.root.training))
            if any(s != seen[0] for s in seen):
                raise WorldError(
                    f"the ranks call the model with different batches: {odd_one_out(seen)}. Under strategy 'pipeline' all see the same, "
                    "which prepared loaders take care of"
                )
        if key not in self._surveys:
            found = survey(self.root, self.module, self._places, args, kwargs, self.world.device)
            if self.cuts is None:
                self.cuts, self.shared = self._divide(found)
            missing = [name for name in self.begins if name not in found.crossing]
            if missing:
                raise StepError(
                    f"the forward does not call {missing[0]!r}, where a stage begins, for a batch of this form: strategy 'pipeline' needs "
                    "one course for all"
                )
            self._surveys[key] = found
        return self._surveys[key]

    @property
    def begins(self) -> tuple[str, ...]:
        return self.cuts.begins if self.cuts is not None else ()

    @property
    def last_rank(self) -> int:
        return len(self.begins) % self.world.size

    def count(self, rows: int) -> int:
        """Micro-batches for so many samples: as many as asked for, or the next lower number that the schedule can take."""
        count = min(self._most, rows)
        while not fits(self.schedule, count, self.world.size):
            count -= 1
        return count

    def make_stages(self) -> list[Stage]:
        assert self.cuts is not None
        mine = range(self.world.rank, len(self.begins) + 1, self.world.size)
        return [
            Stage(StageForward(self.module, self.root, self.cuts, self._places, i), self.world) for i in mine
        ]

    def scheduled(self, count: int) -> tuple[Any, list[Stage]]:
        """torch's schedule for so many micro-batches, and its stages. Fewer than ranks leave no turns to take: all forwards come first."""
        if count not in self._schedules:
            stages = self.make_stages()
            one, several = CLASSES[self.schedule if count >= self.world.size else "gpipe"]
            one = one if len(stages) == 1 else None
            kind = getattr(torch_schedules, one or str(several))
            made = kind(stages[0] if one else stages, count, loss_fn=lambda loss, _: loss, scale_grads=False)
            self._schedules[count] = made, stages
        return self._schedules[count]

    def forget_schedules(self) -> None:
        self._schedules.clear()

    def sum_shared(self) -> None:
        if self.sums and self.shared:
            with self.world.explained("gradients of shared parameters"), torch.no_grad():
                for shared in self.shared:
                    shared.sum()

    # -- outputs --------------------------------------------------------------------------------------------------------

    @staticmethod
    def _check_outputs(batch: Batch) -> None:
        for found, rows in zip(batch._surveys, batch.rows):
            for leaf in leaves(found.outputs):
                if isinstance(leaf, Tensor) and (not leaf.ndim or leaf.shape[0] != rows):
                    raise BatchError(
                        f"the model returns a tensor of shape {tuple(leaf.shape)} for {rows} samples: micro-batches can be put together "
                        "only along dimension 0. Return one value a sample, and reduce it outside (the loss, for example), or use "
                        "accelerator.forward_backward()"
                    )
                if not (leaf is None or isinstance(leaf, (Tensor, bool, int, float, str))):
                    raise BatchError(
                        f"the model returns a {type(leaf).__name__}, which cannot be put together from micro-batches: return tensors, "
                        "and lists, tuples or dicts of them"
                    )

    def _share(self, outputs: Sequence[Any], batch: Batch) -> tuple[list[Tensor], Any]:
        """The tensors of the whole batch's output on every rank, and the tree that holds them."""
        tree = batch._surveys[0].outputs
        forms = [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]
        if outputs:
            if any(
                form_of(map_leaves(_without_tensors, o)) != form_of(map_leaves(_without_tensors, tree))
                for o in outputs
            ):
                raise StepError(
                    "the model's output has another form than in a forward without values: strategy 'pipeline' needs shapes that follow "
                    "from the inputs' shapes"
                )
            whole = concatenate(outputs)
            tensors = [leaf.detach().contiguous() for leaf in leaves(whole) if isinstance(leaf, Tensor)]
        else:
            rows, device = sum(batch.rows), self.world.device
            tensors = [torch.empty((rows, *f.shape[1:]), dtype=f.dtype, device=device) for f in forms]
        with self.world.explained("the outputs of the last stage"):
            for tensor in tensors:
                if tensor.numel():
                    dist.broadcast(_bytes(tensor), self.last_rank)
        return [t.requires_grad_(f.requires_grad) for t, f in zip(tensors, forms, strict=True)], tree

    @contextmanager
    def summing(self, wanted: bool) -> Iterator[None]:
        before, self.sums = self.sums, wanted
        try:
            yield
        finally:
            self.sums = before


def _without_tensors(leaf: Any) -> Any:
    return "a tensor" if isinstance(leaf, Tensor) else leaf


def fits(schedule: str, count: int, ranks: int) -> bool:
    """Whether torch's schedule takes so many micro-batches on so many ranks; where it takes turns between rounds, rounds are equal."""
    turns = schedule in ("interleaved_1f1b", "zero_bubble")
    return not turns or count % max(1, count // ranks) == 0


def split(tree: Any, count: Callable[[int], int]) -> list[Any]:
    """`tree` in parts along dimension 0 of all tensors, `count` of the number of samples.

    Raises:
        BatchError: tensors of different lengths, or none.
    """
    tensors = [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor) and leaf.ndim]
    lengths = sorted({t.shape[0] for t in tensors})
    if len(lengths) != 1 or not lengths[0]:
        said = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise BatchError(
            f"strategy 'pipeline' cuts a batch into micro-batches along dimension 0, and the model was called with tensors of shapes "
            f"({said}): pass tensors with one row a sample; what is no part of the batch (a mask) goes into a buffer of the model"
        )
    number = count(lengths[0])
    rows, extra = divmod(lengths[0], number)
    parts, begin = [], 0
    for i in range(number):
        end = begin + rows + (i < extra)
        parts.append(slice_tensors(tree, slice(begin, end)))
        begin = end
    return parts


def length(part: Any) -> int:
    """Samples in a micro-batch."""
    return next(leaf.shape[0] for leaf in leaves(part) if isinstance(leaf, Tensor) and leaf.ndim)


@contextmanager
def own_stream(key: int, index: int, device: torch.device) -> Iterator[None]:
    """Inside, random numbers are those of stage `index`, f(key, index); the streams outside, alike on all ranks, stay where they are."""
    numpy = sys.modules.get("numpy")
    drawn = random.getstate(), numpy.random.get_state() if numpy else None, torch.get_rng_state()
    there = torch.get_device_module(device) if device.type != "cpu" else None
    on_device = there.get_rng_state() if there else None
    seed_all(mix(key, "stage", index))
    try:
        yield
    finally:
        random.setstate(drawn[0])
        if numpy:
            numpy.random.set_state(drawn[1])
        torch.set_rng_state(drawn[2])
        if there:
            there.set_rng_state(on_device)
