"""The launcher hands CuPy what the kernels expect: seen at the driver's door, where a CPU does the work."""

from __future__ import annotations

import pytest
import torch

from easymp.cuda.cupy_launcher import MOST_BLOCKS, CupyLauncher, probe
from easymp.cuda.kernel import Kernel
from easymp.cuda.rules import RULES
from easymp.cuda.step import FusedStep
from easymp.errors import KernelError

from .compiled import CompiledLauncher
from .driver import Driver

COUNT = Kernel(
    "count",
    ("uint64 out", "int64 less", "float64 most"),
    "at<double>(out)[block] = (double)less + (most > 1e300 ? 1.0 : 0.0);",
)
BAD = Kernel("bad", ("uint64 out",), "at<double>(out)[block] = nothing;")


def steps(launcher):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(s)) for s in [(40000,), (7,), (3, 5)]]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    step = FusedStep(optimizer, RULES[torch.optim.AdamW], launcher)
    for turn in range(2):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(turn))
        result = step.measure(1.0)
        step.step(result[1], result[2])
    return [p.detach() for p in parameters], result


def at_the_door():
    """Run in a process of its own, for CuPy stays as it is imported here."""
    driver = Driver()
    driver.install()
    with driver.here():
        launcher = CupyLauncher(torch.device("cpu"))
        probe(launcher)
        began = list(driver.launches)

        out = torch.zeros(2, dtype=torch.float64)
        launcher.launch(COUNT, 2, [out.data_ptr(), -5, float("inf")])
        launcher.launch(COUNT, 1, [out.data_ptr(), True, 2])
        counted = out.tolist()

        failures = []
        for kernel, blocks in ((BAD, 1), (COUNT, 0), (COUNT, MOST_BLOCKS + 1)):
            before = list(driver.launches)
            with pytest.raises(KernelError) as said:
                launcher.launch(kernel, blocks, [0] * len(kernel.arguments))
            assert driver.launches == before
            failures.append(str(said.value))

        driver.launches.clear()
        ours, result = steps(launcher)
        theirs, expected = steps(CompiledLauncher())
        same = [torch.equal(a, b) for a, b in zip([*ours, result], [*theirs, expected])]
    return began, counted, failures, driver.launches, same, driver.wrong, driver.guarded


def test_what_reaches_the_driver(ranks, tmp_path):
    pytest.importorskip("cupy", reason="CuPy, an optional package, is not installed")
    env = {"CUPY_CACHE_DIR": str(tmp_path / "cache")}
    [(began, counted, failures, launches, same, wrong, guarded)] = ranks(at_the_door, processes=1, env=env)
    assert wrong == []
    assert began == [("probe", 0), ("probe", 2)]  # compiled and loaded by a start of one thread, then started
    assert counted == [1.0, -4.0]
    assert "bad cannot be compiled for cpu: CompileException" in failures[0]
    assert 'identifier "nothing" is undefined' in failures[0]
    assert all("blocks" in failure for failure in failures[1:])
    # Of a step, everything is compiled before the first launch; the second step compiles nothing.
    adam = "adam_f32_f32_f32_f32"
    measured, stepped = [("squares_f32", 5), ("total", 1)], [("prepare_adam", 1), (adam, 5)]
    assert launches[:4] == [("squares_f32", 0), ("total", 0), *measured]
    assert launches[4:] == [("prepare_adam", 0), (adam, 0), *stepped, *measured, *stepped]
    assert all(same)
    assert guarded == len(began) + len(launches) + 3 + 1  # each start, and the compilation that failed
