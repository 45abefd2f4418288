"""On a GPU: what CuPy starts does as torch does, on its streams and in its graphs, and nothing waits for the device.

The same text has been compared with torch on a CPU (tests/optim/test_own.py, test_formulas.py), so these tests look at
what only a GPU has.
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
from easymp.optim.rules import ADAM

from .compiled import CompiledLauncher
from .kernels import ALL

pytestmark = pytest.mark.gpu

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = [(7,), (64, 33), (0,), (1,), (2, 8199), (16384,), (3, 4, 5, 2), ()]
PLAIN = [torch.nn.Parameter(torch.zeros(1))]
GROUPS = {
    "adam": {**torch.optim.AdamW(PLAIN).defaults, "lr": 1e-2, "amsgrad": True},
    "sgd": {**torch.optim.SGD(PLAIN).defaults, "lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
    "adagrad": torch.optim.Adagrad(PLAIN).defaults,
    "lion": {**optim.Lion(PLAIN).defaults, "lr": 1e-3},
}


# Dtypes of gradient, parameter and states; elements by which addresses are off 16 bytes.
KINDS = [(F32, F32, F32, 0), (F32, F32, F32, 1), (BF16, F32, F32, 0)]
KINDS += [(F16, F16, F16, 3), (BF16, BF16, BF16, 0), (BF16, BF16, F32, 1)]


@pytest.fixture
def launcher() -> CupyLauncher:
    launcher_or_reason = launcher_for(torch.device("cuda"))
    assert isinstance(launcher_or_reason, CupyLauncher), launcher_or_reason
    return launcher_or_reason


def parameters(dtype: torch.dtype, device: str, misaligned: int = 0) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    values = []
    for shape in SHAPES:
        run = torch.empty(math.prod(shape) + misaligned, dtype=dtype, device=device)[misaligned:]
        values.append(torch.nn.Parameter(run.view(shape).copy_(torch.randn(shape))))
    return values


def set_gradients(tensors: list[torch.nn.Parameter], turn: int, dtype: torch.dtype, scale: float = 1.0) -> None:
    """The same gradients to `tensors`, whatever their device."""
    generator = torch.Generator().manual_seed(turn)
    for p in tensors:
        gradient = (torch.randn(p.shape, generator=generator) * scale).to(dtype).to(p.device)
        p.grad = gradient if dtype == p.dtype else None
        p.kernel_gradient = gradient


def step_of(tensors, rule, group, launcher, state_dtype=None, rounding=None) -> FusedStep:
    optimizer = torch.optim.Optimizer([dict(group, params=tensors)], {})
    keywords = {"state_dtype": state_dtype, "rounding": rounding}
    return FusedStep(optimizer, rule, launcher, gradient=lambda p: p.kernel_gradient, ema_decay=0.9, **keywords)


def assert_same(on_gpu: list, on_cpu: list, dtype: torch.dtype) -> None:
    """Within roundings of `dtype`.

    A GPU merges a × b + c. One in a thousand may be apart, where a rule takes the sign of a sum.
    """
    rtol, atol = {F32: (2e-5, 2e-6), BF16: (2e-2, 2e-2), F16: (4e-3, 4e-3)}[dtype]
    for a, b in zip(on_gpu, on_cpu, strict=True):
        assert a.dtype == b.dtype
        difference = ~torch.isclose(a.detach().cpu(), b.detach().cpu(), rtol=rtol, atol=atol)
        assert difference.sum() <= 1e-3 * difference.numel()


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
@pytest.mark.parametrize(("gradient", "parameter", "state", "misaligned"), KINDS)
def test_each_rule_as_on_a_cpu(launcher, rule, gradient, parameter, state, misaligned):
    group = GROUPS[rule.name]
    gpu_parameters, cpu_parameters = parameters(parameter, "cuda", misaligned), parameters(parameter, "cpu", misaligned)
    gpu_step = step_of(gpu_parameters, rule, group, launcher, state)
    reference = step_of(cpu_parameters, rule, group, CompiledLauncher(), state)
    for turn in range(3):
        set_gradients(gpu_parameters, turn, gradient, 64.0)
        set_gradients(cpu_parameters, turn, gradient, 64.0)
        scale = torch.tensor(64.0)
        result, expected = gpu_step.measure(1.0, scale.cuda()), reference.measure(1.0, scale)
        torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=0.0)
        found_inf = torch.tensor(float(turn == 1))  # the second step is an overflow
        gpu_step.step(result[1], found_inf.cuda())
        reference.step(expected[1], found_inf)
    assert_same(gpu_parameters, cpu_parameters, parameter)
    for p, q in zip(gpu_parameters, cpu_parameters):
        gpu_state, cpu_state = gpu_step.optimizer.state[p], reference.optimizer.state[q]
        assert gpu_state.keys() == cpu_state.keys()
        assert_same([gpu_state[key] for key in gpu_state], [cpu_state[key] for key in gpu_state], parameter)


def warm(launcher) -> tuple[list[torch.nn.Parameter], FusedStep]:
    tensors = parameters(F32, "cuda")
    step = step_of(tensors, ADAM, GROUPS["adam"], launcher)
    set_gradients(tensors, 0, F32)
    result = step.measure(1.0)
    step.step(result[1], result[2])
    return tensors, step


def test_nothing_waits_for_the_device(launcher):
    tensors, step = warm(launcher)
    gradients = [torch.randn_like(p) for p in tensors]
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        torch.cuda.set_sync_debug_mode("error")
        try:
            for p, g in zip(tensors, gradients):
                p.kernel_gradient = g  # elsewhere than before: the tables are made anew
            with torch.profiler.record_function("one step"):
                result = step.measure(1.0)
                step.step(result[1], result[2])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    events = profile.events()
    assert any(event.name.startswith("adam_") for event in events), "the profiler has seen no kernel"
    [span] = [e.time_range for e in events if e.name == "one step" and e.device_type == DeviceType.CPU]
    # The profiler itself waits at its beginning and its end.
    waits = [e.name for e in events if "Synchronize" in e.name and span.start <= e.time_range.start <= span.end]
    assert waits == []


def test_a_graph_of_backward_and_step(launcher):
    runs = []
    for captured in (False, True):
        tensors = parameters(F32, "cuda")
        optimizer = torch.optim.AdamW(tensors, lr=1e-2)
        step, batch = FusedStep(optimizer, ADAM, launcher), torch.ones((), device="cuda")
        graph, side_stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()

        def step_once(tensors=tensors, step=step, batch=batch):
            torch.stack([(p * batch).square().sum() for p in tensors]).sum().backward()
            result = step.measure(1.0)
            step.step(result[1], result[2])

        def step_outside(lr, step_once=step_once, optimizer=optimizer, side_stream=side_stream):
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = lr
            side_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side_stream):
                step_once()
            torch.cuda.current_stream().wait_stream(side_stream)

        for turn in range(9):
            batch.fill_(1.0 + turn / 8)
            if turn == 3 and captured:
                optimizer.zero_grad()
                with torch.cuda.graph(graph):
                    step_once()
            if turn < 3 or not captured or turn == 6:
                step_outside(1e-1 if turn == 6 else 1e-2)
            else:
                graph.replay()
        torch.cuda.synchronize()
        runs.append([*tensors, *(v for p in tensors for v in optimizer.state[p].values())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_the_current_stream_is_taken_at_each_launch(launcher):
    tensors, step = warm(launcher)
    side_stream = torch.cuda.Stream()
    set_gradients(tensors, 1, F32)
    torch.cuda.synchronize()
    with torch.cuda.stream(side_stream):
        step.step()  # its tables are made on this stream: memory of the driver's may come with a wait for what runs
    torch.cuda.synchronize()
    reference = copy.deepcopy([p.detach() for p in tensors])
    torch.cuda.synchronize()
    with torch.cuda.stream(side_stream):
        torch.cuda._sleep(1_000_000_000)  # half a second
        step.step()
        later = torch.cuda.Event()
        later.record()
    # The step is behind the sleep on the other stream: here nothing has moved yet.
    moved = [not torch.equal(p.detach(), q) for p, q in zip(tensors, reference) if p.numel()]
    assert not later.query() and not any(moved)
    torch.cuda.synchronize()
    assert any(not torch.equal(p.detach(), q) for p, q in zip(tensors, reference))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_has_its_launcher_whatever_the_current_one():
    second = torch.device("cuda", 1)
    launcher_here = launcher_for(second)
    assert isinstance(launcher_here, CupyLauncher), launcher_here
    assert launcher_for(second) is launcher_here
    with torch.cuda.device(0):
        tensors = parameters(F32, "cuda:1")
        step = step_of(tensors, ADAM, GROUPS["adam"], launcher_here)
        set_gradients(tensors, 0, F32)
        before = [p.detach().clone() for p in tensors]
        step.step()
        assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(second)
    assert any(not torch.equal(p.detach(), q) for p, q in zip(tensors, before))
