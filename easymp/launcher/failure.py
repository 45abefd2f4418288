"""How a rank failed, written by the rank and read by its launcher; and which of several failures is the cause.

The rank writes a small file beside elastic's error file: elastic's own has whole seconds, and the rank whose traceback
matters is often a tenth of a second ahead of those that lost their peer.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

FILE = "failure.json"
CAUSE, PEER, TOLD = range(3)  # went wrong by itself; lost another rank; was told to stop
RESTART = 75  # EX_TEMPFAIL of sysexits.h: the rank has saved itself and wants to be started again
FATAL = "fatal.txt"  # Python's stacks at SIGSEGV and its like, by faulthandler

# The types in which a backend says that another rank is gone: a user's own error of another type never means that.
PEER_TYPES = frozenset(
    {"RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "WorldError"}
)


class Failure(NamedTuple):
    """One rank's end. `code` as `subprocess` has it: negative for a signal."""

    rank: int
    code: int
    type: str = ""
    message: str = ""
    text: str = ""  # the traceback, from the user's first line on
    time: float = float("inf")  # seconds since the epoch; infinite where the rank could not write

    @property
    def exit_code(self) -> int:
        """As a shell has it: 128 + n for signal n."""
        return 128 - self.code if self.code < 0 else self.code

    @property
    def words(self) -> str:
        """What happened, in a line."""
        if self.type:
            first = self.message.strip().splitlines()
            return f"{self.type}: {first[0]}" if first else self.type
        if self.code < 0:
            return f"killed by {signal_name(-self.code)}"
        if self.code == RESTART:
            return f"told to stop, it saved its state and can be started again (exit code {RESTART})"
        return f"exit code {self.code}"


def record(path: str | None, rank: int, error: BaseException, code: int, hide: TracebackType | None) -> None:
    """Write how this rank fails, beside elastic's error file `path`; frames before `hide` are left out."""
    if not path:
        return
    if isinstance(error, SystemExit):
        kind, message = "", ""
        text = "" if error.code is None or isinstance(error.code, int) else f"{error.code}\n"
    else:
        kind, message = type(error).__name__, str(error)
        text = "".join(traceback.format_exception(type(error), error, hide))
    failure = Failure(rank, code, kind, message, text, time.time())
    place = Path(path).with_name(FILE)
    fresh = place.with_suffix(".tmp")  # whole or not there: this rank may be killed while it writes
    fresh.write_text(json.dumps(failure._asdict()), encoding="utf-8")
    fresh.replace(place)


def collect(directory: Path, codes: Mapping[int, int], first_rank: int = 0) -> list[Failure]:
    """The failures of the last attempt: what the ranks wrote below `directory`, and bare exit codes of those that could not.

    Args:
        directory: elastic's log directory.
        codes: exit codes by global rank, of the ranks that elastic saw fail.
        first_rank: global rank of this node's first process.
    """
    attempts = sorted(directory.glob("*/attempt_*"), key=lambda p: int(p.name.rpartition("_")[2]))
    last = attempts[-1] if attempts else directory
    found = {}
    for path in last.glob(f"*/{FILE}"):
        failure = Failure(**json.loads(path.read_text(encoding="utf-8")))
        found[failure.rank] = failure
    for rank, code in codes.items():
        if rank not in found:
            fatal = last / str(rank - first_rank) / FATAL
            text = fatal.read_text(encoding="utf-8", errors="replace") if fatal.exists() else ""
            found[rank] = Failure(rank, code, text=text)
    return by_blame(found.values())


def by_blame(failures: Iterable[Failure]) -> list[Failure]:
    """The likeliest cause first: what went wrong by itself, then lost connections, then who was told to stop; each by time."""
    return sorted(failures, key=blame)


def blame(failure: Failure) -> tuple[int, float, int]:
    """What `by_blame` sorts by: CAUSE, PEER or TOLD, the time, and the rank."""
    # Imports torch, which the worker's entry must not do before the user's script does.
    from ..distributed.hang_report import Watch

    if not failure.type and failure.code == -signal.SIGTERM:
        return TOLD, failure.time, failure.rank  # elastic ends the others so, once one has failed
    if failure.type in PEER_TYPES and Watch.caused_by_peer(RuntimeError(failure.message)):
        return PEER, failure.time, failure.rank
    # A killed rank cannot say when: it goes before whoever could, for that is how the others lost it.
    return CAUSE, failure.time if failure.code >= 0 else 0.0, failure.rank


def explain(failures: list[Failure], size: int, node: str = "") -> str:
    """The first failure's own text, under a line that says whose it is; that line alone where it was another node's."""
    first = failures[0]
    if node:
        return f"rank {first.rank} of {size} failed first, on {node}: {first.words}; the launcher there says more"
    return f"rank {first.rank} of {size} failed first: {first.words}\n{first.text}".rstrip()


def say(text: str) -> None:
    """A line of the launcher's own, beside what the ranks write."""
    sys.stderr.write(f"easymp launch: {text}\n")
    sys.stderr.flush()


def signal_name(number: int) -> str:
    """``"SIGKILL (signal 9)"``."""
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"
