"""Spikes: updates whose gradient norm or loss lies far above that of the last updates.

Of the last values x, with m their median and d = 1.4826 · median(|x - m|), a spike is x > m + factor · d, or x that is
not finite. d is the median absolute deviation, scaled to the standard deviation of normal numbers (Hampel, "The
Influence Curve and Its Role in Robust Estimation", 1974). Mean and standard deviation, as OLMo 2 takes them
(arXiv:2501.00656, its SkipStepOptimizer), would grow with the spikes themselves, and one NaN among the values would
hide all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..base.dtensor import local
from ..base.parts import Part
from ..data import Samples, SampleTracker
from ..errors import SettingError, StepError, check_whole
from ..logging import get_logger
from ..optim.torch_step import parameters_of
from ..options import check_word
from ..protocols import Conflict
from ..trackers.rows import Pending, Row

logger = get_logger(__name__)
GuardPolicy = Literal["skip", "rollback"]
QUANTITIES = ("gradient norm", "loss")
LEAST = 32  # values of a window: half of them tell a spike from an update that is only large
FEW = 32  # former values; with fewer a spike is at least twice their median
NORMAL = 1.4826  # the standard deviation of normal numbers in units of their median absolute deviation
TRANSFER = 32  # updates whose numbers go to the host in one transfer
LOG_INDICES = 8  # indices of samples in a line of the log; the table has all
MAX_RETURNS = 3  # to one checkpoint, before an error
LEAVE_OUT = "Leave one of them out"
COLUMNS = (
    "update", "answer", *QUANTITIES, *(f"{quantity} limit" for quantity in QUANTITIES),
    "epoch", "begin", "end", "samples",
)  # fmt: skip


class History:
    """The last gradient norms and losses, on the device: float32 [2, window], infinite where one was not finite."""

    def __init__(self, window: int, device: torch.device) -> None:
        self.values = torch.zeros(2, window, device=device)
        self.count = 0

    def judge(self, current: Tensor, factor: float, scaled: bool) -> Tensor:
        """Compare `current` [2] with the former values, and add it to them.

        Returns float32 [5]: 1 for a spike, else 0; `current`; its two limits. A limit is infinite in the first half of
        the window, and where most former values are equal. Numbers that are not finite are spikes, unless `scaled`
        (the loss scale answers to them).
        """
        window = self.values.shape[1]
        limit = torch.full_like(current, torch.inf)
        if self.count >= window // 2:
            former = self.values[:, : self.count]
            median = former.median(1, keepdim=True).values
            deviation = NORMAL * (former - median).abs().median(1).values
            margin = factor * deviation
            if min(self.count, window) < FEW:  # whose deviation is often far too small
                margin = torch.maximum(margin, median[:, 0].abs())
            limit = torch.where(deviation > 0, median[:, 0] + margin, limit)
        spikes = (current > limit) & current.isfinite() if scaled else (current > limit) | ~current.isfinite()
        self.values[:, self.count % window] = current.nan_to_num(torch.inf, torch.inf, -torch.inf)
        self.count += 1
        return torch.cat([spikes.any().float()[None], current, limit])


class SpikeGuard(Part):
    """Leaves out updates whose gradient norm or loss is a spike: ``Accelerator(parts=[SpikeGuard()])``.

    The norm is that of `clip_grad_norm_` before the clip; gradients without a clip are measured. The loss is the mean
    over the losses that `backward` got since the last update. Both are averaged over the ranks, so that all ranks
    decide alike. With m the median of the last `window` values and d = 1.4826 · median(|x - m|), a value x is a spike
    if x > m + factor · d, or if it is not finite (without a loss scale, which sees to these). With fewer than 32 values
    it also has to be above 2 · m. Until there are ``window // 2`` values, only values that are not finite count. Spikes
    are among the values: a lasting rise is accepted after half a window. Checkpoints keep the values.

    Each spike is a warning and a row of the table "spikes" (see `log_table`): update, norm, loss, limits, and the
    samples' epoch, positions and, of prepared loaders with a known order, indices.

    Args:
        policy: "skip": the step changes nothing on any rank, schedulers do not step, and `optimizer_step_was_skipped`
            is true; optimizers that run fused do not wait for the device. "rollback": load the checkpoint that this run
            saved or loaded last, and go on with the next batch, bit for bit as a run that was never given the batches
            since then. Work of once an epoch since then is undone, too. It waits for the device in each update. Without
            a checkpoint the update is skipped.
        window: number of former updates, at least 32.
        factor: how far above the median a spike begins.
        each_optimizer: judge the updates of each optimizer by themselves, as of a GAN with two; False: those of all
            together.

    Raises:
        SettingError: a wrong policy, window or factor.
        RefusedError: with `optimizer_in_backward`, `join_uneven_inputs` or closures.
        StepError: `optimizer.step` without a loss from `backward`; a fourth return to one checkpoint.
        CheckpointError: the checkpoint cannot be loaded.

    Example:
        >>> acc = Accelerator(cpu=True, log_with="none", seed=0, parts=[easymp.SpikeGuard(window=32)])
        >>> model, optimizer = acc.prepare(model, optimizer)
        >>> for i in range(20):
        ...     loss = model(torch.rand(4, 2) * (1000 if i == 18 else 1)).square().mean()
        ...     acc.backward(loss)
        ...     norm = acc.clip_grad_norm_(model.parameters(), 1.0)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     if acc.optimizer_step_was_skipped:
        ...         print(i)
        18
    """

    name = "guard"
    vetoes_nonfinite = True
    conflicts = (
        Conflict("guard", "join_uneven_inputs()", "ranks that are done cannot agree on a spike", LEAVE_OUT),
        Conflict("guard", "step(closure)", "the closure replaces the gradients that were judged", LEAVE_OUT),
    )

    def __init__(
        self, policy: GuardPolicy = "skip", window: int = 128, factor: float = 10.0, each_optimizer: bool = False
    ) -> None:
        check_word("policy", policy, get_args(GuardPolicy))
        check_whole(f"SpikeGuard(window={window!r})", window, LEAST)
        if not factor > 0:
            raise SettingError(f"SpikeGuard(factor={factor!r}): pass a number above 0")
        self._policy, self._window, self._factor, self._each_optimizer = policy, window, factor, each_optimizer
        self._histories: dict[str, History] = {}  # by the optimizers that are judged together
        self._loaded: dict[str, Any] = {}
        self._losses: list[Tensor] = []  # of the update: since the last backward that follows a step
        self._stepped = False  # whether a step has followed the last backward
        self._norm_of: dict[int, Tensor] = {}  # id of a parameter → the first norm that has its gradient in it
        # On all optimizers together, since the last backward; True: a checkpoint was loaded instead of the update.
        self._verdict: Tensor | bool | None = None
        self._pending = Pending()
        self._samples_of_row: dict[int, tuple[Row, Samples | None]] = {}
        self._returns: tuple[str, int] = "", 0  # the last checkpoint that was returned to, and how often

    def begin(self) -> None:
        self._tracker = SampleTracker(self.run.window)

    # -- events of an update

    def loss(self, loss: Tensor, num_items: Any = None) -> None:
        if self._stepped:
            self._losses.clear()
            self._stepped = False
        mean = local(loss.detach()).float().sum()
        self._losses.append(mean if num_items is None else mean / num_items)
        self._norm_of.clear()
        self._verdict = None

    def norm(self, norm: Tensor, parameters: Sequence[Tensor]) -> None:
        self._norm_of = {id(parameter): norm for parameter in parameters} | self._norm_of

    def step(self, optimizer: Any) -> Tensor | bool:
        self._stepped = True
        if not self._each_optimizer and self._verdict is not None:
            return self._verdict
        if not self._losses:
            raise StepError(
                "SpikeGuard judges the loss of an update, and backward() got none since the last step: call "
                "accelerator.backward(loss) before each optimizer.step()"
            )
        optimizers = self.run.prepared.optimizers
        key, judged_optimizers = "all", optimizers
        if self._each_optimizer:
            key, judged_optimizers = str(optimizers.index(optimizer)), [optimizer]
        judged, update = self._judge(key, judged_optimizers), optimizer.updates + 1
        self._verdict = judged[0]
        samples = self._tracker.samples()
        if self._policy == "rollback" and judged[0]:
            checkpoint = self._go_back()
            if checkpoint is not None:
                self._verdict = True
                self._report(update, judged.tolist(), samples, checkpoint)
                return True
        self._note(update, judged, samples)
        return judged[0]

    def _judge(self, key: str, optimizers: Sequence[Any]) -> Tensor:
        """Judge the update of `optimizers`; the result of `History.judge`, the same on all ranks."""
        world = self.run.world
        parameters = [p for optimizer in optimizers for p in parameters_of(optimizer)]
        # Chosen by what is the same on all ranks, since a norm of shards is a collective.
        unmeasured = [p for p in parameters if p.requires_grad and id(p) not in self._norm_of]
        if unmeasured:
            self.accelerator.clip_grad_norm_(unmeasured, float("inf"))
        norms = {id(norm): norm for p in parameters if (norm := self._norm_of.get(id(p))) is not None}
        norm = torch.stack([local(n.detach()).float().reshape(()) for n in norms.values()]).norm()
        mean = torch.stack([loss.to(world.device, non_blocking=True) for loss in self._losses]).mean()
        current = torch.stack([norm.to(world.device, non_blocking=True), mean])
        history = self._histories.get(key)
        if history is None:
            history = self._histories[key] = History(self._window, world.device)
            saved = self._loaded.pop(key, None)
            if saved is not None and len(saved["values"][0]) == self._window:
                history.count = saved["seen"]
                history.values.copy_(torch.tensor(saved["values"]))
        return history.judge(world.reduce(current, "mean"), self._factor, self.run.scaler.scales)

    def _go_back(self) -> str | None:
        """Load this run's last checkpoint, except for the place in the data; returns its folder, if there is one."""
        place: str | None = self.accelerator._last_checkpoint()
        if place is None:
            return None
        last, count = self._returns
        if place == last and count == MAX_RETURNS:
            raise StepError(
                f"SpikeGuard(policy='rollback') has gone back to {place} {MAX_RETURNS} times, and there is a spike "
                "again: it does not come from a few batches. Look at the learning rate, or go on from an older "
                "checkpoint by load_state(path)"
            )
        self._returns = place, count + 1 if place == last else 1
        self._forget()
        self.accelerator._load_last_checkpoint()
        self.run.window.begin()
        return place

    # -- the report

    def _note(self, update: int, judged: Tensor, samples: Samples | None) -> None:
        """Report `judged` once its numbers have arrived from the device, if it is a spike."""
        if judged.device.type == "cpu":
            self._report(update, judged.tolist(), samples)
            return
        row = Row(update, 0.0, {"judged": judged})
        self._samples_of_row[id(row)] = row, samples
        self._pending.add(row)
        if len(self._pending) >= TRANSFER:
            self._pending.send()
        self._report_arrived(wait=False)

    def _report_arrived(self, wait: bool) -> None:
        for row in self._pending.arrived(wait):
            self._report(row.step, row.values["judged"], self._samples_of_row.pop(id(row))[1])

    def _report(self, update: int, judged: list[float], samples: Samples | None, checkpoint: str = "") -> None:
        """Log a spike, with its samples, on the main process."""
        spike, *numbers = judged
        if not spike or self.run.world.rank:
            return
        answer = f"gone back to {checkpoint}, without the batches since then" if checkpoint else "skipped on all ranks"
        exceeded = [
            f"the {quantity} is {value:.4g}" + (f", above {limit:.4g}" if limit != torch.inf else "")
            for quantity, value, limit in zip(QUANTITIES, numbers, numbers[2:])
            if not value <= limit or value == torch.inf
        ]
        loader = None if samples is None else samples.loader()
        indices = None if loader is None or samples is None else loader.indices(*samples[1:])
        message = f"{' and '.join(exceeded)}; {answer}."
        if samples is not None:
            message += f" Samples {samples.begin} to {samples.end} of epoch {samples.epoch}"
        if indices is not None:
            message += f": {', '.join(map(str, indices[:LOG_INDICES]))}{' …' if len(indices) > LOG_INDICES else ''}"
        logger.warning("update %d: %s", update, message)
        positions = samples[1:] if samples else (None, None, None)
        index_text = None if indices is None else ", ".join(map(str, indices))
        row = (update, "rollback" if checkpoint else "skip", *numbers, *positions, index_text)
        self.accelerator.log_table("spikes", COLUMNS, [row], update)

    def close(self) -> None:
        self._pending.send()
        self._report_arrived(wait=True)

    def released(self) -> None:
        self._forget()

    # -- the state

    def state(self) -> dict[str, Any] | None:
        live = {key: {"seen": h.count, "values": h.values.tolist()} for key, h in self._histories.items()}
        return {**self._loaded, **live} or None

    def load(self, state: Mapping[str, Any]) -> None:
        self._forget()
        self._loaded = dict(state)

    def _forget(self) -> None:
        self._histories.clear()
        self._loaded.clear()
        self._losses.clear()
        self._verdict = None
