"""What is compared: the speculative configurations, each with the model it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from specdec import plugins
from specdec.config import SpeculativeConfig
from specdec.errors import ConfigError

if TYPE_CHECKING:
    from specdec.llm import LLM

BASELINE = "plain"
_LONGEST_NAME = 48


@attrs.frozen
class Configuration:
    """One of those that are compared. name: in tables; text: as it was given."""

    name: str
    text: str | None
    config: SpeculativeConfig | None

    def promises_equal(self, llm: LLM, *, greedy: bool) -> bool:
        """Whether its tokens have to be those of plain decoding."""
        return llm.lossless and (greedy or llm.rejection_sample_method in (None, "coupled"))

    def as_dict(self, llm: LLM) -> dict[str, Any]:
        """What it is, ready for JSON."""
        return {
            "name": self.name,
            "speculative_config": self.text,
            "rejection_sample_method": llm.rejection_sample_method,
            "lossless": llm.lossless,
        }


def configurations(texts: Sequence[str], *, baseline: bool) -> list[Configuration]:
    """Read what was given; the baseline, plain decoding, comes first.

    Raises:
        ConfigError: one of them is wrong or given twice, or there is none.
    """
    found = [Configuration(BASELINE, None, None)] if baseline else []
    for number, text in enumerate(texts, start=1):
        if text.strip().lower() == BASELINE:
            leave_out = f"-sc {BASELINE}" if baseline else f"-sc {BASELINE} and --no-baseline"
            raise ConfigError(
                f"{text!r} is no speculator: plain decoding is always measured as the baseline; "
                f"leave {leave_out} out"
            )
        config = SpeculativeConfig.parse(text)
        assert config is not None  # a text is no plain decoding
        name = text if len(text) <= _LONGEST_NAME else f"{config.method or config.model} ({number})"
        if any(text == other.text for other in found):
            raise ConfigError(f"the configuration {text!r} is given twice")
        found.append(Configuration(name, text, config))
    if not found:
        raise ConfigError("--no-baseline without --speculative-config leaves nothing to measure")
    return found


def check_methods(compared: Sequence[Configuration]) -> None:
    """Raise PluginError where a method is not installed, before any model is loaded."""
    for one in compared:
        if one.config is not None and isinstance(one.config.method, str):
            plugins.find(one.config.method)
