"""Step time and memory of each strategy, beside the same training written by hand in plain torch.

    python benchmarks/strategies.py            # one table; --keep writes it to benchmarks/results

Each row is a launch of its own, over gloo on CPUs, or on GPUs where there are as many as the row has processes. In it
the contenders take turns: a few steps each, then the next, in another order each time. A ratio is the median over the
rounds of (easymp / by hand) in the same round, with the quartiles behind it. The first loop by hand runs twice; its
second copy shows what the method makes of no difference at all. Before anything is timed, all train on the same
batches, and their losses must agree.

The model is a GPT of blocks in fp32 under AdamW(fused=True); a step is zero_grad, forward, backward, update. Where
ranks share the data, each has its own sequences; under tensor and pipeline parallelism all have the same ones.

Memory is that of all tensors alive, made since before the model was built: at the peak of three steps, and after a step
with gradients still there ("lasting": weights, gradients, optimizer states). On CPUs every operation's results are
watched (not workspaces inside one, nor what gloo takes for itself); torch's profiler would miss what gloo's threads
free. On GPUs the caching allocator counts. The fullest rank stands in the table, beside
`easymp.training.memory.estimate`, which allocates nothing.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
import torch.nn.functional as F
from blocks import Block
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from easymp import Accelerator, detect
from easymp.protocols import Facts
from easymp.strategies import STRATEGIES
from easymp.training import memory

SIZES = {  # width, blocks, words, length of a sequence, sequences a rank
    "full": (384, 8, 512, 64, 4),
    "tiny": (32, 2, 64, 8, 4),
}
HEAD = 16  # width of an attention head
MICRO = 4  # micro-batches of a pipeline
EVERY = 4  # local steps between two averages


# -- the model ---------------------------------------------------------------------------------------------------------


class GPT(nn.Module):
    def __init__(self, size: str) -> None:
        super().__init__()
        width, blocks, words, length, _ = SIZES[size]
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, HEAD) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def begin(self, x: Tensor) -> Tensor:
        return self.embed(x) + self.place(torch.arange(x.shape[1], device=x.device))

    def end(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


PLAN = {
    "blocks.*.[qkv]": "colwise",
    "blocks.*.o": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


class Job:
    """What every contender starts from: the same model and batches.

    Args:
        slices: among how many ranks a batch is divided.
    """

    def __init__(self, row: Row, size: str) -> None:
        self.row, self.size = row, size
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        gpus = torch.cuda.is_available() and torch.cuda.device_count() >= self.world
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpus else torch.device("cpu")
        self.slices = self.world if row.divides else 1
        torch.manual_seed(0)
        self.model = GPT(size)
        self.generator = torch.Generator().manual_seed(1)

    def batch(self) -> tuple[Tensor, Tensor]:
        _, _, words, length, each = SIZES[self.size]
        tokens = torch.randint(words, (each * self.slices, length + 1), generator=self.generator)
        mine = tokens.chunk(self.slices)[self.rank % self.slices].to(self.device)
        return mine[:, :-1], mine[:, 1:]

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Matrices of the blocks apart from the rest: fused AdamW takes no DTensors and plain tensors in one group."""
        split = [p for n, p in model.named_parameters() if n.split(".")[-2] in ("q", "k", "v", "up", "o", "down")]
        known = {id(p) for p in split}
        return [{"params": split}, {"params": [p for p in model.parameters() if id(p) not in known]}]


# -- the contenders: each `next` is one step, and gives its loss -------------------------------------------------------


def loop(
    job: Job, model: Callable[[Tensor], Tensor], optimizer: Any, after: Callable[[], None] = lambda: None
) -> Iterator[Tensor]:
    while True:
        optimizer.zero_grad()
        x, y = job.batch()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        after()
        yield loss.detach()


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def plain(job: Job) -> Iterator[Tensor]:
    model = job.model.to(job.device)
    return loop(job, model, adamw(model.parameters()))


def ddp_of(job: Job) -> DistributedDataParallel:
    model = job.model.to(job.device)
    return DistributedDataParallel(
        model, device_ids=[job.device] if job.device.type == "cuda" else None, gradient_as_bucket_view=True
    )


def ddp(job: Job) -> Iterator[Tensor]:
    model = ddp_of(job)
    return loop(job, model, adamw(model.parameters()))


def zero_by_torch(job: Job) -> Iterator[Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = ddp_of(job)
    return loop(job, model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True))


