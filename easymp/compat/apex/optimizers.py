"""``apex.optimizers``: easymp's optimizers with Apex's arguments and defaults, and torch's keys in their state.

Moments of half parameters are fp32. Not here: gradients and scales as arguments of `step` (amp does it), steps in CUDA graphs, and
optimizers of ``apex.contrib``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required  # type: ignore[attr-defined]

from ...optim.fused import FusedOptimizer, Options
from ...optim.layerwise import LAMB, NovoGrad
from ...optim.masters import LOW
from ...optim.torch_optimizers import ADAGRAD, ADAM, SGD_RULE, TorchOptimizer, swapped
from .amp import ApexError, layer

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD"]
BY_AMP = {"FP16_Optimizer": "use amp.initialize(model, optimizer, opt_level='O2')"}
__getattr__ = layer.absent("apex.optimizers", BY_AMP, lambda: __all__)


class _ApexOptimizer(FusedOptimizer):
    """Base of Apex's optimizers. Their `step` raises ApexError for sparse gradients."""

    _none = True  # `zero_grad` frees gradients by default
    _beside = False  # weight decay multiplies the weights by 1 - lr × decay before the rule, without it
    _master = False  # half parameters are stepped as fp32 copies, which are "master_param" in the state
    _written: dict[Tensor, int]  # parameter → its version when it was written from its copy

    @property
    def options(self) -> Options:  # type: ignore[override]
        low = any(p.dtype in LOW for p in self._parameters())
        return Options(state_dtype=torch.float32) if low else Options()

    @options.setter
    def options(self, options: Options) -> None:
        """Follow from the parameters, which amp may make half."""

    def step(self, closure: Callable[[], Any] | None = None, **given: Any) -> Any:
        if asked := ", ".join(f"{name}=…" for name, value in given.items() if value is not None):
            raise ApexError(
                f"{type(self).__name__}.step({asked}): gradients are read from .grad, and amp.scale_loss scales; call step() alone"
            )
        return FusedOptimizer.step(self, closure)  # which no instance's hooks wrap

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self._none if set_to_none is None else set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_none", "_beside", "_master", "_written")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def advance(self, factor: Tensor | None, found_inf: Tensor | None, result: Tensor | None = None) -> None:
        if any(p.grad is not None and p.grad.is_sparse for p in self._parameters()):
            raise ApexError(f"{type(self).__name__} does not support sparse gradients: use SparseAdam")
        with self._masters() if self._master else nullcontext():
            if not self._beside:
                super().advance(factor, found_inf, result)
            elif found_inf is None or not found_inf.item():
                for group in self.param_groups:
                    moved = [p for p in group["params"] if p.grad is not None]
                    if moved and group["weight_decay"]:
                        torch._foreach_mul_(moved, 1 - group["lr"] * group["weight_decay"])
                with swapped(self.param_groups, "weight_decay", 0.0):
                    super().advance(factor, None, result)

    @contextmanager
    def _masters(self) -> Iterator[None]:
        """Inside, groups and state hold the fp32 copies in place of half parameters with gradients."""
        held = []
        for params in (group["params"] for group in self.param_groups):
            for i, p in enumerate(params):
                if p.grad is None or p.dtype not in LOW:
                    continue
                state = self.state.pop(p, {})
                master = state.pop("master_param", None)
                if master is None or self._written.get(p) != p._version:  # the model has loaded other weights
                    master = p.detach().float()
                master.grad = p.grad.float()
                params[i], self.state[master] = master, state
                held.append((params, i, p, master))
        try:
            yield
        finally:
            for params, i, p, master in held:
                params[i], master.grad = p, None
                self.state[p] = {**self.state.pop(master), "master_param": master}
                p.detach().copy_(master)
                self._written[p] = p._version

    def _begin(self, name: str, set_grad_none: bool, amsgrad: bool = False) -> None:
        kind = type(self).__name__
        if amsgrad:
            raise ApexError(f"{kind} does not support the AMSGrad variant: leave out amsgrad=True")
        native = f"optimizer = easymp.optim.{name}(model.parameters(), …)  # or torch.optim's: the same"
        layer.use(f"optimizers.{kind}", native)
        self._none, self._written = set_grad_none, dict[Tensor, int]()


