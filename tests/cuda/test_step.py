"""The numbers of the fused step: after a hundred steps what torch's AdamW has in float64, within rounding, over dtypes and layouts."""

import math

import pytest
import torch

from easymp import KernelError
from easymp.cuda.step import FusedStep
from easymp.optim import Adam

from .compiled import CompiledLauncher
from .kernels import RULES

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
SHAPES = [(7,), (64, 33), (0,), (1,), (2, 8199), (16384,), (3, 4, 5, 2), ()]


def scattered(shape, dtype, misaligned):
    """Numbers as weights have them, at an address that is a multiple of 16, or is not."""
    size = math.prod(shape)
    run = torch.empty(size + misaligned, dtype=dtype)[misaligned:]
    return run.view(shape).copy_(torch.randn(shape) * 0.1)


def parameters(dtype=FP32, misaligned=0, seed=0, shapes=SHAPES):
    torch.manual_seed(seed)
    made = [torch.nn.Parameter(scattered(s, dtype, misaligned)) for s in shapes]
    made[-2].data = made[-2].data.to(memory_format=torch.channels_last)
    return made


def random(parameter, turn, index, dtype, scale=1.0):
    generator = torch.Generator().manual_seed(1000 * turn + index)
    return (torch.randn(parameter.shape, generator=generator) * scale).to(dtype)


def snapshot(optimizer, also=()):
    held = [p for group in optimizer.param_groups for p in group["params"]]
    state = [v for p in held for v in optimizer.state[p].values()]
    return [t.detach().clone() for t in (*held, *state, *also)]


def same(before, after):
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# -- against torch, step by step --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}])
def test_five_steps_with_scale_and_clip_are_torchs(kind, options):
    ours, theirs = parameters(), parameters()
    mine, reference = kind(ours, lr=1e-2, **options), kind(theirs, lr=1e-2, **options)
    launcher = CompiledLauncher()
    step = FusedStep(mine, RULES[kind], launcher)
    scale = torch.tensor(1024.0)
    for turn in range(5):
        for i, (p, q) in enumerate(zip(ours, theirs)):
            q.grad = random(q, turn, i, FP32)
            p.grad = q.grad * 1024
        total = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        result = step.measure(1.0, scale)
        assert result[0].item() == pytest.approx(total.item(), rel=1e-5)
        step.step(result[1], result[2])
        reference.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert launcher.launches[-4:-1] == ["squares_f32", "total", "prepare_adam"]


# gradient, parameter, states: with fp32 parameters and states the reference is float64 that is never rounded; others round as it goes.
KINDS = [
    (FP32, FP32, None, 0),
    (FP32, FP32, None, 1),
    (BF16, FP32, None, 0),
    (FP16, FP32, None, 3),
    (FP32, FP32, BF16, 0),
    (BF16, FP32, BF16, 1),
    (BF16, BF16, FP32, 0),
    (BF16, BF16, None, 1),
    (FP16, FP16, FP32, 0),
]


@pytest.mark.parametrize("low", [BF16, FP16])
def test_masters_copies_and_averages_come_from_one_pass(low):
    """The gradient in half precision, the master in fp32, the copy in half precision, the average in fp32."""
    masters, shadows = parameters(), parameters()
    copies = [m.detach().to(low) for m in masters]
    ours = torch.optim.AdamW(masters, lr=1e-2)
    theirs = torch.optim.AdamW(shadows, lr=1e-2)
    averages = [s.detach().clone() for s in shadows]
    gradients = {}
    launcher = CompiledLauncher()
    step = FusedStep(
        ours,
        Adam.rule,
        launcher,
        gradient=lambda p: gradients.get(id(p)),
        copy={id(m): c for m, c in zip(masters, copies)},
        ema_decay=0.9,
    )
    for turn in range(10):
        for i, (m, s) in enumerate(zip(masters, shadows)):
            gradients[id(m)] = torch.empty_like(m, dtype=low).copy_(random(m, turn, i, low))
            s.grad = gradients[id(m)].float()
        result = step.measure(1.0)
        torch.nn.utils.clip_grad_norm_(shadows, 1.0)
        step.step(result[1])
        theirs.step()
        for a, s in zip(averages, shadows):
            a.lerp_(s.detach(), 0.1)
        assert all(torch.equal(c, m.to(low)) for c, m in zip(copies, masters))
    assert launcher.launches.count(launcher.launches[-1]) == 10  # one a step
    for m, s, a in zip(masters, shadows, averages):
        torch.testing.assert_close(m, s, rtol=0, atol=1e-6)
        torch.testing.assert_close(ours.state[m]["ema"], a, rtol=0, atol=1e-6)
    before = snapshot(ours, copies)
    step.step(result[1], torch.ones(()))
    assert same(before, snapshot(ours, copies))


