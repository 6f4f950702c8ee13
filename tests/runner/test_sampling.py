"""What the kernels are told of a step."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import specdec_kernels
from specdec import LLM, Capabilities, LogitsRows, SamplingParams, VerificationRule, hookimpl
from specdec.runner.rows import Rows, TargetOutputs
from specdec.runner.sampling import kernel_verify
from specdec.runner.target import TargetModel
from specdec.testing import BigramSpeculator, toy_target
from specdec.types import Draft, Step, Verdict
from specdec_kernels import EditInputs, Verified

PLAIN = SamplingParams(temperature=1.0, seed=1, max_tokens=12)
CUT = SamplingParams(temperature=1.0, seed=2, max_tokens=4, top_k=2)


@pytest.mark.parametrize("rule", [None, "coupled", "block"])
def test_steps_search_for_cuts_only_while_a_request_truncates(
    monkeypatch: pytest.MonkeyPatch, rule: str | None
) -> None:
    told: list[bool] = []
    verify = specdec_kernels.verify

    def listening(*arguments: Any, truncate: bool, **others: Any) -> Verified:
        told.append(truncate)
        return verify(*arguments, truncate=truncate, **others)

    monkeypatch.setattr(specdec_kernels, "verify", listening)
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(3))
    config = None
    if rule is not None:
        config = {"method": BigramSpeculator, "table": table, "num_speculative_tokens": 1}
        config["rejection_sample_method"] = rule
    with LLM(toy_target(table), speculative_config=config) as llm:
        (alone,) = llm.generate([[1]], PLAIN, use_tqdm=False)
        assert set(told) == {False}
        told.clear()
        beside, _ = llm.generate([[1], [2]], [PLAIN, CUT], use_tqdm=False)
    # until the request that truncates has its four tokens
    assert told == sorted(told, reverse=True)
    assert set(told) == {True, False}
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids


# -- edits -------------------------------------------------------------------

TABLE = torch.randn(7, 7, generator=torch.Generator().manual_seed(4))


def editing(**more: Any) -> SamplingParams:
    asks = {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.5, "logit_bias": {2: 1.0}}
    return SamplingParams(**{**asks, "max_tokens": 12, **more})


def unchanged(rows: LogitsRows, logits: Tensor) -> Tensor:
    return logits


@attrs.frozen(eq=False)
class Call:
    """What the kernels were given: logits, whether they are the target's own, and edits."""

    logits: Tensor
    own: bool
    edits: EditInputs | None
    drafts: int


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Every call of `verify`, after which the logits of the target are as they were."""
    found: list[Call] = []
    outputs: list[Tensor] = []
    forward, verify = TargetModel.forward, specdec_kernels.verify

    def noting(self: TargetModel, rows: Rows) -> TargetOutputs:
        out = forward(self, rows)
        outputs[:] = [out.logits, out.logits.clone()]
        return out

    def listening(logits: Tensor, *arguments: Any, **others: Any) -> Verified:
        theirs, before = outputs
        own = logits.data_ptr() == theirs.data_ptr() and torch.equal(logits, before)
        found.append(Call(logits.clone(), own, others["edits"], arguments[1].shape[1]))
        verified = verify(logits, *arguments, **others)
        assert torch.equal(logits, found[-1].logits)
        return verified

    monkeypatch.setattr(TargetModel, "forward", noting)
    monkeypatch.setattr(specdec_kernels, "verify", listening)
    return found


def drafted(rule: str | None, method: Any = BigramSpeculator) -> dict[str, Any] | None:
    if rule is None:
        return None
    config = {"method": method, "table": TABLE, "num_speculative_tokens": 2}
    return {**config, "rejection_sample_method": rule}


each_rule = pytest.mark.parametrize("rule", [None, "coupled", "standard", "block"])


@each_rule
def test_kernels_edit_the_targets_own_logits_while_a_request_asks(
    calls: list[Call], rule: str | None
) -> None:
    with LLM(toy_target(TABLE), speculative_config=drafted(rule)) as llm:
        (alone,) = llm.generate([[1]], PLAIN, use_tqdm=False)
        assert {call.edits for call in calls} == {None}
        calls.clear()
        beside, _ = llm.generate([[1], [2]], [PLAIN, editing(max_tokens=4)], use_tqdm=False)
    assert all(call.own for call in calls)
    # until the request that asks for them has its four tokens
    told = [call.edits is not None for call in calls]
    assert told == sorted(told, reverse=True)
    assert set(told) == {True, False}
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids


@each_rule
def test_steps_with_a_logits_processor_are_edited_before_the_kernels(
    calls: list[Call], rule: str | None
) -> None:
    looking = editing(logits_processors=[unchanged], logit_bias={2: 100.0})
    with LLM(toy_target(TABLE), speculative_config=drafted(rule)) as llm:
        llm.generate([[2]], looking, use_tqdm=False)
    assert calls
    assert {call.edits for call in calls} == {None}
    assert all((call.logits[:, 2] > 20).all() for call in calls)


class OwnRule(BigramSpeculator):
    """Judges as coupled does, under a name of its own."""

    def capabilities(self) -> Capabilities:
        return attrs.evolve(
            super().capabilities(), verification=(VerificationRule("own", lossless=True),)
        )

    @hookimpl
    def verify(self, step: Step, draft: Draft, logits: Tensor) -> Verdict:
        return kernel_verify(step, logits, draft.tokens, method="coupled")


def test_a_rule_of_a_speculators_own_is_shown_edited_logits(calls: list[Call]) -> None:
    params = editing(logit_bias={2: 4.0})
    with LLM(toy_target(TABLE)) as llm:
        (plain,) = llm.generate([[2]], params, use_tqdm=False)
    calls.clear()
    with LLM(toy_target(TABLE), speculative_config=drafted("own", OwnRule)) as llm:
        (output,) = llm.generate([[2]], params, use_tqdm=False)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    # core draws where nothing is under test
    assert {(call.drafts > 0, call.own, call.edits is None) for call in calls} == {
        (False, True, False),
        (True, False, True),
    }


@pytest.mark.parametrize("processors", [(), (unchanged,)])
def test_edits_of_the_kernels_and_those_before_give_the_same(
    calls: list[Call], processors: tuple[Any, ...]
) -> None:
    """Also the log-probabilities: they are of the logits before all edits."""
    params = editing(logprobs=7)
    with LLM(toy_target(TABLE)) as llm:
        (expected,) = llm.generate([[2]], params, use_tqdm=False)
    params = editing(logprobs=7, logits_processors=processors)
    with LLM(toy_target(TABLE), speculative_config=drafted("coupled")) as llm:
        (output,) = llm.generate([[2]], params, use_tqdm=False)
    mine, right = output.outputs[0], expected.outputs[0]
    assert mine.token_ids == right.token_ids
    assert mine.logprobs == right.logprobs
    law = TABLE.double().log_softmax(-1)
    assert mine.logprobs is not None
    last = 2
    for token, entries in zip(mine.token_ids, mine.logprobs, strict=True):
        assert entries[token].logprob == pytest.approx(law[last, token].item(), abs=1e-5)
        last = token
