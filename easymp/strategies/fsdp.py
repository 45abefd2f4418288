"""fsdp and hsdp, torch's FSDP2: parameters, gradients and optimizer states are sharded; each block is gathered while it computes (ZeRO-3).

Every rank holds 1/world of each parameter along dimension 0, as a DTensor. A block's parameters are gathered before its forward and again
before its backward, and its gradients are reduced to shards as soon as it has them. Large layers outside of the repeated blocks, embeddings
and heads, are gathered in the same way, and all other parameters with the model.

Shards are fp32. Under bf16 and fp16 they are gathered in that dtype, which layers compute with, and freed after forward. Gradients are
reduced in fp32. Autocast is around the model, so that functions run in the dtypes that they have under ddp: norms see their weights in
fp32, embeddings return fp32. The numbers differ from ddp's by the rounding of other weights, and of gradients before they are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.dtensor import names_of, rebind
from ..base.rng import TORCH
from ..distributed import World
from ..errors import PrepareError, RefusedError, SettingError, StepError, nearest
from ..optim.sharded import check_sums
from ..options import check_fields
from ..precision.policies import (
    Float8Linear,
    Float8Shard,
    as_if_fp32,
    forget_rounded,
    round_shards,
    rounded_weights,
)
from ..protocols import Layout, WrapContext, chunk_elements, no_elements
from .blocks import bottom_up, find_blocks, find_layers, refuse_sharded, refuse_sparse
from .meta_init import materialise, on_meta
from .single import Reducing, Released, Spread, average, hook_gradient, share_buffers, take_rank_0s

ZEROS = (2, 13)  # the first torch that can reduce zeros for parameters without a gradient


@dataclass(frozen=True)
class FSDPOptions:
    """Options of strategy "fsdp".

    Attributes:
        reshard_after_forward: free a block's gathered parameters after its forward and gather them again for its backward
            (ZeRO-3); False keeps them until backward is done: more memory, less communication (ZeRO-2).
        wrap: the parts that are gathered one at a time, besides the rest of the model: "blocks", the repeated ones found in the model;
            names of module classes; or a number: modules with at least that many parameters.
        cpu_offload: shards, their gradients and optimizer states are in the host's memory (no effect on a CPU).
        reduce_every_micro_batch: reduce gradients to shards at each micro-batch of an accumulation window; False keeps them whole, in
            fp32, until the window ends: more memory, less communication. None: False where memory for them is left at `prepare`. The
            plan says which, and why.
        ignore: names of parameters or modules, or patterns of them (``"*.router"``), that stay whole on each rank; their gradients
            are averaged after backward.
        symmetric_memory: gather into NCCL's symmetric memory by torch's `set_symm_mem_for_comm`, which can leave more of the GPU to
            kernels. On CUDA only.
        context_parallel: neighbouring ranks that read the same samples and share each sequence, see
            `Accelerator.context_parallel`. On CUDA only. It divides the number of ranks; parameters are sharded over all of them.

    Raises:
        SettingError: a value of another type.

    Example:
        >>> settings = Settings(strategy="fsdp", strategy_options=FSDPOptions(wrap=("Block",), cpu_offload=True))
    """

    reshard_after_forward: bool = True
    wrap: str | tuple[str, ...] | int = "blocks"
    cpu_offload: bool = False
    reduce_every_micro_batch: bool | None = None
    ignore: tuple[str, ...] = ()
    symmetric_memory: bool = False
    context_parallel: int = field(default=1, metadata={"least": 1})

    def __post_init__(self) -> None:
        check_fields(self)
        ignore = (self.ignore,) if isinstance(self.ignore, str) else self.ignore
        if not isinstance(ignore, (list, tuple)) or not all(isinstance(name, str) for name in ignore):
            raise SettingError(
                f"ignore={ignore!r} is not a tuple of (patterns of) names of parameters or modules"
            )
        wrap = tuple(self.wrap) if isinstance(self.wrap, list) else self.wrap
        names = isinstance(wrap, tuple) and wrap and all(isinstance(name, str) for name in wrap)
        if not (names or wrap == "blocks" or (type(wrap) is int and wrap >= 1)):
            raise SettingError(
                f"wrap={wrap!r} is neither 'blocks', nor a tuple of class names such as ('Block',), nor a number of at least 1"
            )
        object.__setattr__(self, "ignore", tuple(ignore))
        object.__setattr__(self, "wrap", wrap)


class FSDP(Spread):
    """torch's `fully_shard`, on each repeated block and on the model.

    In place, by torch: parameters become DTensors, which hold this rank's shard; the class of the model and of each block becomes a
    subclass of its own (``FSDPBlock`` for ``Block``), which cannot be deep-copied; hooks that gather and shard are registered on
    them. In place, by us: parameters and buffers take rank 0's values first, and the optimizers of the same `prepare` take the new
    parameters. A parameter must be used on all ranks or on none. After the run is closed the model can no longer be called.

    Gradients that are not reduced yet (`no_sync`, accumulation) are whole on each rank, in fp32, and torch keeps them: ``.grad`` is None,
    and the prepared optimizer's `zero_grad` clears them. Reduced at each micro-batch (``reduce_every_micro_batch``), they add up in
    ``.grad``, as shards. Ignored parameters stay whole, and their gradients are averaged at the end of a backward that reduces.

    A model on the meta device gets its values block by block, each sharded before the next one has any: no rank holds the whole.
    Buffers are not sharded; before a forward that follows a synchronised one they take rank 0's values, as in ddp.
    """

    name: ClassVar[str] = "fsdp"
    traffic: ClassVar = {"forward": ("all_gather",), "backward": ("all_gather", "reduce_scatter")}
    several: ClassVar[str] = "shards a model over processes"
    no_join: ClassVar[str] = "every rank's forward needs the other ranks' shards"
    Options: ClassVar[type] = FSDPOptions
    sharded: ClassVar[bool] = True
    no_double_backward = (
        "fsdp frees a block's gathered parameters after its backward, which that would need again. Use strategy='ddp', or a loss without "
        "the gradient of a gradient"
    )
    sums = False  # torch keeps its own, in the dtype in which gradients are reduced

    def __init__(self, world: World, options: FSDPOptions) -> None:
        super().__init__(world, options)
        self.data_rank, self.data_size = world.rank // self.context_size, world.size // self.context_size
        if options.symmetric_memory:
            refuse_without_cuda("symmetric_memory", world.device)
        self.reduces_each = options.reduce_every_micro_batch
        if options.ignore:
            self.no_step_in_backward = "averages the gradients of ignored parameters at the end of backward"
        self._shape: tuple[int, ...] = (world.size,)  # of the mesh
        self._mesh: Any = None

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        return shards_of(model, options, size)

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer], context: WrapContext) -> nn.Module:
        names = names_of(model, optimizers)
        ignored = matching(model, self.options.ignore)
        check_shardable(model, ignored)
        policy = context.policy
        policy.decide(model)
        model = policy.convert(model)
        whole = [p for name, p in model.named_parameters() if name in ignored]
        groups = {id(part): group for group in find_groups(model, self.options.wrap, whole) for part in group}
        finished: set[int] = set()
        parts: list[Any] = []

        def take(part: nn.Module) -> None:
            finished.add(id(part))
            group = groups.get(id(part), ())
            if group and finished.issuperset(map(id, group)):
                for module in group:
                    take_rank_0s(module, self._world, context.place)
                shard(group, self._over(), self.options, self._world.device, whole, policy.gather)
                parts.extend(group)

        if on_meta(model):
            # A block is drawn whole and then sharded: drawn as shards, all ranks would have the same numbers in different places.
            device = self._world.device if context.place else torch.device("cpu")
            materialise(model, device, context.initialize, take)
        else:
            for part in bottom_up(model):
                take(part)
        rebind(model, optimizers, names)
        module = policy.forward(model, self._world.device)
        context.compile(module)
        sharded = Sharded(module, model, parts, self._world, self.options, whole, policy.gather)
        sharded.early, sharded.replicated = bool(self.reduces_each), len(self._shape) > 1
        sharded.watch_parts()
        if policy.rounds:
            sharded.rounded = rounded_shards(model, self.options, self._world)
            sharded.unrounded = no_fp8_gathers(self.options, self._world.device)
        return sharded

    def spread(self, optimizer: Optimizer) -> Optimizer:
        check_sums(optimizer, self.name)
        one_by_one(optimizer, "sharded", "ignored")
        return optimizer

    def _over(self) -> Any:
        """The mesh over which parameters are sharded: of one dimension, or of two, replicated along the first."""
        if self._mesh is None:
            from torch.distributed.device_mesh import init_device_mesh  # here: it takes half a second

            names = ("replicate", "shard")[-len(self._shape) :]
            self._mesh = init_device_mesh(self._world.device.type, self._shape, mesh_dim_names=names)
        return self._mesh

    def drop(self, model: nn.Module, parameters: Callable[[], set[int]]) -> None:
        if isinstance(model, Sharded):
            model.drop(parameters)

    def release(self, model: nn.Module, alone: nn.Module) -> nn.Module:
        if isinstance(model, Sharded):
            model.forget()
        return Released("this model's parameters are shards")


@dataclass(frozen=True)
class HSDPOptions(FSDPOptions):
    """Options of strategy "hsdp": those of "fsdp", and one more.

    `reduce_every_micro_batch`: None is True. Each micro-batch's gradients are reduced inside a group, and sums are averaged between groups
    when the window ends.

    Attributes:
        shard_size: neighbouring ranks that hold one copy of the model among them; None: as many as a node has. It divides the
            number of ranks.

    Example:
        >>> settings = Settings(strategy="hsdp", strategy_options=HSDPOptions(shard_size=8))
    """

    shard_size: int | None = field(default=None, metadata={"least": 2})


class HSDP(FSDP):
    """FSDP on a mesh of two dimensions: gathered and reduced inside a group of `shard_size` ranks, averaged between groups.

    In an accumulation window torch keeps the sums of micro-batches' gradients as fp32 shards, out of sight until the window ends.
    """

    name: ClassVar[str] = "hsdp"
    Options: ClassVar[type] = HSDPOptions

    def __init__(self, world: World, options: HSDPOptions) -> None:
        super().__init__(world, options)
        size = options.shard_size or world.local_size
        said = f"shard_size={size}" if options.shard_size else f"a node's {size} ranks"
        why, choose = "", "pass strategy_options=HSDPOptions(shard_size=...)"
        if size == world.size and options.shard_size is None:
            why = f"shards inside a node and replicates between nodes, and all {size} ranks are on one: {choose}, or use strategy='fsdp'"
        elif size >= world.size:
            why = f"with {said} leaves nothing to replicate among {world.size} ranks: use strategy='fsdp', or a smaller shard_size"
        elif size < 2:
            why = f"shards inside a node, and each has one rank: use 'ddp' or 'fsdp', or {choose}"
        elif world.size % size:
            why = f"splits {world.size} ranks into groups of equal size, which {said} does not allow: pass one that divides {world.size}"
        if why:
            raise RefusedError(f"strategy 'hsdp' {why}")
        self._shape = (world.size // size, size)
        if TORCH < ZEROS and self.reduces_each:
            raise SettingError(
                f"reduce_every_micro_batch=True under hsdp needs torch {'.'.join(map(str, ZEROS))} or newer, and this is "
                f"{torch.__version__}: before, torch adds up gradients of different parameters. Leave it out"
            )
        if self.reduces_each is None:
            self.reduces_each = TORCH >= ZEROS

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        return shards_of(model, options, options.shard_size or local_size)


def refuse_without_cuda(word: str, device: torch.device) -> None:
    if device.type != "cuda":
        raise RefusedError(
            f"{word}=True works between CUDA devices, and this run is on {device.type}: leave it out"
        )


def find_groups(
    model: nn.Module, wrap: str | tuple[str, ...] | int, whole: Sequence[Tensor] = ()
) -> list[tuple[nn.Module, ...]]:
    """Find the modules that are gathered together, inner ones first. The last group is `model`, with all remaining parameters."""
    blocks = find_blocks(model, wrap)
    layers = find_layers(model, blocks, {id(p) for p in whole}) if wrap == "blocks" else []
    order = {id(m): i for i, m in enumerate(bottom_up(model))}
    groups = [*((block,) for block in blocks), *layers]
    return [*sorted(groups, key=lambda group: max(order[id(m)] for m in group)), (model,)]


def shards_of(model: nn.Module, options: Any, ranks: int) -> Layout:
    """The layout of `model` in `ranks` shards, at the peak of backward.

    Gathered are: what torch gathers with the model itself, layers with tied weights, the running block, and the next one. Gradients are
    whole for the same parts but the next block. A block's are copied to be reduced, and the copy lives until the next block's are
    complete.
    """
    ignored = matching(model, options.ignore)
    taken = {id(p) for name, p in model.named_parameters() if name in ignored}
    kept = trained_kept = 0  # elements from the begin of backward to its end, and trainable ones of these
    blocks: list[tuple[int, int, int]] = []
    early_rounds = not no_fp8_gathers(options, torch.device("cuda"))  # for which estimates are made
    products, rounded = rounded_weights(model) if early_rounds else set(), set[int]()
    share, early = no_elements if options.cpu_offload else chunk_elements(ranks), 0
    for group in find_groups(model, options.wrap, [p for p in model.parameters() if id(p) in taken]):
        own = {id(p): p for module in group for p in module.parameters() if id(p) not in taken}
        taken.update(own)
        everything = sum(p.numel() for p in own.values())
        trained = sum(p.numel() for p in own.values() if p.requires_grad)
        if len(group) > 1 or group[0] is model:
            kept, trained_kept = kept + everything, trained_kept + trained
        else:
            small = products & own.keys()
            rounded |= small
            blocks.append((everything, trained, sum(own[i].numel() for i in small)))
        early = max(early, sum(share("", p) for p in own.values() if p.requires_grad))
    blocks.sort(reverse=True)
    block = max((trained for _, trained, _ in blocks), default=0)
    unreduced, reducing = max((trained_kept + block, block), (trained_kept, trained_kept), key=sum)

    def held(name: str, parameter: Tensor) -> int:
        return parameter.numel() if name in ignored else share(name, parameter)

    together = blocks[:2] if options.reshard_after_forward else blocks
    return Layout(
        *(held, held, held),
        gathers=True,
        gathered=kept + sum(elements for elements, *_ in together),
        rounded=rounded,
        gathered_once=sum(elements for *_, elements in together),
        unreduced=unreduced,
        reducing=reducing,
        early=early,
        note="weights, gradients and states are in the host's memory" if options.cpu_offload else "",
    )


def shard(
    modules: Sequence[nn.Module],
    mesh: Any,
    options: FSDPOptions,
    device: torch.device,
    whole: Sequence[nn.Parameter] = (),
    gather: torch.dtype | None = None,
) -> None:
    """Shard the parameters of `modules` over `mesh`, to be gathered together in dtype `gather`, except those that stay `whole`.

    Where one of them has another dtype than fp32, bf16 or fp16, all are gathered as they are.
    """
    # Imported here: half a second that other strategies need not pay.
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

    inner = [part for m in modules for part in m.modules() if isinstance(part, FSDPModule)]
    within = {id(p) for part in inner for p in part.parameters()}
    dtypes = {p.dtype for module in modules for p in module.parameters() if id(p) not in within}
    offload = {"offload_policy": CPUOffloadPolicy()} if options.cpu_offload and device.type != "cpu" else {}
    fully_shard(
        modules if len(modules) > 1 else modules[0],
        mesh=mesh,
        reshard_after_forward=options.reshard_after_forward,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=gather if dtypes <= {torch.float32, torch.bfloat16, torch.float16} else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # autocast does, where a product asks for it
        ),
        ignored_params=set(whole),
        **offload,
    )
    # torch 2.8 takes gloo's average for a sum; a sum that torch divides is right in all versions.
    for part in modules if device.type == "cpu" else ():
        part.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    if options.symmetric_memory:
        if not hasattr(FSDPModule, "set_symm_mem_for_comm"):
            raise RefusedError(
                f"symmetric_memory=True needs torch 2.11 or newer, and this is {torch.__version__}: leave it out"
            )
        modules[0].set_symm_mem_for_comm()  # type: ignore[operator]


def no_fp8_gathers(options: FSDPOptions, device: torch.device) -> str:
    """Why no shard is gathered in fp8; "" if they can be."""
    if not find_spec("torchao"):
        return "torchao is not installed"
    moves = "with cpu_offload torch moves shards to the GPU before it asks what to gather"
    return moves if options.cpu_offload and device.type != "cpu" else ""


def rounded_shards(model: nn.Module, options: FSDPOptions, world: World) -> tuple[Float8Shard, ...]:
    """Shards that are gathered in fp8: those of `Float8Linear` layers of the repeated blocks, where no layer of another kind reads them."""
    if no_fp8_gathers(options, world.device):
        return ()
    others = {id(p) for m in model.modules() if type(m) is not Float8Linear for p in m._parameters.values()}
    inside = (m for block in find_blocks(model, options.wrap) for m in block.modules())
    own = {id(m.weight): m for m in inside if type(m) is Float8Linear and hasattr(m.weight, "to_local")}
    shards = (Float8Shard(m, partial(world.reduce, op="max")) for i, m in own.items() if i not in others)
    return tuple(shard for shard in shards if shard.part() is not None)


class Sharded(Reducing):
    """Calls the model under the precision's autocast, with equal buffers on all ranks.

    Args:
        parts: all modules that gather their own parameters, `root`, the user's module, included.
        whole: parameters that are not sharded; their gradients are averaged over all ranks.
        gather: half precision in which parameters are gathered; None: as they are stored.

    Attributes:
        early: whether backwards before the end of an accumulation window reduce gradients to shards.
        unrounded: why there are no `rounded` ones under fp8.
        rounded: shards that are gathered in fp8. They are rounded once an update, and in front of each forward without gradients.
        replicated: whether shards are replicated: their gradients are averaged at the end of the window.
    """

    def __init__(
        self,
        module: nn.Module,
        root: nn.Module,
        parts: Sequence[Any],
        world: World,
        options: FSDPOptions,
        whole: Sequence[nn.Parameter] = (),
        gather: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.module, self.world, self.options = module, world, options
        self.root: Any = root
        self.parts = tuple(parts)
        self.early = self.replicated = False
        self._unreduced = False  # whether torch may keep sums beside `.grad`
        self._stale = True  # whether buffers may differ between the ranks
        self._gathered = False  # whether all parts have been gathered once
        self._whole = tuple(whole)  # a tuple: they are parameters of `root`, and of nothing else
        self._hooks = as_if_fp32(root) if gather else []
        self._hooks += [hook_gradient(p, self._expect_average) for p in self._whole]
        self._expecting = False  # whether this backward ends with `_average`
        self._empty: list[Tensor] | None = None  # without a gradient when an early window of replicas began
        self._used: set[int] = set()  # ids of those that have had one since
        self._ending = False  # whether this backward ends with `_end_window`
        self.rounded: tuple[Float8Shard, ...] = ()
        self.unrounded = ""
        self._all = tuple(root.parameters())
        self._frozen = [not p.requires_grad for p in self._all]

    def _compare_frozen(self, frozen: list[bool]) -> None:
        """Compare which parameters are frozen, after a change: ranks that reduce different gradients would wait forever."""
        names = {id(p): name for name, p in self.root.named_parameters()}
        now = {names.get(id(p), "?"): "frozen" if f else "trained" for p, f in zip(self._all, frozen)}
        changed = [name for name, f, before in zip(now, frozen, self._frozen) if f != before]
        self.world.compare(
            f"a forward after requires_grad was changed, first of {changed[0]!r}",
            lambda: now,
            remedy="freeze and unfreeze the same parameters on all ranks, before the same forward",
        )
        self._frozen = frozen

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._stale:
            share_buffers(self.root, self.world)
        training = torch.is_grad_enabled()
        self.world.forwards += 1
        if training and (frozen := [not p.requires_grad for p in self._all]) != self._frozen:
            self._compare_frozen(frozen)
        if training and not self.reduces and self.early and self.replicated and self._empty is None:
            # torch keeps the sums of micro-batches without names: each must be of all parameters, with zeros for those that it did not use.
            sharded = [p for p in self.root.parameters() if p.requires_grad and hasattr(p, "to_local")]
            self._empty = [p for p in sharded if p.grad is None]
            self.root.set_reduce_scatter_unused_params(True)
        self._stale = training and self.reduces
        if self.rounded and not (training and all(shard.current() for shard in self.rounded)):
            round_shards(self.rounded)
        with self.world.explained("forward"):
            outputs = self.module(*args, **kwargs)
        if not training:
            forget_rounded(self.rounded)  # evaluation may see weights that were swapped by `.data`
        if training and not self.reduces and not self._gathered:
            self._gather_once()
        if not training and not self.options.reshard_after_forward:
            for part in self.parts:  # no backward will follow, which would have done it
                part.reshard()
        return outputs

    def _gather_once(self) -> None:
        """Gather every part: torch cannot keep unreduced gradients of a block that no forward has gathered yet."""
        for part in self.parts:
            places = [
                (m, name, p) for m in part.modules() for name, p in m._parameters.items() if p is not None
            ]
            part.unshard()
            for module, name, shard in places if self.early and self.replicated else ():
                whole: Any = module._parameters[name]
                if whole is not shard:
                    self._hooks.append(hook_gradient(whole, partial(self._note_use, id(shard))))
            part.reshard()
        for group in self._groups():
            for one in group.fsdp_params:
                one.accumulate_unsharded_grad_if_needed = partial(_accumulate, group, one)
        self._gathered = True

    def _expect_average(self, _: Tensor) -> None:
        if self.reduces and not self._expecting:
            self._expecting = True
            # As torch's DDP and FSDP do: called at the end of this backward.
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        self._expecting = False
        average([p.grad for p in self._whole if p.grad is not None], self.world)

    def watch_parts(self) -> None:
        """Explain errors of modules that are called from outside of the model's forward but only gathered by it."""
        inside = {id(m) for part in self.parts if part is not self.root for m in part.modules()}
        for module in self.root.modules():
            own = any(True for _ in module.parameters(recurse=False))
            if own and module is not self.root and id(module) not in inside:
                self._hooks.append(module.register_forward_pre_hook(_check_gathered))

    def _note_use(self, shard: int, _: Tensor) -> None:
        self._used.add(shard)
        if self.reduces and self._empty is not None and not self._ending:
            self._ending = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_window)

    def _end_window(self) -> None:
        """Remove the zero gradients of parameters that no micro-batch used."""
        empty = self._empty or []
        used = [id(p) in self._used for p in empty]
        if not all(used):
            counts = self.world.reduce(torch.tensor(used, device=self.world.device).float(), "sum").tolist()
            for parameter, count in zip(empty, counts):
                if not count:
                    parameter.grad = None
        self._empty, self._ending = None, False
        self._used.clear()
        self.root.set_reduce_scatter_unused_params(False)

    def drop(self, parameters: Callable[[], set[int]]) -> None:
        """Drop the sums that torch keeps beside ``.grad`` for these ids of parameters, after backwards under `no_sync`."""
        if not self._unreduced:
            return
        self._unreduced, cleared = False, parameters()
        for group in self._groups():
            chosen = [p for p in group.fsdp_params if id(p.sharded_param) in cleared]
            for kept in chosen:
                # In another dtype than the parameter's; else in the gathered parameter.
                kept.unsharded_accumulated_grad = None
                if hasattr(kept, "_unsharded_param"):
                    kept._unsharded_param.grad = None
            if len(chosen) == len(group.fsdp_params):
                group._partial_reduce_output = None

    def _groups(self) -> Iterator[Any]:
        """torch's groups of parameters that are gathered together."""
        for part in self.parts:
            state = part._get_fsdp_state()
            before_2_11 = getattr(state, "_fsdp_param_group", None)
            yield from filter(None, getattr(state, "_fsdp_param_groups", None) or [before_2_11])

    def forget(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def reduce(self, wanted: bool) -> None:
        super().reduce(wanted)
        self._unreduced |= not wanted
        if not self.early:
            self.root.set_requires_gradient_sync(wanted)
        elif self.replicated:
            self.root.set_requires_all_reduce(wanted)


def _accumulate(group: Any, one: Any) -> None:
    """Add a gradient to the sum of earlier micro-batches; beside such sums the first one, too, is in their dtype, as torch asks."""
    type(one).accumulate_unsharded_grad_if_needed(one)
    if hasattr(one, "_unsharded_param") and any(
        p.unsharded_accumulated_grad is not None for p in group.fsdp_params
    ):
        one.to_accumulated_grad_if_needed()


def _check_gathered(module: nn.Module, args: Any) -> None:
    if any(hasattr(p, "to_local") for p in module.parameters(recurse=False)):
        raise StepError(
            f"a {type(module).__name__} is called outside of the model's forward, where its parameters are shards. Call the model itself; "
            "name another method that computes in prepare(model, forward_methods=('name',)), or decorate it with @easymp.forward_method"
        )


# -- checks before anything is changed ---------------------------------------------------------------------------------


def one_by_one(optimizer: Optimizer, parts: str, whole: str) -> None:
    """Let `optimizer` step one tensor at a time where a param group has both DTensors and plain ones, which torch's lists do not mix.

    `parts` and `whole` name the two kinds. Raises PrepareError where the optimizer is set to take lists.
    """
    for g, group in enumerate(optimizer.param_groups):
        if len({hasattr(p, "to_local") for p in group["params"]}) < 2:
            continue
        word = next((word for word in ("fused", "foreach") if group.get(word)), None)
        if word:
            raise PrepareError(
                f"{type(optimizer).__name__} has {word}=True for {parts} and {whole} parameters together (param group {g}), which "
                f"torch's {word} step does not take: leave {word} out, or give {whole} parameters a param group of their own"
            )
        if "foreach" in group:
            group["foreach"] = False  # else torch chooses it on accelerators


def matching(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Names of the parameters that `patterns` match, by their own name or that of a module that holds them."""
    parameters = {name for name, _ in model.named_parameters()}
    modules = [name for name, _ in model.named_modules() if name]
    found, known = set[str](), [*parameters, *modules]
    for pattern in patterns:
        held = tuple(f"{name}." for name in modules if fnmatchcase(name, pattern))
        these = {n for n in parameters if fnmatchcase(n, pattern) or n.startswith(held)}
        if not these:
            raise PrepareError(
                f"no parameter or module of this {type(model).__name__} is named {pattern!r}{nearest(pattern, known)}: correct `ignore`"
            )
        found |= these
    if found and found == parameters:
        raise PrepareError(f"ignore={patterns!r} leaves no parameter to shard: use strategy='ddp'")
    return found


def check_shardable(model: nn.Module, ignored: Collection[str] = ()) -> None:
    """Refuse what torch cannot shard, by name; parameters in `ignored` may be anything."""
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        raise PrepareError(
            f"a {type(model).__name__} cannot be called, so fsdp cannot shard it: put it into a module with a forward"
        )
    refuse_sparse(model, "fsdp reduces dense ones only")
    refuse_sharded(model)
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        if name in ignored:
            continue
        if parameter.ndim == 0:
            raise PrepareError(
                f"parameter {name!r} is 0-dim, and fsdp shards along dimension 0: make it one of shape (1,), or `ignore` it"
            )
        if not parameter.is_contiguous():
            raise PrepareError(
                f"parameter {name!r} is not contiguous (shape {tuple(parameter.shape)}, strides {parameter.stride()}), and fsdp shards "
                "contiguous ones only: make it contiguous (no channels_last), or `ignore` it"
            )
        if parameter.requires_grad:
            dtypes.setdefault(parameter.dtype, name)
    if len(dtypes) > 1:
        said = ", ".join(f"{name!r} is {dtype}" for dtype, name in dtypes.items())
        raise PrepareError(
            f"fsdp gathers parameters of one dtype together, but {said}: convert them to one dtype, or `ignore` some"
        )
