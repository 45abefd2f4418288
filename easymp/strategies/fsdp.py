"""fsdp and hsdp, torch's FSDP2: parameters, gradients and optimizer states are sharded (ZeRO-3).

Every rank holds 1/world of each parameter along dimension 0, as a DTensor, in fp32. Repeated blocks, large layers
outside of them, and the rest of the model are each gathered for their forward and again for their backward, under bf16
and fp16 in that dtype, and their gradients are reduced to shards in fp32. Autocast is around the model, so functions
run in ddp's dtypes: norms see their weights in fp32, embeddings return fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.dtensor import ShardMemory, names_of, rebind
from ..distributed import World
from ..errors import PrepareError, RefusedError, SettingError, StepError, is_whole, nearest
from ..optim.sharded import check_sums
from ..optim.torch_step import copies, step_on_shards
from ..options import Record, option
from ..precision.policies import as_if_fp32
from ..protocols import Conflict, Layout, WrapContext, chunk_elements, no_elements
from .blocks import bottom_up, find_blocks, find_layers, refuse_hooked, refuse_sharded, refuse_sparse, refuse_uncallable
from .meta_init import materialise, on_meta
from .single import Reducing, Released, Remedy, Single, average, broadcast_model, device_mesh, hook_gradient


@dataclass(frozen=True)
class FSDPOptions(Record):
    """Options of strategy "fsdp".

    Raises:
        SettingError: a value of another type or out of its range, or a former option.

    Example:
        >>> settings = Settings(strategy="fsdp", strategy_options=FSDPOptions(wrap=("Block",), cpu_offload=True))
    """

    retired: ClassVar = {"symmetric_memory": "shards are gathered through NCCL's own buffers. Leave it out"}

    reshard_after_forward: bool = option(
        True,
        "free a block's gathered parameters after its forward and gather them again for its backward (ZeRO-3). False "
        "keeps them until backward is done (ZeRO-2): more memory, less communication",
    )
    wrap: str | tuple[str, ...] | int = option(
        "blocks",
        'the parts that are gathered one at a time, besides the rest of the model: "blocks", the repeated ones found '
        "in the model; a tuple of class names; or a number: modules with at least that many parameters",
    )
    cpu_offload: bool = option(
        False, "shards, their gradients and optimizer states are in the host's memory; no effect on a CPU"
    )
    reduce_every_micro_batch: bool | None = option(
        None,
        "reduce gradients to shards at each micro-batch of an accumulation window. False keeps them whole, in fp32, "
        "until the window ends: more memory, less communication. None: False where memory for them is left at "
        "`prepare`; the plan says which, and why",
    )
    ignore: tuple[str, ...] = option(
        (),
        'names of parameters or modules, or patterns of them (``"*.router"``), that stay whole on each rank; their '
        "gradients are averaged after backward",
    )
    context_parallel: int = option(
        1,
        "neighbouring ranks that read the same samples and share each sequence, see `Accelerator.context_parallel`. It "
        "divides the number of ranks; parameters are sharded over all of them",
        least=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        ignore = (self.ignore,) if isinstance(self.ignore, str) else self.ignore
        if not isinstance(ignore, (list, tuple)) or not all(isinstance(name, str) for name in ignore):
            raise SettingError(f"ignore={ignore!r} is not a tuple of (patterns of) names of parameters or modules")
        wrap = tuple(self.wrap) if isinstance(self.wrap, list) else self.wrap
        names = isinstance(wrap, tuple) and wrap and all(isinstance(name, str) for name in wrap)
        if not (names or wrap == "blocks" or is_whole(wrap, 1)):
            raise SettingError(
                f"wrap={wrap!r} is not 'blocks', a tuple of class names such as ('Block',), or a number of at least 1"
            )
        object.__setattr__(self, "ignore", tuple(ignore))
        object.__setattr__(self, "wrap", wrap)


def conflicts_of(strategy: str) -> tuple[Conflict, ...]:
    """The rows of "fsdp" or "hsdp" in the table of what does not go together."""
    freed = "a block's gathered parameters, which the gradient of a gradient needs, are freed after its backward"
    replaced = "backward goes through the gathered parameters, of which the model shows the shards"
    late = "gradients of ignored parameters are averaged at the end of backward"
    return (
        Conflict(strategy, "join_uneven_inputs()", "every rank's forward needs the other ranks' shards", Remedy.JOIN),
        Conflict(strategy, "create_graph=True", freed, Remedy.GRAPH),
        Conflict(strategy, "backward(inputs=...)", replaced, Remedy.INPUTS),
        Conflict("ignore", "optimizer_in_backward", late, Remedy.LEAVE_OUT),
    )


class FSDP(Single):
    """torch's `fully_shard`, on each repeated block and on the model.

    In place, by torch: parameters become DTensors; the class of the model and of each block becomes a subclass of its
    own (``FSDPBlock`` for ``Block``), which cannot be deep-copied; hooks that gather and shard are registered on them.
    In place, by us: parameters and buffers take rank 0's values first, and the optimizers of the same `prepare` take
    the new parameters.

    Gradients that are not reduced yet are whole on each rank, in fp32, beside ``.grad``; with
    ``reduce_every_micro_batch`` they add up in ``.grad``, as shards.
    """

    name: ClassVar[str] = "fsdp"
    several: ClassVar[str] = "shards a model over processes"
    Options: ClassVar[type] = FSDPOptions
    sharded: ClassVar[bool] = True
    spreads_states: ClassVar[bool] = True
    conflicts: ClassVar[Sequence[Conflict]] = conflicts_of("fsdp")
    sums = False  # torch keeps its own, in the dtype in which gradients are reduced

    def __init__(self, world: World, options: FSDPOptions) -> None:
        super().__init__(world, options)
        self.reduces_each = options.reduce_every_micro_batch
        self._copies = partial(copies, ranks=world.size)
        self._shape: tuple[int, ...] = (world.size,)  # of the mesh

    @staticmethod
    def option_words(options: Any) -> Collection[str]:
        return ("ignore",) if options.ignore else ()

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        return shards_of(model, options, size)

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer], context: WrapContext) -> nn.Module:
        names = names_of(model, optimizers)
        ignored = matching(model, self.options.ignore)
        check_shardable(model, ignored)
        policy, world, options = context.policy, self._world, self.options
        model = policy.convert(model)
        unsharded = [p for name, p in model.named_parameters() if name in ignored]
        groups = find_groups(model, options.wrap, unsharded)
        ids = set(map(id, groups))

        def shard_complete(module: nn.Module) -> None:
            if id(module) in ids:
                broadcast_model(module, world, context.place)
                shard(module, self._mesh, options, world.device, unsharded, policy.gather)

        if on_meta(model):
            # A block is drawn whole and then sharded: drawn as shards, all ranks would have the same numbers in
            # different places.
            device = world.device if context.place else torch.device("cpu")
            materialise(model, device, context.initialize, shard_complete)
        else:
            for group in groups:
                shard_complete(group)
        rebind(model, optimizers, names)
        module = policy.forward(model, world.device)
        context.compile(module)
        sharded = Sharded(module, model, groups, world, options, bool(self.reduces_each), unsharded, policy.gather)
        sharded.explain_calls_from_outside()
        return sharded

    def spread(self, optimizer: Optimizer) -> Optimizer:
        check_sums(optimizer, self.name)
        one_by_one(optimizer, "sharded", "ignored")
        return optimizer

    @cached_property
    def _mesh(self) -> Any:
        """The mesh over which parameters are sharded: of one dimension, or of two, replicated along the first."""
        return device_mesh(self._world, self._shape, ("replicate", "shard")[-len(self._shape) :])

    def release(self, model: nn.Module, module: nn.Module) -> nn.Module:
        super().release(model, module)
        return Released("this model's parameters are shards")


@dataclass(frozen=True)
class HSDPOptions(FSDPOptions):
    """Options of strategy "hsdp": those of "fsdp", and one more.

    Example:
        >>> settings = Settings(strategy="hsdp", strategy_options=HSDPOptions(shard_size=8))
    """

    shard_size: int | None = option(
        None,
        "neighbouring ranks that hold one copy of the model among them; None: as many as a node has. It divides the "
        "number of ranks",
        least=2,
    )


class HSDP(FSDP):
    """FSDP inside groups of `shard_size` ranks; gradients are averaged between groups, too."""

    name: ClassVar[str] = "hsdp"
    conflicts: ClassVar[Sequence[Conflict]] = conflicts_of("hsdp")
    Options: ClassVar[type] = HSDPOptions

    def __init__(self, world: World, options: HSDPOptions) -> None:
        super().__init__(world, options)
        size = options.shard_size or world.local_size
        sizes = [n for n in range(2, world.size) if world.size % n == 0]
        if size not in sizes:
            label = f"shard_size={size}" if options.shard_size else f"{size}, a node's ranks"
            choices = f"pass HSDPOptions(shard_size=...) with one of {sizes}, or " if sizes else ""
            raise RefusedError(
                "strategy 'hsdp' shards inside groups of 2 ranks or more, of which there are several, and "
                f"{world.size} ranks make no such groups of {label}: {choices}use strategy='fsdp' or 'ddp'"
            )
        self._shape = (world.size // size, size)

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        return shards_of(model, options, options.shard_size or local_size)


def find_groups(
    model: nn.Module, wrap: str | tuple[str, ...] | int, unsharded: Sequence[Tensor] = ()
) -> list[nn.Module]:
    """Find the modules that are gathered on their own, inner ones first. The last is `model`, with all the rest."""
    blocks = find_blocks(model, wrap)
    layers = find_layers(model, blocks, {id(p) for p in unsharded}) if wrap == "blocks" else []
    ids = {id(m) for m in (*blocks, *layers, model)}
    return [m for m in bottom_up(model) if id(m) in ids]


def shards_of(model: nn.Module, options: Any, ranks: int) -> Layout:
    """The layout of `model` in `ranks` shards, at the peak of backward.

    Gathered are the parameters outside of blocks, the running block, and the next one, whose gradients are not whole
    yet. A block's are copied to be reduced, until the next block's are complete.
    """
    ignored = matching(model, options.ignore)
    claimed = {id(p) for name, p in model.named_parameters() if name in ignored}
    elements_outside = trained_outside = 0  # of blocks: from the begin of backward to its end
    blocks: list[tuple[int, int]] = []  # elements, and trained elements
    share, largest_share = no_elements if options.cpu_offload else chunk_elements(ranks), 0
    for group in find_groups(model, options.wrap, [p for p in model.parameters() if id(p) in claimed]):
        parameters = {id(p): p for p in group.parameters() if id(p) not in claimed}
        claimed.update(parameters)
        trainable = [p for p in parameters.values() if p.requires_grad]
        elements, trained = sum(p.numel() for p in parameters.values()), sum(p.numel() for p in trainable)
        if group is model:
            elements_outside, trained_outside = elements, trained
        else:
            blocks.append((elements, trained))
        largest_share = max(largest_share, sum(share("", p) for p in trainable))
    blocks.sort(reverse=True)
    block = max((trained for _, trained in blocks), default=0)
    unreduced, reducing = max((trained_outside + block, block), (trained_outside, trained_outside), key=sum)

    def on_rank(name: str, parameter: Tensor) -> int:
        return parameter.numel() if name in ignored else share(name, parameter)

    gathered = blocks[:2] if options.reshard_after_forward else blocks
    return Layout(
        weights=on_rank,
        gradients=on_rank,
        states=on_rank,
        gathers=True,
        gathered=elements_outside + sum(elements for elements, _ in gathered),
        unreduced=unreduced,
        reducing=reducing,
        early=largest_share,
        note="weights, gradients and states are in the host's memory" if options.cpu_offload else "",
    )


def shard(
    module: nn.Module, mesh: Any, options: FSDPOptions, device: torch.device, unsharded: Sequence[nn.Parameter] = (),
    gather: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Shard the parameters of `module`, except `unsharded`, over `mesh`. They are gathered in dtype `gather`."""
    # Imported here: half a second that other strategies need not pay.
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    nested = [m for m in module.modules() if isinstance(m, FSDPModule)]
    sharded = {id(p) for m in nested for p in m.parameters()}
    dtypes = {p.dtype for p in module.parameters() if id(p) not in sharded}
    fsdp_module = fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=options.reshard_after_forward,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=gather if dtypes <= {torch.float32, torch.bfloat16, torch.float16} else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # autocast does, where a product asks for it
        ),
        ignored_params=set(unsharded),
        offload_policy=CPUOffloadPolicy() if options.cpu_offload and device.type != "cpu" else OffloadPolicy(),
    )
    # torch 2.8 takes gloo's average for a sum; a sum that torch divides is right in all versions.
    if device.type == "cpu":
        fsdp_module.set_force_sum_reduction_for_comms(True)


