"""Gradients are right under every strategy, or refused before they are used."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from easymp import Accelerator, DataLoaderConfiguration, GradScalerKwargs, PrepareError

PRECISE = 1e-6


def far(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def share(strategy: str | None, rank: int) -> tuple[int, int]:
    """Which part of the data a rank sees, of how many, on two ranks."""
    return (rank, 2) if strategy not in (None, "tensor_parallel", "pipeline") else (0, 1)


# -- ranks that run out of batches --------------------------------------------------------------------------------------


def regression() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.randn(68, 6, generator=generator), torch.randn(68, 1, generator=generator)


def joined(precision: str) -> tuple[int, float, list[torch.Tensor]]:
    config = DataLoaderConfiguration(even_batches=False)
    with Accelerator(mixed_precision=precision, strategy="ddp", dataloader_config=config) as acc:
        model, x, y = regression()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        model, optimizer, schedule, loader = acc.prepare(
            model, optimizer, schedule, DataLoader(TensorDataset(x, y), batch_size=4)
        )
        seen = 0
        for _ in range(2):
            with acc.join_uneven_inputs([model]):
                for inputs, targets in loader:
                    acc.backward(nn.functional.mse_loss(model(inputs), targets))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    seen += 1
        return seen, schedule.get_last_lr()[0] * acc.scaler.get_scale(), [p.detach().clone() for p in model.parameters()]


def test_joined_ranks_train_as_one_process_with_the_same_samples(ranks) -> None:
    model, x, y = regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    for _ in range(2):
        for inputs, targets in zip(x.split(8), y.split(8)):  # a batch of each rank; the last one is a single rank's
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    (n0, rate0, there0), (n1, rate1, there1) = ranks(joined, "no")
    assert (n0, n1) == (18, 16)
    assert rate0 == rate1 == schedule.get_last_lr()[0]
    assert far(there0, there1) == 0
    assert far(there0, [p.detach() for p in model.parameters()]) < PRECISE


def test_joined_ranks_keep_one_loss_scale(ranks) -> None:
    (_, scale0, there0), (_, scale1, there1) = ranks(joined, "fp16")
    assert scale0 == scale1
    assert far(there0, there1) == 0


def counted_while_joined() -> None:
    with Accelerator(mixed_precision="no", strategy="ddp") as acc:
        model = acc.prepare(nn.Linear(2, 1))
        with acc.join_uneven_inputs([model]):
            acc.backward(model(torch.ones(3, 2)).sum(), num_items=3)


def test_items_are_not_counted_while_joined(ranks) -> None:
    for failure in ranks.fails(counted_while_joined):
        assert failure.type == "StepError"
        assert "inside join_uneven_inputs: items are counted over all ranks" in failure.message


# -- sparse gradients ---------------------------------------------------------------------------------------------------


class Bag(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8, sparse=sparse)
        self.middle, self.out = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.middle(self.words(indices).mean(1))))


def looked_up(strategy: str | None, precision: str, clip: str, steps: int, sparse: bool) -> list[torch.Tensor] | None:
    torch.manual_seed(0)
    scale = [GradScalerKwargs(init_scale=1024.0)]  # that no gradient here overflows
    with Accelerator(
        mixed_precision=precision, strategy=strategy, gradient_accumulation_steps=steps, kwargs_handlers=scale, cpu=True
    ) as acc:
        model = Bag(sparse)
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        part, parts = share(strategy, acc.process_index)
        generator = torch.Generator().manual_seed(1)
        for _ in range(4 * steps):
            indices = torch.randint(0, 12, (8, 3), generator=generator).chunk(parts)[part]
            with acc.accumulate(model):
                out = model(indices)
                acc.backward(out.square().mean() + out.mean())
                if clip == "norm":
                    acc.clip_grad_norm_(model.parameters(), 0.1)
                elif clip == "value":
                    acc.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()
        acc.wait_for_everyone()
        state = acc.get_state_dict(model)
        return [value.float() for value in state.values()] if acc.is_main_process else None


KINDS = [("no", "", 1), ("no", "norm", 2), ("no", "value", 1), ("fp16", "norm", 1)]


@pytest.mark.parametrize(("precision", "clip", "steps"), KINDS)
def test_sparse_gradients_train_as_dense_ones(precision: str, clip: str, steps: int) -> None:
    got, want = (looked_up(None, precision, clip, steps, sparse) for sparse in (True, False))
    assert far(got, want) < (PRECISE if precision == "no" else 1e-3)


@pytest.mark.parametrize("strategy", ["ddp", "tensor_parallel", "pipeline"])
@pytest.mark.parametrize(("precision", "clip", "steps"), KINDS[1:])
def test_sparse_gradients_among_ranks(ranks, strategy: str, precision: str, clip: str, steps: int) -> None:
    got = ranks(looked_up, strategy, precision, clip, steps, True)[0]
    assert far(got, looked_up(None, precision, clip, steps, False)) < (PRECISE if precision == "no" else 1e-3)


def test_sparse_gradients_under_local_sgd(ranks) -> None:
    got, want = (ranks(looked_up, "local_sgd", "no", "norm", 1, sparse)[0] for sparse in (True, False))
    assert far(got, want) < PRECISE


def refused(strategy: str, precision: str) -> str:
    with Accelerator(mixed_precision=precision, strategy=strategy, cpu=True) as acc, pytest.raises(PrepareError) as caught:
        acc.prepare(Bag(True))
    return str(caught.value)


@pytest.mark.parametrize(("strategy", "precision"), [("zero1", "no"), ("fsdp", "no"), ("ddp", "O2")])
def test_sparse_gradients_are_refused_by_name(ranks, strategy: str, precision: str) -> None:
    assert all("'words' has sparse gradients, and" in said for said in ranks(refused, strategy, precision))
