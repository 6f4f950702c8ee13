"""Two thousand random requests, and what each of them gives alone.

Every sampling parameter is mixed with every other; requests come, go and are aborted between
steps; pages, slots and rows are so few that requests are set aside all the time. A request that was
not aborted gives what it gives alone, in plain decoding, in an engine of its own.

Slow because it runs two thousand requests, and each of 130 alone as well.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from specdec import LLM, Capabilities, PromptError, SamplingParams
from specdec.logits_processors import LogitsRows, row_by_row
from specdec.testing import (
    BigramSpeculator,
    ConstantSpeculator,
    OracleSpeculator,
    PlaceholderSpeculator,
    WrongSpeculator,
)
from specdec.types import KVLayer

VOCAB = 32
PAGE = 16 * 2 * 2 * 8 * 8  # bytes: tokens of a page, keys and values, heads, head size, float64
DISTINCT, TOTAL = 130, 2000
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "see", "it", "."]


# -- random requests ---------------------------------------------------------


def never_twice(rows: LogitsRows, logits: Tensor) -> Tensor:
    """No token directly after itself; edits in place."""
    for i in range(len(rows)):
        written = rows.output_token_ids(i)
        if len(written):
            logits[i, int(written[-1])] = -math.inf
    return logits


def by_position(rows: LogitsRows, logits: Tensor) -> Tensor:
    """Another preference at every position; gives new logits."""
    start = torch.tensor([rows.position(i) for i in range(len(rows))])
    wave = torch.cos(start[:, None] * 0.7 + torch.arange(logits.shape[1]))
    return logits + wave.to(logits.dtype)


def seldom(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Whatever the prompt and the output hold is less likely; looks at one row at a time."""
    there = torch.zeros_like(scores)
    there[0, input_ids[0]] = 0.8
    return scores - there


def phrase(chance: random.Random) -> str:
    words = chance.sample(WORDS, chance.choice([1, 1, 2]))
    text = " ".join(words)
    return text[: chance.randint(1, len(text))] if chance.random() < 0.2 else text


def parameters(chance: random.Random) -> dict[str, Any]:
    """Keywords of `SamplingParams`, each there now and then."""

    def often(share: float) -> bool:
        return chance.random() < share

    values: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": None if often(0.03) else chance.randint(1, 14),
        "ignore_eos": often(0.4),
        "output_kind": chance.choice(["cumulative", "delta", "final_only"]),
        "skip_special_tokens": often(0.5),
    }
    if often(0.6):
        values |= {"temperature": chance.uniform(0.3, 1.6), "seed": chance.randrange(2**40)}
        values["n"] = chance.choice([1, 1, 1, 2, 3])
        for name, value in (
            ("top_k", chance.randint(1, 12)),
            ("top_p", chance.uniform(0.4, 0.99)),
            ("min_p", chance.uniform(0.01, 0.2)),
        ):
            if often(0.3):
                values[name] = value
    ids = range(VOCAB)
    others: list[tuple[float, str, Any]] = [
        (0.2, "repetition_penalty", chance.uniform(0.7, 1.8)),
        (0.2, "presence_penalty", chance.uniform(-2, 2)),
        (0.2, "frequency_penalty", chance.uniform(-1, 2)),
        (0.2, "logit_bias", {i: chance.uniform(-4, 4) for i in chance.sample(ids, 5)}),
        (0.2, "bad_words", [phrase(chance) for _ in range(chance.randint(1, 3))]),
        (0.1, "allowed_token_ids", chance.sample(ids, chance.randint(3, 20))),
        (0.2, "min_tokens", chance.randint(1, 10)),
        (0.2, "stop_token_ids", chance.sample(ids, chance.randint(1, 3))),
        (0.3, "stop", [phrase(chance) for _ in range(chance.randint(1, 3))]),
        (0.3, "include_stop_str_in_output", True),
        (0.2, "logprobs", chance.choice([0, 1, 3, -1])),
        (0.15, "prompt_logprobs", chance.choice([0, 2, -1])),
        (
            0.2,
            "logits_processors",
            chance.sample([never_twice, by_position, row_by_row(seldom)], chance.randint(1, 2)),
        ),
    ]
    for share, name, value in others:
        if often(share):
            values[name] = value
    if "stop" not in values and often(0.1):
        values["detokenize"] = False
    return values


