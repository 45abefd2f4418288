"""Names and signatures of NVIDIA Apex, written down from its source: here under the same address, or refused with a sentence.

A signature is the parameters in Apex's order, each with its default; None is a class or value without one of its own.
"""

from __future__ import annotations

SCALE = "loss optimizers loss_id=0 model=None delay_unscale=False delay_overflow_check=False"
INITIALIZE = (
    "models optimizers=None enabled=True opt_level=O1 cast_model_type=None patch_torch_functions=None keep_batchnorm_fp32=None "
    "master_weights=None loss_scale=None cast_model_outputs=None num_losses=1 verbosity=1 min_loss_scale=None max_loss_scale=16777216.0"
)
NAME = "module name"
AMP = {
    "disable_casts": "",
    "float_function": "fn",
    "half_function": "fn",
    "init": "enabled=True loss_scale=dynamic enable_caching=True verbose=False allow_banned=False",
    "initialize": INITIALIZE,
    "load_state_dict": "state_dict",
    "master_params": "optimizer",
    "promote_function": "fn",
    "register_float_function": NAME,
    "register_half_function": NAME,
    "register_promote_function": NAME,
    "scale_loss": SCALE,
    "state_dict": "destination=None",
}
NORM = "normalized_shape eps=1e-05 elementwise_affine=True memory_efficient=False"
MIXED_NORM = "normalized_shape eps=1e-05"
BY_SHAPE = "input normalized_shape eps=1e-06 memory_efficient=False"
NORMS = {
    "FusedLayerNorm": NORM,
    "FusedRMSNorm": NORM,
    "MixedFusedLayerNorm": MIXED_NORM,
    "MixedFusedRMSNorm": MIXED_NORM,
    "fused_layer_norm": BY_SHAPE,
    "fused_layer_norm_affine": "input weight bias normalized_shape eps=1e-06 memory_efficient=False",
    "fused_rms_norm": BY_SHAPE,
    "fused_rms_norm_affine": "input weight normalized_shape eps=1e-06 memory_efficient=False",
    "manual_rms_norm": "input normalized_shape weight eps",
    "mixed_dtype_fused_layer_norm_affine": "input weight bias normalized_shape eps=1e-06 memory_efficient=False",
    "mixed_dtype_fused_rms_norm_affine": "input weight normalized_shape eps=1e-06 memory_efficient=False",
}
HALF = {
    "BN_convert_float": "module",
    "FP16Model": "network",
    "clip_grad_norm": None,
    "convert_module": "module dtype",
    "convert_network": "network dtype",
    "master_params_to_model_params": "model_params master_params flat_master=False",
    "model_grads_to_master_grads": "model_params master_params flat_master=False",
    "network_to_half": "network",
    "prep_param_lists": "model flat_master=False",
    "to_python_float": "t",
    "tofp16": None,
}
ADAM = (
    "params lr=0.001 bias_correction=True betas=(0.9,~0.999) eps=1e-08 adam_w_mode=True weight_decay=0.0 amsgrad=False "
    "set_grad_none=True capturable=False master_weights=False"
)
SGD = (
    "params lr momentum=0.0 dampening=0.0 weight_decay=0.0 nesterov=False wd_after_momentum=False materialize_master_grads=True "
    "set_grad_none=False"
)
LAMB = (
    "params lr=0.001 bias_correction=True betas=(0.9,~0.999) eps=1e-06 weight_decay=0.01 amsgrad=False adam_w_mode=True "
    "grad_averaging=True set_grad_none=True max_grad_norm=1.0 use_nvlamb=False"
)
MIXED_LAMB = (
    "params lr=0.001 step=0 bias_correction=True betas=(0.9,~0.999) eps=1e-06 weight_decay=0.01 amsgrad=False adam_w_mode=True "
    "grad_averaging=True max_grad_norm=1.0 use_nvlamb=False reduced_precision_dtype=None"
)
NOVOGRAD = (
    "params lr=0.001 bias_correction=True betas=(0.9,~0.999) eps=1e-08 weight_decay=0.0 amsgrad=False reg_inside_moment=False "
    "grad_averaging=True norm_type=2 init_zero=False set_grad_none=True"
)
ADAGRAD = "params lr=0.01 eps=1e-10 weight_decay=0.0 set_grad_none=True adagrad_w_mode=False"
DDP = (
    "module message_size=10000000 delay_allreduce=False shared_param=None allreduce_trigger_params=None "
    "retain_allreduce_buffers=False allreduce_always_fp32=False num_allreduce_streams=1 allreduce_communicators=None "
    "gradient_average=True gradient_predivide_factor=1.0 gradient_average_split_factor=None prof=False"
)
SYNC = "num_features eps=1e-05 momentum=0.1 affine=True track_running_stats=True process_group=None channel_last=False fuse_relu=False"
LARC = "optimizer trust_coefficient=0.02 clip=True eps=1e-08"
SCALER = "loss_scale init_scale=65536.0 scale_factor=2.0 scale_window=2000 min_loss_scale=None max_loss_scale=16777216.0"
APPLY = {"MultiTensorApply": "chunk_size", "multi_tensor_applier": None}
APEX: dict[str, dict[str, str | None]] = {
    "": dict.fromkeys(("amp", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel")),
    "amp": {**AMP, "_amp_state": None},
    "amp._amp_state": {"_amp_state": None, "master_params": "optimizer", "maybe_print": "msg rank0=False"},
    "amp.amp": {name: AMP[name] for name in AMP if "function" in name or name == "init"},
    "amp.frontend": {name: AMP[name] for name in ("initialize", "load_state_dict", "state_dict")},
    "amp.handle": {"AmpHandle": None, "disable_casts": "", "scale_loss": SCALE},
    "amp.scaler": {"LossScaler": SCALER},
    "fp16_utils": HALF,
    "fp16_utils.fp16util": HALF,
    "multi_tensor_apply": APPLY,
    "multi_tensor_apply.multi_tensor_apply": APPLY,
    "normalization": NORMS,
    "normalization.fused_layer_norm": NORMS,
    "optimizers.fused_adagrad": {"FusedAdagrad": ADAGRAD},
    "optimizers.fused_adam": {"FusedAdam": ADAM},
    "optimizers.fused_lamb": {"FusedLAMB": LAMB},
    "optimizers.fused_mixed_precision_lamb": {"FusedMixedPrecisionLamb": MIXED_LAMB},
    "optimizers.fused_novograd": {"FusedNovoGrad": NOVOGRAD},
    "optimizers.fused_sgd": {"FusedSGD": SGD},
    "parallel": {
        "ReduceOp": None,
        "convert_syncbn_model": "module process_group=None channel_last=False",
        "create_syncbn_process_group": "group_size",
    },
    "parallel.LARC": {"LARC": LARC},
    "parallel.distributed": {"DistributedDataParallel": DDP, "Reducer": "module_or_grads_list"},
    "parallel.optimized_sync_batchnorm": {"SyncBatchNorm": SYNC},
    "parallel.sync_batchnorm": {"SyncBatchNorm": SYNC},
}
REFUSED = [  # modules, and names as module:name
    *(
        "RNN",
        "RNN.models",
        "contrib",
        "contrib.multihead_attn",
        "fused_dense",
        "mlp",
        "pyprof",
        "reparameterization",
        "testing",
    ),
    *(
        "transformer",
        "transformer.tensor_parallel.layers",
        "amp.lists.functional_overrides",
        "amp.opt",
        "amp.rnn_compat",
    ),
    *("amp.utils", "amp.wrap", "amp._initialize", "fp16_utils.fp16_optimizer", "fp16_utils.loss_scaler"),
    *("normalization.instance_norm", "parallel.multiproc", "amp:NoOpHandle", "fp16_utils:FP16_Optimizer"),
    *("fp16_utils:DynamicLossScaler", "optimizers:FP16_Optimizer", "parallel:multiproc"),
]
