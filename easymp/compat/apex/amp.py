"""``apex.amp``: mixed precision by optimization levels, on CPUs and GPUs.

Models and optimizers are changed in place, as by Apex: a model gets hooks, an optimizer a subclass of its class and, at
O2, fp32 masters (`easymp.optim.Masters`) in place of its half parameters. O1's casts hold from `initialize` on for the
thread that called it. Not here: closures with masters, and the scaling of losses by the handle that `init` returns.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ...errors import EasympError, RefusedError, SettingError, nearest
from ...optim.masters import Masters
from ...optim.own_optimizers import LARC
from ...optim.torch_step import Snapshot, parameters_of
from ...options import AutocastKwargs, GradScalerKwargs
from ...precision import Scaler
from ...precision.levels import O1, Cast, ListedCasts, as_listed, cast, cast_model, cast_table
from ...precision.policies import LOW
from ..layer import Layer, by_name

layer = Layer("Apex", "apex", "apex")


class ApexError(EasympError, RuntimeError):
    """An error that Apex raises as RuntimeError, or a case that Apex would compute wrongly without an error."""


# -- the casts of O1 --------------------------------------------------------------------------------------------------


class AmpHandle:
    """O1's casts, on or off, for the thread that turned them on."""

    def __init__(self) -> None:
        self._entered = ExitStack()
        self._pause: Callable[[], AbstractContextManager[Any]] | None = None  # turns the casts off; None: they are off

    def activate(self, device: torch.device, allow_banned: bool = False) -> None:
        """Turn the casts on. A GPU gets torch's autocast, which has Apex's lists there."""
        self._deactivate()
        # Cached casts of weights would outlive the step that changes them: torch drops them at the end of a block, and
        # there is none.
        casts = O1().casting(device, AutocastKwargs(cache_enabled=False))
        if allow_banned:
            casts = ListedCasts({**cast_table(), functional.binary_cross_entropy: Cast.FLOAT})
        self._pause = partial(torch.autocast, device.type, enabled=False)
        if isinstance(casts, ListedCasts):
            self._pause = casts.suspended
        self._entered.enter_context(casts)

    def _deactivate(self) -> None:
        self._entered.close()
        self._pause = None

    def is_active(self) -> bool:
        return self._pause is not None

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        """Inside, O1 casts nothing."""
        pause, self._pause = self._pause, None
        try:
            with pause() if pause else nullcontext():
                yield
        finally:
            self._pause = pause

    def scale_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, as by Apex."""
        raise RefusedError("The old Amp API is no longer supported: use amp.initialize and amp.scale_loss")

    wrap_optimizer = scale_loss


_handle = AmpHandle()
disable_casts = _handle._disable_casts


def init(
    enabled: bool = True, loss_scale: float | str = "dynamic", enable_caching: bool = True, verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle:  # fmt: skip
    """O1's casts without models and optimizers, until the returned handle's ``_deactivate()``."""
    _handle._deactivate()
    if enabled:
        _handle.activate(torch.device("cuda" if torch.cuda.is_available() else "cpu"), allow_banned)
    return _handle


def _cast_decorators(rule: Cast, prefix: str) -> tuple[Callable[..., Any], Callable[..., None]]:
    """A decorator that casts a function's arguments by `rule`, and a function that decorates ``module.name``."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not _handle.is_active():
                return fn(*args, **kwargs)
            args, kwargs = as_listed(rule, fn, args, kwargs)
            # The user's cast goes before the list that the function is on.
            with disable_casts() if fn in cast_table() else nullcontext():
                return fn(*args, **kwargs)

        return wrapper

    def register(module: Any, name: str) -> None:
        if not hasattr(module, name):
            raise SettingError(f"No function named {name} in module {module}: nothing can be cast for it")
        setattr(module, name, decorate(getattr(module, name)))

    decorate.__name__, register.__name__ = f"{prefix}_function", f"register_{prefix}_function"
    decorate.__doc__ = f"A decorator. Under O1 floating-point arguments of `fn` are cast: {rule.value}."
    register.__doc__ = f"Under O1 cast arguments of ``module.name``, if looked up there: {rule.value}."
    return decorate, register


