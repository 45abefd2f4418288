"""The words of `tests/test_pairs.py`, one run by each row of them, and the same training as a plain loop of torch."""

from __future__ import annotations

import collections
import copy
import gc
import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from allpairspy import AllPairs
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from easymp import (
    CompileOptions,
    DataLoaderConfiguration,
    GradScalerKwargs,
    Part,
    SpikeGuard,
    conflicts,
)
from easymp.optim import LAMB, Lion, Muon
from easymp.protocols import SMALL_EPS, UNROUNDED
from easymp.training.state import OPEN_RUNS, accelerators

from .words import make_accelerator

Row = Mapping[str, str]
Axes = Mapping[str, tuple[str, ...]]
WIDTH, BATCH, MICRO = 16, 12, 6  # the model's, samples in a micro-batch of all ranks, micro-batches in a run
HALFWAY, POISONED = 2, 4  # micro-batches before the save, and before the loss that is not finite
PARALLEL = ("ddp", "zero1", "fsdp", "hsdp", "tensor_parallel", "pipeline", "local_sgd")
RANKS = {"single": 1, "data_parallel": 1, "hsdp": 4}  # others: 2

# Axes, and the words of each; the first one is what a script has that says nothing.
AXES: Axes = {
    "strategy": ("single", "data_parallel", *PARALLEL),
    "precision": ("fp32", "bf16", "fp16", "bf16-true", "bf16-true, rounded", "fp16-true", "O1", "O2", "O3"),
    "parameters": ("dense", "frozen", "shared", "sparse", "batchnorm"),
    "optimizer": ("sgd", "adamw", "lion", "muon", "lamb", "own"),
    "data": ("even", "uneven", "iterable", "dispatched", "joined"),
    "call": ("forward", "forward_methods", "forward_backward", "create_graph"),
    "clip": ("no clip", "clip_grad_norm_", "clip_grad_value_", "torch's clip"),
    "checkpoint": ("no checkpoint", "load", "asynchronous save", "other layout"),
    "recomputation": ("all kept", "blocks", "attention", "pattern", "size"),
    "window": ("one micro-batch", "accumulation", "token weights", "no_sync"),
    "models": ("one model", "two models", "group added later"),
    "nonfinite": ("default answer", "skip", "raise", "warn"),
    "part": ("no part", "guard", "own part"),
    "compile": ("eager", "compiled model", "compiled blocks"),
    "step": ("plain step", "closure"),
    "in backward": ("step after backward", "optimizer_in_backward"),
    "average": ("no average", "ema_decay"),
    "states": ("fp32 states", "stochastic_rounding"),
    "schedule": ("constant", "schedule"),
    "replicas": ("replicas compared", "replicas trusted"),
    "engine": ("fused", "unfused"),
    "replay": ("no replay", "replay"),
    "determinism": ("any algorithm", "deterministic"),
}
# Axes beside which all is in fp32 and by SGD: steps of Adam, Lion and Muon hide a wrong factor of all gradients, and
# half precision a small error.
EXACT = ("strategy", "parameters", "data", "call", "clip", "recomputation", "window", "models", "step", "in backward")
EXACT_AXES: Axes = {axis: words if axis in EXACT else words[:1] for axis, words in AXES.items()}
SLOW_AXES = ("compile", "checkpoint", "recomputation")
WORDS = [word for words in AXES.values() for word in words]
PLAIN: Row = {axis: words[0] for axis, words in AXES.items()}

