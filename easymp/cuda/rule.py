"""Update rules of optimizers, and the kernels made from them.

A rule is text, one assignment a line, which is both Python and C++. Kernels run it on numbers; where no kernels run,
`optim.rules` runs it on lists of tensors. It may call sqrt, pow, where, maximum and sign.

Two kernels make a step. `prepare` runs a thread for each tensor: it moves a loss scale, and computes the step counter,
bias corrections and other numbers of a tensor in float64, since in float32 `1.f - 0.999f` is off by 1.3e-5. lr may be a
tensor of the device and the counters are the optimizer's own, so a captured step goes on counting when it is replayed;
a group's other numbers are those of the capture. `update` reads and writes each element once, with the average of the
weights and the low-precision copy of the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.dtensor import local
from . import EMA
from .kernel import THREADS, Kernel, Role, same_layout, stream

Group = Mapping[str, Any]
Number = str | Callable[[Group], float]  # a key of a param group, or a function of it


def direction(group: Group) -> float:
    """The sign of gradients: -1 where a group maximizes."""
    return -1.0 if group["maximize"] else 1.0


BETAS: Mapping[str, Number] = {
    "beta1": lambda group: group["betas"][0],
    "beta2": lambda group: group["betas"][1],
    # 1 - bias^step corrects an average that starts at 0. torch's groups have no option to leave that out.
    "bias1": lambda group: group["betas"][0] if group.get("bias_correction", True) else 0.0,
    "bias2": lambda group: group["betas"][1] if group.get("bias_correction", True) else 0.0,
}


@dataclass(frozen=True)
class Survey:
    """Sums over a whole tensor, on all ranks that hold a part of it, which a rule needs before it moves any element."""

    squares: Mapping[str, str]  # name of a sum → the name whose squares it adds up
    # On doubles, for each tensor, after the sums: sees these and all that `Rule.prepare` sees but ``step``, and changes
    # numbers of the tensor.
    weigh: str
    states: str = ""  # moves the states, which `Rule.element` then only reads; "" where that moves them
    terms: str = ""  # what both passes compute from the states
    maximum: Callable[[Group], bool] = lambda group: False  # the sums are largest magnitudes, which kernels do not know


@dataclass(frozen=True, eq=False)
class Rule:
    """How one optimizer moves a parameter."""

    name: str  # a C identifier
    states: tuple[str, ...]  # keys of the states that have a number for each element, as torch names them
    numbers: Mapping[str, Number]  # name in the text → the number of a param group; the text also sees ``lr``
    # On doubles, for each tensor: sees ``step`` (of this step, from 1) and ``norm``, and makes numbers of the tensor.
    prepare: str
    element: str  # on floats: moves ``p`` and the states by ``g``, the unscaled and clipped gradient
    variants: Mapping[tuple[str, ...], str] = field(default_factory=dict)  # states of other groups → their `element`
    uses: Callable[[Group], tuple[str, ...]] | None = None  # which of `states` a param group has
    refuse: Callable[[Group], str | None] = lambda group: None  # why kernels do not run on a param group
    counts: bool = True  # the state has a "step"; if not, steps are counted beside it, from 1 in a loaded state
    start: Callable[[Group], float] = lambda group: 0.0  # the first value of states
    scalar: str = ""  # key of a float32 number of each tensor, 0-dim, that `Survey.weigh` changes
    norm: bool = False  # `prepare` sees the norm of all gradients, as the rule sees them; else it is 0
    survey: Survey | None = None  # a pass over the elements before the update

    @property
    def single(self) -> tuple[str, ...]:
        """Keys of the state that have one number a tensor."""
        return tuple(key for key in ("step" if self.counts else "", self.scalar) if key)

    def states_of(self, group: Group) -> tuple[str, ...]:
        """Keys of the states of parameters in `group`."""
        return self.states if self.uses is None else self.uses(group)

    def numbers_of(self, group: Group) -> dict[str, float]:
        """The `numbers` of `group`, by name."""
        return {name: float(group[key] if isinstance(key, str) else key(group)) for name, key in self.numbers.items()}

    def element_of(self, states: tuple[str, ...]) -> str:
        """The text of the update of parameters with these states, after `Survey.states`."""
        terms = "" if self.survey is None else self.survey.terms
        return terms + self.variants.get(states, self.element)

    @property
    def computed(self) -> set[str]:
        """Numbers of a tensor that `prepare` and `Survey.weigh` compute."""
        text = self.prepare if self.survey is None else self.prepare + self.survey.weigh
        return set(re.findall(r"^(\w+) =", text, re.MULTILINE)) - {self.scalar}

    @property
    def constants(self) -> list[str]:
        """Numbers of a tensor that are kept from one kernel to the next."""
        text = self.element if self.survey is None else self.survey.states + self.survey.terms + self.element
        read = set(re.findall(r"\w+", text))
        return [*sorted(self.computed), *(name for name in ("lr", *self.numbers) if name in read)]


def cpp(text: str, dtype: str, variables: Collection[str] = ()) -> str:
    """The text of a rule as C++ on numbers of `dtype`. Names that are not `variables` become constants."""
    lines = (line.partition(" ")[::2] for line in text.split("\n") if line)
    return "\n".join(f"{'' if name in variables else f'const {dtype} '}{name} {value};" for name, value in lines)


def complete(
    rule: Rule,
    group: Group,
    parameter: Tensor,
    state: dict[str, Any],
    counters: dict[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    average: bool = False,
) -> None:
    """Make missing entries of a state and of step `counters`; convert loaded ones to the step's layout and `dtype`."""
    device, keys = parameter.device, rule.states_of(group)
    fresh = any(state.get(key) is None for key in keys)
    for key in rule.single:
        number = state.get(key)
        if not isinstance(number, Tensor) or number.device != device or number.dtype != torch.float32:
            state[key] = torch.as_tensor(0.0 if number is None else number).to(device, torch.float32)
    if counters is not None and not rule.counts and (fresh or parameter not in counters):
        counters[parameter] = torch.full((), 0.0 if fresh else 1.0, device=device)
    for key in (*keys, EMA) if average else keys:
        value = state.get(key)
        new_dtype = dtype or (parameter if value is None else value).dtype
        if key == EMA:
            new_dtype = torch.float32  # in bf16 it would not follow weights that move by less than 2^-9 of it
        if value is not None and value.dtype == new_dtype and same_layout(local(value), local(parameter)):
            continue
        state[key] = torch.empty_like(parameter, dtype=new_dtype, requires_grad=False)
        if value is None and key != EMA:
            local(state[key]).fill_(rule.start(group))
        else:
            local(state[key]).copy_(local(parameter if value is None else value))


