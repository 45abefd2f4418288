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

OWN = {"context_parallel", "comm_hook", "gradient_predivide_factor"}  # not torch's
OTHER_DEFAULT = {"gradient_as_bucket_view", "bucket_cap_mb", "broadcast_buffers"}


def test_defaults_of_torch() -> None:
    theirs = inspect.signature(torch.amp.GradScaler).parameters
    for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"):
        assert getattr(GradScalerKwargs(), name) == theirs[name].default, name
    theirs = inspect.signature(DistributedDataParallel).parameters
    fields = {f.name: f.default for f in dataclasses.fields(DistributedDataParallelKwargs)}
    for name in fields.keys() - OWN:
        assert name in OTHER_DEFAULT & theirs.keys() or fields[name] == theirs[name].default, name


WRONG: list[tuple[str, dict[str, Any], str]] = [
    *(
        ("GradientAccumulationPlugin", {"num_steps": steps}, "is not a whole number of at least 1")
        for steps in (0, 1.5, True, "4")
    ),
    ("DataLoaderConfiguration", {"even_batches": 1}, "even_batches=1 is neither True nor False"),
    ("AutocastKwargs", {"output_dtype": torch.int8}, "pass torch.float32, or None"),
    ("ProjectConfiguration", {"save_on_each_node": True}, "a folder that all nodes share"),
    ("ProfileKwargs", {"schedule_option": {"wait": 1}}, "does not suit torch.*'active'"),
    ("ProfileKwargs", {"activities": ["gpu"]}, "'gpu' is none of 'cpu', 'cuda'"),
    *(("LocalSGDOptions", {"every": every}, "is not a whole number of at least 1") for every in (0, 1.5, True, "8")),
    ("FSDPOptions", {"wrap": "layers"}, "wrap='layers' is not 'blocks', a tuple"),
    ("FSDPOptions", {"reduce_every_micro_batch": 1}, "reduce_every_micro_batch=1 is neither"),
    *(
        (record, {"symmetric_memory": False}, "no longer has the option 'symmetric_memory': shards are gathered")
        for record in ("FSDPOptions", "HSDPOptions")
    ),
    ("TensorParallelOptions", {"async_tensor_parallel": True}, "orders collectives. Use compile='blocks'"),
    ("FSDPOptions", {"cpu_offload": 1}, "cpu_offload=1 is neither True nor False"),
    ("PipelineOptions", {"splits": "blocks.1"}, "neither None nor a tuple of module names"),
    ("PipelineOptions", {"splits": ("a", "a")}, "names a module twice"),
    ("PipelineOptions", {"microbatches": 0}, "microbatches=0 is not a whole number of at least 1"),
    ("PipelineOptions", {"schedule": "zb"}, "schedule='zb' is none of 'gpipe', '1f1b'"),
    ("PipelineOptions", {"stages_per_rank": 2}, "which has one stage a process"),
    ("TensorParallelOptions", {"plan": {}}, "is not a mapping of module names to styles"),
    ("TensorParallelOptions", {"size": 1}, "size=1 is not a whole number of at least 2"),
    ("TensorParallelOptions", {"sequence_parallel": True}, "torch's styles cut sequences"),
    ("TensorParallelOptions", {"fsdp": True}, "fsdp=True is neither an FSDPOptions nor a dict"),
    *(
        ("DistributedDataParallelKwargs", options, words)
        for options, words in [
            ({"comm_hook": "fp61"}, r"comm_hook='fp61' is none of 'no', 'fp16', .*, did you mean 'fp(16|32)'"),
            ({"comm_hook": "power_sgd"}, "easymp has no PowerSGD. Use comm_hook='bf16'"),
            ({"comm_wrapper": "fp16"}, "no longer has the option 'comm_wrapper': easymp has no PowerSGD"),
            ({"comm_state_option": {}}, "no longer has the option 'comm_state_option': easymp has no PowerSGD"),
            ({"gradient_predivide_factor": 0}, "gradient_predivide_factor=0 is not a finite number above 0"),
            ({"bucket_cap_mb": 0}, "bucket_cap_mb=0 is not a finite number above 0"),
            ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb=nan is not a finite number above 0"),
            ({"static_graph": "yes"}, "static_graph='yes' is neither True nor False"),
        ]
    ),
]


@pytest.mark.parametrize(("record", "options", "words"), WRONG)
def test_wrong_values_are_refused(record: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        getattr(easymp, record)(**options)


def order(acc: easymp.Accelerator) -> list[list[int]]:
    loader = torch.utils.data.DataLoader(range(16), batch_size=4, shuffle=True)
    return [batch.tolist() for batch in acc.prepare(loader)]


def test_a_loader_record_may_change_before_a_loader_is_prepared() -> None:
    record = easymp.DataLoaderConfiguration(data_seed=1)
    acc = easymp.Accelerator(cpu=True, dataloader_config=record)
    other = easymp.Accelerator(cpu=True, dataloader_config=easymp.DataLoaderConfiguration(data_seed=2))
    first, record.data_seed = order(acc), 2
    assert order(acc) == order(other) != first
    with pytest.raises(SettingError, match="even_batches='yes' is neither True nor False"):
        record.even_batches = "yes"  # type: ignore[assignment]
    assert record.even_batches is True
    with pytest.raises(AttributeError):
        record.split_batch = True  # type: ignore[attr-defined]