# Words of the table of conflicts, by words of the axes; others are the same.
TABLE_WORDS: dict[str, tuple[str, ...]] = {
    "create_graph": ("create_graph=True",),
    "clip_grad_norm_": ("clip_grad_norm_()",),
    "clip_grad_value_": ("clip_grad_value_()",),
    "torch's clip": ("change of gradients", "a clip by torch"),
    "closure": ("step(closure)",),
    "two models": ("a second backward() in one micro-step", "several models"),
    "fp16": ("fp16", "a loss scale"),
    "O1": ("O1", "a loss scale"),
    "O2": ("O2", "a loss scale", "fp32 masters"),
    "fp16-true": ("fp16-true", "a loss scale", "fp32 masters"),
    "bf16-true": ("bf16-true", "fp32 masters", UNROUNDED),
    "accumulation": ("gradient_accumulation_steps",),
    "token weights": ("gradient_accumulation_steps", "backward(num_items=...)"),
    "no_sync": ("no_sync()",),
    "joined": ("join_uneven_inputs()",),
    "skip": ("nonfinite=skip",),
    "raise": ("nonfinite=raise",),
    "warn": ("nonfinite=warn",),
    "blocks": ("activation_checkpointing", "activation_checkpointing=blocks"),
    "attention": ("activation_checkpointing", "activation_checkpointing=attention"),
    "pattern": ("activation_checkpointing",),
    "size": ("activation_checkpointing", "activation_checkpointing by size"),
    "batchnorm": ("convert_sync_batchnorm",),
    "sparse": ("sparse gradients",),
    "adamw": (SMALL_EPS,),
    "muon": ("an optimizer without stochastic rounding", "Muon"),
    "own": ("an optimizer without stochastic rounding",),
    "lamb": ("LAMB",),
    "bf16-true, rounded": ("bf16-true", "stochastic_rounding"),
}


def table_words(words: Sequence[str]) -> set[str]:
    return {name for word in words for name in TABLE_WORDS.get(word, (word,))}


# -- the rows


@cache
def refusals() -> dict[frozenset[str], conflicts.Conflict]:
    """The pairs of words of the axes that the table refuses."""
    found, table = {}, conflicts.table()
    for one, other in itertools.combinations(WORDS, 2):
        conflict = conflicts.find(table_words([one, other]), table)
        if conflict is not None:
            found[frozenset((one, other))] = conflict
    return found


@cache
def excluded() -> dict[str, frozenset[str]]:
    """By word the words that are in no row with it: refused with them, or without a meaning in the plain loop."""
    # Of models that are trained apart, a batch-norm over all of them has no meaning in a plain loop.
    pairs = [
        *refusals(),
        frozenset(("local_sgd", "batchnorm")),
        # These are "bf16-true, rounded".
        frozenset(("bf16-true", "stochastic_rounding")),
        # Of several ranks only those of ddp join, which steps in no backward.
        frozenset(("optimizer_in_backward", "joined")),
        # Refused where ranks share Muon's step, and where a window sums gradients, but not else.
        frozenset(("optimizer_in_backward", "muon")),
        frozenset(("sparse", "bf16-true, rounded")),
        # torch fails itself: its clip takes neither sparse gradients nor DTensors beside tensors, some of its
        # optimizers no sparse ones, its compiler no function mode, by which O1 casts on CPUs.
        *(frozenset(("torch's clip", other)) for other in ("tensor_parallel", "sparse")),
        *(frozenset(("sparse", other)) for other in ("adamw", "muon", "O3")),
        *(frozenset(("O1", other)) for other in ("compiled model", "compiled blocks")),
    ]
    return {word: frozenset().union(*(pair - {word} for pair in pairs if word in pair)) for word in WORDS}


def is_possible(words: Sequence[str]) -> bool:
    """Whether the last of these words goes together with the others."""
    return not words or excluded()[words[-1]].isdisjoint(words)


def possible_pairs(axes: Axes = AXES) -> set[frozenset[str]]:
    pairs_of_axes = itertools.combinations(axes.values(), 2)
    return {frozenset(pair) for a, b in pairs_of_axes for pair in itertools.product(a, b) if is_possible(pair)}


@cache
def rows() -> list[Row]:
    return covering_array(AXES)


@cache
def exact_rows() -> list[Row]:
    return covering_array(EXACT_AXES)


def covering_array(axes: Axes) -> list[Row]:
    """Each possible pair of words of these axes is in a row."""
    found = [
        dict(zip(axes, words)) for words in AllPairs([list(words) for words in axes.values()], filter_func=is_possible)
    ]
    missing = possible_pairs(axes) - {pair for row in found for pair in pairs_of(row)}
    while missing:  # allpairspy ends where it cannot go on without one that is refused
        found.append(row_with(min(missing, key=sorted), missing, axes))
        missing -= set(pairs_of(found[-1]))
    make_quick(found)
    return found


