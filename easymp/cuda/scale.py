"""The loss scale in the step's third launch: who holds a `Scale` lends it to the step, whose first thread moves it on its way.

Where several optimizers divide by one scale, it has to stay until the last of them has stepped: it is not lent.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

RULE = ("growth", "backoff", "interval", "delay", "hysteresis", "refill", "minimum", "maximum")


@dataclass(eq=False, slots=True)
class Scale:
    """A loss scale on a device, lent for one step.

    Attributes:
        state: int32 [3]: the float32 scale's bits; good steps since the last overflow or growth; overflows still to be forgiven, plus one.
        rule: float64 [8], as `RULE` names them; see `precision.scaler.LossScale`, whose `Scaler.advance` is the same by torch.
        moved: whether the step has moved it. One that torch runs, or that had nothing to step, has not.
    """

    state: Tensor
    rule: Tensor
    moved: bool = False


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
