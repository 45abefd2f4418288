"""The face on two real processes: what one process alone cannot show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import easymp
import easymp.compat.accelerate
from easymp import Accelerator

from ..strategies.models import refuses
from .models import data, make


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize(("theirs", "rate"), [(False, 0.5), (True, 0.25)])
def test_a_scheduler_steps_once_an_update_not_once_a_process(theirs: bool, rate: float) -> None:
    with (easymp.compat.accelerate if theirs else easymp).Accelerator(mixed_precision="no") as acc:
        model = make()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer, scheduler = acc.prepare(model, optimizer, scheduler)
        acc.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        scheduler.step()
        assert scheduler.get_last_lr()[0] == rate


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("n", [24, 21, 1])
def test_metrics_see_every_sample_once(n: int) -> None:
    with Accelerator(mixed_precision="no") as acc:
        loader = acc.prepare(DataLoader(data(n), batch_size=4))
        seen, objects = [], []
        for x, index, _ in loader:
            gathered = acc.gather_for_metrics({"index": index, "more": (x,)})
            assert gathered["more"][0].shape == (len(gathered["index"]), 4)
            seen += gathered["index"].tolist()
            objects += acc.gather_for_metrics([str(i) for i in index.tolist()], use_gather_object=True)
        assert seen == list(range(n)) and objects == [str(i) for i in range(n)]
        assert (loader.batch_size, loader.total_batch_size) == (4, 8)


def metrics_wrongly() -> None:
    with Accelerator(mixed_precision="no") as acc:
        gather = acc.gather_for_metrics
        for x, _, _ in acc.prepare(DataLoader(data(10), batch_size=4)):
            refuses(ValueError, "got a scalar", gather, x.sum())
            refuses(ValueError, "got shape (16,", gather, x.flatten())
            refuses(ValueError, "got 5 items", gather, [1, 2, 3, 4, 5])
            refuses(ValueError, "got a scalar", gather, {"a": x, "b": x.mean()})
            break
        outside = "outside a loop over a prepared loader cannot know which samples are repeated"
        refuses(ValueError, outside, gather, x)


def test_metrics_that_are_not_of_the_batch_are_refused(ranks) -> None:
    ranks(metrics_wrongly)
    metrics_wrongly()


@pytest.mark.on_ranks(2)
def test_collectives() -> None:
    with Accelerator(mixed_precision="no") as acc:
        r, ran = acc.process_index, lambda: "ran"
        assert (acc.num_processes, acc.is_main_process) == (2, not r)
        gathered = acc.gather({"a": torch.tensor([r]), "b": [torch.full((1, 2), r)]})
        assert (gathered["a"].tolist(), gathered["b"][0].tolist()) == ([0, 1], [[0, 0], [1, 1]])
        assert acc.gather(torch.tensor(float(r))).tolist() == [0.0, 1.0]
        assert acc.gather(torch.tensor([r == 1, False])).tolist() == [False, False, True, False]
        counted = acc.reduce(torch.tensor([r, 2], dtype=torch.int16))
        assert (counted.tolist(), counted.dtype) == ([1, 4], torch.int16)
        assert acc.reduce(torch.tensor([1.0 + r])).item() == 3.0
        assert acc.reduce(torch.tensor([1.0 + r]), "mean").item() == 1.5
        assert acc.reduce(torch.tensor([1, 4 * r]), "mean").tolist() == [1, 2]
        assert acc.reduce(torch.tensor([1.0 + r]), "sum", 0.5).item() == 1.5
        padded = acc.pad_across_processes(torch.ones(r + 1, 2), dim=0, pad_index=9)
        assert padded.tolist() == [[1, 1], [1 if r else 9] * 2]
        assert acc.pad_across_processes(torch.ones(r + 1), pad_first=True).tolist() == [r, 1]
        assert easymp.broadcast({"x": torch.tensor([r])}, 1)["x"].tolist() == [1]
        assert easymp.gather_object([r, {"r": r}]) == [0, {"r": 0}, 1, {"r": 1}]
        assert easymp.broadcast_object_list(["one", r] if r else [None, None], 1) == ["one", 1]
        assert float(acc.mean(float(r), 1 + 2 * r)) == 0.75
        with acc.split_between_processes(list(range(5))) as mine:
            assert mine == ([3, 4] if r else [0, 1, 2])
        with acc.split_between_processes({"x": torch.arange(5)}, apply_padding=True) as mine:
            assert mine["x"].tolist() == ([3, 4, 4] if r else [0, 1, 2])
        assert acc.on_main_process(ran)() == (None if r else "ran")
        acc.wait_for_everyone()
        if r == 1:
            acc.set_trigger()
        assert (acc.check_trigger(), acc.check_trigger()) == (True, False)
