"""One rank of a replay: runs a script from a checkpoint, stops before a step, and compares its ring with the run's."""

from __future__ import annotations

import os
import pdb
import platform
import runpy
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from ... import __file__ as easymp_file
from ...data import Samples, SampleTracker
from ...parts.ring import Entry, path_of, read
from ...training.search import ModuleSearch
from ...training.state import accelerators
from ..harness.rank import Runner, Stop, read_task
from . import DIFFERS, END, NOT_REACHED, SAME, newest

SHOWN = 32  # indices of samples
HOOKS = ("before_forward", "before_step")
BITS = {"losses": "loss", "norms": "gradient norm", "scale": "loss scale", "loaders": "place in the data"}


class Replay(Runner):
    """Runs a script from one checkpoint, saves nothing, and stops in front of an update."""

    def __init__(self, folder: Path, task: dict[str, Any]) -> None:
        super().__init__(folder, task)
        self._update = task["update"]
        self._hooks: dict[str, Any] = {}
        if task["hooks"]:
            functions = runpy.run_path(task["hooks"])
            self._hooks = {name: functions[name] for name in HOOKS if name in functions}
            if not self._hooks:
                raise SystemExit(f"{task['hooks']} defines neither {' nor '.join(HOOKS)}")
        self._search: ModuleSearch | None = None
        self._rank = self._updates = 0  # as far as the script has come
        self._began = False
        self._start: str | None = None  # the checkpoint that was loaded
        self._samples: Samples | None = None  # of the running update

    def run_script(self) -> None:
        if self.task["begin"]:
            torch.set_num_threads(self.task["begin"]["threads"])
        os.chdir(self.task["directory"])
        with suppress(Stop):
            try:
                self.play()
                if self._rank == 0:
                    print(f"The script has ended after update {self._updates}: update {self._update} never came.")
                    (self.folder / END).write_text(NOT_REACHED, encoding="utf-8")
            except (Exception, SystemExit) as error:
                if isinstance(error, Stop) or not self._began or self.run is None or self.run.world.size > 1:
                    raise
                print(f"The script ends before the step: {type(error).__name__}: {error}")
                self._stop(self.run.prepared.optimizers[0], traceback=error.__traceback__)
        for accelerator in accelerators():
            accelerator.close()

    # -- events of the run

    def begin(self) -> None:
        self._rank = self.run.world.rank
        self._tracker = SampleTracker(self.run.window)

    def loading(self, call: str, path: str | None) -> str | None:
        start: str | None = self.task["checkpoint"]
        if call == "load_state":
            return start if path is None else None
        if start is None and path is not None:  # a run that began from another one's checkpoints
            start = newest(path, self._update)[0]
        if start is None:
            self._follow()
        return start or ""

    def loaded(self, path: str) -> None:
        self._start = path
        self._follow()
        if self._updates >= self._update:
            self._began = False  # there is nothing to look at
            raise SystemExit(
                f"{path} has update {self._updates} already, and the replay stops in front of {self._update}: let the "
                "script call resume(), which loads a checkpoint before it"
            )

    def saving(self, call: str, path: str | None) -> str:
        """Save nothing, but do to the models what a save does to them; the script may write into the folder."""
        if call == "save_state":
            self.run.world.settle()
        folder = self.folder / "saved"
        folder.mkdir(exist_ok=True)
        return str(folder)

    def prepared(self, objects: Sequence[Any]) -> None:
        if self.run.prepared.optimizers and self.run.prepared.models and self.task["checkpoint"] is None:
            self._follow()

    def step(self, optimizer: Any) -> None:
        self._samples = self._tracker.samples()
        if optimizer.updates + 1 < self._update:
            return
        if optimizer.closure is not None:  # which computes the gradients
            with torch.enable_grad():
                optimizer.closure()
        self._stop(optimizer, optimizer.closure is not None)
        raise Stop

    def stepped(self, optimizer: Any) -> None:
        self._follow()

    def _follow(self) -> None:
        """Begin to watch if the next update is the one in which the replay stops."""
        prepared = self.run.prepared
        self._updates = max((optimizer.updates for optimizer in prepared.optimizers), default=0)
        if self._began or self._updates != self._update - 1:
            return
        self._began = True
        if self.task["nonfinite"]:
            self._search = ModuleSearch(prepared.models)
        self._call_hook("before_forward")

    def _call_hook(self, name: str) -> None:
        if name in self._hooks:
            self._hooks[name](self.accelerator, [route.view for route in self.run.prepared.models])

    # -- in front of the step

    def _stop(self, optimizer: Any, closure: bool = False, traceback: TracebackType | None = None) -> None:
        run, search, ring = self.run, self._search, self.run.parts.get("replay")
        rank = run.world.rank
        if search is not None:
            search.end()
        ring.finish(ring.row(optimizer, self._update))
        header, entries = read(path_of(self.task["project"], rank))
        replayed, last = ring.entries, (self._update, run.prepared.optimizers.index(optimizer))
        difference, streams = compared(entries, replayed, last, closure)
        common = len(entries.keys() & replayed.keys())
        ranks = run.world.gather_objects((common, difference, streams, search.result if search else ""))
        commons, differences, streams_by_rank, nonfinite = zip(*ranks)
        if rank == 0:
            print(self._headline(optimizer, replayed[last]))
            print(self._verdict(min(commons), differences, sorted(set().union(*streams_by_rank)), header), flush=True)
            if search is not None:
                layers = "; ".join(f"{layer} (rank {r})" for r, layer in enumerate(nonfinite) if layer)
                finite = "All inputs, outputs and gradients of modules are finite"
                print(f"First not finite: {layers}." if layers else f"{finite}.", flush=True)
            (self.folder / END).write_text(DIFFERS if any(differences) else SAME, encoding="utf-8")
        self._call_hook("before_step")
        if self.task["pdb"]:
            libraries = tuple(str(Path(file).parent) for file in (easymp_file, torch.__file__))
            frame: FrameType | None = sys._getframe()
            while frame is not None and frame.f_code.co_filename.startswith(libraries):
                frame = frame.f_back
            debugger = pdb.Pdb()
            debugger.reset()
            debugger.interaction(None if traceback else frame, traceback)

    def _headline(self, optimizer: Any, entry: Entry) -> str:
        """Where the replay stands: the update, its numbers, and its samples."""
        stepped = self.run.plan.settings.optimizer_in_backward
        position = "Behind the backward, which has made the step," if stepped else "In front of the step"
        parts = [f"{position} of update {self._update} ({type(optimizer.given).__name__})"]
        forms = (("loss", "losses", ".6g"), ("gradient norm", "norms", ".6g"), ("loss scale", "scale", "g"))
        for name, key, form in forms:
            numbers = ", ".join(format(float.fromhex(number), form) for number in entry[key])
            parts += [f"{name} {numbers}"] if numbers else []
        samples = self._samples
        loader = None if samples is None else samples.loader()
        if samples is not None and loader is not None:
            indices = loader.indices(*samples[1:]) or []
            texts = list(map(str, indices[:SHOWN]))
            if len(indices) > SHOWN:
                texts.append("…")
            range_ = f"epoch {samples.epoch}, samples {samples.begin} to {samples.end}"
            parts.append(f"{range_} (indices {', '.join(texts)})" if texts else range_)
        return "; ".join(parts) + "."

    def _verdict(self, common: int, differences: Sequence[str], streams: Sequence[str], begin: Entry | None) -> str:
        """The comparison of `common` updates: the first difference on each rank, and random streams that differ."""
        start = f"from {self._start}" if self._start else "from the beginning of the script"
        if self.task["checkpoint"] and not self._start:
            start += ", which does not call resume()"
        if begin is None:
            no_ring = "The run kept no updates, so nothing could be compared: Settings(replay=64) keeps the last 64"
            return f"Replayed {start}. {no_ring}."
        for rank, difference in enumerate(differences):
            if difference:
                sentences = [difference]
                for name, version in {"torch": torch.__version__, "Python": platform.python_version()}.items():
                    if begin["versions"][name] != version:
                        sentences.append(f"{name} is {version}, and was {begin['versions'][name]}")
                return f"Replayed {start}. It is not the run. On rank {rank}, {'. '.join(sentences)}."
        if not common:
            return f"Replayed {start}. Nothing could be compared: the run's ring has none of these updates."
        numbers = "losses, gradient norms, loss scale and places in the data"
        updates = f"{common} update{'s' * (common > 1)} of the run's ring"
        differ = f" Random streams that differ: {', '.join(streams)}." if streams else ""
        return f"Replayed {start}. {updates}: {numbers} are equal, bit for bit.{differ}"


