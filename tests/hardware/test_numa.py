"""NUMA nodes out of a made-up /sys, and the cores that ranks get of them."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from easymp.hardware import accelerators, cpu


@pytest.fixture
def machine(tmp_path):
    """Writes /sys of a machine: cores of each node, and the node of the devices at PCI addresses."""

    def write(nodes: dict[int, str], devices: dict[str, str] | None = None) -> Path:
        for node, cores in nodes.items():
            folder = tmp_path / f"sys/devices/system/node/node{node}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(cores + "\n")
        for address, node in (devices or {}).items():
            folder = tmp_path / "sys/bus/pci/devices" / address
            folder.mkdir(parents=True)
            (folder / "numa_node").write_text(node + "\n")
        return tmp_path

    return write


def test_cores_of_nodes_are_those_that_this_process_may_use(machine):
    root = machine({0: "0-3,8-11", 1: "4-7,12-15", 2: ""})  # the third has memory only
    everything = frozenset(range(16))
    assert cpu.nodes(root, everything) == {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12, 13, 14, 15}}
    assert cpu.nodes(root, frozenset({1, 2, 5})) == {0: {1, 2}, 1: {5}}
    assert cpu.nodes(root, frozenset({1, 2})) == {0: {1, 2}}  # taskset, or a cpuset of a control group
    assert cpu.nodes(root / "nowhere", everything) == {}


def test_the_node_of_a_card(machine):
    root = machine({}, {"0000:3b:00.0": "1", "0001:af:00.0": "-1"})
    assert accelerators.near("00000000:3B:00.0", root) == 1
    assert accelerators.near("00000001:AF:00.0", root) is None  # -1: the firmware does not say
    assert accelerators.near("00000000:00:00.0", root) is None
    assert accelerators.near(None, root) is None


def test_cards_in_torchs_order(machine, monkeypatch):
    root = machine({}, {"0000:3b:00.0": "1", "0000:17:00.0": "0"})
    cards = [types.SimpleNamespace(address=f"00000000:{bus}:00.0") for bus in ("3B", "17")]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(accelerators, "read_nvml", lambda: types.SimpleNamespace(cards=cards))
    assert accelerators.gpu_nodes(root) == [1, 0]
    monkeypatch.setattr(accelerators, "read_nvml", lambda: None)
    assert accelerators.gpu_nodes(root) == [None, None]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert accelerators.gpu_nodes(root) == []


A, B, C, D = (frozenset(range(start, start + 4)) for start in (0, 4, 8, 12))


@pytest.mark.parametrize(
    ("processes", "nodes", "gpus", "chosen"),
    [
        (2, {0: A, 1: B}, [], [A, B]),
        (4, {0: A, 1: B}, [], [A, A, B, B]),
        (2, {0: A, 1: B, 4: C, 5: D}, [], [A | B, C | D]),
        (3, {0: A, 1: B}, [], [A, A, B]),  # 8 cores give each of 3 ranks 2 in any case
        (
            3,
            {0: A | B, 1: C | D},
            [],
            [],
        ),  # two would share 8 cores, which gives them 4 of the 5 that are theirs
        (2, {0: A, 1: frozenset({4})}, [], []),  # the second would have one core
        (2, {0: A}, [], []),
        (2, {}, [], []),
        (2, {0: A, 1: B}, [1, 0], [B, A]),
        (2, {0: A, 1: B}, [0, 0], [A, A]),  # half of what they might have, where their GPUs are
        (4, {0: A, 1: B, 2: C, 3: D}, [0, 0, 0, 0], []),  # a quarter
        (2, {0: A, 1: B}, [0, None], []),
        (2, {0: A, 1: B}, [0, 7], []),  # a node of which no core may be used
        (2, {0: A, 1: B}, [0], []),  # more ranks than GPUs
    ],
)
def test_which_rank_gets_which_cores(processes, nodes, gpus, chosen):
    assert cpu.choose(processes, nodes, gpus) == chosen


def test_threads_follow_the_cores(monkeypatch):
    monkeypatch.setattr(cpu, "nodes", lambda: {0: A, 1: B})
    assert cpu.rank_cores(2, 8, [1, 1]) == ([B, B], 2)
    assert cpu.rank_cores(2, 8, []) == ([A, B], 4)
    assert cpu.rank_cores(1, 8, []) == ([], 8)  # one process may have the machine
