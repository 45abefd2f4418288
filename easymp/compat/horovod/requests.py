"""What a rank asks for, and what is agreed on: plain records that travel as JSON, and pure functions between them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...distributed.process_group import odd_one_out

# What each kind of operation needs to be alike on all ranks.
ALIKE = {
    "allreduce": ("shape", "dtype", "op", "prescale", "postscale", "device"),
    "allgather": ("dtype", "device"),
    "broadcast": ("shape", "dtype", "root", "device"),
    "alltoall": ("dtype", "device"),
    "reducescatter": ("shape", "dtype", "op", "device"),
    "barrier": (),
    "join": (),
    "leave": (),
}
ROWS = ("allgather", "alltoall")  # dimension 0 may differ


@dataclass(frozen=True)
class Request:
    """One operation of one rank.

    Attributes:
        name: by which the ranks' requests are brought together, whatever their order; of one that leaves: why.
        shape, dtype, device: of the tensor; `device` is the type.
        op: "sum", "average", "min", "max", "product", "adasum", or "".
        root: of a broadcast.
        prescale, postscale: factors before and after a reduction.
        splits: rows for each rank, of an alltoall.
    """

    name: str
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    device: str = "cpu"
    op: str = ""
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    splits: tuple[int, ...] = ()


@dataclass(frozen=True)
class Order:
    """What all ranks do next.

    Attributes:
        request: rank 0's, or of the first rank that is not done.
        rows: dimension 0 of each rank's tensor, where it may differ; 0 of those that joined.
        splits: of each rank, of an alltoall.
        joined: ranks that have no more data, and take part with zeros.
        error: why it is not done; on all ranks.
    """

    request: Request
    rows: tuple[int, ...] = ()
    splits: tuple[tuple[int, ...], ...] = ()
    joined: tuple[int, ...] = ()
    error: str = ""


@dataclass
class Table:
    """Rank 0's view of who has asked for what.

    Attributes:
        size: ranks.
        joined: those that have no more data, in the order in which they said so.
        left: those that shut down, and why; from then on nothing can be agreed on.
    """

    size: int
    joined: list[int] = field(default_factory=list)
    left: dict[int, str] = field(default_factory=dict)
    _leaving: list[int] = field(default_factory=list)
    _waiting: dict[str, dict[int, Request]] = field(default_factory=dict)

    def add(self, rank: int, requests: list[Request]) -> None:
        for request in requests:
            if request.kind == "join":
                self.joined.append(rank)
            elif request.kind == "leave":
                self.left[rank] = request.name
                self._leaving.append(rank)
            else:
                self._waiting.setdefault(request.name, {})[rank] = request

    def complete(self) -> list[Order]:
        """Operations that every rank has asked for or joined before, or that a rank left; they leave the table. Then who left."""
        joined = set(self.joined)
        ready = [name for name, asked in self._waiting.items() if len(asked.keys() | joined) == self.size]
        orders = [agree(self._waiting.pop(name), self.size, self.joined) for name in ready]
        if len(self.joined) == self.size:
            orders.append(Order(Request("join", "join", root=self.joined[-1])))
            self.joined.clear()
        if self.left:
            asked = [next(iter(requests.values())) for requests in self._waiting.values()]
            asked += [Request("join", "join")] * bool(self.joined)
            orders += [Order(request, error=f"{request.name}: {self._gone()}") for request in asked]
            self._waiting.clear()
            self.joined.clear()
        orders += [Order(Request(self.left[rank], "leave", root=rank)) for rank in self._leaving]
        self._leaving.clear()
        return orders

    def _gone(self) -> str:
        said = "; ".join(f"rank {rank} has left ({why})" for rank, why in self.left.items())
        return f"{said}. A rank that only runs out of data calls hvd.join() first"

    def missing(self) -> dict[str, list[int]]:
        """Ranks that operations wait for, by name."""
        return {
            name: [r for r in range(self.size) if r not in asked and r not in self.joined]
            for name, asked in self._waiting.items()
        }


def agree(asked: Mapping[int, Request], size: int, joined: list[int]) -> Order:
    """What comes of the ranks' requests of one name."""
    ranks = sorted(asked)
    first = asked[ranks[0]]
    fault = _fault(asked, ranks, first, size, joined)
    rows = (
        tuple(asked[r].shape[0] if r in asked and asked[r].shape else 0 for r in range(size))
        if first.kind in ROWS
        else ()
    )
    splits = (
        tuple(asked[r].splits if r in asked else (0,) * size for r in range(size))
        if first.kind == "alltoall"
        else ()
    )
    return Order(first, rows, splits, tuple(joined), fault)


def _fault(
    asked: Mapping[int, Request], ranks: list[int], first: Request, size: int, joined: list[int]
) -> str:
    where = f"{first.name}: the ranks' calls differ"
    kinds = [asked[r].kind for r in ranks]
    if len(set(kinds)) > 1:
        return f"{where}: {odd_one_out(kinds)}"
    for word in ALIKE[first.kind]:
        values = [getattr(asked[r], word) for r in ranks]
        if any(value != values[0] for value in values):
            return f"{where} in {word}: {odd_one_out(values)}"
    if first.kind in ROWS:
        rest = [asked[r].shape[1:] for r in ranks]
        if any(shape != rest[0] for shape in rest):
            return f"{where} in shape, beyond dimension 0: {odd_one_out([asked[r].shape for r in ranks])}"
    if first.kind == "broadcast" and not 0 <= first.root < size:
        return f"{first.name}: root rank {first.root} is none of 0 … {size - 1}"
    if joined and first.kind not in ("allreduce", "allgather", "barrier"):
        return f"{first.name}: {first.kind} needs every rank, and rank {', '.join(map(str, joined))} joined: it has no more data"
    return ""


def written(items: list[Any]) -> str:
    return json.dumps([dataclasses.asdict(item) for item in items])


def read_requests(text: str | bytes) -> list[Request]:
    return [_request(entry) for entry in json.loads(text)]


def read_orders(text: str | bytes) -> list[Order]:
    return [
        Order(
            _request(entry["request"]),
            tuple(entry["rows"]),
            tuple(map(tuple, entry["splits"])),
            tuple(entry["joined"]),
            entry["error"],
        )
        for entry in json.loads(text)
    ]


def _request(entry: dict[str, Any]) -> Request:
    return Request(**{**entry, "shape": tuple(entry["shape"]), "splits": tuple(entry["splits"])})