def zero_by_rows(job: Job) -> Iterator[Tensor]:
    """This rank's rows of each parameter in an AdamW of their own; every dimension 0 of this model divides evenly."""
    model = ddp_of(job)
    wholes = [p.detach() for p in model.parameters()]
    rows = [w.chunk(job.world)[job.rank] for w in wholes]
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    class Rows:
        own = adamw(rows)

        def zero_grad(self) -> None:
            model.zero_grad()

        def step(self) -> None:
            for row, p in zip(rows, model.parameters()):
                row.grad = p.grad.chunk(job.world)[job.rank]
            self.own.step()
            self.own.zero_grad()
            for work in [gather(w.view(-1), r.view(-1), async_op=True) for w, r in zip(wholes, rows)]:
                work.wait()

    return loop(job, model, Rows())


def fully_sharded(job: Job, *shape: int) -> Iterator[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(job.device.type, shape, mesh_dim_names=names)
    model = job.model.to(job.device)
    for part in [*model.blocks, model]:
        fully_shard(part, mesh=mesh)
    return loop(job, model, adamw(model.parameters()))


def fsdp(job: Job) -> Iterator[Tensor]:
    return fully_sharded(job, job.world)


def hsdp(job: Job) -> Iterator[Tensor]:
    return fully_sharded(job, job.world // 2, 2)


def tensor_parallel(job: Job) -> Iterator[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(job.device.type, (job.world,))
    model = job.model.to(job.device)
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                n: RowwiseParallel() if n in ("o", "down") else ColwiseParallel()
                for n in ("q", "k", "v", "o", "up", "down")
            },
        )
    return loop(job, model, adamw(job.groups(model)))


def gpipe(job: Job) -> Iterator[Tensor]:
    """Two stages: activations go one way, their gradients the other; the loss is on the second rank, which tells it."""
    model, first = job.model.to(job.device), job.rank == 0
    half = len(model.blocks) // 2
    blocks = model.blocks[:half] if first else model.blocks[half:]
    ends = [model.embed, model.place] if first else [model.norm, model.head]
    mine = nn.ModuleList([*ends, *blocks])
    width, _, _, length, each = SIZES[job.size]
    del job.model
    for part in ("embed", "place") if not first else ("norm", "head"):
        delattr(model, part)
    model.blocks = blocks
    optimizer = adamw(mine.parameters())
    while True:
        optimizer.zero_grad()
        x, y = job.batch()
        kept: list[tuple[Tensor, Tensor]] = []
        total = torch.zeros((), device=job.device)
        for part, target in zip(x.chunk(MICRO), y.chunk(MICRO)):
            if first:
                got, out = part, model.begin(part)
            else:
                got = torch.empty(each // MICRO, length, width, device=job.device)
                dist.recv(got, 0)
                out = got.requires_grad_()
            for block in blocks:
                out = block(out)
            if first:
                dist.send(out.detach(), 1)
            else:
                out = loss_of(model.end(out), target) / MICRO
                total += out.detach()
            kept.append((got, out))
        for got, out in kept:
            if first:
                grad = torch.empty_like(out)
                dist.recv(grad, 1)
                out.backward(grad)
            else:
                out.backward()
                assert got.grad is not None
                dist.send(got.grad, 0)
        del kept, got, out
        optimizer.step()
        dist.broadcast(total, 1)
        yield total


def local_steps(job: Job) -> Iterator[Tensor]:
    model = job.model.to(job.device)
    parameters = list(model.parameters())
    for p in parameters:
        dist.broadcast(p.detach(), 0)
    steps = 0

    def average() -> None:
        nonlocal steps
        steps += 1
        if steps % EVERY == 0:
            flat = torch.cat([p.detach().view(-1) for p in parameters])
            dist.all_reduce(flat)
            flat /= job.world
            for p, values in zip(parameters, flat.split([p.numel() for p in parameters])):
                p.detach().copy_(values.view(p.shape))

    return loop(job, model, adamw(parameters), average)


def ours(job: Job) -> Iterator[Tensor]:
    accelerator = Accelerator(
        mixed_precision="no",
        strategy=job.row.name,
        strategy_options=job.row.options,
        cpu=job.device.type == "cpu" or None,
    )
    optimizer = torch.optim.AdamW(
        job.groups(job.model) if job.row.name == "tensor_parallel" else job.model.parameters(), lr=1e-3
    )
    model, optimizer = accelerator.prepare(job.model, optimizer)
    while True:
        optimizer.zero_grad()
        x, y = job.batch()
        loss = loss_of(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        yield loss.detach()


@dataclass(frozen=True)
class Row:
    """A strategy, the processes it needs, and its loops by hand.

    Attributes:
        divides: whether ranks have different sequences.
        options: of the strategy.
    """

    name: str
    hands: dict[str, Callable[[Job], Iterator[Tensor]]]
    processes: int = 2
    divides: bool = True
    options: dict[str, Any] | None = field(default=None)


ROWS = [
    Row("single", {"plain loop": plain}, processes=1),
    Row("ddp", {"DDP": ddp}),
    Row("zero1", {"DDP, AdamW on rows": zero_by_rows, "DDP, ZeroRedundancyOptimizer": zero_by_torch}),
    Row("fsdp", {"fully_shard": fsdp}),
    Row("hsdp", {"fully_shard on 2 × 2": hsdp}, processes=4, options={"shard_size": 2}),
    Row("tensor_parallel", {"parallelize_module": tensor_parallel}, divides=False, options={"plan": PLAN}),
    Row("pipeline", {"GPipe by send and recv": gpipe}, divides=False, options={"microbatches": MICRO}),
    Row("local_sgd", {"local steps": local_steps}, options={"every": EVERY}),
]
AGAIN = "by hand again"
OURS = "easymp"


def contenders(row: Row) -> dict[str, Callable[[Job], Iterator[Tensor]]]:
    return {**row.hands, AGAIN: next(iter(row.hands.values())), OURS: ours}


# -- one row, inside a process of its own ------------------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """While entered, knows the memory of all plain CPU tensors that operations make.

    Of DTensors, that of the parts they wrap.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # it comes again, with the parts
        results = func(*args, **(kwargs or {}))
        for item in tree_leaves(results):
            if isinstance(item, Tensor) and not item.is_meta and not hasattr(item, "__tensor_flatten__"):
                storage = item.untyped_storage()
                key = storage._cdata
                if key not in self._storages:
                    self._storages[key] = weakref.ref(storage, lambda _, key=key: self._storages.pop(key, None))
        self.peak = max(self.peak, self.now())
        return results

    def now(self) -> int:
        return sum(there.nbytes() for ref in list(self._storages.values()) if (there := ref()) is not None)


def footprint(contender: Callable[[Job], Iterator[Tensor]], row: Row, size: str) -> tuple[int, int, list[float]]:
    """Bytes at the peak of three steps and after them, above the start, and the losses."""

    def steps() -> tuple[Iterator[Tensor], list[float]]:
        run = contender(Job(row, size))
        return run, [float(next(run)) for _ in range(3)]

    gc.collect()
    if torch.cuda.is_available() and torch.cuda.device_count() >= row.processes:
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        run, losses = steps()
        top, now = torch.cuda.max_memory_allocated() - start, torch.cuda.memory_allocated() - start
    else:
        with Alive() as alive:
            run, losses = steps()
        gc.collect()
        top, now = alive.peak, alive.now()
    del run
    gc.collect()
    return top, now, losses


def measure(row: Row, size: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Contender → seconds a step, one figure a round."""
    runs = {name: contender(Job(row, size)) for name, contender in contenders(row).items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    device = Job(row, "tiny").device
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    gc.collect()
    gc.freeze()
    for k in range(rounds + 1):
        shift = k % len(names)
        order = names[shift:] + names[:shift]
        for name in order if k // len(names) % 2 else reversed(order):
            next(runs[name])  # caches that another contender has filled
            wait()
            if dist.is_initialized():
                dist.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                next(runs[name])
            wait()
            if k:
                times[name].append((time.perf_counter() - begin) / steps)
    return times


def worker(row: Row, size: str, rounds: int, steps: int, out: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    among = "RANK" in os.environ
    if among:
        gpus = torch.cuda.is_available() and torch.cuda.device_count() >= row.processes
        if gpus:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    seen = {name: footprint(contender, row, size) for name, contender in contenders(row).items()}
    told: list[Any] = [None] * row.processes
    if among:
        dist.all_gather_object(told, seen)
    else:
        told = [seen]
    means = {name: [statistics.mean(s) for s in zip(*(there[name][2] for there in told))] for name in seen}
    for name, losses in means.items():
        wanted = means[next(iter(row.hands))]
        if any(abs(a - b) > 1e-4 * abs(b) for a, b in zip(losses, wanted)):
            raise SystemExit(
                f"{name} trains otherwise than by hand in row {row.name!r} ({losses}, {wanted}): no use timing it"
            )
    bytes_ = {name: [max(there[name][i] for there in told) for i in (0, 1)] for name in seen}
    times = measure(row, size, rounds, steps)
    if not among or dist.get_rank() == 0:
        out.write_text(json.dumps({"times": times, "bytes": bytes_}))
    if among:
        gc.unfreeze()
        gc.collect()  # whatever wraps a model goes before the group does
        dist.barrier()


# -- all rows ----------------------------------------------------------------------------------------------------------


def refused(row: Row) -> str | None:
    """Why the strategy cannot be measured here."""
    kind = STRATEGIES[row.name]
    said = kind.refuse(Facts(detect(), "cpu", row.processes))
    return str(said) if said else None


def launched(row: Row, size: str, rounds: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        script = [
            __file__,
            "--row",
            row.name,
            "--size",
            size,
            "--rounds",
            str(rounds),
            "--steps",
            str(steps),
            "--times",
            str(out),
        ]
        launch = [] if row.processes == 1 else ["-m", "easymp", "launch", "--processes", str(row.processes)]
        done = subprocess.run([sys.executable, *launch, *script], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"row {row.name!r} failed:\n{done.stdout}{done.stderr}")
        return json.loads(out.read_text())


def ratio(times: dict[str, list[float]], name: str, hand: str) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles([a / b for a, b in zip(times[name], times[hand])], n=4)
    return middle, low, high


def predicted(row: Row, size: str) -> tuple[int, int]:
    with torch.device("meta"):
        model = GPT(size)
    _, _, _, length, each = SIZES[size]
    sample = (torch.zeros(each, length, dtype=torch.long, device="meta"),)
    told = memory.estimate(
        model,
        strategy=row.name,
        world=row.processes,
        optimizer="adamw",
        options=copy.copy(row.options),
        sample=sample,
    )
    return told.total, told.lasting


def tables(results: dict[str, dict[str, Any]], size: str) -> str:
    times, sizes = [], []
    for row in (row for row in ROWS if row.name in results):
        found = results[row.name]
        peak, lasting = predicted(row, size)
        mb = {name: [f"{b / 2**20:.1f}" for b in both] for name, both in found["bytes"].items()}
        first = next(iter(row.hands))
        for hand in row.hands:
            middle = statistics.median(found["times"][hand]) * 1e3
            cells = ["{:.3f} ({:.3f} … {:.3f})".format(*ratio(found["times"], OURS, hand))]
            again = ["{:.3f} ({:.3f} … {:.3f})".format(*ratio(found["times"], AGAIN, hand))] if hand == first else [""]
            times.append([f"{row.name}, {row.processes}", hand, f"{middle:.0f}", *cells, *again])
            off = found["bytes"][OURS][1] / lasting - 1
            told = [f"{lasting / 2**20:.1f}", f"{off:+.1%}", mb[hand][0], mb[OURS][0], f"{peak / 2**20:.1f}"]
            sizes.append([f"{row.name}, {row.processes}", hand, mb[hand][1], mb[OURS][1], *told])
    return "\n".join(
        [
            "## Time of a step",
            "",
            report.table(
                ["strategy, processes", "by hand", "ms", "easymp / by hand", "by hand again / by hand"], times
            ),
            "",
            "## Memory of the fullest rank, MiB",
            "",
            report.table(
                [
                    *(
                        "strategy, processes",
                        "by hand",
                        "lasting, by hand",
                        "lasting, easymp",
                        "predicted",
                        "off",
                    ),
                    *("peak, by hand", "peak, easymp", "predicted, at most"),
                ],
                sizes,
            ),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="turns of each contender (40)")
    parser.add_argument("--steps", type=int, default=2, help="timed steps a turn (2)")
    parser.add_argument("--size", choices=list(SIZES), default="full", help="of the model (full)")
    parser.add_argument("--only", nargs="*", metavar="STRATEGY", choices=[row.name for row in ROWS], help="these rows")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--times", type=Path, help=argparse.SUPPRESS)
    if "--times" in sys.argv:
        asked = parser.parse_args()
        worker(
            next(row for row in ROWS if row.name == asked.row),
            asked.size,
            asked.rounds,
            asked.steps,
            asked.times,
        )
        return

    report.options(parser, "strategies")
    asked = parser.parse_args()
    where = report.here()
    rows = [row for row in ROWS if not asked.only or row.name in asked.only]
    why_not = {row.name: said for row in rows if (said := refused(row))}
    results = {
        row.name: launched(row, asked.size, asked.rounds, asked.steps) for row in rows if row.name not in why_not
    }
    width, blocks, words, length, each = SIZES[asked.size]
    count = sum(p.numel() for p in GPT(asked.size).parameters())
    text = "\n".join(
        [
            "# Strategies beside plain torch",
            "",
            (
                f"A GPT of {count / 1e6:.1f} million parameters ({blocks} blocks, {width} wide, {words} words), {each} "
                "sequences of "
                f"{length} tokens a rank, AdamW; {asked.rounds} interleaved turns of {asked.steps} steps; ratios: "
                "median (quartiles)."
            ),
            "",
            tables(results, asked.size) if results else "",
            "",
            *(f"- {name} is left out: {said}." for name, said in why_not.items()),
            where,
        ]
    )
    report.hand_in(text, asked.out)


if __name__ == "__main__":
    main()
