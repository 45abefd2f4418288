"""Each moment of a step belongs to one phase, on the host and on a device that is not here; the table and sentences."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from easymp.profiling import breakdown
from easymp.profiling.breakdown import Breakdown, read

# -- events as kineto gives them, made by hand: also those of a GPU that is not here -----------------------------------

ANNOTATION, FUNCTION, BACKWARD = 7, 0, 1
DEFAULTS = {
    "start_thread_id": 1,
    "correlation_id": 0,
    "linked_correlation_id": 0,
    "device_index": -1,
    "nbytes": 0,
    "is_async": False,
}


class Event:
    """Times in µs; kineto's are in ns."""

    def __init__(
        self, name: str, begin: float, end: float, scope: int = FUNCTION, device: str = "CPU", **fields: Any
    ) -> None:
        start, stop = int(begin * 1000), int(end * 1000)
        times = {"start_ns": start, "end_ns": stop, "duration_ns": stop - start}
        fields = {
            "name": name,
            "scope": scope,
            "device_type": SimpleNamespace(name=device),
            **times,
            **DEFAULTS,
            **fields,
        }
        for field, value in fields.items():
            setattr(self, field, lambda value=value: value)


def step(number: int, begin: float, end: float) -> Event:
    return Event(f"ProfilerStep#{number}", begin, end, ANNOTATION)


def mark(phase: str, begin: float, end: float) -> Event:
    return Event(f"easymp: {phase}", begin, end, ANNOTATION)


def gloo(name: str, begin: float, end: float) -> Event:
    return Event(f"gloo:{name}", begin, end, ANNOTATION, start_thread_id=3, is_async=True)


def kernel(name: str, begin: float, end: float, launcher: Event | None, index: int = 0) -> Event:
    launcher_id = launcher.correlation_id() if launcher else 99999
    return Event(name, begin, end, device="CUDA", device_index=index, linked_correlation_id=launcher_id)


def memory(at: float, size: int, device: str = "CPU", index: int = -1) -> Event:
    return Event("[memory]", at, at, device=device, device_index=index, nbytes=size)


def count(events: list[Any], steps: set[str], base: int = 0) -> Breakdown:
    result = Breakdown(0, "cpu")
    result.add(read(events, steps), base)
    assert result.total == sum(result.time.values())
    return result


def microseconds(times: dict[str, int]) -> dict[str, float]:
    return {phase: ns / 1000 for phase, ns in times.items()}


def marks_of(text: str) -> list[Event]:
    matches = re.findall(r"([a-z ]+) (-?\d+)-(\d+)", text)
    return [mark(phase.strip(), int(begin), int(end)) for phase, begin, end in matches]


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ("", {"other": 100}),
        # The loss lies between forward and backward, also where gradients are cleared in between.
        (
            "forward 10-20, optimizer 22-24, backward 30-60",
            {"forward": 10, "loss": 8, "optimizer": 2, "backward": 30, "other": 50},
        ),
        # another batch in between
        (
            "forward 10-20, data wait 30-40, backward 50-60",
            {"data wait": 10, "forward": 10, "backward": 10, "other": 70},
        ),
        # a closure: the inner mark counts
        ("optimizer 0-100, forward 10-40, backward 40-80", {"forward": 30, "backward": 40, "optimizer": 30}),
        ("forward -50-10, backward 95-130", {"forward": 10, "loss": 85, "backward": 5}),
    ],
)
def test_each_moment_has_one_phase(marks: str, expected: dict[str, int]) -> None:
    assert microseconds(count([step(0, 0, 100), *marks_of(marks)], {"ProfilerStep#0"}).time) == expected


