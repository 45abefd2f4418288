"""Update rules as data, and the kernels made from them: the third and the fourth launch of a step.

The third (`prepare`) computes step counters, bias corrections and every other number of a whole tensor, on the device, in float64: in
float32 `1.f - 0.999f` is off by 1.3e-5. It also moves a borrowed loss scale. lr may be a tensor of the device and the counters are the
optimizer's own, so a captured step goes on counting when it is replayed; a group's other numbers are those of the capture. The fourth
(`update`) reads each element once and writes it once, with the average of the weights and the low-precision copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.dtensor import local
from . import EMA
from .kernel import THREADS, Kernel, Role, alike, stream

Group = Mapping[str, Any]
Number = str | Callable[[Group], float]  # a key of a param group, or a function of it
# C++ on floats, once an element; or a function of the states that a group has.
Element = str | Callable[[tuple[str, ...]], str]


def direction(group: Group) -> float:
    """The sign of gradients: -1 where a group maximizes."""
    return -1.0 if group["maximize"] else 1.0


def average(group: Group) -> float:
    """The share of a gradient in the first average, of optimizers that have the option `grad_averaging`."""
    return 1.0 - group["betas"][0] if group["grad_averaging"] else 1.0


BETAS = {"beta1": lambda group: group["betas"][0], "beta2": lambda group: group["betas"][1]}


@dataclass(frozen=True)
class Survey:
    """Sums over a whole tensor, on all ranks that hold a part of it, which a rule needs before it moves any element."""

    sums: tuple[str, ...]  # names of the totals
    element: str  # C++ that adds to `sums`
    weigh: str  # C++ on doubles, once a tensor: sees the totals and what `Rule.prepare` sees but ``step``; changes `constants`
    moves: bool = False  # `element` reads and writes the states; the rule's own then only reads them
    reads: tuple[str, ...] = ("g", "p")  # names that `element` reads, ``g`` (unscaled and clipped) first


@dataclass(frozen=True, eq=False)
class Rule:
    """How one optimizer moves a parameter.

    `prepare` is C++ on doubles, once a tensor and step: it sees `numbers`, ``lr``, ``step`` (of this step, from 1) and ``norm``, and sets
    `constants`. `element` is C++ on floats: ``p``, ``g`` (unscaled and clipped), the states and `constants`.
    """

    name: str  # a C identifier
    states: tuple[str, ...]  # keys of the states that have a number for each element, as torch names them
    numbers: Mapping[str, Number]  # names in `prepare` → the numbers of a param group; "lr" comes before them
    prepare: str
    constants: tuple[str, ...]
    element: Element
    # The same by torch, (p, g, states, group, step), in place, for optimizers that torch has.
    reference: Callable[[Tensor, Tensor, dict[str, Any], Group, int], None] | None = None
    uses: Callable[[Group], tuple[str, ...]] | None = None  # which of `states` a param group has
    # Why kernels do not take a param group, in words.
    refuse: Callable[[Group], str | None] = lambda group: None
    counts: bool = True  # the state has a "step"; if not, steps are counted beside it, from 1 where states were there before
    starts: Callable[[Group], float] = lambda group: 0.0  # the first value of states
    scalar: str = ""  # key of a float32 number of each tensor, 0-dim, that `Survey.weigh` sees and writes
    norm: bool = False  # `prepare` is told the norm of all gradients, as the rule sees them; else it is 0
    survey: Survey | None = None  # a pass over the elements before the update

    @property
    def single(self) -> tuple[str, ...]:
        """Keys of the state that have one number a tensor."""
        return ("step",) * self.counts + (self.scalar,) * bool(self.scalar)

    @property
    def moves(self) -> bool:
        """Whether `element` writes the states."""
        return self.survey is None or not self.survey.moves

    def states_of(self, group: Group) -> tuple[str, ...]:
        """Keys of the states of parameters in `group`."""
        return self.states if self.uses is None else self.uses(group)

    def hyper(self, group: Group) -> list[float]:
        """The `numbers` of `group`."""
        return [float(group[how] if isinstance(how, str) else how(group)) for how in self.numbers.values()]


def complete(
    rule: Rule,
    group: Group,
    parameter: Tensor,
    state: dict[str, Any],
    counters: dict[Tensor, Tensor],
    dtype: torch.dtype | None,
    average: bool = False,
) -> list[tuple[str, Any]]:
    """Make missing entries of a state and of `counters` of steps, loaded ones in the step's layout and `dtype`; returns former values."""
    before, device = [], parameter.device
    keys = rule.states_of(group)
    fresh = any(state.get(key) is None for key in keys)

    def put(key: str, value: Tensor) -> None:
        before.append((key, state.get(key)))
        state[key] = value

    for key in rule.single:
        held = state.get(key)
        if not isinstance(held, Tensor) or held.device != device or held.dtype != torch.float32:
            now = torch.zeros((), device=device) if held is None else torch.as_tensor(held)
            put(key, now.to(device, torch.float32))
    if not rule.counts and (fresh or parameter not in counters):
        counters[parameter] = torch.full((), 0.0 if fresh else 1.0, device=device)
    for key in (*keys, EMA) if average else keys:
        value = state.get(key)
        wanted = dtype or (parameter if value is None else value).dtype
        if key == EMA:
            wanted = torch.float32  # in bf16 it would not follow weights that move by less than 2^-9 of it
        if value is not None and value.dtype == wanted and alike(local(value), local(parameter)):
            continue
        put(key, torch.empty_like(parameter, dtype=wanted, requires_grad=False))
        if value is not None:
            local(state[key]).copy_(local(value))
        elif key == EMA:
            local(state[key]).copy_(local(parameter))
        else:
            local(state[key]).fill_(rule.starts(group))
    return before


