"""The loop: who pays for what goes wrong, what preemption changes, and what a step reports.

Takes ten seconds: every kind of request is run with every kind of drafts.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, cast

import attrs
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from specdec import (
    LLM,
    Capabilities,
    Draft,
    PluginError,
    RequestOutput,
    SamplingParams,
    Speculator,
    SpeculatorError,
    Step,
    Verdict,
    hookimpl,
)
from specdec.logits_processors import LogitsRows
from specdec.metrics import SpeculationMetrics
from specdec.runner.isolation import join
from specdec.runner.state import Slots
from specdec.testing import (
    BigramSpeculator,
    ConstantSpeculator,
    OracleSpeculator,
    RaisingSpeculator,
    RecordingSpeculator,
    WrongSpeculator,
    tiny_target,
    toy_target,
)
from specdec.types import (
    SKIP_REASONS,
    EndedRequest,
    KVLayer,
    RequestChanges,
    StepReport,
    VerificationRule,
)
from specdec_kernels import DenseQ, SparseQ


def greedy(most: int = 8, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=most, **values)


def counting(vocab: int = 32) -> PreTrainedModel:
    """After token t comes t + 1."""
    return toy_target(torch.eye(vocab).roll(1, dims=1) * 20)


def count(first: int, number: int) -> list[int]:
    return list(range(first, first + number))


def generate(llm: LLM, prompts: list[list[int]], max_tokens: int = 8) -> list[RequestOutput]:
    return llm.generate(prompts, greedy(max_tokens), use_tqdm=False)


def assert_idle(llm: LLM) -> None:
    """Every page and slot is back, and the engine still works."""
    scheduler = llm._loaded.engine.scheduler
    assert scheduler.pool.free == scheduler.pool.num_blocks - 1
    assert not scheduler.running
    assert not scheduler.waiting
    (output,) = generate(llm, [[20]], max_tokens=3)
    assert output.outputs[0].token_ids == [21, 22, 23]
    assert scheduler.pool.free == scheduler.pool.num_blocks - 1


# -- errors in hooks ---------------------------------------------------------


@pytest.mark.parametrize("hook", ["propose", "extract_hidden_states"])
def test_a_hook_that_raises_ends_only_the_request_it_raised_for(hook: str) -> None:
    config = {"method": RaisingSpeculator, "token": 7, "hook": hook}
    with LLM(counting(), speculative_config=config) as llm:
        first, culprit, last = generate(llm, [[10], [3], [15, 16]])
        assert_idle(llm)
    assert first.outputs[0].token_ids == count(11, 8)
    assert last.outputs[0].token_ids == count(17, 8)
    assert (first.error, last.error) == (None, None)
    completion = culprit.outputs[0]
    # what was emitted when the speculator met the token stands
    assert (completion.finish_reason, completion.token_ids) == ("error", [4, 5, 6, 7])
    assert culprit.error is not None
    assert culprit.finished
    for part in ("RaisingSpeculator", hook, "RuntimeError", "the token 7 was met"):
        assert part in culprit.error


class Misbehaving(Speculator):
    """Drafts right, and answers wrongly whenever the token 4 comes next."""

    answer: ClassVar[Callable[[Step, int], Any]]

    def capabilities(self) -> Capabilities:
        return Capabilities(q="dense", drawn="independent")

    @hookimpl
    def propose(self, step: Step, k: int) -> Any:
        if bool(((step.next_token == 4) & (step.slots >= 0)).any()):
            return type(self).answer(step, k)
        return Draft(tokens=step.next_token[:, None] + torch.arange(1, k + 1))


def full(step: Step, k: int, value: int = 0) -> torch.Tensor:
    return torch.full((step.batch, k), value)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda step, k: full(step, k), "a tensor of shape"),
        (lambda step, k: "tokens", "a str"),
        (lambda step, k: Draft(tokens=full(step, k)[:, 1:]), "of shape"),
        (lambda step, k: Draft(tokens=full(step, k)[:0]), "of shape"),
        (lambda step, k: Draft(tokens=full(step, k).int()), "dtype torch.int32"),
        (lambda step, k: Draft(tokens=full(step, k, 32)), "hold 32"),
        (lambda step, k: Draft(tokens=full(step, k, -2)), "hold -2"),
        (lambda step, k: Draft(tokens=cast(Any, full(step, k).tolist())), "of type list"),
        (lambda step, k: Draft(tokens=full(step, k), confidence=full(step, k)), "confidence"),
        (lambda step, k: Draft(tokens=full(step, k), parents=full(step, k)), "parents"),
        (lambda step, k: Draft(tokens=full(step, k), q=DenseQ(torch.zeros(1, k))), "q.logits"),
        (
            lambda step, k: Draft(tokens=full(step, k), q=SparseQ(torch.zeros(1), torch.zeros(1))),
            "q of type SparseQ",
        ),
        (lambda step, k: step.nothing, "AttributeError"),
    ],
)
def test_a_wrong_answer_ends_only_the_request_it_was_given_for(
    answer: Callable[[Step, int], Any], message: str
) -> None:
    class Mine(Misbehaving):
        pass

    Mine.answer = staticmethod(answer)
    with LLM(counting(), speculative_config={"method": Mine}) as llm:
        outputs = generate(llm, [[10], [3], [15, 16]], max_tokens=6)
        assert_idle(llm)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert outputs[0].outputs[0].token_ids == count(11, 6)
    assert outputs[2].outputs[0].token_ids == count(17, 6)
    assert message in str(outputs[1].error)
    assert "speculator Mine" in str(outputs[1].error)


def test_a_prompt_that_fails_before_it_draws_a_token_ends_too() -> None:
    class Refusing(Speculator):
        def capabilities(self) -> Capabilities:
            return Capabilities()

        @hookimpl
        def propose(self, step: Step) -> None:
            assert not bool(((step.next_token == 9) & step.is_prefill).any()), "nine"

    with LLM(counting(), speculative_config={"method": Refusing}, max_num_batched_tokens=2) as llm:
        good, bad = generate(llm, [[1], [8, 8, 9, 8, 8]])
        assert_idle(llm)
    assert good.outputs[0].token_ids == count(2, 8)
    assert (bad.outputs[0].finish_reason, bad.outputs[0].token_ids) == ("error", [])
    assert "nine" in str(bad.error)


class FreshLaws(BigramSpeculator):
    """Writes its law to one buffer, as the contract allows, and raises for one request."""

    @hookimpl
    def propose(self, step: Step, k: int) -> Draft:
        if bool(((step.next_token == 2) & (step.slots >= 0)).any()):
            raise ValueError("two")
        self.logits.zero_()
        return super().propose(step, k)


def test_laws_of_drafts_asked_for_one_by_one_reach_the_verification() -> None:
    # after 1 comes 2, for which the drafter raises; nothing else leads to either
    table = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    table[:, 1:3] = -1e4
    table[1] = torch.where(torch.arange(8) == 2, 0.0, -1e4)
    config = {
        "method": FreshLaws,
        "table": table,
        "rejection_sample_method": "standard",
        "num_speculative_tokens": 2,
    }
    prompts = [[3], [1], [4]] * 10
    params = [SamplingParams(temperature=1.0, seed=s, max_tokens=7) for s in range(30)]
    with LLM(toy_target(table), speculative_config=config, max_num_seqs=4) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        metrics = llm.metrics
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"] * 10
    # drafts have the target's law, so all are kept, unless the law that was handed over is lost
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens == 80


def test_joined_drafts_keep_each_requests_tokens_and_law() -> None:
    slots = Slots(4, 8, 1, 2, torch.device("cpu"))

    class Some:
        batch = 4
        slots = torch.tensor([2, 0, 3, -1])
        next_token = torch.zeros(4, dtype=torch.int64)
        state: Any

    step: Any = Some()
    step.state = slots.device
    drafts = {
        0: Draft(torch.tensor([1, 2]), DenseQ(torch.full((2, 5), 0.5))),
        2: Draft(torch.tensor([3, -1]), DenseQ(torch.full((2, 5), 1.5))),
    }
    joined = join(step, drafts, 2)
    assert joined.tokens.tolist() == [[1, 2], [-1, -1], [3, -1], [-1, -1]]
    assert isinstance(joined.q, DenseQ)
    assert joined.q.logits[:, 0, 0].tolist() == [0.0, 0.0, 0.5, 1.5, 0.0]
    for law, draft in drafts.items():
        assert isinstance(draft.q, DenseQ)
        drafts[law] = Draft(draft.tokens, draft.q._replace(lse=torch.tensor([1.0, 2.0]) * law))
    joined = join(step, drafts, 2)
    assert isinstance(joined.q, DenseQ)
    assert joined.q.lse is not None
    assert joined.q.lse.tolist() == [[0, 0], [0, 0], [0, 0], [2, 4], [0, 0]]
    # laws that cannot be put together are left out, which every rule survives
    drafts[2] = Draft(drafts[2].tokens, DenseQ(torch.zeros(2, 6)))
    assert join(step, drafts, 2).q is None
    drafts[2] = Draft(drafts[2].tokens)
    assert join(step, drafts, 2).q is None
    assert join(step, {}, 2).tokens.tolist() == [[-1, -1]] * 4


class OwnRule(Speculator):
    """Brings an exact greedy rule, and breaks it when the token 5 was the last."""

    how: ClassVar[str] = "raise"

    def capabilities(self) -> Capabilities:
        return Capabilities(verification=(VerificationRule("own", lossless=True),))

    @hookimpl
    def propose(self, step: Step, k: int) -> Draft:
        return Draft(tokens=step.next_token[:, None] + torch.arange(1, k + 1))

    @hookimpl
    def verify(self, step: Step, draft: Draft, logits: torch.Tensor) -> Verdict:
        batch, k = draft.tokens.shape
        verdict = Verdict(
            tokens=torch.full((batch, k + 1), -1),
            count=torch.zeros(batch, dtype=torch.int64),
            rows=torch.full((batch, k + 1), -1),
        )
        for request in range(batch):
            first, end = step.logits_start[request : request + 2].tolist()
            if first < end:
                verdict.tokens[request, : end - first] = logits[first:end].argmax(-1)
                verdict.rows[request, : end - first] = torch.arange(first, end)
                verdict.count[request] = end - first
        broken = bool((step.tokens == 5).any())
        if broken and self.how == "raise":
            raise RuntimeError("five")
        if broken and self.how == "count":
            verdict.count.add_(7)
        if broken and self.how == "rows":
            verdict.rows.fill_(99)
        if broken and self.how == "shape":
            return Verdict(verdict.tokens[:, 1:], verdict.count, verdict.rows)
        return verdict


@pytest.mark.parametrize("how", ["raise", "count", "rows", "shape", "fine"])
def test_a_rule_that_breaks_ends_only_the_request_it_broke_for(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnRule, "how", how)
    config = {
        "method": OwnRule,
        "rejection_sample_method": "own",
        "num_speculative_tokens": 2,
    }
    # room for every draft beside the half of a step that a prompt may claim
    with LLM(counting(), speculative_config=config, max_num_batched_tokens=18) as llm:
        # the last prompt is still in its chunks when the rule breaks
        outputs = generate(llm, [[10], [3], [15, 16], [20] * 30 + [10]])
        assert_idle(llm)
    ends = [o.outputs[0].finish_reason for o in outputs]
    assert ends == ["length", "length" if how == "fine" else "error", "length", "length"]
    for output, first in zip(outputs, (11, 4, 17, 11), strict=True):
        if output.error is None:
            assert output.outputs[0].token_ids == count(first, 8)
    if how != "fine":
        assert outputs[1].outputs[0].token_ids == [4]
        assert "verify" in str(outputs[1].error)


def test_verdicts_of_requests_asked_for_one_by_one_point_into_the_whole_step() -> None:
    seen: list[tuple[Step, Verdict]] = []

    class Watching:
        @hookimpl
        def step_finished(self, step: Step, verdict: Verdict) -> None:
            if bool((step.tokens == 5).any()):
                seen.append((step, verdict))

    config = {"method": OwnRule, "rejection_sample_method": "own", "num_speculative_tokens": 2}
    with LLM(counting(), speculative_config=config, observers=[Watching()]) as llm:
        generate(llm, [[10], [3], [15]])
    ((step, verdict),) = seen
    assert step.logits_start.tolist() == [0, 3, 6, 9, 9]
    assert verdict.count.tolist() == [3, 0, 3, 0]
    assert verdict.rows.tolist() == [[0, 1, 2], [-1] * 3, [6, 7, 8], [-1] * 3]
    assert verdict.tokens.tolist() == [[12, 13, 14], [-1] * 3, [17, 18, 19], [-1] * 3]


def test_drafts_are_tested_once_even_if_none_follow_them() -> None:
    class NowAndThen(Speculator):
        def capabilities(self) -> Capabilities:
            return Capabilities()

        @hookimpl
        def propose(self, step: Step, k: int) -> Draft | None:
            if int(step.next_token[0]) == 4:
                return Draft(tokens=torch.tensor([[9, 9]]))
            return None

    config = {"method": NowAndThen, "num_speculative_tokens": 2}
    with LLM(counting(), speculative_config=config) as llm:
        (output,) = generate(llm, [[1]])
    numbers = output.metrics.speculative_decoding
    assert (numbers.num_drafts, numbers.num_plain_steps) == (1, 6)


def test_a_request_starts_with_all_its_drafts_whatever_became_of_the_one_before() -> None:
    config = {
        "method": WrongSpeculator,
        "streams": {(n,): count(n + 1, 12) for n in (1, 2)},
        "num_speculative_tokens": 4,
        "length_policy": "falling",
    }
    with LLM(counting(), speculative_config=config, max_num_seqs=1) as llm:
        one, two = generate(llm, [[1], [2]], max_tokens=12)
    drafted = [o.metrics.speculative_decoding.drafted_per_pos for o in (one, two)]
    assert drafted[0] == drafted[1]
    assert 0 < drafted[0][3] < drafted[0][0]


def test_a_speculator_that_always_raises_ends_every_request_and_not_the_engine() -> None:
    class Broken(Speculator):
        def capabilities(self) -> Capabilities:
            return Capabilities()

        @hookimpl
        def propose(self) -> None:
            raise ZeroDivisionError

    with LLM(counting(), speculative_config={"method": Broken}, max_num_seqs=2) as llm:
        outputs = generate(llm, [[1], [2], [3]])
        scheduler = llm._loaded.engine.scheduler
        assert scheduler.pool.free == scheduler.pool.num_blocks - 1
    assert all("ZeroDivisionError" in str(o.error) for o in outputs)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 1, 1]


def test_requests_that_a_speculator_refuses_to_meet_end_and_those_before_go_on() -> None:
    class Shy(Speculator):
        def capabilities(self) -> Capabilities:
            return Capabilities()

        def requests_changed(self, changes: RequestChanges) -> None:
            if any(request.tokens == (9,) for request in changes.added):
                raise LookupError("a nine")

        @hookimpl
        def propose(self) -> None:
            return None

    params = [greedy(n) for n in (3, 8, 4)]
    with LLM(counting(), speculative_config={"method": Shy}, max_num_seqs=2) as llm:
        outputs = llm.generate([[1], [2], [9]], params, use_tqdm=False)
        assert_idle(llm)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "length", "error"]
    assert outputs[1].outputs[0].token_ids == count(3, 8)
    assert "Shy" in str(outputs[2].error)
    assert "LookupError in requests_changed: a nine" in str(outputs[2].error)


def test_requests_that_arrive_with_one_that_is_refused_go_on() -> None:
    class Picky(ConstantSpeculator):
        def requests_changed(self, changes: RequestChanges) -> None:
            if any(request.tokens == (9,) for request in changes.added):
                raise LookupError("a nine")

    with LLM(counting(), speculative_config={"method": Picky}) as llm:
        outputs = llm.generate([[1], [9], [2]], greedy(5), use_tqdm=False)
        assert_idle(llm)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert outputs[2].outputs[0].token_ids == count(3, 5)


def test_a_rule_is_not_asked_about_requests_without_drafts() -> None:
    class Poisoned(Speculator):
        def capabilities(self) -> Capabilities:
            return Capabilities(verification=[VerificationRule("mine", lossless=True)])

        @hookimpl
        def propose(self, step: Step, k: int) -> Draft:
            return Draft(tokens=torch.ones(step.batch, k, dtype=torch.int64))

        @hookimpl
        def verify(self, step: Step, draft: Draft, logits: torch.Tensor) -> Verdict:
            assert bool((step.num_drafts > 0).any()), "asked without drafts"
            if bool((step.slots == 0).any()):
                raise RuntimeError("slot 0 is poison")
            tokens = torch.full((step.batch, draft.tokens.shape[1] + 1), -1)
            rows, drawing = tokens.clone(), step.logits_start.diff() > 0
            first = step.logits_start[:-1][drawing]
            tokens[drawing, 0], rows[drawing, 0] = logits[first].argmax(dim=-1), first
            return Verdict(tokens=tokens, count=drawing.long(), rows=rows)

    config = {"method": Poisoned, "rejection_sample_method": "mine", "num_speculative_tokens": 2}
    with LLM(counting(), speculative_config=config, max_num_batched_tokens=12) as llm:
        outputs = llm.generate([[1], [2], list(range(20))], greedy(6), use_tqdm=False)
    assert ["slot 0 is poison" in str(o.error) for o in outputs] == [True, False, False]
    assert [o.outputs[0].token_ids for o in outputs[1:]] == [count(3, 6), count(20, 6)]


# -- errors in the life cycle ------------------------------------------------


class LifeCycle(Speculator):
    """Raises in one of its methods; counts how often it was closed."""

    where: ClassVar[str] = ""
    closed: ClassVar[int] = 0

    @classmethod
    def load(cls, target: Any, config: Any) -> LifeCycle:
        cls.fail("load")
        return cls()

    @classmethod
    def fail(cls, where: str) -> None:
        if cls.where == where:
            raise KeyError(where)

    def capabilities(self) -> Capabilities:
        self.fail("capabilities")
        return Capabilities(kv_layers=[KVLayer(1, 4, 4)])

    def allocate(self, pools: Any) -> None:
        self.fail("allocate")

    @hookimpl
    def propose(self) -> None:
        return None

    def close(self) -> None:
        type(self).closed += 1
        self.fail("close")


@pytest.mark.parametrize("where", ["load", "capabilities", "allocate"])
def test_a_speculator_that_fails_to_start_is_named_and_closed(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LifeCycle, "where", where)
    monkeypatch.setattr(LifeCycle, "closed", 0)
    model = counting()
    with pytest.raises(PluginError, match=f"LifeCycle.*raised KeyError in {where}") as caught:
        LLM(model, speculative_config={"method": LifeCycle})
    assert isinstance(caught.value.__cause__, KeyError)
    assert LifeCycle.closed == (0 if where == "load" else 1)
    with LLM(model) as llm:  # nothing of it stays on the model
        assert generate(llm, [[1]])[0].outputs[0].token_ids == count(2, 8)


def test_a_speculator_that_fails_to_close_is_named_and_the_model_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LifeCycle, "where", "close")
    llm = LLM(counting(), speculative_config={"method": LifeCycle})
    target = llm._loaded.target
    with pytest.raises(PluginError, match=r"LifeCycle.*raised KeyError in close"):
        llm.close()
    with pytest.raises(RuntimeError, match="allocate"):
        _ = target.cache
    llm.close()  # once is enough


def test_an_error_at_the_start_is_not_hidden_by_one_in_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Both(LifeCycle):
        def allocate(self, pools: Any) -> None:
            raise MemoryError("none left")

    monkeypatch.setattr(Both, "where", "close")
    with pytest.raises(PluginError, match="MemoryError in allocate: none left"):
        LLM(counting(), speculative_config={"method": Both})
    assert "raised in close" in caplog.text


@pytest.mark.parametrize("what", ["load", "capabilities"])
def test_an_answer_of_the_wrong_kind_at_the_start_is_named(what: str) -> None:
    class Odd(LifeCycle):
        @classmethod
        def load(cls, target: Any, config: Any) -> Any:
            return {} if what == "load" else cls()

        def capabilities(self) -> Any:
            return {"drawn": "coupled"}

    with pytest.raises(PluginError, match=rf"Odd.*: {what}\(\) gave dict; "):
        LLM(counting(), speculative_config={"method": Odd})


def test_states_that_the_target_does_not_have_are_refused_with_the_speculators_name() -> None:
    class Deep(LifeCycle):
        def capabilities(self) -> Capabilities:
            return Capabilities(hidden_states=(7,))

    with pytest.raises(ValueError, match="no capture id 7; ids are 0") as caught:
        LLM(counting(), speculative_config={"method": Deep})
    assert any("Deep" in note for note in caught.value.__notes__)


def test_a_drafters_layers_get_pages_beside_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(LifeCycle, "allocate", lambda self, pools: given.append(pools))
    with LLM(counting(), speculative_config={"method": LifeCycle}, max_num_seqs=2) as llm:
        blocks = llm._loaded.engine.scheduler.pool.num_blocks
        plain = LLM(counting(), kv_cache_memory=10**6)
        shared = LLM(counting(), speculative_config={"method": LifeCycle}, kv_cache_memory=10**6)
        # both caches come out of one budget
        assert (
            shared._loaded.engine.scheduler.pool.num_blocks
            < plain._loaded.engine.scheduler.pool.num_blocks
        )
        plain.close()
        shared.close()
    (pools, _) = given
    assert (pools.num_blocks, pools.block_size) == (blocks, 16)
    assert (pools.num_slots, pools.max_drafts) == (3, 5)
    ((keys, values),) = pools.kv
    assert keys.shape == values.shape == (blocks * 16, 1, 4)
    assert keys.dtype == torch.float64


# -- observers ---------------------------------------------------------------


class Observer:
    """Raises at its second step."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.steps = 0

    @hookimpl
    def step_finished(self) -> None:
        self.steps += 1
        if self.error is not None and self.steps == 2:
            raise self.error


