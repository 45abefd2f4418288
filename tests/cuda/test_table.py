"""The table follows what it points at.

New only when something lies elsewhere, never stale, and it keeps nothing alive.
"""

import copy
import weakref
from types import SimpleNamespace

import pytest
import torch

from easymp import KernelError, StepError
from easymp.cuda import kernel as tables
from easymp.cuda import step as steps
from easymp.cuda.kernel import CHUNK, Role, Row, dense, lay_out, same_layout, stream
from easymp.cuda.step import FusedStep
from easymp.optim.rules import ADAM

from .compiled import CompiledLauncher

CPU = torch.device("cpu")


class Run:
    """Ours and torch's AdamW over the same parameters and gradients."""

    def __init__(self, groups=None, **options):
        torch.manual_seed(0)
        self.parameters = [torch.nn.Parameter(torch.randn(s)) for s in ((5,), (3, 7), (100,), (1,))]
        self.torch_parameters = [torch.nn.Parameter(p.detach().clone()) for p in self.parameters]
        options = {"lr": 1e-2, **options}
        self.optimizer = torch.optim.AdamW(self._groups(self.parameters, groups), **copy.deepcopy(options))
        self.reference = torch.optim.AdamW(self._groups(self.torch_parameters, groups), **copy.deepcopy(options))
        self.step = FusedStep(self.optimizer, ADAM, CompiledLauncher())

    def _groups(self, parameters, groups):
        if groups is None:
            return parameters
        return [{"params": [parameters[i] for i in of], **options} for of, options in groups]

    def __call__(self, indices=None, measured=True):
        for i, (p, q) in enumerate(zip(self.parameters, self.torch_parameters)):
            q.grad = torch.randn(q.shape) if indices is None or i in indices else None
            if q.grad is None:
                p.grad = None
            elif p.grad is None:
                p.grad = q.grad.clone()
            else:
                p.grad.copy_(q.grad)
        if measured:
            self.step.measure()
        self.step.step()
        self.reference.step()
        self.check()

    def check(self):
        for p, q in zip(self.parameters, self.torch_parameters):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
            assert self.optimizer.state.get(p, {}).get("step", 0) == self.reference.state.get(q, {}).get("step", 0)


@pytest.mark.parametrize("captured", [True, False])
def test_tables_of_a_captured_step_stay(monkeypatch, captured):
    """A graph that was captured goes on reading them when a step outside of it has made others."""
    run = Run()
    run()
    layout = run.step._layout
    tables = [weakref.ref(t) for t in (run.step._hyper, layout.table.rows, layout.constants)]
    del layout
    monkeypatch.setattr(steps, "capturing", lambda device: captured)
    run()
    monkeypatch.setattr(steps, "capturing", lambda device: False)
    for p in run.parameters:
        p.grad = None
    for optimizer in (run.optimizer, run.reference):
        optimizer.param_groups[0]["lr"] = 0.5
    run()
    assert [r() is not None for r in tables] == [captured] * 3


def test_a_torch_that_does_not_keep_what_replays_copy(monkeypatch):
    run = Run()
    run()
    monkeypatch.setattr(tables, "GRAPHS_KEEP_PINNED", False)
    monkeypatch.setattr(tables, "capturing", lambda device: True)
    run()  # where it was
    for p in run.parameters:
        p.grad = torch.ones_like(p)
    with pytest.raises(StepError, match=r"zero_grad\(set_to_none=False\)"):
        run.step.measure()


