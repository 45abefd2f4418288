"""The rendezvous of a single node, with the calls of torch's: nobody to wait for, and a port of its own for the ranks."""

from __future__ import annotations

import socket
from typing import Any

from ..errors import WorldError
from .failure import say
from .place import Place, hold, listening
from .reports import Report


class Alone:
    """One node's rendezvous, and the same calls about the others' endings as `meeting.Meeting` has.

    Raises:
        WorldError: somebody listens at the port that was asked for.
    """

    use_agent_store = (
        False  # of the launcher, by the ranks: its keys of an earlier attempt would be read again
    )

    def __init__(self, place: Place) -> None:
        import torch.distributed as dist

        self._place = place
        self._store = dist.HashStore()
        self._round = 0
        refuse_taken(place)
        self._kept = socket.socket()  # from the first round on what keeps the ranks' port for them

    def next_rendezvous(self) -> Any:
        """A round in which the ranks meet; from the second on because one failed."""
        import torch.distributed as dist
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        if self._round:
            say(f"a rank failed; restart {self._round}")
        self._round += 1
        store, port = dist.PrefixStore(str(self._round), self._store), self._place.port
        if (
            port is None
        ):  # another one each time: what a killed rank has forked may have the last one open for some seconds
            self._kept.close()
            self._kept, port = hold()
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo.build(0, store, self._place.address, port))

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "easymp"

    def get_backend(self) -> str:
        return "easymp"

    def tell(self, report: Report) -> None:
        """Nobody listens."""

    def hear(self, own: Report) -> list[Report]:
        """Nobody else."""
        return []

    def close(self, over: bool) -> None:
        self._kept.close()


def refuse_taken(place: Place) -> None:
    """Raise WorldError where the main node's port is in use already."""
    if place.port is not None and listening(place.port):
        which = "the main node, which is this one," if place.limit > 1 else "this machine"
        other = "on all nodes" if place.limit > 1 else "or leave it away to have a free one found"
        raise WorldError(
            f"port {place.port} on {which} is taken by another program: pass a free one, --main-address {place.address}:PORT, {other}; "
            f"`ss -ltnp 'sport = :{place.port}'` shows who listens there"
        )
