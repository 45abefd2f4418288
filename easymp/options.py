"""Option records that a caller may pass: plain data, checked where it is made."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, StrEnum
from typing import Any, Literal, get_args

import torch

from .errors import SettingError, nearest

ACTIVITIES = ("cpu", "cuda", "xpu", "mtia", "hpu")


def _whole(value: Any, least: int | None = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check(good: bool, words: str) -> None:
    if not good:
        raise SettingError(words)


def check_fields(record: Any) -> None:
    """Refuse a wrong type in the bool, int and float fields of `record`."""
    for f in dataclasses.fields(record):
        _check_field(f, getattr(record, f.name))


def _check_field(f: dataclasses.Field[Any], value: Any) -> None:
    """Refuse a wrong type; an int field may have a ``least`` in its metadata."""
    kind, least = str(f.type), f.metadata.get("least")
    if value is None and kind.endswith("None"):
        return
    if kind.startswith("bool"):
        _check(isinstance(value, bool), f"{f.name}={value!r} is neither True nor False")
    elif kind.startswith("int"):
        bound = f" of at least {least}" if least else ""
        _check(_whole(value, least), f"{f.name}={value!r} is not a whole number{bound}")
    elif kind == "float":
        _check(_number(value), f"{f.name}={value!r} is not a number")


def check_word(name: str, value: Any, known: Collection[str]) -> None:
    """Raise a SettingError where `value` is none of `known`."""
    words = ", ".join(repr(str(word)) for word in known)
    _check(value in known, f"{name}={value!r} is none of {words}{nearest(str(value), known)}")


Tests = Mapping[str, tuple[Callable[[Any], bool], str]]  # by name: a test of a value, and the test in words


def _check_table(name: str, given: Any, known: Tests) -> None:
    """Refuse anything but a dict of `known` names and good values."""
    _check(isinstance(given, Mapping), f"{name} is a {type(given).__name__}, not a dict")
    for key, value in given.items():
        near = nearest(str(key), known) or "."
        _check(key in known, f"{name} has no {key!r}{near} Known: {', '.join(known)}")
        good, words = known[key]
        _check(good(value), f"{key}={value!r} in {name} is not {words}")


class KwargsHandler:
    """Base of the records for `kwargs_handlers`."""

    def to_dict(self) -> dict[str, Any]:
        """Copy all fields.

        Returns:
            Values by name.

        Example:
            >>> easymp.GradScalerKwargs(growth_interval=100).to_dict()["growth_interval"]
            100
        """
        return copy.deepcopy(vars(self))

    def to_kwargs(self) -> dict[str, Any]:
        """Copy the fields that differ from their defaults.

        Returns:
            Values by name.

        Example:
            >>> easymp.GradScalerKwargs(growth_interval=100).to_kwargs()
            {'growth_interval': 100}
        """
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != default[name]}


@dataclass(slots=True)
class DataLoaderConfiguration:
    """How prepared loaders read. A change of a field counts for loaders that are prepared after it.

    Attributes:
        split_batches: the loader's batch size is that of all ranks together; each gets its part.
        dispatch_batches: rank 0 reads and sends; None and False let every rank read its own share.
        even_batches: complete the last round with samples from the start of the epoch's order, so that every rank has as
            many batches of one size; `gather_for_metrics` drops them again.
        use_seedable_sampler: shuffle by f(seed, epoch), the same order at any world size. False keeps the loader's own
            random sampler, drawn on rank 0.
        data_seed: seed of the data order; None takes the run's.
        non_blocking: copies to the device do not wait (with pinned memory; no difference on a CPU).
        use_stateful_dataloader: makes no difference: the position of every prepared loader can be saved and resumed.

    Raises:
        SettingError: a value of another type.

    Example:
        >>> acc = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True, data_seed=1))
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    data_seed: int | None = None
    non_blocking: bool = True
    use_stateful_dataloader: bool = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dataclass_fields__:
            _check_field(self.__dataclass_fields__[name], value)
        object.__setattr__(self, name, value)


