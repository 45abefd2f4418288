"""DeepSpeed's public names, each with what easymp.compat.deepspeed makes of it; beside DeepSpeed itself where that is installed."""

from __future__ import annotations

import inspect
import tomllib
from operator import attrgetter
from pathlib import Path

import pytest
from torch import nn

from easymp import RefusedError
from easymp.compat import deepspeed

from .test_deepspeed import BATCH, KEYS, NAMES, SGD, started

HERE = set(deepspeed.__all__)
REFUSED = {at for names in NAMES["addresses"].values() for at in names.split() if "." not in at}
REFUSED |= set(NAMES["absent"][""])
TABLE = tomllib.loads(Path(__file__).with_name("deepspeed_names.toml").read_text())
OWN, ENGINE_OWN, SIGNATURES = set(TABLE["package"].split()), set(TABLE["engine"].split()), TABLE["signatures"]


def parameters_of(package, name):
    return list(inspect.signature(attrgetter(name)(package)).parameters)


def test_signatures():
    for name, parameters in SIGNATURES.items():
        assert parameters_of(deepspeed, name) == parameters.split(), name


def test_top_level_names():
    for name in HERE:
        assert hasattr(deepspeed, name)
    for name in REFUSED:
        with pytest.raises(ImportError, match=f"deepspeed.{name} is not part of easymp.compat: "):
            getattr(deepspeed, name)


def test_names_of_the_engine():
    with started({**BATCH, "optimizer": SGD}, model=nn.Linear(8, 2)) as engine:
        for name in NAMES["engine"]["refused"]:
            with pytest.raises(RefusedError, match=rf"engine\.{name}\(\) is not part of easymp.compat: "):
                getattr(engine, name)()
        for name in NAMES["engine"]["off"]["names"].split():
            assert getattr(engine, name)() is False
        of_keys = "zero_hpz_partition_size zero_multi_rank_bucket_allreduce flops_profiler_profile_step"
        for name in (*of_keys.split(), "gradient_clipping"):
            assert getattr(engine, name)() == 1


@pytest.mark.slow
def test_beside_deepspeed_itself(monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # which it sets
    theirs = pytest.importorskip("deepspeed")
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    assert {n for n in dir(theirs) if not n.startswith("_")} <= HERE | REFUSED | OWN
    engine = {n for n in vars(theirs.DeepSpeedEngine) if not n.startswith("_")}
    with started({**BATCH, "optimizer": SGD}) as ours:
        assert {n for n in engine if not hasattr(ours, n)} <= ENGINE_OWN
    records = {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "compile": theirs.runtime.config.CompileConfig,
        "tensor_parallel": theirs.runtime.tensor_parallel.config.TPTrainingConfig,
    }
    for section, record in records.items():
        ours = {key: default for at, key, default, *_ in KEYS if at == section}
        for name, field in record.model_fields.items():
            for known in {name, field.alias or name}:
                assert known in ours, (section, known)
                default = ours[known] if isinstance(ours[known], list) else [ours[known], None]
                given = getattr(field.default, "value", field.default)
                plain = isinstance(given, (bool, int, float, str)) and ours[known] is not None
                assert not plain or given in default, (section, known, given, default)
    constants = vars(theirs.runtime.constants)
    top = {
        v.strip().lower()
        for n, v in constants.items()
        if f"{n}_DEFAULT" in constants and isinstance(v, str) and "\n" not in v
    }
    known = {key for _, key, *_ in KEYS}
    assert {key for key in top if key.isidentifier()} <= known | {"check_overflow", "pipeline_stage", "type"}
    for name, parameters in SIGNATURES.items():
        if name != "WarmupLR" and not name.startswith(("Warmup", "ops", "DeepSpeedEngine.backward")):
            assert parameters_of(theirs, name) == parameters.split(), name
