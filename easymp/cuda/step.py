"""The step after backward, of one optimizer on one device, in four launches and without a wait for the device.

1. `measure.squares`: Σ g² and a look for what is not finite (one launch a dtype);
2. `measure.TOTAL`: the norm and the factor for clipping and unscaling (the ranks add up here, where gradients are sharded);
3. `rule.prepare`: counters and constants, and the loss scale, where it is lent to this step;
4. `rule.update`: everything else (one launch a combination of dtypes).

A rule that needs sums over whole tensors has a survey between 3 and 4: `survey_of`, `totals` (the ranks add up here, where tensors
are sharded) and `weigh`.

Of 32 bytes an fp32 parameter, 4 are for the norm: torch's GradScaler, clip and fused AdamW move 48.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from ..base.dtensor import add_up, dense, local, parts
from ..errors import KernelError, StepError
from . import EMA
from .kernel import (
    THREADS,
    TYPES,
    Kernel,
    Row,
    Table,
    addresses,
    alike,
    capturing,
    lay_out,
    places,
    plain,
    upload,
)
from .measure import Gradients, OverRanks, totals
from .rounding import Rounding
from .rule import (
    MOST,
    TENSOR,
    Group,
    Kind,
    Rule,
    Scale,
    complete,
    prepare,
    roles_of,
    survey_of,
    update,
    weigh,
)

if TYPE_CHECKING:
    from .cupy_launcher import CupyLauncher

_NOTHING: dict[str, Any] = {}
Gradient = Callable[[Tensor], "Tensor | None"]


def takes(tensor: Tensor, device: torch.device) -> bool:
    """Whether the kernels on `device` read and write `tensor`: a dense float32, bfloat16 or float16."""
    here = local(tensor)
    return here.device == device and here.dtype in TYPES and plain(here) and dense(here)


@dataclass(eq=False, slots=True)
class _Item:
    """One parameter with a gradient, in the tables."""

    kind: Kind
    row: Row
    words: tuple[int, ...]


@dataclass
class _Layout:
    """One set of parameters with gradients, at their addresses. It owns none of them: gradients can be freed, states replaced."""

    seen: Any = None  # facts of the tables (see `_seen`); while they stay, so do the tables. None where they are not known
    # Weak references, as `_beside` has them.
    things: list[Callable[[], Tensor | None]] = field(default_factory=list)
    # Of each row, the number of its parameter among those with gradients.
    order: list[int] = field(default_factory=list)
    kinds: tuple[Kind, ...] = ()
    table: Table | None = None
    tensors: Tensor | None = None
    partials: Tensor | None = None
    constants: Tensor | None = None


def _nothing() -> None:
    """Stands for a weak reference to a thing that does not exist."""


class FusedStep:
    """Steps the parameters of `optimizer`, which are dense floats on the launcher's device.

    State is made and kept in the optimizer, under torch's keys, with ``step`` on the device as in torch's own fused steps.

    Args:
        gradient: of a parameter; ``.grad`` by default.
        copy: id of a parameter → the low-precision tensor that becomes the parameter, rounded, at each step.
        ema_decay, state_dtype: as in `optim.fused.Options`.
        rounding: of bf16 parameters and states; None: to the nearest.
        copies: as in `protocols.Counting`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: Rule,
        launcher: CupyLauncher,
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
        # Entries of states that a new layout replaces.
        self._before: list[tuple[dict[str, Any], str, Any]] = []
        self._counters: dict[Tensor, Tensor] = {}  # of steps, where the rule's states have none
        self._captured: list[Any] = []  # tensors that CUDA graphs read

    @torch.no_grad()
    def measure(
        self, max_norm: float = float("inf"), scale: Tensor | None = None, over_ranks: OverRanks | None = None
    ) -> Tensor:
        """Measure the gradients: float32 [4] on the device, as `measure.RESULT` names them; arguments as of `Engine.measure`."""
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
        """Move the parameters; KernelError if nothing has changed, StepError if a launch failed within the step.

        Args:
            factor: float32, 0-dim: gradients are multiplied by it.
            found_inf: float32, 0-dim: above 0, nothing but `scale` changes.
            measured: the result of `measure` for these gradients, for a rule that needs their norm; without it they are measured.
            scale: moves, where there is anything to step and it lies on this device.
        """
        if self.rule.norm and measured is None:
            measured = self.measure()
        layout, parameters, held = self._lay_out()
        if layout.table is None or layout.tensors is None or layout.constants is None:
            return
        times, skip = (0 if t is None else t.data_ptr() for t in (factor, found_inf))
        moving = scale if scale is not None and scale.state.device == self._launcher.device else None
        lent = (0, 0) if moving is None else (moving.state.data_ptr(), moving.rule.data_ptr())
        self._each(prepare(self.rule), skip, 0 if measured is None else measured.data_ptr(), times, *lent)
        if moving is not None:
            moving.moved = True
        try:
            if self.rule.survey is not None:
                self._survey(len(self.rule.survey.sums), [parameters[i] for i in layout.order], times, skip)
            self._stream(update, times, skip, 1.0 - (self.ema_decay or 0.0))
        except KernelError as error:  # not a KernelError, after which torch would step once more
            why = f"a launch failed within a step, and some of the parameters have moved: {error}"
            raise StepError(f"{why}. Load a checkpoint") from error
        if capturing(self._launcher.device):
            self._captured += [layout, self._groups]
        del held  # kept until all launches that read them are in the stream

    def _survey(self, sums: int, parameters: Sequence[Tensor], times: int, skip: int) -> None:
        layout: Any = self._layout
        self._stream(survey_of, times, skip)
        found = torch.empty((len(parameters), sums), dtype=torch.float64, device=self._launcher.device)
        arguments = [layout.partials.data_ptr(), layout.table.firsts.data_ptr(), found.data_ptr()]
        self._launcher.launch(totals(sums), len(parameters), arguments)
        add_up(parameters, found)
        self._each(weigh(self.rule), skip, found.data_ptr())

    def _each(self, kernel: Kernel, skip: int, *arguments: int) -> None:
        """Launch `prepare` or `weigh`: a thread a tensor."""
        layout: Any = self._layout
        count, constants = len(layout.tensors), layout.constants.data_ptr()
        given = [layout.tensors.data_ptr(), count, self._hypers().data_ptr(), skip, constants, *arguments]
        self._launcher.launch(kernel, -(-count // THREADS), given)

    def _stream(self, kernel_of: Callable[[Rule, Kind], Kernel], *arguments: int | float) -> None:
        """Launch the kernel of each kind on its chunks."""
        layout: Any = self._layout
        table, constants = layout.table, layout.constants.data_ptr()
        seed = () if self.rounding is None else (self.rounding.seed,)
        for kind, first, last in zip(layout.kinds, table.starts, table.starts[1:]):
            if last > first:
                kernel = kernel_of(self.rule, kind)
                partials = layout.partials.data_ptr() + 8 * len(kernel.sums) * first
                lying = [table.rows.data_ptr(), table.chunks.data_ptr() + 8 * first, partials]
                self._launcher.launch(kernel, last - first, [*lying, constants, *arguments, *seed])

    def _compile(self, kinds: Collection[Kind]) -> None:
        """All of them, before the first launch of a step; where one cannot be, the state is restored and KernelError raised."""
        rule = self.rule
        kernels = [prepare(rule), *(update(rule, kind) for kind in kinds)]
        if rule.survey is not None:
            kernels += [survey_of(rule, kind) for kind in kinds]
            kernels += [totals(len(rule.survey.sums)), weigh(rule)]
        try:
            self._launcher.ready(kernels)
        except KernelError:
            for state, key, value in reversed(self._before):
                if value is None:
                    del state[key]
                else:
                    state[key] = value
            raise
        finally:
            self._before.clear()

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
        """The address of `lr`; 0 where its number is uploaded: no tensor, elsewhere, or of another dtype."""
        here = isinstance(lr, Tensor) and lr.device == self._launcher.device and lr.dtype == torch.float32
        return lr.data_ptr() if here else 0  # type: ignore[union-attr]

    def _found(self) -> tuple[list[int], list[Tensor], list[Tensor]]:
        """Numbers of the parameters that have gradients now, the parameters, and the gradients."""
        held = enumerate(p for group in self.optimizer.param_groups for p in group["params"])
        found = [(i, p, g) for i, p in held if (g := self._gradient(p)) is not None]
        return [i for i, _, _ in found], [p for _, p, _ in found], [g for _, _, g in found]

    def _beside(self, parameters: Sequence[Tensor], keys: Sequence[str]) -> list[Any]:
        """Of each parameter: itself, its low-precision copy, and its states under `keys`; None where there is none."""
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
        """All facts of a layout but the identity of `things`, whose addresses tell the rest; None where addresses are not known."""
        lying, beside = places(gradients), addresses(parts([thing for thing in things if thing is not None]))
        return None if lying is None or beside is None else [positions, groups, lying, beside]

    def _facts(self, group: Group) -> tuple[int, int, tuple[str, ...]]:
        """Of a param group: the number of its parameters, the address of its lr, and its states."""
        if (refusal := self.rule.refuse(group)) is not None:
            raise KernelError(refusal)
        return len(group["params"]), self._lr_at(group["lr"]), self.rule.states_of(group)

    def _lay_out(self) -> tuple[_Layout, list[Tensor], list[Any]]:
        """The layout of the parameters that have gradients now, the last one if all is where it was; these; tensors to keep alive."""
        positions, parameters, found = self._found()
        groups = [self._facts(group) for group in self.optimizer.param_groups]
        averages = (EMA,) if self.ema_decay is not None else ()
        keys = [*self.rule.single, *dict.fromkeys(key for *_, uses in groups for key in uses), *averages]
        gradients, things, layout = parts(found), self._beside(parameters, keys), self._layout
        if len(things) == len(layout.things) and all(map(is_, things, [thing() for thing in layout.things])):
            seen = self._seen(positions, gradients, things, groups)
            if seen is not None and seen == layout.seen:
                return layout, parameters, [gradients, things]
        numbers = [number for number, (count, *_) in enumerate(groups) for _ in range(count)]
        for position, parameter, gradient in zip(positions, parameters, gradients):
            self._check(parameter, gradient, (*groups[numbers[position]][-1], EMA))
        items = [
            self._item(parameter, gradient, position, numbers[position], *groups[numbers[position]][1:])
            for position, parameter, gradient in zip(positions, parameters, gradients)
        ]
        if items:
            self._compile(dict.fromkeys(item.kind for item in items))
        layout = self._layout = self._new(items)
        things = self._beside(parameters, keys)
        read_there = all(item.row.tensors[0] is gradient for item, gradient in zip(items, gradients))
        if read_there and all(thing is None or isinstance(thing, Tensor) for thing in things):
            layout.things = [_nothing if thing is None else ref(thing) for thing in things]
            layout.seen = self._seen(positions, gradients, things, groups)
        return layout, parameters, [items, things]

    def _new(self, items: Sequence[_Item]) -> _Layout:
        if not items:
            return _Layout()
        device = self._launcher.device
        kinds: dict[Kind, list[int]] = {}
        for i, item in enumerate(items):
            kinds.setdefault(item.kind, []).append(i)
        order = [i for of in kinds.values() for i in of]
        table = lay_out([[items[i].row for i in of] for of in kinds.values()], device)
        words = [word for i in order for word in items[i].words]
        return _Layout(
            order=order,
            kinds=tuple(kinds),
            table=table,
            tensors=upload(words, torch.int64, device).view(-1, TENSOR),
            partials=torch.empty((table.starts[-1], 2), dtype=torch.float64, device=device),
            constants=torch.empty((len(items), MOST), dtype=torch.float32, device=device),
        )

    def _check(self, parameter: Tensor, gradient: Tensor, keys: Iterable[str]) -> None:
        """Refuse what the kernels do not take, before any state is made."""
        device, low = self._launcher.device, self._copy.get(id(parameter))
        state = self.optimizer.state.get(parameter, _NOTHING)
        here, beside = local(parameter), [local(state[key]) for key in keys if state.get(key) is not None]
        others = [gradient, *beside, *(() if low is None else (local(low),))]
        if (
            not takes(here, device)
            or any(not plain(t) or t.device != device or t.dtype not in TYPES for t in others)
            or any(t.shape != here.shape for t in others)
            or not (low is None or alike(local(low), here))
        ):
            it = f"a parameter of shape {tuple(parameter.shape)}, its gradient or its state"
            raise KernelError(
                f"kernels take dense float32, bfloat16 and float16 tensors on {device}, and {it} is not"
            )

    def _item(
        self, parameter: Tensor, gradient: Tensor, position: int, number: int, lr: int, uses: tuple[str, ...]
    ) -> _Item:
        """`parameter` as a row, its tensors in the order of their roles."""
        averages = () if self.ema_decay is None else (EMA,)
        state, group = self.optimizer.state[parameter], self.optimizer.param_groups[number]
        given = self.rule, group, parameter, state, self._counters, self.state_dtype
        self._before += [(state, *entry) for entry in complete(*given, bool(averages))]
        counter = state["step"] if self.rule.counts else self._counters[parameter]
        scalar = state[self.rule.scalar] if self.rule.scalar else counter
        here, low = local(parameter), self._copy.get(id(parameter))
        if not alike(gradient, here) or gradient.is_neg():
            gradient = torch.empty_like(here, dtype=gradient.dtype).copy_(gradient)
        beside = [local(state[key]) for key in (*uses, *averages)]
        row = (gradient, here, *beside, *(() if low is None else (local(low),)))
        roles = roles_of(uses, bool(averages), low is not None)
        dtypes = tuple((role.name, t.dtype) for role, t in zip(roles, row))
        kind = Kind(uses, dtypes, self.rounding is not None)
        first = 0 if self.rounding is None else self.rounding.first(parameter)
        words = (number, local(counter).data_ptr(), lr, local(scalar).data_ptr())
        return _Item(kind, Row(row, self._copies(parameter), position, first), words)
