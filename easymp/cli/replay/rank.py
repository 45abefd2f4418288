"""One rank of a replay: runs the script from a checkpoint, stops in front of a step, and compares what it kept with the run's ring."""

from __future__ import annotations

import json
import os
import pdb
import platform
import runpy
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any
from unittest.mock import patch

import torch

from ... import __file__ as easymp_file
from ...accelerator import Accelerator
from ...checkpoint.ring import Entry, file_of, read
from ...launcher.worker import run_module, run_script
from ...optim import PreparedOptimizer
from ...training.nonfinite import Search
from ...training.spikes import Samples
from ...training.state import accelerators
from . import DIFFERS, END, NOT_REACHED, SAME, TASK, newest

SHOWN = 32  # indices of samples
HOOKS = ("before_forward", "before_step")
BITS = {"losses": "loss", "norms": "gradient norm", "scale": "loss scale", "loaders": "place in the data"}


class Stop(SystemExit):
    """Ends the script in front of the update."""


class Replay:
    """What stands in the script's way: it resumes from one checkpoint, saves nothing, and stops in front of an update."""

    def __init__(self, scratch: Path, task: Mapping[str, Any]) -> None:
        self._scratch, self._task, self._update = scratch, task, task["update"]
        self._hooks: dict[str, Any] = {}
        if task["hooks"]:
            found = runpy.run_path(task["hooks"])
            self._hooks = {name: found[name] for name in HOOKS if name in found}
            if not self._hooks:
                raise SystemExit(f"{task['hooks']} defines neither {' nor '.join(HOOKS)}")
        self._search: Search | None = None
        self._rank = self._done = 0  # as far as the script has come
        self._began = False
        self._start: str | None = None  # the checkpoint that was loaded

    def run(self) -> None:
        """Run the script, up to the update."""
        task = self._task
        if task["begin"]:
            torch.set_num_threads(task["begin"]["threads"])
        around = {"resume": self._resume, "save_state": self._save_state}
        around |= dict.fromkeys(("save_model", "save"), lambda acc, *args, **named: None)
        step, prepare, load = PreparedOptimizer.step, Accelerator.prepare, Accelerator.load_state
        with ExitStack() as stack:
            for name, call in around.items():
                stack.enter_context(patch.object(Accelerator, name, bound(call)))
            stack.enter_context(patch.object(Accelerator, "prepare", bound(self._prepare, prepare)))
            stack.enter_context(patch.object(Accelerator, "load_state", bound(self._load_state, load)))
            stack.enter_context(patch.object(PreparedOptimizer, "step", bound(self._step, step)))
            os.chdir(task["folder"])
            with suppress(Stop):
                try:
                    (run_module if task["module"] else run_script)(task["script"], task["arguments"])
                    self._never()
                except (Exception, SystemExit) as error:
                    acc = next(iter(accelerators()), None)
                    if isinstance(error, Stop) or not self._began or acc is None or acc.num_processes > 1:
                        raise
                    print(f"The script ends before the step: {type(error).__name__}: {error}")
                    self._stop(acc, acc._prepared.optimizers[0], ended=error.__traceback__)
        for acc in accelerators():
            acc.close()

    def _never(self) -> None:
        if self._rank == 0:
            print(f"The script has ended after update {self._done}: update {self._update} never came.")
            (self._scratch / END).write_text(NOT_REACHED, encoding="utf-8")

    # -- the script's calls

    def _resume(self, acc: Any, path: Any = None, strict: bool = True) -> str | None:
        start = self._task["checkpoint"]
        if start is None and path is not None:  # a run that began from another one's checkpoints
            start = newest(path, self._update)[0]
        if start is not None:
            acc.load_state(start, strict=strict)
        self._look(acc)
        return start

    def _load_state(
        self, acc: Any, call: Callable[..., Any], path: Any = None, strict: bool = True, **named: Any
    ) -> Any:
        if path is None and named.get("input_dir") is None:
            path = self._task["checkpoint"]
        loaded = call(acc, path, strict, **named)
        self._start = loaded.place
        self._look(acc)
        if self._done >= self._update:
            self._began = False  # there is nothing to look at
            raise SystemExit(
                f"{self._start} has update {self._done} already, and the replay stops in front of {self._update}: let the script call "
                "resume(), which loads a checkpoint before it"
            )
        return loaded

    def _save_state(self, acc: Any, *args: Any, **named: Any) -> str:
        """Save nothing, but do to the models what a save does to them; the script may write into the folder."""
        acc._world.settle()
        folder = self._scratch / "saved"
        folder.mkdir(exist_ok=True)
        return str(folder)

    def _prepare(self, acc: Any, call: Callable[..., Any], *objects: Any, **named: Any) -> Any:
        done = call(acc, *objects, **named)
        if acc._prepared.optimizers and acc._prepared.models and self._task["checkpoint"] is None:
            self._look(acc)
        return done

    def _step(self, optimizer: Any, call: Callable[..., Any], closure: Any = None) -> Any:
        acc = next((one for one in accelerators() if optimizer in one._prepared.optimizers), None)
        window = optimizer._window
        waits = window.accumulation != 1 and window.inside and not window.sync
        if acc is None or waits or optimizer.turn.dropped or optimizer.updates + 1 < self._update:
            result = call(optimizer, closure)
            if acc is not None:
                self._look(acc)
            return result
        if closure is not None:  # which computes the gradients
            with torch.enable_grad():
                closure()
        self._stop(acc, optimizer, closure is not None)
        raise Stop

    def _look(self, acc: Any) -> None:
        """Begin the update in front of which to stop, once the one before is made."""
        self._rank = acc.process_index
        self._done = max((optimizer.updates for optimizer in acc._prepared.optimizers), default=0)
        if self._began or self._done != self._update - 1:
            return
        self._began = True
        if self._task["nonfinite"]:
            self._search = Search(acc._prepared.models)
        if "before_forward" in self._hooks:
            self._hooks["before_forward"](acc, acc._views())

    # -- in front of the step

    def _stop(
        self, acc: Any, optimizer: Any, closure: bool = False, ended: TracebackType | None = None
    ) -> None:
        rank, search = acc.process_index, self._search
        if search is not None:
            search.end()
        acc._ring.finish(acc._ring.row(optimizer, self._update))
        begin, theirs = read(file_of(self._task["project"], rank))
        mine, last = acc._ring.entries, (self._update, acc._prepared.optimizers.index(optimizer))
        found = search.found if search is not None else ""
        mine_found = (len(theirs.keys() & mine.keys()), *compared(theirs, mine, last, closure), found)
        everyones = acc._world.gather_objects(mine_found)
        if rank == 0:
            print(self._where(acc, optimizer, mine[last]))
            print(self._verdict(everyones, begin), flush=True)
            if search is not None:
                places = "; ".join(f"{one[3]} (rank {r})" for r, one in enumerate(everyones) if one[3])
                none = "All inputs, outputs and gradients of modules are finite"
                print(f"First not finite: {places}." if places else f"{none}.", flush=True)
            end = DIFFERS if any(one[1] for one in everyones) else SAME
            (self._scratch / END).write_text(end, encoding="utf-8")
        if "before_step" in self._hooks:
            self._hooks["before_step"](acc, acc._views())
        if self._task["pdb"]:
            debugger = pdb.Pdb()
            debugger.reset()
            debugger.interaction(None if ended else frame_of_script(), ended)  # type: ignore[arg-type]

    def _where(self, acc: Any, optimizer: Any, entry: Entry) -> str:
        kind = type(optimizer.given).__name__
        stepped = acc.plan.settings.optimizer_in_backward
        place = "Behind the backward, which has made the step," if stepped else "In front of the step"
        parts = [f"{place} of update {self._update} ({kind})"]
        losses = ", ".join(f"{float.fromhex(loss):.6g}" for loss in entry["losses"])
        norms = ", ".join(f"{float.fromhex(norm):.6g}" for norm in entry["norms"])
        parts += [f"loss {losses}"] * bool(losses) + [f"gradient norm {norms}"] * bool(norms)
        parts += [f"loss scale {float.fromhex(scale):g}" for scale in entry["scale"]]
        samples: Samples | None = acc._guard.samples()
        loader = None if samples is None else samples.loader()
        if samples is not None and loader is not None:
            indices = loader.indices(*samples[1:]) or []
            few = ", ".join([*map(str, indices[:SHOWN]), *["…"] * (len(indices) > SHOWN)])
            where = f"epoch {samples.epoch}, samples {samples.begin} to {samples.end}"
            parts.append(f"{where} (indices {few})" if few else where)
        return "; ".join(parts) + "."

    def _verdict(self, everyones: list[Any], begin: Entry | None) -> str:
        start = f"from {self._start}" if self._start else "from the beginning of the script"
        if self._task["checkpoint"] and not self._start:
            start += ", which does not call resume()"
        if begin is None:
            kept = "The run kept no updates, so nothing could be compared: Accelerator(replay=64) keeps the last 64"
            return f"Replayed {start}. {kept}."
        for rank, (_, words, _, _) in enumerate(everyones):
            if words:
                now = {"torch": torch.__version__, "Python": platform.python_version()}
                here = [f"{name} is {v}, and was {begin['versions'][name]}" for name, v in now.items()]
                here = [said for said, name in zip(here, now) if begin["versions"][name] != now[name]]
                return f"Replayed {start}. It is not the run. On rank {rank}, {'. '.join([words, *here])}."
        count = min(one[0] for one in everyones)
        if not count:
            return f"Replayed {start}. Nothing could be compared: the run's ring has none of these updates."
        what = "losses, gradient norms, loss scale and places in the data"
        said = f"Replayed {start}. {count} update{'s' * (count > 1)} of the run's ring: {what} are equal, bit for bit."
        streams = sorted({name for one in everyones for name in one[2]})
        return said + (f" Random streams that differ: {', '.join(streams)}." if streams else "")


