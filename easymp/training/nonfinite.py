"""Losses and gradient norms that are not finite: reported once, with step, rank and loss scale; skipped; or raised on all ranks.

Reports do not synchronise with the device: the numbers of several steps are copied to the host together, and read when they have arrived.
To skip, gradients are checked before each step, as under a loss scale (by a `Scaler` with scale 1 where there is none). To raise, losses
are checked, too. The first module with such numbers is found by hooks: in a second forward with the same arguments, or, where steps are
skipped, in the next update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..base.dtensor import local
from ..base.pytree import leaves
from ..base.rng import isolated
from ..errors import NonfiniteError
from ..logging import get_logger
from ..precision import Scaler
from ..trackers.rows import Pending, Row

if TYPE_CHECKING:
    from ..protocols import Precision
    from .prepare import Preparation
    from .state import Run
    from .wrapper import Route

logger = get_logger(__name__)

TOGETHER = 32  # numbers that go to the host in one transfer
LOSS, NORM, GRADIENTS = "the loss", "the gradient norm", "the gradients"
FOLLOWS = {
    "warn": "The step is taken, and the weights will not be finite either: nonfinite='skip' leaves such steps out, nonfinite='raise' "
    "makes them an error, and finds the first module with such numbers",
    "skip": "Steps with such gradients are skipped on all ranks; optimizer_step_was_skipped says so",
}


class Nonfinite:
    """The guard of one run.

    Args:
        mode: "warn", "skip" or "raise"; None: "skip" under a loss scale, else "warn".
    """

    def __init__(
        self, mode: str | None, run: Run, scaler: Scaler, prepared: Preparation, precision: Precision
    ) -> None:
        self._raises = mode == "raise"
        self._follows = FOLLOWS["skip" if scaler.enabled else "warn"]
        self._world, self._scaler, self._prepared, self._precision = run.world, scaler, prepared, precision
        self._pending = Pending()
        self._said = False
        self._bad = False  # a loss of this rank was not finite since the last step, where that is raised
        self._calls: list[Any] = []  # the last calls of the models before that loss
        self._first = ""  # where gradients were first not finite
        self._search: Search | None = None  # in the next update
        self._steps = 0
        if scaler.enabled:
            scaler.found = self._step
        if self._raises:
            scaler.unscaled = self._look_at_gradients

    def _updates(self) -> int:
        optimizers = self._prepared.optimizers
        return optimizers[0].updates if optimizers else 0

    def loss(self, loss: Tensor) -> None:
        """Look at a loss of this rank, before backward."""
        if self._raises:
            if not self._bad and not bool(local(loss.detach()).isfinite().all()):
                self._bad, self._calls = True, [route.last for route in self._routes]
        elif not self._said and not (loss.is_cpu and loss.ndim == 0 and math.isfinite(loss.item())):
            self._note(LOSS, local(loss.detach()), self._updates() + 1)

    def norm(self, norm: Tensor) -> None:
        """Look at a gradient norm. Not under a loss scale, where an overflow is how the scale is found."""
        if self._said or self._raises or self._scaler.scales:
            return
        if not (norm.is_cpu and math.isfinite(norm.item())):
            self._note(NORM, local(norm.detach()), self._updates() + 1)

    def skips(self) -> None:
        """Note that steps with such gradients are left out."""
        self._follows = FOLLOWS["skip"]

    def forget(self) -> None:
        """Forget the losses since the last step, which does not come."""
        self._bad = False
        self._release()

    @property
    def _routes(self) -> list[Route]:
        return self._prepared.models

    def _release(self) -> None:
        """Let go of the arguments of calls."""
        self._calls, self._first = [], ""
        for route in self._prepared.models:
            route.last = None

    def _step(self, found: Tensor) -> None:
        """Called at the begin of a step, which is skipped if `found` is above 0 on all ranks."""
        scaler = self._scaler
        if self._search is not None and self._search.calls:
            self._end_search()
        if self._raises:
            if found.item() or (scaler.agree and self._world.any(self._bad)) or self._bad:
                self._raise()
        elif not self._said:
            self._steps += 1
            if not scaler.scales:
                self._note(GRADIENTS, found, self._updates())
            elif found.device.type == "cpu" or self._steps % TOGETHER == 0:
                # With a loss scale, an overflow is reported only once the scale is down at 1.
                self._note(GRADIENTS, found * (scaler.current <= 1), self._updates())

    def finish(self) -> None:
        """At the end of the run, report numbers that are still being copied."""
        self._end_search()
        self._pending.send()
        self._read(wait=True)

    def _note(self, name: str, value: Tensor, step: int) -> None:
        value = value.sum() if value.ndim else value
        if value.device.type == "cpu":
            self._look(name, value.item(), step, now=True)
            return
        self._pending.add(Row(step, 0.0, {name: value}))
        if len(self._pending) >= TOGETHER:
            self._pending.send()
        self._read()

    def _read(self, wait: bool = False) -> None:
        for row in self._pending.arrived(wait):
            for name, value in row.values.items():
                self._look(name, value, row.step)

    def _look(self, name: str, value: float, step: int, now: bool = False) -> None:
        if self._said or (value == 0 if name is GRADIENTS else math.isfinite(value)):
            return
        self._said = True
        first = self._run_again([route.last for route in self._routes]) if now and name is LOSS else ""
        if self._scaler.enabled and not first:
            self._search = Search(self._routes)
        # Averaging spreads one rank's number to all ranks a step later: only the first rank reports it.
        if self._world.size == 1 or self._world.store().add("nonfinite", 1) == 1:
            what = f"{name} is {value}" if name is not GRADIENTS else f"{name} are not finite"
            self._say(step, f"{what} ({self._words()}). {first}{self._follows}")

    def _say(self, step: int, words: str) -> None:
        logger.warning("rank %d, step %d: %s", self._world.rank, step, words, main_process_only=False)

    def _words(self) -> str:
        scaler = self._scaler
        scale = f"loss scale {scaler.in_use:g}" if scaler.scales else "no loss scale"
        return f"precision {self._precision.name}, {scale}"

    def _raise(self) -> None:
        scaler, world = self._scaler, self._world
        mine, self._bad = self._bad, False
        everywhere = world.gather_objects(mine) if scaler.agree else [mine]
        if scaler.scales and not any(everywhere) and scaler.in_use > 1:
            return  # the scale is being found
        ranks = [str(rank) for rank, bad in enumerate(everywhere) if bad]
        what = f"{LOSS} is not finite on rank {', '.join(ranks)}" if ranks else f"{GRADIENTS} are not finite"
        if ranks:
            words = self._run_again(
                self._calls or [route.last for route in self._routes], together=scaler.agree
            )
            firsts = world.gather_objects(words if mine else "") if scaler.agree else [words]
            first = next(filter(None, firsts), "")
        else:
            first = self._first or self._gradient_words()
        self._release()
        raise NonfiniteError(
            f"step {self._updates()}: {what} ({self._words()}). {first}No weights have changed in this step. Look at the data and the "
            "learning rate, or use nonfinite='skip' to leave such steps out"
        )

    # -- the first module

    def _run_again(self, calls: Sequence[Any], together: bool = False) -> str:
        """Run the forward of `calls`, one a route or None, under hooks; returns a sentence, or "".

        Where layers or statistics are spread over the ranks, all must do so `together`.
        """
        world, prepared = self._world, self._prepared
        strategy = prepared.strategy
        spread = strategy.sharded or strategy.splits_layers or bool(prepared.converted)
        if strategy.only_forward or (spread and not together):
            return ""
        there = [call is not None for call in calls]
        if spread:
            there = [all(each) for each in zip(*world.gather_objects(there))]
        if not any(there):
            return ""
        routes, device, same = self._routes, world.device, True
        search, before = Search(routes), random_state(device)
        try:
            with isolated(), torch.no_grad():
                for route, call, has in zip(routes, calls, there):
                    if not has:
                        continue
                    method, args, kwargs, state = call
                    same &= state is not None
                    if state is not None:
                        put_random_state(device, state)
                    module = route.module if spread else self._precision.forward(route.original, device)
                    with on_copies(route.original), route.instead(method) if method else nullcontext():
                        module(*args, **kwargs)
        except Exception as error:  # of a model that cannot run twice: the report itself is what counts
            return f"A second forward, to find the module, failed ({type(error).__name__}: {error}). "
        finally:
            put_random_state(device, before)
            search.end()
        if search.found:
            return f"First not finite: {search.found}. "
        return (
            "The outputs of the model are finite, so the loss function is the place. "
            if same
            else "A second forward, with other random numbers, is finite. "
        )

    def _look_at_gradients(self, found: Tensor) -> None:
        """Look before a clip changes them: one that is not finite would spread to all."""
        if found.item() and not (self._scaler.scales and self._scaler.in_use > 1):
            self._first = self._first or self._gradient_words()

    def _gradient_words(self) -> str:
        """Name the parameter with such a gradient where backward came first. A collective, unless ranks may be done."""
        masters = self._prepared.masters
        named = [pair for route in self._routes for pair in route.original.named_parameters()]
        flags = []
        for _, parameter in named:
            grads = [held.grad for held in (parameter, masters.get(id(parameter))) if held is not None]
            flags.append(any(not finite(grad) for grad in grads if grad is not None))
        if self._scaler.agree:
            flags = self._world.reduce(torch.tensor(flags, device=self._world.device).float(), "max").tolist()
        names = [name for (name, _), flag in zip(named, flags) if flag]
        if not names:
            return ""
        return (
            f"{len(names)} of {len(named)} parameters have such gradients; the last of them in the model, where backward came first, is "
            f"{names[-1]!r}. "
        )

    def _end_search(self) -> None:
        search, self._search = self._search, None
        if search is not None:
            search.end()
            if search.found:
                self._say(self._updates(), f"first not finite: {search.found}")


AT = {"inputs": "of the inputs", "output": "that arrives at the output"}


class Search:
    """Hooks that find the first module with numbers that are not finite, in forward or in backward. Each module waits for the device.

    Meanwhile nothing runs compiled.

    Attributes:
        found: the place, in words; "" so far.
        calls: forwards of models.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self.found, self.calls = "", 0
        self._running: list[str] = []  # modules whose forward is under way, with the range of their inputs
        self._arrived: int | None = (
            None  # at an output: a gradient that the next hook may trace to a module's inputs
        )
        self._undo: list[Callable[[], object]] = []
        for route in routes:
            for module in route.module.modules():
                if module._compiled_call_impl is not None:
                    self._undo.append(
                        partial(setattr, module, "_compiled_call_impl", module._compiled_call_impl)
                    )
                    module._compiled_call_impl = None
            for name, module in route.original.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                kinds = type(module).__mro__
                kind = kinds[
                    2 if kinds[1].__name__ == "FSDPModule" else 0
                ].__name__  # fully_shard changes classes
                label = f"{name!r} ({kind})" if name else f"the model ({kind})"
                before, after = partial(self._before, label), partial(self._after, label)
                self._undo.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                self._undo.append(module.register_forward_hook(after).remove)

    def end(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _before(self, label: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = numbers([args, kwargs])
        good, words = spread_of(tensors)
        if not self._running:
            self.calls += 1
        if not good and not self.found:
            where = (
                f"computed in the forward of {self._running[-1]}" if self._running else "given to the model"
            )
            self.found = f"the inputs of {label}, {where}"
        self._running.append(f"{label}, whose inputs {words}")
        self._watch(tensors, "inputs", self._running[-1])

    def _after(self, label: str, module: nn.Module, args: Any, output: Any) -> None:
        at, tensors = self._running.pop(), numbers(output)
        if not self.found and not spread_of(tensors)[0]:
            wrong = [name for name, p in module.named_parameters(recurse=False) if not finite(p)]
            self.found = f"the output of {at}" + (
                f"; its parameter {wrong[0]!r} is not finite" if wrong else ""
            )
        self._watch(tensors, "output", at)

    def _watch(self, tensors: Iterable[Tensor], what: str, at: str) -> None:
        for tensor in tensors:
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(partial(self._gradient, tensor.data_ptr(), what, at))

    def _gradient(self, pointer: int, what: str, at: str, gradient: Tensor) -> None:
        # Hooks of a tensor run in the order of forward: as an output first, then as the inputs of the module that made this gradient.
        if finite(gradient):
            return
        if not self.found or (what == "inputs" and self._arrived == pointer):
            self.found = f"the gradient {AT[what]} of {at}"
            self._arrived = pointer if what == "output" else None


def numbers(tree: Any) -> list[Tensor]:
    """The dense floating-point tensors in a nested batch or in a model's output."""
    found = (leaf for leaf in leaves(tree) if isinstance(leaf, Tensor))
    return [t for t in found if t.is_floating_point() and t.layout is torch.strided and not t.is_meta]


def finite(tensor: Tensor) -> bool:
    """Whether this rank's part is. Waits for the device."""
    here = local(tensor.detach())
    return here.is_meta or bool((here.coalesce()._values() if here.is_sparse else here).isfinite().all())


def spread_of(tensors: Sequence[Tensor]) -> tuple[bool, str]:
    """Whether all numbers are finite, and their range in words."""
    parts = [part.detach().float().aminmax() for tensor in tensors if (part := local(tensor)).numel()]
    if not parts:
        return True, "are no floating-point numbers"
    low, high = (float(torch.stack(side).cpu().aminmax()[i]) for i, side in enumerate(zip(*parts)))
    return math.isfinite(low) and math.isfinite(high), f"range from {low:.4g} to {high:.4g}"


@contextmanager
def on_copies(model: nn.Module) -> Iterator[None]:
    """Inside, forward changes copies of the buffers."""
    held = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    for module, name, buffer in held:
        module._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for module, name, buffer in held:
            module._buffers[name] = buffer


# -- random numbers of a forward


def keeps(mode: str | None, device: torch.device) -> Callable[[], Any] | None:
    """Returns what a call of a model keeps beside its arguments; None where numbers are known too late to call it again."""
    if mode == "raise":
        return partial(random_state, device)
    return _nothing if device.type == "cpu" else None


def _nothing() -> None:
    """To a warning the time that a copy of the state takes is not worth it."""


def random_state(device: torch.device) -> Any:
    """The state of torch's generator of a device: on CUDA two numbers."""
    if device.type != "cuda":
        return torch.default_generator.get_state()
    generator = torch.cuda.default_generators[device.index or 0]
    return generator.initial_seed(), generator.get_offset()


def put_random_state(device: torch.device, state: Any) -> None:
    """Restore what `random_state` returned."""
    if device.type != "cuda":
        torch.default_generator.set_state(state)
        return
    generator = torch.cuda.default_generators[device.index or 0]
    generator.manual_seed(state[0])
    generator.set_offset(state[1])
