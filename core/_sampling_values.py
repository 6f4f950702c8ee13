"""The one form of what users may write for a sampling parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from specdec._structure import shown
from specdec.errors import PromptError


def normal(name: str, value: Any) -> Any:
    """Bring a value to the form of its field; what does not look like one is left for the types.

    Raises:
        PromptError: an entry of a list or dict that cannot be one, named; what cannot be read.
    """
    try:
        return _NORMAL.get(name, plain)(value)
    except PromptError:
        raise
    except Exception as error:  # lists in circles, tensors without data, odd objects
        raise PromptError(
            f"SamplingParams: {name} cannot be read ({type(error).__name__}): {shown(value)}"
        ) from error


def plain(value: Any) -> Any:
    """The Python numbers that numpy's and torch's stand for."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def _fixed(value: Any) -> Any:
    """A list that nobody can change later."""
    value = plain(value)
    return tuple(value) if isinstance(value, list) else value


def _texts(value: Any) -> Any:
    return () if value is None else _fixed(value)


def _stops(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _texts(value)


def _bias(value: Any) -> Any:
    """Numbers by token id; as in JSON, ids may be written as text."""
    if not isinstance(value, Mapping):
        return plain(value)
    found: dict[int, float] = {}
    for key, bias in value.items():
        token, bias = plain(key), plain(bias)
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 20:
            token = int(token)
        if isinstance(token, bool) or not isinstance(token, int):
            raise PromptError(
                f"SamplingParams: logit_bias has the key {shown(key)}, but keys are token ids"
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise PromptError(
                f"SamplingParams: logit_bias of the id {shown(token)} is {shown(bias)}, but it has "
                "to be a number"
            )
        if token in found:
            raise PromptError(f"SamplingParams: logit_bias has the id {shown(token)} twice")
        found[token] = bias
    return found or None


def _processors(value: Any) -> Any:
    """Functions of two arguments, checked as far as that goes without calling them."""
    if not isinstance(value, list | tuple):
        return () if value is None else value
    for function in value:
        kinds = {f"{c.__module__}.{c.__qualname__}" for c in type(function).__mro__}
        if any(k.startswith("transformers.") and "LogitsProcessor" in k for k in kinds):
            raise PromptError(
                f"SamplingParams: logits_processors holds a {type(function).__name__} of "
                "transformers, which looks at one row at a time; wrap it in "
                "specdec.logits_processors.row_by_row"
            )
        if not callable(function):
            continue  # its type is refused
        try:
            inspect.signature(function).bind(None, None)
        except TypeError as error:
            raise PromptError(
                f"SamplingParams: logits_processors holds {shown(function)}, which cannot be "
                f"called with (rows, logits): {error}"
            ) from error
        except ValueError:
            continue  # built-in functions need not say what they take
    return tuple(value)


_NORMAL: dict[str, Callable[[Any], Any]] = {
    "logit_bias": _bias,
    "bad_words": _texts,
    "allowed_token_ids": _fixed,
    "logits_processors": _processors,
    "stop": _stops,
}
