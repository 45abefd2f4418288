"""How many processes suit this machine."""

from __future__ import annotations

from .. import settings
from ..slurm import read_task


def default_processes() -> int:
    """One an accelerator, or 1 without any (or with ``cpu`` set). Asks the driver's library, not the device.

    Several of Slurm's tasks on one machine are one for each process.
    """
    task, _ = read_task()
    if settings.resolve().cpu or (task is not None and task.local_size > 1):
        return 1
    import torch

    # By NVML where it can: a process that has initialised CUDA cannot fork workers that use it.
    return max(1, torch.cuda.device_count(), torch.xpu.device_count())
