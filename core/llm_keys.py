"""Keyword arguments of vLLM's `LLM` that specdec knows and refuses, each with the reason.

The value is (neutral values that ask for nothing, reason).
"""

from __future__ import annotations

from typing import Any

from specdec.errors import ConfigError, listed, nearest

_ONE_DEVICE = "specdec runs a target on one device"
_NOT_YET = "it is not served yet"
_MODULES = "the target runs as the transformers modules that it is"

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tensor_parallel_size": ((1,), _ONE_DEVICE),
    "pipeline_parallel_size": ((1,), _ONE_DEVICE),
    "data_parallel_size": ((1,), _ONE_DEVICE),
    "enable_expert_parallel": ((False,), _ONE_DEVICE),
    "distributed_executor_backend": ((), _ONE_DEVICE),
    "disable_custom_all_reduce": ((True, False), _ONE_DEVICE),
    "gpu_memory_utilization": ((), f"{_NOT_YET}; kv_cache_memory says how many bytes"),
    "kv_cache_memory_bytes": ((), "here it is called kv_cache_memory"),
    "num_gpu_blocks_override": ((), "kv_cache_memory says how many bytes the cache gets"),
    "swap_space": ((0,), "nothing is swapped: a request is admitted when there is room for it"),
    "cpu_offload_gb": ((0,), _NOT_YET),
    "enable_prefix_caching": ((False,), _NOT_YET),
    "enable_chunked_prefill": ((True,), "prompts are always prefilled in chunks"),
    "scheduling_policy": (("fcfs",), f"{_NOT_YET}; requests run first come, first served"),
    "quantization": ((), f"{_NOT_YET}; load a model that transformers dequantises"),
    "kv_cache_dtype": (("auto",), "the cache has the dtype of the model"),
    "calculate_kv_scales": ((False,), "the cache has the dtype of the model"),
    "load_format": (("auto", "safetensors"), "transformers finds the format of a checkpoint"),
    "config_format": (("auto", "hf"), "transformers reads the configuration"),
    "model_impl": (("auto", "transformers"), _MODULES),
    "tokenizer_mode": (("auto", "hf"), "transformers chooses the tokenizer"),
    "runner": (("auto", "generate"), "specdec generates; it does not embed or classify"),
    "task": (("auto", "generate"), "specdec generates; it does not embed or classify"),
    "convert": (("auto", "none"), "specdec generates; it does not embed or classify"),
    "allowed_local_media_path": (("",), "prompts are text or token ids"),
    "limit_mm_per_prompt": (({},), "prompts are text or token ids"),
    "mm_processor_kwargs": (({},), "prompts are text or token ids"),
    "enable_lora": ((False,), f"{_NOT_YET}; merge the adapter into the model"),
    "max_loras": ((1,), f"{_NOT_YET}; merge the adapter into the model"),
    "compilation_config": ((), f"{_NOT_YET}: steps run eagerly"),
    "attention_backend": ((), "attention runs through one function over the paged cache"),
    "attention_config": ((), "attention runs through one function over the paged cache"),
    "kv_transfer_config": ((), _NOT_YET),
    "structured_outputs_config": ((), _NOT_YET),
    "logits_processors": (([],), _NOT_YET),
    "async_scheduling": ((False,), _NOT_YET),
    "disable_log_stats": ((True, False), "nothing is logged unless asked for"),
    "logprobs_mode": (("raw_logprobs",), f"{_NOT_YET}: logprobs are refused"),
    "max_logprobs": ((), f"{_NOT_YET}: logprobs are refused"),
    "generation_config": (("auto",), "only its end-of-sequence tokens are read"),
    "override_generation_config": (({},), "give the values in SamplingParams"),
    "block_size": ((), "pages have one size"),
    "enable_sleep_mode": ((False,), "close the LLM and make it again"),
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
