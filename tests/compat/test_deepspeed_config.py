"""Configurations and names of DeepSpeed: each is honoured, ignored by name or refused; beside DeepSpeed itself where that is installed."""

from __future__ import annotations

import inspect
import math
import re
import tomllib
import warnings
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from easymp import RefusedError, SettingError
from easymp.cli.config.importers import DEEPSPEED
from easymp.cli.config.rules import Document, Importer
from easymp.compat import deepspeed, explain

from .test_deepspeed import BATCH, SGD, model, started

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
K6 = """{ "train_batch_size": 64, "gradient_accumulation_steps": 4,
  "fp16": { "enabled": true, "loss_scale": 0, // automatic
            "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1 }, # and a comma too many
}"""


def test_a_file_with_comments(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(K6)
    with started(file) as engine:
        assert engine.get_batch_info() == (64, 16, 4)
        assert engine.fp16_enabled() and engine.dynamic_loss_scale() and engine.gradient_clipping() == 1.0
        assert (engine.loss_scale(), engine.initial_dynamic_scale()) == (0, 65536)
        assert engine.config["train_batch_size"] == 64
    file.write_text('{"train_batch_size": 8,\n"train_batch_size": 16}')
    for wrong, words in ((file, "line 2"), ("nowhere.json", "no DeepSpeed configuration at 'nowhere.json'")):
        with pytest.raises(SettingError, match=words):
            deepspeed.initialize(model=model(), config=wrong)


@pytest.mark.parametrize(
    ("given", "solved"),
    [
        ((64, 4, 16), (64, 4, 16)),
        ((64, None, 4), (64, 16, 4)),
        ((64, 8, None), (64, 8, 8)),
        ((None, 8, 4), (32, 8, 4)),
        ((64, None, None), (64, 64, 1)),
        (("auto", 8, "auto"), (8, 8, 1)),
    ],
)
def test_the_batch_triangle(given, solved):
    with started({name: value for name, value in zip(SIZES, given) if value is not None}) as engine:
        assert engine.get_batch_info() == solved


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"gradient_accumulation_steps": 2}, "neither train_batch_size nor train_micro_batch_size_per_gpu"),
        (dict(zip(SIZES, (64, 4, 4))), r"gradient_accumulation_steps=4, 1 ranks \(64 != 4 \* 4 \* 1\)"),
        ({SIZES[0]: 7, SIZES[2]: 2}, r"\(7 != 3 \* 2 \* 1\)"),
        ({SIZES[0]: 7, SIZES[1]: 2}, r"\(7 != 2 \* 3 \* 1\)"),
        ({**BATCH, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, "enabled at once"),
        ({**BATCH, "fp16": {"enabled": True, "loss_scale_window": -1}}, "fp16.loss_scale_window=-1 is below 1"),
        ({**BATCH, "fp16": {"enabled": True, "hysteresis": True}}, "fp16.hysteresis=True is not a finite number"),
        ({**BATCH, "fp16": {"enabled": True, "min_loss_scale": math.nan}}, "fp16.min_loss_scale=nan is not a finite"),
        ({**BATCH, "fp16": {"enabled": "yes"}}, "fp16.enabled='yes' is neither true nor false"),
        ({**BATCH, "checkpoint": {"tag_validation": "foo"}}, "checkpoint.tag_validation='foo' is not one of ignore, warn"),
        ({**BATCH, "fp16": 1}, "fp16=1 must be a dict"),
        ({**BATCH, "gradient_cliping": 1.0}, "has no key 'gradient_cliping', did you mean 'gradient_clipping'"),
        ({**BATCH, "zero_optimization": {"stage": 4}}, "zero_optimization.stage=4 must lie in 0 … 3"),
        ({**BATCH, "optimizer": {"type": "Adam", "lr": 1}}, "optimizer has no key 'lr'"),
        ({**BATCH, "fp16": {"enabled": "auto"}}, "fp16.enabled='auto' is for tools that fill it in"),
        ({**BATCH, "optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, "optimizer.params.lr='auto' is for tools"),
        ({**BATCH, "optimizer": {"type": "Adam", "params": {"lr": "1e-3"}}}, "optimizer.params.lr='1e-3' is a string"),
        ([], "is a list; it must be a dict"),
        ({**BATCH, "optimizer": {"type": "Adan"}}, "there is no optimizer 'Adan', did you mean 'Adam'"),
        ({**BATCH, "optimizer": {"type": "OneBitAdam"}}, "'OneBitAdam' is not part of easymp.compat: use 'AdamW'"),
        ({**BATCH, "optimizer": {"type": "SGD", "params": {"moment": 0.9}}}, "no parameter 'moment', did you mean 'momentum'"),
        ({**BATCH, "scheduler": {"type": "WarmUpLR"}}, "no scheduler 'WarmUpLR', did you mean"),
        ({**BATCH, "scheduler": {"type": "WarmupLR", "params": {"warmup": 3}}}, "WarmupLR has no parameter 'warmup'"),
        ({**BATCH, "scheduler": {"type": "WarmupLR"}}, "a scheduler without an optimizer"),
    ],
)  # fmt: skip
def test_wrong_configurations(config, words):
    with pytest.raises(SettingError, match=words):
        deepspeed.initialize(model=model(), config=config)


def test_initialize_says_what_is_missing():
    for given, words in [
        ({"config": BATCH}, "requires a model"),
        ({"model": model()}, "requires --deepspeed_config"),
        ({"model": model(), "config": BATCH, "config_params": BATCH}, "given twice"),
        ({"model": "bert", "config": BATCH}, "pass a torch"),
        ({"model": model(), "optimizer": "adam", "config": BATCH}, "optimizer='adam' is neither one nor a"),
    ]:
        with pytest.raises(SettingError, match=words):
            deepspeed.initialize(**given)
    other = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model().parameters()))
    config = {**BATCH, "optimizer": {"type": "Adam"}}
    with pytest.raises(AssertionError, match="drives another optimizer"):
        deepspeed.initialize(model=model(), config=config, lr_scheduler=other)


