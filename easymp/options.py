"""Option records that a caller may pass: plain data, checked where it is made."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from .errors import SettingError, check_whole, nearest

if TYPE_CHECKING:  # the command line reads settings before it imports torch
    import torch

ACTIVITIES = ("cpu", "cuda", "xpu", "mtia", "hpu")


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check(good: bool, message: str) -> None:
    """Raise a SettingError with the message unless `good`."""
    if not good:
        raise SettingError(message)


def option(
    default: Any = MISSING,
    help: str = "",
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    switch: tuple[str, str] | None = None,
    make: Any = MISSING,
) -> Any:
    """A field of a record, said once: its default (or what makes it), its help for the docs, and its limits.

    `above` also asks for a finite number. `switch` has the words that false and true mean in a settings file.
    """
    limits = {"choices": choices, "least": least, "most": most, "above": above, "switch": switch}
    return field(default=default, default_factory=make, metadata={"help": help, **limits})


def refuse_retired(kind: type, names: Iterable[str]) -> None:
    """Raise a SettingError for a former option of the record `kind`."""
    for name in names:
        if instead := getattr(kind, "retired", {}).get(name):
            raise SettingError(f"{kind.__name__} no longer has the option {name!r}: {instead}")


class Record:
    """Base of option records: checks each field by its type and limits, and documents the fields of `option`.

    Attributes:
        retired: names of former options → what to use instead.
    """

    retired: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        entries = [
            textwrap.fill(f"{name}: {f.metadata['help']}.", 116, initial_indent=" " * 4, subsequent_indent=" " * 8)
            for name, f in vars(cls).items()
            if isinstance(f, dataclasses.Field) and f.metadata.get("help")
        ]
        if entries:
            parts = re.split(r"\n\n(?=Raises:|Example:)", inspect.cleandoc(cls.__doc__ or ""), maxsplit=1)
            cls.__doc__ = "\n\n".join([parts[0], "\n".join(["Attributes:", *entries]), *parts[1:]])

    def __new__(cls, *values: Any, **named: Any) -> Any:
        refuse_retired(cls, named)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            _check_field(f, getattr(self, f.name))


def _check_field(f: dataclasses.Field[Any], value: Any) -> None:
    """Refuse a value of another type than bool, int and float fields have, or outside of the field's limits."""
    kind, least, above = str(f.type), f.metadata.get("least"), f.metadata.get("above")
    if value is None and kind.endswith("None"):
        return
    if choices := f.metadata.get("choices"):
        check_word(f.name, value, choices)
    elif kind.startswith("bool"):
        check(isinstance(value, bool), f"{f.name}={value!r} is neither True nor False")
    elif kind.startswith("int"):
        check_whole(f"{f.name}={value!r}", value, least)
    elif kind.startswith("float"):
        fits = is_number(value) and (above is None or above < value < float("inf"))
        check(fits, f"{f.name}={value!r} is not a {'number' if above is None else f'finite number above {above}'}")


def check_word(name: str, value: Any, known: Collection[str]) -> None:
    """Raise a SettingError where `value` is none of `known`."""
    words = ", ".join(repr(str(word)) for word in known)
    check(value in known, f"{name}={value!r} is none of {words}{nearest(str(value), known)}")


class KwargsHandler(Record):
    """Base of the records that Accelerate takes as `kwargs_handlers`."""

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
        even_batches: complete the last round with samples from the start of the epoch's order, so that every rank has
            as many batches of one size; `gather_for_metrics` drops them again.
        use_seedable_sampler: shuffle by f(seed, epoch), the same order at any world size. False keeps the loader's own
            random sampler and draws as a plain DataLoader does; rank 0 draws for all.
        data_seed: seed of the data order; None takes the run's.
        non_blocking: copies to the device do not wait (with pinned memory; no difference on a CPU).
        use_stateful_dataloader: makes no difference: the position of every prepared loader can be saved and resumed.
        tokens: pack samples of different lengths one behind the other into micro-batches of at most so many tokens, the
            same number on every rank; see docs/guides/packing.md. `backward` of a mean loss counts each label once.
        length: with `tokens`: a function from a sample to its tokens, or a list of all samples' lengths; None takes the
            length of ``input_ids``, or of the sample.

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
    tokens: int | None = field(default=None, metadata={"least": 1})
    length: Callable[[Any], int] | Sequence[int] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dataclass_fields__:
            _check_field(self.__dataclass_fields__[name], value)
        object.__setattr__(self, name, value)


