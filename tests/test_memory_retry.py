"""Out of memory: every rank tries the same smaller batch."""

from __future__ import annotations

import time

import pytest
import torch

from easymp import Accelerator, SettingError, find_executable_batch_size
from easymp.training.state import current_world


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_the_batch_is_halved_until_it_fits() -> None:
    tried = []

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int, factor: int) -> int:
        tried.append(batch_size)
        if batch_size > 4:
            out_of_memory()
        return batch_size * factor

    assert train(10) == 40
    assert tried == [16, 8, 4]
    assert train(1) == 4, "the size that worked is where the next call begins"
    assert tried == [16, 8, 4, 4]


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "HIP out of memory. Tried to allocate 2.00 GiB",
    ],
)
def test_libraries_say_it_in_words_of_their_own(words: str) -> None:
    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> int:
        if batch_size > 1:
            raise RuntimeError(words)
        return batch_size

    assert train() == 1


def test_the_global_batch_can_stay_by_more_micro_batches() -> None:
    tried = []

    @find_executable_batch_size(starting_batch_size=8, keep_global_batch=True)
    def train(batch_size: int, micro_batches: int) -> None:
        tried.append((batch_size, micro_batches))
        if batch_size > 2:
            out_of_memory()

    train()
    assert tried == [(8, 1), (4, 2), (2, 4)]


def test_other_errors_pass() -> None:
    def train(batch_size: int) -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        find_executable_batch_size(train)()


def test_wrong_signatures_are_refused() -> None:
    with pytest.raises(SettingError, match="its first must be the batch size"):
        find_executable_batch_size(lambda: None)
    with pytest.raises(SettingError, match="leave it out of the call"):
        find_executable_batch_size(lambda batch_size: None)(batch_size=3)


def one_rank_runs_out() -> tuple[list[int], float]:
    tried = []

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> float:
        with Accelerator(mixed_precision="no") as acc:
            tried.append(batch_size)
            model = torch.nn.Linear(2, 1)
            model = acc.prepare(model)
            if acc.process_index == 1 and batch_size > 2:
                out_of_memory()
            acc.backward(model(torch.ones(batch_size, 2)).sum())  # rank 0 waits here for rank 1
            return float(acc.reduce(torch.tensor(1.0)))

    outer = Accelerator(mixed_precision="no")
    total = train()
    outer.close()
    current_world().close()
    return tried, total


def test_a_rank_that_runs_out_takes_the_others_along(ranks) -> None:
    assert ranks(one_rank_runs_out) == [([4, 2], 2.0)] * 2


def one_rank_runs_out_in_accelerates_idiom() -> tuple[list[int], float]:
    tried = []
    acc = Accelerator(mixed_precision="no", timeout=60, gradient_accumulation_steps=2)

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> None:
        acc.free_memory()
        tried.append(batch_size)
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

    begin = time.monotonic()
    train()
    acc.close()
    return tried, time.monotonic() - begin


def test_a_model_prepared_by_an_outer_accelerator_does_not_hold_the_others_up(ranks) -> None:
    for tried, seconds in ranks(one_rank_runs_out_in_accelerates_idiom, timeout=100):
        assert tried == [8, 4, 2]
        assert seconds < 30, "two attempts that end at the timeout take 120"


def one_rank_runs_out_before_its_turn() -> list[int]:
    tried = []
    acc = Accelerator(mixed_precision="no")

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        if acc.process_index == 0 and batch_size > 2:
            out_of_memory()
        with acc.main_process_first():  # rank 1 waits here for rank 0, which is alive
            pass

    train()
    with acc.main_process_first():
        pass
    acc.close()
    current_world().close()
    return tried


def test_a_rank_that_waits_for_its_turn_is_taken_along(ranks) -> None:
    assert ranks(one_rank_runs_out_before_its_turn, timeout=60) == [[4, 2]] * 2


def one_rank_fails() -> None:
    outer = Accelerator(mixed_precision="no")

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> None:
        if outer.process_index == 1:
            raise ValueError("a bad sample")
        outer.reduce(torch.tensor(1.0))

    try:
        train()
    finally:
        outer.close()


def test_another_rank_s_error_is_no_lack_of_memory(ranks) -> None:
    zero, one = ranks.fails(one_rank_fails)
    assert one.type == "ValueError"
    assert zero.type == "WorldError"
