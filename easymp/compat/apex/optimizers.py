"""``apex.optimizers``: easymp's optimizers with Apex's arguments and defaults, and torch's keys in their state.

Moments of half parameters are fp32. Not here: gradients and scales as arguments of `step`, steps in CUDA graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import required

from ...optim import Engine, EngineOptions, OwnOptimizer, fuse, rules
from ...optim.own_optimizers import LAMB, NovoGrad
from ...optim.torch_step import fill_momentum, multiply, parameters_of, step_without_hooks, without_decay
from ...precision.policies import LOW
from .amp import ApexError, layer

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD"]
REQUIRED: Any = required  # torch's mark of an argument without a default
__getattr__ = layer.absent(__name__)


class _ApexOptimizer(OwnOptimizer):
    """Base of Apex's optimizers."""

    torch_class: ClassVar[type[torch.optim.Optimizer] | None] = None  # whose fused step serves fp32 parameters
    _set_grad_none = True  # `zero_grad` frees gradients by default
    _decoupled_decay = False  # weight decay multiplies the weights by 1 - lr × decay before the rule, without it
    _keeps_masters = False  # half parameters are stepped as fp32 copies, which are "master_param" in the state
    _unscales_in_memory = False  # a loss scale is divided out of `.grad`, too
    _engine: tuple[Any, Engine] | None = None  # with the facts that it was chosen by

    @property
    def engine(self) -> Engine:
        """Runs the step inside of this one, with fp32 states, where parameters are now, which amp may make half."""
        groups, parameters = self.param_groups, parameters_of(self)
        uncorrected = not all(group.get("bias_correction", True) for group in groups)  # which torch does not know
        by_rule = self.torch_class is None or uncorrected or any(p.dtype in LOW for p in parameters)
        # A copy of this optimizer chooses for itself.
        facts = id(self), by_rule, [(type(p), p.device) for p in parameters[:1]]
        if self._engine is None or self._engine[0] != facts:
            fused = all(group.get("fused") for group in groups)
            by_rule = by_rule or not (fused or fuse(self, kind=self.torch_class) is None)
            own: Any = weakref.proxy(self)  # makes no cycle
            options = EngineOptions(state_dtype=torch.float32 if by_rule else None)

            def step_by_torch() -> None:
                fill_momentum(own, own.torch_class)
                step_without_hooks(own.torch_class)(own)

            self._engine = facts, Engine(own, options, self.counting, rule=self.rule, plain=step_by_torch)
        return self._engine[1]

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        if used := ", ".join(f"{name}=…" for name, value in options.items() if value is not None):
            subject = f"{type(self).__name__}.step({used})"
            raise ApexError(f"{subject}: gradients are read from .grad, and amp.scale_loss scales; call step() alone")
        return OwnOptimizer.step(self, closure)  # which no instance's hooks wrap

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self._set_grad_none if set_to_none is None else set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        options = ("_set_grad_none", "_decoupled_decay", "_keeps_masters", "_unscales_in_memory")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in options}}

    def advance(self, factor: Tensor | None, found_inf: Tensor | None) -> None:
        gradients = [p.grad for p in parameters_of(self) if p.grad is not None]
        if any(gradient.is_sparse for gradient in gradients):
            raise ApexError(f"{type(self).__name__} does not support sparse gradients: use SparseAdam")
        if self._unscales_in_memory and factor is not None:
            multiply(gradients, factor)
            factor = None
        with self._stepping_masters() if self._keeps_masters else nullcontext():
            if not self._decoupled_decay:
                self.engine.step(factor, found_inf)
            elif found_inf is None or not found_inf.item():
                for group in self.param_groups:
                    moved = [p for p in group["params"] if p.grad is not None]
                    if moved and group["weight_decay"]:
                        torch._foreach_mul_(moved, 1 - group["lr"] * group["weight_decay"])
                with without_decay(self.param_groups):
                    self.engine.step(factor)

    @contextmanager
    def _stepping_masters(self) -> Iterator[None]:
        """Inside, groups and state hold the fp32 copies in place of half parameters with gradients."""
        replaced = []
        for params in (group["params"] for group in self.param_groups):
            for i, p in enumerate(params):
                if p.grad is None or p.dtype not in LOW:
                    continue
                state = self.state.pop(p, {})
                weight, master = p.detach(), state.pop("master_param", None)
                master = weight.float() if master is None else master
                torch.where(master.to(p.dtype) == weight, master, weight, out=master)  # weights that were loaded since
                master.grad = p.grad.float()
                params[i], self.state[master] = master, state
                replaced.append((params, i, p, master))
        try:
            yield
        finally:
            for params, i, p, master in replaced:
                params[i], master.grad = p, None
                self.state[p] = {**self.state.pop(master), "master_param": master}
                p.detach().copy_(master)

    def _begin(self, set_grad_none: bool, amsgrad: bool = False) -> None:
        if amsgrad:
            raise ApexError(f"{type(self).__name__} does not support the AMSGrad variant: leave out amsgrad=True")
        self._set_grad_none = set_grad_none


