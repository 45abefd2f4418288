"""``apex.amp``: mixed precision by optimization levels, on CPUs and GPUs.

Models and optimizers are changed in place, as by Apex: a model gets hooks, an optimizer a subclass of its class and, at O2, fp32
masters (`easymp.optim.Masters`) in place of its half parameters. O1's casts hold from `initialize` on for the thread that called it;
DataParallel's threads run without. Not here: closures with masters, and the scaling of losses by the handle that `init` returns.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ...errors import EasympError, RefusedError, SettingError, nearest
from ...optim.layerwise import LARC
from ...optim.masters import LOW, Masters
from ...options import AutocastKwargs, GradScalerKwargs
from ...precision import Scaler
from ...precision.levels import O1, Cast, ListedCasts, as_listed, cast, cast_model, cast_table
from ..layer import Layer, named, submodules

layer = Layer("Apex")


class ApexError(EasympError, RuntimeError):
    """An error that Apex raises as RuntimeError, or a case that Apex would compute wrongly without an error."""


class AmpHandle:
    """O1's casts, on or off, for the thread that turned them on."""

    def __init__(self) -> None:
        self._entered = ExitStack()
        self._running: AbstractContextManager[Any] | None = None
        self._device, self._half = torch.device("cpu"), torch.float16

    def on(self, device: torch.device, half: torch.dtype = torch.float16, allow_banned: bool = False) -> None:
        """Torch's functions cast from now on, as `init` says; on a GPU by torch's autocast, where its lists are Apex's."""
        self._deactivate()
        self._device, self._half = device, half
        if allow_banned or half != torch.float16:
            banned = {functional.binary_cross_entropy: Cast.FLOAT} if allow_banned else {}
            self._running = ListedCasts({**cast_table(), **banned}, half)
        else:
            # Cached casts of weights would outlive the step that changes them: torch drops them at the end of a block, and there is none.
            self._running = O1().casting(device, AutocastKwargs(cache_enabled=False))
        self._entered.enter_context(self._running)

    def _deactivate(self) -> None:
        self._entered.close()
        self._running = None

    def is_active(self) -> bool:
        return self._running is not None

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        """Inside, O1 casts nothing."""
        running, self._running = self._running, None
        away: AbstractContextManager[Any] = nullcontext()
        if running is not None:
            listed = isinstance(running, ListedCasts)
            away = running.suspended() if listed else torch.autocast(self._device.type, enabled=False)
        try:
            with away:
                yield
        finally:
            self._running = running

    def scale_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, as by Apex."""
        raise RefusedError("The old Amp API is no longer supported: use amp.initialize and amp.scale_loss")

    wrap_optimizer = scale_loss


_handle = AmpHandle()
disable_casts = _handle._disable_casts


def init(
    enabled: bool = True, loss_scale: float | str = "dynamic", enable_caching: bool = True, verbose: bool = False,
    allow_banned: bool = False, *, patch_type: torch.dtype = torch.float16,
) -> AmpHandle:  # fmt: skip
    """O1's casts without models and optimizers, until the returned handle's ``_deactivate()``. Products run in `patch_type`, fp16 or bf16.

    With `allow_banned` binary_cross_entropy runs in fp32; otherwise it refuses half precision.
    """
    _handle._deactivate()
    if enabled:
        _handle.on(torch.device("cuda" if torch.cuda.is_available() else "cpu"), patch_type, allow_banned)
    return _handle


def _casts(how: Cast, word: str) -> tuple[Callable[..., Any], Callable[..., None]]:
    """A decorator, and a function that puts it on a module's function."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not _handle.is_active():
                return fn(*args, **kwargs)
            args, kwargs = as_listed(how, fn, args, kwargs, _handle._half)
            # The user's cast goes before the list that the function is on.
            with disable_casts() if fn in cast_table() else nullcontext():
                return fn(*args, **kwargs)

        return wrapper

    def register(module: Any, name: str) -> None:
        if not hasattr(module, name):
            raise SettingError(f"No function named {name} in module {module}: nothing can be cast for it")
        setattr(module, name, decorate(getattr(module, name)))

    decorate.__name__, register.__name__ = f"{word}_function", f"register_{word}_function"
    decorate.__doc__ = f"A decorator. Under O1 floating-point arguments of `fn` are cast: {how.value}."
    register.__doc__ = f"Under O1 cast arguments of ``module.name``, if looked up there: {how.value}."
    return decorate, register


