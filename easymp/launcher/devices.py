"""How many processes suit this machine."""

from __future__ import annotations

from .. import settings
from ..distributed import ranks


def default_processes() -> int:
    """As many as are announced for each node; else one an accelerator, or 1 without any (or with ``cpu`` set).

    Asks the driver's library, not the device. Several announced tasks on one machine are one for each process.
    """
    found, _ = ranks.read_node()
    if found is not None and found.processes > 1:
        return found.processes
    if settings.resolve().cpu or (found is not None and (found.local_size or 1) > 1):
        return 1
    import torch

    # By NVML where it can: a process that has initialised CUDA cannot fork workers that use it.
    return max(1, torch.cuda.device_count(), torch.xpu.device_count())
