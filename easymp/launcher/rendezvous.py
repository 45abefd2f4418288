"""The rendezvous of a launch: its configuration, and the handlers that torch's elastic agent asks for the ranks' places.

One node needs a free port only. Several nodes meet by torch's c10d rendezvous, in the order of the node ranks, at a store that the
main node's launcher opens; that node cannot be replaced. A node that fails for good, or is stopped, leaves a report in the store; the
others see it within a second, stop their ranks, and name the node with the traceback.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple

from ..base import env, ranks
from ..base.ranks import LOOPBACK, PORT
from ..errors import SettingError, WorldError
from ..logging import get_logger
from .worker import Failure, say

logger = get_logger(__name__)
WAIT = 600.0  # seconds
RUN = "easymp"
OVER = "over"  # the terms of a run that is closing: the next one may already try to connect at the same port
CONNECT = 10.0  # seconds for the program at the main node's port to answer as a store
ANSWER = 60.0  # seconds for the store's answer to a request
RETRY, PATIENT = 0.3, 5.0  # seconds between two tries to connect, and before a line says that this node waits
LAST_CALL = 10  # seconds for more nodes, once there are enough
HEARTBEAT, MISSED = 5, 3  # seconds; a node that misses MISSED heartbeats is gone
LOOK = 1.0  # seconds between looks at the store
# Seconds for the others' reports, where the cause of a failure must be theirs, and where it is here.
HEARING, BRIEF = 15.0, 3.0
LINGER = 10.0  # seconds that the main node stays for the others to read


@dataclass(frozen=True)
class RendezvousConfig:
    """Where the ranks meet. One node needs none of it: a free port on the loopback is found."""

    nodes: int = 1  # how many take part; with `most`, at least
    # This node's number, in the order of its ranks; 0 is the main node. None: the node that has `address` is the main one.
    node_rank: int | None = None
    address: str = LOOPBACK  # of the main node, where the launchers meet and rank 0 listens
    port: int | None = None
    most: int | None = None  # nodes that may take part, where they come and go; None for exactly `nodes`
    wait: float = WAIT  # seconds that the nodes wait for one another

    def __post_init__(self) -> None:
        rank, limit = self.node_rank, self.limit
        if not 1 <= self.nodes <= limit:
            raise SettingError(f"nodes={self.nodes}:{limit} cannot train: use at least 1, the smaller first")
        if rank is not None and not 0 <= rank < limit:
            raise SettingError(f"node_rank={rank} does not lie in 0 … {limit - 1} for {self.words}")
        if limit > 1 and self.port is None:
            raise SettingError(f"{self.words} need a port to meet at on {self.address}: pass one to each")

    @property
    def limit(self) -> int:
        """Nodes that may take part."""
        return self.nodes if self.most is None else self.most

    @property
    def elastic(self) -> bool:
        """Whether nodes may come and go."""
        return self.limit > self.nodes

    @property
    def words(self) -> str:
        """``"2 nodes"``, ``"1 to 4 nodes"``."""
        number = f"{self.nodes} to {self.limit}" if self.elastic else str(self.nodes)
        return f"{number} node{'s' * (self.limit > 1)}"

    @property
    def endpoint(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def read_config(
    nodes: str | None = None,
    node_rank: int | None = None,
    main_address: str | None = None,
    main_port: int | None = None,
    wait: float = WAIT,
) -> RendezvousConfig:
    """The configuration of a command line: ``"2"`` or ``"1:4"`` nodes, ``"host"`` or ``"host:port"``."""
    least, most = read_nodes(nodes or "1")
    if most == 1 and node_rank is not None:
        raise SettingError(f"--node-rank {node_rank} says which of several machines this is: pass --nodes")
    if most > 1 and main_address is None:
        cure = "pass --main-address HOST[:PORT], an address of the first node, on all of them"
        raise SettingError(f"{most} nodes must know where to meet: {cure}")
    address, port = (LOOPBACK, None) if main_address is None else read_address(main_address)
    port = port or main_port or (PORT if most > 1 else None)
    if most == 1 and not is_here(address):
        ignored = "main_address=%r is not this machine, and not used: this run has one node (more: --nodes)"
        logger.warning(ignored, main_address)
        address = LOOPBACK
    return RendezvousConfig(least, node_rank, address, port, None if most == least else most, wait)


def read_nodes(text: str) -> tuple[int, int]:
    """Fewest and most nodes of ``"2"`` or ``"1:4"``."""
    match = re.fullmatch(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise SettingError(
            f"nodes={text!r} is not a number of nodes: use 2, or 1:4 for at least 1, at most 4"
        )
    return least, most


def read_address(text: str) -> tuple[str, int | None]:
    """Host and port of ``"host"``, ``"host:29500"``, ``"::1"`` or ``"[::1]:29500"``."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([^:\s\[\]]+))(?::(\d+))?", text)
    if match is None:
        try:
            return str(ipaddress.IPv6Address(text)), None
        except ValueError:
            why = f"main_address={text!r} is not an address: use HOST, HOST:PORT or [IPV6]:PORT"
            raise SettingError(why) from None
    port = None if match[3] is None else int(match[3])
    if port is not None and not 0 < port < 65536:
        raise SettingError(f"main_address={text!r} has no possible port: use one from 1 to 65535")
    return match[1] or match[2], port


