"""Keywords of vLLM's LLM: neutral values pass, others are refused with the reason."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from specdec import LLM, ConfigError
from specdec.llm_keys import REFUSED, refuse

# the fields of EngineArgs, which LLM passes on, then some that older versions had
VLLM = """
model enable_return_routed_experts model_weights served_model_name tokenizer hf_config_path runner
convert skip_tokenizer_init enable_prompt_embeds tokenizer_mode trust_remote_code
allowed_local_media_path allowed_media_domains download_dir safetensors_load_strategy load_format
config_format dtype kv_cache_dtype seed max_model_len cudagraph_capture_sizes
max_cudagraph_capture_size ir_op_priority distributed_executor_backend pipeline_parallel_size
master_addr master_port nnodes node_rank distributed_timeout_seconds numa_bind numa_bind_nodes
numa_bind_cpus tensor_parallel_size prefill_context_parallel_size decode_context_parallel_size
dcp_comm_backend dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_size
data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address
data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb data_parallel_backend
enable_expert_parallel enable_ep_weight_filter moe_backend all2all_backend enable_elastic_ep
enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold
disable_nccl_for_dp_synchronization eplb_config enable_eplb expert_placement_strategy
max_parallel_loading_workers block_size enable_prefix_caching prefix_caching_hash_algo
disable_sliding_window disable_cascade_attn offload_backend cpu_offload_gb cpu_offload_params
offload_group_size offload_num_in_group offload_prefetch_step offload_params
gpu_memory_utilization kv_cache_memory_bytes max_num_batched_tokens max_num_partial_prefills
max_long_partial_prefills long_prefill_token_threshold max_num_seqs max_logprobs logprobs_mode
disable_log_stats aggregate_engine_logging revision code_revision hf_token hf_overrides
tokenizer_revision quantization quantization_config allow_deprecated_quantization enforce_eager
disable_custom_all_reduce language_model_only limit_mm_per_prompt enable_mm_embeds
interleave_mm_strings media_io_kwargs mm_processor_kwargs mm_processor_cache_gb
mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode
mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin io_processor_plugin
renderer_num_workers skip_mm_profiling video_pruning_rate mm_tensor_ipc enable_lora max_loras
max_lora_rank default_mm_loras fully_sharded_loras max_cpu_loras lora_dtype lora_target_modules
enable_tower_connector_lora specialize_active_lora ray_workers_use_nsight num_gpu_blocks_override
model_loader_extra_config ignore_patterns enable_chunked_prefill disable_chunked_mm_input
scheduler_reserve_full_isl disable_hybrid_kv_cache_manager structured_outputs_config
reasoning_parser reasoning_parser_plugin speculative_config show_hidden_metrics_for_version
otlp_traces_endpoint collect_detailed_traces kv_cache_metrics kv_cache_metrics_sample
cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics
enable_logging_iteration_details enable_mm_processor_stats scheduling_policy scheduler_cls
pooler_config compilation_config attention_config mamba_config kernel_config
enable_flashinfer_autotune worker_cls worker_extension_cls profiler_config kv_transfer_config
kv_events_config ec_transfer_config reasoning_config generation_config enable_sleep_mode
override_generation_config model_impl override_attention_dtype attention_backend
calculate_kv_scales kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype
mamba_block_size mamba_cache_mode mamba_backend enable_mamba_cache_stochastic_rounding
mamba_cache_philox_rounds additional_config use_tqdm_on_load pt_load_map_location
logits_processors async_scheduling stream_interval kv_sharing_fast_prefill optimization_level
performance_mode kv_offloading_size kv_offloading_backend tokens_only shutdown_timeout
weight_transfer_config fail_on_environ_validation gdn_prefill_backend
swap_space chat_template max_seq_len_to_capture task guided_decoding_backend lora_modules
num_lookahead_slots override_pooler_config rope_scaling rope_theta tokenizer_pool_size
"""
KNOWN = [n for n in inspect.signature(LLM).parameters if n != "unsupported"]


def test_no_keyword_is_both_served_and_refused() -> None:
    assert not set(KNOWN) & set(REFUSED)


def test_every_keyword_of_vllm_is_served_or_refused_with_a_reason() -> None:
    assert set(VLLM.split()) - set(KNOWN) - set(REFUSED) == set()


@pytest.mark.parametrize("name", REFUSED)
def test_neutral_values_pass_and_others_are_refused_with_the_reason(name: str) -> None:
    neutral, reason = REFUSED[name]
    for value in (*neutral, None):
        refuse({name: value}, KNOWN)
    with pytest.raises(ConfigError) as caught:
        refuse({name: "something else"}, KNOWN)
    assert str(caught.value) == f"LLM({name}='something else') is refused: {reason}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", True),  # equals 1, but is no number
        ("enable_prefix_caching", 0),
        ("swap_space", False),
        ("disable_hybrid_kv_cache_manager", 1),
    ],
)
def test_values_of_another_type_are_not_neutral(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="is refused"):
        refuse({name: value}, KNOWN)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_modle_len", "max_model_len"),
        ("specultive_config", "speculative_config"),
        ("tensor_paralel_size", "tensor_parallel_size"),
    ],
)
def test_an_unknown_keyword_is_named_with_its_neighbour(name: str, near: str) -> None:
    with pytest.raises(
        ConfigError, match=f"no argument '{name}'; did you mean '{near}'.*known: deterministic"
    ):
        refuse({name: 1}, KNOWN)


def test_the_llm_refuses_before_it_loads_anything() -> None:
    with pytest.raises(ConfigError, match="specdec runs a target on one device"):
        LLM("/no/such/model", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="here it is called kv_cache_memory"):
        LLM("/no/such/model", kv_cache_memory_bytes=2**30)
