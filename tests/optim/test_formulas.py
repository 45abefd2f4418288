"""easymp's own optimizers are the formulas of their papers, by kernels and by torch."""

import math

import pytest
import torch

from easymp import optim as ours

from ..cuda.compiled import CompiledLauncher, kernels_on_cpu

SHAPES = [(7,), (64, 33), (0,), (1,), (2, 8200), (3, 1, 5)]


def larc(parameters, trust=0.02, clip=True, **options):
    return ours.LARC(torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, **options), trust, clip)


def norm(numbers):
    return math.sqrt(sum(x * x for x in numbers))


def lion(p, g, memory, group, step, optimizer):
    m = memory.setdefault("m", [0.0] * len(p))
    (b1, b2), lr = group["betas"], group["lr"]
    for i, x in enumerate(g):
        x = -x if group["maximize"] else x
        c = b1 * m[i] + (1 - b1) * x
        p[i] -= lr * ((c > 0) - (c < 0) + group["weight_decay"] * p[i])
        m[i] = b2 * m[i] + (1 - b2) * x


def lamb(p, g, memory, group, step, optimizer):
    m, v = memory.setdefault("m", [0.0] * len(p)), memory.setdefault("v", [0.0] * len(p))
    (b1, b2), decay = group["betas"], group["weight_decay"]
    r = []
    for i, x in enumerate(g):
        x = -x if group["maximize"] else x
        x += 0 if group["adam_w_mode"] else decay * p[i]
        m[i] = b1 * m[i] + (1 - b1 if group["grad_averaging"] else 1) * x
        v[i] = b2 * v[i] + (1 - b2) * x * x
        c1, c2 = (1 - b1**step, 1 - b2**step) if group["bias_correction"] else (1, 1)
        r.append(m[i] / c1 / (math.sqrt(v[i] / c2) + group["eps"]) + (decay * p[i] if group["adam_w_mode"] else 0))
    trusted = (group["use_nvlamb"] or decay) and norm(p) and norm(r)
    ratio = norm(p) / norm(r) if trusted else 1.0
    for i, x in enumerate(r):
        p[i] -= group["lr"] * ratio * x


def novograd(p, g, memory, group, step, optimizer):
    (b1, b2), decay = group["betas"], group["weight_decay"]
    m = memory.setdefault("m", [0.0] * len(p))
    square = norm(g) ** 2
    v = memory.setdefault("v", 0.0 if group["init_zero"] else square)
    v = memory["v"] = b2 * v + (1 - b2) * square
    c1, c2 = (1 - b1**step, 1 - b2**step) if group["bias_correction"] else (1, 1)
    below = math.sqrt(v / c2) + group["eps"]
    for i, x in enumerate(g):
        x = -x if group["maximize"] else x
        if group["reg_inside_moment"]:
            x = x / below + decay * p[i]
        m[i] = b1 * m[i] + (1 - b1 if group["grad_averaging"] else 1) * x
        p[i] -= group["lr"] * (m[i] / c1 if group["reg_inside_moment"] else m[i] / c1 / below + decay * p[i])


def larc_sgd(p, g, memory, group, step, optimizer):
    trust, clips, eps = optimizer.trust
    decay, lr = group["weight_decay"], group["lr"]
    d = [-x if group["maximize"] else x for x in g]
    if norm(p) and norm(g):
        local = trust * norm(p) / (norm(g) + decay * norm(p) + eps)
        local = min(local / lr, 1) if clips else local
        d = [local * (x + decay * w) for x, w in zip(d, p)]
    b = memory.setdefault("b", [0.0] * len(p))
    for i, x in enumerate(d):
        b[i] = group["momentum"] * b[i] + x
        p[i] -= lr * (x + group["momentum"] * b[i] if group["nesterov"] else b[i])


DECAY = {"lr": 1e-2, "weight_decay": 0.1}
BARE = {"lr": 1e-2, "weight_decay": 0.0}
OTHER_MEANS = {"grad_averaging": False, "maximize": True}
OWN = [
    (lion, ours.Lion, {"lr": 1e-2}),
    (lion, ours.Lion, {**DECAY, "maximize": True}),
    (lamb, ours.LAMB, {"lr": 1e-2}),
    (lamb, ours.LAMB, {**BARE, "bias_correction": False, "max_grad_norm": None}),
    (lamb, ours.LAMB, {**BARE, **OTHER_MEANS, "use_nvlamb": True}),
    (lamb, ours.LAMB, {"lr": 1e-2, "adam_w_mode": False, "max_grad_norm": 1e6}),
    (novograd, ours.NovoGrad, {**DECAY, "betas": (0.9, 0.98)}),
    (novograd, ours.NovoGrad, {**DECAY, **OTHER_MEANS, "reg_inside_moment": True}),
    (novograd, ours.NovoGrad, {"lr": 1e-2, "init_zero": True, "bias_correction": False}),
    (larc_sgd, larc, {"weight_decay": 0.1, "nesterov": True}),
    (larc_sgd, larc, {"clip": False, "weight_decay": 0.1, "maximize": True}),
    (larc_sgd, larc, {"trust": 0.002}),
]


@pytest.mark.parametrize(("formula", "make", "options"), OWN)
def test_each_optimizer_is_its_papers_formula(formula, make, options, monkeypatch):
    kernels_on_cpu(monkeypatch, CompiledLauncher())
    torch.manual_seed(0)
    start = [torch.randn(s) for s in SHAPES]
    parameter_lists = [[torch.nn.Parameter(x.clone()) for x in start] for _ in range(2)]
    fast, slow = (make(p, **options, fused=fused) for p, fused in zip(parameter_lists, (None, False)))
    fast_engine, slow_engine = engines = [ours.Engine(fast), ours.Engine(slow)]
    lists, memories, group = [x.flatten().tolist() for x in start], [{} for _ in start], fast.param_groups[0]
    for turn in range(3):
        generator = torch.Generator().manual_seed(turn)
        gradients = [torch.randn(s, generator=generator) for s in SHAPES]
        for parameters, engine in zip(parameter_lists, engines):
            for p, g in zip(parameters, gradients):
                p.grad = g.clone()
            engine.step(found_inf=torch.tensor(1.0))  # an overflow: nothing happens
            engine.step(torch.ones(()))
        numbers = [g.flatten().tolist() for g in gradients]
        max_norm, total_norm = group.get("max_grad_norm"), norm([x for g in numbers for x in g])
        factor = max_norm / total_norm if max_norm and total_norm > max_norm else 1.0
        for g, flat, memory in zip(numbers, lists, memories):
            formula(flat, [x * factor for x in g], memory, group, turn + 1, fast)
    assert (getattr(fast, "engine", fast_engine).kernels is None) == (formula in (lamb, novograd))
    assert getattr(slow, "engine", slow_engine).kernels is None
    for parameters in parameter_lists:
        for p, flat in zip(parameters, lists):
            torch.testing.assert_close(p.detach().flatten(), torch.tensor(flat), rtol=1e-5, atol=2e-6)
