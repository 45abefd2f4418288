"""One pipeline stage: torch's stage, around the part of the user's own forward that belongs to it.

No model is traced, so train and eval, changing shapes, keyword arguments and any Python in a forward stay as they are. Every rank calls
the whole model. Before the stage, modules return blank tensors of the right shape instead of running. At the module where the stage
begins, blank arguments become the tensors received from the stage before. Where the next stage begins, the forward is left, and the
arguments of that module are sent to the next stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..base.pytree import leaves, map_leaves
from ..distributed import World
from ..errors import EasympError, StepError
from .pipeline_cuts import Blanks, Cuts, Survey, call_of, intercepted, replayed


@dataclass
class Batch:
    """One batch in micro-batches.

    Attributes:
        parts: the micro-batches, each args, kwargs and target.
        rows: samples of each.
        surveys: of each.
        begins: names of the modules at whose first call stages begin.
        trains: whether gradients are wanted.
        returns_all: gradients come back for all floating-point tensors: zero bubble needs them to find the parameters of a stage.
        seed: of the stages' random numbers.
        loss_fn: called by the last stage; None: the outputs are kept.
        summed: losses of micro-batches are sums, and so is the batch's; else means.
        factor: multiplies the loss before backward.
        total: the batch's loss, on the last stage's rank.
        outputs: micro-batch → the model's output, on the last stage's rank.
        error: what a stage of this rank raised. It is kept until all ranks have finished the batch, so that none waits in vain.
    """

    parts: list[Any]
    rows: list[int]
    surveys: list[Survey]
    begins: tuple[str, ...]
    trains: bool
    returns_all: bool
    seed: int
    loss_fn: Callable[..., Any] | None = None
    summed: bool = False
    factor: Any = None
    total: Any = None
    outputs: dict[int, Any] = field(default_factory=dict)
    error: Exception | None = None

    def crossing(self, chunk: int, stage: int) -> list[tuple[int, Tensor]]:
        """Position and form of each tensor that `stage` receives from the one before."""
        if not 0 < stage <= len(self.begins):
            return []
        return self.surveys[chunk].crossing[self.begins[stage - 1]]

    def returns(self, form: Tensor) -> bool:
        """Whether a gradient comes back for a tensor of that form."""
        floating = form.is_floating_point() or form.is_complex()
        return self.trains and floating and (form.requires_grad or self.returns_all)

    def ended(self, chunk: int, outputs: Any) -> Any:
        """The output of the last stage's submodule: a loss to run backward on, or the tensors of the model's output."""
        if self.loss_fn is None:
            self.outputs[chunk] = outputs
            return tuple(leaf for leaf in leaves(outputs) if isinstance(leaf, Tensor))
        target = self.parts[chunk][2]
        loss = self.loss_fn(outputs) if target is None else self.loss_fn(outputs, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise StepError(f"loss_fn returned a value of {what}: return one number, the mean over the batch")
        if not self.summed:
            loss = loss * (self.rows[chunk] / sum(self.rows))
        self.total += loss.detach().reshape(())
        return loss.reshape(()) * self.factor


class Departure(BaseException):
    """Leaves the model's forward where the next stage begins. A BaseException passes through the model's own ``except Exception``."""

    def __init__(self, values: Any) -> None:
        super().__init__()
        self.values = values


class StageForward(nn.Module):
    """Calls the part of a model that is one stage; the submodule of torch's stage.

    Args:
        module: `root`, or `root` under autocast.
        root: the user's model.
        cuts: where the stages begin, and what they use.
        places: all intercepted modules, by name.
        index: the stage.
    """

    def __init__(
        self, module: nn.Module, root: nn.Module, cuts: Cuts, places: Mapping[str, nn.Module], index: int
    ) -> None:
        super().__init__()
        self.index, self.last, self.names = index, len(cuts.begins), cuts.begins
        self._module = (module,)  # a tuple, so that it is not registered
        self._own = tuple(p for name, p in root.named_parameters() if index in cuts.users[name])
        self._everything = frozenset(id(t) for t in (*root.parameters(), *root.buffers()))
        skip = replayed(places)
        self._calls = {m: self._intercept(name, call_of(m), name in skip) for name, m in places.items()}
        self.now: tuple[Batch, int] | None = None  # the batch and the number of its micro-batch
        self._blanks: Blanks | None = None
        self._at = 0  # the stage that the running forward has reached
        self._received: Sequence[Tensor] = ()
        self._positions: Sequence[int] = ()
        self._results: Iterator[tuple[str, Any]] = iter(())

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(self._own)

    @property
    def where(self) -> str:
        begins = f"begins at {self.names[self.index - 1]!r}" if self.index else "is the first"
        return f"stage {self.index} of {self.last + 1} ({begins})"

    def forward(self, *received: Tensor) -> Any:
        """The micro-batch `now`: the tensors for the next stage, or what the batch makes of the model's output."""
        assert self.now is not None
        batch, chunk = self.now
        if batch.error is None:
            try:
                return self._stage(received, batch, chunk)
            except Exception as error:
                # One rank alone is out of memory: its retry (`find_executable_batch_size`) ends the others' wait.
                if batch.loss_fn is None or isinstance(error, MemoryError) or "memory" in str(error).lower():
                    raise
                batch.error = error
        # Zeros that depend on what was received, because a split backward of torch 2.8 looks for a way there.
        zero = torch.zeros((), device=batch.factor.device, requires_grad=True)
        zero = sum((t.abs().sum() * 0 for t in received if t.requires_grad), zero)
        if self.index == self.last:
            return zero
        forms = [f for _, f in batch.crossing(chunk, self.index + 1)]
        return tuple(
            zero.to(f.dtype).expand(f.shape).clone()
            if batch.returns(f)
            else torch.zeros(f.shape, dtype=f.dtype, device=zero.device)
            for f in forms
        )

    def _stage(self, received: Sequence[Tensor], batch: Batch, chunk: int) -> Any:
        self._received = [t.clone() if t.requires_grad else t for t in received]  # a model may write to them
        self._positions = [i for i, _ in batch.crossing(chunk, self.index)]
        self._results = iter(batch.surveys[chunk].results)
        try:
            ended, result = self._run(*batch.parts[chunk][:2])
        finally:
            self._received, self._results = (), iter(())
        if ended:
            return batch.ended(chunk, result)
        tensors = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        sent = []
        for i, expected in batch.crossing(chunk, self.index + 1):
            tensor = tensors[i] if i < len(tensors) else None
            if tensor is None or tensor.shape != expected.shape or tensor.dtype != expected.dtype:
                got = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
                raise StepError(
                    f"{self.where} passes on {got}, and a forward without values passed on {tuple(expected.shape)} {expected.dtype}: "
                    "strategy 'pipeline' needs shapes that follow from the inputs' shapes"
                )
            # torch cuts the graph at these tensors in place, which views and leaves do not allow.
            sent.append(tensor.clone() if tensor._is_view() or tensor.is_leaf else tensor)
        return tuple(sent)

    def _run(self, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Whether the forward ended in this stage, and the model's output; else the arguments for the next stage."""
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

    def _intercept(self, name: str, call: Callable[..., Any], replay: bool) -> Callable[..., Any]:
        def through(*args: Any, **kwargs: Any) -> Any:
            if self._at < self.last and name == self.names[self._at]:
                self._at += 1
                if self._at == self.index:
                    args, kwargs = self._begin((args, kwargs))
                elif self._at > self.index:
                    raise Departure((args, kwargs))
            return self._replay(name) if replay and self._at < self.index else call(*args, **kwargs)

        return through

    def _replay(self, name: str) -> Any:
        """The output of a module of an earlier stage, blank."""
        called, output = next(self._results, ("nothing", None))
        if called != name:
            raise StepError(
                f"the forward calls {name!r} in {self.where}, where a forward without values called {called!r}: strategy 'pipeline' "
                "needs a course that follows from the inputs' shapes"
            )
        return map_leaves(
            lambda leaf: torch.empty_like(leaf) if isinstance(leaf, Tensor) and leaf.is_meta else leaf, output
        )

    def _begin(self, values: Any) -> Any:
        """`values`, the arguments with which the stage begins, with the received tensors in place."""
        if _get_current_dispatch_mode() is self._blanks:  # else a mode of the model's lies above: ours stays
            self._leave_blanks()
        torch.clear_autocast_cache()  # it may hold blank copies of parameters that this stage shares with an earlier one
        tensors = [leaf for leaf in leaves(values) if isinstance(leaf, Tensor)]
        if any(t.is_meta for i, t in enumerate(tensors) if i not in self._positions):
            raise StepError(
                f"{self.where} begins with a tensor that a forward without values did not pass there: strategy 'pipeline' needs a course "
                "that follows from the inputs' shapes"
            )
        if any(t.requires_grad for t in self._received) and not torch.is_grad_enabled():
            raise StepError(
                "a stage begins inside no_grad, but what is computed before needs gradients: split elsewhere (a checkpoint needs "
                "use_reentrant=False)"
            )
        for i, new in zip(self._positions, self._received, strict=True):
            try:
                torch.utils.swap_tensors(tensors[i], new)  # so that the model's other references have it, too
            except RuntimeError as error:
                raise StepError(
                    f"{self.where} cannot have the values that it begins with, for something else keeps what is passed there: a view of "
                    "it, or a checkpoint around that module. Put checkpoints inside of modules, or split elsewhere"
                ) from error
        return values


class Stage(_PipelineStageBase):
    """torch's stage, with transfers of any number of tensors of any length.

    Tensors travel as bytes, for not every backend knows every dtype.
    """

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
        self.submod.now = (
            self.batch,
            fwd_chunk_id,
        )  # torch before 2.13 takes all arguments for inputs of backward
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
        super().backward_one_chunk(
            bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
        )

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
