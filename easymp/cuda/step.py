"""The step after backward, of one optimizer on one device, in four launches and without a wait for the device.

1. `measure.squares`: Σ g² and a look for what is not finite (one launch a dtype);
2. `measure.TOTAL`: the norm and the factor for clipping and unscaling (the ranks add up here, where gradients are sharded);
3. `prepare`: counters and constants, and the loss scale, where it is lent to this step;
4. `update`: everything else (one launch a combination of dtypes).

A rule that needs sums over whole tensors has a survey between 3 and 4: `survey_of`, `totals` (the ranks add up here, where tensors
are sharded) and `weigh`.

Of 32 bytes an fp32 parameter, 4 are for the norm: torch's GradScaler, clip and fused AdamW move 48.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ..base.dtensor import add_up, local, parts
from ..errors import KernelError, StepError
from . import EMA
from .elementwise import TYPES, Row, Table, addresses, alike, capturing, dense, lay_out, places, plain, upload
from .kernel import THREADS, Kernel, Launcher
from .measure import Gradients, OverRanks, totals
from .rounding import Rounding
from .rule import MOST, TENSOR, Group, Rule, Scale, Survey, prepare, roles_of, survey_of, update, weigh

_NOTHING: dict[str, Any] = {}
Gradient = Callable[[Tensor], "Tensor | None"]


@dataclass(frozen=True)
class _Kind:
    """What one launch of `update` takes: states and dtypes of all its rows, and how they are rounded."""

    states: tuple[str, ...]
    dtypes: tuple[tuple[str, torch.dtype], ...]
    stochastic: bool


@dataclass(eq=False, slots=True)
class _Item:
    """One parameter with a gradient, in the tables."""

    kind: _Kind
    row: Row
    words: tuple[int, ...]


@dataclass
class _Layout:
    """One set of parameters with gradients, where they lay. It owns none of them: gradients can be freed, states replaced.

    Attributes:
        seen: what the tables were made of, as `_look_at` says; while it stays, so do they. None where it cannot be told.
        things: parameters and what lies beside their gradients, in the order of `_beside`.
        rest: parameters that the kernels do not take.
        order: of each row, which of the parameters with gradients it is.
    """

    seen: Any = None
    things: list[Callable[[], Tensor | None]] = field(default_factory=list)
    rest: list[Tensor] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    kinds: tuple[_Kind, ...] = ()
    table: Table | None = None
    tensors: Tensor | None = None
    partials: Tensor | None = None
    constants: Tensor | None = None


def _nothing() -> None:
    """In place of a reference to what is not there."""


class FusedStep:
    """Steps the parameters of `optimizer` that are dense floats on the launcher's device; `rest` are the others.

    State is made and kept in the optimizer, under torch's keys, with ``step`` on the device as torch's own fused steps have it.

    Args:
        optimizer: of whose class `rule` is.
        gradient: where the gradient of a parameter is; ``.grad`` by default.
        copy: id of a parameter → the low-precision tensor that becomes the parameter, rounded, at each step.
        ema_decay: keep an exponential moving average of the weights, in fp32, under the state key "ema":
            ema += (p - ema) × (1 - ema_decay).
        state_dtype: of states; that of their parameter where None, as torch has it. To be bf16 they want `rounding`: to the nearest, a
            second moment that falls by a thousandth a step stays where it is.
        rounding: of bf16 parameters and states; to the nearest where None.
        copies: of a parameter, on how many ranks each of its elements lies, of those that `over_ranks` adds up.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: Rule,
        launcher: Launcher,
        *,
        gradient: Gradient = lambda parameter: parameter.grad,
        copy: dict[int, Tensor] | None = None,
        ema_decay: float | None = None,
        state_dtype: torch.dtype | None = None,
        rounding: Rounding | None = None,
        copies: Callable[[Tensor], int] = lambda parameter: 1,
    ) -> None:
        self.optimizer, self.rule, self.ema_decay = optimizer, rule, ema_decay
        self.state_dtype, self.rounding = state_dtype, rounding
        self._launcher, self._gradient, self._copies = launcher, gradient, copies
        self._copy = {} if copy is None else copy
        self._gradients = Gradients(launcher, copies)
        self._layout = _Layout()
        self._hyper: list[float] = []
        self._groups: Tensor | None = None
        self._kernels: dict[Any, Kernel] = {}
        # What the state had where a new layout has put something.
        self._before: list[tuple[dict[str, Any], str, Any]] = []
        self._counters: dict[Tensor, Tensor] = {}  # of steps, where the rule's states have none
        self._captured: list[Any] = []  # what graphs point at

    @property
    def rest(self) -> list[Tensor]:
        """Parameters with gradients that the last step has left to others."""
        return self._layout.rest

    # -- the four launches ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def measure(
        self, max_norm: float = float("inf"), scale: Tensor | None = None, over_ranks: OverRanks | None = None
    ) -> Tensor:
        """float32 [4] on the device, as `measure.RESULT` names them: the norm of the gradients divided by `scale`, the factor …

        Of all gradients that are dense floats on the device, those of `rest` too.

        Args:
            scale: float32, 0-dim: the loss scale.
            over_ranks: adds up a float64 tensor [2] over the ranks, in place. A collective.
        """
        _, parameters, gradients = self._found()
        return self._gradients.measure(gradients, parameters, max_norm, scale, over_ranks)

    @torch.no_grad()
    def step(
        self,
        factor: Tensor | None = None,
        found_inf: Tensor | None = None,
        measured: Tensor | None = None,
        scale: Scale | None = None,
    ) -> None:
        """Move the parameters.

        Args:
            factor: float32, 0-dim: what gradients are multiplied by.
            found_inf: float32, 0-dim: above 0, nothing changes, the counters included; but for `scale`.
            measured: what `measure` has given for these gradients, for a rule that needs their norm; without it they are measured.
            scale: moves, where there is anything to step and it lies on this device.

        Raises:
            KernelError: it cannot begin; nothing has changed.
            StepError: it has begun, and the device took no more.
        """
        if self.rule.norm and measured is None:
            measured = self.measure()
        layout, parameters, held = self._lay_out()
        if layout.table is None or layout.tensors is None or layout.constants is None:
            return
        times, skip = (0 if t is None else t.data_ptr() for t in (factor, found_inf))
        constants, follow = layout.constants.data_ptr(), 1.0 - (self.ema_decay or 0.0)
        moving = scale if scale is not None and scale.state.device == self._launcher.device else None
        lent = (0, 0) if moving is None else (moving.state.data_ptr(), moving.rule.data_ptr())
        self._each(self._prepare(), skip, 0 if measured is None else measured.data_ptr(), times, *lent)
        if moving is not None:
            moving.moved = True
        try:
            if self.rule.survey is not None:
                self._survey(self.rule.survey, [parameters[i] for i in layout.order], times, skip)
            for kind, first, last in zip(layout.kinds, layout.table.starts, layout.table.starts[1:]):
                self._stream(
                    self._update(kind), first, last, constants, times, skip, follow, *self._seed(kind)
                )
        except KernelError as error:  # nobody may take it for a step that has not begun
            raise StepError(
                f"a step stopped in its midst, and some of the parameters have moved: {error}. Load a checkpoint"
            ) from error
        if capturing(self._launcher.device):
            self._captured += [layout, self._groups]
        del held  # until all that reads them is in the stream

    def _survey(self, survey: Survey, parameters: Sequence[Tensor], times: int, skip: int) -> None:
        layout: Any = self._layout
        for kind, first, last in zip(layout.kinds, layout.table.starts, layout.table.starts[1:]):
            given = (layout.constants.data_ptr(), times, skip, *self._seed(kind))
            self._stream(self._look(survey, kind), first, last, *given)
        device = self._launcher.device
        found = torch.empty((len(parameters), len(survey.sums)), dtype=torch.float64, device=device)
        arguments = [layout.partials.data_ptr(), layout.table.firsts.data_ptr(), found.data_ptr()]
        self._launcher.launch(self._totals(survey), len(parameters), arguments)
        add_up(parameters, found)
        self._each(self._weigh(survey), skip, found.data_ptr())

    def _each(self, kernel: Kernel, skip: int, *arguments: int) -> None:
        """Launch `prepare` or `weigh`: a thread a tensor."""
        layout: Any = self._layout
        count = len(layout.tensors)
        given = [
            layout.tensors.data_ptr(),
            count,
            self._hypers().data_ptr(),
            skip,
            layout.constants.data_ptr(),
        ]
        self._launcher.launch(kernel, -(-count // THREADS), [*given, *arguments])

    def _seed(self, kind: _Kind) -> tuple[int, ...]:
        return (self.rounding.seed,) if kind.stochastic and self.rounding is not None else ()

    # -- the kernels, each made once ------------------------------------------------------------------------------------

    def _prepare(self) -> Kernel:
        return self._make("prepare", lambda: prepare(self.rule))

    def _update(self, kind: _Kind) -> Kernel:
        return self._make(kind, lambda: update(self.rule, kind.states, dict(kind.dtypes), kind.stochastic))

    def _look(self, survey: Survey, kind: _Kind) -> Kernel:
        made = partial(survey_of, self.rule, survey, kind.states, dict(kind.dtypes), kind.stochastic)
        return self._make(("survey", kind), made)

    def _totals(self, survey: Survey) -> Kernel:
        return self._make("totals", lambda: totals(len(survey.sums)))

    def _weigh(self, survey: Survey) -> Kernel:
        return self._make("weigh", lambda: weigh(self.rule, survey))

    def _compile(self, kinds: Collection[_Kind]) -> None:
        """All of them, before the first launch of a step; where one cannot be compiled, the state is what it was.

        Raises:
            KernelError: one of them cannot be compiled.
        """
        kernels = [self._prepare(), *map(self._update, kinds)] if kinds else []
        if kinds and (survey := self.rule.survey) is not None:
            kernels += [
                *(self._look(survey, kind) for kind in kinds),
                self._totals(survey),
                self._weigh(survey),
            ]
        try:
            self._launcher.ready(kernels)
        except KernelError:
            for state, key, value in reversed(self._before):
                if value is None:
                    del state[key]
                else:
                    state[key] = value
            self._before.clear()
            raise

    def _make(self, key: Any, make: Callable[[], Kernel]) -> Kernel:
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = make()
        return kernel

    def _stream(self, kernel: Kernel, first: int, last: int, *arguments: int | float) -> None:
        layout: Any = self._layout
        if last > first:
            chunks = layout.table.chunks.data_ptr() + 8 * first
            partials = layout.partials.data_ptr() + 8 * len(kernel.sums) * first
            given = [layout.table.rows.data_ptr(), chunks, partials, *arguments]
            self._launcher.launch(kernel, last - first, given)

    # -- what they run over ---------------------------------------------------------------------------------------------

    def _hypers(self) -> Tensor:
        """Numbers of the param groups, on the device; copied there when one has changed."""
        numbers: list[float] = []
        for group in self.optimizer.param_groups:
            mine = [0.0 if self._lr_at(group["lr"]) else float(group["lr"]), *self.rule.hyper(group)]
            numbers += mine + [0.0] * (MOST - len(mine))
        if self._groups is None or numbers != self._hyper:
            self._hyper = numbers
            self._groups = upload(numbers, torch.float64, self._launcher.device)
        return self._groups

    def _lr_at(self, lr: float | Tensor) -> int:
        """Where the device finds `lr`, 0 where it is told the number: as a tensor elsewhere, or of another dtype, is."""
        here = isinstance(lr, Tensor) and lr.device == self._launcher.device and lr.dtype == torch.float32
        return lr.data_ptr() if here else 0  # type: ignore[union-attr]

    def _found(self) -> tuple[list[int], list[Tensor], list[Tensor]]:
        """Parameters that have gradients now: their numbers among all, they, and these."""
        held = enumerate(p for group in self.optimizer.param_groups for p in group["params"])
        found = [(i, p, g) for i, p in held if (g := self._gradient(p)) is not None]
        return [i for i, _, _ in found], [p for _, p, _ in found], [g for _, _, g in found]

    def _keys(self, groups: Sequence[tuple[Any, ...]]) -> list[str]:
        """Of states: all that parameters in any of `groups` need."""
        return [
            *self.rule.single,
            *{key: None for *_, uses in groups for key in uses},
            *[EMA] * (self.ema_decay is not None),
        ]

    def _beside(self, parameters: Sequence[Tensor], keys: Sequence[str]) -> list[Any]:
        """Of each of `parameters`: itself, its low-precision copy, and what its state has under `keys`; None for nothing."""
        things: list[Any] = []
        states, copies = self.optimizer.state, self._copy
        for parameter in parameters:
            things.append(parameter)
            if copies:
                things.append(copies.get(id(parameter)))
            things += map(states.get(parameter, _NOTHING).get, keys)
        return things

    def _seen(
        self, positions: list[int], gradients: list[Tensor], things: list[Any], groups: list[tuple[Any, ...]]
    ) -> list[Any] | None:
        """All that a layout depends on but which `things` these are; None where it cannot be told.

        Of a thing that stays the same object, its address tells the rest. Gradients are often new ones.
        """
        lying, beside = places(gradients), addresses(parts([thing for thing in things if thing is not None]))
        return None if lying is None or beside is None else [positions, groups, lying, beside]

    def _lay_out(self) -> tuple[_Layout, list[Tensor], list[Any]]:
        """The layout of the parameters that have gradients now, the last one if all is where it was; these; what it points at."""
        positions, parameters, found = self._found()
        groups = [self._facts(group) for group in self.optimizer.param_groups]
        keys = self._keys(groups)
        gradients, things, layout = parts(found), self._beside(parameters, keys), self._layout
        if len(things) == len(layout.things) and all(map(is_, things, [thing() for thing in layout.things])):
            seen = self._seen(positions, gradients, things, groups)
            if seen is not None and seen == layout.seen:
                return layout, parameters, [gradients, things]
        items: dict[int, _Item] = {}
        numbers = [number for number, (count, *_) in enumerate(groups) for _ in range(count)]
        for i, (position, parameter, gradient) in enumerate(zip(positions, parameters, gradients)):
            number = numbers[position]
            _, fits, lr, uses = groups[number]
            item = self._item(parameter, gradient, position, number, lr, uses) if fits else None
            if item is not None:
                items[i] = item
        self._compile({item.kind for item in items.values()})
        self._before.clear()
        layout = self._layout = self._new(items)
        layout.rest = [parameter for i, parameter in enumerate(parameters) if i not in items]
        things = self._beside(parameters, keys)
        read_there = all(item.row.tensors[0] is gradients[i] for i, item in items.items())
        if read_there and all(thing is None or isinstance(thing, Tensor) for thing in things):
            layout.things = [_nothing if thing is None else ref(thing) for thing in things]
            layout.seen = self._seen(positions, gradients, things, groups)
        return layout, parameters, [items, things]

    def _facts(self, group: Group) -> tuple[int, bool, int, tuple[str, ...]]:
        """Of a param group: parameters, whether it is for the kernels, where its lr is, and the states that it has."""
        count = len(group["params"])
        if self.rule.refuse(group) is not None:
            return count, False, 0, ()
        return count, True, self._lr_at(group["lr"]), self.rule.states_of(group)

    def _new(self, items: Mapping[int, _Item]) -> _Layout:
        if not items:
            return _Layout()
        device = self._launcher.device
        kinds: dict[_Kind, list[int]] = {}
        for i, item in items.items():
            kinds.setdefault(item.kind, []).append(i)
        order = [i for of in kinds.values() for i in of]
        table = lay_out([[items[i].row for i in of] for of in kinds.values()], device)
        tensors = upload([word for i in order for word in items[i].words], torch.int64, device).view(
            -1, TENSOR
        )
        return _Layout(
            order=order,
            kinds=tuple(kinds),
            table=table,
            tensors=tensors,
            partials=torch.empty((table.starts[-1], 2), dtype=torch.float64, device=device),
            constants=torch.empty((len(tensors), MOST), dtype=torch.float32, device=device),
        )

    def _item(
        self, parameter: Tensor, gradient: Tensor, position: int, number: int, lr: int, uses: tuple[str, ...]
    ) -> _Item | None:
        """`parameter` as a row, its tensors in the order of their roles; None where the kernels do not take it."""
        if not self._takes(parameter, gradient, self.optimizer.state.get(parameter, {}), uses):
            return None
        state = self._state(parameter, uses, self.optimizer.param_groups[number])
        counter = state["step"] if self.rule.counts else self._counters[parameter]
        scalar = state[self.rule.scalar] if self.rule.scalar else counter
        here, low = local(parameter), self._copy.get(id(parameter))
        if not alike(gradient, here) or gradient.is_neg():
            gradient = torch.empty_like(here, dtype=gradient.dtype).copy_(gradient)
        averages = (EMA,) if self.ema_decay is not None else ()
        beside = [local(state[key]) for key in (*uses, *averages)]
        row = (gradient, here, *beside, *(() if low is None else (local(low),)))
        roles = roles_of(uses, bool(averages), low is not None)
        dtypes = tuple((role.name, t.dtype) for role, t in zip(roles, row))
        kind = _Kind(uses, dtypes, self.rounding is not None)
        first = 0 if self.rounding is None else self.rounding.first(parameter)
        words = (number, local(counter).data_ptr(), lr, local(scalar).data_ptr())
        return _Item(kind, Row(row, self._copies(parameter), position, first), words)

    def _takes(
        self, parameter: Tensor, gradient: Tensor, state: Mapping[str, Any], uses: tuple[str, ...]
    ) -> bool:
        """Whether the kernels can; before any state is made, for what they leave to others is not theirs."""
        device = self._launcher.device
        here, low = local(parameter), self._copy.get(id(parameter))
        there = [state[key] for key in (*uses, EMA) if state.get(key) is not None]
        others = [local(t) for t in (gradient, *there, *(() if low is None else (low,)))]
        if here.device != device or here.dtype not in TYPES or not dense(here):
            return False
        if not plain(here) or any(not plain(t) or t.device != device or t.dtype not in TYPES for t in others):
            return False
        return all(t.shape == here.shape for t in others) and (low is None or alike(local(low), here))

    def _state(self, parameter: Tensor, uses: Sequence[str], group: Group) -> dict[str, Any]:
        """The state of `parameter`, made where there is none; what was loaded comes into its layout and dtype."""
        state = self.optimizer.state[parameter]
        device = self._launcher.device
        for key in self.rule.single:
            held = state.get(key)  # a number would be waited for
            now = torch.zeros((), device=device) if held is None else torch.as_tensor(held)
            self._put(state, key, now.to(device, torch.float32))
        fresh = any(state.get(key) is None for key in uses)
        if not self.rule.counts and (fresh or parameter not in self._counters):
            begun = 0.0 if fresh else 1.0
            self._counters[parameter] = torch.full((), begun, dtype=torch.float32, device=device)
        for key in (*uses, EMA) if self.ema_decay is not None else uses:
            value = state.get(key)
            wanted = self._dtype(key, parameter, value)
            if value is not None and value.dtype == wanted and alike(local(value), local(parameter)):
                continue
            made = torch.empty_like(parameter, dtype=wanted, requires_grad=False)
            self._put(state, key, made)
            if value is not None:
                local(state[key]).copy_(local(value))
            elif key == EMA:
                local(state[key]).copy_(local(parameter))
            else:
                local(state[key]).fill_(self.rule.starts(group))
        return state

    def _dtype(self, key: str, parameter: Tensor, value: Tensor | None) -> torch.dtype:
        if key == EMA:
            return torch.float32  # a bf16 average would not follow what moves by less than 2^-9 of it
        return self.state_dtype or (parameter if value is None else value).dtype

    def _put(self, state: dict[str, Any], key: str, value: Tensor) -> None:
        self._before.append((state, key, state.get(key)))
        state[key] = value
