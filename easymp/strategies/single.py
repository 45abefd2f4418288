"""single: one process, one device; the base class of the other strategies, and functions that several of them use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ..base.dtensor import local
from ..distributed import World
from ..errors import BatchError, RefusedError, SettingError, StepError
from ..logging import get_logger
from ..optim.torch_step import multiply, values
from ..options import DistributedDataParallelKwargs
from ..protocols import Counting, Facts, Layout, Refusal, WrapContext

logger = get_logger(__name__)

Call = Callable[..., Any]


class Single:
    """Calls the model under autocast. The base of all strategies, with a default for each member of `easymp.protocols.Strategy`.

    It takes ddp's options, for scripts that run on one process and on several; they have no effect here. `several` says what the strategy
    does over processes, and `no_join` why ranks cannot run out of batches at different times; both are "" where that does not apply.
    """

    name: ClassVar[str] = "single"
    Options: ClassVar[type] = DistributedDataParallelKwargs
    several: ClassVar[str] = ""
    no_join: ClassVar[str] = ""
    sharded: ClassVar[bool] = False
    splits_layers: ClassVar[bool] = False
    local_updates: ClassVar[bool] = False
    masters: ClassVar[bool] = True
    replicated: ClassVar[bool] = True
    late_loss: ClassVar[bool] = False
    traffic: ClassVar[dict[str, tuple[str, ...]] | None] = {}
    no_offload = ""
    no_step_in_backward = ""
    no_double_backward = ""
    only_forward = ""
    reduces_each: bool | None = False
    sums = True
    data_rank = 0
    data_size = 1
    data_group: Any = None
    context_size = 1

    def __init__(self, world: World, options: Any) -> None:
        self._world, self.options = world, options
        self.context_size = check_context(world, getattr(options, "context_parallel", 1))
        self._context_mesh: Any = None

    @contextmanager
    def context(self, buffers: Sequence[Tensor], dims: Sequence[int]) -> Iterator[None]:
        """A context in which `buffers` are this rank's part of each sequence, and attention is over the sequences of the group."""
        if self.context_size == 1:
            yield
            return
        # Imported here: half a second that other runs need not pay.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel

        check_sequences(buffers, dims, self.context_size)
        if self._context_mesh is None:
            shape = (self._world.size // self.context_size, self.context_size)
            grid = init_device_mesh(self._world.device.type, shape, mesh_dim_names=("data", "context"))
            self._context_mesh = grid["context"]
        kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
        ringed = context_parallel(self._context_mesh, buffers=list(buffers), buffer_seq_dims=list(dims))
        with sdpa_kernel(kernels), ringed, Attention():
            yield

    @classmethod
    def refuse(cls, facts: Facts) -> Refusal | None:
        if cls.several and facts.world_size == 1:
            return Refusal(
                f"strategy {cls.name!r} {cls.several}, and there is one",
                "start several (`easymp launch --processes N script.py`), or use 'auto'",
            )
        if not cls.several and facts.world_size > 1:
            return Refusal(
                f"strategy {cls.name!r} is for one process, and {facts.world_size} were started: each would train alone",
                "use strategy='ddp' or 'auto', or start one process",
            )
        return None

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        return Layout()

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer], context: WrapContext) -> nn.Module:
        if context.place:
            model.to(self._world.device)
        module = context.policy.forward(context.policy.convert(model), self._world.device)
        context.compile(module)
        return module

    def spread(self, optimizer: Optimizer) -> Optimizer:
        return optimizer

    def loss(
        self, module: nn.Module, call: Call, loss_fn: Call, args: Any, kwargs: Any, target: Any, summed: bool
    ) -> Tensor:
        outputs = call(*args, **kwargs)
        loss: Tensor = loss_fn(outputs) if target is None else loss_fn(outputs, target)
        return loss

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return model.reducing(False) if isinstance(model, Reducing) else nullcontext()

    def force_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return model.reducing(True) if isinstance(model, Reducing) else nullcontext()

    def drop(self, model: nn.Module, parameters: Callable[[], set[int]]) -> None:
        pass

    def average(self, models: Sequence[nn.Module], gradients: Sequence[Tensor]) -> None:
        pass

    def reduced(self, parameter: Tensor) -> Sequence[Tensor]:
        return (parameter,)

    def after_backward(self, models: Sequence[nn.Module], create_graph: bool) -> Callable[[], None] | None:
        return None

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        if self.no_join:
            raise RefusedError(
                f"strategy {self.name!r} cannot join uneven inputs: {self.no_join}. Keep even_batches=True, or use strategy='ddp'"
            )
        return nullcontext()

    @property
    def counting(self) -> Counting:
        return Counting()

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        return clip_whole(parameters, max_norm, norm_type)

    def release(self, model: nn.Module, alone: nn.Module) -> nn.Module:
        return alone