# -- the norm of all gradients, divided by the loss scale --------------------------------------------------------------

RESULT = ("norm", "factor", "found_inf", "inverse_scale")  # float32, the output of `CONCLUDE`

_INVERSE = "const float inverse = scale ? (float)(1.0 / (double)*at<const float>(scale)) : 1.f;"


@cache
def squares(dtype: torch.dtype) -> Kernel:
    """Σ (g / scale)² and the number of elements that are not finite, of each chunk, at ``partials``."""
    return stream(
        "squares",
        [Role("g")],
        {"g": dtype},
        "const float x = g * inverse; squares += x * x; bad += finite(g) ? 0.f : 1.f;",
        arguments=("uint64 scale",),
        setup=_INVERSE,
        sums={"squares": "copies > 0.0 ? squares / copies : 0.0", "bad": "copies > 0.0 ? bad : 0.0"},
    )


_CONCLUDE = """
const double norm = sqrt(at<const double>(totals)[0]);
const double inverse = scale ? (double)(float)(1.0 / (double)*at<const float>(scale)) : 1.0;
const double clip = max_norm / (norm + 1e-6);
float* const out = at<float>(result);
out[0] = (float)norm;
out[1] = (float)(inverse * (clip < 1.0 ? clip : norm == norm ? 1.0 : norm));
out[2] = at<const double>(totals)[1] > 0.0 ? 1.f : 0.f;
out[3] = (float)inverse;
"""

# One block adds up the sums of the blocks of `squares`, always in the same order: a step gives the same bits each time.
_SETTINGS = ("uint64 scale", "float64 max_norm", "uint64 result")
TOTAL = Kernel(
    "total",
    ("uint64 partials", "int64 count", "uint64 totals", "int64 concludes", *_SETTINGS),
    f"""
for (i64 j = thread; j < count; j += {THREADS}) {{
  squares += at<const double>(partials)[2 * j];
  bad += at<const double>(partials)[2 * j + 1];
}}
""",
    ("squares", "bad"),
    f"""
at<double>(totals)[0] = squares;
at<double>(totals)[1] = bad;
if (concludes) {{
{_CONCLUDE}
}}
""",
)

# After the ranks have added up their totals.
CONCLUDE = Kernel("conclude", ("uint64 totals", *_SETTINGS), f"if (thread == 0) {{ {_CONCLUDE} }}")


