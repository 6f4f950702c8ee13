"""Read the text forms of a speculative configuration.

The short string::

    config  = method [":" options] | options
    options = option {"," option}
    option  = key "=" value
    value   = bare | "'" text without "'" "'" | JSON string, list or object
    bare    = text without , = : | ' "

A bare `true`, `false`, `null` or number is that value, everything else is text: write a number
that is meant as text (a revision) in quotes. Space around words does not count. `|` outside
quotes is reserved for chains of speculators. A text that starts with `{` is one JSON object.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from specdec._structure import shown
from specdec.errors import ConfigError

_SPECIAL = ",=:|'\""
_KEYWORDS = {"true": True, "false": False, "null": None, "none": None}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def parse(text: str) -> dict[str, Any]:
    """Return the keys and values that the text names; the method under `method`.

    Raises:
        ConfigError: the text does not follow the grammar; the message shows where.
    """
    stripped = text.strip()
    if not stripped:
        raise ConfigError(
            "the speculative configuration is empty; write a method ('specdec plugins' lists them)"
        )
    if stripped.startswith("{"):
        return _parse_json(stripped)
    return _Reader(stripped).config()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"the key {shown(key)} stands twice in a JSON object")
        found[key] = value
    return found


def _no_number(constant: str) -> NoReturn:
    raise ConfigError(f"{constant} is no number in JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_number)


def _parse_json(text: str) -> dict[str, Any]:
    try:
        parsed = _DECODER.decode(text)
    except ConfigError as error:
        raise ConfigError(f"the speculative configuration {shown(text)}: {error}") from None
    # ValueError: broken, or an integer beyond any use; RecursionError: too deeply nested
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"the speculative configuration {shown(text)} is not valid JSON: {error}"
        ) from error
    assert isinstance(parsed, dict)  # it starts with a brace
    return parsed


class _Reader:
    """Reads the short string from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def fail(self, what: str) -> ConfigError:
        return ConfigError(
            f"cannot read the speculative configuration {shown(self.text)}: {what} at character "
            f"{self.at + 1}; the form is method:key=value,key=value with values that hold any of "
            ", = : | in quotes"
        )

    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        seen: set[str] = set()
        word = self.word()
        if self.peek() == "=":
            self.at = 0  # no method: the text starts with an option
        else:
            if not word:
                raise self.fail("a method or a key is missing")
            found["method"] = word
            seen.add("method")
            if not self.peek():
                return found
            self.expect(":")
        while True:
            key = self.word()
            if not key:
                raise self.fail("a key is missing")
            if key.replace("-", "_") in seen:
                raise self.fail(f"the key {shown(key)} stands twice, the second time")
            seen.add(key.replace("-", "_"))
            self.expect("=", after=f" after {shown(key)}")
            found[key] = self.value()
            if not self.peek():
                return found
            self.expect(",", after=" after a value")

    def peek(self) -> str:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.text[self.at : self.at + 1]

    def expect(self, mark: str, *, after: str = "") -> None:
        found = self.peek()
        if found == "|":
            raise self.fail("'|' is reserved for chains of speculators, which are not there yet,")
        if found != mark:
            stands = repr(found) if found else "nothing"
            raise self.fail(f"{mark!r} is expected{after}, but {stands} stands")
        self.at += 1

    def word(self) -> str:
        self.peek()
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in _SPECIAL:
            self.at += 1
        return self.text[start : self.at].strip()

    def value(self) -> Any:
        mark = self.peek()
        if mark == "'":
            end = self.text.find("'", self.at + 1)
            if end < 0:
                raise self.fail("the quote is never closed")
            quoted = self.text[self.at + 1 : end]
            self.at = end + 1
            return quoted
        if mark and mark in '"[{':
            try:
                value, self.at = _DECODER.raw_decode(self.text, self.at)
            except (ValueError, RecursionError) as error:
                raise self.fail(f"a JSON value is broken ({error})") from error
            return value
        word = self.word()
        if not word:
            raise self.fail("a value is missing")
        try:
            return _typed(word)
        except ValueError as error:  # an integer of more digits than Python reads
            raise self.fail(f"a number is too long ({error})") from error


def _typed(word: str) -> Any:
    if word.lower() in _KEYWORDS:
        return _KEYWORDS[word.lower()]
    if _NUMBER.fullmatch(word):
        return float(word) if set(word) & set(".eE") else int(word)
    return word
