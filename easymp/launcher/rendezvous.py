"""The rendezvous of a launch: its configuration, and the handlers that torch's elastic agent asks for ranks.

One node needs a free port only. Several nodes meet by torch's c10d rendezvous, in the order of the node ranks, at a
store that the main node's launcher opens; that node cannot be replaced. A node that fails for good, or is stopped,
leaves a report in the store; the others see it within a second, stop their ranks, and name the node with the traceback.
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
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from ..base import env, ranks
from ..base.ranks import LOOPBACK, PORT
from ..errors import SettingError, WorldError
from ..logging import get_logger
from .worker import Failure, print_line

logger = get_logger(__name__)
WAIT = 600.0  # seconds that nodes wait for one another
WAIT_LONGER = "or wait longer with --wait SECONDS"
RUN = "easymp"
OVER = "over"  # the terms of a run that is closing: the next one may already try to connect at the same port
CONNECT = 10.0  # seconds for the program at the main node's port to answer as a store
ANSWER = 60.0  # seconds for the store's answer to a request
RETRY, PATIENCE = 0.3, 5.0  # seconds between two tries to connect, and before a line says that this node waits
LAST_CALL = 10  # seconds for more nodes, once there are enough
HEARTBEAT, MISSED = 5, 3  # seconds; a node that misses MISSED heartbeats is gone
LOOK = 1.0  # seconds between looks at the store
# Seconds to wait for the others' reports, where the cause of a failure must be theirs, and where it is here.
REPORTS, FEW_REPORTS = 15.0, 3.0
LINGER = 10.0  # seconds that the main node stays for the others to read


@dataclass(frozen=True)
class RendezvousConfig:
    """Where the ranks meet. One node needs none of it: a free port on the loopback is found."""

    nodes: int = 1  # that take part; with `max_nodes`, at least
    node_rank: int | None = None  # in the order of ranks; 0 is the main node. None: the main node has `address`
    address: str = LOOPBACK  # of the main node, where the launchers meet and rank 0 listens
    port: int | None = None
    max_nodes: int | None = None  # where nodes come and go
    wait: float = WAIT  # seconds that the nodes wait for one another

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= self.limit:
            raise SettingError(f"nodes={self.nodes}:{self.limit} cannot train: use at least 1, the smaller first")
        rank, last = self.node_rank, self.limit - 1
        if rank is not None and not 0 <= rank <= last:
            raise SettingError(f"node_rank={rank} does not lie in 0 … {last} for {self.node_count}")
        if self.limit > 1 and self.port is None:
            raise SettingError(f"{self.node_count} need a port to meet at on {self.address}: pass one to each")

    @property
    def limit(self) -> int:
        """Nodes that may take part."""
        return self.nodes if self.max_nodes is None else self.max_nodes

    @property
    def elastic(self) -> bool:
        """Whether nodes may come and go."""
        return self.limit > self.nodes

    @property
    def node_count(self) -> str:
        """``"2 nodes"``, ``"1 to 4 nodes"``."""
        number = f"{self.nodes} to {self.limit}" if self.elastic else str(self.nodes)
        return f"{number} node{'s' * (self.limit > 1)}"

    @property
    def endpoint(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def read_nodes(text: str) -> tuple[int, int]:
    """Fewest and most nodes of ``"2"`` or ``"1:4"``."""
    match = re.fullmatch(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?", text)
    min_nodes, max_nodes = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= min_nodes <= max_nodes:
        raise SettingError(f"nodes={text!r} is not a number of nodes: use 2, or 1:4 for at least 1, at most 4")
    return min_nodes, max_nodes


def read_address(text: str) -> tuple[str, int | None]:
    """Host and port of ``"host"``, ``"host:29500"``, ``"::1"`` or ``"[::1]:29500"``."""
    with suppress(ValueError):
        return str(ipaddress.IPv6Address(text)), None
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([^:\s\[\]]+))(?::(\d+))?", text)
    if match is None:
        raise SettingError(f"main_address={text!r} is not an address: use HOST, HOST:PORT or [IPV6]:PORT")
    port = None if match[3] is None else int(match[3])
    if port is not None and not 0 < port < 65536:
        raise SettingError(f"main_address={text!r} has no possible port: use one from 1 to 65535")
    return match[1] or match[2], port


def find_nodes(
    nodes: str | None, node_rank: int | None, main_address: str | None, main_port: int | None, wait: float
) -> tuple[RendezvousConfig, dict[str, str | None]]:
    """Where this launcher meets the others, by a command line and announced values, and variables for its workers.

    Each announced task (of srun, mpirun, a pod of Kubeflow) is a launcher, and counts as a node.
    """
    min_nodes, max_nodes = read_nodes(nodes or "1")
    variables: dict[str, str | None] = {}
    announced = ranks.read_node()
    job_nodes = env.integer("SLURM_JOB_NUM_NODES") or 1
    if announced == ranks.BATCH and nodes is None and job_nodes > 1:
        raise SettingError(
            f"Slurm's job has {job_nodes} nodes, and its batch script runs on the first one only: write srun before "
            "the command to start it on all, or pass --nodes 1"
        )
    if isinstance(announced, ranks.Announced) and (announced.size > 1 or announced.max_nodes is not None):
        if nodes is None:
            min_nodes, max_nodes = announced.size, announced.max_nodes or announced.size
        elif not min_nodes <= announced.size <= max_nodes:
            raise SettingError(
                f"nodes={nodes!r} and {ranks.variables(announced.launcher.size)} contradict each other: leave --nodes "
                f"out and start a launcher on each node, or unset {announced.launcher.size} for a run of this machine "
                "alone"
            )
        node_rank = announced.rank if node_rank is None else node_rank
        main_address, main_port = main_address or announced.address, main_port or announced.port
        if (announced.local_size or 1) > 1:
            # The worker counts local ranks over all launchers of this machine, which number theirs from 0.
            variables["EASYMP_LAUNCHER"] = f"{announced.local_rank} of {announced.local_size}"
    if max_nodes == 1 and node_rank is not None:
        raise SettingError(f"--node-rank {node_rank} says which of several machines this is: pass --nodes")
    if max_nodes > 1 and main_address is None:
        remedy = "pass --main-address HOST[:PORT], an address of the first node, on all of them"
        raise SettingError(f"{max_nodes} nodes must know where to meet: {remedy}")
    address, port = (LOOPBACK, None) if main_address is None else read_address(main_address)
    port = port or main_port or (PORT if max_nodes > 1 else None)
    if max_nodes == 1 and not is_local(address):
        message = "main_address=%r is not this machine, and not used: this run has one node (more: --nodes)"
        logger.warning(message, main_address)
        address = LOOPBACK
    config = RendezvousConfig(min_nodes, node_rank, address, port, None if max_nodes == min_nodes else max_nodes, wait)
    return config, variables


# -- addresses and ports


def own_address(address: str, port: int | None = None) -> str:
    """This machine's address on its way to another, by the routing table; "" without a way. Nothing is sent."""
    try:
        target = socket.getaddrinfo(address, port or PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(*target[:3]) as probe:
            probe.connect(target[4])
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def is_local(address: str) -> bool:
    """Whether this machine has the address: the way to it ends where it starts."""
    try:
        targets = {info[4][0] for info in socket.getaddrinfo(address, None, type=socket.SOCK_DGRAM)}
    except OSError:
        return False
    return own_address(address) in targets


def interface(address: str) -> str | None:
    """The name of the network interface that has one of this machine's addresses."""
    import psutil  # needed by runs on several machines only

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in addresses):
            return str(name)
    return None


