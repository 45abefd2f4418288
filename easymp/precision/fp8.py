"""fp8: matrix products of linear layers in 8 bits, the rest as under bf16.

Inputs and weights are rounded to e4m3 (3 bits of mantissa, up to 448), gradients to e5m2 (2 bits, up to 57344), as in "FP8 Formats for
Deep Learning" (Micikevicius et al., arXiv:2209.05433). Scaling is dynamic and tensorwise: each tensor is divided by one scale that maps
its largest element to the largest number of the format, and ``torch._scaled_mm`` multiplies the product by both scales. Parameters and
their gradients stay fp32, so optimizers and checkpoints do not change.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..errors import PrepareError
from ..logging import get_logger
from ..protocols import Facts, Refusal
from .policies import BF16

logger = get_logger(__name__)

MULTIPLE = 16  # torch._scaled_mm needs inner and last dimensions that are multiples of 16
FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


class FP8(BF16):
    """bf16 autocast with `Float8Linear` in place of each `nn.Linear` with two sizes that are multiples of 16.

    Such a layer changes its class in place. Layers of other classes stay, also subclasses of `nn.Linear`.
    """

    name: ClassVar[str] = "fp8"
    swaps: ClassVar[bool] = True

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        needs = "fp8 needs the fp8 Tensor Cores of an NVIDIA GPU of sm_89 (Ada, Hopper) or newer"
        without = [d for d in facts.hardware.devices if not d.fp8 or d.capability is None]
        if facts.device == "cpu":
            here = "training runs on the CPU"
        elif without:
            here = f"this device is {without[0].name} ({without[0].architecture or without[0].kind})"
        else:
            return None
        return Refusal(f"{needs}, and {here}", "use bf16, fp32 or auto")

    def convert(self, model: nn.Module) -> nn.Module:
        """Swap layers, see the class; PrepareError if the model has none to swap."""
        layers = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
        fit = {
            name: layer for name, layer in layers.items() if not any(n % MULTIPLE for n in layer.weight.shape)
        }
        already = any(type(layer) is Float8Linear for layer in model.modules())  # by an earlier run
        if not fit and not already:
            raise PrepareError(
                f"mixed_precision='fp8' needs a plain nn.Linear whose in_features and out_features are multiples of {MULTIPLE}, and "
                f"none of the {len(layers)} in this {type(model).__name__} has such sizes. Use mixed_precision='bf16', or other sizes"
            )
        for layer in fit.values():
            layer.__class__ = Float8Linear
        left = ", ".join(sorted(layers.keys() - fit.keys()))
        words = "fp8 by torch._scaled_mm in %d of %d linear layers%s"
        logger.info(words, len(fit), len(layers), f"; in bf16: {left}" if left else "")
        return model


class Float8Linear(nn.Linear):
    """`nn.Linear` with its product in forward and two products in backward in fp8. Inputs have shape (..., in_features)."""

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        out = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        product: Tensor = _Product.apply(input.reshape(-1, self.in_features), self.weight, out)  # type: ignore[no-untyped-call]
        product = product.view(*input.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias.to(out)


class _Product(torch.autograd.Function):
    """``input @ weight.T``: (rows, in) and (out, in) to (rows, out)."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, out: torch.dtype) -> Tensor:
        x, x_scale = rounded(input, FORWARD)
        # Save the weight and not its rounded copy: the weight exists anyway, or is gathered again.
        ctx.save_for_backward(x, x_scale, weight)
        ctx.input_dtype = input.dtype
        w, w_scale = rounded(weight, FORWARD)
        return _multiply(x, w.t(), x_scale, w_scale, out, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, weight = ctx.saved_tensors
        g, g_scale = rounded(grad, BACKWARD)
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            w, w_scale = rounded(weight, FORWARD)
            of_input = _multiply(g, _columns(w), g_scale, w_scale, grad.dtype).to(ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            g, x = _padded(g), _padded(x)
            product = _multiply(g.t().contiguous(), _columns(x), g_scale, x_scale, grad.dtype)
            of_weight = product.to(weight.dtype)
        return of_input, of_weight, None


def _padded(matrix: Tensor) -> Tensor:
    """`matrix` with rows of zeros, which add nothing to a product that sums over rows, up to a multiple of 16."""
    more = -matrix.shape[0] % MULTIPLE
    if not more:
        return matrix
    bytes_ = nn.functional.pad(matrix.view(torch.uint8), (0, 0, 0, more))  # zero has no bits set
    return bytes_.view(matrix.dtype)


def rounded(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`tensor` in fp8, contiguous, and the fp32 scale (0-dim) that multiplies it back to its range."""
    largest = torch.finfo(dtype).max
    wide = tensor.detach().float()
    scale = (wide.abs().amax() if wide.numel() else wide.new_zeros(())).clamp(min=1e-12) / largest
    return (wide / scale).clamp(-largest, largest).to(dtype).contiguous(), scale


def _columns(tensor: Tensor) -> Tensor:
    """The matrix in column-major memory, as torch._scaled_mm needs its second operand."""
    return tensor.t().contiguous().t()


def _multiply(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: torch.dtype, fast: bool = False
) -> Tensor:
    if not a.shape[0]:
        return torch.zeros(a.shape[0], b.shape[1], dtype=out, device=a.device)
    return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=out, use_fast_accum=fast)
