"""The tokenizer of a target, and the tokens that end its output."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_tokenizer(
    model: str | Path | PreTrainedModel,
    tokenizer: str | Path | PreTrainedTokenizerBase | None,
    *,
    revision: str | None,
    trust_remote_code: bool,
    token: str | bool | None,
    extra: object,
) -> PreTrainedTokenizerBase | None:
    """Load a tokenizer, by default the model's own; None for a module if none is named.

    To be called when the model is loaded: whatever goes wrong here, it is there.

    extra: further arguments of transformers, a mapping or None.

    Raises:
        ConfigError: a setting is wrong, or there is a source but it gives no tokenizer.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    check_token(token)
    if not isinstance(extra, Mapping | None):
        raise ConfigError(
            f"tokenizer_kwargs is of type {type(extra).__name__}; give a dict of arguments for "
            "the transformers tokenizer"
        )
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if not isinstance(tokenizer, str | Path | None):
        raise ConfigError(
            f"tokenizer is of type {type(tokenizer).__name__}; give a folder, a Hub id or a "
            "transformers tokenizer"
        )
    source = model if tokenizer is None else tokenizer
    if not isinstance(source, str | Path):
        return None  # a module that was passed in: prompts come as ids unless one is given
    try:
        return AutoTokenizer.from_pretrained(
            str(source),
            revision=revision,
            trust_remote_code=trust_remote_code,
            token=token,
            **(extra or {}),
        )
    except Exception as error:  # transformers raises many kinds for one cause
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        raise ConfigError(
            f"no tokenizer could be loaded from {str(source)!r} ({type(error).__name__}: {reason}) "
            "- name another with tokenizer=, or pass skip_tokenizer_init=True and token ids"
        ) from error


def check_token(token: object) -> None:
    """Refuse what is no token of the Hub, without showing it. Raise ConfigError."""
    if not isinstance(token, str | bool | None):
        raise ConfigError(
            f"hf_token is of type {type(token).__name__}; give a string, True for the one that is "
            "stored, False for none, or None"
        )


def eos_ids(model: Any, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """End-of-sequence tokens: of the generation config, the config and the tokenizer."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, list | tuple):
            found.update(value)
    return frozenset(i for i in found if i >= 0)
