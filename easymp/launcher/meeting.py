"""The rendezvous of several nodes: torch's c10d one, in the order of the node ranks, and with a word from each node when its part ends.

The main node's launcher has the store that all meet at, so it is the one that cannot be replaced. A node that fails for good, or is
stopped, leaves a report there; the others see it within a second, stop their ranks, and know whose traceback matters.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

from ..errors import SettingError, WorldError
from .failure import say
from .knocking import OVER, RUN, open_store
from .place import Place, hold, is_here, own_address
from .reports import Report

LAST_CALL = 10  # seconds for more nodes, once there are enough
HEARTBEAT, MISSED = 5, 3  # seconds; a node that misses so many is gone
LOOK = 1.0  # seconds between looks at the store
HEARING = 15.0  # seconds for the others' reports, where what happened here must have its cause there
BRIEF = 3.0  # and where it has its cause here
LINGER = 10.0  # seconds that the main node stays for the others to read


class Ended(Exception):
    """The run ended on other nodes; `reports` say how."""

    def __init__(self, reports: list[Report]) -> None:
        super().__init__("the run ended on another node")
        self.reports = reports


class Meeting:
    """This node among several.

    Raises:
        WorldError: the main node's port is taken, or it does not answer in time.
        SettingError: the main node was started for another number of nodes.
    """

    use_agent_store = False  # see Alone

    def __init__(self, place: Place) -> None:
        self._place = place
        self._main = is_here(place.address) if place.node_rank is None else place.node_rank == 0
        self._own = own_address(place.address, place.port) or socket.gethostname()
        self._name = (
            f"node {place.node_rank} ({socket.gethostname()})"
            if place.node_rank is not None
            else socket.gethostname()
        )
        self._store = open_store(place, self._main, self._name)
        self._torchs = self._rendezvous()
        self._round, self._restarts, self._size = 0, 0, 0  # nodes, once they have met
        self._looked, self._others_wait, self._lost = 0.0, False, False
        self._told = 0  # our report's number
        self._kept = (
            socket.socket()
        )  # from the first round on what keeps the ranks' port for them, should rank 0 be here

    # -- coming together ---------------------------------------------------------------------------------------------

    def _rendezvous(self) -> Any:
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

        wanted = RendezvousParameters(
            "c10d",
            self._place.endpoint,
            RUN,
            self._place.nodes,
            self._place.limit,
            self._own,
            join_timeout=max(1, int(self._place.wait)),
            last_call_timeout=LAST_CALL,
            keep_alive_interval=HEARTBEAT,
            keep_alive_max_attempt=MISSED,
        )
        return create_handler(self._store, C10dRendezvousBackend(self._store, RUN), wanted)

    def next_rendezvous(self) -> Any:
        """A round in which the nodes meet, in their order; from the second on because a rank failed, or a node came or went.

        Raises:
            Ended: the run has ended elsewhere.
            WorldError: too few nodes came, or the main one is gone.
            SettingError: two nodes have the same rank.
        """
        import torch.distributed as dist
        from torch.distributed.elastic import rendezvous

        failed = self._round > 0 and not self._others_wait
        self._restarts += failed
        try:
            found = self._torchs.next_rendezvous()
            order, listed = self._in_order(found)
            rank = order.index(found.rank)
            store = dist.PrefixStore("ordered", found.store)
            self._kept.close()
            self._kept, port = hold()  # another one each time, as `Alone` has
            address = self._place.address if self._main else self._own
            meet = rendezvous.RendezvousStoreInfo.build(rank, store, address, port)
        except rendezvous.RendezvousTimeoutError:
            raise WorldError(self._too_few()) from None
        except (rendezvous.RendezvousClosedError, rendezvous.RendezvousGracefulExitError):
            raise self._ended() from None
        except (rendezvous.RendezvousError, RuntimeError) as error:
            if isinstance(error, (SettingError, WorldError)):
                raise
            raise self._gone(error) from error
        self._round, self._others_wait = self._round + 1, False
        if self._round > 1:
            why = f"a rank failed; restart {self._restarts}" if failed else "the workers start again"
            say(f"{why}, on {len(order)} node{'s' * (len(order) > 1)}: {', '.join(listed)}")
        return rendezvous.RendezvousInfo(found.store, rank, len(order), meet)

    def _ended(self) -> Ended | WorldError:
        try:
            ends = [report for report in self._others() if self._final(report)]
        except RuntimeError as error:  # the main node closed the run and did not wait for this one
            return self._gone(error)
        if ends:
            return Ended(ends)
        late = (
            "before this node's ranks could start again"
            if self._round
            else "and this node came too late to take part"
        )
        return WorldError(
            f"the run at {self._place.endpoint} is over, {late}: the others' output says how it ended"
        )

    def _gone(self, error: Exception) -> WorldError:
        return WorldError(f"the main node at {self._place.endpoint} is gone, and with it this run ({error})")

    def _in_order(self, found: Any) -> tuple[list[int], list[str]]:
        """Torch's numbers of the nodes in the order of ours, and their names: the main node, then by node rank, then as torch has them."""
        mine = [
            not self._main,
            self._place.limit if self._place.node_rank is None else self._place.node_rank,
            self._name,
        ]
        found.store.set(f"node/{found.rank}", json.dumps(mine))
        nodes = [json.loads(found.store.get(f"node/{i}")) for i in range(found.world_size)]
        self._size = len(nodes)
        order = sorted(range(len(nodes)), key=lambda i: (*nodes[i][:2], i))
        for one, other in pairwise(order):
            if nodes[one][1] == nodes[other][1] < self._place.limit:
                raise SettingError(
                    f"{nodes[one][2]} and {nodes[other][2]} say the same --node-rank {nodes[one][1]}: each machine needs its own"
                )
        return order, [nodes[i][2] for i in order]

    def _too_few(self) -> str:
        count = self._store.add("came", 0)
        names = ", ".join(self._store.get(f"came/{i}").decode() for i in range(1, count + 1))
        return (
            f"{self._place.words} were to meet at {self._place.endpoint}, and after {self._place.wait:g} seconds not enough are there "
            f"(so far came: {names}): start the others, ask for fewer with --nodes, or wait longer with --wait SECONDS"
        )

    # -- while the ranks run -----------------------------------------------------------------------------------------

    def num_nodes_waiting(self) -> int:
        """Nodes that want to join. A main node that is done and gone leaves the ranks here to their own end.

        Raises:
            Ended: the run has ended on another node.
        """
        from torch.distributed.elastic.rendezvous import RendezvousError

        now = time.monotonic()
        if self._lost or now - self._looked < LOOK:
            return 0
        self._looked = now
        try:
            ends = [report for report in self._others() if self._final(report)]
            waiting = self._torchs.num_nodes_waiting()
        except (RendezvousError, RuntimeError):
            self._lost = True
            return 0
        if ends:
            self._store.add("heard", 1)
            raise Ended(ends)
        self._others_wait = waiting > 0
        return waiting

    def get_run_id(self) -> str:
        return RUN

    def get_backend(self) -> str:
        return "easymp"

    # -- endings -----------------------------------------------------------------------------------------------------

    def tell(self, report: Report) -> None:
        """Leave word for the others."""
        try:
            self._told = self._store.add("told", 1)
            self._store.set(f"told/{self._told}", replace(report, node=self._name, main=self._main).to_json())
        except RuntimeError:
            self._lost = True

    def hear(self, own: Report) -> list[Report]:
        """What the others say of their ends, after `tell(own)`: waited for as long as it may change who is to blame."""
        deadline = time.monotonic() + (BRIEF if own.caused else HEARING)
        others: list[Report] = []
        while not self._lost:
            try:
                others, silent = self._others(), self._store.add("heard", 0)
            except RuntimeError:
                self._lost = True
                break
            certain = not own.caused and any(
                self._final(report) and (report.caused or report.signal) for report in others
            )
            if certain or len(others) + silent >= self._size - 1 or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return others

    def close(self, over: bool) -> None:
        """Leave; `over`: nobody may join any more. The main node stays until the others have left, too, and read what was told."""
        self._kept.close()
        try:
            if over or self._main or not self._place.elastic:
                self._torchs.shutdown()
            if self._main:
                self._store.set("terms", OVER)
                self._store.set("over", "")
            elif over and not self._told:
                # Else the same node's next run would find this run's store, and leave it as it finds another.
                with suppress(RuntimeError):
                    self._store.wait(["over"], timedelta(seconds=BRIEF))
            left, deadline = self._store.add("left", 1), time.monotonic() + LINGER
            while self._main and left < self._size and time.monotonic() < deadline:
                time.sleep(0.1)
                left = self._store.add("left", 0)
        except RuntimeError:
            self._lost = True

    def _others(self) -> list[Report]:
        told = range(1, self._store.add("told", 0) + 1)
        return [Report.from_json(self._store.get(f"told/{i}").decode()) for i in told if i != self._told]

    def _final(self, report: Report) -> bool:
        """Whether it ends the run here, too: where nodes may come and go, one that was stopped only leaves."""
        return report.signal is None or report.main or not self._place.elastic
