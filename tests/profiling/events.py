"""Events as kineto gives them, made by hand: also those of a GPU that is not here."""

from __future__ import annotations

from types import SimpleNamespace

ANNOTATION, FUNCTION, BACKWARD = 7, 0, 1


class Event:
    """Times in µs; kineto's are in ns."""

    def __init__(
        self,
        what: str,
        begin: float,
        end: float,
        kind: int = FUNCTION,
        *,
        thread: int = 1,
        correlation: int = 0,
        linked: int = 0,
        device: str = "CPU",
        index: int = -1,
        bytes: int = 0,
        asynchronous: bool = False,
    ) -> None:
        self.what, self.correlation, self.index = what, correlation, index
        start, stop, place = int(begin * 1000), int(end * 1000), SimpleNamespace(name=device)
        facts = {"name": what, "start_ns": start, "end_ns": stop, "duration_ns": stop - start, "scope": kind}
        facts |= {"start_thread_id": thread, "correlation_id": correlation, "linked_correlation_id": linked}
        facts |= {"device_type": place, "device_index": index, "nbytes": bytes, "is_async": asynchronous}
        for name, fact in facts.items():
            setattr(self, name, lambda fact=fact: fact)


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
