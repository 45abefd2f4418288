"""local_sgd and LocalSGD on real processes: models that go their own ways, and are averaged when they should be."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from easymp import Accelerator, EasympWarning, LocalSGD, LocalSGDOptions, SettingError

from .models import make, part, under, whole


def same(acc: Accelerator, tensors: Any) -> bool:
    """Whether these are the same on all ranks."""
    rows = acc.gather(torch.cat([t.detach().flatten() for t in tensors])[None])
    return bool((rows == rows[0]).all())


def spreads(every: int, precision: str, fused: bool | None = None) -> list[list[bool]]:
    """At the start, after each of 7 updates, and after a meeting: whether parameters, and buffers, are the same on all ranks."""
    with under("local_sgd", {"every": every}, precision=precision, fused=fused) as acc:
        torch.manual_seed(acc.process_index)
        model = nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5))
        model[1].running_mean.fill_(acc.process_index)
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        generator = torch.Generator().manual_seed(acc.process_index)
        found = [[same(acc, model.parameters()), same(acc, [model[1].running_mean])]]
        for step in range(8):
            if step == 7:
                acc.wait_for_everyone()
            else:
                acc.backward(model(torch.randn(4, 12, generator=generator)).square().mean() / 100)
                optimizer.step()
                optimizer.zero_grad()
            found.append([same(acc, model.parameters()), same(acc, [model[1].running_mean])])
    return found


@pytest.mark.parametrize(("precision", "fused"), [("no", None), ("fp16", True)])
def test_models_are_averaged_after_every_third_update(ranks, precision: str, fused: bool | None) -> None:
    for found in ranks(spreads, 3, precision, fused):
        assert found == [[(i % 3 == 0) or i == 8] * 2 for i in range(9)]


def two_rates() -> tuple[list[bool], list[bool]]:
    """Two optimizers, the second of which steps every other time."""
    with under("local_sgd", LocalSGDOptions(every=2)) as acc:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        fast, slow = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second))
        first, second, fast, slow = acc.prepare(first, second, fast, slow)
        alike: tuple[list[bool], list[bool]] = [], []
        for step in range(8):
            acc.backward(second(first(torch.full((2, 4), acc.process_index + step + 1.0))).square().mean())
            fast.step()
            if step % 2:
                slow.step()
            for model, list_ in zip((first, second), alike):
                list_.append(same(acc, [model.weight]))
            fast.zero_grad()
            slow.zero_grad()
        return alike


def test_each_optimizer_counts_its_own_updates(ranks) -> None:
    for first, second in ranks(two_rates):
        assert first == [False, True] * 4
        assert second == [True, False, False, True, True, False, False, True]


def passes(leave: bool) -> tuple[bool, str]:
    data = TensorDataset(torch.randn(40, 12, generator=torch.Generator().manual_seed(1)))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with under("local_sgd", {"every": 100}, precision="bf16") as acc:
            model = make("mlp")
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = acc.prepare(model, optimizer, DataLoader(data, batch_size=4))
            for i, (x,) in enumerate(loader):
                acc.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if leave and i == 2:
                    break
            alike = same(acc, model.parameters())
        optimizer.optimizer.step()  # the run is over: this rank's own business
    return alike, " ".join(str(w.message) for w in seen if w.category is EasympWarning)


def test_a_pass_ends_with_an_averaging_and_a_run_that_ends_before_says_so(ranks) -> None:
    assert ranks(passes, False) == [(True, "")] * 2
    for alike, words in ranks(passes, True):
        assert not alike
        assert "they were trained for 3 updates since they were last averaged" in words


def overflow(fused: bool | None) -> list[bool]:
    """Of four steps, the second overflows on rank 1; averaged after every second update."""
    with under("local_sgd", {"every": 2}, precision="fp16") as acc:
        model = make("mlp")
        mine = acc.is_main_process if fused is None else fused
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, fused=mine, foreach=False)
        model, optimizer = acc.prepare(model, optimizer)
        found = []
        for step in range(5):
            loss = model(torch.full((2, 12), 1.0 + acc.process_index)).square().mean() / 100
            acc.backward(loss * (torch.inf if step == 1 and acc.process_index == 1 else 1))
            optimizer.step()
            found.append(acc.optimizer_step_was_skipped)
            optimizer.zero_grad()
            found.append(same(acc, model.parameters()))
        return found


@pytest.mark.parametrize("fused", [True, None])
def test_skipped_steps_do_not_count_on_any_rank(ranks, fused: bool | None) -> None:
    """Also where one rank's optimizer is fused, and so steps without an effect, and another's is not."""
    for found in ranks(overflow, fused):
        assert found == [False, False, True, False, False, True, False, False, False, True]


def block(
    every: int, enabled: bool, steps: int, strategy: str | None = None, precision: str = "no"
) -> tuple[list[bool], Any]:
    with Accelerator(mixed_precision=precision, gradient_accumulation_steps=steps, strategy=strategy) as acc:
        model = make("mlp")
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        generator = torch.Generator().manual_seed(5)
        alike = []

        def look() -> None:
            alike.append(same(acc, model.parameters()))

        def update() -> None:
            x = part(acc, torch.randn(8, 12, generator=generator))
            with acc.accumulate(model):
                acc.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()

        with LocalSGD(accelerator=acc, model=model, local_sgd_steps=every, enabled=enabled) as local_sgd:
            for _ in range(5):
                update()
                local_sgd.step()
                look()
            assert local_sgd.num_steps == 5
        look()
        if steps == 1:
            update()  # ddp again
        look()
        return alike, [whole(p) for p in model.parameters()]


def test_the_block_averages_every_second_step_and_at_its_end(ranks) -> None:
    for precision in ("no", "bf16"):
        for alike, _ in ranks(block, 2, True, 1, None, precision):
            assert alike == [False, True, False, True, False, True, True]


def test_averaged_after_each_step_the_block_is_ddp(ranks) -> None:
    one = block(1, True, 1)[1]
    for alike, parameters in ranks(block, 1, True, 1):
        assert all(alike)
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(parameters, one))


def test_where_the_block_has_no_place(ranks) -> None:
    assert ranks.fails(block, 2, True, 1, "local_sgd")[0].type == "RefusedError"
    assert "strategy='ddp'" in ranks.fails(block, 2, True, 1, "fsdp")[0].message
    with pytest.raises(SettingError, match="local_sgd_steps=0 is not a whole number"):
        block(0, True, 1)
