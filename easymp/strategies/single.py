"""single: one process, one device. Also the base class of the other strategies, and functions that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._utils import _take_tensors
from torch.optim import Optimizer

from ..base.dtensor import local, settle
from ..distributed import World
from ..errors import RefusedError, StepError
from ..logging import get_logger
from ..optim.torch_step import multiply, values
from ..options import DistributedDataParallelKwargs
from ..protocols import UNROUNDED, Conflict, Counting, Strategy, WrapContext
from .context_parallel import SequenceAttention, check_group_size

logger = get_logger(__name__)
BUCKET = 2**26  # bytes broadcast at a time

Call = Callable[..., Any]
SEVERAL_DEVICES = "data_parallel on several devices"


class Remedy:
    """Remedies of several strategies, in their rows of the table of conflicts."""

    FORWARD = "Call the model itself, or use strategy='ddp'"
    GRAPH = "Use strategy='ddp', or a loss without the gradient of a gradient"
    INPUTS = "Freeze the other parameters for this backward, or use strategy='ddp'"
    IN_BACKWARD = "Leave one of them out, or use strategy='fsdp'"
    JOIN = "Keep even_batches=True, or use strategy='ddp'"
    LEAVE_OUT = "Leave one of them out"
    MASTERS = "Use bf16, or fp16, which keeps the parameters themselves in fp32"
    ROUNDING = "Use Settings(stochastic_rounding=True), or bf16, which keeps weights in fp32"


class Single(Strategy):
    """Calls the model under autocast. The base of all strategies, for functions that they share.

    It takes ddp's options, for scripts that run on one process and on several; they have no effect here.
    """

    name: ClassVar[str] = "single"
    Options: ClassVar[type] = DistributedDataParallelKwargs
    # Counts the ranks that hold each element of a parameter's gradient (0: other ranks count it); None where gradients
    # are whole on every rank. Optimizers keep it, so it must not hold the strategy.
    _copies: Callable[[Tensor], int] | None = None

    def __init__(self, world: World, options: Any) -> None:
        self._world, self.options = world, options
        self.words = {self.name, *self.option_words(options)}
        size = getattr(options, "context_parallel", 1)
        self.context_size = check_group_size("context_parallel", size, world.size)
        if size > 1:
            self.words.add("context_parallel")
        self.data_rank, self.data_size = world.rank // size, world.size // size

    @cached_property
    def _attention(self) -> SequenceAttention:
        return SequenceAttention(self._world, self.context_size)

    def context(self, buffers: Sequence[Tensor], dims: Sequence[int]) -> AbstractContextManager[None]:
        return self._attention.over(buffers, dims) if self.context_size > 1 else nullcontext()

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer], context: WrapContext) -> nn.Module:
        if context.place:
            model.to(self._world.device)
        module = context.policy.forward(context.policy.convert(model), self._world.device)
        context.compile(module)
        return module

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return model.no_sync() if isinstance(model, Reducing) else nullcontext()

    def drop(self, model: nn.Module, parameters: Callable[[], set[int]]) -> None:
        if isinstance(model, Reducing):
            model.drop(parameters)

    def release(self, model: nn.Module, module: nn.Module) -> nn.Module:
        for hook in model.hooks if isinstance(model, Reducing) else ():
            hook.remove()
        return module

    @property
    def counting(self) -> Counting:
        world = self._world

        def add(totals: Tensor) -> None:
            totals.copy_(world.reduce(totals.to(world.device)))  # a rank without gradients has them anywhere

        return Counting() if self._copies is None else Counting(self._copies, add, settle)

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        if self._copies is None:
            return clip_whole(parameters, max_norm, norm_type)
        return clip_to_norm(parameters, max_norm, norm_type, self._world, self._copies)


class Reducing(nn.Module):
    """Calls `module`, which runs the user's `root`. Backward reduces gradients over the ranks while it `reduces`."""

    def __init__(self, module: nn.Module, root: Any, world: World, broadcasts_buffers: bool = True) -> None:
        super().__init__()
        self.module, self.root, self.world = module, root, world
        self.hooks: list[Any] = []  # on the model, until its release
        self.reduces = True
        self._broadcasts = self._stale = broadcasts_buffers

    def begin_forward(self) -> None:
        """Give buffers the values of rank 0 after a forward whose backward reduces gradients, as torch's DDP does."""
        if self._stale:
            broadcast(self.root.buffers(), self.world)
        self._stale = self._broadcasts and torch.is_grad_enabled() and self.reduces
        self.world.forwards += 1

    def drop(self, parameters: Callable[[], set[int]]) -> None:
        """Drop gradients that are kept elsewhere than in ``.grad``, of the parameters with these ids."""

    def reduce(self, enabled: bool) -> None:
        self.reduces = enabled

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        previous = self.reduces
        self.reduce(False)
        try:
            yield
        finally:
            self.reduce(previous)


def without_masters(strategy: str, reason: str) -> Iterator[Conflict]:
    """The rows of a strategy that does not go together with fp32 masters, in the table of conflicts."""
    for precision in ("O2", "fp16-true"):
        yield Conflict(strategy, precision, reason, Remedy.MASTERS)
    yield Conflict(strategy, UNROUNDED, reason, Remedy.ROUNDING)


