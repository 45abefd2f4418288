"""The ways to run each strategy that the tests of all strategies go through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from easymp.strategies import STRATEGIES


@dataclass(frozen=True)
class Way:
    """One way to run a strategy."""

    strategy: str
    sizes: tuple[int, ...] = (2, 4)  # numbers of processes
    options: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # beside these for one kind of model
    adam: bool = True  # else SGD with momentum
    norms: bool = True  # gradient norms are those of one process, and gradients may be clipped by them


# torch's reducer waits for every gradient, unless told otherwise.
UNUSED = {"idle": {"find_unused_parameters": True}}
ONE_BATCH = {"conv": {"microbatches": 1}}  # batch-norm sees a micro-batch at a time
# Ways of strategies that need more than the defaults; every other strategy of the registry has one way, its name.
SPECIAL = {
    "ddp": Way("ddp", more=UNUSED),
    "zero1": Way("zero1", more=UNUSED),
    "hsdp": Way("hsdp", (4,), {"shard_size": 2}),
    "tensor_parallel": Way("tensor_parallel"),
    "tensor_parallel in fsdp": Way("tensor_parallel", (4,), {"size": 2}),
    "pipeline": Way("pipeline", more=ONE_BATCH),
    "pipeline 1f1b": Way("pipeline", (2,), {"schedule": "1f1b", "microbatches": 4}, ONE_BATCH),
    # Averaged after each step, SGD's parameters and momenta are those of averaged gradients; norms are each rank's own.
    "local_sgd": Way("local_sgd", options={"every": 1}, adam=False, norms=False),
}
WAYS: dict[str, Way] = {}
for _name, _strategy in STRATEGIES.items():
    _default = {_name: Way(_name, (2, 4) if _strategy.several else (1,))}
    WAYS |= {label: way for label, way in SPECIAL.items() if way.strategy == _name} or _default