def find_nodes(
    nodes: str | None, node_rank: int | None, main_address: str | None, main_port: int | None, wait: float
) -> tuple[RendezvousConfig, dict[str, str | None]]:
    """Where this launcher meets the others, as `read_config`, and variables for its workers; announced values fill the gaps.

    Each announced task (of srun, mpirun, a pod of Kubeflow) is a launcher, and counts as a node.
    """
    least, most = read_nodes(nodes or "1")
    found, why = ranks.read_node()
    if why == ranks.BATCH and nodes is None and (count := env.integer("SLURM_JOB_NUM_NODES", 1)) > 1:
        raise SettingError(
            f"Slurm's job has {count} nodes, and its batch script runs on the first one only: write srun before the command, which "
            "starts it on all (`easymp launch --slurm print` shows how), or pass --nodes 1 to use this one"
        )
    if found is None or (found.size == 1 and found.most is None):
        return read_config(nodes, node_rank, main_address, main_port, wait), {}
    if nodes and not least <= found.size <= most:
        raise SettingError(
            f"nodes={nodes!r} and {ranks.said(found.by.size)} contradict each other: leave --nodes out, and start a launcher on each "
            f"node, or unset {found.by.size} for a run of this machine alone"
        )
    there = str(found.size) if found.most is None else f"{found.size}:{found.most}"
    rank = found.rank if node_rank is None else node_rank
    met = read_config(nodes or there, rank, main_address or found.address, main_port or found.port, wait)
    if (found.local_size or 1) == 1:
        return met, {}
    # The worker's entry counts local ranks over all launchers of this machine: each of them numbers its own workers from 0.
    return met, {"EASYMP_LAUNCHER": f"{found.local_rank} of {found.local_size}"}


# -- addresses and ports


def own_address(address: str, port: int | None) -> str:
    """This machine's address on its way to another, by the routing table; ``""`` where there is no way. Nothing is sent."""
    try:
        found = socket.getaddrinfo(address, port or PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(*found[:3]) as probe:
            probe.connect(found[4])
            return probe.getsockname()[0]
    except OSError:
        return ""


def is_here(address: str) -> bool:
    """Whether this machine has the address: the way to it ends where it starts."""
    try:
        targets = {info[4][0] for info in socket.getaddrinfo(address, None, type=socket.SOCK_DGRAM)}
    except OSError:
        return False
    return own_address(address, None) in targets


def interface(address: str) -> str | None:
    """The name of the network interface that has one of this machine's addresses."""
    import psutil  # needed by runs on several machines only

    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == address.partition("%")[0] for found in addresses):
            return name
    return None


