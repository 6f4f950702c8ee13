"""Draft what followed an earlier occurrence of the tokens just seen.

The rule, in full. Let the sequence be t[0:L]. Take the longest n, from `prompt_lookup_max` down
to `prompt_lookup_min`, for which the last n tokens also occur earlier, that is end at some
e < L; among several e the last one. Draft t[e], t[e + 1], ...; where that runs into the end of
the sequence it goes on with the drafts themselves, which repeats the last L - e tokens.

Where no size is named, single tokens are looked up too while a request runs alone: they draft
more often and fail more often, and only there do rows cost next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import attrs
import numpy as np
import torch

from specdec import Capabilities, ConfigError, Draft, Speculator, hookimpl
from specdec_plugin_ngram.index import NgramIndex

if TYPE_CHECKING:
    from specdec import RequestChanges, SpeculatorConfig, Step, TargetInfo

DEFAULT_MIN, DEFAULT_MAX = 2, 3
LARGEST = 256  # every size has a table, and hashing it costs its square
DEFAULT_ALONE = 1  # the shortest while a request runs alone


@attrs.frozen
class NgramOptions:
    """Sizes of the n-grams that are looked up.

    prompt_lookup_max: longest n-gram, in tokens, 256 at most; if unset the same as
        `prompt_lookup_min`, and 3 if both are unset.
    prompt_lookup_min: shortest n-gram that is still drafted from; if unset the same as
        `prompt_lookup_max`, and if both are unset 2, or 1 while a single request runs.
    """

    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse sizes that no n-gram has."""
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, but it has to be at least 1")
            if value is not None and value > LARGEST:
                raise ConfigError(
                    f"{name} is {value}; n-grams of at most {LARGEST} tokens are looked up, and "
                    "more than a few hardly ever help"
                )
        if self.shortest > self.longest:
            raise ConfigError(
                f"prompt_lookup_min={self.shortest} is larger than "
                f"prompt_lookup_max={self.longest}; swap them, or name only one"
            )

    @property
    def longest(self) -> int:
        """The largest n."""
        return self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_MAX

    @property
    def shortest(self) -> int:
        """The smallest n."""
        return self.prompt_lookup_min or self.prompt_lookup_max or DEFAULT_MIN

    @property
    def shortest_alone(self) -> int:
        """The smallest n while a single request runs."""
        return self.prompt_lookup_min or self.prompt_lookup_max or DEFAULT_ALONE


class NgramSpeculator(Speculator):
    """Repeats what followed the last occurrence of the current suffix."""

    Options = NgramOptions

    def __init__(self, slots: int, options: NgramOptions) -> None:
        self.index = NgramIndex(slots, options.shortest_alone, options.longest)
        self.shortest = options.shortest

    @classmethod
    def load(cls, target: TargetInfo, config: SpeculatorConfig) -> Self:
        """Make an empty index; there is no checkpoint."""
        return cls(target.max_num_seqs, config.options)

    def capabilities(self) -> Capabilities:
        """It reads tokens on the host and nothing of the target."""
        return Capabilities(drawn="deterministic", host_tokens=True)

    @hookimpl
    def propose(self, step: Step, k: int) -> Draft:
        """Take in the tokens that are new, then look the last ones up."""
        host = step.host
        assert host is not None  # `host_tokens` asks for it
        tokens = np.full((step.batch, k), -1, np.int64)
        owned = host.slots >= 0
        slots = host.slots[owned]
        length = host.length[slots]
        self.index.add(host.history, slots, length)
        shortest = self.shortest if len(slots) > 1 else 1
        source = self.index.find(host.history, slots, length, shortest)[:, None]
        column = np.arange(k)
        again = source + column % (length[:, None] - source)
        wanted = (column < host.k[owned, None]) & (source > 0)
        tokens[owned] = np.where(wanted, host.history[slots[:, None], again], -1)
        return Draft(tokens=torch.from_numpy(tokens).to(step.slots.device))

    def requests_changed(self, changes: RequestChanges) -> None:
        """Empty the slots of requests that left; those that got one are met in `propose`."""
        self.index.drop(np.array(changes.left, np.int64))