# -- context parallelism: neighbouring ranks share each sequence; torch passes keys and values around in a ring ----------

RINGED = ("cuda",)  # torch 2.13 rings flash, memory-efficient and cuDNN kernels, and none of CPUs
CALLED = (
    "call torch.nn.functional.scaled_dot_product_attention in the model, and run forward and backward inside"
)


def check_context(world: World, size: int) -> int:
    """Return `size`; raises where the ranks cannot form groups of it, or where torch has no ring."""
    if size == 1:
        return size
    asked = f"context_parallel={size}"
    if world.size % size:
        fit = [n for n in range(2, world.size + 1) if world.size % n == 0]
        remedy = f"use one of {fit}" if fit else "leave it out, or start several processes"
        raise SettingError(f"{asked} does not divide {world.size} processes into groups: {remedy}")
    if world.device.type not in RINGED:
        raise RefusedError(
            f"{asked} cannot run here: torch rings the attention kernels of CUDA devices only, and this run is on {world.device.type}. "
            "Leave it out"
        )
    return size


def check_sequences(buffers: Sequence[Tensor], dims: Sequence[int], size: int) -> None:
    """Refuse tensors that cannot be split in place into equal parts of the same sequences."""
    if not buffers or len(buffers) != len(dims):
        raise BatchError(
            f"context_parallel() got {len(buffers)} buffers and {len(dims)} dims: pass one for each"
        )
    lengths = {b.shape[d] for b, d in zip(buffers, dims)}
    if len(lengths) > 1 or max(lengths) % (2 * size):
        raise BatchError(
            f"context_parallel() got sequences of length {sorted(lengths)}: pad all to one length, a multiple of {2 * size} "
            f"(a causal mask gives each of {size} ranks a part of the beginning and one of the end)"
        )
    if any(b.requires_grad or b._base is not None for b in buffers):
        raise BatchError(
            "context_parallel() changes buffers in place: pass plain tensors of the batch, no views or results"
        )


class Attention(TorchFunctionMode):
    """Raises a StepError for attention that torch does not ring, and at its end where there was none: it would see a part only."""

    rings = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._nn.scaled_dot_product_attention:
            if not any(hasattr(value, "to_local") for value in (*args, *(kwargs or {}).values())):
                raise StepError(
                    f"attention is not ringed where scaled_dot_product_attention was imported by its name: {CALLED}"
                )
            self.rings += 1
        return func(*args, **(kwargs or {}))

    def __exit__(self, kind: Any, *error: Any) -> None:
        super().__exit__(kind, *error)
        if kind is None and not self.rings:
            raise StepError(
                f"no attention was ringed inside context_parallel(), so no token saw those of other ranks: {CALLED}"
            )


class Spread(Single):
    """Base of strategies under which ranks hold different parts of the gradients."""

    def _copies(self) -> Callable[[Tensor], int]:
        """Counts the ranks that hold each element of a parameter's gradient; 0: other ranks count it."""
        size = self._world.size
        return lambda parameter: copies(parameter, size)

    @property
    def counting(self) -> Counting:
        return counting_over(self._world, self._copies())

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        return clip_to_norm(parameters, max_norm, norm_type, self._world, self._copies())


class Reducing(nn.Module):
    """Calls a model. Its backward reduces gradients over the ranks, or adds them up locally while `reduces` is False."""

    reduces = True

    def reduce(self, wanted: bool) -> None:
        self.reduces = wanted

    @contextmanager
    def reducing(self, wanted: bool) -> Iterator[None]:
        before = self.reduces
        self.reduce(wanted)
        try:
            yield
        finally:
            self.reduce(before)


