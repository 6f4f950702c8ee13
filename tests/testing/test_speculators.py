"""Doubles that do one thing on purpose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specdec import LLM, ConfigError, RequestOutput, SamplingParams
from specdec.runner.drafting import Drafting
from specdec.testing import (
    BigramSpeculator,
    ConstantSpeculator,
    OracleSpeculator,
    PlaceholderSpeculator,
    RaisingSpeculator,
    RecordingSpeculator,
    WrongSpeculator,
    tiny_target,
    toy_target,
)
from specdec_kernels import DenseQ, SparseQ

PROMPT = (1, 2)


def counting() -> PreTrainedModel:
    """After token t comes t + 1."""
    return toy_target(torch.eye(32).roll(1, dims=1) * 20)


STREAMS = {PROMPT: list(range(3, 32))}


def run(config: dict[str, Any], **sampling: Any) -> tuple[RequestOutput, Any]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 13, **sampling})
    with LLM(counting(), speculative_config={"num_speculative_tokens": 3, **config}) as llm:
        (output,) = llm.generate(list(PROMPT), params, use_tqdm=False)
        return output, llm.speculator


def rates(output: RequestOutput) -> list[float]:
    numbers = output.metrics.speculative_decoding
    return [
        a / d for a, d in zip(numbers.accepted_per_pos, numbers.drafted_per_pos, strict=True) if d
    ]


def test_the_oracle_is_always_right() -> None:
    output, _ = run({"method": OracleSpeculator, "streams": STREAMS})
    assert rates(output) == [1, 1, 1]
    assert output.metrics.speculative_decoding.num_drafts == 3


def test_the_oracle_drafts_nothing_for_a_prompt_that_it_does_not_know() -> None:
    output, _ = run({"method": OracleSpeculator, "streams": {(5,): [6]}})
    assert output.metrics.speculative_decoding.num_drafts == 0
    assert output.outputs[0].token_ids == list(range(3, 16))


def test_the_wrong_one_is_never_right() -> None:
    output, _ = run({"method": WrongSpeculator, "streams": STREAMS})
    assert output.metrics.speculative_decoding.num_draft_tokens > 20
    assert output.metrics.speculative_decoding.num_accepted_tokens == 0


@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_placeholder_ends_the_drafts_although_right_ones_follow(column: int) -> None:
    output, _ = run({"method": PlaceholderSpeculator, "streams": STREAMS, "column": column})
    assert rates(output) == [1] * column
    assert output.outputs[0].token_ids == list(range(3, 16))


def test_a_constant_is_drafted_over_and_over() -> None:
    output, _ = run({"method": ConstantSpeculator, "token": 7})
    numbers = output.metrics.speculative_decoding
    assert numbers.accepted_per_pos == [1, 0, 0]
    # an id that the target does not have ends the request, and says so
    output, _ = run({"method": ConstantSpeculator, "token": 32})
    assert output.outputs[0].finish_reason == "error"
    assert "hold 32" in str(output.error)


def test_the_raising_one_raises_at_its_token_and_drafts_nothing_before() -> None:
    output, _ = run({"method": RaisingSpeculator, "token": 9})
    assert output.outputs[0].token_ids == list(range(3, 10))
    assert output.metrics.speculative_decoding.num_drafts == 0
    assert "the token 9 was met" in str(output.error)


@pytest.mark.parametrize(
    ("options", "rule", "drawn", "form", "kind"),
    [
        ({}, "coupled", "coupled", None, None),
        ({"draft_sample_method": "greedy"}, "coupled", "deterministic", None, None),
        ({}, "standard", "independent", "dense", DenseQ),
        ({"candidates": 2}, "block", "independent", "sparse", SparseQ),
        ({"with_q": False}, "standard", "independent", None, None),
    ],
)
def test_the_bigram_draws_in_every_way(
    options: dict[str, Any],
    rule: str,
    drawn: str,
    form: str | None,
    kind: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {
        "method": BigramSpeculator,
        "table": torch.eye(32).roll(1, dims=1) * 20,
        "rejection_sample_method": rule,
        **options,
    }
    seen: list[Any] = []
    plan = Drafting.plan

    def keep(drafting: Drafting, which: Any, draft: Any, k: Any) -> None:
        seen.append(draft.q)
        plan(drafting, which, draft, k)

    monkeypatch.setattr(Drafting, "plan", keep)
    with LLM(counting(), speculative_config=config) as llm:
        params = SamplingParams(temperature=1, seed=1, max_tokens=9)
        (output,) = llm.generate(list(PROMPT), params, use_tqdm=False)
        assert llm.capabilities is not None
        assert (llm.capabilities.drawn, llm.capabilities.q) == (drawn, form)
    # its table is the target's, so its drafts hold
    assert output.metrics.speculative_decoding.acceptance_rate == 1
    assert {type(q) for q in seen} == {type(None) if kind is None else kind}


def test_the_recorder_keeps_what_every_call_was_given() -> None:
    with LLM(
        tiny_target(),
        speculative_config={
            "method": RecordingSpeculator,
            "layers": (0, 2),
            "num_speculative_tokens": 2,
        },
    ) as llm:
        recorder: Any = llm.speculator
        (output,) = llm.generate(
            [5, 6, 7], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False
        )
    text = [5, 6, 7, *output.outputs[0].token_ids]
    assert recorder.pairs == {0: dict(enumerate(text[1:]))}
    assert sorted(recorder.features[0]) == list(range(6))
    assert all(f.shape == (64,) for f in recorder.features[0].values())
    assert recorder.calls[0] == {
        "slots": [0],
        "k": [2],
        "is_prefill": [True],
        "samples": [True],
        "valid_rows": [3],
    }
    assert recorder.changes == [("added", 0)]
    assert recorder.pools.max_drafts == 2
    assert recorder.closed


def test_options_of_another_double_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no key 'streams'"):
        run({"method": ConstantSpeculator, "streams": {}})
