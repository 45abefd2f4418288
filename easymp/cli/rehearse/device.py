"""A device without memory, for the fake tensors of a rehearsal, and values of the small ones.

It uses torch's hook for backends in Python. torch refuses an operation whose tensors are on this device and on the
host, as it does with a GPU's. Its autocast has the lists of GPUs
(https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior).

Values of counts, scales, flags and losses are computed beside the fake tensors. A number that depends on a tensor
without values is taken to be 2; a flag says that all is well.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

ATEN = torch.ops.aten
NAME = "card"
IS_POSSIBLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")  # not in older versions of torch
HALF = """
    addbmm addmm addmv addr baddbmm bmm conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution linalg_multi_dot linalg_vecdot linear matmul mm mv prelu
    scaled_dot_product_attention
"""
FLOAT = """
    acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity cross_entropy_loss
    cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss huber_loss kl_div l1_loss layer_norm log log10
    log1p log2 logsumexp margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss nll_loss norm.Scalar
    nuclear_norm poisson_nll_loss pow.Tensor_Scalar pow.Tensor_Tensor prod reciprocal renorm rsqrt sinh smooth_l1_loss
    soft_margin_loss softplus sum sum.dim_IntList tan triplet_margin_loss softmax.int log_softmax.int
"""
DYNAMIC = (ATEN.nonzero.default, ATEN.masked_select.default)  # the host allocates by their values
# torch's fused steps that have no kernel for tensors without values.
STEPS = {getattr(packet, name) for packet in (ATEN._fused_sgd_, ATEN._fused_adagrad_) for name in packet.overloads()}
UNKNOWN_NUMBER = 2
SMALL = 64  # elements up to which a tensor has values
FALSE_FLAGS = ("any", "isnan", "isinf", "ne")  # operations whose flag of unknown values is False
# It leaves a flag and a scale as they are: no gradient is infinite.
KEEPS_FLAG = ATEN._amp_foreach_non_finite_check_and_unscale_.default
KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]


def do_nothing(*args: Any, **keywords: Any) -> None: ...


class Work:
    """A stream or an event whose work is done at once."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        self.device = torch.device(NAME, 0)

    def __enter__(self) -> Work:
        return self

    def __exit__(self, *error: Any) -> None: ...

    def query(self) -> bool:
        return True

    synchronize = wait = wait_stream = wait_event = record = record_stream = do_nothing

    def record_event(self, event: Any = None) -> Any:
        return event or Work()


def device_module(devices: int) -> Any:
    """The module of so many devices, which `torch.get_device_module` gives: its work is done at once."""
    actions = "set_device set_stream synchronize empty_cache reset_peak_memory_stats"
    random_state = "set_rng_state manual_seed manual_seed_all"
    memory = "max_memory_allocated memory_allocated memory_reserved max_memory_reserved"
    return SimpleNamespace(
        Stream=Work,
        Event=Work,
        device=nullcontext,
        stream=nullcontext,
        device_count=lambda: devices,
        current_device=lambda: 0,
        current_stream=Work,
        default_stream=Work,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        get_rng_state=lambda device=None: torch.zeros(16, dtype=torch.uint8),
        memory_stats=lambda device=None: {},
        **dict.fromkeys(memory.split(), lambda device=None: 0),
        **dict.fromkeys(f"{actions} {random_state}".split(), do_nothing),
    )


def cast(operation: Any, dtype: torch.dtype | None, *args: Any, **keywords: Any) -> Any:
    """Run an operation with floating-point tensors cast to `dtype`; None: to that of the autocast."""
    target = dtype or torch.get_autocast_dtype(NAME)

    def cast_tensor(tensor: Tensor) -> Tensor:
        castable = tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.device.type == NAME
        return tensor.to(target) if castable else tensor

    with torch._C._ExcludeDispatchKeyGuard(KEYS):
        args, keywords = tree_map_only(Tensor, cast_tensor, (args, keywords))
        return operation(*args, **keywords)


