"""A program in the style of litgpt's pretraining. Arguments: package, folder, strategy, processes, precision."""

import importlib
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.mlp(self.norm(x)).relu()


def main(fabric, folder, stop):
    fabric.seed_everything(42)
    with fabric.init_module(empty_init=False):
        model = nn.Sequential(nn.Embedding(11, 16), Block(), Block(), nn.Linear(16, 11))
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
    tokens = torch.randint(0, 11, (64, 33), generator=torch.Generator().manual_seed(1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=2))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0, "hparams": {"lr": 0.05}}
    path, steps, losses, accumulate = folder / "last.ckpt", [], [], 4 // fabric.world_size
    if path.exists():
        fabric.load(path, state)
    batches = list(loader)[state["step"] * accumulate :]
    for i, (inputs, targets) in enumerate(batches, 1):
        with fabric.no_backward_sync(model, enabled=i % accumulate != 0):
            loss = nn.functional.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
            fabric.backward(loss / accumulate)
        losses.append(loss.detach())
        if i % accumulate:
            continue
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        state["step"] += 1
        mean = fabric.all_reduce(torch.stack(losses).mean(), reduce_op="mean")
        largest_loss = fabric.all_reduce(torch.stack(losses).max(), reduce_op=torch.distributed.ReduceOp.MAX)
        steps.append([mean.item(), largest_loss.item(), scheduler.get_last_lr()[0]])
        fabric.log_dict({"loss": mean, "worst": largest_loss}, step=state["step"])
        losses = []
        if state["step"] == stop:
            break
    fabric.barrier()
    fabric.save(path, state)
    if fabric.is_global_zero:
        (folder / "found.json").write_text(json.dumps(steps))
    fabric.print(f"{type(fabric.strategy).__name__} on {fabric.world_size}")
    return steps


def pretrained(package, folder, strategy="auto", devices="auto", stop=4, precision="32-true"):
    """Mean loss, greatest loss and learning rate of each step; goes on from `folder` where a checkpoint is there."""
    logger = importlib.import_module(f"{package}.loggers").CSVLogger(folder, name="logs")
    options = {"devices": devices, "strategy": strategy, "precision": precision, "loggers": logger}
    fabric = importlib.import_module(package).Fabric(accelerator="cpu", **options)
    steps = fabric.launch(main, Path(folder), stop)
    if package != "lightning_fabric":
        fabric.easymp.close()
    return steps


if __name__ == "__main__":
    pretrained(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), precision=sys.argv[5])