half_function, register_half_function = _casts(Cast.HALF, "half")
float_function, register_float_function = _casts(Cast.FLOAT, "float")
promote_function, register_promote_function = _casts(Cast.WIDEST, "promote")


class LossScaler:
    """The scale of one loss, which moves at the end of each `scale_loss`; one that was given as a number is constant, and skips no step."""

    number = 0  # of the loss

    def __init__(
        self, loss_scale: float | str, init_scale: float = 2.0**16, scale_factor: float = 2.0, scale_window: int = 2000,
        min_loss_scale: float | None = None, max_loss_scale: float = 2.0**24,
    ) -> None:  # fmt: skip
        self.dynamic = loss_scale == "dynamic"
        first, bounds = (
            min(init_scale, max_loss_scale),
            {"min_scale": min_loss_scale or 0.0, "max_scale": max_loss_scale},
        )
        rule = GradScalerKwargs(first, scale_factor, 1 / scale_factor, scale_window, **bounds)
        self.scaler = Scaler(rule if self.dynamic else GradScalerKwargs(float(loss_scale), dynamic=False))
        self._counted = 0

    def loss_scale(self) -> float:
        """The factor of the loss. Waits for the device."""
        return self.scaler.get_scale()

    _loss_scale = property(loss_scale, lambda self, scale: self.scaler.update(scale))

    @property
    def _unskipped(
        self,
    ) -> int:  # good blocks since the last overflow or growth; of a scale that does not move, all of them
        return int(self.scaler.state_dict()["_growth_tracker"]) if self.dynamic else self._counted

    def overflowed(self, found: torch.Tensor) -> bool:
        """Move the scale; whether steps are to be skipped, as `found` is above 0. Waits for the device."""
        if not self.dynamic:
            self._counted += 1
            return False
        self.scaler.advance(found)
        return bool(found.item())


@dataclass(frozen=True)
class Properties:
    """A level's properties, by Apex's names. None and False leave types as they are."""

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: torch.dtype | bool | None = None
    patch_torch_functions: bool | None = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str = 1.0


PROPERTIES = [field.name for field in fields(Properties)][2:]


class AmpState:
    """The state that the last `initialize` left, by the names under which scripts read it."""

    opt_properties: Properties | None = None  # before `initialize`
    allow_incoming_model_not_fp32 = False  # lets `initialize` take half parameters
    verbosity = 1
    loss_scalers: Sequence[LossScaler] = ()
    handle = _handle
    optimizers: ClassVar[weakref.WeakSet[torch.optim.Optimizer]] = weakref.WeakSet()

    def loss(self, number: int) -> LossScaler:
        """The scaler of loss `number`."""
        if 0 <= number < len(self.loss_scalers):
            return self.loss_scalers[number]
        made = len(self.loss_scalers)
        raise ApexError(f"loss_id={number}, and there are {made} loss scalers: pass num_losses={number + 1}")


_amp_state = AmpState()


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print, unless verbosity=0; with `rank0` on rank 0 only."""
    if _amp_state.verbosity > 0 and not (rank0 and dist.is_initialized() and dist.get_rank()):
        print(msg)  # noqa: T201 (Apex's interface, with a parameter to turn it off)


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """``loss_scaler0``, ``loss_scaler1`` … → {"loss_scale", "unskipped"}; in `destination`, if given."""
    destination = {} if destination is None else destination
    for i, scaler in enumerate(_amp_state.loss_scalers):
        destination[f"loss_scaler{i}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return destination


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Take scales and counters; call it after `initialize`. A line says so where there are more or fewer than losses."""
    if unknown := [repr(key) for key in state_dict if not str(key).startswith("loss_scaler")]:
        raise ApexError(f"unexpected keys in amp's state_dict: {', '.join(unknown)}: pass amp.state_dict()'s")
    if (entries := len(state_dict)) != (used := len(_amp_state.loss_scalers)):
        maybe_print(f"Warning: state_dict contains {entries} entries, while {used} loss_scalers are used")
    for scaler, entry in zip(_amp_state.loss_scalers, state_dict.values()):
        scaler.scaler.load_state_dict({"scale": entry["loss_scale"], "_growth_tracker": entry["unskipped"]})
        scaler._counted = int(entry["unskipped"])


