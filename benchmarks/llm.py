"""Training a language model end to end: tuned PyTorch, easymp with the same words, Accelerate as its users write it.

    python benchmarks/llm.py --cpu              # a GPT of 10M parameters on this CPU, one and two processes; --keep
    writes the result python benchmarks/llm.py                    # on an NVIDIA GPU: 124M and 1B parameters, eager and
    compiled, bf16 and fp8 python benchmarks/llm.py --rehearse         # tiny sizes: see that it runs

The data are the bytes of the standard library's source text. An update is two micro-batches, clipping and AdamW; rows
with micro-batches of one sequence show more of what a wrapper adds to the model's products. All contenders of a row
live in one process (or two, by DDP) and take turns, an update each, every time in another order. A ratio is the median
over the rounds of (contender / by hand) in the same round, with the quartiles behind it; the loop by hand runs twice,
and its second copy shows what the method makes of no difference at all. Before anything is timed, the losses of three
updates must agree.

Memory is the peak of these three updates above what was there before: on CPUs the bytes of all tensors that operations
make, on GPUs what the caching allocator counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
import torch.nn.functional as F
from blocks import Block
from strategies import Alive
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

ACCUMULATION, CLIP, CHECKED = 2, 1.0, 3
SIZES = {  # width, blocks, words, length of a sequence, sequences of a micro-batch
    "tiny": (32, 2, 256, 16, 2),
    "10M": (320, 8, 256, 256, 4),
    "124M": (768, 12, 50304, 1024, 16),
    "1B": (2048, 18, 50304, 2048, 4),
}


@dataclass(frozen=True)
class Row:
    size: str
    processes: int = 1
    precision: str = "no"
    compiled: bool = False
    device: str = "cpu"
    sharded: bool = False  # by fsdp, on a mesh of one
    batch: int = 0  # sequences of a micro-batch, where they are not those of `SIZES`

    @property
    def name(self) -> str:
        words = [f"{self.size}, {self.processes} process" + "es" * (self.processes > 1), self.precision]
        more = (
            ["compiled"] * self.compiled
            + ["fsdp"] * self.sharded
            + [f"micro-batches of {self.batch}"] * bool(self.batch)
        )
        return ", ".join([*words, *more]).replace(", no", ", fp32")


def rows(where: str, fsdp: bool = False) -> list[Row]:
    if fsdp:
        size = {"rehearse": "tiny", "cpu": "10M", "cuda": "1B"}[where]
        return [Row(size, 1, "bf16", device="cuda" if where == "cuda" else "cpu", sharded=True)]
    if where == "rehearse":
        return [Row("tiny"), Row("tiny", 2, "bf16")]
    if where == "cpu":
        return [Row("10M", n, batch=batch) for batch in (0, 1) for n in (1, 2)]
    eager = [Row(size, 1, "bf16", device="cuda") for size in ("124M", "1B")]
    return [*eager, *(Row(r.size, 1, p, True, "cuda") for r in eager for p in ("bf16", "fp8"))]


# -- the model and its data --------------------------------------------------------------------------------------------


class RotaryBlock(nn.Module):
    """A block as Llama has it: RMSNorm, rotary positions, SwiGLU; [batch, length, width] to the same."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head, inner = head, -(-8 * width // 3 // 64) * 64
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def turned(self, x: Tensor) -> Tensor:
        half = self.head // 2
        speed = 10000.0 ** -torch.linspace(0, 1, half, device=x.device)
        angle = torch.arange(x.shape[2], device=x.device)[:, None] * speed
        a, b = x.float().split(half, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LanguageModel(nn.Module):
    def __init__(self, size: str) -> None:
        super().__init__()
        width, blocks, words, length, _ = SIZES[size]
        kind: Any = RotaryBlock if size == "1B" else Block
        self.embed = nn.Embedding(words, width)
        self.place = nn.Embedding(length, width) if kind is Block else None
        self.blocks = nn.ModuleList(
            kind(width, 128 if size == "1B" else 16 if size == "tiny" else 64) for _ in range(blocks)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        if self.place is not None:
            y = y + self.place.weight[: x.shape[1]]
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y))


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of the standard library's source text, and the bytes that follow each byte."""

    def __init__(self, length: int) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        self.bytes = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.length

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        piece = self.bytes[i * self.length : (i + 1) * self.length + 1].long()
        return piece[:-1], piece[1:]


class Job:
    """What every contender starts from: the same model and the same data."""

    def __init__(self, row: Row) -> None:
        self.row, self.device = row, torch.device(row.device)
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        torch.manual_seed(0)
        with self.device:
            self.model = LanguageModel(row.size)
        *_, length, batch = SIZES[row.size]
        batch = row.batch or batch
        self.tokens = ACCUMULATION * batch * length * self.size  # of an update
        self.data, self.batch = Text(length), batch

    def loader(self, sampler: Any = None) -> DataLoader[Any]:
        return DataLoader(self.data, self.batch, sampler=sampler, pin_memory=self.row.device == "cuda", drop_last=True)


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


# -- the contenders: each `next` is an update, and gives the loss of its last micro-batch ------------------------------


