"""ddp: every rank holds the whole model; gradients are averaged while backward runs."""

from __future__ import annotations

import math
import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..base.pytree import leaves
from ..distributed import World
from ..errors import RefusedError, StepError
from ..optim.muon import Muon
from ..options import DistributedDataParallelKwargs
from ..protocols import Layout, WrapContext
from .blocks import refuse_sparse
from .single import Framed, Single, hook_gradient, share_buffers, take_rank_0s
from .transforms import passed_over

# Options that torch takes as they are.
TORCHS = ("dim", "bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
CALLS = 8  # before one backward, whose outputs are looked at under find_unused_parameters
LATE = (
    "backward() added a gradient that no rank averages: {!r} had requires_grad=False when the model was prepared. Freeze it after that "
    "instead (with find_unused_parameters=True where that can be), or prepare the model anew once it trains"
)


class DDP(Single):
    """torch's DistributedDataParallel, around the model under autocast; a model without trainable parameters is left unwrapped.

    In place, by torch: parameters and buffers take rank 0's values when wrapped. `comm_hook` changes the precision of the averaged
    gradients: under fp16 with a loss scale, ``comm_hook="fp16"`` overflows when the scaled gradients do, and the scale falls until they
    fit.
    """

    name: ClassVar[str] = "ddp"
    traffic: ClassVar = {"backward": ("all_reduce",)}
    several: ClassVar[str] = "averages gradients over processes"
    Options: ClassVar[type] = DistributedDataParallelKwargs

    def __init__(self, world: World, options: DistributedDataParallelKwargs) -> None:
        # Hooks compress gradients during backward, so under accumulation these are summed in `.grad`, in their own dtype.
        self.sums = options.comm_hook in ("no", "fp32")
        super().__init__(world, options)
        self.data_rank, self.data_size = world.rank // self.context_size, world.size // self.context_size
        self._sharing: weakref.WeakSet[Muon] = weakref.WeakSet()
        own = options.find_unused_parameters or options.static_graph or make_hook(options, world.size)
        if own and not self.no_step_in_backward:
            self.no_step_in_backward = "averages gradients bucket by bucket then, without find_unused_parameters, static_graph and hooks"
        self._early: list[Early] = []
        if options.static_graph:
            self.no_double_backward = "with static_graph=True the first backward counts as the one that is averaged. Leave static_graph out"

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        trained = [p for p in model.parameters() if p.requires_grad]
        buckets = [sum(p.numel() for p in b) for b in buckets_of(trained, options.bucket_cap_mb * 2**20)]
        errors = options.low_rank and options.comm_state_option.get("use_error_feedback", True)  # PowerSGD's
        copies = (not options.gradient_as_bucket_view) + errors
        return Layout(reducing=sum(buckets) * copies, early=max(buckets, default=0))

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer], context: WrapContext) -> nn.Module:
        _check(model, self.options, context)
        device = self._world.device
        if context.place:
            model.to(device)
        module = context.policy.forward(context.policy.convert(model), device)
        if context.in_backward:
            why = "optimizer_in_backward=True averages dense ones only"
            refuse_sparse(model, why, "leave optimizer_in_backward out")
            take_rank_0s(model, self._world)
            self._early.append(Early(module, model, self._world, self.options))
            module = self._early[-1]
        elif any(p.requires_grad for p in model.parameters()):
            options = {name: getattr(self.options, name) for name in TORCHS}
            if not self.options.broadcast_buffers:
                options["broadcast_buffers"] = False  # naming torch's default warns from 2.13 on
            if context.place and device.type in ("cuda", "xpu"):
                options["device_ids"] = [device]
            module = Replica(Framed(module) if passed_over(module) else module, model, options)
            hook = make_hook(self.options, self._world.size)
            if hook is not None:
                module.register_comm_hook(*hook)
                if self.options.low_rank:
                    self._world.carried.append(Carried(hook[0], module))
        context.compile(module)
        return module

    def reduced(self, parameter: Tensor) -> Sequence[Tensor]:
        return next((e.reduced(parameter) for e in self._early if id(parameter) in e.names), ())

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return model.no_sync() if isinstance(model, DistributedDataParallel) else super().no_sync(model)

    @contextmanager
    def force_sync(self, model: nn.Module) -> Iterator[None]:
        if not isinstance(model, DistributedDataParallel):
            with super().force_sync(model):
                yield
            return
        before = model.require_backward_grad_sync
        model.require_backward_grad_sync = model.armed = True  # type: ignore[assignment]
        model.reducer.prepare_for_backward([])  # what forward does when it expects a reduction
        try:
            yield
        finally:
            model.require_backward_grad_sync = before

    def average(self, models: Sequence[nn.Module], gradients: Sequence[Tensor]) -> None:
        self._world.average_(gradients)
        for model in models:
            if isinstance(model, DistributedDataParallel):
                model.require_forward_param_sync = True  # buffers, as forward does before a reduction

    def after_backward(self, models: Sequence[nn.Module], create_graph: bool) -> Callable[[], None] | None:
        if self._early:
            return lambda: [early.check() for early in self._early] and None
        replicas = [(m, m.gradients()) for m in models if isinstance(m, Replica)]
        if replicas and create_graph:
            raise StepError(
                "backward(create_graph=True) under ddp, which averages gradients in place and keeps no graph of them: take the inner "
                "gradient by torch.autograd.grad(..., create_graph=True), and call backward() on a loss made of it"
            )
        if not replicas:
            return None
        return lambda: [replica.check_averaged(before) for replica, before in replicas] and None

    def spread(self, optimizer: Optimizer) -> Optimizer:
        if isinstance(optimizer, Muon):
            self._sharing.add(optimizer)
            self._share(True)
        return optimizer

    def _share(self, on: bool) -> None:
        """Set whether the ranks share the work of a step, which then is a collective."""
        for optimizer in self._sharing:
            optimizer.shared = on

    @contextmanager
    def join(self, models: Sequence[nn.Module]) -> Iterator[None]:
        replicas = [m for m in models if isinstance(m, DistributedDataParallel)]
        if make_hook(self.options, self._world.size) is not None:
            raise RefusedError(
                "join_uneven_inputs with a comm_hook or gradient_predivide_factor, which divide by the number of all ranks: batches that "
                "some ranks no longer have would count less. Leave these options out, or keep even_batches=True and do not join"
            )
        self._share(False)
        try:
            with Join(replicas, divide_by_initial_world_size=False) if replicas else nullcontext():
                yield
        finally:
            self._share(True)

    def release(self, model: nn.Module, alone: nn.Module) -> nn.Module:
        self._share(False)
        for hook in model.hooks if isinstance(model, Replica) else ():
            hook.remove()
        self._early = [early for early in self._early if early is not model]
        return alone


