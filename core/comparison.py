"""Tokens with and without speculation, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import attrs

if TYPE_CHECKING:
    from specdec.outputs import RequestOutput

_SHOWN = 5  # differences that are listed


@attrs.frozen(kw_only=True)
class Comparison:
    """What speculation gained, and where its tokens are not those of plain decoding.

    rate, plain_rate: tokens per second. different: completions (`prompt/index`) and the first
    token at which they differ. lossless: whether the rule keeps the target's law; repeats:
    whether it promises the very tokens.
    """

    rate: float
    plain_rate: float
    completions: int
    different: dict[str, int]
    lossless: bool
    repeats: bool

    @classmethod
    def of(
        cls,
        outputs: Sequence[RequestOutput],
        reference: Sequence[RequestOutput],
        seconds: float,
        plain_seconds: float,
        *,
        lossless: bool,
        repeats: bool,
    ) -> Self:
        """Compare what speculation gave, in so many seconds, with what plain decoding gave."""
        pairs = {
            f"{number}/{c.index}": (c.token_ids, d.token_ids)
            for number, (a, b) in enumerate(zip(outputs, reference, strict=True))
            for c, d in zip(a.outputs, b.outputs, strict=True)
        }
        return cls(
            rate=tokens_of(outputs) / seconds,
            plain_rate=tokens_of(reference) / plain_seconds,
            completions=len(pairs),
            different={name: first_difference(a, b) for name, (a, b) in pairs.items() if a != b},
            lossless=lossless,
            repeats=repeats,
        )

    @property
    def broken(self) -> bool:
        """Whether tokens differ that the rule promises to be equal."""
        return self.repeats and bool(self.different)

    def lines(self) -> list[str]:
        """Say it to a person."""
        equal = self.completions - len(self.different)
        # without a token on either side, as when every request failed, there is no ratio
        gain = f"{self.rate / self.plain_rate:.2f}x" if self.plain_rate else "-"
        lines = [f"plain decoding: {self.plain_rate:.1f} tokens/s; gain: {gain} (each ran once)"]
        if self.repeats:
            differ = f"{len(self.different)} of {self.completions} differ"
            verdict = differ if self.different else "equal"
            lines.append(f"tokens with and without speculation: {verdict}")
            for name, at in list(self.different.items())[:_SHOWN]:
                lines.append(f"  completion {name} differs from token {at} on")
            if self.different:
                lines += [
                    "  near-ties can round differently in one-row and several-row products;",
                    "  --deterministic removes that on a CPU in float32",
                ]
        elif self.lossless:
            lines.append(
                "sampled tokens depend on the drafts under this rule; their law is the target's "
                f"({equal} of {self.completions} completions happen to be equal)"
            )
        else:
            lines.append("this rule is not lossless: the law of the tokens is not the target's")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Say it to a program."""
        return {
            "tokens_per_second": self.rate,
            "plain_tokens_per_second": self.plain_rate,
            "gain": self.rate / self.plain_rate if self.plain_rate else None,
            "completions": self.completions,
            "equal": self.completions - len(self.different),
            "equal_expected": self.repeats,
            "lossless": self.lossless,
            "first_differences": self.different,
        }


def tokens_of(outputs: Sequence[RequestOutput]) -> int:
    """How many tokens were emitted."""
    return sum(len(c.token_ids) for o in outputs for c in o.outputs)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Index of the first token at which they differ; where the shorter one ends at the latest."""
    unlike = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(unlike, min(len(a), len(b)))
