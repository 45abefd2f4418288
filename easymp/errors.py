"""The errors of easymp. Every message names the value, the reason, and the remedy.

The classes also derive from the builtin that a careful caller would expect (ValueError, RuntimeError …), so that
existing ``except`` clauses keep working.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, NoReturn, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

PASSWORDS = re.compile(r"(://[^/\s:@]*):(?:\S*@|(?!\d{1,5}\b)[^/\s]+)|://[^/\s:?#]*@")
QUERY_SECRETS = re.compile(
    r"([?&#][^\s=&?#]*(?:sig|key|token|secret|pass|pwd|auth|cred|accessid)[^\s=&?#]*=)[^\s&#'\"]*", re.I
)
ALIKE = "Every rank must pass the same structure, dtypes and shapes"


def redact(text: str) -> str:
    """Mask passwords, tokens and keys of the URLs in `text`.

    A password may hold "/" and "@", so everything up to the last "@" of the URL is masked. Of a URL that was cut inside
    of its password, all behind the colon is masked, unless it is a port.
    """
    if "://" not in text:
        return text
    text = PASSWORDS.sub(lambda match: f"{match[1]}:***@" if match[1] is not None else "://***@", text)
    return QUERY_SECRETS.sub(r"\1***", text)


class EasympError(Exception):
    """Base of every error that easymp raises on purpose. Secrets of URLs in its message are masked.

    Example:
        >>> try:
        ...     Accelerator(strategy="dpd")
        ... except EasympError as error:
        ...     print(type(error).__name__)
        SettingError
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact(arg) if isinstance(arg, str) else arg for arg in args))

    def add_note(self, note: str) -> None:
        super().add_note(redact(note))


class SettingError(EasympError, ValueError):
    """A setting has a wrong name, type or value.

    Example:
        >>> resolve(strategy="dpd")
        Traceback (most recent call last):
        easymp.errors.SettingError: strategy='dpd' is not one of auto, ..., did you mean 'ddp'?
    """


class RefusedError(EasympError, ValueError):
    """A request cannot be met here. The message gives the reason and an alternative.

    Example:
        >>> Accelerator(cpu=True, strategy="fsdp")
        Traceback (most recent call last):
        easymp.errors.RefusedError: strategy='fsdp' cannot run here: ...
    """


class PrepareError(EasympError, ValueError):
    """The objects given to `prepare` do not fit together.

    Example:
        >>> Accelerator(cpu=True).prepare(torch.optim.SGD(nn.Linear(2, 1).parameters()))
        Traceback (most recent call last):
        easymp.errors.PrepareError: SGD holds a parameter of shape (1, 2) ... that belongs to no prepared model: ...
    """


class StepError(EasympError, RuntimeError):
    """A call of the training step came too early, too late, or in the wrong place.

    Example:
        >>> Accelerator(cpu=True).backward(torch.ones(()))
        Traceback (most recent call last):
        easymp.errors.StepError: backward() got a loss without a graph ...
    """


class NonfiniteError(EasympError, FloatingPointError):
    """A loss or gradient is infinite or NaN under ``Accelerator(nonfinite="raise")``.

    Example:
        >>> acc = Accelerator(cpu=True, nonfinite="raise")
        >>> model, optimizer = acc.prepare(model, optimizer)
        >>> acc.backward(model(torch.full((1, 2), torch.inf)).sum())
        >>> optimizer.step()
        Traceback (most recent call last):
        easymp.errors.NonfiniteError: step 1: the loss is not finite on rank 0 ...
    """


class BatchError(EasympError, ValueError):
    """A batch or loader has the wrong shape, length or structure for the call.

    Example:
        >>> skip_first_batches([1, 2], 1)
        Traceback (most recent call last):
        easymp.errors.BatchError: skip_first_batches takes a DataLoader, got a list: ...
    """


class LengthError(BatchError, TypeError):
    """A loader has no length. Python's own word for that is TypeError: `list`, tqdm and others go on without one."""


class LeafError(BatchError, TypeError):
    """A leaf is not a tensor. Python's own word for that is TypeError."""


class ArgumentError(SettingError, TypeError):
    """A call does not take this argument. Python's own word for that is TypeError."""