# -- layouts ------------------------------------------------------------------------------------------------------------


def pair(make, lr=1e-2):
    """The same parameters under ours and under torch's step."""
    torch.manual_seed(0)
    ours = make()
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    mine, reference = torch.optim.AdamW(ours, lr=lr), torch.optim.AdamW(theirs, lr=lr)
    return ours, theirs, FusedStep(mine, Adam.rule, CompiledLauncher()), reference


def both(ours, theirs, step, reference, gradients):
    for p, q, g in zip(ours, theirs, gradients):
        p.grad, q.grad = g, None if g is None else g.detach().clone(memory_format=torch.contiguous_format)
    result = step.measure()
    norms = [
        q.grad.norm() for q in theirs if q.grad is not None and not q.grad.is_sparse and q.grad.dtype != FP64
    ]
    if norms:
        torch.testing.assert_close(result[0], torch.stack(norms).norm(), rtol=1e-5, atol=1e-8)
    step.step()
    reference.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_gradients_with_other_strides_are_read_right():
    def make():
        return [
            torch.nn.Parameter(torch.randn(4, 6, 3, 3).to(memory_format=torch.channels_last))
            for _ in range(3)
        ]

    given = pair(make)
    for _ in range(3):
        plain = torch.randn(4, 6, 3, 3)
        expanded = torch.randn(1, 6, 1, 1).expand(4, 6, 3, 3)
        stepped = torch.randn(8, 6, 3, 3)[::2]
        both(*given, [plain, expanded, stepped])
    step = given[2]
    assert all(step.optimizer.state[p]["exp_avg"].stride() == p.stride() for p in given[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Parameter(torch.randn(4, dtype=FP64)),
        lambda: torch.nn.Parameter(torch.randn(8)[::2]),
        lambda: torch.nn.Parameter(torch.randn(3, 1).expand(3, 4)),
        lambda: torch.nn.Parameter(torch.randn(5, 2)),
    ],
)
def test_tensors_that_kernels_do_not_take_are_refused_before_any_state_is_made(make):
    odd, good = make(), torch.nn.Parameter(torch.randn(3))
    optimizer = torch.optim.AdamW([good, odd])
    good.grad, odd.grad = torch.ones(3), torch.ones_like(odd, memory_format=torch.contiguous_format)
    if odd.shape == (5, 2):
        odd.grad = torch.ones(5, 2).to_sparse(1)
    before = good.detach().clone()
    step = FusedStep(optimizer, Adam.rule, CompiledLauncher())
    with pytest.raises(KernelError, match="dense float32"):
        step.step()
    assert not optimizer.state and torch.equal(good, before)


# -- what the norm says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(value, dtype):
    for size in (1, 8, 16384, 16385, 40_003):
        for where in {0, size // 2, size - 1}:
            p = torch.nn.Parameter(torch.zeros(size))
            p.extra = torch.zeros(size, dtype=dtype)
            step = FusedStep(
                torch.optim.AdamW([p]), Adam.rule, CompiledLauncher(), gradient=lambda p: p.extra
            )
            assert step.measure()[2] == 0
            p.extra[where] = value
            assert step.measure()[2] == 1


def test_no_gradients_at_all_and_only_empty_tensors():
    empty, without = torch.nn.Parameter(torch.zeros(0, 3)), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([empty, without])
    step = FusedStep(optimizer, Adam.rule, CompiledLauncher())
    for _ in range(2):
        result = step.measure(1.0)
        step.step(result[1], result[2])
        assert result.tolist() == [0.0, 1.0, 0.0, 1.0]
        assert not optimizer.state
    empty.grad = torch.zeros(0, 3)
    step.step(step.measure(1.0)[1])
    assert optimizer.state[empty]["step"] == 1
    assert without not in optimizer.state
