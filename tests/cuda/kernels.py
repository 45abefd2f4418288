"""All kernels that easymp can make, for tests that look at each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch

from easymp.cuda.cupy_launcher import PROBE
from easymp.cuda.kernel import Kernel
from easymp.cuda.rule import CONCLUDE, TOTAL, Rule, Variant, prepare, squares, update
from easymp.optim.rules import ADAGRAD, ADAM, LION, SGD

ALL = (ADAM, SGD, ADAGRAD, LION)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
# Dtypes of gradient, parameter, states and low-precision copy; whether bf16 is rounded at random; whether there is an
# average.
COMBINATIONS: tuple[tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype | None, bool, bool], ...] = (
    (F32, F32, F32, None, False, False),
    (F32, F32, F32, None, False, True),
    (BF16, BF16, BF16, None, True, False),
    (F16, F16, F16, None, False, False),
    (BF16, F32, F32, BF16, False, True),
    (F16, F32, F32, F16, False, False),
    (BF16, F32, BF16, BF16, True, True),
    (BF16, BF16, F32, None, False, False),
)


def of_rule(rule: Rule, combinations: tuple = COMBINATIONS) -> Iterator[Kernel]:
    """What a step by `rule` takes, for each of `combinations` and each set of states that a group may have."""
    yield prepare(rule)
    sets = {rule.states, rule.states[:2]} if rule.name.endswith("adam") else {rule.states}
    if rule.name.endswith("sgd"):
        sets.add(())
    for gradient, parameter, state, low, stochastic, average in combinations:
        for states in sorted(sets):
            dtypes = {"raw": gradient, "p": parameter, **dict.fromkeys(states, state)}
            extra = {"ema": F32} if average else {}
            extra |= {} if low is None else {"low": low}
            yield update(rule, Variant(states, tuple({**dtypes, **extra}.items()), stochastic))


def beside_steps() -> Iterator[Kernel]:
    yield from (PROBE, TOTAL, CONCLUDE)
    yield from map(squares, DTYPES)


def every_kernel() -> list[Kernel]:
    return list(dict.fromkeys([*beside_steps(), *(kernel for rule in ALL for kernel in of_rule(rule))]))


def few_kernels() -> list[Kernel]:
    """One of each kind, those with most registers among them."""
    rule_kernels = [row for begin in (0, 6) for row in of_rule(ADAM, COMBINATIONS[begin : begin + 1])]
    return list(dict.fromkeys([TOTAL, squares(F16), *rule_kernels, *of_rule(SGD, ())]))


def vectors(kernel: Kernel) -> Mapping[str, int]:
    """How many words of 16 bytes the loop of `kernel` loads and stores, by its text."""
    sizes = {"float": 4, "bf16": 2, "fp16": 2}
    suffixes = {name: kind for kind, name in re.findall(r"(float|bf16|fp16)\* const (\w+)_at =", kernel.body)}
    return {
        line: sum(
            int(n) * sizes[suffixes[name]] // 16 for n, name in re.findall(rf"{call}<(\d+)>\((\w+)_at", kernel.body)
        )
        for line, call in (("ld", "get"), ("st", "put"))
    }