def test_another_tensor_at_the_same_address_is_seen():
    buffer = torch.zeros(32)
    p = torch.nn.Parameter(torch.zeros(4, 4))
    optimizer = torch.optim.AdamW([p], lr=1.0, weight_decay=0.0)
    step = FusedStep(optimizer, ADAM, CompiledLauncher(), gradient=lambda p: p.extra)
    p.extra = buffer[:16].view(4, 4).copy_(torch.tensor([[1.0], [2.0], [3.0], [4.0]]).expand(4, 4))
    assert step.measure()[0].item() == pytest.approx(120**0.5)
    step.step()
    p.extra = buffer.view(torch.bfloat16)[:16].view(4, 4).copy_(torch.ones(4, 4))  # of another dtype
    assert p.extra.data_ptr() == buffer.data_ptr()
    assert step.measure()[0].item() == 4.0
    step.step()
    assert optimizer.state[p]["exp_avg"][3, 0].item() == pytest.approx(0.9 * 0.4 + 0.1)
    p.extra = torch.as_strided(buffer, (4, 4), (1, 4))  # of other strides
    buffer[:16] = torch.arange(16.0)
    before = optimizer.state[p]["exp_avg"].clone()
    step.step()
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], before * 0.9 + 0.1 * torch.arange(16.0).view(4, 4).T)
    p.extra = buffer[:8].view(2, 4)  # of another shape: not of this parameter
    with pytest.raises(KernelError, match=r"shape \(4, 4\)"):
        step.step()


def test_groups_have_their_own_numbers_and_schedulers_change_them(monkeypatch):
    layouts = []
    monkeypatch.setattr(steps, "lay_out", lambda *arguments: layouts.append(arguments) or lay_out(*arguments))
    run = Run(
        groups=[
            ([0, 3], {"lr": 1e-1, "betas": (0.5, 0.7)}),
            ([1], {"weight_decay": 0.3, "eps": 1e-3}),
            ([2], {"maximize": True}),
        ]
    )
    for _ in range(4):
        run()
        for group in (*run.optimizer.param_groups, *run.reference.param_groups):
            group["lr"] *= 0.5
    assert len(layouts) == 1


def test_more_than_four_billion_elements():
    size = 2**33 + 5
    huge = SimpleNamespace(numel=lambda: size, data_ptr=lambda: 2**46)
    table = lay_out([[Row((torch.zeros(1),)), Row((huge,))]], CPU)
    chunk = int(table.chunks[-1])
    assert (chunk >> 32, chunk & 0xFFFFFFFF) == (1, size // CHUNK)
    assert table.starts[-1] == 1 + -(-size // CHUNK)
    # The last chunk of a tensor whose other elements are not there.
    last = torch.arange(5.0)
    begin = size // CHUNK * CHUNK
    distant = SimpleNamespace(numel=lambda: begin + 5, data_ptr=lambda: last.data_ptr() - 4 * begin)
    table = lay_out([[Row((distant,))]], CPU)
    kernel = stream("number", [Role("x", writes=True)], {"x": torch.float32}, f"x = (float)(e - {begin}ll) + x;")
    CompiledLauncher().launch(
        kernel, 1, [table.rows.data_ptr(), table.chunks.data_ptr() + 8 * (table.starts[-1] - 1), 0]
    )
    assert last.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_dense_and_alike():
    x = torch.zeros(2, 3, 4, 5)
    last = x.to(memory_format=torch.channels_last)
    assert all(map(dense, (x, x.permute(3, 0, 2, 1), last, x[1:], x[:0], torch.zeros(()), x[:, :, :, :0])))
    overlapping = torch.zeros(3, 1).expand(3, 4), torch.zeros(4).as_strided((3, 2), (1, 1))
    assert not any(map(dense, (x[:, 1:], x[..., ::2], *overlapping)))
    assert same_layout(x, torch.ones_like(x)) and not same_layout(x, last) and not same_layout(x, x[1:])
    assert same_layout(torch.zeros(5, 1, 3), torch.zeros(15).as_strided((5, 1, 3), (3, 9, 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_number_that_is_not_finite_is_found_at_any_place(dtype):
    for size, value in ((1, "inf"), (8, "nan"), (16384, "-inf"), (16385, "inf"), (40_003, "nan")):
        for position in {0, size // 2, size - 1}:
            p = torch.nn.Parameter(torch.zeros(size))
            p.extra = torch.zeros(size, dtype=dtype)
            step = FusedStep(torch.optim.AdamW([p]), ADAM, CompiledLauncher(), gradient=lambda p: p.extra)
            assert step.measure()[2] == 0
            p.extra[position] = float(value)
            assert step.measure()[2] == 1
