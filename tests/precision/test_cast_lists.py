"""O1's lists on a CPU: the type of each kind of operation, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from easymp.errors import StepError
from easymp.precision.cast_lists import NAMES, Cast, ListedCasts, cast_table

FP16, FP32, BF16 = torch.float16, torch.float32, torch.bfloat16


def square(dtype: torch.dtype = FP32) -> Tensor:
    return torch.rand(4, 4, dtype=dtype) + 0.1


HALVES: dict[str, Any] = {
    "linear": lambda x: F.linear(x, square(), torch.zeros(4)),
    "Linear": lambda x: nn.Linear(4, 4)(x),
    "@": lambda x: x @ square(),
    "rmatmul": lambda x: square() @ x,
    "matmul": lambda x: torch.matmul(x, square()),
    "mm": lambda x: x.mm(square()),
    "mv": lambda x: x.mv(torch.ones(4)),
    "addmm": lambda x: torch.addmm(torch.zeros(4), x, square()),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, square()),
    "conv1d": lambda x: nn.Conv1d(4, 2, 3, padding=1)(x[None]),
    "conv2d": lambda x: nn.Conv2d(1, 2, 3)(x[None, None]),
    "conv_transpose2d": lambda x: nn.ConvTranspose2d(1, 2, 2)(x[None, None]),
    "prelu": lambda x: nn.PReLU()(x),
    "LSTM": lambda x: nn.LSTM(4, 3)(x)[0],
    "GRU": lambda x: nn.GRU(4, 3, num_layers=2)(x)[0],
    "RNN": lambda x: nn.RNN(4, 3, nonlinearity="relu")(x)[0],
    "LSTMCell": lambda x: nn.LSTMCell(4, 3)(x)[0],
    "GRUCell": lambda x: nn.GRUCell(4, 3)(x),
    "attention": lambda x: nn.MultiheadAttention(4, 2)(x[None], x[None], x[None])[0],
    "sdpa": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
}
FLOATS: dict[str, Any] = {
    "softmax": lambda x: F.softmax(x, -1),
    "torch.softmax": lambda x: torch.softmax(x, -1),
    "Softmax": lambda x: nn.Softmax(-1)(x),
    "method": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x: nn.LayerNorm(4)(x),
    "group_norm": lambda x: nn.GroupNorm(2, 4)(x[None]),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 3])),
    "mse_loss": lambda x: nn.MSELoss()(x, square()),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, square()),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, square()),
    "exp": lambda x: x.exp(),
    "log": lambda x: torch.log(x),
    "pow": lambda x: x.pow(2),
    "**": lambda x: x**2,
    "2**": lambda x: 2**x,
    "1/": lambda x: 1 / x,
    "sum": lambda x: x.sum(),
    "prod": lambda x: torch.prod(x),
    "cumsum": lambda x: x.cumsum(0),
    "std": lambda x: x.std(),
    "var": lambda x: x.var(0),
    "norm": lambda x: x.norm(),
    "torch.norm": lambda x: torch.norm(x),
    "cosine_similarity": lambda x: F.cosine_similarity(x, square()),
}
OWN: dict[str, Any] = {  # in no list: they keep the type they are given
    "relu": F.relu,
    "gelu": lambda x: nn.GELU()(x),
    "tanh": torch.tanh,
    "max_pool": lambda x: nn.MaxPool1d(2)(x),
    "transpose": lambda x: x.t(),
    "+1": lambda x: x + 1,
    "mean": lambda x: x.mean(),
    "dropout": lambda x: nn.Dropout(0.5)(x),
}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("given", [FP32, FP16, BF16])
def test_products_are_fp16(name: str, given: torch.dtype) -> None:
    x = square(given).requires_grad_()
    with ListedCasts():
        y = HALVES[name](x)
    assert y.dtype == FP16
    y.float().sum().backward()
    assert x.grad.dtype == given


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("given", [FP32, FP16])
def test_what_needs_range_is_fp32(name: str, given: torch.dtype) -> None:
    x = square(given).requires_grad_()
    with ListedCasts():
        y = FLOATS[name](x)
    assert y.dtype == FP32
    y.sum().backward()
    assert x.grad.dtype == given


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("given", [FP32, FP16])
def test_other_functions_keep_the_type(name: str, given: torch.dtype) -> None:
    with ListedCasts():
        assert OWN[name](square(given)).dtype == given


WIDEST: dict[str, Any] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: torch.mul(a, b),
    "/": lambda a, b: a / b,
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "atan2": torch.atan2,
    "cross": lambda a, b: torch.cross(a[:, :3], b[:, :3], dim=1),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack((a, b)),
    "bilinear": lambda a, b: F.bilinear(a, b, torch.ones(2, 4, 4, dtype=b.dtype)),
}


@pytest.mark.parametrize("name", WIDEST)
def test_several_tensors_take_the_widest_type(name: str) -> None:
    with ListedCasts():
        for a, b, wanted in ((FP16, FP16, FP16), (FP16, FP32, FP32), (FP32, FP16, FP32)):
            assert WIDEST[name](square(a), square(b)).dtype == wanted
        assert (square(FP16) + torch.ones(())).dtype == FP32  # torch's own rule gives fp16 here


def test_in_place_keeps_the_type_of_what_is_written_to() -> None:
    with ListedCasts():
        x = square(FP16)
        x += square()
        assert x.dtype == FP16


def test_integers_and_doubles_are_left_alone() -> None:
    with ListedCasts():
        assert torch.arange(3).sum().dtype == torch.int64
        assert (square().double() @ square().double()).dtype == torch.float64
        assert nn.Embedding(3, 2)(torch.tensor([1])).dtype == FP32


def test_binary_cross_entropy_on_half_is_refused() -> None:
    with ListedCasts():
        p, y = square(FP16) / 2, torch.ones(4, 4)
        for loss in (F.binary_cross_entropy, nn.BCELoss()):
            with pytest.raises(StepError, match="use binary_cross_entropy_with_logits"):
                loss(p, y)
            assert loss(p.float(), y).dtype == FP32


def test_it_nests_and_ends() -> None:
    mode = ListedCasts()
    with mode, mode:
        assert (square() @ square()).dtype == FP16
    assert (square() @ square()).dtype == FP32


def test_attention_casts_what_is_inside() -> None:
    attention = nn.MultiheadAttention(8, 2, dropout=0.0)
    x = torch.randn(3, 2, 8)
    plain, _ = attention(x, x, x)
    with ListedCasts():
        for need in (True, False):
            cast, _ = attention(x, x, x, need_weights=need)
            assert cast.dtype == FP16
            torch.testing.assert_close(cast.float(), plain, rtol=1e-2, atol=1e-3)


def test_numbers_stay_close() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5))
    x, y = torch.randn(6, 1, 4, 4), torch.tensor([0, 1, 2, 3, 4, 0])
    F.cross_entropy(model(x), y).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with ListedCasts():
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    for p, wanted in zip(model.parameters(), plain):
        assert p.grad.dtype == FP32
        torch.testing.assert_close(p.grad, wanted, rtol=0.05, atol=2e-3)


def test_every_name_is_torchs_and_in_one_list() -> None:
    names = [name for words in NAMES.values() for name in words.split()]
    assert len(names) == len(set(names))
    for name in names:
        assert any(hasattr(home, name) for home in (torch, F, Tensor)), name
    assert set(cast_table().values()) == set(Cast)


def test_another_table() -> None:
    with ListedCasts({**cast_table(), torch.relu: Cast.HALF}):
        assert torch.relu(square()).dtype == FP16
