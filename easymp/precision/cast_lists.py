"""Cast lists of O1: functions that run in fp16, in fp32, or in the widest dtype of their arguments.

Source: https://github.com/NVIDIA/apex/tree/master/apex/amp/lists. torch's autocast follows these lists on GPUs but not on CPUs, where
softmax, sums and powers stay in half precision. O1 on a CPU is therefore a function mode with these lists. It casts fp32, bf16 and fp16
tensors; float64 and integers stay.
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
from .policies import cast_outputs

UNUSED_DEVICE = "ipu"
CASTABLE = (torch.float32, torch.bfloat16, torch.float16)


class Cast(Enum):
    """How a function's floating-point arguments are cast."""

    HALF = "they become fp16"
    FLOAT = "they become fp32"
    WIDEST = "they become the widest type among them"
    FIRST = "they become the type of the first, which is written to"
    FLOAT_FIRST = "they become the type of the first, which is written to; fp16 there is an error"
    REFUSED = "fp16 is an error"


class CastError(StepError, NotImplementedError):
    """A function whose arguments O1 must not cast; Apex raises a NotImplementedError."""


NAMES: dict[Cast, str] = {
    Cast.HALF: """
        conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear prelu scaled_dot_product_attention
        matmul mm mv bmm addmm addmv addr baddbmm addbmm chain_matmul einsum __matmul__ __rmatmul__
        lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    """,
    Cast.FLOAT: """
        acos asin cosh sinh tan erfinv exp expm1 log log10 log1p log2 logsumexp reciprocal rsqrt
        pow __pow__ __ipow__ __rpow__ __rdiv__ __rtruediv__ cpu
        prod sum cumprod cumsum std var norm dist renorm cdist pdist
        softmax softmin log_softmax gumbel_softmax softplus interpolate grid_sample
        layer_norm group_norm rms_norm local_response_norm normalize cosine_similarity pairwise_distance
        binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss gaussian_nll_loss hinge_embedding_loss huber_loss
        kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss nll_loss
        poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss triplet_margin_with_distance_loss
    """,
    Cast.WIDEST: """
        add sub mul div true_divide addcdiv addcmul atan2 bilinear cross dot tensordot cat stack
        eq __eq__ ne __ne__ ge gt le lt equal
    """,
    Cast.REFUSED: "binary_cross_entropy",
}


@cache
def cast_table() -> Mapping[Callable[..., Any], Cast]:
    """Cast by function, for every name under which torch calls it, and for the function of the same name that writes in place."""
    table = {}
    for cast, names in NAMES.items():
        for home in (torch, functional, Tensor):
            for name in names.split():
                if hasattr(home, name):
                    table[getattr(home, name)] = cast
                if hasattr(home, f"{name}_"):
                    table[getattr(home, f"{name}_")] = Cast.FLOAT_FIRST if cast is Cast.FLOAT else Cast.FIRST
    return table


class ListedCasts(TorchFunctionMode):
    """Function mode in which torch's functions cast their arguments by `table`. Reentrant; works on the thread that enters it."""

    def __init__(
        self, table: Mapping[Callable[..., Any], Cast] | None = None, half: torch.dtype = torch.float16
    ) -> None:
        super().__init__()
        self.table = cast_table() if table is None else table
        self.half = half
        self._before: list[bool] = []

    def __enter__(self) -> ListedCasts:
        # RNN layers of torch compare dtypes unless autocast is on for some device: use one that does not exist.
        self._before.append(torch.is_autocast_enabled(UNUSED_DEVICE))
        torch.set_autocast_enabled(UNUSED_DEVICE, True)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_autocast_enabled(UNUSED_DEVICE, self._before.pop())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        cast = self.table.get(func)
        if cast is None:
            if func is functional.multi_head_attention_forward:
                with self:  # torch leaves the mode for this call, and the listed functions are inside it
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
    """Cast `args` and `kwargs` for `function`; CastError for half precision if the function refuses it."""
    if cast in (Cast.FIRST, Cast.FLOAT_FIRST):
        first = args[0].dtype if args and isinstance(args[0], Tensor) else None
        if first == half and cast is Cast.FLOAT_FIRST:
            raise CastError(
                f"{function.__name__} in place on {half} rounds each result to it: call {function.__name__.strip('_')} and use its "
                "result, or convert with .float()"
            )
        return (args[:1] + _to(args[1:], first), _to(kwargs, first)) if first in CASTABLE else (args, kwargs)
    if cast in (Cast.REFUSED, Cast.WIDEST):
        dtypes = {t.dtype for t in _floating((args, kwargs))}
        if cast is Cast.REFUSED and half in dtypes:
            raise CastError(
                f"{function.__name__} on {half} loses values close to 0 and 1: use binary_cross_entropy_with_logits on the inputs "
                "of the sigmoid, or convert its inputs with .float()"
            )
        if cast is Cast.REFUSED or len(dtypes) < 2:  # the widest of two different dtypes is fp32
            return args, kwargs
    wanted = half if cast is Cast.HALF else torch.float32
    return _to(args, wanted), _to(kwargs, wanted)


@cache
def _attention() -> Callable[..., Any]:
    """Multi-head attention of torch without its dispatch to the mode, which would recurse without end."""
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
    """Calls `module` under `ListedCasts` and casts its outputs to ``options.output_dtype``."""

    def __init__(self, module: nn.Module, options: AutocastKwargs) -> None:
        super().__init__()
        self.module, self.options = module, options

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with ListedCasts():
            outputs = self.module(*args, **kwargs)
        return cast_outputs(outputs, self.options.output_dtype)
