"""prepare: any order, any mix, and what does not fit together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from easymp import Accelerator, PreparedLoader, PrepareError, SettingError, StepError
from easymp.compat.accelerate import AcceleratorState
from easymp.optim import PreparedOptimizer, PreparedScheduler

from ..words import make_accelerator
from .models import data, make


@pytest.fixture
def acc() -> Iterator[Accelerator]:
    with Accelerator(mixed_precision="bf16") as acc:
        yield acc


def four() -> list[Any]:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return [model, optimizer, DataLoader(data(), batch_size=4), torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def test_any_order(acc: Accelerator) -> None:
    kinds = ["PreparedSequential", *(k.__name__ for k in (PreparedOptimizer, PreparedLoader, PreparedScheduler))]
    for order in list(itertools.permutations(range(4)))[::6]:
        objects = four()
        done = acc.prepare(*[objects[i] for i in order])
        assert [type(d).__name__ for d in done] == [kinds[i] for i in order]


def test_one_by_one_in_any_call_and_again(acc: Accelerator) -> None:
    model, optimizer, loader, scheduler = four()
    batches = acc.prepare(loader)
    model = acc.prepare(model)
    optimizer = acc.prepare(optimizer)
    scheduler = acc.prepare(scheduler)
    for x, _, y in batches:
        acc.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr()[0] == pytest.approx(0.1 * 0.5**6)
    done = [model, optimizer, batches, scheduler, None]
    assert all(a is b for a, b in zip(done, acc.prepare(*done), strict=True))
    assert acc.prepare(None) is None


@pytest.mark.parametrize(
    ("run", "given", "fused"),
    [({}, {}, True), ({}, {"foreach": True}, None), ({}, {"fused": False}, False), ({"fused": False}, {}, None)],
)
def test_a_fused_step_only_where_the_user_left_it_open(run: Any, given: Any, fused: bool | None) -> None:
    with make_accelerator(mixed_precision="no", **run) as acc:
        model = make()
        _, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), **given))
        assert optimizer.param_groups[0]["fused"] is fused
        assert not run or acc.plan.optimizer.value == "as given"


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(make().parameters(), lr=0.1)


def test_what_cannot_be_prepared(acc: Accelerator) -> None:
    acc.prepare(twice := make())
    for objects, words in (
        ([make(), sgd()], "that belongs to no prepared model"),
        ([*four()[:2], torch.optim.lr_scheduler.StepLR(sgd(), 1)], "StepLR drives an optimizer that"),
        ([data()], "a TensorDataset, which is not a Module"),
        ([nn.DataParallel(make())], "already in a DataParallel: pass its"),
        ([twice[2]], "parameter 'weight' of this Linear was prepared before,"),
    ):
        with pytest.raises(PrepareError, match=words):
            acc.prepare(*objects)
    with pytest.raises(PrepareError, match="device_placement has 1 values for 2 objects"):
        acc.prepare(make(), None, device_placement=[True])


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"mixed_precision": "bf61"}, r"'bf61' is not one of .*did you mean 'bf16'"),
        ({"mixed_precison": "bf16"}, "no argument 'mixed_precison', did you mean"),
        ({"log_with": "jsonk"}, "'jsonk' is not a tracker, did you mean 'jsonl'"),
        ({"dynamo_plugin": object()}, r"pass compile=CompileOptions\(...\)"),
        ({"kwargs_handlers": [object()]}, r"no argument 'kwargs_handlers': pass strategy_options"),
        ({"timeout": 60}, r"no argument 'timeout': pass settings=Settings\(timeout=...\)"),
    ],
)
def test_the_constructor_refuses(keywords: dict, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Accelerator(**keywords)
    with pytest.raises(StepError, match="needs an open Accelerator"):
        AcceleratorState()  # what was begun has ended again


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_a_loader_without_a_length_is_prepared_once(acc: Accelerator) -> None:
    given = DataLoader(Stream(), batch_size=2)
    assert acc.prepare(given) is acc.prepare(given)


def test_a_notebook_shows_the_plan(acc: Accelerator) -> None:
    assert re.search(r"<pre>processes .*\nprecision +bf16 .*\nstrategy +single +one process\n", acc._repr_html_(), re.S)
