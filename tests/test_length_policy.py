"""How many drafts the next step gets."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from specdec.length_policy import FallingLength, FixedLength

SLOTS = np.array([0, 2])


def ints(*values: int) -> NDArray[np.int64]:
    return np.array(values)


def test_a_fixed_length_is_the_same_for_everybody() -> None:
    policy = FixedLength(4)
    assert policy.choose(SLOTS, running=9).tolist() == [4, 4]
    policy.observe(SLOTS, ints(4, 4), ints(0, 4))
    policy.reset(0)
    assert policy.choose(SLOTS, running=2).tolist() == [4, 4]


@pytest.mark.parametrize(("running", "expected"), [(1, 4), (2, 4), (3, 1), (4, 0), (40, 0)])
def test_a_table_gives_fewer_to_many(running: int, expected: int) -> None:
    table = [4, 4, 4, 1, 0]  # by requests in the step; the last entry holds for more
    for policy in (FixedLength(4, table), FallingLength(4, 8, table)):
        assert policy.choose(SLOTS, running).tolist() == [expected, expected]


def test_a_falling_length_falls_to_one_while_drafts_fail_and_never_to_none() -> None:
    policy = FallingLength(6, 3)
    chosen = []
    for _ in range(20):
        drafted = policy.choose(SLOTS, running=2)
        chosen.append(int(drafted[1]))
        policy.observe(SLOTS, drafted, ints(int(drafted[0]), 0))
    assert chosen[0] == 6
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[-1] == 1
    # the slot whose drafts all held keeps its length
    assert policy.choose(SLOTS, running=2).tolist() == [6, 1]


def test_a_falling_length_climbs_again_when_drafts_hold() -> None:
    policy = FallingLength(6, 3)
    slot = ints(1)
    for _ in range(20):
        policy.observe(slot, policy.choose(slot, 1), ints(0))
    lengths = []
    for _ in range(12):
        drafted = policy.choose(slot, 1)
        lengths.append(int(drafted[0]))
        policy.observe(slot, drafted, drafted)
    assert lengths[0] == 1
    assert lengths == sorted(lengths)
    assert lengths[-1] == 6


def test_steps_without_drafts_teach_nothing_and_a_new_request_starts_afresh() -> None:
    policy = FallingLength(5, 3)
    for _ in range(20):
        policy.observe(SLOTS, ints(3, 0), ints(0, 0))
    assert policy.choose(SLOTS, 2).tolist() == [1, 5]
    policy.reset(0)
    assert policy.choose(SLOTS, 2).tolist() == [5, 5]
