"""A small convolutional network on scikit-learn's handwritten digits, in any precision, on any number of processes.

    python examples/digits.py                                    one process
    python examples/digits.py --processes 2 --precision fp32     two
    easymp launch --processes 2 examples/digits.py               two, too
    python examples/digits.py --folder runs/digits               saves itself after each epoch and at SIGTERM, and goes
                                                                 on when it is started again
    easymp compare examples/digits.py --precision fp32,bf16      time, memory, loss and accuracy of both

The batch size is the number of samples in one update, whatever the number of processes and of accumulation steps: in
fp32 they all train the same model, up to rounding.
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from easymp import Accelerator, DataLoaderConfiguration, ProjectConfiguration, tqdm

TRAINING = 1408  # of 1797 images: 22 batches of 64. The 389 others are no multiple of anything


class Net(nn.Sequential):
    """(batch, 1, 8, 8) images to (batch, 10) logits; 66 thousand parameters.

    No layer mixes samples, as batch-norm would, and none has a kink: at the kinks of relu and max-pool a difference in
    rounding between one process and two can grow until the final losses differ.
    """

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.GELU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.GELU(), nn.AvgPool2d(2)),
            *(nn.Flatten(), nn.Linear(32 * 4 * 4, 116), nn.GELU(), nn.Linear(116, 10)),
        )


def load() -> tuple[TensorDataset, TensorDataset]:
    """Training and test images, pixels from 0 to 1. The split is the same in every run."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(images).float().div(16).view(-1, 1, 8, 8)[order]
    labels = torch.from_numpy(labels)[order]
    return TensorDataset(images[:TRAINING], labels[:TRAINING]), TensorDataset(images[TRAINING:], labels[TRAINING:])


@torch.no_grad()
def evaluate(acc: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """The share of samples that are classified right, over all processes, each sample counted once."""
    model.eval()
    right = total = 0
    for images, labels in loader:
        predictions, labels = acc.gather_for_metrics((model(images).argmax(1), labels))
        right += int((predictions == labels).sum())
        total += len(labels)
    model.train()
    return right / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16", "fp16"], default="auto")
    parser.add_argument("--processes", type=int, default=1, help="on this machine")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="samples in one update, over all processes")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches in one update")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="for checkpoints; a run goes on from the newest one there")
    args = parser.parse_args()

    Accelerator.launch(processes=args.processes)  # starts this script on each process; does nothing for one
    acc = Accelerator(
        mixed_precision=args.precision,
        gradient_accumulation_steps=args.accumulation,
        seed=args.seed,
        project_dir=ProjectConfiguration(args.folder, total_limit=2),
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        log_with="jsonl" if args.folder else "none",
    )
    training, test = load()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(training, batch_size=args.batch_size // args.accumulation, shuffle=True, drop_last=True)
    test_loader = DataLoader(test, batch_size=128)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, args.epochs * (TRAINING // args.batch_size))
    model, optimizer, loader, test_loader, scheduler = acc.prepare(model, optimizer, loader, test_loader, scheduler)
    acc.print(acc)

    if args.folder:
        acc.print(f"resumed from {acc.resume()}")

    seconds, batches, loss = 0.0, 0, float("nan")
    for _ in (bar := tqdm(acc.epochs(args.epochs), unit="epoch")):
        begin = time.perf_counter()
        losses, count = torch.zeros((), device=acc.device), 0
        for images, labels in loader:
            with acc.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                acc.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if acc.sync_gradients:
                acc.log({"loss": loss})  # of this process's part of the batch; waits for no device
            losses += loss.detach()
            count += 1
        batches += count
        loss = acc.mean(losses / max(count, 1)).item()  # a run may go on after the last batch of an epoch
        seconds += time.perf_counter() - begin
        acc.log({"accuracy": evaluate(acc, model, test_loader)})
        bar.set_postfix(loss=f"{loss:.4f}")
        if args.folder:
            acc.save_state()
    speed = batches * loader.total_batch_size / max(seconds, 1e-9)

    accuracy = evaluate(acc, model, test_loader)
    acc.print(f"precision      {acc.plan.precision.value} ({acc.plan.precision.reason})")
    acc.print(f"training loss  {loss:.7f}")
    acc.print(f"test accuracy  {accuracy:.2%} of {len(test)}")
    acc.print(f"speed          {speed:.0f} samples/s")
    acc.end_training()


if __name__ == "__main__":
    main()
