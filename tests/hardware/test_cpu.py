"""The processor.

Instructions, limits of control groups and NUMA nodes, on trees laid out as kernels and container runtimes do.
"""

from __future__ import annotations

import platform
import types

import psutil
import pytest

from easymp import detect
from easymp.hardware import CPU, cpu

GIB = 2**30
NONE = 9223372036854771712  # version 1's "no limit"
X86 = "processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor\nflags\t\t: fpu sse2 {flags}\n\nprocessor\t: 1\n"
ARM = "processor\t: 0\nBogoMIPS\t: 2000.00\nFeatures\t: fp asimd evtstrm {flags}\nCPU implementer\t: 0x41\n"


@pytest.fixture
def tree(tmp_path):
    """Writes files below a root: ``tree({"proc/self/cgroup": "0::/"})`` returns the root."""

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return tmp_path

    return write


def v2(path, files):
    return {"proc/self/cgroup": f"0::{path}"} | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}


FLAGS = [
    (X86, "avx avx2", {"avx2"}),
    (X86, "avx2 avx512f avx512_bf16 avx512_vnni", {"avx2", "avx512", "avx512_bf16", "avx512_vnni"}),
    (X86, "avx512_fp16 amx_bf16 amx_tile amx_int8", {"avx512_fp16", "amx_bf16", "amx_int8"}),
    (ARM, "asimdhp bf16 i8mm sve svebf16", {"neon", "neon_fp16", "neon_bf16", "i8mm", "sve", "sve_bf16"}),
]


@pytest.mark.parametrize(("text", "flags", "expected"), FLAGS)
def test_features_from_the_kernels_list(tree, monkeypatch, text, flags, expected):
    monkeypatch.setattr(cpu.torch, "cpu", types.SimpleNamespace())  # before torch 2.13
    assert cpu.features(tree({"proc/cpuinfo": text.format(flags=flags)})) == expected


ABILITIES = [  # what torch tells, and which of bf16 and fp16 is fast
    ("avx2", ()),
    ("avx2 avx512_f avx512_bf16", ("bf16",)),
    ("amx_tile amx_bf16 avx512_fp16", ("bf16", "fp16")),
    ("neon bf16 fp16_arith", ("bf16",)),
]


@pytest.mark.parametrize(("torch_names", "fast"), ABILITIES)
def test_features_from_torch(monkeypatch, torch_names, fast):
    capabilities = {
        "architecture": "any",
        "sve_max_length": 256,
        "sve2": False,
        **dict.fromkeys(torch_names.split(), True),
    }
    monkeypatch.setattr(cpu.torch, "cpu", types.SimpleNamespace(get_capabilities=lambda: capabilities))
    processor = CPU("name", "any", 1, 1, 1, 1, cpu.features())
    assert (processor.bf16, processor.fp16) == ("bf16" in fast, "fp16" in fast)


@pytest.mark.skipif(platform.system() != "Linux", reason="needs hardware with Linux: reads /proc/cpuinfo")
def test_both_sources_agree_here(monkeypatch):
    by_torch = cpu.features()
    monkeypatch.setattr(cpu.torch, "cpu", types.SimpleNamespace())
    assert cpu.features() == by_torch


@pytest.mark.real_cpu
def test_this_processor():
    processor = detect(use_accelerators=False).cpu
    assert processor.name and processor.architecture == platform.machine()
    assert 1 <= processor.threads <= psutil.cpu_count()
    assert 1 <= processor.numa_nodes <= processor.cores <= psutil.cpu_count()
    assert 2**28 < processor.memory <= psutil.virtual_memory().total


V1 = ("memory/memory.limit_in_bytes", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
NESTED = {
    "slurm/memory.max": 8 * GIB,
    "slurm/job/memory.max": "max",
    "slurm/job/step/memory.max": 16 * GIB,
    "slurm/cpu.max": "200000 100000",
    "slurm/job/step/cpu.max": "800000 100000",
    "other/memory.max": GIB,
}


def v1(*values):
    return {f"sys/fs/cgroup/{name}": value for name, value in zip(V1, values)}


@pytest.mark.parametrize(
    ("files", "memory", "quota"),
    [
        ({"proc/cpuinfo": ""}, None, None),
        (v2("/", {"memory.max": 4 * GIB, "cpu.max": "150000 100000"}), 4 * GIB, 1.5),
        (v2("/a/b", {"a/memory.max": "max", "a/b/memory.max": "max", "a/b/cpu.max": "max 1000"}), None, None),
        (v2("/slurm/job/step", NESTED), 8 * GIB, 2.0),  # an ancestor's limit counts
        # the host's path in a container: the mount is the group
        (v2("/docker/abc", {"memory.max": 2 * GIB}), 2 * GIB, None),
        (v2("/../../docker/abc", {"memory.max": 2 * GIB}), 2 * GIB, None),
        (v1(3 * GIB, 350000, 100000), 3 * GIB, 3.5),  # version 1 in a container
        (v1(NONE, -1, 100000), NONE, None),
    ],
)
def test_limits(tree, files, memory, quota):
    root = tree(files)
    assert (cpu.memory_limit(root), cpu.cpu_quota(root)) == (memory, quota)


@pytest.mark.parametrize(("allowed", "quota", "threads"), [(8, 4.0, 4), (8, 1.5, 1), (8, 0.25, 1), (2, 16.0, 2)])
def test_threads_that_can_really_run(tree, monkeypatch, allowed, quota, threads):
    files = {"memory.max": 2**20, "cpu.max": f"{quota * 1e5:.0f} 100000"}
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(allowed), raising=False)
    bound = cpu.probe(tree(v2("/", files)))
    assert (bound.memory, bound.threads) == (2**20, threads)


def test_numa_nodes_with_processors_are_counted(tree):
    lists = enumerate(("0-3,8-11", "4-7,12-15", ""))  # the third has memory only
    root = tree({f"sys/devices/system/node/node{i}/cpulist": cores for i, cores in lists})
    assert (cpu.probe(root).numa_nodes, cpu.probe(root / "none").numa_nodes) == (2, 1)
