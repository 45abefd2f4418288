"""All that tests run sees one recorded processor: this process, ranks, and scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from easymp import Accelerator
from easymp.hardware.accelerators import _detect
from easymp.precision import PRECISIONS

from ..site import CPUS, VARIABLE


def precision() -> tuple[str, list[str]]:
    _detect.cache_clear()  # a rank may have seen another record
    with Accelerator(cpu=True) as acc:
        return acc.plan.precision.value, sorted(acc.plan.hardware.cpu.features)


@pytest.mark.reads_hardware
def test_a_process_and_ranks_see_the_same_processor(ranks: Any) -> None:
    features = CPUS[os.environ[VARIABLE]][2].split()
    decided = "bf16" if "amx_bf16" in features else "fp32"
    assert [precision(), *ranks(precision, env={VARIABLE: os.environ[VARIABLE]})] == [(decided, sorted(features))] * 3


SCRIPT = """
import os, sys
from easymp import detect
from easymp.hardware.accelerators import _detect

for processor in sys.argv[1:]:
    os.environ["TESTS_CPU"] = processor
    print(*sorted(detect().cpu.features))
    _detect.cache_clear()
"""


def test_a_script_sees_the_processor() -> None:
    command = [sys.executable, "-c", SCRIPT, *CPUS]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split() for line in printed.splitlines()] == [sorted(cpu[2].split()) for cpu in CPUS.values()]


@pytest.mark.real_cpu
def test_this_processor_trains_in_each_precision_that_its_plan_takes() -> None:
    for name in PRECISIONS:
        if name in ("tf32", "fp8"):  # of GPUs
            continue
        with Accelerator(cpu=True, mixed_precision=name, seed=0) as acc:
            model = torch.nn.Linear(4, 4)
            model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            acc.backward(model(torch.ones(2, 4)).square().mean())
            optimizer.step()
            assert all(p.isfinite().all() for p in model.parameters()), name
