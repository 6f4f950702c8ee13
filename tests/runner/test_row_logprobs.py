"""Which row of logits speaks for which token: of a step's output, and of a prompt."""

from __future__ import annotations

from collections.abc import Sequence, Set
from math import inf
from typing import Any, NamedTuple

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

import specdec_kernels
from specdec.logprobs import LogprobArrays, PromptLogprobLog
from specdec.runner import row_logprobs
from specdec.runner.row_logprobs import (
    PromptChunk,
    RowLogprobs,
    prompt_logprobs,
    prompt_rows,
    top_count,
)
from specdec.types import Step
from specdec_kernels import Sampling
from specdec_kernels.logprobs import token_logprobs

V, K = 11, 3
Ints = NDArray[np.int64]


class Emitted(NamedTuple):
    """What a step gave: the first `kept` of `tokens` stand."""

    tokens: Ints
    kept: Ints


def step_of(*counts: int) -> Step:
    """Requests with so many rows of logits each; the batch is padded."""
    batch = 1 << (len(counts) - 1).bit_length()
    start = np.cumsum([0, *counts, *[0] * (batch - len(counts))])
    unread: Any = dict.fromkeys((field.name for field in attrs.fields(Step)), None)
    return Step(**{**unread, "logits_start": torch.from_numpy(start)})


def step_with(drafts: list[list[int]]) -> Step:
    return step_of(*(len(d) + 1 for d in drafts))


def logits_for(step: Step, seed: int = 0, best: Sequence[int] = ()) -> Tensor:
    """Random rows, the last two padding; `best` makes an id the likeliest of each row."""
    make = torch.Generator().manual_seed(seed)
    logits = torch.randn(int(step.logits_start[-1]) + 2, V, generator=make)
    for row, token in enumerate(best):
        logits[row, token] = 9.0
    return logits


def run(
    drafts: list[list[int]],
    logits: Tensor,
    wanted: list[int],
    *,
    method: str = "coupled",
    temperature: float = 0.0,
    stops: Set[int] = frozenset(),
    room: int = 9,
) -> tuple[dict[int, LogprobArrays], Emitted]:
    """Keep, verify, cut and take; between keep and take every row is spoilt by an edit."""
    step = step_with(drafts)
    rows = RowLogprobs()
    rows.keep(step, logits, np.array(wanted))
    batch = len(step.logits_start) - 1
    table = [[*d, *[-1] * (K - len(d))] for d in drafts] + [[-1] * K] * (batch - len(drafts))
    verified = specdec_kernels.verify(
        logits,
        step.logits_start,
        torch.tensor(table),
        torch.arange(len(logits)) + 4,
        torch.tensor([*range(len(drafts)), *[-1] * (batch - len(drafts))]),
        Sampling(
            stream=torch.arange(batch),
            temperature=torch.full((batch,), temperature),
            top_k=torch.zeros(batch, dtype=torch.int64),
            top_p=torch.ones(batch),
            min_p=torch.zeros(batch),
        ),
        method=method,
    )
    logits.fill_(-inf)
    tokens = verified.tokens[: len(drafts)].numpy()
    count = verified.count[: len(drafts)].numpy()
    kept = np.minimum(count, room)
    for b, row in enumerate(tokens.tolist()):
        ends = [j + 1 for j, token in enumerate(row) if token in stops]
        kept[b] = min([kept[b], *ends])
    return rows.take(tokens, kept, verified.rows), Emitted(tokens, kept)


def exact(row: Tensor, tokens: list[int]) -> list[float]:
    return [float(row.double().log_softmax(-1)[token]) for token in tokens]


def test_every_emitted_token_is_judged_by_its_own_row() -> None:
    # all drafts stand, and a bonus token; the second draft falls, and is replaced; no drafts
    drafts: list[list[int]] = [[5, 6], [7, 8, 9], []]
    logits = logits_for(step_with(drafts), best=[5, 6, 10, 7, 0, 9, 9, 4])
    raw = logits.clone()
    found, emitted = run(drafts, logits, [0, 0, 0])
    assert emitted.tokens.tolist() == [[5, 6, 10, -1], [7, 0, -1, -1], [4, -1, -1, -1]]
    assert {b: e.ids[:, 0].tolist() for b, e in found.items()} == {0: [5, 6, 10], 1: [7, 0], 2: [4]}
    for b, rows in enumerate([[0, 1, 2], [3, 4], [7]]):
        own = found[b].ids[:, 0].tolist()
        expected = [exact(raw[row], [token])[0] for row, token in zip(rows, own, strict=True)]
        assert found[b].logprobs[:, 0].tolist() == pytest.approx(expected, abs=1e-5)
        assert found[b].ranks[:, 0].tolist() == [1] * len(rows)


