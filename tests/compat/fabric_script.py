"""A program in the style of litgpt's pretraining. Arguments: package, strategy, devices, folder, and the last step."""

import importlib
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

package, strategy, devices, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
L = importlib.import_module(package)
CSVLogger = importlib.import_module(f"{package}.loggers").CSVLogger
FSDPStrategy = importlib.import_module(f"{package}.strategies").FSDPStrategy
rank_zero_only = importlib.import_module(f"{package}.utilities.rank_zero").rank_zero_only
ACCUMULATE = 4 // devices


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x)).relu()


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.h, self.head = (
            nn.Embedding(11, 16),
            nn.ModuleList([Block(), Block()]),
            nn.Linear(16, 11),
        )

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        return self.head(x)


@rank_zero_only
def write(name: str, value: object) -> None:
    (folder / name).write_text(json.dumps(value))


def main(fabric, stop: int) -> None:
    fabric.seed_everything(42)
    with fabric.init_module(empty_init=False):
        model = GPT()
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
    tokens = torch.randint(0, 11, (32, 33), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=2))
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "step": 0,
        "hparams": {"lr": 0.05},
    }
    path, losses = folder / "last.ckpt", []
    if path.exists():
        fabric.load(path, state)
    batches = list(loader)[state["step"] * ACCUMULATE :]
    for i, (inputs, targets) in enumerate(batches, 1):
        with fabric.no_backward_sync(model, enabled=i % ACCUMULATE != 0):
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            fabric.backward(loss / ACCUMULATE)
        losses.append(loss.detach())
        if i % ACCUMULATE:
            continue
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        state["step"] += 1
        loss = fabric.all_reduce(torch.stack(losses).mean(), reduce_op="mean")
        worst = fabric.all_reduce(torch.stack(losses).max(), reduce_op=torch.distributed.ReduceOp.MAX)
        fabric.log_dict({"loss": loss, "worst": worst, "lr": scheduler.get_last_lr()[0]}, step=state["step"])
        losses = []
        if state["step"] == stop:
            break
    fabric.barrier()
    fabric.save(path, state)
    write(f"{stop}.json", [state["step"], scheduler.last_epoch])
    fabric.print(f"{type(fabric.strategy).__name__} on {fabric.world_size}")


if strategy == "fsdp":
    how = {"auto_wrap_policy": {Block}, "activation_checkpointing_policy": {Block}, "state_dict_type": "full"}
    strategy = FSDPStrategy(limit_all_gathers=True, cpu_offload=False, **how)
logger = CSVLogger(folder, name="logs", flush_logs_every_n_steps=1)
fabric = L.Fabric(accelerator="cpu", devices=devices, strategy=strategy, precision="32-true", loggers=logger)
fabric.launch(main, int(sys.argv[5]))
