"""On a GPU: what CuPy starts does what torch does, on torch's streams and in its graphs, and nothing waits for the device.

The same text has been compared with torch on a CPU (tests/optim/test_own.py, test_formulas.py), so these tests look at what only a GPU has.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.autograd import DeviceType

from easymp import optim
from easymp.cuda.cupy_launcher import CupyLauncher, launcher_for
from easymp.cuda.step import FusedStep

from .compiled import CompiledLauncher
from .kernels import ALL, RULES

pytestmark = pytest.mark.gpu

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = [(7,), (64, 33), (0,), (1,), (2, 8199), (16384,), (3, 4, 5, 2), ()]
PLAIN = [torch.nn.Parameter(torch.zeros(1))]
GROUPS = {
    "adam": {**optim.AdamW(PLAIN).defaults, "lr": 1e-2, "amsgrad": True},
    "sgd": {**optim.SGD(PLAIN).defaults, "lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
    "adagrad": optim.Adagrad(PLAIN).defaults,
    "lion": {**optim.Lion(PLAIN).defaults, "lr": 1e-3},
    "lamb": {**optim.LAMB(PLAIN).defaults, "lr": 1e-2},
    "novograd": {**optim.NovoGrad(PLAIN).defaults, "lr": 1e-2, "betas": (0.9, 0.98)},
}


# Dtypes of gradient, parameter and states; elements by which addresses are off 16 bytes.
KINDS = [(F32, F32, F32, 0), (F32, F32, F32, 1), (BF16, F32, F32, 0)]
KINDS += [(F16, F16, F16, 3), (BF16, BF16, BF16, 0), (BF16, BF16, F32, 1)]


@pytest.fixture
def launcher() -> CupyLauncher:
    found = launcher_for(torch.device("cuda"))
    assert isinstance(found, CupyLauncher), found.reason
    return found


def parameters(dtype: torch.dtype, device: str, misaligned: int = 0) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    made = []
    for shape in SHAPES:
        run = torch.empty(math.prod(shape) + misaligned, dtype=dtype, device=device)[misaligned:]
        made.append(torch.nn.Parameter(run.view(shape).copy_(torch.randn(shape))))
    return made


def give(held: list[torch.nn.Parameter], turn: int, dtype: torch.dtype, scale: float = 1.0) -> None:
    """The same gradients to `held`, whatever their device."""
    generator = torch.Generator().manual_seed(turn)
    for p in held:
        made = (torch.randn(p.shape, generator=generator) * scale).to(dtype).to(p.device)
        p.grad = made if dtype == p.dtype else None
        p.given = made


def step_of(held, rule, group, launcher, state_dtype=None, rounding=None) -> FusedStep:
    optimizer = torch.optim.Optimizer([dict(group, params=held)], {})
    more = {"state_dtype": state_dtype, "rounding": rounding}
    return FusedStep(optimizer, rule, launcher, gradient=lambda p: p.given, ema_decay=0.9, **more)


def assert_same(here: list, there: list, dtype: torch.dtype) -> None:
    """Within roundings of `dtype`: a GPU merges a × b + c. One in a thousand may be apart, where a rule takes the sign of a sum."""
    rtol, atol = {F32: (2e-5, 2e-6), BF16: (2e-2, 2e-2), F16: (4e-3, 4e-3)}[dtype]
    for a, b in zip(here, there, strict=True):
        assert a.dtype == b.dtype
        apart = ~torch.isclose(a.detach().cpu(), b.detach().cpu(), rtol=rtol, atol=atol)
        assert apart.sum() <= 1e-3 * apart.numel()


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
@pytest.mark.parametrize(("gradient", "parameter", "state", "misaligned"), KINDS)
def test_each_rule_as_on_a_cpu(launcher, rule, gradient, parameter, state, misaligned):
    group = GROUPS[rule.name]
    ours, theirs = parameters(parameter, "cuda", misaligned), parameters(parameter, "cpu", misaligned)
    mine = step_of(ours, rule, group, launcher, state)
    reference = step_of(theirs, rule, group, CompiledLauncher(), state)
    for turn in range(3):
        give(ours, turn, gradient, 64.0)
        give(theirs, turn, gradient, 64.0)
        scale = torch.tensor(64.0)
        result, expected = mine.measure(1.0, scale.cuda()), reference.measure(1.0, scale)
        torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=0.0)
        found = torch.tensor(float(turn == 1))  # the second step is an overflow
        mine.step(result[1], found.cuda())
        reference.step(expected[1], found)
    assert_same(ours, theirs, parameter)
    for p, q in zip(ours, theirs):
        one, other = mine.optimizer.state[p], reference.optimizer.state[q]
        assert one.keys() == other.keys()
        assert_same([one[key] for key in one], [other[key] for key in one], parameter)


def warm(launcher) -> tuple[list[torch.nn.Parameter], FusedStep]:
    held = parameters(F32, "cuda")
    step = step_of(held, RULES[torch.optim.AdamW], GROUPS["adam"], launcher)
    give(held, 0, F32)
    result = step.measure(1.0)
    step.step(result[1], result[2])
    return held, step


def test_nothing_waits_for_the_device(launcher):
    held, step = warm(launcher)
    made = [torch.randn_like(p) for p in held]
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        torch.cuda.set_sync_debug_mode("error")
        try:
            for p, g in zip(held, made):
                p.given = g  # elsewhere than before: the tables are made anew
            with torch.profiler.record_function("one step"):
                result = step.measure(1.0)
                step.step(result[1], result[2])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    events = profile.events()
    assert any(event.name.startswith("adam_") for event in events), "the profiler has seen no kernel"
    [span] = [e.time_range for e in events if e.name == "one step" and e.device_type == DeviceType.CPU]
    # The profiler itself waits at its beginning and its end.
    waits = [
        e.name for e in events if "Synchronize" in e.name and span.start <= e.time_range.start <= span.end
    ]
    assert waits == []


def test_a_graph_of_backward_and_step(launcher):
    runs = []
    for captured in (False, True):
        held = parameters(F32, "cuda")
        optimizer = torch.optim.AdamW(held, lr=1e-2)
        step, batch = FusedStep(optimizer, RULES[torch.optim.AdamW], launcher), torch.ones((), device="cuda")
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()

        def once(held=held, step=step, batch=batch):
            torch.stack([(p * batch).square().sum() for p in held]).sum().backward()
            result = step.measure(1.0)
            step.step(result[1], result[2])

        def outside(lr, once=once, optimizer=optimizer, side=side):
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = lr
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                once()
            torch.cuda.current_stream().wait_stream(side)

        for turn in range(9):
            batch.fill_(1.0 + turn / 8)
            if turn == 3 and captured:
                optimizer.zero_grad()
                with torch.cuda.graph(graph):
                    once()
            if turn < 3 or not captured or turn == 6:
                outside(1e-1 if turn == 6 else 1e-2)
            else:
                graph.replay()
        torch.cuda.synchronize()
        runs.append([*held, *(v for p in held for v in optimizer.state[p].values())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_the_current_stream_is_taken_at_each_launch(launcher):
    held, step = warm(launcher)
    other = torch.cuda.Stream()
    give(held, 1, F32)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        step.step()  # its tables are made on this stream: memory of the driver's may come with a wait for what runs
    torch.cuda.synchronize()
    reference = copy.deepcopy([p.detach() for p in held])
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(1_000_000_000)  # half a second
        step.step()
        late = torch.cuda.Event()
        late.record()
    # The step is behind the sleep on the other stream: here nothing has moved yet.
    moved = [not torch.equal(p.detach(), q) for p, q in zip(held, reference) if p.numel()]
    assert not late.query() and not any(moved)
    torch.cuda.synchronize()
    assert any(not torch.equal(p.detach(), q) for p, q in zip(held, reference))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_has_its_launcher_whatever_the_current_one():
    second = torch.device("cuda", 1)
    found = launcher_for(second)
    assert isinstance(found, CupyLauncher), found.reason
    assert launcher_for(second) is found
    with torch.cuda.device(0):
        held = parameters(F32, "cuda:1")
        step = step_of(held, RULES[torch.optim.AdamW], GROUPS["adam"], found)
        give(held, 0, F32)
        before = [p.detach().clone() for p in held]
        step.step()
        assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(second)
    assert any(not torch.equal(p.detach(), q) for p, q in zip(held, before))