def test_old_spellings_and_nulls():
    old = {"zero_optimization": True, "steps_per_print": math.inf}
    old |= dict.fromkeys(("wall_clock_breakdown", "fp16", "gradient_clipping"))
    with started({**BATCH, **old}) as engine:
        assert (engine.zero_optimization_stage(), engine.steps_per_print()) == (1, 0)
        assert not engine.wall_clock_breakdown()
        assert (engine.fp16_enabled(), engine.gradient_clipping()) == (False, 1.0)


NAMES = tomllib.loads(Path(deepspeed.__file__).with_name("names.toml").read_text(encoding="utf-8"))


def keys_of(table, kind="honoured", why=""):
    """Section by section: key, DeepSpeed's default, "honoured", "ignored" or "refused", and the reason."""
    for name, value in table.items():
        if name in ("ignored", "refused"):
            for reason, inner in value.items():
                yield from keys_of(inner, name, reason)
        elif name == "null":
            yield from ((key, None, kind, why) for key in value.split())
        else:
            yield name, value, kind, why


KEYS = [(at, *key) for at, table in NAMES["keys"].items() for key in keys_of(table)]


def nested(keys, value):
    """A configuration with these keys, of values by default."""
    content = {}
    for section, key, default, *_ in keys:
        inside = content
        for name in section.split(".") if section else ():
            inside[name] = inside[name] if isinstance(inside.get(name), dict) else {}
            inside = inside[name]
        inside.setdefault(key, value(default))
    return content


def test_defaults_of_deepspeed_stop_no_script():
    config = nested(KEYS, lambda default: default[0] if isinstance(default, list) else default)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with started({**config, **BATCH}) as engine:
            assert engine.get_batch_info() == (4, 4, 1) and engine.zero_reduce_bucket_size() == 500_000_000


def test_easymp_config_knows_the_same_keys():
    known = [key for key in KEYS if key[0] not in ("optimizer", "scheduler", "flops_profiler", "checkpoint")]
    content = nested(known, lambda default: "auto")
    found = Importer(Document("ds.json", content, ""), "DeepSpeed", None)
    found.walk(content, DEEPSPEED)
    assert len(found.lines) >= len(known) - 20
    assert not [line for line in found.lines if line[1].startswith("unknown")]


