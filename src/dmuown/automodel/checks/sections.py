"""The sections of a fine-tuning recipe of NeMo AutoModel 0.7, and the rule of each key.

Written from the dataclasses and readers of the host; a test compares the keys with the installed host's.
"""

from __future__ import annotations

from collections.abc import Mapping

from dmuown.automodel.checks.rules import (
    Rule,
    any_value,
    count,
    count_or_zero,
    dtype,
    either,
    items,
    mapping,
    not_negative,
    one_of,
    optional,
    positive,
    switch,
    text,
)

_signal = optional(either("a signal's number or name", count, text, items(either("a signal", count, text))))

STEP_SCHEDULER: Mapping[str, Rule] = {
    "global_batch_size": count,
    "local_batch_size": count,
    "num_epochs": optional(count),
    "max_steps": optional(count),
    "ckpt_every_steps": optional(count),
    "save_checkpoint_every_epoch": switch,
    "validate_on_checkpoint": switch,
    "val_every_steps": optional(count),
    "log_remote_every_steps": count,
    "loss_average_window_steps": count,
    "gc_every_steps": optional(count),
    "start_step": count_or_zero,
    "start_epoch": count_or_zero,
    "preemption_signal": _signal,
    "dp_size": any_value,
    "dataloader": any_value,
}

