"""Where a model and its tokenizer come from: what is said of it has to be of use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specdec.errors import ConfigError


def check_sources(
    model: object,
    tokenizer: object,
    *,
    skip_tokenizer_init: object,
    trust_remote_code: object,
    remote: Mapping[str, object],
    tokenizer_options: Mapping[str, object],
) -> None:
    """Refuse what would be ignored: how to fetch what is here already."""
    for name, value in (
        ("skip_tokenizer_init", skip_tokenizer_init),
        ("trust_remote_code", trust_remote_code),
    ):
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}, but it has to be True or False")
    given = [name for name, value in remote.items() if value is not None]
    if not isinstance(model, str | Path):
        given += ["trust_remote_code"] if trust_remote_code else []
        if given:
            raise ConfigError(
                f"{given[0]} says how to load a model, but the model was passed in as a module"
            )
    elif Path(model).expanduser().is_dir() and remote["revision"] is not None:
        raise ConfigError(
            f"revision is {remote['revision']!r}, but {str(model)!r} is a folder and has none"
        )
    options = [name for name, value in tokenizer_options.items() if value is not None]
    if skip_tokenizer_init and (tokenizer is not None or options):
        what = "a tokenizer" if tokenizer is not None else options[0]
        raise ConfigError(f"skip_tokenizer_init=True contradicts giving {what}")
    named = isinstance(tokenizer, str | Path) or (
        tokenizer is None and isinstance(model, str | Path)
    )
    if options and not named:
        raise ConfigError(
            f"{options[0]} says how to load a tokenizer, but none is loaded: name one with "
            "tokenizer="
        )