@dataclass
class ProjectConfiguration(Record):
    """Where a run keeps checkpoints and logs.

    Attributes:
        project_dir: a folder, or a URL of fsspec; checkpoints without a path go to ``project_dir/checkpoints``, or to
            ``./checkpoints``.
        logging_dir: for the script's own logs; None takes `project_dir`. Several runs may share it, and `project_dir`
            belongs to one run.
        automatic_checkpoint_naming: makes no difference: ``save_state()`` without a path always names by updates:
            ``step-00000100``.
        total_limit: how many of the checkpoints that ``save_state()`` names by itself are left, the last ones; None
            leaves all. Checkpoints that the run did not continue are not counted, and stay: `easymp checkpoint prune`
            removes them.
        iteration: saves so far; kept in checkpoints.
        save_on_each_node: only False: the ranks write one checkpoint together, in one place that all of them reach.

    Raises:
        SettingError: a value of another type, or ``save_on_each_node=True``.

    Example:
        >>> acc = Accelerator(cpu=True, project_dir=ProjectConfiguration("runs/one", total_limit=3))
        >>> acc.project_dir
        'runs/one'
        >>> project = ProjectConfiguration()
        >>> project.set_directories("runs/two")
        >>> project.logging_dir
        'runs/two'
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = field(default=None, metadata={"least": 1})
    iteration: int = field(default=0, metadata={"least": 0})
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        words = (
            "save_on_each_node=True cannot be honoured: each rank writes its part of one checkpoint. Use a folder that "
            "all nodes share, or a URL such as s3://bucket/folder"
        )
        check(not self.save_on_each_node, words)
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

    Raises:
        SettingError: a value of another type, or `num_steps` below 1.

    Example:
        >>> acc = Accelerator(cpu=True, gradient_accumulation_steps=GradientAccumulationPlugin(num_steps=4))
        >>> acc.gradient_accumulation_steps
        4
    """

    num_steps: int = option(1, "micro-batches in one update", least=1)
    adjust_scheduler: bool = option(True, "makes no difference: prepared schedulers count updates, not micro-batches")
    sync_with_dataloader: bool = option(True, "the last batch of a loader ends the update early")
    sync_each_batch: bool = option(
        False, "reduce gradients at every micro-batch: more communication, less memory under sharding"
    )


def _fp32() -> torch.dtype:
    import torch

    return torch.float32


@dataclass(frozen=True)
class AutocastKwargs(KwargsHandler):
    """Options of autocast.

    Raises:
        SettingError: a value of another type.

    Example:
        >>> settings = Settings(autocast_options=AutocastKwargs(output_dtype=None))
        >>> acc = Accelerator(cpu=True, mixed_precision="bf16", settings=settings)
        >>> acc.prepare(nn.Linear(2, 1))(torch.ones(1, 2)).dtype
        torch.bfloat16
    """

    enabled: bool = option(True, "False computes in the parameters' own dtype")
    cache_enabled: bool = option(True, "keep cast weights until the region ends")
    output_dtype: torch.dtype | None = option(
        make=_fp32, help="dtype of a prepared model's floating-point outputs; None leaves them as computed"
    )

    def __post_init__(self) -> None:
        import torch

        super().__post_init__()
        dtype = self.output_dtype
        good = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
        check(good, f"output_dtype={dtype!r} is not a floating-point type: pass torch.float32, or None")


@dataclass(frozen=True)
class GradScalerKwargs(KwargsHandler):
    """Options of the loss scale under fp16: the rule of torch.amp.GradScaler, and of Apex's and DeepSpeed's scalers.

    Raises:
        SettingError: a number is out of its range.

    Example:
        >>> rule = GradScalerKwargs(init_scale=1024.0, growth_interval=100)
        >>> acc = Accelerator(cpu=True, mixed_precision="fp16", settings=Settings(scaler_options=rule))
        >>> acc.scaler.get_scale()
        1024.0
    """

    init_scale: float = option(65536.0, "the first scale", above=0)
    growth_factor: float = option(2.0, "the scale is multiplied by it after `growth_interval` good steps", above=1)
    backoff_factor: float = option(0.5, "the scale is multiplied by it after an overflow", above=0)
    growth_interval: int = option(2000, "good steps, one after the other, before the scale grows", least=1)
    enabled: bool = option(True, "False trains fp16 without a loss scale")
    hysteresis: int = option(1, "overflows before the scale falls", least=1)
    min_scale: float = option(0.0, "the scale never falls below it")
    max_scale: float = option(float("inf"), "the scale never grows above it")
    dynamic: bool = option(True, "False keeps the scale at `init_scale`")
    growth_delay: int = option(0, "more good steps before the first growth after an overflow; DeepSpeed has 1", least=0)
    refill_each_step: bool = option(False, "a good step resets the count of `hysteresis`; else growth does")
    raise_at_minimum: bool = option(
        False, "an overflow at `min_scale` is a StepError. It costs a wait for the device at each step"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.backoff_factor < 1, f"backoff_factor={self.backoff_factor!r} of the loss scale is not below 1")
        fits = 0 <= self.min_scale <= self.max_scale
        check(fits, f"min_scale={self.min_scale!r} is not between 0 and max_scale={self.max_scale!r}")


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
    POWER_SGD = "power_sgd"  # Accelerate's; refused, as BATCHED_POWER_SGD
    BATCHED_POWER_SGD = "batched_power_sgd"