def refuse_taken(config: RendezvousConfig) -> None:
    """Raise WorldError where a program listens at the main node's port already, and SettingError where this user may not."""
    if (port := config.port) is None:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections do not count
        try:
            probe.bind(("", port))
        except PermissionError as error:
            why = f"port {port} may not be opened by this user ({error}): take one above 1023"
            raise SettingError(why) from error
        except OSError:
            which, other = "this machine", "or leave it out to have a free one found"
            if config.limit > 1:
                which, other = "the main node, which is this one,", "on all nodes"
            raise WorldError(
                f"port {port} on {which} is taken, by another program or by another launcher of this run (pass --node-rank to "
                f"each): pass a free one, --main-address {config.address}:PORT, {other}; `ss -ltnp 'sport = :{port}'` shows it"
            ) from None


def hold_port() -> tuple[socket.socket, int]:
    """A free port, and a socket that keeps other programs from getting it, until it is closed.

    Ranks open theirs when they have imported torch, which takes seconds. A program that names the port and sets SO_REUSEADDR, as
    torch's store does, may listen there meanwhile. That is so on Linux only; elsewhere the port is not kept.
    """
    kept = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    kept.bind(("", 0))
    port = kept.getsockname()[1]
    if sys.platform == "linux":
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    else:
        kept.close()
    return kept, port


# -- handlers


class Report(NamedTuple):
    """How a node's part of the run ended, as its launcher tells the others."""

    failures: tuple[Failure, ...] = ()  # of its ranks, likeliest cause first
    caused: bool = False  # whether the cause is there, and not another rank that was lost
    signal: int | None = None  # that stopped its launcher
    saved: str = ""  # the checkpoint that its ranks saved: they can be started again
    node: str = ""  # "node 1 (host)"
    main: bool = False  # it is the node that the others meet at


class Ended(Exception):
    """The run ended on other nodes; its argument, the list of their reports, says how."""


class SingleNode:
    """The rendezvous of one node: a port for its ranks."""

    use_agent_store = False  # ranks do not use the launcher's store: it has keys of earlier attempts

    def __init__(self, config: RendezvousConfig) -> None:
        self._config, self._round = config, 0
        self._kept = socket.socket()  # from the first round on it keeps the ranks' port for them
        refuse_taken(config)

    def next_rendezvous(self) -> Any:
        """A round in which the ranks meet; from the second on because one failed."""
        from torch.distributed import HashStore
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        if self._round:
            say(f"a rank failed; restart {self._round}")
        self._round += 1
        # Another port each time: children of a killed rank may have the last one open for some seconds.
        store, port = HashStore(), self._config.port or self._next_port()
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo.build(0, store, self._config.address, port))

    def _next_port(self) -> int:
        self._kept.close()
        self._kept, port = hold_port()
        return port

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return RUN

    def get_backend(self) -> str:
        return "easymp"

    def tell(self, report: Report) -> None:
        """Leave a report for the others."""

    def hear(self, own: Report) -> list[Report]:
        """The others' reports, after `tell(own)`."""
        return []

    def close(self, over: bool) -> None:
        """Leave; `over`: no node may join any more."""
        self._kept.close()


