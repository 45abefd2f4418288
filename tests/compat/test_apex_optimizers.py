"""apex.optimizers, normalization and fp16_utils by Apex's arguments, against formulas in double precision."""

from __future__ import annotations

import copy
import importlib
import inspect
import tomllib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import required

import easymp.optim
from easymp import EasympError, EasympWarning, RefusedError
from easymp.compat.apex import fp16_utils, normalization, optimizers

from ..cuda.compiled import CompiledLauncher, kernels_on_cpu

FusedAdagrad, FusedAdam, FusedSGD = optimizers.FusedAdagrad, optimizers.FusedAdam, optimizers.FusedSGD
FusedMixedPrecisionLamb = optimizers.FusedMixedPrecisionLamb
APEX = tomllib.loads(Path(__file__).with_name("apex_names.toml").read_text())
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


UNCORRECTED = {"lr": 1e-2, "weight_decay": 0.1, "bias_correction": False, "betas": (0.8, 0.9)}
ADAMW, SGD, ADAGRAD = torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad
CASES = [  # the optimizer, its options, and torch's of the same rule, with options of its own
    (FusedAdam, {}, ADAMW, {"weight_decay": 0.0}),
    (FusedAdam, {"lr": 1e-2, "weight_decay": 0.1}, ADAMW, {}),
    (FusedAdam, {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}, torch.optim.Adam, {}),
    (FusedSGD, {"lr": 0.1}, SGD, {}),
    (FusedSGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}, SGD, {}),
    (FusedSGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, SGD, {}),
    (FusedSGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True}, SGD, {"weight_decay": 0}),
    (FusedAdagrad, {}, ADAGRAD, {}),
    (FusedAdagrad, {"lr": 0.1, "weight_decay": 0.1, "adagrad_w_mode": True}, ADAGRAD, {"weight_decay": 0}),
]


def stepped(kind, options, dtype=torch.float32, decay=0.0):
    """A parameter after four steps, and the optimizer, copied meanwhile. `decay` is that beside the gradient."""
    p = nn.Parameter(torch.linspace(-1, 1, 12, device=DEVICE).view(3, 4).to(dtype))
    optimizer, generator = kind([p], **options), torch.Generator().manual_seed(1)
    for step in range(4):
        with torch.no_grad():
            p.mul_(1 - decay)
        p.grad = torch.randn(3, 4, generator=generator).to(DEVICE, dtype)
        optimizer.step()
        if step == 1:
            optimizer = copy.deepcopy(optimizer)  # options travel along
            p = optimizer.param_groups[0]["params"][0]
    return p.detach().cpu().double(), optimizer


@pytest.mark.parametrize(("kind", "options", "torch_kind", "torch_options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_each_follows_the_rule_of_torchs(kind, options, torch_kind, torch_options, dtype):
    weight, optimizer = stepped(kind, options, dtype)
    named = {n: v for n, v in options.items() if n in inspect.signature(torch_kind).parameters} | torch_options
    beside = options["lr"] * options["weight_decay"] if torch_options.get("weight_decay") == 0 and options else 0.0
    exact, _ = stepped(torch_kind, {"eps": 1e-10, **named} if torch_kind is ADAGRAD else named, torch.float64, beside)
    assert torch.allclose(weight, exact, rtol=0, atol=1e-5 if dtype == torch.float32 else 5e-3)
    states = [item for state in optimizer.state.values() for item in state.items()]
    moments = {name: value.dtype for name, value in states if value.ndim}
    assert moments.keys() <= {"exp_avg", "exp_avg_sq", "momentum_buffer", "sum"}
    assert set(moments.values()) <= {torch.float32}


@pytest.mark.parametrize("by_kernels", [False, True])
def test_adam_without_bias_correction(monkeypatch, by_kernels):
    if by_kernels:
        kernels_on_cpu(monkeypatch, CompiledLauncher())
    weight, optimizer = stepped(FusedAdam, UNCORRECTED)
    p, m, v = torch.linspace(-1, 1, 12).view(3, 4).double(), 0, 0
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        g = torch.randn(3, 4, generator=generator).double()
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        p -= 0.01 * (m / (v.sqrt() + 1e-8) + 0.1 * p)
    assert torch.allclose(weight, p, rtol=0, atol=1e-5) and (optimizer.engine.name == "CuPy") == by_kernels


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LAMB", {}),
        ("LAMB", {"use_nvlamb": True, "max_grad_norm": 0.1, "adam_w_mode": False}),
        ("NovoGrad", {}),
        ("NovoGrad", {"norm_type": 0, "reg_inside_moment": True, "weight_decay": 0.1}),
    ],
)
def test_lamb_and_novograd_are_the_librarys(name, options):
    classes = getattr(optimizers, f"Fused{name}"), getattr(easymp.optim, name)
    assert torch.equal(*(stepped(kind, options)[0] for kind in classes))


