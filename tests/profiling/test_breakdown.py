"""Each moment of a step belongs to one phase: on the host, and on a device that is not here."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from easymp.profiling.breakdown import (
    Breakdown,
    Interval,
    Mark,
    common,
    length,
    read,
    timeline,
    union,
    without,
)

from .events import BACKWARD, Event, gloo, kernel, mark, memory, step


def count(events: list[Any], steps: set[str], base: int = 0) -> Breakdown:
    result = Breakdown(0, "cpu")
    result.add(read(events, steps), base)
    assert result.total == sum(result.time.values())
    return result


def us(times: dict[str, int]) -> dict[str, float]:
    return {phase: ns / 1000 for phase, ns in times.items()}


def parsed(text: str) -> list[tuple[str, int, int]]:
    found = re.findall(r"([a-z ]+) (-?\d+)-(\d+)", text)
    return [(phase.strip(), int(begin), int(end)) for phase, begin, end in found]


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ("", "other 0-100"),
        # The loss lies between forward and backward, also where gradients are cleared in between.
        (
            "forward 10-20, optimizer 22-24, backward 30-60",
            "other 0-10, forward 10-20, loss 20-22, optimizer 22-24, loss 24-30, backward 30-60, other 60-100",
        ),
        (  # another batch in between
            "forward 10-20, data wait 30-40, backward 50-60",
            "other 0-10, forward 10-20, other 20-30, data wait 30-40, other 40-50, backward 50-60, other 60-100",
        ),
        (  # a closure: the inner mark counts
            "optimizer 0-100, forward 10-40, backward 40-80",
            "optimizer 0-10, forward 10-40, backward 40-80, optimizer 80-100",
        ),
        ("forward -50-10, backward 95-130", "forward 0-10, loss 10-95, backward 95-100"),
    ],
)
def test_the_timeline_has_no_gap(marks: str, expected: str) -> None:
    found = timeline([Mark(begin, end, phase) for phase, begin, end in parsed(marks)], 0, 100)
    assert [(part.phase, part.begin, part.end) for part in found] == parsed(expected)


NODE = [
    Event("autograd::engine::evaluate_function: Mm", 300, 700),
    Event("MmBackward0", 300, 650, BACKWARD),
    Event("aten::mm", 310, 640),
    Event("c10d::allreduce_", 650, 660),
    Event("aten::copy_", 860, 890),
]
REDISTRIBUTED = [
    Event("aten::mm", 0, 800),
    Event("_c10d_functional::all_reduce", 10, 20),
    Event("_c10d_functional::wait_tensor", 20, 600),
    Event("aten::mm", 600, 800),
]


@pytest.mark.parametrize(
    ("marks", "flight", "events", "expected", "hidden"),
    [
        # Behind mm it is hidden, else waited for; the node of backward around both does not count as work.
        ("backward 300-900", (500, 850), NODE, {"other": 400, "backward": 390, "communication": 210}, 140),
        # As under tensor parallelism: the operation on a DTensor redistributes first.
        ("forward 0-800", (15, 600), REDISTRIBUTED, {"forward": 215, "communication": 585, "other": 200}, 0),
        # Short pauses between operations are not waiting.
        (
            "forward 0-1000",
            (0, 840),
            [Event("aten::add", t, t + 10) for t in range(0, 1000, 60)],
            {"forward": 1000},
            840,
        ),
        # A batch that comes by a collective is data.
        ("data wait 0-400", (0, 400), [], {"data wait": 400, "other": 600}, 0),
        # torch.compile's regions are work.
        (
            "backward 0-1000",
            (100, 450),
            [Event("## Call CompiledFxGraph f00 ##", 0, 400, 7)],
            {"backward": 950, "communication": 50},
            300,
        ),
    ],
)
def test_the_host_waits_for_a_collective_only_where_nothing_runs(
    marks: str, flight: tuple[int, int], events: list[Event], expected: dict[str, int], hidden: int
) -> None:
    marked = [mark(phase, begin, end) for phase, begin, end in parsed(marks)]
    result = count([step(0, 0, 1000), *marked, gloo("all_reduce", *flight), *events], {"ProfilerStep#0"})
    assert us(result.time) == expected
    assert result.hidden == hidden * 1000


def on_gpu() -> list[Event]:
    """A step of 1000 µs on the host, with kernels until 1300."""
    mm, back, reduce, adam, copy = (
        Event("aten::mm", 100, 120, correlation=1),
        Event("aten::mm", 320, 330, correlation=2, thread=2),
        Event("c10d::allreduce_", 340, 350, correlation=3, thread=2),
        Event("aten::_fused_adamw_", 700, 720, correlation=4),
        Event("aten::copy_", 10, 20, correlation=5),
    )
    host = [
        step(3, 0, 1000),
        mark("data wait", 0, 100),
        mark("forward", 100, 300),
        mark("backward", 300, 650),
        mark("optimizer", 700, 800),
        *(mm, back, reduce, adam, copy),
        Event("nccl:all_reduce", 340, 345, 7),
    ]
    device = [
        kernel("Memcpy HtoD (Pinned -> Device)", 20, 150, copy),
        kernel("ampere_sgemm_128x64", 130, 400, mm),
        kernel("ampere_sgemm_128x64", 450, 900, back),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 800, 1100, reduce),
        kernel("multi_tensor_apply_kernel", 1100, 1300, adam),
        kernel("easymp: forward", 130, 400, mm),  # torch repeats annotations in the device's rows
        kernel("nccl:all_reduce", 800, 1100, reduce),
        kernel("ampere_sgemm_128x64", 0, 5000, None, index=1),  # of another card
    ]
    return [*host, *device]


def test_on_a_device_kernels_belong_to_the_phase_that_launched_them() -> None:
    assert read(on_gpu(), {"ProfilerStep#3"}).device == 1  # the busiest card
    result = count([e for e in on_gpu() if e.index != 1], {"ProfilerStep#3"})
    assert result.steps == [1_000_000]
    # The copy alone runs for 110 µs; the host waits for data for 20 more. Idle from 400 to 450, while the host is in backward.
    assert us(result.time) == {
        "data wait": 130,
        "forward": 270,
        "backward": 500,
        "communication": 200,
        "optimizer": 200,
    }
    assert us(result.idle) == {"data wait": 20, "backward": 50}
    assert result.hidden == 100_000


@pytest.mark.parametrize("device", ["CPU", "CUDA"])
def test_peaks_of_memory(device: str) -> None:
    index = -1 if device == "CPU" else 0
    events = [
        step(0, 0, 100),
        mark("forward", 0, 40),
        mark("backward", 40, 80),
        memory(5, 1000, device, index),
        memory(10, 500, device, index),
        memory(30, -700, device, index),
        memory(50, 50, device, index),
        memory(55, -850, device, index),
        memory(90, 10_000, "CUDA" if device == "CPU" else "CPU"),  # elsewhere
        *([kernel("k", 10, 20, None)] if device == "CUDA" else []),
    ]
    base = 4000 if device == "CUDA" else 0
    found = count(events, {"ProfilerStep#0"}, base).peak
    assert found == {"forward": base + 1500, "backward": base + 850, "other": base}
    assert count([e for e in events if e.what != "[memory]"], {"ProfilerStep#0"}).peak == {}


def test_complete_steps_count_and_without_any_all_counts_as_one() -> None:
    events = [step(2, 0, 100), step(3, 100, 180), step(4, 180, 999), mark("forward", 0, 999)]
    result = count(events, {"ProfilerStep#2", "ProfilerStep#3"})
    assert result.steps == [100_000, 80_000]
    assert us(result.time) == {"forward": 180}
    assert count([mark("forward", 50, 90), Event("aten::mm", 90, 130)], set()).steps == [80_000]
    assert count([], set()).total == 0


# -- intervals, beside sets of moments ---------------------------------------------------------------------------------

STRETCHES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1])), max_size=8
)


def moments(stretches: list[Interval]) -> set[int]:
    return {t for begin, end in stretches for t in range(begin, end)}


@given(STRETCHES, STRETCHES)
def test_as_sets_of_moments(a: list[Interval], b: list[Interval]) -> None:
    one, two = union(a), union(b)
    assert moments(one) == moments(a)
    assert length(one) == len(moments(a))
    assert moments(common(one, two)) == moments(a) & moments(b)
    assert moments(without(one, two)) == moments(a) - moments(b)
    for result in (one, common(one, two), without(one, two)):
        assert all(begin < end for begin, end in result)
        assert all(x[1] <= y[0] for x, y in pairwise(result))
