"""Read what a user gives as prompts: text, token ids, chat messages."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from specdec.errors import PromptError, listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = Mapping[str, Any]
_PROMPT_KEYS = ("prompt", "prompt_token_ids")
Prompt: TypeAlias = "str | Sequence[int] | Sequence[Message] | Mapping[str, Any]"


@attrs.frozen
class TokenizedPrompt:
    """A prompt as token ids. text: None if it came as ids."""

    text: str | None
    token_ids: list[int]


def read_prompts(prompts: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[TokenizedPrompt]:
    """Tokenize one prompt or a list of them.

    Raises:
        PromptError: something is no prompt, or text came without a tokenizer to read it.
    """
    prompts = _plain(prompts)
    if _is_one(prompts):
        return [_read(prompts, tokenizer)]
    if _is_list(prompts) and any(isinstance(p, numbers.Number) for p in prompts):
        odd = next(p for p in prompts if not _is_id(p))
        raise PromptError(f"a list of token ids holds {odd!r}; ids are integers")
    if not _is_list(prompts):
        raise PromptError(
            f"prompts of type {type(prompts).__name__}; give text, token ids, chat messages, "
            "{'prompt': text} or {'prompt_token_ids': ids}, or a list of these"
        )
    return [_read(p, tokenizer) for p in prompts]


def is_chat(prompts: Any) -> bool:
    """Whether it is a conversation, or a list of them.

    Raises:
        PromptError: a message of it has no role.
    """
    if _is_message(prompts):
        return True
    if not _is_list(prompts):
        return False
    _check_roles(prompts)
    return all(is_chat(p) for p in prompts)


def _check_roles(messages: Sequence[Any]) -> None:
    """Refuse messages without a role. Prompts with keys of their own are no messages."""
    for number, message in enumerate(messages):
        if isinstance(message, Mapping) and not {"role", *_PROMPT_KEYS} & set(message):
            has = ", ".join(map(repr, message)) or "nothing"
            raise PromptError(f"message {number} has no 'role' (it has {has})")


def _is_one(value: Any) -> bool:
    if isinstance(value, str | Mapping):
        return True
    if not _is_list(value) or not value:
        return False
    return all(_is_id(v) for v in value) or all(_is_message(v) for v in value)


def _is_list(value: Any) -> bool:
    """Whether it can hold prompts, ids or messages: bytes are sequences of numbers, but no ids."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _is_id(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """The list that an array or tensor stands for; anything else as it is."""
    if not (hasattr(value, "tolist") and hasattr(value, "shape")):
        return value
    try:
        return value.tolist()
    except Exception as error:  # as of a tensor without data
        raise PromptError(
            f"a prompt of type {type(value).__name__} cannot be read "
            f"({type(error).__name__}: {error}); give token ids as a list"
        ) from error


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value


def _read(prompt: Any, tokenizer: PreTrainedTokenizerBase | None) -> TokenizedPrompt:
    if isinstance(prompt, Mapping) and not _is_message(prompt):
        if len(prompt) != 1 or next(iter(prompt)) not in _PROMPT_KEYS:
            message = "; a chat message has a 'role' as well" if "content" in prompt else ""
            raise PromptError(
                f"a prompt with the keys {listed(map(str, prompt))}; it has to have exactly one "
                f"of {listed(_PROMPT_KEYS)}{message}"
            )
        (key, value), *_ = prompt.items()
        if key == "prompt" and not isinstance(value, str):
            raise PromptError(f"the key 'prompt' holds {type(value).__name__}, not text")
        prompt = _plain(value)
        if key == "prompt_token_ids" and not (_is_list(prompt) and all(map(_is_id, prompt))):
            raise PromptError(
                f"the key 'prompt_token_ids' holds {type(value).__name__}, not a list of token ids"
            )
    prompt = _plain(prompt)
    if isinstance(prompt, str):
        tokenizer = _needed(tokenizer)
        return TokenizedPrompt(prompt, _ids(tokenizer, prompt))
    if _is_message(prompt):
        prompt = [prompt]
    if _is_list(prompt) and prompt and all(_is_message(m) for m in prompt):
        return _render(prompt, _needed(tokenizer))
    if _is_list(prompt) and all(_is_id(i) for i in prompt):
        return TokenizedPrompt(None, [int(i) for i in prompt])
    raise PromptError(
        f"a prompt of type {type(prompt).__name__} cannot be read; give text, token ids, chat "
        "messages with 'role' and 'content', {'prompt': text} or {'prompt_token_ids': ids}"
    )


def _render(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> TokenizedPrompt:
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(
            "chat messages need a chat template, and this model's tokenizer has none; "
            "give the prompt as text"
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates raise what they like
        raise PromptError(f"the chat template refused the messages: {error}") from error
    # the template writes the special tokens itself
    return TokenizedPrompt(str(text), _ids(tokenizer, str(text), add_special_tokens=False))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, **options: Any) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # a tokenizer would speak of a wrong type
        at = error.start
        raise PromptError(
            f"a text prompt holds the lone surrogate {text[at]!r} at position {at}, which is no "
            "character; give valid Unicode text"
        ) from error
    return [int(i) for i in tokenizer(text, **options)["input_ids"]]


def _needed(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise PromptError(
            "a text prompt needs a tokenizer and this LLM has none; give token ids, or a tokenizer"
        )
    return tokenizer
