"""One estimate a row: numbers of processes by strategies by precisions, what fits, and which to take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...base.units import size
from ...distributed import Ranks
from ...errors import EasympError, RefusedError, SettingError
from ...hardware import Hardware
from ...plan import Plan, incompatible, make_plan, rank_memory
from ...precision import ALIASES, PRECISIONS
from ...protocols import Facts
from ...settings import Settings
from ...strategies import STRATEGIES
from ...training.memory import NO_SAMPLE, SPARE, Memory, Optimizer, estimate, fits
from ...training.memory import STATES as STATES
from . import DEFAULT_STRATEGIES
from .sized import Sized

WITH_INPUT = "activations are not counted: pass the shape of a batch (--input)"
WITHOUT = (
    "activations are not counted: they need a forward, so module:callable and the shape of a batch (--input)"
)


@dataclass(frozen=True)
class Row:
    """What one rank needs, and what it has.

    Attributes:
        need: the arithmetic of `easymp.training.memory`.
        available: bytes that a rank has.
    """

    need: Memory
    available: int

    @property
    def fits(self) -> bool:
        return fits(self.need, self.available)

    @property
    def spare(self) -> int:
        """Bytes left of what may be filled; negative where it does not fit."""
        return int(self.available * (1 - SPARE)) - self.need.total

    @property
    def name(self) -> str:
        return f"{self.need.strategy} on {self.need.world} with {self.need.precision}"


@dataclass(frozen=True)
class Estimates:
    """All rows.

    Attributes:
        rows: by number of processes, then strategy, then precision.
        refused: what was asked for and cannot be, a sentence each.
        notes: what is only approximately so.
        preferred: precisions, the one that this machine would take first.
    """

    rows: tuple[Row, ...]
    refused: tuple[str, ...]
    notes: tuple[str, ...]
    preferred: tuple[str, ...]

    @property
    def suggested(self) -> Row | None:
        """On the most processes, the simplest strategy that fits, in the preferred precision."""
        most = max(row.need.world for row in self.rows)
        return self._first([row for row in self.rows if row.need.world == most])

    @property
    def smallest(self) -> Row | None:
        """The fewest processes on which anything fits."""
        for world in sorted({row.need.world for row in self.rows}):
            if found := self._first([row for row in self.rows if row.need.world == world]):
                return found
        return None

    def _first(self, rows: Sequence[Row]) -> Row | None:
        ordered = (row for precision in self.preferred for row in rows if row.need.precision == precision)
        return next((row for row in ordered if row.fits), None)

    @property
    def suggestion(self) -> str:
        """The last line: what to take, or what is missing."""
        take, least = self.suggested or self.smallest, self.smallest
        if take is None or least is None:
            near = max(self.rows, key=lambda row: row.spare)
            short = f"{near.name} comes nearest, {size(-near.spare)} too much"
            return f"nothing fits: {short}; take more memory, more devices, or a smaller model"
        words = f"{take.name} fits with {size(take.spare)} to spare"
        if least.need.world < take.need.world:
            words += f"; the fewest processes are {least.need.world}, by {least.name} ({size(least.spare)} to spare)"
        return words


def estimates(
    sized: Sized,
    hardware: Hardware,
    processes: Sequence[int] = (1, 2, 4, 8),
    strategies: Sequence[str] = (),
    precisions: Sequence[str] = (),
    optimizer: Optimizer = "adamw",
    memory: int | None = None,
    per_node: int | None = None,
    cpu: bool = False,
    sample: Any = None,
    options: Any = None,
    activation_checkpointing: bool | str | Sequence[str] = False,
) -> Estimates:
    """Estimate every combination.

    Args:
        hardware: of this machine, whose devices a rank has, or a share of whose memory.
        strategies, precisions: none: the usual ones that can be had here, and the rest is left out without a word.
        memory: bytes that a rank has on another machine; then nothing is asked of this one.
        per_node: ranks of a node; None: as many as this machine has devices, or all.
        sample: one rank's micro-batch, for activations.
        options: of the strategy, of which there is one then.
        activation_checkpointing: for a sample, which parts are computed again in backward; True: repeated blocks.

    Raises:
        SettingError: a wrong name or number, or a sample for what has no forward.
        PrepareError: no part is what `activation_checkpointing` means.
        BatchError: the forward cannot be followed on the sample.
    """
    _check(sized, strategies, sample, options, activation_checkpointing)
    if memory is not None:
        hardware = dataclasses.replace(hardware, devices=())
    plans = {world: _plan(hardware, world, memory, per_node, cpu) for world in sorted(set(processes))}
    here = next(iter(plans.values()))
    kinds, refused = _precisions(here, precisions, elsewhere=memory is not None)
    rows: list[Row] = []
    # The same for every strategy and world.
    followed = {
        precision: estimate(
            sized.model,
            strategy="single",
            precision=precision,
            sample=sample,
            activation_checkpointing=activation_checkpointing,
        )
        for precision in (kinds if sample is not None else ())
    }
    activations = {precision: need.activations for precision, need in followed.items()}
    for world, plan in plans.items():
        for strategy in strategies or DEFAULT_STRATEGIES:
            why = STRATEGIES[strategy].refuse(_facts(plan))
            if why is not None:
                refused += [f"{strategy} on {world}: {why}"] if strategies else []
                continue
            for precision in kinds:
                try:
                    need = _need(
                        sized.model, plan, strategy, precision, optimizer, options, activations.get(precision)
                    )
                except SettingError:
                    raise
                except EasympError as error:  # this model, under this strategy
                    refused.append(f"{strategy} on {world} with {precision}: {error}")
                else:
                    rows.append(Row(need, rank_memory(plan)))
    if not rows:
        raise SettingError(f"nothing is left to estimate: {'; '.join(refused) or 'no processes'}")
    preferred = [name for name in _ordered(here, kinds, memory is not None) if name in kinds]
    return Estimates(tuple(rows), tuple(dict.fromkeys(refused)), _notes(sized, rows), tuple(preferred))


def _check(
    sized: Sized, strategies: Sequence[str], sample: Any, options: Any, activation_checkpointing: Any
) -> None:
    if sample is not None and not sized.runs:
        raise SettingError(
            f"activations need a forward, and {sized.name} has none: pass module:callable with the shape of its input"
        )
    if activation_checkpointing is not False and sample is None:
        raise SettingError(
            "activation checkpointing changes activations, which are counted with the shape of a batch (--input)"
        )
    if options and len(strategies) != 1:
        raise SettingError("options are one strategy's: name that strategy alone")


def _plan(hardware: Hardware, world: int, memory: int | None, per_node: int | None, cpu: bool) -> Plan:
    devices = 0 if cpu else len(hardware.devices)
    ranks = Ranks(size=world, local_size=min(world, per_node or devices or world))
    return make_plan(Settings(memory=memory, cpu=cpu), hardware, ranks)


def _facts(plan: Plan) -> Facts:
    return Facts(plan.hardware, plan.device.value.split(":")[0], plan.ranks.size)


def _precisions(plan: Plan, asked: Sequence[str], elsewhere: bool) -> tuple[list[str], list[str]]:
    """Those to estimate, and why others that were asked for cannot be had here."""
    usual = [name for name in _ordered(plan, ["fp32"], elsewhere) if name in PRECISIONS]
    names = list(dict.fromkeys(ALIASES.get(name, name) for name in asked or ["fp32", *usual]))[
        : len(asked) or 2
    ]
    refusals = {name: None if elsewhere else PRECISIONS[name].refuse(_facts(plan)) for name in names}
    return [name for name in names if not refusals[name]], [
        f"{n}: {why}" for n, why in refusals.items() if why and asked
    ]


def _ordered(plan: Plan, names: Sequence[str], elsewhere: bool) -> list[str]:
    """What this machine takes by itself, then bf16, then `names`."""
    return list(dict.fromkeys([*([] if elsewhere else [plan.precision.value]), "bf16", *names]))


def _need(
    model: nn.Module | int,
    plan: Plan,
    strategy: str,
    precision: str,
    optimizer: Optimizer,
    options: Any,
    activations: int | None,
) -> Memory:
    why = incompatible(PRECISIONS[precision], STRATEGIES[strategy])
    if why is not None:
        raise RefusedError(str(why))
    return estimate(
        model,
        strategy=strategy,
        precision=precision,
        world=plan.ranks.size,
        per_node=plan.ranks.local_size,
        optimizer=optimizer,
        options=options,
        activations=activations,
    )


def _notes(sized: Sized, rows: Sequence[Row]) -> tuple[str, ...]:
    """Each once, with the strategies that it is about where that is not all."""
    every = {row.need.strategy for row in rows}
    about: dict[str, set[str]] = {}
    for row in rows:
        for note in row.need.notes:
            note = (WITH_INPUT if sized.runs else WITHOUT) if note == NO_SAMPLE else note
            about.setdefault(note, set()).add(row.need.strategy)
    said = [note if who == every else f"{', '.join(sorted(who))}: {note}" for note, who in about.items()]
    return (*sized.notes, *said)