def compared(
    theirs: Mapping[tuple[int, int], Entry],
    mine: Mapping[tuple[int, int], Entry],
    last: tuple[int, int],
    closure: bool,
) -> tuple[str, list[str]]:
    """The first difference of two rings in words, and the random streams that differ. The `last` one has not been stepped yet.

    A step with a `closure` would have evaluated it again: of the last one the first loss is compared.
    """
    streams: set[str] = set()
    for key in sorted(theirs.keys() & mine.keys()):
        a, b = theirs[key], mine[key]
        if closure and key == last:
            a = {**a, "losses": a["losses"][: len(b["losses"])], "norms": b["norms"]}
        for name, words in BITS.items():
            if a[name] != b[name] and not (key == last and name == "scale"):  # a step may change it
                return (
                    f"update {key[0]}: the {words} is {shown(b[name])}, and {shown(a[name])} in the run",
                    [],
                )
        drawn = a["random"].keys() & b["random"].keys() if key != last else ()
        streams |= {name for name in drawn if a["random"][name] != b["random"][name]}
    return "", sorted(streams)


def shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(shown, value)) or "none"
    return repr(float.fromhex(value)) if isinstance(value, str) else str(value)


def frame_of_script() -> FrameType | None:
    """The frame that called the step."""
    libraries = tuple(str(Path(file).parent) for file in (easymp_file, torch.__file__))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(libraries):
        frame = frame.f_back
    return frame


def bound(call: Callable[..., Any], real: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A method that calls ``call(self, real, ...)``, or without `real` ``call(self, ...)``."""
    more = () if real is None else (real,)
    return lambda self, *args, **named: call(self, *more, *args, **named)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    Replay(place, json.loads((place / TASK).read_text(encoding="utf-8"))).run()
