"""The page: one HTML file that needs nothing else, neither the network nor a script."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..base.units import size
from .comparison import Comparison
from .plots import COLOURS, DARK, dashes, plots
from .summaries import Run, Summary
from .table import heads, rows, unit
from .verdict import is_busy
from .writing import seconds

LONG = 60  # letters of plans' names, above which a title counts them
TEMPLATE = Path(__file__).with_name("page.html.jinja")
WORD = 12  # letters of a name that fit a narrow table beside its numbers


def page(found: Comparison) -> str:
    """HTML. What comes from outside (names, messages, arguments) is escaped."""
    # At first use: an optional package.
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        title=title(found),
        command=shlex.join(command(found)),
        when=_when(found),
        long=max((len(summary.name) for summary in found.summaries), default=0) > WORD,
        found=found,
        verdict=found.verdict,
        heads=heads(found.summaries, found.metrics),
        rows=rows(found.summaries, found.metrics),
        unit=unit(found.summaries),
        plots=[(plot, Markup(plot.svg())) for plot in plots(found)],
        plans=[_plan(summary, found.machine.get("threads")) for summary in found.summaries],
        seeded=any(run.seed is not None for summary in found.summaries for run in summary.runs),
        machine=machine(found.machine),
        swatch=_swatch,
        colours=COLOURS,
        dark=DARK,
    )


def title(found: Comparison) -> str:
    script, names = Path(found.task.script).name, ", ".join(summary.name for summary in found.summaries)
    return f"{script}: {names}" if len(names) <= LONG else f"{script} under {len(found.summaries)} plans"


def _when(found: Comparison) -> str:
    """``"21 November 2026, 16:24"``, when the first run began, by this machine's clock."""
    begun = min((run.end.started for summary in found.summaries for run in summary.runs), default=None)
    return "" if begun is None else time.strftime("%-d %B %Y, %H:%M", time.localtime(begun))


def command(found: Comparison) -> list[str]:
    """The script and its arguments, without what each plan adds."""
    task = found.task
    return [*(["python", "-m"] if task.module else ["python"]), task.script, *task.arguments]


def machine(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values."""
    if not facts:
        return []
    devices = [f"{device['name']}, {size(device['memory'])}" for device in facts["devices"]]
    counted = [f"{devices.count(device)} × {device}" for device in dict.fromkeys(devices)]
    lines = [
        (
            "processor",
            f"{facts['processor']}: {facts['cores']} cores, {facts['threads']} threads usable, {size(facts['memory'])}",
        ),
        ("accelerators", ", ".join(counted) or "none"),
        ("links", facts["links"]),
        ("system", facts["system"]),
        ("software", f"torch {facts['torch']}, easymp {facts['easymp']}, Python {facts['python']}"),
    ]
    return [(name, value) for name, value in lines if value]


def _plan(summary: Summary, threads: int | None) -> dict[str, Any]:
    run = summary.typical or summary.runs[0]
    plan = run.record.plan if run.record is not None else {}
    choices = [
        (name, choice["value"], choice["reason"]) for name, choice in plan.items() if isinstance(choice, dict)
    ]
    asked = f"{summary.variant.processes}" if summary.variant.processes else "left to the launcher"
    return {
        "name": summary.name,
        "override": summary.variant.override() or "nothing",
        "processes": plan.get("processes", asked),
        "choices": choices,
        "runs": [_run(each, threads) for each in summary.runs],
    }


def _run(run: Run, threads: int | None) -> dict[str, Any]:
    record, end = run.record, run.end
    return {
        "number": run.number,
        "seed": run.seed,
        "status": end.status,
        "seconds": seconds(record.seconds if record else None),
        "before": seconds(run.before),
        "wall": seconds(end.wall),
        "updates": f"{record.updates:,}" if record else "–",
        "samples": f"{record.samples:,}" if record and record.samples is not None else "–",
        "peak": size(record.peak) if record else "–",
        "others": "–" if end.others is None else f"{end.others:.2f}",
        "busy": is_busy(end.others, threads),
    }


def _swatch(plan: int) -> dict[str, Any]:
    """Colour and dashes of a plan, for the piece of line before its name."""
    pattern: str | tuple[int, Sequence[float]] = dashes(plan)
    return {
        "colour": plan % len(COLOURS),
        "dashes": "" if isinstance(pattern, str) else " ".join(f"{n * 1.6:g}" for n in pattern[1]),
    }
