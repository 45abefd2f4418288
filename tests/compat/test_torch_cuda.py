"""Programs written for torch.cuda.amp, with nothing but the import line changed, beside torch's own scaler."""

from __future__ import annotations

import importlib
import inspect
import pickle

import pytest
import torch
from torch import nn

from easymp.compat import explain
from easymp.compat.torch_cuda import amp
from easymp.compat.torch_cuda.amp import autocast_mode, grad_scaler

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
        def forward(ctx, a):
            return a @ a

        @staticmethod
        @amp.custom_bwd
        def backward(ctx, grad):
            product = grad @ grad
            assert product.dtype == torch.float16  # under the autocast of forward
            return product.float()

    a, b = (torch.randn(4, 4, device=DEVICE, requires_grad=True) for _ in range(2))
    with autocast():
        assert Product.apply(a.half(), b.half()).dtype == torch.float32
        product, out = Product.apply(a, b), Plain.apply(a)
        assert (product.dtype, out.dtype) == (torch.float32, torch.float16)
    (product.sum() + out.sum()).backward()
    assert a.grad is not None


def test_a_scaler_is_torchs_on_this_device():
    scaler = GradScaler(256.0, growth_interval=3)
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(1)
    p = nn.Parameter(torch.ones(2, device=DEVICE))
    optimizer = torch.optim.SGD([p], lr=0.1)
    scales = []
    for factor in (0.5, float("inf")):
        scaler.scale((p * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    assert scales == [768.0, 192.0]
    scaler.update(8.0)
    wanted = torch.amp.GradScaler(DEVICE, 8.0, 3.0, 0.25, 1).state_dict()
    for copied in (pickle.loads(pickle.dumps(scaler)), GradScaler()):
        copied.load_state_dict(scaler.state_dict())
        assert copied.state_dict() == scaler.state_dict() == wanted
    off = GradScaler(enabled=False)
    assert scaler.is_enabled() and not off.is_enabled() and off.state_dict() == {} and off.scale(p) is p
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    assert scaler._found_inf_per_device(optimizer).keys() == {p.device}
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is grad_scaler.OptState.UNSCALED
    with pytest.raises(AssertionError, match="growth factor must be"):
        GradScaler(growth_factor=0.5)


def test_names_and_signatures_are_torchs():
    theirs = torch.cuda.amp
    assert set(theirs.__all__) == set(amp.__all__)
    for name in ("autocast", "GradScaler", "custom_fwd", "custom_bwd"):
        pair = [inspect.signature(getattr(module, name)).parameters.values() for module in (theirs, amp)]
        there, here = ([(p.name, p.default) for p in parameters] for parameters in pair)
        assert there == here
    assert isinstance(autocast(), torch.autocast) and isinstance(GradScaler(), torch.amp.GradScaler)
    assert grad_scaler.GradScaler is GradScaler and autocast_mode.custom_fwd is amp.custom_fwd


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
