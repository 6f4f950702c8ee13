"""Edits of logits: every row against the row alone, and against the definition id by id."""

from __future__ import annotations

import doctest
from collections.abc import Sequence
from math import inf, nan
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec_kernels import EditInputs, Edits, Sampling, edit_logits, empty_rows, verify
from specdec_kernels import edits as module

VOCAB = 11
Asked = dict[str, Any]


def table(rows: Sequence[Sequence[float]], filler: float, dtype: torch.dtype) -> Tensor:
    """Ragged rows in as many columns as the longest needs."""
    width = max((len(r) for r in rows), default=0)
    padded = [[*r, *[filler] * (width - len(r))] for r in rows]
    return torch.tensor(padded, dtype=dtype).reshape(len(rows), width)


def edits_of(asked: Sequence[Asked]) -> Edits:
    """What each slot asks for, under the names of the fields; `bias` is a dict."""

    def number(name: str, default: float) -> Tensor:
        return torch.tensor([float(a.get(name, default)) for a in asked])

    def ids(name: str) -> Tensor:
        return table([list(a.get(name, ())) for a in asked], -1, torch.int64)

    words = [a.get("bad_words", ()) for a in asked]
    width = max((len(w) for w in words), default=0)
    length = max((len(t) for w in words for t in w), default=0)
    bad = torch.full((len(asked), width, length), -1)
    for slot, mine in enumerate(words):
        for i, tokens in enumerate(mine):
            bad[slot, i, length - len(tokens) :] = torch.tensor(tokens)
    return Edits(
        repetition_penalty=number("repetition_penalty", 1.0),
        presence_penalty=number("presence_penalty", 0.0),
        frequency_penalty=number("frequency_penalty", 0.0),
        bias_ids=ids("bias"),
        bias=table([list(a.get("bias", {}).values()) for a in asked], 0.0, torch.float32),
        allowed_ids=ids("allowed_ids"),
        stop_ids=ids("stop_ids"),
        min_length=torch.tensor([a.get("min_length", 0) for a in asked], dtype=torch.int64),
        bad_words=bad,
    )


def naive(row: list[float], prompt: list[int], output: list[int], asked: Asked) -> list[float]:
    """One row, id by id, in the order of the documentation."""
    z = list(row)
    vocab = len(z)
    for x, bias in asked.get("bias", {}).items():
        if 0 <= x < vocab:
            z[x] += bias
    allowed = [x for x in asked.get("allowed_ids", ()) if x >= 0]
    if allowed:
        z = [v if x in allowed else -inf for x, v in enumerate(z)]
    if len(prompt) + len(output) < asked.get("min_length", 0):
        z = [-inf if x in asked.get("stop_ids", ()) else v for x, v in enumerate(z)]
    factor = asked.get("repetition_penalty", 1.0)
    for x in range(vocab):
        if x in prompt or x in output:
            z[x] = z[x] / factor if z[x] > 0 else z[x] * factor
        z[x] -= asked.get("frequency_penalty", 0.0) * output.count(x)
        z[x] -= asked.get("presence_penalty", 0.0) * (x in output)
    for *before, last in asked.get("bad_words", ()):
        if 0 <= last < vocab and output[len(output) - len(before) :] == before:
            z[last] = -inf
    return z