# -- the third launch ------------------------------------------------------------------------------------------------------

TENSOR = 4  # words of each tensor: its group, and the addresses of its step counter, its lr (0: the group's) and its scalar
MOST = (
    16  # most numbers of a group, and most constants of a tensor; the last constant is the number of the step
)


@cache
def prepare(rule: Rule) -> Kernel:
    """For each tensor: its counter goes up, unless the step is skipped, and its constants are written. The loss scale moves either way.

    Arguments: ``tensors`` int64 [count, TENSOR]; ``hyper`` float64 [groups, MOST], lr first; ``skip``, the address of
    a float that is above 0 if the step is skipped, or 0; ``constants`` float32 [count, MOST]; ``measured``, the address of
    `measure.RESULT`, and ``factor`` of the gradients' factor, or 0; ``scale`` and ``law``, see `MOVE`.
    """
    declared = " ".join(f"double {c} = 0.0;" for c in rule.constants)
    text = f"""
float* const counter = at<float>(mine[1]);
const double step = (double)*counter + 1.0; (void)step;
*counter = (float)step;
const float* const seen = at<const float>(measured);
const double norm = seen ? (double)seen[0] * (factor ? (double)*at<const float>(factor) / (double)seen[3] : 1.0) : 0.0; (void)norm;
{declared}
{rule.prepare}
out[{MOST - 1}] = (float)step;
"""
    arguments = ("uint64 measured", "uint64 factor", "uint64 scale", "uint64 law")
    return _each(f"prepare_{rule.name}", rule, arguments, text, MOVE)


@cache
def weigh(rule: Rule) -> Kernel:
    """For each tensor: its constants, after the survey. Takes ``totals`` float64 [count, sums] in place of `prepare`'s last four."""
    survey = rule.survey
    assert survey is not None
    loaded = [f"double {c} = (double)out[{i}]; (void){c};" for i, c in enumerate(rule.constants)]
    total = f"at<const double>(totals)[tensor * {len(survey.sums)} + "
    loaded += [f"const double {s} = {total}{i}];" for i, s in enumerate(survey.sums)]
    text = [*loaded, survey.weigh]
    if rule.scalar:
        scalar = f"float* const kept = at<float>(mine[3]); double {rule.scalar} = (double)*kept;"
        text = [*loaded, scalar, survey.weigh, f"*kept = (float){rule.scalar};"]
    return _each(f"weigh_{rule.name}", rule, ("uint64 totals",), "\n".join(text))


def _each(name: str, rule: Rule, arguments: tuple[str, ...], text: str, always: str = "") -> Kernel:
    """A kernel with a thread a tensor, which runs `text` unless ``skip`` is above 0, and `always` in any case."""
    numbers = " ".join(f"const double {n} = group[{i + 1}]; (void){n};" for i, n in enumerate(rule.numbers))
    stored = " ".join(f"out[{i}] = (float){c};" for i, c in enumerate(rule.constants))
    assert max(len(rule.numbers), len(rule.constants)) < MOST
    return Kernel(
        name,
        ("uint64 tensors", "int64 count", "uint64 hyper", "uint64 skip", "uint64 constants", *arguments),
        f"""{always}
const i64 tensor = block * {THREADS} + thread;
if (tensor < count && !(skip && *at<const float>(skip) > 0.f)) {{
  const u64* const mine = at<const u64>(tensors) + tensor * {TENSOR};
  const double* const group = at<const double>(hyper) + mine[0] * {MOST};
  const double lr = mine[2] ? (double)*at<const float>(mine[2]) : group[0]; (void)lr;
  float* const out = at<float>(constants) + tensor * {MOST};
  {numbers}
  {text}
  {stored}
}}
""",
    )


