"""The face on two real processes: what one process alone cannot show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import easymp
from easymp import Accelerator, DistributedType

from ..strategies.models import whole
from .models import data, make


def close_to(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(a, b))


COUNTS = [[3, 8], [1, 6], [9, 2], [4, 4]]  # of tokens: micro-step, rank


def tokens() -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    draw = torch.Generator().manual_seed(1)

    def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(n, 4, generator=draw), torch.randint(0, 2, (n,), generator=draw)

    return [[batch(n) for n in row] for row in COUNTS]


def token_windows(strategy: str) -> list[torch.Tensor]:
    with Accelerator(mixed_precision="no", strategy=strategy, gradient_accumulation_steps=4) as acc:
        model = acc.prepare(make())
        for row in tokens():
            x, y = (torch.cat(parts) for parts in zip(*row[acc.process_index :: acc.num_processes]))
            with acc.accumulate(model):
                acc.backward(nn.functional.cross_entropy(model(x), y, reduction="sum"), num_items=len(y))
        return [whole(p.grad) for p in model.parameters()]


@pytest.mark.parametrize(("strategy", "size"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_token_weighted_loss_is_that_of_one_big_batch(ranks, strategy: str, size: int) -> None:
    model = make()
    x, y = (torch.cat(parts) for parts in zip(*(batch for row in tokens() for batch in row)))
    nn.functional.cross_entropy(model(x), y).backward()
    for got in ranks(token_windows, strategy, processes=size):
        assert close_to(got, [p.grad for p in model.parameters()])


def scheduler_steps() -> tuple[float, float]:
    rates = []
    for theirs in (False, True):
        with Accelerator(mixed_precision="no", scheduler_steps_per_process=theirs) as acc:
            model = make()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            model, optimizer, scheduler = acc.prepare(
                model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            )
            acc.backward(model(torch.ones(1, 4)).sum())
            optimizer.step()
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
    return tuple(rates)


def test_a_scheduler_steps_once_an_update_not_once_a_process(ranks) -> None:
    assert ranks(scheduler_steps) == [(0.5, 0.25)] * 2


def metrics(n: int, batch: int) -> tuple[list[int], list[int], int, int]:
    with Accelerator(mixed_precision="no") as acc:
        loader = acc.prepare(DataLoader(data(n), batch_size=batch))
        seen, objects = [], []
        for x, index, _ in loader:
            gathered = acc.gather_for_metrics({"index": index, "more": (x,)})
            assert gathered["more"][0].shape == (len(gathered["index"]), 4)
            seen += gathered["index"].tolist()
            objects += acc.gather_for_metrics([str(i) for i in index.tolist()], use_gather_object=True)
        return seen, [int(o) for o in objects], loader.batch_size, loader.total_batch_size


@pytest.mark.parametrize(("n", "batch"), [(24, 4), (21, 4), (1, 4)])
def test_metrics_see_every_sample_once(ranks, n: int, batch: int) -> None:
    for seen, objects, mine, total in ranks(metrics, n, batch):
        assert seen == objects == list(range(n))
        assert (mine, total) == (batch, 2 * batch)


def metrics_wrongly() -> list[str]:
    said = []
    with Accelerator(mixed_precision="no") as acc:
        loader = acc.prepare(DataLoader(data(10), batch_size=4))
        for x, _, _ in loader:
            for wrong in (x.sum(), x.flatten(), [1, 2, 3, 4, 5], {"a": x, "b": x.mean()}):
                try:
                    acc.gather_for_metrics(wrong)
                except ValueError as error:
                    said.append(str(error))
            break
        try:
            acc.gather_for_metrics(x)
        except ValueError as error:
            said.append(str(error))
    return said


def test_metrics_that_are_not_of_the_batch_are_refused(ranks) -> None:
    for said in [*ranks(metrics_wrongly), metrics_wrongly()]:
        assert [s.split(",")[0].split(":")[0] for s in said] == [
            "gather_for_metrics() got a scalar",
            "gather_for_metrics() got shape (16",
            "gather_for_metrics() got 5 items",
            "gather_for_metrics() got a scalar",
            "gather_for_metrics() outside a loop over a prepared loader cannot know which samples are repeated",
        ]


def collectives() -> dict[str, Any]:
    with Accelerator(mixed_precision="no") as acc:
        r = acc.process_index
        flags = torch.tensor([r == 1, False])
        box = ["one", r] if r else [None, None]
        found = {
            "gather": acc.gather({"a": torch.tensor([r]), "b": [torch.full((1, 2), r)]}),
            "scalar": acc.gather(torch.tensor(float(r))),
            "bool": acc.gather(flags),
            "int16": acc.reduce(torch.tensor([r, 2], dtype=torch.int16)),
            "sum": acc.reduce(torch.tensor([1.0 + r])),
            "mean": acc.reduce(torch.tensor([1.0 + r]), "mean"),
            "mean of ints": acc.reduce(torch.tensor([1, 4 * r]), "mean"),
            "scaled": acc.reduce(torch.tensor([1.0 + r]), "sum", 0.5),
            "padded": acc.pad_across_processes(torch.ones(r + 1, 2), dim=0, pad_index=9),
            "in front": acc.pad_across_processes(torch.ones(r + 1), pad_first=True),
            "broadcast": easymp.broadcast({"x": torch.tensor([r])}, 1),
            "objects": easymp.gather_object([r, {"r": r}]),
            "object list": easymp.broadcast_object_list(box, 1),
            "weighted": float(acc.mean(float(r), 1 + 2 * r)),
            "share": list(share(acc, list(range(5)))),
            "padded share": list(share(acc, {"x": torch.arange(5)}, True)["x"].tolist()),
            "who": (acc.num_processes, acc.process_index, acc.is_main_process, acc.is_last_process),
            "type": acc.distributed_type,
        }
        acc.wait_for_everyone()
        if r == 1:
            acc.set_trigger()
        found["trigger"] = (acc.check_trigger(), acc.check_trigger())
        first = acc.on_main_process(lambda: "ran")()
        found["only"] = (first, acc.on_process(lambda: "ran", process_index=1)())
        return found


def share(acc: Accelerator, what: Any, pad: bool = False) -> Any:
    with acc.split_between_processes(what, apply_padding=pad) as mine:
        return mine


def test_collectives(ranks) -> None:
    zero, one = ranks(collectives)
    for found in (zero, one):
        assert found["gather"]["a"].tolist() == [0, 1]
        assert found["gather"]["b"][0].tolist() == [[0, 0], [1, 1]]
        assert found["scalar"].tolist() == [0.0, 1.0]
        assert found["bool"].tolist() == [False, False, True, False]
        assert found["int16"].tolist() == [1, 4]
        assert found["int16"].dtype == torch.int16
        assert (found["sum"].item(), found["mean"].item(), found["scaled"].item()) == (3.0, 1.5, 1.5)
        assert found["mean of ints"].tolist() == [1, 2]
        assert found["padded"].shape == (2, 2)
        assert found["broadcast"]["x"].tolist() == [1]
        assert found["objects"] == [0, {"r": 0}, 1, {"r": 1}]
        assert found["object list"] == ["one", 1]
        assert found["weighted"] == 0.75
        assert found["type"] == DistributedType.MULTI_CPU == "MULTI_CPU"
        assert found["trigger"] == (True, False)
    assert zero["padded"].tolist() == [[1, 1], [9, 9]]
    assert zero["in front"].tolist() == [0, 1]
    assert (zero["share"], one["share"]) == ([0, 1, 2], [3, 4])
    assert (zero["padded share"], one["padded share"]) == ([0, 1, 2], [3, 4, 4])
    assert (zero["who"], one["who"]) == ((2, 0, True, False), (2, 1, False, True))
    assert (zero["only"], one["only"]) == (("ran", None), (None, "ran"))
