"""Keyword arguments of vLLM's `LLM` that specdec knows and refuses, each with the reason.

The value is (neutral values that ask for nothing, reason).
"""

from __future__ import annotations

from typing import Any

from specdec.errors import ConfigError, listed, nearest

_ONE_DEVICE = "specdec runs a target on one device"
_NOT_YET = "it is not served yet"
_MODULES = "the target runs as the transformers modules that it is"
_TEXT = "prompts are text or token ids"
_LORA = f"{_NOT_YET}; merge the adapter into the model"
_GENERATES = "specdec generates; it does not embed or classify"
_CHUNKS = "prompts are always prefilled in chunks; max_num_batched_tokens is their size"
_SIZED = "kv_cache_memory says how many bytes the cache gets"
_CACHE_DTYPE = "the cache has the dtype of the model"
_ONE_ATTENTION = "attention runs through one function over the paged cache"
_NO_PREFIX_CACHE = f"{_NOT_YET}: there is no prefix cache"
_OFFLOAD = f"{_NOT_YET}: weights and cache stay on the device"
_EAGER = f"{_NOT_YET}: steps run eagerly"
_HUB = "transformers finds and reads checkpoints; its environment variables (HF_HOME) say where"
_PARTS = "specdec is one process whose parts are not exchanged by name"
_METRICS = "LLM.metrics counts speculation; nothing else is measured"
_STRUCTURED = f"{_NOT_YET}: outputs are not constrained"
_DRAFTS = "it belongs into speculative_config"
_NO_SERVER = "specdec has no server"
_NO_STATE_SPACE = "targets with a recurrent state are not served"

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    # one device
    "tensor_parallel_size": ((1,), _ONE_DEVICE),
    "pipeline_parallel_size": ((1,), _ONE_DEVICE),
    "data_parallel_size": ((1,), _ONE_DEVICE),
    "data_parallel_rank": ((), _ONE_DEVICE),
    "data_parallel_size_local": ((1,), _ONE_DEVICE),
    "data_parallel_backend": (("mp",), _ONE_DEVICE),
    "data_parallel_start_rank": ((), _ONE_DEVICE),
    "data_parallel_address": ((), _ONE_DEVICE),
    "data_parallel_rpc_port": ((), _ONE_DEVICE),
    "data_parallel_hybrid_lb": ((False,), _ONE_DEVICE),
    "data_parallel_external_lb": ((False,), _ONE_DEVICE),
    "disable_nccl_for_dp_synchronization": ((True, False), _ONE_DEVICE),
    "prefill_context_parallel_size": ((1,), _ONE_DEVICE),
    "decode_context_parallel_size": ((1,), _ONE_DEVICE),
    "dcp_kv_cache_interleave_size": ((1,), _ONE_DEVICE),
    "dcp_comm_backend": (("ag_rs",), _ONE_DEVICE),
    "cp_kv_cache_interleave_size": ((1,), _ONE_DEVICE),
    "enable_expert_parallel": ((False,), _ONE_DEVICE),
    "enable_eplb": ((False,), _ONE_DEVICE),
    "enable_ep_weight_filter": ((False,), _ONE_DEVICE),
    "enable_elastic_ep": ((False,), _ONE_DEVICE),
    "eplb_config": (({},), _ONE_DEVICE),
    "expert_placement_strategy": (("linear",), _ONE_DEVICE),
    "all2all_backend": ((), _ONE_DEVICE),
    "enable_dbo": ((False,), _ONE_DEVICE),
    "ubatch_size": ((0,), _ONE_DEVICE),
    "dbo_decode_token_threshold": ((), _ONE_DEVICE),
    "dbo_prefill_token_threshold": ((), _ONE_DEVICE),
    "nnodes": ((1,), _ONE_DEVICE),
    "node_rank": ((0,), _ONE_DEVICE),
    "master_addr": ((), _ONE_DEVICE),
    "master_port": ((), _ONE_DEVICE),
    "distributed_timeout_seconds": ((), _ONE_DEVICE),
    "numa_bind": ((False,), _ONE_DEVICE),
    "numa_bind_nodes": ((), _ONE_DEVICE),
    "numa_bind_cpus": ((), _ONE_DEVICE),
    "distributed_executor_backend": (("uni",), _ONE_DEVICE),
    "disable_custom_all_reduce": ((True, False), _ONE_DEVICE),
    "max_parallel_loading_workers": ((1,), _ONE_DEVICE),
    "ray_workers_use_nsight": ((False,), _ONE_DEVICE),
    # memory and the cache
    "kv_cache_memory_bytes": ((), "here it is called kv_cache_memory"),
    "num_gpu_blocks_override": ((), _SIZED),
    "swap_space": ((0, 0.0), "nothing is swapped: a request that is set aside is computed again"),
    "preemption_mode": (("recompute",), "a request that is set aside is computed again"),
    "cpu_offload_gb": ((0, 0.0), _OFFLOAD),
    "cpu_offload_params": ((set(), []), _OFFLOAD),
    "offload_backend": (("auto",), _OFFLOAD),
    "offload_group_size": ((0,), _OFFLOAD),
    "offload_num_in_group": ((1,), _OFFLOAD),
    "offload_prefetch_step": ((1,), _OFFLOAD),
    "offload_params": ((set(), []), _OFFLOAD),
    "kv_offloading_size": ((), _OFFLOAD),
    "kv_offloading_backend": ((), _OFFLOAD),
    "block_size": ((), "pages have one size"),
    "use_v2_block_manager": ((True, False), "there is one way of managing pages"),
    "enable_prefix_caching": ((False,), _NO_PREFIX_CACHE),
    "prefix_caching_hash_algo": (("sha256",), _NO_PREFIX_CACHE),
    "disable_hybrid_kv_cache_manager": (
        (True,),
        "every layer keeps every token, as with disable_hybrid_kv_cache_manager=True",
    ),
    "kv_sharing_fast_prefill": ((False,), _NOT_YET),
    "kv_cache_dtype": (("auto",), _CACHE_DTYPE),
    "kv_cache_dtype_skip_layers": (([],), _CACHE_DTYPE),
    "calculate_kv_scales": ((False,), _CACHE_DTYPE),
    "quantization_param_path": ((), _CACHE_DTYPE),
    "mamba_cache_dtype": (("auto",), _NO_STATE_SPACE),
    "mamba_ssm_cache_dtype": (("auto",), _NO_STATE_SPACE),
    "mamba_block_size": ((), _NO_STATE_SPACE),
    "mamba_cache_mode": (("none",), _NO_STATE_SPACE),
    "mamba_config": (({},), _NO_STATE_SPACE),
    "mamba_backend": (("triton",), _NO_STATE_SPACE),
    "enable_mamba_cache_stochastic_rounding": ((False,), _NO_STATE_SPACE),
    "mamba_cache_philox_rounds": ((0,), _NO_STATE_SPACE),
    "gdn_prefill_backend": ((), _NO_STATE_SPACE),
    "kv_transfer_config": ((), _NOT_YET),
    "kv_events_config": ((), _NO_PREFIX_CACHE),
    "ec_transfer_config": ((), _TEXT),
    # drafts
    "speculative_model": ((), _DRAFTS),
    "num_speculative_tokens": ((), _DRAFTS),
    # scheduling
    "enable_chunked_prefill": ((True,), _CHUNKS),
    "max_num_partial_prefills": ((1,), _CHUNKS),
    "max_long_partial_prefills": ((1,), _CHUNKS),
    "long_prefill_token_threshold": ((0,), _CHUNKS),
    "scheduler_delay_factor": ((0.0, 0), "a request is admitted when there is room for it"),
    "num_scheduler_steps": ((1,), "a step is one forward of the target"),
    "multi_step_stream_outputs": ((True, False), "LLM.stream yields after every step"),
    "stream_interval": ((1,), "LLM.stream yields after every step"),
    "num_lookahead_slots": ((0,), "it follows from the speculator's drafts"),
    "scheduler_reserve_full_isl": ((True,), "a request is admitted when there is room for it"),
    "async_scheduling": ((False,), _NOT_YET),
    "disable_async_output_proc": ((True, False), "a step ends before the next begins"),
    "scheduler_cls": ((), _PARTS),
    "worker_cls": (("auto",), _PARTS),
    "worker_extension_cls": (("",), _PARTS),
    "additional_config": (({},), _PARTS),
    # loading
    "download_dir": ((), _HUB),
    "model_weights": (("",), "the weights are read from the model"),
    "load_format": (("auto", "safetensors", "hf"), "transformers finds the format of a checkpoint"),
    "ignore_patterns": ((), _HUB),
    "model_loader_extra_config": (({},), _HUB),
    "safetensors_load_strategy": (("lazy",), _HUB),
    "pt_load_map_location": (("cpu",), _HUB),
    "use_tqdm_on_load": ((True,), "transformers shows the progress of loading"),
    "code_revision": ((), "code and weights of a model come from one revision"),
    "config_format": (("auto", "hf"), "transformers reads the configuration"),
    "hf_config_path": ((), "the configuration is read from the model; hf_overrides changes it"),
    "rope_scaling": (({},), "give it in hf_overrides, as rope_parameters"),
    "rope_theta": ((), "give it in hf_overrides, in rope_parameters"),
    "quantization": ((), f"{_NOT_YET}; load a model that transformers dequantises"),
    "quantization_config": ((), f"{_NOT_YET}; load a model that transformers dequantises"),
    "allow_deprecated_quantization": ((False,), f"{_NOT_YET}: nothing is quantised"),
    "served_model_name": ((), f"{_NO_SERVER}, so a model needs no other name"),
    "weight_transfer_config": ((), _NOT_YET),
    # what runs
    "model_impl": (("auto", "transformers"), _MODULES),
    "moe_backend": (("auto",), _MODULES),
    "disable_sliding_window": ((False,), "layers attend over the window of their configuration"),
    "disable_cascade_attn": ((True, False), "there is no cascade attention"),
    "attention_backend": ((), _ONE_ATTENTION),
    "attention_config": (({},), _ONE_ATTENTION),
    "override_attention_dtype": ((), _ONE_ATTENTION),
    "kernel_config": (({},), _MODULES),
    "ir_op_priority": (({},), _MODULES),
    "enable_flashinfer_autotune": ((False,), _MODULES),
    "compilation_config": ((0, {}), _EAGER),
    "optimization_level": ((0,), _EAGER),
    "performance_mode": (("balanced",), _NOT_YET),
    "cudagraph_capture_sizes": (([],), _EAGER),
    "cuda_graph_sizes": (([],), _EAGER),
    "max_cudagraph_capture_size": ((0,), _EAGER),
    "max_seq_len_to_capture": ((0,), _EAGER),
    "enable_sleep_mode": ((False,), "close the LLM and make it again"),
    "runner": (("auto", "generate"), _GENERATES),
    "task": (("auto", "generate"), _GENERATES),
    "convert": (("auto", "none"), _GENERATES),
    "pooler_config": ((), _GENERATES),
    "override_pooler_config": ((), _GENERATES),
    # prompts and outputs
    "tokenizer_mode": (("auto", "hf"), "transformers chooses the tokenizer"),
    "tokenizer_pool_size": ((0,), "prompts are tokenised in turn"),
    "tokenizer_pool_type": (("ray",), "prompts are tokenised in turn"),
    "tokenizer_pool_extra_config": (({},), "prompts are tokenised in turn"),
    "renderer_num_workers": ((1,), "prompts are tokenised in turn"),
    "chat_template": ((), "pass a tokenizer= whose chat_template it is"),
    "tokens_only": ((False,), "here it is called skip_tokenizer_init"),
    "enable_prompt_embeds": ((False,), _TEXT),
    "allowed_local_media_path": (("",), _TEXT),
    "allowed_media_domains": (([],), _TEXT),
    "limit_mm_per_prompt": (({},), _TEXT),
    "language_model_only": ((True, False), _TEXT),
    "enable_mm_embeds": ((False,), _TEXT),
    "interleave_mm_strings": ((False,), _TEXT),
    "media_io_kwargs": (({},), _TEXT),
    "mm_processor_kwargs": (({},), _TEXT),
    "mm_processor_cache_gb": ((0, 0.0), _TEXT),
    "mm_processor_cache_type": ((), _TEXT),
    "mm_shm_cache_max_object_size_mb": ((), _TEXT),
    "mm_tensor_ipc": ((), _TEXT),
    "disable_mm_preprocessor_cache": ((True, False), _TEXT),
    "mm_encoder_only": ((False,), _TEXT),
    "mm_encoder_tp_mode": (("weights",), _TEXT),
    "mm_encoder_attn_backend": ((), _TEXT),
    "mm_encoder_attn_dtype": ((), _TEXT),
    "mm_encoder_fp8_scale_path": ((), _TEXT),
    "mm_encoder_fp8_scale_save_path": ((), _TEXT),
    "mm_encoder_fp8_scale_save_margin": ((), _TEXT),
    "skip_mm_profiling": ((True, False), _TEXT),
    "video_pruning_rate": ((0.0, 0), _TEXT),
    "enable_mm_processor_stats": ((False,), _TEXT),
    "io_processor_plugin": ((), _TEXT),
    "disable_chunked_mm_input": ((True, False), _TEXT),
    "generation_config": (("auto",), "only its end-of-sequence tokens are read"),
    "override_generation_config": (({},), "give the values in SamplingParams"),
    "logits_processors": (([],), "give them in SamplingParams, to the requests they are for"),
    "logits_processor_pattern": ((), _NOT_YET),
    "logprobs_mode": (("raw_logprobs",), "log-probabilities are those of the model's logits"),
    "enable_return_routed_experts": ((False,), _NOT_YET),
    "structured_outputs_config": (({},), _STRUCTURED),
    "guided_decoding_backend": (("auto",), _STRUCTURED),
    "guided_decoding_disable_fallback": ((False,), _STRUCTURED),
    "guided_decoding_disable_any_whitespace": ((False,), _STRUCTURED),
    "guided_decoding_disable_additional_properties": ((False,), _STRUCTURED),
    "reasoning_parser": (("",), "outputs are given as they are generated"),
    "reasoning_parser_plugin": (("",), "outputs are given as they are generated"),
    "reasoning_config": (({},), "outputs are given as they are generated"),
    # adapters
    "enable_lora": ((False,), _LORA),
    "enable_lora_bias": ((False,), _LORA),
    "lora_modules": (([], {}), _LORA),
    "lora_dtype": (("auto",), _LORA),
    "lora_extra_vocab_size": ((), _LORA),
    "lora_target_modules": (([],), _LORA),
    "max_loras": ((1,), _LORA),
    "max_lora_rank": ((16,), _LORA),
    "max_cpu_loras": ((), _LORA),
    "fully_sharded_loras": ((False,), _LORA),
    "enable_tower_connector_lora": ((False,), _LORA),
    "specialize_active_lora": ((False,), _LORA),
    "default_mm_loras": (({},), _LORA),
    "enable_prompt_adapter": ((False,), _LORA),
    "max_prompt_adapters": ((1,), _LORA),
    "max_prompt_adapter_token": ((0,), _LORA),
    # what is logged and measured
    "disable_log_stats": ((True, False), "nothing is logged unless asked for"),
    "aggregate_engine_logging": ((False,), "nothing is logged unless asked for"),
    "disable_log_requests": ((True,), "nothing is logged unless asked for"),
    "enable_log_requests": ((False,), "nothing is logged unless asked for"),
    "show_hidden_metrics_for_version": ((), _METRICS),
    "otlp_traces_endpoint": ((), _METRICS),
    "collect_detailed_traces": (([],), _METRICS),
    "kv_cache_metrics": ((False,), _METRICS),
    "kv_cache_metrics_sample": ((), _METRICS),
    "cudagraph_metrics": ((False,), _METRICS),
    "enable_layerwise_nvtx_tracing": ((False,), _METRICS),
    "enable_mfu_metrics": ((False,), _METRICS),
    "enable_logging_iteration_details": ((False,), _METRICS),
    "profiler_config": (({},), f"{_NOT_YET}; torch.profiler sees what runs"),
    # how an engine of several processes lives
    "enable_fault_tolerance": ((False,), _PARTS),
    "fault_tolerance_config": (({},), _PARTS),
    "fail_on_environ_validation": ((True, False), "variables of another engine are not read"),
    "shutdown_timeout": ((0,), "close waits for nothing: a step is whole or not begun"),
}


def refuse(given: dict[str, Any], known: list[str]) -> None:
    """Refuse keywords that LLM does not have; those whose value asks for nothing pass."""
    for name, value in given.items():
        if name not in REFUSED:
            raise ConfigError(
                f"LLM has no argument {name!r}{nearest(name, [*known, *REFUSED])} "
                f"(known: {listed(known)})"
            )
        neutral, reason = REFUSED[name]
        if value is not None and not any(value == n and type(value) is type(n) for n in neutral):
            raise ConfigError(f"LLM({name}={value!r}) is refused: {reason}")
