"""One update of the optimizers: its micro-steps, its items, and the phase of each optimizer.

Each Accelerator has one `UpdateWindow`. Loaders report when they are read and when they yield their last batch; `accumulate` begins
micro-steps; backward, clipping, the loss scale and the optimizers read and advance it. It does not know models or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import StepError
from .dtensor import local


class Phase(Enum):
    """Where an optimizer is in its update."""

    ACCUMULATING = "its gradients are as backward left them, times the loss scale where there is one"
    UNSCALED = "its gradients have been divided by the loss scale, in memory"
    CLIPPED = "its gradients have been measured; its step multiplies by the factor that clips and unscales"
    STEPPED = "it has stepped; the next backward begins the next update"


# Phase asked for → phase now → the call that came too early.
_TOO_EARLY = {
    Phase.UNSCALED: {
        Phase.UNSCALED: "unscale_ was called twice for this optimizer since its last update(): once is enough",
        Phase.CLIPPED: "unscale_ was called after a clip that unscales: once is enough",
        Phase.STEPPED: "unscale_ was called after step(): unscale before the step, or call update() first",
    },
    Phase.CLIPPED: {
        Phase.STEPPED: "gradients were clipped after step(): clip before the step, or call backward(loss) first"
    },
    Phase.STEPPED: {
        Phase.STEPPED: "step() was called twice for this optimizer without accelerator.backward(loss) in between: loss.backward() by "
        "itself does not count (with a scaler of your own, call update() after it)"
    },
}


@dataclass(eq=False, slots=True)
class Turn:
    """One optimizer's part in an update.

    Attributes:
        found_inf: above 0 if one of its gradients is not finite, on any rank; None while that is unknown, or after `Scaler.update`.
        skipped: above 0 if its last step was skipped; None before a first step under a loss scale.
        lent: the loss scale that its step is to divide by.
        clip: the factor of a clip that its step is to apply, and the gradients to which it applies.
        spent: its gradients have been stepped on, and not cleared since.
        waiting: the last call was a step before the end of the window.
        seen: backward passes before its last step, where a script counts micro-steps itself.
        spike: above 0 if `Accelerator.guard` leaves its step out; None: it has not judged this update.
        dropped: its next step is left out, and does not count as an update.
    """

    phase: Phase = Phase.ACCUMULATING
    found_inf: Tensor | None = None
    skipped: Tensor | None = None
    lent: Any = None
    clip: Any = None
    spent: bool = False
    waiting: bool = False
    seen: int = 0
    spike: Tensor | None = None
    dropped: bool = False

    def check(self, phase: Phase) -> None:
        """Raise StepError if the call that enters `phase` comes too early."""
        refusal = _TOO_EARLY[phase].get(self.phase)
        if refusal is not None:
            raise StepError(refusal)

    def enter(self, phase: Phase) -> None:
        """Enter `phase`, after `check`."""
        self.check(phase)
        self.phase = phase

    def begin(self) -> None:
        """Begin the next update; gradients are new, or add to existing ones."""
        self.phase, self.found_inf, self.lent = Phase.ACCUMULATING, None, None

    @property
    def moved(self) -> bool:
        """Whether the loss scale has been updated for its step."""
        return self.lent is not None and self.lent.moved


class UpdateWindow:
    """The micro-steps from one update to the next. A loader, here, is anything with an attribute `last`.

    Attributes:
        accumulation: micro-steps in a full window.
        micro: micro-steps begun in the current window.
        sync: whether the current micro-step ends its window, so that gradients are reduced and optimizers step.
        backwards: backward passes in the current micro-step; without `accumulate`, in the run.
        inside: whether an `accumulate` block is open.
        turns: optimizer → its part in this update.
        counts_items: whether a window of several micro-steps is being counted in items.
        items: items of the last counted window over all ranks, until a tracker reads them.
        end_with_loader: whether the last batch of the loader being read ends the window early.
        between: called at the end of the body of a training loop.
        stepped: called with a prepared optimizer after each of its updates.
        timing: while a profile is open, its `asks`, `has` and `over` are called when a loader is asked for a batch, has one, and ends.
        epochs: the running epoch of an ``accelerator.epochs(n)`` loop, and n; None before the first one.
        resuming: ids of loaders that a checkpoint left inside a pass: their next pass is the rest of it.
        went_on: whether one of them has continued since.
        full_passes: after a checkpoint at a loader's last batch the next pass is the next epoch, as in Accelerate, not an empty rest.
        loops: how often loops have begun, ended, or changed places.
        enclosing: the loader of the innermost loop.
        reading: the same, or without a loop the loader of an iterator that the script holds.
        outermost: the loader of the outermost loop, or of such an iterator.
    """

    def __init__(self, accumulation: int = 1, end_with_loader: bool = True) -> None:
        self.accumulation, self.end_with_loader = accumulation, end_with_loader
        self.turns: WeakKeyDictionary[Any, Turn] = WeakKeyDictionary()
        self.between: Callable[[], None] | None = None
        self.stepped: list[Callable[[Any], None]] = []
        self.timing: Any = None
        self.epochs: tuple[int, int] | None = None
        self.resuming: set[int] = set()
        self.went_on = self.full_passes = False
        self.loops = 0
        self.reset()

    def reset(self) -> None:
        """Forget the window and the loops: nothing has been trained yet."""
        self.micro = self.backwards = 0
        self.sync, self.inside, self.counts_items = True, False, False
        self.items: Tensor | None = None
        self.begin()
        self._reading: list[Any] = []  # loops inside of loops
        self._beside: list[Any] = []  # iterators that the script holds, and asks when it likes
        self._at_end = False
        self._look()

    # -- micro-steps

    def tick(self) -> bool:
        """Begin a micro-step; returns whether it ends its window."""
        self.micro = 1 if self.sync else self.micro + 1
        self.backwards = 0
        reading = self.reading
        self.sync = self.micro >= self.accumulation or bool(
            self.end_with_loader and reading is not None and reading.last
        )
        return self.sync

    def turn(self, optimizer: Any) -> Turn:
        """The part of `optimizer` in this update."""
        turn = self.turns.get(optimizer)
        if turn is None:
            turn = self.turns[optimizer] = Turn()
        return turn

    @property
    def begun(self) -> int:
        """Optimizers whose update is past backward."""
        return sum(turn.phase is not Phase.ACCUMULATING for turn in self.turns.values())

    def begin(self) -> None:
        """Begin the next update of all optimizers."""
        for turn in self.turns.values():
            turn.begin()

    def __getstate__(self) -> dict[str, Any]:
        here = ("turns", "stepped", "timing", "between")  # of this process
        return {name: value for name, value in self.__dict__.items() if name not in here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.__dict__.update(state)

    def end_by_hand(self, turn: Turn) -> None:
        """End a window by a script's own step: after a full window's micro-batches, or with the last batch of its loader."""
        done, turn.seen = self.backwards - turn.seen, self.backwards
        loader = self.reading
        last = self.end_with_loader and (self._at_end if loader is None else loader.last)
        if done < self.accumulation and not (done and last):
            raise StepError(
                f"optimizer.step() outside `with accelerator.accumulate(model):`, {done} of gradient_accumulation_steps="
                f"{self.accumulation} backward passes after the last step: it would step with a fraction of the gradient. Put forward, "
                "backward, step and zero_grad inside the block, or set gradient_accumulation_steps=1"
            )

    def keeps_gradients(self, turn: Turn) -> bool:
        """Whether gradients hold part of an unfinished window, so that `zero_grad` must keep them.

        Both idioms work: after `step`, and at the beginning of each micro-step, also after another optimizer's backward.
        """
        waiting, turn.waiting = turn.waiting, False
        if self.accumulation == 1 or turn.spent:
            return False
        begins = waiting or not self.backwards  # a micro-step; otherwise the call follows this one's step
        return bool((begins and self.micro > 1) or (self.backwards and not self.sync))

    def refuse_unprepared(
        self, owner: Mapping[int, str], stepped_by: Mapping[int, Any], optimizers: Sequence[Any]
    ) -> Callable[[], None]:
        """Refuse steps inside a window by unprepared optimizers of prepared parameters. Returns a function that ends this.

        They would step at each micro-batch, on a part of the gradient. torch calls the hook at every step of every optimizer.
        """

        def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if not self.inside or self.accumulation == 1:
                return
            if any(optimizer is known.optimizer or optimizer is known.given for known in optimizers):
                return  # also if it holds more than it did when it was prepared: groups are added
            held = (id(p) for group in optimizer.param_groups for p in group["params"])
            if any(p in owner and p not in stepped_by for p in held):
                raise StepError(
                    f"{type(optimizer).__name__} stepped inside accumulate() but was not prepared: it would step at each of the "
                    f"{self.accumulation} micro-batches. Pass it to prepare() and use what that returns"
                )

        return register_optimizer_step_pre_hook(check).remove

    # -- items

    def divide(self, loss: Tensor, items: int | Tensor, world: Any) -> Tensor:
        """Scale `loss`, a sum over `items` items (tokens, pixels) of this rank, for backward.

        With micro-batches m and ranks r the gradient of one big batch is Σ_m,r ∂loss_sum / Σ_m,r items; the average of the means is
        something else as soon as the counts differ. The divisor is known only when the window ends; until then the first micro-step's
        count stands in for it, so that numbers keep their usual size, and `finish_items` corrects the gradients by one factor.
        Gradients are averaged over the ranks, which is undone here, since counts are summed. Where several ranks see the same data,
        fewer are averaged and each item is counted several times: the one makes up for the other.
        """
        if self.inside and self.accumulation != 1 and self.backwards:
            raise StepError(
                "a second backward() with num_items in one micro-step: its items would be counted twice. Add the losses up and "
                "call backward() once"
            )
        if self.micro <= 1:
            self.counts_items = False  # of a window that was never finished
        tensor = isinstance(items, Tensor)
        counted = items.numel() == 1 if tensor else not isinstance(items, str)
        if not counted or ((not tensor or items.is_cpu) and not 0 <= float(items) < math.inf):
            shown = f"a tensor of shape {tuple(items.shape)}" if not counted and tensor else repr(items)
            raise StepError(
                f"backward() got {shown} as num_items: pass how many items the loss sums over, one number of at least 0, such as "
                "(labels != -100).sum()"
            )
        here = number(items, loss.device)
        if not self.counts_items:
            total = above_0(world.reduce(here))
            if self.sync and self.micro <= 1:
                self.items = total
                return loss * (world.size / total)
            self._stand_in = total * self.accumulation
            self._count = torch.zeros_like(here)
            self.counts_items = True
        self._count += here
        return loss * (world.size / self._stand_in)

    def finish_items(self, gradients: Iterable[Tensor], world: Any) -> None:
        """Correct the gradients of a window that has ended, after the last backward."""
        self.items = above_0(world.reduce(self._count))
        factor = self._stand_in / self.items
        grads = [local(g) for g in gradients]
        if grads:
            torch._foreach_mul_(grads, factor)
        self.counts_items = False

    # -- loaders

    def _look(self) -> None:
        """Update the attributes about loops. Loops change once a pass, and are read at every batch."""
        self.loops += 1
        self.enclosing: Any = self._reading[-1] if self._reading else None
        there = self._reading or self._beside or [None]
        self.reading: Any = there[-1]
        self.outermost: Any = there[0]

    def enter(self, loader: Any, beside: bool = False) -> None:
        """Note that a pass over `loader` begins; with `beside`, next to the innermost loop and not inside it."""
        (self._beside if beside else self._reading).append(loader)
        self._at_end = False
        self._look()

    def asks(self, loader: Any) -> None:
        """Note that `loader` is asked for a batch. Open loaders that began after it are read beside it, and not in its body."""
        nest = self._reading
        if any(one is loader for one in nest):
            while nest[-1] is not loader:
                self._beside.append(nest.pop())
            self._look()

    def hold(self, epoch: int, count: int) -> None:
        """Note that `epoch` of ``epochs(count)`` begins. No loop is open then, so the script holds the open iterators."""
        self.epochs = epoch, count
        self._beside[:0] = self._reading
        self._reading.clear()
        self._look()

    def leave(self, loader: Any) -> None:
        """Note that the pass over `loader` ended, or was left early."""
        for there in (self._reading, self._beside):
            for i in range(len(there) - 1, -1, -1):
                if there[i] is loader:
                    del there[i]
                    self._at_end = loader.last
                    self._look()
                    return


class MicroStep:
    """Begin a micro-step, and keep its gradients to this rank by `no_sync` unless it ends the window; with `alone`, also then."""

    __slots__ = ("_alone", "_modules", "_no_sync", "_open", "_window")

    def __init__(
        self,
        window: UpdateWindow,
        no_sync: Callable[[Any], AbstractContextManager[Any]],
        modules: Sequence[Any],
        alone: bool = False,
    ) -> None:
        self._window, self._no_sync, self._modules, self._alone = window, no_sync, modules, alone
        self._open: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        self._window.inside = True
        if not self._window.tick() or self._alone:
            for module in self._modules:
                quiet = self._no_sync(module)
                quiet.__enter__()
                self._open.append(quiet)

    def __exit__(self, *error: Any) -> None:
        self._window.inside = False
        while self._open:
            self._open.pop().__exit__(*error)


def above_0(total: Tensor) -> Tensor:
    """`total`, or 1 where nothing was counted, as a divisor; weights of items may add up to less than 1."""
    return torch.where(total == 0, 1.0, total)


def number(value: float | Tensor, device: torch.device) -> Tensor:
    """`value` as an fp32 tensor on `device`, written by a kernel, since a copy from the host would wait for the device."""
    if isinstance(value, Tensor) and (value.numel() != 1 or value.device.type != "cpu"):
        return value.to(device, torch.float32)
    shape = value.shape if isinstance(value, Tensor) else ()
    return torch.full(shape, float(value), dtype=torch.float32, device=device)