def make_quick(covering_rows: list[dict[str, str]]) -> None:
    """Give rows the first words of the axes that take time, where other rows have the pairs of their words."""
    rows_by_pair = collections.Counter(pair for row in covering_rows for pair in pairs_of(row))
    for axis, row in itertools.product(SLOW_AXES, covering_rows):
        quick_row = {**row, axis: AXES[axis][0]}
        lost = set(pairs_of(row)) - set(pairs_of(quick_row))
        words = [word for name, word in row.items() if name != axis]
        if all(rows_by_pair[pair] > 1 for pair in lost) and is_possible([*words, quick_row[axis]]):
            rows_by_pair.subtract(lost)
            rows_by_pair.update(set(pairs_of(quick_row)) - set(pairs_of(row)))
            row.update(quick_row)


def row_of(words: Sequence[str]) -> Row:
    """The plain row with these words; of joined ranks, under ddp."""
    row = {axis: next((word for word in words if word in choices), choices[0]) for axis, choices in AXES.items()}
    if row["data"] == "joined" and row["strategy"] == "single":
        row["strategy"] = "ddp"
    return row


def row_with(pair: frozenset[str], missing: set[frozenset[str]], axes: Axes) -> Row:
    """A row with `pair` and many of the `missing` pairs, word by word; first words of axes go with all others."""
    row = {axis: word for axis, words in axes.items() for word in words if word in pair}
    for axis, words in axes.items():
        if axis not in row:
            possible = [word for word in words if is_possible([*row.values(), word])]
            row[axis] = max(possible, key=lambda word: sum(frozenset((word, w)) in missing for w in row.values()))
    return {axis: row[axis] for axis in axes}


def pairs_of(row: Row) -> Iterator[frozenset[str]]:
    return map(frozenset, itertools.combinations(row.values(), 2))


# -- the training


class Block(nn.Module):
    """Attention and two layers. torch's fused attention has no second derivative on CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        scores = torch.softmax(self.query(y) @ y.transpose(1, 2) / WIDTH**0.5, -1)
        return x + self.think(x + scores @ self.value(y))


class Digits(nn.Module):
    """Classifies the digits by a small transformer, of the rows of an image or of some of its pixels."""

    def __init__(self, parameters: str) -> None:
        super().__init__()
        self.of_pixels = parameters in ("shared", "sparse")
        if self.of_pixels:
            self.stem: nn.Module = nn.Embedding(17, WIDTH, sparse=parameters == "sparse")
        else:
            self.stem = nn.Linear(8, WIDTH)
        self.norm = nn.BatchNorm1d(8) if parameters == "batchnorm" else nn.Identity()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 17, bias=False)
        if parameters == "shared":
            self.head.weight = self.stem.weight
        if parameters == "frozen":
            self.stem.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.of_pixels:
            h = self.stem((x[:, ::5] * 16).round().long()) * x.mean(1)[:, None, None]
        else:
            h = self.norm(self.stem(x.view(-1, 8, 8)))
        for block in self.blocks:
            h = block(h)
        return self.head(h).mean(1)[:, :10]

    def score(self, x: Tensor) -> Tensor:
        return self(x)


class OwnOptimizer(torch.optim.Optimizer):
    """A user's: momentum, written for one parameter after the other."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    velocity = state.setdefault("velocity", torch.zeros_like(parameter))
                    velocity.mul_(0.5).add_(parameter.grad)
                    parameter.sub_(group["lr"] * velocity)
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.003, eps=1e-5),
    "lion": lambda params: Lion(params, lr=0.001),
    "muon": lambda params: Muon(params, lr=0.01, adamw_lr=0.003),
    "lamb": lambda params: LAMB(params, lr=0.01),
    "own": OwnOptimizer,
}


class Counter(Part):
    """A user's part: counts updates, and is saved with them."""

    name = "counter"
    updates = 0

    def stepped(self, optimizer: Any) -> None:
        self.updates += 1

    def state(self) -> dict[str, int]:
        return {"updates": self.updates}

    def load(self, state: Mapping[str, int]) -> None:
        self.updates = state["updates"]


@cache
def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float().div(16), torch.from_numpy(labels)


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, samples: TensorDataset) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples[i] for i in range(len(self.samples)))


