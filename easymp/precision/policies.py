"""fp32, TF32, and bf16, fp16, fp8, mxfp8 and nvfp4 by autocast: fp32 parameters, matrix products in fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from ..base.pytree import map_leaves
from ..errors import BatchError, PrepareError
from ..logging import get_logger
from ..options import AutocastKwargs
from ..protocols import Facts, Precision, Refusal

logger = get_logger(__name__)

LOW = (torch.float16, torch.bfloat16)
HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class FP32:
    """fp32 weights and products, with torch's TF32 flags as the user set them. The other precisions override what differs."""

    name: ClassVar[str] = "fp32"
    param: ClassVar[torch.dtype] = torch.float32
    compute: ClassVar[torch.dtype] = torch.float32
    reduce: ClassVar[torch.dtype] = torch.float32
    scaled: ClassVar[bool] = False
    masters: ClassVar[bool] = False
    raises: ClassVar[bool] = False
    keeps_updates: ClassVar[bool] = True
    swaps: ClassVar[bool] = False
    rounds: ClassVar[bool] = False
    tf32: ClassVar[bool] = False

    def __init__(self, options: AutocastKwargs = AutocastKwargs()) -> None:  # noqa: B008
        self.options = options

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        return None

    @property
    def gather(self) -> torch.dtype | None:
        return None

    @property
    def output(self) -> torch.dtype | None:
        return None

    def decide(self, model: nn.Module) -> None:
        pass

    def convert(self, model: nn.Module) -> nn.Module:
        return model

    def forward(self, model: nn.Module, device: torch.device) -> nn.Module:
        return model

    def casting(self, device: torch.device, options: AutocastKwargs) -> AbstractContextManager[Any]:
        return nullcontext()


class TF32(FP32):
    """fp32 weights, matrix products and convolutions on TF32 Tensor Cores: 10 bits of mantissa instead of 23."""

    name: ClassVar[str] = "tf32"
    tf32: ClassVar[bool] = True

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        if facts.device == "cpu":
            return Refusal(
                "TF32 is a mode of GPU Tensor Cores and training runs on the CPU", "use fp32 or bf16"
            )
        lacking = next((d.name for d in facts.hardware.devices if not d.tf32), None)
        why = f"{lacking} has no TF32 Tensor Cores (NVIDIA Ampere, sm_80, and newer do)"
        return Refusal(why, "use fp32 or auto") if lacking is not None else None


class Mixed(FP32):
    """Autocast to `compute`."""

    raises: ClassVar[bool] = True
    tf32: ClassVar[bool] = True  # for functions that autocast leaves in fp32

    @property
    def gather(self) -> torch.dtype | None:
        return self.compute if self.options.enabled else None

    @property
    def output(self) -> torch.dtype | None:
        return self.options.output_dtype

    def forward(self, model: nn.Module, device: torch.device) -> nn.Module:
        return Autocast(model, device, self.compute, self.options) if self.options.enabled else model

    def casting(self, device: torch.device, options: AutocastKwargs) -> AbstractContextManager[Any]:
        if not options.enabled:
            return nullcontext()
        return torch.autocast(device.type, self.compute, True, options.cache_enabled)


class BF16(Mixed):
    """fp32 parameters, products in bfloat16 under autocast. bf16 has the range of fp32 and needs no loss scale."""

    name: ClassVar[str] = "bf16"
    compute: ClassVar[torch.dtype] = torch.bfloat16

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        for device in facts.hardware.devices if facts.device != "cpu" else ():
            if not device.bf16:
                card = f"{device.name} ({device.architecture or 'this device'})"
                return Refusal(
                    f"{card} has no bf16 units; torch would emulate them", "use fp16, fp32 or auto"
                )
        return None  # CPUs run bf16 with or without instructions for it; the plan says which


