"""easymp's own optimizers: the same numbers by our kernels and by torch, under torch's own protocols, and checkpoints both ways."""

import copy
import inspect
import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from easymp import EasympWarning, KernelError, RefusedError, StepError
from easymp import optim as ours

from ..cuda.compiled import CompiledLauncher, kernels_on_cpu

SHAPES = [(7,), (33, 5), (0,), (1,), (2, 9001), ()]


def made(dtype=torch.float32, device="cpu", misaligned=0):
    torch.manual_seed(0)
    parameters = []
    for shape in SHAPES:
        run = torch.empty(math.prod(shape) + misaligned, dtype=dtype, device=device)[misaligned:]
        parameters.append(torch.nn.Parameter(run.view(shape).copy_(torch.randn(shape))))
    return parameters


def give(parameters, turn, scale=1.0):
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
    return ours.LARC(ours.SGD(parameters, **options))


def larc_adam(parameters, **options):
    return ours.LARC(ours.AdamW(parameters, **options), clip=False)


KINDS = [
    (ours.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    (ours.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    (ours.SGD, {"lr": 0.1}),
    (ours.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1, "maximize": True}),
    (ours.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (ours.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (ours.Lion, {"lr": 1e-2, "weight_decay": 0.1}),
    (ours.LAMB, {"lr": 1e-2}),
    (ours.NovoGrad, {"lr": 1e-2, "weight_decay": 0.1}),
    (larc, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (larc_adam, {"lr": 0.1, "weight_decay": 0.1}),
]


def run(kind, options, turns=4, device="cpu", misaligned=0):
    """A run with a loss scale, an overflow first and later, and clipping."""
    parameters = made(device=device, misaligned=misaligned)
    optimizer = kind(parameters, **options)
    for turn in range(turns):
        for overflow in (turn != 2, False):
            give(parameters, turn, 1024.0)
            scale, found = torch.tensor([1024.0, float(overflow)], device=device).unbind()
            optimizer.grad_scale, optimizer.found_inf = scale, found
            if overflow:
                parameters[0].grad[0] = math.nan
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
        give(parameters, turn + 10)
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_kernels_and_torch_agree(kind, options, kernels):
    fast, optimizer = run(kind, options, misaligned=len(options) % 2)
    slow, plain = run(kind, {**options, "fused": False})
    inside, other = (getattr(o, "optim", o).engine for o in (optimizer, plain))
    assert (inside.name, other.name) == ("CuPy", "torch")
    assert "fused=False" in other.reason
    for p, q in zip(fast, slow):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(dict(optimizer.state[p]), dict(plain.state[q]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [ours.AdamW, ours.Adam, ours.SGD, ours.Adagrad])
def test_checkpoints_are_torchs_both_ways(kind, kernels):
    options = {"lr": 0.1, **({"momentum": 0.9, "dampening": 0.3} if kind is ours.SGD else {})}
    torchs = getattr(torch.optim, kind.__name__)
    assert issubclass(kind, torchs)
    for first, second in ((kind, torchs), (torchs, kind)):
        straight, moved = made(), made()
        whole, before = torchs(straight, **options), first(moved, **options)
        after = second(moved, **options)
        for turn in range(4):
            give(straight, turn)
            give(moved, turn)
            whole.step()
            if turn == 2:
                after.load_state_dict(copy.deepcopy(before.state_dict()))
            (before if turn < 2 else after).step()
        for p, q in zip(straight, moved):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("fast", [False, True])
def test_an_average_of_the_weights(fast):
    parameters = made()
    means = [p.detach().clone() for p in parameters]
    with kernels_here(fast):
        optimizer = ours.AdamW(parameters, lr=0.1, ema_decay=0.9)
        for turn in range(3):
            give(parameters, turn)
            optimizer.found_inf = torch.tensor(1.0)
            optimizer.step()
            del optimizer.found_inf
            optimizer.step()
            means = [0.9 * m + 0.1 * p.detach() for m, p in zip(means, parameters)]
    now = [p.detach().clone() for p in parameters]
    with optimizer.averaged():
        torch.testing.assert_close([p.detach() for p in parameters], means, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, parameters, now))


def test_gradscaler_schedulers_and_closures():
    parameters = made()
    optimizer = ours.Lion(parameters, lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    before = parameters[0].detach().clone()
    once = before - before.sign()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(sum(p.square().sum() for p in parameters)).backward()
    scaler.unscale_(optimizer)
    squares = sum(p.square().sum().item() for p in parameters)
    assert optimizer.clip_grad_norm_(1.0).item() == pytest.approx(2 * math.sqrt(squares), rel=1e-5)
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(parameters[0].detach(), once)
    scheduler.step()
    optimizer.zero_grad()

    def closure():
        loss = parameters[0].square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    torch.testing.assert_close(parameters[0].detach(), once - 0.5 * once.sign())


def test_the_engine_says_what_steps_and_why():
    assert ours.AdamW(made()).engine.name == "torch fused"
    assert "NVIDIA" in ours.AdamW(made()).engine.reason
    assert ours.Lion(made()).engine.name == "torch"
    assert "norms are torch's" in ours.LARC(torch.optim.RMSprop(made())).engine.reason


WRONG = {
    "norms of tensors already": (RefusedError, lambda: ours.LARC(ours.LAMB(made()))),
    "another optimizer": (ValueError, lambda: ours.Lion([torch.nn.Parameter(torch.zeros(2).cfloat())])),
    "capturable": (TypeError, lambda: ours.Adam(made(), capturable=True)),
    r"^AdamW\(\) got an unexpected keyword argument 'foreach'$": (
        TypeError,
        lambda: ours.AdamW(made(), foreach=True),
    ),
    r"^NovoGrad\(\) got an unexpected keyword argument 'foreach'$": (
        TypeError,
        lambda: ours.NovoGrad(made(), foreach=True),
    ),
    "ema_decay": (StepError, lambda: ours.SGD(made()).averaged().__enter__()),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_refused(words):
    error, call = WRONG[words]
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("kind", [ours.SGD, ours.Adagrad, ours.Lion])
@pytest.mark.filterwarnings("ignore::easymp.EasympWarning", "ignore:Sparse invariant checks")
def test_parameters_that_kernels_do_not_take_are_stepped_by_torch(kind, kernels):
    for odd in (made(torch.float64)[1], torch.nn.Parameter(torch.randn(8)[::2])):
        optimizer = kind([made()[1], odd], lr=0.1)
        give([made()[1], odd], 0)
        optimizer.step()
        assert "some are not" in optimizer.engine.reason
    assert kernels.launches == []
    ends = []
    for fused in (None, False):
        table = torch.nn.Parameter(torch.ones(5, 3))
        optimizer = kind([table], lr=0.1, fused=fused)
        give([table], 0)
        optimizer.step()
        assert optimizer.engine.name == ("torch" if fused is False else "CuPy")
        table.grad = torch.ones(5, 3).to_sparse(1)
        optimizer.step()
        assert optimizer.engine.kernels is None
        ends.append(table.detach())
    torch.testing.assert_close(*ends)


def test_gradients_with_other_strides_are_read_right(kernels):
    ends = []
    for kind in (ours.AdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        parameters = [
            torch.nn.Parameter(torch.randn(4, 6, 3, 3).to(memory_format=torch.channels_last))
            for _ in range(3)
        ]
        optimizer = kind(parameters, lr=1e-2)
        for _ in range(3):
            plain, expanded = torch.randn(4, 6, 3, 3), torch.randn(1, 6, 1, 1).expand(4, 6, 3, 3)
            for p, g in zip(parameters, (plain, expanded, torch.randn(8, 6, 3, 3)[::2])):
                p.grad = g
            optimizer.step()
        assert all(optimizer.state[p]["exp_avg"].stride() == p.stride() for p in parameters)
        ends.append([p.detach() for p in parameters])
    assert kernels.launches
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6)


def test_parameters_of_other_stages_do_not_decide_what_steps():
    here, elsewhere = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, device="meta"))
    for order in ([here, elsewhere], [elsewhere, here]):
        for optimizer in (ours.AdamW(order), ours.SGD(order, lr=0.1, momentum=0.9)):
            assert optimizer.engine.name == "torch fused"
            optimizer.state[here]["momentum_buffer"] = torch.zeros(2)
            assert optimizer.engine.name == "torch fused"
            assert elsewhere not in optimizer.state


def test_no_gradients_and_only_empty_tensors(kernels):
    empty, without = torch.nn.Parameter(torch.zeros(0, 3)), torch.nn.Parameter(torch.ones(3))
    optimizer = ours.AdamW([empty, without])
    for _ in range(2):
        assert optimizer.clip_grad_norm_(1.0) == 0.0
        optimizer.step()
        assert not optimizer.state
    empty.grad = torch.zeros(0, 3)
    optimizer.step()
    assert optimizer.state[empty]["step"] == 1 and without not in optimizer.state


@pytest.mark.parametrize("kind", [ours.AdamW, ours.SGD, ours.Lion, ours.LAMB, ours.NovoGrad])
def test_bf16_rounded_stochastically_is_the_same_by_torch(kind, kernels):
    options = {"lr": 0.05, "state_dtype": torch.bfloat16, "stochastic_rounding": 3}
    options |= {"momentum": 0.9} if kind is ours.SGD else {}
    ends = []
    for fused in (None, False):
        low = made(torch.bfloat16)
        optimizer = kind(low, **options, fused=fused)
        for turn in range(3):
            give(low, turn)
            optimizer.step()
        kept = [v for s in optimizer.state.values() for key, v in s.items() if v.ndim and key != "step"]
        assert {v.dtype for v in kept} == {torch.bfloat16}
        ends.append(torch.cat([p.detach().flatten() for p in low]))
    same = (ends[0] == ends[1]).float().mean()
    assert same > (0.8 if kind is ours.LAMB else 0.98)  # its kernel divides rounded averages
    torch.testing.assert_close(ends[0], ends[1], rtol=2e-2, atol=2e-2)


class Failing(CompiledLauncher):
    """Compiles nothing whose name begins with `word`; starts nothing from launch `number` on."""

    def __init__(self, word="", number=math.inf):
        super().__init__()
        self.word, self.number = word, number

    def ready(self, kernels):
        kernels = list(kernels)
        if self.word and any(kernel.name.startswith(self.word) for kernel in kernels):
            raise KernelError("no compiler")
        super().ready(kernels)

    def launch(self, kernel, blocks, arguments):
        if len(self.launches) >= self.number:
            raise KernelError("no driver")
        self.ready([kernel])
        super().launch(kernel, blocks, arguments)


@pytest.mark.parametrize(
    ("failing", "loaded"), [({"word": "adam_bf16"}, False), ({"number": 0}, False), ({"number": 0}, True)]
)
def test_kernels_that_fail_leave_the_step_to_torch(failing, loaded, monkeypatch):
    monkeypatch.setattr("easymp.cuda.cupy_launcher._warned", [])
    ends = []
    for kind in (torch.optim.AdamW, ours.AdamW):
        parameters = [*made(), *made(torch.bfloat16)]
        optimizer = kind(parameters, lr=0.1)
        if loaded:
            before = torch.optim.AdamW(parameters)
            give(parameters, 0)
            before.step()
            optimizer.load_state_dict(before.state_dict())
        give(parameters, 1)
        if kind is ours.AdamW:
            launcher = Failing(**failing)
            kernels_on_cpu(monkeypatch, launcher)
            with pytest.warns(EasympWarning, match="torch's own steps run instead"):
                optimizer.step()
            assert (launcher.launches, optimizer.engine.name) == ([], "torch fused")
        else:
            optimizer.step()
        ends.append([t for p in parameters for t in (p.detach(), *optimizer.state[p].values())])
    torch.testing.assert_close(*ends, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("number", [1, 2])
def test_a_step_that_has_begun_is_not_taken_for_one_that_has_not(number, monkeypatch):
    """Where nothing has moved, torch may step instead; afterwards it would step twice."""
    kernels_on_cpu(monkeypatch, launcher := Failing(number=number))
    parameters = [*made(), *made(torch.bfloat16)]
    give(parameters, 0)
    with pytest.raises(StepError, match="Load a checkpoint"):
        ours.AdamW(parameters).step()
    assert len(launcher.launches) == number


SPREAD = {
    "AdamW": lambda p: ours.AdamW(p, lr=1e-2, ema_decay=0.9),
    "Lion": lambda p: ours.Lion(p, lr=1e-2, weight_decay=0.1),
    "LAMB": lambda p: ours.LAMB(p, lr=1e-1, max_grad_norm=0.1),
    "NovoGrad": lambda p: ours.NovoGrad(p, lr=1e-1, weight_decay=0.1),
    "LARC": lambda p: ours.LARC(ours.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1)),
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
    mine = ours.LAMB(parameters)
    world = SimpleNamespace(size=2, device=torch.device("cuda"), any=lambda mine: mine or not everywhere)
    same_kernels(world, mine, ours.Engine(mine))
    assert (mine.engine.kernels is not None) == everywhere
    parameters[0].grad = torch.ones(3)
    mine.step()
    assert everywhere or "not run on all ranks" in mine.engine.reason


def test_larc_multiplies_gradients_of_half_precision_by_the_factor_of_a_scale() -> None:
    weight = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    optimizer = ours.LARC(ours.SGD([weight], lr=0.5), clip=False, trust_coefficient=1.0)
    weight.grad = torch.full_like(weight, 8.0)
    optimizer.grad_scale = torch.tensor(4.0)
    optimizer.step()
    assert weight.tolist() == [0.5] * 4


def test_low_precision_and_double():
    for optimizer, dtype in ((ours.LAMB, torch.bfloat16), (ours.NovoGrad, torch.float64)):
        held = made(dtype)
        give(held, 0)
        optimizer(held, lr=0.1, **({"norm_type": math.inf} if optimizer is ours.NovoGrad else {})).step()
        assert all(p.dtype == dtype and p.isfinite().all() for p in held)


def test_signatures_name_every_keyword() -> None:
    class Own(ours.AdamW):
        def __init__(self) -> None:
            super().__init__([torch.nn.Parameter(torch.ones(2))], lr=0.5)

    for kind in (ours.AdamW, ours.SGD, ours.LAMB, ours.Lion):
        words = inspect.signature(kind).parameters
        assert {"maximize", "fused", "ema_decay", "state_dtype", "stochastic_rounding"} <= words.keys()
        given = {name: word.default for name, word in words.items() if word.kind is word.KEYWORD_ONLY}
        kind([torch.nn.Parameter(torch.ones(2))], **given)
    assert not inspect.signature(Own).parameters and Own().defaults["lr"] == 0.5