def dataset(data: str) -> Any:
    """Samples and their numbers; uneven ones end in a short batch, joined ones with the rank that has more."""
    number = MICRO * BATCH - {"uneven": 5, "joined": BATCH // 2}.get(data, 0)
    samples = TensorDataset(*(values[:number] for values in digits()), torch.arange(number))
    return Stream(samples) if data == "iterable" else samples


def build(row: Row, seed: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [Digits(row["parameters"]) for _ in range(2 if row["models"] == "two models" else 1)]


def build_optimizer(row: Row, model: nn.Module, later: bool = False) -> torch.optim.Optimizer:
    """The optimizer of a model, at first without the last block, where that is added later."""
    named = dict(model.named_parameters())
    if row["models"] == "group added later" and not later:
        named = {name: p for name, p in named.items() if not name.startswith("blocks.1")}
    if row["optimizer"] == "muon":
        return OPTIMIZERS["muon"](named.items())
    return OPTIMIZERS[row["optimizer"]](list(named.values()))


def stepped(row: Row, model: nn.Module, later: bool) -> list[Tensor]:
    """The parameters that the optimizer of `model` steps."""
    if row["models"] != "group added later":
        return list(model.parameters())
    takes = {id(p) for _, p in late_named(row, model)} if later else set()
    return [p for name, p in model.named_parameters() if not name.startswith("blocks.1") or id(p) in takes]


def late_named(row: Row, model: Any) -> list[tuple[str, Tensor]]:
    """What is added later: the last block, of which Muon takes the matrices."""
    return [(name, p) for name, p in model.blocks[1].named_parameters() if p.ndim == 2 or row["optimizer"] != "muon"]


def late_group(row: Row, model: Any) -> dict[str, Any]:
    named = late_named(row, model)
    return {"params": named, "use_muon": True} if row["optimizer"] == "muon" else {"params": [p for _, p in named]}


def weighted_loss(row: Row, y: Tensor) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor | None]:
    """The loss function of a micro-batch, and its number of items, where it is a sum over these."""
    if row["window"] == "token weights":
        return (lambda out, y: F.cross_entropy(out.float(), y, ignore_index=3, reduction="sum")), (y != 3).sum()
    return (lambda out, y: F.cross_entropy(out.float(), y)), None


def penalty_of(out: Tensor, x: Tensor, scale: float = 1.0) -> Tensor:
    (slope,) = torch.autograd.grad(out.float().square().mean(), x, create_graph=True)
    return scale * slope.square().sum(1).mean()


def clip_by_torch(row: Row, parameters: Any) -> None:
    if row["clip"] == "clip_grad_value_":
        torch.nn.utils.clip_grad_value_(parameters, 0.02)
    elif row["clip"] != "no clip":
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)


class Result(NamedTuple):
    """What a rank comes to: losses and numbers of samples by micro-batch, and weights at the end, by model."""

    losses: list[list[float]]
    samples: list[list[int]]
    weights: list[dict[str, Tensor]] | None  # of rank 0
    averages: list[dict[str, Tensor]] | None
    data_ranks: list[int]  # the slice of the data that each micro-batch was of
    updates: int


def accelerator_of(row: Row, strategy: str, folder: str) -> Any:
    options: dict[str, Any] = {"hsdp": {"shard_size": 2}, "local_sgd": {"every": 1}}.get(strategy, {})
    if strategy == "pipeline" and row["parameters"] == "batchnorm":
        options = {"microbatches": 1}  # batch-norm sees one at a time
    compiled = {"compiled model": "model", "compiled blocks": "blocks"}.get(row["compile"])
    recomputed = {"blocks": "blocks", "attention": "attention", "pattern": "*.think", "size": "1MiB"}
    return make_accelerator(
        cpu=True,
        strategy=strategy,
        strategy_options=options or None,
        mixed_precision=row["precision"].removesuffix(", rounded"),
        gradient_accumulation_steps=2 if row["window"] in ("accumulation", "token weights") else 1,
        dataloader_config=DataLoaderConfiguration(
            dispatch_batches=row["data"] == "dispatched" or None, even_batches=row["data"] != "joined"
        ),
        activation_checkpointing=recomputed.get(row["recomputation"]),
        compile=CompileOptions(compiled, backend="eager") if compiled else None,
        seed=0,
        deterministic=row["determinism"] == "deterministic",
        ema_decay=0.7 if row["average"] == "ema_decay" else None,
        nonfinite=row["nonfinite"] if row["nonfinite"] in ("skip", "raise", "warn") else None,
        project_dir=folder,
        log_with="none",
        save_on_signal=False,
        parts={"guard": [SpikeGuard(each_optimizer=row["models"] == "two models")], "own part": [Counter()]}.get(
            row["part"], []
        ),
        fused=row["engine"] == "fused",
        optimizer_in_backward=row["in backward"] == "optimizer_in_backward",
        stochastic_rounding="stochastic_rounding" in row["states"] or "rounded" in row["precision"],
        convert_sync_batchnorm=row["parameters"] == "batchnorm",
        replica_check=1 if row["replicas"] == "replicas compared" else 0,
        replay=2 if row["replay"] == "replay" else 0,
        scaler_options=GradScalerKwargs(init_scale=1024.0),
        timeout=30,
    )