@pytest.fixture(scope="module")
def cases(make_case: Any, alone: Any) -> list[Any]:
    chance = random.Random(20)
    made: list[Any] = []
    lengths = [1, 9, 13, 15, 29, 40]
    while len(made) < DISTINCT:
        prompt = tuple(chance.randrange(VOCAB) for _ in range(chance.choice(lengths)))
        values = parameters(chance)
        if len(made) % 7 == 0:  # long enough for two more pages: somebody has to give way
            values |= {"max_tokens": 38, "min_tokens": 34, "n": 1}
            prompt = prompt[:9]
        try:
            case = make_case(len(made), prompt, SamplingParams(**values))
            alone(case)
        except PromptError:  # parameters that contradict each other
            continue
        made.append(case)
    return made


def test_the_random_requests_are_of_every_kind(cases: list[Any], alone: Any) -> None:
    for field in attrs.fields(SamplingParams):
        others = [c for c in cases if getattr(c.params, field.name) != field.default]
        assert len(others) > 3, field.name
    completions = [c for case in cases for c in alone(case).outputs]
    reasons = {type(c.stop_reason) for c in completions if c.finish_reason == "stop"}
    assert reasons == {type(None), int, str}
    assert {c.finish_reason for c in completions} >= {"stop", "length"}
    assert sum(len(c.token_ids) for c in completions) > 5 * len(completions)


# -- engines -----------------------------------------------------------------

TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))


def streams(cases: list[Any], alone: Any) -> dict[Any, list[int]]:
    """What an oracle drafts: the right tokens, and some more after the end."""
    return {c.prompt: [*alone(c).outputs[0].token_ids, 3, 1, 4, 1, 5] for c in cases}


@attrs.frozen(eq=False)
class Engine:
    """An engine and how many requests go through it. open: so many at a time."""

    name: str
    requests: int
    settings: dict[str, Any]
    speculative_config: dict[str, Any] | None = None
    open: int = 24


def drafted(method: type, number: int, **options: Any) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": number, **options}


class ReachingSpeculator(OracleSpeculator):
    """The oracle, with a cache of its own and places in it past the end of every request."""

    def capabilities(self) -> Capabilities:
        layers = [KVLayer(heads=1, k_dim=4, v_dim=4)]
        return attrs.evolve(super().capabilities(), lookahead_slots=19, kv_layers=layers)


FALLING: dict[str, Any] = {"length_policy": "falling"}
BY_BATCH = {"num_speculative_tokens_per_batch_size": [[1, 2, 5], [3, 5, 2], [6, 64, 0]]}
ENGINES = [
    Engine("plain", 160, {"kv_cache_memory": 8 * PAGE}),
    Engine(
        "plain with few rows and slots",
        40,
        {"kv_cache_memory": 6 * PAGE, "max_num_batched_tokens": 4, "max_num_seqs": 3},
        open=6,
    ),
    Engine("oracle", 810, {"kv_cache_memory": 9 * PAGE}, drafted(OracleSpeculator, 4)),
    Engine(
        "oracle with few rows and drafts by batch",
        140,
        {"kv_cache_memory": 6 * PAGE, "max_num_batched_tokens": 11, "max_num_seqs": 5},
        drafted(OracleSpeculator, 5, **BY_BATCH),
    ),
    Engine(
        "wrong by priority",
        150,
        {"kv_cache_memory": 8 * PAGE, "scheduling_policy": "priority"},
        drafted(WrongSpeculator, 3, **FALLING),
    ),
    Engine(
        "coupled bigrams by priority",
        130,
        {"kv_cache_memory": 9 * PAGE, "scheduling_policy": "priority"},
        drafted(BigramSpeculator, 3, table=TABLE),
    ),
    Engine(
        "many greedy bigrams",
        110,
        {"kv_cache_memory": 8 * PAGE, "max_num_batched_tokens": 48},
        drafted(BigramSpeculator, 17, table=TABLE, draft_sample_method="greedy", **FALLING),
    ),
    Engine(
        "ends of sequence in two slots",
        40,
        {"kv_cache_memory": 5 * PAGE, "max_num_batched_tokens": 9, "max_num_seqs": 2},
        drafted(ConstantSpeculator, 2, token=1),
        open=5,
    ),
    Engine(
        "oracle that reaches ahead",
        100,
        {"kv_cache_memory": 13 * PAGE, "max_num_seqs": 5},
        drafted(ReachingSpeculator, 4),
    ),
    Engine(
        "placeholders",
        320,
        {"kv_cache_memory": 9 * PAGE, "max_num_batched_tokens": 33},
        drafted(PlaceholderSpeculator, 4, column=2),
    ),
]


