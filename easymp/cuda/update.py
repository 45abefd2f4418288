"""The fourth launch: every element is read once, moved by its rule, and written once, with all that follows from it.

What follows: the exponential moving average of the weights, and the low-precision copy that the model computes with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .kernel import Kernel
from .prepare import MOST
from .rules.rule import Rule, Survey
from .streams import Role, stream

GRADIENT, PARAMETER, AVERAGE, COPY = "g", "p", "ema", "low"


def roles_of(states: Sequence[str], average: bool, copy: bool, moves: bool = True) -> tuple[Role, ...]:
    """Of a row, in its order; the gradient comes first, for `measure` reads the same table. `moves`: the states are written."""
    roles = [Role(GRADIENT), Role(PARAMETER, writes=True), *(Role(s, writes=moves) for s in states)]
    if average:
        roles.append(Role(AVERAGE, writes=True))
    if copy:
        roles.append(Role(COPY, reads=False, writes=True))
    return tuple(roles)


def update(
    rule: Rule, states: tuple[str, ...], dtypes: Mapping[str, torch.dtype], stochastic: bool = False
) -> Kernel:
    """The update of tensors with these `states`, and with an average and a copy where `dtypes` has them.

    Arguments beside `stream`'s: ``constants`` of `prepare`; ``factor`` and ``skip``, addresses of floats, or 0; ``follow``, the
    share (1 - decay) of a new weight in its average; and if `stochastic`, how bf16 parameters and states are rounded, its ``seed``.
    """
    roles = roles_of(states, AVERAGE in dtypes, COPY in dtypes, rule.survey is None or not rule.survey.moves)
    setup = f"{_setup(rule, stochastic)}\nconst float share = (float)follow; (void)share;"
    written = [PARAMETER, *(s for s in states if rule.survey is None or not rule.survey.moves)]
    element = _SCALED % rule.element(states) + _rounded(written, states, dtypes, stochastic)
    if AVERAGE in dtypes:
        element += f"\n{AVERAGE} += ({PARAMETER} - {AVERAGE}) * share;"
    if COPY in dtypes:
        element += f"\n{COPY} = {PARAMETER};"
    return stream(
        f"{rule.name}_stochastic" if stochastic else rule.name,
        roles,
        dtypes,
        element,
        arguments=("uint64 constants", "uint64 factor", "uint64 skip", "float64 follow", *_SEED * stochastic),
        setup=setup,
        when=_WHEN,
    )


def survey_of(
    rule: Rule,
    survey: Survey,
    states: tuple[str, ...],
    dtypes: Mapping[str, torch.dtype],
    stochastic: bool = False,
) -> Kernel:
    """The pass before: arguments beside `stream`'s are ``constants``, ``factor``, ``skip`` and ``seed``; the sums go to ``partials``."""
    roles = [*(Role(name) for name in survey.reads), *(Role(s, writes=True) for s in states if survey.moves)]
    return stream(
        f"survey_{rule.name}_stochastic" if stochastic else f"survey_{rule.name}",
        roles,
        dtypes,
        _SCALED % survey.element(states)
        + _rounded(states if survey.moves else (), states, dtypes, stochastic),
        arguments=("uint64 constants", "uint64 factor", "uint64 skip", *_SEED * stochastic),
        setup=_setup(rule, stochastic),
        when=_WHEN,
        sums={s: s for s in survey.sums},
    )


_WHEN = "!(skip && *at<const float>(skip) > 0.f)"
_SCALED = "{ const float raw = g; { const float g = raw * times; (void)g; %s } }"


_SEED = ("int64 seed",)


def _rounded(
    written: Sequence[str], states: Sequence[str], dtypes: Mapping[str, torch.dtype], stochastic: bool
) -> str:
    numbers = {name: i for i, name in enumerate((PARAMETER, *states))}
    low = [name for name in written if stochastic and dtypes[name] == torch.bfloat16]
    return "".join(f"\n{name} = rounded({name}, key, {numbers[name]}u, origin + e);" for name in low)


def _setup(rule: Rule, stochastic: bool) -> str:
    random = f"""
const u32 key = key_of((u64)seed, (u32)constant[{MOST - 1}], (u32)row[3]); (void)key;
const i64 origin = (i64)row[4]; (void)origin;"""
    return "\n".join(
        (
            f"const float* const constant = at<const float>(constants) + tensor * {MOST};",
            *(f"const float {c} = constant[{i}]; (void){c};" for i, c in enumerate(rule.constants)),
            "const float times = factor ? *at<const float>(factor) : 1.f;",
            random if stochastic else "",
        )
    )
