"""The ways to run each strategy that the tests of all strategies go through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Way:
    """One way to run a strategy.

    Attributes:
        sizes: numbers of processes.
        options: strategy_options.
        more: options beside these for one kind of model.
        adam: AdamW; else SGD with momentum.
        norms: whether gradient norms are those of one process, and gradients may be clipped by them.
    """

    strategy: str
    sizes: tuple[int, ...] = (2, 4)
    options: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    adam: bool = True
    norms: bool = True


# Model, accumulation and clip: any two values of them meet in some row; `test_matrix` has the whole product.
PAIRS = [
    ("mlp", 1, None),
    ("mlp", 3, 0.1),
    ("tied", 1, 0.1),
    ("tied", 3, None),
    ("idle", 1, None),
    ("idle", 3, 0.1),
]

# `test_matrix` sees to it that each strategy of the registry is here.
UNUSED = {
    "idle": {"find_unused_parameters": True}
}  # torch's reducer waits for every gradient, unless told otherwise
WAYS = {
    "single": Way("single", (1,)),
    "data_parallel": Way("data_parallel", (1,)),
    "ddp": Way("ddp", more=UNUSED),
    "zero1": Way("zero1", more=UNUSED),
    "fsdp": Way("fsdp"),
    "hsdp": Way("hsdp", (4,), {"shard_size": 2}),
    "tensor_parallel": Way("tensor_parallel"),
    "tensor_parallel in fsdp": Way("tensor_parallel", (4,), {"size": 2}),
    "pipeline": Way(
        "pipeline", more={"conv": {"microbatches": 1}}
    ),  # batch-norm sees a micro-batch at a time
    "pipeline 1f1b": Way(
        "pipeline", (2,), {"schedule": "1f1b", "microbatches": 4}, {"conv": {"microbatches": 1}}
    ),
    # Averaged after each step, SGD's parameters and momenta are those of averaged gradients; norms are each rank's own.
    "local_sgd": Way("local_sgd", options={"every": 1}, adam=False, norms=False),
}
