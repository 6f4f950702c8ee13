"""Keywords of vLLM's LLM: neutral values pass, others are refused with the reason."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from specdec import LLM, ConfigError
from specdec.llm_keys import REFUSED, refuse

KNOWN = [n for n in inspect.signature(LLM).parameters if n != "unsupported"]


def test_no_keyword_is_both_served_and_refused() -> None:
    assert not set(KNOWN) & set(REFUSED)


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
