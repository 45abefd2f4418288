"""The main node's store, where several launchers meet: opened there, and knocked at by the others until it opens."""

from __future__ import annotations

import json
import socket
import time
from datetime import timedelta
from typing import Any

from ..errors import SettingError, WorldError
from .alone import refuse_taken
from .failure import say
from .place import Place, is_here

RUN = "easymp"
OVER = "over"  # the terms of a run that is closing: the next one may already knock at the same port
ANSWER = 60.0  # seconds that the store has for an answer
CONNECT = 10.0  # seconds that what listens at the main node's port has to prove itself a store
PATIENT = 5.0  # seconds without a word about waiting
AGAIN = 0.3  # seconds between two knocks


def open_store(place: Place, main: bool, name: str) -> Any:
    """The store of this run; `name` is written down there.

    Raises:
        WorldError: the port is taken, or the main node does not answer in time.
        SettingError: the main node was started for another number of nodes.
    """
    terms, start = json.dumps([place.nodes, place.limit]), time.monotonic()
    if main:
        if not is_here(place.address):
            raise WorldError(
                f"{place.address!r} is no address of this machine, which is to be the main node: pass one of its own with "
                "--main-address, on all nodes, or --node-rank 0 on the machine that has it"
            )
        refuse_taken(place)
    while True:
        if not main:
            _knock(place, start)
        try:
            store = _connect(place, main)
            if main:
                store.set("terms", terms)
            theirs = store.get("terms").decode()
            if theirs == terms:
                store.set(f"came/{store.add('came', 1)}", name)
                return store
        except (RuntimeError, TimeoutError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise WorldError(
                f"what listens at {place.endpoint} does not answer as the main node's launcher: pass its address and port ({why})"
            ) from error
        if theirs != OVER:
            least, most = json.loads(theirs)
            raise SettingError(
                f"the main node at {place.endpoint} was started for {Place(least, 0, port=1, most=most).words}, this one for "
                f"{place.words}: pass the same --nodes on all"
            )
        del store
        if time.monotonic() - start >= place.wait:
            raise WorldError(_unanswered(place, "the run there is over"))
        time.sleep(AGAIN)


def _connect(place: Place, main: bool) -> Any:
    import torch.distributed as dist

    from ..distributed.hang_report import in_time

    def connect() -> Any:
        return dist.TCPStore(
            place.address,
            place.port,
            is_master=main,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT),
        )

    store = in_time(connect, CONNECT)
    store.set_timeout(timedelta(seconds=ANSWER))
    return dist.PrefixStore(RUN, store)


def _knock(place: Place, start: float) -> None:
    """Wait until something listens at the main node's port. By hand, for torch's store cannot be interrupted while it waits."""
    said = False
    while True:
        try:
            socket.create_connection((place.address, place.port), timeout=CONNECT).close()
            return
        except OSError as error:
            why, waited = error.strerror or str(error), time.monotonic() - start
        if waited >= place.wait:
            raise WorldError(_unanswered(place, why))
        if waited >= PATIENT and not said:
            say(f"waiting for the main node at {place.endpoint} ({why})")
            said = True
        time.sleep(AGAIN)


def _unanswered(place: Place, why: str) -> str:
    return (
        f"the main node did not answer at {place.endpoint} for {place.wait:g} seconds ({why}): start it there with "
        "--node-rank 0, correct --main-address, or wait longer with --wait SECONDS"
    )
