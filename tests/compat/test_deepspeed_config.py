"""Configurations and names of DeepSpeed.

Each is honoured, ignored by name or refused; beside DeepSpeed itself where that is installed.
"""

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

from easymp import EasympWarning, RefusedError, SettingError
from easymp.cli.config.foreign import DEEPSPEED, KEYS, Document, ImportedSettings
from easymp.compat import deepspeed, layer
from easymp.compat.deepspeed.engine import GETTERS

from .test_deepspeed import BATCH, SGD, model, started

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def sizes_of(engine):
    return tuple(getattr(engine, name)() for name in SIZES)


K6 = """{ "train_batch_size": 64, "gradient_accumulation_steps": 4,
  "fp16": { "enabled": true, "loss_scale": 0, // automatic
            "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1 }, # and a comma too many
}"""


def test_a_file_with_comments(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(K6)
    with started(file) as engine:
        assert sizes_of(engine) == (64, 16, 4)
        assert engine.fp16_enabled() and engine.dynamic_loss_scale() and engine.gradient_clipping() == 1.0
        assert (engine.loss_scale(), engine.optimizer) == (0, None)
        assert engine.config["train_batch_size"] == 64
    config = deepspeed.DeepSpeedConfig(str(file))
    assert (config.train_micro_batch_size_per_gpu, config.fp16_enabled, config.zero_enabled) == (16, True, False)
    with started(config) as engine:
        assert engine.gradient_accumulation_steps() == 4
    file.write_text('{"train_batch_size": 8,\n"train_batch_size": 16}')
    for wrong, message in ((file, "stands twice"), ("nowhere.json", "no DeepSpeed configuration at 'nowhere.json'")):
        with pytest.raises(SettingError, match=message):
            deepspeed.initialize(model=model(), config=wrong)


@pytest.mark.parametrize(
    ("sizes", "solved"),
    [
        ((64, 4, 16), (64, 4, 16)),
        ((64, None, 4), (64, 16, 4)),
        ((64, 8, None), (64, 8, 8)),
        ((None, 8, 4), (32, 8, 4)),
        ((64, None, None), (64, 64, 1)),
        (("auto", 8, "auto"), (8, 8, 1)),
    ],
)
def test_the_batch_triangle(sizes, solved):
    with started({name: value for name, value in zip(SIZES, sizes) if value is not None}) as engine:
        assert sizes_of(engine) == solved


@pytest.mark.parametrize(
    ("config", "message"),
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
        ({**BATCH, "optimizer": {"type": "SGD", "params": {"moment": 0.9}}}, "'moment', did you mean 'momentum'"),
        ({**BATCH, "scheduler": {"type": "LRRangeTest"}}, "'LRRangeTest' is not part of easymp.compat: use torch"),
        ({**BATCH, "scheduler": {"type": "WarmUpLR"}}, "no scheduler 'WarmUpLR', did you mean"),
        ({**BATCH, "scheduler": {"type": "WarmupLR", "params": {"warmup": 3}}}, "WarmupLR has no parameter 'warmup'"),
        ({**BATCH, "scheduler": {"type": "WarmupLR"}}, "a scheduler without an optimizer"),
    ],
)  # fmt: skip
def test_wrong_configurations(config, message):
    with pytest.raises(SettingError, match=message):
        deepspeed.initialize(model=model(), config=config)


def test_initialize_says_what_is_missing():
    for arguments, message in [
        ({"config": BATCH}, "model=None.: pass a torch"),
        ({"model": model()}, "requires --deepspeed_config"),
        ({"model": model(), "config": BATCH, "config_params": BATCH}, "given twice"),
        ({"model": "bert", "config": BATCH}, "pass a torch"),
        ({"model": model(), "optimizer": "adam", "config": BATCH}, "optimizer='adam' is neither one nor a"),
    ]:
        with pytest.raises(SettingError, match=message):
            deepspeed.initialize(**arguments)
    scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model().parameters()))
    config = {**BATCH, "optimizer": {"type": "Adam"}}
    with pytest.raises(AssertionError, match="drives another optimizer"):
        deepspeed.initialize(model=model(), config=config, lr_scheduler=scheduler)


def test_every_set_of_ignored_keys_warns_in_one_warning():
    sets = {"overlap_comm": True}, {"overlap_comm": True, "reduce_bucket_size": 7}, {"overlap_comm": True}
    for keys in sets:
        with pytest.warns(EasympWarning) as caught:
            started({**BATCH, "comms_logger": {"enabled": True}, "zero_optimization": keys}).__enter__().destroy()
        (message,) = [str(w.message) for w in caught if "without effect" in str(w.message)]
        assert all(key in message for key in ("comms_logger", *keys)), message


def test_switches_that_are_off_are_honoured_or_refused():
    untested = {**BATCH, "zero_allow_untested_optimizer": False, "zero_optimization": {"stage": 2}}
    for adam in {"type": "AdamW"}, {"type": "Lion"}:
        started({**untested, "optimizer": adam}).__enter__().destroy()
    with pytest.raises(AssertionError, match="You are using an untested ZeRO Optimizer, SGD"):
        deepspeed.initialize(model=model(), config={**untested, "optimizer": SGD})
    with pytest.raises(RefusedError, match=r"ignore_unused_parameters=False is not honoured: parameters without"):
        deepspeed.initialize(model=model(), config={**BATCH, "zero_optimization": {"ignore_unused_parameters": False}})
    fused = {"optimizer": {**SGD, "legacy_fusion": True}}
    with pytest.raises(RefusedError, match=r"optimizer\.legacy_fusion=True is not honoured"):
        deepspeed.initialize(model=model(), config={**BATCH, **fused})
    with started({**BATCH, "optimizer": SGD}) as engine:
        for save in engine.save_checkpoint, engine.save_16bit_model:
            with pytest.raises(SettingError, match="an empty path: pass a folder"):
                save("")