@cache
def totals(count: int) -> Kernel:
    """Of each row, `count` sums over its chunks, in their order; a block a row.

    Arguments: ``partials`` float64 [chunks, count]; ``starts`` of the rows; ``totals`` float64 [rows, count].
    """
    names = tuple(f"sum{i}" for i in range(count))
    adds = " ".join(f"{n} += at<const double>(partials)[{count} * j + {i}];" for i, n in enumerate(names))
    stores = " ".join(f"at<double>(totals)[{count} * block + {i}] = {n};" for i, n in enumerate(names))
    return Kernel(
        f"totals_{count}",
        ("uint64 partials", "uint64 starts", "uint64 totals"),
        f"""
const i64* const start = at<const i64>(starts) + block;
for (i64 j = start[0] + thread; j < start[1]; j += {THREADS}) {{ {adds} }}
""",
        names,
        stores,
    )


# -- a thread for each tensor ------------------------------------------------------------------------------------------

TENSOR = 4  # words of each tensor: its group; the addresses of its step counter, lr (0: the group's) and scalar
MOST = 16  # most numbers of a group, and most constants of a tensor; the last constant is the number of the step


@cache
def prepare(rule: Rule) -> Kernel:
    """Count the step of each tensor and write its constants, unless the step is skipped; the loss scale always moves.

    Arguments: ``tensors`` int64 [count, TENSOR]; ``hyper`` float64 [groups, MOST], lr first; ``skip``, the address of
    a float that is above 0 if the step is skipped, or 0; ``constants`` float32 [count, MOST]; ``measured``, the address
    of `RESULT`, and ``factor`` of the gradients' factor, or 0; ``scale`` and ``law``, see `MOVE`.
    """
    text = f"""
{" ".join(f"double {name} = 0.0;" for name in sorted(rule.computed))}
float* const counter = at<float>(row[1]);
const double step = (double)*counter + 1.0; (void)step;
*counter = (float)step;
const float* const result = at<const float>(measured);
const double times = factor ? (double)*at<const float>(factor) : result ? (double)result[3] : 1.0;
const double norm = result ? (double)result[0] * times / (double)result[3] : 0.0; (void)norm;
{cpp(rule.prepare, "double", rule.computed)}
out[{MOST - 1}] = (float)step;
"""
    arguments = ("uint64 measured", "uint64 factor", "uint64 scale", "uint64 law")
    return _per_tensor(f"prepare_{rule.name}", rule, arguments, text, MOVE)


@cache
def weigh(rule: Rule) -> Kernel:
    """Change the constants of each tensor after the survey, by ``totals`` float64 [count, sums]."""
    survey = rule.survey
    assert survey is not None
    computed = [f"double {name} = (double)out[{i}]; (void){name};" for i, name in enumerate(sorted(rule.computed))]
    total = f"at<const double>(totals)[tensor * {len(survey.squares)} + "
    sums = [f"const double {name} = {total}{i}];" for i, name in enumerate(survey.squares)]
    text = "\n".join([*computed, *sums, cpp(survey.weigh, "double", rule.computed | {rule.scalar})])
    if rule.scalar:
        loaded = f"float* const scalar = at<float>(row[3]); double {rule.scalar} = (double)*scalar;"
        text = f"{loaded}\n{text}\n*scalar = (float){rule.scalar};"
    return _per_tensor(f"weigh_{rule.name}", rule, ("uint64 totals",), text)


def _per_tensor(name: str, rule: Rule, arguments: tuple[str, ...], text: str, always: str = "") -> Kernel:
    """A kernel with a thread a tensor, which runs `text` unless ``skip`` is above 0, and `always` before it."""
    assert max(len(rule.numbers), len(rule.constants)) < MOST
    return Kernel(
        name,
        ("uint64 tensors", "int64 count", "uint64 hyper", "uint64 skip", "uint64 constants", *arguments),
        f"""{always}
const i64 tensor = block * {THREADS} + thread;
if (tensor < count && !(skip && *at<const float>(skip) > 0.f)) {{
  const u64* const row = at<const u64>(tensors) + tensor * {TENSOR};
  const double* const group = at<const double>(hyper) + row[0] * {MOST};
  const double lr = row[2] ? (double)*at<const float>(row[2]) : group[0]; (void)lr;
  float* const out = at<float>(constants) + tensor * {MOST};
  {" ".join(f"const double {name} = group[{i}]; (void){name};" for i, name in enumerate(rule.numbers, 1))}
  {text}
  {" ".join(f"out[{i}] = (float){name};" for i, name in enumerate(rule.constants))}
}}
""",
    )


# -- the loss scale in it ----------------------------------------------------------------------------------------------

LAW = ("growth", "backoff", "interval", "delay", "hysteresis", "refill", "minimum", "maximum")


@dataclass(eq=False, slots=True)
class Scale:
    """A loss scale on a device, lent for one step."""

    state: Tensor  # int32 [3]: bits of the float32 scale; good steps since it moved; overflows still forgiven, plus one
    rule: Tensor  # float64 [8], as `LAW` names them; see `GradScalerKwargs`; `Scaler.advance` is the same by torch
    moved: bool = False  # the step has moved it. One that torch runs, or that had nothing to step, has not