LEVELS = {
    "O0": Properties(True, "O0", torch.float32, False, None, False, 1.0),
    "O1": Properties(True, "O1", None, True, None, None, "dynamic"),
    "O2": Properties(True, "O2", torch.float16, False, True, True, "dynamic"),
    "O3": Properties(True, "O3", torch.float16, False, False, False, 1.0),
}
O1_REFUSES = {
    "cast_model_type": "O1 inserts casts around torch's functions, and the weights themselves stay fp32",
    "keep_batchnorm_fp32": "O1 runs batch-norm in fp32 anyway",
    "master_weights": "O1's weights are fp32 themselves",
}
TYPES = (torch.float32, torch.float16, torch.bfloat16, False)


def _properties(level: str, given: dict[str, Any]) -> Properties:
    if level not in LEVELS:
        raise ApexError(
            f"Unexpected optimization level {level!r}{nearest(level, LEVELS) or '.'} Options are 'O0', 'O1', 'O2', 'O3'. Note "
            "that in `O0`, `O1`, etc., the prefix O is the letter O, not the number zero"
        )
    start = LEVELS[level]
    changed = {name: _read(name, value) for name, value in given.items()}
    for name, value in changed.items():
        why = O1_REFUSES.get(name) if start.patch_torch_functions else None
        if why and not (name == "cast_model_type" and value in (torch.float32, False)):
            raise ApexError(f"{name}={value!r} with opt_level {level}: {why}. Leave it out, or use O2 or O3")
        if name == "patch_torch_functions" and value and not start.patch_torch_functions:
            raise ApexError(f"{name}=True with opt_level {level}: only opt_level='O1' casts around functions")
    if start.patch_torch_functions:
        changed.pop("cast_model_type", None)  # fp32, the type of the weights
    return replace(start, **changed)


def _read(name: str, value: Any) -> Any:
    if name == "loss_scale" and value != "dynamic":
        number = 0.0
        with suppress(TypeError, ValueError):
            number = float(value)
        if isinstance(value, bool) or not 0.0 < number < float("inf"):
            raise ApexError(f"loss_scale={value!r} must be a positive number, or 'dynamic'")
        return number
    if name == "cast_model_type" and not any(value is known for known in TYPES):
        raise ApexError(f"cast_model_type={value!r} is not one of {', '.join(map(str, TYPES))}")
    if name in ("loss_scale", "cast_model_type"):
        return value
    if str(value) not in ("True", "False"):
        raise ApexError(f"{name}={value!r} must be a boolean, the string 'True' or 'False', or None")
    return str(value) == "True"


Seen = dict[tuple[int, int], Tensor]  # gradients, by identity and version


