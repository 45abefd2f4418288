"""Memory over time: a thread that looks several times a second."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

EVERY = 0.05  # seconds between two looks, at first
MANY = 2000  # looks after which they come half as often, so that a run of days does not fill the disk
FAMILY = 1.0  # seconds between two looks for children, which go through all processes of the machine


class Sampler(threading.Thread):
    """Tells `tell` the bytes in use until `stop`.

    Attributes:
        kind: "device": what torch has allocated on it; "process": what this process and its children (loaders' workers) have resident,
            pages that they share counted in each.
        peak: the most so far: the device's own count, or the largest sample.
    """

    def __init__(self, device: torch.device, tell: Callable[[int], None]) -> None:
        super().__init__(name="easymp-memory", daemon=True)
        self._tell = tell
        self._over = threading.Event()
        module = None if device.type == "cpu" else torch.get_device_module(device)
        self._device, self._module = device, module if hasattr(module, "memory_allocated") else None
        import psutil  # needed by runs that are recorded only

        self._gone = psutil.Error  # what a process says that has ended
        self._process, self._children, self._looked = psutil.Process(), [], 0.0
        self.kind = "device" if self._module else "process"
        self.peak = 0

    def run(self) -> None:
        every, looks = EVERY, 0
        self.look()
        while not self._over.wait(every):
            self.look()
            looks += 1
            if looks == MANY:
                every, looks = every * 2, 0

    def look(self) -> None:
        """Tell now."""
        now = self._allocated() if self._module else self._resident()
        self.peak = max(self.peak, now)
        self._tell(now)

    def stop(self) -> None:
        self._over.set()
        self.join()
        self.look()
        if self._module:
            self.peak = int(self._module.max_memory_allocated(self._device))

    def _allocated(self) -> int:
        assert self._module is not None
        return int(self._module.memory_allocated(self._device))

    def _resident(self) -> int:
        now = float(sum(self._process.cpu_times()[:2]))
        if now - self._looked >= FAMILY:  # processor time: a process that waits has no new children
            self._looked, self._children = now, self._process.children(recursive=True)
        total = self._process.memory_info().rss
        for child in self._children:
            try:
                total += child.memory_info().rss
            except self._gone:
                continue
        return int(total)
