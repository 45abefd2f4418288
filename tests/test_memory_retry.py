"""Out of memory: every rank tries the same smaller batch."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from easymp import Accelerator, SettingError, find_executable_batch_size
from easymp.compat.accelerate import PartialState

from .words import make_accelerator


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_the_batch_is_halved_until_it_fits():
    tried = []

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int, factor: int) -> int:
        tried.append(batch_size)
        if batch_size > 4:
            out_of_memory()
        return batch_size * factor

    assert train(10) == 40
    assert train(1) == 4, "the size that worked is where the next call begins"
    assert tried == [16, 8, 4, 4]


def test_the_global_batch_can_stay_by_more_micro_batches():
    tried = []

    @find_executable_batch_size(starting_batch_size=8, keep_global_batch=True)
    def train(batch_size: int, micro_batches: int) -> None:
        tried.append((batch_size, micro_batches))
        if batch_size > 2:
            out_of_memory()

    train()
    assert tried == [(8, 1), (4, 2), (2, 4)]


@pytest.mark.parametrize(
    ("words", "is_memory"),
    [
        ("CUDA error: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("HIP out of memory. Tried to allocate 2.00 GiB", True),
        ("shapes do not match", False),
    ],
)
def test_libraries_say_it_in_words_of_their_own(words, is_memory):
    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> int:
        if batch_size > 1:
            raise RuntimeError(words)
        return batch_size

    if is_memory:
        assert train() == 1
    else:
        with pytest.raises(RuntimeError, match=words):
            train()
    with pytest.raises(SettingError, match="leave it out of the call"):
        train(batch_size=3)
    with pytest.raises(SettingError, match="its first must be the batch size"):
        find_executable_batch_size(lambda: None)


# -- several processes -------------------------------------------------------------------------------------------------


def retried(attempt: Any, starting: int, options: dict[str, Any]) -> tuple[list[int], float]:
    """The sizes that this rank has tried, and how long that took."""
    tried: list[int] = []
    acc = make_accelerator(mixed_precision="no", **options)

    @find_executable_batch_size(starting_batch_size=starting)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        attempt(acc, batch_size)

    begin = time.monotonic()
    try:
        train()
    finally:
        acc.close()
    PartialState().destroy_process_group()
    return tried, time.monotonic() - begin


def with_an_accelerator_inside(outer: Accelerator, batch_size: int) -> None:
    with Accelerator(mixed_precision="no") as acc:
        model = acc.prepare(torch.nn.Linear(2, 1))
        if acc.process_index == 1 and batch_size > 2:
            out_of_memory()
        acc.backward(model(torch.ones(batch_size, 2)).sum())  # rank 0 waits here for rank 1
        assert acc.reduce(torch.tensor(1.0)) == 2


def in_accelerates_idiom(acc: Accelerator, batch_size: int) -> None:
    acc.free_memory()
    model = torch.nn.Linear(2, 1)
    model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for micro in range(2):
        with acc.accumulate(model):
            loss = model(torch.ones(batch_size, 2)).sum()
            if acc.process_index == 1 and batch_size > 2 and micro == 1:
                out_of_memory()
            acc.backward(loss)  # rank 0 waits here for rank 1
            optimizer.step()
            optimizer.zero_grad()


def before_its_turn(acc: Accelerator, batch_size: int) -> None:
    if acc.process_index == 0 and batch_size > 2:
        out_of_memory()
    if acc.process_index == 0:
        time.sleep(0.3)
    with acc.main_process_first():  # rank 1 waits here for rank 0, in the second attempt, too
        pass


@pytest.mark.parametrize(
    ("attempt", "starting", "options"),
    [
        (with_an_accelerator_inside, 4, {}),
        (in_accelerates_idiom, 8, {"timeout": 60, "gradient_accumulation_steps": 2}),
        (before_its_turn, 4, {}),
    ],
)
def test_a_rank_that_runs_out_takes_the_others_along(ranks, attempt, starting, options):
    for tried, seconds in ranks(retried, attempt, starting, options):
        assert tried == ([8, 4, 2] if starting == 8 else [4, 2])
        assert seconds < 30, "attempts that end at the timeout take longer"


def one_rank_fails(acc: Accelerator, batch_size: int) -> None:
    if acc.process_index == 1:
        raise ValueError("a bad sample")
    acc.reduce(torch.tensor(1.0))


def test_another_rank_s_error_is_no_lack_of_memory(ranks):
    zero, one = ranks.fails(retried, one_rank_fails, 8, {})
    assert (zero.type, one.type) == ("WorldError", "ValueError")
