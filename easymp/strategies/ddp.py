"""ddp: every rank holds the whole model; gradients are averaged while backward runs."""

from __future__ import annotations

import math
import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

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


class DDP(Single):
    """torch's DistributedDataParallel, around the model under autocast.

    In place, by torch: parameters and buffers take rank 0's values when wrapped. A model without trainable parameters is
    left unwrapped, for there is nothing to average.

    `comm_hook` changes the precision of the averaged gradients. Under fp16 with a loss scale, ``comm_hook="fp16"`` overflows when the
    scaled gradients do, and the scale falls until they fit.
    """

    name: ClassVar[str] = "ddp"
    several: ClassVar[str] = "averages gradients over processes"
    Options: ClassVar[type] = DistributedDataParallelKwargs

    def __init__(self, world: World, options: DistributedDataParallelKwargs) -> None:
        self.data_rank, self.data_size = world.rank, world.size
        # Hooks compress gradients during backward, so under accumulation these are summed in `.grad`, in their own dtype.
        self.sums = options.comm_hook in ("no", "fp32")
        super().__init__(world, options)
        self._sharing: weakref.WeakSet[Muon] = weakref.WeakSet()
        if not self.no_step_in_backward and (
            options.find_unused_parameters or options.static_graph or make_hook(options, world.size)
        ):
            self.no_step_in_backward = (
                "averages gradients bucket by bucket then, without find_unused_parameters, static_graph, comm_hook and "
                "gradient_predivide_factor"
            )
        self._early: list[Early] = []
        if options.static_graph:
            self.no_double_backward = "with static_graph=True the first backward counts as the one that is averaged. Leave static_graph out"

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        buckets = sum(p.numel() for p in model.parameters() if p.requires_grad)
        errors = options.low_rank and options.comm_state_option.get(
            "use_error_feedback", True
        )  # PowerSGD's, of each element
        early = max((sum(p.numel() for p in b) for b in buckets_of(model, options)), default=0)
        return Layout(reducing=buckets * ((not options.gradient_as_bucket_view) + errors), early=early)

    def wrap(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], context: WrapContext
    ) -> nn.Module:
        _check(model, self.options, context)
        device = self._world.device
        if context.place:
            model.to(device)
        module = context.policy.forward(context.policy.convert(model), device)
        if context.in_backward:
            refuse_sparse(
                model,
                "optimizer_in_backward=True averages dense ones only",
                "leave optimizer_in_backward out",
            )
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
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    @contextmanager
    def force_sync(self, model: nn.Module) -> Iterator[None]:
        if not isinstance(model, DistributedDataParallel):
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
                model.require_forward_param_sync = (
                    True  # buffers: what forward does when it expects a reduction
                )

    def after_backward(self, models: Sequence[nn.Module], create_graph: bool) -> Callable[[], None] | None:
        if self._early:
            return lambda: [early.check() for early in self._early] and None
        replicas = [(m, m.gradients()) for m in models if isinstance(m, Replica)]
        if not replicas:
            return None
        if create_graph:
            raise StepError(
                "backward(create_graph=True) under ddp, which averages gradients in place and keeps no graph of them: take the inner "
                "gradient by torch.autograd.grad(..., create_graph=True), and call backward() on a loss made of it"
            )

        def check() -> None:
            for replica, before in replicas:
                replica.check_averaged(before)

        return check

    def spread(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if isinstance(optimizer, Muon):
            self._sharing.add(optimizer)
            self._share(True)
        return optimizer

    def _share(self, on: bool) -> None:
        """Whether the ranks share the work of a step, which then is a collective."""
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
        self._buckets = buckets_of(root, options)
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
        left, late = (
            self._buckets[self._next :],
            self._ready.difference(id(p) for b in self._buckets for p in b),
        )
        missing = [self.names[id(p)] for bucket in left for p in bucket if id(p) not in self._ready]
        idle = not self._ready  # the loss was another model's
        self._ready, self._next = set(), 0
        if late:
            raise StepError(
                f"backward() added a gradient that no rank averages: {self.names[late.pop()]!r} had requires_grad=False when the model was "
                "prepared. Freeze it after prepare() instead, or prepare the model anew once it trains"
            )
        if missing and not idle:
            raise StepError(
                f"no gradient came for {missing[0]!r}, and with optimizer_in_backward=True ddp averages gradients only when it has them "
                "all: use all parameters in each step, freeze others before prepare, or leave optimizer_in_backward out"
            )


def buckets_of(model: nn.Module, options: Any) -> list[list[nn.Parameter]]:
    """Trainable parameters from the last to the first, in buckets of `bucket_cap_mb`."""
    buckets: list[list[nn.Parameter]] = []
    room = 0.0
    for parameter in [p for p in model.parameters() if p.requires_grad][::-1]:
        if room <= 0:
            buckets.append([])
            room = options.bucket_cap_mb * 2**20
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    return buckets


class Replica(DistributedDataParallel):
    """DistributedDataParallel with the user's names of parameters in its errors, and with fixed buckets.

    torch lays out buckets for the first backward, and again in the order in which its gradients came. The place in a bucket decides the
    order in which the ranks' parts are summed, so on three or more ranks a resumed run would differ in the last bits from one that was not
    interrupted. Here buckets go from the last parameter to the first from the beginning, as gradients mostly come.

    Args:
        module: `root`, or `root` under autocast.
        root: the user's module.
        options: for torch.
    """

    def __init__(self, module: nn.Module, root: nn.Module, options: dict[str, Any]) -> None:
        self._backwards = not options["find_unused_parameters"]  # else torch keeps its first layout
        super().__init__(module, **options)
        self._in_order = [name for name, p in root.named_parameters() if p.requires_grad]
        self._names = (
            self._in_order[::-1] if self._backwards else self._in_order
        )  # as the reducer counts them
        if self._backwards:
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()
        self._begun = False  # whether gradients have been reduced once
        self.armed = (
            False  # whether the next backward averages gradients: a call of the model arms one backward
        )
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
        """Let torch find unused parameters from the outputs of all calls since the last backward, not only the last call.

        Only the last few calls are kept, because calls without a backward would keep their graphs alive.
        """
        if self._done:
            self._outputs.clear()
            self._done = False
        found = [leaf for leaf in leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        for leaf in found:
            leaf.register_hook(self._backward_came)
        self._outputs.append(found)
        if len(self._outputs) > 1 and not self.static_graph:
            self.reducer.prepare_for_backward([leaf for call in self._outputs for leaf in call])

    def _backward_came(self, gradient: Tensor) -> None:
        self._done = True

    def _reduced(self, *args: Any, **kwargs: Any) -> Any:
        # With a static graph, torch's reducer needs one reduced iteration before it may skip one. Reducing early changes no
        # result: the average over ranks of an average is that average.
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
        """Check a backward that was to average gradients.

        Raises:
            StepError: it added gradients that no rank averages.
        """
        if self._late:
            raise StepError(
                f"backward() added a gradient that no rank averages: {min(self._late)[1]!r} had requires_grad=False when the model was "
                "prepared. Freeze it after prepare() instead, with DistributedDataParallelKwargs(find_unused_parameters=True); or "
                "prepare the model anew once it trains (free_memory() lets go of it)"
            )
        for parameter, grad, version in before:
            if parameter.grad is not grad or (grad is not None and grad._version != version):
                break
        else:
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
        missing = {self._names[int(i)] for i in found[1].split()} if found else set()
        names = [repr(name) for name in self._in_order if name in missing]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        lacking = f"no gradient came for {', '.join(names[:5])}{more}"
        who = lacking if names else "not every parameter got a gradient"
        if self.static_graph:
            cure = (
                "With static_graph=True each step must use the same parameters: pass "
                "DistributedDataParallelKwargs(find_unused_parameters=True) without static_graph"
            )
        elif self.find_unused_parameters:
            cure = (
                "find_unused_parameters=True looks from forward's outputs: use all of them in the loss, and return them as tensors in "
                "tuples, lists, dicts or dataclasses, where torch finds them"
            )
        else:
            cure = (
                "If the loss does not depend on them at each step, pass DistributedDataParallelKwargs(find_unused_parameters=True) (in "
                "strategy_options or kwargs_handlers); if it never does, freeze them before prepare: requires_grad_(False)"
            )
        return f"in the last backward {who}, and ddp averages gradients only when it has them all. {cure}"


UNFINISHED = "Expected to have finished reduction in the prior iteration"


def _check(model: nn.Module, options: DistributedDataParallelKwargs, context: WrapContext) -> None:
    """Refuse models and precisions that a comm_hook cannot serve.

    Raises:
        PrepareError: such a model.
        RefusedError: such a precision.
    """
    if options.comm_hook == "no":
        return
    refuse_sparse(model, f"comm_hook={options.comm_hook!r} packs dense ones", "leave comm_hook at 'no'")
    if options.remembers and context.policy.scaled:
        raise RefusedError(
            f"comm_hook={options.comm_hook!r} remembers what it did not send, so the overflow that {context.policy.name} with a loss scale "
            "is meant to skip would stay in it for good: use bf16, or comm_state_option={'use_error_feedback': False, 'warm_start': "
            "False}"
        )


# -- comm hooks: gradients are cast for the reduction, or sent as products of two thin matrices (PowerSGD) -------------


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# PowerSGD divides columns by their length. Columns of a zero gradient (a parameter not in use yet) would be NaN for ever, since it
# starts from the last step's matrices. fp16 has no number between 0 and 6e-8.
EPSILON = {"fp16": 1e-6, "bf16": 1e-8, "no": 1e-8}

# Keys of a checkpoint → attributes of PowerSGDState, each a dict by bucket.
REMEMBERED = {"errors": "error_dict", "p": "p_memory_dict", "q": "q_memory_dict"}

Future = torch.futures.Future[Tensor]


def make_hook(
    options: DistributedDataParallelKwargs, size: int
) -> tuple[Any, Callable[[Any, Any], Future]] | None:
    """Make the state and hook for ``register_comm_hook``; None for torch's own all-reduce.

    Args:
        size: ranks.
    """
    if options.low_rank:
        return _power_sgd(options)
    if options.comm_hook == "no" and options.gradient_predivide_factor is None:
        return None
    before = options.gradient_predivide_factor or float(size)
    return CommHookState(DTYPES.get(options.comm_hook), before, size / before), all_reduce


@dataclass(frozen=True)
class CommHookState:
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


class Load:
    """A bucket as PowerSGD reads it, over another buffer than DistributedDataParallel's."""

    def __init__(
        self, bucket: dist.GradBucket, buffer: Tensor, shapes: Sequence[torch.Size | tuple[int, ...]]
    ) -> None:
        self._bucket, self._buffer = bucket, buffer
        parts = buffer.split([math.prod(shape) for shape in shapes])
        self._gradients = [part.view(shape) for part, shape in zip(parts, shapes)]

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return self._gradients

    def index(self) -> int:
        return self._bucket.index()

    def is_last(self) -> bool:
        return self._bucket.is_last()


class Carried:
    """The state of PowerSGD on this rank, for checkpoints: errors of the last reduction, matrices, and the count of steps.

    Args:
        state: torch's PowerSGDState.
        module: the DistributedDataParallel that it belongs to.
    """

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
            setattr(
                self._state, own, {int(bucket): tensor.to(device) for bucket, tensor in state[name].items()}
            )


def _power_sgd(options: DistributedDataParallelKwargs) -> tuple[Any, Callable[[Any, Any], Future]]:
    # Imported here: it needs NumPy.
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    given = {"orthogonalization_epsilon": EPSILON[options.comm_wrapper], **options.comm_state_option}
    dtype = DTYPES.get(options.comm_wrapper)
    square = options.comm_hook == "batched_power_sgd"

    def low_rank(state, bucket):  # type: ignore[no-untyped-def]
        gradient = bucket.buffer()
        # torch's hook cannot make matrices of scalars and of empty tensors.
        shapes: Sequence[Any] = [
            g.shape if g.ndim and g.numel() else (1, g.numel()) for g in bucket.gradients()
        ]
        moved = gradient if dtype is None else gradient.to(dtype)
        if square:
            side = math.isqrt(gradient.numel() - 1) + 1  # of the smallest square that holds all
            moved = torch.cat([moved, moved.new_zeros(side * side - gradient.numel())])
            shapes = [(side, side)]

        def arrived(future: Any) -> Tensor:
            total = future.value()
            return gradient if total is gradient else gradient.copy_(total[: gradient.numel()])

        load: Any = Load(bucket, moved, shapes)
        future = powerSGD_hook(state, load).then(arrived)
        if gradient.device.type == "cpu":
            # PowerSGD starts its second and third all-reduce when the one before has arrived: on gloo in another thread, and so between
            # other buckets' in another order on each rank. On NCCL they are queued at once.
            future.wait()
        return future

    return PowerSGDState(None, **given), low_rank
