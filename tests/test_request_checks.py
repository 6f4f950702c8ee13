"""Prompts and parameters that a target cannot serve."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec import PromptError, SamplingParams
from specdec.request_checks import (
    bad_word_ids,
    check_edits,
    check_prompt,
    check_stops,
    check_text,
)

EOS = frozenset({1})


def byte_level() -> Any:
    """Byte-level BPE with the letters a to e, a space, and some words with and without one."""
    alphabet = ["<unk>", "<eos>", "a", "b", "c", "d", "e", "Ġ"]
    merges = [("a", "b"), ("ab", "c"), ("Ġ", "abc")]
    words = [*alphabet, *("".join(m) for m in merges)]
    core = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=core, eos_token="<eos>")


def words_only() -> Any:
    core = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "cat": 2, "dog": 3}, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=core, unk_token="<unk>", eos_token="<eos>")


def check(tokenizer: Any = None, vocab_size: int = 10, **asked: Any) -> None:
    params = SamplingParams(**asked)
    words = bad_word_ids(params.bad_words, tokenizer, "prompt 3")
    check_edits(params, "prompt 3", vocab_size=vocab_size, eos=EOS, bad_words=words)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"logit_bias": {3: 1, 10: 1}}, "prompt 3: logit_bias holds 10; ids are 0 to 9"),
        ({"logit_bias": {10**300: 1}}, "logit_bias holds 1000"),
        ({"allowed_token_ids": [3, 99]}, "allowed_token_ids holds 99; ids are 0 to 9"),
        ({"bad_words": ["cat"]}, r"prompt 3: bad_words is .*without a tokenizer"),
        (
            {"allowed_token_ids": [1], "min_tokens": 2},
            "min_tokens is 2, but allowed_token_ids leave nothing but stop tokens",
        ),
        (
            {"allowed_token_ids": [5, 6], "stop_token_ids": [6, 5], "min_tokens": 1},
            "leave nothing but stop tokens",
        ),
        (
            {"stop_token_ids": [0, *range(2, 10)], "min_tokens": 1},
            "min_tokens is 1, but all tokens are stop tokens",
        ),
    ],
    ids=str,
)
def test_edits_that_the_target_cannot_serve_are_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(PromptError, match=said):
        check(**asked)


def test_edits_that_bad_words_make_impossible_are_refused() -> None:
    tokenizer = words_only()
    with pytest.raises(PromptError, match="allowed_token_ids and bad_words leave no token that"):
        check(tokenizer, allowed_token_ids=[2, 3], bad_words=["cat", "dog"])
    with pytest.raises(PromptError, match="prompt 3: bad_words leave no token"):
        check(tokenizer, vocab_size=2, bad_words=["<unk>", "<eos>"])
    with pytest.raises(PromptError, match="allowed_token_ids and bad_words leave nothing but stop"):
        check(tokenizer, allowed_token_ids=[1, 2], bad_words=["cat"], min_tokens=1)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"repetition_penalty": 2.0, "logit_bias": {9: 1}},
        {"allowed_token_ids": [1]},
        {"allowed_token_ids": [1], "min_tokens": 2, "ignore_eos": True},
        {"allowed_token_ids": [1, 9], "min_tokens": 2},
        {"allowed_token_ids": [2, 3], "bad_words": ["cat dog", "cat cat"]},
        {"allowed_token_ids": [2, 3], "bad_words": ["cat"]},
    ],
    ids=str,
)
def test_edits_that_leave_something_pass(asked: dict[str, Any]) -> None:
    check(words_only(), **asked)


def test_a_word_is_banned_with_a_space_before_it_and_without() -> None:
    tokenizer = byte_level()
    ids = tokenizer.convert_tokens_to_ids
    assert bad_word_ids(["abc"], tokenizer, "it") == [[ids("abc")], [ids("Ġabc")]]
    assert bad_word_ids([" abc"], tokenizer, "it") == bad_word_ids(["abc"], tokenizer, "it")
    assert bad_word_ids(["de"], tokenizer, "it") == [
        [ids("d"), ids("e")],
        [ids("Ġ"), ids("d"), ids("e")],
    ]
    assert bad_word_ids(["abc de"], tokenizer, "it") == [
        [ids("abc"), ids("Ġ"), ids("d"), ids("e")],
        [ids("Ġabc"), ids("Ġ"), ids("d"), ids("e")],
    ]
    assert bad_word_ids(["  "], tokenizer, "it") == [[ids("Ġ")] * 2]


def test_a_word_whose_space_makes_no_difference_is_there_once() -> None:
    assert bad_word_ids(["cat", "cat dog"], words_only(), "it") == [[2], [2, 3]]
    assert bad_word_ids([], None, "it") == []


def test_words_that_the_tokenizer_cannot_spell_are_refused() -> None:
    with pytest.raises(PromptError, match="bad_words holds 'mouse', which the tokenizer has no to"):
        bad_word_ids(["cat", "mouse"], words_only(), "it")
    with pytest.raises(PromptError, match="bad_words holds '  '"):
        bad_word_ids(["  "], words_only(), "it")
    assert bad_word_ids(["<unk>"], words_only(), "it") == [[0]]


def test_words_of_too_many_tokens_are_refused() -> None:
    tokenizer, longest = words_only(), "cat " * 64
    bad_word_ids([longest] * 16, tokenizer, "it")
    with pytest.raises(PromptError, match=r"it: bad_words are 1025 tokens .*; 1024 at most"):
        bad_word_ids([*[longest] * 16, "dog"], tokenizer, "it")
    with pytest.raises(PromptError, match=r"it: bad_words holds 'cat .*, which is 65 tokens; 64"):
        bad_word_ids([longest + "cat"], tokenizer, "it")


def test_stop_texts_need_a_tokenizer() -> None:
    with pytest.raises(PromptError, match=r"the prompt: stop is \('x',\), but without a tokenizer"):
        check_text(SamplingParams(stop="x"), "the prompt", tokenizer=None)
    check_text(SamplingParams(stop="x"), "the prompt", tokenizer=words_only())
    check_text(SamplingParams(stop_token_ids=[1]), "the prompt", tokenizer=None)


def test_prompts_are_checked_against_vocabulary_and_length() -> None:
    for ids, said in (
        ([], "the prompt is empty"),
        ([3, 10], "the prompt holds the token id 10; ids are 0 to 9"),
        ([1] * 8, "the prompt has 8 tokens, but max_model_len is 8"),
    ):
        with pytest.raises(PromptError, match=said):
            check_prompt(ids, "the prompt", vocab_size=10, max_model_len=8)
    check_prompt([1] * 7, "the prompt", vocab_size=10, max_model_len=8)


def test_stop_tokens_are_checked_against_vocabulary_and_number() -> None:
    with pytest.raises(PromptError, match="the prompt: stop_token_ids holds 10; ids are 0 to 9"):
        check_stops(SamplingParams(stop_token_ids=[10]), EOS, "the prompt", vocab_size=10)
    many = list(range(10, 266))
    params = SamplingParams(stop_token_ids=[*many, 10])
    with pytest.raises(PromptError, match="257 stop tokens, 256 of its own and the others"):
        check_stops(params, EOS, "the prompt", vocab_size=999)
    ignoring = SamplingParams(stop_token_ids=many, ignore_eos=True)
    check_stops(ignoring, EOS, "the prompt", vocab_size=999)
