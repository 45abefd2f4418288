"""O1's lists: which functions run in fp16, which in fp32, and which in the widest type they are given.

The lists are those of Apex: https://github.com/NVIDIA/apex/tree/master/apex/amp/lists. torch's autocast follows the same ones on GPUs,
but another one on CPUs (softmax, sums and powers stay half there), so O1 on a CPU is a function mode with these lists. Only
fp32, bf16 and fp16 tensors are cast; float64 and integers stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..errors import StepError
from ..options import AutocastKwargs
from .mixed import as_asked

NOBODYS = "ipu"
CASTABLE = (torch.float32, torch.bfloat16, torch.float16)


class Cast(Enum):
    """What becomes of the floating-point arguments of a function."""

    HALF = "they become fp16"
    FLOAT = "they become fp32"
    WIDEST = "they become the widest type among them"
    REFUSED = "fp16 is an error"


NAMES: dict[Cast, str] = {
    Cast.HALF: """
        conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear prelu scaled_dot_product_attention
        matmul mm mv bmm addmm addmv addr baddbmm addbmm chain_matmul einsum __matmul__ __rmatmul__
        lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    """,
    Cast.FLOAT: """
        acos asin cosh sinh tan erfinv exp expm1 log log10 log1p log2 logsumexp reciprocal rsqrt pow __pow__ __rpow__ __rdiv__ __rtruediv__
        prod sum cumprod cumsum std var norm dist renorm cdist pdist
        softmax softmin log_softmax gumbel_softmax softplus
        layer_norm group_norm rms_norm local_response_norm normalize cosine_similarity pairwise_distance
        binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss gaussian_nll_loss hinge_embedding_loss huber_loss
        kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss nll_loss
        poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss triplet_margin_with_distance_loss
    """,
    Cast.WIDEST: """
        add sub mul div true_divide addcdiv addcmul atan2 bilinear cross dot tensordot grid_sample cat stack
    """,
    Cast.REFUSED: "binary_cross_entropy",
}


@cache
def cast_table() -> Mapping[Callable[..., Any], Cast]:
    """Function → what happens to its arguments, by all names under which torch calls it."""
    homes = (torch, functional, Tensor)
    return {
        getattr(home, name): cast
        for cast, names in NAMES.items()
        for name in names.split()
        for home in homes
        if hasattr(home, name)
    }


class ListedCasts(TorchFunctionMode):
    """Inside, torch's functions cast their arguments by `table`. Enters and leaves as often as wanted, on its own thread."""

    def __init__(
        self, table: Mapping[Callable[..., Any], Cast] | None = None, half: torch.dtype = torch.float16
    ) -> None:
        super().__init__()
        self.table = cast_table() if table is None else table
        self.half = half
        self._before: list[bool] = []

    def __enter__(self) -> ListedCasts:
        # torch's RNN layers compare the types of input and weights, unless they see autocast somewhere: for a device that nobody has.
        self._before.append(torch.is_autocast_enabled(NOBODYS))
        torch.set_autocast_enabled(NOBODYS, True)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_autocast_enabled(NOBODYS, self._before.pop())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        cast = self.table.get(func)
        if cast is None:
            if func is functional.multi_head_attention_forward:
                with self:  # torch leaves the mode while it calls this, and what is listed comes further in
                    return _attention()(*args, **kwargs)
            return func(*args, **kwargs)
        args, kwargs = as_listed(cast, func, args, kwargs, self.half)
        return func(*args, **kwargs)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, nothing is cast."""
        table, self.table = self.table, {}
        try:
            yield
        finally:
            self.table = table


def as_listed(
    cast: Cast, function: Callable[..., Any], args: Any, kwargs: Any, half: torch.dtype = torch.float16
) -> tuple[Any, Any]:
    """`args` and `kwargs`, as `cast` has them for `function`.

    Raises:
        StepError: half precision, where that is refused.
    """
    wanted = half if cast is Cast.HALF else torch.float32
    if cast is Cast.REFUSED:
        if half in {t.dtype for t in _floating((args, kwargs))}:
            raise StepError(
                f"{function.__name__} on {half} loses what lies close to 0 and 1: use binary_cross_entropy_with_logits on what goes "
                "into the sigmoid, or convert its inputs with .float()"
            )
        return args, kwargs
    if (
        cast is Cast.WIDEST and len({t.dtype for t in _floating((args, kwargs))}) < 2
    ):  # of any two unlike ones it is fp32
        return args, kwargs
    return _to(args, wanted), _to(kwargs, wanted)


@cache
def _attention() -> Callable[..., Any]:
    """torch's multi-head attention without its first lines, which would hand the call to the mode again and again."""
    whole = functional.multi_head_attention_forward
    found = FunctionType(
        whole.__code__,
        {**whole.__globals__, "has_torch_function": lambda _: False},
        whole.__name__,
        whole.__defaults__,
    )
    found.__kwdefaults__ = whole.__kwdefaults__
    return found


def _floating(arguments: Any) -> Iterator[Tensor]:
    if isinstance(arguments, Tensor):
        if arguments.dtype in CASTABLE:
            yield arguments
    elif isinstance(arguments, (tuple, list)):
        for item in arguments:
            yield from _floating(item)
    elif isinstance(arguments, dict):
        yield from _floating(list(arguments.values()))


def _to(arguments: Any, dtype: torch.dtype) -> Any:
    if isinstance(arguments, Tensor):
        return arguments.to(dtype) if arguments.dtype in CASTABLE else arguments
    if type(arguments) in (tuple, list):
        return type(arguments)(_to(item, dtype) for item in arguments)
    if isinstance(arguments, dict):
        return {key: _to(value, dtype) for key, value in arguments.items()}
    return arguments


class Listed(nn.Module):
    """Calls `module` under `ListedCasts`, and casts its outputs as autocast's are."""

    def __init__(self, module: nn.Module, options: AutocastKwargs) -> None:
        super().__init__()
        self.module = module
        self.options = options

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with ListedCasts():
            outputs = self.module(*args, **kwargs)
        return as_asked(outputs, self.options.output_dtype)