def check_port_is_free(config: RendezvousConfig) -> None:
    """Raise WorldError where a program listens at the main node's port, SettingError where this user may not."""
    if config.port is None:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections do not count
        try:
            probe.bind(("", config.port))
        except PermissionError as error:
            remedy = "take one above 1023"
            raise SettingError(f"port {config.port} may not be opened by this user ({error}): {remedy}") from error
        except OSError:
            machine, remedy = "this machine", "or leave it out to have a free one found"
            if config.limit > 1:
                machine, remedy = "the main node, which is this one,", "on all nodes"
            raise WorldError(
                f"port {config.port} on {machine} is taken, by another program or by another launcher of this run "
                f"(pass --node-rank to each): pass a free one, --main-address {config.address}:PORT, {remedy}; "
                f"`ss -ltnp 'sport = :{config.port}'` shows it"
            ) from None


# -- handlers


class Report(NamedTuple):
    """How a node's part of the run ended, as its launcher tells the others."""

    failure: Failure | None = None  # of its ranks, the likeliest cause
    caused: bool = False  # whether the cause is there, and not another rank that was lost
    signal: int | None = None  # that stopped its launcher
    checkpoint: str = ""  # that its ranks saved: they can be started again
    node: str = ""  # "node 1 (host)"
    is_main: bool = False


