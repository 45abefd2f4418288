"""A few threads for the blocks of one file: hashing, reads and writes let the interpreter go, so two cores work at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar, cast

T = TypeVar("T")
R = TypeVar("R")
WORKERS = 3  # one more than hash at the same time on 2 cores, so that the disk always has something to do


def spread(function: Callable[[T], R], items: Iterable[T], name: str) -> Iterator[R]:
    """``function(item)`` for each item, on WORKERS threads: the results as they are done, in any order.

    `items` is drawn from on the calling thread, a few ahead of what is done. The first error is raised here, after what runs has
    ended. Plain threads, as the pools of `concurrent.futures` take no more work once the interpreter ends, and a save may still run.
    """
    tasks: SimpleQueue[tuple[T] | None] = SimpleQueue()
    done: SimpleQueue[tuple[R | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        while (task := tasks.get()) is not None:
            try:
                done.put((function(*task), None))
            except BaseException as error:
                done.put((None, error))

    def result() -> R:
        value, error = done.get()
        if error is not None:
            raise error
        return cast(R, value)

    threads: list[Thread] = []
    running = 0
    try:
        for item in items:
            if len(threads) < WORKERS:
                thread = Thread(target=work, name=f"easymp-{name}", daemon=True)
                try:
                    thread.start()
                    threads.append(thread)
                except RuntimeError:  # no more threads here, or the interpreter ends
                    if not threads:
                        yield function(item)
                        continue
            tasks.put((item,))
            running += 1
            if running > WORKERS:
                yield result()
                running -= 1
        for _ in range(running):
            yield result()
    finally:
        for _ in threads:
            tasks.put(None)
        for thread in threads:
            thread.join()