def test_an_observer_that_raises_is_reported_and_taken_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, good = Observer(ValueError("tired")), Observer()
    with caplog.at_level(logging.ERROR), LLM(counting(), observers=[bad, good]) as llm:
        (output,) = generate(llm, [[1]])
    assert output.outputs[0].token_ids == count(2, 8)
    assert (bad.steps, good.steps) == (2, 8)
    assert "was taken off" in caplog.text
    assert "tired" in caplog.text


# -- steps that break off ----------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit()])
def test_an_interrupt_in_a_step_ends_its_requests_and_leaves_the_llm_usable(
    error: BaseException,
) -> None:
    with LLM(counting(), observers=[Observer(error)], max_num_seqs=2) as llm:
        with pytest.raises(type(error)):
            generate(llm, [[1], [2], [3]])
        assert_idle(llm)


@pytest.mark.parametrize(
    "where",
    [
        "target.forward",
        "_committed",
        "_record",
        "reporting.step",
        "scheduler.admit",
        "scheduler.choose",
    ],
)
def test_an_error_of_our_own_ends_every_running_request(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(counting(), max_num_seqs=2) as llm:
        engine: Any = llm._loaded.engine
        owner, name = (engine, where) if where[0] == "_" else (
            getattr(engine, where.split(".")[0]), where.split(".")[1]
        )  # fmt: skip
        right, calls = getattr(owner, name), []

        def wrong(*arguments: Any, **more: Any) -> Any:
            calls.append(name)
            if len(calls) == 3:
                raise RuntimeError("out of luck")
            return right(*arguments, **more)

        monkeypatch.setattr(owner, name, wrong)
        other = llm.stream([[5]], greedy())
        assert next(other).outputs[0].token_ids == [6]
        with pytest.raises(RuntimeError, match="out of luck"):
            generate(llm, [[1], [2], [3]])
        # the stream was in the same step: half of it cannot be told from the whole
        *_, last = other
        assert last.finished
        assert last.outputs[0].finish_reason == "error"
        assert last.error == "a step was broken off by RuntimeError: out of luck"
        assert_idle(llm)


def test_an_interrupt_between_steps_aborts_only_its_own_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LLM(counting()) as llm:
        other = llm.stream([[5]], greedy())
        next(other)

        class Bar:
            def __init__(self, **_: Any) -> None: ...

            def __enter__(self) -> Bar:
                return self

            def __exit__(self, *_: object) -> None: ...

            def update(self) -> None:
                raise KeyboardInterrupt

        monkeypatch.setattr("tqdm.auto.tqdm", Bar)
        with pytest.raises(KeyboardInterrupt) as caught:
            llm.generate([[1], [2]], [greedy(2), greedy()])
        monkeypatch.undo()
        # at once, although the traceback still holds the frames
        assert caught.tb is not None
        assert len(llm._loaded.engine.scheduler.running) == 1
        *_, last = other
        assert last.outputs[0].token_ids == count(6, 8)
        assert last.error is None
        assert_idle(llm)


def test_drafts_end_where_the_drafter_reaches_no_further() -> None:
    class Near(OwnRule):
        def capabilities(self) -> Capabilities:
            return Capabilities(max_context=6)

        verify = None  # type: ignore[assignment]

    with LLM(counting(), speculative_config={"method": Near, "num_speculative_tokens": 2}) as llm:
        (output,) = generate(llm, [[1]], max_tokens=12)
    assert output.outputs[0].token_ids == count(2, 12)
    numbers = output.metrics.speculative_decoding
    # from 2 tokens: blocks of 3 until length 6 is reached, then one by one
    assert numbers.drafted_per_pos == [2, 1]
    assert numbers.skipped == {"context": 5, "budget": 1}


def test_why_there_were_no_drafts_is_counted() -> None:
    table = [[1, 1, 2], [2, 8, 0]]
    config = {
        "method": OwnRule,
        "num_speculative_tokens": 2,
        "num_speculative_tokens_per_batch_size": table,
        "rejection_sample_method": "own",
    }
    with LLM(counting(), speculative_config=config) as llm:
        one, two = llm.generate(
            [[1], [1]],
            [greedy(4), greedy(9)],
            use_tqdm=False,
        )
    assert one.metrics.speculative_decoding.skipped == {"policy": 3}
    # alone again, the other drafts; its last token has no room for a draft
    assert two.metrics.speculative_decoding.skipped == {"policy": 4, "budget": 1}
    assert two.metrics.speculative_decoding.num_draft_tokens == 2

    class Silent(LifeCycle):
        pass

    with LLM(counting(), speculative_config={"method": Silent}) as llm:
        (output,) = generate(llm, [[1]], max_tokens=5)
    assert output.metrics.speculative_decoding.skipped == {"nothing_proposed": 3, "budget": 1}
    with LLM(counting()) as llm:
        (output,) = generate(llm, [[1]], max_tokens=5)
    assert output.metrics.speculative_decoding.skipped == {}
    assert output.metrics.speculative_decoding.num_plain_steps == 4


def test_a_speculator_error_is_a_plugin_error() -> None:
    assert issubclass(SpeculatorError, PluginError)


def test_the_tiny_target_is_not_changed_by_a_run() -> None:
    model = tiny_target()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with LLM(model, speculative_config={"method": LifeCycle}) as llm:
        generate(llm, [[1]])
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


# -- set aside and resumed ---------------------------------------------------

Pages = Callable[[Any, int], int]


@attrs.frozen(eq=False)
class Worded:
    """A model whose tokens are words, with the outputs of single requests to compare with."""

    model: PreTrainedModel
    tokenizer: Any
    alone: dict[str, RequestOutput] = attrs.field(factory=dict)

    def run(
        self, prompts: list[list[int]], params: list[SamplingParams], **llm: Any
    ) -> list[RequestOutput]:
        with LLM(self.model, tokenizer=self.tokenizer, **llm) as engine:
            outputs = engine.generate(prompts, params, use_tqdm=False)
            scheduler = engine._loaded.engine.scheduler
            assert scheduler.pool.free == scheduler.num_blocks
            assert not scheduler.running
        return outputs

    def by_itself(self, kind: str) -> RequestOutput:
        """The output of a kind of request that has the engine to itself, and memory enough."""
        if kind not in self.alone:
            (self.alone[kind],) = self.run([PROMPTS[kind]], [params_of(kind)], max_logprobs=-1)
        return self.alone[kind]


@pytest.fixture(scope="module")
def worded(model_folder: Path) -> Worded:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = tiny_target(vocab=len(tokenizer), max_model_len=64, eos_token_id=1, seed=3)
    return Worded(model, tokenizer)


def no_word_three_times(rows: LogitsRows, logits: torch.Tensor) -> torch.Tensor:
    for i in range(len(rows)):
        times = np.bincount(rows.output_token_ids(i), minlength=logits.shape[1])
        logits[i, torch.from_numpy(times >= 2)] = -torch.inf
    return logits


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_k": 8, "seed": 5},
    "penalised": {
        "temperature": 0.7, "seed": 6, "repetition_penalty": 1.4, "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
    "bad words": {"temperature": 0, "bad_words": ["cat", "the mat", "it .", "dog ran"]},
    "biased": {"temperature": 1.0, "seed": 7, "logit_bias": {4: 2.0, 9: -5.0}},
    "allowed": {"temperature": 1.0, "seed": 8, "allowed_token_ids": [4, 5, 6, 7, 8]},
    "least length": {
        "temperature": 1.0, "seed": 9, "min_tokens": 20, "stop_token_ids": list(range(2, 12)),
        "ignore_eos": False,
    },
    "processed": {"temperature": 0.8, "seed": 10, "logits_processors": [no_word_three_times]},
    "logprobs": {"temperature": 0.8, "seed": 11, "logprobs": 3, "prompt_logprobs": 2},
    "all logprobs": {"temperature": 0, "logprobs": -1, "prompt_logprobs": 0},
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "one": {"seed": 3},
    "two": {"seed": 4},
    "plain words": {"seed": 12, "allowed_token_ids": list(range(4, 17))},
}
PROMPTS = {kind: [4 + n, 5, 6, 3 + n][: 3 + n % 2] for n, kind in enumerate([*KINDS, *OTHERS])}
TOKENS = 24


def params_of(kind: str, **more: Any) -> SamplingParams:
    values = {**KINDS, **OTHERS}[kind]
    return SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, **values, **more})


