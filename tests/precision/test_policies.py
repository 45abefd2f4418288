"""What fp32, tf32, bf16 and fp16 do to a model: types inside, types outside, and nothing to the parameters."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from easymp import Accelerator, AutocastKwargs, BatchError

from ..strategies.models import Of

HALF = [("bf16", torch.bfloat16), ("fp16", torch.float16)]
Pair = namedtuple("Pair", "logits extra")


@dataclass
class Record:
    logits: torch.Tensor


def tiny(shape: Any = lambda y: y) -> nn.Module:
    """Returns what `shape` makes of a linear layer's output."""
    return Of(lambda m, x: shape(m.layer(x)), layer=nn.Linear(4, 3))


def prepared(model: nn.Module, precision: str, **options: Any) -> nn.Module:
    with Accelerator(mixed_precision=precision, cpu=True, kwargs_handlers=[AutocastKwargs(**options)]) as acc:
        return acc.prepare(model)


def outputs(precision: str, shape: Any = lambda y: y, **options: Any) -> Any:
    return prepared(tiny(shape), precision, **options)(torch.randn(2, 4))


@pytest.mark.parametrize(("precision", "compute"), HALF)
def test_products_run_in_half_and_come_out_in_fp32(precision: str, compute: torch.dtype) -> None:
    model = tiny()
    seen: list[torch.dtype] = []
    model.layer.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    y = prepared(model, precision)(torch.randn(2, 4))
    assert seen == [compute]
    assert y.dtype == torch.float32
    y.sum().backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


def test_every_floating_output_is_fp32_in_its_own_container() -> None:
    precision = "bf16"
    a, [b] = outputs(precision, lambda y: (y, [y]))
    assert (a.dtype, b.dtype) == (torch.float32, torch.float32)
    both = outputs(precision, lambda y: {"logits": y, "more": {"deep": (y,)}})
    assert both["logits"].dtype == both["more"]["deep"][0].dtype == torch.float32
    pair = outputs(precision, lambda y: Pair(y, None))
    assert type(pair) is Pair
    assert (pair.logits.dtype, pair.extra) == (torch.float32, None)
    best = outputs(precision, lambda y: y.max(dim=1))
    assert (best.values.dtype, best.indices.dtype) == (torch.float32, torch.int64)
    for kind in (OrderedDict, UserDict):
        kept = outputs(precision, lambda y, kind=kind: kind(y=y))
        assert type(kept) is kind
        assert kept["y"].dtype == torch.float32
    record = outputs(precision, Record)
    assert (type(record), record.logits.dtype) == (Record, torch.float32)
    packed = outputs("bf16", lambda y: pack_sequence([y, y[:1]]))
    assert type(packed) is PackedSequence
    assert packed.data.dtype == torch.float32
    assert packed.batch_sizes.tolist() == [2, 1]


def test_double_precision_is_not_thrown_away() -> None:
    """Autocast leaves float64 alone; so must what comes after it."""
    extras = (torch.tensor([1, 2]), "word", None, torch.ones(2, dtype=torch.complex64))
    y, z, *rest = outputs("bf16", lambda y: (y, y.double() + 1e-12, *extras))
    assert (y.dtype, z.dtype) == (torch.float32, torch.float64)
    assert all(a is b for a, b in zip(rest, extras))


def test_another_output_type_or_none() -> None:
    assert outputs("bf16", output_dtype=None).dtype == torch.bfloat16
    assert outputs("bf16", output_dtype=torch.bfloat16).dtype == torch.bfloat16
    assert outputs("fp16", output_dtype=torch.bfloat16).dtype == torch.bfloat16
    shown = object()
    assert outputs("bf16", lambda _: shown, output_dtype=None) is shown


def test_outputs_that_cannot_be_rebuilt_are_said() -> None:
    class Odd(Mapping):
        def __init__(self, y: Tensor, must: int) -> None:
            self.y = y

        def __getitem__(self, key: str) -> Tensor:
            return {"y": self.y}[key]

        def __iter__(self):
            return iter(["y"])

        def __len__(self) -> int:
            return 1

    with pytest.raises(BatchError, match=r"model's output cannot be given back in torch.float32"):
        outputs("bf16", lambda y: Odd(y, 1))
    assert type(outputs("bf16", output_dtype=None, shape=lambda y: Odd(y, 1))) is Odd


def test_the_weight_cache_can_be_turned_off() -> None:
    def casts(cache_enabled: bool) -> int:
        layer = nn.Linear(4, 4)
        called = prepared(nn.Sequential(layer, layer, layer), "bf16", cache_enabled=cache_enabled)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            called(torch.ones(1, 4))
        return sum(event.count for event in profile.key_averages() if event.key == "aten::_to_copy")

    assert casts(True) < casts(False)
