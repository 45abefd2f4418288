"""One update of the optimizers: its micro-steps, its items, and the phase of each optimizer; and how many are made.

Loaders report when they are read and when they yield their last batch; `accumulate` begins micro-steps; backward,
clipping, the loss scale and the optimizers read and advance the window. It does not know models or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..errors import StepError
from .dtensor import local
from .parts import Parts


class Phase(Enum):
    """Where an optimizer is in its update."""

    ACCUMULATING = "its gradients are as backward left them, times the loss scale where there is one"
    UNSCALED = "its gradients have been divided by the loss scale, in memory"
    CLIPPED = "its gradients have been measured; its step multiplies by the factor that clips and unscales"
    STEPPED = "it has stepped; the next backward begins the next update"


# The phase to enter, the phase now → the call that came too early.
_TOO_EARLY = {
    ("UNSCALED", "UNSCALED"): "unscale_ was called twice for this optimizer since its last update(): once is enough",
    ("UNSCALED", "CLIPPED"): "unscale_ was called after a clip that unscales: once is enough",
    ("UNSCALED", "STEPPED"): "unscale_ was called after step(): unscale before the step, or call update() first",
    ("CLIPPED", "STEPPED"): "gradients were clipped after step(): clip before the step, or call backward(loss) first",
    ("STEPPED", "STEPPED"): "step() was called twice for this optimizer without accelerator.backward(loss) in between: "
    "loss.backward() by itself does not count (with a scaler of your own, call update() after it)",
}


@dataclass(eq=False, slots=True)
class Turn:
    """One optimizer's part in an update."""

    phase: Phase = Phase.ACCUMULATING
    found_inf: Tensor | None = None  # above 0 if a gradient is not finite, on any rank; None while that is unknown
    skipped: Tensor | None = None  # above 0 if the last step was skipped; None before a first step under a loss scale
    clip: Any = None  # the factor of a clip that the step applies, and the gradients to which it applies
    spent: bool = False  # a step has used the gradients, which were not cleared since
    waiting: bool = False  # the last call was a step before the end of the window
    backwards: int = 0  # backward passes before the last step, where a script counts micro-steps itself

    def check(self, phase: Phase) -> None:
        """Raise StepError if the call that enters `phase` comes too early."""
        refusal = None if self.phase is Phase.ACCUMULATING else _TOO_EARLY.get((phase.name, self.phase.name))
        if refusal is not None:
            raise StepError(refusal)

    def enter(self, phase: Phase) -> None:
        """Enter `phase`, after `check`."""
        self.check(phase)
        self.phase = phase

    def begin(self) -> None:
        """Begin the next update. Gradients in memory may be kept and added to."""
        self.phase, self.found_inf = Phase.ACCUMULATING, None


