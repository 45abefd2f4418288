"""Casts that divide and sums in fp32 give torch's bits."""

import pytest
import torch

from easymp.cuda import casts
from easymp.cuda.casts import Adder, divided

from .compiled import CompiledLauncher

TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def launcher(monkeypatch):
    made = CompiledLauncher()
    monkeypatch.setattr(casts, "launcher_with", lambda device, kernels: made)
    return made


SIZES = [0, 1, 7, 8, 16384, 16391, 40_001]


@pytest.mark.parametrize(
    ("source", "target"), [(torch.float32, t) for t in TYPES[1:]] + [(t, torch.float32) for t in TYPES[1:]]
)
@pytest.mark.parametrize("by", [1.0, 8.0, 3.0])
def test_a_cast_that_divides_is_a_division_and_a_cast(source, target, by, launcher):
    for size in SIZES:
        for offset in (0, 1):  # the second is not aligned
            x = (torch.randn(size + offset) * 100).to(source)[offset:]
            y = torch.empty(size + offset, dtype=target)[offset:]
            assert torch.equal(divided(x, y, by), (x.float() / by).to(target))
    assert len(launcher.launches) == 2 * len(SIZES) - 2


@pytest.mark.parametrize("kernels", [True, False])
def test_sums_of_all_tensors_are_torchs(kernels, launcher, monkeypatch):
    if not kernels:
        monkeypatch.setattr(casts, "launcher_with", lambda device, kernels: None)
    adder = Adder()
    shapes = [(7,), (0,), (33, 64), (16385,), (2, 3, 5, 7), (100,)]
    kinds = [torch.bfloat16, torch.bfloat16, torch.float16, torch.bfloat16, torch.bfloat16, torch.float64]
    sources = [torch.randn(s).to(k) for s, k in zip(shapes, kinds)]
    sources[4] = sources[4].to(memory_format=torch.channels_last)
    totals = [torch.empty_like(s, dtype=torch.float32) for s in sources]
    sources[3] = torch.randn(2 * 16385).bfloat16()[::2]  # not dense: torch's
    expected = [s.float() for s in sources]
    adder(sources, totals, [True] * 6)
    assert all(torch.equal(t, e) for t, e in zip(totals, expected))
    assert launcher.launches == (["widen_bf16_f32", "widen_f16_f32"] if kernels else [])
    adder(sources, totals, [False] * 6)
    adder(sources, totals, [False] * 6)
    assert all(torch.equal(t, e + s.float() + s.float()) for t, e, s in zip(totals, expected, sources))
    adder(sources[:1], totals[:1], [True])
    assert torch.equal(totals[0], expected[0])
    adder([], [], [])
