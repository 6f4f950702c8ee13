"""What becomes of prompts and parameters before the engine hears of any of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from specdec import OutOfMemoryError, PromptError, SamplingParams, VerificationRule
from specdec.intake import Intake
from specdec.request import Request
from specdec.runner.kv_cache import BlockPool
from specdec.runner.scheduler import Scheduler
from specdec.runner.state import Slots
from specdec_kernels import make_stream

VOCAB, LONGEST, SEED = 20, 32, 7


def intake(**settings: Any) -> Intake:
    slots = Slots(2, LONGEST, 8, 0, torch.device("cpu"))
    values: dict[str, Any] = {
        "scheduler": Scheduler(slots, BlockPool(9), 4, 16, 0),
        "tokenizer": None,
        "eos": frozenset({1}),
        "vocab_size": VOCAB,
        "max_model_len": LONGEST,
        "seed": SEED,
        "rule": None,
        "max_logprobs": 5,
        "priorities": False,
    }
    return Intake(**{**values, **settings})


def one(made: list[Request]) -> Any:
    """The only completion of the only request."""
    (request,) = made
    (sequence,) = request.sequences
    return sequence


@pytest.fixture
def tokenizer(model_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_folder)


# -- what a request is made of -----------------------------------------------


def test_a_prompt_and_its_parameters_become_a_request(tokenizer: Any) -> None:
    some = intake(tokenizer=tokenizer)
    params = SamplingParams(max_tokens=6, stop_token_ids=[9, 4])
    (request,) = some.requests("the cat", params)
    assert (request.request_id, request.prompt, request.finished) == ("0", "the cat", False)
    sequence = one([request])
    assert (sequence.request_id, sequence.name, sequence.index) == ("0", "0", 0)
    assert (sequence.prompt, sequence.emitted) == ([4, 5], [])
    assert sequence.params is params
    assert sequence.max_length == 8
    assert (sequence.stop_ids, sequence.own_stop_ids) == ((1, 4, 9), {4, 9})
    assert (sequence.slot, sequence.blocks, sequence.num_preemptions) == (-1, [], 0)
    assert request.metrics.num_prompt_tokens == 2
    assert not some.scheduler.waiting  # it is only made here


def test_the_parameters_are_the_defaults_if_none_are_given() -> None:
    sequence = one(intake().requests([3], None))
    assert sequence.params == SamplingParams()
    assert sequence.max_length == 1 + 16


def test_an_end_that_is_ignored_is_no_stop() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=[4])
    assert one(intake().requests([3], params)).stop_ids == (4,)


@pytest.mark.parametrize(("most", "longest"), [(5, 8), (10**30, LONGEST), (None, LONGEST)])
def test_a_request_grows_to_its_limit_or_the_contexts(most: int | None, longest: int) -> None:
    params = SamplingParams(max_tokens=most)
    assert one(intake().requests([3, 4, 5], params)).max_length == longest


def test_a_seed_gives_the_same_stream_to_every_request_and_another_to_every_completion() -> None:
    some = intake()
    params = SamplingParams(seed=3, n=2)
    first, second = some.requests([[4], [5]], params)
    for request in (first, second):
        assert [s.stream for s in request.sequences] == [make_stream(3, 0), make_stream(3, 1)]


def test_without_a_seed_the_order_of_requests_decides() -> None:
    def streams(**settings: Any) -> list[int]:
        some = intake(**settings)
        made = [*some.requests([[4], [5]], None), *some.requests([6], SamplingParams(n=2))]
        return [s.stream for request in made for s in request.sequences]

    again = streams()
    assert again == streams()
    assert len(set(again)) == 4
    assert set(again).isdisjoint(streams(seed=8))
    assert again[1] == make_stream(make_stream(SEED, 1), 0)


def test_completions_share_a_request_and_nothing_that_changes(tokenizer: Any) -> None:
    params = SamplingParams(n=3, seed=1, logprobs=2, prompt_logprobs=1, stop=["mat"])
    (request,) = intake(tokenizer=tokenizer).requests([4, 5], params)
    sequences = request.sequences
    assert [(s.index, s.name) for s in sequences] == [(0, "0/0"), (1, "0/1"), (2, "0/2")]
    for name in ("metrics", "text", "logprobs", "emitted", "blocks", "news"):
        assert len({id(getattr(s, name)) for s in sequences}) == 3, name
    assert len({id(s.metrics.speculative_decoding) for s in sequences}) == 3
    # a prompt says the same to all of them
    assert [s.prompt_logprobs is not None for s in sequences] == [True, False, False]


def test_later_requests_rank_behind_earlier_ones_of_the_same_priority() -> None:
    some = intake(priorities=True)
    made = some.requests([[4], [5]], SamplingParams(n=2), priority=[3, 1])
    made += some.requests([6], None, priority=3)
    made += some.requests([7], None)
    ranks = [s.rank for request in made for s in request.sequences]
    assert ranks == [(3, 0), (3, 1), (1, 2), (1, 3), (3, 4), (0, 5)]


def test_one_priority_is_for_all_and_none_is_zero() -> None:
    some = intake(priorities=True)
    assert [r.sequences[0].priority for r in some.requests([[4], [5]], None, -2)] == [-2, -2]
    assert [r.sequences[0].priority for r in some.requests([[4], [5]], None)] == [0, 0]


def test_an_id_of_the_users_takes_no_number() -> None:
    some = intake()
    assert [r.request_id for r in some.requests([4], None, request_id="mine")] == ["mine"]
    (numbered,) = some.requests([4], None)
    assert (numbered.request_id, numbered.sequences[0].request_id) == ("0", "0")


@pytest.mark.parametrize(
    ("asked", "kept"), [(0, 0), (3, 3), (-1, VOCAB), (99, VOCAB), (None, None)]
)
def test_as_many_logprobs_are_kept_as_there_can_be(asked: int | None, kept: int | None) -> None:
    params = SamplingParams(logprobs=asked, prompt_logprobs=asked)
    sequence = one(intake(max_logprobs=-1).requests([4], params))
    for log in (sequence.logprobs, sequence.prompt_logprobs):
        assert (None if log is None else log.n) == kept


def test_bad_words_are_turned_into_their_tokens(tokenizer: Any) -> None:
    params = SamplingParams(bad_words=["cat", "on the mat"])
    sequence = one(intake(tokenizer=tokenizer).requests([4], params))
    assert sequence.bad_words == ((5,), (7, 4, 9))


# -- mistakes ----------------------------------------------------------------


def synthetic() -> VerificationRule:
    return VerificationRule("synthetic", lossless=False)


@pytest.mark.parametrize(
    ("prompts", "params", "said"),
    [
        ([[4], []], None, "prompt 1 is empty"),
        ([[4], [VOCAB]], None, f"prompt 1 holds the token id {VOCAB}; ids are 0 to {VOCAB - 1}"),
        ([[4], [4] * LONGEST], None, f"prompt 1 has {LONGEST} tokens, but max_model_len is"),
        ([4], SamplingParams(stop_token_ids=[99]), "the prompt: stop_token_ids holds 99; ids are"),
        ([4], SamplingParams(logit_bias={99: 1.0}), "the prompt: logit_bias holds 99; ids are 0"),
        ([4], SamplingParams(allowed_token_ids=[99]), "the prompt: allowed_token_ids holds 99"),
        (
            [4],
            SamplingParams(allowed_token_ids=[1], min_tokens=2),
            "the prompt: min_tokens is 2, but allowed_token_ids leave nothing but stop tokens",
        ),
        ([4], SamplingParams(bad_words=["cat"]), "without a tokenizer nobody knows their tokens"),
        ([4], SamplingParams(stop=["cat"]), "without a tokenizer there is no text to find it in"),
        ([4], SamplingParams(logprobs=6), "logprobs asks for 6, but max_logprobs is 5"),
        ([4], SamplingParams(prompt_logprobs=-1), "prompt_logprobs asks for the whole vocabulary"),
        ([[4], [5]], [SamplingParams()], "2 prompts but 1 SamplingParams; give one, or one each"),
        ([[4], [5]], [SamplingParams(), {}], "sampling_params holds {}, which is no"),
        ([4], {"n": 2}, "sampling_params is of type dict; give SamplingParams"),
        ("text", None, "a text prompt needs a tokenizer"),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],
)  # fmt: skip
def test_a_mistake_names_the_prompt_and_what_is_allowed(
    prompts: Any, params: Any, said: str
) -> None:
    with pytest.raises(PromptError) as caught:
        intake().requests(prompts, params)
    assert said in str(caught.value)


def test_a_request_that_could_outgrow_the_cache_alone_is_refused() -> None:
    slots = Slots(2, LONGEST, 8, 0, torch.device("cpu"))
    small = intake(scheduler=Scheduler(slots, BlockPool(4), 4, 16, 0))  # 3 pages of 4 tokens
    assert one(small.requests([4] * 4, SamplingParams(max_tokens=8))).max_length == 12
    with pytest.raises(OutOfMemoryError, match=r"prompt 1 can grow to 13 tokens, but .* holds 12"):
        small.requests([[4], [4] * 5], SamplingParams(max_tokens=8))


def test_a_mistake_in_one_prompt_takes_no_number_and_no_stream_from_the_others() -> None:
    some, other = intake(priorities=True), intake(priorities=True)
    for prompts, more in (
        ([[4], []], {}),
        ([[4], [5]], {"priority": [1]}),
        ([4], {"priority": "1"}),
    ):
        with pytest.raises(PromptError):
            some.requests(prompts, None, **more)
    (mine,), (theirs,) = (i.requests([4], None) for i in (some, other))
    assert mine.request_id == theirs.request_id == "0"
    assert mine.sequences[0].stream == theirs.sequences[0].stream
    assert mine.sequences[0].arrival == theirs.sequences[0].arrival


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 1.2},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 2},
        {"logits_processors": [lambda rows, logits: logits]},
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],
)
def test_a_rule_that_keeps_what_an_edit_excludes_refuses_the_edit(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    with pytest.raises(PromptError, match=r"prompt 0: .* is refused under rejection_sample_method"):
        intake(rule=synthetic()).requests([[4], [5]], params)
    for rule in (None, VerificationRule("coupled", lossless=True)):
        assert one(intake(rule=rule).requests([4], params)).params is params


@pytest.mark.parametrize(
    ("priority", "said"),
    [
        ([1], "2 prompts but 1 priorities; give one, or one each"),
        (["1", 2], "priority is '1', but it has to be an integer, lower first"),
        ([1.0, 2], "priority is 1.0"),
        (True, "priority is True"),
        (2**62, "priority is 4611686018427387904"),
        (-(2**62), "priority is -4611686018427387904"),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],
)
def test_a_priority_is_an_integer(priority: Any, said: str) -> None:
    with pytest.raises(PromptError) as caught:
        intake(priorities=True).requests([[4], [5]], None, priority)
    assert said in str(caught.value)


def test_priorities_that_would_be_ignored_are_refused() -> None:
    with pytest.raises(PromptError, match=r"run first come, first served.*'priority'\) takes them"):
        intake().requests([[4], [5]], None, [0, 1])
    assert len(intake().requests([[4], [5]], None, [0, 0])) == 2
