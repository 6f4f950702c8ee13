"""Rules whose tokens depend on the drafts keep the target's law, and the checks would notice.

Slow because a law shows only in thousands of samples: about 2 s a case.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec import LLM, Capabilities, Draft, SamplingParams, Step, Verdict, hookimpl
from specdec.testing import (
    BigramSpeculator,
    ConstantSpeculator,
    assert_law,
    assert_lossless,
    tiny_target,
    toy_target,
)
from specdec.testing.speculators import BigramOptions
from specdec.types import VerificationRule
from specdec_kernels import DenseQ

DRAFTER = torch.tensor([[1.5, 0.1, -0.4], [0.2, 0.9, -0.5], [0.8, -1.0, 0.3]])


def bigram(**options: Any) -> dict[str, Any]:
    return {
        "method": BigramSpeculator,
        "table": DRAFTER,
        "num_speculative_tokens": 2,
        **options,
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"candidates": 2},
        {"with_q": False},
        {"draft_sample_method": "greedy"},
    ],
    ids=["dense", "sparse", "law-unknown", "one-hot"],
)
@pytest.mark.parametrize("rule", ["standard", "block"])
def test_tokens_have_the_targets_law(rule: str, options: dict[str, Any]) -> None:
    # four tokens with two drafts: a random number used in two steps would show
    assert_law(bigram(rejection_sample_method=rule, **options), tokens=4, samples=3000)


def test_tokens_have_the_targets_law_under_coupled_verification() -> None:
    assert_law(bigram(), samples=3000)


def test_tokens_have_the_targets_law_at_another_temperature() -> None:
    assert_law(bigram(rejection_sample_method="block"), samples=3000, temperature=0.6)


# -- the checks notice -------------------------------------------------------


@attrs.frozen
class LossyOptions(BigramOptions):
    """keep: how many drafts are kept unseen."""

    keep: int = 1


class KeepingSpeculator(BigramSpeculator):
    """Brings a rule that keeps the first draft whatever the target says of it."""

    Options: ClassVar[type] = LossyOptions

    def capabilities(self) -> Capabilities:
        rule = VerificationRule("keep-first", lossless=False)
        return Capabilities(drawn="deterministic", verification=(rule,))

    @hookimpl
    def verify(self, step: Step, draft: Draft, logits: torch.Tensor) -> Verdict:
        batch, k = draft.tokens.shape
        tokens = torch.full((batch, k + 1), -1)
        rows = torch.full((batch, k + 1), -1)
        count = torch.zeros(batch, dtype=torch.int64)
        for request in range(batch):
            first, end = step.logits_start[request : request + 2].tolist()
            if first == end:
                continue
            kept = min(self.options.keep, end - first - 1)
            tokens[request, :kept] = draft.tokens[request, :kept]
            tokens[request, kept] = logits[first + kept].argmax()
            rows[request, : kept + 1] = torch.arange(first, first + kept + 1)
            count[request] = kept + 1
        return Verdict(tokens=tokens, count=count, rows=rows)


def keeping(keep: int) -> dict[str, Any]:
    return {
        "method": KeepingSpeculator,
        "table": torch.eye(61).roll(1, dims=1),
        "draft_sample_method": "greedy",
        "rejection_sample_method": "keep-first",
        "num_speculative_tokens": 3,
        "keep": keep,
    }


def test_a_lossy_rule_runs_if_it_is_named_and_the_checks_fail_for_it() -> None:
    with LLM(tiny_target(), speculative_config=keeping(1)) as llm:
        llm.generate([1, 2], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
        assert not llm.lossless
        assert llm.metrics.num_accepted_tokens > 0
    with pytest.raises(AssertionError, match="together, k=2"):
        assert_lossless(keeping(1), model=tiny_target(), drafts=(2,))
    law = keeping(1) | {"table": DRAFTER}
    with pytest.raises(AssertionError, match="chi-square"):
        assert_law(law, samples=1000)


def test_a_rule_of_the_speculators_own_that_is_exact_passes_greedily() -> None:
    config = keeping(0)  # keeps nothing: the target's argmax, step by step
    params = SamplingParams(temperature=0, max_tokens=8)
    model = tiny_target()
    with LLM(model) as plain, LLM(model, speculative_config=config) as llm:
        expected = plain.generate([[1, 2], [9]], params, use_tqdm=False)
        actual = llm.generate([[1, 2], [9]], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in actual] == [o.outputs[0].token_ids for o in expected]


class LyingSpeculator(BigramSpeculator):
    """Draws from one law and hands over another."""

    @hookimpl
    def propose(self, step: Step, k: int) -> Draft:
        draft = super().propose(step, k)
        return Draft(tokens=draft.tokens, q=DenseQ(self.logits.roll(1, dims=-1)))


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_a_wrong_law_of_the_drafts_is_noticed(rule: str) -> None:
    config = bigram(rejection_sample_method=rule) | {"method": LyingSpeculator}
    with pytest.raises(AssertionError, match="chi-square"):
        assert_law(config, samples=3000)


# -- synthetic acceptance ----------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("given_rates", "expected"),
    [
        ({"synthetic_acceptance_rates": [0.8, 0.5, 0.1]}, [0.8, 0.5, 0.1]),
        ({"synthetic_acceptance_length": 2.5}, [1.0, 0.5, 0.0]),
    ],
    ids=["rates", "length"],
)
def test_synthetic_acceptance_meets_its_rates(
    given_rates: dict[str, Any], expected: list[float], temperature: float
) -> None:
    config = {
        "method": ConstantSpeculator,
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        **given_rates,
    }
    params = [
        SamplingParams(temperature=temperature, seed=s, max_tokens=80, ignore_eos=True)
        for s in range(250)
    ]
    with LLM(
        toy_target(torch.zeros(8, 8)),
        speculative_config=config,
        max_num_seqs=250,
        max_num_batched_tokens=1000,
    ) as llm:
        llm.generate([[1]] * 250, params, use_tqdm=False)
        metrics = llm.metrics
        assert not llm.lossless
    # drafts near the end are cut by the budget: look at each column's own drafts
    assert metrics.num_drafts > 7000
    for column, rate in enumerate(expected):
        drafted = metrics.drafted_per_pos[column]
        measured = metrics.accepted_per_pos[column] / drafted
        sigma = math.sqrt(max(rate * (1 - rate), 1e-9) / drafted)
        assert abs(measured - rate) < max(0.02, 3 * sigma), (column, measured)


# -- metrics -----------------------------------------------------------------


class Counting:
    """Adds up verdicts as an observer sees them: before stops cut anything."""

    def __init__(self) -> None:
        self.drafted = self.accepted = self.plain = self.emitted = 0

    @hookimpl
    def step_finished(self, step: Step, verdict: Verdict) -> None:
        decode = ~step.is_prefill & (step.slots >= 0)
        tested, count = step.num_drafts[decode], verdict.count[decode]
        self.drafted += int((tested > 0).sum())
        self.plain += int((tested == 0).sum())
        self.accepted += int((count - 1).sum())
        self.emitted += int(count.sum())


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    k=st.integers(1, 6),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    rule=st.sampled_from(["coupled", "standard", "block"]),
    requests=st.integers(1, 6),
    slots=st.integers(1, 4),
    policy=st.sampled_from(["fixed", "falling"]),
    most=st.integers(1, 20),
)
def test_the_numbers_of_speculation_add_up(
    k: int, temperature: float, rule: str, requests: int, slots: int, policy: str, most: int
) -> None:
    observer = Counting()
    config = bigram(rejection_sample_method=rule, length_policy=policy) | {
        "num_speculative_tokens": k
    }
    table = torch.tensor([[2.0, 0.1, -0.4], [0.2, 1.9, -0.5], [0.8, -1.0, 0.3]])
    with LLM(
        toy_target(table, eos_token_id=2),
        speculative_config=config,
        max_num_seqs=slots,
        observers=[observer],
    ) as llm:
        outputs = llm.generate(
            [[0, 1]] * requests,
            SamplingParams(temperature=temperature, max_tokens=most),
            use_tqdm=False,
        )
        total = llm.metrics
    assert (total.num_drafts, total.num_plain_steps) == (observer.drafted, observer.plain)
    assert total.num_accepted_tokens == observer.accepted
    # every verified step emits what it accepted and one token of the target's own
    assert observer.emitted == total.num_drafts + total.num_plain_steps + observer.accepted
    assert sum(total.accepted_per_pos) == total.num_accepted_tokens
    assert sum(total.drafted_per_pos) == total.num_draft_tokens
    for counts in (total.accepted_per_pos, total.drafted_per_pos):
        assert counts == sorted(counts, reverse=True)
    assert all(a <= d for a, d in zip(total.accepted_per_pos, total.drafted_per_pos, strict=True))
    assert sum(total.skipped.values()) == total.num_plain_steps
    own = [o.metrics.speculative_decoding for o in outputs]
    assert sum(m.num_drafts for m in own) == total.num_drafts
    assert sum(m.num_accepted_tokens for m in own) == total.num_accepted_tokens
    for output in outputs:
        tokens = len(output.outputs[0].token_ids)
        assert output.metrics.num_generated_tokens == tokens
        numbers = output.metrics.speculative_decoding
        whole = 1 + numbers.num_drafts + numbers.num_plain_steps + numbers.num_accepted_tokens
        assert tokens <= whole <= tokens + k  # what a stop or the budget cut from the last block