# Sees ``skip``, and ``scale`` and ``law``, addresses of `Scale.state` and `Scale.rule`, or 0. Products are in double.
MOVE = f"""
if (scale && block == 0 && thread == 0) {{
  float* const size = at<float>(scale);
  int* const good = at<int>(scale) + 1;
  int* const patience = at<int>(scale) + 2;
  {" ".join(f"const double {name} = at<const double>(law)[{i}];" for i, name in enumerate(LAW))}
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


# -- a thread for each few elements ------------------------------------------------------------------------------------

GRADIENT, PARAMETER, COPY = "raw", "p", "low"


def roles_of(states: Sequence[str], average: bool, copy: bool, moves: bool = True) -> tuple[Role, ...]:
    """Roles of a row in their order. The gradient comes first, which `measure` reads. `moves`: states are written."""
    roles = [Role(GRADIENT), Role(PARAMETER, writes=True), *(Role(state, writes=moves) for state in states)]
    if average:
        roles.append(Role(EMA, writes=True))
    if copy:
        roles.append(Role(COPY, reads=False, writes=True))
    return tuple(roles)


class Variant(NamedTuple):
    """Rows of one launch of `update`: their states and dtypes by role, and whether bf16 is rounded stochastically."""

    states: tuple[str, ...]
    dtypes: tuple[tuple[str, torch.dtype], ...]
    stochastic: bool = False


@cache
def update(rule: Rule, variant: Variant) -> Kernel:
    """The update of tensors of this variant, and of their averages and copies where its dtypes have them.

    Arguments beside those of `stream`: ``constants`` of `prepare`; ``factor`` and ``skip``, addresses of floats, or 0;
    ``follow``, the share (1 - decay) of a new weight in its average; and for stochastic rounding its ``seed``.
    """
    states, dtypes = variant.states, dict(variant.dtypes)
    moves = rule.survey is None or not rule.survey.states
    after = ""
    if EMA in dtypes:
        after += f"{EMA} += ({PARAMETER} - {EMA}) * ema_share;\n"
    if COPY in dtypes:
        after += f"{COPY} = {PARAMETER};\n"
    roles = roles_of(states, EMA in dtypes, COPY in dtypes, moves)
    return _pass(rule.name, rule, variant, roles, rule.element_of(states), after)


@cache
def survey(rule: Rule, variant: Variant) -> Kernel:
    """The pass before `update`, with its arguments; the sums go to ``partials``."""
    survey = rule.survey
    assert survey is not None
    roles = [Role(GRADIENT)]
    if survey.states:
        roles += [Role(PARAMETER), *(Role(state, writes=True) for state in variant.states)]
    sums = "".join(f"{name} += {value} * {value};\n" for name, value in survey.squares.items())
    return _pass(f"survey_{rule.name}", rule, variant, roles, survey.states + survey.terms, sums, survey.squares)


def _pass(
    name: str, rule: Rule, variant: Variant, roles: Sequence[Role], text: str, after: str, sums: Collection[str] = ()
) -> Kernel:
    """A kernel over elements: the `text` of the rule, stochastic rounding of all that it moves, and `after`."""
    dtypes, variables = dict(variant.dtypes), (PARAMETER, *variant.states)
    constants = "\n".join(f"const float {c} = constant[{i}]; (void){c};" for i, c in enumerate(rule.constants))
    setup = f"""
const float* const constant = at<const float>(constants) + tensor * {MOST};
{constants}
const float times = factor ? *at<const float>(factor) : 1.f;
const float ema_share = (float)follow; (void)ema_share;
"""
    element = f"const float g = raw * times; (void)g;\n{cpp(text, 'float', variables)}\n"
    arguments = ["uint64 constants", "uint64 factor", "uint64 skip", "float64 follow"]
    if variant.stochastic:
        name, arguments = f"{name}_stochastic", [*arguments, "int64 seed"]
        setup += f"""
const u32 key = key_of((u64)seed, (u32)constant[{MOST - 1}], (u32)row[3]); (void)key;
const i64 origin = (i64)row[4]; (void)origin;
"""
        for role in roles:
            if role.name in variables and role.writes and dtypes[role.name] == torch.bfloat16:
                rounded = f"rounded({role.name}, key, {variables.index(role.name)}u, origin + e)"
                element += f"{role.name} = {rounded};\n"
    return stream(
        name,
        roles,
        dtypes,
        element + after,
        arguments=arguments,
        setup=setup,
        condition="!(skip && *at<const float>(skip) > 0.f)",
        sums={name: name for name in sums},
    )
