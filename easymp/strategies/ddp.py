"""ddp: every rank holds the whole model; gradients are averaged while backward runs."""

from __future__ import annotations

import re
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..base.pytree import leaves
from ..distributed import World
from ..errors import StepError
from ..optim.muon import Muon
from ..optim.torch_step import parameters_of
from ..options import DistributedDataParallelKwargs
from ..protocols import Conflict, Layout, WrapContext
from .blocks import refuse_sparse
from .single import Framed, Remedy, Single, hook_gradient
from .transforms import passed_over

# Options that torch takes as they are.
TORCH_OPTIONS = ("dim", "bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
CALLS = 8  # calls before one backward whose outputs find_unused_parameters searches
LATE = (
    "backward() added a gradient that no rank averages: {!r} had requires_grad=False when the model was prepared. "
    "Prepare the model anew once it trains, or freeze it after prepare (with find_unused_parameters=True)"
)


class DDP(Single):
    """torch's DistributedDataParallel around the model under autocast; one without trainable parameters is not wrapped.

    In place, by torch: parameters and buffers take rank 0's values when wrapped.
    """

    name: ClassVar[str] = "ddp"
    several: ClassVar[str] = "averages gradients over processes"
    conflicts: ClassVar[Sequence[Conflict]] = (
        Conflict("ddp", "optimizer_in_backward", "it averages gradients bucket by bucket", Remedy.IN_BACKWARD),
        Conflict("static_graph=True", "create_graph=True", "only the first backward is averaged", Remedy.LEAVE_OUT),
        Conflict(
            "comm_hook",
            "join_uneven_inputs()",
            "the hook divides by the number of all ranks, so that batches that some ranks no longer have would count "
            "less",
            "Leave comm_hook and gradient_predivide_factor out, or keep even_batches=True and do not join",
        ),
    )
    Options: ClassVar[type] = DistributedDataParallelKwargs

    def __init__(self, world: World, options: DistributedDataParallelKwargs) -> None:
        # Hooks compress gradients in backward, so accumulation sums these in `.grad`, in their own dtype.
        self.sums = options.comm_hook in ("no", "fp32")
        super().__init__(world, options)
        self._hook = make_hook(options, world.size)
        self._muons: weakref.WeakSet[Muon] = weakref.WeakSet()
        self._replicas: weakref.WeakSet[Replica] = weakref.WeakSet()
        self._step_hooks: list[RemovableHandle] = []  # of optimizers

    @staticmethod
    def option_words(options: Any) -> Collection[str]:
        words = {f"{name}=True" for name in ("find_unused_parameters", "static_graph") if getattr(options, name)}
        return words | {"comm_hook"} if options.comm_hook != "no" or options.gradient_predivide_factor else words

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        trained = [p for p in model.parameters() if p.requires_grad]
        buckets = [sum(p.numel() for p in b) for b in buckets_of(trained, options.bucket_cap_mb * 2**20)]
        reducing = 0 if options.gradient_as_bucket_view else sum(buckets)
        return Layout(reducing=reducing, early=max(buckets, default=0))

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer], context: WrapContext) -> nn.Module:
        options, device = self.options, self._world.device
        if options.comm_hook != "no":
            refuse_sparse(model, f"comm_hook={options.comm_hook!r} packs dense ones", "leave comm_hook at 'no'")
        if context.place:
            model.to(device)
        module = context.policy.forward(context.policy.convert(model), device)
        if any(p.requires_grad for p in model.parameters()):
            keywords = {name: getattr(options, name) for name in TORCH_OPTIONS}
            if not options.broadcast_buffers:
                keywords["broadcast_buffers"] = False  # naming torch's default warns from 2.13 on
            if context.place and device.type in ("cuda", "xpu"):
                keywords["device_ids"] = [device]
            module = Replica(Framed(module) if passed_over(module) else module, model, keywords)
            self._world.wrappers.add(module)
            self._replicas.add(module)
            if self._hook is not None:
                module.register_comm_hook(*self._hook)
        context.compile(module)
        return module

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return model.no_sync() if isinstance(model, DistributedDataParallel) else super().no_sync(model)

    def average(self, models: Sequence[nn.Module], gradients: Sequence[Tensor]) -> None:
        self._world.average_(gradients)
        for model in models:
            if isinstance(model, DistributedDataParallel):
                model.require_forward_param_sync = True  # buffers, as forward does before a reduction

    def after_backward(self, models: Sequence[nn.Module], create_graph: bool) -> Callable[[], None] | None:
        checks = [m.averaging_check() for m in models if isinstance(m, Replica)]
        if checks and create_graph:
            raise StepError(
                "backward(create_graph=True) under ddp, which averages gradients without a graph: call backward() "
                "on a loss that is made of torch.autograd.grad(..., create_graph=True)"
            )

        def check_all() -> None:
            for check in checks:
                check()

        return check_all if checks else None

    def spread(self, optimizer: Optimizer) -> Optimizer:
        self._check_steps(optimizer)
        if isinstance(optimizer, Muon):
            self._muons.add(optimizer)
            self._share_steps(True)
        return optimizer

    def _check_steps(self, optimizer: Optimizer) -> None:
        """Let each step of `optimizer` refuse gradients that the last backward has not averaged."""
        self._step_hooks.append(optimizer.register_step_pre_hook(self._check_reduced))

    def _check_reduced(self, optimizer: Optimizer, *_: Any) -> None:
        for replica in self._replicas:
            try:
                replica.check_reduced()
            except StepError:
                # An optimizer of other models may step. One with fp32 masters may not: they belong to no model.
                averaged = {id(p) for model in self._replicas if model is not replica for p in model.parameters()}
                if not averaged.issuperset(map(id, parameters_of(optimizer))):
                    raise

    def _share_steps(self, enabled: bool) -> None:
        """Set whether the ranks share the work of Muon's steps. A shared step is a collective."""
        for optimizer in self._muons:
            optimizer.shared = enabled

    @contextmanager
    def join(self, models: Sequence[nn.Module]) -> Iterator[None]:
        replicas: list[Any] = [m for m in models if isinstance(m, DistributedDataParallel)]
        self._share_steps(False)
        try:
            with Join(replicas, divide_by_initial_world_size=False) if replicas else nullcontext():
                yield
        finally:
            self._share_steps(True)

    def release(self, model: nn.Module, module: nn.Module) -> nn.Module:
        self._share_steps(False)
        while self._step_hooks:
            self._step_hooks.pop().remove()
        if isinstance(model, Replica):
            self._replicas.discard(model)
            for hook in model.hooks:
                hook.remove()
        return super().release(model, module)