class WorldError(EasympError, RuntimeError):
    """Ranks disagree, are missing, or do not answer.

    Example:
        >>> debug_launcher(lambda: 1 / 0)
        Traceback (most recent call last):
        easymp.errors.WorldError: rank ... of 2 failed first: ZeroDivisionError: division by zero
        ...
    """


class CheckpointError(EasympError, RuntimeError, ValueError):
    """A checkpoint cannot be written or read. Live objects are unchanged, unless the message says otherwise.

    Example:
        >>> load("missing.safetensors")
        Traceback (most recent call last):
        easymp.errors.CheckpointError: ...missing.safetensors: there is no such file
    """


class NoCheckpointError(CheckpointError):
    """A path holds no checkpoint, neither a good one nor a damaged one."""


class TrackerError(EasympError, RuntimeError):
    """A tracker cannot start.

    Example:
        >>> class Broken(GeneralTracker):
        ...     name = "broken"
        ...     def start(self):
        ...         raise OSError("no disk")
        >>> Accelerator(cpu=True, log_with=Broken()).get_tracker("broken")
        Traceback (most recent call last):
        easymp.errors.TrackerError: tracker broken could not start: OSError: no disk. ...
    """


class KernelError(EasympError, RuntimeError):
    """A kernel cannot be compiled or started on this machine. torch's own step is taken where there is one.

    Example:
        >>> issubclass(KernelError, RuntimeError)
        True
    """


class EasympWarning(UserWarning):
    """Something works, but probably not as intended.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", EasympWarning)  # makes errors of them
    """


# What strategies and precisions are called elsewhere, where the closest spelling is another one; and the options that
# make them equal, as TOML writes them.
KEPT, MOVED = "fsdp reshard_after_forward=false", "fsdp cpu_offload=true"
ELSEWHERE = {
    **dict.fromkeys(("zero", "zero_1", "deepspeed_stage_1"), "zero1"),
    **dict.fromkeys(("zero2", "zero_2", "deepspeed_stage_2", "shard_grad_op"), KEPT),
    **dict.fromkeys(("zero3", "zero_3", "deepspeed", "deepspeed_stage_3", "full_shard"), "fsdp"),
    **dict.fromkeys(("deepspeed_stage_2_offload", "zero2_offload"), f"{KEPT} cpu_offload=true"),
    **dict.fromkeys(("zero_offload", "zero3_offload", "deepspeed_stage_3_offload"), MOVED),
    **dict.fromkeys(("fsdp1", "fsdp2", "fully_shard"), "fsdp"),
    "hybrid_shard": "hsdp",
    **dict.fromkeys(("_hybrid_shard_zero2", "hybrid_shard_zero2"), "hsdp reshard_after_forward=false"),
    **dict.fromkeys(("dp", "no_shard", "ddp_spawn", "multi_gpu", "multi_cpu", "horovod"), "ddp"),
    "ddp_find_unused_parameters_true": "ddp find_unused_parameters=true",
    **dict.fromkeys(("tp", "mp", "megatron", "megatron_lm", "model_parallel"), "tensor_parallel"),
    **dict.fromkeys(("pp", "gpipe"), "pipeline"),
    "1f1b": "pipeline schedule='1f1b'",
    "diloco": "local_sgd",
    **dict.fromkeys(("amp", "mixed", "bf16_mixed", "bfloat16_mixed"), "bf16"),
    **dict.fromkeys(("16", "16_mixed", "fp16_mixed", "float16_mixed"), "fp16"),
    **dict.fromkeys(("32", "32_true", "full"), "fp32"),
    **dict.fromkeys(("transformer_engine", "float8", "e4m3", "hybrid"), "fp8"),
}


