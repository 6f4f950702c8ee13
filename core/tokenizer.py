"""The tokenizer of a target, and the tokens that end its output."""

from __future__ import annotations

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
    extra: dict[str, Any],
) -> PreTrainedTokenizerBase | None:
    """Load a tokenizer, by default the model's own; None if there is none to load.

    None for a module that was passed in, and where the model itself cannot be found either.

    Raises:
        ConfigError: one was named, or the model's folder is there, and it cannot be loaded.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    source = tokenizer
    if source is None and isinstance(model, str | Path):
        source = model
    elif not isinstance(source, str | Path | None):
        raise ConfigError(
            f"tokenizer is of type {type(source).__name__}; give a folder, a Hub id or a "
            "transformers tokenizer"
        )
    if source is None:
        return None  # a module that was passed in: prompts come as ids unless one is given
    try:
        return AutoTokenizer.from_pretrained(
            str(source),
            revision=revision,
            trust_remote_code=trust_remote_code,
            token=token,
            **extra,
        )
    except Exception as error:  # transformers raises many kinds for one cause
        if tokenizer is None and not Path(str(source)).is_dir():
            return None  # no such model either: its own error says it better
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        raise ConfigError(
            f"no tokenizer could be loaded from {str(source)!r} ({type(error).__name__}: {reason}) "
            "- name another with tokenizer=, or pass skip_tokenizer_init=True and token ids"
        ) from error


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