@pytest.mark.parametrize("address", APEX)
def test_names_and_signatures_are_apexs(address):
    module = importlib.import_module(f"easymp.compat.apex{address and '.'}{address}")
    for name, signature in APEX[address].items():
        member, expected = getattr(module, name), signature.split()
        if signature != "value":
            parameters = list(inspect.signature(member).parameters.values())
            shown = [n.name if n.default in (n.empty, required) else f"{n.name}={n.default}" for n in parameters]
            assert [parameter.replace(" ", "~") for parameter in shown[: len(expected)]] == expected, name
            assert all(n.kind is n.KEYWORD_ONLY for n in parameters[len(expected) :])  # options of ours


@pytest.mark.parametrize(("kind", "options"), [(FusedAdam, {"master_weights": True}), (FusedMixedPrecisionLamb, {})])
def test_fp32_copies_keep_small_updates_and_go_into_the_state(kind, options):
    p = nn.Parameter(torch.ones(8, dtype=torch.float16, device=DEVICE))
    optimizer = kind([p], lr=2e-4, weight_decay=0.0, **options)
    for step in range(8):
        p.grad = torch.ones_like(p)
        optimizer.step()
        if step == 3:
            state, optimizer = optimizer.state_dict(), kind([p], lr=2e-4, weight_decay=0.0, **options)
            optimizer.load_state_dict(state)
    assert optimizer.state[p]["master_param"].dtype == torch.float32
    assert p[0].item() < 0.9995  # one step is less than half of fp16's spacing below 1
    with torch.no_grad():
        p.fill_(4.0)  # weights that were loaded into the model
    optimizer.step()
    assert p[0].item() > 3.9


@pytest.mark.parametrize("capturable", [False, True])
def test_a_capturable_step_divides_the_loss_scale_out_of_gradients(capturable):
    p = nn.Parameter(torch.ones(8, dtype=torch.float16, device=DEVICE))
    optimizer = FusedAdam([p], capturable=capturable, master_weights=True)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
    scaler.scale(p.float().sum()).backward()
    scaler.step(optimizer)
    assert p.grad.unique().tolist() == [1.0 if capturable else 4.0]
    assert p[0].item() == pytest.approx(0.999, abs=1e-3)


@pytest.mark.parametrize(("apexs", "torchs"), [(FusedAdam, torch.optim.AdamW), (FusedSGD, torch.optim.SGD)])
def test_states_go_to_torchs_optimizers_and_back(apexs, torchs):
    p = nn.Parameter(torch.ones(3, device=DEVICE))
    options = {"momentum": 0.9} if torchs is torch.optim.SGD else {"weight_decay": 0.1}
    weights = []
    for classes in ((apexs, torchs, apexs), (torchs, apexs, torchs)):
        p.data.fill_(1.0)
        state = None
        for kind in classes:
            optimizer = kind([p], lr=0.1, **options)
            if state is not None:
                optimizer.load_state_dict(state)
            p.grad = torch.linspace(-1, 1, 3, device=DEVICE)
            optimizer.step()
            state = optimizer.state_dict()
        weights.append(p.detach().clone())
    assert torch.allclose(*weights, rtol=0, atol=1e-6)