class Call:
    """The arguments of one call: request b lies in slot `slots[b]`, -1 being padding.

    Each request is (prompt, output, drafts, asked); its rows are its drafts and one more.
    """

    def __init__(
        self,
        requests: Sequence[tuple[list[int], list[int], list[int], Asked]],
        *,
        vocab: int = VOCAB,
        slots: Sequence[int] | None = None,
        spare_rows: int = 0,
        seed: int = 0,
    ) -> None:
        self.requests = list(requests)
        order = list(range(len(self.requests))) if slots is None else list(slots)
        places = max([*order, len(self.requests)]) + 2
        self.slots = torch.tensor(order, dtype=torch.int64)
        self.drafts = table([d for _, _, d, _ in self.requests], -1, torch.int64)
        counts = [len(d) + 1 for _, _, d, _ in self.requests]
        self.start = torch.tensor([0, *counts]).cumsum(0)
        rows = sum(counts) + spare_rows
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(rows, vocab, generator=generator) * 3
        self.positions = torch.tensor(
            [
                len(p) + len(o) + i
                for (p, o, *_), n in zip(self.requests, counts, strict=True)
                for i in range(n)
            ]
            + [0] * spare_rows,
            dtype=torch.int64,
        )
        # what lies past the known tokens is stale, and must not be read
        self.history = torch.full((places, 40), 3)
        self.prompt_length = torch.full((places,), 7)
        asked: list[Asked] = [{"repetition_penalty": 5.0} for _ in range(places)]
        for slot, (prompt, output, _, wants) in zip(order, self.requests, strict=True):
            known = [*prompt, *output]
            self.history[slot, : len(known)] = torch.tensor(known, dtype=torch.int64)
            self.prompt_length[slot] = len(prompt)
            asked[slot] = wants
        self.edits = edits_of(asked)

    def run(self, logits: Tensor | None = None) -> Tensor:
        return edit_logits(
            self.logits.clone() if logits is None else logits,
            self.start,
            self.drafts,
            self.positions,
            self.slots,
            history=self.history,
            prompt_length=self.prompt_length,
            edits=self.edits,
        )

    def rows(self) -> list[tuple[int, int, int]]:
        """Request, drafts before, row; of all rows that belong to somebody."""
        return [
            (b, i, int(self.start[b]) + i)
            for b in range(len(self.requests))
            for i in range(int(self.start[b + 1] - self.start[b]))
            if self.slots[b] >= 0
        ]

    def alone(self, request: int, i: int, row: int) -> Tensor:
        """The row by itself, in a step without drafts, once its drafts were committed."""
        slot = int(self.slots[request])
        history = self.history.clone()
        first = int(self.positions[row]) - i
        history[slot, first : first + i] = self.drafts[request, :i]
        return edit_logits(
            self.logits[row : row + 1].clone(),
            torch.tensor([0, 1]),
            torch.empty((1, 0), dtype=torch.int64),
            self.positions[row : row + 1],
            self.slots[request : request + 1],
            history=history,
            prompt_length=self.prompt_length,
            edits=self.edits,
        )[0]


def differing(call: Call, edited: Tensor) -> list[int]:
    """Rows that are not, bit for bit, what they are alone."""
    return [
        row
        for b, i, row in call.rows()
        if not torch.equal(edited[row].nan_to_num(9e9), call.alone(b, i, row).nan_to_num(9e9))
    ]


# Two requests, so that the last row of the call is not every request's last, and between them one
# that asks for nothing. Every row of theirs is changed by what they ask for.
PROMPT, OUTPUT = [4, 5, 4], [1, 2, 1]
DRAFTS = [2, 1, 9]
ASKS: dict[str, Asked] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "presence_penalty": {"presence_penalty": 0.75},
    "frequency_penalty": {"frequency_penalty": -0.5},
    "logit_bias": {"bias": {0: 3.0, 9: -100.0}},
    "allowed_token_ids": {"allowed_ids": [1, 2, 8]},
    "min_tokens": {"stop_ids": [0, 7], "min_length": 10},
    "bad_words, one token": {"bad_words": [[6]]},
    "bad_words, over the boundary": {"bad_words": [[2, 1, 2, 3], [1, 2, 1, 5], [1, 9, 0]]},
}
WHERE_DRAFTS_COUNT = [
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "bad_words, over the boundary",
]


def example(asked: Asked) -> Call:
    return Call(
        [
            (PROMPT, OUTPUT, DRAFTS, asked),
            (PROMPT, OUTPUT, DRAFTS, {}),
            (PROMPT, OUTPUT, DRAFTS, asked),
        ]
    )


