"""Collectives that a script calls: alike on all ranks, or one error on all of them, which names the odd one out."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

import easymp
from easymp import Accelerator, BatchError, Settings, WorldError

F, LONG, WHOLE = torch.ones(2), torch.ones(3), torch.ones(2, dtype=torch.int32)


class Pair(NamedTuple):
    x: Any
    y: Any


broadcast = easymp.broadcast_object_list


def padded(acc: Accelerator, *shape: int) -> Any:
    return acc.pad_across_processes(torch.ones(shape), dim=1)


# What ranks 0 and 1 do, what rank 2 does, and what all of them say.
Call = Callable[[Accelerator], Any]
UNLIKE: list[tuple[Call, Call, str]] = [
    (lambda a: a.gather(F), lambda a: a.gather(WHOLE), "rank 2 has int32[2], the others float32[2]"),
    (lambda a: a.gather({"a": [F, F]}), lambda a: a.gather({"a": [F, LONG]}), "pass the same structure"),
    (lambda a: a.reduce(F), lambda a: a.reduce(F[None]), "rank 2 has float32[1, 2], the others float32[2]"),
    (lambda a: a.reduce({"a": F, "b": F}), lambda a: a.reduce({"a": F, "c": F}), "at ['b']: rank 2 has"),
    (lambda a: a.gather([F]), lambda a: a.gather([F, F]), "rank 2 has float32[2], the others nothing"),
    (lambda a: a.gather(Pair(F, F)), lambda a: a.gather(Pair(F, (F,))), "at [1]: rank 2 has nothing"),
    (lambda a: a.gather(F), lambda a: a.gather(1.0), "rank 2 has a float, the others float32[2]"),
    (lambda a: a.gather(F), lambda a: a.reduce(F), "rank 2 calls reduce(reduction='sum', scale=1.0)"),
    (lambda a: a.reduce(F), lambda a: a.reduce(F, "mean"), "rank 2 calls reduce(reduction='mean', scale=1.0)"),
    (lambda a: a.gather(F), lambda a: easymp.gather_object([F]), "rank 2 calls gather_object, the others"),
    (lambda a: a.wait_for_everyone(), lambda a: a.check_trigger(), "rank 2 calls check_trigger"),
    (lambda a: padded(a, 2, 2), lambda a: padded(a, 3, 5), "rank 2 has float32[3, *], the others float32[2, *]."),
    (lambda a: a.mean(1.0), lambda a: a.mean([1.0, 2.0]), "at the value: rank 2 has float32[2]"),
    (lambda a: easymp.broadcast(F, 0), lambda a: easymp.broadcast(F, 1), "rank 2 calls broadcast("),
    (lambda a: broadcast([1]), lambda a: broadcast([1, 2]), "rank 2 has a list of 2, the others a list of 1"),
    (lambda a: easymp.gather_object([1]), lambda a: easymp.gather_object("text"), "not a str"),
    (lambda a: easymp.gather(F), lambda a: easymp.reduce(F), "rank 2 calls reduce(reduction='mean'"),
    (lambda a: a.gather(F), lambda a: a.gather_for_metrics(F), "rank 2 calls gather_for_metrics"),
]  # fmt: skip


def error_text(call: Callable[..., Any], *args: Any) -> str:
    try:
        call(*args)
    except (BatchError, WorldError) as error:
        return str(error)
    return "no error"


def all_unlike() -> list[str]:
    with Accelerator(mixed_precision="no") as acc:
        errors = [error_text(odd if acc.process_index == 2 else common, acc) for common, odd, _ in UNLIKE]
        assert acc.gather(torch.tensor(acc.process_index)).tolist() == [0, 1, 2]  # the ranks go on together
        return errors


def test_unlike_calls_are_one_error_on_all_ranks(ranks) -> None:
    for (_, _, message), *texts in zip(UNLIKE, *ranks(all_unlike, processes=3)):
        assert all(message in text for text in texts), texts
        assert len(set(texts)) == 1


def keys_in_another_order() -> tuple[list[str], dict[str, list[float]]]:
    with Accelerator(mixed_precision="no") as acc:
        values = {"a": torch.ones(1), "b": torch.zeros(2)}
        total = acc.reduce(dict(reversed(values.items())) if acc.process_index else values)
        return list(total), {name: value.tolist() for name, value in sorted(total.items())}


def test_keys_in_another_order_are_right(ranks) -> None:
    sums = {"a": [2.0], "b": [0.0, 0.0]}
    assert ranks(keys_in_another_order) == [(["a", "b"], sums), (["b", "a"], sums)]


def not_compared(environment: bool) -> list[float]:
    with Accelerator(mixed_precision="no", settings=Settings(debug=None if environment else False)) as acc:
        # Unlike, and harmless: moved by bytes of one size.
        return acc.reduce(torch.ones(2, 1) if acc.process_index else torch.ones(1, 2)).flatten().tolist()


def test_debug_false_compares_nothing(ranks) -> None:
    assert ranks(not_compared, False) == [[2.0, 2.0]] * 2
    assert ranks(not_compared, True, env={"EASYMP_DEBUG": "false"}) == [[2.0, 2.0]] * 2


def one_leaves() -> str:
    acc = Accelerator(mixed_precision="no")
    if acc.process_index == 1:
        acc.end_training()
        return ""
    try:
        return error_text(acc.gather, F)
    finally:
        acc.end_training()


def test_a_rank_that_has_left_is_named_at_once(ranks) -> None:
    assert "rank 0 gave up in gather: rank 1 has left the run" in ranks(one_leaves)[0]


def listens() -> set[str]:
    """Addresses at which this process's store listens."""
    with Accelerator(cpu=True):
        connections = psutil.Process().net_connections("tcp")
        port = int(os.environ["MASTER_PORT"])
        return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port}


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", socket.gethostname()])
def test_the_store_of_one_machine_is_out_of_reach_for_others(ranks, address: str) -> None:
    opened, other_opened = ranks(listens, env={"MASTER_ADDR": address})
    assert opened <= {"127.0.0.1", "::1"} and len(opened) == 1
    assert not other_opened