class FP16(Mixed):
    """fp32 parameters, products in float16 under autocast, and a loss scale, since gradients below 6e-8 would vanish."""

    name: ClassVar[str] = "fp16"
    compute: ClassVar[torch.dtype] = torch.float16
    scaled: ClassVar[bool] = True

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        for device in facts.hardware.devices if facts.device == "cuda" else ():
            if "GTX 16" in device.name:
                return Refusal(
                    f"{device.name} has no Tensor Cores and its fp16 gives NaN", "use fp32 or auto"
                )
        return None


def product_type(policy: Precision | type[Precision]) -> str:
    """The type of most products on a GPU, as `hardware.gpus.peak_flops` calls it."""
    return policy.name if policy.swaps else HALVES.get(policy.compute, "tf32" if policy.tf32 else "fp32")


def raise_weights(model: nn.Module) -> list[tuple[nn.Parameter, torch.dtype]]:
    """Raise trainable bf16 and fp16 parameters of `model` to fp32 in place; returns them, each with its dtype before.

    Buffers are raised too, because batch-norm needs one dtype, except in modules with frozen parameters only.
    """
    raised = [(p, p.dtype) for p in model.parameters() if p.requires_grad and p.dtype in LOW]
    chosen = {id(t) for p, _ in raised for t in (p, p.grad) if t is not None}
    for module in model.modules() if raised else ():
        own = [p for p in module._parameters.values() if p is not None]
        if not own or any(id(p) in chosen for p in own):
            chosen.update(id(b) for b in module._buffers.values() if b is not None and b.dtype in LOW)
        module._apply(lambda t: t.float() if id(t) in chosen else t, recurse=False)
    return raised


EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# Layers with weights and biases that autocast converts.
PRODUCTS = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
MATRICES = (nn.LayerNorm, nn.RMSNorm, nn.Bilinear)  # other layers that have weights of several dimensions


class Autocast(nn.Module):
    """Calls `module` under autocast, inside of DDP and torch.compile, and casts outputs to ``options.output_dtype``; float64 stays."""

    def __init__(
        self, module: nn.Module, device: torch.device, compute: torch.dtype, options: AutocastKwargs
    ) -> None:
        super().__init__()
        self.module, self.device_type, self.compute, self.options = module, device.type, compute, options

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, self.compute, True, self.options.cache_enabled):
            outputs = self.module(*args, **kwargs)
        return cast_outputs(outputs, self.options.output_dtype)


def cast_outputs(outputs: Any, dtype: torch.dtype | None) -> Any:
    """Cast floating-point tensors in a model's outputs to `dtype`; None leaves them as computed."""
    if dtype is None:
        return outputs
    if type(outputs) is Tensor:
        return cast_leaf(outputs, dtype)
    try:
        return map_leaves(lambda leaf: cast_leaf(leaf, dtype), outputs)
    except BatchError as error:
        raise BatchError(
            f"the model's output cannot be given back in {dtype}: {error.__cause__}. Return plain tensors, tuples, lists or dicts from "
            "forward(), or leave outputs as computed with AutocastKwargs(output_dtype=None)"
        ) from error


def cast_leaf(leaf: Any, dtype: torch.dtype, double: bool = False) -> Any:
    """`leaf` in `dtype` if it is a floating-point tensor or packed sequence; `double` includes float64."""
    if isinstance(leaf, Tensor):
        return (
            leaf.to(dtype) if leaf.is_floating_point() and (double or leaf.dtype != torch.float64) else leaf
        )
    if isinstance(leaf, PackedSequence):
        return leaf._replace(data=cast_leaf(leaf.data, dtype, double))
    return leaf


