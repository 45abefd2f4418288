"""LARC: "Large Batch Training of Convolutional Networks", You, Gitman and Ginsburg, arXiv:1708.03888, as Apex's wrapper has it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..base.dtensor import local
from ..cuda.rules import RULES, Rule, Trust, larc
from ..cuda.rules.larc import adapted
from ..errors import RefusedError
from .fused import FusedOptimizer, Options
from .torch_step import whole_squares, wide


class LARC(FusedOptimizer):
    """Another optimizer, with a learning rate for each parameter that its norm and its gradient's allow.

    A gradient is multiplied, decay in it, by min(1, trust_coefficient × |p| / (|g| + weight_decay × |p| + eps) / lr). Param groups, state
    and checkpoints are those of the optimizer inside. Of sharded parameters (DTensors) the norms are those of the whole tensors.

    Args:
        optimizer: any of torch's classes; its weight decay is left to LARC.
        trust_coefficient: of the ratio of norms.
        clip: False leaves out the min and / lr, so that lr is multiplied by the ratio, whatever it is.
        eps: beside the norms.

    Raises:
        RefusedError: an optimizer that scales by norms of tensors itself.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        # torch's own __init__ would build param groups and state a second time.
        self.optim = optimizer
        self.trust = Trust(trust_coefficient, clip, eps)
        ours = isinstance(optimizer, FusedOptimizer)
        self.options = optimizer.options if ours else Options()
        inside = optimizer.rule if ours else RULES.get(type(optimizer))
        if inside is not None and inside.survey is not None:
            raise RefusedError(
                f"{type(optimizer).__name__} scales by the norms of tensors already: LARC is for optimizers that do not"
            )
        self._inside = inside
        for name in _HOOKS:
            setattr(self, name, OrderedDict())
        self._patch_step_function()

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        assert self._inside is not None
        return larc(self._inside, self.trust)

    def _refuse(self, device: torch.device | None, wanted: bool) -> str | None:
        if self._inside is None:
            return f"our kernels have no rule for {type(self.optim).__name__}"
        return super()._refuse(device, wanted)

    @property
    def _stepped(self) -> torch.optim.Optimizer:
        return self.optim

    def _advance_rest(self, moved: Any, factor: Tensor | None, found_inf: Tensor | None) -> None:
        self.advance_by_torch(moved, factor, found_inf)  # an average is kept by the optimizer inside

    def advance_by_torch(self, parameters: Any, factor: Tensor | None, found_inf: Tensor | None) -> None:
        held = [p.grad for p in parameters]
        gradients = [g.to_dense() if g.is_sparse else g for g in held]
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        weights = whole_squares(parameters, parameters).sqrt()
        slopes = whole_squares(parameters, gradients).sqrt()
        if factor is not None:
            gradients = list(torch._foreach_mul(gradients, factor))
            slopes = slopes * factor.to(slopes.device)
        hidden = [(p, p.grad) for p in self._parameters() if p.grad is not None]
        for parameter, _ in hidden:
            parameter.grad = None
        for p, g, weight, slope in zip(
            parameters, gradients, weights.float().unbind(), slopes.float().unbind()
        ):
            new = adapted(
                wide(local(p)),
                wide(local(g)),
                weight.to(p.device),
                slope.to(p.device),
                self.trust,
                groups[id(p)],
            )
            p.grad = torch.empty_like(g)
            local(p.grad).copy_(new)
        try:
            with self._without_decay():
                self._step_inside(found_inf)
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient

    def _step_inside(self, found_inf: Tensor | None) -> None:
        inside = self.optim
        if isinstance(inside, FusedOptimizer):
            inside.advance(None, found_inf)
        elif found_inf is None or not found_inf.item():
            inside.step()

    @contextmanager
    def _without_decay(self) -> Iterator[None]:
        held = [group.get("weight_decay") for group in self.param_groups]
        for group, decay in zip(self.param_groups, held):
            if decay is not None:
                group["weight_decay"] = 0.0
        try:
            yield
        finally:
            for group, decay in zip(self.param_groups, held):
                if decay is not None:
                    group["weight_decay"] = decay

    # -- what the optimizer inside has ------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optim.defaults

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("optim", "trust", "options", "_inside", *_HOOKS)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._patch_step_function()


_HOOKS: tuple[str, ...] = (
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks"),
    *(
        "_optimizer_state_dict_post_hooks",
        "_optimizer_load_state_dict_pre_hooks",
        "_optimizer_load_state_dict_post_hooks",
    ),
)