half_function, register_half_function = _cast_decorators(Cast.HALF, "half")
float_function, register_float_function = _cast_decorators(Cast.FLOAT, "float")
promote_function, register_promote_function = _cast_decorators(Cast.WIDEST, "promote")


# -- levels and scales ------------------------------------------------------------------------------------------------


class LossScaler(Scaler):
    """Scale of loss number `index`: "dynamic" moves at the end of each `scale_loss`; a number stays constant."""

    def __init__(
        self, loss_scale: float | str, min_loss_scale: float | None = None, max_loss_scale: float = 2.0**24,
        index: int = 0,
    ) -> None:  # fmt: skip
        self.dynamic, self.index = loss_scale == "dynamic", index
        if self.dynamic:
            first = min(2.0**16, max_loss_scale)
            rule = GradScalerKwargs(init_scale=first, min_scale=min_loss_scale or 0.0, max_scale=max_loss_scale)
        else:
            rule = GradScalerKwargs(init_scale=float(loss_scale), dynamic=False)
        super().__init__(rule)
        self._blocks = 0  # under a constant scale

    loss_scale = Scaler.get_scale
    _loss_scale = property(loss_scale, Scaler.update)

    @property
    def _unskipped(self) -> int:
        """Good blocks since the scale last moved; of a constant scale, all blocks."""
        return int(self.state_dict()["_growth_tracker"]) if self.dynamic else self._blocks

    def skips(self, found_inf: Tensor) -> bool:
        """Move the scale; whether steps are to be skipped, since `found_inf` is above 0. Waits for the device."""
        self._blocks += 1
        self.advance(found_inf)
        return self.dynamic and bool(found_inf.item())


class Properties(SimpleNamespace):
    """A level's properties, by Apex's names, also in a dict. None and False leave types as they are."""

    options = property(vars)


