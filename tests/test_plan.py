"""The decision on every machine of the table: what runs, why, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from easymp import Hardware, Plan, RefusedError, Settings, Source, make_plan, resolve
from easymp.distributed import Ranks
from easymp.precision import PRECISIONS
from easymp.settings import NAMES
from easymp.strategies import STRATEGIES

from .hardware.machines import MACHINES

ONE = Ranks()


def several(size: int, rank: int = 0) -> Ranks:
    return Ranks(rank, size, rank, size, "RANK and WORLD_SIZE")


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
    "Zen 4 server": ("cpu", "fp32", "avx512_bf16 without AMX tiles may be slower; easymp compare measures bf16"),
    "Sapphire Rapids": ("cpu", "bf16", "this CPU has AMX tiles for bf16"),
    "Graviton 4": ("cpu", "fp32", "sve_bf16 without AMX tiles"),
}


def test_every_machine_has_its_row():
    assert AUTO.keys() == MACHINES.keys()


@pytest.mark.parametrize("machine", AUTO)
def test_auto(machine):
    device, precision, why = AUTO[machine]
    made, hardware = plan(machine), MACHINES[machine]
    assert (made.device.value, made.precision.value, made.strategy.value) == (device, precision, "single")
    assert re.search(why, made.precision.reason)
    assert made.precision.source is made.device.source is Source.DETECTED
    assert made.device.reason == (hardware.devices[0].name if hardware.devices else hardware.looked_for[0])
    assert made.strategy.reason == "one process"


@pytest.mark.parametrize("machine", ["2xA100 NVLink", "8xH100", "laptop CPU"])
def test_several_processes(machine):
    devices = MACHINES[machine].devices
    size = len(devices) or 3
    for rank in range(size):
        made = plan(machine, several(size, rank))
        assert made.device.value == (f"cuda:{rank}" if devices else "cpu")
        assert (made.strategy.value, made.strategy.reason) == ("ddp", f"{size} processes")


def test_pods_with_one_gpu_each():
    """RANK and WORLD_SIZE without LOCAL_RANK: before ranks are counted by host (`easymp env`), and after."""
    announced = Ranks(1, 2, 1, 2, "RANK and WORLD_SIZE", unknown="rank")
    counted = announced._replace(local_rank=0, local_size=1, unknown="")
    assert [plan("A100", ranks).device.value for ranks in (announced, counted)] == ["cuda:0"] * 2
    with pytest.raises(RefusedError, match="this is process 1 of its node"):  # two ranks are on one host
        plan("A100", announced._replace(unknown=""))


def mixed(*machines: str) -> Hardware:
    """One machine with the cards of several, of the first one's kind."""
    cards = [card for name in machines for card in MACHINES[name].devices if card.kind == MACHINES[machines[0]].kind]
    return replace(MACHINES[machines[0]], devices=tuple(replace(c, index=i) for i, c in enumerate(cards)))


@pytest.mark.parametrize(
    ("other", "precision"), [("T4", "fp16"), ("V100", "fp16"), ("P100", "fp32"), ("GTX 1660", "fp32"), ("L4", "bf16")]
)
def test_unlike_cards_decide_alike(other, precision):
    for cards in (("A100", other), (other, "A100")):
        assert {plan(mixed(*cards), several(2, rank)).precision.value for rank in (0, 1)} == {precision}
        assert len({plan(mixed(*cards), several(2, rank)).precision for rank in (0, 1)}) == 1


def test_what_a_rank_has():
    assert plan("8xH100", several(8, 3)).memory == MACHINES["8xH100"].devices[3].memory
    assert plan("M-series Mac").memory == MACHINES["M-series Mac"].devices[0].memory
    assert plan("laptop CPU", several(4)).memory == MACHINES["laptop CPU"].cpu.memory // 4
    assert plan("8xH100", several(8), cpu=True).memory == MACHINES["8xH100"].cpu.memory // 8
    assert plan("laptop CPU", several(4), memory="1GiB").memory == 1 << 30


# -- asked for ---------------------------------------------------------------------------------------------------------

