"""The third launch: step counters, bias corrections and whatever else is one number a tensor, in float64, on the device.

`1.f - 0.999f` is off by 1.3e-5, so numbers become floats only here. lr may be a tensor of the device, and the counters are the
optimizer's own, so a captured step goes on counting when it is replayed.
"""

from __future__ import annotations

from .kernel import THREADS, Kernel
from .rules.rule import Rule

TENSOR = 3  # words that each tensor has here: its group, the address of its step counter, the address of its lr (0: the group's)
MOST = 16  # most numbers of a group, and most constants of a tensor


def prepare(rule: Rule) -> Kernel:
    """For each tensor: its counter goes up, unless the step is skipped, and its constants are written.

    Arguments: ``tensors`` int64 [count, TENSOR]; ``hyper`` float64 [groups, MOST], lr first; ``skip``, the address of
    a float that is above 0 if the step is skipped, or 0;
    ``constants`` float32 [count, MOST].
    """
    numbers = " ".join(f"const double {n} = group[{i + 1}]; (void){n};" for i, n in enumerate(rule.numbers))
    declared = " ".join(f"double {c} = 0.0;" for c in rule.constants)
    stored = " ".join(f"out[{i}] = (float){c};" for i, c in enumerate(rule.constants))
    assert len(rule.numbers) < MOST
    assert len(rule.constants) <= MOST
    return Kernel(
        f"prepare_{rule.name}",
        ("uint64 tensors", "int64 count", "uint64 hyper", "uint64 skip", "uint64 constants"),
        f"""
const i64 tensor = block * {THREADS} + thread;
if (tensor < count && !(skip && *at<const float>(skip) > 0.f)) {{
  const u64* const mine = at<const u64>(tensors) + tensor * {TENSOR};
  const double* const group = at<const double>(hyper) + mine[0] * {MOST};
  const double lr = mine[2] ? (double)*at<const float>(mine[2]) : group[0]; (void)lr;
  float* const counter = at<float>(mine[1]);
  const double step = (double)*counter + 1.0; (void)step;
  *counter = (float)step;
  {numbers}
  {declared}
  {rule.prepare}
  float* const out = at<float>(constants) + tensor * {MOST};
  {stored}
}}
""",
    )