class UpdateWindow:
    """The micro-steps from one update to the next. A loader, here, is anything with an attribute `last`.

    A copy or a pickle begins anew.
    """

    def __init__(self, accumulation: int = 1, end_with_loader: bool = True, parts: Parts | None = None) -> None:
        self.accumulation = accumulation  # micro-steps in a full window
        self.end_with_loader = end_with_loader  # whether the last batch of the loader being read ends the window early
        self.parts = Parts() if parts is None else parts  # of the run, which hear of the loop
        # Raises where a call does not go together with something that is in force; set by a run.
        self.refuse: Callable[..., None] = lambda *words: None
        self.ranks_differ = False  # whether ranks may differ in parameters and in updates, as inside `no_sync`
        self.joining = False  # whether ranks may be out of batches, and so take no part in a step
        self.turns: WeakKeyDictionary[Any, Turn] = WeakKeyDictionary()  # optimizer → its part in this update
        self.epochs: tuple[int, int] | None = None  # the running epoch of ``accelerator.epochs(n)``, and n
        self.resuming: set[int] = set()  # ids of loaders that a checkpoint left in a pass: the next one is its rest
        self.went_on = False  # whether one of them has continued since
        # After a checkpoint at a loader's last batch the next pass is the next epoch, as in Accelerate, no empty rest.
        self.full_passes = False
        self.reset()

    def __reduce__(self) -> Any:
        return UpdateWindow, (self.accumulation, self.end_with_loader)

    def reset(self) -> None:
        """Forget the window and the loops: nothing has been trained yet."""
        self.micro = 0  # micro-steps begun in the current window
        self.backwards = 0  # backward passes in the current micro-step; without `accumulate`, in the run
        self.sync = True  # whether the current micro-step ends its window: gradients are reduced, optimizers step
        self.in_accumulate = False  # whether an `accumulate` block is open
        self.counts_items = False  # whether a window of several micro-steps is being counted in items
        self.items: Tensor | None = None  # of the last counted window over all ranks, until a tracker reads them
        self.begin()
        self._loops: list[Any] = []  # loaders of nested loops
        self._iterators: list[Any] = []  # loaders of iterators that the script holds, and asks when it likes
        self._at_end = False
        self._update_loaders()

    # -- micro-steps

    def tick(self) -> bool:
        """Begin a micro-step; returns whether it ends its window."""
        self.micro = 1 if self.sync else self.micro + 1
        self.backwards = 0
        loader = self.reading
        self.sync = self.micro >= self.accumulation or bool(self.end_with_loader and loader is not None and loader.last)
        return self.sync

    def turn(self, optimizer: Any) -> Turn:
        """The part of `optimizer` in this update."""
        turn = self.turns.get(optimizer)
        if turn is None:
            turn = self.turns[optimizer] = Turn()
        return turn

    def begin(self) -> None:
        """Begin the next update of all optimizers."""
        for turn in self.turns.values():
            turn.begin()

    def ends_at_step(self, turn: Turn) -> bool:
        """Whether a step now ends a window of several micro-steps; else the optimizer waits for the one that does."""
        if self.in_accumulate:
            turn.waiting = not self.sync
            return self.sync
        count, turn.backwards = self.backwards - turn.backwards, self.backwards
        loader = self.reading
        at_last_batch = self.end_with_loader and (self._at_end if loader is None else loader.last)
        if count < self.accumulation and not (count and at_last_batch):
            raise StepError(
                f"optimizer.step() outside `with accelerator.accumulate(model):`, {count} of "
                f"gradient_accumulation_steps={self.accumulation} backward passes after the last step: it would step "
                "with a fraction of the gradient. Put forward, backward, step and zero_grad inside the block, or set "
                "gradient_accumulation_steps=1"
            )
        return True

    def keeps_gradients(self, turn: Turn) -> bool:
        """Whether gradients hold part of an unfinished window of several micro-steps, so that `zero_grad` keeps them.

        Scripts call it after `step`, or at the beginning of each micro-step, also after another optimizer's backward.
        """
        waiting, turn.waiting = turn.waiting, False
        if turn.spent:
            return False
        begins = waiting or not self.backwards  # a micro-step; otherwise the call follows this one's step
        return bool((begins and self.micro > 1) or (self.backwards and not self.sync))

    # -- items

    def starting_gradient(
        self, loss: Tensor, gradient: Tensor | None, num_items: int | Tensor | None, world: Any
    ) -> Tensor:
        """The gradient that backward starts from: `gradient`, or 1, times the part of the loss in its window.

        A mean is divided by the micro-steps, a sum by all items. Dividing the loss itself costs an operator in forward
        and one in backward.
        """
        start = torch.ones_like(loss) if gradient is None else gradient
        if num_items is None and self.packed:
            num_items = self._items_of_batch()
            start = start if num_items is None else start * num_items
        if num_items is not None:
            factor: Tensor = self._share_of_items(_to_count(num_items, loss.device), world)
            return start * factor
        if self.accumulation == 1:
            return start
        if self.counts_items:
            raise StepError(
                "backward() without num_items in a window that began with it: pass it for every micro-batch, or for "
                "none"
            )
        return start / self.accumulation

    def _items_of_batch(self) -> Any:
        """The number of items of the packed batch that the loop has; None where its collate function gives none."""
        if len(self._loops) + len(self._iterators) > 1:
            raise StepError(
                "backward() of a mean while several loaders are read, one of which packs by tokens=: pass the sum of "
                "the losses and its num_items, since the loss may be of any of their batches"
            )
        if self.reading.reads > 1:
            raise StepError(
                f"backward() of a mean after {self.reading.reads} batches of a loader that packs by tokens=, each with "
                "its own number of items: pass the sum of the losses and the batch's num_items, since the loss may be "
                "of any of them"
            )
        self.reading.reads = 0
        return self.reading.items

    def _share_of_items(self, items: Tensor, world: Any) -> Any:
        """The factor for a loss that is a sum over `items` items (tokens, pixels) of this rank.

        With micro-batches m and ranks r the gradient of one big batch is Σ_m,r ∂loss_sum / Σ_m,r items. The divisor is
        known only when the window ends; until then the first micro-step's count stands in for it, so that numbers keep
        their usual size, and `finish_items` corrects the gradients by one factor. Gradients are averaged over the
        ranks, which is undone here, since counts are summed. Where several ranks see the same data, fewer are averaged
        and each item is counted several times: the one makes up for the other.
        """
        if self.joining and world.size > 1:
            self.refuse("backward(num_items=...)", "join_uneven_inputs()")
        if self.accumulation != 1 and not self.in_accumulate:
            raise StepError(
                "backward() with a number of items outside of `with accelerator.accumulate(model):`, under "
                f"gradient_accumulation_steps={self.accumulation}: where a window begins is not known, so that its "
                "items cannot be counted. Put forward, backward, step and zero_grad inside the block"
            )
        if self.accumulation != 1 and self.backwards:
            self.refuse("backward(num_items=...)", "a second backward() in one micro-step")
        if self.micro <= 1:
            self.counts_items = False  # of a window that was never finished
        if not self.counts_items:
            total = _sum_over_ranks(items, world)
            if self.sync and self.micro <= 1:
                self.items = total
                return world.size / total
            self._stand_in = total * self.accumulation
            self._count = torch.zeros_like(items)
            self.counts_items = True
        self._count += items
        return world.size / self._stand_in

    def finish_items(self, gradients: Iterable[Tensor], world: Any) -> None:
        """Correct the gradients of a window that has ended, after the last backward."""
        self.items = _sum_over_ranks(self._count, world)
        factor = self._stand_in / self.items
        grads = [local(g) for g in gradients]
        if grads:
            torch._foreach_mul_(grads, factor)
        self.counts_items = False

    # -- loaders

    def _update_loaders(self) -> None:
        """Update the attributes about loops, which change once a pass and are read at every batch."""
        self.enclosing: Any = self._loops[-1] if self._loops else None  # of the innermost loop
        loaders = self._loops or self._iterators or [None]
        self.reading: Any = loaders[-1]  # the same, or without a loop that of an iterator which the script holds
        self.outermost: Any = loaders[0]
        # Whether batches hold unequal numbers of items, since an open loader packs samples by tokens.
        self.packed = any(getattr(loader, "tokens", None) for loader in (*self._loops, *self._iterators))

    def begin_pass(self, loader: Any, as_iterator: bool = False) -> None:
        """Note that a pass over `loader` begins; with `as_iterator`, beside the open loops, not inside them."""
        (self._iterators if as_iterator else self._loops).append(loader)
        self._at_end = False
        self._update_loaders()

    def request_batch(self, loader: Any) -> None:
        """Note that `loader` is asked for a batch: open loaders that began after it are not read in its body."""
        if any(open_loader is loader for open_loader in self._loops):
            while self._loops[-1] is not loader:
                self._iterators.append(self._loops.pop())
            self._update_loaders()

    def begin_epoch(self, epoch: int, count: int) -> None:
        """Note that `epoch` of ``epochs(count)`` begins. No loop is open then, so the script holds open iterators."""
        self.epochs = epoch, count
        self._iterators[:0] = self._loops
        self._loops.clear()
        self._update_loaders()

    def end_pass(self, loader: Any) -> None:
        """Note that the pass over `loader` ended, or was left early."""
        for loaders in (self._loops, self._iterators):
            for i in range(len(loaders) - 1, -1, -1):
                if loaders[i] is loader:
                    del loaders[i]
                    self._at_end = loader.last
                    self._update_loaders()
                    return


