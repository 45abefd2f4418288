"""Configurations of Accelerate and DeepSpeed, taken over line by line."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easymp.cli.wizard.accelerate_file import ACCELERATE, KINDS
from easymp.cli.wizard.deepspeed_file import DEEPSPEED
from easymp.cli.wizard.foreign import Foreign, read_foreign
from easymp.errors import SettingError
from easymp.options import GradScalerKwargs
from easymp.precision import rule_from
from easymp.settings import Launching, Settings
from easymp.strategies import STRATEGIES, read_options
from easymp.strategies.transforms import read_which

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


def read(folder: Path, text: str | dict[str, Any], name: str = "given.yaml") -> Foreign:
    path = folder / name
    path.write_text(text if isinstance(text, str) else json.dumps(text))  # JSON is YAML, too
    return read_foreign(path)


def said(found: Foreign, start: str) -> str:
    (text,) = (text for key, text in found.lines if key.startswith(start))
    return text


def test_a_sharded_training_of_accelerate(tmp_path: Path) -> None:
    found = read(tmp_path, SHARDED)
    assert found.settings == {
        "debug": True,
        "strategy": "fsdp",
        "mixed_precision": "bf16",
        "activation_checkpointing": "blocks",
    }
    assert found.launching == {"main_address": "10.0.0.1", "main_port": 29501, "nodes": "2", "processes": 8}
    assert found.script == (
        "Accelerator(strategy_options={'cpu_offload': True, 'reshard_after_forward': False, 'wrap': ('GPT2Block', 'BertLayer')})"
    )
    assert len(found.lines) == SHARDED.count(":") - 1  # one a line, the section's own not
    assert "--node-rank 1" in said(found, "machine_rank")
    Settings(**found.settings), Launching(**found.launching)


def test_a_configuration_of_deepspeed(tmp_path: Path) -> None:
    found = read(tmp_path, ENGINE, "ds_config.json")
    assert found.settings == {"gradient_accumulation_steps": 4, "mixed_precision": "fp16", "strategy": "fsdp"}
    assert found.launching == {}
    assert found.script == (
        "Accelerator(strategy_options={'reshard_after_forward': False, 'cpu_offload': True}, "
        "kwargs_handlers=[GradScalerKwargs(init_scale=256.0, growth_interval=500, hysteresis=2)])"
    )
    assert (
        "torch.optim.AdamW(model.parameters(), lr=0.001, betas=(0.9, 0.95)); no counterpart: torch_adam"
        in said(found, "optimizer")
    )
    assert "accelerator.clip_grad_norm_(model.parameters(), 0.5)" in said(found, "gradient_clipping")
    plain = read(
        tmp_path,
        {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}},
        "plain.json",
    )
    assert "AdamW(model.parameters(), lr=0.001, weight_decay=0.0)" in said(
        plain, "optimizer"
    )  # DeepSpeed's default, not torch's
    assert "4 x 4 on 4 processes" in said(found, "train_batch_size")
    assert "batch_size=4" in said(found, "train_micro_batch_size_per_gpu")
    assert said(found, "zero_optimization.overlap_comm").startswith("no counterpart")


def test_a_file_that_names_another_is_read_with_it(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(ENGINE)
    outer = {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": "ds.json"},
        "num_processes": 4,
    }
    found = read(tmp_path, outer)
    assert found.settings["strategy"] == "fsdp" and found.settings["mixed_precision"] == "fp16"
    assert found.launching == {"processes": 4}
    with pytest.raises(
        SettingError,
        match=r"ds\.json, line 2: gradient_accumulation_steps .* = 4, but another line of the file says 2",
    ):
        read(tmp_path, {**outer, "gradient_accumulation_steps": 2})
    with pytest.raises(SettingError, match=r"absent\.json' is no file"):
        read(tmp_path, {**outer, "deepspeed_config": {"deepspeed_config_file": "/absent/absent.json"}})


MULTI = {"distributed_type": "MULTI_GPU", "num_processes": 4}


@pytest.mark.parametrize(
    ("given", "taken", "launch"),
    [
        ({"distributed_type": "NO"}, {}, {"processes": 1}),
        ({"distributed_type": "NO", "num_processes": 1, "use_cpu": True}, {"cpu": True}, {"processes": 1}),
        (MULTI, {"strategy": "ddp"}, {"processes": 4}),
        ({**MULTI, "num_processes": 1}, {}, {"processes": 1}),
        ({**MULTI, "num_processes": -1}, {"strategy": "ddp"}, {}),
        ({**MULTI, "num_processes": 5, "num_machines": 2}, {"strategy": "ddp"}, {"nodes": "2"}),
        ({**MULTI, "distributed_type": "MULTI_CPU"}, {"strategy": "ddp", "cpu": True}, {"processes": 4}),
        (
            {**MULTI, "mixed_precision": "no"},
            {"strategy": "ddp", "mixed_precision": "fp32"},
            {"processes": 4},
        ),
        (
            {**MULTI, "mixed_precision": False},
            {"strategy": "ddp", "mixed_precision": "fp32"},
            {"processes": 4},
        ),
        ({**MULTI, "fp16": True}, {"strategy": "ddp", "mixed_precision": "fp16"}, {"processes": 4}),
        ({**MULTI, "distributed_type": "XLA"}, {}, {"processes": 4}),
        ({**MULTI, "main_process_port": 0, "gpu_ids": "0,1"}, {"strategy": "ddp"}, {"processes": 4}),
        (
            {**MULTI, "distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": 4}},
            {"strategy": "hsdp"},
            {"processes": 4},
        ),
        (
            {**MULTI, "distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}},
            {"strategy": "ddp"},
            {"processes": 4},
        ),
        (
            {**MULTI, "distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 1}},
            {"strategy": "zero1"},
            {"processes": 4},
        ),
        (
            {**MULTI, "distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 0}},
            {"strategy": "ddp"},
            {"processes": 4},
        ),
        (
            {**MULTI, "distributed_type": "MEGATRON_LM", "megatron_lm_config": {"megatron_lm_tp_degree": 2}},
            {"strategy": "tensor_parallel"},
            {"processes": 4},
        ),
        (
            {**MULTI, "distributed_type": "MEGATRON_LM", "megatron_lm_config": {"megatron_lm_pp_degree": 2}},
            {"strategy": "pipeline"},
            {"processes": 4},
        ),
        (
            {
                **MULTI,
                "parallelism_config": {
                    "parallelism_config_dp_replicate_size": 2,
                    "parallelism_config_dp_shard_size": 2,
                },
            },
            {"strategy": "hsdp"},
            {"processes": 4},
        ),
        ({"fp16": {"enabled": "auto"}, "train_batch_size": "auto"}, {}, {}),
        (
            {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
            {"mixed_precision": "bf16", "strategy": "zero1"},
            {},
        ),
        ({"amp": {"enabled": True, "opt_level": "O2"}}, {"mixed_precision": "O2"}, {}),
        ({"tensor_parallel": {"autotp_size": 2}}, {"strategy": "tensor_parallel"}, {}),
        (
            {"tensorboard": {"enabled": True}, "wandb": {"enabled": True}},
            {"log_with": "tensorboard,wandb"},
            {},
        ),
    ],
)
def test_what_is_taken(
    tmp_path: Path, given: dict[str, Any], taken: dict[str, Any], launch: dict[str, Any]
) -> None:
    found = read(tmp_path, given)
    assert (found.settings, found.launching) == (taken, launch)


@pytest.mark.parametrize(
    ("given", "line", "words"),
    [
        ({**MULTI, "num_proceses": 8}, "num_proceses", "did you mean 'num_processes'?"),
        ({"zero_optimization": {"stge": 1}}, "zero_optimization.stge", "did you mean 'stage'?"),
        ({**MULTI, "num_machines": 3}, "num_processes", "4 processes do not divide among 3 machines"),
        ({**MULTI, "gpu_ids": "0,1"}, "gpu_ids", "CUDA_VISIBLE_DEVICES=0,1"),
        (
            {**MULTI, "dynamo_config": {"dynamo_backend": "INDUCTOR"}},
            "dynamo_config",
            "Accelerator(dynamo_backend='inductor')",
        ),
        (
            {**MULTI, "fsdp_config": {"fsdp_version": 2}},
            "fsdp_config",
            "not in force: distributed_type is MULTI_GPU",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            "zero_optimization",
            "strategy stays auto",
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.off",
            "zero1 has no option",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "zero_optimization.off",
            "nothing is moved to disks",
        ),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer", "no counterpart: OneBitAdam"),
        (
            {"optimizer": {"type": "Lamb", "params": {"lr": "auto"}}},
            "optimizer",
            "easymp.optim.LAMB(model.parameters())",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}},
            "scheduler",
            "math.log(i + 1) / math.log(9) if i < 9",
        ),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}},
            "scheduler",
            "easymp.compat.deepspeed.OneCycle(optimizer, cycle_min_lr=0.1, cycle_max_lr=0.2)",
        ),
        (
            {"fp16": {"enabled": True, "consecutive_hysteresis": True}},
            "fp16.consecutive_hysteresis",
            "GradScalerKwargs(refill_each_step=True)",
        ),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4},
            "train_batch_size",
            "= 64 / (4 x processes)",
        ),
        ({"bf16": {"enabled": True}}, "(no gradient_clipping)", "clips at 1.0"),
        ({"flops_profiler": {"enabled": False, "profile_step": 1}}, "flops_profiler", "off"),
    ],
)
def test_what_is_said(tmp_path: Path, given: dict[str, Any], line: str, words: str) -> None:
    assert words in said(read(tmp_path, given), line)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "a.yaml",
            "distributed_type: MULTI_GPU\nnum_processes: eight\n",
            "a.yaml, line 2: num_processes = eight is no number",
        ),
        ("a.yaml", "distributed_type: MULTI_GPUS\n", "line 1: distributed_type = MULTI_GPUS is not one of"),
        ("a.yaml", "debug: true\nmixed_precision: bf61\n", "line 2: mixed_precision = 'bf61' is not one of"),
        (
            "a.yaml",
            "debug: true\nuse_cpu: no\ndebug: false\n",
            "line 3: the key 'debug' stands there before, on line 1",
        ),
        (
            "a.yaml",
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: 7\n",
            "line 3: fsdp_config.fsdp_sharding_strategy = 7",
        ),
        ("a.yaml", "debug: [1\n", "is not valid YAML"),
        ("a.yaml", "a: &x [*x]\ndebug: *x\n", "inside one another without end"),
        ("a.yaml", "- 1\n", "holds a list"),
        ("a.yaml", "\n", "is empty"),
        ("a.toml", "x = 1\n", "holds a str"),
        (
            "a.yaml",
            "learning_rate: 1\n",
            "neither Accelerate nor DeepSpeed: none of its keys is theirs (learning_rate)",
        ),
        (
            "a.json",
            '{"bf16": {"enabled": true},\n "fp16": {"enabled": true}}',
            "a.json, line 1: fp16 and bf16 are enabled at once",
        ),
        (
            "a.json",
            '{"fp16": {"enabled": true},\n "fp16": {}}',
            "a.json, line 2: the key 'fp16' stands there before, on line 1",
        ),
        ("a.json", '{"fp16": 1}', "line 1: fp16 = 1 is no group of keys"),
        ("a.json", '{"gradient_accumulation_steps": 0}', "below the smallest possible value, 1"),
        (
            "a.json",
            '{"zero_optimization": {"stage": 4}}',
            "line 1: zero_optimization.stage = 4 is no stage of ZeRO",
        ),
        (
            "a.json",
            '{"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}',
            "no multiple of 2",
        ),
    ],
)
def test_what_is_wrong_is_refused_with_its_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(SettingError) as caught:
        read(tmp_path, text, name)
    assert words in str(caught.value)


def test_without_pyyaml_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(SettingError, match=r"pip install 'easymp\[yaml\]'"):
        read(tmp_path, SHARDED)
    assert read(tmp_path, ENGINE, "ds").origin == "DeepSpeed"  # JSON needs nothing
    with pytest.raises(SettingError, match="is no file"):
        read_foreign(tmp_path / "absent.yaml")


# -- every key ---------------------------------------------------------------------------------------------------------


def test_every_key_that_accelerate_writes_is_known() -> None:
    spec = importlib.util.find_spec("accelerate")
    if spec is None or spec.origin is None:
        pytest.skip("an optional package is not installed: accelerate (the extra 'bench')")
    commands = Path(spec.origin).parent / "commands"
    tree = ast.parse((commands / "config" / "config_args.py").read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    fields = {
        n.target.id
        for c in classes
        for n in c.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    assert len(fields) > 30 and fields - {*ACCELERATE} == set()
    flags = set(
        re.findall(
            r'"--((?:fsdp|parallelism_config|megatron_lm|dynamo)_\w+)"', (commands / "launch.py").read_text()
        )
    )
    ours = {key for rules in ACCELERATE.values() if isinstance(rules, dict) for key in rules}
    assert len(flags) > 30 and flags - ours == set()


def leaves(rules: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    return [
        leaf
        for key, rule in rules.items()
        for leaf in (leaves(rule, (*path, key)) if isinstance(rule, dict) else [(*path, key)])
    ]


VALUES = (
    st.sampled_from(
        [
            None,
            True,
            False,
            "no",
            "auto",
            "cpu",
            "nvme",
            "bf16",
            *KINDS,
            "NO_SHARD",
            0,
            1,
            2,
            3,
            8,
            -1,
            0.5,
            1e40,
            "1e8",
        ]
    )
    | st.text(max_size=5)
    | st.lists(st.integers(), max_size=2)
    | st.fixed_dictionaries(
        {
            "type": st.sampled_from(["Adam", "WarmupCosineLR", "StepLR", "x"]),
            "params": st.just({"lr": 1, "x": []}),
        }
    )
)


@pytest.mark.parametrize("rules", [ACCELERATE, DEEPSPEED], ids=["accelerate", "deepspeed"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_values_are_taken_or_refused_and_no_line_is_lost(
    tmp_path: Path, rules: Any, data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.sampled_from(leaves(rules)), min_size=1, max_size=6, unique=True))
    content: dict[str, Any] = {}
    for *sections, key in chosen:
        inside = content
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[key] = data.draw(VALUES)
    try:
        found = read(tmp_path, content, "given.json")
    except SettingError:
        return
    taken, _ = Settings(**found.settings), Launching(**found.launching)
    names = {"Accelerator": dict, "GradScalerKwargs": GradScalerKwargs}
    arguments = eval(found.script or "{}", names)  # what is told to be written is what the script may write
    if "strategy_options" in arguments:
        read_options(STRATEGIES[taken.strategy], arguments["strategy_options"], {})
    for handler in arguments.get("kwargs_handlers", ()):
        rule_from(handler)
    assert read_which(arguments.get("activation_checkpointing", False)) in (True, False)
    assert {key.split(":")[0] for key, _ in found.lines} >= {".".join(path) for path in chosen}
    assert all(text for _, text in found.lines)
