"""Update rules of optimizers, and the kernels made from them.

A rule is text, one assignment a line, which is both Python and C++. Kernels run it on numbers; where no kernels run,
`optim.rules` runs it on lists of tensors. It may call sqrt, pow, where, maximum and sign.

Two kernels make a step. `prepare` runs a thread for each tensor: step counter, bias corrections and other numbers of a
tensor, in float64, since in float32 `1.f - 0.999f` is off by 1.3e-5. lr may be a tensor of the device and the counters
are the optimizer's own, so a captured step goes on counting when it is replayed. `update` reads and writes each element
once, with the average of the weights and the low-precision copy of the model.
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
    """Sums over a whole tensor, on all ranks that hold a part of it, which a rule needs before it moves any element.

    Kernels do not know them: torch's operations step by a rule that has a survey.
    """

    squares: Mapping[str, str]  # name of a sum → the name whose squares it adds up
    # On doubles, for each tensor, after the sums: sees these and all that `Rule.prepare` sees but ``step``, and changes
    # numbers of the tensor.
    weigh: str
    states: str = ""  # moves the states, which `Rule.element` then only reads; "" where that moves them
    terms: str = ""  # what both passes compute from the states
    maximum: Callable[[Group], bool] = lambda group: False  # the sums are largest magnitudes


@dataclass(frozen=True, eq=False)
class Rule:
    """How one optimizer moves a parameter."""

    name: str  # a C identifier
    states: tuple[str, ...]  # keys of the states that have a number for each element, as torch names them
    numbers: Mapping[str, Number]  # name in the text → the number of a param group; the text also sees ``lr``
    # On doubles, for each tensor: sees ``step`` (of this step, from 1), and makes numbers of the tensor.
    prepare: str
    element: str  # on floats: moves ``p`` and the states by ``g``, the unscaled and clipped gradient
    variants: Mapping[tuple[str, ...], str] = field(default_factory=dict)  # states of other groups → their `element`
    uses: Callable[[Group], tuple[str, ...]] | None = None  # which of `states` a param group has
    refuse: Callable[[Group], str | None] = lambda group: None  # why kernels do not run on a param group
    counts: bool = True  # the state has a "step"; if not, steps are counted beside it, from 1 in a loaded state
    start: Callable[[Group], float] = lambda group: 0.0  # the first value of states
    scalar: str = ""  # key of a float32 number of each tensor, 0-dim, that `Survey.weigh` changes
    norm: bool = False  # `prepare` sees ``norm``, that of all gradients, as the rule sees them
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

    @property
    def computed(self) -> list[str]:
        """Names of the per-tensor numbers that the code in `prepare` assigns."""
        return sorted(set(re.findall(r"^(\w+) =", self.prepare, re.MULTILINE)))

    @property
    def constants(self) -> list[str]:
        """Names of the per-tensor numbers that `element` reads."""
        read = set(re.findall(r"\w+", self.element))
        return [*self.computed, *(name for name in ("lr", *self.numbers) if name in read)]


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

RESULT = ("norm", "factor", "found_inf")  # float32, the output of `CONCLUDE`

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


# -- a thread for each tensor ------------------------------------------------------------------------------------------

TENSOR = 3  # words of each tensor: its group; the addresses of its step counter and lr (0: the group's)
MOST = 16  # most numbers of a group, and most constants of a tensor; the last constant is the number of the step


@cache
def prepare(rule: Rule) -> Kernel:
    """Count the step of each tensor and write its constants, unless the step is skipped.

    Arguments: ``tensors`` int64 [count, TENSOR]; ``hyper`` float64 [groups, MOST], lr first; ``skip``, the address of
    a float that is above 0 if the step is skipped, or 0; ``constants`` float32 [count, MOST].
    """
    assert max(len(rule.numbers), len(rule.constants)) < MOST
    return Kernel(
        f"prepare_{rule.name}",
        (*(f"uint64 {name}" for name in ("tensors", "hyper", "skip", "constants")), "int64 count"),
        f"""
const i64 tensor = block * {THREADS} + thread;
if (tensor < count && !(skip && *at<const float>(skip) > 0.f)) {{
  const u64* const row = at<const u64>(tensors) + tensor * {TENSOR};
  const double* const group = at<const double>(hyper) + row[0] * {MOST};
  const double lr = row[2] ? (double)*at<const float>(row[2]) : group[0]; (void)lr;
  float* const out = at<float>(constants) + tensor * {MOST};
  {" ".join(f"const double {name} = group[{i}]; (void){name};" for i, name in enumerate(rule.numbers, 1))}
  float* const counter = at<float>(row[1]);
  const double step = (double)*counter + 1.0; (void)step;
  *counter = (float)step;
  {cpp(rule.prepare, "double")}
  {" ".join(f"out[{i}] = (float){name};" for i, name in enumerate(rule.constants))}
  out[{MOST - 1}] = (float)step;
}}
""",
    )


# -- a thread for each few elements ------------------------------------------------------------------------------------

GRADIENT, PARAMETER, COPY = "raw", "p", "low"


def roles_of(states: Sequence[str], average: bool, copy: bool) -> tuple[Role, ...]:
    """Roles of a row in their order. The gradient comes first, which `measure` reads."""
    roles = [Role(GRADIENT), Role(PARAMETER, writes=True), *(Role(state, writes=True) for state in states)]
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
    dtypes, variables = dict(variant.dtypes), (PARAMETER, *variant.states)
    roles = roles_of(variant.states, EMA in dtypes, COPY in dtypes)
    constants = "\n".join(f"const float {c} = constant[{i}]; (void){c};" for i, c in enumerate(rule.constants))
    setup = f"""
const float* const constant = at<const float>(constants) + tensor * {MOST};
{constants}
const float times = factor ? *at<const float>(factor) : 1.f;
const float ema_share = (float)follow; (void)ema_share;
"""
    text = rule.variants.get(variant.states, rule.element)
    element = f"const float g = raw * times; (void)g;\n{cpp(text, 'float', variables)}\n"
    name, arguments = rule.name, ["uint64 constants", "uint64 factor", "uint64 skip", "float64 follow"]
    if variant.stochastic:
        name, arguments = f"{name}_stochastic", [*arguments, "int64 seed"]
        setup += f"""
const u32 key = key_of((u64)seed, (u32)constant[{MOST - 1}], (u32)row[3]); (void)key;
const i64 origin = (i64)row[4]; (void)origin;
"""
        for number, variable in enumerate(variables):
            if dtypes[variable] == torch.bfloat16:
                element += f"{variable} = rounded({variable}, key, {number}u, origin + e);\n"
    if EMA in dtypes:
        element += f"{EMA} += ({PARAMETER} - {EMA}) * ema_share;\n"
    if COPY in dtypes:
        element += f"{COPY} = {PARAMETER};\n"
    skips = "!(skip && *at<const float>(skip) > 0.f)"
    return stream(name, roles, dtypes, element, arguments=arguments, setup=setup, condition=skips)