@pytest.mark.parametrize("asked", ASKS.values(), ids=ASKS)
def test_every_row_gets_what_it_would_get_alone_with_its_drafts_committed(asked: Asked) -> None:
    call = example(asked)
    edited = call.run()
    assert differing(call, edited) == []
    changed = (edited != call.logits).any(-1)
    assert changed.tolist() == [True] * 4 + [False] * 4 + [True] * 4


@pytest.mark.parametrize("asked", ASKS.values(), ids=ASKS)
@pytest.mark.parametrize("rows", ["last of the call", "last of each", "first of each"])
def test_the_comparison_sees_an_edit_that_reaches_some_rows_only(asked: Asked, rows: str) -> None:
    call = example(asked)
    reached = {
        "last of the call": [11],
        "last of each": [3, 7, 11],
        "first of each": [0, 4, 8],
    }[rows]
    wrong = call.logits.clone()
    wrong[reached] = call.run()[reached]
    assert differing(call, wrong) == [r for r in (0, 1, 2, 3, 8, 9, 10, 11) if r not in reached]


@pytest.mark.parametrize("name", WHERE_DRAFTS_COUNT)
@pytest.mark.parametrize("used", [0, 3])
def test_the_comparison_sees_one_context_used_for_all_rows(name: str, used: int) -> None:
    """Rows that all count no draft, or all drafts, as one does who forgets which row it is."""
    call = example(ASKS[name])
    one = Call([(PROMPT, [*OUTPUT, *DRAFTS[:used]], [], ASKS[name])])
    wrong = call.logits.clone()
    for row in range(4):
        one.logits = call.logits[row : row + 1]
        wrong[row] = one.run()[0]
    assert set(differing(call, wrong)) >= {3 if used == 0 else 0, 8, 9, 10, 11}


def test_repetition_counts_the_prompt_and_the_others_do_not() -> None:
    for name, counted in (("repetition_penalty", True), ("presence_penalty", False)):
        call = Call([([4], [], [], {name: 2.0})])
        assert (call.run() != call.logits)[0].nonzero().flatten().tolist() == [4] * counted


def test_repetition_divides_positive_logits_and_multiplies_the_others() -> None:
    call = Call([([0, 1, 2], [], [], {"repetition_penalty": 2.0})], vocab=4)
    call.logits = torch.tensor([[3.0, -3.0, 0.0, 3.0]])
    assert call.run().tolist() == [[1.5, -6.0, 0.0, 3.0]]


def test_tokens_that_were_prefilled_again_after_a_preemption_still_count_as_output() -> None:
    asked = {"frequency_penalty": 1.0, "bad_words": [[5, 6]]}
    call = Call([([4], [5, 5], [], asked)])  # one row after a prefill of all three
    edited = call.run()
    assert (call.logits - edited)[0, 5] == 2
    assert edited[0, 6] == -inf


def test_a_minimum_that_ends_between_two_drafts_masks_the_rows_before_it_alone() -> None:
    call = Call([([4, 4], [5], [6, 6, 6], {"stop_ids": [1], "min_length": 5})])
    assert (call.run()[:, 1] == -inf).tolist() == [True, True, False, False]


def test_bad_words_are_not_looked_for_in_the_prompt_nor_across_its_end() -> None:
    words = {"bad_words": [[4, 5], [4, 6, 7]]}
    call = Call([([1, 4], [], [6, 4], words), ([1, 4], [6], [], words)])
    assert (call.run() == -inf).nonzero().tolist() == [[2, 5]]


def test_drafts_that_are_no_ids_take_a_place_and_match_nothing() -> None:
    call = Call([([4], [], [2, 3], {"bad_words": [[2, 5], [3, 6]], "frequency_penalty": 1.0})])
    for none in (-1, -7, VOCAB, 2**40):
        call.drafts = torch.tensor([[none, 3]])
        edited = call.run()
        assert torch.equal(edited[:2], call.logits[:2])
        assert (edited[2] == -inf).nonzero().flatten().tolist() == [6]
        assert (call.logits - edited)[2, 3] == 1


