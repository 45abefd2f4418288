"""A small GPT that learns to write Python from the standard library's source, character by character.

    python examples/char_gpt.py                     one process
    python examples/char_gpt.py --processes 2       two; the same batch, divided
    python examples/char_gpt.py --accumulation 4    the same batch, in four parts
    python examples/char_gpt.py --processes 2 --strategy fsdp    sharded; or zero1, tensor_parallel, pipeline ...
    python examples/char_gpt.py --profile           and a table of where the time of three updates went

Two optimizers: Muon for the matrices inside the blocks, AdamW for the rest, each with a scheduler. Windows end with
their file, so batches hold different numbers of characters; `backward(loss_sum, num_items=n)` gives every character the
same weight all the same, whatever the number of processes and of accumulation steps.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from easymp import Accelerator, DataLoaderConfiguration, tqdm
from easymp.strategies import STRATEGIES

WINDOW, WIDTH, HEADS, BLOCKS = 128, 128, 4, 3
SYMBOLS = 128  # ASCII; anything else becomes "?"
END = 0  # fills a file's last window; no text holds it


class Block(nn.Module):
    """Causal attention and a two-layer network, each added to what comes in: (batch, window, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.mix(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Symbols (batch, window) to logits of the next ones (batch, window, SYMBOLS); 0.62 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.out(self.norm(self.blocks(self.symbols(text) + self.places(places))))


def windows(files: Iterable[Path]) -> Tensor:
    """(number of windows, WINDOW + 1) symbols.

    Neighbours share one, the first to be guessed follows the first to be read.
    """
    rows = []
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace").encode("ascii", "replace")
        for start in range(0, len(text) - 1, WINDOW):
            rows.append(text[start : start + WINDOW + 1].ljust(WINDOW + 1, bytes([END])))
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(-1, WINDOW + 1)


def load() -> tuple[Tensor, Tensor]:
    """Windows for training and for validation, which are every twentieth file of the standard library's top folder."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return windows(f for i, f in enumerate(files) if i % 20), windows(files[::20])


def nats(model: nn.Module, text: Tensor) -> tuple[Tensor, Tensor]:
    """Of each window (batch, WINDOW + 1): the sum of -log p(symbol) over its symbols, and their number."""
    read, guess = text[:, :-1].long(), text[:, 1:].long()
    losses = F.cross_entropy(model(read).transpose(1, 2), guess, ignore_index=END, reduction="none")
    return losses.sum(1), (guess != END).sum(1)


@torch.no_grad()
def evaluate(acc: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Nats a character, over all processes, each window counted once."""
    model.eval()
    total = sum(acc.gather_for_metrics(torch.stack(nats(model, text), 1)).double().sum(0) for (text,) in loader)
    model.train()
    return (total[0] / total[1]).item()


def unigram(training: Tensor, validation: Tensor) -> float:
    """Nats a character of the best guess that knows how often each symbol occurs in training, and nothing else."""
    seen = torch.bincount(training.flatten(), minlength=SYMBOLS).double().add(1)
    seen[END] = 0
    text = validation[:, 1:].flatten().long()
    return -(seen / seen.sum()).log()[text[text != END]].mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16", "fp16"], default="auto")
    parser.add_argument("--strategy", choices=["auto", *STRATEGIES], default="auto", help="how the model is spread")
    parser.add_argument(
        "--options", type=json.loads, metavar="JSON", help="of the strategy, such as '{\"shard_size\": 2}'"
    )
    parser.add_argument("--processes", type=int, default=1, help="on this machine")
    parser.add_argument("--steps", type=int, default=300, help="updates")
    parser.add_argument("--batch-size", type=int, default=32, help="windows in one update, over all processes")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches in one update")
    parser.add_argument("--windows", type=int, help="of the validation text (all)")
    parser.add_argument("--profile", action="store_true", help="say where the time of the third to fifth update goes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    if not hasattr(torch.optim, "Muon"):
        raise SystemExit(
            f"this example needs torch 2.9 or newer, for torch.optim.Muon; this is torch {torch.__version__}"
        )
    Accelerator.launch(processes=args.processes)  # starts this script on each process; does nothing for one
    acc = Accelerator(
        mixed_precision=args.precision,
        strategy=args.strategy,
        strategy_options=args.options,
        gradient_accumulation_steps=args.accumulation,
        seed=args.seed,
        dataloader_config=DataLoaderConfiguration(
            split_batches=True
        ),  # a loader's batch is divided among the processes
    )
    training, validation = load()
    loader = DataLoader(TensorDataset(training), args.batch_size // args.accumulation, shuffle=True, drop_last=True)
    test_loader = DataLoader(TensorDataset(validation[: args.windows]), 64)
    model = GPT()
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01)
    adam = torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95))

    def rate(step: int) -> float:
        """Up in 20 updates, full until a third is done, then down to 0."""
        return min(1.0, (step + 1) / 20, max(0.0, 1 - step / args.steps) * 1.5)

    muon_rate, adam_rate = LambdaLR(muon, rate), LambdaLR(adam, rate)
    model, muon, adam, muon_rate, adam_rate, loader, test_loader = acc.prepare(
        model, muon, adam, muon_rate, adam_rate, loader, test_loader
    )
    acc.print(acc)

    begin, updates = time.perf_counter(), 0
    with (
        tqdm(total=args.steps, unit="update") as bar,
        acc.profile() if args.profile else nullcontext() as profile,
    ):
        while updates < args.steps:
            for (text,) in loader:
                with acc.accumulate(model):
                    losses, counts = nats(model, text)
                    acc.backward(losses.sum(), num_items=counts.sum())
                    acc.clip_grad_norm_(model.parameters(), 1.0)
                    for part in (muon, adam, muon_rate, adam_rate):
                        part.step()
                    muon.zero_grad()
                    adam.zero_grad()
                if acc.sync_gradients:
                    updates += 1
                    bar.update()
                    if updates % 20 == 0:
                        bar.set_postfix(nats=f"{acc.mean(losses.sum() / counts.sum(), counts.sum()).item():.3f}")
                    if updates == args.steps:
                        break
    speed = updates * args.batch_size / (time.perf_counter() - begin)

    if profile is not None:
        acc.print(profile.summary())
    loss = evaluate(acc, model, test_loader)
    acc.print(f"precision   {acc.plan.precision.value} ({acc.plan.precision.reason})")
    acc.print(
        f"validation  {loss:.3f} nats a character; by the frequency of characters alone "
        f"{unigram(training, validation):.3f}"
    )
    acc.print(f"speed       {speed:.0f} samples/s, {speed * WINDOW:.0f} characters/s")
    acc.end_training()


if __name__ == "__main__":
    main()
