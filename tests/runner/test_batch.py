"""The padded layout of a step, and what its fields say whenever a speculator is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from specdec import LLM, Capabilities, Draft, SamplingParams, Speculator, Step, hookimpl
from specdec.runner.batch import build, padded_batch
from specdec.runner.isolation import only, only_outputs
from specdec.runner.scheduler import Schedule
from specdec.runner.sequence import Sequence
from specdec.runner.state import Slots
from specdec.testing import (
    BigramSpeculator,
    RecordingSpeculator,
    emitted,
    tiny_target,
    toy_target,
)
from specdec.types import HostStep, RequestChanges, TargetOutputs

CPU = torch.device("cpu")


@pytest.fixture
def slots(new_sequence: Callable[..., Sequence]) -> Slots:
    """Slot 0 decodes with two drafts, 2 decodes plainly, 1 and 3 are in their prompts."""
    slots = Slots(5, 32, 4, 3, CPU)
    for slot, (length, done) in enumerate([(6, 5), (9, 4), (3, 2), (2, 0)]):
        tokens = [10 * (slot + 1) + i for i in range(length)]
        slots.place(slot, new_sequence(tokens, max_length=20, stream=slot, blocks=[slot + 1]))
        slots.computed[slot] = done
    slots.drafts[0] = [77, 78, 79]
    slots.num_drafts[0] = 2
    return slots


def flags(*values: bool) -> Any:
    return np.array(values, dtype=bool)


@pytest.fixture
def schedule() -> Schedule:
    return Schedule(
        slots=np.array([0, 2, 1, 3]),
        rows=np.array([3, 1, 4, 2]),
        is_prefill=flags(False, False, True, True),
        samples=flags(True, True, False, True),
        is_chunk=flags(False, False, True, False),
    )


def part(schedule: Schedule, requests: int) -> Schedule:
    """The first requests of a schedule."""
    return Schedule(*(getattr(schedule, f.name)[:requests] for f in attrs.fields(Schedule)))


@pytest.mark.parametrize(("requests", "padded"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (9, 16)])
def test_batches_are_padded_to_powers_of_two(requests: int, padded: int) -> None:
    assert padded_batch(requests) == padded


def test_rows_lie_one_request_after_the_other(slots: Slots, schedule: Schedule) -> None:
    batch = build(schedule, slots, device=CPU)
    step = batch.step
    assert step.tokens.tolist() == [15, 77, 78, 32, 24, 25, 26, 27, 40, 41]
    assert step.positions.tolist() == [5, 6, 7, 2, 4, 5, 6, 7, 0, 1]
    assert step.query_start.tolist() == [0, 3, 4, 8, 10]
    assert step.num_drafts.tolist() == [2, 0, 0, 0]
    # every row of those that decode, the last one of a prompt's last chunk, none of a chunk
    assert step.logits_rows.tolist() == [0, 1, 2, 3, 9]
    assert step.logits_start.tolist() == [0, 3, 4, 4, 5]
    assert step.predicted.tolist() == [6, 7, 8, 3, 2]
    assert batch.drafts.tolist() == [[77, 78], [-1] * 2, [-1] * 2, [-1] * 2]
    assert batch.rows.context == [8, 3, 8, 2]
    assert batch.rows.block_tables[:, 0].tolist() == [1, 3, 2, 4]
    # how the target computes them, which is not always as a prompt
    assert batch.rows.is_prefill == [False, False, True, False]
    assert step.is_prefill.tolist() == [False, False, True, True]


def test_rows_that_are_only_read_come_after_those_that_are_sampled_from(
    slots: Slots, schedule: Schedule
) -> None:
    also = np.array([2, 2, 3]), np.array([0, 3, 0])
    plain = build(schedule, slots, device=CPU).step
    step = build(schedule, slots, device=CPU, also_read=also).step
    assert step.logits_rows.tolist() == [*plain.logits_rows.tolist(), 4, 7, 8]
    assert step.predicted.tolist() == [*plain.predicted.tolist(), 5, 8, 1]
    assert step.logits_start.tolist() == plain.logits_start.tolist()


@pytest.mark.parametrize(
    ("params", "truncates"),
    [
        (SamplingParams(), False),
        (SamplingParams(top_k=-1), False),
        (SamplingParams(top_k=4), True),
        (SamplingParams(top_p=0.9), True),
        (SamplingParams(min_p=0.1), True),
        (SamplingParams(temperature=0, top_k=4, top_p=0.9, min_p=0.1), False),
    ],
    ids=["plain", "off", "top-k", "top-p", "min-p", "greedy"],
)
def test_a_step_says_whether_any_of_its_requests_truncates(
    slots: Slots,
    schedule: Schedule,
    new_sequence: Callable[..., Sequence],
    params: SamplingParams,
    truncates: bool,
) -> None:
    assert not build(schedule, slots, device=CPU).step.truncates
    slots.place(3, new_sequence([1, 2], params=params))
    assert build(schedule, slots, device=CPU).step.truncates == truncates
    assert not build(part(schedule, 3), slots, device=CPU).step.truncates
    # nothing of it stays once the slot is somebody else's
    slots.place(3, new_sequence([1, 2], params=SamplingParams()))
    assert not build(schedule, slots, device=CPU).step.truncates


def test_padding_owns_no_rows(slots: Slots, schedule: Schedule) -> None:
    step = build(part(schedule, 3), slots, least_rows=8, device=CPU).step
    assert step.batch == 4
    assert step.slots.tolist() == [0, 2, 1, -1]
    assert step.query_start.tolist() == [0, 3, 4, 8, 8]
    assert step.logits_start.tolist() == [0, 3, 4, 4, 4]
    assert step.samples.tolist() == [True, True, False, False]
    assert len(step.tokens) == 8
    step = build(part(schedule, 1), slots, least_rows=8, device=CPU).step
    assert (step.batch, len(step.tokens), step.query_start.tolist()) == (1, 8, [0, 3])
    assert step.tokens.tolist()[3:] == [0] * 5


def test_a_request_alone_is_a_step_of_its_own(slots: Slots, schedule: Schedule) -> None:
    whole = build(schedule, slots, least_rows=16, device=CPU).step
    host = HostStep(schedule.slots, np.array([3, 2, 1, 0]), slots.history, slots.length)
    numbered = torch.arange(4)
    whole = attrs.evolve(whole, valid_rows=numbered, next_token=numbered, k=numbered, host=host)
    hidden = torch.arange(len(whole.tokens))[:, None].double()
    outputs = TargetOutputs(captured={2: hidden}, post_norm=hidden + 0.5)
    logits = torch.arange(len(whole.logits_rows))
    for request in range(whole.batch):
        alone = only(whole, request)
        first, last = whole.query_start[request : request + 2].tolist()
        assert alone.batch == 1
        assert alone.query_start.tolist() == [0, last - first]
        assert alone.tokens.tolist() == whole.tokens[first:last].tolist()
        assert alone.positions.tolist() == whole.positions[first:last].tolist()
        for name in ("slots", "num_drafts", "is_prefill", "samples", "valid_rows", "next_token"):
            assert (
                getattr(alone, name).tolist()
                == getattr(whole, name)[request : request + 1].tolist()
            )
        assert alone.k.tolist() == [request]
        read, end = whole.logits_start[request : request + 2].tolist()
        assert alone.logits_start.tolist() == [0, end - read]
        # the same rows as before, now counted from the request's first
        mine = whole.logits_rows[logits[read:end]]
        assert (alone.logits_rows + first).tolist() == mine.tolist()
        assert alone.state is whole.state
        assert alone.host is not None
        assert alone.host.slots.tolist() == [schedule.slots[request]]
        assert alone.host.k.tolist() == [3 - request]
        assert alone.host.history is slots.history
        own = only_outputs(outputs, whole, request)
        assert own.captured[2][:, 0].tolist() == list(range(first, last))
        assert own.post_norm is not None
        assert len(own.post_norm) == last - first


def test_without_captured_states_there_are_none_for_one_request(
    slots: Slots, schedule: Schedule
) -> None:
    step = build(schedule, slots, device=CPU).step
    own = only_outputs(TargetOutputs(captured={}, post_norm=None), step, 1)
    assert (own.captured, own.post_norm) == ({}, None)


# -- in the loop -------------------------------------------------------------


def test_padding_rows_change_no_token() -> None:
    model = tiny_target()
    prompts = [[1], [2, 3, 4], list(range(17))]
    params = [SamplingParams(temperature=0.8 * (n % 2), seed=n, max_tokens=10) for n in range(3)]
    table = torch.randn(61, 61, generator=torch.Generator().manual_seed(0))
    config = {"method": BigramSpeculator, "table": table, "num_speculative_tokens": 3}
    with LLM(model, speculative_config=config, max_num_batched_tokens=7) as llm:
        llm._loaded.engine.target.least_rows = 24
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [[o.outputs[0].token_ids] for o in outputs] == emitted(model, prompts, params)


class CheckingSpeculator(Speculator):
    """Holds every step that it is shown against what `Step` promises."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self.cached: dict[int, int] = {}
        self.known: dict[int, int] = {}  # tokens that a request came with

    def capabilities(self) -> Capabilities:
        return Capabilities(host_tokens=True)

    def allocate(self, pools: Any) -> None:
        self.max_rows = pools.max_rows

    def requests_changed(self, changes: RequestChanges) -> None:
        for slot in changes.left:
            del self.cached[slot]
        for request in changes.arrived:
            assert request.slot not in self.cached
            self.cached[request.slot] = 0
            self.known[request.slot] = len(request.tokens)
            assert len(request.tokens) >= request.prompt_length
        self.kinds |= {"set aside"} if changes.preempted else set()
        self.kinds |= {"resumed"} if changes.resumed else set()

    @hookimpl
    def propose(self, step: Step, k: int) -> Draft:
        state, batch = step.state, step.batch
        assert batch & (batch - 1) == 0
        assert step.query_start.shape == step.logits_start.shape == (batch + 1,)
        assert int(step.query_start[-1]) <= len(step.tokens) <= self.max_rows
        host = step.host
        assert host is not None
        assert host.slots.tolist() == step.slots.tolist()
        assert host.k.tolist() == step.k.tolist()
        for b, slot in enumerate(step.slots.tolist()):
            first, last = step.query_start[b : b + 2].tolist()
            read, end = step.logits_start[b : b + 2].tolist()
            wanted = int(step.k[b])
            assert 0 <= wanted <= k
            if slot < 0:
                assert (last - first, end - read, wanted) == (0, 0, 0)
                self.kinds.add("padding")
                continue
            valid, prefill = int(step.valid_rows[b]), bool(step.is_prefill[b])
            samples, length = bool(step.samples[b]), int(state.length[slot])
            history = state.history[slot, :length].tolist()
            assert host.length[slot] == length
            position = int(step.positions[first])
            # rows go on where the cache of this request ends
            assert position == self.cached[slot]
            assert step.positions[first:last].tolist() == list(
                range(position, position + last - first)
            )
            assert step.tokens[first : first + valid].tolist() == history[position:][:valid]
            assert int(step.next_token[b]) == history[position + valid]
            self.cached[slot] += valid
            assert int(state.computed[slot]) == self.cached[slot]
            rows = list(range(first, last))
            if prefill:
                assert valid == last - first
                assert rows[len(rows) - (end - read) :] == step.logits_rows[read:end].tolist()
                assert end - read == int(samples)
                if not samples:
                    assert wanted == 0
                    assert length == self.known[slot]
                again = position >= int(state.prompt_length[slot])
                self.kinds |= {"computed again"} if again else set()
                self.kinds.add("last chunk" if samples else "chunk")
            else:
                assert samples
                assert 1 <= valid <= last - first == 1 + int(step.num_drafts[b])
                assert step.logits_rows[read:end].tolist() == rows
                self.kinds.add("verified" if step.num_drafts[b] else "plain")
            if samples:
                assert length == self.cached[slot] + 1
            if not wanted:
                self.kinds.add("wants none")
        # a draft for some requests only; every third is left to plain decoding
        tokens = step.next_token[:, None].repeat(1, k)
        tokens[state.length[step.slots] % 3 == 0] = -1
        return Draft(tokens=tokens)