class Share:
    """The state of amp for one optimizer between two steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, masters: bool) -> None:
        self._optimizer: Any = weakref.proxy(optimizer)  # makes no cycle
        self.mastered = masters
        none: Any = SimpleNamespace(param_groups=(), state={})
        self.masters = Masters(self._optimizer if masters else none, {})
        self.scaler: LossScaler | None = None  # of the present gradients
        self.overflow: LossScaler | None = None  # on which a gradient overflowed since the last step
        self._stash: list[tuple[Tensor, Tensor]] = []  # divided gradients of the blocks before
        self._strange: Seen = {}  # gradients of a loss that this optimizer was not given with

    def parameters(self) -> Iterator[Tensor]:
        return (p for group in self._optimizer.param_groups for p in group["params"])

    def begin(self, scaler: LossScaler) -> None:
        """Put present gradients aside before scaled ones come, unless they are scaled, too."""
        if self.scaler is scaler:
            return
        if self.scaler is not None:
            raise ApexError(
                f"gradients scaled with loss_id={self.scaler.number} are waiting (delay_unscale=True): end them with one that unscales, "
                f"before loss_id={scaler.number} begins"
            )
        self.check()
        self._stash = [(p, p.grad) for p in self.parameters() if p.grad is not None]
        # Those of the model come from a loss that this optimizer was not given with.
        for parameter in [*self.masters.parameters, *self.parameters()]:
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
        """Restore the gradients that were put aside, after a failed block."""
        stash = self._stash
        self.forget()
        for parameter in self.parameters():
            parameter.grad = None
        for parameter, stashed in stash:
            parameter.grad = stashed

    def forget(self) -> None:
        """The gradients were cleared."""
        self._stash, self._strange, self.scaler = [], {}, None
        self.masters.clear()

    def seen(self) -> Seen:
        """The present gradients."""
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        return {(id(grad), grad._version): grad for grad in grads}

    def compare(self, before: Seen) -> None:
        """Note gradients that are not those of `before`: they have an unknown scale until they are cleared."""
        self._strange |= {key: grad for key, grad in self.seen().items() if key not in before}

    def check(self) -> None:
        """Raise ApexError where such gradients were not cleared."""
        if self._strange.keys() & self.seen().keys():
            raise ApexError(
                "this optimizer holds scaled gradients of a loss whose amp.scale_loss it was not given with: pass every optimizer whose "
                "parameters the loss depends on, as in amp.scale_loss(loss, [a, b]), or clear them with zero_grad() first"
            )
        self._strange = {}

    def check_ready(self) -> None:
        """Raise ApexError where gradients are not ready for a step."""
        if self.scaler is not None:
            raise ApexError("step() on scaled gradients: leave delay_unscale=True out of the last scale_loss")
        self.check()
        if any(p.grad is not None for p in self.masters.parameters):
            raise ApexError(
                "the model holds gradients that did not come by amp.scale_loss with this optimizer: put `with amp.scale_loss(loss, "
                "optimizers) as scaled_loss:` around every backward, with every optimizer whose parameters the loss depends on"
            )


class Stepping:
    """Comes before the optimizer's own class."""

    _amp: Share

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own step, or none after an overflow; parameters become their masters, rounded."""
        self._opt_called = True  # by which torch's schedulers know that a step came before theirs
        share = self._amp
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None and (share.masters.parameters or share.overflow is not None):
            raise ApexError("Currently, Amp does not support closure use: call the closure before step()")
        if share.overflow is not None:
            scaler, share.overflow = share.overflow, None
            reducing = f"loss scaler {scaler.number} reducing loss scale to {scaler.loss_scale()}"
            maybe_print(f"Gradient overflow.  Skipping step, {reducing}")
            share.masters.clear()
            return None
        share.check_ready()
        share.masters.pairs()  # take over weights that were loaded into the model since
        with disable_casts():
            result = super().step(*args, **kwargs)  # type: ignore[misc]
        share.masters.give_back()
        return result

    # torch's marks: the inner step calls the hooks, and schedulers read `_opt_called`.
    step.hooked = step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears gradients, of masters and of the model."""
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        self._amp.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Half parameters get masters, as those of `initialize` did."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if self._amp.mastered:
            self._amp.masters.take(self.param_groups[-1:])  # type: ignore[attr-defined]