@settings(max_examples=60, deadline=None)
@given(
    drafts=st.lists(st.lists(st.integers(0, V - 1), max_size=K), min_size=1, max_size=5),
    method=st.sampled_from(["coupled", "standard", "block"]),
    temperature=st.sampled_from([0.0, 0.7, 3.0]),
    stops=st.sets(st.integers(0, V - 1), max_size=3),
    room=st.integers(1, 5),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_rows_of_rejected_drafts_are_dropped_not_shifted(
    drafts: list[list[int]],
    method: str,
    temperature: float,
    stops: set[int],
    room: int,
    seed: int,
    data: st.DataObject,
) -> None:
    wanted = data.draw(
        st.lists(st.sampled_from([-1, 0, 2, V]), min_size=len(drafts), max_size=len(drafts))
    )
    step = step_with(drafts)
    logits = logits_for(step, seed)
    raw = logits.clone()
    found, emitted = run(
        drafts, logits, wanted, method=method, temperature=temperature, stops=stops, room=room
    )
    assert set(found) == {b for b, n in enumerate(wanted) if n >= 0}
    for b, entries in found.items():
        kept, n = int(emitted.kept[b]), wanted[b]
        assert entries.ids.shape == (kept, 1 + n), "as many entries as tokens stand after the cut"
        for j in range(kept):
            row = raw[int(step.logits_start[b]) + j]  # a chain: token j continues row j
            ids = entries.ids[j].tolist()
            assert ids == [int(emitted.tokens[b, j]), *row.argsort(descending=True)[:n].tolist()]
            assert entries.logprobs[j].tolist() == pytest.approx(exact(row, ids), abs=1e-5)
            assert entries.ranks[j].tolist() == [int((row >= row[i]).sum()) for i in ids]


def test_tokens_after_a_stop_have_no_entries() -> None:
    drafts = [[5, 6, 7], [8, 9]]
    logits = logits_for(step_with(drafts), best=[5, 6, 7, 0, 8, 9, 1])
    found, emitted = run(drafts, logits, [1, 1], stops={6, 8})
    assert (emitted.tokens >= 0).sum(axis=1).tolist() == [4, 3]
    assert emitted.kept.tolist() == [2, 1]
    assert [len(found[b]) for b in range(2)] == [2, 1]


def test_a_verdict_that_skips_rows_is_followed() -> None:
    step = step_of(1, 3)
    logits = logits_for(step)
    rows = RowLogprobs()
    rows.keep(step, logits, np.array([-1, 0]))
    tree = torch.tensor([[0, -1], [1, 3]])
    found = rows.take(np.array([[1, -1], [4, 2]]), np.array([1, 2]), tree)
    expected = exact(logits[1], [4]) + exact(logits[3], [2])
    assert found[1].logprobs[:, 0].tolist() == pytest.approx(expected, abs=1e-5)


class Watched:
    """Logits that tell which rows were copied."""

    def __init__(self, logits: Tensor) -> None:
        self.logits, self.device = logits, logits.device
        self.copied: list[int] = []

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        self.copied += rows.tolist()
        return self.logits.index_select(dim, rows)


def test_only_rows_of_requests_that_ask_are_copied() -> None:
    step = step_of(3, 2, 1, 2)
    logits: Any = Watched(logits_for(step))
    RowLogprobs().keep(step, logits, np.array([-1, 0, -1, 3]))
    assert logits.copied == [3, 4, 6, 7]


def test_nothing_is_touched_if_nobody_asks() -> None:
    untouched: Any = None
    rows = RowLogprobs()
    rows.keep(untouched, untouched, np.array([-1, -1]))
    assert rows.take(np.array([[1], [2]]), np.array([1, 1]), untouched) == {}


def test_what_was_kept_is_forgotten_after_one_step() -> None:
    step = step_of(1)
    rows = RowLogprobs()
    rows.keep(step, logits_for(step), np.array([0]))
    given = np.array([[1]]), np.array([1]), torch.tensor([[0]])
    assert len(rows.take(*given)) == 1
    assert rows.take(*given) == {}
    rows.keep(step, logits_for(step), np.array([0]))
    rows.keep(step, logits_for(step), np.array([-1]))
    assert rows.take(*given) == {}


def test_a_request_without_a_token_has_no_entries() -> None:
    step = step_of(2, 1, 0)  # the last one's chunk is not the last of its prompt
    rows = RowLogprobs()
    rows.keep(step, logits_for(step), np.array([0, 0, 0]))
    found = rows.take(
        np.array([[-1, -1], [3, -1], [-1, -1]]),
        np.array([0, 1, 0]),
        torch.tensor([[-1, -1], [2, -1], [-1, -1], [-1, -1]]),
    )
    assert set(found) == {1}


def test_what_is_asked_for_becomes_a_number_of_tokens() -> None:
    assert [top_count(x, 30) for x in (None, 0, 5, 30, 31, -1)] == [-1, 0, 5, 30, 30, 30]


# --- prompts --------------------------------------------------------------


def chunks_of(length: int, size: int) -> list[tuple[int, int]]:
    """First position and number of rows of every chunk."""
    return [(first, min(size, length - first)) for first in range(0, length, size)]


def model(tokens: Ints) -> Tensor:
    """Rows of logits that depend on all tokens up to their own, as a target's do."""
    context = (np.cumsum(tokens + 1) * 2654435761) % 1009
    ids = np.arange(V)
    return torch.from_numpy(np.sin(context[:, None] * 0.37 + ids * 1.7).astype(np.float32) * 3)


def prefill(
    prompt: Ints, size: int, n: int, log: PromptLogprobLog, then: Ints | None = None
) -> None:
    """Prefill in chunks, with what was emitted before, and keep what is said of the prompt."""
    tokens = prompt if then is None else np.concatenate([prompt, then])
    logits = model(tokens)
    for first, count in chunks_of(len(tokens), size):
        chunk = PromptChunk(request=4, prompt=prompt, first=first, rows=count, have=len(log), n=n)
        requests, rows = prompt_rows([chunk])
        assert set(requests) <= {4}
        # two rows of padding follow
        read = torch.from_numpy(np.pad(rows, (0, 2)))
        found = prompt_logprobs([chunk], logits[first : first + count][read])
        assert set(found) == set(requests)
        if found:
            log.append(found[4])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, V - 1), min_size=1, max_size=12), st.sampled_from([0, 3, V]))