@dataclass
class ProjectConfiguration:
    """Where a run keeps checkpoints and logs.

    Attributes:
        project_dir: a folder, or a URL of fsspec; checkpoints without a path go to ``project_dir/checkpoints``, or to ``./checkpoints``.
        logging_dir: for the script's own logs; None takes `project_dir`. Several runs may share it, and `project_dir` belongs to one run.
        automatic_checkpoint_naming: makes no difference: ``save_state()`` without a path always names by updates: ``step-00000100``.
        total_limit: how many of the checkpoints that ``save_state()`` names by itself are left, the last ones; None leaves all. Checkpoints
            that the run did not continue are not counted, and stay: `easymp checkpoint prune` removes them.
        iteration: saves so far; kept in checkpoints.
        save_on_each_node: only False: the ranks write one checkpoint together, in one place that all of them reach.

    Raises:
        SettingError: a value of another type, or ``save_on_each_node=True``.

    Example:
        >>> acc = Accelerator(cpu=True, project_config=ProjectConfiguration("runs/one", total_limit=3))
        >>> acc.project_configuration.set_directories("runs/two")
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = field(default=None, metadata={"least": 1})
    iteration: int = field(default=0, metadata={"least": 0})
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        words = (
            "save_on_each_node=True cannot be honoured: each rank writes its part of one checkpoint. Use a folder that all nodes share, or "
            "a URL such as s3://bucket/folder"
        )
        _check(not self.save_on_each_node, words)
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: Any = None) -> None:
        """Change `project_dir`, and `logging_dir` too where it was the same.

        Args:
            project_dir: a folder or URL.
        """
        apart = None if self.logging_dir in (None, self.project_dir) else os.fspath(self.logging_dir)
        self.project_dir = None if project_dir is None else os.fspath(project_dir)
        self.logging_dir = self.project_dir if apart is None else apart


@dataclass(frozen=True)
class GradientAccumulationPlugin(KwargsHandler):
    """When gradients are reduced and optimizers step.

    Attributes:
        num_steps: micro-batches in one update.
        adjust_scheduler: makes no difference: prepared schedulers count updates, not micro-batches.
        sync_with_dataloader: the last batch of a loader ends the update early.
        sync_each_batch: reduce gradients at every micro-batch: more communication, less memory under sharding.

    Raises:
        SettingError: a value of another type, or `num_steps` below 1.

    Example:
        >>> acc = Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4))
        >>> acc.gradient_accumulation_steps
        4
    """

    num_steps: int = field(default=1, metadata={"least": 1})
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class AutocastKwargs(KwargsHandler):
    """Options of autocast.

    Attributes:
        enabled: False computes in the parameters' own dtype.
        cache_enabled: keep cast weights until the region ends.
        output_dtype: dtype of a prepared model's floating-point outputs; None leaves them as computed.

    Raises:
        SettingError: a value of another type.

    Example:
        >>> acc = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(output_dtype=None)])
        >>> acc.prepare(nn.Linear(2, 1))(torch.ones(1, 2)).dtype
        torch.bfloat16
    """

    enabled: bool = True
    cache_enabled: bool = True
    output_dtype: torch.dtype | None = torch.float32

    def __post_init__(self) -> None:
        check_fields(self)
        dtype = self.output_dtype
        good = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
        _check(good, f"output_dtype={dtype!r} is not a floating-point type: pass torch.float32, or None")


@dataclass(frozen=True)
class GradScalerKwargs(KwargsHandler):
    """Options of the loss scale under fp16: the rule of torch.amp.GradScaler, and of Apex's and DeepSpeed's scalers.

    Attributes:
        init_scale: the first scale.
        growth_factor: the scale is multiplied by it after `growth_interval` good steps.
        backoff_factor: the scale is multiplied by it after an overflow.
        growth_interval: good steps, one after the other, before the scale grows.
        enabled: False trains fp16 without a loss scale.
        hysteresis: overflows before the scale falls.
        min_scale: the scale never falls below it.
        max_scale: the scale never grows above it.
        dynamic: False keeps the scale at `init_scale`.
        growth_delay: further good steps before the first growth after an overflow; DeepSpeed has 1.
        refill_each_step: a good step resets the count of `hysteresis`; else growth does.
        raise_at_minimum: an overflow at `min_scale` is a StepError. It costs a wait for the device at each step.

    Raises:
        SettingError: a number is out of its range.

    Example:
        >>> rule = GradScalerKwargs(init_scale=1024.0, growth_interval=100)
        >>> Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[rule]).scaler.get_scale()
        1024.0
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True
    hysteresis: int = 1
    min_scale: float = 0.0
    max_scale: float = float("inf")
    dynamic: bool = True
    growth_delay: int = 0
    refill_each_step: bool = False
    raise_at_minimum: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name, good, rule in (
            ("init_scale", 0 < self.init_scale < float("inf"), "a positive finite number"),
            ("growth_factor", self.growth_factor > 1 or not self.dynamic, "above 1"),
            ("backoff_factor", 0 < self.backoff_factor < 1 or not self.dynamic, "between 0 and 1"),
            ("growth_interval", self.growth_interval >= 1, "at least 1"),
            ("hysteresis", self.hysteresis >= 1, "at least 1"),
            ("min_scale", 0 <= self.min_scale <= self.max_scale, "at least 0 and at most the maximum"),
        ):
            _check(good, f"{name}={getattr(self, name)!r} of the loss scale must be {rule}")