def with_drafts(name: str, worded: Worded, kinds: list[str]) -> dict[str, Any] | None:
    """The configuration of a speculator; one that knows what each kind of request emits."""
    if name == "none":
        return None
    config: dict[str, Any] = {"num_speculative_tokens": 3}
    if name == "bigram":
        vocab = worded.model.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        return {
            **config, "method": BigramSpeculator,
            "table": torch.randn(vocab, vocab, generator=generator),
        }  # fmt: skip
    streams = {tuple(PROMPTS[k]): worded.by_itself(k).outputs[0].token_ids for k in kinds}
    method = {"right": OracleSpeculator, "wrong": WrongSpeculator}[name]
    return {**config, "method": method, "streams": streams}


class Keeping:
    """Keeps every report, and what was told of slots, by the names of requests."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.names: list[dict[int, str]] = []  # who had which slot in each step
        self.resumed: dict[str, list[int]] = {}  # tokens that each had when it was resumed

    @hookimpl
    def step_finished(self, report: StepReport) -> None:
        self.reports.append(report)
        names = dict(self.names[-1]) if self.names else {}
        if report.changes is not None:
            for slot in report.changes.left:
                del names[slot]
            for info in report.changes.arrived:
                assert info.slot not in names
                names[info.slot] = info.request_id
            for info in report.changes.resumed:
                emitted = len(info.tokens) - info.prompt_length
                self.resumed.setdefault(info.request_id, []).append(emitted)
        self.names.append(names)


def assert_same(actual: RequestOutput, expected: RequestOutput) -> None:
    """Everything that a user can see of a completion is the same."""
    (one,), (other,) = actual.outputs, expected.outputs
    for name in ("token_ids", "text", "finish_reason", "stop_reason"):
        assert getattr(one, name) == getattr(other, name), name
    assert actual.error is expected.error is None
    assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-5)
    for mine, theirs in (
        (one.logprobs, other.logprobs),
        (actual.prompt_logprobs, expected.prompt_logprobs),
    ):
        assert (mine is None) == (theirs is None)
        for a, b in zip(mine or [], theirs or [], strict=True):
            assert (a is None) == (b is None)
            for (i, x), (j, y) in zip((a or {}).items(), (b or {}).items(), strict=True):
                assert (i, x.rank, x.decoded_token) == (j, y.rank, y.decoded_token)
                assert x.logprob == pytest.approx(y.logprob, abs=1e-5)


@pytest.mark.parametrize("drafts", ["none", "right", "wrong", "bigram"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_request_that_was_set_aside_emits_what_it_emits_alone(
    kind: str, drafts: str, worded: Worded, small_pages: Pages
) -> None:
    kinds, watching = ["one", "two", kind], Keeping()
    outputs = worded.run(
        [PROMPTS[k] for k in kinds],
        [params_of(k) for k in kinds],
        speculative_config=with_drafts(drafts, worded, kinds),
        kv_cache_memory=small_pages(worded.model, 14),
        max_num_batched_tokens=24,
        max_logprobs=-1,
        observers=[watching],
    )
    assert outputs[2].metrics.num_preemptions >= 1
    # in the middle of it, so that emitted tokens had to be computed again
    assert max(watching.resumed["2"]) >= 8
    for output, one in zip(outputs, kinds, strict=True):
        assert_same(output, worded.by_itself(one))


@pytest.mark.parametrize("drafts", ["none", "right", "wrong"])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_is_found_across_a_preemption(
    drafts: str, include: bool, worded: Worded, small_pages: Pages
) -> None:
    whole = worded.by_itself("plain words").outputs[0]
    words = whole.text.split()
    # the first pair of words that comes up late, and not before
    pairs = [" ".join(pair) for pair in itertools.pairwise(words)]
    number = next(n for n in range(16, 22) if pairs.index(pairs[n]) == n)
    params = params_of(
        "plain words", stop=["never", pairs[number]], include_stop_str_in_output=include
    )
    kinds, watching = ["one", "two", "plain words"], Keeping()
    *_, output = worded.run(
        [PROMPTS[k] for k in kinds],
        [params_of("one"), params_of("two"), params],
        speculative_config=with_drafts(drafts, worded, kinds),
        kv_cache_memory=small_pages(worded.model, 13),
        observers=[watching],
    )
    assert max(watching.resumed["2"]) >= 8
    (found,) = output.outputs
    assert (found.finish_reason, found.stop_reason) == ("stop", pairs[number])
    assert found.token_ids == whole.token_ids[: number + 2]
    before = whole.text[: whole.text.index(pairs[number])]
    assert found.text == before + (pairs[number] if include else "")


def test_what_a_request_is_set_aside_for_does_not_change_its_stream(
    worded: Worded, small_pages: Pages
) -> None:
    kinds = ["one", "two", "seeded"]
    with LLM(
        worded.model, tokenizer=worded.tokenizer, kv_cache_memory=small_pages(worded.model, 14)
    ) as llm:
        last: dict[str, RequestOutput] = {}
        texts: dict[str, list[str]] = {}
        times: dict[str, set[Any]] = {}
        for output in llm.stream([PROMPTS[k] for k in kinds], [params_of(k) for k in kinds]):
            last[output.request_id] = output
            texts.setdefault(output.request_id, []).append(output.outputs[0].text)
            started = output.metrics.first_scheduled_time, output.metrics.first_token_time
            times.setdefault(output.request_id, set()).add(started)
        assert llm._loaded.engine.scheduler.num_preemptions > 0
    for number, kind in enumerate(kinds):
        assert_same(last[str(number)], worded.by_itself(kind))
        # it only ever grew
        seen = texts[str(number)]
        assert all(b.startswith(a) for a, b in itertools.pairwise(seen))
        assert len(seen) == TOKENS
        # it started once
        ((scheduled, first),) = times[str(number)]
        assert scheduled <= first


@pytest.mark.parametrize("drafts", ["none", "right", "wrong"])
def test_the_numbers_of_a_request_that_was_set_aside_add_up(
    drafts: str, worded: Worded, small_pages: Pages
) -> None:
    kinds, watching = ["one", "two", "greedy", "seeded"], Keeping()
    with LLM(
        worded.model,
        tokenizer=worded.tokenizer,
        speculative_config=with_drafts(drafts, worded, kinds),
        kv_cache_memory=small_pages(worded.model, 14),
        max_num_batched_tokens=16,
        observers=[watching],
        per_request_spec_decode_metrics="detailed",
    ) as llm:
        outputs = llm.generate(
            [PROMPTS[k] for k in kinds], [params_of(k) for k in kinds], use_tqdm=False
        )
        totals = llm.metrics
    counted: dict[str, Counter[str]] = {str(n): Counter() for n in range(4)}
    steps: dict[str, list[tuple[int, int]]] = {str(n): [] for n in range(4)}
    for report, names in zip(watching.reports, watching.names, strict=True):
        for row, slot in enumerate(report.slots.tolist()):
            count = counted[names[slot]]
            drafted, accepted = int(report.drafted[row]), int(report.accepted[row])
            count["kept"] += int(report.kept[row])
            if report.is_decode[row]:
                count["steps" if drafted else "plain"] += 1
                count["emitted"] += int(report.emitted[row])
                steps[names[slot]] += [(drafted, accepted)] if drafted else []
            elif report.emitted[row]:
                count["prefilled"] += 1
    for output in outputs:
        numbers, count = output.metrics.speculative_decoding, counted[output.request_id]
        numbers.check(emitted=count["emitted"])
        assert (numbers.num_drafts, numbers.num_plain_steps) == (count["steps"], count["plain"])
        assert numbers.per_step_drafted == [d for d, _ in steps[output.request_id]]
        assert numbers.per_step_accepted == [a for _, a in steps[output.request_id]]
        assert output.metrics.num_generated_tokens == count["kept"] == TOKENS
        # a prefill gives a token that belongs to no decode step, and so does every resumption
        # but one that had a single token left to compute
        assert 1 <= count["prefilled"] <= 1 + output.metrics.num_preemptions
        assert count["emitted"] + count["prefilled"] >= TOKENS
        if drafts == "none":
            assert numbers.skipped == {}
            assert count["emitted"] + count["prefilled"] == TOKENS
        else:
            assert numbers.num_drafts > 0
        metrics = output.metrics
        assert metrics.first_scheduled_time is not None
        assert metrics.first_token_time is not None
        assert metrics.finished_time is not None
        assert metrics.first_scheduled_time <= metrics.first_token_time < metrics.finished_time
    assert sum(o.metrics.num_preemptions for o in outputs) >= 2
    assert watching.reports[-1].num_preempted == sum(o.metrics.num_preemptions for o in outputs)
    added = SpeculationMetrics()
    for output in outputs:
        added.add(output.metrics.speculative_decoding)
    assert totals.as_dict() == added.as_dict()


class TellingSpeculator(RecordingSpeculator):
    """Also keeps what it was told, and of every stay in a slot what it was shown."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.told: list[RequestChanges] = []
        self.names: dict[int, str] = {}
        self.stays: list[tuple[str, dict[int, int], dict[int, torch.Tensor]]] = []

    def requests_changed(self, changes: RequestChanges) -> None:
        self.told.append(changes)
        self.close_stays(changes.left)
        super().requests_changed(changes)
        for request in changes.arrived:
            assert request.slot not in self.names
            self.names[request.slot] = request.request_id

    def close_stays(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.stays.append((self.names.pop(slot), self.pairs[slot], self.features[slot]))


def test_a_speculator_is_shown_every_row_of_a_resumed_request_again(
    worded: Worded, small_pages: Pages
) -> None:
    kinds = ["one", "two", "seeded", "greedy"]
    config = {"method": TellingSpeculator, "layers": [1], "num_speculative_tokens": 2}
    states = []
    for memory in (None, small_pages(worded.model, 14)):
        with LLM(
            worded.model,
            tokenizer=worded.tokenizer,
            speculative_config=config,
            kv_cache_memory=memory,
            max_num_batched_tokens=16,
        ) as llm:
            outputs = llm.generate(
                [PROMPTS[k] for k in kinds], [params_of(k) for k in kinds], use_tqdm=False
            )
            speculator = llm.speculator
            assert isinstance(speculator, TellingSpeculator)
            speculator.close_stays(list(speculator.names))
            states.append(speculator)
    roomy, tight = states
    assert not any(told.preempted or told.resumed for told in roomy.told)
    preempted = sum(len(told.preempted) for told in tight.told)
    assert preempted == sum(len(told.resumed) for told in tight.told) >= 2
    once = {name: features for name, _, features in roomy.stays}
    whole = {o.request_id: o.prompt_token_ids + o.outputs[0].token_ids for o in outputs}
    stays: Counter[str] = Counter()
    for name, pairs, features in tight.stays:
        stays[name] += 1
        tokens = whole[name]
        # from the first row on, without a hole, each with the token that really follows
        assert pairs == {p: tokens[p + 1] for p in range(len(pairs))}
        for position, feature in features.items():
            if position in once[name]:
                assert torch.allclose(feature, once[name][position], atol=1e-9)
    assert sum(stays.values()) == 4 + preempted
    for told in tight.told:
        for info in told.resumed:
            number = int(info.request_id)
            assert info.prompt_length == len(PROMPTS[kinds[number]])
            assert list(info.tokens) == whole[info.request_id][: len(info.tokens)]
            assert len(info.tokens) > info.prompt_length
            assert stays[info.request_id] == 1 + outputs[number].metrics.num_preemptions


@pytest.mark.parametrize("method", ["standard", "block"])
def test_laws_of_drafts_survive_a_change_of_slots(
    method: str, worded: Worded, small_pages: Pages
) -> None:
    # drafts drawn from the target's own law are all kept, unless another slot's law is read
    table = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    model = toy_target(table, max_model_len=64)
    config = {
        "method": BigramSpeculator, "table": table, "rejection_sample_method": method,
        "num_speculative_tokens": 3,
    }  # fmt: skip
    params = [SamplingParams(seed=n, max_tokens=24) for n in range(6)]
    with LLM(
        model, speculative_config=config, kv_cache_memory=small_pages(model, 16), max_num_seqs=4
    ) as llm:
        outputs = llm.generate([[n % 8] for n in range(6)], params, use_tqdm=False)
        metrics = llm.metrics
    assert sum(o.metrics.num_preemptions for o in outputs) > 0
    assert [len(o.outputs[0].token_ids) for o in outputs] == [24] * 6
    assert 0 < metrics.num_accepted_tokens == metrics.num_draft_tokens


def test_a_higher_priority_sets_aside_and_both_emit_what_they_emit_alone(worded: Worded) -> None:
    kinds = ["one", "two", "greedy"]
    with LLM(
        worded.model, tokenizer=worded.tokenizer, scheduling_policy="priority", max_num_seqs=1
    ) as llm:
        ids = {
            llm.add_request(PROMPTS[k], params_of(k), priority=3 - n): k
            for n, k in enumerate(kinds[:2])
        }
        order = []
        for _ in range(5):
            llm.step()
        ids[llm.add_request(PROMPTS["greedy"], params_of("greedy"), priority=-1)] = "greedy"
        while llm.has_unfinished_requests():
            for output in llm.step():
                if output.finished:
                    order.append(ids[output.request_id])
                    assert_same(output, worded.by_itself(ids[output.request_id]))
                    assert output.metrics.num_preemptions == (ids[output.request_id] == "two")
    assert order == ["greedy", "two", "one"]


def test_a_request_aborted_while_it_is_set_aside_keeps_what_it_emitted(
    worded: Worded, small_pages: Pages
) -> None:
    kinds = ["one", "two", "greedy"]
    with LLM(
        worded.model, tokenizer=worded.tokenizer, kv_cache_memory=small_pages(worded.model, 14)
    ) as llm:
        for kind in kinds:
            llm.add_request(PROMPTS[kind], params_of(kind), request_id=kind)
        scheduler = llm._loaded.engine.scheduler
        while not scheduler.num_preemptions:
            llm.step()
        assert [s.request_id for s in scheduler.waiting] == ["greedy"]
        llm.abort_request("greedy")
        (aborted,) = [o for o in llm.step() if o.request_id == "greedy"]
        (completion,) = aborted.outputs
        assert completion.finish_reason == "abort"
        whole = worded.by_itself("greedy").outputs[0]
        number = len(completion.token_ids)
        assert 8 <= number < TOKENS
        assert completion.token_ids == whole.token_ids[:number]
        assert whole.text.startswith(completion.text)
        while llm.has_unfinished_requests():
            for output in llm.step():
                if output.finished:
                    assert_same(output, worded.by_itself(output.request_id))
        assert scheduler.pool.free == scheduler.num_blocks


def test_a_drafters_errors_end_a_resumed_request_alone(worded: Worded, small_pages: Pages) -> None:
    class Forgetful(ConstantSpeculator):
        def requests_changed(self, changes: RequestChanges) -> None:
            if changes.resumed:
                raise LookupError("never seen before")

    kinds = ["one", "two", "greedy"]
    outputs = worded.run(
        [PROMPTS[k] for k in kinds],
        [params_of(k) for k in kinds],
        speculative_config={"method": Forgetful},
        kv_cache_memory=small_pages(worded.model, 14),
    )
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "length", "error"]
    assert "LookupError in requests_changed: never seen before" in str(outputs[2].error)
    number = len(outputs[2].outputs[0].token_ids)
    assert number >= 8
    assert (
        outputs[2].outputs[0].token_ids == worded.by_itself("greedy").outputs[0].token_ids[:number]
    )
    for output, kind in zip(outputs[:2], kinds, strict=False):
        assert_same(output, worded.by_itself(kind))


