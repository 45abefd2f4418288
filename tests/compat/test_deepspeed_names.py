"""DeepSpeed's public names, each with what easymp.compat.deepspeed makes of it; beside DeepSpeed itself where that is installed."""

from __future__ import annotations

import inspect

import pytest
from torch import nn

from easymp import RefusedError
from easymp.compat import deepspeed

from .test_deepspeed import BATCH, KEYS, NAMES, SGD, started

# Top-level names of DeepSpeed 0.19: here; refused, with the reason; a part of DeepSpeed's own machinery, without a counterpart.
HERE = set(deepspeed.__all__)
REFUSED = set(NAMES["absent"][""]) | {
    at for names in NAMES["addresses"].values() for at in names.split() if "." not in at
}
OWN = set(
    "DeepSpeedConfigError DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable KV MLA_KV MLA_Q QUERY NOT_HEAD_BLOCKED MUON_OPTIMIZER "
    "TORCH_DISTRIBUTED_DEFAULT_PORT constants dist git_branch git_hash git_version_info git_version_info_installed "
    "merge_tp_model_init_into_config record_tp_model_init_args resolve_per_head_muon_after_sharding version pkg_version "
    "Any Callable Dict Optimizer Optional Tuple Union argparse json os torch".split()
)
# Methods and properties of the engine in the same way; refused ones say so when they are called.
ENGINE_OWN = set(
    "aio_config all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_no_retain autotuning_end_profile_step autotuning_metric "
    "autotuning_metric_path autotuning_model_info_path autotuning_profile_model_info autotuning_start_profile_step "
    "buffered_allreduce_fallback checkpoint_serialization_enabled checkpoint_tag_validation_enabled checkpoint_tag_validation_fail "
    "clip_fp32_gradients collect_python_gc communication_data_type compile_zero_optimization_stage cpuadam_cores_perc "
    "curriculum_learning_config data_efficiency_config data_sampling_config dynamic_loss_scale_args get_autosp_backend "
    "get_autotp_backend get_compile_time get_deepcompile_backend get_deepspeed_compile_backend get_optimizer_configuration "
    "get_sequence_parallel_group get_type is_first_weights_partition_group is_iterable_style_dataset is_map_style_dataset "
    "optimizer_legacy_fusion print_forward_breakdown random_ltd_config random_ltd_initialize sparse_all_gather sparse_allreduce "
    "sparse_allreduce_bucket sparse_allreduce_no_retain swap_tensor_config tensor_parallel_config "
    "torch_autocast_lower_precision_safe_modules uses_parallelization_pass_only zenflow_config zero_partial_offload".split()
)
# Parameters in DeepSpeed's order.
SIGNATURES = {
    "initialize": "args model optimizer model_parameters training_data lr_scheduler distributed_port mpu dist_init_required collate_fn "
    "config mesh_param config_params",
    "init_distributed": "dist_backend auto_mpi_discovery distributed_port verbose timeout init_method dist_init_required config rank "
    "world_size",
    "add_config_arguments": "parser",
    "zero.GatheredParameters": "params modifier_rank fwd_module enabled",
    "checkpointing.configure": "mpu_ deepspeed_config partition_activations contiguous_checkpointing num_checkpoints checkpoint_in_cpu "
    "synchronize profile",
    "DeepSpeedEngine.backward": "self loss retain_graph scale_wrt_gas",
    "DeepSpeedEngine.step": "self lr_kwargs",
    "DeepSpeedEngine.save_checkpoint": "self save_dir tag client_state save_latest exclude_frozen_parameters",
    "DeepSpeedEngine.load_checkpoint": "self load_dir tag load_module_strict load_optimizer_states load_lr_scheduler_states "
    "load_module_only custom_load_fn",
    "DeepSpeedEngine.save_16bit_model": "self save_dir save_filename exclude_frozen_parameters",
    "DeepSpeedEngine.module_state_dict": "self destination prefix keep_vars exclude_frozen_parameters",
    "DeepSpeedEngine.set_train_batch_size": "self train_batch_size",
    "DeepSpeedEngine.set_train_micro_batch_size": "self micro_batch_size",
    "WarmupLR": "optimizer warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration",
    "WarmupDecayLR": "optimizer total_num_steps warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration",
    "WarmupCosineLR": "optimizer total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type last_batch_iteration",
    "ops.adam.FusedAdam": "params lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none",
}


def parameters_of(package, name):
    for part in name.split("."):
        package = getattr(package, part)
    return list(inspect.signature(package).parameters)


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
        for name in (
            "zero_hpz_partition_size",
            "zero_multi_rank_bucket_allreduce",
            "flops_profiler_profile_step",
            "gradient_clipping",
        ):
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
