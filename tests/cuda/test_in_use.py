"""Where kernels stand in for torch's operations, beside the optimizer's step, results are the same bits."""

import pytest
import torch

from easymp import KernelError, cuda
from easymp.cuda import casts, cupy_launcher
from easymp.cuda.cupy_launcher import CupyLauncher, Unavailable
from easymp.optim.masters import Masters, Sums
from easymp.precision import Scaler
from easymp.strategies.ddp import CommHookState, all_reduce

from .compiled import CompiledLauncher


@pytest.fixture
def launcher():
    return CompiledLauncher()


def twice(monkeypatch, module, launcher, do):
    """What `do` gives with kernels, and without."""
    with_kernels = do()
    assert launcher.launches == []  # a CPU has none of its own
    monkeypatch.setattr(module, "launcher_with", lambda device, kernels: launcher)
    return do(), with_kernels


@pytest.mark.parametrize("broken", [False, True])
def test_unscaling(monkeypatch, launcher, broken):
    def unscale():
        torch.manual_seed(0)
        held = [
            torch.nn.Parameter(torch.randn(s).to(d))
            for s, d in (((40, 3), torch.float32), ((7,), torch.bfloat16), ((5,), torch.float32))
        ]
        optimizer = torch.optim.SGD(held, lr=0.1)
        for p in held:
            p.grad = torch.randn(p.shape).to(p.dtype) * 1000
        held[2].grad = torch.randn(10)[::2]  # no run of memory: torch's
        if broken:
            held[1].grad[-1] = float("nan")
        scaler = Scaler()
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        return [p.grad for p in held], [p.detach() for p in held], scaler.skipped(optimizer)

    ours, torchs = twice(monkeypatch, cuda, launcher, unscale)
    assert launcher.launches == ["unscale_f32", "total", "unscale_bf16", "total"]
    assert ours[2] == torchs[2] == broken
    for mine, theirs in zip((*ours[0], *ours[1]), (*torchs[0], *torchs[1])):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_sums_and_masters(monkeypatch, launcher):
    def gather():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Linear(9, 3)).bfloat16()
        sums = Sums({})
        sums.watch(list(model.parameters()))
        masters = Masters(torch.optim.SGD(model.parameters(), lr=0.1), {})
        for _ in range(3):
            for _ in range(3):
                model(torch.randn(4, 5).bfloat16()).square().sum().backward()
                sums.add()
            model(torch.randn(4, 5).bfloat16()).square().sum().backward()
            masters.gather()
        return [*sums.gradients(), *(m.grad for _, m in masters.pairs())]

    ours, torchs = twice(monkeypatch, casts, launcher, gather)
    assert len(launcher.launches) == 12
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))


def reduce_in(dtype, before, after, kernels):
    if kernels:
        casts.launcher_with = lambda device, wanted: CompiledLauncher()
    torch.manual_seed(torch.distributed.get_rank())
    gradient = torch.randn(1000)
    return all_reduce(CommHookState(dtype, before, after), Bucket(gradient)).wait()


class Bucket:
    def __init__(self, gradient):
        self.gradient = gradient

    def buffer(self):
        return self.gradient


def hooked():
    """On two ranks: the buckets of a compressed all-reduce, with kernels and without."""
    own = casts.launcher_with
    torch.distributed.init_process_group("gloo")
    try:
        cases = [(d, *by) for d in (torch.bfloat16, torch.float16) for by in ((2.0, 1.0), (0.5, 4.0))]
        return [torch.equal(reduce_in(*case, True), _plain(own, case)) for case in cases]
    finally:
        casts.launcher_with = own
        torch.distributed.destroy_process_group()


def _plain(own, case):
    casts.launcher_with = own
    return reduce_in(*case, False)


def test_compressed_reductions(ranks):
    assert ranks(hooked, processes=2) == [[True] * 4] * 2


# -- failures ---------------------------------------------------------------------------------------------------------------


def test_a_kernel_that_cannot_be_compiled_is_torchs_from_then_on(monkeypatch):
    class Broken(CupyLauncher):
        asked = 0

        def ready(self, kernels):
            Broken.asked += 1
            raise KernelError("nvrtc said so")

    said = []
    device = torch.device("cuda", 0)
    monkeypatch.setattr(cupy_launcher, "launcher_for", lambda device: Broken(device))
    monkeypatch.setattr(cupy_launcher, "warn_once", said.append)
    monkeypatch.setattr(cupy_launcher, "_broken", set())
    kernels = [casts.add(torch.bfloat16)]
    assert cupy_launcher.launcher_with(device, kernels) is None
    assert cupy_launcher.launcher_with(device, kernels) is None
    assert (Broken.asked, said) == (1, ["nvrtc said so"])
    monkeypatch.setattr(cupy_launcher, "launcher_for", lambda device: Unavailable("no CuPy"))
    assert cupy_launcher.launcher_with(device, [casts.add(torch.float16)]) is None
    assert cupy_launcher.launcher_with(torch.device("cpu"), kernels) is None
