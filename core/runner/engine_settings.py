"""Sizes and policies of an engine, checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from specdec.errors import ConfigError, listed, nearest


def _at_least_one(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{attribute.name} is {value!r}, but it has to be an integer from 1 up")


def _share(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise ConfigError(f"{attribute.name} is {value!r}, but it has to be a number in (0, 1]")


def _from_minus_one(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < -1:
        raise ConfigError(f"{attribute.name} is {value!r}, but it has to be an integer from -1 up")


def _one_of(*words: str) -> Callable[[object, attrs.Attribute[Any], object], None]:
    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value not in words:
            near = nearest(value, words) if isinstance(value, str) else ""
            raise ConfigError(
                f"{attribute.name} is {value!r}, but it has to be {listed(words)}{near}"
            )

    return check


def _boolean(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{attribute.name} is {value!r}, but it has to be True or False")


@attrs.frozen(kw_only=True)
class EngineSettings:
    """Sizes of the engine; see `specdec.LLM`."""

    max_model_len: int | None = attrs.field(default=None, validator=_at_least_one)
    max_num_seqs: int = attrs.field(default=64, validator=_at_least_one)
    max_num_batched_tokens: int = attrs.field(default=512, validator=_at_least_one)
    scheduling_policy: str = attrs.field(default="fcfs", validator=_one_of("fcfs", "priority"))
    kv_cache_memory: int | None = attrs.field(default=None, validator=_at_least_one)
    gpu_memory_utilization: float | None = attrs.field(default=None, validator=_share)
    max_logprobs: int = attrs.field(default=20, validator=_from_minus_one)
    per_request_spec_decode_metrics: str = attrs.field(
        default="summary", validator=_one_of("summary", "detailed")
    )
    enforce_eager: bool = attrs.field(default=False, validator=_boolean)
    deterministic: bool = attrs.field(default=False, validator=_boolean)
