"""An optimizer that knows the accumulation window and the loss scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..clock import StepClock
from ..errors import StepError
from ..precision import Scaler


class PreparedOptimizer(torch.optim.Optimizer):
    """The user's optimizer behind `step` and `zero_grad` that act once a window.

    State, param groups, hooks and everything else are the wrapped optimizer's own (`.optimizer`).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, clock: StepClock, scaler: Scaler) -> None:
        # torch's own __init__ would build param groups and state a second time.
        self.optimizer = optimizer
        self._clock = clock
        self._scaler = scaler

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update at the end of a window, skipped if a gradient overflowed; nothing on other micro-steps.

        Raises:
            StepError: with accumulation, outside an `accumulate` block.
        """
        clock = self._clock
        if clock.accumulation != 1:
            if not clock.inside:
                raise StepError(
                    f"optimizer.step() outside `with accelerator.accumulate(model):` while gradient_accumulation_steps="
                    f"{clock.accumulation}: it would step each micro-batch with a fraction of the gradient. Put forward, backward, "
                    "step and zero_grad inside the block, or set gradient_accumulation_steps=1"
                )
            if not clock.sync:
                return None
        if self._scaler.enabled:
            return self._scaler.step(self.optimizer, closure)
        return self.optimizer.step(closure) if closure is not None else self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, unless they hold part of a window that is not finished.

        Both idioms work: after `step`, and at the beginning of each micro-step.
        """
        clock = self._clock
        if clock.accumulation != 1:
            unfinished = clock.micro > 1 if not clock.backwards else not clock.sync
            if unfinished:
                return
        self.optimizer.zero_grad(set_to_none)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped for an overflow. Waits for the device under fp16."""
        return self._scaler.skipped(self.optimizer)

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)  # while being unpickled
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"Prepared({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "_clock": self._clock, "_scaler": self._scaler}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


for _name in (
    "register_step_pre_hook",
    "register_step_post_hook",
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
):

    def _delegate(self: PreparedOptimizer, *args: Any, _name: str = _name, **kwargs: Any) -> Any:
        return getattr(self.optimizer, _name)(*args, **kwargs)

    setattr(PreparedOptimizer, _name, _delegate)