class LoggerType(StrEnum):
    """Names of trackers for `log_with`. Those of Accelerate that easymp does not have are refused with the reason.

    Example:
        >>> acc = Accelerator(cpu=True, log_with=LoggerType.JSONL)
    """

    ALL = "all"
    JSONL = "jsonl"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"
    CONSOLE = "console"
    AIM = "aim"
    CLEARML = "clearml"
    COMETML = "comet_ml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"
    TRACKIO = "trackio"


class DDPCommunicationHookType(StrEnum):
    """Values of `DistributedDataParallelKwargs.comm_hook`.

    Example:
        >>> DDPCommunicationHookType.BF16.value
        'bf16'
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


CommHook = Literal["no", "fp16", "bf16", "fp32", "power_sgd", "batched_power_sgd"]  # the same words
CommWrapper = Literal["no", "fp16", "bf16"]


COUNT = (lambda v: _whole(v, 0), "a whole number")
POSITIVE = (lambda v: _whole(v, 1), "a whole number of at least 1")
EITHER = (lambda v: isinstance(v, bool), "True or False")
# What torch's PowerSGDState takes beside the process group.
POWER_SGD: Tests = {
    **dict.fromkeys(("matrix_approximation_rank", "compression_stats_logging_frequency"), POSITIVE),
    **dict.fromkeys(("start_powerSGD_iter", "random_seed"), COUNT),
    **dict.fromkeys(("use_error_feedback", "warm_start", "batch_tensors_with_same_shape"), EITHER),
    "min_compression_rate": (lambda v: _number(v) and v > 0, "a number above 0"),
    "orthogonalization_epsilon": (lambda v: _number(v) and v >= 0, "a number of at least 0"),
}


@dataclass(frozen=True)
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of DistributedDataParallel, with torch's names and defaults, and how gradients are communicated.

    Attributes:
        dim: as in torch.
        broadcast_buffers: rank 0's buffers go to all ranks at each forward.
        bucket_cap_mb: MB of gradients that are reduced at a time.
        find_unused_parameters: look for parameters that a forward did not use.
        gradient_as_bucket_view: gradients live in the buckets, which saves one copy of them; True here, unlike in torch.
        static_graph: each step uses the same parameters.
        comm_hook: "no": in the gradients' own dtype; "fp16", "bf16": cast to be sent; "fp32": low-precision gradients are
            summed in fp32 (Apex's allreduce_always_fp32); "power_sgd": as products of two thin matrices, one pair a parameter
            (Vogels et al., arXiv:1905.13727); "batched_power_sgd": one pair a bucket, faster and less accurate.
        comm_wrapper: "fp16" or "bf16": dtype of PowerSGD's matrices.
        comm_state_option: options of torch's PowerSGDState, above all ``matrix_approximation_rank`` (1) and
            ``start_powerSGD_iter`` (1000; whole gradients are sent until then).
        gradient_predivide_factor: f divides gradients before they are summed over n ranks, n/f afterwards. None divides by n
            before, which cannot overflow; 1.0 (Apex's default) by n afterwards, which loses no small ones.
        context_parallel: neighbouring ranks that read the same samples and share each sequence, see
            `Accelerator.context_parallel`. On CUDA only. It divides the number of ranks.

    Raises:
        SettingError: a value of another type, or options that exclude each other.

    Example:
        >>> ddp = DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option={"start_powerSGD_iter": 10})
        >>> ddp.low_rank, ddp.remembers
        (True, True)
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: float = 25
    find_unused_parameters: bool = False
    _: dataclasses.KW_ONLY  # Accelerate has `check_reduction` in the fifth place
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | CommHook = "no"
    comm_wrapper: CommWrapper | DDPCommunicationHookType = "no"
    comm_state_option: Mapping[str, Any] = field(default_factory=dict)
    gradient_predivide_factor: float | None = None
    context_parallel: int = field(default=1, metadata={"least": 1})

    @property
    def low_rank(self) -> bool:
        """Whether gradients are sent as products of thin matrices."""
        return self.comm_hook in ("power_sgd", "batched_power_sgd")

    @property
    def remembers(self) -> bool:
        """Whether PowerSGD keeps a state from one step to the next."""
        state = self.comm_state_option
        return self.low_rank and (state.get("use_error_feedback", True) or state.get("warm_start", True))

    def __post_init__(self) -> None:
        check_fields(self)
        for name, known in (("comm_hook", get_args(CommHook)), ("comm_wrapper", get_args(CommWrapper))):
            given = getattr(self, name)
            word = given.value if isinstance(given, Enum) else given
            check_word(name, word, known)
            object.__setattr__(self, name, str(word))
        state, factor = self.comm_state_option, self.gradient_predivide_factor
        hook, wrapper = self.comm_hook, self.comm_wrapper
        _check_table("comm_state_option", state, POWER_SGD)
        start, alone = state.get("start_powerSGD_iter", 1000), not self.low_rank
        good = factor is None or (_number(factor) and 0 < factor < float("inf"))
        for wrong, words in (
            (
                not self.bucket_cap_mb > 0,
                f"bucket_cap_mb={self.bucket_cap_mb!r} is not a number of MB above 0",
            ),
            (
                wrapper != "no" and alone,
                f"comm_wrapper={wrapper!r} but comm_hook={hook!r}: pass comm_hook={wrapper!r} alone, or comm_hook='power_sgd' too",
            ),
            (
                state and alone,
                f"comm_state_option holds options of PowerSGD, but comm_hook={hook!r}: pass comm_hook='power_sgd', or leave them out",
            ),
            (
                start < 2 and self.remembers,
                f"start_powerSGD_iter={start} is too early, torch reorders buckets: pass 2 or more, or no error feedback and warm start",
            ),
            (not good, f"gradient_predivide_factor={factor!r} is not a finite number above 0"),
            (
                factor is not None and not alone,
                f"gradient_predivide_factor={factor} has no effect under comm_hook={hook!r}, which sums no gradients: leave one out",
            ),
        ):
            _check(not wrong, words)


@dataclass(frozen=True)
class InitProcessGroupKwargs(KwargsHandler):
    """Options of the process group.

    Attributes:
        backend: only the usual one of the device: "gloo" on CPUs, "nccl" on NVIDIA and AMD, "xccl" on Intel.
        init_method: only "env://": the launcher decides where ranks meet.
        timeout: how long a collective may wait for the other ranks: a timedelta, or seconds.

    Raises:
        SettingError: another `init_method`, or a `timeout` that is not above 0.

    Example:
        >>> InitProcessGroupKwargs(timeout=600).seconds
        600.0
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | float = 120.0

    def __post_init__(self) -> None:
        words = "ranks meet where the launcher says (MASTER_ADDR and MASTER_PORT). Leave it out"
        asked = f"init_method={self.init_method!r} is not honoured: {words}"
        _check(self.init_method in (None, "env://"), asked)
        good = (isinstance(self.timeout, timedelta) or _number(self.timeout)) and self.seconds > 0
        _check(good, f"timeout={self.timeout!r} is neither a timedelta nor a number of seconds above 0")

    @property
    def seconds(self) -> float:
        """The timeout in seconds."""
        return self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else float(self.timeout)