class Framed(nn.Module):
    """Calls a module whose forward is torch's own (a bare nn.Sequential), which torch.compile would skip."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Released(nn.Module):
    """Replaces a released model of which this rank has only a part. Calls raise an error that begins with `subject`."""

    def __init__(self, subject: str) -> None:
        super().__init__()
        self.subject = subject

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StepError(
            f"{self.subject} of a run that has let go of it (close, free_memory): call it before, or build it anew"
        )


# -- data_parallel: one process, several accelerators ------------------------------------------------------------------


class DataParallel(Single):
    """torch's nn.DataParallel around the model under autocast, on all visible accelerators; with one the model itself.

    A forward that returns the loss returns one for each device: average them. Batch-norm takes each device's share.
    """

    name: ClassVar[str] = "data_parallel"
    conflicts: ClassVar[Sequence[Conflict]] = (
        Conflict(SEVERAL_DEVICES, "forward_methods", "it calls copies of the model, by forward alone", Remedy.FORWARD),
    )

    def __init__(self, world: World, options: DistributedDataParallelKwargs) -> None:
        super().__init__(world, options)
        self._devices = visible_devices(world.device)
        if len(self._devices) > 1:
            self.words.add(SEVERAL_DEVICES)

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer], context: WrapContext) -> nn.Module:
        module = super().wrap(model, optimizers, context)
        if (count := len(self._devices)) < 2:
            logger.info("data_parallel: one device (%s), so the model runs as it is", self._world.device)
            return module
        for name, submodule in module.named_modules():
            if submodule._compiled_call_impl is not None:
                raise RefusedError(
                    f"data_parallel calls copies of the model, and the compiled code of {name or 'the model'} would "
                    "run in each of them with the first one's parameters: leave compiling out, or use strategy='ddp'"
                )
        logger.info("data_parallel copies the model to %d devices at each call; ddp is faster", count)
        return nn.DataParallel(module, self._devices)


def visible_devices(device: torch.device) -> list[int]:
    """Indices of the visible accelerators of the kind of `device`, its own first."""
    count = torch.get_device_module(device).device_count() if device.type in ("cuda", "xpu") else 0
    home = device.index or 0
    return [home, *(d for d in range(count) if d != home)] if count else []


# -- tensors of a model, over the ranks --------------------------------------------------------------------------------


@torch.no_grad()
def average(tensors: Iterable[Tensor], world: World) -> None:
    """Replace floating-point and complex tensors by their mean over the ranks, in place. Halves sum in fp32."""
    unique = {id(t): torch.view_as_real(t) if t.is_complex() else t for t in tensors}.values()
    real = [t for t in unique if t.is_floating_point() and t.numel()]
    means = [t.float() if t.element_size() < 4 else t for t in real]
    world.average_(means)
    for tensor, mean in zip(real, means):
        if tensor is not mean:
            tensor.copy_(mean)


def hook_gradient(parameter: nn.Parameter, call: Callable[[Any], None]) -> Any:
    """Register a post-accumulate-grad hook, also on a frozen parameter, which may train later; torch refuses that."""
    requires_grad = parameter.requires_grad
    parameter.requires_grad_(True)
    hook = parameter.register_post_accumulate_grad_hook(call)
    parameter.requires_grad_(requires_grad)
    return hook


def device_mesh(world: World, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """All ranks as a grid."""
    from torch.distributed.device_mesh import init_device_mesh  # here: it takes half a second

    return init_device_mesh(world.device.type, shape, mesh_dim_names=names)


def broadcast_model(model: nn.Module, world: World, move: bool = False) -> None:
    """Give the unsharded tensors of `model` the values of rank 0; with `move`, first move them to the rank's device."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if not hasattr(t, "to_local")]
    for tensor in tensors if move else ():
        if tensor.device != world.device:
            tensor.data = tensor.data.to(world.device)
    broadcast(tensors, world)


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], world: World) -> None:
    """Give `tensors` the values of rank 0, in place, in a few flat collectives."""
    for bucket in _take_tensors([t.detach() for t in tensors if t.numel()], BUCKET):
        flat = world.broadcast(torch.cat([t.reshape(-1) for t in bucket]))
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket])):
            if world.rank:
                tensor.copy_(part.view(tensor.shape))


# -- norms of gradients in any layout: each element counts once --------------------------------------------------------


def clip_whole(parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ for dense and sparse gradients, whose rows count once."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not any(grad.is_sparse for grad in grads):
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    total: Tensor = nn.utils.get_total_norm([values(grad) for grad in grads], norm_type)
    multiply(grads, (max_norm / (total + 1e-6)).clamp(max=1.0))
    return total


@torch.no_grad()
def clip_to_norm(
    parameters: Sequence[Tensor], max_norm: float, norm_type: float, world: World, count: Callable[[Tensor], int]
) -> Tensor:
    """Scale gradients so that their total norm is at most `max_norm`; returns the norm before, equal on all ranks.

    The norm is (Σ_ranks Σ_local |x|^p / c)^(1/p), where c ranks hold the element x. `count` returns c of a parameter.
    """
    for parameter in parameters:
        settle(parameter)
    grads_by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        number = count(parameter) if parameter.grad is not None else 0
        if number and (shard := values(local(parameter.grad))).numel():  # type: ignore[arg-type]  # it is not None
            grads_by_copies.setdefault(number, []).append(shard)
    # One dtype on all ranks, also on those without an element.
    double = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
    norms = [torch.zeros((), dtype=torch.float64 if double else torch.float32, device=world.device)]
    for number, grads in grads_by_copies.items():
        norms.append(nn.utils.get_total_norm(grads, norm_type).to(norms[0]) * number ** (-1.0 / norm_type))
    on_this_rank = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    total: Tensor = torch.linalg.vector_norm(world.gather(on_this_rank), norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    multiply([p.grad for p in parameters if p.grad is not None], factor)
    return total
