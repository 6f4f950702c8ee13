"""`num_speculative_tokens_per_batch_size`: drafts by the number of requests in a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from specdec._structure import shown
from specdec.errors import ConfigError

KEY = "num_speculative_tokens_per_batch_size"


class DraftRange(NamedTuple):
    """`drafts` per request while `first` to `last` requests run, both included."""

    first: int
    last: int
    drafts: int


def check_ranges(ranges: Sequence[Any]) -> list[DraftRange]:
    """Return the ranges in ascending order.

    Raises:
        ConfigError: no ranges, an entry that is no (first, last, drafts) of whole numbers in
            their order, ranges that overlap, or none that starts at 1.
    """
    if not ranges:
        raise ConfigError(
            f"{KEY} is empty; leave it out, or give [first, last, drafts] entries such as "
            "[[1, 16, 5], [17, 64, 2]]"
        )
    table = sorted(_range(entry) for entry in ranges)
    if table[0].first != 1:
        raise ConfigError(
            f"{KEY} starts at {shown(table[0].first)} requests; the first range has to start at 1"
        )
    for one, two in itertools.pairwise(table):
        if two.first <= one.last:
            raise ConfigError(
                f"{KEY}: the ranges {shown(list(one))} and {shown(list(two))} overlap"
            )
    return table


def drafts_by_batch(ranges: Sequence[Any], drafts: int, max_num_seqs: int) -> list[int]:
    """Drafts per request by the number of requests in the step: entry n is for n of them.

    ranges: (first, last, drafts) entries; a gap and the tail keep the drafts of the range before.
    drafts: the most there can be: larger entries are cut to it.
    Returns max_num_seqs + 1 entries; entry 0 is like entry 1.
    """
    table = check_ranges(ranges)
    found: list[int] = []
    for entry, after in zip(table, [*table[1:], None], strict=True):
        # a range holds until the next one starts, so gaps and the tail need no rule of their own
        end = max_num_seqs + 1 if after is None else min(after.first, max_num_seqs + 1)
        found += [min(entry.drafts, drafts)] * (end - len(found))
    return found


def _range(entry: Any) -> DraftRange:
    if not (
        isinstance(entry, list | tuple)
        and len(entry) == 3
        and all(isinstance(n, int) and not isinstance(n, bool) for n in entry)
    ):
        raise ConfigError(
            f"{KEY} holds {shown(entry)}; every entry has to be three integers, "
            "[first, last, drafts]"
        )
    first, last, drafts = entry
    if first < 1 or last < first:
        raise ConfigError(
            f"{KEY} holds {shown(entry)}; a range goes from 1 or more requests to no fewer"
        )
    if drafts < 0:
        raise ConfigError(f"{KEY} holds {shown(entry)}; drafts cannot be negative")
    return DraftRange(first, last, drafts)