def compared(
    entries: Mapping[tuple[int, int], Entry],
    replayed: Mapping[tuple[int, int], Entry],
    last: tuple[int, int],
    closure: bool,
) -> tuple[str, list[str]]:
    """The first difference of the run's ring and the replay's, and the random streams that differ.

    The replay stops before the step of the `last` update. With a `closure` that step would have computed further
    losses, so only the first loss of the last update is compared.
    """
    streams: set[str] = set()
    for key in sorted(entries.keys() & replayed.keys()):
        a, b = entries[key], replayed[key]
        if closure and key == last:
            a = {**a, "losses": a["losses"][: len(b["losses"])], "norms": b["norms"]}
        for name, title in BITS.items():
            if a[name] != b[name] and not (key == last and name == "scale"):  # a step may change it
                return f"update {key[0]}: the {title} is {shown(b[name])}, and {shown(a[name])} in the run", []
        drawn = a["random"].keys() & b["random"].keys() if key != last else ()
        streams |= {name for name in drawn if a["random"][name] != b["random"][name]}
    return "", sorted(streams)


def shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(shown, value)) or "none"
    return repr(float.fromhex(value)) if isinstance(value, str) else str(value)


if __name__ == "__main__":
    scratch = Path(sys.argv[1])
    Replay(scratch, read_task(scratch)).run_script()
