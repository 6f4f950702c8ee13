"""What a request is told, and what observers are told, when it ends in an unusual way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from specdec import (
    LLM,
    Capabilities,
    Draft,
    LogitsRows,
    PromptError,
    SamplingParams,
    Speculator,
    Step,
    StepReport,
    hookimpl,
)
from specdec.testing import tiny_target, toy_target


def counting(vocab: int = 32) -> Any:
    """Token t is followed by t + 1."""
    logits = torch.full((vocab, vocab), -9.0, dtype=torch.float64)
    logits[torch.arange(vocab), (torch.arange(vocab) + 1) % vocab] = 9.0
    return toy_target(logits)


class Right(Speculator):
    """Knows that token t is followed by t + 1."""

    def capabilities(self) -> Capabilities:
        return Capabilities()

    @hookimpl
    def propose(self, step: Step, k: int) -> Draft:
        return Draft(tokens=(step.next_token[:, None] + 1 + torch.arange(k)) % 32)


DRAFTS = {"method": Right, "num_speculative_tokens": 4}


class Reports:
    def __init__(self) -> None:
        self.seen: list[StepReport] = []

    @hookimpl
    def step_finished(self, report: StepReport) -> None:
        self.seen.append(report)


def raising_after(count: int) -> Callable[[LogitsRows, torch.Tensor], torch.Tensor]:
    """Raises at every row whose output has so many tokens or more."""

    def processor(rows: LogitsRows, logits: torch.Tensor) -> torch.Tensor:
        if any(len(rows.output_token_ids(i)) >= count for i in range(len(rows))):
            raise ValueError("too far")
        return logits

    return processor


@pytest.mark.parametrize("after", range(7))
@pytest.mark.parametrize("stop", [None, 5])
def test_a_processor_that_raises_at_a_draft_ends_the_request_where_plain_decoding_would(
    after: int, stop: int | None
) -> None:
    params = SamplingParams(
        temperature=0,
        max_tokens=6,
        logits_processors=[raising_after(after)],
        stop_token_ids=None if stop is None else [stop],
    )
    found = []
    for config in (None, DRAFTS):
        with LLM(counting(), speculative_config=config) as llm:
            (output,) = llm.generate([[1]], params, use_tqdm=False)
        one = output.outputs[0]
        found.append((one.token_ids, one.finish_reason, one.stop_reason, output.error))
    assert found[0] == found[1]
    ends = "error" if after < (4 if stop else 6) else ("stop" if stop else "length")
    assert found[0][1] == ends


def test_more_min_tokens_than_fit_are_refused_and_harm_nobody() -> None:
    with LLM(counting(), max_model_len=16) as llm:
        llm.add_request([1], SamplingParams(max_tokens=8), request_id="good")
        llm.step()
        for wanted in (14, 2**63 - 1):
            with pytest.raises(
                PromptError, match=r"min_tokens is .*, but after the prompt at most 13"
            ):
                llm.add_request([1, 2, 3], SamplingParams(min_tokens=wanted, max_tokens=None))
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
    assert outputs[-1].outputs[0].finish_reason == "length"


def test_observers_learn_of_an_abort_although_no_step_follows() -> None:
    reports = Reports()
    with LLM(counting(), observers=[reports]) as llm:
        llm.add_request([1], SamplingParams(max_tokens=8), request_id="one")
        llm.step()
        assert reports.seen[-1].num_running == 1
        llm.abort_request("one")
        last = reports.seen[-1]
        assert (last.num_running, last.num_waiting) == (0, 0)
        assert last.free_blocks == last.num_blocks
        assert [(e.request_id, e.finish_reason) for e in last.ended] == [("one", "abort")]
        assert last.changes is not None
        assert last.changes.finished == (0,)
        assert len(last.slots) == 0
        count = len(reports.seen)
        assert [o.outputs[0].finish_reason for o in llm.step()] == ["abort"]
        assert len(reports.seen) == count


def test_observers_learn_of_requests_that_closing_ends() -> None:
    reports = Reports()
    llm = LLM(counting(), observers=[reports], max_num_seqs=1)
    for _ in range(2):
        llm.add_request([1], SamplingParams(max_tokens=8))
    llm.step()
    llm.close()
    assert sorted(e.finish_reason for r in reports.seen for e in r.ended) == ["abort", "abort"]
    assert reports.seen[-1].num_waiting == 0
    assert not llm.has_unfinished_requests()


def test_a_streamed_output_counts_speculation_as_it_goes() -> None:
    with LLM(counting(), speculative_config=DRAFTS) as llm:
        outputs = list(llm.stream([[1]], SamplingParams(temperature=0, max_tokens=20)))
    emitted = [o.metrics.speculative_decoding.num_emitted_tokens for o in outputs]
    # the first token follows the prompt: it is of no decode step
    assert emitted == [len(o.outputs[0].token_ids) - 1 for o in outputs]


def test_a_delta_holds_completions_that_moved_and_each_end_once() -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=6, output_kind="delta", stop_token_ids=[3, 9])
    whole = SamplingParams(n=3, seed=1, max_tokens=6, stop_token_ids=[3, 9])
    with LLM(tiny_target(vocab=12, seed=2)) as llm:
        (expected,) = llm.generate([[1, 2]], whole, use_tqdm=False)
        deltas = list(llm.stream([[1, 2]], params))
    tokens: dict[int, list[int]] = {i: [] for i in range(3)}
    ends: list[int] = []
    for output in deltas:
        for one in output.outputs:
            assert one.token_ids or one.finish_reason
            tokens[one.index] += one.token_ids
            ends += [one.index] * (one.finish_reason is not None)
    assert sorted(ends) == [0, 1, 2]
    assert list(tokens.values()) == [c.token_ids for c in expected.outputs]


def test_an_end_of_sequence_that_is_named_again_is_no_stop_of_the_requests_own() -> None:
    model = tiny_target(vocab=12, seed=2, eos_token_id=4)
    asked = SamplingParams(seed=0, max_tokens=200, stop_token_ids=[4], n=8)
    with LLM(model, max_model_len=256) as llm:
        (output,) = llm.generate([[1, 2]], asked, use_tqdm=False)
    stopped = [c for c in output.outputs if c.finish_reason == "stop"]
    assert stopped
    assert {c.stop_reason for c in stopped} == {None}
    assert {c.token_ids[-1] for c in stopped} == {4}


@pytest.mark.parametrize("priority", [1.5, {1: 2}, True, "high", [1, 2], [1.0], 2**70])
def test_what_is_no_priority_is_refused(priority: Any) -> None:
    two: Any = np.int64(2)
    with LLM(counting(), scheduling_policy="priority") as llm:
        with pytest.raises(PromptError, match="priorit"):
            llm.generate([[1]], SamplingParams(max_tokens=1), priority=priority)
        llm.generate([[1]], SamplingParams(max_tokens=1), priority=two, use_tqdm=False)


def test_requests_without_a_name_take_none_that_is_in_use() -> None:
    with LLM(counting()) as llm:
        llm.add_request([1], SamplingParams(max_tokens=4), request_id="0")
        llm.add_request([1], SamplingParams(max_tokens=4), request_id="1")
        (output,) = llm.generate([[1]], SamplingParams(max_tokens=2), use_tqdm=False)
        assert output.request_id not in ("0", "1")