class Training:
    """A run of a row under a strategy, from one micro-batch to another."""

    def __init__(self, row: Row, strategy: str, folder: str, seed: int, later: bool) -> None:
        self.row, self.later = row, later
        self.acc = accelerator_of(row, strategy, folder)
        self.losses: list[list[float]] = []
        self.samples: list[list[int]] = []
        spread = self.acc._prepared.strategy
        loader = DataLoader(dataset(row["data"]), batch_size=BATCH // spread.data_size)
        models = build(row, seed)
        optimizers = [build_optimizer(row, model) for model in models]
        schedulers = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.5, 6) for o in optimizers]
        methods = ("score",) if row["call"] == "forward_methods" else ()
        prepared = self.acc.prepare(*models, *optimizers, *schedulers, loader, forward_methods=methods)
        number = len(models)
        self.models, self.optimizers = prepared[:number], prepared[number : 2 * number]
        self.schedulers, self.loader = prepared[2 * number : 3 * number], prepared[-1]
        if later:
            self.add_groups()

    def add_groups(self) -> None:
        if self.row["models"] == "group added later":
            for model, optimizer in zip(self.models, self.optimizers):
                optimizer.add_param_group(late_group(self.row, model))

    def fit(self, begin: int, end: int, save: Callable[[], object] = lambda: None) -> None:
        row, acc = self.row, self.acc
        by_two = row["window"] != "one micro-batch"
        with ExitStack() as stack:
            if row["data"] == "joined":
                stack.enter_context(acc.join_uneven_inputs(self.models))
            for micro, batch in enumerate(self.loader, begin):
                last = not by_two or micro % 2 == 1
                self.micro_step(micro, batch, last)
                if last and not self.later and micro + 1 >= HALFWAY:
                    self.later = True
                    self.add_groups()
                    for optimizer in self.optimizers:
                        optimizer.zero_grad()
                    for model in self.models:
                        model.zero_grad()
                if micro + 1 == end:
                    save()  # inside the pass, so that it continues here
                    break

    def micro_step(self, micro: int, batch: Any, last: bool) -> None:
        row, acc = self.row, self.acc
        x, y, numbers = batch
        self.samples.append(numbers.tolist())
        self.losses.append([])
        by_hand = row["window"] == "no_sync"
        context: Any = acc.accumulate(*self.models)
        if by_hand:
            context = nullcontext() if last else acc.no_sync()
        with context:
            for model, optimizer, scheduler in zip(self.models, self.optimizers, self.schedulers):
                self.update(micro, model, optimizer, scheduler, (x, y), last, by_hand)

    def update(
        self, micro: int, model: Any, optimizer: Any, scheduler: Any, batch: Any, last: bool, by_hand: bool
    ) -> None:
        row, acc = self.row, self.acc

        def evaluate() -> Tensor:
            x, y = batch
            loss_fn, items = weighted_loss(row, y)
            factor = 0.5 if by_hand else 1.0
            spread = acc._prepared.strategy
            if row["nonfinite"] == "skip" and micro == POISONED and spread.data_rank == 0:
                factor = float("nan")
            if row["call"] == "forward_backward":
                loss = acc.forward_backward(
                    model, lambda out, y: factor * loss_fn(out, y), x, target=y, num_items=items
                )
            else:
                doubly = row["call"] == "create_graph" and row["strategy"] == "pipeline"
                x = x.detach().requires_grad_(row["call"] == "create_graph" and not doubly)
                out = model.score(x) if row["call"] == "forward_methods" else model(x)
                loss = loss_fn(out, y)
                if x.requires_grad:
                    loss = loss + penalty_of(out, x, 1.0 if items is None else len(y))
                loss = factor * loss
                acc.backward(loss, num_items=items, create_graph=doubly)
            self.losses[-1].append(loss.item())
            parameters = stepped(row, model, self.later)
            if by_hand and not last:
                return loss
            if row["clip"] == "clip_grad_norm_":
                acc.clip_grad_norm_(parameters, 0.5)
            elif row["clip"] == "clip_grad_value_":
                acc.clip_grad_value_(parameters, 0.02)
            elif row["clip"] == "torch's clip" and last:
                acc.unscale_gradients(optimizer)
                clip_by_torch(row, parameters)
            return loss

        if row["step"] == "closure" and last:
            optimizer.step(evaluate)
        else:
            evaluate()
            if last or not by_hand:
                optimizer.step()
        if last or not by_hand:
            if row["schedule"] == "schedule":
                scheduler.step()
            optimizer.zero_grad()

    def result(self) -> Result:
        acc, averages = self.acc, None
        acc.wait_for_everyone()
        weights = [dict(acc.weights(model)) for model in self.models]
        if self.row["average"] == "ema_decay":
            with acc.averaged():
                averages = copies([dict(acc.weights(model)) for model in self.models])
        is_main = acc.is_main_process
        return Result(
            self.losses,
            self.samples,
            copies(weights) if is_main else None,
            averages if is_main else None,
            [acc._prepared.strategy.data_rank] * len(self.losses),
            acc.updates,
        )


