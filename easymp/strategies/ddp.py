"""ddp: every rank holds the whole model; gradients are averaged while backward runs."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ..base.pytree import leaves
from ..distributed import World
from ..errors import RefusedError, StepError
from ..options import DistributedDataParallelKwargs
from ..protocols import Counting, Facts, Layout, Manner, Refusal
from .blocks import refuse_sparse
from .compiling import passed_over
from .framed import Framed
from .hooks import Carried, make_hook
from .norms import clip_whole

# Options that torch takes as they are.
TORCHS = ("dim", "bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
CALLS = 8  # before one backward, whose outputs are looked at under find_unused_parameters


class DDP:
    """torch's DistributedDataParallel, around the model under autocast.

    In place, by torch: parameters and buffers take rank 0's values when wrapped. A model without trainable parameters is
    left unwrapped, for there is nothing to average.

    How gradients travel (`comm_hook`) changes what arrives, not when. An overflow is seen on arrival: under fp16 with a loss scale,
    ``comm_hook="fp16"`` overflows once the scaled gradients do, and the scale falls until they fit.
    """

    name: ClassVar[str] = "ddp"
    Options: ClassVar[type] = DistributedDataParallelKwargs
    whole: ClassVar[bool] = True
    apart: ClassVar[bool] = False
    alike: ClassVar[bool] = True
    masters: ClassVar[bool] = True
    sharded: ClassVar[bool] = False
    once = ""
    only_forward = ""
    early: ClassVar[bool] = False

    def __init__(self, world: World, options: DistributedDataParallelKwargs) -> None:
        self.data_rank, self.data_size = world.rank, world.size
        self.data_group = None
        # Compressed gradients travel by hooks of backward, so under accumulation they are summed where they are, in their own type.
        self.sums = options.comm_hook in ("no", "fp32")
        self._world = world
        self._options = options
        if options.static_graph:
            self.once = "with static_graph=True the first backward counts as the one that is averaged. Leave static_graph out"

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        if facts.world_size == 1:
            return Refusal(
                "strategy 'ddp' averages gradients over processes, and there is one",
                "start several (`easymp launch --processes N script.py`), or use 'auto'",
            )
        return None

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        buckets = sum(p.numel() for p in model.parameters() if p.requires_grad)
        errors = options.low_rank and options.comm_state_option.get(
            "use_error_feedback", True
        )  # PowerSGD's, of each element
        return Layout(reducing=buckets * ((not options.gradient_as_bucket_view) + errors))

    def wrap(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], manner: Manner
    ) -> nn.Module:
        _check(model, self._options, manner)
        device = self._world.device
        if manner.place:
            model.to(device)
        module = manner.policy.forward(manner.policy.convert(model), device)
        if any(p.requires_grad for p in model.parameters()):
            options = {name: getattr(self._options, name) for name in TORCHS}
            if not self._options.broadcast_buffers:
                options["broadcast_buffers"] = False  # naming torch's default warns from 2.13 on
            if manner.place and device.type in ("cuda", "xpu"):
                options["device_ids"] = [device]
            module = Replica(Framed(module) if passed_over(module) else module, model, options)
            hook = make_hook(self._options, self._world.size)
            if hook is not None:
                module.register_comm_hook(*hook)
                if self._options.low_rank:
                    self._world.carried.append(Carried(hook[0], module))
        manner.compile(module)
        return module

    def spread(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

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

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        replicas = [m for m in models if isinstance(m, DistributedDataParallel)]
        if make_hook(self._options, self._world.size) is not None:
            raise RefusedError(
                "join_uneven_inputs with a comm_hook or gradient_predivide_factor, which divide by the number of all ranks: batches that "
                "some ranks no longer have would count less. Leave these options out, or keep even_batches=True and do not join"
            )
        return Join(replicas, divide_by_initial_world_size=False) if replicas else nullcontext()

    @property
    def counting(self) -> Counting:
        return Counting()

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        return clip_whole(parameters, max_norm, norm_type)

    def release(self, model: nn.Module, alone: nn.Module) -> nn.Module:
        return alone


class Replica(DistributedDataParallel):
    """DistributedDataParallel that knows its parameters by the user's names, and says them when it waits for some.

    Gradients are reduced in buckets, and in which order the ranks' parts of a bucket are summed depends on where they lie in it. torch lays
    buckets out once, for a first backward that does not know the order in which gradients come, and again for all others. A run that goes
    on from a checkpoint would have a first backward where the one that it continues had a later one, and on three or more ranks the last
    bits would differ. So they are laid out once and for all, from the last parameter to the first, as gradients mostly come.

    Args:
        module: what is called: `root`, or `root` under autocast.
        root: the user's module.
        options: for torch.
    """

    def __init__(self, module: nn.Module, root: nn.Module, options: dict[str, Any]) -> None:
        self._backwards = not options["find_unused_parameters"]  # with which torch keeps its first layout
        super().__init__(module, **options)
        self._in_order = [name for name, p in root.named_parameters() if p.requires_grad]
        self._names = (
            self._in_order[::-1] if self._backwards else self._in_order
        )  # as the reducer counts them
        if self._backwards:
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()
        self._begun = False  # whether gradients have been reduced once
        self.armed = False  # whether a backward averages gradients, which a call makes so, and only once
        self._all = tuple(root.parameters())
        self._few = (*self._all[:4], *self._all[4:][-4:])
        self._outputs: deque[list[Tensor]] = deque(
            maxlen=CALLS
        )  # since the last backward, for find_unused_parameters
        self._done = False  # whether there has been one
        self._frozen = tuple((name, p) for name, p in root.named_parameters() if not p.requires_grad)

    def _build_params_for_reducer(self) -> Any:
        parameters, sparse = super()._build_params_for_reducer()
        return (parameters[::-1], sparse[::-1]) if self._backwards else (parameters, sparse)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if self.require_backward_grad_sync and torch.is_grad_enabled():
                self.armed = True
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
        """Unused parameters are those that no call since the last backward uses; torch looks from the last call's outputs alone.

        The outputs of the last few calls are kept: calls that no backward follows would keep all of their graphs.
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
        # Of a static graph, torch's reducer needs one reduced iteration before it may skip one. Reducing early changes no
        # result: the average over ranks of an average is that average.
        self.require_backward_grad_sync = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.require_backward_grad_sync = False

    def gradients(self) -> list[tuple[Tensor, Tensor | None, int]]:
        """Parameters, each with its gradient and that one's version, for `check_averaged` after a backward.

        Where nothing can go wrong, a few show whether the backward reached this model: hundreds would be looked at in every step.
        """
        chosen = self._all if self._frozen or not self.armed else self._few
        return [(p, grad, 0 if grad is None else grad._version) for p in chosen for grad in [p.grad]]

    def check_averaged(self, before: Sequence[tuple[Tensor, Tensor | None, int]]) -> None:
        """After a backward that was to average gradients.

        Raises:
            StepError: it added gradients that no rank averages.
        """

        def changed(parameter: Tensor, grad: Tensor | None, version: int) -> bool:
            return parameter.grad is not grad or (grad is not None and grad._version != version)

        if not any(changed(*one) for one in before):
            return
        if not self.armed:
            raise StepError(
                "backward() added gradients that no rank averages: the model was not called since the last backward() that averaged them. "
                "Call the model itself, once for each backward() (add losses up first), not a part of it; name another method that "
                "trains in prepare(model, forward_methods=('name',)), or decorate it with @easymp.forward_method"
            )
        self.armed = False
        late = {id(p): name for name, p in self._frozen if p.grad is not None}
        for parameter, grad, version in before if late else ():
            if id(parameter) in late and changed(parameter, grad, version):
                raise StepError(
                    f"backward() added a gradient that no rank averages: {late[id(parameter)]!r} had requires_grad=False when the model "
                    "was prepared. Freeze it after prepare() instead, with DistributedDataParallelKwargs(find_unused_parameters=True); or "
                    "prepare the model anew once it trains (free_memory() lets go of it)"
                )

    def _unused(self, said: str) -> str:
        """torch's sentence about parameters that it waits for, with their names and the way out for these options."""
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", said)
        missing = {self._names[int(i)] for i in found[1].split()} if found else set()
        names = [repr(name) for name in self._in_order if name in missing]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        who = (
            f"no gradient came for {', '.join(names[:5])}{more}"
            if names
            else "not every parameter got a gradient"
        )
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


def _check(model: nn.Module, options: DistributedDataParallelKwargs, manner: Manner) -> None:
    """What gradients cannot travel as, before anything is changed.

    Raises:
        PrepareError: such a model.
        RefusedError: such a precision.
    """
    if options.comm_hook == "no":
        return
    refuse_sparse(model, f"comm_hook={options.comm_hook!r} packs dense ones", "leave comm_hook at 'no'")
    if options.remembers and manner.policy.scaled:
        raise RefusedError(
            f"comm_hook={options.comm_hook!r} remembers what it did not send, so the overflow that {manner.policy.name} with a loss scale "
            "is meant to skip would stay in it for good: use bf16, or comm_state_option={'use_error_feedback': False, 'warm_start': "
            "False}"
        )
