"""Programs written for torch.cuda.amp, with nothing but the import line changed, beside torch's own scaler."""

from __future__ import annotations

import importlib
import inspect
import pickle

import pytest
import torch
from easymp.compat.torch_cuda.amp import autocast_mode, grad_scaler
from torch import nn

from easymp.compat.torch_cuda import amp

GradScaler, autocast = amp.GradScaler, amp.autocast
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train(autocast, scaler, clip=None, **options):
    """The program of the examples of torch.cuda.amp; mean losses by epoch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)).to(DEVICE)
    x = torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    optimizer, loss_fn = torch.optim.SGD(net.parameters(), lr=0.5), nn.CrossEntropyLoss()
    losses = []
    for i in range(40):
        optimizer.zero_grad()
        with autocast(**options):
            loss = loss_fn(net(x[i % 4]), (x[i % 4].sum(1) > 0).long())
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return [sum(losses[i : i + 4]) / 4 for i in range(0, 40, 4)]


@pytest.mark.parametrize("clip", [None, 1.0])
def test_the_program_trains_as_in_fp32(clip):
    accuracy = train(autocast, GradScaler(), clip)
    exact = train(autocast, GradScaler(enabled=False), clip, enabled=False)
    assert accuracy[-1] < 0.2 * accuracy[0]
    assert accuracy == pytest.approx(exact, abs=0.01)
    assert accuracy != exact  # it was fp16


@pytest.mark.gpu
def test_on_a_gpu_it_is_torchs_own_numbers():
    torch_result = train(lambda: torch.autocast("cuda", torch.float16), torch.amp.GradScaler("cuda"))
    assert train(autocast, GradScaler()) == pytest.approx(torch_result, rel=1e-5)


def square(dtype, **options):
    """A function that computes in a `dtype` in forward and backward."""

    class Square(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd(**options)
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a @ a

        @staticmethod
        @amp.custom_bwd
        def backward(ctx, grad):
            product = grad @ ctx.saved_tensors[0]  # under the autocast of forward
            assert product.dtype == dtype
            return product.float()

    return Square.apply


def test_functions_with_casts_of_their_own():
    a = torch.randn(4, 4, device=DEVICE, requires_grad=True)
    for dtype, options in (torch.float16, {}), (torch.float32, {"cast_inputs": torch.float32}):
        with autocast():
            output = square(dtype, **options)(a)
            assert output.dtype == dtype and square(dtype, **options)(a.half()).dtype == dtype
        output.sum().backward()
    assert a.grad is not None


def test_a_scaler_is_torchs_on_this_device():
    scaler = GradScaler(256.0, growth_interval=3)
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(1)
    p = nn.Parameter(torch.ones(2, device=DEVICE))
    optimizer = torch.optim.SGD([p], lr=0.1)
    for factor, scale in ((0.5, 768.0), (float("inf"), 192.0)):
        scaler.scale((p * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        optimizer.zero_grad()
    scaler.update(8.0)
    expected = torch.amp.GradScaler(DEVICE, 8.0, 3.0, 0.25, 1).state_dict()
    for copied in (pickle.loads(pickle.dumps(scaler)), GradScaler()):
        copied.load_state_dict(scaler.state_dict())
        assert copied.state_dict() == scaler.state_dict() == expected
    off = GradScaler(enabled=False)
    assert scaler.is_enabled() and not off.is_enabled() and off.state_dict() == {} and off.scale(p) is p
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    assert scaler._found_inf_per_device(optimizer).keys() == {p.device}
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is grad_scaler.OptState.UNSCALED


def test_names_and_signatures_are_torchs():
    original = torch.cuda.amp
    assert set(original.__all__) == set(amp.__all__)
    for name in ("autocast", "GradScaler", "custom_fwd", "custom_bwd"):
        pair = [inspect.signature(getattr(module, name)).parameters.values() for module in (original, amp)]
        torch_parameters, our_parameters = ([(p.name, p.default) for p in parameters] for parameters in pair)
        assert torch_parameters == our_parameters
    assert isinstance(autocast(), torch.autocast) and isinstance(GradScaler(), torch.amp.GradScaler)
    assert grad_scaler.GradScaler is GradScaler and autocast_mode.custom_fwd is amp.custom_fwd
    assert not amp.amp_definitely_not_available()
    for module, name, message in (
        (".amp", "autocst", "amp.autocst is not part of easymp.compat, did you mean"),
        ("", "Stream", "cuda.Stream is not part of easymp.compat: all but amp is"),
    ):
        with pytest.raises(ImportError, match=message):
            getattr(importlib.import_module(f"easymp.compat.torch_cuda{module}"), name)
