"""Events as kineto gives them, made by hand: also those of a GPU that is not here."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

ANNOTATION, FUNCTION, BACKWARD = 7, 0, 1


@dataclass
class Event:
    """Times in µs; kineto's are in ns."""

    what: str
    begin: float
    end: float
    kind: int = FUNCTION
    thread: int = 1
    correlation: int = 0
    linked: int = 0
    device: str = "CPU"
    index: int = -1
    bytes: int = 0
    asynchronous: bool = False

    def name(self) -> str:
        return self.what

    def start_ns(self) -> int:
        return int(self.begin * 1000)

    def end_ns(self) -> int:
        return int(self.end * 1000)

    def duration_ns(self) -> int:
        return self.end_ns() - self.start_ns()

    def scope(self) -> int:
        return self.kind

    def start_thread_id(self) -> int:
        return self.thread

    def correlation_id(self) -> int:
        return self.correlation

    def linked_correlation_id(self) -> int:
        return self.linked

    def device_type(self) -> Any:
        return SimpleNamespace(name=self.device)

    def device_index(self) -> int:
        return self.index

    def nbytes(self) -> int:
        return self.bytes

    def is_async(self) -> bool:
        return self.asynchronous


def step(number: int, begin: float, end: float) -> Event:
    return Event(f"ProfilerStep#{number}", begin, end, ANNOTATION)


def mark(phase: str, begin: float, end: float) -> Event:
    return Event(f"easymp: {phase}", begin, end, ANNOTATION)


def gloo(what: str, begin: float, end: float) -> Event:
    return Event(f"gloo:{what}", begin, end, ANNOTATION, thread=3, asynchronous=True)


def kernel(name: str, begin: float, end: float, of: Event | None, index: int = 0) -> Event:
    return Event(name, begin, end, device="CUDA", index=index, linked=of.correlation if of else 99999)


def memory(at: float, size: int, device: str = "CPU", index: int = -1) -> Event:
    return Event("[memory]", at, at, device=device, index=index, bytes=size)
