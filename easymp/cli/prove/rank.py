"""One rank of a proof: runs the script, and writes its first updates down, or repeats them on one process and compares.

What is written of an update: the whole gradients as the step finds them (reduced, unscaled, clipped), and the whole weights after it.
The process that repeats updates compares its gradients, steps with the plan's, compares the weights, and takes the plan's. So errors
do not add up over updates, and a gradient that is noise (of a key's bias under Adam) is not an update that differs.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ...accelerator import Accelerator
from ...base.dtensor import local
from ...base.pytree import leaves
from ...checkpoint.huggingface import gather_on_host, load
from ...data import PreparedLoader
from ...launcher.worker import run_module, run_script
from ...optim import PreparedOptimizer
from ...optim.torch_step import IMPLEMENTATION
from ...precision.policies import LOW
from . import FIRST, REFUSED, ROWS, SKIPPED, TASK

# Relative differences that a precision explains: 1024 unit roundoffs of fp32, 32 of shorter dtypes, half the value for fp8.
FP32 = 2**-14
EXPLAINED = {
    "fp32": FP32,
    "tf32": 2**-6,
    "fp16": 2**-6,
    "bf16": 2**-3,
    "fp8": 0.5,
    "mxfp8": 0.5,
    "nvfp4": 1.0,
}
SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
NOISE = 1 / 8  # of the RMS of all gradients: added to that of a parameter, which may be zero but for rounding
ROUNDINGS = 4  # of a weight to the dtype that it is stored in
MUON = 0.5  # of an update: Muon orthogonalises in bf16, which amplifies rounding
HEARD = {"prepare": Accelerator, "backward": Accelerator, "step": PreparedOptimizer, "read": PreparedLoader}


class Stop(SystemExit):
    """Ends the script after the last update that is compared."""


class Writer:
    """Writes down the updates of the plan, on rank 0.

    Args:
        steps: updates of each optimizer.
        dropout: False sets the rates of dropout layers to 0.
    """

    def __init__(self, folder: Path, steps: int, dropout: bool) -> None:
        self.folder, self._steps, self._dropout = folder, steps, dropout
        self.acc: Any = None
        self.root: nn.Module = nn.ModuleList()  # the model, or all models
        self.number = 0  # of the update
        self._forget()

    def _forget(self) -> None:
        self.losses: list[tuple[Tensor, Any]] = []  # of the running update
        self.outputs: dict[str, list[tuple[float, float]]] = {}
        self.samples: set[int] = set()

    def refuse(self, why: str) -> None:
        """End the run: it cannot be compared."""
        (self.folder / REFUSED).write_text(why, encoding="utf-8")
        raise Stop

    # -- the script's calls, around which these methods stand

    def run(self, script: Callable[[], None]) -> None:
        """Run the script, up to the last update to compare."""
        with ExitStack() as heard, suppress(Stop):
            for name, kind in HEARD.items():
                around = replaced(getattr(self, f"around_{name}"), getattr(kind, name))
                heard.enter_context(patch.object(kind, name, around))
            script()
        if self.acc is not None:
            self.acc.close()

    def around_prepare(self, acc: Accelerator, call: Callable[..., Any], *objects: Any, **how: Any) -> Any:
        if self.acc not in (None, acc):
            self.refuse("the script makes several Accelerators")
        self.acc = acc
        models = [item for item in objects if isinstance(item, nn.Module)]
        for part in (part for model in models for part in model.modules() if not self._dropout):
            rates = [name for name, value in vars(part).items() if "drop" in name and type(value) is float]
            for name in [*rates, *(["p"] if isinstance(part, _DropoutNd) else [])]:
                setattr(part, name, 0.0)
        done = call(acc, *objects, **how)
        every = [route.original for route in acc._prepared.models]
        self.root = every[0] if len(every) == 1 else nn.ModuleList(every)
        if acc._prepared.strategy.local_updates or acc.plan.settings.optimizer_in_backward:
            self.refuse("local_sgd and optimizer_in_backward=True have no gradients to compare at a step")
        if models:
            self.start(f"start-{len(every)}.safetensors")
            for name, part in self.root.named_modules() if not acc.plan.compiles else ():
                part.register_forward_hook(partial(self._output, name))  # torch.compile breaks graphs there
        return done

    def around_backward(self, acc: Accelerator, call: Callable[..., None], loss: Tensor, **how: Any) -> None:
        call(acc, loss, **how)
        self.losses.append((loss.detach(), how.get("num_items")))  # a pipeline's has its value by now

    def around_read(self, loader: PreparedLoader, call: Callable[..., Any], skip: int = 0) -> Iterator[Any]:
        for batch in call(loader, skip):
            for i, leaf in enumerate(leaves(batch)):
                if isinstance(leaf, Tensor) and leaf.ndim and leaf.numel():
                    rows = leaf.detach().cpu().reshape(len(leaf), -1).contiguous().view(torch.uint8)
                    self.samples.update(zlib.crc32(row, i) for row in rows.numpy())
            yield batch

    def around_step(self, optimizer: PreparedOptimizer, call: Callable[..., Any], closure: Any = None) -> Any:
        window, optimizers = self.acc._window, self.acc._prepared.optimizers
        waits = window.accumulation != 1 and window.inside and not window.sync
        if waits or optimizer not in optimizers:  # a copy, for example
            return call(optimizer, closure)
        if closure is not None:
            self.refuse("step(closure) evaluates the model several times in an update")
        if optimizer.updates >= self._steps:
            raise Stop
        self.acc._world.settle()
        self.acc.unscale_gradients(optimizer)
        with torch.no_grad():
            self.stepping(optimizer)
            with torch.enable_grad():
                result = call(optimizer)
            self.stepped(optimizer)
        self.number += 1
        self._forget()
        if all(one.updates >= self._steps for one in optimizers):
            raise Stop
        return result

    def _output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Note the mean of a layer's output, and of its magnitude: they show which layer is the first that differs."""
        first = next((t for t in leaves(output) if isinstance(t, Tensor) and t.is_floating_point()), None)
        if first is not None and module.training and torch.is_grad_enabled():
            here = local(first.detach())
            here = getattr(here, "trigger_wait", lambda: here)()
            if type(here) is Tensor and not here.is_meta and here.numel():  # a survey runs on fake tensors
                means = float(here.double().mean()), float(here.double().abs().mean())
                self.outputs.setdefault(name, []).append(means)

    # -- facts of all ranks

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and floating-point buffers."""
        buffers = {name: b for name, b in self.root.named_buffers() if b.is_floating_point()}
        return {**dict(self.root.named_parameters()), **buffers}

    def gradients(self, optimizer: PreparedOptimizer) -> dict[str, Tensor]:
        """Gradients of what rank 0's optimizer steps, with zeros where other ranks have one. `self.held` has the tensors."""
        stepped = {id(own): tensor for tensor, own in optimizer.parameters()}
        every = dict(self.root.named_parameters())
        here = [name for name, p in every.items() if id(p) in stepped]
        names = self.acc._world.gather_objects(here)[0]
        self.held = {name: stepped.get(id(every[name]), every[name]) for name in names}
        here = [name for name, tensor in self.held.items() if tensor.grad is not None]
        there = set().union(*self.acc._world.gather_objects(here))
        held = [(name, tensor, tensor.grad) for name, tensor in self.held.items() if name in there]
        grads = {name: torch.zeros_like(t) if grad is None else grad for name, t, grad in held}
        return {n: g.detach() if g.layout == torch.strided else g.to_dense() for n, g in grads.items()}

    def facts(self, optimizer: PreparedOptimizer) -> dict[str, Any]:
        """What is compared beside tensors."""
        window, share = self.acc._window, self.acc._prepared.strategy.data_rank
        losses = [(float(loss.sum()), None if n is None else float(n)) for loss, n in self.losses]
        sums = {name: [len(v), *map(sum, zip(*v))] for name, v in self.outputs.items()}
        every = self.acc._world.gather_objects((share, losses, self.samples, sums))
        shares = {one[0]: one[1] for one in every}  # ranks of a group have the same
        heard = [pair for found in shares.values() for pair in found]
        counted = None not in [items for _, items in heard]
        total = sum(items for _, items in heard) if counted else len(heard)
        outputs = {}
        for name in dict.fromkeys(name for one in every for name in one[3]):
            count, *means = map(sum, zip(*(one[3][name] for one in every if name in one[3])))
            outputs[name] = [mean / count for mean in means]
        numbers = [[(n, v) for n, v in g.items() if type(v) in (int, float)] for g in optimizer.param_groups]
        loader = window.reading
        return {
            "optimizer": self.acc._prepared.optimizers.index(optimizer), "class": type(optimizer.given).__name__,
            "update": optimizer.updates + 1, "samples": sorted(set().union(*(one[2] for one in every))),
            "loss": sum(loss for loss, _ in heard) / total if total else None,
            "scale": sum(abs(loss) for loss, _ in heard) / total if total else 0.0, "outputs": outputs,
            "options": [pair for group in numbers for pair in group if pair[0] not in IMPLEMENTATION],
            "at": None if loader is None else [loader.epoch, loader.position],
            "short": (window.inside and window.micro < window.accumulation) or bool(loader and loader._surplus),
        }  # fmt: skip

    # -- the records

    def start(self, name: str) -> None:
        """Models were prepared."""
        self._save(name, {"weights": self._whole(self.tensors())})

    def stepping(self, optimizer: PreparedOptimizer) -> None:
        """An update is about to be made, with gradients in memory."""
        grads = self.gradients(optimizer)
        self._grads = {name: grad.clone() for name, grad in self._whole(grads).items()}
        self._info = {**self.facts(optimizer), "apart": self._apart("gradient", grads)}

    def stepped(self, optimizer: PreparedOptimizer) -> None:
        """An update was made."""
        acc, policy, strategy = self.acc, self.acc._precision, self.acc._prepared.strategy
        after = {n: t for n, t in self.tensors().items() if n in self.held or not isinstance(t, nn.Parameter)}
        kinds = [policy.name, SHORT.get(policy.compute, "fp32"), getattr(strategy.options, "comm_hook", "no")]
        apart = self._info["apart"] or self._apart("weight", {name: after[name] for name in self.held})
        explained = max(EXPLAINED.get(kind, 0.0) for kind in kinds)
        self._info.update(apart=apart, explained=explained, skipped=optimizer.step_was_skipped)
        if self._info["skipped"]:
            (self.folder / SKIPPED).touch()
        steps, loaders = acc._window.accumulation, acc._prepared.loaders
        self._info["plan"] = {
            "strategy": strategy.name, "precision": policy.name, "processes": acc.num_processes,
            "shares": strategy.data_size, "accumulation": steps,
            "batches": [loader.total_batch_size and loader.total_batch_size * steps for loader in loaders],
        }  # fmt: skip
        update = {"info": self._info, "gradients": self._grads, "weights": self._whole(after)}
        self._save(f"update-{self.number}.safetensors", update)

    def _whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors, on rank 0."""
        return gather_on_host(self.acc._world, tensors)

    def _save(self, name: str, tree: dict[str, Any]) -> None:
        self.acc.save(tree, self.folder / name)

    def _apart(self, kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """The first tensor that another rank has otherwise than rank 0, although all hold it whole."""
        world, found = self.acc._world, []
        for i, (name, tensor) in enumerate(tensors.items() if self.acc._prepared.strategy.replicated else ()):
            if world.size > 1 and not hasattr(tensor, "to_local"):
                one = measured(name, tensor, world.broadcast(tensor))
                if one["error"] > FP32 * one["scale"]:  # tensor_parallel computes some on each rank
                    found.append((i, {**one, "kind": kind, "rank": world.rank}))
        every = [pair for pairs in world.gather_objects(found[:1]) for pair in pairs]
        return min(every, key=lambda pair: pair[0], default=(0, None))[1]


class Repeater(Writer):
    """Repeats the updates on one process in fp32, and compares. `report` has a row for each."""

    def __init__(self, folder: Path, steps: int, dropout: bool) -> None:
        super().__init__(folder, steps, dropout)
        self.report: list[dict[str, Any]] = []
        self._plan = load(folder / FIRST)["info"]["plan"]
        self._states: list[Tensor] = []  # of the random stream, before the calls that run
        self._draws = ""  # the innermost module whose call draws random numbers

    def around_prepare(self, acc: Accelerator, call: Callable[..., Any], *objects: Any, **how: Any) -> Any:
        models = [item for item in objects if isinstance(item, nn.Module)]
        for tensor in (t for model in models for t in (*model.parameters(), *model.buffers())):
            if tensor.dtype in LOW:
                tensor.data = tensor.data.float()
        done = super().around_prepare(acc, call, *objects, **how)
        for loader, batch in zip(acc._prepared.loaders, self._plan["batches"]):
            if batch is not None:  # the batch of all processes and micro-batches
                loader.batch_size, loader._source.cut = batch, loader._source.cut._replace(batch=batch)
            elif self._plan["shares"] * self._plan["accumulation"] > 1:
                self.refuse("a loader's batches come ready, and cannot be joined to one of all processes")
        return done

    def start(self, name: str) -> None:
        self._take(load(self.folder / name)["weights"])
        for path, part in self.root.named_modules():
            part.register_forward_pre_hook(lambda *_: self._states.append(random_state()))
            part.register_forward_hook(partial(self._look, path))

    def _look(self, name: str, *_: Any) -> None:
        if not torch.equal(self._states.pop(), random_state()):
            self._draws = self._draws or self._layer(name)

    def _layer(self, name: str) -> str:
        return f"{name or 'the model'} ({type(self.root.get_submodule(name)).__name__})"

    @torch.no_grad()
    def _take(self, values: Mapping[str, Tensor]) -> None:
        tensors = self.tensors()
        for name, value in values.items():
            tensors[name].copy_(value)

    def stepping(self, optimizer: PreparedOptimizer) -> None:
        place = self.folder / f"update-{self.number}.safetensors"
        if not place.exists():
            raise Stop
        self._theirs = load(place)
        info, theirs = self._theirs["info"], self._theirs["gradients"]
        own, mine = self.facts(optimizer), self.gradients(optimizer)
        if info["optimizer"] != own["optimizer"] or not theirs.keys() <= self.held.keys():
            self.refuse("the script steps its optimizers in another order on one process")
        if info["at"] != own["at"]:
            raise Stop  # an epoch has ended, with another number of updates
        row = {name: info[name] for name in ("update", "class", "skipped", "short", "apart", "plan")}
        self.row: dict[str, Any] = row
        self.report.append(row)
        if row["apart"]:
            row["apart"]["layer"] = self._layer(row["apart"]["name"].rpartition(".")[0])
        elif not row["skipped"] and not row["short"]:
            names = dict.fromkeys([*mine, *theirs])
            zeros = {name: torch.zeros_like(self.held[name]) for name in names}
            self._compare(info, own, {n: (theirs.get(n, zeros[n]), mine.get(n, zeros[n])) for n in names})
        if row["skipped"]:  # here by nonfinite="skip", which has looked at finite gradients
            optimizer.turn.found_inf = torch.ones_like(optimizer.turn.found_inf)  # type: ignore[arg-type]
        for name, tensor in self.held.items():
            tensor.grad = theirs[name].to(tensor) if name in theirs else None
        self._before = {name: tensor.detach().clone() for name, tensor in self.held.items()}

    def _compare(self, info: dict[str, Any], own: dict[str, Any], pairs: dict[str, Any]) -> None:
        """Compare what an update begins with, and note what would explain a difference."""
        share, row = info["explained"], self.row
        if None not in (info["loss"], own["loss"]):
            most = share * max(info["scale"], own["scale"])
            times = over(abs(info["loss"] - own["loss"]), most)
            row["loss"] = {"plan": info["loss"], "one": own["loss"], "times": times}
        row["ratio"], usual = common_ratio(pairs)
        row["gradients"] = self._measured(pairs, lambda one: share * (one["scale"] + NOISE * usual))
        row["option"] = next(([*a, b[1]] for a, b in zip(info["options"], own["options"]) if a != b), None)
        row["draws"], row["same samples"] = self._draws, info["samples"] == own["samples"]
        row["layer"] = ""
        for name, (mean, size) in own["outputs"].items():
            theirs = info["outputs"].get(name, (mean, size))
            if not row["layer"] and max(abs(theirs[0] - mean), abs(theirs[1] - size)) > share * size:
                row["layer"] = self._layer(name)
        norms = (n for n, part in self.root.named_modules() if isinstance(part, _BatchNorm) and part.training)
        row["batchnorm"] = next(map(self._layer, norms), "")

    def stepped(self, optimizer: PreparedOptimizer) -> None:
        row, theirs, tensors = self.row, self._theirs["weights"], self.tensors()
        arithmetic = MUON if "muon" in row["class"].lower() else FP32

        def most(one: dict[str, Any]) -> float:
            name = one["name"]
            rounding: float = ROUNDINGS * torch.finfo(theirs[name].dtype).eps / 2 * one["scale"]
            if name not in self._before:  # a buffer, such as the running mean of a batch-norm
                return rounding + self._theirs["info"]["explained"] * one["scale"]
            return rounding + arithmetic * rms(tensors[name] - self._before[name])

        if "gradients" in row:
            row["weights"] = self._measured({n: (t, tensors[n]) for n, t in theirs.items()}, most)
        beyond = any(row[kind]["beyond"] for kind in ("gradients", "weights") if kind in row)
        apart = row["apart"] or row.get("option") or not row.get("loss", {"times": 0})["times"] <= 1
        row["differs"] = bool(beyond or apart)
        if row["differs"]:
            raise Stop
        self._take(theirs)

    def _measured(
        self, pairs: Mapping[str, tuple[Tensor, Tensor]], most: Callable[[Any], float]
    ) -> dict[str, Any]:
        """The largest difference as a multiple of what is explained, and the tensors that differ by more, in the model's order."""
        found = [measured(name, *pair) for name, pair in pairs.items()]
        for one in found:
            one["times"], one["layer"] = (
                over(one["error"], most(one)),
                self._layer(one["name"].rpartition(".")[0]),
            )
        largest = max(found, key=lambda one: one["times"], default=None)
        return {"largest": largest, "beyond": [one for one in found if not one["times"] <= 1]}