class FusedAdam(_ApexOptimizer, torch.optim.Adam):
    """Adam, or AdamW with `adam_w_mode`, the default."""

    rule = rules.ADAM
    torch_class = torch.optim.Adam

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, adam_w_mode: bool = True,
        weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none: bool = True, capturable: bool = False,
        master_weights: bool = False,
    ) -> None:  # fmt: skip
        self._begin(set_grad_none, amsgrad)
        self._keeps_masters, self._unscales_in_memory = master_weights, capturable
        super().__init__(params, lr, betas, eps, weight_decay)
        for group in (self.defaults, *self.param_groups):
            group["decoupled_weight_decay"] = adam_w_mode
            group.setdefault("bias_correction", bias_correction)

    def advance(self, factor: Tensor | None, found_inf: Tensor | None) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise ApexError("FusedAdam cannot step in a CUDA graph: use torch.optim.AdamW(capturable=True)")
        super().advance(factor, found_inf)


class FusedSGD(_ApexOptimizer, torch.optim.SGD):
    """SGD with momentum; without `lr` each group must have one. `materialize_master_grads` has no effect."""

    rule = rules.SGD
    torch_class = torch.optim.SGD

    def __init__(
        self, params: Any, lr: float | Tensor = REQUIRED, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: float = 0.0, nesterov: bool = False, wd_after_momentum: bool = False,
        materialize_master_grads: bool = True, set_grad_none: bool = False,
    ) -> None:  # fmt: skip
        self._begin(set_grad_none)
        if not materialize_master_grads:
            layer.ignore({"materialize_master_grads": "masters have gradients, by which they can be clipped"})
        self._decoupled_decay = wd_after_momentum
        params = list(params)
        if lr is REQUIRED and not all(isinstance(group, dict) and "lr" in group for group in params):
            raise ValueError("FusedSGD needs a learning rate: pass lr=…, or groups with an 'lr'")
        super().__init__(params, 0.0 if lr is REQUIRED else lr, momentum, dampening, weight_decay, nesterov)
        self.defaults["lr"] = lr  # by which torch asks later groups for theirs


class FusedAdagrad(_ApexOptimizer, torch.optim.Adagrad):
    """Adagrad; `adagrad_w_mode` is weight decay beside the gradient, as in AdamW."""

    rule = rules.ADAGRAD
    torch_class = torch.optim.Adagrad

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0,
        set_grad_none: bool = True, adagrad_w_mode: bool = False,
    ) -> None:  # fmt: skip
        self._begin(set_grad_none)
        self._decoupled_decay = adagrad_w_mode
        super().__init__(params, lr, 0.0, weight_decay, 0.0, eps)


class FusedLAMB(_ApexOptimizer, LAMB):
    """`easymp.optim.LAMB`, with Apex's options and defaults."""

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.01, amsgrad: bool = False,
        adam_w_mode: bool = True, grad_averaging: bool = True, set_grad_none: bool = True, max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:  # fmt: skip
        self._begin(set_grad_none, amsgrad)
        super().__init__(
            params, lr, bias_correction, betas, eps, weight_decay, adam_w_mode=adam_w_mode,
            grad_averaging=grad_averaging, max_grad_norm=max_grad_norm, use_nvlamb=use_nvlamb,
        )  # fmt: skip


class FusedMixedPrecisionLamb(FusedLAMB):
    """`FusedLAMB` that steps fp32 copies of parameters of every half type."""

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, step: int = 0, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.01, amsgrad: bool = False,
        adam_w_mode: bool = True, grad_averaging: bool = True, max_grad_norm: float = 1.0, use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if step:
            raise ApexError(f"step={step} is not here: load_state_dict() sets each parameter's steps")
        self._keeps_masters = True
        super().__init__(
            params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode, grad_averaging,
            max_grad_norm=max_grad_norm, use_nvlamb=use_nvlamb,
        )  # fmt: skip


class FusedNovoGrad(_ApexOptimizer, NovoGrad):
    """`easymp.optim.NovoGrad` with one norm a tensor, by `norm_type` 2, or 0 for the largest magnitude."""

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: bool = False,
        reg_inside_moment: bool = False, grad_averaging: bool = True, norm_type: float = 2, init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        self._begin(set_grad_none, amsgrad)
        super().__init__(
            params, lr, bias_correction, betas, eps, weight_decay, reg_inside_moment=reg_inside_moment,
            grad_averaging=grad_averaging, norm_type=norm_type, init_zero=init_zero,
        )  # fmt: skip