class Ended(Exception):
    """The run ended on other nodes, as their reports say."""

    def __init__(self, reports: list[Report]) -> None:
        super().__init__(reports)
        self.reports = reports


class SingleNode:
    """The rendezvous of one node: a port for its ranks. A RendezvousHandler, without an import of torch."""

    use_agent_store = False  # ranks do not use the launcher's store: it has keys of earlier attempts

    def __init__(self, config: RendezvousConfig) -> None:
        self._config, self._rounds = config, 0
        self._reservation = socket.socket()  # from the first round on it keeps the ranks' port for them
        if config.limit == 1:
            check_port_is_free(config)

    def next_rendezvous(self) -> Any:
        """Let the ranks meet. Each call after the first means that a rank failed."""
        from torch.distributed import HashStore
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        if self._rounds:
            print_line(f"a rank failed; restart {self._rounds}")
        self._rounds += 1
        # Another port each time: children of a killed rank may have the last one open for some seconds.
        store, port = HashStore(), self._config.port or self._next_port()
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo.build(0, store, self._config.address, port))

    def _next_port(self) -> int:
        """A free port, and a socket that keeps other programs from getting it while ranks import torch.

        torch's store sets SO_REUSEADDR, by which it may listen there meanwhile: on Linux. Elsewhere no port is kept.
        """
        self._reservation.close()
        self._reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._reservation.bind(("", 0))
        port: int = self._reservation.getsockname()[1]
        if sys.platform == "linux":
            self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            self._reservation.close()
        return port

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return RUN

    def get_backend(self) -> str:
        return "easymp"

    def publish(self, report: Report) -> None:
        """Leave a report for the others."""

    def other_reports(self, own_report: Report) -> list[Report]:
        return []

    def close(self, final: bool) -> None:
        """Leave; `final`: no node may join any more."""
        self._reservation.close()