def by_hand(job: Job) -> Iterator[Tensor]:
    """What a performance engineer writes.

    Fused AdamW and clipping, blocks compiled one by one, reduction only where it counts.
    """
    row, model = job.row, job.model
    if row.sharded:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*model.blocks, model):
            fully_shard(part, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if row.compiled:
        for block in model.blocks:
            block.compile()
    call: Any = model
    sampler = None
    if job.size > 1:
        call = DistributedDataParallel(model, gradient_as_bucket_view=True)
        sampler = torch.utils.data.DistributedSampler(job.data, shuffle=False)
    cast = torch.autocast(row.device, torch.bfloat16, enabled=row.precision != "no" and not row.sharded)
    micro = 0
    while True:
        for x, y in job.loader(sampler):
            micro += 1
            last = micro % ACCUMULATION == 0
            x, y = x.to(job.device, non_blocking=True), y.to(job.device, non_blocking=True)
            with call.no_sync() if job.size > 1 and not last else nullcontext():
                with cast:
                    loss = loss_of(call(x), y)
                (loss / ACCUMULATION).backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
                optimizer.step()
                optimizer.zero_grad()
                yield loss.detach()


def by_wrapper(job: Job, accelerator: Any) -> Iterator[Tensor]:
    """The loop of Accelerate's documentation, which is easymp's, too."""
    optimizer = torch.optim.AdamW(job.model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(job.model, optimizer, job.loader())
    while True:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                yield loss.detach()


def by_easymp(job: Job) -> Iterator[Tensor]:
    from easymp import Accelerator
    from easymp.strategies.fsdp import FSDP

    row = job.row
    words: dict[str, Any] = {"mixed_precision": row.precision, "gradient_accumulation_steps": ACCUMULATION}
    if row.sharded:
        FSDP.several = ""  # which refuses one process
        words["strategy"] = "fsdp"
    accelerator = Accelerator(**words, compile="blocks" if row.compiled else None, cpu=row.device == "cpu")
    return by_wrapper(job, accelerator)


def by_accelerate(job: Job) -> Iterator[Tensor]:
    from accelerate import Accelerator

    row = job.row
    words: dict[str, Any] = {"mixed_precision": row.precision, "gradient_accumulation_steps": ACCUMULATION}
    accelerator = Accelerator(**words, cpu=row.device == "cpu", dynamo_backend="inductor" if row.compiled else "no")
    return by_wrapper(job, accelerator)


HAND, AGAIN, OURS, PEER = "by hand", "by hand again", "easymp", "Accelerate"


def contenders(row: Row) -> dict[str, Callable[[Job], Iterator[Tensor]]]:
    """Who can run a row: fp8 needs a library of its own by hand and under Accelerate, so bf16 stands beside it."""
    every = {HAND: by_hand, AGAIN: by_hand, OURS: by_easymp}
    if find_spec("accelerate") is not None and row.precision != "fp8" and not row.sharded:
        every[PEER] = by_accelerate
    return every


# -- one row, inside processes of its own ------------------------------------------------------------------------------


def begin(contender: Callable[[Job], Iterator[Tensor]], row: Row) -> tuple[Iterator[Tensor], int, list[float]]:
    """A contender after its first updates: the peak of memory in them, above the start, and their losses."""
    gc.collect()
    device = torch.device(row.device)
    if row.device == "cuda":
        before = report.forget_peak(device)
        run = contender(Job(row))
        losses = [mean(next(run)) for _ in range(CHECKED)]
        return run, report.peak(device) - before, losses
    with Alive() as alive:
        run = contender(Job(row))
        losses = [mean(next(run)) for _ in range(CHECKED)]
    return run, alive.peak, losses


def mean(loss: Tensor) -> float:
    """Over the ranks, whose samples are the same ones together, however a loader shares them out."""
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss = loss / dist.get_world_size()
    return float(loss)


def worker(row: Row, rounds: int, seconds: float, out: Path) -> None:
    torch.set_num_threads(
        max(1, torch.get_num_threads() // row.processes) if row.processes > 1 else torch.get_num_threads()
    )
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    if row.sharded:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        os.environ.update(where, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if row.device == "cuda" else "gloo")
    runs, peaks, firsts = {}, {}, {}
    for name, contender in contenders(row).items():
        runs[name], peaks[name], firsts[name] = begin(contender, row)
    # Losses differ by the order of sums; under fp8 by its rounding.
    near = 0.05 if row.precision == "fp8" else 0.01
    for name, losses in firsts.items():
        if any(abs(a - b) > near * abs(b) for a, b in zip(losses, firsts[HAND])):
            raise SystemExit(f"{name} trains otherwise than the loop by hand: losses {losses}, not {firsts[HAND]}")
    times: dict[str, list[float]] = {name: [] for name in runs}
    names, began = list(runs), time.monotonic()
    gc.collect()
    gc.freeze()
    for k in range(rounds + 1):
        late = torch.tensor(float(k > 3 and time.monotonic() - began > seconds), device=row.device)
        if dist.is_initialized():
            dist.all_reduce(late)
        if late:
            break
        shift = k % len(names)
        order = names[shift:] + names[:shift]
        for name in order if k // len(names) % 2 else reversed(order):
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            next(runs[name])
            if row.device == "cuda":
                torch.cuda.synchronize()
            if k:  # the first round is warm-up
                times[name].append(time.perf_counter() - start)
    if not dist.is_initialized() or dist.get_rank() == 0:
        job = Job(row)
        told = {"times": times, "peaks": peaks, "tokens": job.tokens}
        out.write_text(json.dumps(told))
    if dist.is_initialized():
        del runs
        gc.collect()
        dist.barrier()


# -- all rows ----------------------------------------------------------------------------------------------------------


def launched(row: Row, rounds: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "told.json"
        fields = json.dumps(vars(row))
        script = [
            __file__,
            "--row",
            fields,
            "--rounds",
            str(rounds),
            "--seconds",
            str(seconds),
            "--told",
            str(out),
        ]
        launch = ["-m", "easymp", "launch", "--processes", str(row.processes)] if row.processes > 1 else []
        done = subprocess.run([sys.executable, *launch, *script], capture_output=True, text=True)
        if done.returncode:
            return {"failed": (done.stdout + done.stderr).strip().splitlines()[-1:] or ["no word"]}
        return json.loads(out.read_text())


def ratio(told: dict[str, Any], name: str, base: str) -> tuple[float, float, float]:
    """Median and quartiles of tokens/s over those of `base` in the same round."""
    low, middle, high = statistics.quantiles([b / a for a, b in zip(told["times"][name], told["times"][base])], n=4)
    return middle, low, high


def claims(row: Row, told: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """What this row would have to show, and whether it does."""
    if "failed" in told:
        yield f"{row.name}: runs; it fails: {told['failed'][0]}", False
        return
    fast = ratio(told, OURS, HAND)[0]
    yield f"{row.name}: easymp has at least 0.99 of the tokens/s by hand: {fast:.3f}", fast >= 0.99
    if PEER in told["times"]:
        peer, hand = (ratio(told, name, PEER)[0] for name in (OURS, HAND))
        text = f"{peer:.3f}, where the loop by hand has {hand:.3f}"
        yield f"{row.name}: easymp has at least 1.05 of Accelerate's tokens/s: {text}", peer >= 1.05
    share = told["peaks"][OURS] / told["peaks"][HAND]
    # A loader's order of samples is a tensor under easymp, and a list, which is not counted, by hand.
    yield f"{row.name}: the peak of memory is at most 1.005 of that by hand: {share:.3f}", share <= 1.005


def section(row: Row, told: dict[str, Any]) -> str:
    if "failed" in told:
        return f"## {row.name}\n\nfails: {told['failed'][0]}"
    lines = []
    for name, times in told["times"].items():
        each = told["tokens"] / statistics.median(times)
        beside = "" if name == HAND else "{:.3f} ({:.3f} … {:.3f})".format(*ratio(told, name, HAND))
        lines.append([name, f"{each:,.0f}", beside, f"{told['peaks'][name] / 2**20:,.1f}"])
    head = ["", "tokens/s", "beside by hand", "peak, MiB"]
    count = len(told["times"][HAND])
    return (
        f"## {row.name}\n\n{count} rounds of one update, {told['tokens']:,} tokens each.\n\n{report.table(head, lines)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="10M parameters on this CPU")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on this CPU, three rounds")
    parser.add_argument("--fsdp", action="store_true", help="on a mesh of one, beside torch's fully_shard")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each contender, three at least (30)")
    parser.add_argument("--seconds", type=float, default=150, help="of measuring a row, at most (150)")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--told", type=Path, help=argparse.SUPPRESS)
    if "--told" in sys.argv:
        asked = parser.parse_args()
        worker(Row(**json.loads(asked.row)), asked.rounds, asked.seconds, asked.told)
        return
    on_cpu = "--cpu" in sys.argv or "--rehearse" in sys.argv or not torch.cuda.is_available()
    report.options(
        parser,
        ("llm-cpu" if on_cpu else "llm") + "-fsdp" * ("--fsdp" in sys.argv),
        None if on_cpu else torch.cuda.get_device_name(),
    )
    asked = parser.parse_args()
    rounds = 3 if asked.rehearse else max(3, asked.rounds)
    results = {
        row: launched(row, rounds, asked.seconds)
        for row in rows("rehearse" if asked.rehearse else "cpu" if on_cpu else "cuda", asked.fsdp)
    }
    said = [f"- {'yes' if met else 'NO'}: {text}" for row, told in results.items() for text, met in claims(row, told)]
    absent = [] if find_spec("accelerate") else ["Accelerate is left out: it is not installed (the extra 'bench')."]
    parts = [
        "# Training a language model",
        report.here(*(["accelerate"] if not absent else [])),
        *absent,
        *(section(row, told) for row, told in results.items()),
        "## What it shows",
        "\n".join(said),
    ]
    report.hand_in("\n\n".join(parts), asked.out)
    if any("failed" in told for told in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
