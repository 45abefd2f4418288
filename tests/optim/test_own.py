"""`Engine` on torch's optimizers and on easymp's own.

The same numbers by our kernels and by torch, under torch's own protocols, and checkpoints both ways.
"""

import copy
import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW

from easymp import Accelerator, KernelError, RefusedError, SettingError, Settings, StepError
from easymp import optim as ours
from easymp.optim import Engine, EngineOptions

from ..cuda.compiled import CompiledLauncher, kernels_on_cpu

SHAPES = [(7,), (33, 5), (0,), (1,), (2, 9001), ()]


def make_parameters(dtype=torch.float32, device="cpu", misaligned=0):
    torch.manual_seed(0)
    parameters = []
    for shape in SHAPES:
        run = torch.empty(math.prod(shape) + misaligned, dtype=dtype, device=device)[misaligned:]
        parameters.append(torch.nn.Parameter(run.view(shape).copy_(torch.randn(shape))))
    return parameters


def set_gradients(parameters, turn, scale=1.0):
    generator = torch.Generator().manual_seed(turn)
    for p in parameters:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p)


@pytest.fixture
def kernels(monkeypatch):
    """Kernels for the CPU, by g++."""
    launcher = CompiledLauncher()
    kernels_on_cpu(monkeypatch, launcher)
    return launcher


def larc(parameters, **options):
    return ours.LARC(SGD(parameters, **options))


def larc_adam(parameters, **options):
    return ours.LARC(AdamW(parameters, **options), clip=False)


