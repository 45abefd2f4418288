"""A proof against a script that another library trains, or torch alone: the script before its move to easymp.

``python -m easymp.cli.prove.against FOLDER`` runs one rank of the reference, which torch's own hooks watch, since it
may know nothing of easymp; and, where that has left its updates, of the moved script, which compares.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
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
from ..harness.rank import Stop, read_task, row_checksums
from . import FIRST, LIBRARIES
from .rank import DTYPE_NAMES, EXPLAINED, Repeater, Writer, options_of

# Wrappers of a model, and the attribute that has the model.
WRAPPERS = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod", "_FabricModule": "_forward_module"}
SEVERAL = "the reference trains several models, and one is compared"


class Reference(Writer):
    """Runs the reference, and saves its first updates, on rank 0."""

    def __init__(self, folder: Path, task: dict[str, Any]) -> None:
        super().__init__(folder, task)
        self.depth = 0  # of calls of modules
        self.scale = 1.0  # of the next loss
        self.precision = "fp32"
        self.update: dict[str, Any] = {}  # without the weights after it

    def run_script(self) -> None:
        """Run the script, with hooks that stay: the process ends with it."""
        run = run_module if self.task["module"] else run_script
        torch_optimizer.register_optimizer_step_pre_hook(self._before_step)
        torch_optimizer.register_optimizer_step_post_hook(self._after_step)
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
                self.losses.append((tensors.detach() / self.scale, None))
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

    # -- the model's calls

    def _enter(self, module: nn.Module, args: Any, keywords: Any) -> None:
        """Take the outermost module of a training forward for the model, and record its samples."""
        if self.depth or not (module.training and torch.is_grad_enabled()):
            return
        module = unwrapped(module)
        if not any(p.requires_grad for p in module.parameters()):
            return  # a loss function
        if next(self.root.parameters(), None) is None:
            self.root = module
            self._save("start-1", {"weights": self._whole_tensors()})
            for name, layer in module.named_modules():
                layer.register_forward_hook(partial(self._record_output, name))
        elif self.root is not module:
            self.refuse(SEVERAL)
        self.samples.update(row_checksums(tensors_of(args, keywords)))

    def _record_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        kind = next(self.root.parameters()).device.type
        if torch.is_autocast_enabled(kind):
            self.precision = DTYPE_NAMES[torch.get_autocast_dtype(kind)]
        super()._record_output(name, module, args, output)

    # -- the optimizer's steps

    def _whole_tensors(self) -> dict[str, Tensor]:
        return {name: whole(tensor) for name, tensor in self.tensors().items()}

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        grads = {name: p.grad for name, p in self.root.named_parameters() if id(p) in stepped and p.grad is not None}
        if not grads:
            return
        scale = getattr(optimizer, "grad_scale", None)  # a fused step divides by it
        if scale is not None:
            grads = {name: grad / scale for name, grad in grads.items()}
        facts: list[Any] = [([float(loss) for loss, _ in self.losses], self.samples, self.outputs)]
        if dist.is_initialized():
            facts *= dist.get_world_size()
            dist.all_gather_object(facts, facts[0])
        size = len(facts)
        losses = [loss for rank_losses, _, _ in facts for loss in rank_losses]
        outputs = {}
        for name in self.outputs:
            means = [pair for _, _, by_name in facts for pair in by_name.get(name, ())]
            outputs[name] = [sum(column) / len(means) for column in zip(*means)]
        info = {
            "optimizer": 0,
            "class": type(optimizer).__name__,
            "update": self.number + 1,
            "samples": sorted(set().union(*(samples for _, samples, _ in facts))),
            "loss": sum(losses) / size,
            "scale": sum(map(abs, losses)) / size,
            "outputs": outputs,
            "options": options_of(optimizer),
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
        self.update = {"info": info, "gradients": {name: whole(grad) for name, grad in grads.items()}}

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.update:
            return
        self._save(f"update-{self.number}", {**self.update, "weights": self._whole_tensors()})
        self.update = {}
        self.number += 1
        self._reset()
        if self.number >= self.task["steps"]:
            raise Stop

    def _save(self, name: str, tree: dict[str, Any]) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            save_tree(tree, self.folder / f"{name}.safetensors")


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside of wrappers, and of subclasses of them."""
    for kind in type(module).__mro__:
        inner = getattr(module, WRAPPERS.get(kind.__name__, ""), None)
        if isinstance(inner, nn.Module):
            return unwrapped(inner)
    return module


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
    seed_all(0)
    if not (folder / FIRST).exists():
        Reference(folder, {**task, "script": task["reference"]}).run_script()
        return
    for package in LIBRARIES.get(task["against"], ()):
        install(package)
    Comparer(folder, task).run_script()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
