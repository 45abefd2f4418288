"""One rank of a proof: runs the script, and saves its first updates, or repeats them on one process and compares.

An update is saved as the whole gradients that the step uses (reduced, unscaled, clipped), and the whole weights after
it. The process that repeats updates compares its gradients with the saved ones, steps with the saved gradients,
compares the weights, and goes on from the saved weights. So errors do not add up over updates. Adam makes a full update
of a gradient that is only rounding noise (that of an attention key's bias), so both steps use the same noise.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...base.dtensor import local
from ...base.pytree import leaves
from ...checkpoint.export import gather_on_host, load
from ...optim import PreparedOptimizer
from ...optim.torch_step import IMPLEMENTATION
from ...precision.policies import LOW
from ..harness.rank import SingleRunner, Stop, read_task, row_checksums
from . import FIRST, ROWS, SKIPPED

# Relative differences that a precision explains: 1024 unit roundoffs of fp32, 32 of shorter dtypes, half the value for
# fp8.
FP32 = 2**-14
EXPLAINED = {"fp32": FP32, "tf32": 2**-6, "fp16": 2**-6, "bf16": 2**-3, "fp8": 0.5}
DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
NOISE = 1 / 8  # of the RMS of all gradients: added to that of a parameter, which may be zero but for rounding
ROUNDINGS = 4  # of a weight to the dtype that it is stored in
MUON = 0.5  # of an update: Muon orthogonalises in bf16, which amplifies rounding


class Writer(SingleRunner):
    """Saves the updates of the plan, on rank 0. The task's ``steps`` are updates of each optimizer."""

    def __init__(self, folder: Path, task: dict[str, Any]) -> None:
        super().__init__(folder, task)
        self.root: nn.Module = nn.ModuleList()  # the model, or all models
        self.number = 0  # of the update
        self._reset()

    def _reset(self) -> None:
        self.losses: list[tuple[Tensor, Any]] = []  # of the running update
        self.outputs: dict[str, list[tuple[float, float]]] = {}
        self.samples: set[int] = set()

    def run_script(self) -> None:
        with suppress(Stop):
            self.play()
        if self.acc is not None:
            self.acc.close()

    # -- events of the run

    def prepared(self, objects: Sequence[Any]) -> None:
        prepared, plan = self.run.prepared, self.run.plan
        models = [route.original for route in prepared.models]
        self.root = models[0] if len(models) == 1 else nn.ModuleList(models)
        if prepared.strategy.local_updates or plan.settings.optimizer_in_backward:
            self.refuse("local_sgd and optimizer_in_backward=True have no gradients to compare at a step")
        if prepared.routes_of(objects):
            self.start(f"start-{len(models)}.safetensors")
            for name, module in self.root.named_modules() if not plan.compiles else ():
                module.register_forward_hook(partial(self._record_output, name))  # torch.compile breaks graphs there

    def loss(self, loss: Tensor, num_items: Any = None) -> None:
        self.losses.append((loss.detach(), num_items))

    def batch_ready(self, loader: Any, batch: Any) -> None:
        self.samples.update(row_checksums(batch))

    @torch.no_grad()
    def step(self, optimizer: PreparedOptimizer) -> None:
        if optimizer.closure is not None:
            self.refuse("step(closure) evaluates the model several times in an update")
        if optimizer.updates >= self.task["steps"]:
            raise Stop
        self.run.world.settle()
        self.acc.unscale_gradients(optimizer)
        self.before_step(optimizer)

    @torch.no_grad()
    def stepped(self, optimizer: PreparedOptimizer) -> None:
        self.after_step(optimizer)
        self.number += 1
        self._reset()
        if all(optimizer.updates >= self.task["steps"] for optimizer in self.run.prepared.optimizers):
            raise Stop

    def _record_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Record the mean of a layer's output, and of its magnitude: they show which layer differs first."""
        means = mean_and_magnitude(module, output)
        if means is not None:
            self.outputs.setdefault(name, []).append(means)

    # -- facts of all ranks

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and floating-point buffers."""
        buffers = {name: b for name, b in self.root.named_buffers() if b.is_floating_point()}
        return {**dict(self.root.named_parameters()), **buffers}

    def gradients_of(self, optimizer: PreparedOptimizer) -> dict[str, Tensor]:
        """Gradients of the parameters that rank 0's optimizer steps, with zeros where other ranks have one.

        `self.stepped_tensors` gets the tensors.
        """
        stepped = {id(parameter): tensor for tensor, parameter in optimizer.parameters()}
        parameters = dict(self.root.named_parameters())
        tensors = {name: stepped.get(id(parameter), parameter) for name, parameter in parameters.items()}
        names = [name for name, parameter in parameters.items() if id(parameter) in stepped]
        names_with_gradient = [name for name, tensor in tensors.items() if tensor.grad is not None]
        by_rank = self.run.world.gather_objects((names, names_with_gradient))
        self.stepped_tensors = {name: tensors[name] for name in by_rank[0][0]}
        with_gradient = {name for rank in by_rank for name in rank[1]}
        grads = {}
        for name, tensor in self.stepped_tensors.items():
            if name in with_gradient:
                grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                grads[name] = grad.detach() if grad.layout == torch.strided else grad.to_dense()
        return grads

    def facts(self, optimizer: PreparedOptimizer) -> dict[str, Any]:
        """Facts of the update that are compared beside tensors."""
        window, data_rank = self.run.window, self.run.prepared.strategy.data_rank
        losses: list[tuple[float, float | None]]
        losses = [(float(loss.sum()), None if n is None else float(n)) for loss, n in self.losses]
        sums = {name: [len(v), *map(sum, zip(*v))] for name, v in self.outputs.items()}
        ranks = self.run.world.gather_objects((data_rank, losses, self.samples, sums))
        losses = [pair for pairs in {rank[0]: rank[1] for rank in ranks}.values() for pair in pairs]
        total = sum(1.0 if items is None else items for _, items in losses)
        outputs = {}
        for name in dict.fromkeys(name for rank in ranks for name in rank[3]):
            count, *means = map(sum, zip(*(rank[3][name] for rank in ranks if name in rank[3])))
            outputs[name] = [mean / count for mean in means]
        loader = window.reading
        return {
            "optimizer": self.run.prepared.optimizers.index(optimizer),
            "class": type(optimizer.given).__name__,
            "update": optimizer.updates + 1,
            "samples": sorted(set().union(*(rank[2] for rank in ranks))),
            "loss": sum(loss for loss, _ in losses) / total if total else None,
            "scale": sum(abs(loss) for loss, _ in losses) / total if total else 0.0,
            "outputs": outputs,
            "options": options_of(optimizer),
            "at": None if loader is None else [loader.epoch, loader.position],
            "short": (window.in_accumulate and window.micro < window.accumulation) or bool(loader and loader._surplus),
        }

    # -- the files

    def start(self, name: str) -> None:
        self.acc.save({"weights": gather_on_host(self.run.world, self.tensors())}, self.folder / name)

    def before_step(self, optimizer: PreparedOptimizer) -> None:
        grads = self.gradients_of(optimizer)
        self._grads = {name: grad.clone() for name, grad in gather_on_host(self.run.world, grads).items()}
        self._info = {**self.facts(optimizer), "apart": self._rank_difference("gradient", grads)}

    def after_step(self, optimizer: PreparedOptimizer) -> None:
        policy, strategy, info = self.run.precision, self.run.prepared.strategy, self._info
        tensors = self.tensors()
        for name in [n for n, t in tensors.items() if isinstance(t, nn.Parameter) and n not in self.stepped_tensors]:
            del tensors[name]
        comm_hook = getattr(strategy.options, "comm_hook", "no")
        precisions = (policy.name, DTYPE_NAMES.get(policy.compute, "fp32"), comm_hook)
        stepped = {name: tensors[name] for name in self.stepped_tensors}
        info["apart"] = info["apart"] or self._rank_difference("weight", stepped)
        info["explained"] = max(EXPLAINED.get(kind, 0.0) for kind in precisions)
        info["skipped"] = optimizer.step_was_skipped
        if info["skipped"]:
            (self.folder / SKIPPED).touch()
        accumulation = self.run.window.accumulation
        batch_sizes = [loader.total_batch_size for loader in self.run.prepared.loaders]
        info["plan"] = {
            "strategy": strategy.name,
            "precision": policy.name,
            "processes": self.run.world.size,
            "shares": strategy.data_size,
            "accumulation": accumulation,
            "batches": [size and size * accumulation for size in batch_sizes],
        }
        update = {"info": info, "gradients": self._grads, "weights": gather_on_host(self.run.world, tensors)}
        self.acc.save(update, self.folder / f"update-{self.number}.safetensors")

    def _rank_difference(self, kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """The first tensor that differs on a rank from rank 0's, although all hold it whole."""
        world, differences = self.run.world, []
        if world.size == 1 or not self.run.prepared.strategy.replicated:
            return None
        replicas = {name: tensor for name, tensor in tensors.items() if not hasattr(tensor, "to_local")}
        for i, (name, tensor) in enumerate(replicas.items()):
            difference = compare(name, tensor, world.broadcast(tensor))
            if difference["error"] > FP32 * difference["scale"]:  # tensor_parallel computes some on each rank
                differences.append((i, {**difference, "kind": kind, "rank": world.rank}))
        pairs = [pair for pairs in world.gather_objects(differences[:1]) for pair in pairs] if replicas else []
        return min(pairs, key=lambda pair: pair[0], default=(0, None))[1]