KINDS = [
    (AdamW, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    (Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1, "maximize": True}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (ours.Lion, {"lr": 1e-2, "weight_decay": 0.1}),
    (larc, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (larc_adam, {"lr": 0.1, "weight_decay": 0.1}),
]


def run(kind, options, turns=4, device="cpu", misaligned=0):
    """A run with a loss scale, an overflow first and later, and clipping."""
    parameters = make_parameters(device=device, misaligned=misaligned)
    optimizer = kind(parameters, **options)
    engine = Engine(optimizer)
    for turn in range(turns):
        for overflow in (turn != 2, False):
            set_gradients(parameters, turn, 1024.0)
            if overflow:
                parameters[0].grad[0] = math.nan
            measured = engine.measure(scale=torch.tensor(1024.0, device=device))
            engine.step(measured.factor, measured.found_inf)
        set_gradients(parameters, turn + 10)
        engine.clip_grad_norm_(0.5)
        engine.step()
    return parameters, optimizer, getattr(optimizer, "engine", engine)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_kernels_and_torch_agree(kind, options, kernels):
    fast, optimizer, by_kernels = run(kind, options, misaligned=len(options) % 2)
    slow, plain, by_torch = run(kind, {**options, "fused": False})
    assert (by_kernels.name, by_torch.name) == ("CuPy", "torch")
    assert "chosen by the caller" in by_torch.reason
    for p, q in zip(fast, slow):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(dict(optimizer.state[p]), dict(plain.state[q]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [AdamW, Adam, SGD, Adagrad])
def test_checkpoints_are_torchs_both_ways(kind, kernels):
    options = {"lr": 0.1, **({"momentum": 0.9, "dampening": 0.3} if kind is SGD else {})}
    for engine_first in (True, False):
        straight, moved = make_parameters(), make_parameters()
        reference, before, after = kind(straight, **options), kind(moved, **options), kind(moved, **options)
        factor, engine = torch.ones(()), Engine(before if engine_first else after)
        for turn in range(4):
            set_gradients(straight, turn)
            set_gradients(moved, turn)
            reference.step()
            if turn == 2:
                after.load_state_dict(copy.deepcopy(before.state_dict()))
            if (turn < 2) == engine_first:
                engine.step(factor)
            else:
                (after if engine_first else before).step()
        for p, q in zip(straight, moved):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=2e-6)
        assert kernels.launches


@pytest.mark.parametrize("fast", [False, True])
def test_an_average_of_the_weights(fast):
    parameters = make_parameters()
    means = [p.detach().clone() for p in parameters]
    with kernels_here(fast):
        engine = Engine(AdamW(parameters, lr=0.1), EngineOptions(ema_decay=0.9))
        for turn in range(3):
            set_gradients(parameters, turn)
            engine.step(found_inf=torch.tensor(1.0))
            engine.step()
            means = [0.9 * m + 0.1 * p.detach() for m, p in zip(means, parameters)]
    weights = [p.detach().clone() for p in parameters]
    with engine.averaged():
        torch.testing.assert_close([p.detach() for p in parameters], means, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, parameters, weights))


def test_gradscaler_schedulers_and_closures():
    parameters = make_parameters()
    optimizer = ours.Lion(parameters, lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    before = parameters[0].detach().clone()
    after_one_step = before - before.sign()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(sum(p.square().sum() for p in parameters)).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(parameters[0].detach(), after_one_step)
    scheduler.step()
    optimizer.zero_grad()

    def closure():
        loss = parameters[0].square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    torch.testing.assert_close(parameters[0].detach(), after_one_step - 0.5 * after_one_step.sign())


def test_the_engine_says_what_steps_and_why():
    assert (Engine(AdamW(make_parameters())).name, Engine(AdamW(make_parameters(), fused=True)).name) == (
        "torch",
        "torch fused",
    )
    assert "NVIDIA" in Engine(AdamW(make_parameters())).reason
    assert Engine(ours.Lion(make_parameters())).name == "torch"


WRONG = {
    "norms of tensors already": (RefusedError, lambda: ours.LARC(ours.LAMB(make_parameters()))),
    "another optimizer": (SettingError, lambda: ours.Lion([torch.nn.Parameter(torch.zeros(2).cfloat())])),
    "ema_decay": (StepError, lambda: Engine(SGD(make_parameters())).averaged().__enter__()),
    "are for Adam, AdamW": (SettingError, lambda: Engine(ours.Muon(net()), EngineOptions(stochastic_rounding=1))),
    "needs stochastic_rounding=True": (SettingError, lambda: EngineOptions(state_dtype=torch.bfloat16)),
    **{
        rf"no '{name}': use torch.optim.{name}, which": (ImportError, lambda name=name: getattr(ours, name))
        for name in ("Adam", "AdamW", "SGD", "Adagrad")
    },
    **{
        rf"{kind}\({option}=…\) was removed.*Accelerator\(ema_decay=….*stochastic_rounding.*easymp.optim.Engine": (
            SettingError,
            lambda kind=kind, option=option: getattr(ours, kind)(make_parameters(), **{option: 1}),
        )
        for kind in ("Lion", "LAMB", "NovoGrad")
        for option in ("ema_decay", "state_dtype", "stochastic_rounding")
    },
    "unexpected keyword argument 'decay'": (TypeError, lambda: ours.Lion(make_parameters(), decay=0.1)),
    "use easymp.optim.Engine": (ImportError, lambda: ours.FusedOptimizer),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_refused(words):
    error, call = WRONG[words]
    with pytest.raises(error, match=words):
        call()


@pytest.mark.filterwarnings("ignore::easymp.EasympWarning", "ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", [SGD, Adagrad, ours.Lion])
def test_parameters_that_kernels_do_not_take_are_stepped_by_torch(kind, kernels):
    for odd in (make_parameters(torch.float64)[1], torch.nn.Parameter(torch.randn(8)[::2])):
        engine = Engine(kind([make_parameters()[1], odd], lr=0.1))
        set_gradients([odd], 0)
        engine.step(torch.ones(()))
        assert "some are not" in engine.reason
    assert kernels.launches == []
    ends = []
    for fused in (None, False):
        table = torch.nn.Parameter(torch.ones(5, 3))
        engine = Engine(kind([table], lr=0.1, fused=fused))
        set_gradients([table], 0)
        engine.step(torch.ones(()))
        assert engine.name == ("torch" if fused is False else "CuPy")
        table.grad = torch.ones(5, 3).to_sparse(1)
        engine.step(torch.ones(()))
        assert engine.kernels is None
        ends.append(table.detach())
    torch.testing.assert_close(*ends)


def test_gradients_with_other_strides_are_read_right(kernels):
    ends = []
    for by_engine in (True, False):
        torch.manual_seed(0)
        parameters = [
            torch.nn.Parameter(torch.randn(4, 6, 3, 3).to(memory_format=torch.channels_last)) for _ in range(3)
        ]
        optimizer = AdamW(parameters, lr=1e-2)
        step = Engine(optimizer).step if by_engine else optimizer.step
        for _ in range(3):
            plain, expanded = torch.randn(4, 6, 3, 3), torch.randn(1, 6, 1, 1).expand(4, 6, 3, 3)
            for p, g in zip(parameters, (plain, expanded, torch.randn(8, 6, 3, 3)[::2])):
                p.grad = g
            step()
        assert all(optimizer.state[p]["exp_avg"].stride() == p.stride() for p in parameters)
        ends.append([p.detach() for p in parameters])
    assert kernels.launches
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6)


def test_no_gradients_and_only_empty_tensors(kernels):
    empty, without = torch.nn.Parameter(torch.zeros(0, 3)), torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([empty, without])
    engine = Engine(optimizer)
    for _ in range(2):
        assert engine.clip_grad_norm_(1.0) == 0.0
        engine.step()
        assert not optimizer.state
    empty.grad = torch.zeros(0, 3)
    engine.step()
    assert optimizer.state[empty]["step"] == 1 and without not in optimizer.state


@pytest.mark.parametrize("kind", [AdamW, SGD, ours.Lion, ours.LAMB, ours.NovoGrad])
def test_bf16_rounded_stochastically_is_the_same_by_torch(kind, kernels, monkeypatch):
    monkeypatch.setattr("easymp.optim.rules.AT_ONCE", 1000)
    options = {"lr": 0.05} | ({"momentum": 0.9} if kind is SGD else {})
    ends = []
    for fused in (None, False):
        low = make_parameters(torch.bfloat16)
        optimizer = kind(low, **options, fused=fused)
        engine = Engine(optimizer, EngineOptions(state_dtype=torch.bfloat16, stochastic_rounding=3))
        for turn in range(3):
            set_gradients(low, turn)
            before = [p.detach().clone() for p in low]
            engine.step(found_inf=torch.ones(()))
            assert all(map(torch.equal, low, before))  # an overflow: nothing is rounded anew
            engine.step(torch.full((), 0.5))
        averages = [v for s in optimizer.state.values() for key, v in s.items() if v.ndim and key != "step"]
        assert {v.dtype for v in averages} == {torch.bfloat16}
        assert engine.name == ("torch" if fused is False or kind in (ours.LAMB, ours.NovoGrad) else "CuPy")
        ends.append(torch.cat([p.detach().flatten() for p in low]))
    assert (ends[0] == ends[1]).float().mean() > 0.98
    torch.testing.assert_close(ends[0], ends[1], rtol=2e-2, atol=2e-2)


def rounded_run(folder, first, last):
    """Weights in bf16 after some steps of torch's AdamW with stochastic rounding, and the states' dtypes."""
    model = net().bfloat16()
    settings = Settings(stochastic_rounding=True, seed=5)
    with Accelerator(cpu=True, mixed_precision="bf16-true", settings=settings) as acc:
        model, optimizer = acc.prepare(model, AdamW(model.parameters(), lr=0.01))
        assert "with stochastic rounding" in acc.plan.weights.reason and not optimizer.has_masters
        if first:
            acc.load_state(folder)
        for turn in range(first, last):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(turn))
            acc.backward(model(x).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        acc.save_state(folder)
        dtypes = {v.dtype for state in optimizer.state.values() for key, v in state.items() if key != "step"}
        return [p.detach().clone() for p in model.parameters()], dtypes


def test_the_setting_rounds_torchs_optimizers_and_a_resumed_run_draws_the_same_bits(tmp_path):
    straight, dtypes = rounded_run(tmp_path / "whole", 0, 6)
    rounded_run(tmp_path / "cut", 0, 3)
    resumed, _ = rounded_run(tmp_path / "cut", 3, 6)
    assert all(map(torch.equal, straight, resumed))
    assert dtypes == {torch.bfloat16}


class Failing(CompiledLauncher):
    """Compiles nothing whose name begins with `refused_prefix`; starts nothing from launch `number` on."""

    def __init__(self, refused_prefix="", number=math.inf):
        super().__init__()
        self.refused_prefix, self.number = refused_prefix, number

    def compile(self, kernels):
        kernels = list(kernels)
        if self.refused_prefix and any(kernel.name.startswith(self.refused_prefix) for kernel in kernels):
            raise KernelError("no compiler")
        super().compile(kernels)

    def launch(self, kernel, blocks, arguments):
        if len(self.launches) >= self.number:
            raise KernelError("no driver")
        self.compile([kernel])
        super().launch(kernel, blocks, arguments)


@pytest.mark.parametrize(
    ("failing", "loaded"), [({"refused_prefix": "adam_bf16"}, False), ({"number": 0}, False), ({"number": 0}, True)]
)
def test_kernels_that_fail_leave_the_step_to_torch(failing, loaded, monkeypatch):
    ends = []
    for by_engine in (False, True):
        parameters = [*make_parameters(), *make_parameters(torch.bfloat16)]
        optimizer = AdamW(parameters, lr=0.1)
        if loaded:
            before = AdamW(parameters)
            set_gradients(parameters, 0)
            before.step()
            optimizer.load_state_dict(before.state_dict())
        set_gradients(parameters, 1)
        if by_engine:
            launcher, reasons = Failing(**failing), []
            kernels_on_cpu(monkeypatch, launcher)
            engine = Engine(optimizer, failed=reasons.append)
            engine.step()
            assert (launcher.launches, engine.name, len(reasons)) == ([], "torch", 1)
        else:
            optimizer.step()
        ends.append([t for p in parameters for t in (p.detach(), *optimizer.state[p].values())])
    torch.testing.assert_close(*ends, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("number", [1, 2])
def test_a_step_that_has_begun_is_not_taken_for_one_that_has_not(number, monkeypatch):
    """Where nothing has moved, torch may step instead; afterwards it would step twice."""
    kernels_on_cpu(monkeypatch, launcher := Failing(number=number))
    parameters = [*make_parameters(), *make_parameters(torch.bfloat16)]
    set_gradients(parameters, 0)
    with pytest.raises(StepError, match="Load a checkpoint"):
        Engine(AdamW(parameters)).step()
    assert len(launcher.launches) == number


SPREAD = {
    "AdamW": lambda p: AdamW(p, lr=1e-2),
    "Lion": lambda p: ours.Lion(p, lr=1e-2, weight_decay=0.1),
    "LAMB": lambda p: ours.LAMB(p, lr=1e-1, max_grad_norm=0.1),
    "NovoGrad": lambda p: ours.NovoGrad(p, lr=1e-1, weight_decay=0.1),
    "LARC": lambda p: ours.LARC(SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1)),
}


def net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


@contextmanager
def kernels_here(kernels):
    """Kernels by g++ in a rank, or as they are."""
    with pytest.MonkeyPatch.context() as patch:
        if kernels:
            kernels_on_cpu(patch, CompiledLauncher())
        yield


@pytest.mark.parametrize("everywhere", [True, False])
def test_kernels_run_on_all_ranks_or_on_none(everywhere, kernels):
    """On GPUs, where a rank may miss CuPy: two ways to measure would meet in different collectives."""
    from easymp.training.prepare import same_kernels

    parameters = [torch.nn.Parameter(torch.ones(3))]
    lion = ours.Lion(parameters)
    engine = Engine(lion)
    world = SimpleNamespace(size=2, device=torch.device("cuda"), any=lambda flag: flag or not everywhere)
    same_kernels(world, lion, engine)
    assert (engine.kernels is not None) == everywhere
    parameters[0].grad = torch.ones(3)
    engine.step()
    assert everywhere or "not run on all ranks" in engine.reason


def test_larc_multiplies_gradients_of_half_precision_by_the_factor_of_a_scale() -> None:
    weight = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    optimizer = ours.LARC(SGD([weight], lr=0.5), clip=False, trust_coefficient=1.0)
    weight.grad = torch.full_like(weight, 8.0)
    optimizer.grad_scale = torch.tensor(4.0)
    optimizer.step()
    assert weight.tolist() == [0.5] * 4


def test_low_precision_and_double():
    for optimizer, dtype in ((ours.LAMB, torch.bfloat16), (ours.NovoGrad, torch.float64)):
        parameters = make_parameters(dtype)
        set_gradients(parameters, 0)
        optimizer(parameters, lr=0.1, **({"norm_type": math.inf} if optimizer is ours.NovoGrad else {})).step()
        assert all(p.dtype == dtype and p.isfinite().all() for p in parameters)
