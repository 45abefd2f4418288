"""Every rule, as the kernels compute it, is its torch reference, torch's own optimizer where there is one, and the papers' formulas."""

import math

import pytest
import torch

from easymp.cuda.step import FusedStep
from easymp.optim.lamb import LAMB_RULE as LAMB
from easymp.optim.larc import Trust, larc
from easymp.optim.lion import LION
from easymp.optim.novograd import NOVOGRAD
from easymp.optim.torch_optimizers import ADAGRAD, ADAM
from easymp.optim.torch_optimizers import SGD_RULE as SGD

from .compiled import CompiledLauncher

SHAPES = [(7,), (64, 33), (0,), (1,), (2, 9001), (3, 1, 5)]

LION_GROUP = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}
LAMB_GROUP = {
    "lr": 1e-2,
    "betas": (0.9, 0.999),
    "eps": 1e-6,
    "weight_decay": 0.01,
    "adam_w_mode": True,
    "grad_averaging": True,
    "bias_correction": True,
    "max_grad_norm": 1.0,
    "use_nvlamb": False,
    "maximize": False,
}
NOVOGRAD_GROUP = {
    "lr": 1e-2,
    "betas": (0.9, 0.98),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "grad_averaging": True,
    "norm_type": 2,
    "bias_correction": True,
    "init_zero": False,
    "reg_inside_moment": False,
    "maximize": False,
}
SGD_GROUP = {
    "lr": 1e-2,
    "momentum": 0.9,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    "maximize": False,
}


class Plain(torch.optim.Optimizer):
    """Param groups and state, and nothing else."""


def made(shapes=SHAPES, seed=0):
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s)) for s in shapes]


def gradients(turn, shapes=SHAPES):
    generator = torch.Generator().manual_seed(turn)
    return [torch.randn(s, generator=generator) for s in shapes]


def give(parameters, turn):
    for parameter, gradient in zip(parameters, gradients(turn)):
        parameter.grad = gradient


def clip(group, grads):
    norm = math.sqrt(sum(g.double().square().sum().item() for g in grads))
    most = group.get("max_grad_norm")
    return most / norm if most and norm > most else 1.0


TORCH = [
    (torch.optim.SGD, SGD, {"lr": 0.1}),
    (
        torch.optim.SGD,
        SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1, "maximize": True},
    ),
    (torch.optim.SGD, SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.Adagrad, ADAGRAD, {"lr": 0.1}),
    (
        *(torch.optim.Adagrad, ADAGRAD),
        {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5, "maximize": True},
    ),
    (torch.optim.AdamW, ADAM, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
]


@pytest.mark.parametrize(("kind", "rule", "options"), TORCH)
def test_torchs_optimizers(kind, rule, options):
    ours, theirs = made(), made()
    mine, torchs = kind(ours, **options), kind(theirs, foreach=False, **options)
    step = FusedStep(mine, rule, CompiledLauncher())
    for turn in range(4):
        give(ours, turn)
        give(theirs, turn)
        step.step(None, torch.tensor(1.0))  # an overflow: nothing happens
        step.step()
        torchs.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        for key, value in torchs.state[q].items():
            if value is not None:
                torch.testing.assert_close(mine.state[p][key], value, rtol=1e-5, atol=1e-6)
        assert set(mine.state[p]) == {key for key, value in torchs.state[q].items() if value is not None}