def first_takes_long(path: Path) -> tuple[bool, bool]:
    with Accelerator(cpu=True, settings=Settings(timeout=1)) as acc:
        with acc.main_process_first():
            if acc.is_main_process:
                time.sleep(1.5)
                path.touch()
            first = path.exists()
        with acc.local_main_process_first():
            pass
        return first, acc.check_trigger()


def test_the_first_process_may_take_longer_than_the_timeout(ranks, tmp_path: Path) -> None:
    assert ranks(first_takes_long, tmp_path / "cache") == [(True, False)] * 2


def first_is_gone(number: int, path: Path) -> None:
    with Accelerator(cpu=True, settings=Settings(timeout=2)) as acc:
        if acc.is_main_process:
            path.write_text(str(os.getpid()))
        acc.wait_for_everyone()
        try:
            with acc.main_process_first():
                if acc.is_main_process:
                    os.kill(os.getpid(), number)
        finally:
            if number == signal.SIGSTOP:
                os.kill(int(path.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_first_process_that_is_gone_is_not_waited_for(ranks, tmp_path: Path, number: int) -> None:
    _, waiting = ranks.fails(first_is_gone, number, tmp_path / "pid")
    assert waiting.type == "WorldError"
    assert waiting.message.startswith("rank 1 gave up in main_process_first: ")


def busy(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


def trained_in_a_thread(path: Path) -> str:
    """As Ray Train does: the main thread waits elsewhere."""
    errors: list[str] = []

    def train() -> None:
        with Accelerator(cpu=True, settings=Settings(timeout=2)) as acc:
            acc.wait_for_everyone()
            if acc.process_index == 0:
                errors.append(error_text(acc.gather, F))
                path.touch()
            else:
                busy(path)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    return "".join(errors)


def test_a_hang_shows_the_line_of_the_thread_that_trains(ranks, tmp_path: Path) -> None:
    text = ranks(trained_in_a_thread, tmp_path / "given up")[0]
    assert "rank 0 gave up in gather: timed out" in text
    assert re.search(r"rank 0: .*test_collectives.py:\d+ in error_text", text)
    assert re.search(r"rank 1: .*test_collectives.py:\d+ in busy", text)