class MultiNode(SingleNode):
    """The rendezvous of this node with others."""

    def __init__(self, config: RendezvousConfig) -> None:
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

        super().__init__(config)
        host = socket.gethostname()
        self._is_main = is_local(config.address) if config.node_rank is None else config.node_rank == 0
        self._own_address = own_address(config.address, config.port) or host
        self._name = host if config.node_rank is None else f"node {config.node_rank} ({host})"
        self._mailbox = _open_store(config, self._is_main, self._name)
        store = self._mailbox.store
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=config.endpoint,
            run_id=RUN,
            min_nodes=config.nodes,
            max_nodes=config.limit,
            local_addr=self._own_address,
            join_timeout=max(1, int(config.wait)),
            last_call_timeout=LAST_CALL,
            keep_alive_interval=HEARTBEAT,
            keep_alive_max_attempt=MISSED,
        )
        self._handler: Any = create_handler(store, C10dRendezvousBackend(store, RUN), parameters)
        self._restarts = 0
        self._size = 0  # nodes, once they have met
        self._last_look, self._others_wait = 0.0, False
        self._lost = False  # whether the main node's store is gone
        self._report_number = 0  # of our report

    def next_rendezvous(self) -> Any:
        """Let the nodes meet. Each call after the first means that a rank failed, or that a node came or went."""
        from torch.distributed import PrefixStore
        from torch.distributed.elastic import rendezvous

        config, failed = self._config, self._rounds > 0 and not self._others_wait
        self._restarts += failed
        try:
            info = self._handler.next_rendezvous()
            order, names = self._in_order(info)
            rank, store = order.index(info.rank), PrefixStore("ordered", info.store)
            address = config.address if self._is_main else self._own_address
            bootstrap = rendezvous.RendezvousStoreInfo.build(rank, store, address, self._next_port())
        except rendezvous.RendezvousTimeoutError:
            arrived = ", ".join(self._mailbox.messages("came").values())
            raise WorldError(
                f"{config.node_count} were to meet at {config.endpoint}, and after {config.wait:g} seconds not enough "
                f"are there (so far came: {arrived}): start the others, ask for fewer with --nodes, {WAIT_LONGER}"
            ) from None
        except (rendezvous.RendezvousClosedError, rendezvous.RendezvousGracefulExitError):
            try:
                if reports := list(filter(self._is_final, self._reports())):
                    raise Ended(reports) from None
            except RuntimeError as error:  # the main node closed the run and did not wait for this one
                raise self._main_node_is_gone(error) from None
            event = "'s ranks could start again" if self._rounds else " took part"
            ending = f"the run at {config.endpoint} is over, before this node{event}"
            raise WorldError(f"{ending}: the others' output says how it ended") from None
        except (SettingError, WorldError):
            raise
        except (rendezvous.RendezvousError, RuntimeError) as error:
            raise self._main_node_is_gone(error) from error
        self._rounds, self._others_wait = self._rounds + 1, False
        if self._rounds > 1:
            reason = f"a rank failed; restart {self._restarts}" if failed else "the workers start again"
            print_line(f"{reason}, on {len(order)} node{'s' * (len(order) > 1)}: {', '.join(names)}")
        return rendezvous.RendezvousInfo(info.store, rank, len(order), bootstrap)

    def _main_node_is_gone(self, error: Exception) -> WorldError:
        return WorldError(f"the main node at {self._config.endpoint} is gone, and with it this run ({error})")

    def _in_order(self, info: Any) -> tuple[list[int], list[str]]:
        """torch's numbers of the nodes in our order (main node, node rank, torch's number), and their names."""
        limit, node_rank = self._config.limit, self._config.node_rank
        sort_key = [not self._is_main, limit if node_rank is None else node_rank, self._name]
        info.store.set(f"node/{info.rank}", json.dumps(sort_key))
        nodes = [json.loads(info.store.get(f"node/{i}")) for i in range(info.world_size)]
        self._size = len(nodes)
        order = sorted(range(len(nodes)), key=lambda i: (*nodes[i][:2], i))
        for a, b in pairwise(nodes[i] for i in order):
            if a[1] == b[1] < limit:
                raise SettingError(f"{a[2]} and {b[2]} say the same --node-rank {a[1]}: each machine needs its own")
        return order, [nodes[i][2] for i in order]

    @contextmanager
    def _unless_lost(self) -> Iterator[None]:
        """Guard a block of requests to the store: if the store is gone, note that, and skip the rest of the block."""
        try:
            yield
        except RuntimeError:  # torch's RendezvousError is one, too
            self._lost = True

    def num_nodes_waiting(self) -> int:
        """Number of nodes that want to join; 0 after the main node ended, so that the ranks here run to their end."""
        if self._lost or time.monotonic() - self._last_look < LOOK:
            return 0
        self._last_look = time.monotonic()
        reports: list[Report] = []
        waiting = 0
        with self._unless_lost():
            reports = list(filter(self._is_final, self._reports()))
            waiting = int(self._handler.num_nodes_waiting())
        if reports and not self._lost:
            self._mailbox.store.add("heard", 1)
            raise Ended(reports)
        self._others_wait = waiting > 0
        return waiting

    def publish(self, report: Report) -> None:
        failure = report.failure and report.failure._replace(text="")  # tracebacks are shown where they arose
        report = report._replace(failure=failure, node=self._name, is_main=self._is_main)
        with self._unless_lost():
            self._report_number = self._mailbox.send("reports", json.dumps(report))

    def other_reports(self, own_report: Report) -> list[Report]:
        """The others' reports, waited for as long as they may change which failure is the cause."""
        deadline = time.monotonic() + (FEW_REPORTS if own_report.caused else REPORTS)
        reports: list[Report] = []
        while not self._lost:
            with self._unless_lost():
                reports, without_report = self._reports(), self._mailbox.store.add("heard", 0)
                explained = any(r.caused or r.signal for r in reports if self._is_final(r))
                complete = len(reports) + without_report >= self._size - 1
                if complete or (explained and not own_report.caused) or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        return reports

    def close(self, final: bool) -> None:
        """Leave; the main node stays until the others have left, too, and read the reports."""
        super().close(final)
        store = self._mailbox.store
        with self._unless_lost():
            if final or self._is_main or not self._config.elastic:
                self._handler.shutdown()
            if self._is_main:
                store.set("terms", OVER)
                store.set("over", "")
            elif final and not self._report_number:
                # Else the same node's next run would find this run's store, and leave it as it finds another.
                with suppress(RuntimeError):
                    store.wait(["over"], timedelta(seconds=FEW_REPORTS))
            count, deadline = store.add("left", 1), time.monotonic() + LINGER
            while self._is_main and count < self._size and time.monotonic() < deadline:
                time.sleep(0.1)
                count = store.add("left", 0)

    def _reports(self) -> list[Report]:
        texts = self._mailbox.messages("reports")
        reports = [Report(*json.loads(text)) for number, text in texts.items() if number != self._report_number]
        return [r._replace(failure=r.failure and Failure(*r.failure)) for r in reports]

    def _is_final(self, report: Report) -> bool:
        """Whether `report` ends the run here, too. In an elastic run, a node that a signal has stopped only leaves."""
        return report.signal is None or report.is_main or not self._config.elastic