class MultiNode(SingleNode):
    """The rendezvous of this node with others."""

    def __init__(self, config: RendezvousConfig) -> None:
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

        self._config, self._kept, host = config, socket.socket(), socket.gethostname()
        self._main = is_here(config.address) if config.node_rank is None else config.node_rank == 0
        self._own = own_address(config.address, config.port) or host
        self._name = host if config.node_rank is None else f"node {config.node_rank} ({host})"
        self._store = _open_store(config, self._main, self._name)
        asked = RendezvousParameters(
            *("c10d", config.endpoint, RUN, config.nodes, config.limit, self._own),
            join_timeout=max(1, int(config.wait)),
            last_call_timeout=LAST_CALL,
            keep_alive_interval=HEARTBEAT,
            keep_alive_max_attempt=MISSED,
        )
        self._torchs = create_handler(self._store, C10dRendezvousBackend(self._store, RUN), asked)
        self._round = self._restarts = 0
        self._size = 0  # nodes, once they have met
        self._looked, self._others_wait = 0.0, False
        self._lost = False  # the main node's store is gone
        self._told = 0  # our report's number

    def next_rendezvous(self) -> Any:
        """A round in which the nodes meet, in their order; from the second on because a rank failed, or a node came or went."""
        from torch.distributed import PrefixStore
        from torch.distributed.elastic import rendezvous

        failed = self._round > 0 and not self._others_wait
        self._restarts += failed
        try:
            found = self._torchs.next_rendezvous()
            order, names = self._in_order(found)
            rank, store = order.index(found.rank), PrefixStore("ordered", found.store)
            address = self._config.address if self._main else self._own
            meet = rendezvous.RendezvousStoreInfo.build(rank, store, address, self._next_port())
        except rendezvous.RendezvousTimeoutError:
            came = range(1, self._store.add("came", 0) + 1)
            names = ", ".join(self._store.get(f"came/{i}").decode() for i in came)
            raise WorldError(
                f"{self._config.words} were to meet at {self._config.endpoint}, and after {self._config.wait:g} seconds not enough are "
                f"there (so far came: {names}): start the others, ask for fewer with --nodes, or wait longer with --wait SECONDS"
            ) from None
        except (rendezvous.RendezvousClosedError, rendezvous.RendezvousGracefulExitError):
            try:
                ends = self._others(final=True)
            except RuntimeError as error:  # the main node closed the run and did not wait for this one
                raise self._gone(error) from None
            if ends:
                raise Ended(ends) from None
            late = "'s ranks could start again" if self._round else " took part"
            where = f"the run at {self._config.endpoint} is over, before this node{late}"
            raise WorldError(f"{where}: the others' output says how it ended") from None
        except (SettingError, WorldError):
            raise
        except (rendezvous.RendezvousError, RuntimeError) as error:
            raise self._gone(error) from error
        self._round, self._others_wait = self._round + 1, False
        if self._round > 1:
            why = f"a rank failed; restart {self._restarts}" if failed else "the workers start again"
            say(f"{why}, on {len(order)} node{'s' * (len(order) > 1)}: {', '.join(names)}")
        return rendezvous.RendezvousInfo(found.store, rank, len(order), meet)

    def _gone(self, error: Exception) -> WorldError:
        return WorldError(f"the main node at {self._config.endpoint} is gone, and with it this run ({error})")

    def _in_order(self, found: Any) -> tuple[list[int], list[str]]:
        """Torch's numbers of the nodes in the order of ours, and their names: the main node, then by node rank, then as torch has them."""
        limit, own = self._config.limit, self._config.node_rank
        place = [not self._main, limit if own is None else own, self._name]
        found.store.set(f"node/{found.rank}", json.dumps(place))
        nodes = [json.loads(found.store.get(f"node/{i}")) for i in range(found.world_size)]
        self._size = len(nodes)
        order = sorted(range(len(nodes)), key=lambda i: (*nodes[i][:2], i))
        for one, other in pairwise(order):
            if nodes[one][1] == nodes[other][1] < limit:
                same = f"{nodes[one][2]} and {nodes[other][2]} say the same --node-rank {nodes[one][1]}"
                raise SettingError(f"{same}: each machine needs its own")
        return order, [nodes[i][2] for i in order]

    @contextmanager
    def _unless_lost(self) -> Iterator[None]:
        """Inside, requests to the store; where it is gone, the rest is left out. A RendezvousError is a RuntimeError, too."""
        try:
            yield
        except RuntimeError:
            self._lost = True

    def num_nodes_waiting(self) -> int:
        """Nodes that want to join. Where the main node is done and gone, the ranks here run to their own end."""
        now = time.monotonic()
        if self._lost or now - self._looked < LOOK:
            return 0
        self._looked = now
        ends, waiting = [], 0
        with self._unless_lost():
            ends, waiting = self._others(final=True), self._torchs.num_nodes_waiting()
        if ends and not self._lost:
            self._store.add("heard", 1)
            raise Ended(ends)
        self._others_wait = waiting > 0
        return waiting

    def tell(self, report: Report) -> None:
        own = tuple(f._replace(text="") for f in report.failures)  # tracebacks are shown where they arose
        report = report._replace(failures=own, node=self._name, main=self._main)
        with self._unless_lost():
            self._told = self._store.add("told", 1)
            self._store.set(f"told/{self._told}", json.dumps(report))

    def hear(self, own: Report) -> list[Report]:
        """The others' reports, waited for as long as they may change which failure is the cause."""
        deadline = time.monotonic() + (BRIEF if own.caused else HEARING)
        others: list[Report] = []
        while not self._lost:
            with self._unless_lost():
                others, silent = self._others(), self._store.add("heard", 0)
                final = not own.caused and any(self._is_final(r) and (r.caused or r.signal) for r in others)
                if final or len(others) + silent >= self._size - 1 or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        return others

    def close(self, over: bool) -> None:
        """Leave; the main node stays until the others have left, too, and read the reports."""
        self._kept.close()
        with self._unless_lost():
            if over or self._main or not self._config.elastic:
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

    def _others(self, final: bool = False) -> list[Report]:
        told = (i for i in range(1, self._store.add("told", 0) + 1) if i != self._told)
        found = [Report(*json.loads(self._store.get(f"told/{i}"))) for i in told]
        reports = [report._replace(failures=tuple(Failure(*f) for f in report.failures)) for report in found]
        return [report for report in reports if not final or self._is_final(report)]

    def _is_final(self, report: Report) -> bool:
        """Whether it ends the run here, too. Where nodes may come and go, a node that was stopped only leaves."""
        return report.signal is None or report.main or not self._config.elastic


