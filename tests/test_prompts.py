"""What counts as a prompt, and what is said of everything else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from specdec.errors import PromptError
from specdec.prompts import is_chat, read_prompts


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_folder)


USER = {"role": "user", "content": "the cat"}
BOT = {"role": "assistant", "content": "sat"}


def ids(prompts: Any, tokenizer: Any = None) -> list[list[int]]:
    found = read_prompts(prompts, tokenizer)
    assert all(type(i) is int for prompt in found for i in prompt.token_ids)
    return [prompt.token_ids for prompt in found]


@pytest.mark.parametrize(
    "prompt",
    [
        [4, 5],
        (4, 5),
        range(4, 6),
        np.array([4, 5]),
        np.array([4, 5], dtype=np.int32),
        torch.tensor([4, 5]),
        [np.int64(4), 5],
        {"prompt_token_ids": [4, 5]},
        {"prompt_token_ids": torch.tensor([4, 5])},
    ],
    ids=lambda p: type(p).__name__,
)
def test_token_ids_come_in_many_shapes(prompt: Any) -> None:
    assert ids(prompt) == [[4, 5]]
    assert ids([prompt, [6]]) == [[4, 5], [6]]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_a_matrix_is_a_list_of_prompts(make: Any) -> None:
    assert ids(make([[4, 5], [6, 7]])) == [[4, 5], [6, 7]]


def test_text_is_tokenized_and_kept(tokenizer: Any) -> None:
    (prompt,) = read_prompts("the cat", tokenizer)
    assert (prompt.text, prompt.token_ids) == ("the cat", [4, 5])
    assert ids(["the", {"prompt": "cat sat"}, [9]], tokenizer) == [[4], [5, 6], [9]]


def test_chat_messages_go_through_the_template_without_more_special_tokens(tokenizer: Any) -> None:
    (prompt,) = read_prompts([USER], tokenizer)
    assert (prompt.text, prompt.token_ids) == ("<user> the cat <bot> ", [2, 4, 5, 3])
    # one message, a conversation, several conversations
    assert ids(USER, tokenizer) == [[2, 4, 5, 3]]
    assert ids([USER, BOT, USER], tokenizer) == [[2, 4, 5, 2, 6, 2, 4, 5, 3]]
    assert ids([[USER], [USER, BOT]], tokenizer) == [[2, 4, 5, 3], [2, 4, 5, 2, 6, 3]]


def test_no_prompts_are_no_prompts() -> None:
    assert read_prompts([], None) == []


def test_an_empty_prompt_is_read_and_left_to_the_check_of_lengths() -> None:
    assert ids([[]]) == [[]]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (3, "prompts of type int; give text, token ids, chat messages"),
        (None, "prompts of type NoneType"),
        (b"abc", "prompts of type bytes"),
        ({1, 2}, "prompts of type set"),
        (iter([1, 2]), "prompts of type list_iterator"),
        (np.array(3), "prompts of type int"),
        ([1, "a"], "a list of token ids holds 'a'; ids are integers"),
        ([1.0, 2.0], "a list of token ids holds 1.0; ids are integers"),
        ([True, False], "a list of token ids holds True"),
        (torch.tensor([1.5]), "a list of token ids holds 1.5"),
        ([[1, 2], None], "a prompt of type NoneType cannot be read"),
        ([b"ab"], "a prompt of type bytes cannot be read"),
        ([[1, "a"]], "a prompt of type list cannot be read"),
        ([[[1]]], "a prompt of type list cannot be read"),
        (np.zeros((2, 2, 2), dtype=int), "a prompt of type list cannot be read"),
        ({}, "a prompt with the keys none; it has to have exactly one of prompt, "),
        ({"text": "a"}, "a prompt with the keys text;"),
        ([{"rol": "user", "content": "a"}], "; a chat message has a 'role' as well"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "the keys prompt, prompt_token_ids"),
        ({"prompt": [1]}, "the key 'prompt' holds list, not text"),
        ({"prompt_token_ids": "abc"}, "'prompt_token_ids' holds str, not a list of token ids"),
        ({"prompt_token_ids": [[1]]}, "'prompt_token_ids' holds list, not a list of token ids"),
        ({"prompt_token_ids": 7}, "'prompt_token_ids' holds int"),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],
)
def test_everything_else_is_refused(prompts: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        read_prompts(prompts, None)


@pytest.mark.parametrize("prompts", ["the cat", ["the"], [USER], {"prompt": "the"}])
def test_text_without_a_tokenizer_is_refused(prompts: Any) -> None:
    with pytest.raises(PromptError, match="a text prompt needs a tokenizer and this LLM has none"):
        read_prompts(prompts, None)


@pytest.mark.parametrize(
    "prompts",
    ["a \ud800", ["the", "a \ud800"], {"prompt": "a \ud800"}, {**USER, "content": "\ud800"}],
    ids=["text", "list", "dict", "chat"],
)
def test_half_a_character_is_refused(prompts: Any, tokenizer: Any) -> None:
    with pytest.raises(
        PromptError, match=r"^a text prompt holds the lone surrogate '\\ud800' at position \d"
    ):
        read_prompts(prompts, tokenizer)


def test_chat_without_a_template_is_refused(model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = None
    with pytest.raises(PromptError, match="chat messages need a chat template"):
        read_prompts([USER], tokenizer)


def test_what_a_template_raises_is_a_prompt_error_that_quotes_it(model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = "{{ raise_exception('no system prompts here') }}"
    with pytest.raises(PromptError, match="refused the messages: no system prompts here"):
        read_prompts([USER], tokenizer)


@pytest.mark.parametrize("prompts", [USER, [USER], [USER, BOT], [[USER], [USER]], []])
def test_conversations_are_told_apart(prompts: Any) -> None:
    assert is_chat(prompts)


@pytest.mark.parametrize(
    "prompts", [[{"rol": "user", "content": "a"}], [[USER], [{"rol": "user", "content": "a"}]]]
)
def test_a_message_without_a_role_is_named(prompts: Any) -> None:
    with pytest.raises(PromptError, match=r"^message 0 has no 'role' \(it has 'rol', 'content'\)$"):
        is_chat(prompts)


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("prompts", ["a", ["a"], [1, 2], {"prompt": "a"}, [USER, "a"], generator()])
def test_other_prompts_are_no_conversations(prompts: Any) -> None:
    assert not is_chat(prompts)