# -- the loss scale in it --------------------------------------------------------------------------------------------------

RULE = ("growth", "backoff", "interval", "delay", "hysteresis", "refill", "minimum", "maximum")


@dataclass(eq=False, slots=True)
class Scale:
    """A loss scale on a device, lent for one step."""

    state: Tensor  # int32 [3]: the float32 scale's bits; good steps since it moved; overflows still to be forgiven, plus one
    rule: Tensor  # float64 [8], as `RULE` names them; see `GradScalerKwargs`; `Scaler.advance` is the same by torch
    moved: bool = False  # the step has moved it. One that torch runs, or that had nothing to step, has not


# Sees ``scale`` and ``law``, addresses of `Scale.state` and `Scale.rule`, or 0; and ``skip``. Products are in double, as torch has them.
MOVE = f"""
if (scale && block == 0 && thread == 0) {{
  float* const size = at<float>(scale);
  int* const good = at<int>(scale) + 1;
  int* const patience = at<int>(scale) + 2;
  {" ".join(f"const double {name} = at<const double>(law)[{i}];" for i, name in enumerate(RULE))}
  const bool bad = skip && *at<const float>(skip) > 0.f;
  const bool falls = bad && *patience <= 1;
  const int count = bad ? 0 : *good + 1;
  const bool grows = (double)count >= interval + delay;
  const float lower = (float)((double)*size * backoff), least = (float)minimum;
  const float higher = (float)((double)*size * growth), most = (float)maximum;
  const float bounded = higher > most ? most : higher;
  if (refill > 0.0 ? !bad : grows) *patience = (int)hysteresis;
  else if (bad && !falls) *patience -= 1;
  if (falls) *size = lower < least ? least : lower;
  else if (grows && finite(bounded)) *size = bounded;
  *good = grows ? (int)delay : count;
}}
"""


# -- the fourth launch -----------------------------------------------------------------------------------------------------

GRADIENT, PARAMETER, AVERAGE, COPY = "g", "p", "ema", "low"


def roles_of(states: Sequence[str], average: bool, copy: bool, moves: bool = True) -> tuple[Role, ...]:
    """Of a row, in its order; the gradient comes first, for `measure` reads the same table. `moves`: the states are written."""
    roles = (Role(GRADIENT), Role(PARAMETER, writes=True), *(Role(s, writes=moves) for s in states))
    more = (Role(AVERAGE, writes=True),) * average + (Role(COPY, reads=False, writes=True),) * copy
    return roles + more


class Kind(NamedTuple):
    """Rows of one launch of `update`: their states and dtypes by role, and whether bf16 is rounded stochastically."""

    states: tuple[str, ...]
    dtypes: tuple[tuple[str, torch.dtype], ...]
    stochastic: bool = False


@cache
def update(rule: Rule, kind: Kind) -> Kernel:
    """The update of tensors of this kind, and of their averages and copies where its dtypes have them.

    Arguments beside `stream`'s: ``constants`` of `prepare`; ``factor`` and ``skip``, addresses of floats, or 0; ``follow``, the
    share (1 - decay) of a new weight in its average; and for stochastic rounding its ``seed``.
    """
    states, dtypes, stochastic = kind.states, dict(kind.dtypes), kind.stochastic
    roles = roles_of(states, AVERAGE in dtypes, COPY in dtypes, rule.moves)
    setup = f"{_setup(rule, stochastic)}\nconst float share = (float)follow; (void)share;"
    text = rule.element if isinstance(rule.element, str) else rule.element(states)
    written = (PARAMETER, *states) if rule.moves else (PARAMETER,)
    element = _SCALED % text + _rounded(written, states, dtypes, stochastic)
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


@cache
def survey_of(rule: Rule, kind: Kind) -> Kernel:
    """The pass before: arguments beside `stream`'s are ``constants``, ``factor``, ``skip`` and ``seed``; the sums go to ``partials``."""
    survey, states, dtypes, stochastic = rule.survey, kind.states, dict(kind.dtypes), kind.stochastic
    assert survey is not None
    roles = [*(Role(name) for name in survey.reads), *(Role(s, writes=True) for s in states if survey.moves)]
    return stream(
        f"survey_{rule.name}_stochastic" if stochastic else f"survey_{rule.name}",
        roles,
        dtypes,
        _SCALED % survey.element + _rounded(states if survey.moves else (), states, dtypes, stochastic),
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
    named = "\n".join(f"const float {c} = constant[{i}]; (void){c};" for i, c in enumerate(rule.constants))
    return f"""const float* const constant = at<const float>(constants) + tensor * {MOST};
{named}
const float times = factor ? *at<const float>(factor) : 1.f;
{random if stochastic else ""}"""