# -- the store of several nodes


def _open_store(config: RendezvousConfig, main: bool, name: str) -> Any:
    """The store of this run, opened by the main node; `name` is written down there."""
    from torch.distributed import PrefixStore, TCPStore

    from ..distributed.hang_report import in_time  # imports torch

    terms, start, said = json.dumps([config.nodes, config.limit]), time.monotonic(), False
    options = {"is_master": main, "wait_for_workers": False, "timeout": timedelta(seconds=CONNECT)}
    if main:
        if not is_here(config.address):
            raise WorldError(
                f"{config.address!r} is not an address of this machine, which is to be the main node: pass one of its own with "
                "--main-address, on all nodes, or --node-rank 0 on the machine that has it"
            )
        refuse_taken(config)
    while True:
        try:
            if not main:  # By hand, for torch's store cannot be interrupted while it waits.
                socket.create_connection((config.address, config.port), timeout=CONNECT).close()
        except OSError as error:
            why = error.strerror or str(error)
        else:
            try:
                tcp = in_time(lambda: TCPStore(config.address, config.port, **options), CONNECT)
                tcp.set_timeout(timedelta(seconds=ANSWER))
                store = PrefixStore(RUN, tcp)
                if main:
                    store.set("terms", terms)
                theirs = store.get("terms").decode()
                if theirs == terms:
                    store.set(f"came/{store.add('came', 1)}", name)
                    return store
            except (RuntimeError, TimeoutError) as error:
                why = (str(error).splitlines() or [type(error).__name__])[0]
                who = f"the program that listens at {config.endpoint}"
                cure = f"pass its address and port ({why})"
                raise WorldError(f"{who} does not answer as the main node's launcher: {cure}") from error
            if theirs != OVER:
                least, most = json.loads(theirs)
                there = RendezvousConfig(least, 0, port=1, most=most).words
                both = f"was started for {there}, this one for {config.words}: pass the same --nodes on all"
                raise SettingError(f"the main node at {config.endpoint} {both}")
            del store, tcp
            why = "the run there is over"
        waited = time.monotonic() - start
        if waited >= config.wait:
            raise WorldError(
                f"the main node did not answer at {config.endpoint} for {config.wait:g} seconds ({why}): start it there with "
                "--node-rank 0, correct --main-address, or wait longer with --wait SECONDS"
            )
        if waited >= PATIENT and not said:
            say(f"waiting for the main node at {config.endpoint} ({why})")
            said = True
        time.sleep(RETRY)
