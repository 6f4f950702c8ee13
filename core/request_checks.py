"""What a prompt and its sampling parameters have to satisfy for a target; all raise PromptError.

where: names the prompt in messages.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

from specdec._structure import shown
from specdec.errors import PromptError
from specdec.runner.state import MAX_STOP_IDS
from specdec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_BAD_TOKENS = 1024  # of all bad words of a request
_LONGEST_BAD_WORD = 64  # every step compares the words of all requests at their longest


def check_ids(request_ids: str | Iterable[str]) -> list[str]:
    """The ids of requests to abort, one or several.

    Raises:
        PromptError: they are no texts.
    """
    given = [request_ids] if isinstance(request_ids, str) else request_ids
    if not isinstance(given, Iterable):
        raise PromptError(f"request_ids is {shown(given)}, but it has to be a text or several")
    ids = list(given)
    for one in ids:
        if not isinstance(one, str):
            raise PromptError(f"request_ids holds {shown(one)}, but ids are texts")
    return ids


def check_request_id(request_id: object, used: Container[str]) -> None:
    """Refuse an id that is no text, or that one of the running requests has."""
    if not (isinstance(request_id, str) and request_id):
        raise PromptError(f"request_id is {request_id!r}, but it has to be a text")
    if request_id in used:
        raise PromptError(f"request_id {request_id!r} is in use by a request that still runs")


def check_prompt(ids: Sequence[int], where: str, *, vocab_size: int, max_model_len: int) -> None:
    """Refuse a prompt that is empty, too long, or holds ids that the target does not have."""
    if not ids:
        raise PromptError(f"{where} is empty; give at least one token")
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise PromptError(
            f"{where} holds the token id {shown(wrong)}; ids are 0 to {vocab_size - 1}"
        )
    if len(ids) >= max_model_len:
        raise PromptError(
            f"{where} has {len(ids)} tokens, but max_model_len is {max_model_len} and at "
            "least one token has to be generated; shorten it, or raise max_model_len"
        )


def check_stops(
    params: SamplingParams, eos: frozenset[int], where: str, *, vocab_size: int
) -> None:
    """Refuse stop tokens that the target does not have, or too many of them."""
    own = params.stop_token_ids or ()
    _in_vocabulary("stop_token_ids", own, where, vocab_size)
    wanted = _stop_ids(params, eos)
    if len(wanted) > MAX_STOP_IDS:
        raise PromptError(
            f"{where} has {len(wanted)} stop tokens, {len(set(own))} of its own and the others the "
            f"model's; {MAX_STOP_IDS} at most are served"
        )


def check_text(
    params: SamplingParams, where: str, *, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Refuse stop texts if there is no text to find them in."""
    if params.stop and tokenizer is None:
        raise PromptError(
            f"{where}: stop is {shown(params.stop)}, but without a tokenizer there is no text to "
            "find it in; name one with tokenizer=, or use stop_token_ids"
        )


def check_edits(
    params: SamplingParams,
    where: str,
    *,
    vocab_size: int,
    eos: frozenset[int],
    bad_words: Sequence[Sequence[int]],
) -> None:
    """Refuse edits of ids that the target does not have, and those that leave nothing to draw.

    eos: the model's end-of-sequence tokens. bad_words: from `bad_word_ids`. What is left may still
    depend on the output: bad words of several tokens are not considered.
    """
    if not params.edits:
        return
    _in_vocabulary("logit_bias", params.logit_bias or (), where, vocab_size)
    _in_vocabulary("allowed_token_ids", params.allowed_token_ids or (), where, vocab_size)
    names = [n for n in ("allowed_token_ids", "bad_words") if getattr(params, n)]
    excluded = {ids[0] for ids in bad_words if len(ids) == 1}
    if not _left(params, excluded, vocab_size):
        raise PromptError(f"{where}: {' and '.join(names)} leave no token that could be drawn")
    if params.min_tokens and not _left(params, excluded | _stop_ids(params, eos), vocab_size):
        raise PromptError(
            f"{where}: min_tokens is {shown(params.min_tokens)}, but "
            + (f"{' and '.join(names)} leave nothing but" if names else "all tokens are")
            + " stop tokens, which may not be drawn before"
        )


def bad_word_ids(
    words: Sequence[str], tokenizer: PreTrainedTokenizerBase | None, where: str
) -> list[list[int]]:
    """Token ids that would spell the words: each as a text begins with it, and as a space precedes.

    A word may give two entries. Spellings that the tokenizer would not choose are not among them.

    Raises:
        PromptError: there is no tokenizer, or it cannot spell a word, or the ids are too many.
    """
    if not words:
        return []
    if tokenizer is None:
        raise PromptError(
            f"{where}: bad_words is {shown(words)}, but without a tokenizer nobody knows their "
            "tokens; name one with tokenizer="
        )
    found: list[list[int]] = []
    for word in words:
        bare = word.lstrip(" ") or word
        try:
            ids, spaced = (_encoded(text, word, tokenizer) for text in (bare, f" {bare}"))
        except PromptError as error:
            raise PromptError(f"{where}: {error}") from error
        if len(ids) > _LONGEST_BAD_WORD:
            raise PromptError(
                f"{where}: bad_words holds {shown(word)}, which is {len(ids)} tokens; "
                f"{_LONGEST_BAD_WORD} at most are looked for"
            )
        found.append(ids)
        if spaced[0] != ids[0]:
            found.append(spaced)
    total = sum(map(len, found))
    if total > _MOST_BAD_TOKENS:
        raise PromptError(
            f"{where}: bad_words are {total} tokens in all their spellings; {_MOST_BAD_TOKENS} at "
            "most are served"
        )
    return found


def _encoded(text: str, word: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    try:
        ids = list(tokenizer.encode(text, add_special_tokens=False))
    except Exception as error:  # as of half a character, of which tokenizers say what they like
        raise PromptError(
            f"bad_words holds {shown(word)}, which the tokenizer cannot read "
            f"({type(error).__name__}: {error})"
        ) from error
    unknown = tokenizer.unk_token_id
    if not ids or (unknown in ids and str(tokenizer.unk_token) not in word):
        raise PromptError(
            f"bad_words holds {shown(word)}, which the tokenizer has no tokens for; no output can "
            "hold it"
        )
    return ids


def _stop_ids(params: SamplingParams, eos: frozenset[int]) -> frozenset[int]:
    """Every token that ends a request."""
    own = frozenset(params.stop_token_ids or ())
    return own if params.ignore_eos else own | eos


def _left(params: SamplingParams, excluded: Iterable[int], vocab_size: int) -> int:
    """How many tokens may be drawn if some are excluded."""
    if params.allowed_token_ids:
        return len(set(params.allowed_token_ids).difference(excluded))
    return vocab_size - sum(i < vocab_size for i in set(excluded))


def _in_vocabulary(name: str, ids: Iterable[int], where: str, vocab_size: int) -> None:
    wrong = next((i for i in ids if i >= vocab_size), None)
    if wrong is not None:
        raise PromptError(f"{where}: {name} holds {shown(wrong)}; ids are 0 to {vocab_size - 1}")
