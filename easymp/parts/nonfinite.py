"""Losses and gradient norms that are not finite: reported once, with their place; skipped; or raised on all ranks.

Reports do not synchronise with the device: the numbers of several steps are copied to the host together, and read when
they have arrived. To skip, gradients are checked before each step, as under a loss scale (by a `Scaler` with scale 1
where there is none). To raise, losses are checked, too. The first module with such numbers is found by hooks: in a
second forward with the same arguments, or, where steps are skipped, in the next update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..base.dtensor import local
from ..base.parts import Part
from ..base.rng import isolated, put_random_state, random_state
from ..errors import NonfiniteError
from ..logging import get_logger
from ..trackers.rows import Pending, Row
from ..training.search import ModuleSearch, finite, on_copies

if TYPE_CHECKING:
    from ..settings import Settings
    from ..training.wrapper import Route

logger = get_logger(__name__)

TRANSFER = 32  # numbers that go to the host in one transfer
LOSS, NORM, GRADIENTS = "the loss", "the gradient norm", "the gradients"
CONSEQUENCE = (
    "The step is taken, and the weights will not be finite either: nonfinite='skip' leaves such steps out, "
    "nonfinite='raise' makes them an error, and finds the first module with such numbers"
)
SKIPPED = "Steps with such gradients are skipped on all ranks; optimizer_step_was_skipped says so"


class Call(NamedTuple):
    """The last call of a model that trains, to be made again."""

    method: str  # called in place of forward; "" for forward
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    random_state: Any  # before the call; None: not kept


class Nonfinite(Part):
    """Answers to losses and gradients that are not finite."""

    name = "nonfinite"

    def __init__(self, answer: str | None) -> None:
        self._raises, self.needs_views = answer == "raise", answer is not None
        self._pending = Pending()
        self._reported = False
        self._since: int | None = None  # the update from which on no loss of this rank was finite
        self._bad_loss = False  # a loss of this rank was not finite since the last step, where that is raised
        self._calls: dict[int, Call] = {}  # by id of a model's route, until its optimizer has stepped
        self._failed_calls: dict[int, Call] = {}  # those before a loss that was not finite
        self._error: NonfiniteError | None = None  # of gradients that were looked at before the step
        self._stepping = False
        self._search: ModuleSearch | None = None  # in the next update
        self._steps = 0

    @classmethod
    def wanted(cls, settings: Settings) -> Nonfinite:
        return cls(settings.nonfinite)

    def begin(self) -> None:
        skipped = self.run.scaler.enabled or any(part.vetoes_nonfinite for part in self.run.parts.all)
        self._consequence = SKIPPED if skipped else CONSEQUENCE
        if not self._raises:
            self.run.parts.end(self, "step")
            if self.run.world.device.type != "cpu":
                self.run.parts.end(self, "forward")  # numbers are known too late to call the model again

    @property
    def _update(self) -> int:
        """The number of the running update, from 1."""
        optimizers = self.run.prepared.optimizers
        return 1 + (optimizers[0].updates if optimizers else 0)

    # -- events

    def forward(self, model: Route, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # To a warning, the time that a copy of the random state takes is not worth it.
        state = random_state(self.run.world.device) if self._raises else None
        self._calls[id(model)] = Call(model.method, args, kwargs, state)

    def loss(self, loss: Tensor, num_items: Any = None) -> None:
        if self._raises:
            if not self._bad_loss and not bool(local(loss.detach()).isfinite().all()):
                self._bad_loss, self._failed_calls = True, dict(self._calls)
        elif loss.is_cpu and loss.ndim == 0 and math.isfinite(loss.item()):
            self._since = None
        else:
            self._note(LOSS, local(loss.detach()))

    def norm(self, norm: Tensor, parameters: Sequence[Tensor]) -> None:
        # Under a loss scale, an overflow is how the scale is found.
        if self._reported or self._raises or self.run.scaler.scales:
            return
        if not (norm.is_cpu and math.isfinite(norm.item())):
            self._note(NORM, local(norm.detach()))

    def verdict(self, optimizer: Any, found_inf: Tensor) -> None:
        scaler = self.run.scaler
        if self._search is not None and self._search.calls:
            self._end_search()
        if self._raises:
            self._error = self._judge_update(found_inf)
            if self._stepping and self._error is not None:
                self._raise()
        elif not self._reported:
            self._steps += 1
            if not scaler.scales:
                self._note(GRADIENTS, found_inf)
            elif found_inf.device.type == "cpu" or self._steps % TRANSFER == 0:
                # With a loss scale, an overflow is reported only once the scale is down at 1.
                self._note(GRADIENTS, found_inf * (scaler.current_scale <= 1))

    def step(self, optimizer: Any) -> None:
        if self._error is not None:
            self._raise()
        self._stepping = True

    def stepped(self, optimizer: Any) -> None:
        self._stepping = False
        self._calls.clear()

    def loaded(self, path: str) -> None:
        """Forget losses that no step has followed: the load has replaced the state."""
        self._bad_loss, self._error = False, None
        self._calls.clear()

    def close(self) -> None:
        """Report numbers that are still being copied, and a last loss that is not finite."""
        self._end_search()
        self._pending.send()
        self._read_arrived(wait=True)
        if self._since is not None and self._is_first_rank("nonfinite-end"):
            remedy = (
                "Steps with such gradients were skipped: look at the data and the learning rate"
                if self.run.scaler.enabled
                else "Load a checkpoint from before it; nonfinite='raise' ends a run there"
            )
            self._warn(
                self._update - 1,
                f"the run ends with a loss that is not finite, and no loss has been finite since update {self._since}. "
                f"{remedy}",
            )

    # -- reports

    def _is_first_rank(self, event: str) -> bool:
        """Whether no other rank has reported `event`: averaging spreads one rank's number to all ranks a step later."""
        world = self.run.world
        return world.size == 1 or bool(world.store().add(event, 1) == 1)

    def _note(self, name: str, value: Tensor) -> None:
        value, step = value.sum() if value.ndim else value, self._update
        if value.device.type == "cpu":
            self._judge(name, value.item(), step, now=True)
            return
        self._pending.add(Row(step, 0.0, {name: value}))
        if len(self._pending) >= TRANSFER:
            self._pending.send()
        self._read_arrived()

    def _read_arrived(self, wait: bool = False) -> None:
        for row in self._pending.arrived(wait):
            for name, value in row.values.items():
                self._judge(name, value, row.step)

    def _judge(self, name: str, value: float, step: int, now: bool = False) -> None:
        if name is LOSS:
            self._since = None if math.isfinite(value) else self._since or step
        if self._reported or (value == 0 if name is GRADIENTS else math.isfinite(value)):
            return
        self._reported = True
        module = self._run_again(self._calls) if now and name is LOSS else ""
        if self.run.scaler.enabled and not module:
            self._search = ModuleSearch(self.run.prepared.models)
        if self._is_first_rank("nonfinite"):
            fact = f"{name} is {value}" if name is not GRADIENTS else f"{name} are not finite"
            self._warn(step, f"{fact} ({self._circumstances()}). {module}{self._consequence}")

    def _warn(self, step: int, message: str) -> None:
        logger.warning("rank %d, step %d: %s", self.run.world.rank, step, message, main_process_only=False)

    def _circumstances(self) -> str:
        scaler = self.run.scaler
        scale = f"loss scale {float(scaler.current_scale):g}" if scaler.scales else "no loss scale"
        return f"precision {self.run.precision.name}, {scale}"

    def _judge_update(self, found_inf: Tensor) -> NonfiniteError | None:
        """The error of an update with a loss or gradients that are not finite, before a clip; a collective."""
        scaler, world = self.run.scaler, self.run.world
        together = not self.run.window.joining
        any_bad_loss = world.any(self._bad_loss) if together else self._bad_loss
        if not any_bad_loss and not found_inf.item():
            return None
        bad_loss, self._bad_loss = self._bad_loss, False
        bad_by_rank = world.gather_objects(bad_loss) if together else [bad_loss]
        if scaler.scales and not any(bad_by_rank) and scaler.current_scale > 1:
            return None  # the scale is being found
        ranks = [str(rank) for rank, bad in enumerate(bad_by_rank) if bad]
        fact = f"{LOSS} is not finite on rank {', '.join(ranks)}" if ranks else f"{GRADIENTS} are not finite"
        if ranks:
            module = self._run_again(self._failed_calls or self._calls, together)
            modules = world.gather_objects(module if bad_loss else "") if together else [module]
            cause = next(filter(None, modules), "")
        else:
            cause = self._gradient_cause(together)
        self._calls.clear()
        self._failed_calls.clear()
        return NonfiniteError(
            f"step {self._update}: {fact} ({self._circumstances()}). {cause}No weights have changed in this step. Look "
            "at the data and the learning rate, or use nonfinite='skip' to leave such steps out"
        )

    def _raise(self) -> None:
        error, self._error, self._stepping = self._error, None, False
        assert error is not None
        raise error

    # -- the first module

    def _run_again(self, calls: Mapping[int, Call], together: bool = False) -> str:
        """Run the forward of `calls` under hooks; returns a sentence. Spread layers need all ranks `together`."""
        world, prepared = self.run.world, self.run.prepared
        strategy, device = prepared.strategy, world.device
        spread = strategy.sharded or strategy.splits_layers or bool(prepared.converted)
        if "forward_methods" in self.run.refused or (spread and not together):
            return ""
        called = [id(route) in calls for route in prepared.models]
        if spread:
            called = [all(flags) for flags in zip(*world.gather_objects(called))]
        if not any(called):
            return ""
        search, state_before, same_numbers = ModuleSearch(prepared.models), random_state(device), True
        try:
            with isolated(), torch.no_grad():
                for route in [route for route, was_called in zip(prepared.models, called) if was_called]:
                    call = calls[id(route)]
                    same_numbers &= call.random_state is not None
                    if call.random_state is not None:
                        put_random_state(device, call.random_state)
                    module = route.module if spread else self.run.precision.forward(route.original, device)
                    with on_copies(route.original), route.instead(call.method) if call.method else nullcontext():
                        module(*call.args, **call.kwargs)
        except Exception as error:  # of a model that cannot run twice: the report itself is what counts
            return f"A second forward, to find the module, failed ({type(error).__name__}: {error}). "
        finally:
            put_random_state(device, state_before)
            search.end()
        if search.result:
            return f"First not finite: {search.result}. "
        if same_numbers:
            return "The outputs of the model are finite, so the loss function is the place. "
        return "A second forward, with other random numbers, is finite. "

    def _gradient_cause(self, together: bool) -> str:
        """Name the parameter with such a gradient where backward came first. A collective, unless ranks may be done."""
        masters, world = self.run.prepared.masters, self.run.world
        parameters = [pair for route in self.run.prepared.models for pair in route.original.named_parameters()]
        flags = []
        for _, parameter in parameters:
            holders = [holder for holder in (parameter, masters.get(id(parameter))) if holder is not None]
            flags.append(any(holder.grad is not None and not finite(holder.grad) for holder in holders))
        if together:
            flags = world.reduce(torch.tensor(flags, device=world.device).float(), "max").tolist()
        names = [name for (name, _), flag in zip(parameters, flags) if flag]
        if not names:
            return ""
        return (
            f"{len(names)} of {len(parameters)} parameters have such gradients; the last of them in the model, where "
            f"backward came first, is {names[-1]!r}. "
        )

    def _end_search(self) -> None:
        search, self._search = self._search, None
        if search is not None:
            search.end()
            if search.result:
                self._warn(self._update, f"first not finite: {search.result}")
