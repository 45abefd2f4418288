"""A small residual network on images of discs, squares and crosses, which are drawn on the spot.

python examples/shapes.py                              one process
easymp launch --processes 2 examples/shapes.py         two
python examples/shapes.py --folder runs/shapes         logs its loss, and saves its weights there
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from easymp import Accelerator, Settings

SIZE = 16


def draw(count: int, seed: int) -> TensorDataset:
    """(count, 3, SIZE, SIZE) images with one shape of a random colour and place in noise, and the shapes' numbers."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    centers = torch.randint(5, SIZE - 5, (2, count, 1, 1), generator=generator)
    rows, columns = (torch.arange(SIZE).view(shape) - center for shape, center in zip([(-1, 1), (1, -1)], centers))
    disc, square = rows**2 + columns**2 <= 16, (rows.abs() <= 3) & (columns.abs() <= 3)
    cross = (rows.abs() <= 4) & (columns.abs() <= 1) | (rows.abs() <= 1) & (columns.abs() <= 4)
    shapes = torch.stack([disc, square, cross])[labels, torch.arange(count)].unsqueeze(1)
    colours = 0.5 + torch.rand(count, 3, 1, 1, generator=generator)
    return TensorDataset(shapes * colours + 0.2 * torch.randn(count, 3, SIZE, SIZE, generator=generator), labels)


class Block(nn.Module):
    """Two convolutions with batch-norm, and the way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *(nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()),
            *(nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)),
        )
        self.around = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.around(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", help="for the log and the weights")
    args = parser.parse_args()

    acc = Accelerator(
        seed=0,
        project_dir=args.folder,
        log_with="jsonl" if args.folder else "none",
        settings=Settings(convert_sync_batchnorm=True),
    )
    layers = [nn.Conv2d(3, 16, 3, padding=1), Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = acc.prepare(DataLoader(draw(1280, seed=1), batch_size=32, shuffle=True))
    test_loader = acc.prepare(DataLoader(draw(320, seed=2), batch_size=64))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, acc.total_updates(loader, args.epochs))
    model, optimizer, scheduler = acc.prepare(model, optimizer, scheduler)
    acc.print(acc)

    for epoch in acc.epochs(args.epochs):
        model.train()
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            acc.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            acc.log({"loss": loss})
        model.eval()
        with torch.no_grad():
            right = [acc.gather_for_metrics(model(images).argmax(1) == labels) for images, labels in test_loader]
        accuracy = torch.cat(right).float().mean().item()
        acc.log({"accuracy": accuracy})
        acc.print(f"epoch {epoch}: test accuracy {accuracy:.1%}")
    if args.folder:
        acc.save_model(model, f"{args.folder}/weights")
    acc.end_training()


if __name__ == "__main__":
    main()
