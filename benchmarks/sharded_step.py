"""Time of an optimizer's step on a sharded model: easymp's fsdp beside torch's fully_shard with AdamW.

Two gloo processes on this machine. The model has many small layers, so the figures are what the step costs on the
host before its arithmetic. Seconds of the process, which do not count the waits for the other one.

    python benchmarks/sharded_step.py            # one table; --out FILE writes it
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from easymp import Accelerator

if __package__:
    from .report import hand_in, here, options, table
else:
    from report import hand_in, here, options, table  # type: ignore[no-redef]

LAYERS, STEPS = (50, 200), 20
CONTENDERS = ("easymp fsdp", "fully_shard, fused", "fully_shard, foreach")


def prepare(contender: str, layers: int) -> tuple[nn.Module, Any, Callable[[Tensor], None]]:
    """The model, the optimizer, and the call that runs backward."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(layers)))
    if contender == "easymp fsdp":
        acc = Accelerator(strategy="fsdp", mixed_precision="fp32", cpu=True)
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        return model, optimizer, acc.backward
    from torch.distributed.fsdp import fully_shard

    for layer in (*model.children(), model):
        fully_shard(layer)
    implementation = {contender.split()[-1]: True}
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, **implementation), Tensor.backward


def rank(contender: str, layers: int) -> None:
    """Measure in one of the two processes; rank 0 prints the seconds of each step."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model, optimizer, backward = prepare(contender, layers)
    seconds = []
    for _ in range(STEPS):
        backward(model(torch.ones(2, 8)).square().mean())
        before = time.process_time()
        optimizer.step()
        seconds.append(time.process_time() - before)
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(json.dumps(seconds))
    dist.destroy_process_group()


def measure(contender: str, layers: int) -> list[float]:
    """Seconds of each step, in a run of its own."""
    command = [sys.executable, "-m", "easymp", "launch", "--processes", "2", __file__]
    environment = {**os.environ, "OF_A_BENCHMARK": json.dumps([contender, layers]), "PYTHONWARNINGS": "ignore"}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    seconds: list[float] = json.loads(output.splitlines()[-1])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS, help="sizes of the model")
    options(parser, "sharded-step")
    arguments = parser.parse_args()
    rows = []
    for layers in arguments.layers:
        for contender in CONTENDERS:
            first, *later = measure(contender, layers)
            label = f"{2 * layers} tensors, {contender}"
            rows.append([label, f"{first:.3f} s", f"{1000 * statistics.median(later):.1f} ms"])
    text = f"# The step of a sharded model\n\n{here()}\n\nMedian of {STEPS - 1} later steps, 2 processes, gloo.\n\n"
    hand_in(text + table(["", "first step", "a later step"], rows), arguments.out)


if __name__ == "__main__":
    if "OF_A_BENCHMARK" in os.environ:
        rank(*json.loads(os.environ["OF_A_BENCHMARK"]))
    else:
        main()
