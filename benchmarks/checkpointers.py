"""What `checkpoint.py` compares.

A state of realistic tensors, and those who save and load it, each as its own users would.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from blocks import Block
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SIZES = {  # width, blocks, words, positions
    "tiny": (64, 4, 512, 64),
    "64MB": (256, 6, 2048, 256),
    "1GB": (768, 12, 6144, 1024),  # GPT-2 with fewer words
    "4GB": (1024, 24, 50257, 1024),  # GPT-2 medium
}
HEAD = 32  # width of an attention head
MOMENTS = ("exp_avg", "exp_avg_sq")


# -- the state ---------------------------------------------------------------------------------------------------------


class GPT(nn.Module):
    """Its forward uses the first block only, so that a step is short beside a save; all of it is saved."""

    def __init__(self, width: int, blocks: int, words: int, positions: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, HEAD) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks[0](x))


def described(size: str) -> tuple[int, int]:
    """Bytes and tensors of a state, beside AdamW's step counts."""
    with torch.device("meta"):
        there = list(GPT(*SIZES[size]).parameters())
    return 3 * sum(p.nbytes for p in there), 3 * len(there)


class Job:
    """The state, made once and inherited by every process that measures."""

    def __init__(self, size: str) -> None:
        self.size = size
        self.bytes, _ = described(size)
        with torch.device("meta"):
            self.net = GPT(*SIZES[size])
        self.net.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(0)
        tile = torch.rand(2**20, generator=generator).mul_(0.02)  # positive, as second moments are
        at = 0

        def fill(tensor: Tensor) -> Tensor:
            """Without temporary tensors.

            Holes that they leave in the heap would be used where new memory is to be measured.
            """
            nonlocal at
            at += 4099  # no two tensors are alike
            first = at % (len(tile) // 2)
            for part in tensor.view(-1).split(len(tile) // 2):
                part.copy_(tile[first : first + len(part)])
            return tensor

        with torch.no_grad():
            self.moments = [{k: fill(torch.empty_like(p)) for k in MOMENTS} for p in map(fill, self.net.parameters())]


def local(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def memory_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).numpy()).cast("B")


def shard(net: GPT, mesh: Any) -> None:
    """As FSDP2's users do: each block, then what is left."""
    from torch.distributed.fsdp import fully_shard

    for part in [*net.blocks, net]:
        fully_shard(part, mesh=mesh)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# -- the contenders ----------------------------------------------------------------------------------------------------


class Contender:
    """A run with a model and an optimizer, that saves and loads. `model` is what wraps `net`, where something does.

    Attributes:
        durable: whether a save is on disk when it returns.
        left_out: case → why it has no figures there.
        facts: is a save that was cut short told from a whole one, are there checksums, is there pickle.
    """

    durable: ClassVar[bool] = False
    asynchronous: ClassVar[bool] = False
    left_out: ClassVar[dict[str, str]] = {}
    facts: ClassVar[tuple[str, str, str]]

    def __init__(self, job: Job, case: str) -> None:
        self.case, self.net = case, job.net
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.model: Any = self.net
        self.wrap()

    def adamw(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-3, fused=True)

    def wrap(self) -> None:
        """By hand, as torch's users do."""
        if self.case == "ddp":
            self.model = DistributedDataParallel(self.net, gradient_as_bucket_view=True)
        if self.case == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh

            shard(self.net, init_device_mesh("cpu", (self.size,)))
        self.optimizer = self.adamw()

    def remember(self, job: Job) -> None:
        """The optimizer has done steps."""
        for p, moments in zip(self.net.parameters(), job.moments):
            state: dict[str, Tensor] = {"step": torch.tensor(10.0)}
            for k, whole in moments.items():
                if hasattr(p, "to_local"):
                    state[k] = torch.empty_like(p.detach())
                    local(state[k]).copy_(whole.chunk(self.size)[self.rank])
                else:
                    state[k] = whole
            self.optimizer.state[p] = state

    def live(self) -> list[Tensor]:
        """The state, as far as it is on this rank."""
        parameters = list(self.net.parameters())
        return [local(t) for t in [*parameters, *(self.optimizer.state[p][k] for p in parameters for k in MOMENTS)]]

    def save(self, path: Path) -> None:
        raise NotImplementedError

    def load(self, path: Path) -> None:
        raise NotImplementedError

    def begin(self, path: Path) -> Callable[[], bool]:
        """Begin an asynchronous save; what is returned says whether it is done."""
        raise NotImplementedError

    def end(self) -> None:
        """Nothing is in flight any more, or its error is raised."""


class Plain(Contender):
    durable = True
    facts = ("–", "–", "–")
    read: list[Tensor] | None = None

    def live(self) -> list[Tensor]:
        return self.read or super().live()

    def files(self, tensors: list[Tensor]) -> dict[str, list[Tensor]]:
        """Under ddp each rank writes a part and reads all, under fsdp its own shards."""
        if self.case == "fsdp":
            return {f"{self.rank}.bin": tensors}
        return {f"{r}.bin": tensors[r :: self.size] for r in range(self.size)}

    def save(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        name = f"{self.rank}.bin"
        descriptor = os.open(path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        for tensor in self.files(self.live())[name]:
            view = memory_of(tensor)
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
        os.close(descriptor)
        for folder in (path, path.parent):
            sync(folder)

    def load(self, path: Path) -> None:
        like = [local(p) for p in self.net.parameters()]
        self.read = self.read or [torch.empty_like(t) for t in [*like, *(t for t in like for _ in MOMENTS)]]
        for name, tensors in self.files(self.read).items():
            with open(path / name, "rb", buffering=0) as file:
                for tensor in tensors:
                    view = memory_of(tensor)
                    while view:
                        view = view[file.readinto(view) :]


class Easymp(Contender):
    durable = True
    facts = ("yes", "CRC-32 of every byte, SHA-256 of the manifest", "none")

    def wrap(self) -> None:
        from easymp import Accelerator

        strategy = "single" if self.case == "one" else self.case
        self.accelerator = Accelerator(mixed_precision="no", strategy=strategy, cpu=True)
        self.optimizer = self.adamw()
        self.model, _ = self.accelerator.prepare(self.net, self.optimizer)

    def save(self, path: Path) -> None:
        self.accelerator.save_state(path)

    def load(self, path: Path) -> None:
        self.accelerator.load_state(path)


class EasympAsync(Easymp):
    asynchronous = True

    def begin(self, path: Path) -> Callable[[], bool]:
        self.accelerator.save_state(path, async_=True)
        return path.is_dir  # it gets this name when it is committed

    def end(self) -> None:
        self.accelerator.end_training()


class Whole(Contender):
    """The first rank writes one state, whole.

    Under fsdp as torch's tutorial has it: gathered there, read there, and sent to the others.
    """

    def whole(self) -> dict[str, Any]:
        """On the first rank."""
        if self.case != "fsdp":
            return {"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        gathered = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.net, self.optimizer, options=gathered)
        return {"model": model, "optimizer": optimizer}

    def take(self, read: Callable[[], dict[str, Any]]) -> None:
        if self.case != "fsdp":
            state = read()
            self.net.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            return
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        state = read() if self.rank == 0 else {"model": {}, "optimizer": {}}
        sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self.net, state["model"], options=sent)
        set_optimizer_state_dict(self.net, self.optimizer, state["optimizer"], options=sent)


class TorchSave(Whole):
    facts = ("no", "of the zip file, not looked at", "all, restricted by weights_only")

    def save(self, path: Path) -> None:
        state = self.whole()
        if self.rank == 0:
            path.mkdir()
            torch.save(state, path / "state.pt")

    def load(self, path: Path) -> None:
        self.take(lambda: torch.load(path / "state.pt", map_location="cpu", weights_only=True))


class Safetensors(Whole):
    facts = ("no", "none", "none")

    def save(self, path: Path) -> None:
        from safetensors.torch import save_file

        state = self.whole()
        if self.rank == 0:
            path.mkdir()
            save_file(state["model"], path / "model.safetensors")
            optimizer = state["optimizer"]
            flat = {f"{i}.{k}": v for i, entry in optimizer["state"].items() for k, v in entry.items()}
            save_file(flat, path / "optimizer.safetensors", {"groups": json.dumps(optimizer["param_groups"])})

    def load(self, path: Path) -> None:
        from safetensors import safe_open
        from safetensors.torch import load_file

        def read() -> dict[str, Any]:
            state: dict[int | str, dict[str, Tensor]] = {}  # by numbers, or by names where it was gathered
            for name, tensor in load_file(path / "optimizer.safetensors").items():
                i, _, k = name.rpartition(".")
                state.setdefault(int(i) if i.isdigit() else i, {})[k] = tensor
            with safe_open(path / "optimizer.safetensors", "pt") as file:
                groups = json.loads(file.metadata()["groups"])
            optimizer = {"state": state, "param_groups": groups}
            return {"model": load_file(path / "model.safetensors"), "optimizer": optimizer}

        self.take(read)


class DCP(Contender):
    """As torch's recipe has it: an object whose state is that of model and optimizer, by names."""

    facts = ("by .metadata, written last", "none", ".metadata")

    def app(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        from torch.distributed.checkpoint.stateful import Stateful

        model, optimizer = self.model, self.optimizer

        class App(Stateful):
            def state_dict(self) -> dict[str, Any]:
                weights, states = get_state_dict(model, optimizer)
                return {"model": weights, "optimizer": states}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

        return {"app": App()}

    def save(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.app(), checkpoint_id=path)

    def load(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self.app(), checkpoint_id=path)


class DCPAsync(DCP):
    """Its thread calls collectives while training goes on.

    In the group that training uses they would meet training's own, in an order that differs from rank to rank: that
    hangs, or crashes in gloo. So it has a group to itself."""

    asynchronous = True

    def wrap(self) -> None:
        super().wrap()
        self.group = dist.new_group(backend="gloo") if self.size > 1 else None

    def begin(self, path: Path) -> Callable[[], bool]:
        import torch.distributed.checkpoint as dcp

        self.saving = dcp.async_save(self.app(), checkpoint_id=path, process_group=self.group)
        return self.saving.done

    def end(self) -> None:
        self.saving.result()


class Accelerate(Contender):
    left_out: ClassVar[dict[str, str]] = {
        "fsdp": "on CPUs it passes over its FullyShardedDataParallelPlugin without a word, and would save as ddp does"
    }
    facts = ("no", "none", "optimizer, scheduler, RNG")

    def wrap(self) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(mixed_precision="no", cpu=True)
        self.optimizer = self.adamw()
        self.model, _ = self.accelerator.prepare(self.net, self.optimizer)

    def save(self, path: Path) -> None:
        self.accelerator.save_state(str(path))

    def load(self, path: Path) -> None:
        self.accelerator.load_state(str(path))


class Fabric(Contender):
    facts = ("no", "of the zip file, not looked at; none under fsdp", "all; .metadata and meta.pt under fsdp")

    def wrap(self) -> None:
        from lightning_fabric import Fabric

        strategy: Any = {"one": "auto", "ddp": "ddp"}.get(self.case)
        if self.case == "fsdp":  # its FSDPStrategy is for GPUs; this is its one for FSDP2
            from lightning_fabric.strategies import ModelParallelStrategy

            def sharded(net: GPT, mesh: Any) -> GPT:
                shard(net, mesh["data_parallel"])
                return net

            strategy = ModelParallelStrategy(sharded, data_parallel_size=self.size, tensor_parallel_size=1)
        self.fabric = Fabric(accelerator="cpu", strategy=strategy, devices=self.size, precision="32-true")
        self.fabric.launch()
        self.model = self.fabric.setup_module(self.net)
        self.optimizer = self.adamw()
        self.prepared = self.fabric.setup_optimizers(self.optimizer)

    def save(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        self.fabric.save(path / "state.ckpt", {"model": self.model, "optimizer": self.prepared})

    def load(self, path: Path) -> None:
        self.fabric.load(path / "state.ckpt", {"model": self.model, "optimizer": self.prepared})


BASE, OURS, ASYNC, THEIRS = "plain write and read", "easymp", "easymp, async", "DCP, async"
CONTENDERS: dict[str, type[Contender]] = {
    BASE: Plain,
    OURS: Easymp,
    ASYNC: EasympAsync,
    "torch.save, load": TorchSave,
    "safetensors": Safetensors,
    "DCP": DCP,
    THEIRS: DCPAsync,
    "Accelerate": Accelerate,
    "Fabric": Fabric,
}