def _open_store(config: RendezvousConfig, is_main: bool, name: str) -> Any:
    """A mailbox in the store of several nodes, which the main node opens; `name` is written down there."""
    from torch.distributed import PrefixStore, TCPStore

    from ..distributed.mailbox import Mailbox, with_timeout  # imports torch

    assert config.port is not None
    limit = timedelta(seconds=CONNECT)
    connect = partial(TCPStore, config.address, config.port, is_master=is_main, wait_for_workers=False, timeout=limit)
    terms, start, has_said = json.dumps([config.nodes, config.limit]), time.monotonic(), False
    if is_main:
        if not is_local(config.address):
            raise WorldError(
                f"{config.address!r} is not an address of this machine, which is to be the main node: pass one of its "
                "own with --main-address, on all nodes, or --node-rank 0 on the machine that has it"
            )
        check_port_is_free(config)
    while True:
        try:
            if not is_main:  # By hand, for torch's store cannot be interrupted while it waits.
                socket.create_connection((config.address, config.port), timeout=CONNECT).close()
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            try:
                tcp_store = with_timeout(connect, CONNECT)
                tcp_store.set_timeout(timedelta(seconds=ANSWER))
                store = PrefixStore(RUN, tcp_store)
                if is_main:
                    store.set("terms", terms)
                main_terms = store.get("terms").decode()
                if main_terms == terms:
                    mailbox = Mailbox(store)
                    mailbox.send("came", name)
                    return mailbox
            except (RuntimeError, TimeoutError) as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                program = f"the program that listens at {config.endpoint} does not answer as the main node's launcher"
                raise WorldError(f"{program}: pass its address and port ({reason})") from error
            if main_terms != OVER:
                min_nodes, max_nodes = json.loads(main_terms)
                node_count = RendezvousConfig(min_nodes, 0, port=1, max_nodes=max_nodes).node_count
                started = f"the main node at {config.endpoint} was started for {node_count}"
                raise SettingError(f"{started}, this one for {config.node_count}: pass the same --nodes on all")
            del store, tcp_store
            reason = "the run there is over"
        seconds = time.monotonic() - start
        if seconds >= config.wait:
            raise WorldError(
                f"the main node did not answer at {config.endpoint} for {config.wait:g} seconds ({reason}): start it "
                f"there with --node-rank 0, correct --main-address, {WAIT_LONGER}"
            )
        if seconds >= PATIENCE and not has_said:
            print_line(f"waiting for the main node at {config.endpoint} ({reason})")
            has_said = True
        time.sleep(RETRY)
