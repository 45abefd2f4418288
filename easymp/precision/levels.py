"""Apex's optimization levels O0 to O3, and Lightning Fabric's "bf16-true" and "fp16-true", low-precision weights.

|           | parameters            | products | step                                  | loss scale |
|-----------|-----------------------|----------|---------------------------------------|------------|
| O0        | fp32                  | fp32     | plain                                 | –          |
| O1        | fp32                  | fp16 by Apex's lists | plain                     | dynamic    |
| O2        | fp16, batch-norm fp32 | fp16     | fp32 masters                          | dynamic    |
| O3        | fp16                  | fp16     | plain                                 | –          |
| fp16-true | fp16, batch-norm fp32 | fp16     | fp32 masters                          | dynamic    |
| bf16-true | bf16, batch-norm fp32 | bf16     | fp32 masters, or stochastic rounding  | –          |

Source of the levels: https://nvidia.github.io/apex/amp.html#opt-levels. Outputs are fp32 unless
``AutocastKwargs.output_dtype`` is set.

torch's autocast follows Apex's lists on GPUs but not on CPUs, where softmax, sums and powers stay in half precision. So
O1 on a CPU is a function mode with these lists (https://github.com/NVIDIA/apex/tree/master/apex/amp/lists). float64 and
integers stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from functools import cache
from itertools import product
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..base.pytree import map_leaves
from ..errors import StepError
from ..options import AutocastKwargs
from ..protocols import SMALL_EPS, Conflict, Facts, Refusal
from .policies import BF16, FP16, FP32, Autocast, cast_leaf, cast_outputs

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
        conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear prelu
        scaled_dot_product_attention matmul mm mv bmm addmm addmv addr baddbmm addbmm chain_matmul einsum
        __matmul__ __rmatmul__
        lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    """,
    Cast.FLOAT: """
        acos asin cosh sinh tan erfinv exp expm1 log log10 log1p log2 logsumexp reciprocal rsqrt
        pow __pow__ __ipow__ __rpow__ __rdiv__ __rtruediv__ cpu
        prod sum cumprod cumsum std var norm dist renorm cdist pdist
        softmax softmin log_softmax gumbel_softmax softplus interpolate grid_sample
        layer_norm group_norm rms_norm local_response_norm normalize cosine_similarity pairwise_distance
        binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss gaussian_nll_loss
        hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss
        multilabel_margin_loss multilabel_soft_margin_loss nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss
        triplet_margin_loss triplet_margin_with_distance_loss
    """,
    Cast.WIDEST: """
        add sub mul div true_divide addcdiv addcmul atan2 bilinear cross dot vdot tensordot cat stack
        eq __eq__ ne __ne__ ge gt le lt equal
    """,
    Cast.REFUSED: "binary_cross_entropy",
}


@cache
def cast_table() -> Mapping[Callable[..., Any], Cast]:
    """Cast by function, for every name under which torch calls it, and for functions that write in place."""
    table = {}
    for cast, names in NAMES.items():
        for namespace, name in product((torch, functional, Tensor), names.split()):
            if hasattr(namespace, name):
                table[getattr(namespace, name)] = cast
            if hasattr(namespace, f"{name}_"):
                table[getattr(namespace, f"{name}_")] = Cast.FLOAT_FIRST if cast is Cast.FLOAT else Cast.FIRST
    return table


