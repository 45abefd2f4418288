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


def overflow(optimizer):
    optimizer.param_groups[0]["params"][0].grad.fill_(float("inf"))


def test_the_numbers_can_be_set_saved_and_pickled():
    scaler = GradScaler(256.0, growth_interval=3)
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(1)
    p = nn.Parameter(torch.ones(2, device=DEVICE))
    optimizer = torch.optim.SGD([p], lr=0.1)
    scales = []
    for good in (True, False):
        scaler.scale((p * 0.5).sum()).backward()
        good or overflow(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [768.0, 192.0]
    scaler.update(8.0)
    for copied in (pickle.loads(pickle.dumps(scaler)), GradScaler()):
        copied.load_state_dict(scaler.state_dict())
        assert (
            copied.state_dict()
            == scaler.state_dict()
            == torch.amp.GradScaler(DEVICE, 8.0, 3.0, 0.25, 1).state_dict()
        )
    off = GradScaler(enabled=False)
    assert scaler.is_enabled() and not off.is_enabled() and off.state_dict() == {} and off.scale(p) is p
    with pytest.raises(AssertionError, match="growth factor must be"):
        GradScaler(growth_factor=0.5)


def test_errors_are_torchs():
    scaler, p = GradScaler(2.0), nn.Parameter(torch.ones(2, device=DEVICE))
    optimizer = torch.optim.SGD([p], lr=0.1)
    with pytest.raises(AssertionError, match="did not use scaler"):
        scaler.step(optimizer)
    scaler.scale(p.sum())
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)  # without gradients
    half = nn.Parameter(torch.ones(2, dtype=torch.float16, device=DEVICE))
    scaler.scale(half.sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(torch.optim.SGD([half], lr=0.1))


def test_an_optimizer_that_scales_by_itself_is_told():
    seen = []

    class Mine(torch.optim.SGD):
        def __init__(self, parameters):
            super().__init__(parameters, lr=0.1)
            self._step_supports_amp_scaling = True  # of this instance

        def step(self, closure=None):
            seen.append((self.grad_scale.item(), self.found_inf.item()))

    p = nn.Parameter(torch.ones(1, device=DEVICE))
    scaler, optimizer = GradScaler(4.0), Mine([p])
    for bad in (False, True):
        scaler.scale(p.sum()).backward()
        bad and overflow(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert seen == [(4.0, 0.0), (4.0, 1.0)] and p.grad.isinf().all() and scaler.get_scale() == 2.0


def test_what_libraries_read_of_a_scaler_is_there():
    scaler, p = GradScaler(4.0), nn.Parameter(torch.ones(1, device=DEVICE))
    optimizer = torch.optim.SGD([p], lr=0.1)
    assert scaler._scale is None and scaler._init_growth_tracker == 0 and scaler._growth_tracker is None
    scaler.scale(p.sum()).backward()
    assert scaler._get_growth_tracker() == 0 and scaler._check_scale_growth_tracker("step")[0] == 4.0
    found = scaler._unscale_grads_(optimizer, torch.tensor(0.5), torch.tensor(0.0), True)
    assert p.grad == 2.0 and not any(found.values())
    scaler.unscale_(optimizer)
    assert scaler._found_inf_per_device(optimizer).keys() == {p.device}
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is grad_scaler.OptState.UNSCALED


def test_names_and_signatures_are_torchs():
    theirs = torch.cuda.amp
    assert set(theirs.__all__) == set(amp.__all__)
    for name in ("autocast", "GradScaler"):
        there, here = (inspect.signature(getattr(module, name).__init__) for module in (theirs, amp))
        assert [(p.name, p.default) for p in there.parameters.values()] == [
            (p.name, p.default) for p in here.parameters.values()
        ]
        assert isinstance(getattr(amp, name)(), getattr(torch.amp, name))
    for name in ("custom_fwd", "custom_bwd"):
        assert [*inspect.signature(getattr(theirs, name)).parameters] == [
            *inspect.signature(getattr(amp, name)).parameters
        ]
    assert {n for n in vars(torch.amp.GradScaler) if n not in vars(amp.GradScaler)} <= {*dir(GradScaler)}
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