LR_SCHEDULER: Mapping[str, Rule] = {
    "lr_warmup_steps": optional(count_or_zero),
    "lr_decay_steps": optional(count),
    "lr_decay_style": one_of("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    "init_lr": optional(not_negative),
    "max_lr": optional(positive),
    "min_lr": optional(not_negative),
    "start_wd": optional(not_negative),
    "end_wd": optional(not_negative),
    "wd_incr_steps": optional(count_or_zero),
    "wd_incr_style": one_of("constant", "linear", "cosine"),
    "use_checkpoint_opt_param_scheduler": switch,
    "override_opt_param_scheduler": switch,
    "wsd_decay_steps": optional(count),
    "lr_wsd_decay_style": optional(one_of("linear", "cosine", "exponential", "minus_sqrt")),
}

CHECKPOINT: Mapping[str, Rule] = {
    "enabled": switch,
    "checkpoint_dir": text,
    "restore_from": optional(text),
    "model_save_format": one_of("safetensors", "torch_save"),
    "model_cache_dir": optional(text),
    "model_repo_id": optional(text),
    "save_consolidated": either("true, false, every or final", switch, one_of("final", "every", "false", "true")),
    "is_peft": switch,
    "model_state_dict_keys": optional(items(text)),
    "is_async": switch,
    "wait_for_staging": switch,
    "cpu_offload": switch,
    "allow_legacy_pickle_restore": switch,
    "dequantize_base_checkpoint": optional(switch),
    "original_model_root_dir": optional(text),
    "skip_task_head_prefixes_for_base_model": optional(items(text)),
    "single_rank_consolidation": switch,
    "staging_dir": optional(text),
    "v4_compatible": switch,
    "legacy_paramwrapper_layout": switch,
    "diffusers_compatible": switch,
    "best_metric_key": text,
    "consolidation_timeout_minutes": count,
    "max_recent_checkpoints": optional(count),
}

PARALLEL_SIZES: Mapping[str, Rule] = {
    "dp_size": optional(count),
    "dp_replicate_size": optional(count),
    "tp_size": optional(count),
    "pp_size": optional(count),
    "cp_size": optional(count),
    "ep_size": optional(count),
}

_COMMON_STRATEGY: Mapping[str, Rule] = {
    **PARALLEL_SIZES,
    "_target_": any_value,
    "strategy": one_of("fsdp2", "megatron_fsdp", "ddp"),
    "pipeline": optional(mapping),
    "moe": optional(mapping),
    "activation_checkpointing": optional(either("true, false, full or selective", switch, one_of("full", "selective"))),
}

_scope = either("a scope or a list of scopes", text, items(text))

STRATEGIES: Mapping[str, Mapping[str, Rule]] = {
    "fsdp2": {
        **_COMMON_STRATEGY,
        "sequence_parallel": switch,
        "tp_plan": any_value,
        "patch_is_packed_sequence": switch,
        "mp_policy": optional(mapping),
        "offload_policy": optional(mapping),
        "autocast_dtype": dtype,
        "activation_checkpointing_scope": _scope,
        "defer_fsdp_grad_sync": switch,
        "reshard_after_forward": optional(switch),
        "enable_async_tensor_parallel": switch,
        "enable_compile": switch,
        "enable_fsdp2_prefetch": switch,
        "fsdp2_backward_prefetch_depth": count_or_zero,
        "fsdp2_forward_prefetch_depth": count_or_zero,
        "multimodal": mapping,
    },
    "megatron_fsdp": {
        **_COMMON_STRATEGY,
        "megatron_fsdp_unit_modules": optional(items(text)),
        "zero_dp_strategy": one_of(0, 1, 2, 3),
        **dict.fromkeys(
            (
                "init_fsdp_with_meta_device",
                "grad_reduce_in_fp32",
                "preserve_fp32_weights",
                "overlap_grad_reduce",
                "overlap_param_gather",
                "check_for_nan_in_grad",
                "report_nan_in_param_grad",
                "average_in_collective",
                "disable_bucketing",
                "calculate_per_token_loss",
                "keep_fp8_transpose_cache",
                "nccl_ub",
                "fsdp_double_buffer",
            ),
            switch,
        ),
    },
    "ddp": {
        **_COMMON_STRATEGY,
        "activation_checkpointing_scope": _scope,
        "broadcast_buffers": switch,
        "find_unused_parameters": switch,
        "static_graph": switch,
        "bucket_cap_mb": optional(positive),
        "gradient_as_bucket_view": switch,
        "autocast_dtype": dtype,
    },
}

MP_POLICY: Mapping[str, Rule] = {
    "_target_": text,
    "param_dtype": dtype,
    "reduce_dtype": dtype,
    "output_dtype": dtype,
    "cast_forward_inputs": switch,
}

MOE: Mapping[str, Rule] = {
    "_target_": text,
    "ignore_router_for_ac": switch,
    "reshard_after_forward": switch,
    "lm_head_precision": dtype,
    "wrap_outer_model": switch,
    "mp_policy": optional(mapping),
}

DIST_ENV: Mapping[str, Rule] = {
    "backend": one_of("nccl", "gloo", "cuda:nccl,cpu:gloo", "cpu:gloo,cuda:nccl"),
    "timeout_minutes": positive,
}

CLIP: Mapping[str, Rule] = {"max_norm": optional(positive), "backend": one_of("triton", "te")}

_selectors = optional(items(mapping))

FREEZE: Mapping[str, Rule] = {
    "freeze_modules": _selectors,
    "unfreeze_modules": _selectors,
    "freeze_vision_tower": optional(switch),
    "freeze_audio_tower": optional(switch),
    "freeze_language_model": optional(switch),
    "freeze_video_embedder": optional(switch),
}

PACKED_SEQUENCE: Mapping[str, Rule] = {
    "packed_sequence_size": count_or_zero,
    "packing_strategy": one_of("thd", "neat"),
    "max_packs": optional(count),
    "prepacked": switch,
    "num_proc": count,
    "pad_to_multiple_of": count,
    "drop_long_samples": switch,
    "split_across_pack": switch,
}

DATALOADER: Mapping[str, Rule] = {
    "_target_": one_of("torchdata.stateful_dataloader.StatefulDataLoader", "torch.utils.data.DataLoader"),
    "collate_fn": any_value,
    "dataset": any_value,
    "dataloader_type": one_of("single", "cyclic"),
    "shuffle": optional(switch),
    "group_by_length": switch,
    "shuffle_buffer_size": count,
    "batch_size": count,
    "num_workers": count_or_zero,
    "pin_memory": switch,
    "persistent_workers": switch,
    "prefetch_factor": optional(count),
    "drop_last": switch,
}

MLFLOW: Mapping[str, Rule] = {
    "experiment_name": text,
    "run_name": any_value,
    "tracking_uri": optional(text),
    "artifact_location": optional(text),
    "tags": mapping,
    "resume": switch,
    "description": optional(text),
    "flatten_depth": optional(count),
}

COMET: Mapping[str, Rule] = {
    "project_name": text,
    "workspace": optional(text),
    "api_key": optional(text),
    "experiment_name": optional(text),
    "tags": items(text),
    "auto_metric_logging": switch,
}

HEALTH: Mapping[str, Rule] = {"health": switch, "health_every_steps": count, "health_layers": switch}

SECTIONS: Mapping[str, Mapping[str, Rule]] = {
    "step_scheduler": STEP_SCHEDULER,
    "lr_scheduler": LR_SCHEDULER,
    "checkpoint": CHECKPOINT,
    "dist_env": DIST_ENV,
    "clip_grad_norm": CLIP,
    "freeze_config": FREEZE,
    "packed_sequence": PACKED_SEQUENCE,
    "dataloader": DATALOADER,
    "validation_dataloader": DATALOADER,
    "mlflow": MLFLOW,
    "comet": COMET,
    "dmuown": HEALTH,
}
"""Sections whose keys are all known; `distributed` is one more, with keys by strategy (`STRATEGIES`)."""

TARGET_SECTIONS = ("model", "dataset", "loss_fn", "optimizer", "peft")
"""Sections with a `_target_` that decides their keys; so has every `validation_dataset*`."""

SCALARS: Mapping[str, Rule] = {
    "recipe": any_value,
    "seed": count_or_zero,
    "nvtx": switch,
    "sdpa_method": any_value,
    "plugin_fn": any_value,
    "neftune": any_value,
}

OTHER_SECTIONS = (
    "autonvtx",
    "benchmark",
    "ci",
    "compile",
    "distributed",
    "domain_mixture",
    "embedding_row_repair",
    "fp8",
    "launcher",
    "mfu",
    "moe_metrics",
    "mtp",
    "prewarm",
    "processor",
    "qat",
    "quantization",
    "skypilot",
    "slurm",
    "tokenizer",
    "tool_call_eval",
    "wandb",
)
"""Sections that the host reads and that are not checked key by key here."""

REQUIRED = ("recipe", "model", "dataset", "loss_fn", "optimizer")

DEFAULTS: Mapping[str, str] = {
    "step_scheduler": "32 samples a step, one at a time, for 10 epochs",
    "step_scheduler.global_batch_size": "32",
    "step_scheduler.local_batch_size": "1",
    "step_scheduler.ckpt_every_steps": "100",
    "lr_scheduler": "a constant learning rate",
    "lr_scheduler.lr_decay_style": "cosine",
    "clip_grad_norm": "clipping at a norm of 1.0",
    "clip_grad_norm.max_norm": "1.0",
    "checkpoint": "checkpoints in checkpoints/, consolidated at the end",
    "checkpoint.checkpoint_dir": "checkpoints/",
    "dist_env": "nccl and a timeout of one minute",
    "dist_env.timeout_minutes": "1",
    "distributed": "fsdp2 over all processes",
    "model.torch_dtype": "the checkpoint's dtype",
    "dataloader": "no shuffling, and the data set's own collation",
    "seed": "42",
}
"""What the host takes, without saying so, where a key that decides a run is missing."""