SCHEDULE = {
    **dict.fromkeys(("wait", "warmup", "repeat", "skip_first", "skip_first_wait"), COUNT),
    "active": POSITIVE,
}


@dataclass(frozen=True)
class ProfileKwargs(KwargsHandler):
    """Options of `Accelerator.profile`, by Accelerate's names. Those that torch.profiler.profile has keep its defaults.

    Attributes:
        activities: names of "cpu", "cuda", "xpu", "mtia", "hpu", or torch's ProfilerActivity; None: all that the machine has.
        schedule_option: of torch.profiler.schedule: ``active`` steps are recorded after ``wait`` and ``warmup`` ones (0), again and again
            or ``repeat`` times, after the first ``skip_first``. None records the whole block.
        on_trace_ready: called with the profile whenever a cycle of the schedule has been recorded.
        record_shapes: as in torch.
        profile_memory: as in torch.
        with_stack: as in torch.
        with_flops: as in torch.
        with_modules: as in torch.
        output_trace_dir: a local folder for the traces, one file a rank and cycle; None: ``profile`` in the project's folder, or in the
            working directory.

    Raises:
        SettingError: a value of another type, or a schedule without ``active``.

    Example:
        >>> acc = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(schedule_option={"wait": 1, "active": 2})])
    """

    activities: Sequence[str | torch.profiler.ProfilerActivity] | None = None
    schedule_option: Mapping[str, int] | None = None
    on_trace_ready: Callable[[Any], Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        hook, given, cycle = self.on_trace_ready, self.activities, self.schedule_option
        _check(hook is None or callable(hook), f"on_trace_ready={hook!r} is not a function")
        good = given is None or (bool(given) and not isinstance(given, str))
        _check(good, f'activities={given!r} is not a list such as ["cpu", "cuda"]')
        for activity in given or ():
            check_word("activities: activity", activity_word(activity), ACTIVITIES)
        if cycle is not None:
            _check_table("schedule_option", cycle, SCHEDULE)
            words = "schedule_option names no active steps, so nothing is recorded: add active=3"
            _check("active" in cycle, words)


def activity_word(given: Any) -> str:
    """The name of an activity in `ProfileKwargs`."""
    return str(getattr(given, "name", given)).lower()


HANDLERS: tuple[type[Any], ...] = (
    *(AutocastKwargs, GradScalerKwargs, DistributedDataParallelKwargs, InitProcessGroupKwargs, ProfileKwargs),
)


def by_kind(handlers: Sequence[Any] | None) -> dict[type, Any]:
    """kwargs_handlers by their type, at most one of each."""
    found: dict[type, Any] = {}
    for handler in handlers or ():
        kind, known = type(handler), ", ".join(kind.__name__ for kind in HANDLERS)
        _check(kind in HANDLERS, f"kwargs_handlers holds a {kind.__name__}; it takes {known}")
        _check(kind not in found, f"kwargs_handlers holds two {kind.__name__}: pass one")
        found[kind] = handler
    return found