class Framed(nn.Module):
    """Calls a module whose forward is torch's own (a bare nn.Sequential), since torch.compile skips it when DDP calls it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Released(nn.Module):
    """Replaces a released model that one rank holds in part, as `held` says. Calls raise an error."""

    def __init__(self, held: str) -> None:
        super().__init__()
        self.held = held

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StepError(
            f"{self.held} of a run that has let go of it (close, free_memory): call it before, or build it anew"
        )


# -- data_parallel: one process, several accelerators ------------------------------------------------------------------


@dataclass(frozen=True)
class DataParallelOptions:
    """Options of strategy "data_parallel".

    Attributes:
        devices: indices of the accelerators to use, the one that holds the model first; None takes all that are visible.

    Raises:
        SettingError: `devices` is not a list of different indices.

    Example:
        >>> settings = Settings(strategy="data_parallel", strategy_options=DataParallelOptions(devices=(0, 1)))
    """

    devices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.devices is None:
            return
        devices = tuple(self.devices) if isinstance(self.devices, (list, tuple, range)) else ()
        if not devices or len({*devices}) < len(devices) or any(type(d) is not int or d < 0 for d in devices):
            raise SettingError(f"devices={self.devices!r} is not a list of different indices, such as (0, 1)")
        object.__setattr__(self, "devices", devices)


class DataParallel(Single):
    """torch's nn.DataParallel, around the model under autocast; with fewer than two accelerators the model itself, as in "single".

    The loader's batch is split along dimension 0, and outputs are joined. A forward that returns the loss returns one a device: average
    them. Changes that forward makes to the model stay on the first device only, and batch-norm takes each device's share by itself, also
    with `convert_sync_batchnorm`. ddp does the same faster, without copies and with a process a device.
    """

    name: ClassVar[str] = "data_parallel"
    traffic = None
    Options: ClassVar[type] = DataParallelOptions

    def __init__(self, world: World, options: DataParallelOptions) -> None:
        super().__init__(world, options)
        self._devices = choose_devices(world.device, options.devices)
        if len(self._devices) > 1:
            self.only_forward = "calls copies of the model, by forward alone"
            self.no_offload = "runs copies of the model in threads, whose activations its hooks do not see"

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer], context: WrapContext) -> nn.Module:
        module = super().wrap(model, optimizers, context)
        if (count := len(self._devices)) < 2:
            logger.info("data_parallel: one device (%s), so the model runs as it is", self._world.device)
            return module
        for name, part in module.named_modules():
            if part._compiled_call_impl is not None:
                raise RefusedError(
                    f"data_parallel calls copies of the model, and the compiled code of {name or 'the model'} would run in each of them "
                    "with the first one's parameters: leave compiling out, or use strategy='ddp'"
                )
        words = "data_parallel copies the model to %d devices at each call; ddp is faster: `easymp launch --processes %d`"
        logger.info(words, count, count)
        return nn.DataParallel(module, list(self._devices))


def choose_devices(device: torch.device, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    """Indices of the devices of `device`'s kind that a model on `device` is spread over."""
    here = torch.get_device_module(device).device_count() if device.type in ("cuda", "xpu") else 0
    first = device.index or 0
    if wanted is None:
        return (first, *(d for d in range(here) if d != first)) if here else ()
    missing = [d for d in wanted if d >= here]
    if missing:
        raise RefusedError(
            f"devices={wanted}, but there are {here} accelerators here, counted from 0: leave out {missing}"
        )
    if wanted[0] != first:
        raise RefusedError(f"devices={wanted}, but the model is put on device {first}: name that one first")
    return wanted


# -- tensors of a model, over the ranks --------------------------------------------------------------------------------


@torch.no_grad()
def average(tensors: Iterable[Tensor], world: World) -> None:
    """Replace floating-point and complex tensors by their mean over the ranks, in place; half-precision ones are summed in fp32."""
    unique = {id(t): torch.view_as_real(t) if t.is_complex() else t for t in tensors}.values()
    real = [t for t in unique if t.is_floating_point() and t.numel()]
    summed = [t.float() if t.element_size() < 4 else t for t in real]
    world.average_(summed)
    for tensor, mean in zip(real, summed):
        if tensor is not mean:
            tensor.copy_(mean)


def refuse_words(strategy: Any, activation_offload: bool, optimizer_in_backward: bool) -> None:
    """Raises RefusedError for words that save memory and that `strategy`, or its class, cannot run."""
    offload = "activation_offload", activation_offload, strategy.no_offload
    in_backward = "optimizer_in_backward", optimizer_in_backward, strategy.no_step_in_backward
    for name, asked, why in (offload, in_backward):
        if asked and why:
            raise RefusedError(
                f"{name}=True cannot run under strategy {strategy.name!r}, which {why}. Leave it out, or use strategy='fsdp'"
            )


