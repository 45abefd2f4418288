"""What fp32, tf32, bf16, fp16 and the levels O0 to O3 do to a model.

Types inside, types outside, and that each trains.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import make_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from easymp import Accelerator, AutocastKwargs, BatchError, Settings

from ..strategies.models import Of

FP16, FP32 = torch.float16, torch.float32
Pair = namedtuple("Pair", "logits extra")
Record = make_dataclass("Record", ["logits"])


def tiny(shape: Any = lambda y: y) -> nn.Module:
    """Returns what `shape` makes of a linear layer's output."""
    return Of(lambda m, x: shape(m.layer(x)), layer=nn.Linear(4, 3))


def prepared(model: nn.Module, precision: str, **options: Any) -> nn.Module:
    with Accelerator(
        mixed_precision=precision, cpu=True, settings=Settings(autocast_options=AutocastKwargs(**options))
    ) as acc:
        return acc.prepare(model)


def outputs(precision: str, shape: Any = lambda y: y, **options: Any) -> Any:
    return prepared(tiny(shape), precision, **options)(torch.randn(2, 4))


@pytest.mark.parametrize(("precision", "compute"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_products_run_in_half_and_come_out_in_fp32(precision: str, compute: torch.dtype) -> None:
    model = tiny()
    dtypes: list[torch.dtype] = []
    model.layer.register_forward_hook(lambda _, inputs, output: dtypes.append(output.dtype))
    y = prepared(model, precision)(torch.randn(2, 4))
    assert dtypes == [compute] and y.dtype == FP32
    y.sum().backward()
    assert {t.dtype for p in model.parameters() for t in (p, p.grad)} == {FP32}
    assert not torch.is_autocast_enabled("cpu")


CONTAINERS: dict[str, tuple[Any, Any]] = {  # of the output, and how its tensors are read
    "tuple": (lambda y: (y, [y]), lambda y: [y[0], y[1][0]]),
    "dict": (lambda y: {"y": y, "more": {"deep": (y,)}}, lambda y: [y["y"], y["more"]["deep"][0]]),
    "Pair": (lambda y: Pair(y, None), lambda y: [y.logits]),
    "max": (lambda y: y.max(dim=1), lambda y: [y.values]),
    "OrderedDict": (lambda y: OrderedDict(y=y), lambda y: [y["y"]]),
    "UserDict": (lambda y: UserDict(y=y), lambda y: [y["y"]]),
    "Record": (Record, lambda y: [y.logits]),
    "PackedSequence": (lambda y: pack_sequence([y, y[:1]]), lambda y: [y.data]),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_floating_output_is_fp32_in_its_own_container(name: str) -> None:
    wrap, tensors = CONTAINERS[name]
    result = outputs("bf16", wrap)
    assert type(result) is type(wrap(torch.randn(2, 3)))
    assert {y.dtype for y in tensors(result)} == {FP32}


def test_double_precision_is_not_thrown_away() -> None:
    """Autocast leaves float64 alone; so must what comes after it."""
    extras = (torch.tensor([1, 2]), "word", None, torch.ones(2, dtype=torch.complex64))
    y, z, *rest_of_outputs = outputs("bf16", lambda y: (y, y.double() + 1e-12, *extras))
    assert (y.dtype, z.dtype) == (FP32, torch.float64)
    assert all(a is b for a, b in zip(rest_of_outputs, extras))


def test_another_output_type_or_none() -> None:
    for precision in ("bf16", "fp16", "O1", "O2", "O3"):
        assert outputs(precision, output_dtype=torch.float64).dtype == torch.float64
        assert outputs(precision, output_dtype=None).dtype == (torch.bfloat16 if precision == "bf16" else FP16)
    result = object()
    assert outputs("bf16", lambda _: result, output_dtype=None) is result


class Odd(UserDict):
    def __init__(self, y: Tensor, must: int) -> None:
        self.data = {"y": y}


def test_outputs_that_cannot_be_rebuilt_are_said() -> None:
    with pytest.raises(BatchError, match=r"model's output cannot be given back in torch.float32"):
        outputs("bf16", lambda y: Odd(y, 1))
    assert type(outputs("bf16", output_dtype=None, shape=lambda y: Odd(y, 1))) is Odd


def test_the_weight_cache_can_be_turned_off() -> None:
    def casts(cache_enabled: bool) -> int:
        layer = nn.Linear(4, 4)
        model = prepared(nn.Sequential(layer, layer, layer), "bf16", cache_enabled=cache_enabled)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(torch.ones(1, 4))
        return sum(event.count for event in profile.key_averages() if event.key == "aten::_to_copy")

    assert casts(True) < casts(False)


def net() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
    return nn.Sequential(*first, nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))


# level: parameters, batch-norm, scaled, masters
TABLE = {
    "O0": (FP32, FP32, False, False),
    "O1": (FP32, FP32, True, False),
    "O2": (FP16, FP32, True, True),
    "O3": (FP16, FP16, False, False),
}


@pytest.mark.parametrize("level", TABLE)
def test_the_table_of_levels(level: str) -> None:
    param, norm, scaled, masters = TABLE[level]
    with Accelerator(mixed_precision=level, cpu=True) as acc:
        assert (acc.mixed_precision, acc.plan.precision.value) == (level, level)
        assert acc.scaler.enabled == scaled
        assert acc.scaler.get_scale() == (65536.0 if scaled else 1.0)
        model = net()
        parameters = list(model.parameters())
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert all(a is b for a, b in zip(parameters, model.parameters()))
        assert {p.dtype for m in (model[1], model[5]) for p in m.parameters()} == {param}
        norm_tensors = (*model[2].parameters(), *model[2].buffers())
        assert {t.dtype for t in norm_tensors if t.is_floating_point()} == {norm}
        assert model[2].num_batches_tracked.dtype == torch.int64
        stepped_dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}
        assert stepped_dtypes == ({FP32} if masters else {param, norm})
        dtypes: list[Any] = []
        model[5].register_forward_hook(lambda _, inputs, output: dtypes.append((inputs[0].dtype, output.dtype)))
        assert model(torch.randn(8, 12)).dtype == FP32
        assert dtypes[0][1] == (FP32 if level == "O0" else FP16)


def test_buffers_and_tied_parameters_are_cast_once() -> None:
    model = nn.Module()
    model.embed, model.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    model.head.weight = model.embed.weight
    model.register_buffer("table", torch.ones(3))
    model.register_buffer("index", torch.arange(3))
    model.frozen = nn.Linear(2, 2).requires_grad_(False)
    model.plain = nn.BatchNorm1d(4, affine=False)
    with Accelerator(mixed_precision="O2", cpu=True) as acc:
        acc.prepare(model)
    assert model.head.weight is model.embed.weight
    integers = ("index", "plain.num_batches_tracked")
    assert all(t.dtype == (torch.int64 if n in integers else FP16) for n, t in model.state_dict().items())


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_nested_inputs_are_cast_in(level: str) -> None:
    reads = Of(lambda m, batch, scale: (batch["x"].dtype, batch["n"].dtype, scale.dtype))
    batch = {"x": torch.ones(2), "n": torch.arange(2)}
    with Accelerator(mixed_precision=level, cpu=True) as acc:
        dtypes = acc.prepare(reads)(batch, scale=torch.ones((), dtype=torch.float64))
    assert dtypes == (FP16, torch.int64, FP16)


@pytest.mark.parametrize(("level", "product"), [("O0", FP32), ("O1", FP16), ("O2", FP32), ("O3", FP32)])
def test_autocast_outside_of_the_model(level: str, product: torch.dtype) -> None:
    with Accelerator(mixed_precision=level, cpu=True) as acc:
        with acc.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == product
        with acc.autocast(AutocastKwargs(enabled=False)):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == FP32
