"""Build an attrs class from a mapping a user wrote, with errors that name the key."""

from __future__ import annotations

import functools
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import attrs

from specdec.errors import ConfigError, PluginError, listed, nearest

T = TypeVar("T")


class _Short(reprlib.Repr):
    """A repr that never fails and never floods a message."""

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # Python writes no integer of more than 4300 digits
            return f"an integer of {x.bit_length()} bits"


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 20
_SHORT.maxlevel = 4


def shown(value: object) -> str:
    """Return the repr of what a user wrote, cut to a length and depth that fit a message."""
    return _SHORT.repr(value)


def printable(text: object) -> str:
    """Return text of somebody else's for a terminal, control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def field_names(cls: type) -> tuple[str, ...]:
    """Names of the fields of an attrs class that its constructor takes."""
    return tuple(a.alias for a in attrs.fields(cls) if a.init)


def structure(cls: type[T], values: Mapping[str, Any], what: str) -> T:
    """Return `cls(**values)`; unknown keys, wrong types and refused values are `ConfigError`s.

    what: names the thing in messages, e.g. `the options of 'x'`.
    """
    check_keys(cls, values, what)
    for key in _required(cls):
        if key not in values:
            raise ConfigError(f"{what} need the key {key!r}")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except Exception as error:  # a validator or converter may raise what it likes
        # those of attrs carry their arguments along: only the first is for people
        reason = error.args[0] if error.args else type(error).__name__
        raise ConfigError(f"{what}: {reason}") from error


def check_keys(cls: type, values: Mapping[str, Any], what: str) -> None:
    """Refuse keys that the attrs class does not have and values of another type than its field.

    The type of a field with a converter is that of the result, so its values are not judged.
    """
    known = field_names(cls)
    for key in values:
        if key not in known:
            raise ConfigError(
                f"{what} has no key {shown(key)}{nearest(key, known)} (known: {listed(known)})"
            )
    hints = _hints(cls)
    for key, value in values.items():
        if key in hints and not fits(value, hints[key]):
            raise ConfigError(
                f"{what}: {key} is {shown(value)}, but it has to be {spell(hints[key])}"
                f"{_quotes(value, hints[key])}"
            )


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(cls)
    except Exception as error:  # a NameError, mostly
        raise PluginError(
            f"the types of the fields of {cls.__module__}.{cls.__qualname__} cannot be read "
            f"({type(error).__name__}: {error}); import them when the module is run, not under "
            "TYPE_CHECKING"
        ) from error
    return {
        a.alias: hints[a.name] for a in attrs.fields(cls) if a.converter is None and a.name in hints
    }


def _required(cls: type) -> list[str]:
    return [a.alias for a in attrs.fields(cls) if a.init and a.default is attrs.NOTHING]


def _quotes(value: Any, hint: Any) -> str:
    if isinstance(value, bool | int | float) and fits("", hint):
        return "; in a short string, put it in quotes"
    return ""


def fits(value: Any, hint: Any) -> bool:
    """Whether a plain value belongs to a simple type; types it does not know always fit."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, a) for a in args)
    if origin is typing.Literal:
        return any(type(value) is type(a) and value == a for a in args)
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    sequence = origin or hint
    if sequence in (list, tuple, Sequence):
        if not isinstance(value, list | tuple):
            return False
        if origin is tuple and Ellipsis not in args:
            return len(value) == len(args) and all(map(fits, value, args))
        return not args or all(fits(v, args[0]) for v in value)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(
            fits(k, args[0]) and fits(v, args[1]) for k, v in value.items()
        )
    if origin is type:
        return isinstance(value, type) and issubclass(value, args)
    kind = origin or hint
    return not isinstance(kind, type) or isinstance(value, kind)


def spell(hint: Any) -> str:
    """Say a type as a person would."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(spell(a) for a in args)
    if origin is typing.Literal:
        return " or ".join(repr(a) for a in args)
    if hint is None or hint is type(None):
        return "null"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    if hint in names:
        return names[hint]
    if origin is type:
        return f"a subclass of {spell(args[0])}"
    if origin is tuple and Ellipsis not in args:
        return "a list of " + ", ".join(spell(a) for a in args)
    if (origin or hint) in (list, tuple, Sequence):
        inner = spell(args[0]) if args and args[0] is not Any else ""
        return f"a list (each entry {inner})" if inner else "a list"
    if (origin or hint) in (dict, Mapping):
        return "an object"
    return getattr(hint, "__name__", str(hint))
