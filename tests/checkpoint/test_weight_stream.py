"""accelerator.weights: a model's whole weights as a stream, from every strategy, in buckets."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp import Accelerator, CheckpointError, SettingError, StepError

from ..strategies.models import make
from ..strategies.models import whole as full
from ..strategies.ways import WAYS

BUCKET = 3000  # bytes; smaller than some of the tensors


def stream(label: str) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """The stream's names in order, its tensors, and this rank's live ones."""
    way = WAYS[label]
    alone = {"every": 10} if way.strategy == "local_sgd" else {}  # ranks that train alone are averaged first
    with Accelerator(
        mixed_precision="no", strategy=way.strategy, strategy_options={**way.options, **alone}, timeout=30
    ) as acc:
        given = make("tied")
        model, optimizer = acc.prepare(given, torch.optim.SGD(given.parameters(), lr=0.5))
        if alone:
            acc.backward(model(torch.full((4, 12), acc.process_index + 0.5)).square().mean())
            optimizer.step()
        pairs = list(acc.weights(bucket=BUCKET))
        found, alive = {name: t.clone() for name, t in pairs}, list[Any]()
        del pairs
        sizes = []
        for _, tensor in acc.weights(model, dtype=torch.bfloat16, bucket=BUCKET):
            assert tensor.dtype == torch.bfloat16
            alive.append(weakref.ref(tensor))
            sizes.append(sum(t.nbytes for ref in alive if (t := ref()) is not None))
        assert max(sizes) <= BUCKET + max(t.nbytes // 2 for t in found.values())
        live = {name: full(p) for name, p in model.named_parameters() if not p.is_meta}
        return list(found), found, live


@pytest.mark.parametrize(
    "label",
    [
        pytest.param(label, marks=[pytest.mark.slow] if way.sizes[0] > 2 or " " in label else [])
        for label, way in WAYS.items()
    ],
)
def test_every_strategy_streams_the_whole_weights(ranks: Any, label: str) -> None:
    several = ranks(stream, label, processes=WAYS[label].sizes[0])
    plain = make("tied").state_dict()
    for names, found, live in several:
        assert set(names) == set(plain) and names[1] == "head.weight"  # beside the one that it is tied to
        for name, tensor in plain.items():
            assert tensor.shape == found[name].shape and torch.equal(found[name], several[0][1][name]), name
        for name, tensor in live.items():
            assert torch.equal(found[name], tensor), name


def some_leave() -> list[Any]:
    found: list[Any] = []
    with Accelerator(mixed_precision="no", strategy="fsdp", timeout=30) as acc:
        model, rank = acc.prepare(make("tied")), acc.process_index
        for _ in acc.weights(bucket=BUCKET):
            break  # all of them: nobody waits
        try:
            for _ in acc.weights(bucket=BUCKET):
                if rank == 1:
                    break
        except CheckpointError as error:
            found.append(str(error))

        def full_server(bucket: list[Any]) -> None:
            raise ValueError(f"no room for {bucket[0][0]}")

        try:
            acc.weights(bucket=BUCKET).each_bucket(full_server, rank=1)
        except (ValueError, CheckpointError) as error:
            found.append(f"{type(error).__name__}: {error}")
        buckets: list[list[str]] = []
        acc.weights(bucket=BUCKET).each_bucket(lambda b: buckets.append([name for name, _ in b]), rank=1)
        names = list(dict(acc.weights(model)))
        assert [name for bucket in buckets for name in bucket] == (names if rank == 1 else [])
        assert rank != 1 or 1 < len(buckets) < len(names)
    return found


def a_server_is_full() -> str:
    def full_server(_: Any) -> None:
        raise ValueError("no room")

    with Accelerator(mixed_precision="no", strategy="ddp", timeout=30) as acc:
        stream = acc.weights(acc.prepare(make("tied")), bucket=BUCKET)
        with pytest.raises((ValueError, CheckpointError)) as error:
            stream.each_bucket(full_server, rank=1)
        return str(error.value)


def test_ranks_with_whole_models_wait_for_a_function(ranks: Any) -> None:
    assert ranks(a_server_is_full) == ["rank 1: ValueError: no room", "no room"]


def test_a_rank_that_leaves_early_is_named(ranks: Any) -> None:
    one, other = ranks(some_leave)
    assert one[0].startswith("rank 1: left the loop over the weights early")
    assert one[1] == "CheckpointError: rank 1: ValueError: no room for embed.weight"
    assert other == ["ValueError: no room for embed.weight"]


def test_what_is_refused() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"amax": 3}

    with Accelerator(mixed_precision="no", cpu=True) as acc:
        with pytest.raises(StepError, match=r"weights\(\) of no prepared models: say which"):
            acc.weights()
        model: Any = acc.prepare(nn.Linear(2, 2))
        given: Any
        for given, words in (
            ({"dtype": torch.int8}, "dtype=torch.int8"),
            ({"bucket": "much"}, "bucket='much'"),
        ):
            with pytest.raises(SettingError, match=words):
                acc.weights(model, **given)
        with pytest.raises(CheckpointError, match="'_extra_state' in the state_dict of this Extra is a dict"):
            acc.weights(Extra(2, 2))
        with pytest.raises(CheckpointError, match="weight is on the meta device"):
            dict(acc.weights(nn.Linear(2, 2, device="meta")))
        with pytest.raises(SettingError, match="rank=1 is not one of the 1 ranks"):
            acc.weights(model).each_bucket(print, rank=1)
        assert dict(acc.weights(model))["weight"].data_ptr() == model.weight.data_ptr()  # the live one
