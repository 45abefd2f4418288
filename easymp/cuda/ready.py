"""The launcher for work beside the optimizer's step: casts, sums, images. Where there is none, torch's operations do it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import KernelError
from .availability import launcher_for, warn_once
from .kernel import Kernel, Launcher
from .launching import CupyLauncher

_broken: set[tuple[torch.device, Kernel]] = set()


def launcher_with(device: torch.device, kernels: Sequence[Kernel]) -> Launcher | None:
    """The launcher of `device`, with `kernels` compiled; None where CuPy or one of them fails, which is said once, and without a GPU."""
    if device.type != "cuda":
        return None
    launcher = launcher_for(device)
    if not isinstance(launcher, CupyLauncher) or any((device, kernel) in _broken for kernel in kernels):
        return None
    try:
        launcher.ready(kernels)
    except KernelError as error:
        warn_once(str(error))
        _broken.update((device, kernel) for kernel in kernels)
        return None
    return launcher