class Early(nn.Module):
    """Calls the model with rank 0's buffers, and averages gradients bucket by bucket, so that they can be stepped on and freed.

    torch's DistributedDataParallel keeps buckets of all gradients. Here a bucket is there from its first gradient to its step. Buckets
    go from the last parameter to the first, on all ranks in this order, and each is averaged when its gradients are complete.
    """

    def __init__(self, module: nn.Module, root: nn.Module, world: World, options: Any) -> None:
        super().__init__()
        self.module, self._world, self._root = module, world, (root,)
        self._shares = options.broadcast_buffers
        trained = [p for p in root.parameters() if p.requires_grad]
        self._buckets = buckets_of(trained, options.bucket_cap_mb * 2**20)
        self.names = {id(p): name for name, p in root.named_parameters()}
        self._ready: set[int] = set()
        self._next = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._ready, self._next = set(), 0  # a backward before may have ended in an error
            if self._shares:
                share_buffers(self._root[0], self._world)
        return self.module(*args, **kwargs)

    def reduced(self, parameter: Tensor) -> list[Tensor]:
        """Parameters whose gradients are averaged now that `parameter` has its own."""
        self._ready.add(id(parameter))
        done: list[Tensor] = []
        while self._next < len(self._buckets) and self._ready.issuperset(map(id, self._buckets[self._next])):
            bucket = self._buckets[self._next]
            self._world.average_([p.grad for p in bucket if p.grad is not None])
            done += bucket
            self._next += 1
        return done

    def check(self) -> None:
        """After a backward: raises StepError where a parameter had no gradient, or was frozen when it was wrapped."""
        ready, self._ready, self._next = self._ready, set(), 0
        waited = [id(p) for bucket in self._buckets for p in bucket]
        missing = [self.names[p] for p in waited if p not in ready]
        if late := ready.difference(waited):
            raise StepError(LATE.format(self.names[late.pop()]))
        if missing and ready:  # else the loss was another model's
            raise StepError(
                f"no gradient came for {missing[0]!r}, and with optimizer_in_backward=True ddp averages gradients only when it has them "
                "all: use all parameters in each step, freeze others before prepare, or leave optimizer_in_backward out"
            )


