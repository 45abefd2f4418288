"""local_sgd and LocalSGD on real processes: models that go their own ways, and are averaged when they should be."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from easymp import Accelerator, EasympWarning, LocalSGD, LocalSGDOptions, SettingError

from .models import make, mean_square, part, under, update, whole


def same(acc: Accelerator, tensors: Any) -> bool:
    """Whether these are the same on all ranks."""
    rows = acc.gather(torch.cat([t.detach().flatten() for t in tensors])[None])
    return bool((rows == rows[0]).all())


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize(("precision", "fused"), [("no", None), ("fp16", True)])
def test_models_are_averaged_after_every_third_update(precision: str, fused: bool | None) -> None:
    with under("local_sgd", {"every": 3}, precision=precision, fused=fused) as acc:
        torch.manual_seed(acc.process_index)
        model = nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5))
        model[1].running_mean.fill_(acc.process_index)
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        generator = torch.Generator().manual_seed(acc.process_index)
        for step in range(9):
            if step == 8:
                acc.wait_for_everyone()
            elif step:
                update(acc, optimizer, mean_square(model(torch.randn(4, 12, generator=generator))) / 100)
            assert same(acc, model.parameters()) == (step % 3 == 0 or step == 8)
            assert same(acc, [model[1].running_mean]) == (step % 3 == 0 or step == 8)


@pytest.mark.on_ranks(2)
def test_each_optimizer_counts_its_own_updates() -> None:
    with under("local_sgd", LocalSGDOptions(every=2)) as acc:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        optimizers = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second))
        first, second, fast, slow = acc.prepare(first, second, *optimizers)
        for step in range(8):
            x = torch.full((2, 4), acc.process_index + step + 1.0)
            acc.backward(mean_square(second(first(x))))
            for optimizer in (fast, slow)[: 1 + step % 2]:  # the second one steps every other time
                optimizer.step()
            assert same(acc, [first.weight]) == (step % 2 == 1)
            assert same(acc, [second.weight]) == (step % 4 in (0, 3))
            fast.zero_grad()
            slow.zero_grad()


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("stops_early", [False, True])
def test_a_pass_ends_with_an_averaging_and_a_run_that_ends_before_says_so(stops_early: bool) -> None:
    data = TensorDataset(torch.randn(40, 12, generator=torch.Generator().manual_seed(1)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with under("local_sgd", {"every": 100}, precision="bf16") as acc:
            model = make("mlp")
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = acc.prepare(model, optimizer, DataLoader(data, batch_size=4))
            for i, (x,) in enumerate(loader):
                update(acc, optimizer, mean_square(model(x)))
                if stops_early and i == 2:
                    break
            assert same(acc, model.parameters()) == (not stops_early)
        optimizer.optimizer.step()  # the run is over: this rank's own business
    warning_text = " ".join(str(w.message) for w in caught if w.category is EasympWarning)
    assert bool(warning_text) == stops_early
    assert not stops_early or "after 3 updates since they were last averaged" in warning_text


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("fused", [True, None])
def test_skipped_steps_do_not_count_on_any_rank(fused: bool | None) -> None:
    """Also where one rank's optimizer is fused, and so steps without an effect, and another's is not."""
    with under("local_sgd", {"every": 2}, precision="fp16") as acc:
        model, is_fused = make("mlp"), acc.is_main_process if fused is None else fused
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, fused=is_fused, foreach=False)
        model, optimizer = acc.prepare(model, optimizer)
        for step in range(5):  # the second one overflows on rank 1
            loss = mean_square(model(torch.full((2, 12), 1.0 + acc.process_index))) / 100
            acc.backward(loss * (torch.inf if step == 1 and acc.process_index == 1 else 1))
            optimizer.step()
            assert acc.optimizer_step_was_skipped == (step == 1)
            optimizer.zero_grad()
            assert same(acc, model.parameters()) == (step in (2, 4))


def block(steps: int, strategy: str | None = None, precision: str = "no") -> tuple[list[bool], Any]:
    """Whether parameters are the same on all ranks after each of 5 steps in a block, at its end, and a step later."""
    with under(strategy, precision=precision) as acc:
        model = make("mlp")
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        generator = torch.Generator().manual_seed(5)
        equal = []

        def train_once() -> None:
            update(acc, optimizer, mean_square(model(part(acc, torch.randn(8, 12, generator=generator)))))

        with LocalSGD(accelerator=acc, model=model, local_sgd_steps=steps, enabled=True) as local_sgd:
            for _ in range(5):
                train_once()
                local_sgd.step()
                equal.append(same(acc, model.parameters()))
            assert local_sgd.num_steps == 5
        equal.append(same(acc, model.parameters()))
        train_once()  # ddp again
        return [*equal, same(acc, model.parameters())], [whole(p) for p in model.parameters()]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_block_averages_every_second_step_and_at_its_end(ranks, precision: str) -> None:
    for equal, _ in ranks(block, 2, None, precision):
        assert equal == [False, True, False, True, False, True, True]


def test_averaged_after_each_step_the_block_is_ddp(ranks) -> None:
    one = block(1)[1]
    for equal, parameters in ranks(block, 1):
        assert all(equal)
        torch.testing.assert_close(parameters, one, rtol=1e-5, atol=1e-6)


def test_where_the_block_has_no_place(ranks) -> None:
    assert ranks.fails(block, 2, "local_sgd")[0].type == "RefusedError"
    assert "strategy='ddp'" in ranks.fails(block, 2, "fsdp")[0].message
    with pytest.raises(SettingError, match="local_sgd_steps=0 is not a whole number"):
        block(0)
