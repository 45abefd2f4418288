"""fsdp: parameters, gradients and optimizer states are sharded; each block is gathered while it computes (ZeRO-3).

torch's FSDP2. Every rank holds 1/world of each parameter along dimension 0, as a DTensor. A block's parameters are gathered before
its forward and again before its backward, and its gradients are reduced to shards as soon as it has them. Parameters stay fp32 and
products run under autocast, as in ddp, so that the numbers agree with ddp's; gradients are reduced in fp32.

Autocast keeps half-precision copies of the weights for backward. In bf16 and fp16 they are all there when forward ends, half of what
ddp's fp32 weights take: what is sharded in full are gradients and optimizer states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import PrepareError, RefusedError, StepError
from ..protocols import Facts, Layout, Manner, Refusal, nowhere, pieces
from ..rebind import names_of, rebind
from ..records import FSDPOptions
from ..shards import local
from ..world import World
from .blocks import find_blocks


class FSDP:
    """torch's `fully_shard`, on each repeated block and on the model.

    In place, by torch: parameters become DTensors, which hold this rank's shard; the class of the model and of each block becomes a
    subclass of its own (``FSDPBlock`` for ``Block``), which cannot be deep-copied; hooks that gather and shard are registered on
    them. In place, by us: parameters and buffers take rank 0's values first, and the optimizers of the same `prepare` take the new
    parameters. Only calling the model itself gathers its parameters, not its other methods, and a parameter must be
    used on all ranks or on none. After the run is closed the model keeps its shards and can no longer be called.

    Gradients that are not reduced yet (`no_sync`, accumulation) lie whole on each rank, out of sight: ``.grad`` is None and
    `zero_grad` does not clear them. Reducing at each micro-step (``sync_each_batch``) keeps shards only.

    Buffers are not sharded; before a forward that follows a synchronised one they take rank 0's values, as in ddp.
    """

    name: ClassVar[str] = "fsdp"
    Options: ClassVar[type] = FSDPOptions
    whole: ClassVar[bool] = True  # in forward and backward each part is gathered
    masters: ClassVar[bool] = True
    sums = False  # torch keeps its own, in the type that gradients are reduced in

    def __init__(self, world: World, options: FSDPOptions) -> None:
        self.data_rank, self.data_size = world.rank, world.size
        self.data_group = None
        self._world = world
        self._options = options
        self._mesh: Any = None

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        if facts.world_size == 1:
            return Refusal(
                "strategy 'fsdp' shards a model over processes, and there is one",
                "start several (`easymp launch --processes N script.py`), or use 'auto'",
            )
        return None

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        return shards_of(model, options, size)

    def wrap(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], manner: Manner) -> nn.Module:
        names = names_of(model, optimizers)
        check_shardable(model)
        policy = manner.policy
        policy.decide(model)
        model = policy.convert(model)
        blocks = find_blocks(model, self._options.wrap)
        if manner.place:
            model.to(self._world.device)
            rebind(model, optimizers, names)  # where torch is told to swap parameters when they move
            names = names_of(model, optimizers)
        take_rank_0s(model, self._world)
        parts = shard([*blocks, model], self._over(), self._options, self._world.device)
        rebind(model, optimizers, names)
        module = policy.forward(model, self._world.device)
        manner.compile(module)
        return Sharded(module, model, parts, self._world, self._options)

    def spread(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def _over(self) -> Any:
        # Imported here: half a second that other strategies need not pay.
        from torch.distributed.device_mesh import init_device_mesh

        if self._mesh is None:
            self._mesh = init_device_mesh(self._world.device.type, (self._world.size,))
        return self._mesh

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with _of(model).reducing(False):
            yield

    @contextmanager
    def force_sync(self, model: nn.Module) -> Iterator[None]:
        with _of(model).reducing(True):
            yield

    def average(self, models: Sequence[nn.Module], gradients: Sequence[Tensor]) -> None:
        raise AssertionError("torch reduces the sums that it keeps")

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        raise RefusedError(
            "strategy 'fsdp' cannot join uneven inputs: every rank's forward needs the other ranks' shards. Keep even_batches=True, or "
            "use strategy='ddp'"
        )

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        sharded = [p.grad for p in parameters if p.grad is not None and hasattr(p.grad, "to_local")]
        whole = [p.grad for p in parameters if p.grad is not None and not hasattr(p.grad, "to_local")]
        shards = [local(g) for g in sharded]
        # A norm of norms is the norm of all. Computed on shards: plain tensors and DTensors do not mix in one list, and not every
        # rank holds an element of each.
        parts = [g for g in shards if g.numel()]
        here = (
            nn.utils.get_total_norm(parts, norm_type).to(self._world.device)
            if parts
            else torch.zeros((), device=self._world.device)
        )
        norms = self._world.gather(here)
        if whole:
            norms = torch.cat([norms, nn.utils.get_total_norm(whole, norm_type)[None].to(norms.device)])
        total = torch.linalg.vector_norm(norms, norm_type)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for grads in (parts, whole):
            if grads:
                torch._foreach_mul_(grads, factor.to(grads[0].device))
        return total

    def release(self, model: nn.Module, alone: nn.Module) -> nn.Module:
        return Released()


def shards_of(model: nn.Module, options: Any, ranks: int) -> Layout:
    """What a rank holds of `model` in `ranks` shards.

    At the peak of backward there are gathered: what is in no block, the block that computes, and the next one. Beside the shards of
    gradients there are whole ones: those of what is in no block, which are reduced last, and those of one block, twice while they
    are reduced.
    """
    taken: set[int] = set()
    sizes: list[tuple[int, int]] = []  # of each block, then of the rest: elements, and those of trainable parameters
    for module in [*find_blocks(model, options.wrap), model]:
        own = {id(p): p for p in module.parameters() if id(p) not in taken}
        taken.update(own)
        sizes.append((sum(p.numel() for p in own.values()), sum(p.numel() for p in own.values() if p.requires_grad)))
    *blocks, rest = sizes
    blocks.sort(reverse=True)
    block = max((trained for _, trained in blocks), default=0)
    cut = nowhere if options.cpu_offload else pieces(ranks)
    return Layout(
        weights=cut,
        gradients=cut,
        states=cut,
        gathered=rest[0] + sum(elements for elements, _ in (blocks[:2] if options.reshard_after_forward else blocks)),
        reducing=max(rest[1] + 2 * block, 2 * rest[1]),
        note="weights, gradients and states lie in the host's memory" if options.cpu_offload else "",
    )


def take_rank_0s(model: nn.Module, world: World) -> None:
    """Give `model`'s parameters and buffers the values of rank 0."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.numel():
                tensor.copy_(world.broadcast(tensor))


