"""Files of DeepSpeed: the meaning of each key here.

Half of a file is about the script, which makes its own optimizer, scheduler and loader: the sentence is then the line to write.
`easymp.compat.deepspeed` takes the names of keys and optimizers from here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ... import optim
from ...errors import SettingError, nearest
from .rules import CLIP, OFF, Importer, Rule, accumulate, also_off, call, clip, is_off, switch, table

OURS = {"lamb": "LAMB", "fusedlamb": "LAMB", "lion": "Lion", "fusedlion": "Lion", "cpulion": "Lion"}
ADAMS = ("adam", "fusedadam", "cpuadam", "deepspeedcpuadam")  # AdamW, unless adam_w_mode is false
SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
SCALER = "scaler_options"
MOST_POWER = 127  # of 2, in fp32


def strategy(content: Mapping[str, Any]) -> str | None:
    """The strategy that the file asks for; None where "auto" does it, which is ddp on several processes."""
    zero, split = content.get("zero_optimization"), content.get("tensor_parallel")
    if isinstance(split, Mapping) and _count(split.get("autotp_size")) > 1:
        return "tensor_parallel"
    stage = zero.get("stage") if isinstance(zero, Mapping) else 0
    return {1: "zero1", 2: "fsdp", 3: "fsdp"}.get(stage) if isinstance(stage, int) else None


def take_all(take: Importer) -> None:
    """Apply the rules to the whole document of `take`.

    Raises:
        SettingError: a wrong value, or two precisions at once.
    """
    content = take.document.content
    sections = {name: content.get(name) for name in ("fp16", "bf16", "amp")}
    on = [name for name, one in sections.items() if isinstance(one, Mapping) and one.get("enabled") is True]
    if len(on) > 1:
        where = take.document.where((on[1],))
        raise SettingError(f"{where}: {' and '.join(on)} are enabled at once: turn one of them off")
    if "gradient_clipping" not in content:
        said = f"DeepSpeed clips at 1.0 then, since mid-2026; {CLIP.format(value=1.0)}, if it did"
        take.lines.append(("(no gradient_clipping)", said))
    take.walk(content, DEEPSPEED)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


# -- rules that look at the value


def _precision(name: str, note: str) -> Rule:
    return lambda take, value: take.set("mixed_precision", name) + note if take.yes(value) else OFF


def _power(take: Importer, value: Any) -> str:
    if not is_off(take.document.content["fp16"].get("loss_scale")):
        return "nothing to take: the loss scale is fixed"
    if take.number(value) > MOST_POWER:
        raise take.wrong(value, f"is above {MOST_POWER}, the largest power of 2 in fp32")
    return (
        "nothing to take: as by default"
        if value == 16
        else take.table(SCALER, init_scale=2.0 ** take.number(value))
    )


def _batch(take: Importer, value: Any) -> str:
    total, content = take.number(value, 1, True), take.document.content
    micro = _count(content.get("train_micro_batch_size_per_gpu"))
    steps = _count(content.get("gradient_accumulation_steps"))
    if micro and steps and total % (micro * steps):
        why = (
            f"is not a multiple of {micro} (a micro-batch) times {steps} (accumulation): correct one of them"
        )
        raise take.wrong(value, why)
    if micro and steps:
        return f"nothing to take: {micro} x {steps} on {total // (micro * steps)} processes"
    if micro:
        return f"in the script or by hand: gradient_accumulation_steps = {total} / ({micro} x processes)"
    many = f" x {steps}" if steps > 1 else ""
    return f"in the script: DataLoader(..., batch_size=...) of {total} / (processes{many})"


@also_off
def stage(take: Importer, value: Any) -> str:
    """A stage of ZeRO: ddp, zero1, or fsdp, which keeps whole weights between forward and backward at stage 2."""
    number = take.number(value, whole=True)
    if number > 3:
        raise take.wrong(value, "is not a stage of ZeRO, 0 to 3")
    if take.strategy is None:
        return "nothing to take: strategy stays auto"
    kept = f"; {take.option(reshard_after_forward=False)}" if number == 2 else ""
    return f"{take.set('strategy', take.strategy)}{kept}"


def offload(take: Importer, value: Any) -> str:
    if value == "nvme":
        return "no counterpart: nothing is moved to disks; cpu_offload of strategy fsdp moves to the host's memory"
    if value not in ("cpu", True):
        raise take.wrong(value, "is not one of none, cpu and nvme")
    return f"{take.option(cpu_offload=True)}: weights, gradients and states together, under strategy fsdp"


def _split(take: Importer, value: Any) -> str:
    if take.number(value, whole=True) < 2:
        return OFF
    return f"{take.set('strategy', 'tensor_parallel')}; {take.option(size=value)}"


def _typed(take: Importer, value: Any) -> tuple[str, dict[str, Any]]:
    """The type and the parameters of an optimizer or scheduler."""
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise take.wrong(value, 'has no "type"')
    params = value.get("params") or {}
    unknown = [key for key in value if key not in ("type", "params", "legacy_fusion")]
    if unknown or not isinstance(params, Mapping):
        beside = f"has {unknown[0]!r} beside type and params" if unknown else "has params without keys"
        raise take.wrong(value, beside)
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in params.items() if v != "auto"}
    return value["type"], given


def _optimizer(take: Importer, value: Any) -> str:
    import torch

    name, params = _typed(take, value)
    lower = name.lower()
    classes = {c.lower(): c for c in dir(torch.optim) if isinstance(getattr(torch.optim, c), type)}
    if lower in (*ADAMS, "adamw") and not params.get("torch_adam"):
        params.setdefault("weight_decay", 0.0)  # of DeepSpeed's Adams; torch's AdamW has 0.01
    if lower in ADAMS:
        lower = "adamw" if params.pop("adam_w_mode", True) else "adam"
    home, found = ("easymp.optim", OURS[lower]) if lower in OURS else ("torch.optim", classes.get(lower))
    if found is None:
        known = nearest(name, [*classes.values(), *OURS.values()]) or ", which torch.optim does not have"
        return f"no counterpart: {name}{known}"
    known = inspect.signature(getattr(optim if lower in OURS else torch.optim, found)).parameters
    lost = ", ".join(f"{k}={v}" for k, v in params.items() if k not in known)
    told = call(f"{home}.{found}", {k: v for k, v in params.items() if k in known}, "model.parameters()")
    return f"in the script: {told}{f'; no counterpart: {lost}' if lost else ''}"


def _scheduler(take: Importer, value: Any) -> str:
    from torch.optim import lr_scheduler

    name, params = _typed(take, value)
    if name in SCHEDULES or isinstance(getattr(lr_scheduler, name, None), type):
        home = "easymp.compat.deepspeed" if name in SCHEDULES else "torch.optim.lr_scheduler"
        return f"in the script: {call(f'{home}.{name}', params, 'optimizer')}"
    known = [*SCHEDULES, *(n for n in dir(lr_scheduler) if n[0].isupper())]
    return f"no counterpart: {name}{nearest(name, known)}"


def _tracker(take: Importer, value: Any) -> str:
    if not isinstance(value, Mapping) or value.get("enabled") is not True:
        return OFF
    named = [take.values.pop("log_with")] if "log_with" in take.values else []
    said = take.set("log_with", ",".join([*named, take.path[-1]]))
    return f"{said}: the tracker of accelerator.log"


# -- the tables

OFFLOAD = table("deepspeed", "offload", device=offload)
FP16 = table(
    "deepspeed",
    "fp16",
    enabled=_precision("fp16", "; weights stay in fp32 (fp16 weights: mixed_precision O2)"),
    loss_scale=lambda take, value: take.table(SCALER, init_scale=float(take.number(value)), dynamic=False),
    initial_scale_power=_power,
    loss_scale_window=lambda take, value: take.table(SCALER, growth_interval=take.number(value, 1, True)),
    hysteresis=lambda take, value: take.table(SCALER, hysteresis=take.number(value, 1, True)),
    consecutive_hysteresis=lambda take, value: take.table(SCALER, refill_each_step=take.yes(value)),
    min_loss_scale=lambda take, value: take.table(SCALER, min_scale=float(take.number(value))),
)
DEEPSPEED = table(
    "deepspeed",
    train_batch_size=_batch,
    train_micro_batch_size_per_gpu=lambda take, value: (
        f"in the script: DataLoader(..., batch_size={take.number(value, 1, True)}); a loader's batch is one process's"
    ),
    gradient_accumulation_steps=accumulate,
    gradient_clipping=clip,
    optimizer=_optimizer,
    scheduler=_scheduler,
    zero_optimization=table(
        "deepspeed",
        "zero_optimization",
        stage=stage,
        offload_optimizer=OFFLOAD,
        offload_param=OFFLOAD,
        cpu_offload=offload,
        cpu_offload_param=offload,
        cpu_offload_params=offload,
    ),
    fp16=FP16,
    bf16=table(
        "deepspeed", "bf16", enabled=_precision("bf16", "; weights stay in fp32, and products run in bf16")
    ),
    amp={
        "enabled": lambda take, value: take.set(
            "mixed_precision", take.document.content["amp"].get("opt_level", "O1")
        ),
        "opt_level": lambda take, value: take.set("mixed_precision", str(value)),
    },
    torch_autocast=table("deepspeed", "torch_autocast"),
    tensor_parallel=table("deepspeed", "tensor_parallel", autotp_size=_split),
    activation_checkpointing=table("deepspeed", "activation_checkpointing"),
    compile=table("deepspeed", "compile", enabled=switch("compile", "model")),
    data_types=table("deepspeed", "data_types"),
    tensorboard=_tracker,
    wandb=_tracker,
)