def hook_gradient(parameter: nn.Parameter, call: Callable[[Any], None]) -> Any:
    """Register a post-accumulate-grad hook, also on a frozen parameter, which torch refuses and which may be unfrozen later."""
    wanted = parameter.requires_grad
    parameter.requires_grad_(True)
    hook = parameter.register_post_accumulate_grad_hook(call)
    parameter.requires_grad_(wanted)
    return hook


def take_rank_0s(model: nn.Module, world: World, place: bool = False) -> None:
    """Broadcast rank 0's values of the unsharded tensors of `model`; with `place`, move them to the rank's device first."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if hasattr(tensor, "to_local"):
                continue
            if place and tensor.device != world.device:
                tensor.data = tensor.data.to(world.device)
            if tensor.numel():
                tensor.copy_(world.broadcast(tensor))


@torch.no_grad()
def share_buffers(model: nn.Module, world: World) -> None:
    """Give the buffers of `model` the values of rank 0."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in model.buffers():
        if buffer.numel():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        flat = world.broadcast(torch.cat([b.reshape(-1) for b in buffers]))
        if world.rank:
            for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers])):
                buffer.copy_(values.view(buffer.shape))


# -- norms of gradients in any layout: each element counts once --------------------------------------------------------


def clip_whole(parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """torch.nn.utils.clip_grad_norm_, of sparse gradients too, whose rows count once."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not any(grad.is_sparse for grad in grads):
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    total = nn.utils.get_total_norm([values(grad) for grad in grads], norm_type)
    multiply(grads, (max_norm / (total + 1e-6)).clamp(max=1.0))
    return total


def clip_to_norm(
    parameters: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    world: World,
    count: Callable[[Tensor], int],
) -> Tensor:
    """Scale gradients so that their total norm is at most `max_norm`; returns the norm before (0-dim, equal on all ranks).

    Gradients are plain tensors and DTensors of any meshes and placements, mixed. `count` gives the number c of ranks that hold each
    element of a gradient (0: other ranks count it), which is weighted by 1/c: (Σ_ranks Σ_local |x|^p / c)^(1/p). All ranks pass the same
    parameters.
    """
    with torch.no_grad():
        for parameter in parameters:
            settle(parameter)
        held = [p for p in parameters if p.grad is not None]
        by_copies: dict[int, list[Tensor]] = {}
        for parameter in held:
            part = values(local(parameter.grad))  # type: ignore[arg-type]
            number = count(parameter)
            if part.numel() and number:
                by_copies.setdefault(number, []).append(part)
        # One dtype on all ranks, also on those without an element.
        double = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
        zero = torch.zeros((), dtype=torch.float64 if double else torch.float32, device=world.device)
        here = [
            nn.utils.get_total_norm(parts, norm_type).to(zero) * number ** (-1.0 / norm_type)
            for number, parts in by_copies.items()
        ] or [zero]
        mine = torch.linalg.vector_norm(torch.stack(here), norm_type)
        total = torch.linalg.vector_norm(world.gather(mine), norm_type)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        multiply([p.grad for p in held], factor)
    return total


def counting_over(world: World, count: Callable[[Tensor], int]) -> Counting:
    """Sums over all ranks of `world`; `count` is as in `clip_to_norm`. Optimizers keep the result: it must not hold a strategy."""

    def add(totals: Tensor) -> None:
        totals.copy_(world.reduce(totals.to(world.device)))  # a rank without gradients has them anywhere

    return Counting(count, add, settle)


def copies(tensor: Any, ranks: int) -> int:
    """The number of `ranks` ranks that hold an element of `tensor`: all for a plain tensor, fewer for a sharded one."""
    if not hasattr(tensor, "to_local"):
        return ranks
    # torch's _StridedShard is a Shard in some versions only.
    dims = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return ranks // math.prod(tensor.device_mesh.size(dim) for dim in dims)


def settle(parameter: Any) -> None:
    """Give `parameter`'s gradient the layout of `parameter`, where backward left it in another (partial sums, whole); a collective."""
    grad = parameter.grad
    if hasattr(grad, "to_local") and grad.placements != getattr(parameter, "placements", grad.placements):
        parameter.grad = grad.redistribute(placements=parameter.placements)
