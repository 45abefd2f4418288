"""fp32 masters: what the optimizer steps, and that a script that knows nothing of them works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from easymp import Accelerator, GradScalerKwargs, PrepareError, StepError

from ..strategies.models import make, whole

FP16, FP32 = torch.float16, torch.float32
SCALE = GradScalerKwargs(init_scale=1024.0)  # gradients of 1 times 2^16 overflow in fp16


@pytest.mark.parametrize("how", ["load_state_dict", "copy_", "add_"])
def test_weights_written_from_outside_reach_the_masters(how: str) -> None:
    with Accelerator(mixed_precision="O2", cpu=True, kwargs_handlers=[SCALE]) as acc:
        model = nn.Linear(2, 1, bias=False)
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in range(2):
            with torch.no_grad():
                if how == "load_state_dict":
                    model.load_state_dict({"weight": torch.tensor([[5.0, 6.0]])})
                elif how == "copy_":
                    model.weight.copy_(torch.tensor([[5.0, 6.0]]))
                else:
                    model.weight.zero_().add_(torch.tensor([[5.0, 6.0]]))
            acc.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
            assert model.weight.tolist() == [[4.0, 5.0]]
            assert optimizer.param_groups[0]["params"][0].tolist() == [[4.0, 5.0]]


def test_the_tools_of_the_step_take_the_models_own_parameters() -> None:
    with Accelerator(mixed_precision="O2", cpu=True, fused=False, kwargs_handlers=[SCALE]) as acc:
        model = nn.Linear(4, 1, bias=False)
        nn.init.ones_(model.weight)
        model = acc.prepare(model)
        optimizer = acc.prepare(torch.optim.SGD(model.parameters(), lr=1.0))  # in a later call
        (master,) = optimizer.param_groups[0]["params"]

        def back() -> None:
            acc.backward(model(torch.full((1, 4), 3.0)).sum())

        back()
        assert model.weight.grad.dtype == FP16
        assert float(acc.clip_grad_norm_(model.parameters(), 1.0)) == pytest.approx(6.0, rel=1e-3)
        assert model.weight.grad is None
        assert master.grad.norm().item() == pytest.approx(1.0, rel=1e-3)
        optimizer.step()
        assert model.weight[0].tolist() == pytest.approx([0.5] * 4, abs=1e-2)
        optimizer.zero_grad()
        back()
        acc.clip_grad_value_(model.weight, 0.25)
        assert master.grad.flatten().tolist() == [0.25] * 4
        back()
        optimizer.step()
        optimizer.zero_grad()
        assert master.grad is None
        back()
        acc.unscale_gradients(optimizer)
        assert master.grad.flatten().tolist() == [3.0] * 4
        optimizer.step()
        model.zero_grad()  # of the model instead of the optimizer: nothing of the last step comes again
        back()
        acc.unscale_gradients()
        assert master.grad.flatten().tolist() == [3.0] * 4
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        back()
        acc.unscale_gradients()
        assert master.grad.flatten().tolist() == [3.0] * 4
        optimizer.step()
        assert acc._prepared.optimizers_of([master]) == [optimizer]
        later = nn.Linear(2, 2)
        later = acc.prepare(later)
        optimizer.add_param_group({"params": list(later.parameters()), "lr": 0.1})
        assert {p.dtype for group in optimizer.param_groups for p in group["params"]} == {FP32}
        kept = optimizer.optimizer
    assert [p.dtype for group in kept.param_groups for p in group["params"]] == [FP16] * 3


def test_closures_and_sparse_gradients_are_refused() -> None:
    with Accelerator(mixed_precision="O2", cpu=True, kwargs_handlers=[SCALE]) as acc:
        model = nn.Linear(2, 1)
        model, optimizer = acc.prepare(model, torch.optim.LBFGS(model.parameters()))
        with pytest.raises(StepError, match="a closure cannot be used with fp32 masters"):
            optimizer.step(lambda: 1.0)
        with pytest.raises(PrepareError, match=r"'0' has sparse gradients, .* make it with sparse=False"):
            acc.prepare(nn.Sequential(nn.Embedding(4, 2, sparse=True)))


def train(strategy: str, kind: str, steps: int, precision: str = "O2", updates: int = 3) -> dict[str, Any]:
    """Losses, norms and masters of a training whose micro-batches the ranks share, with num_items and clipping."""
    how: Any = {"mixed_precision": precision, "strategy": strategy, "gradient_accumulation_steps": steps}
    with Accelerator(cpu=True, kwargs_handlers=[SCALE], **how) as acc:
        model = make(kind)
        decays, rest = ([p for p in model.parameters() if (p.ndim > 1) is wide] for wide in (True, False))
        groups = [{"params": decays, "weight_decay": 0.1}, {"params": rest, "lr": 0.005}]
        optimizer: Any = torch.optim.AdamW(groups, lr=0.01)
        model, optimizer = acc.prepare(model, optimizer)
        spread, generator = acc._prepared.strategy, torch.Generator().manual_seed(7)
        losses, norms = [], []
        for _ in range(updates):
            for _ in range(steps):
                x = torch.randn(12, 12, generator=generator)
                y = torch.randint(0, 5, (12,), generator=generator)
                x, y = (t.chunk(spread.data_size)[spread.data_rank] for t in (x, y))
                with acc.accumulate(model):
                    loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
                    acc.backward(loss, num_items=len(y))
                    norm = acc.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
            losses.append(float(acc.reduce(loss.detach(), "mean")) * spread.data_size)
            norms.append(float(norm))
        return {
            "losses": losses,
            "norms": norms,
            "skipped": acc.optimizer_step_was_skipped,
            "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
            "parameters": [whole(p).float() for p in model.parameters()],
        }


@pytest.mark.parametrize(
    ("strategy", "kind", "steps"),
    [
        ("ddp", "mlp", 3),
        ("fsdp", "tied", 1),
        ("fsdp", "idle", 2),
        ("zero1", "mlp", 3),
        ("tensor_parallel", "mlp", 3),
    ],
)
def test_ranks_train_as_one_process(ranks, strategy: str, kind: str, steps: int) -> None:
    one = train("single", kind, steps)
    if kind != "tied":  # whose words are made of the inputs' digits
        assert one["losses"] == pytest.approx(train("single", kind, steps, "no")["losses"], rel=0.02)
    for got in ranks(train, strategy, kind, steps):
        assert got["losses"] == pytest.approx(one["losses"], rel=0.02)
        assert got["norms"] == pytest.approx(one["norms"], rel=0.05)
        assert not got["skipped"]
        assert got["dtypes"] == ["torch.float16"]