def test_parameters_apply_in_the_documented_order() -> None:
    asked = {
        "bias": {0: 2.0, 1: 5.0},
        "allowed_ids": [0, 1, 2, 3],
        "stop_ids": [3],
        "min_length": 9,
        "repetition_penalty": 2.0,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.25,
        "bad_words": [[2]],
    }
    call = Call([([1], [0, 0], [], asked)], vocab=5)
    call.logits = torch.zeros(1, 5)
    # (0 + 2) / 2 - 2 * 0.5 - 0.25, (0 + 5) / 2, banned, stop, not allowed
    assert call.run().tolist() == [[-0.25, 2.5, -inf, -inf, -inf]]


def test_rows_of_nobody_and_rows_past_the_last_draft_are_left_alone() -> None:
    asked = {"bias": dict.fromkeys(range(VOCAB), 1.0)}
    request = (PROMPT, OUTPUT, DRAFTS, asked)
    call = Call([request, request], slots=[1, -1], spare_rows=3)
    edited = call.run()
    assert (edited != call.logits).any(-1).tolist() == [True] * 4 + [False] * 7
    call.drafts = call.drafts[:, :1]  # K = 1: two rows of a request are used at most
    edited = call.run()
    assert (edited != call.logits).any(-1).tolist() == [True] * 2 + [False] * 9


def test_rows_whose_request_asks_for_nothing_keep_their_bits() -> None:
    call = Call([(PROMPT, OUTPUT, DRAFTS, {}), (PROMPT, OUTPUT, [], {"bias": {1: 1.0}})])
    call.logits[0, :4] = torch.tensor([nan, -0.0, inf, -inf])
    bits = call.logits.view(torch.int32)
    assert torch.equal(call.run()[:4].view(torch.int32), bits[:4])


