"""Models of the kinds that strategies find hard, and a training of them that any number of ranks can share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp import Accelerator
from easymp.base.dtensor import local

from ..words import make_accelerator

STEPS, BATCH, WIDTH, WORDS, LENGTH = 5, 24, 16, 19, 6


class Of(nn.Module):
    """A model of `parts`, whose forward is ``call(self, *inputs)``."""

    def __init__(self, call: Any, **parts: Any) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self, *args, **kwargs)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.think = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.think(x + self.attend(y, y, y, need_weights=False)[0])


class Tied(nn.Module):
    """A small transformer whose embedding is its last layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed((x.abs() * 100).long()[:, :LENGTH] % WORDS)
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean(1)[:, :5]


class Idle(nn.Module):
    """Frozen parameters, and others that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(12, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(12, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks[1](self.blocks[0](self.frozen(x))))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 5))


def conv() -> nn.Module:
    def stage(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())

    return nn.Sequential(nn.Unflatten(1, (1, 3, 4)), stage(1, 6), stage(6, 10), nn.Flatten(), nn.Linear(120, 5))


MODELS = {"mlp": mlp, "conv": conv, "tied": Tied, "idle": Idle}


def make(kind: str | Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[kind]() if isinstance(kind, str) else kind()


def whole(tensor: Tensor) -> Tensor:
    """The full values of a parameter, whatever its layout; a collective."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def under(
    strategy: str | None = None, options: Any = None, steps: int = 1, precision: str = "no", **settings: Any
) -> Accelerator:
    words = {"strategy": strategy, "strategy_options": options, "gradient_accumulation_steps": steps, **settings}
    return make_accelerator(mixed_precision=precision, **words)


def part(acc: Accelerator, batch: Tensor) -> Tensor:
    """This process's samples of a batch that all processes share."""
    return batch.chunk(acc.num_processes)[acc.process_index]


def message(error: Any, call: Any, *args: Any, **keywords: Any) -> str:
    """What the error says that `call` raises."""
    with pytest.raises(error) as caught:
        call(*args, **keywords)
    return str(caught.value)


def refuses(error: Any, pattern: str, call: Any, *args: Any, **keywords: Any) -> None:
    """`call` raises this error, which holds these words."""
    assert pattern in (error_text := message(error, call, *args, **keywords)), error_text


def mean_square(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


def train_step(acc: Accelerator, model: nn.Module, loss_fn: Any, x: Any, y: Any = None, **keywords: Any) -> Tensor:
    """Forward and backward as a script writes them, or by `forward_backward` where a pipeline's schedule needs it."""
    if getattr(acc._prepared.strategy.options, "schedule", "gpipe") != "gpipe":
        return acc.forward_backward(model, loss_fn, x, target=y, **keywords)
    loss = loss_fn(model(x)) if y is None else loss_fn(model(x), y)
    acc.backward(loss, **keywords)
    return loss.detach()


def update(acc: Accelerator, optimizer: Any, loss: Tensor) -> None:
    """One update, as a script writes it."""
    acc.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def adamw(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def classes(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, 12, generator=generator), torch.randint(0, 5, (BATCH,), generator=generator)


def train(
    acc: Accelerator, kind: Any, clip: float | None = None, optimizer: Any = adamw, draw: Any = classes
) -> dict[str, Any]:
    """`STEPS` updates, in which the ranks share each micro-batch.

    Losses, gradient norms and skipped steps, parameters, buffers.
    """
    model = make(kind)
    prepared: Any = optimizer(list(model.parameters()))
    schedule: Any = torch.optim.lr_scheduler.LinearLR(prepared, 1.0, 0.2, STEPS)
    model, prepared, schedule = acc.prepare(model, prepared, schedule)
    spread = acc._prepared.strategy
    generator = torch.Generator().manual_seed(7)
    losses, norms, skipped = [], [], []
    for _ in range(STEPS):
        total = torch.zeros(())
        for _ in range(acc.gradient_accumulation_steps):
            x, y = (t.chunk(spread.data_size)[spread.data_rank] for t in draw(generator))
            with acc.accumulate(model):
                total += train_step(acc, model, nn.functional.cross_entropy, x, y)
                norm = acc.clip_grad_norm_(model.parameters(), clip or 1e9)
                prepared.step()
                schedule.step()
                prepared.zero_grad()
        losses.append(float(acc.reduce(total, "mean")))
        norms.append(float(norm))
        skipped.append(acc.optimizer_step_was_skipped)
    states = [v for per in prepared.state.values() for v in per.values() if isinstance(v, Tensor) and v.ndim]
    return {
        "losses": losses,
        "norms": norms,
        "skipped": skipped,
        "parameters": {name: whole(p) for name, p in model.named_parameters()},
        "here": {name: local(p).detach().clone() for name, p in model.named_parameters()},
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "kinds": sorted({type(p).__name__ for p in model.parameters()}),
        "states": sorted({type(v).__name__ for v in states}),
        "lr": schedule.get_last_lr()[0],
    }


def trained(
    strategy: str,
    kind: str,
    steps: int,
    clip: float | None,
    precision: str = "no",
    options: Any = None,
    **settings: Any,
) -> dict[str, Any]:
    """`train` under a strategy."""
    with under(strategy, options, steps, precision, **settings) as acc:
        return train(acc, kind, clip)


@cache
def alone(kind: str, steps: int, clip: float | None) -> dict[str, Any]:
    """`train` on one process."""
    return trained("single", kind, steps, clip)


def agree(a: dict[str, Any], b: dict[str, Any], rel: float = 1e-5) -> None:
    assert a["losses"] == pytest.approx(b["losses"], rel=rel)
    assert a["norms"] == pytest.approx(b["norms"], rel=rel)
    assert (a["lr"], a["skipped"]) == (b["lr"], b["skipped"])
    assert a["parameters"].keys() == b["parameters"].keys()
