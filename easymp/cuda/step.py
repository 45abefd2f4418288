"""The step after backward, of one optimizer on one device, in four launches and without a wait for the device.

1. `measure.squares`: Σ g² and a look for what is not finite (one launch a dtype);
2. `measure.TOTAL`: the norm and the factor for clipping and unscaling (the ranks add up here, where gradients are sharded);
3. `prepare`: counters and constants;
4. `update`: everything else (one launch a combination of dtypes).

Of 32 bytes an fp32 parameter, 4 are for the norm: torch's GradScaler, clip and fused AdamW move 48.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..shards import local
from .kernel import THREADS, Kernel, Launcher
from .measure import CONCLUDE, RESULT, TOTAL, squares
from .prepare import MOST, TENSOR, prepare
from .rules.rule import Rule
from .streams import TYPES
from .table import Row, Table, lay_out, upload
from .update import AVERAGE, COPY, GRADIENT, PARAMETER, roles_of, update

STATES = (torch.float32, torch.bfloat16)
EMA = "ema"  # key of the average in an optimizer's state

Gradient = Callable[[Tensor], "Tensor | None"]


@dataclass(frozen=True)
class _Kind:
    """What one launch of `update` takes: states and dtypes of all its rows."""

    states: tuple[str, ...]
    dtypes: tuple[tuple[str, torch.dtype], ...]


@dataclass
class _Layout:
    """One set of parameters with gradients, where they lie."""

    addresses: list[int]
    kinds: tuple[_Kind, ...] = ()
    table: Table | None = None
    tensors: Tensor | None = None
    partials: Tensor | None = None
    constants: Tensor | None = None
    keep: list[Any] = field(default_factory=list)  # what the table points at


class FusedStep:
    """Steps the parameters of `optimizer` that are dense floats on the launcher's device; `rest` are the others.

    State is made and kept in the optimizer, under torch's keys, with ``step`` on the device as torch's own fused steps have it.

    Args:
        optimizer: of whose class `rule` is.
        gradient: where the gradient of a parameter is; ``.grad`` by default.
        copy: id of a parameter → the low-precision tensor that becomes the parameter, rounded, at each step.
        ema_decay: keep an exponential moving average of the weights under the state key "ema": ema += (p - ema) × (1 - ema_decay).
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
        copies: Callable[[Tensor], int] = lambda parameter: 1,
    ) -> None:
        self.optimizer, self.rule, self.ema_decay = optimizer, rule, ema_decay
        self.rest: list[Tensor] = []
        self._launcher, self._gradient, self._copy, self._copies = launcher, gradient, copy or {}, copies
        self._layout = _Layout([])
        self._hyper: list[float] = []
        self._groups: Tensor | None = None
        self._kernels: dict[Any, Kernel] = {}

    # -- the four launches ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def measure(
        self,
        max_norm: float = float("inf"),
        scale: Tensor | None = None,
        over_ranks: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """float32 [4] on the device, as `measure.RESULT` names them: the norm of the gradients divided by `scale`, the factor …

        Args:
            scale: float32, 0-dim: the loss scale.
            over_ranks: adds up a float64 tensor [2] over the ranks, in place. A collective.
        """
        layout = self._lay_out()
        device = self._launcher.device
        result = torch.empty(len(RESULT), dtype=torch.float32, device=device)
        totals = torch.empty(2, dtype=torch.float64, device=device)
        at = 0 if scale is None else scale.data_ptr()
        count = 0
        if layout.table is not None and layout.partials is not None:
            for kind, first, last in zip(layout.kinds, layout.table.starts, layout.table.starts[1:]):
                kernel = self._make(("squares", kind.dtypes[0][1]), lambda dtype=kind.dtypes[0][1]: squares(dtype))
                self._stream(kernel, first, last, at)
            count = layout.table.starts[-1]
        partials = 0 if layout.partials is None else layout.partials.data_ptr()
        alone = over_ranks is None
        self._launcher.launch(TOTAL, 1, [partials, count, totals.data_ptr(), alone, at, max_norm, result.data_ptr()])
        if over_ranks is not None:
            over_ranks(totals)
            self._launcher.launch(CONCLUDE, 1, [totals.data_ptr(), at, max_norm, result.data_ptr()])
        return result

    @torch.no_grad()
    def step(self, factor: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Move the parameters.

        Args:
            factor: float32, 0-dim: what gradients are multiplied by.
            found_inf: float32, 0-dim: above 0, nothing changes, the counters included.
        """
        layout = self._lay_out()
        if layout.table is None or layout.tensors is None or layout.constants is None:
            return
        times, skip = (0 if t is None else t.data_ptr() for t in (factor, found_inf))
        count = len(layout.tensors)
        constants, follow = layout.constants.data_ptr(), 1.0 - (self.ema_decay or 0.0)
        kernel = self._make("prepare", lambda: prepare(self.rule))
        self._launcher.launch(
            kernel, -(-count // THREADS), [layout.tensors.data_ptr(), count, self._hypers().data_ptr(), skip, constants]
        )
        for kind, first, last in zip(layout.kinds, layout.table.starts, layout.table.starts[1:]):
            kernel = self._make(kind, lambda kind=kind: update(self.rule, kind.states, dict(kind.dtypes)))
            self._stream(kernel, first, last, constants, times, skip, follow)

    def _make(self, key: Any, make: Callable[[], Kernel]) -> Kernel:
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = make()
        return kernel

    def _stream(self, kernel: Kernel, first: int, last: int, *arguments: int | float) -> None:
        layout = self._layout
        assert layout.table is not None
        assert layout.partials is not None
        if last > first:
            chunks = layout.table.chunks.data_ptr() + 8 * first
            partials = layout.partials.data_ptr() + 16 * first
            self._launcher.launch(kernel, last - first, [layout.table.rows.data_ptr(), chunks, partials, *arguments])

    # -- what they run over ---------------------------------------------------------------------------------------------

    def _hypers(self) -> Tensor:
        """Numbers of the param groups, on the device; copied there when one has changed."""
        numbers: list[float] = []
        for group in self.optimizer.param_groups:
            lr = group["lr"]
            mine = [0.0 if isinstance(lr, Tensor) and lr.is_cuda else float(lr), *self.rule.hyper(group)]
            numbers += mine + [0.0] * (MOST - len(mine))
        if self._groups is None or numbers != self._hyper:
            self._hyper = numbers
            self._groups = upload(numbers, torch.float64, self._launcher.device)
        return self._groups

    def _lay_out(self) -> _Layout:
        """The table of the parameters that have gradients now; the last one, if all is where it was."""
        kinds: dict[_Kind, list[tuple[Row, int, Tensor, Any]]] = {}
        addresses: list[int] = []
        self.rest = []
        for number, group in enumerate(self.optimizer.param_groups):
            fits = self.rule.refuse(group) is None
            uses = self.rule.uses(group) if fits else ()
            for parameter in group["params"]:
                gradient = self._gradient(parameter)
                if gradient is None:
                    continue
                row = self._row(parameter, gradient, uses) if fits else None
                if row is None:
                    self.rest.append(parameter)
                    continue
                kind, tensors = row
                state = self.optimizer.state[parameter]
                kinds.setdefault(kind, []).append((Row(tensors, self._copies(parameter)), number, state["step"], group["lr"]))
                addresses += [t.data_ptr() for t in tensors]
        if addresses == self._layout.addresses:
            return self._layout
        self._layout = self._new(addresses, kinds)
        return self._layout

    def _new(self, addresses: list[int], kinds: dict[_Kind, list[tuple[Row, int, Tensor, Any]]]) -> _Layout:
        device = self._launcher.device
        if not kinds:
            return _Layout(addresses)
        table = lay_out([[row for row, *_ in rows] for rows in kinds.values()], device)
        words: list[int] = []
        for rows in kinds.values():
            for _, group, counter, lr in rows:
                words += [group, counter.data_ptr(), lr.data_ptr() if isinstance(lr, Tensor) and lr.is_cuda else 0]
        tensors = upload(words, torch.int64, device).view(-1, TENSOR)
        partials = torch.empty((table.starts[-1], 2), dtype=torch.float64, device=device)
        constants = torch.empty((len(tensors), MOST), dtype=torch.float32, device=device)
        return _Layout(addresses, tuple(kinds), table, tensors, partials, constants, [list(rows) for rows in kinds.values()])

    def _row(self, parameter: Tensor, gradient: Tensor, uses: tuple[str, ...]) -> tuple[_Kind, tuple[Tensor, ...]] | None:
        """The tensors of `parameter`, in the order of their roles; None where the kernels do not take them."""
        here = local(parameter)
        if here.device != self._launcher.device or here.dtype not in TYPES or gradient.is_sparse:
            return None
        state = self._state(parameter, uses)
        low = self._copy.get(id(parameter))
        roles = roles_of(uses, self.ema_decay is not None, low is not None)
        by_role = {GRADIENT: gradient, PARAMETER: parameter, AVERAGE: state.get(EMA), COPY: low, **{s: state[s] for s in uses}}
        tensors = [local(by_role[role.name]) for role in roles]
        if not _dense(here) or any(t.dtype not in TYPES or t.device != here.device for t in tensors):
            return None
        if tensors[0].stride() != here.stride():
            tensors[0] = torch.empty_like(here, dtype=tensors[0].dtype).copy_(tensors[0])
        if any(t.stride() != here.stride() for t in tensors):
            return None
        return _Kind(uses, tuple((role.name, t.dtype) for role, t in zip(roles, tensors))), tuple(tensors)

    def _state(self, parameter: Tensor, uses: Sequence[str]) -> dict[str, Any]:
        state = self.optimizer.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=self._launcher.device)
        elif state["step"].device != self._launcher.device or state["step"].dtype != torch.float32:
            state["step"] = state["step"].to(self._launcher.device, torch.float32)
        for key in uses:
            if key not in state:
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if self.ema_decay is not None and EMA not in state:
            state[EMA] = parameter.detach().clone(memory_format=torch.preserve_format)
        return state


def _dense(tensor: Tensor) -> bool:
    """Whether `tensor` fills a run of memory, in any order of its dimensions."""
    end = 1
    for stride, count in sorted(zip(tensor.stride(), tensor.shape)):
        if count > 1:
            if stride != end:
                return False
            end *= count
    return True
