"""Cast lists of O1 on a CPU: dtypes of each kind of operation, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from easymp import Accelerator, StepError

FP16, FP32, BF16 = torch.float16, torch.float32, torch.bfloat16


@contextmanager
def o1() -> Iterator[None]:
    with Accelerator(mixed_precision="O1", cpu=True) as acc, acc.autocast():
        yield


def square(dtype: torch.dtype = FP32) -> Tensor:
    return torch.rand(4, 4, dtype=dtype) + 0.1


HALVES: dict[str, Any] = {
    "linear": lambda x: F.linear(x, square(), torch.zeros(4)),
    "@": lambda x: x @ square(),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "conv2d": lambda x: nn.Conv2d(1, 2, 3)(x[None, None]),
    "prelu": lambda x: nn.PReLU()(x),
    "LSTM": lambda x: nn.LSTM(4, 3)(x)[0],
    "GRU": lambda x: nn.GRU(4, 3, num_layers=2)(x)[0],
    "attention, no weights": lambda x: nn.MultiheadAttention(4, 2)(x[None], x[None], x[None], need_weights=False)[0],
    "attention": lambda x: nn.MultiheadAttention(4, 2)(x[None], x[None], x[None])[0],
    "sdpa": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
}
FLOATS: dict[str, Any] = {
    "softmax": lambda x: F.softmax(x, -1),
    "layer_norm": lambda x: nn.LayerNorm(4)(x),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 3])),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, square()),
    "**": lambda x: x**2,
    "2**": lambda x: 2**x,
    "1/": lambda x: 1 / x,
    "sum": lambda x: x.sum(),
    "norm": lambda x: x.norm(),
    "interpolate": lambda x: F.interpolate(x[None], 2),
    "cpu": lambda x: x.cpu(),
    "**=": lambda x: x.__ipow__(2) if x.dtype == FP16 else x.clone().__ipow__(2),
}
OWN: dict[str, Any] = {  # in no list: they keep the type they are given
    "relu": F.relu,
    "tanh": torch.tanh,
    "+1": lambda x: x + 1,
    "mean": lambda x: x.mean(),
    "dropout": lambda x: nn.Dropout(0.5)(x),
}


@pytest.mark.parametrize("input_dtype", [FP32, FP16, BF16])
def test_products_are_fp16_functions_that_need_range_fp32_and_others_as_given(input_dtype: torch.dtype) -> None:
    for functions, output_dtype in ((HALVES, FP16), (FLOATS, FP32), (OWN, input_dtype)):
        for name, function in functions.items() if input_dtype != BF16 or output_dtype == FP16 else ():
            x = square(input_dtype).requires_grad_()
            with o1():
                y = function(x)
            assert y.dtype == output_dtype, name
            y.float().sum().backward()
            assert x.grad.dtype == input_dtype, name


WIDEST: dict[str, Any] = {
    "+": lambda a, b: a + b,
    "*": lambda a, b: torch.mul(a, b),
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "cross": lambda a, b: torch.cross(a[:, :3], b[:, :3], dim=1),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "vdot": lambda a, b: torch.vdot(a[0], b[0]),
    "cat": lambda a, b: torch.cat([a, b]),
    "bilinear": lambda a, b: F.bilinear(a, b, torch.ones(2, 4, 4, dtype=b.dtype)),
}


def test_several_tensors_take_the_widest_dtype() -> None:
    with o1():
        for name, function in WIDEST.items():
            for a, b, expected in ((FP16, FP16, FP16), (FP16, FP32, FP32), (FP32, FP16, FP32)):
                assert function(square(a), square(b)).dtype == expected, name
        assert (square(FP16) + torch.ones(())).dtype == FP32  # torch's own rule gives fp16 here
        x = square(FP16)
        x += square()
        assert x.dtype == FP16  # in place the type stays


def test_functions_that_write_in_place_keep_the_type() -> None:
    with o1():
        x, y = square(FP16), square()
        for result in (x.add_(y), x.mul_(y), x.addmm_(y, y), y.atan2_(x), y.exp_(), y.pow_(x)):
            assert result.dtype == (FP16 if result is x else FP32)
        for name in ("exp_", "log_", "reciprocal_", "cumsum_"):
            with pytest.raises(NotImplementedError, match=rf"{name} in place on torch\.float16"):
                getattr(x, name)(*[0] * (name == "cumsum_"))
        assert torch.equal(x, x.float()) and bool((torch.ones(2, dtype=FP16) > torch.tensor(1 - 1e-5)).all())


def test_integers_and_doubles_are_left_alone() -> None:
    with o1():
        assert torch.arange(3).sum().dtype == torch.int64
        assert (square().double() @ square().double()).dtype == torch.float64
        assert nn.Embedding(3, 2)(torch.tensor([1])).dtype == FP32


def test_binary_cross_entropy_on_half_is_refused() -> None:
    with o1():
        p, y = square(FP16) / 2, torch.ones(4, 4)
        for loss in (F.binary_cross_entropy, nn.BCELoss()):
            with pytest.raises(StepError, match="use binary_cross_entropy_with_logits"):
                loss(p, y)
            assert loss(p.float(), y).dtype == FP32