class Repeater(Writer):
    """Repeats the updates on one process in fp32, and compares. `report` has a row for each."""

    def __init__(self, folder: Path, task: dict[str, Any]) -> None:
        super().__init__(folder, task)
        self.report: list[dict[str, Any]] = []
        self._plan = load(folder / FIRST)["info"]["plan"]
        self._states: list[Tensor] = []  # of the random stream, before the calls that run
        self._draws = ""  # the innermost module whose call draws random numbers

    def run_script(self) -> None:
        try:
            super().run_script()
        finally:
            if self.acc is None or self.acc.is_main_process:
                (self.folder / ROWS).write_text(json.dumps(self.report), encoding="utf-8")

    def preparing(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for tensor in (t for model in models for t in (*model.parameters(), *model.buffers())):
            if tensor.dtype in LOW:
                tensor.data = tensor.data.float()
        super().preparing(models, optimizers)

    def prepared(self, objects: Sequence[Any]) -> None:
        super().prepared(objects)
        for loader, batch in zip(self.run.prepared.loaders, self._plan["batches"]):
            if batch is not None:  # the batch of all processes and micro-batches
                loader.batch_size, loader._source.cut = batch, loader._source.cut._replace(batch=batch)
            elif self._plan["shares"] * self._plan["accumulation"] > 1:
                self.refuse("a loader's batches come ready, and cannot be joined to one of all processes")

    def start(self, name: str) -> None:
        self._load_weights(load(self.folder / name)["weights"])
        for module_name, module in self.root.named_modules():
            module.register_forward_pre_hook(lambda *_: self._states.append(random_state()))
            module.register_forward_hook(partial(self._check_random_state, module_name))

    def _check_random_state(self, name: str, *_: Any) -> None:
        if not torch.equal(self._states.pop(), random_state()):
            self._draws = self._draws or self._layer(name)

    def _layer(self, name: str) -> str:
        return f"{name or 'the model'} ({type(self.root.get_submodule(name)).__name__})"

    @torch.no_grad()
    def _load_weights(self, weights: Mapping[str, Tensor]) -> None:
        tensors = self.tensors()
        for name, value in weights.items():
            if name not in tensors or tensors[name].shape != value.shape:
                shape = tuple(tensors[name].shape) if name in tensors else "missing"
                self.refuse(f"{name} has the shape {tuple(value.shape)} in the first run, and is {shape} in the second")
            tensors[name].copy_(value)

    def before_step(self, optimizer: PreparedOptimizer) -> None:
        path = self.folder / f"update-{self.number}.safetensors"
        if not path.exists():
            raise Stop
        self._saved = load(path)
        info, plan_grads = self._saved["info"], self._saved["gradients"]
        facts, grads = self.facts(optimizer), self.gradients_of(optimizer)
        if info["optimizer"] != facts["optimizer"] or not plan_grads.keys() <= self.stepped_tensors.keys():
            self.refuse("the script steps its optimizers in another order on one process")
        if info["at"] != facts["at"]:
            raise Stop  # an epoch has ended, with another number of updates
        row = {name: info[name] for name in ("update", "class", "skipped", "short", "apart", "plan")}
        self.row: dict[str, Any] = row
        self.report.append(row)
        if row["apart"]:
            row["apart"]["layer"] = self._layer(row["apart"]["name"].rpartition(".")[0])
        elif not row["skipped"] and not row["short"]:
            names = dict.fromkeys([*grads, *plan_grads])
            zeros = {name: torch.zeros_like(self.stepped_tensors[name]) for name in names}
            self._compare(info, facts, {n: (plan_grads.get(n, zeros[n]), grads.get(n, zeros[n])) for n in names})
        if row["skipped"]:  # by nonfinite="skip" on this process, which has looked at finite gradients
            optimizer.turn.found_inf = torch.ones_like(optimizer.turn.found_inf)  # type: ignore[arg-type]
        for name, tensor in self.stepped_tensors.items():
            tensor.grad = plan_grads[name].to(tensor) if name in plan_grads else None
        self._before = {name: tensor.detach().clone() for name, tensor in self.stepped_tensors.items()}

    def _compare(self, info: dict[str, Any], facts: dict[str, Any], grads: dict[str, Any]) -> None:
        """Compare the losses and gradients of an update, and record possible causes of a difference."""
        explained, row = info["explained"], self.row
        if None not in (info["loss"], facts["loss"]):
            bound = explained * max(info["scale"], facts["scale"])
            times = multiple(abs(info["loss"] - facts["loss"]), bound)
            row["loss"] = {"plan": info["loss"], "one": facts["loss"], "times": times}
        row["ratio"], gradient_rms = common_ratio(grads)
        row["gradients"] = self._differences(grads, lambda d: explained * (d["scale"] + NOISE * gradient_rms))
        row["option"] = next(([*a, b[1]] for a, b in zip(info["options"], facts["options"]) if a != b), None)
        row["draws"], row["same samples"] = self._draws, info["samples"] == facts["samples"]
        row["layer"] = ""
        for name, (mean, magnitude) in facts["outputs"].items():
            plan_mean, plan_magnitude = info["outputs"].get(name, (mean, magnitude))
            gap = max(abs(plan_mean - mean), abs(plan_magnitude - magnitude))
            if not row["layer"] and gap > explained * magnitude:
                row["layer"] = self._layer(name)
        norms = (n for n, module in self.root.named_modules() if isinstance(module, _BatchNorm) and module.training)
        row["batchnorm"] = next(map(self._layer, norms), "")

    def after_step(self, optimizer: PreparedOptimizer) -> None:
        row, weights, tensors = self.row, self._saved["weights"], self.tensors()
        arithmetic = MUON if "muon" in row["class"].lower() else FP32

        def bound(difference: dict[str, Any]) -> float:
            name, scale = difference["name"], float(difference["scale"])
            rounding = ROUNDINGS * torch.finfo(weights[name].dtype).eps / 2 * scale
            if name not in self._before:  # a buffer, such as the running mean of a batch-norm
                return rounding + float(self._saved["info"]["explained"]) * scale
            return rounding + arithmetic * rms(tensors[name] - self._before[name])

        if "gradients" in row:
            row["weights"] = self._differences({n: (t, tensors[n]) for n, t in weights.items()}, bound)
        beyond = any(row[kind]["beyond"] for kind in ("gradients", "weights") if kind in row)
        loss_differs = not row.get("loss", {"times": 0})["times"] <= 1
        row["differs"] = bool(beyond or row["apart"] or row.get("option") or loss_differs)
        if row["differs"]:
            raise Stop
        self._load_weights(weights)

    def _differences(self, pairs: Mapping[str, tuple[Tensor, Tensor]], bound: Callable[[Any], float]) -> dict[str, Any]:
        """The largest difference as a multiple of its bound, and all above 1, in the model's order."""
        differences = [compare(name, *pair) for name, pair in pairs.items()]
        for difference in differences:
            difference["times"] = multiple(difference["error"], bound(difference))
            difference["layer"] = self._layer(difference["name"].rpartition(".")[0])
        largest = max(differences, key=lambda difference: difference["times"], default=None)
        return {"largest": largest, "beyond": [d for d in differences if not d["times"] <= 1]}


def mean_and_magnitude(module: nn.Module, output: Any) -> tuple[float, float] | None:
    """The mean of the first tensor of a layer's output, and of its magnitude; None outside of training."""
    first = next((t for t in leaves(output) if isinstance(t, Tensor) and t.is_floating_point()), None)
    if first is None or not (module.training and torch.is_grad_enabled()):
        return None
    tensor = local(first.detach())
    tensor = getattr(tensor, "trigger_wait", lambda: tensor)()
    if type(tensor) is not Tensor or tensor.is_meta or not tensor.numel():  # a survey runs on fake tensors
        return None
    return float(tensor.double().mean()), float(tensor.double().abs().mean())


def options_of(optimizer: Any) -> list[tuple[str, float]]:
    """The numbers of an optimizer's groups, without those that choose an implementation."""
    options = [pair for group in optimizer.param_groups for pair in group.items()]
    return [(name, value) for name, value in options if type(value) in (int, float) and name not in IMPLEMENTATION]


def multiple(error: float, bound: float) -> float:
    return error / bound if bound else math.inf if error else 0.0


def random_state() -> Tensor:
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state()]) if torch.cuda.is_initialized() else state


