"""A proof against a script that another library trains, or torch alone: the script before its move to easymp.

``python -m easymp.cli.prove.against FOLDER`` runs one rank of the reference, which torch's own hooks watch, since it
may know nothing of easymp; and, where that has left its updates, of the moved script, which compares.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from ...base.rng import seed_all
from ...checkpoint.export import save_tree
from ...compat.alias import install
from ...launcher.worker import run_module, run_script
from ...optim import PreparedOptimizer
from ...optim.torch_step import IMPLEMENTATION
from ..harness import REFUSED
from ..harness.rank import Stop, read_task, row_checksums
from . import FIRST
from .rank import DTYPE_NAMES, EXPLAINED, Repeater, Writer, mean_and_magnitude, write_rows

# Wrappers of a model, by the attribute with what they wrap.
WRAPPERS = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod", "_FabricModule": "_forward_module"}
SEVERAL = "the reference trains several models, and one is compared"


class Reference:
    """Runs the reference, and saves its first updates, on rank 0, as `rank.Writer` does."""

    def __init__(self, folder: Path, task: dict[str, Any]) -> None:
        self.folder, self.task = folder, task
        self.root: nn.Module | None = None
        self.depth = self.number = 0  # of calls of modules; of the update
        self.scale = 1.0  # of the next loss
        self.precision = "fp32"
        self._reset()

    def _reset(self) -> None:
        self.losses: list[float] = []
        self.outputs: dict[str, list[tuple[float, float]]] = {}
        self.samples: set[int] = set()

    def run_script(self) -> None:
        seed_all(0)
        run = run_module if self.task["module"] else run_script
        undo: list[Callable[[], None]] = [
            torch_optimizer.register_optimizer_step_pre_hook(self._before_step).remove,
            torch_optimizer.register_optimizer_step_post_hook(self._after_step).remove,
        ]
        call, backward, scale = nn.Module.__call__, torch.autograd.backward, torch.amp.GradScaler.scale

        def enter(module: nn.Module, *args: Any, **keywords: Any) -> Any:
            self._enter(module, args, keywords)
            self.depth += 1
            try:
                return call(module, *args, **keywords)
            finally:
                self.depth -= 1

        def record_loss(tensors: Any, *args: Any, **keywords: Any) -> None:
            if isinstance(tensors, Tensor) and tensors.numel() == 1:
                self.losses.append(float(tensors.detach()) / self.scale)
            backward(tensors, *args, **keywords)

        def record_scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            self.scale = scaler.get_scale()
            return scale(scaler, outputs)

        with (
            patch.object(nn.Module, "__call__", enter),
            patch.object(torch.autograd, "backward", record_loss),
            patch.object(torch.amp.GradScaler, "scale", record_scale),
            suppress(Stop),
        ):
            run(self.task["script"], list(self.task["arguments"]))
        for remove in undo:
            remove()

    # -- the model's calls

    def _enter(self, module: nn.Module, args: Any, keywords: Any) -> None:
        """Take the outermost module of a training forward for the model, and record its samples."""
        if self.depth or not (module.training and torch.is_grad_enabled()):
            return
        while (name := WRAPPERS.get(type(module).__name__)) and isinstance(inner := getattr(module, name), nn.Module):
            module = inner
        if not any(p.requires_grad for p in module.parameters()):
            return  # a loss function
        if self.root is None:
            self.root = module
            self._save("start-1", {"weights": self._tensors()})
            for name, layer in module.named_modules():
                layer.register_forward_hook(self._recorder(name, next(module.parameters()).device))
        elif self.root is not module:
            (self.folder / REFUSED).write_text(SEVERAL, encoding="utf-8")
            raise Stop
        self.samples.update(row_checksums(tensors_of(args, keywords)))

    def _recorder(self, name: str, device: torch.device) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            means, kind = mean_and_magnitude(module, output), device.type
            if torch.is_autocast_enabled(kind):
                self.precision = DTYPE_NAMES[torch.get_autocast_dtype(kind)]
            if means is not None:
                self.outputs.setdefault(name, []).append(means)

        return record

    # -- the optimizer's steps

    def _named(self) -> dict[str, nn.Parameter]:
        return {} if self.root is None else dict(self.root.named_parameters())

    def _tensors(self) -> dict[str, Tensor]:
        buffers = {} if self.root is None else dict(self.root.named_buffers())
        tensors = {**self._named(), **{name: b for name, b in buffers.items() if b.is_floating_point()}}
        return {name: whole(t) for name, t in tensors.items()}

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        grads = {name: p.grad for name, p in self._named().items() if id(p) in stepped and p.grad is not None}
        if not grads:
            return
        scale = getattr(optimizer, "grad_scale", None)  # a fused step divides by it
        if scale is not None:
            grads = {name: grad / scale for name, grad in grads.items()}
        size = dist.get_world_size() if dist.is_initialized() else 1
        facts: list[Any] = [(self.losses, self.samples, self.outputs)]
        if size > 1:
            facts = [None] * size
            dist.all_gather_object(facts, (self.losses, self.samples, self.outputs))
        losses = [loss for rank_losses, _, _ in facts for loss in rank_losses]
        outputs = {}
        for name in self.outputs:
            means = [pair for _, _, by_name in facts for pair in by_name.get(name, ())]
            outputs[name] = [sum(column) / len(means) for column in zip(*means)]
        numbers = [pair for g in optimizer.param_groups for pair in g.items() if type(pair[1]) in (int, float)]
        info = {
            "optimizer": 0,
            "class": type(optimizer).__name__,
            "update": self.number + 1,
            "samples": sorted(set().union(*(samples for _, samples, _ in facts))),
            "loss": sum(losses) / size,
            "scale": sum(map(abs, losses)) / size,
            "outputs": outputs,
            "options": [pair for pair in numbers if pair[0] not in IMPLEMENTATION],
            "at": None,
            "short": False,
            "skipped": False,
            "apart": None,
            "explained": EXPLAINED[self.precision],
            "plan": {
                "strategy": self.task["against"],
                "precision": self.precision,
                "processes": size,
                "shares": size,
                "accumulation": 1,
                "batches": [],
            },
        }
        self._update = {"info": info, "gradients": {name: whole(grad) for name, grad in grads.items()}}

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._update is None:
            return
        self._save(f"update-{self.number}", {**self._update, "weights": self._tensors()})
        self._update = None
        self.number += 1
        self._reset()
        if self.number >= self.task["steps"]:
            raise Stop

    _update: dict[str, Any] | None = None

    def _save(self, name: str, tree: dict[str, Any]) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            save_tree(tree, self.folder / f"{name}.safetensors")


def tensors_of(args: Sequence[Any], keywords: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among a call's arguments."""
    return [value for value in (*args, *keywords.values()) if isinstance(value, Tensor)]