def mixed(n: int, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=n % 2, seed=n, **values)


def test_every_step_that_is_shown_keeps_the_promises_of_its_fields() -> None:
    prompts = [[1], [2] * 3, list(range(20)), [5] * 9, [7, 8], [9] * 12]
    params = [mixed(n, max_tokens=5 + 2 * n, stop_token_ids=[3 + n]) for n in range(6)]
    model = tiny_target(eos_token_id=0)
    config = {"method": CheckingSpeculator, "num_speculative_tokens": 3}
    with LLM(model, speculative_config=config, max_num_seqs=3, max_num_batched_tokens=6) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        speculator = llm.speculator
    assert [o.error for o in outputs] == [None] * 6
    assert isinstance(speculator, CheckingSpeculator)
    assert speculator.kinds == {
        "padding", "chunk", "last chunk", "verified", "plain", "wants none",
    }  # fmt: skip


def test_the_promises_hold_for_requests_that_are_set_aside_and_come_back(
    small_pages: Callable[[Any, int], int],
) -> None:
    prompts = [[1], [2] * 3, list(range(20)), [5] * 9, [7, 8], [9] * 12]
    params = [mixed(n, max_tokens=20) for n in range(6)]
    model = tiny_target(max_model_len=64)
    config = {"method": CheckingSpeculator, "num_speculative_tokens": 3}
    with LLM(
        model,
        speculative_config=config,
        max_num_batched_tokens=10,
        kv_cache_memory=small_pages(model, 18),
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        speculator = llm.speculator
    assert [o.error for o in outputs] == [None] * 6
    assert isinstance(speculator, CheckingSpeculator)
    assert {"set aside", "resumed", "computed again", "verified"} <= speculator.kinds
    assert [[o.outputs[0].token_ids] for o in outputs] == emitted(model, prompts, params)


def counting(vocab: int = 16) -> PreTrainedModel:
    """After token t comes t + 1."""
    return toy_target(torch.eye(vocab).roll(1, dims=1) * 20)


class PairingSpeculator(RecordingSpeculator):
    """Keeps each call's pairs of a row's position and the token that follows it."""

    calls_of_pairs: list[list[tuple[int, int]]]

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.calls_of_pairs = []
        made.append(self)

    @hookimpl
    def propose(self, step: Step, hidden: torch.Tensor | None, k: int) -> Draft:
        super().propose(step, hidden, k)
        valid = int(step.valid_rows[0])
        following = [*step.tokens[1:valid].tolist(), int(step.next_token[0])]
        self.calls_of_pairs.append(list(zip(step.positions.tolist(), following, strict=False)))
        # right, then wrong: with t the last token the target says t + 1, t + 2, ...
        last = int(step.next_token[0])
        return Draft(tokens=torch.tensor([[last + 1, last, last][:k]]))


made: list[PairingSpeculator] = []


def test_features_are_paired_with_the_token_that_follows_them() -> None:
    # the worked example of autoregressive drafters: prompt t0..t4, the target says t5;
    # d6 is accepted, d7 refused, and t7' drawn in its place
    config = {"method": PairingSpeculator, "num_speculative_tokens": 3}
    with LLM(counting(), speculative_config=config) as llm:
        (output,) = llm.generate(
            [0, 1, 2, 3, 4], SamplingParams(temperature=0, max_tokens=7), use_tqdm=False
        )
    calls = made[-1].calls_of_pairs
    assert calls[0] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert calls[1] == [(5, 6), (6, 7)]
    assert calls[2] == [(7, 8), (8, 9)]
    assert output.outputs[0].token_ids == [5, 6, 7, 8, 9, 10, 11]


def test_the_row_before_the_next_chunk_is_paired_with_the_prompts_next_token() -> None:
    config = {"method": PairingSpeculator, "num_speculative_tokens": 3}
    with LLM(counting(), speculative_config=config, max_num_batched_tokens=2) as llm:
        llm.generate([0, 5, 2, 9, 4], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    recorded = made[-1]
    assert recorded.calls_of_pairs[:3] == [[(0, 5), (1, 2)], [(2, 9), (3, 4)], [(4, 5)]]
    assert [c["k"] for c in recorded.calls[:3]] == [[0], [0], [0]]  # one token left: no draft
    assert [c["samples"] for c in recorded.calls[:3]] == [[False], [False], [True]]


def test_requests_come_and_go_in_slots_and_the_speculator_is_told_once() -> None:
    config = {"method": PairingSpeculator, "num_speculative_tokens": 2}
    params = SamplingParams(temperature=0, max_tokens=3)
    with LLM(counting(), speculative_config=config, max_num_seqs=1) as llm:
        llm.generate([[0], [1]], params, use_tqdm=False)
        llm.generate([[2]], params, use_tqdm=False)
    recorded = made[-1]
    assert recorded.changes == [
        ("added", 0), ("finished", 0), ("added", 0), ("finished", 0), ("added", 0),
    ]  # fmt: skip
    assert recorded.closed


def test_a_drafter_without_host_tokens_gets_no_host_step() -> None:
    seen: list[object] = []

    class Looking(Speculator):
        def capabilities(self) -> Capabilities:
            return Capabilities()

        @hookimpl
        def propose(self, step: Step) -> None:
            seen.append(step.host)

    with LLM(counting(), speculative_config={"method": Looking}) as llm:
        llm.generate([0], SamplingParams(max_tokens=2), use_tqdm=False)
    assert seen == [None, None]