def test_every_other_key_is_ignored_or_refused_by_name():
    for section, key, default, kind, why in KEYS:
        if kind == "honoured":
            continue
        other = {"enabled": True} if default is None else not default if isinstance(default, bool) else 7
        where = f"{section}.{key}" if section else key
        config = {**BATCH, **nested([(section, key, other)], lambda value: value)}
        if kind == "refused":
            with pytest.raises(RefusedError, match=re.escape(f"{where}={other!r} is not honoured: {why}")):
                deepspeed.initialize(model=model(), config=config)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                started(config).__enter__().destroy()
            assert f"# without effect: {where} ({why})" in explain()
    off = {"wandb": {"enabled": False}, "hybrid_engine": {"enabled": False}, "amp": {"enabled": "auto"}}
    with started({**BATCH, **off, "zero_optimization": {"reduce_bucket_size": "auto"}}) as engine:
        assert engine.zero_optimization_stage() == 0
    nvme = {**BATCH, "zero_optimization": {"offload_param": {"device": "nvme"}}}
    with pytest.raises(RefusedError, match="nothing is moved to disks"):
        deepspeed.initialize(model=model(), config=nvme)


HERE = set(deepspeed.__all__)
REFUSED = {at for names in NAMES["addresses"].values() for at in names.split() if "." not in at}
REFUSED |= set(NAMES["absent"][""])
TABLE = tomllib.loads(Path(__file__).with_name("deepspeed_names.toml").read_text())
OWN, ENGINE_OWN, SIGNATURES = set(TABLE["package"].split()), set(TABLE["engine"].split()), TABLE["signatures"]


def parameters_of(package, name):
    return list(inspect.signature(attrgetter(name)(package)).parameters)


def test_names_and_signatures():
    for name, parameters in SIGNATURES.items():
        assert parameters_of(deepspeed, name) == parameters.split(), name
    assert all(hasattr(deepspeed, name) for name in HERE)
    for name in REFUSED:
        with pytest.raises(ImportError, match=f"deepspeed.{name} is not part of easymp.compat: "):
            getattr(deepspeed, name)


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        ("", "DeepSpeedConfig", r"initialize\(config=…\)"),
        (".utils", "set_z3_leaf_modules", "FSDPOptions"),
        (".pipe", "PipelineModule", 'strategy="pipeline"'),
        (".zero", "register_external_parameter", "leave it out"),
        (".runtime.config", "DeepSpeedConfig", r"initialize\(config=…\)"),
        (".moe.layer", "MoE", "experts are not spread"),
    ],
)
def test_names_that_are_not_here_say_what_is(module, name, words):
    with pytest.raises(ImportError, match=words):
        exec(f"from easymp.compat.deepspeed{module} import {name}", {})


def test_names_of_the_engine():
    with started({**BATCH, "optimizer": SGD}) as engine:
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
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.zero import config, offload_config

    assert {n for n in dir(theirs) if not n.startswith("_")} <= HERE | REFUSED | OWN
    engine = {n for n in vars(theirs.DeepSpeedEngine) if not n.startswith("_")}
    with started({**BATCH, "optimizer": SGD}) as ours:
        assert {n for n in engine if not hasattr(ours, n)} <= ENGINE_OWN
    records = {
        "zero_optimization": config.DeepSpeedZeroConfig,
        "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "fp16": precision_config.DeepSpeedFP16Config,
        "bf16": precision_config.DeepSpeedBF16Config,
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
    words = {
        v.strip().lower() for n, v in constants.items() if f"{n}_DEFAULT" in constants and isinstance(v, str)
    }
    known = {key for _, key, *_ in KEYS} | {"check_overflow", "pipeline_stage", "type"}
    assert {key for key in words if key.isidentifier()} <= known
    for name, parameters in SIGNATURES.items():
        if name != "WarmupLR" and not name.startswith(("Warmup", "ops", "DeepSpeedEngine.backward")):
            assert parameters_of(theirs, name) == parameters.split(), name