def test_excluded_ids_stay_excluded() -> None:
    every = {k: v for asked in ASKS.values() for k, v in asked.items()}
    call = Call([([1], [0, 1], [0, 1], {**every, "bias": {0: 5.0, 1: 5.0}})])
    call.logits[:, 0], call.logits[:, 1] = -inf, nan
    edited = call.run()
    assert (edited[:, 0] == -inf).all()
    assert not (edited[:, 1] > -inf).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_single_and_double_precision_are_edited_in_place(dtype: torch.dtype) -> None:
    call = example(ASKS["repetition_penalty"])
    given, expected = call.logits.to(dtype, copy=True), call.run()
    edited = call.run(given)
    assert edited is given
    assert edited.dtype == dtype
    torch.testing.assert_close(edited, expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_single_and_is_left_as_it_was(dtype: torch.dtype) -> None:
    for asked in (ASKS["repetition_penalty"], {}):
        call = example(asked)
        given = call.logits.to(dtype)
        before = given.clone()
        edited = call.run(given)
        assert edited.dtype == torch.float32
        assert torch.equal(given, before)
        assert torch.equal(edited, call.run(before.to(torch.float32)))


def test_rows_that_share_memory_are_taken_apart_first() -> None:
    call = example(ASKS["frequency_penalty"])
    shared = torch.arange(float(VOCAB))
    edited = call.run(shared.expand(12, VOCAB))
    assert torch.equal(shared, torch.arange(float(VOCAB)))
    assert torch.equal(edited, call.run(shared.repeat(12, 1)))


def test_rows_may_lie_apart_in_memory() -> None:
    call = example(ASKS["logit_bias"])
    wide = torch.zeros(12, VOCAB + 5)
    wide[:, :VOCAB] = call.logits
    assert torch.equal(call.run(wide[:, :VOCAB]), call.run())
    assert not wide[:, VOCAB:].any()


@pytest.mark.parametrize("requests", [[], [([1], [], [], {"bias": {0: 1.0}})]], ids=["none", "one"])
def test_a_call_may_have_no_rows(
    requests: list[tuple[list[int], list[int], list[int], Asked]],
) -> None:
    call = Call(requests)
    call.start = torch.zeros_like(call.start)
    call.positions = call.positions[:0]
    assert call.run(torch.empty(0, VOCAB)).shape == (0, VOCAB)


def test_ids_beyond_the_vocabulary_are_ignored() -> None:
    beyond = {"bias": {50: 1.0}, "stop_ids": [50], "min_length": 90, "bad_words": [[50], [2, 50]]}
    call = Call([([60, 3], [61, 2], [], {**beyond, "repetition_penalty": 2.0})])
    edited = call.run()
    assert (edited != call.logits)[0].nonzero().flatten().tolist() == [2, 3]


# --- against the definition -----------------------------------------------

ids = st.integers(0, VOCAB - 1)
# eighths, so that float32 and Python's doubles agree but for the penalty that divides
eighths = st.integers(-16, 16).map(lambda x: x / 8)
wishes = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 4.0]),
        "presence_penalty": eighths,
        "frequency_penalty": eighths,
        "bias": st.dictionaries(ids, eighths, max_size=4),
        "allowed_ids": st.lists(ids, max_size=5),
        "stop_ids": st.lists(ids, max_size=3),
        "min_length": st.integers(0, 12),
        "bad_words": st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=4),
    },
)
few = st.integers(0, 3)  # so that tokens repeat
requests = st.tuples(
    st.lists(few, min_size=1, max_size=4),
    st.lists(few, max_size=6),
    st.lists(st.one_of(few, ids), max_size=4),
    wishes,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    asked=st.lists(requests, min_size=1, max_size=4),
    turn=st.randoms(use_true_random=False),
    spare=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_rows_are_those_of_the_definition_and_of_the_row_alone(
    asked: list[tuple[list[int], list[int], list[int], Asked]], turn: Any, spare: int, seed: int
) -> None:
    slots = list(range(len(asked)))
    turn.shuffle(slots)
    slots = [s if s or len(asked) == 1 else -1 for s in slots]  # somebody is padding
    call = Call(asked, slots=slots, spare_rows=spare, seed=seed)
    edited = call.run()
    assert differing(call, edited) == []
    mine = {row for *_, row in call.rows()}
    for row in set(range(len(edited))) - mine:
        assert torch.equal(edited[row], call.logits[row])
    for b, i, row in call.rows():
        prompt, output, drafts, wants = asked[b]
        expected = naive(call.logits[row].tolist(), prompt, [*output, *drafts[:i]], wants)
        for got, value in zip(edited[row].tolist(), expected, strict=True):
            assert (got == -inf) == (value == -inf)
            assert got == pytest.approx(value, abs=1e-5)


# --- rows without any id --------------------------------------------------


def test_a_grammar_excludes_what_the_mask_of_the_row_lacks_before_all_else() -> None:
    asked = {"bias": {32: 5.0}, "allowed_ids": [0, 31, 32, 39]}
    call = Call([([1], [2], [3], asked), ([1], [2], [3], {})], vocab=40)
    masks = torch.tensor([[1, 0], [-(2**31), -1], [2, 129], [0, 0]], dtype=torch.int32)
    named: dict[str, Any] = {
        "history": call.history,
        "prompt_length": call.prompt_length,
        "edits": call.edits,
    }
    named["logits_start"], named["draft_tokens"] = call.start, call.drafts
    named["positions"], named["slots"] = call.positions, call.slots

    def allowed(**start: Any) -> list[list[int]]:
        edited = edit_logits(call.logits.clone(), **named, grammar=masks, **start)
        return [row.nonzero().flatten().tolist() for row in edited > -inf]

    everything = list(range(40))
    assert allowed() == [[0], [31, 32, 39], [1, 32, 39], []]
    start = torch.tensor([1, -1])
    assert allowed(grammar_start=start) == [[31, 32, 39], [32, 39], everything, everything]
    edited = edit_logits(call.logits.clone(), **named, grammar=masks)
    assert edited[1, 32] == call.logits[1, 32] + 5


def test_verify_marks_tokens_of_rows_that_exclude_every_id_and_no_others() -> None:
    call = Call([([1], [2], [3, 1], {}), ([1], [2], [3, 1], {})], vocab=4)
    off = torch.zeros(len(call.prompt_length))
    zero = torch.zeros_like(call.prompt_length)
    sampling = Sampling(zero, off + 1, zero, off + 1, off)
    masks = torch.tensor([[7], [0], [15]], dtype=torch.int32)  # without the draft; empty; all
    inputs = EditInputs(call.history, call.prompt_length, call.edits, masks, torch.tensor([0, -1]))
    given = call.start, call.drafts, call.positions, call.slots, sampling
    named: dict[str, Any] = {"method": "synthetic", "acceptance_rates": torch.ones(2)}
    found = verify(call.logits, *given, **named, edits=inputs)
    assert found.count.tolist() == [3, 3]
    assert found.empty is not None
    assert found.empty.tolist() == [[False, True, False], [False, False, False]]
    assert verify(call.logits, *given, **named).empty is None


def test_a_row_is_empty_if_no_id_can_be_drawn() -> None:
    rows = [[nan, -inf], [nan, 0.0], [-inf, -inf], [inf, -inf], [nan, nan]]
    assert empty_rows(torch.tensor(rows)).tolist() == [True, False, True, False, True]
    assert empty_rows(torch.empty(0, 3)).tolist() == []


# --- arguments ------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "error", "said"),
    [
        ("logits", torch.zeros(12, 0), ValueError, "logits has no columns"),
        ("start", torch.zeros(4), TypeError, "logits_start has dtype torch.float32"),
        ("drafts", torch.zeros(2, 3).long(), ValueError, r"\(2, 3\); expected \[B, K\] with B=3"),
        ("positions", torch.arange(3), ValueError, r"positions has shape \(3,\); .*R=12"),
        ("slots", torch.arange(3).int(), TypeError, "slots has dtype torch.int32"),
        ("history", torch.zeros(3, 4), TypeError, "history has dtype torch.float32"),
        (
            "prompt_length",
            torch.arange(9),
            ValueError,
            r"prompt_length has shape \(9,\); .*slots=5",
        ),
        ("edits", None, TypeError, "edits must be an Edits, not NoneType"),
    ],
)
def test_a_wrong_argument_is_named(
    name: str, value: Any, error: type[Exception], said: str
) -> None:
    call = example(ASKS["logit_bias"])
    setattr(call, name, value)
    with pytest.raises(error, match=f"^edit_logits: .*{said}"):
        call.run()


@pytest.mark.parametrize(
    ("field", "value", "error", "said"),
    [
        ("repetition_penalty", torch.ones(3), ValueError, r"has shape \(3,\); .*slots=5"),
        ("presence_penalty", torch.ones(5).double(), TypeError, "has dtype torch.float64"),
        ("bias", torch.ones(5, 1), ValueError, r"has shape \(5, 1\); .*slots=5, E=2"),
        ("bias_ids", torch.ones(5, 2), TypeError, "has dtype torch.float32; expected torch.int64"),
        ("min_length", torch.ones(5), TypeError, "has dtype torch.float32; expected torch.int64"),
        ("bad_words", torch.ones(5, 2).long(), ValueError, r"expected \[slots, W, L\]"),
        ("stop_ids", None, TypeError, "must be a tensor, not NoneType"),
    ],
)
def test_a_wrong_edit_is_named(field: str, value: Any, error: type[Exception], said: str) -> None:
    call = example(ASKS["logit_bias"])
    call.edits = call.edits._replace(**{field: value})
    with pytest.raises(error, match=rf"^edit_logits: edits\.{field} .*{said}"):
        call.run()


def test_the_examples_in_docstrings_run() -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0
