"""Bytes that a sharded model gathers, and bytes of whole weights that stay: easymp's fsdp beside torch's fully_shard.

Two gloo processes on this machine, one model, each precision. Gathered: outputs of all collectives that gather, in one
forward and in one backward. Alive: storages of whole weights, or of copies of them, that autograd keeps when forward
has ended.

    python benchmarks/sharded_memory.py
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from easymp import Accelerator

if __package__:
    from .blocks import Block
    from .report import hand_in, here, options, table
else:
    from blocks import Block  # type: ignore[no-redef]
    from report import hand_in, here, options, table  # type: ignore[no-redef]

WORDS, WIDTH, LAYERS, LENGTH = 4000, 256, 6, 16
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 64) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def measure(call: nn.Module, model: nn.Module) -> tuple[int, int, int]:
    """Bytes gathered in forward, alive when it has ended, gathered in backward."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    real, shapes = getattr(dist, name), {p.shape for p in model.parameters() if p.ndim > 1}
    gathered, kept = 0, dict[int, Any]()

    def counted(output_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal gathered
        gathered += output_tensor.nbytes
        return real(output_tensor, *args, **kwargs)

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape in shapes or tensor.T.shape in shapes:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    setattr(dist, name, counted)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = call(torch.arange(2 * LENGTH).view(2, LENGTH))
        forward, alive = gathered, sum(storage.nbytes() for storage in kept.values())
        out.float().square().mean().backward()
    finally:
        setattr(dist, name, real)
    return forward, alive, gathered - forward


def rank() -> None:
    """What one of the processes measures."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    found = {}
    for precision, dtype in DTYPES.items():
        with Accelerator(strategy="fsdp", mixed_precision=precision, cpu=True) as acc:
            plain, ours = Model(), Model()
            for part in (plain.embed, *plain.blocks, plain.head, plain):
                policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
                fully_shard(part, mp_policy=policy, reshard_after_forward=True)
            ours = acc.prepare(ours)
            found[precision] = {"fully_shard": measure(plain, plain), "easymp fsdp": measure(ours, ours)}
            main = acc.is_main_process
    if main:
        print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options(parser, "sharded-memory")
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-W", "ignore", __file__]
    started = [
        subprocess.Popen(
            words,
            env={**os.environ, **common, "RANK": str(i), "LOCAL_RANK": str(i), "OF_A_BENCHMARK": "1"},
            stdout=subprocess.PIPE,
        )
        for i in range(2)
    ]
    told = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit("a process failed")
    rows = []
    for precision, by_name in json.loads(told[0].splitlines()[-1]).items():
        plain = by_name["fully_shard"]
        for name, sizes in by_name.items():
            off = max(abs(a - b) for a, b in zip(sizes, plain)) / plain[0]
            rows.append(
                [
                    f"{precision}, {name}",
                    *(f"{size:,}" for size in sizes),
                    "" if sizes == plain else f"{off:.2%}",
                ]
            )
    count = sum(p.numel() for p in Model().parameters())
    head = ["", "gathered in forward", "alive after forward", "gathered in backward", "largest difference"]
    text = f"# What a sharded model gathers and keeps\n\n{here()}\n\n"
    text += f"{count:,} parameters, 2 processes, gloo; bytes a rank.\n\n"
    hand_in(text + table(head, rows), arguments.out)


if __name__ == "__main__":
    rank() if "OF_A_BENCHMARK" in os.environ else main()