def _check_optimizers(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        if isinstance(optimizer, Stepping) or len({*map(id, optimizers)}) < len(optimizers):
            raise ApexError("A given optimizer should only be passed through amp.initialize once")
        step: Callable[..., Any] | None = vars(optimizer).get("step")
        if step is not None and "_wrapped_by_lr_sched" not in vars(step):
            raise ApexError(
                f"the step of this {type(optimizer).__name__} was replaced by another library, past which no step can be skipped: call "
                "amp.initialize first"
            )


def _prepare_optimizer(optimizer: Any, level: Properties) -> None:
    """Give `optimizer` masters, where the level has them, and a step that may be skipped."""
    kind = type(optimizer)
    vars(optimizer).pop("step", None)  # a scheduler's counter, which ours replaces
    optimizer._amp = Share(optimizer, bool(level.master_weights))
    names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    optimizer.__class__ = type(kind.__name__, (Stepping, kind), names)
    _amp_state.optimizers.add(optimizer)


def _share_of(optimizer: Any) -> Share:
    """The state of amp for `optimizer`. Raises ApexError where it was not given to `initialize`."""
    outer = isinstance(optimizer, LARC) and not isinstance(optimizer, Stepping)
    inside = optimizer.optim if outer else optimizer
    if not isinstance(inside, Stepping):
        raise ApexError(
            f"this {type(inside).__name__} was not passed to amp.initialize: model, optimizer = amp.initialize(model, optimizer, "
            "opt_level=…) comes before amp.scale_loss"
        )
    return inside._amp


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The tensors that the optimizer steps: fp32 masters, up to date, and parameters without one. For clipping, after `scale_loss`."""
    if isinstance(optimizer, Stepping):
        optimizer._amp.masters.pairs()
    return (p for group in optimizer.param_groups for p in group["params"])


@contextmanager
def scale_loss(
    loss: Tensor, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], loss_id: int = 0,
    model: Any = None, delay_unscale: bool = False, delay_overflow_check: bool = False,
) -> Iterator[Tensor]:  # fmt: skip
    """Give a ``with`` block the scaled loss, whose ``backward()`` it calls.

    Afterwards gradients (of `master_params`) are divided by the scale, and added to those of the blocks since the last step. An
    overflow skips the next step of every optimizer given, once, and the step says so.

    Each optimizer whose parameters the loss depends on must be given. With `delay_unscale` gradients stay multiplied by the scale; the next
    block without it, with the same `loss_id`, divides them all.
    """
    if delay_overflow_check:
        raise RefusedError("delay_overflow_check=True: each overflow is looked for at once; leave it out")
    if _amp_state.opt_properties is None:
        raise ApexError(
            "Invoked 'with amp.scale_loss', but internal Amp state has not been initialized. model, optimizer = amp.initialize(model, "
            "optimizer, opt_level=...) must be called before 'with amp.scale_loss'"
        )
    if not _amp_state.opt_properties.enabled:
        yield loss
        return
    if not isinstance(loss, Tensor):
        raise ApexError(
            f"scale_loss({loss!r}, …): a {type(loss).__name__} has no backward(); pass the loss as the model's tensor, without .item()"
        )
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    shares, scaler = [_share_of(optimizer) for optimizer in given], _amp_state.loss(loss_id)
    masters = any(share.masters.parameters for share in shares)
    if not (scaler.dynamic or scaler.loss_scale() != 1.0 or masters):
        yield loss.float()
        return
    others = [share for share in map(_share_of, _amp_state.optimizers) if share not in shares]
    before = [share.seen() for share in others]
    began = [share for share in shares if share.scaler is None]
    for share in shares:
        share.begin(scaler)
    try:
        yield scaler.scaler.scale(loss.float())
    except BaseException:
        for share in began:
            share.abort()
        raise
    for share, gradients in zip(others, before):
        share.compare(gradients)
    if delay_unscale:
        return
    for share in shares:
        share.masters.gather()
    gradients = [p.grad for share in shares for p in share.parameters() if p.grad is not None]
    found = scaler.scaler.divide(gradients, loss.device)
    for share in shares:
        share.end()
    if scaler.overflowed(found):
        for share in shares:
            share.overflow = scaler


NATIVE = """
acc = Accelerator(mixed_precision="{level}")
model, optimizer, loader = acc.prepare(model, optimizer, loader)
acc.backward(loss)  # with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()
acc.clip_grad_norm_(model.parameters(), 1.0)  # clip_grad_norm_(amp.master_params(optimizer), 1.0)
optimizer.step()
"""


def initialize(
    models: Any, optimizers: Any = None, enabled: bool = True, opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None, patch_torch_functions: bool | str | None = None,
    keep_batchnorm_fp32: bool | str | None = None, master_weights: bool | str | None = None,
    loss_scale: float | str | None = None, cast_model_outputs: torch.dtype | None = None, num_losses: int = 1,
    verbosity: int = 1, min_loss_scale: float | None = None, max_loss_scale: float = 2.0**24,
) -> Any:  # fmt: skip
    """`models` and `optimizers`, the same objects, changed in place to train at `opt_level`; wrap for DDP afterwards.

    Dynamic scales begin at 2**16, double after 2,000 good blocks and are halved at an overflow. cast_model_type=False casts nothing.
    Where it raises TypeError or ApexError, nothing has changed.
    """
    nets = list(models) if isinstance(models, list) else [models]
    steppers = list(optimizers or []) if isinstance(optimizers, list | None) else [optimizers]
    if not all(isinstance(net, nn.Module) for net in nets):
        raise TypeError("models must be either a single model or a list of models")
    if not all(isinstance(stepper, torch.optim.Optimizer) for stepper in steppers):
        raise TypeError("optimizers must be either a single optimizer or a list of optimizers")
    if not enabled:
        _handle._deactivate()
        _amp_state.opt_properties, _amp_state.loss_scalers = Properties(), []
        return models if optimizers is None else (models, optimizers)
    values = (cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale)
    given = {name: value for name, value in zip(PROPERTIES, values) if value is not None}
    level = _properties(opt_level, given)
    _check_models(nets)
    _check_optimizers(steppers)
    bounds = {"min_loss_scale": min_loss_scale, "max_loss_scale": max_loss_scale}
    scalers = [LossScaler(level.loss_scale, **bounds) for _ in range(num_losses)]
    for i, scaler in enumerate(scalers):
        scaler.number = i
    _handle._deactivate()
    layer.use("amp", NATIVE.format(level=opt_level))
    _amp_state.opt_properties, _amp_state.loss_scalers, _amp_state.verbosity = level, scalers, verbosity
    changed = "".join(f", with {name}={value!r}" for name, value in given.items())
    maybe_print(f"Selected optimization level {opt_level}: its properties{changed}.", True)
    for name in PROPERTIES:
        maybe_print(f"{name:22} : {getattr(level, name)}", True)
    for net in nets:
        _prepare_model(net, level, cast_model_outputs)
    for stepper in steppers:
        _prepare_optimizer(stepper, level)
    if level.patch_torch_functions:
        _handle.on(next((p.device for net in nets for p in net.parameters()), torch.device("cpu")))
    return models if optimizers is None else (models, optimizers)


def _check_models(models: list[nn.Module]) -> None:
    for model in models:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise ApexError(
                f"Incoming model is an instance of {type(model).__name__}. Parallel wrappers should only be applied to the model(s) AFTER "
                "the model(s) have been returned from amp.initialize"
            )
        if _amp_state.allow_incoming_model_not_fp32:
            continue
        floating = [("param", *p) for p in model.named_parameters() if p[1].is_floating_point()]
        wrong = [entry for entry in floating if entry[2].dtype != torch.float32]
        wrong += [("buffer", *entry) for entry in model.named_buffers() if entry[1].dtype in LOW]
        for what, name, tensor in wrong:
            raise ApexError(
                f"Found {what} {name} with type {tensor.dtype}, expected torch.float32. When using amp.initialize, you do not "
                "need to call .half() on your model before passing it, no matter what optimization level you choose"
            )


def _prepare_model(model: nn.Module, level: Properties, outputs: torch.dtype | None) -> None:
    """Cast `model`'s parameters, inputs and outputs; for ``outputs=None`` these to fp32 where inputs are cast."""
    dtype = level.cast_model_type
    if isinstance(dtype, torch.dtype):
        if dtype in LOW:
            cast_model(model, dtype, bool(level.keep_batchnorm_fp32))
            for module in model.modules():
                module.register_state_dict_post_hook(partial(_save_in_fp32, dtype))
        model.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)
        outputs = outputs or torch.float32
    if outputs is not None:
        model.register_forward_hook(partial(_cast_outputs, outputs), prepend=True)


