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


def update(rule: Rule, states: tuple[str, ...], dtypes: Mapping[str, torch.dtype]) -> Kernel:
    """The update of tensors with these `states`, and with an average and a copy where `dtypes` has them.

    Arguments beside `stream`'s: ``constants`` of `prepare`; ``factor`` and ``skip``, addresses of floats, or 0; ``follow``, the
    share (1 - decay) of a new weight in its average.
    """
    roles = roles_of(states, AVERAGE in dtypes, COPY in dtypes, rule.survey is None or not rule.survey.moves)
    setup = f"{_setup(rule)}\nconst float share = (float)follow; (void)share;"
    element = _SCALED % rule.element(states)
    if AVERAGE in dtypes:
        element += f"\n{AVERAGE} += ({PARAMETER} - {AVERAGE}) * share;"
    if COPY in dtypes:
        element += f"\n{COPY} = {PARAMETER};"
    return stream(
        rule.name,
        roles,
        dtypes,
        element,
        arguments=("uint64 constants", "uint64 factor", "uint64 skip", "float64 follow"),
        setup=setup,
        when=_WHEN,
    )


def survey_of(rule: Rule, survey: Survey, states: tuple[str, ...], dtypes: Mapping[str, torch.dtype]) -> Kernel:
    """The pass before: arguments beside `stream`'s are ``constants``, ``factor`` and ``skip``; the sums go to ``partials``."""
    roles = [*(Role(name) for name in survey.reads), *(Role(s, writes=True) for s in states if survey.moves)]
    return stream(
        f"survey_{rule.name}",
        roles,
        dtypes,
        _SCALED % survey.element(states),
        arguments=("uint64 constants", "uint64 factor", "uint64 skip"),
        setup=_setup(rule),
        when=_WHEN,
        sums={s: s for s in survey.sums},
    )


_WHEN = "!(skip && *at<const float>(skip) > 0.f)"
_SCALED = "{ const float raw = g; { const float g = raw * times; (void)g; %s } }"


def _setup(rule: Rule) -> str:
    return "\n".join(
        (
            f"const float* const constant = at<const float>(constants) + tensor * {MOST};",
            *(f"const float {c} = constant[{i}]; (void){c};" for i, c in enumerate(rule.constants)),
            "const float times = factor ? *at<const float>(factor) : 1.f;",
        )
    )