class Upcast:
    """Hooks that show a module parameters in fp32 while it computes: autocast converts the inputs of matrix products only."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._kept: list[dict[str, Any]] = []

    def begin(self, module: nn.Module, *_: Any) -> None:
        held = {name: module._parameters[name] for name in self._names}
        self._kept.append(held)
        for name, parameter in held.items():
            if parameter is not None and parameter.dtype in LOW:
                module._parameters[name] = parameter.float()  # type: ignore[assignment]

    def end(self, module: nn.Module, *_: Any) -> None:
        module._parameters.update(self._kept.pop())


def as_if_fp32(model: nn.Module) -> list[RemovableHandle]:
    """Hook `model`, which gathers its parameters in half precision, so that it computes as with fp32 parameters under autocast.

    Norms and the like see their vectors in fp32, and embeddings return fp32. The hooks run inside torch's hooks that gather.
    """
    handles: list[RemovableHandle] = []
    for module in model.modules():
        if isinstance(module, EMBEDDINGS):
            widen = lambda _, __, outputs: cast_outputs(outputs, torch.float32)  # noqa: E731
            handles.append(module.register_forward_hook(widen, prepend=True))
        every = isinstance(module, MATRICES)
        vectors = [name for name, p in module._parameters.items() if p is not None and (p.ndim < 2 or every)]
        if vectors and not isinstance(module, PRODUCTS):
            upcast = Upcast(vectors)
            handles.append(module.register_forward_pre_hook(upcast.begin))
            handles.append(module.register_forward_hook(upcast.end, prepend=True, always_call=True))
    return handles


@contextmanager
def upcast_again(module: nn.Module) -> Iterator[None]:
    """Inside, `module` sees the same parameters when it is recomputed without its hooks."""
    owners = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
    found = [owner for owner in owners if isinstance(owner, Upcast)]
    for upcast in found:
        upcast.begin(module)
    try:
        yield
    finally:
        for upcast in found:
            upcast.end(module)


# -- fp8 -------------------------------------------------------------------------------------------------------------------
# Inputs and weights are rounded to e4m3 (3 bits of mantissa, up to 448), gradients to e5m2 (2 bits, up to 57344), as in arXiv:2209.05433.
# Each tensor is divided by one scale, which maps its largest element to the format's largest number; ``torch._scaled_mm`` multiplies
# the product by both scales. Parameters and their gradients stay fp32. Where parameters are whole on a rank (all strategies but fsdp and
# hsdp), each weight is rounded once an update, in front of the model and of what torch.compile sees, and read by all micro-batches, by
# recomputation and by backward: one byte an element, from the first forward that trains to the step. Under fsdp and hsdp each rank rounds
# its shard once an update, by the scale of the whole weight, and the rounded shards are gathered, see `Float8Shard`. That needs a tensor
# that holds fp8 and takes a bf16 gradient: torchao's. The products stay ours: torchao's linear layer takes another module's place, which
# loses hooks, and rounds the weight at each product where it is not gathered.

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


class FP8(BF16):
    """bf16 autocast, and each plain `nn.Linear` with two sizes that are multiples of 16 becomes a `Float8Linear`, in place."""

    name: ClassVar[str] = "fp8"
    swaps: ClassVar[bool] = True
    rounds: ClassVar[bool] = True
    multiple: ClassVar[int] = 16  # of inner and last dimensions, which torch._scaled_mm takes
    by: ClassVar[str] = "torch._scaled_mm"

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        needs = "fp8 needs the fp8 Tensor Cores of an NVIDIA GPU of sm_89 (Ada, Hopper) or newer"
        here = _lacking(facts, lambda device: device.fp8 and device.capability is not None)
        return Refusal(f"{needs}, and {here}", "use bf16, fp32 or auto") if here else None

    @property
    def linear(self) -> type[nn.Linear]:
        return Float8Linear

    def convert(self, model: nn.Module) -> nn.Module:
        """Swap layers, see the class; PrepareError if the model has none to swap."""
        layers = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
        fit = {name: layer for name, layer in layers.items() if swappable(layer, self.multiple)}
        already = any(type(layer) is self.linear for layer in model.modules())  # by an earlier run
        if not fit and not already:
            raise PrepareError(
                f"mixed_precision={self.name!r} needs a plain nn.Linear whose in_features and out_features are multiples of "
                f"{self.multiple}, and none of the {len(layers)} in this {type(model).__name__} has such sizes. Use "
                "mixed_precision='bf16', or other sizes"
            )
        for layer in fit.values():
            layer.__class__ = self.linear
        left = ", ".join(sorted(layers.keys() - fit.keys()))
        words = "%s by %s in %d of %d linear layers%s"
        logger.info(words, self.name, self.by, len(fit), len(layers), f"; in bf16: {left}" if left else "")
        return model


def _lacking(facts: Facts, has: Callable[[Any], bool]) -> str:
    """In words, where a device lacks what a precision needs; "" where all have it."""
    if facts.device == "cpu":
        return "training runs on the CPU"
    without = next((d for d in facts.hardware.devices if not has(d)), None)
    return f"this device is {without.name} ({without.architecture or without.kind})" if without else ""


def swappable(module: nn.Module, multiple: int = FP8.multiple) -> bool:
    """Whether `module` is a plain nn.Linear with two sizes that are multiples of `multiple`."""
    return type(module) is nn.Linear and not any(n % multiple for n in module.weight.shape)


def rounded_weights(model: nn.Module) -> set[int]:
    """ids of the weights that fp8 rounds, before or after their layers were swapped."""
    return {id(m.weight) for m in model.modules() if isinstance(m, Float8Linear) or swappable(m)}


class Float8Linear(nn.Linear):
    """`nn.Linear` with its product in forward and two products in backward in fp8. Inputs have shape (..., in_features).

    Attributes:
        once: the rounded weight, its scale and the weight, from `round_once` to a step; None: each product rounds the weight.
        seen: version of the weight that was rounded.
    """

    once: tuple[Tensor, Tensor, Tensor] | None = None
    seen: int = -1

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        out = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        # A forward without gradients rounds by itself: evaluation may see weights that were swapped by `.data`.
        given = self.once[:2] if torch.is_grad_enabled() and self.current() else (None, None)  # type: ignore[index]
        product: Tensor = _Product.apply(input.reshape(-1, self.in_features), self.weight, out, *given)  # type: ignore[no-untyped-call]
        product = product.view(*input.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias.to(out)

    def current(self) -> bool:
        """Whether `once` is of the weight as it is. torch.compile cannot read versions; `round_once` was called outside of it."""
        # `torch.func.functional_call` puts others there.
        if self.once is None or self.once[2] is not self.weight:
            return False
        return torch.compiler.is_compiling() or self.seen == self.weight._version

    def __getstate__(self) -> dict[str, Any]:
        """Leave `once` out of copies and files: it is of this layer's weight."""
        return {name: value for name, value in vars(self).items() if name not in ("once", "seen")}


