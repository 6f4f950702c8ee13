"""Options that sub-commands share: what they become, and what they refuse."""

from __future__ import annotations

import argparse
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import ConfigError, PromptError, cli_options


def parsed(*arguments: str, slots: bool = True) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli_options.add_model(parser, slots=slots)
    cli_options.add_sampling(parser, max_tokens=7)
    return parser.parse_args(["--model", "m", *arguments])


def test_options_become_sampling_parameters() -> None:
    params = cli_options.sampling(
        parsed(
            "--temperature", "0.5", "--top-p", "0.9", "--top-k", "4", "--min-p", "0.1",
            "--seed", "3", "--ignore-eos", "--sampling-params", '{"stop_token_ids": [5]}',
        ),
        n=2,
    )  # fmt: skip
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 4, 0.1)
    assert (params.seed, params.max_tokens, params.ignore_eos, params.n) == (3, 7, True, 2)
    assert list(params.stop_token_ids or ()) == [5]


def test_without_options_sampling_is_greedy() -> None:
    assert cli_options.sampling(parsed()).greedy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[1]", "has to be a JSON object"),
        ('{"top_k": 3}', "use --top-k for it"),
        ('{"output_kind": "delta"}', "which the command decides itself"),
        ('{"n": 2}', "which the command decides itself"),
        ('{"stop_token_idz": [3]}', "did you mean 'stop_token_ids'? (it takes: allowed_token_ids,"),
        ('{"logits_processors": []}', "they are functions, which JSON cannot hold"),
        ('{"temprature": 1}', "did you mean 'temperature'?"),
        ('{"best_of": 2}', "best_of=2 is refused: it is gone"),
        ('{"stop_token_ids": [-1]}', "a negative id"),
    ],
)
def test_further_parameters_that_cannot_be_are_refused(text: str, said: str) -> None:
    with pytest.raises(PromptError, match=re.escape(said)) as caught:
        cli_options.sampling(parsed("--sampling-params", text))
    assert "detokenize, " not in str(caught.value)  # no list names what is not taken


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000", 1000),
        ("1GB", 10**9),
        ("512MiB", 512 * 2**20),
        ("4G", 4 * 2**30),
        ("1.5 kib", 1536),
        ("2tb", 2 * 10**12),
    ],
)
def test_memory_is_read_with_units(text: str, size: int) -> None:
    assert cli_options.engine(parsed("--kv-cache-memory", text))["kv_cache_memory"] == size


@pytest.mark.parametrize("text", ["", "0", "GB", "4X", "-1", "1e9", "0.1", "1GBB", "9" * 5000])
def test_memory_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="has to be a number of bytes above 0, such as"):
        cli_options.engine(parsed(f"--kv-cache-memory={text}"))


def test_options_become_arguments_of_an_llm() -> None:
    named = cli_options.engine(parsed("--max-model-len", "9", "--deterministic"))
    assert named == {
        "tokenizer": None,
        "revision": None,
        "dtype": "auto",
        "device": None,
        "max_model_len": 9,
        "max_num_seqs": 64,
        "kv_cache_memory": None,
        "trust_remote_code": False,
        "deterministic": True,
    }
    assert "max_num_seqs" not in cli_options.engine(parsed(slots=False))


@given(st.lists(st.integers(1, 999), min_size=1))
def test_counts_are_read_in_order_and_once_each(values: list[int]) -> None:
    assert cli_options.counts(",".join(map(str, values))) == list(dict.fromkeys(values))


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (cli_options.count, "0"),
        (cli_options.count, "1.5"),
        (cli_options.count, "-3"),
        (cli_options.count, "²"),
        (cli_options.counts, "1,,2"),
        (cli_options.counts, ""),
        (cli_options.count_or_none, "-1"),
        (cli_options.numbers, "0,warm"),
    ],
)
def test_what_is_no_number_is_misuse(read: Any, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no "):
        read(text)


def test_nothing_may_be_counted_as_zero() -> None:
    assert cli_options.count_or_none("0") == 0
    assert cli_options.numbers("0,0.7,0") == [0.0, 0.7]
