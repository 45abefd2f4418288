"""Loss of a language model's head: easymp's linear_cross_entropy, the plain pair and torch's; time, memory and error.

    python benchmarks/linear_cross_entropy.py            # one table for each precision; --keep writes them to
    benchmarks/results

Each contender computes the loss of the same tokens and the gradients of hidden states and weight. Time is the median of
rounds in which the contenders take turns. Memory is the peak of the process above what it held before the first call,
in a process of its own. The error is that of the gradients, relative to the plain pair in fp64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from easymp.nn import linear_cross_entropy

if __package__:
    from .report import forget_peak, hand_in, here, options, table
    from .report import peak as most
else:
    from report import forget_peak, hand_in, here, options, table  # type: ignore[no-redef]
    from report import peak as most  # type: ignore[no-redef]

SIZES = {"tiny": (256, 32, 500), "10M": (2048, 320, 8192), "124M": (2048, 768, 50304)}
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets)


def torchs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, targets, options=options)


CONTENDERS: dict[str, Loss] = {"plain pair": plain, "easymp": linear_cross_entropy}
if hasattr(F, "linear_cross_entropy"):
    CONTENDERS["torch's own, chunked"] = torchs


def made(size: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    tokens, width, words = SIZES[size]
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, width), torch.randn(words, width) * width**-0.5
    return (
        hidden.to(device).requires_grad_(),
        weight.to(device).requires_grad_(),
        torch.randint(words, (tokens,)).to(device),
    )


def gradients(loss: Loss, data: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    with torch.autocast(data[0].device.type, dtype, enabled=dtype is not None):
        value = loss(*data)
    return torch.autograd.grad(value, data[:2])


def peak(name: str, precision: str, size: str, device: torch.device) -> None:
    """What a process of its own prints: bytes above those before the first call."""
    data, small = made(size, device), made("tiny", device)
    gradients(CONTENDERS[name], small, PRECISIONS[precision])  # what torch keeps from its first product on
    before = forget_peak(device)
    kept = gradients(CONTENDERS[name], data, PRECISIONS[precision])
    print(json.dumps(most(device) - before), file=sys.stdout if kept else sys.stderr)


def error(got: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> float:
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(got, right))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=SIZES, default="10M")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    options(parser, "linear-cross-entropy")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.peak:
        peak(*arguments.peak, arguments.size, device)
        return
    data = made(arguments.size, device)
    double = tuple(t.detach().double().requires_grad_() for t in data[:2])
    right = gradients(plain, (*double, data[2]), None)
    tokens, width, words = SIZES[arguments.size]
    parts = [
        f"# The loss of a head\n\n{here()}\n\n{tokens:,} tokens, {width} features, {words:,} words, on {device.type}."
    ]
    for precision, dtype in PRECISIONS.items():
        taken: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for turn in range(arguments.rounds + 1):
            for name, loss in CONTENDERS.items():
                start = time.perf_counter()
                gradients(loss, data, dtype)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                taken[name] += [time.perf_counter() - start] if turn else []
        rows = []
        for name, loss in CONTENDERS.items():
            words_ = [
                sys.executable,
                "-W",
                "ignore",
                __file__,
                "--size",
                arguments.size,
                "--device",
                arguments.device,
            ]
            told = subprocess.run([*words_, "--peak", name, precision], capture_output=True, text=True, check=True)
            off = error(gradients(loss, data, dtype), right)
            rows.append(
                [
                    name,
                    f"{statistics.median(taken[name]) * 1e3:.1f}",
                    f"{json.loads(told.stdout) / 2**20:.1f}",
                    f"{off:.1e}",
                ]
            )
        parts.append(f"{precision}:\n\n{table(['', 'ms', 'peak, MiB', 'error of gradients'], rows)}")
    hand_in("\n\n".join(parts), arguments.out)


if __name__ == "__main__":
    main()