def test_every_chunk_size_gives_the_entries_of_one_chunk(tokens: list[int], n: int) -> None:
    prompt = np.array(tokens)
    whole = PromptLogprobLog(n)
    prefill(prompt, len(prompt), n, whole)
    assert len(whole) == len(prompt) - 1
    for position, entry in enumerate(whole.as_dicts(None)[1:]):
        following = tokens[position + 1]
        assert entry is not None
        assert next(iter(entry)) == following
        expected = exact(model(prompt)[position], [following])[0]
        assert entry[following].logprob == pytest.approx(expected, abs=1e-5)
    for size in range(1, len(prompt)):
        log = PromptLogprobLog(n)
        prefill(prompt, size, n, log)
        assert log.as_dicts(None) == whole.as_dicts(None)


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 9),
    size=st.integers(1, 12),
    again=st.integers(1, 12),
    emitted=st.integers(0, 4),
)
def test_nothing_is_added_twice_after_a_preemption(
    length: int, size: int, again: int, emitted: int
) -> None:
    prompt = np.arange(length) % V
    log = PromptLogprobLog(1)
    prefill(prompt, size, 1, log)
    before = log.as_dicts(None)
    prefill(prompt, again, 1, log, then=np.full(emitted, 3))
    assert log.as_dicts(None) == before
    assert len(before) == length


@pytest.mark.parametrize("reached", range(1, 7))
def test_a_prefill_that_was_broken_off_is_completed_by_the_next(reached: int) -> None:
    prompt = np.array([3, 1, 4, 1, 5, 9, 2])
    whole, log = PromptLogprobLog(0), PromptLogprobLog(0)
    prefill(prompt, 7, 0, whole)
    chunk = PromptChunk(request=0, prompt=prompt, first=0, rows=reached, have=0, n=0)
    log.append(prompt_logprobs([chunk], model(prompt))[0])
    assert len(log) == reached
    prefill(prompt, 4, 0, log)
    assert log.as_dicts(None) == whole.as_dicts(None)


def test_the_rows_of_several_prompts_follow_each_other() -> None:
    first, second, third = np.array([1, 2, 3]), np.array([4]), np.array([5, 6, 7, 8])
    chunks = [
        PromptChunk(request=1, prompt=first, first=0, rows=3, have=0, n=0),
        PromptChunk(request=2, prompt=second, first=0, rows=1, have=0, n=0),
        PromptChunk(request=5, prompt=third, first=2, rows=2, have=2, n=2),
    ]
    requests, rows = prompt_rows(chunks)
    assert requests.tolist() == [1, 1, 5]
    assert rows.tolist() == [0, 1, 0]
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(1))
    found = prompt_logprobs(chunks, logits)
    assert set(found) == {1, 5}
    assert found[1].ids.tolist() == [[2], [3]]
    expected = [exact(logits[i], [t])[0] for i, t in enumerate([2, 3, 8])]
    given = [*found[1].logprobs[:, 0], *found[5].logprobs[:, 0]]
    assert given == pytest.approx(expected, abs=1e-5)
    assert found[5].ids.shape == (1, 3)


def test_no_prompts_need_no_rows() -> None:
    for found in prompt_rows([]):
        assert len(found) == 0
        assert found.dtype == np.int64
    assert prompt_logprobs([], torch.zeros(0, V)) == {}


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = np.arange(20) % V
    prompt.flags.writeable = False
    whole, parts = PromptLogprobLog(2), PromptLogprobLog(2)
    prefill(prompt, 20, 2, whole)
    sizes = []
    real = token_logprobs

    def watched(logits: Tensor, tokens: Tensor, n: int) -> Any:
        sizes.append(len(tokens))
        return real(logits, tokens, n)

    monkeypatch.setattr(row_logprobs, "token_logprobs", watched)
    monkeypatch.setattr(row_logprobs, "_ROWS_AT_ONCE", 8)
    prefill(prompt, 20, 2, parts)
    assert sizes == [8, 8, 3]
    assert parts.as_dicts(None) == whole.as_dicts(None)
