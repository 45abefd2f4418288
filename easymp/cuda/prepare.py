"""The third launch: step counters, bias corrections and whatever else is one number a tensor, in float64, on the device.

The loss scale moves in it, too, where it is lent to the step.

`1.f - 0.999f` is off by 1.3e-5, so numbers become floats only here. lr may be a tensor of the device, and the counters are the
optimizer's own, so a captured step goes on counting when it is replayed. Numbers of a group that are no tensors are, in a graph, those
of the capture.
"""

from __future__ import annotations

from .kernel import THREADS, Kernel
from .rules.rule import Rule, Survey
from .scale import MOVE

TENSOR = 4  # words of each tensor: its group, and the addresses of its step counter, its lr (0: the group's) and its scalar
MOST = 16  # most numbers of a group, and most constants of a tensor, whose last is the number of the step


def prepare(rule: Rule) -> Kernel:
    """For each tensor: its counter goes up, unless the step is skipped, and its constants are written. The loss scale moves either way.

    Arguments: ``tensors`` int64 [count, TENSOR]; ``hyper`` float64 [groups, MOST], lr first; ``skip``, the address of
    a float that is above 0 if the step is skipped, or 0; ``constants`` float32 [count, MOST]; ``measured``, the address of
    `measure.RESULT`, and ``factor`` of what gradients are multiplied by, or 0; ``scale`` and ``law``, see `scale.MOVE`.
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


def weigh(rule: Rule, survey: Survey) -> Kernel:
    """For each tensor: its constants, with what the survey has found.

    Arguments: those of `prepare`, with ``totals`` float64 [count, sums] in place of the last two.
    """
    loaded = " ".join(f"double {c} = (double)out[{i}]; (void){c};" for i, c in enumerate(rule.constants))
    loaded += "".join(
        f"\nconst double {s} = at<const double>(totals)[tensor * {len(survey.sums)} + {i}];"
        for i, s in enumerate(survey.sums)
    )
    before, after = "", ""
    if rule.scalar:
        before = f"float* const kept = at<float>(mine[3]); double {rule.scalar} = (double)*kept;"
        after = f"*kept = (float){rule.scalar};"
    return _each(
        f"weigh_{rule.name}", rule, ("uint64 totals",), f"{loaded}\n{before}\n{survey.weigh}\n{after}\n"
    )


def _each(name: str, rule: Rule, arguments: tuple[str, ...], text: str, always: str = "") -> Kernel:
    """A kernel with a thread a tensor; the step is skipped where ``skip`` says so, but for what is `always` done."""
    numbers = " ".join(f"const double {n} = group[{i + 1}]; (void){n};" for i, n in enumerate(rule.numbers))
    stored = " ".join(f"out[{i}] = (float){c};" for i, c in enumerate(rule.constants))
    assert len(rule.numbers) < MOST
    assert len(rule.constants) < MOST
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