def rms(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double())) / math.sqrt(tensor.numel() or 1)


def compare(name: str, plan: Tensor, one: Tensor) -> dict[str, Any]:
    """The RMS of ``plan - one`` ("error") and of `one` ("scale"), and both values where they differ most."""
    a, b = (torch.atleast_1d(tensor.detach().double().cpu()) for tensor in (plan, one))
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(math.inf)
    index = [int(i) for i in torch.unravel_index(gap.argmax(), gap.shape)] if gap.numel() else []
    values = [float(tensor[tuple(index)]) if index else 0.0 for tensor in (a, b)]
    return {"name": name, "error": rms(gap), "scale": rms(b), "at": index, "plan": values[0], "one": values[1]}


def common_ratio(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[float | None, float]:
    """The factor between all gradients, or None, and the RMS of all."""
    columns = list(zip(*pairs.values())) or [(torch.zeros(0),)] * 2
    a, b = (torch.cat([g.detach().double().cpu().flatten() for g in tensors]) for tensors in columns)
    ratio = float(a @ b) / (float(b @ b) or 1.0)
    return ratio if rms(a - ratio * b) <= 0.05 * abs(ratio) * rms(b) else None, rms(b)


def main(folder: Path) -> None:
    rank = Repeater if (folder / FIRST).exists() else Writer
    rank(folder, read_task(folder)).run_script()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