PROPERTIES = "cast_model_type patch_torch_functions keep_batchnorm_fp32 master_weights loss_scale".split()
LEVELS = {
    "O0": (torch.float32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (torch.float16, False, True, True, "dynamic"),
    "O3": (torch.float16, False, False, False, 1.0),
}
O1_REFUSES = {
    "cast_model_type": "O1 inserts casts around torch's functions, and the weights themselves stay fp32",
    "keep_batchnorm_fp32": "O1 runs batch-norm in fp32 anyway",
    "master_weights": "O1's weights are fp32 themselves",
}
MODEL_TYPES = (torch.float32, torch.float16, torch.bfloat16, False)


def _properties(level: str, overrides: Mapping[str, Any]) -> Properties:
    """The properties of `level`, changed by `overrides`."""
    if level not in LEVELS:
        hint = nearest(level, LEVELS) or "."
        raise ApexError(
            f"Unexpected optimization level {level!r}{hint} In {', '.join(LEVELS)} the prefix O is the letter O"
        )
    values = {**dict(zip(PROPERTIES, LEVELS[level])), **overrides}
    for name, value in overrides.items():
        if name == "cast_model_type":
            if not any(value is dtype for dtype in MODEL_TYPES):
                raise ApexError(f"cast_model_type={value!r} is not one of {', '.join(map(str, MODEL_TYPES))}")
        elif name == "loss_scale":
            number = 0.0
            with suppress(TypeError, ValueError):
                number = 0.0 if isinstance(value, bool) else float(value)
            if value != "dynamic" and not 0.0 < number < float("inf"):
                raise ApexError(f"loss_scale={value!r} must be a positive number, or 'dynamic'")
            values[name] = value if value == "dynamic" else number
        elif str(value) not in ("True", "False"):
            raise ApexError(f"{name}={value!r} must be a boolean, the string 'True' or 'False', or None")
        else:
            values[name] = str(value) == "True"
    if level != "O1" and values["patch_torch_functions"]:
        raise ApexError(f"patch_torch_functions=True with {level}: only opt_level='O1' casts around functions")
    if level == "O1" and values["cast_model_type"] in (torch.float32, False):
        values["cast_model_type"] = None  # fp32, the type of the weights
    for name, reason in O1_REFUSES.items():
        if level == "O1" and values[name] is not None:
            raise ApexError(f"{name}={values[name]!r} with O1: {reason}. Leave it out, or use O2 or O3")
    return Properties(enabled=True, opt_level=level, **values)


class AmpState:
    """The state that the last `initialize` left, by the names under which scripts read it."""

    opt_properties: Properties | None = None  # before `initialize`
    allow_incoming_model_not_fp32 = False  # lets `initialize` take half parameters
    verbosity = 1
    loss_scalers: Sequence[LossScaler] = ()
    handle = _handle
    optimizers: ClassVar[weakref.WeakSet[torch.optim.Optimizer]] = weakref.WeakSet()


_amp_state = AmpState()


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print, unless verbosity=0; with `rank0` on rank 0 only."""
    if _amp_state.verbosity > 0 and not (rank0 and dist.is_initialized() and dist.get_rank()):
        print(msg)  # noqa: T201 (Apex's interface, with a parameter to turn it off)


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """``{"loss_scaler0": {"loss_scale": …, "unskipped": …}, …}``; written into `destination` if given."""
    destination = {} if destination is None else destination
    for i, scaler in enumerate(_amp_state.loss_scalers):
        destination[f"loss_scaler{i}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return destination


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Take scales and counters. Call it after `initialize`."""
    if unknown := [repr(key) for key in state_dict if not str(key).startswith("loss_scaler")]:
        raise ApexError(f"unexpected keys in amp's state_dict: {', '.join(unknown)}: pass amp.state_dict()'s")
    scalers = _amp_state.loss_scalers
    if (entries := len(state_dict)) != len(scalers):
        maybe_print(f"Warning: state_dict contains {entries} entries, while {len(scalers)} loss_scalers are used")
    for scaler, state in zip(scalers, state_dict.values()):
        scaler.load_state_dict({"scale": state["loss_scale"], "_growth_tracker": state["unskipped"]})
        scaler._blocks = int(state["unskipped"])


# -- the step ---------------------------------------------------------------------------------------------------------

_NO_OPTIMIZER: Any = SimpleNamespace(param_groups=(), state={})


class ScaledGradients:
    """The gradients of one optimizer between two steps: scaled, put aside, or overflowed."""

    def __init__(self, optimizer: torch.optim.Optimizer, has_masters: bool) -> None:
        self._optimizer: Any = weakref.proxy(optimizer)  # makes no cycle
        self.has_masters = has_masters  # of half parameters
        mastered: Any = self._optimizer if has_masters else _NO_OPTIMIZER
        self.masters = Masters(mastered, {})
        self.scaler: LossScaler | None = None  # of the gradients in `.grad`, if they are not divided by it yet
        self.overflow: LossScaler | None = None  # with which a gradient overflowed since the last step
        self._stash: list[tuple[Tensor, Tensor]] = []  # parameters, and divided gradients of the blocks before
        self._foreign: list[Snapshot] = []  # gradients of an unknown scale, until they are cleared

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters that have a gradient, and their gradients."""
        return [(p, p.grad) for p in parameters_of(self._optimizer) if p.grad is not None]

    def begin(self, scaler: LossScaler) -> None:
        """Stash the unscaled gradients before a scaled backward. Gradients scaled by the same `scaler` stay."""
        if self.scaler is scaler:
            return
        if self.scaler is not None:
            waiting = f"gradients scaled with loss_id={self.scaler.index} are waiting (delay_unscale=True)"
            raise ApexError(f"{waiting}: end them with one that unscales, before loss_id={scaler.index} begins")
        self.refuse_foreign()
        self._stash = self.pairs()
        # Those of the model come from a loss that this optimizer was not given with.
        for parameter in [*self.masters.parameters, *(p for p, _ in self._stash)]:
            parameter.grad = None
        self.scaler = scaler

    @torch.no_grad()
    def end(self) -> None:
        """Add the gradients that were put aside to the divided ones."""
        for parameter, stashed in self._stash:
            if parameter.grad is None:
                parameter.grad = stashed
            elif parameter.grad.is_sparse or stashed.is_sparse:
                parameter.grad = parameter.grad + stashed
            else:
                parameter.grad.add_(stashed)
        self._stash, self.scaler = [], None

    def abort(self) -> None:
        """After a failed block: restore the stash. Gradients that came scaled are refused until they are cleared."""
        model_gradients = [Snapshot(p) for p in self.masters.parameters if p.grad is not None]
        self.note_foreign()
        self._foreign += model_gradients
        for parameter, stashed in self._stash:
            parameter.grad = stashed if parameter.grad is None else parameter.grad
        self._stash, self.scaler = [], None

    def clear(self) -> None:
        """Forget all gradients: `zero_grad` cleared them."""
        self._stash, self._foreign, self.scaler = [], [], None
        self.masters.clear()

    def note_foreign(self, before: Sequence[Snapshot] = ()) -> None:
        """Note gradients that are not those of `before`: they have an unknown scale until they are cleared."""
        own = {snapshot.parameter for snapshot in before if snapshot.unchanged}
        self._foreign += [Snapshot(p) for p, _ in self.pairs() if p not in own]

    def refuse_foreign(self) -> None:
        """Raise ApexError where such gradients were not cleared."""
        if any(snapshot.unchanged for snapshot in self._foreign):
            raise ApexError(
                "this optimizer holds scaled gradients, of a loss whose amp.scale_loss it was not given with, or of a "
                "block that failed: pass every optimizer whose parameters the loss depends on, as in "
                "amp.scale_loss(loss, [a, b]), or clear them with zero_grad() first"
            )
        self._foreign.clear()


class AmpOptimizer:
    """Methods that come before those of the optimizer's own class."""

    _amp: ScaledGradients

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own step, or none after an overflow; parameters become their masters, rounded."""
        self._opt_called = True  # by which torch's schedulers know that a step came before theirs
        gradients = self._amp
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None and (gradients.masters.parameters or gradients.overflow is not None):
            raise ApexError("Currently, Amp does not support closure use: call the closure before step()")
        if gradients.overflow is not None:
            scaler, gradients.overflow = gradients.overflow, None
            skipping = f"Skipping step, loss scaler {scaler.index} reducing loss scale to {scaler.loss_scale()}"
            maybe_print(f"Gradient overflow.  {skipping}")
            gradients.masters.clear()
            return None
        if gradients.scaler is not None:
            raise ApexError("step() on scaled gradients: leave delay_unscale=True out of the last scale_loss")
        if any(p.grad is not None for p in gradients.masters.parameters):
            raise ApexError(
                "the model holds gradients that did not come by amp.scale_loss with this optimizer: every backward "
                "needs its `with` block, with every optimizer whose parameters the loss depends on"
            )
        gradients.refuse_foreign()
        gradients.masters.follow()  # weights that were loaded into the model since
        with disable_casts():
            result = super().step(*args, **kwargs)  # type: ignore[misc]  # of the optimizer's class, mixed in
        gradients.masters.write_back()
        return result

    # torch's marks: the inner step calls the hooks, and schedulers read `_opt_called`.
    vars(step).update(hooked=True, _wrapped_by_lr_sched=True)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears gradients, of masters and of the model."""
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        self._amp.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Half parameters get masters, as those of `initialize` did."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if self._amp.has_masters:
            self._amp.masters.add_groups(self.param_groups[-1:])  # type: ignore[attr-defined]


def _gradients_of(optimizer: Any) -> ScaledGradients:
    """The gradients of `optimizer`, or of the one inside LARC. ApexError where it was not given to `initialize`."""
    wraps = isinstance(optimizer, LARC) and not isinstance(optimizer, AmpOptimizer)
    stepped = optimizer.optim if wraps else optimizer
    if not isinstance(stepped, AmpOptimizer):
        name = type(stepped).__name__
        raise ApexError(f"this {name} was not passed to amp.initialize, which comes before amp.scale_loss")
    return stepped._amp


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The tensors that the optimizer steps: fp32 masters, and parameters without one."""
    if isinstance(optimizer, AmpOptimizer):
        optimizer._amp.masters.follow()
    return (p for group in optimizer.param_groups for p in group["params"])


@contextmanager
def scale_loss(
    loss: Tensor, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], loss_id: int = 0,
    model: Any = None, delay_unscale: bool = False, delay_overflow_check: bool = False,
) -> Iterator[Tensor]:  # fmt: skip
    """Give a ``with`` block the scaled loss, whose ``backward()`` it calls; overflows skip the next step."""
    if delay_overflow_check:
        raise RefusedError("delay_overflow_check=True: each overflow is looked for at once; leave it out")
    if _amp_state.opt_properties is None:
        raise ApexError("internal Amp state has not been initialized: call amp.initialize before amp.scale_loss")
    if not _amp_state.opt_properties.enabled:
        yield loss
        return
    if not isinstance(loss, Tensor):
        raise ApexError(f"scale_loss({loss!r}, …): a {type(loss).__name__} has no backward(); leave out .item()")
    stepped = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    by_optimizer, scalers = [_gradients_of(optimizer) for optimizer in stepped], _amp_state.loss_scalers
    if not 0 <= loss_id < len(scalers):
        remedy = f"pass num_losses={loss_id + 1} to amp.initialize"
        raise ApexError(f"loss_id={loss_id}, and there are {len(scalers)} loss scalers: {remedy}")
    scaler = scalers[loss_id]
    has_masters = any(gradients.masters.parameters for gradients in by_optimizer)
    if not (scaler.dynamic or scaler.loss_scale() != 1.0 or has_masters):
        yield loss.float()
        return
    bystanders = [item for item in map(_gradients_of, _amp_state.optimizers) if item not in by_optimizer]
    snapshots = [[Snapshot(p) for p, _ in gradients.pairs()] for gradients in bystanders]
    for gradients in by_optimizer:
        gradients.begin(scaler)
    try:
        yield scaler.scale(loss.float())
    except BaseException:
        for gradients in by_optimizer:
            gradients.abort()
        raise
    for gradients, before in zip(bystanders, snapshots):
        gradients.note_foreign(before)
    if delay_unscale:
        return
    for gradients in by_optimizer:
        gradients.masters.gather(free=True)
    scaled = [gradient for gradients in by_optimizer for _, gradient in gradients.pairs()]
    overflows = scaler.skips(scaler.divide(scaled, loss.device))
    for gradients in by_optimizer:
        gradients.end()
        gradients.overflow = scaler if overflows else gradients.overflow


# -- initialize -------------------------------------------------------------------------------------------------------


def initialize(
    models: Any, optimizers: Any = None, enabled: bool = True, opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None, patch_torch_functions: bool | str | None = None,
    keep_batchnorm_fp32: bool | str | None = None, master_weights: bool | str | None = None,
    loss_scale: float | str | None = None, cast_model_outputs: torch.dtype | None = None, num_losses: int = 1,
    verbosity: int = 1, min_loss_scale: float | None = None, max_loss_scale: float = 2.0**24,
) -> Any:  # fmt: skip
    """`models` and `optimizers`, the same objects, changed in place to train at `opt_level`; wrap for DDP after it."""
    model_list = list(models) if isinstance(models, list) else [models]
    optimizer_list = list(optimizers or []) if isinstance(optimizers, list | None) else [optimizers]
    if not all(isinstance(model, nn.Module) for model in model_list):
        raise TypeError("models must be either a single model or a list of models")
    if not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizer_list):
        raise TypeError("optimizers must be either a single optimizer or a list of optimizers")
    result = models if optimizers is None else (models, optimizers)
    if not enabled:
        _handle._deactivate()
        _amp_state.opt_properties, _amp_state.loss_scalers = Properties(enabled=False), []
        return result
    values = (cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale)
    overrides = {name: value for name, value in zip(PROPERTIES, values) if value is not None}
    properties = _properties(opt_level, overrides)
    for model in model_list:
        _check_model(model)
    for optimizer in optimizer_list:
        if isinstance(optimizer, AmpOptimizer) or len({*map(id, optimizer_list)}) < len(optimizer_list):
            raise ApexError("A given optimizer should only be passed through amp.initialize once")
        step: Callable[..., Any] | None = vars(optimizer).get("step")
        if step is not None and "_wrapped_by_lr_sched" not in vars(step):
            subject = f"the step of this {type(optimizer).__name__} was replaced by another library"
            raise ApexError(f"{subject}, past which no step can be skipped: call amp.initialize first")
    scalers = [LossScaler(properties.loss_scale, min_loss_scale, max_loss_scale, i) for i in range(num_losses)]
    _handle._deactivate()
    _amp_state.opt_properties, _amp_state.loss_scalers, _amp_state.verbosity = properties, scalers, verbosity
    maybe_print(f"Selected optimization level {opt_level}, whose properties are:", True)
    for name in PROPERTIES:
        maybe_print(f"{name:22} : {getattr(properties, name)}", True)
    for model in model_list:
        dtype, output_dtype = properties.cast_model_type, cast_model_outputs
        if isinstance(dtype, torch.dtype):
            if dtype in LOW:
                cast_model(model, dtype, bool(properties.keep_batchnorm_fp32))
                for module in model.modules():
                    module.register_state_dict_post_hook(partial(_save_in_fp32, dtype))
            model.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)
            output_dtype = output_dtype or torch.float32
        if output_dtype is not None:
            model.register_forward_hook(partial(_cast_outputs, output_dtype), prepend=True)
    for optimizer in optimizer_list:
        kind = type(optimizer)
        vars(optimizer).pop("step", None)  # a scheduler's counter, which ours replaces
        optimizer._amp = ScaledGradients(optimizer, bool(properties.master_weights))
        body = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        optimizer.__class__ = type(kind.__name__, (AmpOptimizer, kind), body)
        _amp_state.optimizers.add(optimizer)
    if properties.patch_torch_functions:
        devices = [p.device for model in model_list for p in model.parameters()]
        _handle.activate(devices[0] if devices else torch.device("cpu"))
    return result


def _check_model(model: nn.Module) -> None:
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        instance = f"Incoming model is an instance of {type(model).__name__}"
        raise ApexError(f"{instance}. Parallel wrappers should only be applied AFTER amp.initialize")
    if _amp_state.allow_incoming_model_not_fp32:
        return
    half_buffers = [("buffer", name, t) for name, t in model.named_buffers() if t.dtype in LOW]
    parameters = [("param", name, p) for name, p in model.named_parameters() if p.is_floating_point()]
    for kind, name, tensor in [*parameters, *half_buffers]:
        if tensor.dtype != torch.float32:
            fault = f"Found {kind} {name} with type {tensor.dtype}, expected torch.float32"
            raise ApexError(f"{fault}: leave out .half(); amp.initialize casts, at O2 and O3")


# Functions of the module, so that models with these hooks can be pickled.
def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return cast(args, dtype), cast(kwargs, dtype)


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, outputs: Any) -> Any:
    return cast(outputs, dtype)


def _save_in_fp32(dtype: torch.dtype, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Tensors of `dtype` become fp32 in state dicts, so that checkpoints are alike at every level."""
    for name, tensor in state.items():
        if name.startswith(prefix) and isinstance(tensor, Tensor) and tensor.dtype == dtype:
            state[name] = tensor.float()


CASTS = by_name(
    float_function, half_function, init, promote_function, register_float_function, register_half_function,
    register_promote_function, disable_casts=disable_casts,
)  # fmt: skip
__all__ = [*CASTS, "initialize", "load_state_dict", "master_params", "scale_loss", "state_dict"]
layer.submodules(
    __name__,
    {
        "_amp_state": by_name(AmpState, master_params, maybe_print, _amp_state=_amp_state),
        "amp": CASTS,
        "frontend": by_name(Properties, initialize, load_state_dict, state_dict, opt_levels=LEVELS),
        "handle": by_name(AmpHandle, scale_loss, disable_casts=disable_casts),
        "scaler": by_name(LossScaler),
    },
)
__getattr__ = layer.absent(__name__)