@functools.cache
def register(devices: int) -> tuple[torch.library.Library, ...]:
    """Register the device with torch, once in a process. The cache keeps the returned libraries of kernels alive."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, device_module(devices))
    library = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for names, dtype in ((HALF, None), (FLOAT, torch.float32)):
        for name in names.split():
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(ATEN, packet), overload or "default")
            library.impl(name, functools.partial(cast, operation, dtype))
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    return library, everything


# -- torch's functions that a mode does not see on this device


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """The objects and attributes that are replaced while a script runs, with their replacements."""
    yield torch, "tensor", functools.partial(tensor_on_device, torch.tensor)
    yield Tensor, "new_tensor", new_tensor
    yield FakeTensor, "data", property(Tensor.data.__get__, set_data)  # type: ignore[attr-defined]


def tensor_on_device(make: Any, values: Any, *, device: Any = None, **keywords: Any) -> Tensor:
    """`torch.tensor`, whose copy to the device the dispatch mode sees."""
    tensor: Tensor = make(values, **keywords)
    return tensor if device is None else tensor.to(device)


def new_tensor(tensor: Tensor, values: Any, *, dtype: Any = None, device: Any = None, **keywords: Any) -> Tensor:
    return torch.tensor(values, dtype=dtype or tensor.dtype, device=device or tensor.device, **keywords)


def set_data(tensor: Tensor, value: Tensor) -> None:
    """`tensor.data = value`, of another device, too; torch refuses that of fake tensors."""
    if value.device == tensor.device:
        Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
    else:
        value = value.detach()
        is_parameter = getattr(tensor, "_is_param", False)
        torch.utils.swap_tensors(tensor, nn.Parameter(value, tensor.requires_grad) if is_parameter else value)


# -- what the host does with it


def waits_for(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host waits for the device in an operation: it reads a value, or copies without `non_blocking`."""
    if func in (ATEN._local_scalar_dense.default, ATEN.equal.default, *DYNAMIC):
        return isinstance(args[0], FakeTensor) and args[0].fake_device.type == NAME
    if func is ATEN._to_copy.default:
        target = torch.device(kwargs.get("device") or args[0].device)
        return target.type == "cpu" != args[0].device.type and not kwargs.get("non_blocking")
    if func is ATEN.copy_.default and isinstance(args[1], FakeTensor):
        blocks = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        return blocks and args[0].device.type == "cpu" != args[1].device.type
    return False


def mismatch(line: str) -> str:
    """The reason and remedy for an operation on tensors of the host and of the device."""
    return (
        f"{line or 'an operation'} computes with a tensor on the CPU and one on the device: make the former there, as "
        "in torch.zeros(3, device=acc.device), or move it by .to(acc.device)"
    )


# -- values of small tensors


class SmallValues:
    """By fake tensor of few elements its values, as a tensor on the host."""

    def __init__(self) -> None:
        self._by_tensor: Any = WeakTensorKeyDictionary()

    def read(self, tensor: Tensor) -> Any:
        """The number that the host reads of a tensor of one element."""
        value = self._by_tensor.get(tensor)
        return (default(tensor, "") if value is None else value).item()

    def copy_from_host(self, fake: Tensor, real: Tensor) -> None:
        if real.numel() <= SMALL and real.layout == torch.strided:
            self._by_tensor[fake] = real.detach().clone()

    def compute(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Compute the values of an operation's small results, after it has run on the fake tensors."""
        if func is KEEPS_FLAG or func.namespace not in ("aten", "prims"):
            return
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, FakeTensor)]
        if not outputs:
            return
        results = self._results(func, args, kwargs, outputs)
        for index, tensor in enumerate(outputs):
            if results is not None:
                self._by_tensor[tensor] = results[index]
            elif tensor.numel() == 1:
                self._by_tensor[tensor] = default(tensor, func.__name__)
            else:
                self._by_tensor.pop(tensor, None)

    def _results(self, func: Any, args: Any, kwargs: Any, outputs: list[Any]) -> list[Tensor] | None:
        """The results of the same operation on the values of its arguments; None where one of them is not known."""
        is_small = all(t.numel() <= SMALL and t.layout == torch.strided and not t.is_meta for t in outputs)
        if not is_small or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        unknown = []

        def value_of(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            if not isinstance(leaf, FakeTensor):
                return leaf
            value = self._by_tensor.get(leaf)
            if value is None:
                unknown.append(leaf)
            return value

        args, kwargs = tree_map(value_of, (args, kwargs))
        if unknown:
            return None
        results = tree_leaves(func(*args, **kwargs))
        if func.__name__.startswith(("empty", "new_empty")):
            for result in results:
                result.zero_()
        return results


def default(tensor: Tensor, operation: str) -> Tensor:
    """One number of a type, or a flag, that depends on what is not known."""
    number: float = UNKNOWN_NUMBER
    if tensor.dtype == torch.bool:
        number = operation.split(".")[0] not in FALSE_FLAGS
    return torch.full(tensor.shape, number, dtype=tensor.dtype)
