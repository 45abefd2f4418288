"""Rehearse a Llama-like model of 70 billion parameters on 64, 512 and 4,096 ranks: what `easymp rehearse` takes.

    python benchmarks/rehearse.py --keep          all layouts and numbers of ranks
    python benchmarks/rehearse.py --ranks 64 --layouts fsdp
    python benchmarks/rehearse.py --train --layers 4     this file as the script that is rehearsed

The model has Llama 3 70B's shapes: 80 layers, 8192 wide, 64 heads over 8 of keys and values, 28672 in the middle,
128256 words.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from textwrap import shorten

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from easymp import Accelerator

if __package__:
    from .report import hand_in, here, options, table
else:
    from report import hand_in, here, options, table  # type: ignore[no-redef]

WIDTH, HEADS, GROUPS, MIDDLE, WORDS = 8192, 64, 8, 28672, 128256
LENGTH = 4096  # tokens of a sample
PLAN = {
    "blocks.*.q": "colwise", "blocks.*.k": "colwise", "blocks.*.v": "colwise", "blocks.*.o": "rowwise",
    "blocks.*.gate": "colwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise", "out": "colwise_rep",
}  # fmt: skip
LAYOUTS = {
    "fsdp": {"strategy": "fsdp"},
    "hsdp": {"strategy": "hsdp"},
    "tensor_parallel + fsdp": {
        "strategy": "tensor_parallel", "strategy_options.size": "8", "strategy_options.plan": json.dumps(PLAN)
    },
    "pipeline": {"strategy": "pipeline", "strategy_options.schedule": "1f1b"},
}  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, GROUPS * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, MIDDLE, bias=False) for _ in range(2))
        self.down = nn.Linear(MIDDLE, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        return self.out(self.norm(self.blocks(self.words(text))))


class Text(Dataset[Tensor]):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((LENGTH + 1,), index % WORDS)


def loss_of(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), target.flatten())


def train(layers: int, batch: int) -> None:
    acc = Accelerator(activation_checkpointing=True)
    with torch.device("meta"):
        model = Model(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, loader = acc.prepare(model, optimizer, DataLoader(Text(), batch_size=batch))
    for text in loader:
        acc.forward_backward(model, loss_of, text[:, :-1], target=text[:, 1:])
        optimizer.step()
        optimizer.zero_grad()


def measure(layout: str, ranks: int) -> list[str]:
    """One rehearsal as a row: verdict, peak of the fullest rank, seconds, memory of this machine."""
    sets = [word for name, value in LAYOUTS[layout].items() for word in ("--set", f"{name}={value}")]
    command = [
        sys.executable,
        "-m",
        "easymp",
        "rehearse",
        __file__,
        "--processes",
        str(ranks),
        "--for",
        "8xH100",
    ]
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([*command, *sets, "--json", "--", "--train"], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begun
    if done.returncode == 2:
        sys.exit(f"{done.stdout}{done.stderr}")
    found = json.loads(done.stdout)
    peak = max((one.get("peak", 0) for one in found["ranks"]), default=0)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    worked = spent.ru_utime + spent.ru_stime - before.ru_utime - before.ru_stime
    said = found["verdict"] if done.returncode == 0 else shorten(found["sentence"], 120, placeholder=" …")
    mib = f"{spent.ru_maxrss / 1024:.0f}"
    return [layout, f"{ranks:,}", f"{peak / 2**30:.1f}", f"{seconds:.0f}", f"{worked:.0f}", mib, said]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options(parser, "rehearse")
    parser.add_argument("--train", action="store_true", help="be the script that is rehearsed")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--batch", type=int, default=1, help="samples of a rank's micro-batch")
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 512, 4096])
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    args = parser.parse_args()
    if args.train:
        return train(args.layers, args.batch)
    head, rows = ["layout", "ranks", "peak GiB", "seconds", "of processors", "MiB", "verdict"], []
    for layout in args.layouts:
        for ranks in args.ranks:
            rows.append(measure(layout, ranks))
            print(*rows[-1], flush=True)
    text = "80 layers, 8192 wide, 70.6 billion parameters on meta; bf16, AdamW, recomputed blocks, "
    text += "a sample of 4,096 tokens a rank, 8xH100 a node. Peak: of the fullest of the three ranks that run. "
    text += "Seconds, also those of all processors together, and memory of the largest process: here."
    hand_in(
        f"# Rehearsals of a model of 70 billion parameters\n\n{here()}\n\n{text}\n\n" + table(head, rows),
        args.out,
    )


if __name__ == "__main__":
    main()