def configured(config: dict[str, Any] | None, cases: list[Any], alone: Any) -> Any:
    if config is None or not issubclass(config["method"], OracleSpeculator):
        return config
    return {**config, "streams": streams(cases, alone)}


def test_two_thousand_requests_are_run() -> None:
    assert sum(e.requests for e in ENGINES) == TOTAL


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_a_request_gives_what_it_gives_alone(
    engine: Engine,
    cases: list[Any],
    small_model: Any,
    tokenizer: Any,
    alone: Any,
    make_driver: Callable[[LLM], Any],
) -> None:
    chance = random.Random(engine.name)
    ranked = "scheduling_policy" in engine.settings
    with LLM(
        small_model,
        tokenizer=tokenizer,
        speculative_config=configured(engine.speculative_config, cases, alone),
        max_logprobs=-1,
        **engine.settings,
    ) as llm:
        driver = make_driver(llm)
        left = chance.choices(cases, k=engine.requests)
        whole = chance.choices(cases, k=max(engine.requests // 150, 1))  # these go by `generate`
        doomed: dict[str, int] = {}  # the steps that are left to those that will be aborted
        while left:
            while left and len(driver.open) < engine.open and chance.random() < 0.8:
                name = driver.add(left.pop(), priority=chance.randint(-2, 2) if ranked else 0)
                if chance.random() < 0.12:
                    doomed[name] = chance.randint(0, 20)
            for name in [n for n, steps in doomed.items() if not steps and n in driver.open]:
                driver.abort(name)
            doomed = {n: steps - 1 for n, steps in doomed.items() if steps}
            driver.step()
            if whole and chance.random() < 0.03:
                driver.generate(whole.pop())
        driver.drain()
        metrics = llm.metrics
        assert llm._loaded.engine.scheduler.num_preemptions > 0
    ends = [c.finish_reason for g in driver.done for c in g.completions.values()]
    assert len(driver.done) >= engine.requests
    of_requests = [g.last.metrics.speculative_decoding for g in driver.done]
    for number in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_plain_steps"):
        assert sum(getattr(m, number) for m in of_requests) == getattr(metrics, number)
    assert 0 < ends.count("abort") < len(ends) / 4
    assert (metrics.num_drafts > 0) == (engine.speculative_config is not None)


# -- any script --------------------------------------------------------------


class Traffic(RuleBasedStateMachine):
    """Requests that come, move on and are aborted in any order, which hypothesis makes short."""

    def __init__(self, cases: list[Any], build: Callable[[Engine], Any]) -> None:
        super().__init__()
        self.cases = cases
        self.build = build
        self.driver: Any = None

    @initialize(engine=st.sampled_from(ENGINES))
    def start(self, engine: Engine) -> None:
        self.ranked = "scheduling_policy" in engine.settings
        self.driver = self.build(engine)

    @rule(number=st.integers(0, 40), priority=st.integers(-1, 1))
    def add(self, number: int, priority: int) -> None:
        self.driver.add(self.cases[number], priority=priority if self.ranked else 0)

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.driver.step()

    @precondition(lambda self: self.driver is not None and self.driver.open)
    @rule(which=st.integers(0, 10**6))
    def abort(self, which: int) -> None:
        names = list(self.driver.open)
        self.driver.abort(names[which % len(names)])

    def teardown(self) -> None:
        if self.driver is not None:
            with self.driver.llm:
                self.driver.drain()


def test_no_script_of_arrivals_and_aborts_changes_a_token(
    cases: list[Any],
    small_model: Any,
    tokenizer: Any,
    alone: Any,
    make_driver: Callable[[LLM], Any],
) -> None:
    def build(engine: Engine) -> Any:
        config = configured(engine.speculative_config, cases, alone)
        return make_driver(
            LLM(
                small_model,
                tokenizer=tokenizer,
                speculative_config=config,
                max_logprobs=-1,
                **engine.settings,
            )
        )

    machine: Any = functools.partial(Traffic, cases, build)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=20,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
