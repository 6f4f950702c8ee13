"""Every key that vLLM's SpeculativeConfig knows is used here, or refused with the reason.

The table holds the fields of vLLM 0.33's SpeculativeConfig, one row per key: a value somebody
would write, and who uses it. CORE: every method shares it. PLUGIN: a speculator may declare it
in its Options; without one it is refused. NOBODY: no speculator of ours can mean it, though one
that declares it still gets it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import attrs
import pytest

from specdec.config import SpeculativeConfig
from specdec.config_keys import NEUTRAL_VALUES, REFUSED_KEYS, REFUSED_METHODS
from specdec.errors import ConfigError
from specdec.speculator import Speculator

CORE, PLUGIN, NOBODY = "core", "plugin", "nobody"


class Key(NamedTuple):
    name: str
    value: Any
    used_by: str
    needs: dict[str, Any] = {}  # noqa: RUF012 (never changed)


SYNTHETIC = {"rejection_sample_method": "synthetic", "num_speculative_tokens": 2}
KEYS = [
    Key("method", "some_method", CORE),
    Key("model", "org/drafter", CORE),
    Key("num_speculative_tokens", 4, CORE),
    Key("num_speculative_tokens_per_batch_size", [[1, 16, 3], [32, 128, 2]], CORE),
    Key("rejection_sample_method", "standard", CORE),
    Key("draft_sample_method", "probabilistic", CORE),
    Key("synthetic_acceptance_rates", [0.9, 0.5], CORE, SYNTHETIC),
    Key("synthetic_acceptance_length", 2.5, CORE, SYNTHETIC),
    Key("fly_window_size", 4, NOBODY),
    Key("fly_entropy_threshold", 0.3, NOBODY),
    Key("fly_entropy_top_k", 3, NOBODY),
    Key("enable_adaptive_verification", True, NOBODY),
    Key("draft_tensor_parallel_size", 2, NOBODY),
    Key("tensor_parallel_size", 2, NOBODY),
    Key("quantization", "fp8", PLUGIN),
    Key("kv_cache_dtype", "fp8", PLUGIN),
    Key("attention_backend", "FLASH_ATTN", NOBODY),
    Key("moe_backend", "triton", NOBODY),
    Key("enforce_eager", True, CORE),
    Key("max_model_len", 16384, CORE),
    Key("revision", "main", CORE),
    Key("code_revision", "main", CORE),
    Key("draft_load_config", {"load_format": "dummy"}, NOBODY),
    Key("parallel_drafting", True, PLUGIN),
    Key("disable_padded_drafter_batch", True, NOBODY),
    Key("disable_eagle_block_drop", True, NOBODY),
    Key("disable_lookahead_block_hashes", True, NOBODY),
    Key("draft_lm_head_quantization", "fp8", PLUGIN),
    Key("use_local_argmax_reduction", True, NOBODY),
    Key("use_heterogeneous_vocab", True, PLUGIN),
    Key("index_share_for_mtp_iteration", True, PLUGIN),
    Key("prompt_lookup_max", 5, PLUGIN),
    Key("prompt_lookup_min", 2, PLUGIN),
    Key("suffix_decoding_max_tree_depth", 24, PLUGIN),
    Key("suffix_decoding_max_cached_requests", 100, PLUGIN),
    Key("suffix_decoding_max_spec_factor", 2.0, PLUGIN),
    Key("suffix_decoding_min_token_prob", 0.2, PLUGIN),
    Key("dspark_draft_topk", 4, PLUGIN),
    Key("xpress_topc", 256, PLUGIN),
    Key("draft_model_config", {"eagle_aux_hidden_state_layer_ids": [1]}, PLUGIN),
    # filled in by the engine
    Key("target_model_config", {}, NOBODY),
    Key("target_parallel_config", {}, NOBODY),
    Key("draft_parallel_config", {}, NOBODY),
]
each_key = pytest.mark.parametrize("key", KEYS, ids=lambda k: k.name)


class Plain(Speculator):
    """Declares no key of its own."""

    reads_model = True


def declaring(key: str) -> type[Speculator]:
    options = attrs.make_class("Options", {key: attrs.field(default=None)}, frozen=True)
    return type("Declaring", (Speculator,), {"Options": options})


def config(key: Key, value: Any) -> SpeculativeConfig:
    found = SpeculativeConfig.parse({"method": "some_method", **key.needs, key.name: value})
    assert found is not None
    return found


@each_key
def test_a_key_is_used_or_refused_with_the_reason(key: Key) -> None:
    if key.used_by == CORE:
        assert getattr(config(key, key.value), key.name) == key.value
        config(key, key.value).resolve(Plain, "some_method")
        return
    with pytest.raises(ConfigError) as caught:
        config(key, key.value).resolve(Plain, "some_method")
    assert str(caught.value) == f"{key.name}={key.value!r} is refused: {REFUSED_KEYS[key.name]}"


@pytest.mark.parametrize("key", [k for k in KEYS if k.used_by != CORE], ids=lambda k: k.name)
def test_a_speculator_that_declares_the_key_gets_it(key: Key) -> None:
    given = config(key, key.value).resolve(declaring(key.name), "some_method")
    assert getattr(given.options, key.name) == key.value


@pytest.mark.parametrize("key", [k for k in KEYS if k.used_by != CORE], ids=lambda k: k.name)
@pytest.mark.parametrize("nothing", [None, False])
def test_a_refused_key_may_say_that_it_asks_for_nothing(key: Key, nothing: object) -> None:
    config(key, nothing).resolve(Plain, "some_method")


@pytest.mark.parametrize("name", sorted(NEUTRAL_VALUES))
def test_a_refused_key_may_say_what_is_done_anyway(name: str) -> None:
    key = next(k for k in KEYS if k.name == name)
    config(key, NEUTRAL_VALUES[name]).resolve(Plain, "some_method")


def test_true_is_not_taken_for_one() -> None:
    key = next(k for k in KEYS if k.name == "draft_tensor_parallel_size")
    with pytest.raises(ConfigError, match="is refused"):
        config(key, True).resolve(Plain, "some_method")


def test_the_table_has_every_key_core_knows_and_no_other() -> None:
    shared = {a.name for a in attrs.fields(SpeculativeConfig)} - {"extra"}
    assert {k.name for k in KEYS} == shared - {"length_policy"} | set(REFUSED_KEYS)
    assert set(NEUTRAL_VALUES) <= set(REFUSED_KEYS)
    assert not shared & set(REFUSED_KEYS)


@pytest.mark.parametrize("rule", sorted(REFUSED_METHODS))
def test_a_lossy_or_old_rule_is_refused_with_the_reason(rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.parse({"method": "x", "rejection_sample_method": rule})
    assert str(caught.value) == (
        f"rejection_sample_method={rule!r} is refused: {REFUSED_METHODS[rule]}"
    )


@pytest.mark.parametrize("rule", ["coupled", "standard", "block", "a_rule_of_its_own"])
def test_rules_that_somebody_may_bring_pass(rule: str) -> None:
    found = SpeculativeConfig.parse({"method": "x", "rejection_sample_method": rule})
    assert found is not None
    assert found.rejection_sample_method == rule
