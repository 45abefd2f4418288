"""``easymp env``: facts and plan."""

from __future__ import annotations

import json
import re

import pytest

from easymp import Hardware, cuda
from easymp.cli import env, main
from easymp.cuda.cupy_launcher import Facts
from easymp.hardware import CPU, Device

from ..hardware.machines import MACHINES

H100 = Device("cuda", 0, "H100", 80 << 30, (9, 0), "sm_90", frozenset({"bf16", "fp8"}), bf16=True, fp16=True)
OLD = Device("cuda", 1, "Old", 8 << 30, (3, 5), "sm_35", built_for=False)
XEON = CPU("Some Xeon", "x86_64", 32, 64, 2, 256 << 30, frozenset({"avx2", "amx_bf16"}))
SERVER = Hardware(XEON, (H100, OLD), "nvidia", ("no XPU: torch is built without it",))


@pytest.mark.reads_hardware
def test_this_machine(capsys):
    assert main(["env"]) == 0
    output = capsys.readouterr().out
    for title in "easymp torch processor usable Plan precision strategy kernels".split():
        assert title in output
    assert main(["env", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert set(record) == {"versions", "hardware", "kernels", "plan"}
    assert record["hardware"]["cpu"]["threads"] >= 1
    assert set(record["plan"]["precision"]) == {"value", "reason", "source"}


def test_why_there_are_no_kernels(monkeypatch):
    for packages, reason in (
        ({}, "CuPy is not installed: pip install 'easymp[cuda13]'"),
        ({"cupy-cuda13x": "14.2.0"}, "CuPy 14.2.0 (cupy-cuda13x)"),
    ):
        cupy = Facts("13.0", None, bool(packages), packages, None)
        monkeypatch.setattr(cuda, "facts", lambda device, cupy=cupy: cupy)
        assert env.kernels(SERVER) == reason


def test_facts_of_another_machine():
    text = env.table(env.facts(SERVER)) + env.table(env.facts(MACHINES["8xH100"]))
    for fact in (
        "Some Xeon (x86_64)",
        "32 cores, 64 threads usable, 2 NUMA node(s), 256.0 GiB",
        "cuda:0     H100, 80.0 GiB",
        "sm_90 bf16 fp16 fp8",
        "Old, 8.0 GiB; this torch has no code for it",
        "not found  no XPU",
        "cuda:0-7   8 x NVIDIA H100 80GB HBM3, 79.1 GiB",
    ):
        assert fact in text


@pytest.mark.parametrize(
    ("machine", "lines"),
    [
        ("8xH100", r"cuda:0-7 +8 x NVIDIA H100, 74\.5 GiB|precision +bf16 +native bf16 on sm_90|strategy +ddp"),
        ("64x80GB", r"processes +64 on 8 nodes|not known +model of the GPU: .*A100|8 are assumed; 4x16x80GB"),
        ("V100", r"processes +1 |precision +fp16 |strategy +single|not known +processor"),
        ("4xcpu", r"processes +4 |device +cpu|precision +fp32 +its instructions are not known"),
    ],
)
def test_what_would_be_decided_on_another_machine(machine, lines, folder, capsys):
    assert main(["env", "--for", machine]) == 0
    output = capsys.readouterr().out
    assert [line for line in lines.split("|") if not re.search(line, output)] == []


def test_what_would_be_refused_on_another_machine(folder, monkeypatch, capsys):
    monkeypatch.setenv("EASYMP_MIXED_PRECISION", "bf16")
    assert main(["env", "--for", "8xV100"]) == 2
    assert "NVIDIA V100-16GB (sm_70) has no bf16 units" in capsys.readouterr().err
    assert main(["env", "--for", ""]) == 2
    assert "'' describes no machine" in capsys.readouterr().err
    assert main(["env", "--for", "2x8xA100-80GB", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["nodes"], record["processes"], record["plan"]["processes"]) == (2, 8, 16)
    assert record["hardware"]["devices"][7]["memory"] == 80 * 10**9
