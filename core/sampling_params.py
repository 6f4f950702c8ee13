"""How one request is sampled. vLLM's names and defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from specdec._structure import check_keys, shown
from specdec.errors import ConfigError, PromptError

GREEDY_BELOW = 1e-5  # a temperature under this is greedy
_LEAST_TEMPERATURE = 1e-2  # and none between the two is sampled from: divisions overflow
_MOST_TEMPERATURE = 1e6  # every law is flat long before
_MOST_COMPLETIONS = 10_000

_NOT_YET = "it is not served yet"
_REFUSED = {
    "repetition_penalty": (1.0, _NOT_YET),
    "presence_penalty": (0.0, _NOT_YET),
    "frequency_penalty": (0.0, _NOT_YET),
    "logit_bias": (None, _NOT_YET),
    "bad_words": (None, _NOT_YET),
    "allowed_token_ids": (None, _NOT_YET),
    "min_tokens": (0, _NOT_YET),
    "stop": (None, f"{_NOT_YET}; stop_token_ids is"),
    "include_stop_str_in_output": (False, _NOT_YET),
    "logprobs": (None, _NOT_YET),
    "prompt_logprobs": (None, _NOT_YET),
    "logits_processors": (None, _NOT_YET),
    "structured_outputs": (None, f"{_NOT_YET}: a grammar has to be asked at every draft"),
    "guided_decoding": (None, f"{_NOT_YET}: a grammar has to be asked at every draft"),
    "best_of": (None, "it is gone from the field; sample n and choose"),
    "truncate_prompt_tokens": (None, "cut the prompt yourself, so that nothing is lost silently"),
}


@attrs.frozen(kw_only=True, init=False)
class SamplingParams:
    """How one request is sampled.

    n: completions per prompt, each with a random stream of its own; 10,000 at most.
    temperature: 0 is greedy; below 0.01 it counts as 0.01. 1,000,000 at most.
    top_k: keep the k most likely tokens and every tie with the last; 0 or -1 keeps all.
    top_p: keep the smallest set of most likely tokens whose probability reaches this.
    min_p: keep tokens at least this fraction as likely as the most likely one.
    seed: makes the completions repeatable, whatever else runs. Without one the seed of the
        engine and the order of requests decide.
    max_tokens: tokens at most per completion; None leaves it to `max_model_len`.
    ignore_eos: go on past the end-of-sequence token.
    stop_token_ids: further tokens that end a completion; they stay in `token_ids`.
    detokenize: whether `text` is filled; `skip_special_tokens`: leaves special tokens out of it.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __init__(self, **values: Any) -> None:
        for name in [n for n in values if n in _REFUSED]:
            neutral, reason = _REFUSED[name]
            value = _plain(values.pop(name))
            if not _asks_nothing(value, neutral):
                raise PromptError(
                    f"the sampling parameter {name}={shown(value)} is refused: {reason}"
                )
        values = {name: _plain(value) for name, value in values.items()}
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
            f"temperature is {self.temperature}, but it has to be a number from 0 to 1000000",
        )
        _require(self.top_k >= -1, f"top_k is {self.top_k}, but it has to be -1, 0 or more")
        _require(0 < self.top_p <= 1, f"top_p is {self.top_p}, but it has to be in (0, 1]")
        _require(0 <= self.min_p <= 1, f"min_p is {self.min_p}, but it has to be in [0, 1]")
        _require(
            self.max_tokens is None or self.max_tokens >= 1,
            f"max_tokens is {self.max_tokens}, but it has to be at least 1 or None",
        )
        _require(
            self.seed is None or -(2**63) <= self.seed < 2**63,
            f"seed is {self.seed}, but it has to fit 64 bits",
        )
        _require(
            all(t >= 0 for t in self.stop_token_ids or ()),
            f"stop_token_ids holds a negative id: {self.stop_token_ids}",
        )
        if self.greedy:
            _require(
                self.n == 1,
                f"n is {self.n} at temperature 0: the completions would all be the same; "
                "set a temperature or n=1",
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken; truncation then changes nothing."""
        return self.temperature < GREEDY_BELOW

    @property
    def effective_temperature(self) -> float:
        """The temperature that is divided by: 0 when greedy, else at least 0.01."""
        return 0.0 if self.greedy else max(self.temperature, _LEAST_TEMPERATURE)


def _plain(value: Any) -> Any:
    """The Python numbers that numpy's and torch's stand for."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _asks_nothing(value: Any, neutral: Any) -> bool:
    """Whether a value is the neutral one, or none; what cannot be compared asks for something."""
    try:
        return bool(value in (None, neutral, [], {}, ()))
    except Exception:  # whatever a type raises in `==`
        return False


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise PromptError(f"SamplingParams: {message}")
