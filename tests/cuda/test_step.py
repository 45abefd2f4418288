"""The fused step does what torch's unscale, clip and AdamW do."""

import pytest
import torch

from easymp.cuda.rules import RULES
from easymp.cuda.step import FusedStep

from .compiled import CompiledLauncher

SHAPES = [(7,), (64, 33), (0,), (1,), (5, 4097), (16384,), (3, 1, 5)]


def parameters(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in SHAPES]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}])
def test_five_steps_with_scale_and_clip_are_torchs(kind, options):
    ours, theirs = parameters(), parameters()
    mine, reference = kind(ours, lr=1e-2, **options), kind(theirs, lr=1e-2, **options)
    launcher = CompiledLauncher()
    step = FusedStep(mine, RULES[kind], launcher)
    scale = torch.tensor(1024.0)
    for turn in range(5):
        for p, q in zip(ours, theirs):
            q.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(turn))
            p.grad = q.grad * 1024
        total = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        result = step.measure(1.0, scale)
        assert result[0].item() == pytest.approx(total.item(), rel=1e-5)
        step.step(result[1], result[2])
        reference.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert launcher.launches[-4:] == ["squares_f32", "total", "prepare_adam", launcher.launches[-1]]
