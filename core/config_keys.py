"""Keys and methods of other engines that specdec knows and refuses, each with the reason.

A speculator that supports one of these keys claims it by having it in its `Options`.
The keys every method shares are the fields of `specdec.config.SpeculativeConfig`.
"""

from __future__ import annotations

_ONE_DEVICE = "specdec runs a target on one device; there is no parallelism to set"
_NO_PREFIX_CACHE = "there is no prefix cache whose blocks it could keep or drop"
_ENGINE = "it is filled in by the engine and never by a user"
_FLY = "fly is a lossy rule; specdec ships only lossless ones, and synthetic for load tests"

REFUSED_METHODS: dict[str, str] = {
    "fly": "it is lossy (it lets drafts pass that the target would not have drawn); "
    "use coupled, standard or block",
    "rejection_sampler": "this name is gone; use standard",
    "typical_acceptance_sampler": "it is lossy; use coupled, standard or block",
}

REFUSED_KEYS: dict[str, str] = {
    "fly_window_size": _FLY,
    "fly_entropy_threshold": _FLY,
    "fly_entropy_top_k": _FLY,
    "enable_adaptive_verification": "drafts are shortened by length_policy and "
    "num_speculative_tokens_per_batch_size; there is no measured cost table yet",
    "draft_tensor_parallel_size": _ONE_DEVICE,
    "tensor_parallel_size": f"{_ONE_DEVICE} (a drafter's would be draft_tensor_parallel_size)",
    "quantization": "this method loads no quantised draft weights",
    "kv_cache_dtype": "a drafter's cache has the dtype that its capabilities name",
    "attention_backend": "drafters attend through the runner's own paged cache",
    "moe_backend": "drafters run the modules of transformers as they are",
    "draft_load_config": "checkpoints are read by one loader, which has nothing to configure",
    "parallel_drafting": "this method drafts one token after another",
    "disable_padded_drafter_batch": "there is one layout of a batch, the padded one",
    "disable_eagle_block_drop": _NO_PREFIX_CACHE,
    "disable_lookahead_block_hashes": _NO_PREFIX_CACHE,
    "draft_lm_head_quantization": "this method shares or owns its head as the checkpoint says",
    "use_local_argmax_reduction": _ONE_DEVICE,
    "use_heterogeneous_vocab": "this method drafts in the target's vocabulary",
    "index_share_for_mtp_iteration": "it belongs to heads with sparse attention",
    "prompt_lookup_max": "it belongs to methods that look drafts up in the prompt",
    "prompt_lookup_min": "it belongs to methods that look drafts up in the prompt",
    "suffix_decoding_max_tree_depth": "it belongs to suffix decoding",
    "suffix_decoding_max_cached_requests": "it belongs to suffix decoding",
    "suffix_decoding_max_spec_factor": "it belongs to suffix decoding",
    "suffix_decoding_min_token_prob": "it belongs to suffix decoding",
    "dspark_draft_topk": "it belongs to block drafters with a sequential head",
    "xpress_topc": "it belongs to block drafters with a refiner head",
    "draft_model_config": "this method reads the configuration of its checkpoint",
    "target_model_config": _ENGINE,
    "target_parallel_config": _ENGINE,
    "draft_parallel_config": _ENGINE,
}

# What a pasted configuration may say because it is what is done anyway. null and false are too.
NEUTRAL_VALUES: dict[str, int | str] = {
    "draft_tensor_parallel_size": 1,
    "kv_cache_dtype": "auto",
    "attention_backend": "auto",
    "moe_backend": "auto",
}
