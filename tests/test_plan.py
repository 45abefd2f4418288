"""The decision on every machine of the table: what runs, why, and what is refused."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from easymp import Hardware, Plan, RefusedError, Settings, Source, make_plan, resolve
from easymp.distributed import Ranks
from easymp.plan import candidates
from easymp.precision import PRECISIONS
from easymp.settings import NAMES
from easymp.strategies import STRATEGIES
from easymp.training.memory import Memory, by_memory, estimate, fits

from .hardware.machines import MACHINES

ONE = Ranks()


def several(size: int, rank: int = 0, local_size: int | None = None) -> Ranks:
    local_size = local_size or size
    return Ranks(rank, size, rank % local_size, local_size, "RANK and WORLD_SIZE")


def plan(machine: str | Hardware, ranks: Ranks = ONE, **asked: object) -> Plan:
    hardware = MACHINES[machine] if isinstance(machine, str) else machine
    return make_plan(Settings(**asked), hardware, ranks)


# -- auto --------------------------------------------------------------------------------------------------------------

# machine: device, precision, words of the reason
AUTO = {
    "P100": ("cuda:0", "fp32", r"Tesla P100-PCIE-16GB \(sm_60\) has no Tensor Cores"),
    "V100": ("cuda:0", "fp16", "sm_70 has Tensor Cores for fp16 and no bf16 units; with a loss scale"),
    "T4": ("cuda:0", "fp16", "sm_75 has Tensor Cores for fp16 and no bf16 units; with a loss scale"),
    "GTX 1660": ("cuda:0", "fp32", r"GTX 1660 Ti \(sm_75\) has no Tensor Cores"),
    "A100": ("cuda:0", "bf16", "native bf16 on sm_80: fp32's range, no loss scale needed"),
    "2xA100 NVLink": ("cuda:0", "bf16", "native bf16 on sm_80"),
    "2xRTX 3090": ("cuda:0", "bf16", "native bf16 on sm_86"),
    "L4": ("cuda:0", "bf16", "native bf16 on sm_89"),
    "H100": ("cuda:0", "bf16", "native bf16 on sm_90"),
    "8xH100": ("cuda:0", "bf16", "native bf16 on sm_90"),
    "B200": ("cuda:0", "bf16", "native bf16 on sm_100"),
    "RTX 5090": ("cuda:0", "bf16", "native bf16 on sm_120"),
    "MI300X": ("cuda:0", "bf16", "native bf16 on gfx942"),
    "Intel XPU": ("xpu:0", "bf16", r"native bf16 on Intel\(R\) Data Center GPU Max 1550"),
    "M-series Mac": ("mps", "fp32", "on Apple GPUs half precision is not reliably faster"),
    "laptop CPU": ("cpu", "fp32", "this CPU has no bf16 instructions"),
    "Zen 4 server": (
        "cpu",
        "auto",
        "avx512_bf16 instructions: the first training step times bf16 against fp32",
    ),
    "Sapphire Rapids": ("cpu", "auto", "amx_bf16 instructions: the first training step times"),
    "Graviton 4": ("cpu", "auto", "sve_bf16 instructions: the first training step times"),
}


def test_every_machine_has_its_row() -> None:
    assert AUTO.keys() == MACHINES.keys()


@pytest.mark.parametrize("machine", AUTO)
def test_auto(machine: str) -> None:
    device, precision, why = AUTO[machine]
    made = plan(machine)
    assert (made.device.value, made.precision.value, made.strategy.value) == (device, precision, "single")
    assert re.search(why, made.precision.reason)
    assert made.precision.source is Source.DETECTED
    assert made.device.source is Source.DETECTED
    hardware = MACHINES[machine]
    assert made.device.reason == (hardware.devices[0].name if hardware.devices else hardware.looked_for[0])
    assert made.strategy.reason == "one process"


@pytest.mark.parametrize("machine", ["2xA100 NVLink", "8xH100", "laptop CPU"])
def test_several_processes(machine: str) -> None:
    devices = MACHINES[machine].devices
    size = len(devices) or 3
    for rank in range(size):
        made = plan(machine, several(size, rank))
        assert made.device.value == (f"cuda:{rank}" if devices else "cpu")
        assert (made.strategy.value, made.strategy.reason) == ("ddp", f"{size} processes")


def test_pods_with_one_gpu_each() -> None:
    """RANK and WORLD_SIZE without LOCAL_RANK: before ranks are counted by host (`easymp env`), and after."""
    announced = Ranks(1, 2, 1, 2, "RANK and WORLD_SIZE", unknown="rank")
    counted = announced._replace(local_rank=0, local_size=1, unknown="")
    assert [plan("A100", ranks).device.value for ranks in (announced, counted)] == ["cuda:0"] * 2
    with pytest.raises(RefusedError, match="this is process 1 of its node"):  # two ranks are on one host
        plan("A100", announced._replace(unknown=""))


# -- by memory ---------------------------------------------------------------------------------------------------------


def gpt(parameters: float, layers: int = 32) -> torch.nn.Module:
    """So many parameters in blocks, on the meta device."""
    wide = int((parameters / layers / 2) ** 0.5)
    with torch.device("meta"):
        blocks = (
            torch.nn.Sequential(torch.nn.Linear(wide, wide), torch.nn.Linear(wide, wide))
            for _ in range(layers)
        )
        return torch.nn.Sequential(*blocks)


def needs(model: torch.nn.Module, made: Plan) -> dict[str, Memory]:
    ranks = made.ranks
    return {
        name: estimate(
            model, strategy=name, precision=made.precision.value, world=ranks.size, per_node=ranks.local_size
        )
        for name in candidates(made)
    }


@pytest.mark.parametrize(
    ("machine", "processes", "parameters", "strategy"),
    [
        ("8xH100", 8, 1e9, "ddp"),
        ("8xH100", 8, 3e9, "ddp"),
        ("8xH100", 8, 7e9, "fsdp"),
        ("8xH100", 8, 200e9, "fsdp"),
        ("2xRTX 3090", 2, 1e9, "ddp"),
        ("2xRTX 3090", 2, 1.3e9, "fsdp"),
        ("H100", 1, 3e9, "single"),
        ("H100", 1, 70e9, "single"),
    ],
)
def test_the_first_strategy_that_there_is_memory_for(
    machine: str, processes: int, parameters: float, strategy: str
) -> None:
    made = plan(machine, several(processes) if processes > 1 else ONE)
    each = needs(gpt(parameters), made)
    choice = by_memory(each, made.memory)
    assert (choice.value, choice.source) == (strategy, Source.DETECTED)
    assert ("too much" in choice.reason) == (not fits(each[strategy], made.memory))


def test_what_a_rank_has() -> None:
    assert plan("8xH100", several(8, 3)).memory == MACHINES["8xH100"].devices[3].memory
    assert plan("M-series Mac").memory == MACHINES["M-series Mac"].devices[0].memory
    assert plan("laptop CPU", several(4)).memory == MACHINES["laptop CPU"].cpu.memory // 4
    assert plan("8xH100", several(8), cpu=True).memory == MACHINES["8xH100"].cpu.memory // 8
    assert plan("laptop CPU", several(4), memory="1GiB").memory == 1 << 30


# -- asked for ---------------------------------------------------------------------------------------------------------

# Which precisions each machine takes when asked by name.
LEVELS = {"O0", "O1", "O2", "O3"}
TAKES = {
    **{name: {"fp32", "fp16", "fp16-true", *LEVELS} for name in ("P100", "V100", "T4")},
    "GTX 1660": {"fp32", "O0"},
    **{name: {*PRECISIONS} - {"fp8"} for name in ("A100", "2xA100 NVLink", "2xRTX 3090")},
    "Intel XPU": {*PRECISIONS} - {"fp8"},
    **{name: {*PRECISIONS} - {"fp8", "tf32"} for name in ("MI300X", "M-series Mac")},
    **{
        name: {*PRECISIONS} - {"fp8", "tf32"}
        for name in ("laptop CPU", "Zen 4 server", "Sapphire Rapids", "Graviton 4")
    },
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_precision_by_name_is_honoured_or_refused(machine: str, precision: str) -> None:
    if precision in TAKES.get(machine, set(PRECISIONS)):
        choice = plan(machine, mixed_precision=precision).precision
        assert (choice.value, choice.source) == (precision, Source.ASKED)
    else:
        with pytest.raises(RefusedError, match=r"cannot run here: .+; use .*fp32"):
            plan(machine, mixed_precision=precision)


@pytest.mark.parametrize(
    ("machine", "ranks", "asked", "words"),
    [
        ("T4", ONE, {"mixed_precision": "bf16"}, "use fp16, fp32 or auto"),
        ("V100", ONE, {"mixed_precision": "tf32"}, "Tesla V100-SXM2-16GB has no TF32 Tensor Cores"),
        ("GTX 1660", ONE, {"mixed_precision": "fp16"}, "GTX 1660 Ti has no Tensor Cores and its fp16 gives"),
        ("laptop CPU", ONE, {"mixed_precision": "fp8"}, "or newer, and training runs on the CPU; use bf16"),
        ("MI300X", ONE, {"mixed_precision": "fp8"}, r"fp8 needs .* AMD Instinct MI300X.* \(gfx942\)"),
        ("laptop CPU", several(2), {"strategy": "single"}, "'single' is for one process.*use strategy='ddp'"),
        ("laptop CPU", ONE, {"strategy": "ddp"}, "'ddp' averages gradients over processes, .*easymp launch"),
    ],
)
def test_refusals_say_why_not_and_what_would(
    machine: str, ranks: Ranks, asked: dict[str, str], words: str
) -> None:
    with pytest.raises(RefusedError, match=words):
        plan(machine, ranks, **asked)


def test_a_refusal_names_the_variable_that_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EASYMP_MIXED_PRECISION", "tf32")
    with pytest.raises(RefusedError, match="EASYMP_MIXED_PRECISION in the environment cannot run here"):
        make_plan(resolve(), MACHINES["laptop CPU"], ONE)


def test_a_torch_that_is_not_built_for_the_card() -> None:
    machine = MACHINES["B200"]
    stranger = dataclasses.replace(
        machine, devices=(dataclasses.replace(machine.devices[0], built_for=False),)
    )
    with pytest.raises(RefusedError, match="NVIDIA B200 is sm_100, for which this build of torch"):
        plan(stranger)
    assert plan(stranger, cpu=True).device.value == "cpu"


def mixed(*machines: str) -> Hardware:
    """One machine with the cards of several."""
    cards = [MACHINES[name].devices[0] for name in machines]
    return dataclasses.replace(
        MACHINES[machines[0]], devices=tuple(dataclasses.replace(c, index=i) for i, c in enumerate(cards))
    )


@pytest.mark.parametrize(
    ("other", "precision"),
    [("T4", "fp16"), ("V100", "fp16"), ("P100", "fp32"), ("GTX 1660", "fp32"), ("L4", "bf16")],
)
def test_unlike_cards_decide_alike(other: str, precision: str) -> None:
    for cards in (("A100", other), (other, "A100")):
        choices = {plan(mixed(*cards), several(2, rank)).precision for rank in (0, 1)}
        assert len(choices) == 1
        assert choices.pop().value == precision


# -- purity ------------------------------------------------------------------------------------------------------------

asked = st.fixed_dictionaries(
    {},
    optional={
        "mixed_precision": st.sampled_from(NAMES["mixed_precision"].metadata["choices"]),
        "strategy": st.sampled_from(NAMES["strategy"].metadata["choices"]),
        "cpu": st.booleans(),
        "gradient_accumulation_steps": st.integers(1, 8),
        "fused": st.booleans(),
    },
)
worlds = st.integers(1, 9).flatmap(lambda size: st.builds(several, st.just(size), st.integers(0, size - 1)))


def outcome(settings: Settings, hardware: Hardware, ranks: Ranks) -> Plan | str:
    try:
        return make_plan(settings, hardware, ranks)
    except RefusedError as error:
        return str(error)


@hypothesis_settings(max_examples=60, deadline=None)
@given(asked=asked, names=st.lists(st.sampled_from(sorted(MACHINES)), min_size=1, max_size=3), ranks=worlds)
def test_the_same_in_gives_the_same_out_and_nothing_is_ever_silent(
    asked: dict, names: list[str], ranks: Ranks
) -> None:
    """A plan or a refusal; what was asked for is what is planned."""
    kind = MACHINES[names[0]].kind
    cards = [d for name in names for d in MACHINES[name].devices if d.kind == kind]
    hardware = dataclasses.replace(
        MACHINES[names[0]], devices=tuple(dataclasses.replace(d, index=i) for i, d in enumerate(cards))
    )
    settings = Settings(**asked)
    made = outcome(settings, hardware, ranks)
    assert made == outcome(Settings(**asked), hardware, ranks)
    if isinstance(made, str):
        return
    word = asked.get("mixed_precision", "auto")
    if word != "auto":
        assert made.precision.source is Source.ASKED
    assert made.precision.value in {*PRECISIONS, "auto"}
    assert made.strategy.value in STRATEGIES
    assert asked.get("strategy", "auto") in ("auto", made.strategy.value)
    assert bool(STRATEGIES[made.strategy.value].several) == (ranks.size > 1)
    assert all(choice.reason for choice in made.choices.values())


# -- shown -------------------------------------------------------------------------------------------------------------


def test_explain() -> None:
    assert plan("T4", gradient_accumulation_steps=4).explain().splitlines() == [
        "processes     1       no launcher announced others",
        "device        cuda:0  Tesla T4",
        "precision     fp16    sm_75 has Tensor Cores for fp16 and no bf16 units; with a loss scale",
        "weights       fp32    trainable parameters in bf16 or fp16 are raised at prepare",
        "strategy      single  one process",
        "accumulation  4       4 micro-batches an update",
        "optimizer     fused   torch's fused step, where it has one and the caller left that open",
    ]
