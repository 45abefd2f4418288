"""Option records: frozen, with the peers' names and defaults, and strict about values."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import easymp
from easymp import DistributedDataParallelKwargs, GradScalerKwargs, SettingError

OWN = {"comm_hook", "comm_wrapper", "comm_state_option", "gradient_predivide_factor"}  # not torch's
OTHER_DEFAULT = {"gradient_as_bucket_view", "bucket_cap_mb", "broadcast_buffers"}


def test_defaults_of_torch() -> None:
    theirs = inspect.signature(torch.amp.GradScaler).parameters
    for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"):
        assert getattr(GradScalerKwargs(), name) == theirs[name].default, name
    theirs = inspect.signature(DistributedDataParallel).parameters
    fields = {f.name: f.default for f in dataclasses.fields(DistributedDataParallelKwargs)}
    for name in fields.keys() - OWN:
        assert name in OTHER_DEFAULT & theirs.keys() or fields[name] == theirs[name].default, name


@pytest.mark.parametrize(
    ("record", "options", "words"),
    [
        ("InitProcessGroupKwargs", {"timeout": 0}, "neither a timedelta nor a number of seconds above 0"),
        ("InitProcessGroupKwargs", {"init_method": "file://x"}, "MASTER_ADDR"),
        *(
            ("GradientAccumulationPlugin", {"num_steps": steps}, "is not a whole number of at least 1")
            for steps in (0, 1.5, True, "4")
        ),
        ("DataLoaderConfiguration", {"even_batches": 1}, "even_batches=1 is neither True nor False"),
        ("AutocastKwargs", {"output_dtype": torch.int8}, "pass torch.float32, or None"),
        ("ProjectConfiguration", {"save_on_each_node": True}, "a folder that all nodes share"),
        ("ProfileKwargs", {"schedule_option": {"wait": 1}}, "names no active steps"),
        ("ProfileKwargs", {"activities": ["gpu"]}, "'gpu' is none of 'cpu', 'cuda'"),
        ("DistributedDataParallelKwargs", {"comm_hook": "fp61"}, "did you mean 'fp16'"),
        ("DistributedDataParallelKwargs", {"comm_wrapper": "fp16"}, "comm_hook='fp16' alone"),
    ],
)
def test_wrong_values_are_refused(record: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        getattr(easymp, record)(**options)