def buckets_of(parameters: Sequence[Tensor], cap: float) -> list[list[Tensor]]:
    """`parameters` from the last to the first, as gradients mostly come, in lists of one dtype and up to `cap` bytes."""
    buckets: list[list[Tensor]] = []
    held = 0
    for parameter in reversed(parameters):
        last = buckets[-1][-1] if buckets else None
        alike = last is not None and last.dtype == parameter.dtype and bool(last.ndim) == bool(parameter.ndim)
        if not alike or held + parameter.nbytes > cap:
            buckets.append([])
            held = 0
        buckets[-1].append(parameter)
        held += parameter.nbytes
    return buckets


class Replica(DistributedDataParallel):
    """DistributedDataParallel of `module`, which calls the user's `root`, with the user's names in its errors, and with fixed buckets.

    torch lays out buckets for the first backward, and again in the order in which its gradients came. The place in a bucket decides the
    order in which the ranks' parts are summed, so on three or more ranks a resumed run would differ in the last bits from one that was not
    interrupted. Here buckets go from the last parameter to the first from the beginning, as gradients mostly come.
    """

    def __init__(self, module: nn.Module, root: nn.Module, options: dict[str, Any]) -> None:
        self._backwards = not options["find_unused_parameters"]  # else torch keeps its first layout
        super().__init__(module, **options)
        self._names = [name for name, p in root.named_parameters() if p.requires_grad]
        if self._backwards:
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()
        self._begun = False  # whether gradients have been reduced once
        self.armed = False  # the next backward averages gradients: a call of the model arms one backward
        trained = [p for p in root.parameters() if p.requires_grad]
        # Parameters that show whether a backward ran. A few are enough, since torch waits for all gradients.
        self._all = tuple(root.parameters())
        some_may_lack = options["find_unused_parameters"] or options["static_graph"]
        self._few = (*trained[:4], *trained[4:][-4:]) if some_may_lack else tuple(trained[-1:])
        self._outputs: deque[list[Tensor]] = deque(maxlen=CALLS)  # since the last backward
        self._done = False  # whether there has been one
        self._late: list[tuple[int, str]] = []  # frozen when wrapped, and with a gradient in this backward
        self.hooks = [
            hook_gradient(p, lambda _, found=(i, name): self._late.append(found))
            for i, (name, p) in enumerate(root.named_parameters())
            if not p.requires_grad and (p.is_floating_point() or p.is_complex())
        ]

    def _build_params_for_reducer(self) -> Any:
        parameters, sparse = super()._build_params_for_reducer()
        return (parameters[::-1], sparse[::-1]) if self._backwards else (parameters, sparse)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if self.require_backward_grad_sync and torch.is_grad_enabled():
                self.__dict__["armed"] = True  # past nn.Module's own __setattr__, which takes microseconds
            if not self._begun and torch.is_grad_enabled():
                self._begun = True
                if self.static_graph and not self.require_backward_grad_sync:
                    return self._reduced(*args, **kwargs)
            outputs = super().forward(*args, **kwargs)
            if self.find_unused_parameters and self.armed and torch.is_grad_enabled():
                self._look_from(outputs)
            return outputs
        except RuntimeError as error:
            if UNFINISHED in str(error):
                raise StepError(self._unused(str(error))) from error
            raise

    def _look_from(self, outputs: Any) -> None:
        """Let torch find unused parameters from the outputs of the last calls since a backward, not only of the last call."""
        if self._done:
            self._outputs.clear()
            self._done = False
        found = [leaf for leaf in leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        for leaf in found:
            leaf.register_hook(lambda _: setattr(self, "_done", True))
        self._outputs.append(found)
        if len(self._outputs) > 1 and not self.static_graph:
            self.reducer.prepare_for_backward([leaf for call in self._outputs for leaf in call])

    def _reduced(self, *args: Any, **kwargs: Any) -> Any:
        # With a static graph, torch needs one reduced iteration before it may skip one; the average of an average is that average.
        self.require_backward_grad_sync = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.require_backward_grad_sync = False

    def gradients(self) -> list[tuple[Tensor, Tensor | None, int]]:
        """Parameters, each with its gradient and the gradient's version, for `check_averaged` after a backward."""
        self._late.clear()
        chosen = self._few if self.armed else self._all
        return [(p, grad, 0 if grad is None else grad._version) for p in chosen for grad in [p.grad]]

    def check_averaged(self, before: Sequence[tuple[Tensor, Tensor | None, int]]) -> None:
        """Raise StepError where a backward that was to average gradients added some that no rank averages."""
        if self._late:
            raise StepError(LATE.format(min(self._late)[1]))
        if not any(p.grad is not g or (g is not None and g._version != version) for p, g, version in before):
            return
        if not self.armed:
            raise StepError(
                "backward() added gradients that no rank averages: the model was not called since the last backward() that averaged them. "
                "Call the model itself, once for each backward() (add losses up first), not a part of it; name another method that "
                "trains in prepare(model, forward_methods=('name',)), or decorate it with @easymp.forward_method"
            )
        self.__dict__["armed"] = False

    def _unused(self, said: str) -> str:
        """torch's message about parameters that it waits for, with their names and the remedy under these options."""
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", said)
        last = len(self._names) - 1  # the reducer counts from there
        missing = (
            sorted(last - int(i) if self._backwards else int(i) for i in found[1].split()) if found else []
        )
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        lacking = f"no gradient came for {', '.join(repr(self._names[i]) for i in missing[:5])}{more}"
        who = lacking if missing else "not every parameter got a gradient"
        if self.static_graph:
            cure = "With static_graph=True each step must use the same parameters: pass find_unused_parameters=True instead"
        elif self.find_unused_parameters:
            cure = "find_unused_parameters=True looks from forward's outputs: return tensors, and use all of them in the loss"
        else:
            cure = (
                "If the loss does not depend on them at each step, pass DistributedDataParallelKwargs(find_unused_parameters=True) (in "
                "strategy_options or kwargs_handlers); if it never does, freeze them before prepare: requires_grad_(False)"
            )
        return f"in the last backward {who}, and ddp averages gradients only when it has them all. {cure}"


UNFINISHED = "Expected to have finished reduction in the prior iteration"


def _check(model: nn.Module, options: DistributedDataParallelKwargs, context: WrapContext) -> None:
    """Refuse models and precisions that a comm_hook cannot serve."""
    if options.comm_hook == "no":
        return
    refuse_sparse(model, f"comm_hook={options.comm_hook!r} packs dense ones", "leave comm_hook at 'no'")
    if options.remembers and context.policy.scaled:
        raise RefusedError(
            f"comm_hook={options.comm_hook!r} remembers what it did not send, so the overflow that {context.policy.name} with a loss scale "
            "is meant to skip would stay in it: use bf16, or comm_state_option={'use_error_feedback': False, 'warm_start': False}"
        )


# -- comm hooks: gradients are cast for the reduction, or sent as products of two thin matrices (PowerSGD) -------------


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# PowerSGD divides columns by their length. Columns of a zero gradient (a parameter not in use yet) would be NaN for ever, since it
# starts from the last step's matrices. fp16 has no number between 0 and 6e-8.
EPSILON = {"fp16": 1e-6, "bf16": 1e-8, "no": 1e-8}

# Keys of a checkpoint → attributes of PowerSGDState, each a dict by bucket.
REMEMBERED = {"errors": "error_dict", "p": "p_memory_dict", "q": "q_memory_dict"}


def make_hook(options: DistributedDataParallelKwargs, size: int) -> tuple[Any, Any] | None:
    """Make the state and hook for ``register_comm_hook`` on `size` ranks; None for torch's own all-reduce."""
    if options.low_rank:
        return _power_sgd(options)
    if options.comm_hook == "no" and options.gradient_predivide_factor is None:
        return None
    before = options.gradient_predivide_factor or float(size)
    return CommHookState(DTYPES.get(options.comm_hook), before, size / before), all_reduce


class CommHookState(NamedTuple):
    """The dtype in which gradients are summed (None: their own), and the divisors before and after."""

    dtype: torch.dtype | None
    before: float
    after: float


def all_reduce(state: CommHookState, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with its own types
    """Average over the ranks, summed in `state.dtype`. Complex gradients and wider dtypes than fp32 keep their own dtype."""
    gradient = bucket.buffer()
    dtype = gradient.dtype
    if state.dtype is not None and dtype.is_floating_point:
        dtype = torch.promote_types(dtype, torch.float32) if state.dtype == torch.float32 else state.dtype
    wider = torch.promote_types(dtype, gradient.dtype) == dtype  # divided where there is more room
    if wider:
        moved = gradient.to(dtype).div_(state.before)
    else:  # one pass: divided in the wider type, then rounded
        moved = torch.div(gradient, state.before, out=torch.empty_like(gradient, dtype=dtype))

    def arrived(future: Any) -> Tensor:
        (total,) = future.value()
        if wider:
            return gradient.copy_(total if state.after == 1 else total.div_(state.after))
        gradient.copy_(total)
        return gradient if state.after == 1 else gradient.div_(state.after)

    return dist.all_reduce(moved, async_op=True).get_future().then(arrived)


class Carried:
    """The PowerSGDState of a DistributedDataParallel, for checkpoints: errors of the last reduction, matrices, and the count of steps."""

    def __init__(self, state: Any, module: Any) -> None:
        self._state, self._module = state, weakref.ref(module)

    @property
    def alive(self) -> bool:
        return self._module() is not None

    def state_dict(self) -> dict[str, Any]:
        dicts = {name: dict(getattr(self._state, own)) for name, own in REMEMBERED.items()}
        return {"step": self._state.iter, "drawn": self._state.rng.get_state(), **dicts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        module = self._module()
        device = next(module.parameters()).device if module is not None else None
        self._state.iter = state["step"]
        self._state.rng.set_state(state["drawn"])
        for name, own in REMEMBERED.items():
            setattr(self._state, own, {int(b): tensor.to(device) for b, tensor in state[name].items()})


def _power_sgd(options: DistributedDataParallelKwargs) -> tuple[Any, Any]:
    # Imported here: it needs NumPy.
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    given = {"orthogonalization_epsilon": EPSILON[options.comm_wrapper], **options.comm_state_option}
    dtype = DTYPES.get(options.comm_wrapper)
    square = options.comm_hook == "batched_power_sgd"

    def low_rank(state, bucket):  # type: ignore[no-untyped-def]
        gradient = bucket.buffer()
        # torch's hook cannot make matrices of scalars and of empty tensors.
        shapes = [tuple(g.shape) if g.ndim and g.numel() else (1, g.numel()) for g in bucket.gradients()]
        moved = gradient if dtype is None else gradient.to(dtype)
        if square:
            side = math.isqrt(gradient.numel() - 1) + 1  # of the smallest square that holds all
            moved = torch.cat([moved, moved.new_zeros(side * side - gradient.numel())])
            shapes = [(side, side)]

        def arrived(future: Any) -> Tensor:
            total = future.value()
            return gradient if total is gradient else gradient.copy_(total[: gradient.numel()])

        parts = moved.split([math.prod(shape) for shape in shapes])
        gradients = [part.view(shape) for part, shape in zip(parts, shapes)]
        load: Any = SimpleNamespace(  # the bucket as PowerSGD reads it, over another buffer
            buffer=lambda: moved, gradients=lambda: gradients, index=bucket.index, is_last=bucket.is_last
        )
        future = powerSGD_hook(state, load).then(arrived)
        if gradient.device.type == "cpu":
            # PowerSGD starts its second and third all-reduce when the one before has arrived: on gloo in another thread, and so between
            # other buckets' in another order on each rank. On NCCL they are queued at once.
            future.wait()
        return future

    return PowerSGDState(None, **given), low_rank
