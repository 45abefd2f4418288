import platform
import types

import psutil
import pytest
import torch

from easymp.hardware import cpu, instructions, procfs

X86 = "processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor\nflags\t\t: fpu sse2 {flags}\n\nprocessor\t: 1\n"
ARM = "processor\t: 0\nBogoMIPS\t: 2000.00\nFeatures\t: fp asimd evtstrm {flags}\nCPU implementer\t: 0x41\n"


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        (X86, "avx avx2", {"avx2"}),
        (X86, "avx2 avx512f avx512_bf16 avx512_vnni", {"avx2", "avx512", "avx512_bf16", "avx512_vnni"}),
        (X86, "avx512_fp16 amx_bf16 amx_tile amx_int8", {"avx512_fp16", "amx_bf16", "amx_int8"}),
        (ARM, "", {"neon"}),
        (ARM, "asimdhp bf16 i8mm sve svebf16", {"neon", "neon_fp16", "neon_bf16", "i8mm", "sve", "sve_bf16"}),
    ],
)
def test_features_from_the_kernels_list(text, flags, expected):
    assert instructions.from_cpuinfo(text.format(flags=flags)) == expected


@pytest.mark.parametrize(
    ("capabilities", "bf16", "fp16"),
    [
        ({"avx2": True, "avx512_f": False, "avx512_bf16": False}, False, False),
        ({"avx2": True, "avx512_f": True, "avx512_bf16": True}, True, False),
        ({"amx_tile": True, "amx_bf16": True, "avx512_fp16": True}, True, True),
        ({"neon": True, "bf16": True, "fp16_arith": True, "sve_max_length": 256}, True, False),
        ({"neon": True, "sve": True, "sve_bf16": True}, True, False),
        ({"architecture": "x86_64", "cpu_name": "avx2"}, False, False),
    ],
)
def test_features_from_torch(capabilities, bf16, fp16):
    found = instructions.from_capabilities(capabilities)
    processor = cpu.CPU("name", "any", 1, 1, 1, 1, found)
    assert (processor.bf16, processor.fp16) == (bf16, fp16)


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc/cpuinfo")
def test_all_sources_agree_here(monkeypatch):
    root = cpu.ROOT
    by_torch = instructions.features(root)
    older = types.SimpleNamespace(
        **{n: getattr(torch.cpu, n) for n in vars(torch.cpu) if n.startswith("_is_")}
    )
    monkeypatch.setattr(instructions.torch, "cpu", older)
    assert instructions.features(root) == by_torch
    assert instructions._from_older_torch() <= by_torch


def test_apple_silicon_under_an_older_torch(monkeypatch, tmp_path):
    monkeypatch.setattr(instructions.torch, "cpu", types.SimpleNamespace())
    answers = {
        "hw.optional.arm.FEAT_BF16": "1",
        "hw.optional.arm.AdvSIMD": "1",
        "hw.optional.arm.FEAT_SME": "0",
    }
    monkeypatch.setattr(instructions, "apple", lambda key: answers.get(key, ""))
    assert instructions.features(tmp_path) == {"neon", "neon_bf16"}


def test_sysctl_is_asked_on_a_mac_only(monkeypatch):
    asked = []

    def run(command, **_):
        asked.append(command)
        return types.SimpleNamespace(stdout="Apple M3 Max\n")

    monkeypatch.setattr(procfs.subprocess, "run", run)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert procfs.apple("machdep.cpu.brand_string") == ""
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert procfs.apple("machdep.cpu.brand_string") == "Apple M3 Max"
    assert asked == [["sysctl", "-n", "machdep.cpu.brand_string"]]


def test_the_name_is_the_makers(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(X86.format(flags=""))
    assert cpu.name(tmp_path) == "AMD EPYC 9654 96-Core Processor"


def test_windows_word_for_the_architecture(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "AMD64")
    assert cpu.probe().architecture == "x86_64"


def test_this_processor():
    here = cpu.probe()
    assert here.name and here.architecture == platform.machine()
    assert 1 <= here.threads <= psutil.cpu_count()
    assert 1 <= here.cores <= psutil.cpu_count()
    assert 1 <= here.numa_nodes <= here.cores
    assert 2**28 < here.memory <= psutil.virtual_memory().total


@pytest.mark.skipif(not hasattr(psutil.Process, "cpu_affinity"), reason="this system has no affinity")
def test_affinity_counts():
    process = psutil.Process()
    before = process.cpu_affinity()
    try:
        process.cpu_affinity(before[:1])
        assert cpu.probe().threads == 1
    finally:
        process.cpu_affinity(before)
