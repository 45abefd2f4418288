"""accelerator.weights: a model's whole weights as a stream, in buckets."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from easymp import Accelerator, CheckpointError, SettingError, Settings, StepError

from ..strategies.models import make

BUCKET = 3000  # bytes; smaller than some of the tensors


def in_buckets() -> list[str]:
    """The stream's names in order; a rank holds about a bucket of whole tensors at a time."""
    with Accelerator(mixed_precision="no", strategy="fsdp", settings=Settings(timeout=30)) as acc:
        model = acc.prepare(make("tied"))
        alive, sizes, names = list[Any](), list[int](), list[str]()
        for name, tensor in acc.weights(model, dtype=torch.bfloat16, bucket=BUCKET):
            assert tensor.dtype == torch.bfloat16
            names.append(name)
            alive.append(weakref.ref(tensor))
            sizes.append(sum(t.nbytes for ref in alive if (t := ref()) is not None))
        assert max(sizes) <= BUCKET + max(t.nbytes // 2 for t in make("tied").state_dict().values())
        return names


def test_a_rank_holds_about_a_bucket(ranks: Any) -> None:
    for names in ranks(in_buckets):
        assert set(names) == set(make("tied").state_dict())
        assert names[1] == "head.weight"  # beside the one that it is tied to


def some_leave() -> list[Any]:
    messages: list[Any] = []
    with Accelerator(mixed_precision="no", strategy="fsdp", settings=Settings(timeout=30)) as acc:
        model, rank = acc.prepare(make("tied")), acc.process_index
        for _ in acc.weights(bucket=BUCKET):
            break  # all of them: nobody waits
        try:
            for _ in acc.weights(bucket=BUCKET):
                if rank == 1:
                    break
        except CheckpointError as error:
            messages.append(str(error))

        def full_server(bucket: list[Any]) -> None:
            raise ValueError(f"no room for {bucket[0][0]}")

        try:
            acc.weights(bucket=BUCKET).each_bucket(full_server, rank=1)
        except (ValueError, CheckpointError) as error:
            messages.append(f"{type(error).__name__}: {error}")
        buckets: list[list[str]] = []
        acc.weights(bucket=BUCKET).each_bucket(lambda b: buckets.append([name for name, _ in b]), rank=1)
        names = list(dict(acc.weights(model)))
        assert [name for bucket in buckets for name in bucket] == (names if rank == 1 else [])
        assert rank != 1 or 1 < len(buckets) < len(names)
    return messages


def a_server_is_full() -> str:
    def full_server(_: Any) -> None:
        raise ValueError("no room")

    with Accelerator(mixed_precision="no", strategy="ddp", settings=Settings(timeout=30)) as acc:
        stream = acc.weights(acc.prepare(make("tied")), bucket=BUCKET)
        with pytest.raises((ValueError, CheckpointError)) as error:
            stream.each_bucket(full_server, rank=1)
        return str(error.value)


def test_ranks_with_whole_models_wait_for_a_function(ranks: Any) -> None:
    assert ranks(a_server_is_full) == ["rank 1: ValueError: no room", "no room"]


def test_a_rank_that_leaves_early_is_named(ranks: Any) -> None:
    first, second = ranks(some_leave)
    assert first[0].startswith("rank 1: left the loop over the weights early")
    assert first[1] == "CheckpointError: rank 1: ValueError: no room for embed.weight"
    assert second == ["ValueError: no room for embed.weight"]


def test_what_is_refused() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"amax": 3}

    with Accelerator(mixed_precision="no", cpu=True) as acc:
        with pytest.raises(StepError, match=r"weights\(\) of no prepared models: say which"):
            acc.weights()
        model: Any = acc.prepare(nn.Linear(2, 2))
        options: Any
        for options, message in (({"dtype": torch.int8}, "dtype=torch.int8"), ({"bucket": "much"}, "bucket='much'")):
            with pytest.raises(SettingError, match=message):
                acc.weights(model, **options)
        with pytest.raises(CheckpointError, match="'_extra_state' in the state_dict of this Extra is a dict"):
            acc.weights(Extra(2, 2))
        with pytest.raises(CheckpointError, match="weight is on the meta device"):
            dict(acc.weights(nn.Linear(2, 2, device="meta")))
        with pytest.raises(SettingError, match="rank=1 is not one of the 1 ranks"):
            acc.weights(model).each_bucket(print, rank=1)
        assert dict(acc.weights(model))["weight"].data_ptr() == model.weight.data_ptr()  # the live one