@pytest.mark.parametrize(("drafts", "emitted"), [("none", 17), ("right", 12), ("bigram", 17)])
def test_deterministic_logits_do_not_change_bit_for_bit_if_a_request_is_set_aside(
    drafts: str, emitted: int, small_pages: Pages
) -> None:
    vocab = 61
    model = tiny_target(max_model_len=128, dtype=torch.float32, hidden_size=64)
    # more than 16 rows of a prompt are computed as a chunk, and cut at 20 and 40; what was emitted
    # is not, however much of it there is
    prompts = [[(7 * n + 3 * i) % vocab for i in range(30 + 9 * n)] for n in range(4)]
    params = [
        SamplingParams(temperature=n % 2, seed=n, max_tokens=40, logprobs=0) for n in range(4)
    ]
    settings: dict[str, Any] = {"deterministic": True, "max_num_batched_tokens": 40}
    with LLM(model, **settings) as llm:
        alone = [
            llm.generate([p], q, use_tqdm=False)[0] for p, q in zip(prompts, params, strict=True)
        ]
    config: dict[str, Any] | None = None
    if drafts == "right":
        streams = {tuple(o.prompt_token_ids): o.outputs[0].token_ids for o in alone}
        config = {"method": OracleSpeculator, "streams": streams}
    elif drafts == "bigram":
        config = {"method": BigramSpeculator, "table": torch.eye(vocab)}
    watching = Keeping()
    with LLM(
        model,
        speculative_config=config,
        kv_cache_memory=small_pages(model, 48),
        observers=[watching],
        **settings,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert max(itertools.chain.from_iterable(watching.resumed.values())) >= emitted
    for output, expected in zip(outputs, alone, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        # equal, not close
        assert output.outputs[0].cumulative_logprob == expected.outputs[0].cumulative_logprob
        assert output.outputs[0].logprobs == expected.outputs[0].logprobs


# -- what a step reports -----------------------------------------------------


def reported(report: StepReport) -> dict[str, Any]:
    """The fields that do not depend on a clock or on a page's size."""
    values = attrs.asdict(report, recurse=False)
    for name in ("seconds", "changes"):
        del values[name]
    arrays = {n: v.tolist() for n, v in values.items() if isinstance(v, np.ndarray)}
    return {**values, **arrays}


def test_a_report_says_what_every_request_of_a_mixed_step_did(small_pages: Pages) -> None:
    model, watching = counting(vocab=48), Keeping()
    config = {
        "method": OracleSpeculator, "streams": {(1,): count(2, 20)}, "num_speculative_tokens": 2,
    }  # fmt: skip
    nothing = SKIP_REASONS.index("nothing_proposed")
    with LLM(
        model,
        speculative_config=config,
        max_num_batched_tokens=16,
        max_num_seqs=3,
        kv_cache_memory=small_pages(model, 40),
        observers=[watching],
    ) as llm:
        llm.add_request([1], greedy(20, stop_token_ids=[7]))
        llm.add_request([20], greedy(9))
        llm.add_request(count(0, 30), greedy(1))
        llm.add_request([5], greedy(2))
        for _ in range(3):
            llm.step()
        llm.abort_request("1")
        assert [o.request_id for o in llm.step()] == ["1"]  # no step was needed
        llm.step()
    one, two, three, four, closing = watching.reports
    assert all(report.seconds > 0 for report in watching.reports[:4])
    assert (closing.num_running, closing.num_waiting, len(closing.slots)) == (0, 0, 0)
    told = one.changes
    assert told is not None
    assert [(i.slot, i.request_id) for i in told.added] == [(0, "0"), (1, "1"), (2, "2")]
    assert reported(one) == {
        "slots": [0, 1, 2], "is_decode": [False] * 3, "drafted": [0] * 3, "accepted": [0] * 3,
        "emitted": [1, 1, 0], "kept": [1, 1, 0], "skipped": [-1] * 3, "ended": (),
        "num_running": 3, "num_waiting": 1, "num_preempted": 0, "prompt_tokens": 16,
        "free_blocks": 40 - 1 - 1 - 8, "num_blocks": 40,
    }  # fmt: skip
    assert two.changes is None
    assert reported(two) == {
        # two drafts that stand, a step without any, and the prompt's next chunk
        "slots": [0, 1, 2], "is_decode": [True, True, False], "drafted": [2, 0, 0],
        "accepted": [2, 0, 0], "emitted": [3, 1, 0], "kept": [3, 1, 0],
        "skipped": [-1, nothing, -1], "ended": (), "num_running": 3, "num_waiting": 1,
        "num_preempted": 0, "prompt_tokens": 12, "free_blocks": 40 - 1 - 1 - 8, "num_blocks": 40,
    }  # fmt: skip
    assert three.changes is None
    assert reported(three) == {
        # both drafts stand, but 7 stops; the prompt's last chunk gives the only token there is
        "slots": [0, 1, 2], "is_decode": [True, True, False], "drafted": [2, 0, 0],
        "accepted": [2, 0, 0], "emitted": [3, 1, 1], "kept": [2, 1, 1],
        "skipped": [-1, nothing, -1],
        "ended": (EndedRequest(0, "0", "stop"), EndedRequest(2, "2", "length")),
        "num_running": 1, "num_waiting": 1, "num_preempted": 0, "prompt_tokens": 4,
        "free_blocks": 39, "num_blocks": 40,
    }  # fmt: skip
    told = four.changes
    assert told is not None
    assert set(told.finished) == {0, 1, 2}
    assert [(i.slot, i.request_id) for i in told.added] == [(0, "3")]
    assert reported(four) == {
        "slots": [0], "is_decode": [False], "drafted": [0], "accepted": [0], "emitted": [1],
        "kept": [1], "skipped": [-1], "ended": (EndedRequest(1, "1", "abort"),),
        "num_running": 1, "num_waiting": 0, "num_preempted": 0, "prompt_tokens": 1,
        "free_blocks": 39, "num_blocks": 40,
    }  # fmt: skip


def test_a_report_tells_of_requests_that_were_set_aside(small_pages: Pages) -> None:
    model, watching = counting(vocab=48), Keeping()
    with LLM(model, kv_cache_memory=small_pages(model, 7), observers=[watching]) as llm:
        outputs = llm.generate([[1], [20]], greedy(20), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [count(2, 20), count(21, 20)]
    told = [(r, r.changes) for r in watching.reports if r.changes is not None]
    (report,) = [r for r, changes in told if changes.preempted]
    assert (report.changes.preempted, report.num_preempted) == ((1,), 1)  # type: ignore[union-attr]
    assert (report.num_running, report.num_waiting, report.slots.tolist()) == (1, 1, [0])
    assert watching.reports[-1].num_preempted == 1
    (resumed,) = [changes.resumed for _, changes in told if changes.resumed]
    (info,) = resumed
    assert (info.request_id, info.prompt_length) == ("1", 1)
    assert list(info.tokens) == count(20, len(info.tokens))
    # what it had emitted is computed again, in one chunk
    (again,) = [r for r in watching.reports[1:] if r.prompt_tokens]
    assert again.prompt_tokens == len(info.tokens)
    assert again.is_decode.tolist() == [False]


def test_drafts_that_memory_or_the_step_had_no_room_for_are_told_apart(
    small_pages: Pages,
) -> None:
    model = counting(vocab=48)
    streams = {(1,): count(2, 20), (21,): count(22, 20)}
    config = {"method": OracleSpeculator, "streams": streams, "num_speculative_tokens": 4}
    with LLM(model, speculative_config=config, kv_cache_memory=small_pages(model, 6)) as llm:
        outputs = llm.generate([[1], [21]], greedy(15), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [count(2, 15), count(22, 15)]
    assert outputs[1].metrics.speculative_decoding.skipped.get("memory", 0) >= 1
    with LLM(model, speculative_config=config, max_num_batched_tokens=2) as llm:
        outputs = llm.generate([[1], count(0, 10)], greedy(15), use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == count(2, 15)
    assert outputs[0].metrics.speculative_decoding.skipped["batch"] >= 1


def test_single_steps_are_kept_if_they_are_asked_for() -> None:
    streams = {(1,): count(2, 20)}
    config = {"method": OracleSpeculator, "streams": streams, "num_speculative_tokens": 3}
    for word, steps in (("detailed", [3, 3, 2]), ("summary", None)):
        with LLM(
            counting(), speculative_config=config, per_request_spec_decode_metrics=word
        ) as llm:
            (output,) = generate(llm, [[1]], max_tokens=12)
            assert llm.metrics.per_step_drafted is None
        numbers = output.metrics.speculative_decoding
        assert (numbers.per_step_drafted, numbers.per_step_accepted) == (steps, steps)
        assert numbers.num_drafts == 3