def buckets_of(parameters: Sequence[Tensor], cap: float) -> list[list[Tensor]]:
    """`parameters` from the last to the first, as gradients mostly come, in lists of one dtype of up to `cap` bytes."""
    buckets: list[list[Tensor]] = []
    size, previous = 0, None
    for parameter in reversed(parameters):
        kind = parameter.dtype, bool(parameter.ndim)
        if kind != previous or size + parameter.nbytes > cap:
            buckets.append([])
            size, previous = 0, kind
        buckets[-1].append(parameter)
        size += parameter.nbytes
    return buckets


class Replica(DistributedDataParallel):
    """DistributedDataParallel with fixed buckets, and errors that name the parameters of the user's `root`.

    torch lays out buckets again after the first backward, in the order of its gradients, so that the last bits of a
    resumed run would differ. Here buckets go from the last parameter on.
    """

    def __init__(self, module: nn.Module, root: nn.Module, options: dict[str, Any]) -> None:
        self._reversed = not options["find_unused_parameters"]  # else torch keeps its first layout
        super().__init__(module, **options)
        self._names = [name for name, p in root.named_parameters() if p.requires_grad]
        if self._reversed:
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()
        self._started = False  # whether gradients have been reduced once
        self.armed = False  # the next backward averages gradients: a call of the model arms one backward
        trained = [p for p in root.parameters() if p.requires_grad]
        # Parameters that show whether a backward ran. A few are enough, since torch waits for all gradients.
        self._all = tuple(root.parameters())
        unused = options["find_unused_parameters"] or options["static_graph"]
        self._probes = (*trained[:4], *trained[4:][-4:]) if unused else tuple(trained[-1:])
        self._outputs: deque[list[Tensor]] = deque(maxlen=CALLS)  # of the calls since the last backward
        self._backward_ran = False  # since these calls
        self._unfrozen: set[tuple[int, str]] = set()  # number and name of those frozen when wrapped that got a gradient
        self.hooks = [
            hook_gradient(p, partial(self._record_unfrozen, (i, name)))
            for i, (name, p) in enumerate(root.named_parameters())
            if not p.requires_grad and (p.is_floating_point() or p.is_complex())
        ]

    def _build_params_for_reducer(self) -> Any:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]  # untyped in torch
        return (parameters[::-1], sparse[::-1]) if self._reversed else (parameters, sparse)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        training, reduces = torch.is_grad_enabled(), self.require_backward_grad_sync
        if training and reduces:
            self.__dict__["armed"] = True  # past nn.Module's own __setattr__, which takes microseconds
        if training and not self._started:
            # With a static graph, torch needs one reduced iteration before it may skip one. The average of an average
            # is that average.
            self._started = True
            self.require_backward_grad_sync = reduces or self.static_graph
        try:
            outputs = super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]  # untyped in torch
        except RuntimeError as error:
            self._explain(error)
            raise
        finally:
            if self.require_backward_grad_sync != reduces:
                self.require_backward_grad_sync = reduces
        if self.find_unused_parameters and self.armed and training:
            self._search_from(outputs)
        return outputs

    def _record_unfrozen(self, entry: tuple[int, str], _: Tensor) -> None:
        self._unfrozen.add(entry)

    def _search_from(self, outputs: Any) -> None:
        """Let torch find unused parameters from the outputs of all calls since a backward, not only the last one's."""
        if self._backward_ran:
            self._outputs.clear()
            self._backward_ran = False
        tensors = [leaf for leaf in leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        for tensor in tensors:
            tensor.register_hook(lambda _: setattr(self, "_backward_ran", True))
        self._outputs.append(tensors)
        if len(self._outputs) > 1 and not self.static_graph:
            self.reducer.prepare_for_backward([tensor for tensors in self._outputs for tensor in tensors])

    def averaging_check(self) -> Callable[[], None]:
        """Called before a backward. The result is called after it, and raises where gradients were not averaged."""
        self._unfrozen.clear()
        probes = self._probes if self.armed else self._all
        gradients = [(p, p.grad, 0 if p.grad is None else p.grad._version) for p in probes]

        def check() -> None:
            if self._unfrozen:
                raise StepError(LATE.format(min(self._unfrozen)[1]))
            if all(p.grad is grad and (grad is None or grad._version == version) for p, grad, version in gradients):
                return
            if not self.armed:
                raise StepError(
                    "backward() added gradients that no rank averages: the model was not called since the last "
                    "backward() that averaged them. Call the model itself, once for each backward(), not a part of it; "
                    "name another method that trains in prepare(model, forward_methods=('name',)), or decorate it with "
                    "@easymp.forward_method"
                )
            self.__dict__["armed"] = False

        return check

    def check_reduced(self) -> None:
        """Raise StepError if the last backward has not averaged all gradients."""
        try:
            self.reducer._rebuild_buckets()  # checks that; buckets that are built stay
        except RuntimeError as error:
            self._explain(error)
            raise

    def _explain(self, error: RuntimeError) -> None:
        """Raise a StepError if `error` is torch's about gradients that it waits for."""
        if UNFINISHED in str(error):
            raise StepError(self._explain_unused(str(error))) from error

    def _explain_unused(self, error_text: str) -> str:
        """torch's message about parameters that it waits for, with their names and the remedy under these options."""
        ranks = re.search(r"did not receive grad for rank \d+: ([\d ]+)", error_text)
        last = len(self._names) - 1  # the reducer counts from there
        missing = sorted(last - int(i) if self._reversed else int(i) for i in ranks[1].split()) if ranks else []
        names = ", ".join(repr(self._names[i]) for i in missing[:5])
        etc = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        subject = f"no gradient came for {names}{etc}" if missing else "not every parameter got a gradient"
        if self.static_graph:
            remedy = "With static_graph=True each step must use the same parameters: use find_unused_parameters instead"
        elif self.find_unused_parameters:
            remedy = "find_unused_parameters=True searches forward's outputs: return tensors, and use them in the loss"
        else:
            remedy = (
                "If the loss does not depend on them at each step, pass "
                "DistributedDataParallelKwargs(find_unused_parameters=True); if it never does, freeze them before "
                "prepare: requires_grad_(False)"
            )
        return f"in the last backward {subject}, and ddp averages gradients only when it has them all. {remedy}"


UNFINISHED = "Expected to have finished reduction in the prior iteration"


# -- comm hooks: gradients are cast for the reduction -----------------------------------------------------------------


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def make_hook(options: DistributedDataParallelKwargs, size: int) -> tuple[Any, Any] | None:
    """Make the state and hook for ``register_comm_hook`` on `size` ranks; None for torch's own all-reduce."""
    if options.comm_hook == "no" and options.gradient_predivide_factor is None:
        return None
    before = options.gradient_predivide_factor or float(size)
    return CommHookState(DTYPES.get(options.comm_hook), before, size / before), all_reduce


class CommHookState(NamedTuple):
    """The dtype in which gradients are summed (None: their own), and the divisors before and after."""

    dtype: torch.dtype | None
    before: float
    after: float


def all_reduce(state: CommHookState, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with its own
    """Average over the ranks, summed in `state.dtype`. Complex and wider gradients than fp32 keep their own dtype."""
    gradient = bucket.buffer()
    dtype = gradient.dtype
    if state.dtype is not None and dtype.is_floating_point:
        dtype = torch.promote_types(dtype, torch.float32) if state.dtype == torch.float32 else state.dtype
    if wider := torch.promote_types(dtype, gradient.dtype) == dtype:  # divided where there is more room
        summed = gradient.to(dtype).div_(state.before)
    else:  # one pass: divided in the wider type, then rounded
        summed = torch.div(gradient, state.before, out=torch.empty_like(gradient, dtype=dtype))

    def divide(future: Any) -> Tensor:
        (total,) = future.value()
        if state.after != 1 and wider:
            total.div_(state.after)
        gradient.copy_(total)
        return gradient if state.after == 1 or wider else gradient.div_(state.after)  # type: ignore[no-any-return]

    return dist.all_reduce(summed, async_op=True).get_future().then(divide)