def round_once(layers: Sequence[Float8Linear]) -> None:
    """Round the weights of `layers` that were written to since they were rounded, for all products until `forget_rounded`."""
    for layer in layers:
        if not layer.current() and not layer.weight.is_meta:
            layer.seen = layer.weight._version
            weight, scale = rounded(layer.weight, FORWARD)
            # As a parameter: activation offload leaves it on the device.
            layer.once = nn.Parameter(weight, requires_grad=False), scale, layer.weight


def forget_rounded(layers: Sequence[Float8Linear | Float8Shard], *_: Any) -> None:
    """Called after an optimizer's step: torch's fused ones and our kernels do not count versions."""
    for layer in layers:
        layer.once = None


class Float8Shard:
    """The shard of a `Float8Linear`'s weight, gathered in fp8: torch's FSDP2 calls the two hooks that this sets on the shard.

    The scale is that of the whole weight, so that the gathered bits are those of `round_once`. The layer's weight is a DTensor, sharded
    along dimension 0; `over_ranks` gives the largest of the ranks' values, elementwise.
    """

    def __init__(self, layer: Float8Linear, over_ranks: Callable[[Tensor], Tensor]) -> None:
        self.layer, self.shape, self.over_ranks = ref(layer), layer.weight.shape, over_ranks
        self.once: tuple[Tensor, Tensor] | None = None  # the rounded shard and its scale
        self.seen = -1  # version of the shard that was rounded
        self._part: Any = None

    def part(self) -> Any:
        """This rank's shard; a new one, as after ``model.to()`` or a load that assigns, gets the hooks."""
        part = getattr(getattr(self.layer(), "weight", None), "_local_tensor", None)  # None: gathered now
        known = self._part and self._part()
        if part is None or part is known:
            return known
        part.fsdp_pre_all_gather, part.fsdp_post_all_gather = self.give, self.take
        self._part, self.once = ref(part), None
        return part

    def current(self) -> bool:
        return self.seen == self.part()._version and self.once is not None

    def give(self, mesh: Any) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """What is gathered, and what each rank knows of it: torch's ``fsdp_pre_all_gather``."""
        if self.once is None:  # outside of the model's forward
            round_shards([self])
        data, scale = self.once  # type: ignore[misc]
        missing = -(-self.shape[0] // mesh.size()) - data.shape[0]
        return (_padded(data, missing),), (scale.reciprocal(),)

    def take(self, outputs: tuple[Tensor], known: tuple[Tensor], dtype: Any, *, out: Any = None) -> Any:
        """The whole weight, as a tensor of `dtype` to autograd: torch's ``fsdp_post_all_gather``."""
        (data,), (scale,) = outputs, known
        if out is not None:  # in memory that it knows
            out._scale = scale
            return None
        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole, LinearMMConfig

        how = LinearMMConfig(), GemmInputRole.WEIGHT
        return Float8TrainingTensor(data[: self.shape[0]], scale, dtype, *how), (data,)


def round_shards(shards: Sequence[Float8Shard]) -> None:
    """Round `shards`, with one collective for all scales."""
    parts = [shard.part().detach() for shard in shards]
    peaks = shards[0].over_ranks(torch.stack([_peak(part).float() for part in parts]))
    for shard, part, peak in zip(shards, parts, peaks):
        shard.once, shard.seen = rounded(part, FORWARD, peak), part._version


class _Product(torch.autograd.Function):
    """``input @ weight.T``: (rows, in) and (out, in) to (rows, out). `once` and `scale` are the rounded weight, or None."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, out: torch.dtype, once: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        x, x_scale = rounded(input, FORWARD)
        ctx.dtypes = input.dtype, weight.dtype
        if once is None or scale is None:
            # Save the weight and not its rounded copy: the weight exists anyway, or is gathered again.
            ctx.save_for_backward(x, x_scale, weight)
            w, w_scale = rounded(weight, FORWARD)
        else:
            ctx.save_for_backward(x, x_scale, once, scale)
            w, w_scale = once, scale
        return _multiply(x, w.t(), x_scale, w_scale, out, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, weight, *scale = ctx.saved_tensors
        g, g_scale = rounded(grad, BACKWARD)
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            w, w_scale = (weight, *scale) if scale else rounded(weight, FORWARD)
            of_input = _multiply(g, _columns(w), g_scale, w_scale, grad.dtype).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            g, x = _padded(g), _padded(x)
            product = _multiply(g.t().contiguous(), _columns(x), g_scale, x_scale, grad.dtype)
            of_weight = product.to(ctx.dtypes[1])
        return of_input, of_weight, None, None, None


def _padded(matrix: Tensor, more: int | None = None) -> Tensor:
    """`matrix` with `more` rows of zeros, which add nothing to a product that sums over rows; None: up to a multiple of 16."""
    more = -matrix.shape[0] % FP8.multiple if more is None else more
    if not more:
        return matrix
    bytes_ = nn.functional.pad(matrix.view(torch.uint8), (0, 0, 0, more))  # zero has no bits set
    return bytes_.view(matrix.dtype)


def rounded(tensor: Tensor, dtype: torch.dtype, peak: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`tensor` in fp8, contiguous, and the fp32 scale (0-dim) that multiplies it back to its range.

    A `tensor` that was gathered in fp8 stays as it is. `peak` is the largest magnitude (0-dim) of what `tensor` is a part of.
    """
    data: Tensor | None = getattr(tensor, "_data", None)  # of torchao's Float8TrainingTensor
    if data is not None:
        return data, tensor._scale.reciprocal()  # type: ignore[attr-defined]
    largest = torch.finfo(dtype).max
    wide = tensor.detach().float()
    scale = (_peak(wide) if peak is None else peak).clamp(min=1e-12) / largest
    return (wide / scale).clamp(-largest, largest).to(dtype).contiguous(), scale


def _peak(tensor: Tensor) -> Tensor:
    return tensor.abs().amax() if tensor.numel() else tensor.new_zeros(())


def _columns(tensor: Tensor) -> Tensor:
    """The matrix in column-major memory, as torch._scaled_mm needs its second operand."""
    return tensor.t().contiguous().t()


def _multiply(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: torch.dtype, fast: bool = False
) -> Tensor:
    if not a.shape[0]:
        return torch.zeros(a.shape[0], b.shape[1], dtype=out, device=a.device)
    return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=out, use_fast_accum=fast)