OWN = [
    (LION, LION_GROUP, {"lr": 1e-2}),
    (LION, LION_GROUP, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    (LAMB, LAMB_GROUP, {}),
    (LAMB, LAMB_GROUP, {"weight_decay": 0.0, "bias_correction": False, "max_grad_norm": None}),
    (LAMB, LAMB_GROUP, {"weight_decay": 0.0, "use_nvlamb": True, "grad_averaging": False, "maximize": True}),
    (LAMB, LAMB_GROUP, {"adam_w_mode": False, "max_grad_norm": 1e6}),
    (NOVOGRAD, NOVOGRAD_GROUP, {"weight_decay": 0.1}),
    (
        NOVOGRAD,
        NOVOGRAD_GROUP,
        {"weight_decay": 0.1, "reg_inside_moment": True, "grad_averaging": False, "maximize": True},
    ),
    (NOVOGRAD, NOVOGRAD_GROUP, {"init_zero": True, "bias_correction": False}),
    (larc(SGD, Trust()), SGD_GROUP, {"weight_decay": 0.1, "nesterov": True}),
    (larc(SGD, Trust(clip=False)), SGD_GROUP, {"weight_decay": 0.1, "maximize": True}),
    (larc(SGD, Trust(0.002)), SGD_GROUP, {}),
]


@pytest.mark.parametrize(("rule", "group", "options"), OWN)
def test_the_papers_formulas(rule, group, options):
    group = {**group, **options}
    ours = made()
    mine = Plain(ours, group)
    step = FusedStep(mine, rule, CompiledLauncher())
    lists = [p.detach().flatten().tolist() for p in ours]
    kept = [{} for _ in lists]
    for turn in range(3):
        give(ours, turn)
        factor = clip(group, gradients(turn))
        step.step(None, torch.tensor(1.0))
        step.step(torch.tensor(1.0))
        for g, flat, memory in zip(gradients(turn), lists, kept):
            scaled = [x * factor for x in g.flatten().tolist()]
            FORMULAS[rule.name](flat, scaled, memory, group, turn + 1, rule)
    for p, flat in zip(ours, lists):
        torch.testing.assert_close(p.flatten(), torch.tensor(flat), rtol=1e-5, atol=1e-6)
        single = {rule.scalar} - {""} | ({"step"} if rule.counts else set())
        assert set(mine.state[p]) == {*rule.states, *single}


def norm(numbers):
    return math.sqrt(sum(x * x for x in numbers))


def lion(p, g, memory, group, step, rule):
    m = memory.setdefault("m", [0.0] * len(p))
    (b1, b2), lr = group["betas"], group["lr"]
    for i, x in enumerate(g):
        x = -x if group["maximize"] else x
        c = b1 * m[i] + (1 - b1) * x
        p[i] -= lr * ((c > 0) - (c < 0) + group["weight_decay"] * p[i])
        m[i] = b2 * m[i] + (1 - b2) * x


def lamb(p, g, memory, group, step, rule):
    m, v = memory.setdefault("m", [0.0] * len(p)), memory.setdefault("v", [0.0] * len(p))
    (b1, b2), decay = group["betas"], group["weight_decay"]
    r = []
    for i, x in enumerate(g):
        x = -x if group["maximize"] else x
        x += 0 if group["adam_w_mode"] else decay * p[i]
        m[i] = b1 * m[i] + (1 - b1 if group["grad_averaging"] else 1) * x
        v[i] = b2 * v[i] + (1 - b2) * x * x
        c1, c2 = (1 - b1**step, 1 - b2**step) if group["bias_correction"] else (1, 1)
        r.append(
            m[i] / c1 / (math.sqrt(v[i] / c2) + group["eps"]) + (decay * p[i] if group["adam_w_mode"] else 0)
        )
    trusted = (group["use_nvlamb"] or decay) and norm(p) and norm(r)
    ratio = norm(p) / norm(r) if trusted else 1.0
    for i, x in enumerate(r):
        p[i] -= group["lr"] * ratio * x


def novograd(p, g, memory, group, step, rule):
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


def larc_sgd(p, g, memory, group, step, rule):
    trust, eps, clips = (
        memory.setdefault("trust", TRUST[id(rule)]),
        1e-8,
        memory.setdefault("clips", CLIPS[id(rule)]),
    )
    decay, lr = group["weight_decay"], group["lr"]
    up = -1 if group["maximize"] else 1
    d = [up * x for x in g]
    if norm(p) and norm(g):
        local = trust * norm(p) / (norm(g) + decay * norm(p) + eps)
        local = min(local / lr, 1) if clips else local
        d = [local * (x + decay * w) for x, w in zip(d, p)]
    b = memory.setdefault("b", [0.0] * len(p))
    for i, x in enumerate(d):
        b[i] = group["momentum"] * b[i] + x
        p[i] -= lr * (x + group["momentum"] * b[i] if group["nesterov"] else b[i])


FORMULAS = {"lion": lion, "lamb": lamb, "novograd": novograd, "larc_sgd": larc_sgd}
LARCS = [rule for rule, *_ in OWN if rule.name == "larc_sgd"]
TRUST = dict(zip(map(id, LARCS), (0.02, 0.02, 0.002)))
CLIPS = dict(zip(map(id, LARCS), (True, False, True)))


def test_lambs_clip_sees_gradients_as_they_are_stepped_on():
    """Under a loss scale, and after the caller's own clipping."""
    ends = []
    for scale, most in ((1.0, math.inf), (1024.0, math.inf), (1024.0, 0.5)):
        ours = made()
        mine = Plain(ours, {**LAMB_GROUP, "max_grad_norm": 0.5, "eps": 1e-3})
        step = FusedStep(mine, LAMB, CompiledLauncher())
        for turn in range(3):
            give(ours, turn)
            for p in ours:
                p.grad *= scale
            result = step.measure(most, torch.tensor(scale))
            step.step(result[1], result[2], result)
        ends.append([p.detach() for p in ours])
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-5, atol=1e-6)