def whole(tensor: Tensor) -> Tensor:
    """A copy of a tensor, gathered where it is a DTensor."""
    return getattr(tensor.detach(), "full_tensor", tensor.detach)().clone()


class Comparer(Repeater):
    """Repeats the updates of the reference on as many ranks, under easymp, and compares."""

    def prepared(self, objects: Sequence[Any]) -> None:
        Writer.prepared(self, objects)  # loaders keep their batches

    def start(self, name: str) -> None:
        super().start(name)
        self.root.register_forward_pre_hook(self._record_samples, with_kwargs=True)

    def batch_ready(self, loader: Any, batch: Any) -> None:
        pass  # a reference's loaders are not known: its samples are the inputs of its model

    def _record_samples(self, module: nn.Module, args: Any, keywords: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self.samples.update(row_checksums(tensors_of(args, keywords)))

    def facts(self, optimizer: PreparedOptimizer) -> dict[str, Any]:
        by_rank = self.run.world.gather_objects([float(loss.sum()) for loss, _ in self.losses])
        losses = [loss for losses in by_rank for loss in losses]
        share = self.run.window.accumulation * len(by_rank)  # a reference's losses are divided, and added up
        sums = {"loss": sum(losses) / share, "scale": sum(map(abs, losses)) / share}
        return {**super().facts(optimizer), **sums, "at": None}


def main(folder: Path) -> None:
    task = read_task(folder)
    if not (folder / FIRST).exists():
        Reference(folder, {**task, "script": task["reference"]}).run_script()
        return
    if task["against"] == "accelerate":
        install("accelerate")
    seed_all(0)
    comparer = Comparer(folder, task)
    try:
        comparer.run_script()
    finally:
        if comparer.acc is None or comparer.acc.is_main_process:
            write_rows(folder, comparer.report)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