def shard(modules: Sequence[nn.Module], mesh: Any, options: FSDPOptions, device: torch.device) -> list[Any]:
    """`modules`, each with its parameters sharded over `mesh`; inner ones come first."""
    # Imported here: half a second that other strategies need not pay.
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    offload = options.cpu_offload and device.type != "cpu"  # on a CPU everything is where it would go
    for module in modules:
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=options.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
            offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
        )
    return list(modules)


class Released(nn.Module):
    """What is called in place of a model whose run has let go of it: one rank alone has no whole parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StepError(
            "this model's parameters are shards of a run that has let go of it (close, free_memory), and one rank alone cannot call it: "
            "call it before, or build it anew"
        )


class Sharded(nn.Module):
    """Calls the model under the precision's autocast, with buffers alike on all ranks.

    Args:
        module: what is called: `root`, or `root` under autocast.
        root: the user's module, sharded.
        parts: all modules that gather their own parameters, `root` included.
    """

    def __init__(self, module: nn.Module, root: nn.Module, parts: Sequence[Any], world: World, options: FSDPOptions) -> None:
        super().__init__()
        self.module = module
        self.root: Any = root
        self.parts = tuple(parts)
        self.world = world
        self.options = options
        self.reduces = True  # whether backward reduces gradients
        self.stale = True  # whether buffers may differ between the ranks
        self.gathered = False  # whether all parts have been gathered once

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.stale:
            self._share_buffers()
        training = torch.is_grad_enabled()
        self.stale = training and self.reduces
        with self.world.explained("forward"):
            outputs = self.module(*args, **kwargs)
        if training and not self.reduces and not self.gathered:
            # torch keeps unreduced gradients beside gathered parameters, and fails for a block that no forward has gathered yet.
            for part in self.parts:
                part.unshard()
                part.reshard()
            self.gathered = True
        if not training and not self.options.reshard_after_forward:
            for part in self.parts:  # no backward will follow, which would have done it
                part.reshard()
        return outputs

    def _share_buffers(self) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self.root.buffers():
            if buffer.numel():
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
        with torch.no_grad():
            for buffers in by_dtype.values():
                flat = self.world.broadcast(torch.cat([b.reshape(-1) for b in buffers]))
                if self.world.rank:
                    for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers])):
                        buffer.copy_(values.view(buffer.shape))

    @contextmanager
    def reducing(self, wanted: bool) -> Iterator[None]:
        before, self.reduces = self.reduces, wanted
        self.root.set_requires_gradient_sync(wanted)
        try:
            yield
        finally:
            self.reduces = before
            self.root.set_requires_gradient_sync(before)


def _of(model: nn.Module) -> Sharded:
    assert isinstance(model, Sharded), "what wrap made"
    return model


def check_shardable(model: nn.Module) -> None:
    """What torch cannot shard, by name, before anything is changed.

    Raises:
        PrepareError: such a parameter or model.
    """
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        raise PrepareError(
            f"a {type(model).__name__} cannot be called, so fsdp cannot shard it: put it into a module with a forward"
        )
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local"):
            raise PrepareError(f"parameter {name!r} is sharded already, by an earlier run or by hand: build the model anew")
        if parameter.ndim == 0:
            raise PrepareError(
                f"parameter {name!r} is 0-dim, and fsdp shards along dimension 0: make it one of shape (1,), or use strategy='ddp'"
            )
        if not parameter.is_contiguous():
            raise PrepareError(
                f"parameter {name!r} is not contiguous (shape {tuple(parameter.shape)}, strides {parameter.stride()}), and fsdp shards "
                "contiguous ones only: make it contiguous (no channels_last), or use strategy='ddp'"
            )
        if parameter.requires_grad:
            dtypes.setdefault(parameter.dtype, name)
    if len(dtypes) > 1:
        said = ", ".join(f"{name!r} is {dtype}" for dtype, name in dtypes.items())
        raise PrepareError(f"fsdp gathers parameters of one dtype together, but {said}: convert them to one dtype, or use 'ddp'")