NODE = [
    Event("autograd::engine::evaluate_function: Mm", 300, 700),
    Event("MmBackward0", 300, 650, BACKWARD),
    Event("aten::mm", 310, 640),
    Event("c10d::allreduce_", 650, 660),
    Event("aten::view", 700, 700),
    Event("aten::copy_", 860, 890),
]
REDISTRIBUTED = [
    Event("aten::mm", 0, 800),
    Event("_c10d_functional::all_reduce", 10, 20),
    Event("_c10d_functional::wait_tensor", 20, 600),
    Event("aten::mm", 600, 800),
]
PAUSES = [Event("aten::add", t, t + 10) for t in range(0, 1000, 60)]
REGION = [Event("## Call CompiledFxGraph f00 ##", 0, 400, 7)]


@pytest.mark.parametrize(
    ("marks", "collective", "events", "expected", "hidden"),
    [
        # Behind mm it is hidden, else waited for; the node of backward around both does not count as work.
        ("backward 300-900", (500, 850), NODE, {"other": 400, "backward": 390, "communication": 210}, 140),
        # As under tensor parallelism: the operation on a DTensor redistributes first.
        ("forward 0-800", (15, 600), REDISTRIBUTED, {"forward": 215, "communication": 585, "other": 200}, 0),
        # Short pauses between operations are not waiting.
        ("forward 0-1000", (0, 840), PAUSES, {"forward": 1000}, 840),
        # A batch that comes by a collective is data.
        ("data wait 0-400", (0, 400), [], {"data wait": 400, "other": 600}, 0),
        # torch.compile's regions are work.
        ("backward 0-1000", (100, 450), REGION, {"backward": 950, "communication": 50}, 300),
    ],
)
def test_the_host_waits_for_a_collective_only_where_nothing_runs(
    marks: str, collective: tuple[int, int], events: list[Event], expected: dict[str, int], hidden: int
) -> None:
    recorded = [step(0, 0, 1000), *marks_of(marks), gloo("all_reduce", *collective), *events]
    result = count(recorded, {"ProfilerStep#0"})
    assert microseconds(result.time) == expected
    assert result.hidden == hidden * 1000


def on_gpu() -> list[Event]:
    """A step of 1000 µs on the host, with kernels until 1300."""
    mm, backward, reduce, adam, copy = (
        Event("aten::mm", 100, 120, correlation_id=1),
        Event("aten::mm", 320, 330, correlation_id=2, start_thread_id=2),
        Event("c10d::allreduce_", 340, 350, correlation_id=3, start_thread_id=2),
        Event("aten::_fused_adamw_", 700, 720, correlation_id=4),
        Event("aten::copy_", 10, 20, correlation_id=5),
    )
    host = [
        step(3, 0, 1000),
        *marks_of("data wait 0-100, forward 100-300, backward 300-650, optimizer 700-800"),
        *(mm, backward, reduce, adam, copy),
        Event("nccl:all_reduce", 340, 345, 7),
    ]
    device = [
        kernel("Memcpy HtoD (Pinned -> Device)", 20, 150, copy),
        kernel("ampere_sgemm_128x64", 130, 400, mm),
        kernel("ampere_sgemm_128x64", 450, 900, backward),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 800, 1100, reduce),
        kernel("multi_tensor_apply_kernel", 1100, 1300, adam),
        kernel("easymp: forward", 130, 400, mm),  # torch repeats annotations in the device's rows
        kernel("nccl:all_reduce", 800, 1100, reduce),
        kernel("ampere_sgemm_128x64", 0, 5000, None, index=1),  # of another card
    ]
    return [*host, *device]


def test_on_a_device_kernels_belong_to_the_phase_that_launched_them() -> None:
    assert read(on_gpu(), {"ProfilerStep#3"}).device == 1  # the busiest card
    result = count([e for e in on_gpu() if e.device_index() != 1], {"ProfilerStep#3"})
    assert result.steps == [1_000_000]
    # The copy alone runs for 110 µs; the host waits for data for 20 more. Idle from 400 to 450, while the host is in
    # backward.
    expected = {"data wait": 130, "forward": 270, "backward": 500, "communication": 200, "optimizer": 200}
    assert microseconds(result.time) == expected
    assert microseconds(result.idle) == {"data wait": 20, "backward": 50}
    assert result.hidden == 100_000


