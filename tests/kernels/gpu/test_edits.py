"""Edits as the kernels apply them, against `edit_logits`: bit for bit, on every row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, nan
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec_kernels import Edits, edit_logits
from specdec_kernels.gpu.edit_values import edited, edited_ids, row_edits
from specdec_kernels.gpu.edits import apply_edits, prepare_edits

VOCAB = 70  # three words, the last of them short
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Asked = dict[str, Any]
Request = tuple[list[int], list[int], list[int], Asked]  # prompt, output, drafts, what it asks

EVERY: Asked = {
    "bias": {0: 3.0, 33: -1.5, 69: 2.0},
    "allowed": [*range(1, 40), 69],
    "stop": [2, 34],
    "least": 8,
    "repetition": 1.7,
    "frequency": 0.3,
    "presence": -0.7,
    "words": [[5], [1, 2, 3], [2, 9, 31], [4, 4, 1]],
}
ALONE: dict[str, Asked] = {
    "bias": {"bias": EVERY["bias"]},
    "allowed ids": {"allowed": EVERY["allowed"]},
    "least length": {"stop": EVERY["stop"], "least": 8},
    "repetition": {"repetition": 1.7},
    "frequency": {"frequency": 0.3},
    "presence": {"presence": -0.7},
    "bad words": {"words": EVERY["words"]},
}
PROMPT, OUTPUT, DRAFTS = [4, 5, 4, 69], [1, 2, 1, 33, 1], [2, 9, 1]


def table(rows: Sequence[Sequence[float]], filler: float, dtype: torch.dtype) -> Tensor:
    width = max((len(r) for r in rows), default=0)
    padded = [[*r, *[filler] * (width - len(r))] for r in rows]
    return torch.tensor(padded, dtype=dtype).reshape(len(rows), width)


class Call:
    """Arguments of one call; request b lies in slot `slots[b]`, -1 being padding."""

    def __init__(
        self,
        requests: Sequence[Request],
        device: torch.device,
        *,
        vocab: int = VOCAB,
        slots: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        order = list(range(len(requests))) if slots is None else list(slots)
        places = max([0, *order]) + 2
        asked: list[Asked] = [{"repetition": 9.0} for _ in range(places)]
        known: list[list[int]] = [[] for _ in range(places)]
        prompts = [0] * places
        counts, positions = [], []
        for slot, (prompt, output, drafts, wants) in zip(order, requests, strict=True):
            counts.append(len(drafts) + 1)
            positions += [len(prompt) + len(output) + i for i in range(len(drafts) + 1)]
            asked[slot], known[slot], prompts[slot] = wants, [*prompt, *output], len(prompt)
        words = [a.get("words", []) for a in asked]
        length = max((len(t) for w in words for t in w), default=0)
        bad = torch.full((places, max(map(len, words)), length), -1, dtype=torch.int64)
        for slot, mine in enumerate(words):
            for i, tokens in enumerate(mine):
                bad[slot, i, length - len(tokens) :] = torch.tensor(tokens)

        def numbers(name: str, default: float) -> Tensor:
            return torch.tensor([float(a.get(name, default)) for a in asked])

        def ids(name: str) -> Tensor:
            return table([list(a.get(name, ())) for a in asked], -1, torch.int64)

        edits = Edits(
            repetition_penalty=numbers("repetition", 1.0),
            presence_penalty=numbers("presence", 0.0),
            frequency_penalty=numbers("frequency", 0.0),
            bias_ids=ids("bias"),
            bias=table([list(a.get("bias", {}).values()) for a in asked], 0.0, torch.float32),
            allowed_ids=ids("allowed"),
            stop_ids=ids("stop"),
            min_length=torch.tensor([a.get("least", 0) for a in asked]),
            bad_words=bad,
        )
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(sum(counts), vocab, generator=generator) * 3
        self.logits = logits.to(device, dtype)
        self.chains = [
            x.to(device)
            for x in (
                torch.tensor([0, *counts]).cumsum(0),
                table([d for _, _, d, _ in requests], -1, torch.int64),
                torch.tensor(positions, dtype=torch.int64),
                torch.tensor(order, dtype=torch.int64),
            )
        ]
        # what lies past the known tokens is stale, and must not be read
        width = max(map(len, known)) + 2
        self.named: dict[str, Any] = {
            "history": torch.tensor([[*k, *[3] * (width - len(k))] for k in known]).to(device),
            "prompt_length": torch.tensor(prompts).to(device),
            "edits": Edits(*(x.to(device) for x in edits)),
        }

    def expected(self) -> Tensor:
        return edit_logits(self.logits.clone(), *self.chains, **self.named)

    def run(self, *, chained: bool = True, **grammar: Tensor) -> Tensor:
        chains: list[Any] = [*(self.chains[:2] if chained else (None, None)), *self.chains[2:]]
        named: dict[str, Any] = {**self.named, **grammar}
        return apply_edits(self.logits, prepare_edits(self.logits, *chains, **named), *chains)


def same(one: Tensor, other: Tensor) -> bool:
    """Equal bit for bit, but for what kind of NaN a NaN is."""
    bits = [x.where(x == x, 0.0).view(torch.int32) for x in (one, other)]
    return torch.equal(*bits) and torch.equal(one.isnan(), other.isnan())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*ALONE, "all"])
def test_every_row_is_edited_as_the_reference_does(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    asked = EVERY if name == "all" else ALONE[name]
    requests: list[Request] = [(PROMPT, OUTPUT[:3], DRAFTS, asked), (PROMPT, OUTPUT, DRAFTS, {})]
    call = Call([*requests, (PROMPT[:1], OUTPUT, [], asked)], device, dtype=dtype)
    edited = call.run()
    assert same(edited, call.expected())
    changed = (edited != call.logits.float()).any(-1)
    assert changed[:4].any()
    assert not changed[4:8].any()


def test_edits_of_a_row_that_is_nan_or_infinite_are_those_of_the_reference(
    device: torch.device,
) -> None:
    call = Call([(PROMPT, OUTPUT, DRAFTS, {**EVERY, "allowed": []})], device)
    odd = torch.tensor([nan, inf, -inf, -0.0], device=device)
    call.logits[:, :68] = odd.repeat(17)
    assert same(call.run(), call.expected())


def test_a_bias_leaves_zeros_of_other_ids_their_sign(device: torch.device) -> None:
    call = Call([([4], [1], [], {"bias": {0: 1.0}, "words": [[9, 1]]})], device)
    call.logits[:] = -0.0
    assert same(call.run(), call.expected())


def test_drafts_and_history_that_are_no_ids_match_nothing(device: torch.device) -> None:
    call = Call([([4, -1, 900], [2**33, 2], [-1, 7, 2**40], EVERY)], device)
    assert same(call.run(), call.expected())


def test_padding_and_rows_past_the_last_draft_are_left_alone(device: torch.device) -> None:
    request: Request = (PROMPT, OUTPUT, DRAFTS, EVERY)
    call = Call([request, request], device, slots=[2, -1])
    call.chains[1] = call.chains[1][:, :1]
    edited = call.run()
    assert same(edited, call.expected())
    assert same(edited[2:], call.logits[2:])


def test_ids_beyond_the_vocabulary_are_ignored(device: torch.device) -> None:
    asked = {
        "bias": {50: 1.0, 90: 1.0},
        "stop": [90],
        "least": 90,
        "words": [[90], [1, 90]],
        "allowed": [90],
    }
    call = Call([(PROMPT, OUTPUT, [], asked)], device)
    assert same(call.run(), call.expected())
    assert (call.run() == -inf).all()


@pytest.mark.parametrize("vocab", [1, 31, 32, 4097 + 32])
def test_vocabularies_of_any_size(vocab: int, device: torch.device) -> None:
    asked = {**EVERY, "bias": {0: 1.0, vocab - 1: 2.0}, "allowed": []}
    context = [i * 7 % vocab for i in range(12)]
    call = Call([(context, [vocab - 1, 0], [0, vocab - 1], asked)], device, vocab=vocab)
    assert same(call.run(), call.expected())


def test_long_histories_are_read_in_parts(device: torch.device) -> None:
    tokens = torch.randint(0, 500, (9000,)).tolist()
    asked = {"repetition": 1.3, "frequency": 0.01, "presence": 0.5}
    requests: list[Request] = [
        (tokens[:2500], tokens[2500:], [3, 4], asked),
        (tokens[:100], tokens[100:1300], [], {**asked, "repetition": 1.0}),
    ]
    call = Call(requests, device, vocab=5000)
    assert same(call.run(), call.expected())


def test_lists_longer_than_a_block_are_applied_whole(device: torch.device) -> None:
    asked = {
        "bias": {i: i / 8 for i in range(0, 600, 2)},
        "allowed": list(range(300, 900)),
        "stop": list(range(301, 700, 3)),
        "least": 99,
        "words": [[i, i + 1] for i in range(0, 800, 5)],
    }
    call = Call([([4], [355, 700], [300, 795], asked)], device, vocab=1000)
    edited = call.run()
    assert same(edited, call.expected())
    assert (edited[:, [701, 301, 796]] == -inf).tolist() == [
        [True, True, False],
        [False, True, False],
        [False, True, True],
    ]


def test_a_request_is_a_row_where_there_are_no_chains(device: torch.device) -> None:
    requests: list[Request] = [(PROMPT, OUTPUT, [], EVERY), (PROMPT, OUTPUT[:2], [], {})]
    call = Call([*requests, (PROMPT, OUTPUT[:4], [], EVERY)], device, slots=[1, 3, 0])
    assert same(call.run(chained=False), call.expected())


def packed(allowed: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    words = torch.zeros(len(allowed), 3, dtype=torch.int64)
    for row, ids in enumerate(allowed):
        for x in ids:
            words[row, x // 32] |= 1 << x % 32
    return words.to(torch.int32).to(device)


def test_a_grammar_excludes_what_the_mask_of_the_row_lacks(device: torch.device) -> None:
    asked = {"bias": {31: 2.0, 40: 2.0}}
    call = Call([(PROMPT, OUTPUT, DRAFTS[:1], {}), (PROMPT, OUTPUT, DRAFTS[:1], asked)], device)
    allowed = [[0, 31, 69], [1], [31, 32], [40, 41]]
    expected = call.expected()
    kept = torch.zeros(4, VOCAB, dtype=torch.bool, device=device)
    for row, ids in enumerate(allowed):
        kept[row, ids] = True
    assert same(call.run(grammar=packed(allowed, device)), expected.where(kept, -inf))
    kept[:2] = True
    masks = packed([[], *allowed[2:]], device)
    start = torch.tensor([-1, 1], device=device)
    edited = call.run(grammar=masks, grammar_start=start)
    assert same(edited, expected.where(kept, -inf))


def test_rows_may_lie_apart_in_memory(device: torch.device) -> None:
    call = Call([(PROMPT, OUTPUT, DRAFTS, EVERY)], device)
    wide = torch.zeros(4, VOCAB + 5, device=device)
    wide[:, :VOCAB] = call.logits
    expected, call.logits = call.expected(), wide[:, :VOCAB]
    call.named["history"] = call.named["history"].repeat_interleave(2, 1)[:, ::2]
    assert same(call.run(), expected)


def test_a_call_may_have_no_requests_and_requests_no_rows(device: torch.device) -> None:
    assert Call([], device).run().shape == (0, VOCAB)
    call = Call([(PROMPT, OUTPUT, [], EVERY)], device)
    call.chains[0], call.chains[2] = torch.zeros_like(call.chains[0]), call.chains[2][:0]
    call.logits = call.logits[:0]
    assert call.run().shape == (0, VOCAB)


def test_the_edits_of_a_row_do_not_depend_on_the_rest_of_the_call(device: torch.device) -> None:
    one: Request = (PROMPT, OUTPUT, DRAFTS, EVERY)
    others: list[Request] = [(OUTPUT * 3, PROMPT, DRAFTS * 2, ALONE["repetition"])]
    alone, among = Call([one], device), Call([*others, one], device)
    among.logits[-4:] = alone.logits
    assert same(among.run()[-4:], alone.run())


@triton.jit  # type: ignore[untyped-decorator]
def write_groups(  # type: ignore[no-untyped-def]
    logits, stride, groups, tables, request, out, N: tl.constexpr
):
    """A group of each of N rows of a request, read as a whole and, into out[1], id by id."""
    column = tl.arange(0, N)[:, None]
    group = tl.load(groups + tl.arange(0, N))
    ids = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(logits + column * stride + ids)
    mine = row_edits(tables, request, column)
    at = column * 32 + tl.arange(0, 32)[None, :]
    tl.store(out + at, edited(x, group, mine))
    tl.store(out + N * 32 + at, edited_ids(x, ids, mine))


def test_a_group_of_each_row_of_a_request_can_be_edited_at_once(device: torch.device) -> None:
    call = Call([(PROMPT, OUTPUT, DRAFTS, {}), (PROMPT, OUTPUT, DRAFTS, EVERY)], device, vocab=96)
    groups = torch.tensor([2, 0, 1, 0], device=device)
    allowed = torch.randint(-(2**31), 2**31, (8, 3), dtype=torch.int32, device=device)
    tables = prepare_edits(call.logits, *call.chains, **call.named, grammar=allowed)
    out = torch.empty(2, 4, 32, device=device)
    logits = call.logits[4:]
    rows = torch.arange(4, device=device)
    write_groups[(1,)](logits, 96, groups, tables, 1, out, N=4)
    expected = call.run(grammar=allowed)[4:].view(4, 3, 32)[rows, groups]
    assert same(out[0], expected)
    assert same(out[1], expected)
    write_groups[(1,)](logits, 96, groups, None, 1, out, N=4)
    assert same(out[1], logits.view(4, 3, 32)[rows, groups])


few = st.integers(0, 3)  # so that tokens repeat
ids = st.integers(0, VOCAB - 1)
numbers = st.floats(-3, 3, width=32)
wishes = st.fixed_dictionaries(
    {},
    optional={
        "repetition": st.floats(0.25, 4, width=32),
        "presence": numbers,
        "frequency": numbers,
        "bias": st.dictionaries(ids, numbers, max_size=4),
        "allowed": st.lists(ids, max_size=5),
        "stop": st.lists(ids, max_size=3),
        "least": st.integers(0, 12),
        "words": st.lists(st.lists(few, min_size=1, max_size=4), max_size=4),
    },
)
requests_of = st.tuples(
    st.lists(few, min_size=1, max_size=4),
    st.lists(few, max_size=6),
    st.lists(st.one_of(few, ids), max_size=3),
    wishes,
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    asked=st.lists(requests_of, min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_whatever_requests_ask_rows_are_those_of_the_reference(
    asked: list[Request],
    dtype: torch.dtype,
    seed: int,
    data: st.DataObject,
    device: torch.device,
) -> None:
    slots = data.draw(st.permutations(range(len(asked))))
    call = Call(asked, device, slots=slots, dtype=dtype, seed=seed)
    assert same(call.run(), call.expected())


def test_the_comparison_sees_edits_of_another_row(device: torch.device) -> None:
    pick: Callable[[Tensor], Tensor] = lambda x: x[[1, 0, 2, 3]]  # noqa: E731
    call = Call([(PROMPT, OUTPUT, DRAFTS, ALONE["frequency"])], device)
    expected = call.expected()
    assert not same(pick(call.run() - call.logits) + call.logits, expected)
