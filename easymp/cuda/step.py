"""The step after backward, of one optimizer on one device, in four launches and without a wait for the device.

1. `rule.squares`: Σ g² and a check for numbers that are not finite (one launch a variant).
2. `rule.TOTAL`: the norm, and the factor for clipping and unscaling. The ranks add up here where gradients are sharded.
3. `rule.prepare`: counters and constants.
4. `rule.update`: everything else (one launch a variant).

Of 32 bytes an fp32 parameter, 4 are for the norm: torch's GradScaler, clip and fused AdamW move 48.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from ..base.dtensor import dense, local, parts
from ..errors import KernelError, StepError
from . import EMA
from . import rule as kernels
from .kernel import (
    THREADS,
    Kernel,
    Rounding,
    Row,
    Table,
    addresses,
    capturing,
    facts_of,
    lay_out,
    same_layout,
    supports,
    upload,
)
from .rule import GRADIENT, MOST, Rule, Variant, complete, roles_of

if TYPE_CHECKING:
    from .cupy_launcher import CupyLauncher

_NO_STATE: dict[str, Any] = {}
OverRanks = Callable[[Tensor], None]  # adds up a float64 tensor [2] over the ranks, in place; a collective


def steps(parameter: Tensor, device: torch.device) -> bool:
    """Whether the kernels on `device` step `parameter`: a dense float32, bfloat16 or float16."""
    shard = local(parameter)
    return supports(shard, device) and dense(shard)


class _Moved(NamedTuple):
    """The parameters that this step moves: those that have gradients."""

    parameters: list[Tensor]
    gradients: list[Tensor]  # the parts on this rank
    numbers: list[int]  # of the parameters among all of the optimizer
    groups: list[int]  # numbers of their param groups


class _Item(NamedTuple):
    """The place of one parameter in the tables of `lay_out`."""

    position: int  # among those with gradients
    row: Row
    numbers: list[int]  # its row of `_Layout.tensors`


@dataclass(eq=False)
class _Layout:
    """Tables of one set of parameters with gradients. They keep no tensor alive: it can be freed or replaced."""

    order: list[int]  # of each row, the number of its parameter among those with gradients
    variants: tuple[Variant, ...]
    table: Table
    tensors: Tensor
    partials: Tensor
    constants: Tensor
    gradient_facts: Any = None  # while both stay, so do the tables; None where they are not known
    state_facts: Any = None
    references: list[Callable[[], Tensor | None]] = field(default_factory=list)  # to the tensors of `_tensors`


def _state_facts(groups: list[Any], tensors: Sequence[Any]) -> list[Any] | None:
    """Facts of a layout, beside the identity of `tensors`. None where addresses are not known."""
    pointers = addresses(parts([tensor for tensor in tensors if tensor is not None]))
    return None if pointers is None else [groups, pointers]


class FusedStep:
    """Steps the parameters of `optimizer`, which are dense floats on the launcher's device.

    State is the optimizer's, under torch's keys, with ``step`` on the device as in torch's fused steps. `copy` maps the
    id of a parameter to the low-precision tensor that becomes the parameter, rounded, at each step; `copies` is that of
    `protocols.Counting`, and the options are those of `optim.EngineOptions`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: Rule,
        launcher: CupyLauncher,
        *,
        gradient: Callable[[Tensor], Tensor | None] = lambda parameter: parameter.grad,
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
        self._layout: _Layout | None = None
        self._numbers: list[float] = []
        self._hyper: Tensor | None = None  # `_numbers` on the device
        self._counters: dict[Tensor, Tensor] = {}  # of steps, where the rule's states have none
        self._captured: list[Any] = []  # tensors that CUDA graphs read

    @torch.no_grad()
    def measure(
        self, max_norm: float = float("inf"), scale: Tensor | None = None, over_ranks: OverRanks | None = None
    ) -> Tensor:
        """Measure the gradients, as `Engine.measure`: float32 [3], as `rule.RESULT` names them; or a KernelError."""
        layout, *_in_use = self._lay_out(measures=True)
        device, launch, table = self._launcher.device, self._launcher.launch, layout.table
        passes = [kernels.squares(dict(variant.dtypes)[GRADIENT]) for variant in layout.variants]
        self._launcher.compile([*passes, kernels.TOTAL, kernels.CONCLUDE])
        result = torch.empty(len(kernels.RESULT), dtype=torch.float32, device=device)
        sums = torch.empty(2, dtype=torch.float64, device=device)
        scale_at = 0 if scale is None else scale.data_ptr()
        for kernel, start, end in zip(passes, table.starts, table.starts[1:]):
            if end > start:
                launch(kernel, end - start, [*self._chunks(layout, start, kernel), scale_at])
        settings = [scale_at, max_norm, result.data_ptr()]
        partials = [layout.partials.data_ptr(), table.starts[-1], sums.data_ptr()]
        launch(kernels.TOTAL, 1, [*partials, over_ranks is None, *settings])
        if over_ranks is not None:
            over_ranks(sums)
            launch(kernels.CONCLUDE, 1, [sums.data_ptr(), *settings])
        if capturing(device):
            self._captured.append(layout)
        return result

    @torch.no_grad()
    def step(self, factor: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Move the parameters; KernelError if nothing has changed, StepError if a launch failed within the step.

        `factor` and `found_inf` are those of `Engine.step`.
        """
        layout, *_in_use = self._lay_out()
        if not layout.order:
            return
        factor_at, skip = (0 if t is None else t.data_ptr() for t in (factor, found_inf))
        count, hyper, constants = len(layout.order), self._upload_numbers(), layout.constants.data_ptr()
        tables = [layout.tensors.data_ptr(), hyper.data_ptr(), skip, constants]
        self._launcher.launch(kernels.prepare(self.rule), -(-count // THREADS), [*tables, count])
        arguments = [constants, factor_at, skip, 1.0 - (self.ema_decay or 0.0)]
        if self.rounding is not None:
            arguments.append(self.rounding.seed)
        try:
            for variant, start, end in zip(layout.variants, layout.table.starts, layout.table.starts[1:]):
                if end > start:
                    kernel = kernels.update(self.rule, variant)
                    self._launcher.launch(kernel, end - start, [*self._chunks(layout, start, kernel), *arguments])
        except KernelError as error:  # not a KernelError, after which torch would step once more
            raise StepError(
                f"a launch failed within a step, and some of the parameters have moved: {error}. Load a checkpoint"
            ) from error
        if capturing(self._launcher.device):
            self._captured += [layout, self._hyper]

    def _chunks(self, layout: _Layout, start: int, kernel: Kernel) -> list[int]:
        """The first arguments of a `stream` kernel, for the chunks from number `start` on."""
        chunks, partials = layout.table.chunks.data_ptr(), layout.partials.data_ptr()
        return [layout.table.rows.data_ptr(), chunks + 8 * start, partials + 8 * len(kernel.sums) * start]

    def _upload_numbers(self) -> Tensor:
        """Numbers of the param groups, on the device; copied there when one has changed."""
        numbers: list[float] = []
        for group in self.optimizer.param_groups:
            row = [0.0 if self._lr_at(group["lr"]) else float(group["lr"]), *self.rule.numbers_of(group).values()]
            numbers += row + [0.0] * (MOST - len(row))
        if self._hyper is None or numbers != self._numbers:
            self._numbers = numbers
            self._hyper = upload(numbers, torch.float64, self._launcher.device)
        return self._hyper

    def _lr_at(self, lr: float | Tensor) -> int:
        """The address of `lr`; 0 where its number is uploaded: no tensor, on another device, or of another dtype."""
        if isinstance(lr, Tensor) and lr.device == self._launcher.device and lr.dtype == torch.float32:
            return lr.data_ptr()
        return 0

    # -- the tables ----------------------------------------------------------------------------------------------------

    def _lay_out(self, measures: bool = False) -> tuple[_Layout, _Moved, list[Row]]:
        """The layout of the gradients now: the last one, if all tensors (for `measures`: gradients) have not moved.

        The caller keeps all results until its launches are in the stream.
        """
        moved, layout, rule = self._find_gradients(), self._layout, self.rule
        gradient_facts = facts_of(moved.gradients)
        if gradient_facts is not None:
            gradient_facts += [list(map(id, moved.parameters)), moved.groups]
        same_gradients = layout is not None and gradient_facts is not None and gradient_facts == layout.gradient_facts
        if layout is not None and same_gradients and measures:
            return layout, moved, []
        for param_group in self.optimizer.param_groups:
            if (refusal := rule.refuse(param_group)) is not None:
                raise KernelError(refusal)
        # The address of each group's lr, and keys of its states.
        groups = [(self._lr_at(group["lr"]), rule.states_of(group)) for group in self.optimizer.param_groups]
        keys = [*rule.single, *dict.fromkeys(key for _, states in groups for key in states)]
        if self.ema_decay is not None:
            keys.append(EMA)
        tensors = self._tensors(moved.parameters, keys)
        if layout is not None and same_gradients:
            last_tensors, state_facts = [reference() for reference in layout.references], _state_facts(groups, tensors)
            same = len(tensors) == len(last_tensors) and all(map(is_, tensors, last_tensors))
            if same and state_facts is not None and state_facts == layout.state_facts:
                return layout, moved, []
        for parameter, gradient, group in zip(moved.parameters, moved.gradients, moved.groups):
            self._check(parameter, gradient, (*groups[group][1], EMA))
        before = [dict(self.optimizer.state.get(parameter, _NO_STATE)) for parameter in moved.parameters]
        items: dict[Variant, list[_Item]] = {}
        for i, group in enumerate(moved.groups):
            variant, item = self._item(moved, i, *groups[group])
            items.setdefault(variant, []).append(item)
        try:
            if items:  # all kernels of a step before its first launch
                updates = [kernels.update(rule, variant) for variant in items]
                self._launcher.compile([*updates, kernels.prepare(rule)])
        except KernelError:
            for parameter, old_state in zip(moved.parameters, before):
                state = self.optimizer.state[parameter]
                state.clear()
                state.update(old_state)
            raise
        ordered = [item for same_variant in items.values() for item in same_variant]
        rows, device = [item.row for item in ordered], self._launcher.device
        table = lay_out([[item.row for item in same_variant] for same_variant in items.values()], device)
        layout = self._layout = _Layout(
            order=[item.position for item in ordered],
            variants=tuple(items),
            table=table,
            tensors=upload([number for item in ordered for number in item.numbers], torch.int64, device),
            partials=torch.empty((table.starts[-1], 2), dtype=torch.float64, device=device),
            constants=torch.empty((len(ordered), MOST), dtype=torch.float32, device=device),
        )
        if all(row.tensors[0] is moved.gradients[i] for i, row in zip(layout.order, rows)):
            tensors = self._tensors(moved.parameters, keys)
            layout.gradient_facts, layout.state_facts = gradient_facts, _state_facts(groups, tensors)
            layout.references = [(lambda: None) if tensor is None else ref(tensor) for tensor in tensors]
        return layout, moved, rows

    def _find_gradients(self) -> _Moved:
        moved = _Moved([], [], [], [])
        first = 0
        for index, group in enumerate(self.optimizer.param_groups):
            for number, parameter in enumerate(group["params"], first):
                gradient = self._gradient(parameter)
                if gradient is not None:
                    moved.parameters.append(parameter)
                    moved.gradients.append(gradient)
                    moved.numbers.append(number)
                    moved.groups.append(index)
            first += len(group["params"])
        return moved._replace(gradients=parts(moved.gradients))

    def _tensors(self, parameters: Sequence[Tensor], keys: Sequence[str]) -> list[Any]:
        """Of each parameter: itself, its low-precision copy, and its states under `keys`; None where there is none."""
        tensors: list[Any] = []
        states, copies = self.optimizer.state, self._copy
        for parameter in parameters:
            tensors.append(parameter)
            if copies:
                tensors.append(copies.get(id(parameter)))
            tensors += map(states.get(parameter, _NO_STATE).get, keys)
        return tensors

    def _check(self, parameter: Tensor, gradient: Tensor, keys: Iterable[str]) -> None:
        """Refuse what the kernels do not take, before any state is made."""
        device, low = self._launcher.device, self._copy.get(id(parameter))
        state, shard = self.optimizer.state.get(parameter, _NO_STATE), local(parameter)
        companions = [gradient, *(local(state[key]) for key in keys if state.get(key) is not None)]
        if low is not None:
            companions.append(local(low))
        if (
            not steps(parameter, device)
            or not all(supports(tensor, device) and tensor.shape == shard.shape for tensor in companions)
            or not (low is None or same_layout(local(low), shard))
        ):
            raise KernelError(
                f"kernels take dense float32, bfloat16 and float16 tensors on {device}, and a parameter of shape "
                f"{tuple(parameter.shape)}, its gradient or its state is not one"
            )

    def _item(self, moved: _Moved, i: int, lr_at: int, states: tuple[str, ...]) -> tuple[Variant, _Item]:
        """The i-th parameter with a gradient in the tables, its tensors in the order of their roles."""
        parameter, gradient, rule = moved.parameters[i], moved.gradients[i], self.rule
        averages = self.ema_decay is not None
        state, group = self.optimizer.state[parameter], self.optimizer.param_groups[moved.groups[i]]
        complete(rule, group, parameter, state, self._counters, self.state_dtype, averages)
        shard, low = local(parameter), self._copy.get(id(parameter))
        if not same_layout(gradient, shard) or gradient.is_neg():
            gradient = torch.empty_like(shard, dtype=gradient.dtype).copy_(gradient)
        tensors = [gradient, shard, *(local(state[key]) for key in ((*states, EMA) if averages else states))]
        if low is not None:
            tensors.append(local(low))
        roles = roles_of(states, averages, low is not None)
        dtypes = tuple((role.name, tensor.dtype) for role, tensor in zip(roles, tensors))
        offset = 0 if self.rounding is None else self.rounding.offset_of(parameter)
        row = Row(tuple(tensors), self._copies(parameter), moved.numbers[i], offset)
        counter = local(state["step"] if rule.counts else self._counters[parameter])
        numbers = [moved.groups[i], counter.data_ptr(), lr_at]
        return Variant(states, dtypes, self.rounding is not None), _Item(i, row, numbers)