def replaced(around: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls ``around(self, call, ...)``."""
    return lambda self, *args, **named: around(self, call, *args, **named)


def over(error: float, most: float) -> float:
    return error / most if most else math.inf if error else 0.0


def random_state() -> Tensor:
    host = torch.get_rng_state()
    return torch.cat([host, torch.cuda.get_rng_state()]) if torch.cuda.is_initialized() else host


def rms(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double())) / math.sqrt(tensor.numel() or 1)


def measured(name: str, plan: Tensor, one: Tensor) -> dict[str, Any]:
    """The RMS of the difference, that of `one`, and both values where they differ most."""
    a, b = (torch.atleast_1d(tensor.detach().double().cpu()) for tensor in (plan, one))
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(math.inf)
    at = [int(i) for i in torch.unravel_index(gap.argmax(), gap.shape)] if gap.numel() else []
    values = [float(side[tuple(at)]) if at else 0.0 for side in (a, b)]
    return {"name": name, "error": rms(gap), "scale": rms(b), "at": at, "plan": values[0], "one": values[1]}


def common_ratio(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[float | None, float]:
    """The factor between all gradients, where there is one, and the RMS of all."""
    sides = list(zip(*pairs.values())) or [(torch.zeros(0),)] * 2
    a, b = (torch.cat([g.detach().double().cpu().flatten() for g in side]) for side in sides)
    ratio = float(a @ b) / (float(b @ b) or 1.0)
    return ratio if rms(a - ratio * b) <= 0.05 * abs(ratio) * rms(b) else None, rms(b)


def main(folder: Path, kind: str, name: str, *arguments: str) -> None:
    """Run the script of this name, or the module if `kind` is "module", as one rank."""
    task = json.loads((folder / TASK).read_text(encoding="utf-8"))
    rank = (Repeater if (folder / FIRST).exists() else Writer)(folder, **task)
    try:
        rank.run(lambda: (run_module if kind == "module" else run_script)(name, list(arguments)))
    finally:
        if isinstance(rank, Repeater):
            (folder / ROWS).write_text(json.dumps(rank.report), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
