"""The table of parameters and methods is whole, honest and enforced."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from specdec import PromptError, SamplingParams, VerificationRule
from specdec.config import CORE_RULES
from specdec.parameter_table import COLUMNS, TABLE, WORDS, check_parameters, column_of, markdown

# a value of every parameter that asks for something
ASKING: dict[str, Any] = {
    "n": 2,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.5,
    "seed": 1,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {1: 1.0},
    "bad_words": ["x"],
    "allowed_token_ids": [1],
    "logits_processors": [max],
    "min_tokens": 1,
    "max_tokens": 5,
    "ignore_eos": True,
    "stop_token_ids": [1],
    "stop": ["x"],
    "include_stop_str_in_output": True,
    "detokenize": False,
    "skip_special_tokens": False,
    "logprobs": 1,
    "prompt_logprobs": 1,
    "output_kind": "delta",
}
FIELDS = [field.name for field in attrs.fields(SamplingParams)]
RULES = {
    "coupled": VerificationRule("coupled", lossless=True),
    "standard": VerificationRule("standard", lossless=True),
    "block": VerificationRule("block", lossless=True),
    "synthetic": VerificationRule("synthetic", lossless=False),
    "own lossless rule": VerificationRule("mine", lossless=True),
    "own lossy rule": VerificationRule("roughly", lossless=False),
}


def test_every_parameter_has_a_row_and_every_row_a_parameter() -> None:
    assert list(TABLE) == FIELDS, "say in TABLE how the new parameter fares under every method"
    assert list(ASKING) == FIELDS


def test_every_row_has_a_known_word_for_every_method() -> None:
    assert COLUMNS[: len(CORE_RULES)] == CORE_RULES
    assert set(RULES) == set(COLUMNS)
    for row in TABLE.values():
        assert set(row) == set(COLUMNS)
        assert set(row.values()) <= set(WORDS)


def test_lossless_methods_serve_everything_exactly() -> None:
    for column in COLUMNS:
        words = {row[column] for row in TABLE.values()}
        assert (words == {"exact"}) == RULES[column].lossless


@pytest.mark.parametrize("name", FIELDS)
def test_what_edits_logits_is_refused_where_drafts_are_kept_untested(name: str) -> None:
    params = SamplingParams(**{name: ASKING[name]})
    for column, rule in RULES.items():
        assert (TABLE[name][column] == "refused") == (params.edits and not rule.lossless)


@pytest.mark.parametrize("column", COLUMNS)
def test_a_rule_has_its_column(column: str) -> None:
    assert column_of(RULES[column]) == column


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", FIELDS)
def test_what_the_table_refuses_is_refused_and_the_rest_passes(name: str, column: str) -> None:
    params = SamplingParams(**{name: ASKING[name]})
    if TABLE[name][column] != "refused":
        check_parameters(params, RULES[column], "the prompt")
        return
    said = rf"^prompt 2: {name}=.* is refused under rejection_sample_method='{RULES[column].name}'"
    with pytest.raises(
        PromptError, match=rf"{said}.*use 'coupled', 'standard', 'block', or a lossless rule"
    ):
        check_parameters(params, RULES[column], "prompt 2")


def test_parameters_at_their_defaults_pass_under_every_method() -> None:
    for rule in RULES.values():
        check_parameters(SamplingParams(), rule, "the prompt")
        check_parameters(SamplingParams(logit_bias={}, bad_words=[]), rule, "the prompt")


def test_the_table_in_markdown_has_a_line_per_parameter() -> None:
    head, rule, *rows = markdown().splitlines()
    assert head.startswith("| parameter | `coupled` | `standard` | `block` | `synthetic` | own")
    assert rule.count("---") == head.count("|") - 1
    assert [row.split("`")[1] for row in rows] == FIELDS
    assert "| `min_tokens` | exact | exact | exact | refused | exact | refused |" in rows
    assert "| `top_p` | exact | exact | exact | own tokens | exact | up to the rule |" in rows
