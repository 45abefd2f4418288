"""``deepspeed.ops.lion``, by easymp.optim."""

from __future__ import annotations

from .... import optim

FusedLion = optim.Lion
DeepSpeedCPULion = optim.Lion
