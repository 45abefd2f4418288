"""Where the launchers of a run meet: how many machines, which of them this is, and how the first one is reached."""

from __future__ import annotations

import ipaddress
import re
import socket
import sys
from dataclasses import dataclass

from ..errors import SettingError
from ..logging import get_logger

logger = get_logger(__name__)
PORT = 29500  # torchrun's
WAIT = 600.0  # seconds
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Place:
    """Where the ranks meet. One node needs none of it: a free port on the loopback is found.

    Attributes:
        nodes: how many take part; with `most`, at least.
        node_rank: which one this is, in the order of its ranks; 0 is the main node. None: whoever has `address` is the main node, and
            the others follow as they come.
        address, port: of the main node, where the launchers meet and rank 0 listens.
        most: nodes that may take part, where they come and go; None for exactly `nodes`.
        wait: seconds that the nodes wait for one another.
    """

    nodes: int = 1
    node_rank: int | None = None
    address: str = LOOPBACK
    port: int | None = None
    most: int | None = None
    wait: float = WAIT

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise SettingError(f"{self.nodes} nodes cannot train: use at least 1")
        if self.most is not None and self.most < self.nodes:
            raise SettingError(
                f"nodes={self.nodes}:{self.most} ends below its start: write the smaller number first"
            )
        if self.node_rank is not None and not 0 <= self.node_rank < self.limit:
            raise SettingError(
                f"node_rank={self.node_rank} does not lie in 0 … {self.limit - 1} for {self.words}"
            )
        if self.limit > 1 and self.port is None:
            raise SettingError(
                f"{self.words} need a port to meet at on {self.address}: pass the same free port on each"
            )

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
        return (
            f"{self.nodes} to {self.limit} nodes"
            if self.elastic
            else f"{self.nodes} node{'s' * (self.nodes > 1)}"
        )

    @property
    def endpoint(self) -> str:
        """``"host:29500"``."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def place(
    nodes: str | None = None,
    node_rank: int | None = None,
    main_address: str | None = None,
    main_port: int | None = None,
    wait: float = WAIT,
) -> Place:
    """The place that the words of a command line mean: ``"2"`` or ``"1:4"`` nodes, ``"host"`` or ``"host:port"``.

    Raises:
        SettingError: they contradict one another, or something is missing.
    """
    least, most = read_nodes(nodes or "1")
    if most == 1 and node_rank is not None:
        raise SettingError(
            f"--node-rank {node_rank} says which of several machines this is: say how many with --nodes, too"
        )
    address, port = (LOOPBACK, None) if main_address is None else read_address(main_address)
    if most > 1:
        if main_address is None:
            raise SettingError(
                f"{most} nodes must know where to meet: pass --main-address HOST[:PORT], an address of the first node, on all of them"
            )
        port = port or main_port or PORT
    elif not is_here(address):
        logger.warning(
            "one node meets nobody: main_address=%r is not this machine, and not used (more: --nodes)",
            main_address,
        )
        address = LOOPBACK
    return Place(least, node_rank, address, port or main_port, None if most == least else most, wait)


def read_nodes(text: str) -> tuple[int, int]:
    """Fewest and most nodes of ``"2"`` or ``"1:4"``."""
    match = re.fullmatch(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise SettingError(
            f"nodes={text!r} is no number of nodes: use 2, or 1:4 for at least 1 and at most 4"
        )
    return least, most


def read_address(text: str) -> tuple[str, int | None]:
    """Host and port of ``"host"``, ``"host:29500"``, ``"::1"`` or ``"[::1]:29500"``."""
    bracketed = re.fullmatch(r"\[([0-9a-fA-F:.%\w]+)\](?::(\d+))?", text)
    plain = re.fullmatch(r"([^:\s\[\]]+)(?::(\d+))?", text)
    if not (match := bracketed or plain):
        try:
            return str(ipaddress.IPv6Address(text)), None
        except ValueError:
            raise SettingError(
                f"main_address={text!r} is no address: use HOST, HOST:PORT or [IPV6]:PORT"
            ) from None
    port = None if match[2] is None else int(match[2])
    if port is not None and not 0 < port < 65536:
        raise SettingError(f"main_address={text!r} has no possible port: use one from 1 to 65535")
    return match[1], port


def own_address(address: str, port: int | None) -> str:
    """This machine's address on its way to another, as the routing table has it; ``""`` where there is no way. Nothing is sent."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, port or PORT, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
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


def listening(port: int) -> bool:
    """Whether somebody on this machine listens at the port already.

    Raises:
        SettingError: this user may not.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections do not count
        try:
            probe.bind(("", port))
        except PermissionError as error:
            raise SettingError(
                f"port {port} may not be opened by this user ({error}): take one above 1023"
            ) from error
        except OSError:
            return True
    return False


def hold() -> tuple[socket.socket, int]:
    """A free port, and what keeps it, until it is closed, from whoever asks the system for one.

    Ranks open theirs when they have imported torch, which takes seconds. Who names the port and sets SO_REUSEADDR, as torch's store does,
    may listen there meanwhile; elsewhere than on Linux nobody might, and the port is not kept.
    """
    kept = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    kept.bind(("", 0))
    port = kept.getsockname()[1]
    if sys.platform == "linux":
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    else:
        kept.close()
    return kept, port
