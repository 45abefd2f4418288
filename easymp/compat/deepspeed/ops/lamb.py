"""``deepspeed.ops.lamb``, by easymp.optim."""

from __future__ import annotations

from .... import optim

FusedLamb = optim.LAMB