# Words that earlier versions took, and what to use in their place.
COMPARE = "easymp compare measures the time of a training"
REMOVED = {
    "probe": f'"auto" follows a rule, and {COMPARE}',
    "--measure": COMPARE,
    "--time": COMPARE,
    "--predict": f"{COMPARE}, and easymp estimate counts bytes",
    **dict.fromkeys(("mxfp8", "nvfp4"), "use fp8 or bf16"),
    **dict.fromkeys(("numa", "--no-numa"), "torchrun --numa-binding=node binds ranks to NUMA nodes; else leave it out"),
    "--per-node": "--for 2x4xH100 says how many ranks a node has",
    "--dtype": "--precision bf16-true counts weights that are trained in bf16",
    "--cpu": "--for 8xcpu-64GB describes processes on CPUs",
    "--html": "--output curves.svg draws a picture, and easymp compare RUN RUN compares runs",
    "--all": "--set KEY=VALUE answers ahead, also a question that is not asked",
    "--slurm": "sbatch a script as in the guide to Slurm, with srun easymp launch train.py in it",
}
# For options of easymp.optim's optimizers, whose names stand elsewhere.
OPTIMIZER_REMEDY = "Accelerator(ema_decay=…), the setting stochastic_rounding, and easymp.optim.Engine have these"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for a wrong `name`: ``", did you mean 'x'?"`` with the closest of `known`, ``""`` if none is close.

    A known name that begins with `name` is close. Case and a common beginning (``--``, ``EASYMP_``) are ignored.
    """
    if remedy := REMOVED.get(str(name).lower().removeprefix("easymp_")):
        return f": it was removed. Instead: {remedy}."
    wanted = _stem(name)
    spelled = {_stem(k): str(k) for k in known if k}
    same, *options = ELSEWHERE.get(str(name).lower().replace("-", "_"), "").split(" ")
    close = [same] if same in spelled else get_close_matches(wanted, spelled, n=1, cutoff=0.6)
    if not close and len(wanted) > 2:
        close = sorted((stem for stem in spelled if stem.startswith(wanted)), key=len)[:1]
    more = f" with {' and '.join(options)}" if options and close == [same] else ""
    return f", did you mean {spelled[close[0]]!r}{more}?" if close else ""


def join_some(texts: Sequence[str], separator: str = "; ", limit: int = 5) -> str:
    """The first few texts, and the number of the others."""
    hidden = len(texts) - limit
    return separator.join(texts[:limit]) + (f" and {hidden} more" if hidden > 0 else "")


def _stem(name: str) -> str:
    return str(name).lower().removeprefix("--").removeprefix("easymp_")


def is_whole(value: Any, least: int | None = None) -> bool:
    """Whether `value` is an integer, and at least `least`. True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def check_whole(label: str, value: Any, least: int | None = 1, kind: type[Exception] = SettingError) -> int:
    """Return `value`; raise `kind` where it is not an integer of at least `least`. `label` shows it: ``"steps=0"``."""
    if not is_whole(value, least):
        raise kind(f"{label} is not a whole number{f' of at least {least}' if least else ''}")
    return value  # type: ignore[no-any-return]


def with_script_line(error: BaseException) -> str:
    """The message of `error`, with the script's line that led to it: ``"lr=-1 must be … (/home/me/train.py:3)"``."""
    package, place = os.path.dirname(__file__), ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not frame.f_code.co_filename.startswith(package):
            place = f" ({frame.f_code.co_filename}:{line})"
        elif place:
            break
    return f"{error}{place}"


def failing() -> bool:
    """Whether an error is being handled, or has ended the script, so that the interpreter is exiting."""
    return sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None


# -- words of earlier versions and of Accelerate that easymp lacks, and what to write in their place