class FusedAdam(_ApexOptimizer, TorchOptimizer, torch.optim.Adam):
    """Adam, or AdamW with `adam_w_mode`, the default. `capturable` has no effect; a step while a CUDA graph is captured is refused."""

    rule = ADAM
    torchs = torch.optim.Adam

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0,
        amsgrad: bool = False, set_grad_none: bool = True, capturable: bool = False, master_weights: bool = False,
    ) -> None:  # fmt: skip
        self._begin("AdamW", set_grad_none, amsgrad)
        self._master = master_weights
        super().__init__(params, lr, betas, eps, weight_decay)
        for group in (self.defaults, *self.param_groups):
            group["decoupled_weight_decay"] = adam_w_mode
            group.setdefault("bias_correction", bias_correction)

    def advance(self, factor: Tensor | None, found_inf: Tensor | None, result: Tensor | None = None) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise ApexError("FusedAdam cannot step in a CUDA graph: use torch.optim.AdamW(capturable=True)")
        super().advance(factor, found_inf, result)

    def advance_by_torch(self, factor: Tensor | None, found_inf: Tensor | None) -> None:
        if all(group.get("bias_correction", True) for group in self.param_groups):
            super().advance_by_torch(factor, found_inf)
        else:
            self.step_by_reference(factor, found_inf)  # torch's step has no such option


class FusedSGD(_ApexOptimizer, TorchOptimizer, torch.optim.SGD):
    """SGD with momentum; without `lr` each group must have one. `materialize_master_grads` has no effect."""

    rule = SGD_RULE
    torchs = torch.optim.SGD

    def __init__(
        self, params: Any, lr: float | Tensor = required, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: float = 0.0, nesterov: bool = False, wd_after_momentum: bool = False,
        materialize_master_grads: bool = True, set_grad_none: bool = False,
    ) -> None:  # fmt: skip
        self._begin("SGD", set_grad_none)
        if not materialize_master_grads:
            layer.ignore({"materialize_master_grads": "masters have gradients, by which they can be clipped"})
        self._beside = wd_after_momentum
        params = list(params)
        if lr is required and not all(isinstance(group, dict) and "lr" in group for group in params):
            raise ValueError("FusedSGD needs a learning rate: pass lr=…, or groups with an 'lr'")
        first = 0.0 if lr is required else lr
        super().__init__(params, first, momentum, dampening, weight_decay, nesterov)
        self.defaults["lr"] = lr  # by which torch asks later groups for theirs


class FusedAdagrad(_ApexOptimizer, TorchOptimizer, torch.optim.Adagrad):
    """Adagrad; `adagrad_w_mode` is weight decay beside the gradient, as in AdamW."""

    rule = ADAGRAD
    torchs = torch.optim.Adagrad

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0,
        set_grad_none: bool = True, adagrad_w_mode: bool = False,
    ) -> None:  # fmt: skip
        self._begin("Adagrad", set_grad_none)
        self._beside = adagrad_w_mode
        super().__init__(params, lr, 0.0, weight_decay, 0.0, eps)


class FusedLAMB(_ApexOptimizer, LAMB):
    """`easymp.optim.LAMB`, with Apex's options and defaults. Raises ApexError for amsgrad."""

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.01, amsgrad: bool = False,
        adam_w_mode: bool = True, grad_averaging: bool = True, set_grad_none: bool = True, max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:  # fmt: skip
        self._begin("LAMB", set_grad_none, amsgrad)
        how = {"adam_w_mode": adam_w_mode, "grad_averaging": grad_averaging, "use_nvlamb": use_nvlamb}
        super().__init__(
            *(params, lr, bias_correction, betas, eps, weight_decay), max_grad_norm=max_grad_norm, **how
        )


class FusedMixedPrecisionLamb(FusedLAMB):
    """`FusedLAMB` that steps fp32 copies of parameters of every half type. Raises ApexError for a first `step`."""

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, step: int = 0, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.01, amsgrad: bool = False,
        adam_w_mode: bool = True, grad_averaging: bool = True, max_grad_norm: float = 1.0, use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if step:
            raise ApexError(f"step={step} is not here: load_state_dict() sets each parameter's steps")
        self._master = True
        how = (lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode, grad_averaging)
        super().__init__(params, *how, True, max_grad_norm, use_nvlamb)


class FusedNovoGrad(_ApexOptimizer, NovoGrad):
    """`easymp.optim.NovoGrad`: one norm a tensor, by `norm_type` 2, or 0 for the largest magnitude. Raises ApexError for amsgrad."""

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: bool = False,
        reg_inside_moment: bool = False, grad_averaging: bool = True, norm_type: float = 2, init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        self._begin("NovoGrad", set_grad_none, amsgrad)
        how = {"reg_inside_moment": reg_inside_moment, "grad_averaging": grad_averaging}
        how |= {"norm_type": norm_type, "init_zero": init_zero}
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, **how)