def test_old_spellings_and_nulls():
    old = {"bfloat16": {"enabled": False}, "steps_per_print": math.inf, "zero_optimization": True}
    old |= dict.fromkeys(("fp16", "gradient_clipping"))
    with started({**BATCH, **old}) as engine:
        assert (engine.zero_optimization_stage(), engine.steps_per_print()) == (1, 0)
        assert (engine.fp16_enabled(), engine.gradient_clipping()) == (False, 1.0)


ROWS = [(section, name, *key) for section, keys in KEYS.items() for name, key in keys.items()]


def nested(keys, value):
    """A configuration with these keys, of values by default."""
    content = {}
    for section, key, default, *_ in keys:
        values = content
        for name in section.split(".") if section else ():
            values[name] = values[name] if isinstance(values.get(name), dict) else {}
            values = values[name]
        values.setdefault(key, value(default))
    return content


def test_defaults_of_deepspeed_stop_no_script():
    config = nested(ROWS, lambda default: default[0] if isinstance(default, list) else default)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with started({**config, **BATCH}) as engine:
            assert sizes_of(engine) == (4, 4, 1)


def test_easymp_config_knows_the_same_keys():
    rows = [key for key in ROWS if key[0] not in ("optimizer", "scheduler", "flops_profiler", "checkpoint")]
    content = nested(rows, lambda default: "auto")
    importer = ImportedSettings(Document("ds.json", content), "DeepSpeed", None)
    importer.walk(content, DEEPSPEED)
    assert len(importer.lines) >= len(rows) - 20
    assert not [line for line in importer.lines if line[1].startswith("unknown")]


def test_every_other_key_is_ignored_or_refused_by_name():
    for section, key, default, kind, reason in ROWS:
        if kind == "honoured":
            continue
        value = {"enabled": True} if default is None else not default if isinstance(default, bool) else 7
        path = f"{section}.{key}" if section else key
        config = {**BATCH, **nested([(section, key, value)], lambda default_value: default_value)}
        if kind == "refused":
            with pytest.raises(RefusedError, match=re.escape(f"{path}={value!r} is not honoured: {reason}")):
                deepspeed.initialize(model=model(), config=config)
        else:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                started(config).__enter__().destroy()
            assert any(f"{path} ({reason})" in str(item.message) for item in caught)
    off = {"wandb": {"enabled": False}, "hybrid_engine": {"enabled": False}, "amp": {"enabled": "auto"}}
    with started({**BATCH, **off, "zero_optimization": {"reduce_bucket_size": "auto"}}) as engine:
        assert engine.zero_optimization_stage() == 0
    nvme = {**BATCH, "zero_optimization": {"offload_param": {"device": "nvme"}}}
    with pytest.raises(RefusedError, match="nothing is moved to disks"):
        deepspeed.initialize(model=model(), config=nvme)


HERE = set(deepspeed.__all__)
TABLES = layer.REFUSED["deepspeed"]
REFUSED = set(layer.by_word(TABLES["names"])) | {a for a in layer.by_word(TABLES["modules"]) if "." not in a}
TABLE = tomllib.loads(Path(__file__).with_name("deepspeed_names.toml").read_text())
OWN, SIGNATURES = set(TABLE["package"].split()), TABLE["signatures"]


def parameters_of(package, name):
    return list(inspect.signature(attrgetter(name)(package)).parameters)


def test_names_and_signatures():
    for name, parameters in SIGNATURES.items():
        assert parameters_of(deepspeed, name) == parameters.split(), name
    assert all(hasattr(deepspeed, name) for name in HERE)


def test_names_of_the_engine():
    with started({**BATCH, "optimizer": SGD}) as engine:
        values = {name: getattr(engine, name)() for name in GETTERS}
        assert (values["gradient_clipping"], values["initial_dynamic_scale"]) == (1, 2**16)
        assert engine.get_batch_info() == (4, 4, 1) and values["dataloader_drop_last"] is False
        assert set(engine.module_state_dict(prefix="net.")) == {f"net.{name}" for name in engine.module.state_dict()}
        with pytest.raises(RefusedError, match="get_fp32_state_dict_from_zero_checkpoint"):
            engine.load_checkpoint(".", custom_load_fn=print)
    version = deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__
    assert ".".join(map(str, version)) == deepspeed.__version__


@pytest.mark.slow
def test_beside_deepspeed_itself(monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # which it sets
    original = pytest.importorskip("deepspeed")
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.zero import config

    assert {name for name in dir(original) if not name.startswith("_")} <= HERE | REFUSED | OWN
    records = {"zero_optimization": config.DeepSpeedZeroConfig, "fp16": precision_config.DeepSpeedFP16Config}
    for section, record in records.items():
        for name, field in record.model_fields.items():
            for key in {name, field.alias or name}:
                default = getattr(field.default, "value", field.default)
                plain = isinstance(default, (bool, int, float, str)) and KEYS[section][key].default is not None
                assert not plain or not KEYS[section][key].asks(default), (section, key, default)
    for name, parameters in SIGNATURES.items():
        if name != "WarmupLR" and not name.startswith(("Warmup", "ops", "DeepSpeedEngine.backward")):
            assert parameters_of(original, name) == parameters.split(), name
