"""The n-gram speculator, installed, against plain decoding: what any author's plugin has to pass.

Nothing but public names. Slow because every case runs a tiny model several times.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from specdec import LLM, SamplingParams
from specdec.testing import assert_law, assert_lossless, assert_same_tokens, tiny_target, toy_target

pytest.importorskip("specdec_plugin_ngram", reason="specdec-plugin-ngram is not installed")

VOCAB = 61
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama, tied": ("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 8}),
    "mistral, window": (
        "MistralForCausalLM",
        "MistralConfig",
        {"sliding_window": 7, "head_dim": 8},
    ),
    "gemma3, windows": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"sliding_window": 6}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
}


def family(name: str) -> PreTrainedModel:
    model, config, more = FAMILIES[name]
    base: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    kind = getattr(transformers, config)
    built: PreTrainedModel = getattr(transformers, model)(kind(**{**base, **more})).double()
    built.eval()  # type: ignore[no-untyped-call]
    return built


def cycle(period: int, peak: float = 6.0) -> Tensor:
    """Logits of a language that mostly goes round: drafts hold, and now and then one fails."""
    table = torch.zeros(VOCAB, VOCAB)
    for token in range(VOCAB):
        table[token, (token + 1) % period] = peak
    return table


def prompts() -> list[list[int]]:
    """Prompts of mixed length that repeat themselves."""
    return [[3, 4, 5] * 4, [0, 1], [7] * 9, list(range(12)) * 2, [5, 6, 5, 6, 5]]


def mixed(max_tokens: int = 30) -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 0.5, "min_p": 0.1},
    ]
    return [
        SamplingParams(seed=seed, max_tokens=max_tokens - seed, **kind)
        for seed, kind in enumerate(kinds)
    ]


def test_it_passes_the_conformance_check() -> None:
    assert_lossless("ngram:prompt_lookup_min=1")


def test_it_passes_where_most_drafts_hold() -> None:
    model = toy_target(cycle(12))
    assert_lossless("ngram", model=model, prompts=prompts(), drafts=(1, 5), max_tokens=30)
    with LLM(model, speculative_config="ngram") as llm:
        llm.generate(prompts(), mixed(), use_tqdm=False)
        # neither nothing nor everything was accepted: blocks were cut in the middle
        assert 0 < llm.metrics.num_accepted_tokens < llm.metrics.num_draft_tokens


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("k", [1, 4])
def test_tokens_are_those_of_plain_decoding(name: str, k: int) -> None:
    config = {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": 1}
    assert_same_tokens(family(name), config, prompts(), mixed())


@pytest.mark.parametrize(
    "config",
    [
        {"prompt_lookup_max": 5, "prompt_lookup_min": 2, "num_speculative_tokens": 3},
        {"length_policy": "falling"},
        {"num_speculative_tokens_per_batch_size": [[1, 2, 4], [3, 64, 1]]},
        {"max_model_len": 20},
    ],
)
def test_settings_change_no_token(config: dict[str, Any]) -> None:
    model = toy_target(cycle(12))
    assert_same_tokens(
        model, {"method": "ngram", **config}, prompts(), mixed(), max_num_batched_tokens=5
    )


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_the_law_is_the_targets(rule: str) -> None:
    assert_law(
        {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": rule},
        samples=3000,
    )


def test_drafts_of_every_length_up_to_twenty_are_verified() -> None:
    model = tiny_target()
    config = {"method": "ngram", "num_speculative_tokens": 20, "prompt_lookup_min": 1}
    assert_same_tokens(model, config, prompts(), mixed())
