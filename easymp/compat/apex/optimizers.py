"""``apex.optimizers``: easymp's optimizers with Apex's arguments and defaults, and torch's keys in their state.

Moments of half parameters are fp32. Not here: gradients and scales as arguments of `step` (amp does it), ``capturable`` and
``master_weights`` (`amp.initialize` makes masters), and optimizers of ``apex.contrib``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim.fused import FusedOptimizer, Options
from ...optim.lamb import LAMB
from ...optim.masters import LOW
from ...optim.novograd import NovoGrad
from ...optim.torch_optimizers import ADAGRAD, ADAM, SGD_RULE, TorchOptimizer, swapped
from .amp.state import ApexError, layer

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD"]

__getattr__ = layer.absent(
    "apex.optimizers",
    {
        "FusedMixedPrecisionLamb": "use FusedLAMB with amp.initialize(opt_level='O2')",
        "FP16_Optimizer": "use amp.initialize(model, optimizer, opt_level='O2')",
    },
    lambda: __all__,
)

NATIVE = """
optimizer = easymp.optim.{name}(model.parameters(), …)  # or torch.optim's, which an Accelerator steps by the same kernels
"""


class _ApexOptimizer(FusedOptimizer):
    """Base of Apex's optimizers.

    Attributes:
        _none: `zero_grad` frees gradients by default.
        _beside: weight decay multiplies the weights by 1 - lr × decay before the rule, which has no decay then.
    """

    _none, _beside = True, False

    @property
    def options(self) -> Options:  # type: ignore[override]
        low = any(p.dtype in LOW for group in self.param_groups for p in group["params"])
        return Options(state_dtype=torch.float32) if low else Options()

    @options.setter
    def options(self, options: Options) -> None:
        """Follow from the parameters, which amp may make half."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Gradients become None, or 0 with ``set_grad_none=False``."""
        super().zero_grad(self._none if set_to_none is None else set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_none": self._none, "_beside": self._beside}

    def advance(self, factor: Tensor | None, found_inf: Tensor | None, result: Tensor | None = None) -> None:
        grads = (p.grad for group in self.param_groups for p in group["params"] if p.grad is not None)
        if any(grad.is_sparse for grad in grads):
            raise ApexError(
                f"{type(self).__name__} does not support sparse gradients, please consider SparseAdam instead"
            )
        if not self._beside:
            super().advance(factor, found_inf, result)
        elif found_inf is None or not found_inf.item():
            for group in self.param_groups:
                moved = [p for p in group["params"] if p.grad is not None]
                if moved and group["weight_decay"]:
                    torch._foreach_mul_(moved, 1 - group["lr"] * group["weight_decay"])
            with swapped(self.param_groups, "weight_decay", 0.0):
                super().advance(factor, None, result)

    def _begin(self, name: str, set_grad_none: bool, amsgrad: bool = False, **others: bool) -> None:
        kind = type(self).__name__
        if amsgrad:
            raise ApexError(f"{kind} does not support the AMSGrad variant: leave out amsgrad=True")
        for option, given in others.items():
            if given:
                raise ApexError(
                    f"{option}=True is not here: leave it out of {kind}(…); "
                    "fp32 masters are made by amp.initialize(opt_level='O2')"
                )
        layer.use(f"optimizers.{kind}", NATIVE.format(name=name))
        self._none = set_grad_none


class FusedAdam(_ApexOptimizer, TorchOptimizer, torch.optim.Adam):
    """Adam, or AdamW with `adam_w_mode`, the default.

    Args:
        bias_correction: False leaves the averages as they start, at 0.
        set_grad_none: `zero_grad` frees gradients; False makes them 0.
        others: as torch.optim.AdamW's.

    Raises:
        ApexError: amsgrad; sparse gradients, in the step.
    """

    rule = ADAM
    torchs = torch.optim.Adam

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        self._begin("AdamW", set_grad_none, amsgrad, capturable=capturable, master_weights=master_weights)
        super().__init__(params, lr, betas, eps, weight_decay)
        for group in (self.defaults, *self.param_groups):
            group["decoupled_weight_decay"] = adam_w_mode
            group.setdefault("bias_correction", bias_correction)

    def advance_by_torch(self, factor: Tensor | None, found_inf: Tensor | None) -> None:
        if all(group.get("bias_correction", True) for group in self.param_groups):
            super().advance_by_torch(factor, found_inf)
        else:
            self.step_by_reference(factor, found_inf)  # torch's step has no such option


class FusedSGD(_ApexOptimizer, TorchOptimizer, torch.optim.SGD):
    """SGD with momentum.

    Args:
        wd_after_momentum: weight decay is added to the step, not to the gradient.
        materialize_master_grads: without effect: masters always have gradients.
        set_grad_none: `zero_grad` frees gradients; by default it makes them 0.
        others: as torch.optim.SGD's.
    """

    rule = SGD_RULE
    torchs = torch.optim.SGD

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        self._begin("SGD", set_grad_none)
        if not materialize_master_grads:
            layer.ignore({"materialize_master_grads": "masters have gradients, by which they can be clipped"})
        self._beside = wd_after_momentum
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)


class FusedAdagrad(_ApexOptimizer, TorchOptimizer, torch.optim.Adagrad):
    """Adagrad.

    Args:
        adagrad_w_mode: weight decay beside the gradient, as in AdamW.
        set_grad_none: `zero_grad` frees gradients; False makes them 0.
        others: as torch.optim.Adagrad's.
    """

    rule = ADAGRAD
    torchs = torch.optim.Adagrad

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self._begin("Adagrad", set_grad_none)
        self._beside = adagrad_w_mode
        super().__init__(params, lr, 0.0, weight_decay, 0.0, eps)


class FusedLAMB(_ApexOptimizer, LAMB):
    """`easymp.optim.LAMB`, with Apex's options and defaults.

    Raises:
        ApexError: amsgrad; sparse gradients, in the step.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        self._begin("LAMB", set_grad_none, amsgrad)
        super().__init__(
            *(params, lr, bias_correction, betas, eps, weight_decay),
            adam_w_mode=adam_w_mode,
            grad_averaging=grad_averaging,
            max_grad_norm=max_grad_norm,
            use_nvlamb=use_nvlamb,
        )


class FusedNovoGrad(_ApexOptimizer, NovoGrad):
    """`easymp.optim.NovoGrad`: one norm a tensor, by `norm_type` 2, or 0 for the largest magnitude.

    Raises:
        ApexError: amsgrad; sparse gradients, in the step.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: float = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        self._begin("NovoGrad", set_grad_none, amsgrad)
        super().__init__(
            *(params, lr, bias_correction, betas, eps, weight_decay),
            reg_inside_moment=reg_inside_moment,
            grad_averaging=grad_averaging,
            norm_type=norm_type,
            init_zero=init_zero,
        )