class ListedCasts(TorchFunctionMode):
    """Function mode in which torch's functions cast their arguments by `table`, on the thread that enters it."""

    def __init__(self, table: Mapping[Callable[..., Any], Cast] | None = None) -> None:
        super().__init__()
        self.table = cast_table() if table is None else table
        self._before: list[bool] = []

    def __enter__(self) -> ListedCasts:
        # RNN layers of torch compare dtypes unless autocast is on for some device: use one that does not exist.
        self._before.append(torch.is_autocast_enabled(UNUSED_DEVICE))
        torch.set_autocast_enabled(UNUSED_DEVICE, True)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_autocast_enabled(UNUSED_DEVICE, self._before.pop())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        cast = self.table.get(func)
        if cast is None:
            if func is functional.multi_head_attention_forward:
                with self:  # torch leaves the mode for this call, and the listed functions are inside it
                    return _attention()(*args, **kwargs)
            return func(*args, **kwargs)
        args, kwargs = as_listed(cast, func, args, kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, nothing is cast."""
        table, self.table = self.table, {}
        try:
            yield
        finally:
            self.table = table


def as_listed(cast: Cast, function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast `args` and `kwargs` for `function`; CastError if the function refuses fp16."""
    if cast in (Cast.FIRST, Cast.FLOAT_FIRST):
        first = args[0].dtype if args and isinstance(args[0], Tensor) else None
        if first == torch.float16 and cast is Cast.FLOAT_FIRST:
            raise CastError(
                f"{function.__name__} in place on {first} rounds each result to it: call "
                f"{function.__name__.strip('_')}, or .float() before"
            )
        return (args[:1] + _to(args[1:], first), _to(kwargs, first)) if first in CASTABLE else (args, kwargs)
    if cast in (Cast.REFUSED, Cast.WIDEST):
        dtypes = {t.dtype for t in _floating((args, kwargs))}
        if cast is Cast.REFUSED and torch.float16 in dtypes:
            raise CastError(
                f"{function.__name__} on torch.float16 loses values close to 0 and 1: use "
                "binary_cross_entropy_with_logits on the inputs of the sigmoid, or convert its inputs with .float()"
            )
        if cast is Cast.REFUSED or len(dtypes) < 2:  # the widest of two different dtypes is fp32
            return args, kwargs
    dtype = torch.float16 if cast is Cast.HALF else torch.float32
    return _to(args, dtype), _to(kwargs, dtype)


@cache
def _attention() -> Callable[..., Any]:
    """torch's multi_head_attention_forward without its check for modes, by which our mode would call itself forever."""
    original = functional.multi_head_attention_forward
    names = {**original.__globals__, "has_torch_function": lambda _: False}
    function = FunctionType(original.__code__, names, original.__name__, original.__defaults__)
    function.__kwdefaults__ = original.__kwdefaults__
    return function


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


class Listed(Autocast):
    """Calls `module` under `ListedCasts` and casts its outputs to ``options.output_dtype``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with ListedCasts():
            outputs = self.module(*args, **kwargs)
        return cast_outputs(outputs, self.options.output_dtype)


# -- the levels --------------------------------------------------------------------------------------------------------


class O0(FP32):
    """fp32 under Apex's name."""

    name: ClassVar[str] = "O0"


class O1(FP16):
    """fp16 by Apex's lists: torch's autocast on accelerators, which has the same lists, and a function mode on CPUs."""

    name: ClassVar[str] = "O1"

    def forward(self, model: nn.Module, device: torch.device) -> nn.Module:
        if device.type == "cpu" and self.options.enabled:
            return Listed(model, device, self.compute, self.options)
        return super().forward(model, device)

    def casting(self, device: torch.device, options: AutocastKwargs) -> AbstractContextManager[Any]:
        if device.type == "cpu" and options.enabled:
            return ListedCasts()
        return super().casting(device, options)


class O2(FP32):
    """An fp16 model with fp32 masters: parameters and buffers become fp16 in place, but not in batch-norm layers."""

    name: ClassVar[str] = "O2"
    param: ClassVar[torch.dtype] = torch.float16
    compute: ClassVar[torch.dtype] = torch.float16
    reduce: ClassVar[torch.dtype] = torch.float16
    scaled: ClassVar[bool] = True
    masters: ClassVar[bool] = True
    tf32: ClassVar[bool] = True
    keeps_batch_norm: ClassVar[bool] = True

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        return FP16.refuse(facts)

    def convert(self, model: nn.Module) -> nn.Module:
        return cast_model(model, self.param, self.keeps_batch_norm)

    def forward(self, model: nn.Module, device: torch.device) -> nn.Module:
        return HalfModel(model, device, self.compute, self.options)


class FP16True(O2):
    """O2 under Fabric's name: fp16 weights, fp32 masters and a loss scale."""

    name: ClassVar[str] = "fp16-true"


class BF16True(O2):
    """A bf16 model. Gradients are bf16 and are reduced in bf16. No update is rounded to nearest.

    Optimizers step fp32 masters: 20 bytes a parameter with Adam. With `stochastic_rounding` those that step element by
    element, and LAMB and NovoGrad, have none, and keep bf16 states: 8 bytes.
    """

    name: ClassVar[str] = "bf16-true"
    param: ClassVar[torch.dtype] = torch.bfloat16
    compute: ClassVar[torch.dtype] = torch.bfloat16
    reduce: ClassVar[torch.dtype] = torch.bfloat16
    scaled: ClassVar[bool] = False
    masters: ClassVar[bool] = False

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        return BF16.refuse(facts)


class O3(O2):
    """An fp16 model without masters or loss scale. Gradients below 6e-8 are lost."""

    name: ClassVar[str] = "O3"
    scaled: ClassVar[bool] = False
    masters: ClassVar[bool] = False
    keeps_updates: ClassVar[bool] = False
    keeps_batch_norm: ClassVar[bool] = False
    conflicts: ClassVar[Sequence[Conflict]] = (
        Conflict(
            "O3",
            SMALL_EPS,
            "squares of gradients below 2.4e-4 are 0 in fp16, so that a step is up to a gradient divided by eps",
            "Pass eps=1e-4 to the optimizer, or use O2, which steps in fp32",
        ),
    )


class HalfModel(Autocast):
    """Calls `module` with floating-point inputs in `compute` and casts outputs to ``options.output_dtype``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.module(*cast(args, self.compute), **cast(kwargs, self.compute))
        return cast_outputs(outputs, self.options.output_dtype)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """`tree` with its floating-point tensors in `dtype`."""
    return map_leaves(lambda leaf: cast_leaf(leaf, dtype, double=True), tree)


def cast_model(model: nn.Module, dtype: torch.dtype, keep_batch_norm: bool) -> nn.Module:
    """Cast floating-point parameters and buffers in place; `keep_batch_norm` leaves affine batch-norm layers out."""
    for module in model.modules():
        if not (keep_batch_norm and isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine):
            module._apply(lambda t: cast(t, dtype), recurse=False)
    return model
