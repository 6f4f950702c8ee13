"""The numbers of speculation, and the ratios and identities that follow from them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import attrs

_COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_plain_steps")
_BY_POSITION = ("drafted_per_pos", "accepted_per_pos")
_BY_STEP = ("per_step_drafted", "per_step_accepted")


@attrs.define(eq=False, kw_only=True)
class SpeculationMetrics:
    """Speculation in numbers, over a request or a whole run. Counted before stops cut a block.

    num_drafts: steps in which drafts were verified; num_draft_tokens, num_accepted_tokens: drafts
        verified and accepted in them. drafted_per_pos, accepted_per_pos: the same by column:
        accepted_per_pos[i] counts the steps whose first i + 1 drafts were all accepted.
    num_plain_steps: decode steps that drew a token without any draft; skipped says why, by the
        words of `specdec.types.SKIP_REASONS`; it is empty without a speculator.
    per_step_drafted, per_step_accepted: one number for each step with drafts, in order; None
        unless every one of them was recorded.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_plain_steps: int = 0
    drafted_per_pos: list[int] = attrs.field(factory=list)
    accepted_per_pos: list[int] = attrs.field(factory=list)
    skipped: dict[str, int] = attrs.field(factory=dict)
    per_step_drafted: list[int] | None = None
    per_step_accepted: list[int] | None = None

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verified step, the target's own included; 1 if nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate(self) -> float | None:
        """Share of verified drafts that were accepted; None if there were none."""
        if not self.num_draft_tokens:
            return None
        return self.num_accepted_tokens / self.num_draft_tokens

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step of the target, steps without drafts included."""
        steps = self.num_drafts + self.num_plain_steps
        return 1 + self.num_accepted_tokens / steps if steps else 1.0

    @property
    def num_emitted_tokens(self) -> int:
        """Tokens that the counted steps emitted: one each, and the accepted drafts."""
        return self.num_drafts + self.num_plain_steps + self.num_accepted_tokens

    @property
    def accepted_histogram(self) -> list[int]:
        """Entry i: verified steps that accepted exactly i drafts. One longer than the columns."""
        return [a - b for a, b in pairwise([self.num_drafts, *self.accepted_per_pos, 0])]

    @property
    def acceptance_rate_per_pos(self) -> list[float]:
        """Share of verified steps whose first i + 1 drafts were all accepted; [] if none were."""
        return [n / self.num_drafts for n in self.accepted_per_pos] if self.num_drafts else []

    @property
    def conditional_acceptance_rate_per_pos(self) -> list[float | None]:
        """Of the steps that accepted i drafts, the share that accepted one more.

        None where there were no such steps. A step that drafted only i counts as one that did
        not, so these fall where drafts are short.
        """
        before = [self.num_drafts, *self.accepted_per_pos]
        return [n / b if b else None for b, n in pairwise(before)]

    def add(self, other: SpeculationMetrics) -> None:
        """Add another request's numbers to these; its steps follow these."""
        for name in _BY_STEP:
            setattr(self, name, self._joined(other, name))
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _BY_POSITION:
            columns, others = getattr(self, name), getattr(other, name)
            longest = max(len(columns), len(others))
            padded = [x + [0] * (longest - len(x)) for x in (columns, others)]
            setattr(self, name, [a + b for a, b in zip(*padded, strict=True)])
        for reason, count in other.skipped.items():
            self.skipped[reason] = self.skipped.get(reason, 0) + count

    def as_dict(self) -> dict[str, Any]:
        """The numbers and the ratios, ready for JSON; without the single steps."""
        return {
            **attrs.asdict(self, filter=lambda field, _: field.name not in _BY_STEP),
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_step": self.tokens_per_step,
            "accepted_histogram": self.accepted_histogram,
            "acceptance_rate_per_pos": self.acceptance_rate_per_pos,
            "conditional_acceptance_rate_per_pos": self.conditional_acceptance_rate_per_pos,
        }

    def summary(self) -> dict[str, Any]:
        """The verified steps under the names that vLLM gives a request's numbers.

        num_spec_tokens: the columns counted, `num_speculative_tokens` of the run.
        """
        return {
            "histogram": self.accepted_histogram,
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.acceptance_rate,
            "num_spec_steps": self.num_drafts,
            "num_accepted_draft_tokens": self.num_accepted_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": len(self.accepted_per_pos),
        }

    def detailed(self) -> dict[str, Any]:
        """The summary and its single steps; these are None if they were not recorded."""
        return {
            **self.summary(),
            "per_step_drafted": self.per_step_drafted,
            "per_step_accepted": self.per_step_accepted,
        }

    def check(self, *, emitted: int | None = None) -> None:
        """Raise `AssertionError` if the numbers contradict one another.

        emitted: tokens of the same steps, before any cut, if they were counted apart.
        """
        drafted, accepted = self.drafted_per_pos, self.accepted_per_pos
        weight = sum(i * n for i, n in enumerate(self.accepted_histogram))
        rules = {
            "verified steps have a first draft": sum(drafted[:1]) == self.num_drafts,
            "positions drafted sum to the drafts": sum(drafted) == self.num_draft_tokens,
            "positions accepted sum to those accepted": sum(accepted) == self.num_accepted_tokens,
            "no position accepts more than it drafts": len(drafted) == len(accepted)
            and all(a <= d for d, a in zip(drafted, accepted, strict=False)),
            "later positions are drafted no more often": _falls(drafted),
            "later positions are accepted no more often": _falls(accepted),
            "the histogram sums to the steps": sum(self.accepted_histogram) == self.num_drafts,
            "the histogram weighs what was accepted": weight == self.num_accepted_tokens,
            "every plain step says why, or none": sum(self.skipped.values())
            in (0, self.num_plain_steps),
            "steps emit one token and those accepted": emitted in (None, self.num_emitted_tokens),
            "single steps sum to the whole": self._steps_fit(),
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise AssertionError(f"{self}: it does not hold that {'; that '.join(broken)}")

    def _joined(self, other: SpeculationMetrics, name: str) -> list[int] | None:
        mine: list[int] | None = getattr(self, name)
        theirs: list[int] | None = getattr(other, name)
        if mine is None and not self.num_drafts:
            return theirs if theirs is None else list(theirs)
        if theirs is None and not other.num_drafts:
            return mine
        return None if mine is None or theirs is None else mine + theirs

    def _steps_fit(self) -> bool:
        drafted, accepted = self.per_step_drafted, self.per_step_accepted
        if drafted is None or accepted is None:
            return drafted is accepted
        return (
            len(drafted) == len(accepted) == self.num_drafts
            and sum(drafted) == self.num_draft_tokens
            and all(0 <= a <= d and d > 0 for d, a in zip(drafted, accepted, strict=True))
            and [accepted.count(i) for i in range(len(self.accepted_histogram))]
            == self.accepted_histogram
        )


def _falls(numbers: list[int]) -> bool:
    return all(a >= b for a, b in pairwise([*numbers, 0]))