# -- mxfp8 and nvfp4, by torchao's prototypes ------------------------------------------------------------------------------
# 32 neighbours (mxfp8) or 16 (nvfp4) share a scale: arXiv:2310.10537, and NVIDIA's "Pretraining Large Language Models with NVFP4",
# arXiv:2509.25149. torchao rounds inputs, weights and gradients of all three products, at each product.


class MXFP8(FP8):
    """bf16 autocast, and torchao's MXFP8 products in each plain `nn.Linear` with two sizes that are multiples of 32, in place."""

    name: ClassVar[str] = "mxfp8"
    rounds: ClassVar[bool] = False
    multiple: ClassVar[int] = 32
    by: ClassVar[str] = "torchao"

    @classmethod
    def refuse(cls, facts: Facts) -> Refusal | None:
        needs = f"{cls.name} needs an NVIDIA GPU of sm_100 (B200, GB200) and torchao (extra fp8)"
        here = _lacking(facts, lambda device: device.capability is not None and device.capability[0] == 10)
        if not here and find_spec("torchao") is None:
            here = "torchao is not installed"
        return Refusal(f"{needs}, and {here}", "use bf16, fp32 or auto") if here else None

    @property
    def linear(self) -> type[nn.Linear]:
        return MXFP8Linear


class NVFP4(MXFP8):
    """As `MXFP8`, with torchao's NVFP4 products, in layers with two sizes that are multiples of 128."""

    name: ClassVar[str] = "nvfp4"
    multiple: ClassVar[int] = 128

    @property
    def linear(self) -> type[nn.Linear]:
        return NVFP4Linear