class MicroStep:
    """Begin a micro-step, under `no_sync` unless it ends the window; with `never_syncs`, also then."""

    __slots__ = ("_contexts", "_modules", "_never_syncs", "_no_sync", "_window")

    def __init__(
        self,
        window: UpdateWindow,
        no_sync: Callable[[Any], AbstractContextManager[Any]] = nullcontext,
        modules: Sequence[Any] = (),
        never_syncs: bool = False,
    ) -> None:
        self._window, self._no_sync, self._modules, self._never_syncs = window, no_sync, modules, never_syncs
        self._contexts: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        self._window.in_accumulate = True
        if not self._window.tick() or self._never_syncs:
            for module in self._modules:
                context = self._no_sync(module)
                context.__enter__()
                self._contexts.append(context)

    def __exit__(self, *error: Any) -> None:
        self._window.in_accumulate = False
        while self._contexts:
            self._contexts.pop().__exit__(*error)


class Position(NamedTuple):
    """Updates made, and in all (None: unknown), of the run or (`of_run` is False) of the epoch."""

    updates: int
    total: int | None
    of_run: bool


class Progress:
    """Counts updates, and samples of all ranks; `samples` is None once an update read no prepared loader.

    Attributes:
        epoch: of the loader that the last counted update read; None without one.
    """

    def __init__(self, window: UpdateWindow) -> None:
        self._window = window
        self.updates = 0
        self.samples: int | None = 0
        self.epoch: int | None = None
        self._loader: Any = None
        self._sample_position = 0  # of the loader at the last update
        self._updates_before = 0  # this pass, as far as this process has made them
        self._total: int | None = None  # updates of the run, once known

    def count(self, updates: int) -> bool:
        """Raise the count to `updates`, the number of one optimizer. Returns False if the count was there already."""
        if updates <= self.updates:
            return False
        self.updates, loader = updates, self._window.reading
        if loader is None:
            self.samples = self.epoch = self._loader = None
            return True
        if loader is not self._loader or loader.epoch != self.epoch:
            self._add_samples()  # the end of the pass before
            self._loader, self.epoch = loader, loader.epoch
            self._sample_position, self._updates_before = 0, updates - 1
        self._add_samples()
        return True

    def finish(self, updates: int) -> None:
        """Count the end of the run, after its last update, number `updates`."""
        self.updates = updates
        self._add_samples()

    def position(self, updates: int) -> Position:
        """The position after `updates`, as far as ``accelerator.epochs(n)`` and the loader's length tell."""
        loader, accumulation, epochs = self._loader, self._window.accumulation, self._window.epochs
        length = None
        with suppress(TypeError):  # no loader, or one without a length
            length = -(-len(loader) // accumulation)
        if length is not None:
            updates_in_pass = updates - self._updates_before
            if loader.total_batch_size:  # also after a resume inside a pass
                batches = -(-self._loader_position() // loader.total_batch_size)
                updates_in_pass = -(-batches // accumulation)
            if epochs is None:
                return Position(updates_in_pass, length, of_run=False)
            epoch, count = epochs
            self._total = updates - updates_in_pass + length * (count - epoch)
        return Position(updates, self._total if self._total and self._total >= updates else None, of_run=True)

    def _loader_position(self) -> int:
        """The samples of the pass; after its end, all of them."""
        loader = self._loader
        if loader.epoch == self.epoch and loader.position:
            return int(loader.position)
        return loader.ended[1] if loader.ended and loader.ended[0] == self.epoch else self._sample_position

    def _add_samples(self) -> None:
        if self._loader is not None:
            before, self._sample_position = self._sample_position, self._loader_position()
            if self.samples is not None:
                self.samples += self._sample_position - before


def _sum_over_ranks(items: Tensor, world: Any) -> Tensor:
    """The number of items as a divisor: 1 where there are none. Weights of items may add up to less than 1."""
    total: Tensor = world.reduce(items)
    return torch.where(total == 0, 1.0, total)


def _to_count(num_items: Any, device: torch.device) -> Tensor:
    """`num_items` as an fp32 tensor on `device`, by a kernel, since a copy from the host would wait for the device."""
    shape = tuple(num_items.shape) if isinstance(num_items, Tensor) else ()
    is_one_number = math.prod(shape) == 1 and not isinstance(num_items, str)
    if is_one_number and isinstance(num_items, Tensor) and not num_items.is_cpu:
        return num_items.to(device, torch.float32)
    if not is_one_number or not 0 <= float(num_items) < math.inf:
        description = repr(num_items) if math.prod(shape) == 1 else f"a tensor of shape {shape}"
        raise StepError(
            f"backward() got {description} as num_items: pass how many items the loss sums over, one number of at "
            "least 0, such as (labels != -100).sum()"
        )
    return torch.full(shape, float(num_items), dtype=torch.float32, device=device)
