"""Acceptance rates of synthetic verification: forced acceptance for load tests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from specdec._structure import shown
from specdec.errors import ConfigError


def check_rates(rates: Sequence[float], drafts: int | None) -> None:
    """Refuse rates that are no probabilities, rise, or do not match the number of drafts.

    drafts: None if it is not known yet.
    """
    if not rates or any(not 0 <= r <= 1 for r in rates):
        raise ConfigError(
            f"synthetic_acceptance_rates is {shown(list(rates))}; it has to hold numbers in [0, 1]"
        )
    if any(later > earlier for earlier, later in itertools.pairwise(rates)):
        raise ConfigError(
            f"synthetic_acceptance_rates rises in {shown(list(rates))}; entry i is the probability "
            "that the first i + 1 drafts are all accepted, which cannot rise"
        )
    if drafts is not None and len(rates) != drafts:
        raise ConfigError(
            f"synthetic_acceptance_rates has {len(rates)} entries for {shown(drafts)} drafts; "
            "give one per draft"
        )


def check_length(length: float, drafts: int | None) -> None:
    """Refuse a mean that no step can have: less than 1, or more than drafts + 1 tokens.

    drafts: None if it is not known yet.
    """
    if drafts is not None and not 1 <= length <= drafts + 1:
        raise ConfigError(
            f"synthetic_acceptance_length is {shown(length)}, but with {shown(drafts)} drafts a "
            f"step emits between 1 and {shown(drafts + 1)} tokens"
        )
    if not 1 <= length < math.inf:
        raise ConfigError(
            f"synthetic_acceptance_length is {shown(length)}, but a step emits at least 1 token"
        )


def rates_for_length(length: float, drafts: int) -> list[float]:
    """Rates, one per draft, whose mean tokens per step is `length` with the least variance.

    length: in [1, drafts + 1], the token of the target's own included.
    """
    check_length(length, drafts)
    whole = math.floor(length - 1)
    rates = [1.0] * whole + [length - 1 - whole] + [0.0] * drafts
    return rates[:drafts]


def conditional(rates: Sequence[float]) -> list[float]:
    """Probability of each draft given that those before it were accepted; 0 after a 0."""
    before = [1.0, *rates[:-1]]
    return [r / b if b > 0 else 0.0 for r, b in zip(rates, before, strict=True)]