# Which precisions each machine takes when asked by name; the others take all.
OLD, NO_FP8 = {"fp32", "fp16", "fp16-true", "O0", "O1", "O2", "O3"}, {*PRECISIONS} - {"fp8"}
NO_TF32 = ("MI300X", "M-series Mac", "laptop CPU", "Zen 4 server", "Sapphire Rapids", "Graviton 4")
TAKES = {
    **dict.fromkeys(("P100", "V100", "T4"), OLD),
    "GTX 1660": {"fp32", "O0"},
    **dict.fromkeys(("A100", "2xA100 NVLink", "2xRTX 3090", "Intel XPU"), NO_FP8),
    **dict.fromkeys(NO_TF32, NO_FP8 - {"tf32"}),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_precision_by_name_is_honoured_or_refused(machine):
    for precision in PRECISIONS:
        if precision in TAKES.get(machine, PRECISIONS):
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
def test_refusals_say_why_not_and_what_would(machine, ranks, asked, words):
    with pytest.raises(RefusedError, match=words):
        plan(machine, ranks, **asked)


def test_fp8_on_a_gpu_compiles_blocks_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.setattr("easymp.plan.find_spec", lambda name: name == "triton")
    found = plan("H100", mixed_precision="fp8")
    assert found.compiles and found.compile.value == "blocks" and found.compile.source is Source.DETECTED
    assert "compile       blocks  fuses fp8's casts; compile='no' leaves it out" in found.explain()
    for settings in ({"mixed_precision": "bf16"}, {"mixed_precision": "fp8", "compile": "no"}):
        assert plan("H100", **settings).compile is None and not plan("H100", **settings).compiles
    whole = plan("H100", mixed_precision="fp8", compile="model")
    assert whole.compile is None and whole.compiles
    monkeypatch.setattr("easymp.plan.find_spec", lambda name: None)
    assert "Triton is not installed" in plan("H100", mixed_precision="fp8").compile.reason


def test_a_refusal_names_the_variable_that_asked(monkeypatch):
    monkeypatch.setenv("EASYMP_MIXED_PRECISION", "tf32")
    with pytest.raises(RefusedError, match="EASYMP_MIXED_PRECISION in the environment cannot run here"):
        make_plan(resolve(), MACHINES["laptop CPU"], ONE)


def test_a_torch_that_is_not_built_for_the_card():
    machine = MACHINES["B200"]
    stranger = replace(machine, devices=(replace(machine.devices[0], built_for=False),))
    with pytest.raises(RefusedError, match="NVIDIA B200 is sm_100, for which this build of torch"):
        plan(stranger)
    assert plan(stranger, cpu=True).device.value == "cpu"


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


def outcome(hardware: Hardware, ranks: Ranks, **asked: object) -> Plan | str:
    try:
        return plan(hardware, ranks, **asked)
    except RefusedError as error:
        return str(error)


@hypothesis_settings(max_examples=60, deadline=None)
@given(asked=asked, names=st.lists(st.sampled_from(sorted(MACHINES)), min_size=1, max_size=3), ranks=worlds)
def test_the_same_in_gives_the_same_out_and_nothing_is_ever_silent(asked, names, ranks):
    """A plan or a refusal; what was asked for is what is planned."""
    hardware = mixed(*names)
    made = outcome(hardware, ranks, **asked)
    assert made == outcome(hardware, ranks, **asked)
    if isinstance(made, str):
        return
    if asked.get("mixed_precision", "auto") != "auto":
        assert made.precision.source is Source.ASKED
    assert made.precision.value in PRECISIONS
    assert made.strategy.value in STRATEGIES
    assert asked.get("strategy", "auto") in ("auto", made.strategy.value)
    assert bool(STRATEGIES[made.strategy.value].several) == (ranks.size > 1)
    assert all(choice.reason for choice in made.choices.values())


def test_explain():
    assert plan("T4", gradient_accumulation_steps=4).explain().splitlines() == [
        "processes     1       no launcher announced others",
        "device        cuda:0  Tesla T4",
        "precision     fp16    sm_75 has Tensor Cores for fp16 and no bf16 units; with a loss scale",
        "weights       fp32    trainable parameters in bf16 or fp16 are raised at prepare",
        "strategy      single  one process",
        "accumulation  4       4 micro-batches an update",
        "optimizer     fused   torch's fused step, where it has one and the caller left that open",
    ]
