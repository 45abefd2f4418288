"""Nested batches."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from easymp import BatchError, concatenate, recursively_apply, send_to_device
from easymp.compat.accelerate.utils import slice_tensors

Point = namedtuple("Point", "x y")
ONE, TWO = torch.ones(1), torch.ones(2)


class Titled(list):
    pass


class Odd(tuple):
    def __new__(cls, a: Any, b: Any) -> Odd:
        return super().__new__(cls, (a, b))


class Graph:
    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def to(self, device: Any) -> Graph:  # no non_blocking
        return Graph(str(device))


@dataclass
class Output:
    logits: Any
    names: Any = ()
    count: int = field(default=0, init=False)


@dataclass(frozen=True, slots=True)
class Sealed:
    x: Any


@dataclass
class Items(OrderedDict):
    """A model's output in the style of transformers: fields that are items, but not to be made from a mapping."""

    loss: Any
    logits: Any = None

    def __post_init__(self) -> None:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        self.update({name: value for name, value in values.items() if value is not None})


@pytest.mark.parametrize(
    ("batch", "raised"),
    [
        (OrderedDict(b=1, a=2), OrderedDict(b=2, a=3)),
        (defaultdict(list, a=1), defaultdict(list, a=2)),
        (UserDict(a=1), UserDict(a=2)),
        (Titled([1, 2]), Titled([2, 3])),
        (Point(1, 2), Point(2, 3)),
        ({"a": (1, [Point(2, {"b": 3})])}, {"a": (2, [Point(3, {"b": 4})])}),
    ],
)
def test_containers_keep_their_type_keys_and_order(batch, raised):
    result = recursively_apply(lambda leaf: leaf + 1, batch, test_type=lambda leaf: isinstance(leaf, int))
    assert type(result) is type(batch) and result == raised
    assert getattr(result, "default_factory", None) is getattr(batch, "default_factory", None)


def test_everything_that_can_be_moved_is_moved():
    batch = {"x": TWO, "graph": Graph(), "pair": Point(ONE, "text"), "type": Graph}
    moved = send_to_device(batch, "meta", non_blocking=True)
    assert moved["x"].is_meta and moved["graph"].device == "meta" and moved["pair"].x.is_meta
    assert moved["pair"].y == "text" and moved["type"] is Graph and not batch["x"].is_meta
    assert dict(send_to_device(MappingProxyType({"a": ONE}), "meta"))["a"].is_meta
    with pytest.raises(BatchError, match="holds a Odd, which cannot be rebuilt"):
        send_to_device(Odd(1, 2), "cpu")


def test_skipped_keys_stay_at_every_depth_of_mappings():
    batch = OrderedDict(x=ONE, ids=ONE, more={"ids": ONE, "y": ONE})
    moved = send_to_device(batch, "meta", skip_keys="ids")
    assert type(moved) is OrderedDict and moved["x"].is_meta and moved["more"]["y"].is_meta
    assert moved["ids"] is moved["more"]["ids"] is ONE


def test_a_packed_sequence_moves_itself():
    packed = pack_sequence([torch.ones(3), TWO])
    moved = send_to_device({"text": packed}, "meta")["text"]
    assert type(moved) is PackedSequence and moved.data.is_meta and moved.batch_sizes.device.type == "cpu"
    assert send_to_device(packed, "cpu").batch_sizes.tolist() == [2, 2, 1]


def test_slices_and_concatenations():
    batch = {"x": torch.arange(6).reshape(3, 2), "scale": torch.tensor(2.0), "name": "n"}
    first, remaining = slice_tensors(batch, slice(0, 1)), slice_tensors(batch, slice(1, None))
    assert first["x"].tolist() == [[0, 1]] and remaining["scale"] == 2 and remaining["name"] == "n"
    points = [Point(torch.tensor([i]), [torch.tensor([-i])]) for i in (1, 2)]
    joined = concatenate(points)
    assert type(joined) is Point and joined.x.tolist() == [1, 2] and joined.y[0].tolist() == [-1, -2]
    assert concatenate([{"x": torch.ones(2, 1)}, {"x": torch.ones(2, 2)}], dim=1)["x"].shape == (2, 3)
    assert type(concatenate([Titled([ONE])] * 2)) is Titled
    joined = concatenate([Output(TWO), Output(torch.ones(3))])
    assert type(joined) is Output and joined.logits.shape == (5,)


def test_dataclasses_are_containers():
    batch = {"out": Output(TWO, ["a"]), "sealed": Sealed((TWO,))}
    batch["out"].count = 3
    moved = send_to_device(batch, "meta")
    output, sealed = moved["out"], moved["sealed"]
    assert type(output) is Output and output.logits.is_meta and (output.names, output.count) == (["a"], 3)
    assert type(sealed) is Sealed and sealed.x[0].is_meta and not batch["sealed"].x[0].is_meta
    moved = send_to_device(Items(torch.ones(()), TWO), "meta")
    assert type(moved) is Items and list(moved) == ["loss", "logits"]
    assert moved.loss is moved["loss"] and moved.loss.is_meta and moved.logits is moved["logits"]
    assert list(send_to_device(Items(torch.ones(())), "meta")) == ["loss"]