def copies(weights: Any) -> list[dict[str, Tensor]]:
    return [{name: value.detach().float().clone() for name, value in model.items()} for model in weights]


def train(row: Row, strategy: str, folder: str) -> Result:
    """One run of a row, which may be saved and loaded halfway."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    if row["checkpoint"] == "no checkpoint":
        training = Training(row, strategy, folder, 1, False)
        with training.acc:
            training.fit(0, MICRO)
            return training.result()
    first = strategy
    if row["checkpoint"] == "other layout":
        first = other_layout(row, strategy)
    begun = Training(row, first, folder, 1, False)
    with begun.acc:
        begun.fit(
            0, HALFWAY, lambda: begun.acc.save_state(f"{folder}/state", async_=row["checkpoint"] == "asynchronous save")
        )
    training = Training(row, strategy, folder, 2, True)
    with training.acc:
        training.acc.load_state(f"{folder}/state")
        training.fit(HALFWAY, MICRO)
        result = training.result()
    return result._replace(
        losses=begun.losses + result.losses,
        samples=begun.samples + result.samples,
        data_ranks=[begun.acc._prepared.strategy.data_rank] * len(begun.losses) + result.data_ranks,
    )


def other_layout(row: Row, strategy: str) -> str:
    """A strategy that saves what this one loads."""
    for other in ("fsdp", "ddp", "zero1") if RANKS.get(strategy, 2) > 1 else ("single", "data_parallel"):
        if other != strategy and is_possible([*(word for axis, word in row.items() if axis != "strategy"), other]):
            return other
    return strategy


def close_all() -> None:
    """Close what a run that failed has left open."""
    for accelerator in list(accelerators()):
        accelerator.close()
    gc.collect()
    while OPEN_RUNS:
        _, run = OPEN_RUNS.popitem()
        run.world.close()


def outcomes(batch: Sequence[tuple[int, Row, str]], folder: str) -> list[Result | str]:
    """Each run of a batch: what it comes to, or how it failed."""
    results: list[Result | str] = []
    for number, row, strategy in batch:
        # Rank 0 has also compiled for runs of one process; above torch's limit of recompilations it would run eagerly,
        # and order the collectives of a backward otherwise than ranks that run compiled code.
        torch.compiler.reset()
        try:
            results.append(train(row, strategy, f"{folder}/{number}-{strategy}"))
        except Exception:
            results.append(traceback.format_exc(limit=-4))
            close_all()
    return results


# -- the plain loop


def plain(row: Row, strategy: str, samples: Sequence[Sequence[Sequence[int]]]) -> Result:
    """The same training in fp32, as a loop of torch, with what the ranks have read: numbers by micro-batch and rank.

    Ranks that train alone are as many models, averaged after each update; before a checkpoint of another strategy, one.
    """
    begin_apart = len(samples)
    if strategy == "local_sgd":
        begin_apart = HALFWAY if row["checkpoint"] == "other layout" and other_layout(row, strategy) != strategy else 0
    replicas = [PlainReplica(row)]
    losses: list[list[float]] = []
    for micro, ranks in enumerate(samples):
        if micro == begin_apart:
            replicas = [copy.deepcopy(replicas[0]) for _ in ranks]
        if micro >= begin_apart:
            losses.append(
                [loss for replica, rank in zip(replicas, ranks) for loss in replica.micro_step(micro, [rank], ranks)]
            )
            if replicas[0].ended:
                average([replica.models for replica in replicas])
        else:
            losses.append(replicas[0].micro_step(micro, ranks, ranks))
    first = replicas[0]
    weights = copies([model.state_dict() for model in first.models])
    return Result(losses, [], weights, first.averages, [], first.updates)


@torch.no_grad()
def average(replicas: list[list[nn.Module]]) -> None:
    for models in zip(*replicas):
        for values in zip(*(model.parameters() for model in models)):
            mean = torch.stack(list(values)).mean(0)
            for value in values:
                value.copy_(mean)


class PlainReplica:
    def __init__(self, row: Row) -> None:
        self.row = row
        self.models = build(row, 1)
        self.optimizers = [build_optimizer(row, model) for model in self.models]
        self.schedulers = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.5, 6) for o in self.optimizers]
        self.averages = copies([dict(model.named_parameters()) for model in self.models])
        self.updates, self.later, self.ended = 0, False, False
        self.window: list[list[Any]] = []
        self.items = 0.0

    def micro_step(self, micro: int, ranks: Sequence[Sequence[int]], all_ranks: Sequence[Sequence[int]]) -> list[float]:
        """Losses by rank (of the first model). Items are counted over all ranks, also by those that train alone."""
        images, labels = digits()
        self.window.append([(images[list(rank)], labels[list(rank)]) for rank in ranks])
        items = sum(int((labels[list(rank)] != 3).sum()) for rank in all_ranks)
        self.items += items * len(ranks) / len(all_ranks)
        size = 2 if self.row["window"] != "one micro-batch" else 1
        self.ended = (micro + 1) % size == 0
        losses = []
        for model in self.models:
            losses.append([loss.item() for loss in self.rank_losses(model, self.window[-1])])
        if self.ended:
            poisoned = self.row["nonfinite"] == "skip" and POISONED // size == micro // size
            if not poisoned:
                self.update()
            self.window.clear()
            self.items = 0.0
            if micro + 1 >= HALFWAY and not self.later:
                self.later = True
                if self.row["models"] == "group added later":
                    for model, optimizer in zip(self.models, self.optimizers):
                        optimizer.add_param_group(late_group(self.row, model))
        return losses[0]

    def rank_losses(self, model: nn.Module, ranks: Sequence[Any]) -> list[Tensor]:
        inputs = [x.clone().requires_grad_(self.row["call"] == "create_graph") for x, _ in ranks]
        outputs = model(torch.cat(inputs)).split([len(x) for x in inputs])
        losses = []
        for x, out, (_, y) in zip(inputs, outputs, ranks):
            loss_fn, items = weighted_loss(self.row, y)
            losses.append(loss_fn(out, y))
            if x.requires_grad:
                losses[-1] = losses[-1] + penalty_of(out, x, 1.0 if items is None else len(y))
        return losses

    def update(self) -> None:
        for model, optimizer, scheduler, averages in zip(self.models, self.optimizers, self.schedulers, self.averages):
            model.zero_grad()
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            for ranks in self.window:
                total = torch.stack(self.rank_losses(model, ranks))
                if self.row["window"] == "token weights":
                    (total.sum() / self.items).backward()
                else:
                    (total.mean() / len(self.window)).backward()
            for name, buffer in model.named_buffers():  # batch-norm has seen these batches in micro_step
                buffer.copy_(buffers[name])
            for parameter in model.parameters():
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()  # torch's clips take no sparse ones
            clip_by_torch(self.row, stepped(self.row, model, self.later))
            optimizer.step()
            if self.row["schedule"] == "schedule":
                scheduler.step()
            for name, parameter in model.named_parameters():
                averages[name].lerp_(parameter.detach(), 0.3)
        self.updates += 1


# -- the comparison

# How far weights and losses may be from those in fp32: the weights' difference in units of the way that they went, and
# of the weights, which are rounded.
TOLERANCES = {
    "fp32": (2e-3, 0.0),
    "bf16": (0.15, 0.0),
    "fp16": (0.05, 0.0),
    "O1": (0.05, 0.0),
    "bf16-true": (0.25, 2**-8),
    "bf16-true, rounded": (0.3, 2**-6),
    "fp16-true": (0.1, 2**-10),
    "O2": (0.1, 2**-10),
    "O3": (0.4, 2**-8),
}
# Steps that depend on signs of small gradients, or are computed in bf16.
SIGNED = {"adamw": 3, "lion": 3, "muon": 4, "lamb": 3}


def runs_of(numbered_rows: Sequence[tuple[int, Row]]) -> dict[int, list[tuple[int, Row, str]]]:
    """Runs by number of processes: each row under its strategy, and on one process."""
    runs: dict[int, list[tuple[int, Row, str]]] = {1: [], 2: [], 4: []}
    for number, row in numbered_rows:
        size = RANKS.get(row["strategy"], 2)
        runs[size].append((number, row, row["strategy"]))
        if size > 1:
            runs[1].append((number, row, "single"))
    return runs


def by_data_rank(results: Sequence[Result], name: str) -> list[list[Any]]:
    """What each slice of the data gave, by micro-batch; ranks without a batch are left out."""
    length = max(len(result.samples) for result in results)
    by_micro: list[dict[int, Any]] = [{} for _ in range(length)]
    for result in results:
        for i, (data_rank, value) in enumerate(zip(result.data_ranks, getattr(result, name))):
            by_micro[i][data_rank] = value
    return [[by_rank[rank] for rank in sorted(by_rank)] for by_rank in by_micro]


def fault(row: Row, strategy: str, results: Sequence[Result | str]) -> str:
    """What is wrong with a run of all ranks, in words; "" where it is the plain loop."""
    errors = [result for result in results if isinstance(result, str)]
    if errors:
        return " | ".join(dict.fromkeys(errors))
    samples = by_data_rank(results, "samples")
    if not set(range(MICRO * BATCH - 6)) <= {number for ranks in samples for rank in ranks for number in rank}:
        return f"samples are left out: {samples}"
    reference = plain(row, strategy, samples)
    scale, rounding = TOLERANCES[row["precision"]]
    if row["states"] == "stochastic_rounding":
        scale = max(scale, 0.3)
    tolerance = scale * SIGNED.get(row["optimizer"], 1)
    losses = by_data_rank(results, "losses")
    for micro, (got, expected) in enumerate(zip(losses, reference.losses)):
        if row["nonfinite"] == "skip" and micro == POISONED:
            continue
        factor = 0.5 if row["window"] == "no_sync" else 1.0
        for rank, (loss, plain_loss) in enumerate(zip(got, expected)):
            if abs(loss[0] - factor * plain_loss) > scale * abs(plain_loss):
                expected_loss = factor * plain_loss
                return f"the loss of micro-batch {micro} on rank {rank} is {loss[0]}, of the plain loop {expected_loss}"
    if results[0].updates != reference.updates + (row["nonfinite"] == "skip"):
        return f"{results[0].updates} updates, the plain loop makes {reference.updates}"
    starts = copies([model.state_dict() for model in build(row, 1)])
    for name in ("weights", "averages"):
        found, expected = getattr(results[0], name), getattr(reference, name)
        if found is None:
            continue
        for one, other, start in zip(found, expected, starts):
            names = [n for n in one if n in other and start[n].is_floating_point()]
            if len(names) < len(start) - 3:
                return f"{name} are of {sorted(one)} only"
            allowed = tolerance * norm(other[n] - start[n] for n in names)
            allowed += rounding * norm(other[n] for n in names)
            distance = norm(one[n] - other[n] for n in names)
            if not distance <= allowed:
                return f"{name} are {distance:.3g} away from the plain loop's, {allowed:.3g} is allowed"
    return ""


def norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt())