class Sharded(Reducing):
    """Calls the model, with equal buffers on all ranks. `parts` gather their own parameters, `root` is one of them."""

    def __init__(
        self, module: nn.Module, root: nn.Module, parts: Sequence[Any], world: World, options: FSDPOptions,
        reduces_each: bool, unsharded: Sequence[nn.Parameter] = (), gather: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(module, root, world)
        self._options, self._parts = options, tuple(parts)
        self._reduces_each = reduces_each  # backwards before the end of an accumulation window reduce, too
        self._has_unreduced = False  # whether torch may keep sums beside `.grad`
        self._all_gathered = False  # whether all parts have been gathered once
        self._has_called = False
        self._unsharded = tuple(unsharded)  # a tuple: they are parameters of `root`, and of nothing else
        self.hooks = as_if_fp32(root) if gather else []
        self.hooks += [hook_gradient(p, self._queue_end) for p in self._unsharded]
        self._end_queued = False  # whether this backward ends with `_end_backward`
        self._names, self._tensors = zip(*root.named_parameters())
        self._shards = tuple(p for p in self._tensors if hasattr(p, "to_local"))
        self._frozen = [not p.requires_grad for p in self._tensors]
        self._shard_memory = ShardMemory(root)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._shard_memory.check()
        self.begin_forward()
        training = torch.is_grad_enabled()
        if training:
            self._compare_frozen()
            if any(shard._backward_hooks for shard in self._shards):
                refuse_hooked((name, p) for name, p in zip(self._names, self._tensors) if p._backward_hooks)
        if torch.is_inference_mode_enabled() and not self._all_gathered:
            with torch.inference_mode(False):
                self._gather_once()  # gathered parameters stay what they are first, and could not train
        with self.world.explained("forward"):
            outputs = self.module(*args, **kwargs)
        if not self._has_called:
            self._has_called = True
            self._shard_memory.note()  # torch may have replaced them in the first call
        if training and not self.reduces and not self._all_gathered:
            self._gather_once()
        if not training:
            for part in () if self._options.reshard_after_forward else self._parts:
                part.reshard()  # no backward will follow, which would have done it
        return outputs

    def _compare_frozen(self) -> None:
        """Compare which parameters are frozen, after a change: ranks that reduce different gradients wait forever."""
        frozen = [not p.requires_grad for p in self._tensors]
        if frozen == self._frozen:
            return
        states = {name: "frozen" if flag else "trained" for name, flag in zip(self._names, frozen)}
        changed = [name for name, *flags in zip(self._names, frozen, self._frozen) if flags[0] != flags[1]]
        self.world.compare(
            f"a forward after requires_grad was changed, first of {changed[0]!r}",
            lambda: states,
            remedy="freeze and unfreeze the same parameters on all ranks, before the same forward",
        )
        self._frozen = frozen

    def _gather_once(self) -> None:
        """Gather every part: torch cannot keep unreduced gradients of a block that no forward has gathered yet."""
        for part in self._parts:
            part.unshard()
            part.reshard()
        for group in self._param_groups():
            for parameter in group.fsdp_params:
                parameter.accumulate_unsharded_grad_if_needed = partial(_accumulate, group, parameter)
        self._all_gathered = True

    def _queue_end(self, _: Tensor) -> None:
        if self.reduces and not self._end_queued:
            self._end_queued = True
            # As in torch's DDP and FSDP: called at the end of this backward.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._end_queued = False
        average([p.grad for p in self._unsharded if p.grad is not None], self.world)

    def explain_calls_from_outside(self) -> None:
        """Explain errors of modules that are called from outside of the model's forward but only gathered by it."""
        gathered = {id(m) for part in self._parts if part is not self.root for m in part.modules()}
        for module in self.root.modules():
            has_parameters = next(module.parameters(False), None) is not None
            if has_parameters and module is not self.root and id(module) not in gathered:
                self.hooks.append(module.register_forward_pre_hook(_check_gathered))

    def drop(self, parameters: Callable[[], set[int]]) -> None:
        """Drop the sums that torch keeps beside ``.grad`` after backwards under `no_sync`, for these parameter ids."""
        if not self._has_unreduced:
            return
        self._has_unreduced, cleared = False, parameters()
        for group in self._param_groups():
            for parameter in (p for p in group.fsdp_params if id(p.sharded_param) in cleared):
                # In another dtype than the parameter's; else in the gathered parameter.
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None

    def _param_groups(self) -> Iterator[Any]:
        """torch's groups of parameters that are gathered together."""
        for part in self._parts:
            state = part._get_fsdp_state()
            before_2_11 = getattr(state, "_fsdp_param_group", None)
            yield from filter(None, getattr(state, "_fsdp_param_groups", None) or [before_2_11])

    def reduce(self, enabled: bool) -> None:
        super().reduce(enabled)
        self._has_unreduced |= not enabled
        if not self._reduces_each:
            self.root.set_requires_gradient_sync(enabled)


def _accumulate(group: Any, parameter: Any) -> None:
    """Add a gradient to the sum of earlier micro-batches, in one dtype for the whole group, as torch asks."""
    type(parameter).accumulate_unsharded_grad_if_needed(parameter)
    sums = (p.unsharded_accumulated_grad for p in group.fsdp_params)
    if hasattr(parameter, "_unsharded_param") and any(grad is not None for grad in sums):
        parameter.to_accumulated_grad_if_needed()


def _check_gathered(module: nn.Module, args: Any) -> None:
    if any(hasattr(p, "to_local") for p in module.parameters(recurse=False)):
        raise StepError(
            f"a {type(module).__name__} is called outside of the model's forward, where its parameters are shards. "
            "Call the model itself; name another method that computes in prepare(model, forward_methods=('name',)), or "
            "decorate it with @easymp.forward_method"
        )


# -- checks before anything is changed ---------------------------------------------------------------------------------


def one_by_one(optimizer: Optimizer, parts: str, unsplit: str) -> None:
    """Let `optimizer` step one tensor at a time where a param group mixes DTensors (`parts`) and others (`unsplit`).

    Adam and AdamW step the shards themselves, as they step plain tensors.
    """
    if step_on_shards(optimizer):
        return
    for g, group in enumerate(optimizer.param_groups):
        if len({hasattr(p, "to_local") for p in group["params"]}) < 2:
            continue
        if mode := next((mode for mode in ("fused", "foreach") if group.get(mode)), None):
            raise PrepareError(
                f"{type(optimizer).__name__} has {mode}=True for {parts} and {unsplit} parameters together (param "
                f"group {g}), which torch does not take: leave {mode} out, or give each kind groups of its own"
            )
        if "foreach" in group:
            group["foreach"] = False  # else torch chooses it on accelerators


def matching(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Names of the parameters that `patterns` match, by their own name or that of a module that holds them."""
    parameters = {name for name, _ in model.named_parameters()}
    modules = [name for name, _ in model.named_modules() if name]
    matched = set[str]()
    for pattern in patterns:
        prefixes = tuple(f"{name}." for name in modules if fnmatchcase(name, pattern))
        names = {n for n in parameters if fnmatchcase(n, pattern) or n.startswith(prefixes)}
        if not names:
            subject = f"no parameter or module of this {type(model).__name__}"
            hint = nearest(pattern, [*parameters, *modules])
            raise PrepareError(f"{subject} is named {pattern!r}{hint}: correct `ignore`")
        matched |= names
    if matched and matched == parameters:
        raise PrepareError(f"ignore={patterns!r} leaves no parameter to shard: use strategy='ddp'")
    return matched


def check_shardable(model: nn.Module, ignored: Collection[str] = ()) -> None:
    """Refuse what torch cannot shard, by name; parameters in `ignored` may be anything."""
    refuse_uncallable(model)
    refuse_sparse(model, "fsdp reduces dense ones only")
    refuse_sharded(model)
    refuse_hooked((name, p) for name, p in model.named_parameters() if name not in ignored)
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        if name in ignored:
            continue
        fault = "0-dim: make it one of shape (1,)" if parameter.ndim == 0 else ""
        if not parameter.is_contiguous():
            fault = f"not contiguous (strides {parameter.stride()}): make it contiguous (no channels_last)"
        if fault:
            raise PrepareError(f"parameter {name!r}, which fsdp shards along dimension 0, is {fault}, or `ignore` it")
        if parameter.requires_grad:
            dtypes.setdefault(parameter.dtype, name)
    if len(dtypes) > 1:
        dtype_list = ", ".join(f"{name!r} is {dtype}" for dtype, name in dtypes.items())
        raise PrepareError(f"fsdp gathers parameters of one dtype, but {dtype_list}: convert them, or `ignore` some")
