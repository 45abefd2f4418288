"""Spikes: updates whose gradient norm or loss lies far above that of the last updates. `Accelerator.guard` judges and answers them.

Of the last values x, with m their median and d = 1.4826 · median(|x - m|), a spike is x > m + factor · d, or x that is not finite. d is the
median absolute deviation, scaled to the standard deviation of normal numbers (Hampel, "The Influence Curve and Its Role in Robust
Estimation", 1974). Mean and standard deviation, as OLMo 2 takes them (arXiv:2501.00656, its SkipStepOptimizer), would grow with the spikes
themselves, and one NaN among the values would hide all others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..base.accumulation import Phase
from ..base.dtensor import local
from ..data import PreparedLoader
from ..errors import RefusedError, SettingError, StepError
from ..logging import get_logger
from ..options import check_word
from ..trackers.rows import Pending, Row

if TYPE_CHECKING:
    from ..optim.optimizer import PreparedOptimizer
    from ..precision import Scaler
    from .prepare import Preparation
    from .state import Run

logger = get_logger(__name__)
GuardPolicy = Literal["skip", "rollback"]
WHAT = ("gradient norm", "loss")
NORMAL = 1.4826  # the standard deviation of normal numbers in units of their median absolute deviation
TOGETHER = 32  # updates whose numbers go to the host in one transfer
SHOWN = 8  # indices of samples in a line of the log; the table has all
RETURNS = 3  # to one checkpoint, before an error
COLUMNS = ("update", "answer", *WHAT, *(f"{what} limit" for what in WHAT), "epoch", "begin", "end", "samples")


class Samples(NamedTuple):
    """The samples of an update: places `begin` to `end` in the order of an epoch, over all ranks."""

    loader: Callable[[], PreparedLoader | None]
    epoch: int
    begin: int
    end: int


class History:
    """The last gradient norms and losses, on the device: float32 [2, window]. Infinite where a number was not finite."""

    def __init__(self, window: int, device: torch.device) -> None:
        self.values = torch.zeros(2, window, device=device)
        self.seen = 0

    def judge(self, now: Tensor, factor: float, scaled: bool) -> Tensor:
        """Compare `now` [2] with the former values, and add it to them.

        Returns float32 [5]: above 0 if it is a spike, `now`, and the limits, which are infinite in the first half of the window and where
        most former values are equal. With `scaled`, numbers that are not finite are left to the loss scale.
        """
        window = self.values.shape[1]
        limit = torch.full_like(now, torch.inf)
        if self.seen >= window // 2:
            former = self.values[:, : self.seen]
            middle = former.median(1, keepdim=True).values
            spread = NORMAL * (former - middle).abs().median(1).values
            limit = torch.where(spread > 0, middle[:, 0] + factor * spread, limit)
        over = (now > limit) & now.isfinite() if scaled else (now > limit) | ~now.isfinite()
        self.values[:, self.seen % window] = now.nan_to_num(torch.inf, torch.inf, -torch.inf)
        self.seen += 1
        return torch.cat([over.any().float()[None], now, limit])


class Guard:
    """The histories of one run, and the report of its spikes. A part of checkpoints, once it is used.

    Args:
        table: logs a row of `COLUMNS` at a step.
    """

    def __init__(self, run: Run, scaler: Scaler, table: Callable[[Sequence[Any], int], None]) -> None:
        self._run, self._scaler, self._table = run, scaler, table
        self._histories: dict[str, History] = {}  # by the optimizers that are judged together
        self._loaded: dict[str, Any] = {}
        self._losses: dict[str, list[Tensor]] = {}  # of the micro-steps of this window, by the same
        self._read = Samples(lambda: None, 0, 0, 0)  # by the last update
        self._pending, self._about = Pending(), dict[int, tuple[Row, Samples | None]]()
        self._returned: tuple[str, int] = "", 0

    @property
    def used(self) -> bool:
        return bool(self._histories or self._loaded)

    def choose(
        self, prepared: Preparation, optimizer: torch.optim.Optimizer | None, policy: str
    ) -> tuple[str, list[PreparedOptimizer]]:
        """The optimizers whose update is judged, and the key of their history. Raises where it cannot be judged."""
        chosen, key = prepared.optimizers, "all"
        if optimizer is not None:
            chosen = [one for one in chosen if optimizer in (one, one.given)]
            key = str(prepared.optimizers.index(chosen[0])) if chosen else ""
        if not chosen or any(one.turn.spike is not None or one.turn.phase is Phase.STEPPED for one in chosen):
            raise StepError(
                "guard() judges the update of a prepared optimizer, once: call it after backward() and clip_grad_norm_(), before step()"
            )
        if not self._scaler.agree:
            raise StepError(
                "guard() inside join_uneven_inputs, where ranks that are done cannot agree: leave one of them out"
            )
        if policy == "skip" and getattr(prepared.strategy.options, "remembers", False):
            raise RefusedError(
                "guard(policy='skip') with a comm_hook that remembers what it did not send, and so what was skipped: use another comm_hook"
            )
        return key, chosen

    def add(self, key: str, loss: Tensor, policy: str, window: int, factor: float) -> None:
        """Look at the arguments of a call, and keep the loss."""
        check_word("policy", policy, get_args(GuardPolicy))
        if type(window) is not int or window < 4 or not factor > 0:
            raise SettingError(
                f"guard(window={window!r}, factor={factor!r}): window is a whole number of updates, 4 or more, and factor a number above 0"
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise StepError(
                "guard() takes the loss of this micro-batch as a tensor with one number, as backward() does"
            )
        self._losses.setdefault(key, []).append(local(loss.detach()).float().reshape(()))

    def judge(self, key: str, norms: Sequence[Tensor], window: int, factor: float) -> Tensor:
        """Judge the update that ends the window; the result of `History.judge`, the same on all ranks."""
        world = self._run.world
        losses = self._losses.pop(key)
        norm = torch.stack([local(n.detach()).float().reshape(()) for n in norms]).norm()
        mean = torch.stack(losses).mean()
        now = torch.stack([number.to(world.device, non_blocking=True) for number in (norm, mean)])
        history = self._histories.get(key)
        if history is None:
            history = self._histories[key] = History(window, world.device)
            saved = self._loaded.pop(key, None)
            if saved is not None and len(saved["values"][0]) == window:
                history.seen = saved["seen"]
                history.values.copy_(torch.tensor(saved["values"]))
        if history.values.shape[1] != window:
            raise SettingError(
                f"guard(window={window}) after window={history.values.shape[1]}: pass the same at each call"
            )
        return history.judge(world.reduce(now, "mean"), factor, self._scaler.scales)

    # -- the report

    def samples(self) -> Samples | None:
        """Where the samples of this update stand; None if they do not come from a prepared loader."""
        window, before = self._run.window, self._read
        loader = window.reading
        if not isinstance(loader, PreparedLoader):
            return None
        begin, goes_on = before.end, before.loader() is loader and before.epoch == loader.epoch
        if goes_on and begin == loader.position:  # another optimizer's part of the same update
            return before
        if not goes_on or begin > loader.position:
            micro_steps = window.micro if window.accumulation != 1 else 1
            begin = max(0, loader.position - micro_steps * (loader.total_batch_size or loader.position))
        self._read = Samples(weakref.ref(loader), loader.epoch, begin, loader.position)
        return self._read

    def note(self, step: int, judged: Tensor) -> None:
        """Report `judged` once its numbers have arrived from the device, if it is a spike."""
        samples = self.samples()
        if judged.device.type == "cpu":
            self.report(step, judged.tolist(), samples)
            return
        row = Row(step, 0.0, {"judged": judged})
        self._about[id(row)] = row, samples
        self._pending.add(row)
        if len(self._pending) >= TOGETHER:
            self._pending.send()
        self.finish(wait=False)

    def finish(self, wait: bool = True) -> None:
        """Report what has arrived; with `wait`, all."""
        if wait:
            self._pending.send()
        for row in self._pending.arrived(wait):
            self.report(row.step, row.values["judged"], self._about.pop(id(row))[1])

    def report(self, step: int, judged: list[float], samples: Samples | None, place: str = "") -> None:
        """Log a spike, with its samples, on the main process."""
        spike, *numbers = judged
        if not spike or self._run.world.rank:
            return
        answer = f"gone back to {place}, without the batches since then" if place else "skipped on all ranks"
        over = [
            f"the {what} is {value:.4g}" + (f", above {limit:.4g}" if limit != torch.inf else "")
            for what, value, limit in zip(WHAT, numbers, numbers[2:])
            if not value <= limit or value == torch.inf
        ]
        loader = None if samples is None else samples.loader()
        indices = None if loader is None else loader.indices(*samples[1:])  # type: ignore[index]
        where = (
            "" if samples is None else f" Samples {samples.begin} to {samples.end} of epoch {samples.epoch}"
        )
        where += (
            "" if indices is None else f": {_listed(indices[:SHOWN])}{' …' if len(indices) > SHOWN else ''}"
        )
        logger.warning("update %d: %s; %s.%s", step, " and ".join(over), answer, where)
        row = (step, "rollback" if place else "skip", *numbers, *(samples[1:] if samples else (None,) * 3))
        self._table([*row, None if indices is None else _listed(indices)], step)

    # -- going back

    def goes_back(self, place: str) -> None:
        """Count the returns to a checkpoint, and forget all values: those of the checkpoint are loaded next.

        Raises:
            StepError: there were `RETURNS` to the same one.
        """
        last, count = self._returned
        if place == last and count == RETURNS:
            raise StepError(
                f"guard(policy='rollback') has gone back to {place} {RETURNS} times, and there is a spike again: it does not come from a "
                "few batches. Look at the learning rate, or go on from an older checkpoint by load_state(path)"
            )
        self._returned = place, count + 1 if place == last else 1
        self.load_state_dict({})

    def state_dict(self) -> dict[str, Any]:
        live = {key: {"seen": h.seen, "values": h.values.tolist()} for key, h in self._histories.items()}
        return {**self._loaded, **live}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._histories.clear()
        self._loaded = dict(state)


def drop(optimizers: Sequence[PreparedOptimizer]) -> None:
    """Leave out the next step of `optimizers`, which does not count as an update: their gradients are of weights that are gone."""
    for optimizer in optimizers:
        optimizer.leave(None)
        optimizer.turn.begin()
        optimizer.turn.dropped = True


def _listed(indices: Sequence[Any]) -> str:
    return ", ".join(map(str, indices))