LOADER_OPTIONS = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
# Keywords of the constructor.
SETTING_REMEDIES = {
    name: f"pass settings=Settings({name}=...)"
    for name in (
        *("activation_offload", "convert_sync_batchnorm", "debug", "device_placement", "fused", "gc", "hang_after"),
        *("initialize", "memory", "optimizer_in_backward", "replay", "replica_check", "stochastic_rounding", "timeout"),
    )
}
OTHER_ARGUMENTS = {
    **SETTING_REMEDIES,
    **{name: f"pass dataloader_config=DataLoaderConfiguration({name}=...)" for name in LOADER_OPTIONS},
    "step_scheduler_with_optimizer": "prepared schedulers step once an update; easymp.compat.accelerate has this word",
    "scheduler_steps_per_process": "leave it out: prepared schedulers step once an update, and those of "
    "easymp.compat.accelerate once for each process, as Accelerate's do",
    **dict.fromkeys(
        ("deepspeed_plugin", "deepspeed_plugins"),
        "pass strategy='zero1' (ZeRO-1) or 'fsdp' (ZeRO-2 and 3), and strategy_options",
    ),
    "kwargs_handlers": "pass strategy_options=DistributedDataParallelKwargs(...), Settings(autocast_options=..., "
    "scaler_options=..., timeout=...) as settings, and a ProfileKwargs to profile()",
    "gradient_accumulation_plugin": "pass it as gradient_accumulation_steps",
    "project_config": "pass it as project_dir",
    "dynamo_backend": "pass compile=CompileOptions(backend=...)",
    "dynamo_plugin": "pass compile=CompileOptions(...)",
    "rng_types": "leave it out: data order is f(seed, epoch) on every rank, so there is nothing to synchronise",
    "fsdp_plugin": "pass strategy='fsdp' and strategy_options=FSDPOptions(...)",
    "torch_tp_plugin": "pass strategy='tensor_parallel' and strategy_options=TensorParallelOptions(...)",
    "megatron_lm_plugin": "pass strategy='tensor_parallel' or 'pipeline', and strategy_options",
    "parallelism_config": "pass strategy='hsdp' or 'tensor_parallel', and strategy_options",
}

# Attributes and methods.
BY_LAYER = "easymp.compat.accelerate.Accelerator has it"
OTHER_ATTRIBUTES = {
    "guard": "pass parts=[easymp.SpikeGuard(...)] to Accelerator, which judges each update by itself",
    "hardware": "use plan.hardware",
    "trackers": "use get_tracker(name)",
    "clear": "use free_memory()",
    "get_state_dict": "use dict(accelerator.weights(model)), which gives every rank all tensors",
    **dict.fromkeys(
        ("prepare_model", "prepare_optimizer", "prepare_scheduler", "prepare_data_loader"),
        "use prepare(), for any object",
    ),
    **dict.fromkeys(
        ("register_save_state_pre_hook", "register_load_state_pre_hook"),
        f"use register_for_checkpointing() or a Part with state() and load(); {BY_LAYER}",
    ),
    **dict.fromkeys(
        ("on_local_main_process", "on_last_process", "on_process", "on_local_process", "is_last_process"),
        "compare process_index or local_process_index",
    ),
    "use_distributed": f"use num_processes > 1; {BY_LAYER}",
    "distributed_type": f"use device and plan.strategy; {BY_LAYER}",
    "project_configuration": f"keep the ProjectConfiguration that you pass as project_dir; {BY_LAYER}",
    "logging_dir": f"keep the ProjectConfiguration that you pass as project_dir; {BY_LAYER}",
    "save_iteration": BY_LAYER,
    "state": f"use the Accelerator itself; {BY_LAYER}",
    "gradient_state": f"use sync_gradients and the prepared loader's `last`; {BY_LAYER}",
    "trigger_sync_in_backward": "call the model outside of no_sync() in the micro-step whose gradients are averaged",
    **dict.fromkeys(
        (*LOADER_OPTIONS, "non_blocking", "use_stateful_dataloader"),
        "keep the DataLoaderConfiguration that you pass as dataloader_config",
    ),
}


def refuse_argument(name: str, arguments: Iterable[str]) -> NoReturn:
    """Raise an ArgumentError for a keyword that Accelerator() does not take."""
    remedy = OTHER_ARGUMENTS.get(name)
    hint = nearest(name, arguments) if remedy is None else f": {remedy}"
    raise ArgumentError(f"Accelerator() has no argument {name!r}{hint}")


def without(**remedies: str) -> Callable[[Function], Function]:
    """Decorate a function that has lost these keywords: a call with one is an ArgumentError that says what to do."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def checked(*args: Any, **keywords: Any) -> Any:
            for name in keywords.keys() & remedies.keys():
                raise ArgumentError(f"{function.__name__}() has no argument {name!r}: {remedies[name]}")
            return function(*args, **keywords)

        return checked  # type: ignore[return-value]

    return decorate