def test_what_they_refuse_and_say():
    p = nn.Parameter(torch.ones(3, device=DEVICE))
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([0])).sum().backward()
    by_group = FusedSGD([{"params": [p], "lr": 0.25}], momentum=0.9)
    for call, error, message in (
        (lambda: FusedAdam([p], amsgrad=True), RuntimeError, "FusedAdam does not support the AMSGrad variant"),
        (lambda: optimizers.FusedLAMB([p], amsgrad=True), RuntimeError, "FusedLAMB does not support the AMSGrad"),
        (lambda: optimizers.FusedNovoGrad([p], amsgrad=True), RuntimeError, "FusedNovoGrad does not support the AMS"),
        (lambda: FusedMixedPrecisionLamb([p], step=3), EasympError, "step=3 is not here"),
        (lambda: fp16_utils.prep_param_lists(table, flat_master=True), RefusedError, "flat_master=True: leave it"),
        (lambda: FusedAdam([p]).step(grads=[p], scale=2.0), EasympError, r"step\(grads=…, scale=…\): gradients are"),
        (lambda: FusedSGD([{"params": [p]}]), ValueError, "FusedSGD needs a learning rate"),
        (lambda: by_group.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), ValueError, "parameter lr"),
        (lambda: FusedSGD([p], lr=0.1, nesterov=True), ValueError, "Nesterov momentum requires a momentum"),
        (FusedAdam(table.parameters()).step, RuntimeError, "FusedAdam does not support sparse gradients"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    freeing = FusedSGD([p], lr=0.1, set_grad_none=True)
    for optimizer, is_freed in ((FusedAdam([p]), True), (FusedSGD([p], lr=0.1), False), (freeing, True)):
        p.grad = torch.ones_like(p)
        optimizer.zero_grad()
        assert (p.grad is None) == is_freed
    with pytest.warns(EasympWarning, match="without effect here: memory_efficient"):
        normalization.FusedLayerNorm(8, memory_efficient=True)
    with pytest.warns(EasympWarning, match="without effect here: materialize_master_grads"):
        FusedSGD([p], lr=0.1, materialize_master_grads=False)


def test_norms_are_torchs():
    x, weight, bias = torch.randn(4, 3, 8), torch.randn(8), torch.randn(8)
    norms, eps = normalization, 1e-6
    for result, expected in [
        (norms.FusedLayerNorm(8)(x), F.layer_norm(x, [8])),
        (norms.FusedLayerNorm(8, elementwise_affine=False)(x), F.layer_norm(x, [8])),
        (norms.FusedRMSNorm((3, 8))(x), x / (x.square().mean((1, 2), keepdim=True) + 1e-5).sqrt()),
        (norms.fused_layer_norm(x, 8), F.layer_norm(x, [8], eps=eps)),
        (norms.fused_layer_norm_affine(x, weight, bias, (8,)), F.layer_norm(x, [8], weight, bias, eps)),
        (norms.fused_rms_norm(x, 8), F.rms_norm(x, [8], eps=eps)),
        (norms.fused_rms_norm_affine(x, weight, 8), F.rms_norm(x, [8], weight, eps)),
    ]:
        assert torch.allclose(result, expected, atol=1e-5)
    for kind in (norms.MixedFusedLayerNorm, norms.MixedFusedRMSNorm):
        assert kind(8)(x.half()).dtype == torch.float32 and kind(8).half()(x).dtype == torch.float16
    assert norms.mixed_dtype_fused_layer_norm_affine(x.half(), weight, bias, 8).dtype == torch.float32
    assert norms.mixed_dtype_fused_rms_norm_affine(x.half(), weight, 8).dtype == torch.float32


def test_masters_by_hand():
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, bias=False)).half()
    params, masters = fp16_utils.prep_param_lists(network)
    assert {m.dtype for m in masters} == {torch.float32} and len(masters) == 3
    optimizer = torch.optim.SGD(masters, lr=0.5)
    network(torch.ones(2, 4).half()).float().sum().backward()
    expected = [p.detach().float() - 0.5 * p.grad.float() for p in params]
    fp16_utils.model_grads_to_master_grads(params, masters)
    fp16_utils.clip_grad_norm(masters, 1e6)
    optimizer.step()
    fp16_utils.master_params_to_model_params(params, masters)
    assert all(torch.allclose(p.float(), w, atol=1e-2) for p, w in zip(params, expected))
    fp16_utils.master_params_to_model_params([], [])  # of a model without parameters


def test_networks_in_half():
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False))
    half_network = fp16_utils.network_to_half(network)
    assert half_network(torch.randn(3, 4)).dtype == torch.float16
    assert network[0].weight.dtype == network[2].running_var.dtype == torch.float16
    assert network[1].weight.dtype == torch.float32
    assert fp16_utils.FP16Model(nn.Linear(4, 4))(torch.randn(3, 4)).dtype == torch.float16
    converted = fp16_utils.BN_convert_float(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).half())
    assert (converted[0].weight.dtype, converted[1].weight.dtype) == (torch.float32, torch.float16)
    layer = nn.Sequential(nn.Linear(1, 1))
    fp16_utils.convert_module(layer, torch.float16)
    assert layer[0].weight.dtype == torch.float32
    assert fp16_utils.to_python_float(torch.ones(1)) == fp16_utils.to_python_float([1.0]) == 1.0
