"""A checkpoint keeps all that a model's `state_dict` shows, in any memory, under the names of the plain module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp import Accelerator, CheckpointError, checkpoint


class Odd(nn.Module):
    """Tensors of all kinds."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 2), float(value)))
        self.wide = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last) * value)
        self.turned = nn.Parameter((torch.randn(5, 4) * value).t())
        self.scalar = nn.Parameter(torch.tensor(float(value)))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64) * value)
        self.frozen = nn.Parameter(torch.full((4,), value), requires_grad=False)
        self.register_buffer("count", torch.tensor(value))
        self.register_buffer("mask", torch.tensor([bool(value % 2), True]))
        self.register_buffer("one", torch.tensor([float(value)]).expand(6))
        self.register_buffer("exact", torch.tensor([value / 3], dtype=torch.float64))
        self.register_buffer("small", torch.tensor([value], dtype=torch.uint8))
        self.register_buffer("scratch", torch.tensor(value), persistent=False)
        self.memory = {"seen": [value], "mean": torch.tensor([value / 7])}

    def get_extra_state(self) -> Any:
        return self.memory

    def set_extra_state(self, state: Any) -> None:
        self.memory = state

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def round_trip(make, folder, **settings):
    """A model that was saved, and another one that took its place."""
    with Accelerator(cpu=True, **settings) as acc:
        before = acc.prepare(make(3))
        acc.save_state(folder)
    with Accelerator(cpu=True, **settings) as acc:
        after = make(5)
        acc.prepare(after)
        acc.load_state(folder)
    return before, after


def test_tensors_of_all_kinds_come_back(tmp_path: Path) -> None:
    before, after = round_trip(Odd, tmp_path / "a")
    strides = {name: t.stride() for name, t in Odd(5).state_dict().items() if isinstance(t, Tensor)}
    for name, value in before.state_dict().items():
        there = after.state_dict()[name]
        if isinstance(value, Tensor):
            assert there.dtype == value.dtype and torch.equal(there, value), name
            assert there.stride() == strides[name], name
    assert after.memory == {"seen": [3], "mean": torch.tensor([3 / 7])}
    assert after.scratch.item() == 5  # not in the state_dict


def test_tied_tensors_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    def make(value: int) -> nn.Module:
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
        nn.init.constant_(model[0].weight, value)
        model[1].weight = model[0].weight
        model[2].running_mean.fill_(value)
        model[3].running_mean = model[2].running_mean
        return model

    before, after = round_trip(make, tmp_path / "a")
    assert after[1].weight is after[0].weight and torch.equal(after[0].weight, before[0].weight)
    assert after[3].running_mean is after[2].running_mean and after[2].running_mean.tolist() == [3, 3]
    assert checkpoint.inspect(tmp_path / "a").aliases == {
        "model/1.weight": "model/0.weight",
        "model/3.running_mean": "model/2.running_mean",
    }


def test_tied_tensors_may_be_untied_and_not_the_other_way_round(tmp_path: Path) -> None:
    def prepared(acc: Accelerator, tied: bool) -> Any:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        if tied:
            model[1].weight = model[0].weight
        return acc.prepare(model)

    for tied in (True, False):
        with Accelerator(cpu=True) as acc:
            saved = prepared(acc, tied)[0].weight
            acc.save_state(tmp_path / str(tied))
        with Accelerator(cpu=True) as acc:
            model = prepared(acc, not tied)
            if tied:
                acc.load_state(tmp_path / "True")
                assert all(torch.equal(layer.weight, saved) for layer in model)
                continue
            with pytest.raises(CheckpointError, match=r"1\.weight and 0\.weight are one tensor here"):
                acc.load_state(tmp_path / "False")


def test_names_are_those_of_the_plain_module(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def plain() -> Any:
        return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))

    def wrapped() -> Any:
        model = plain()
        model[0] = checkpoint_wrapper(model[0])
        model[1] = torch.compile(model[1], backend="eager")
        return torch.compile(model, backend="eager")

    def moments(make: Any, folder: Path, load: bool) -> list[Tensor]:
        with Accelerator(cpu=True) as acc:
            model = make()
            model, optimizer = acc.prepare(model, torch.optim.Adam(model.parameters()))
            if load:
                acc.load_state(folder)
            else:
                for parameter in model.parameters():
                    parameter.grad = torch.randn_like(parameter)
                optimizer.step()
                acc.save_state(folder)
            return [state["exp_avg"] for state in optimizer.state.values()]

    for first, then in ((wrapped, plain), (plain, wrapped)):
        folder = tmp_path / first.__name__
        before, after = moments(first, folder, False), moments(then, folder, True)
        assert all(map(torch.equal, before, after))
        names = [t.name for t in checkpoint.inspect(folder).tensors if t.name.startswith("model")]
        assert sorted(names) == ["model/0.bias", "model/0.weight", "model/1.bias", "model/1.weight"]


def empty_shards(folder: Path) -> list[tuple[int, ...]]:
    """fsdp with parameters that have no rows, or fewer than ranks."""
    shapes = []
    for value in (3, 5):
        with Accelerator(strategy="fsdp", cpu=True, timeout=50) as acc:
            model: Any = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2))
            model.nothing = nn.Parameter(torch.empty(0, 4))
            nn.init.constant_(model[0].weight, value)
            model = acc.prepare(model)
            if value == 3:
                acc.save_state(folder)
            else:
                acc.load_state(folder)
                assert model[0].weight.full_tensor().tolist() == [[3, 3]]
                shapes = [tuple(p.shape) for p in model.parameters()]
    return shapes


def test_empty_shards_and_empty_parameters_stay(ranks: Any, tmp_path: Path) -> None:
    assert (0, 4) in ranks(empty_shards, tmp_path / "a", processes=2)[0]
    shapes = {t.name: t.shape for t in checkpoint.inspect(tmp_path / "a").tensors}
    assert shapes["model/nothing"] == (0, 4)