class MXFP8Linear(nn.Linear):
    """`nn.Linear` with its three products by torchao. Inputs have shape (..., in_features)."""

    multiple: ClassVar[int] = MXFP8.multiple

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        out = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        rows = input.reshape(-1, self.in_features).to(out)
        # Rows of zeros add nothing to the product that sums over rows, and their outputs are cut off.
        padded = nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % self.multiple))
        product = self.product(padded)[: rows.shape[0]].to(out).view(*input.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias.to(out)

    def product(self, rows: Tensor) -> Tensor:
        from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.quantization.quantize_.common import KernelPreference

        kernel = KernelPreference.AUTO if rows.is_cuda else KernelPreference.EMULATED  # in tests
        how: Any = {"kernel_preference": kernel, "scale_calculation_mode": ScaleCalculationMode.RCEIL}
        product: Tensor = _to_mxfp8_then_scaled_mm(rows, self.weight.to(rows.dtype), **how)
        return product


class NVFP4Linear(MXFP8Linear):
    """`nn.Linear` with its three products by torchao, gradients with stochastic rounding."""

    multiple: ClassVar[int] = NVFP4.multiple
    # Of the random Hadamard transform: the same on all ranks, and in a resumed run.
    signs: ClassVar[tuple[int, ...]] = (1, -1, 1, 1, -1, -1, 1, -1, 1, -1, -1, 1, -1, 1, 1, -1)

    def product(self, rows: Tensor) -> Tensor:
        from torchao.prototype.moe_training.nvfp4_training.nvfp4_linear import nvfp4_linear

        product: Tensor = nvfp4_linear(rows, self.weight.to(rows.dtype), sign_vector=self.signs)
        return product
