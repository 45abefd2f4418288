"""Programs written for torch.cuda.amp, with nothing but the import line changed, beside torch's own scaler."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from torch import nn

from easymp import SettingError, StepError
from easymp.compat import explain
from easymp.compat.torch_cuda import amp

GradScaler, autocast = amp.GradScaler, amp.autocast
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def samples():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=generator)
    return [
        (x[i : i + 16].to(DEVICE), (x[i : i + 16].sum(1) > 0).long().to(DEVICE)) for i in range(0, 64, 16)
    ]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)).to(DEVICE)


def train(autocast, scaler, clip=None, epochs=10, **how):
    """The program of the examples of torch.cuda.amp; mean losses by epoch."""
    net, loss_fn = model(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for data, target in samples():
            optimizer.zero_grad()
            with autocast(**how):
                output = net(data)
                loss = loss_fn(output, target)
            scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            total += loss.item()
        losses.append(total / 4)
    return losses


@pytest.mark.parametrize("clip", [None, 1.0])
def test_the_program_trains_as_in_fp32(clip):
    found = train(autocast, GradScaler(), clip)
    exact = train(autocast, GradScaler(enabled=False), clip, enabled=False)
    assert found[-1] < 0.2 * found[0]
    assert found == pytest.approx(exact, abs=0.01)
    assert found != exact  # it was fp16


def test_autocast_is_real_on_this_device():
    layer, x = nn.Linear(8, 8).to(DEVICE), torch.randn(4, 8, device=DEVICE)
    with autocast():
        assert layer(x).dtype == torch.float16
        with autocast(enabled=False):
            assert layer(x).dtype == torch.float32
    with amp.autocast(dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer(x).dtype == torch.float32

    @autocast()
    def forward(x):
        return layer(x)

    assert forward(x).dtype == torch.float16


def test_functions_with_casts_of_their_own():
    class Product(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd(cast_inputs=torch.float32)
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @amp.custom_bwd
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            assert a.dtype == grad.dtype == torch.float32
            return grad @ b.t(), a.t() @ grad

    class Plain(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @amp.custom_bwd
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            assert (grad @ b.t()).dtype == torch.float16  # under the autocast of forward
            return (grad @ b.t()).to(a.dtype), (a.t() @ grad).to(b.dtype)

    a, b = (torch.randn(4, 4, device=DEVICE, requires_grad=True) for _ in range(2))
    with autocast():
        assert Product.apply(a.half(), b.half()).dtype == torch.float32
        assert Product.apply(a, b).dtype == torch.float32
        out = Plain.apply(a, b)
        assert out.dtype == torch.float16
    out.sum().backward()
    assert a.grad is not None


NUMBERS = {"init_scale": 256.0, "growth_interval": 3}


def steps(scaler, found):
    """The scale after each step of `found`: good, or an overflow; and the parameter."""
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    scales = []
    for good in found:
        scaler.scale((p * 0.5).sum()).backward()
        if not good:
            p.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, p.detach().tolist()


def test_the_numbers_can_be_set():
    scaler = GradScaler(**NUMBERS)
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(1)
    assert steps(scaler, [True, False])[0] == [768.0, 192.0]
    with pytest.raises(SettingError, match=r"growth_factor=0\.5 of the loss scale must be above 1"):
        scaler.set_growth_factor(0.5)
    scaler.update(8.0)
    assert scaler.get_scale() == 8.0
    assert steps(copy.deepcopy(scaler), [True])[0] == [24.0]
    assert scaler.is_enabled()
    assert not GradScaler(enabled=False).is_enabled()


def test_each_wrong_order_says_which_call_came_too_early():
    scaler, p = GradScaler(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    with pytest.raises(StepError, match="before any backward"):
        scaler.step(optimizer)
    scaler = GradScaler()
    with pytest.raises(StepError, match=r"update\(\) before any step\(\)"):
        scaler.update()
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(StepError, match="unscale_ was called twice"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(StepError, match=r"unscale_ was called after step\(\)"):
        scaler.unscale_(optimizer)
    with pytest.raises(StepError, match=r"step\(\) was called twice"):
        scaler.step(optimizer)
    half = nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler = GradScaler(init_scale=2.0)
    scaler.scale(half.sum()).backward()
    with pytest.raises(StepError, match="a gradient is float16"):
        scaler.unscale_(torch.optim.SGD([half], lr=0.1))


def test_one_overflow_skips_that_optimizer_only():
    scaler = GradScaler(init_scale=4.0)
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    one, other = torch.optim.SGD([a], lr=0.1), torch.optim.SGD([b], lr=0.1)
    scaler.scale((a + b).sum()).backward()
    a.grad.fill_(float("inf"))
    scaler.step(one)
    scaler.step(other)
    scaler.update()
    assert (a.item(), scaler.get_scale()) == (1.0, 2.0)
    assert b.item() == pytest.approx(0.9)


def test_names_that_are_not_here_and_the_native_lines(capsys):
    with pytest.raises(ImportError, match=r"amp.autocst is not part of easymp.compat, did you mean"):
        importlib.import_module("easymp.compat.torch_cuda.amp").autocst  # noqa: B018
    with pytest.raises(ImportError, match=r"cuda.Stream is not part of easymp.compat: all but amp is"):
        importlib.import_module("easymp.compat.torch_cuda").Stream  # noqa: B018
    GradScaler()
    assert 'acc = Accelerator(mixed_precision="fp16")' in explain()
    assert "# torch.cuda.amp → easymp" in capsys.readouterr().out
    assert not amp.amp_definitely_not_available()


@pytest.mark.gpu
def test_on_a_gpu_it_is_torchs_own_numbers():
    found = train(autocast, GradScaler())
    theirs = train(lambda: torch.autocast("cuda", torch.float16), torch.amp.GradScaler("cuda"))
    assert found == pytest.approx(theirs, rel=1e-5)
