"""One estimate a row: numbers of processes by strategies by precisions, the rows that fit, and the advice."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...base.units import size
from ...distributed import Ranks
from ...errors import EasympError, RefusedError, SettingError
from ...hardware import Hardware
from ...plan import incompatible, make_plan
from ...protocols import Facts
from ...registry import ALIASES, PRECISIONS, STRATEGIES
from ...settings import Settings
from ...strategies.transforms import read_which
from ...training.memory import NO_SAMPLE, SPARE, Memory, estimate, fits
from ...training.memory import STATES as STATES
from .models import Sized

WITH_INPUT = "activations are not counted: pass the shape of a batch (--input)"
WITHOUT = "activations are not counted: they need a forward, so module:callable and a batch's shape (--input)"
SIMPLEST = ("single", "ddp", "zero1", "fsdp")  # the first that fits is suggested


class Row(NamedTuple):
    """The need of one rank, and the bytes that are available to it."""

    need: Memory
    available: int

    @property
    def fits(self) -> bool:
        return fits(self.need, self.available)

    @property
    def spare(self) -> int:
        """Bytes left of the part that may be filled; negative where it does not fit."""
        return int(self.available * (1 - SPARE)) - self.need.total

    def __str__(self) -> str:
        return f"{self.need.strategy} on {self.need.world} with {self.need.precision}"


class Estimates(NamedTuple):
    """All rows, by number of processes, then strategy, then precision."""

    rows: list[Row]
    refused: list[str]  # impossible requests, a sentence each
    notes: list[str]  # approximations
    preferred: list[str]  # precisions, the one that this machine would take first

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
        return min(rows, key=lambda row: self.preferred.index(row.need.precision), default=None)

    @property
    def suggestion(self) -> str:
        """The last line: the row to take, or the missing bytes."""
        take, least = self.suggested or self.smallest, self.smallest
        if take is None or least is None:
            near = max(self.rows, key=lambda row: row.spare)
            short = f"{near} comes nearest, {size(-near.spare)} too much"
            return f"nothing fits: {short}; take more memory, more devices, or a smaller model"
        words = f"{take} fits with {size(take.spare)} to spare"
        if least.need.world < take.need.world:
            words += (
                f"; the fewest processes are {least.need.world}, by {least} ({size(least.spare)} to spare)"
            )
        return words


def estimates(
    sized: Sized,
    hardware: Hardware,
    processes: Sequence[int],
    strategies: Sequence[str],
    precisions: Sequence[str],
    memory: int | None,
    per_node: int | None,
    cpu: bool,
    how: Mapping[str, Any],
) -> Estimates:
    """Estimate every combination; the arguments are the flags of the command, `how` those that `estimate` takes.

    Raises:
        SettingError: a wrong name or number, or a sample for a model without a forward.
        PrepareError, BatchError: activation checkpointing finds no part, or the forward cannot be followed.
    """
    sample, recomputed = how["sample"], how["activation_checkpointing"] or how["activation_offload"]
    if sample is not None and not sized.runs:
        raise SettingError(
            f"activations need a forward, and {sized.name} has none: pass module:callable and its input"
        )
    if recomputed and sample is None:
        raise SettingError(
            "activation checkpointing and offload change activations: pass the shape of a batch (--input)"
        )
    if how["options"] and len(strategies) != 1:
        raise SettingError("options are one strategy's: name that strategy alone")
    if memory is not None:
        hardware = dataclasses.replace(hardware, devices=())  # another machine
    devices = 0 if cpu else len(hardware.devices)
    plans = {}
    for world in sorted(set(processes)):
        ranks = Ranks(size=world, local_size=min(world, per_node or devices or world))
        plans[world] = make_plan(Settings(memory=memory, cpu=cpu), hardware, ranks)
    facts = {world: Facts(hardware, p.device.value.split(":")[0], world) for world, p in plans.items()}
    first = min(plans)
    own = [plans[first].precision.value] if memory is None else []
    preferred = [name for name in dict.fromkeys([*own, "bf16", "fp32"]) if name in PRECISIONS]
    usual = list(dict.fromkeys(["fp32", *preferred]))[:2]
    names = dict.fromkeys(ALIASES.get(name, name) for name in precisions or usual)
    refusals = {name: PRECISIONS[name].refuse(facts[first]) if memory is None else None for name in names}
    refused = [f"{name}: {why}" for name, why in refusals.items() if why and precisions]
    kinds = [name for name in names if not refusals[name]]
    activations = {}
    which = read_which(how["activation_checkpointing"] or None)
    each = which is not None and which.below is not None  # by size, activations depend on the rest
    for precision in (
        kinds if sample is not None and not each else ()
    ):  # the same for every strategy and world
        activations[precision] = estimate(
            sized.model, **{**how, "options": None}, strategy="single", precision=precision
        ).activations
    rows: list[Row] = []
    for world, plan in plans.items():
        for strategy in strategies or SIMPLEST:
            if why := STRATEGIES[strategy].refuse(facts[world]):
                refused += [f"{strategy} on {world}: {why}"] if strategies else []
                continue
            for precision in kinds:
                known = (
                    {"activations": activations[precision], "sample": None}
                    if precision in activations
                    else {}
                )
                where = {"world": world, "per_node": plan.ranks.local_size}
                try:
                    if clash := incompatible(PRECISIONS[precision], STRATEGIES[strategy]):
                        raise RefusedError(str(clash))
                    need = estimate(
                        sized.model, strategy=strategy, precision=precision, **where, **{**how, **known}
                    )
                except SettingError:
                    raise
                except EasympError as error:  # this model, under this strategy
                    refused.append(f"{strategy} on {world} with {precision}: {error}")
                else:
                    rows.append(Row(need, plan.memory))
    if not rows:
        raise SettingError(f"nothing is left to estimate: {'; '.join(refused) or 'no processes'}")
    return Estimates(rows, list(dict.fromkeys(refused)), _notes(sized, rows), [*preferred, *kinds])


def _notes(sized: Sized, rows: Sequence[Row]) -> list[str]:
    """Each once, with its strategies, unless it is about all."""
    every = {row.need.strategy for row in rows}
    about: dict[str, set[str]] = {}
    for row in rows:
        for note in row.need.notes:
            note = (WITH_INPUT if sized.runs else WITHOUT) if note == NO_SAMPLE else note
            about.setdefault(note, set()).add(row.need.strategy)
    said = [note if who == every else f"{', '.join(sorted(who))}: {note}" for note, who in about.items()]
    return [*sized.notes, *said]