CommHook = Literal["no", "fp16", "bf16", "fp32"]
SEND_LESS = "easymp has no PowerSGD. Use comm_hook='bf16', which halves the bytes, or strategy='local_sgd'"


@dataclass(frozen=True)
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of DistributedDataParallel, with torch's names and defaults, and how gradients are communicated.

    Raises:
        SettingError: a value of another type or out of its range, or a former option.

    Example:
        >>> acc = Accelerator(cpu=True, strategy_options=DistributedDataParallelKwargs(comm_hook="bf16"))
    """

    retired: ClassVar = {
        **dict.fromkeys(("comm_wrapper", "comm_state_option"), SEND_LESS),
        "devices": "data_parallel takes all accelerators that are visible. Set CUDA_VISIBLE_DEVICES",
    }

    dim: int = option(0, "as in torch")
    broadcast_buffers: bool = option(True, "buffers (batch-norm) take rank 0's values before each forward")
    bucket_cap_mb: float = option(25, "MB of gradients that are averaged at a time", above=0)
    find_unused_parameters: bool = option(False, "parameters may stay without a gradient; searches the graph each step")
    _: dataclasses.KW_ONLY  # Accelerate has `check_reduction` in the fifth place
    gradient_as_bucket_view: bool = option(
        True, "gradients live in the buckets, which saves one copy of them; torch's default is False"
    )
    static_graph: bool = option(False, "each step uses the same parameters")
    comm_hook: DDPCommunicationHookType | CommHook = option(
        "no",
        'how gradients travel: "no", in their own dtype; "fp16" or "bf16", cast to be sent; "fp32", low-precision '
        "gradients are summed in fp32 (Apex's allreduce_always_fp32)",
        choices=get_args(CommHook),
    )
    gradient_predivide_factor: float | None = option(
        None,
        "f divides gradients before they are summed over n ranks, n/f afterwards. None divides by n before, which "
        "cannot overflow; 1.0 (Apex's default) by n afterwards, which loses no small ones",
        above=0,
    )
    context_parallel: int = option(
        1,
        "neighbouring ranks that read the same samples and share each sequence, see `Accelerator.context_parallel`. It "
        "divides the number of ranks",
        least=1,
    )

    def __post_init__(self) -> None:
        hook = self.comm_hook.value if isinstance(self.comm_hook, Enum) else self.comm_hook
        check(hook not in ("power_sgd", "batched_power_sgd"), f"comm_hook={hook!r}: {SEND_LESS}")
        object.__setattr__(self, "comm_hook", hook)
        super().__post_init__()


@dataclass(frozen=True)
class ProfileKwargs(KwargsHandler):
    """Options of `Accelerator.profile`, by Accelerate's names. Those that torch.profiler.profile has keep its defaults.

    Attributes:
        activities: names of "cpu", "cuda", "xpu", "mtia", "hpu", or torch's ProfilerActivity; None: all that the
            machine has.
        schedule_option: of torch.profiler.schedule: ``active`` steps are recorded after ``wait`` and ``warmup`` ones
            (0), again and again or ``repeat`` times, after the first ``skip_first``. None records the whole block.
        on_trace_ready: called with the profile whenever a cycle of the schedule has been recorded.
        record_shapes: as in torch.
        profile_memory: as in torch.
        with_stack: as in torch.
        with_flops: as in torch.
        with_modules: as in torch.
        output_trace_dir: a local folder for the traces, one file a rank and cycle; None: ``profile`` in the project's
            folder, or in the working directory.

    Raises:
        SettingError: a value of another type, or a schedule that torch refuses.

    Example:
        >>> with acc.profile(ProfileKwargs(schedule_option={"wait": 1, "active": 2})) as prof:
        ...     acc.backward(model(torch.ones(4, 2)).mean())
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
        super().__post_init__()
        hook, given, cycle = self.on_trace_ready, self.activities, self.schedule_option
        check(hook is None or callable(hook), f"on_trace_ready={hook!r} is not a function")
        good = given is None or (bool(given) and not isinstance(given, str))
        check(good, f'activities={given!r} is not a list such as ["cpu", "cuda"]')
        for activity in given or ():
            check_word("activities: activity", activity_word(activity), ACTIVITIES)
        if cycle is not None:
            from torch.profiler import schedule

            try:
                schedule(**{"wait": 0, "warmup": 1, **cycle})
            except (TypeError, AssertionError) as error:
                raise SettingError(
                    f"schedule_option={cycle!r} does not suit torch.profiler.schedule ({error}): pass a dict such as "
                    '{"wait": 1, "warmup": 1, "active": 3}'
                ) from None


def activity_word(given: Any) -> str:
    """The name of an activity in `ProfileKwargs`."""
    return str(getattr(given, "name", given)).lower()
