"""One estimate a row: numbers of processes by strategies by precisions, what fits, and which to take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...base.units import size
from ...distributed import Ranks
from ...errors import EasympError, RefusedError, SettingError
from ...hardware import Hardware
from ...plan import Plan, incompatible, make_plan
from ...protocols import Facts
from ...registry import ALIASES, PRECISIONS, STRATEGIES
from ...settings import Settings
from ...training.memory import NO_SAMPLE, SPARE, Memory, Optimizer, estimate, fits
from ...training.memory import STATES as STATES
from .models import Sized

DEFAULT_STRATEGIES = (
    "single",
    "ddp",
    "zero1",
    "fsdp",
)  # the simplest first: the first that fits is suggested
WITH_INPUT = "activations are not counted: pass the shape of a batch (--input)"
WITHOUT = "activations are not counted: they need a forward, so module:callable and a batch's shape (--input)"


class Row(NamedTuple):
    """What one rank needs, and the bytes that are available to it."""

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


class Estimates(NamedTuple):
    """All rows, by number of processes, then strategy, then precision."""

    rows: tuple[Row, ...]
    refused: tuple[str, ...]  # what was asked for and is impossible, a sentence each
    notes: tuple[str, ...]  # what is only approximately so
    preferred: tuple[str, ...]  # precisions, the one that this machine would take first

    @property
    def suggested(self) -> Row | None:
        """On the most processes, the simplest strategy that fits, in the preferred precision."""
        return self._first(max(row.need.world for row in self.rows))

    @property
    def smallest(self) -> Row | None:
        """The fewest processes on which anything fits."""
        worlds = sorted({row.need.world for row in self.rows})
        return next(filter(None, map(self._first, worlds)), None)

    def _first(self, world: int) -> Row | None:
        rows = [row for row in self.rows if row.need.world == world and row.fits]
        ordered = (row for name in self.preferred for row in rows if row.need.precision == name)
        return next(ordered, None)

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
            fewest = f"{least.need.world}, by {least.name} ({size(least.spare)} to spare)"
            words += f"; the fewest processes are {fewest}"
        return words


def estimates(
    sized: Sized,
    hardware: Hardware,
    processes: Sequence[int],
    strategies: Sequence[str],
    precisions: Sequence[str],
    optimizer: Optimizer,
    memory: int | None,
    per_node: int | None,
    cpu: bool,
    sample: Any,
    options: Any,
    activation_checkpointing: bool,
) -> Estimates:
    """Estimate every combination; the arguments are the flags of the command.

    Raises:
        SettingError: a wrong name or number, or a sample for a model without a forward.
        PrepareError, BatchError: activation checkpointing finds no part, or the forward cannot be followed.
    """
    _check(sized, strategies, sample, options, activation_checkpointing)
    elsewhere = memory is not None
    if elsewhere:
        hardware = dataclasses.replace(hardware, devices=())
    devices = 0 if cpu else len(hardware.devices)
    plans = {}
    for world in sorted(set(processes)):
        ranks = Ranks(size=world, local_size=min(world, per_node or devices or world))
        plans[world] = make_plan(Settings(memory=memory, cpu=cpu), hardware, ranks)
    here = next(iter(plans.values()))
    preferred = list(dict.fromkeys([*([] if elsewhere else [here.precision.value]), "bf16", "fp32"]))
    kinds, refused = _precisions(_facts(here), preferred, precisions, elsewhere)
    activations: dict[str, int | None] = dict.fromkeys(kinds)
    for precision in kinds if sample is not None else ():  # the same for every strategy and world
        again = {"sample": sample, "activation_checkpointing": activation_checkpointing}
        alone = estimate(sized.model, strategy="single", precision=precision, **again)
        activations[precision] = alone.activations
    rows: list[Row] = []
    for world, plan in plans.items():
        for strategy in strategies or DEFAULT_STRATEGIES:
            why = STRATEGIES[strategy].refuse(_facts(plan))
            if why is not None:
                refused += [f"{strategy} on {world}: {why}"] if strategies else []
                continue
            for precision in kinds:
                try:
                    if clash := incompatible(PRECISIONS[precision], STRATEGIES[strategy]):
                        raise RefusedError(str(clash))
                    need = estimate(
                        sized.model,
                        strategy=strategy,
                        precision=precision,
                        world=world,
                        per_node=plan.ranks.local_size,
                        optimizer=optimizer,
                        options=options,
                        activations=activations[precision],
                    )
                except SettingError:
                    raise
                except EasympError as error:  # this model, under this strategy
                    refused.append(f"{strategy} on {world} with {precision}: {error}")
                else:
                    rows.append(Row(need, plan.memory))
    if not rows:
        raise SettingError(f"nothing is left to estimate: {'; '.join(refused) or 'no processes'}")
    ordered = tuple(name for name in dict.fromkeys([*preferred, *kinds]) if name in kinds)
    return Estimates(tuple(rows), tuple(dict.fromkeys(refused)), _notes(sized, rows), ordered)


def _check(sized: Sized, strategies: Sequence[str], sample: Any, options: Any, recomputed: Any) -> None:
    if sample is not None and not sized.runs:
        raise SettingError(
            f"activations need a forward, and {sized.name} has none: pass module:callable with the shape of its input"
        )
    if recomputed is not False and sample is None:
        raise SettingError(
            "activation checkpointing changes activations, which are counted with the shape of a batch (--input)"
        )
    if options and len(strategies) != 1:
        raise SettingError("options are one strategy's: name that strategy alone")


def _facts(plan: Plan) -> Facts:
    return Facts(plan.hardware, plan.device.value.split(":")[0], plan.ranks.size)


def _precisions(
    facts: Facts, preferred: Sequence[str], asked: Sequence[str], elsewhere: bool
) -> tuple[list[str], list[str]]:
    """Those to estimate, and why others that were asked for are impossible here."""
    usual = ["fp32", *(name for name in preferred if name in PRECISIONS)]
    names = dict.fromkeys(ALIASES.get(name, name) for name in asked or usual)
    names = list(names)[: len(asked) or 2]
    refusals = {name: None if elsewhere else PRECISIONS[name].refuse(facts) for name in names}
    refused = [f"{name}: {why}" for name, why in refusals.items() if why and asked]
    return [name for name in names if not refusals[name]], refused


def _notes(sized: Sized, rows: Sequence[Row]) -> tuple[str, ...]:
    """Each once, with the strategies that it is about, unless it is about all."""
    every = {row.need.strategy for row in rows}
    about: dict[str, set[str]] = {}
    for row in rows:
        for note in row.need.notes:
            note = (WITH_INPUT if sized.runs else WITHOUT) if note == NO_SAMPLE else note
            about.setdefault(note, set()).add(row.need.strategy)
    said = [note if who == every else f"{', '.join(sorted(who))}: {note}" for note, who in about.items()]
    return (*sized.notes, *said)
