"""Option records: frozen, with the peers' names and defaults, and strict about names."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from easymp import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FSDPOptions,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    HSDPOptions,
    InitProcessGroupKwargs,
    SettingError,
)
from easymp.options import HANDLERS

RECORDS = (*HANDLERS, DataLoaderConfiguration, FSDPOptions, HSDPOptions, GradientAccumulationPlugin)


@pytest.mark.parametrize("record", RECORDS)
def test_frozen_and_documented(record: type) -> None:
    made = record()
    names = [f.name for f in dataclasses.fields(record)]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, names[0], None)
    with pytest.raises(TypeError, match="nonsense"):
        record(nonsense=1)
    assert made == record()
    assert len(record.__doc__) > 30


def test_defaults_of_torch() -> None:
    theirs = inspect.signature(torch.amp.GradScaler).parameters
    ours = GradScalerKwargs()
    for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"):
        assert getattr(ours, name) == theirs[name].default, name
    theirs = inspect.signature(DistributedDataParallel).parameters
    travel = (
        "comm_hook",
        "comm_wrapper",
        "comm_state_option",
        "gradient_predivide_factor",
    )  # which torch has no arguments for
    for f in dataclasses.fields(DistributedDataParallelKwargs):
        if f.name in travel:
            continue
        assert f.name in theirs
        if f.name not in ("gradient_as_bucket_view", "bucket_cap_mb", "broadcast_buffers"):
            assert f.default == theirs[f.name].default, f.name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout": 0}, "timeout=0 is neither a timedelta nor a number of seconds above 0"),
        ({"init_method": "file://x"}, "MASTER_ADDR"),
    ],
)
def test_what_a_process_group_does_not_take(options: dict[str, object], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        InitProcessGroupKwargs(**options)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "4", None])
def test_accumulation_is_a_whole_number(steps: object) -> None:
    with pytest.raises(SettingError, match="is not a whole number of at least 1"):
        GradientAccumulationPlugin(steps)
