"""Speculators that misbehave, steps that break off: who pays, and what is left afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar, cast

import pytest
import torch
from transformers import PreTrainedModel

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
from specdec.runner.isolation import join
from specdec.runner.state import Slots
from specdec.testing import (
    BigramSpeculator,
    ConstantSpeculator,
    RaisingSpeculator,
    WrongSpeculator,
    tiny_target,
    toy_target,
)
from specdec.types import KVLayer, RequestChanges, VerificationRule
from specdec_kernels import DenseQ, SparseQ


def greedy(most: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=most)


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
    with LLM(counting(), speculative_config=config, max_num_batched_tokens=3) as llm:
        # the last prompt is still in its chunks when the rule breaks
        outputs = generate(llm, [[10], [3], [15, 16], [20] * 8 + [10]])
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
    with LLM(counting(), speculative_config=config, max_num_batched_tokens=4) as llm:
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


@pytest.mark.parametrize("where", ["target.forward", "_committed", "_record", "scheduler.schedule"])
def test_an_error_of_our_own_ends_every_running_request(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(counting(), max_num_seqs=2) as llm:
        engine: Any = llm._loaded.engine
        owner, name = (engine, where) if where[0] == "_" else (
            getattr(engine, where.split(".")[0]), where.split(".")[1]
        )  # fmt: skip
        right, calls = getattr(owner, name), []

        def wrong(*arguments: Any) -> Any:
            calls.append(name)
            if len(calls) == 3:
                raise RuntimeError("out of luck")
            return right(*arguments)

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
