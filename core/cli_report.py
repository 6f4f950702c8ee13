"""What sub-commands print about a run: one line of numbers, tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specdec._structure import printable

if TYPE_CHECKING:
    from specdec.metrics import SpeculationMetrics


def summary(tokens: int, seconds: float, metrics: SpeculationMetrics) -> str:
    """Return tokens, their rate, and what speculation brought, as a line."""
    rate = tokens / seconds if seconds else 0.0
    plural = "" if tokens == 1 else "s"
    parts = [f"{tokens} token{plural} in {seconds:.2f} s ({rate:.1f} tokens/s)"]
    if metrics.num_drafts:
        parts += [
            f"{metrics.tokens_per_step:.2f} tokens/step, {metrics.num_accepted_tokens} of "
            f"{metrics.num_draft_tokens} drafts accepted",
            f"acceptance by position: {', '.join(positions(metrics.as_dict()))}",
        ]
    elif metrics.skipped:
        reasons = ", ".join(
            f"{reason.replace('_', ' ')}: {count} step{'' if count == 1 else 's'}"
            for reason, count in metrics.skipped.items()
        )
        parts.append(f"1.00 tokens/step: nothing was drafted ({reasons})")
    return "; ".join(parts)


def positions(numbers: Mapping[str, Any]) -> list[str]:
    """Share of the verified steps whose first 1, 2, ... drafts were all accepted.

    numbers: those of `SpeculationMetrics.as_dict`. It ends at the last position that was drafted.
    """
    return [f"{share:.2f}" for share in drafted_shares(numbers)]


def drafted_shares(numbers: Mapping[str, Any]) -> list[float]:
    """The same as numbers."""
    shares: list[float] = numbers["acceptance_rate_per_pos"]
    return shares[: sum(count > 0 for count in numbers["drafted_per_pos"])]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Return the lines of a Markdown table whose columns are aligned.

    left: columns at the left that hold words; the others hold numbers.
    """
    cells = [[printable(c).replace("|", "\\|") for c in row] for row in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [
            f"{c:<{w}}" if i < left else f"{c:>{w}}"
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(padded)} |")
    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return [lines[0], f"| {' | '.join(rule)} |", *lines[1:]]