# Functions of the module, so that models with these hooks can be pickled.
def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return cast(args, dtype), cast(kwargs, dtype)


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, outputs: Any) -> Any:
    return cast(outputs, dtype)


def _save_in_fp32(dtype: torch.dtype, module: nn.Module, found: dict[str, Any], prefix: str, _: Any) -> None:
    """Tensors of `dtype` become fp32 in state dicts, so that checkpoints are alike at every level."""
    for name, tensor in found.items():
        if name.startswith(prefix) and isinstance(tensor, Tensor) and tensor.dtype == dtype:
            found[name] = tensor.float()


CASTS = named(
    *(float_function, half_function, init, promote_function),
    *(register_float_function, register_half_function, register_promote_function),
    disable_casts=disable_casts,
)
__all__ = [*CASTS, "initialize", "load_state_dict", "master_params", "scale_loss", "state_dict"]
OLD = "use amp.initialize(model, optimizer, opt_level='O1') and amp.scale_loss"
INTERNAL = "it is Apex's own machinery; amp.register_half_function and its kind change how functions are cast"
submodules(
    __name__,
    {
        "_amp_state": named(AmpState, master_params, maybe_print, _amp_state=_amp_state),
        "amp": CASTS,
        "frontend": named(Properties, initialize, load_state_dict, state_dict, opt_levels=LEVELS),
        "handle": named(AmpHandle, scale_loss, disable_casts=disable_casts, absent={"NoOpHandle": OLD}),
        "opt": OLD,
        "scaler": named(LossScaler),
        **dict.fromkeys(("_initialize", "_process_optimizer", "compat", "lists", "utils", "wrap"), INTERNAL),
        "rnn_compat": "torch's RNN layers need nothing",
    },
    layer,
    "apex.amp",
)
__getattr__ = layer.absent("apex.amp", {"NoOpHandle": OLD}, lambda: __all__)
