"""``deepspeed.ops.adagrad``, by easymp.optim."""

from __future__ import annotations

from .... import optim

DeepSpeedCPUAdagrad = optim.Adagrad
