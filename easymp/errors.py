"""The errors of easymp. Every message names the value, the reason, and the remedy.

The classes also derive from the builtin that a careful caller would expect (ValueError, RuntimeError …), so that existing
``except`` clauses keep working.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from difflib import get_close_matches

ALIKE = "Every rank must pass the same structure, dtypes and shapes"


class EasympError(Exception):
    """Base of every error that easymp raises on purpose."""


class SettingError(EasympError, ValueError):
    """A setting has a wrong name, type or value."""


class RefusedError(EasympError, ValueError):
    """Something was asked for that cannot be done here; the message holds the reason and the way out."""


class PrepareError(EasympError, ValueError):
    """The objects given to `prepare` do not fit together."""


class StepError(EasympError, RuntimeError):
    """A call of the training step came too early, too late, or in the wrong place."""


class NonfiniteError(EasympError, FloatingPointError):
    """A loss or gradient is infinite or not a number, and ``nonfinite="raise"`` was asked for."""


class BatchError(EasympError, ValueError):
    """A batch or loader does not have the shape, length or structure that the call needs."""


class LengthError(BatchError, TypeError):
    """A loader has no length. Python's own word for that is TypeError: `list`, tqdm and others go on without one."""


class WorldError(EasympError, RuntimeError):
    """Ranks disagree, are missing, or stopped answering."""


class CheckpointError(EasympError, RuntimeError):
    """A checkpoint cannot be written, or is damaged. Live objects have not changed, unless the message says so."""


class TrackerError(EasympError, RuntimeError):
    """A tracker cannot start."""


class KernelError(EasympError, RuntimeError):
    """A kernel cannot be compiled or started on this machine; torch's own path is taken where there is one."""


class EasympWarning(UserWarning):
    """Something works, but probably not as meant."""


# What strategies and precisions are called elsewhere, where the closest spelling is another one.
ELSEWHERE = {
    **dict.fromkeys(("zero", "zero_1", "deepspeed_stage_1"), "zero1"),
    **dict.fromkeys(
        ("zero2", "zero_2", "zero3", "zero_3", "deepspeed", "deepspeed_stage_2", "deepspeed_stage_3"), "fsdp"
    ),
    **dict.fromkeys(("fsdp1", "fsdp2", "full_shard", "shard_grad_op", "fully_shard"), "fsdp"),
    **dict.fromkeys(("hybrid_shard", "_hybrid_shard_zero2", "hybrid_shard_zero2"), "hsdp"),
    **dict.fromkeys(("dp", "no_shard", "ddp_spawn", "multi_gpu", "multi_cpu", "horovod"), "ddp"),
    **dict.fromkeys(("tp", "mp", "megatron", "megatron_lm", "model_parallel"), "tensor_parallel"),
    **dict.fromkeys(("pp", "gpipe", "1f1b"), "pipeline"),
    "diloco": "local_sgd",
    **dict.fromkeys(("amp", "mixed", "bf16_mixed", "bfloat16_mixed"), "bf16"),
    **dict.fromkeys(("16", "16_mixed", "fp16_mixed", "float16_mixed"), "fp16"),
    **dict.fromkeys(("32", "32_true", "full"), "fp32"),
    **dict.fromkeys(("transformer_engine", "float8", "e4m3", "hybrid"), "fp8"),
}


def nearest(name: str, known: Iterable[str]) -> str:
    """``", did you mean 'x'?"`` for the closest of `known` in any case of letters, or ``""`` where none is close."""
    spelled = {str(k).lower(): str(k) for k in known}
    same = ELSEWHERE.get(str(name).lower().replace("-", "_"))
    if same in spelled:
        return f", did you mean {same!r}?"
    close = get_close_matches(str(name).lower(), spelled, n=1, cutoff=0.5)
    return f", did you mean {spelled[close[0]]!r}?" if close else ""


def failing() -> bool:
    """Inside of an ``except`` or ``finally`` of an error, or at the exit of an interpreter that ends by one."""
    return sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None