@pytest.mark.parametrize("device", ["CPU", "CUDA"])
def test_peaks_of_memory(device: str) -> None:
    index = -1 if device == "CPU" else 0
    sizes = {5: 1000, 10: 500, 30: -700, 50: 50, 55: -850}
    elsewhere = memory(90, 10_000, "CUDA" if device == "CPU" else "CPU")
    events = [step(0, 0, 100), mark("forward", 0, 40), mark("backward", 40, 80), elsewhere]
    events += [memory(at, size, device, index) for at, size in sizes.items()]
    events += [kernel("k", 10, 20, None)] if device == "CUDA" else []
    base = 4000 if device == "CUDA" else 0
    peaks = count(events, {"ProfilerStep#0"}, base).peak
    assert peaks == {"forward": base + 1500, "backward": base + 850, "other": base}
    assert count([e for e in events if e.name() != "[memory]"], {"ProfilerStep#0"}).peak == {}


# -- the table, and the sentences below it -----------------------------------------------------------------------------

MS = 1_000_000


def two_steps(rank: int = 0, device: str = "cpu", idle: dict[str, int] | None = None, **phases: int) -> Breakdown:
    """Two steps, with phases in ms a step and ``_`` for a blank."""
    time = {name.replace("_", " "): ms * 2 * MS for name, ms in phases.items()}
    idle_time = {name: ms * 2 * MS for name, ms in (idle or {}).items()}
    return Breakdown(rank, device, [sum(time.values()) // 2] * 2, time, idle_time)


def test_the_table_adds_up_and_stands_in_columns() -> None:
    result = two_steps(device="cuda:0", data_wait=10, forward=20, backward=60, other=10, idle={"forward": 15})
    result.peak = {"forward": 3 << 20, "backward": 5 << 20}
    assert breakdown.table(result).splitlines() == [
        "phase      ms a step  share  cuda:0 idle  peak memory",
        "data wait      10.00   10 %         0.00",
        "forward        20.00   20 %        15.00      3.0 MiB",
        "backward       60.00   60 %         0.00      5.0 MiB",
        "other          10.00   10 %         0.00",
        "a step        100.00  100 %        15.00      5.0 MiB",
    ]


@pytest.mark.parametrize(
    ("phases", "workers", "expected"),
    [
        ({"forward": 30, "backward": 70}, 0, ["70 %"]),
        ({"data_wait": 31, "backward": 69}, 0, ["69 %", "num_workers=2"]),
        ({"data_wait": 31, "backward": 69}, 4, ["69 %", "num_workers=4"]),
        ({"communication": 20, "backward": 80}, 0, ["80 %", "for 20.0 ms; 9.0 ms more"]),
        ({"optimizer": 40, "backward": 60}, 0, ["60 %", "40.0 ms"]),
        ({"other": 50, "backward": 40}, 0, ["56 %", "50.0 ms"]),
        ({"forward": 40, "backward": 60, "idle": {"forward": 30}}, 0, ["60 %", "30.0 ms of the step, the most in f"]),
        ({}, 0, []),
    ],
)  # fmt: skip
def test_causes_of_waiting_have_a_sentence(phases: dict[str, Any], workers: int, expected: list[str]) -> None:
    result = two_steps(**phases)
    result.hidden = 2 * 9 * MS
    sentences = breakdown.sentences(result, [result], workers)
    assert len(sentences) == len(expected)
    assert all(text in sentence for text, sentence in zip(expected, sentences))


def test_the_slowest_rank_is_named() -> None:
    ranks = [two_steps(0, forward=50, communication=50), two_steps(1, forward=60, data_wait=40)]
    assert "Rank 1 is the slowest (its loader)" in breakdown.sentences(ranks[0], ranks)[-1]
    assert len(breakdown.sentences(ranks[0], [ranks[0], two_steps(1, forward=55, communication=45)])) == 2
