"""How one request is sampled. vLLM's names and defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs

from specdec._sampling_values import normal
from specdec._structure import check_keys, shown
from specdec.errors import ConfigError, PromptError

GREEDY_BELOW = 1e-5  # a temperature under this is greedy
_LEAST_TEMPERATURE = 1e-2  # and none between the two is sampled from: divisions overflow
_MOST_TEMPERATURE = 1e6  # every law is flat long before
_MOST_COMPLETIONS = 10_000
_REPETITION = 1e-6, 1e6  # what float32 can divide by and multiply with
_MOST_IDS = 1024  # of logit_bias and of allowed_token_ids
_MOST_BAD_WORDS = 128
_MOST_STOPS, _LONGEST_STOP = 64, 1024

_NOT_YET = "it is not served yet"
_GRAMMAR = "a grammar has to be asked at every draft"
_NO_GRAMMAR = f"{_GRAMMAR}, and none is"
_REFUSED = {
    "structured_outputs": (None, f"{_NOT_YET}: {_GRAMMAR}"),
    "guided_decoding": (None, f"{_NOT_YET}: {_GRAMMAR}"),
    "guided_json": (None, _NO_GRAMMAR),
    "guided_regex": (None, _NO_GRAMMAR),
    "guided_choice": (None, _NO_GRAMMAR),
    "guided_grammar": (None, _NO_GRAMMAR),
    "response_format": (None, _NO_GRAMMAR),
    "best_of": (None, "it is gone from the field; sample n and choose"),
    "use_beam_search": (False, "completions are sampled, each on its own"),
    "truncate_prompt_tokens": (None, "cut the prompt yourself, so that nothing is lost silently"),
    "spaces_between_special_tokens": (True, "text is what the tokenizer decodes"),
    "thinking_token_budget": (None, "no token is forced; a logits processor can do it"),
    "logprob_token_ids": (None, "logprobs=n gives the n likeliest, -1 all"),
    "priority": (None, "it is an argument of generate, stream and add_request"),
    "extra_args": (None, "nothing would read them"),
}


@attrs.frozen(kw_only=True, init=False)
class SamplingParams:
    """How one request is sampled.

    n: completions per prompt, each with a random stream of its own; 10,000 at most.
    temperature: 0 is greedy; below 0.01 it counts as 0.01. 1,000,000 at most.
    top_k: keep the k most likely tokens and every tie with the last; 0 or -1 keeps all.
    top_p: keep the smallest set of most likely tokens whose probability reaches this.
    min_p: keep tokens at least this fraction as likely as the most likely one.
    seed: makes the completions repeatable, whatever else runs. Without one (None, or -1 as in
        vLLM) the seed of the engine and the order of requests decide.
    repetition_penalty: logits of tokens in the prompt or the output are divided by it if they are
        positive, else multiplied; 1 is off.
    presence_penalty: taken off the logits of tokens in the output, once; from -2 to 2.
    frequency_penalty: taken off for each time that a token is in the output; from -2 to 2.
    logit_bias: added to the logits of these token ids, from -100 to 100; 1,024 ids at most.
    bad_words: texts that are not written: the token that would complete one is excluded, in the
        spelling of the tokenizer; others are not seen. 128 at most.
    allowed_token_ids: all other tokens are excluded; 1,024 ids at most.
    logits_processors: functions that edit the logits after all of these, see
        `specdec.logits_processors`.
    min_tokens: no end-of-sequence, stop token or stop string before so many tokens.
    max_tokens: tokens at most per completion; None leaves it to `max_model_len`.
    ignore_eos: go on past the end-of-sequence token.
    stop_token_ids: further tokens that end a completion; they stay in `token_ids`.
    stop: a text, or several, that ends a completion when it is written; 64 at most, of 1,024
        characters each.
    include_stop_str_in_output: whether `text` holds the text or token that ended it.
    detokenize: whether `text` is filled; `skip_special_tokens`: leaves special tokens out of it.
    logprobs: log-probabilities of every token of the output, and of so many likeliest tokens in
        its place; -1 is the whole vocabulary, None none.
    prompt_logprobs: the same of the prompt.
    output_kind: what `LLM.stream` and `LLM.step` yield: "cumulative" (all so far), "delta" (what is
        new), "final_only" (one output at the end).
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # not hashed, like the others below: what is in them may not be hashable; they are compared
    logit_bias: Mapping[int, float] | None = attrs.field(default=None, hash=False)
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    logits_processors: Sequence[Callable[..., Any]] = attrs.field(default=(), hash=False)
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] | None = attrs.field(default=None, hash=False)
    stop: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    output_kind: Literal["cumulative", "delta", "final_only"] = "cumulative"

    def __init__(self, **values: Any) -> None:
        for name in [n for n in values if n in _REFUSED]:
            neutral, reason = _REFUSED[name]
            value = normal(name, values.pop(name))
            if not _asks_nothing(value, neutral):
                raise PromptError(
                    f"the sampling parameter {name}={shown(value)} is refused: {reason}"
                )
        values = {name: normal(name, value) for name, value in values.items()}
        seed = values.get("seed")
        if isinstance(seed, int) and seed == -1:
            values["seed"] = None
        try:
            check_keys(type(self), values, "SamplingParams")
        except ConfigError as error:
            raise PromptError(str(error)) from error
        self.__attrs_init__(**values)

    def __attrs_post_init__(self) -> None:
        """Check the ranges and what contradicts each other."""
        _require(self.n >= 1, f"n is {shown(self.n)}, but it has to be at least 1")
        _require(
            self.n <= _MOST_COMPLETIONS,
            f"n is {shown(self.n)}, but it can be {_MOST_COMPLETIONS} at most: all completions of "
            "a prompt are prepared before the first one runs",
        )
        _require(
            0 <= self.temperature <= _MOST_TEMPERATURE,
            f"temperature is {shown(self.temperature)}, but it has to be a number from 0 to "
            "1000000",
        )
        _require(self.top_k >= -1, f"top_k is {shown(self.top_k)}, but it has to be -1, 0 or more")
        _require(0 < self.top_p <= 1, f"top_p is {shown(self.top_p)}, but it has to be in (0, 1]")
        _require(0 <= self.min_p <= 1, f"min_p is {shown(self.min_p)}, but it has to be in [0, 1]")
        _require(
            self.seed is None or -(2**63) <= self.seed < 2**63,
            f"seed is {shown(self.seed)}, but it has to fit 64 bits",
        )
        self._check_edits()
        self._check_lengths()
        if self.greedy:
            _require(
                self.n == 1,
                f"n is {self.n} at temperature 0: the completions would all be the same; "
                "set a temperature or n=1",
            )
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(self, name)
            _require(
                number is None or number >= -1,
                f"{name} is {shown(number)}, but it has to be 0 or more, -1 for the whole "
                "vocabulary, or None for none",
            )

    def _check_edits(self) -> None:
        least, most = _REPETITION
        _require(
            least <= self.repetition_penalty <= most,
            f"repetition_penalty is {shown(self.repetition_penalty)}, but it has to be above 0 "
            f"(from {least} to {most:.0f}); 1 is off",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            _require(
                -2 <= penalty <= 2, f"{name} is {shown(penalty)}, but it has to be from -2 to 2"
            )
        for token, bias in (self.logit_bias or {}).items():
            _require(
                -100 <= bias <= 100,
                f"logit_bias of the id {shown(token)} is {shown(bias)}, but it has to be from -100 "
                "to 100",
            )
        allowed = self.allowed_token_ids
        _require(
            allowed is None or len(allowed) > 0,
            "allowed_token_ids is empty: no token could be drawn; None allows all",
        )
        for name, ids in (("logit_bias", self.logit_bias), ("allowed_token_ids", allowed)):
            _at_most(_MOST_IDS, name, "ids", ids or ())
            _require(all(i >= 0 for i in ids or ()), f"{name} holds a negative id: {shown(ids)}")
        _at_most(_MOST_BAD_WORDS, "bad_words", "words", self.bad_words)
        _require(all(self.bad_words), f"bad_words holds an empty text: {shown(self.bad_words)}")

    def _check_lengths(self) -> None:
        _require(
            self.max_tokens is None or self.max_tokens >= 1,
            f"max_tokens is {shown(self.max_tokens)}, but it has to be at least 1 or None: a "
            "request generates; to score a prompt alone use prompt_logprobs with max_tokens=1",
        )
        most = self.max_tokens
        _require(
            self.min_tokens >= 0,
            f"min_tokens is {shown(self.min_tokens)}, but it has to be at least 0",
        )
        _require(
            most is None or self.min_tokens <= most,
            f"min_tokens is {shown(self.min_tokens)}, more than max_tokens, {shown(most)}",
        )
        _require(
            all(t >= 0 for t in self.stop_token_ids or ()),
            f"stop_token_ids holds a negative id: {shown(self.stop_token_ids)}",
        )
        _at_most(_MOST_STOPS, "stop", "texts", self.stop)
        _require(all(self.stop), f"stop holds an empty text: {shown(self.stop)}")
        for text in self.stop:
            _require(
                not any("\ud800" <= c <= "\udfff" for c in text),
                f"stop holds a text that no answer can have, for it is not valid Unicode: "
                f"{shown(text)}",
            )
            _require(
                len(text) <= _LONGEST_STOP,
                f"stop holds a text of {len(text)} characters; {_LONGEST_STOP} at most are served",
            )
        _require(
            self.detokenize or not self.stop,
            f"stop is {shown(self.stop)} with detokenize=False, but stop texts are looked for in "
            "the text; set detokenize, or use stop_token_ids",
        )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken; truncation then changes nothing."""
        return self.temperature < GREEDY_BELOW

    @property
    def effective_temperature(self) -> float:
        """The temperature that is divided by: 0 when greedy, else at least 0.01."""
        return 0.0 if self.greedy else max(self.temperature, _LEAST_TEMPERATURE)

    @property
    def edits(self) -> bool:
        """Whether it asks for any edit of the logits before they are sampled."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.bad_words
            or self.allowed_token_ids
            or self.logits_processors
            or self.min_tokens
        )


def _asks_nothing(value: Any, neutral: Any) -> bool:
    """Whether a value is the neutral one, or none; what cannot be compared asks for something."""
    try:
        return value is None or bool(value == neutral)
    except Exception:  # whatever a type raises in `==`
        return False


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise PromptError(f"SamplingParams: {message}")


def _at_most(most: int, name: str, what: str, values: Any) -> None:
    _require(len(values) <= most, f"{name} holds {len(values)} {what}; {most} at most are served")
