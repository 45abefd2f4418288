"""Bytes that each word for less memory saves on a CPU, beside the prediction of easymp.memory.

Activations: the most that is alive in one training step beside parameters, their gradients and optimizer states.
    Gradients: the most
behind ``.grad`` at once.
Offload runs on a CPU as its plumbing alone: the bytes that it moves.

    python benchmarks/memory_words.py
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import easymp
from easymp import Accelerator, Settings
from easymp.strategies.transforms import Offload
from easymp.training.activations import follow_step

if __package__:
    from .blocks import Block
    from .report import hand_in, here, options, table
else:
    from blocks import Block  # type: ignore[no-redef]
    from report import hand_in, here, options, table  # type: ignore[no-redef]

WIDTH, LAYERS, BATCH, LENGTH = 128, 12, 8, 128
SIZE = "60MiB"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, 32) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Live(TorchDispatchMode):
    """Counts bytes of the storages that operators make, until they are freed."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.model, self.now, self.most = model, 0, 0
        self._seen = weakref.WeakSet[Any](t.untyped_storage() for t in (*model.parameters(), x))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            storage = leaf.untyped_storage() if isinstance(leaf, Tensor) else None
            if storage is not None and storage not in self._seen and storage.nbytes():
                self._seen.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.most = max(self.most, self.now - gradients(self.model))
        return out

    def _freed(self, number: int) -> None:
        self.now -= number


def gradients(model: nn.Module) -> int:
    """Bytes of the storages behind ``.grad`` of this rank."""
    held = [p.grad for p in model.parameters() if p.grad is not None]
    storages = [getattr(grad, "_local_tensor", grad).untyped_storage() for grad in held]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def prepared(acc: Accelerator) -> tuple[Any, Any, Tensor]:
    torch.manual_seed(0)
    model = Model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
    return *acc.prepare(model, optimizer), torch.randn(BATCH, LENGTH, WIDTH)


def activations(precision: Any, **words: Any) -> tuple[int, int]:
    """Bytes at the most in the second step, and as predicted."""
    with Accelerator(cpu=True, settings=Settings(mixed_precision=precision, **words)) as acc:
        model, optimizer, x = prepared(acc)
        acc.backward(model(x).sum())  # where a size is given, this counts blocks
        optimizer.step()
        optimizer.zero_grad()
        with Live(model, x) as live:
            acc.backward(model(x).sum())
    how: Any = {"strategy": "single", "precision": precision, "sample": x, **words}
    need = easymp.memory.estimate(Model(), **how)
    # Autocast's copies of weights are alive, too, and x was made before.
    return live.most, (need.activations or 0) + need.copies - x.nbytes


def most_gradients(strategy: str, options: Any = None, **words: Any) -> tuple[int, int]:
    """Bytes at the most, and as predicted."""
    most = 0
    with Accelerator(
        cpu=True, mixed_precision="no", strategy=strategy, strategy_options=options, settings=Settings(**words)
    ) as acc:
        model, optimizer, x = prepared(acc)
        step_now = optimizer.step_now

        def count(*parameters: Any) -> None:
            nonlocal most
            most = max(most, gradients(model))
            if parameters:
                step_now(*parameters)

        optimizer.step_now = count
        acc.backward(model(x).mean())
        count()
        optimizer.step()
        world = acc.num_processes
    need = easymp.memory.estimate(Model(), strategy=strategy, world=world, options=options, **words)
    return most, need.gradients


def offloaded() -> tuple[int, int]:
    """Bytes of tensors of 64 KiB and more that go to the host, and as predicted."""
    sizes: dict[int, int] = {}

    class Counted(Offload):
        def _pack(self, tensor: Tensor) -> Any:
            packed = super()._pack(tensor)
            if packed is not tensor:
                sizes[id(packed)] = packed.host.nbytes
            return packed

    model, x = Model(), torch.randn(BATCH, LENGTH, WIDTH)
    with Counted(torch.device("cpu")) as hooks:
        out = model(x)
    del hooks
    out.mean().backward()
    return sum(sizes.values()), follow_step(model, (x,), {}, None, None).kept


def rank() -> None:
    """What one of two processes measures."""
    found = {}
    for strategy, options in (("ddp", {"bucket_cap_mb": 1}), ("fsdp", None)):
        for word, words in IN_BACKWARD.items():
            found[f"{strategy}, {word}"] = most_gradients(strategy, options, **words)
    if os.environ["RANK"] == "0":
        print(json.dumps(found))


IN_BACKWARD: dict[str, dict[str, Any]] = {
    "plain": {},
    "optimizer_in_backward=True": {"optimizer_in_backward": True},
}


def on_two_processes() -> dict[str, tuple[int, int]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            env={
                **os.environ,
                **common,
                "RANK": str(i),
                "LOCAL_RANK": str(i),
                "OF_A_BENCHMARK": "1",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
        )
        for i in range(2)
    ]
    told = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit("a process failed")
    found: dict[str, tuple[int, int]] = json.loads(told[0].splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options(parser, "memory-words")
    arguments = parser.parse_args()
    found = {}
    for precision in ("fp32", "bf16"):
        found[f"{precision}, plain"] = activations(precision)
        for what in ("blocks", "attention", SIZE):
            found[f'{precision}, activation_checkpointing="{what}"'] = activations(
                precision, activation_checkpointing=what
            )
    found["fp32, activation_offload=True, moved"] = offloaded()
    of_gradients = {f"single, {w}": most_gradients("single", **words) for w, words in IN_BACKWARD.items()}
    of_gradients |= on_two_processes()
    rows = lambda found: [  # noqa: E731
        [name, f"{most:,}", f"{predicted:,}", f"{most / predicted - 1:+.1%}"]
        for name, (most, predicted) in found.items()
    ]
    count = f"{sum(p.numel() for p in Model().parameters()):,} parameters"
    text = f"# What words for less memory save\n\n{here()}\n\n"
    text += f"{count} in {LAYERS} blocks, {BATCH} × {LENGTH} × {WIDTH} inputs.\n\n"
    text += table(["bytes of activations", "measured", "predicted", "difference"], rows(found))
    text += "\n\n" + table(["bytes of gradients", "measured", "predicted", "difference"], rows(of_gradients))
    hand_in(text, arguments.out)


if __name__ == "__main__":
    rank() if "OF_A_BENCHMARK" in os.environ else main()
