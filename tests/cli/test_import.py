"""``easymp config --from``: configurations of Accelerate and DeepSpeed, a sentence for each key."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from easymp import GradScalerKwargs, resolve
from easymp.cli import main

SHARDED = """
compute_environment: LOCAL_MACHINE
debug: true
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: true
  fsdp_reshard_after_forward: SHARD_GRAD_OP
  fsdp_transformer_layer_cls_to_wrap: GPT2Block,BertLayer
  fsdp_version: 1
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29501
mixed_precision: bf16
num_machines: 2
num_processes: 16
use_cpu: false
"""
ENGINE = """{
  "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4,
  "fp16": {"enabled": true, "loss_scale": 0, // automatic
           "initial_scale_power": 8, "loss_scale_window": 500, "hysteresis": 2},
  "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}, "overlap_comm": true}, # at url http://x
  "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.95], "torch_adam": true}},
  "gradient_clipping": 0.5,
}"""
ALWAYS = {"mixed_precision": "auto", "strategy": "auto", "gradient_accumulation_steps": 1}  # written


@pytest.fixture
def import_text(config: Callable[..., str]) -> Callable[..., tuple[dict[str, Any], str]]:
    """Imports a text on a machine with eight GPUs; returns the settings beyond the defaults, and the output."""

    def run(text: str | dict[str, Any], name: str = "given.yaml"):
        Path(name).write_text(text if isinstance(text, str) else json.dumps(text))  # JSON is YAML, too
        output = config("8xH100", "--yes", "--from", name, "--file", "new.toml")
        settings = tomllib.loads(Path("new.toml").read_text())
        Path("new.toml").unlink()
        return {key: value for key, value in settings.items() if ALWAYS.get(key) != value and value != {}}, output

    return run


def sentence_of(output: str, key: str) -> str:
    """The sentence under the line of a key."""
    lines = output.splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith(key)) + 1]


def test_a_sharded_training_of_accelerate(import_text):
    settings, output = import_text(SHARDED)
    assert settings == {
        "debug": True,
        "strategy": "fsdp",
        "mixed_precision": "bf16",
        "activation_checkpointing": "blocks",
        "launch": {"main_address": "10.0.0.1", "main_port": 29501, "nodes": "2", "processes": 8},
        "strategy_options": {"cpu_offload": True, "reshard_after_forward": False, "wrap": ["GPT2Block", "BertLayer"]},
    }
    assert "--node-rank 1" in sentence_of(output, "machine_rank")


def test_a_configuration_of_deepspeed(import_text):
    settings, output = import_text(ENGINE, "ds_config.json")
    assert settings == {
        "gradient_accumulation_steps": 4,
        "mixed_precision": "fp16",
        "strategy": "fsdp",
        "strategy_options": {"reshard_after_forward": False, "cpu_offload": True},
        "scaler_options": {"init_scale": 256.0, "growth_interval": 500, "hysteresis": 2},
    }
    assert "Adam is torch.optim.AdamW(..., weight_decay=0.0)" in sentence_of(output, "optimizer")
    assert "accelerator.clip_grad_norm_(model.parameters(), 0.5)" in sentence_of(output, "gradient_clipping")
    assert "of 64 / (processes x accumulation)" in sentence_of(output, "train_batch_size")
    assert sentence_of(output, "zero_optimization.overlap_comm").strip().startswith("no counterpart")


def test_a_file_for_several_processes_on_a_machine_that_starts_one(config):
    Path("ds_config.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    arguments = ["--yes", "--from", "ds_config.json"]
    output = config("laptop CPU", *arguments, code=2)
    assert "strategy = fsdp cannot run here" in output and "or --for MACHINE to write the file for another" in output
    config("laptop CPU", *arguments, "--for", "8xH100")
    assert resolve().strategy == "fsdp" and "\nprocesses" not in Path("easymp.toml").read_text()
    config("laptop CPU", *arguments, "--set", "strategy=single", "--file", "single.toml")
    assert "strategy_options" not in tomllib.loads(Path("single.toml").read_text())


def test_the_command_line_wins_over_the_foreign_file_and_that_over_ours(config):
    foreign = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}, "train_batch_size": 1}
    Path("ds.json").write_text(json.dumps(foreign))
    Path("easymp.toml").write_text("mixed_precision = 'bf16'\ngradient_accumulation_steps = 4\nseed = 3\n")
    config("2xA100 NVLink", "--yes", "--from", "ds.json", "--set", "project_dir=runs")
    settings = resolve()
    assert (settings.mixed_precision, settings.strategy, settings.project_dir) == ("fp16", "fsdp", "runs")
    assert settings.strategy_options == {"reshard_after_forward": False}
    assert (settings.gradient_accumulation_steps, settings.seed) == (4, 3)
    Path("bf16.json").write_text('{"bf16": {"enabled": true}}')
    output = config("T4", "--yes", "--from", "bf16.json", "--file", "new.toml", code=2)
    assert "bf16.json: mixed_precision = bf16 cannot run here" in output


def test_a_file_that_names_another_is_read_with_it(import_text, config):
    Path("ds.json").write_text(ENGINE)
    engine = {"deepspeed_config_file": "ds.json"}
    content = {"distributed_type": "DEEPSPEED", "deepspeed_config": engine, "num_processes": 4}
    settings, _ = import_text(content)
    assert (settings["strategy"], settings["mixed_precision"]) == ("fsdp", "fp16")
    assert settings["launch"] == {"processes": 4}
    for change, sentence in (
        ({"gradient_accumulation_steps": 2}, "ds.json: gradient_accumulation_steps would be"),
        ({"deepspeed_config": {"deepspeed_config_file": "/absent.json"}}, "absent.json' is not a file"),
    ):
        Path("given.yaml").write_text(json.dumps({**content, **change}))
        assert sentence in config("8xH100", "--yes", "--from", "given.yaml", code=2)


def multi(kind: str = "MULTI_GPU", **content: Any) -> dict[str, Any]:
    """A file of Accelerate for four processes."""
    return {"distributed_type": kind, "num_processes": 4, **content}


DDP, FOUR, BF16 = {"strategy": "ddp"}, {"launch": {"processes": 4}}, {"mixed_precision": "bf16"}
ONE, TP = {"launch": {"processes": 1}}, {"strategy": "tensor_parallel", "strategy_options": {"size": 2}}
SPLIT = {"parallelism_config_dp_shard_size": 2}
INDUCTOR = {"dynamo_backend": "INDUCTOR"}
TUNED = {"compile": {"what": "model", "mode": "max-autotune"}}


@pytest.mark.parametrize(
    ("content", "settings"),
    [
        ({"distributed_type": "NO"}, ONE),
        ({"distributed_type": "NO", "num_processes": 1, "use_cpu": True}, {"cpu": True} | ONE),
        (multi(), DDP | FOUR),
        (multi(num_processes=-1), DDP),
        (multi(num_processes=5, num_machines=2), DDP | {"launch": {"nodes": "2"}}),
        (multi("MULTI_CPU"), DDP | FOUR | {"cpu": True}),
        (multi(mixed_precision=False), DDP | FOUR | {"mixed_precision": "fp32"}),
        (multi("XLA"), FOUR),
        (multi(main_process_port=0, gpu_ids="0,1"), DDP | FOUR),
        (multi(dynamo_config=INDUCTOR), DDP | FOUR | {"compile": "model"}),
        (multi(dynamo_config=INDUCTOR | {"dynamo_mode": "max-autotune"}), DDP | FOUR | TUNED),
        (multi(dynamo_config=INDUCTOR | {"dynamo_mode": "default"}), DDP | FOUR | {"compile": "model"}),
        (multi(dynamo_backend="AOT_EAGER"), DDP | FOUR | {"compile": {"backend": "aot_eager"}}),
        (multi("FSDP", fsdp_config={"fsdp_sharding_strategy": 4}), {"strategy": "hsdp"} | FOUR),
        (multi("FSDP", fsdp_config={"fsdp_sharding_strategy": "NO_SHARD"}), DDP | FOUR),
        (multi("DEEPSPEED", deepspeed_config={"zero_stage": 1}), {"strategy": "zero1"} | FOUR),
        (multi("DEEPSPEED", deepspeed_config={"zero_stage": 0}), DDP | FOUR),
        (multi("MEGATRON_LM", megatron_lm_config={"megatron_lm_tp_degree": 2}), FOUR),
        (multi(parallelism_config={"parallelism_config_tp_size": 1}), DDP | FOUR),
        ({"fp16": {"enabled": "auto"}, "train_batch_size": "auto"}, {}),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, BF16 | {"strategy": "zero1"}),
        ({"amp": {"enabled": True, "opt_level": "O2"}}, {"mixed_precision": "O2"}),
        ({"tensor_parallel": {"autotp_size": 2}}, TP),
    ],
)  # fmt: skip
def test_settings_of_a_file(import_text, content, settings):
    assert import_text(content)[0] == settings


ZERO, OFF = "zero_optimization", {"offload_param": {"device": "cpu"}}
WARM_UP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}
SIZES = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}


@pytest.mark.parametrize(
    ("content", "key", "pattern"),
    [
        (multi(num_proceses=8), "num_proceses", "unknown, nothing taken: .*did you mean 'num_processes'"),
        ({ZERO: {"stge": 1}}, f"{ZERO}.stge", "did you mean 'stage'"),
        (multi(num_machines=3), "num_processes", "4 processes do not divide among 3 machines"),
        (multi(gpu_ids="0,1"), "gpu_ids", "CUDA_VISIBLE_DEVICES=0,1"),
        (multi(fsdp_config={"fsdp_version": 2}), "fsdp_config", "not in force: distributed_type is MULTI_GPU"),
        ({ZERO: OFF}, f"{ZERO}.off", "strategy stays auto"),
        ({ZERO: {"stage": 1, **OFF}}, f"{ZERO}.off", "zero1 has no option"),
        ({ZERO: {"stage": 3, "offload_param": {"device": "nvme"}}}, f"{ZERO}.off", "moved to disks"),
        (WARM_UP, "scheduler", "easymp.compat.deepspeed has DeepSpeed's schedules"),
        ({"fp16": {"enabled": False, "loss_scale": 8}}, "fp16.loss_scale", "fp16 is not enabled"),
        (SIZES, "train_micro", r"batch_size=4\)"),
        ({"bf16": {"enabled": True}}, "(no gradient_clipping)", "clips at 1.0"),
        (multi(dynamo_config={"dynamo_use_dynamic": True}), "dynamo_config.dynamo_use", r"table \[compile\]"),
        (multi(parallelism_config=SPLIT), "parallelism_config.parallelism_config_dp_s", "as for hsdp and tensor_para"),
        ({"wandb": {"enabled": True}}, "wandb", "EASYMP_LOG_WITH=tensorboard, wandb or jsonl"),
        ({"flops_profiler": {"enabled": False, "profile_step": 1}}, "flops_profiler", "off"),
    ],
)
def test_sentences_of_keys(import_text, content, key, pattern):
    assert re.search(pattern, sentence_of(import_text(content)[1], key))


TWO = '{"bf16": {"enabled": true},\n "fp16": {"enabled": true}}'
SHARD = "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: 7\n"


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.yaml", "distributed_type: NO\nnum_processes: eight\n", "a.yaml: num_processes = eight"),
        ("a.yaml", "distributed_type: MULTI_GPUS\n", "a.yaml: distributed_type = MULTI_GPUS is not one of"),
        ("a.yaml", "debug: true\nmixed_precision: bf61\n", "a.yaml: mixed_precision = 'bf61' is not one of"),
        ("a.yaml", "debug: true\nuse_cpu: no\ndebug: false\n", "a.yaml: the key 'debug' stands twice"),
        ("a.yaml", SHARD, "a.yaml: fsdp_config.fsdp_sharding_strategy = 7"),
        ("a.yaml", SHARD.replace("7", "12"), "a.yaml: fsdp_config.fsdp_sharding_strategy = 12"),
        ("a.yaml", "debug: [1\n", "is not valid YAML"),
        ("a.yaml", "a: &x [*x]\ndebug: *x\n", "has an alias"),
        ("a.yaml", "debug: " + "[" * 5000, "a.yaml"),
        ("a.yaml", "- 1\n", "holds no keys"),
        ("a.yaml", "\n", "holds no keys"),
        ("a.toml", "x = 1\n", "holds no keys"),
        ("a.yaml", "learning_rate: 1\n", "neither Accelerate nor DeepSpeed"),
        ("a.json", TWO, "fp16 and bf16 are enabled at once"),
        ("a.json", '{"fp16": {"enabled": true},\n "fp16": {}}', "a.json: the key 'fp16' stands twice"),
        ("a.json", '{"fp16": 1}', "a.json: fp16 = 1 is not a group of keys"),
        ("a.json", '{"gradient_accumulation_steps": 0}', "below the smallest possible value, 1"),
        (
            "a.json",
            '{"zero_optimization":\n {"stage": 4}}',
            "a.json: zero_optimization.stage = 4 is not an integer from 0 to 3",
        ),
        ("a.json", '{\n"a" 1}', "a.json, line 2"),
        ("a.json", '{"a": /* no end', "a.json, line 1"),
        ("a.json", '{"a": NaN}', "NaN is not a finite number"),
        ("a.json", '{"a": 1e999}', "1e999 is not a finite number"),
        ("a.json", "{} {}", "a.json, line 1"),
        ("a.json", "[" * 100_000, "a.json"),
        ("a.json", '{"a": ' + "9" * 5000 + "}", "a.json is not valid JSON"),
    ],
)
def test_wrong_files_are_refused_with_the_key(name, text, sentence, config):
    Path(name).write_text(text)
    assert sentence in config("8xH100", "--yes", "--from", name, code=2)
    assert not Path("easymp.toml").exists()


def test_without_pyyaml_the_message_names_the_package(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    Path("a.yaml").write_text(SHARDED)
    assert "pip install 'easymp[yaml]'" in config("8xH100", "--yes", "--from", "a.yaml", code=2)
    Path("ds").write_text(ENGINE)
    assert "(DeepSpeed)" in config("8xH100", "--yes", "--from", "ds")  # JSON needs nothing


def test_every_key_that_accelerate_writes_is_known(import_text) -> None:
    spec = importlib.util.find_spec("accelerate")
    if spec is None or spec.origin is None:
        pytest.skip("an optional package is not installed: accelerate (the extra 'bench')")
    commands = Path(spec.origin).parent / "commands"
    tree = ast.parse((commands / "config" / "config_args.py").read_text())
    nodes = [n for c in tree.body if isinstance(c, ast.ClassDef) for n in c.body if isinstance(n, ast.AnnAssign)]
    fields = {n.target.id for n in nodes if isinstance(n.target, ast.Name)}
    pattern = r'"--((fsdp|parallelism_config|megatron_lm|dynamo)_\w+)"'
    flags = re.findall(pattern, (commands / "launch.py").read_text())
    assert len(fields) > 30 and len(flags) > 30
    content: dict[str, Any] = {**dict.fromkeys(fields), "num_processes": 1}
    for flag, section in flags:
        name = section if section.endswith("_config") else f"{section}_config"
        content[name] = (content.get(name) or {}) | {flag: None}
    for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        content["distributed_type"] = kind
        output = import_text(content)[1]
        assert "num_machines: null" in output and "unknown, nothing taken" not in output


TEXTS = [None, True, False, "no", "auto", "cpu", "nvme", "bf16", "DEEPSPEED", "NO_SHARD"]
NUMBERS = [0, 1, 2, 3, 8, -1, 0.5, 1e40, "1e8"]
TYPES, PARAMS = st.sampled_from(["Adam", "WarmupCosineLR", "StepLR", "x"]), st.just({"lr": 1, "x": []})
TYPED = st.fixed_dictionaries({"type": TYPES, "params": PARAMS})
LISTS = st.lists(st.integers(), max_size=2)
VALUES = st.sampled_from([*TEXTS, *NUMBERS]) | st.text(max_size=5) | LISTS | TYPED
KEYS = {
    "accelerate": """distributed_type num_processes num_machines machine_rank mixed_precision fp16 use_cpu gpu_ids
        main_process_port dynamo_backend gradient_accumulation_steps fsdp_config.fsdp_sharding_strategy
        fsdp_config.fsdp_offload_params fsdp_config.fsdp_transformer_layer_cls_to_wrap fsdp_config.fsdp_min_num_params
        deepspeed_config.zero_stage deepspeed_config.offload_param_device deepspeed_config.deepspeed_config_file
        parallelism_config.parallelism_config_tp_size megatron_lm_config.megatron_lm_pp_degree dynamo_config.x""",
    "deepspeed": """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
        optimizer scheduler zero_optimization.stage zero_optimization.offload_param.device fp16.enabled fp16.loss_scale
        fp16.initial_scale_power fp16.hysteresis fp16.consecutive_hysteresis bf16.enabled amp.enabled amp.opt_level
        tensor_parallel.autotp_size compile.enabled tensorboard wandb zero_optimization.mics_shard_size""",
}


@pytest.mark.parametrize("library", KEYS)
@hypothesis_settings(max_examples=60)
@given(data=st.data())
def test_any_values_are_imported_or_refused_and_no_line_is_lost(folder, on_machine, capsys, library, data):
    paths = data.draw(st.lists(st.sampled_from(KEYS[library].split()), min_size=1, max_size=6, unique=True))
    content: dict[str, Any] = {}
    for path in paths:
        *sections, key = path.split(".")
        section = content
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = data.draw(VALUES)
    Path("given.json").write_text(json.dumps(content))
    Path("easymp.toml").unlink(missing_ok=True)
    on_machine("8xH100")
    code = main(["config", "--yes", "--from", "given.json"])
    output = capsys.readouterr().out
    assert code in (0, 2)
    if code == 0:
        GradScalerKwargs(**(resolve().scaler_options or {}))  # the file reads
        assert all(re.search(rf"\n({path}[:.]|{path.split('.')[0]}: )", output) for path in paths)
