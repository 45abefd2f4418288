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

from easymp.errors import BatchError
from easymp.options import AutocastKwargs
from easymp.precision import ALIASES, PRECISIONS
from easymp.precision.fp32 import FP32, TF32
from easymp.precision.mixed import BF16, FP16
from easymp.protocols import Precision

CPU = torch.device("cpu")
HALF = [(BF16, torch.bfloat16), (FP16, torch.float16)]
Pair = namedtuple("Pair", "logits extra")


@dataclass
class Record:
    logits: torch.Tensor


class Tiny(nn.Module):
    """Returns what `shape` makes of a linear layer's output."""

    def __init__(self, shape: Any = lambda y: y) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.shape = shape

    def forward(self, x: Tensor) -> Any:
        return self.shape(self.layer(x))


def outputs(policy: Precision, shape: Any = lambda y: y) -> Any:
    return policy.forward(policy.convert(Tiny(shape)), CPU)(torch.randn(2, 4))


@pytest.mark.parametrize(("kind", "compute"), HALF)
def test_products_run_in_half_and_come_out_in_fp32(kind: type[Precision], compute: torch.dtype) -> None:
    model = Tiny()
    seen: list[torch.dtype] = []
    model.layer.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    policy = kind()
    called = policy.forward(policy.convert(model), CPU)
    y = called(torch.randn(2, 4))
    assert seen == [compute]
    assert y.dtype == torch.float32
    y.sum().backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")
    assert (policy.param, policy.compute, policy.reduce, policy.output) == (
        torch.float32,
        compute,
        torch.float32,
        torch.float32,
    )


@pytest.mark.parametrize("policy", [FP32(), TF32(), BF16(AutocastKwargs(enabled=False))])
def test_a_precision_that_casts_nothing_is_the_model_itself(policy: Precision) -> None:
    model = Tiny()
    assert policy.convert(model) is model
    assert policy.forward(model, CPU) is model


@pytest.mark.parametrize(("kind", "compute"), HALF)
def test_every_floating_output_is_fp32_in_its_own_container(
    kind: type[Precision], compute: torch.dtype
) -> None:
    policy = kind()
    assert outputs(policy).dtype == torch.float32
    a, [b] = outputs(policy, lambda y: (y, [y]))
    assert (a.dtype, b.dtype) == (torch.float32, torch.float32)
    both = outputs(policy, lambda y: {"logits": y, "more": {"deep": (y,)}})
    assert both["logits"].dtype == both["more"]["deep"][0].dtype == torch.float32
    pair = outputs(policy, lambda y: Pair(y, None))
    assert type(pair) is Pair
    assert (pair.logits.dtype, pair.extra) == (torch.float32, None)
    best = outputs(policy, lambda y: y.max(dim=1))
    assert (best.values.dtype, best.indices.dtype) == (torch.float32, torch.int64)
    for kind_ in (OrderedDict, UserDict):
        kept = outputs(policy, lambda y, kind_=kind_: kind_(y=y))
        assert type(kept) is kind_
        assert kept["y"].dtype == torch.float32
    record = outputs(policy, Record)
    assert (type(record), record.logits.dtype) == (Record, torch.float32)


def test_packed_sequences() -> None:
    packed = outputs(BF16(), lambda y: pack_sequence([y, y[:1]]))
    assert type(packed) is PackedSequence
    assert packed.data.dtype == torch.float32
    assert packed.batch_sizes.tolist() == [2, 1]


def test_what_is_no_half_stays_itself() -> None:
    extras = (
        torch.tensor([1, 2]),
        torch.tensor(True),
        "word",
        3,
        2.5,
        None,
        torch.ones(2, dtype=torch.complex64),
    )
    given = outputs(BF16(), lambda y: (y, *extras))[1:]
    assert all(a is b for a, b in zip(given, extras))


def test_double_precision_is_not_thrown_away() -> None:
    """Autocast leaves float64 alone; so must what comes after it."""
    y, z = outputs(BF16(), lambda y: (y, y.double() + 1e-12))
    assert (y.dtype, z.dtype) == (torch.float32, torch.float64)


def test_another_output_type_or_none() -> None:
    assert outputs(BF16(AutocastKwargs(output_dtype=None))).dtype == torch.bfloat16
    assert outputs(BF16(AutocastKwargs(output_dtype=torch.bfloat16))).dtype == torch.bfloat16
    assert outputs(FP16(AutocastKwargs(output_dtype=torch.bfloat16))).dtype == torch.bfloat16
    policy = BF16(AutocastKwargs(output_dtype=None))
    assert policy.output is None
    shown = object()
    assert outputs(policy, lambda _: shown) is shown


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

    with pytest.raises(
        BatchError, match=r"model's output cannot be given back in torch.float32.*output_dtype=None"
    ):
        outputs(BF16(), lambda y: Odd(y, 1))
    assert type(outputs(BF16(AutocastKwargs(output_dtype=None)), lambda y: Odd(y, 1))) is Odd


def test_gradients_through_the_output_cast() -> None:
    torch.manual_seed(0)
    model, x = Tiny(), torch.randn(8, 4)
    (BF16().forward(model, CPU)(x) ** 2).mean().backward()
    cast = model.layer.weight.grad.clone()
    model.zero_grad()
    (model(x) ** 2).mean().backward()
    assert not torch.equal(cast, model.layer.weight.grad)
    torch.testing.assert_close(cast, model.layer.weight.grad, rtol=0.05, atol=0.01)


def test_the_weight_cache_can_be_turned_off() -> None:
    def casts(cache_enabled: bool) -> int:
        layer = nn.Linear(4, 4)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            BF16(AutocastKwargs(cache_enabled=cache_enabled)).forward(
                nn.Sequential(layer, layer, layer), CPU
            )(torch.ones(1, 4))
        return sum(event.count for event in profile.key_averages() if event.key == "aten::_to_copy")

    assert casts(True) < casts(False)


def test_training_leaves_parameters_in_fp32() -> None:
    torch.manual_seed(0)
    model = Tiny()
    called = FP16().forward(FP16().convert(model), CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        called(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    assert {p.dtype for p in model.state_dict().values()} == {torch.float32}


def test_the_registry() -> None:
    assert {name: kind.name for name, kind in PRECISIONS.items()} == {name: name for name in PRECISIONS}
    assert set(ALIASES.values()) <= set(PRECISIONS)
    assert {name for name, kind in PRECISIONS.items() if kind().scaled} >= {"fp16", "O1", "O2", "fp16-true"}
    assert {name for name, kind in PRECISIONS.items() if kind.masters} >= {"O2", "fp16-true"}
    assert {name for name, kind in PRECISIONS.items() if kind.raises} >= {"bf16", "fp16", "fp8", "O1"}
    assert {name for name, kind in PRECISIONS.items() if not kind.keeps_updates} >= {"O3"}
    assert {name for name, kind in PRECISIONS.items() if kind.swaps} >= {"fp8"}
