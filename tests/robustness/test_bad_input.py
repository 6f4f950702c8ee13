"""What a request does wrong is said in its own words and harms nobody else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec import LLM, PromptError, RequestOutput, SamplingParams
from specdec.logits_processors import LogitsRows
from specdec.testing import ConstantSpeculator, OracleSpeculator, toy_target

VOCAB = 32
Clean = Callable[[LLM], None]


def counting(**settings: Any) -> PreTrainedModel:
    """After token t comes t + 1; the words of the tokenizer are 4 to 16, its end is 1."""
    return toy_target(torch.eye(VOCAB).roll(1, dims=1) * 20, **settings)


def count(first: int, number: int) -> list[int]:
    return list(range(first, first + number))


def greedy(most: int | None = 8, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=most, **values)


ORACLE = {
    "method": OracleSpeculator,
    "streams": {(n,): count(n + 1, 31 - n) for n in range(VOCAB)},
    "num_speculative_tokens": 4,
}
CONFIGS = pytest.mark.parametrize("config", [None, ORACLE], ids=["plain", "drafts"])


def generate(llm: LLM, prompts: list[Any], params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


# -- parameters --------------------------------------------------------------

LONG = "x" * 1025


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"stop": ""}, ["stop", "empty"]),
        ({"stop": ["a", ""]}, ["stop", "empty"]),
        ({"stop": LONG}, ["stop", "1025", "1024"]),
        ({"stop": ["a"] * 65}, ["stop", "65", "64"]),
        ({"stop": [3]}, ["stop", "3", "text"]),
        ({"stop": "a", "detokenize": False}, ["stop", "'a'", "detokenize"]),
        ({"max_tokens": 0}, ["max_tokens", "0", "at least 1", "None"]),
        ({"max_tokens": -3}, ["max_tokens", "-3", "at least 1"]),
        ({"max_tokens": 2.5}, ["max_tokens", "2.5", "an integer"]),
        ({"min_tokens": 9, "max_tokens": 8}, ["min_tokens", "9", "max_tokens", "8"]),
        ({"min_tokens": -1}, ["min_tokens", "-1", "at least 0"]),
        ({"n": 2, "temperature": 0}, ["n", "2", "temperature 0"]),
        ({"logprobs": -2}, ["logprobs", "-2", "-1"]),
        ({"allowed_token_ids": []}, ["allowed_token_ids", "empty", "None"]),
        ({"logit_bias": {3: 101}}, ["logit_bias", "3", "101", "-100", "100"]),
        ({"logit_bias": {"x": 1}}, ["logit_bias", "'x'", "token ids"]),
        ({"bad_words": [""]}, ["bad_words", "empty"]),
        ({"repetition_penalty": 0}, ["repetition_penalty", "0", "above 0"]),
        ({"presence_penalty": math.nan}, ["presence_penalty", "nan", "-2", "2"]),
        ({"temperature": math.inf}, ["temperature", "inf", "from 0"]),
        ({"logits_processors": [print, 3]}, ["logits_processors", "3"]),
        ({"logits_processors": [lambda rows: rows]}, ["logits_processors", "(rows, logits)"]),
        ({"output_kind": "deltas"}, ["output_kind", "'deltas'", "'delta'"]),
        ({"temprature": 1}, ["temprature", "temperature"]),
    ],
)
def test_a_value_that_cannot_be_served_is_named_with_what_can(
    values: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(PromptError) as caught:
        SamplingParams(**values)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"logprobs": 6}, ["logprobs", "6", "max_logprobs", "5"]),
        ({"logprobs": -1}, ["logprobs", "whole vocabulary", "max_logprobs", "5"]),
        ({"prompt_logprobs": 6}, ["prompt_logprobs", "6", "max_logprobs", "5"]),
        ({"stop_token_ids": [VOCAB]}, ["stop_token_ids", "32", "0 to 31"]),
        ({"logit_bias": {VOCAB: 1}}, ["logit_bias", "32", "0 to 31"]),
        ({"allowed_token_ids": [2**70]}, ["allowed_token_ids", "0 to 31"]),
        ({"allowed_token_ids": [9], "bad_words": ["mat"]}, ["allowed_token_ids and bad_words"]),
        ({"allowed_token_ids": [1], "min_tokens": 1}, ["min_tokens", "allowed_token_ids", "stop"]),
        ({"bad_words": ["zebra"]}, ["bad_words", "zebra", "tokenizer"]),
        ({"bad_words": ["\ud800"]}, ["bad_words", "tokenizer"]),
    ],
)
def test_what_the_target_or_the_llm_cannot_serve_is_refused_before_it_runs(
    values: dict[str, Any], parts: list[str], tokenizer: Any, clean: Clean
) -> None:
    with LLM(counting(), tokenizer=tokenizer, max_logprobs=5) as llm:
        other = llm.add_request([3], greedy())
        with pytest.raises(PromptError) as caught:
            llm.add_request([3], SamplingParams(temperature=0, **values))
        for part in parts:
            assert part in str(caught.value)
        assert llm.num_unfinished_requests == 1
        outputs = [o for _ in range(8) for o in llm.step()]
        assert (outputs[-1].request_id, outputs[-1].finished) == (other, True)
        assert outputs[-1].outputs[0].token_ids == count(4, 8)
        clean(llm)


@pytest.mark.parametrize("least", [246, 10**6, 2**62, 2**63, 10**30])
def test_a_minimum_that_nothing_can_reach_harms_nobody_else(
    least: int, tokenizer: Any, clean: Clean
) -> None:
    with LLM(counting(), tokenizer=tokenizer) as llm:
        other = llm.add_request([3], greedy())
        try:
            llm.add_request([3], greedy(None, min_tokens=least))
        except PromptError as error:
            assert "min_tokens" in str(error)  # noqa: PT017
        ended: dict[str, RequestOutput] = {}
        while llm.has_unfinished_requests():
            ended |= {o.request_id: o for o in llm.step()}
        assert ended[other].outputs[0].token_ids == count(4, 8)
        clean(llm)


def test_a_huge_stop_text_of_nearly_itself_costs_little_and_is_found(tokenizer: Any) -> None:
    # every beginning of it is in the text over and over
    stops = ["the cat " * 127 + "end", "cat the " * 100, *("the " * i + "x" for i in range(1, 60))]
    table = torch.full((VOCAB, VOCAB), -20.0)
    table[4, 5] = table[5, 4] = 20
    with LLM(toy_target(table), tokenizer=tokenizer) as llm:
        (output,) = generate(llm, [[4]], greedy(230, stop=stops))
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "cat the " * 100)
    assert completion.text == ""
    assert len(completion.token_ids) in (200, 201)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


PROMPTS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "no token": lambda: [[]],
    "bytes": lambda: b"the",
    "half a character": lambda: "the \ud800",
    "a set": lambda: {3, 4},
    "true": lambda: [True],
    "no number": lambda: [math.nan],
    "an id too many": lambda: [3, VOCAB],
    "a negative id": lambda: [3, -1],
    "an id of 5000 digits": lambda: [10**5000],
    "lists in lists": lambda: nested(5000),
    "text that is none": lambda: {"prompt": None},
    "ids that are none": lambda: {"prompt_token_ids": nested(3)},
    "a tensor without data": lambda: torch.zeros(2, dtype=torch.int64, device="meta"),
    "a sparse tensor": lambda: torch.ones(2).to_sparse(),
    "too long": lambda: [3] * 256,
}


@pytest.mark.parametrize("which", PROMPTS)
def test_a_prompt_that_cannot_be_served_is_refused_shortly(
    which: str, tokenizer: Any, clean: Clean
) -> None:
    with LLM(counting(), tokenizer=tokenizer) as llm:
        for call in (llm.add_request, llm.generate, llm.stream):
            with pytest.raises(PromptError) as caught:
                call(PROMPTS[which](), greedy())
            assert 10 < len(str(caught.value)) < 500
        clean(llm)


# -- logits processors -------------------------------------------------------


def mutating(rows: LogitsRows, logits: Tensor) -> Tensor:
    """Tries to write wherever it can reach."""
    for array in (rows.prompt_token_ids, rows.output_token_ids(0), rows.token_ids(0)):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 7
    before = logits.clone()
    logits.fill_(-3.0)
    return before


BAD: list[tuple[Callable[[LogitsRows, Tensor], Any], str]] = [
    (lambda rows, logits: logits[:, 1:], "shape"),
    (lambda rows, logits: logits[:0], "shape"),
    (lambda rows, logits: logits.to(torch.float16), "dtype torch.float16"),
    (lambda rows, logits: logits.long(), "dtype torch.int64"),
    (lambda rows, logits: logits.to("meta"), "device meta"),
    (lambda rows, logits: logits.to_sparse(), "layout"),
    (lambda rows, logits: logits * math.nan, "NaN"),
    (lambda rows, logits: None, "return the logits"),
    (lambda rows, logits: logits.tolist(), "type list"),
    (lambda rows, logits: logits / (1 // 0), "ZeroDivisionError"),
    (lambda rows, logits: rows.output_token_ids(99), "IndexError"),
    (lambda rows, logits: (_ for _ in ()).throw(SystemExit(3)), "SystemExit"),
    (lambda rows, logits: logits.fill_(-math.inf), "exclude every token"),
]


@CONFIGS
@pytest.mark.parametrize(("bad", "message"), BAD, ids=[message for _, message in BAD])
def test_a_processor_that_answers_wrongly_ends_its_request_alone(
    bad: Any, message: str, config: Any, tokenizer: Any, clean: Clean
) -> None:
    def third(rows: LogitsRows, logits: Tensor) -> Any:
        late = rows.position(len(rows) - 1) >= 4
        return bad(rows, logits) if late else logits

    params = [greedy(), greedy(logits_processors=[third], logprobs=1), greedy(stop=["on"])]
    with LLM(counting(), tokenizer=tokenizer, speculative_config=config) as llm:
        first, culprit, last = generate(llm, [[10], [3], [3]], params)
        clean(llm)
        (again,) = generate(llm, [[3]], greedy())
    assert first.outputs[0].token_ids == count(11, 8)
    assert (last.outputs[0].token_ids, last.outputs[0].text) == ([4, 5, 6, 7], "the cat sat ")
    assert (first.error, last.error, again.error) == (None, None, None)
    completion = culprit.outputs[0]
    assert completion.finish_reason == "error"
    assert completion.token_ids == count(4, len(completion.token_ids))
    assert len(completion.logprobs or []) == len(completion.token_ids)
    assert message in str(culprit.error)
    if message != "exclude every token":
        assert "logits_processors[0]" in str(culprit.error)


@CONFIGS
def test_a_processor_that_writes_and_remembers_reaches_nothing(
    config: Any, tokenizer: Any, clean: Clean
) -> None:
    kept: list[Tensor] = []

    def remembering(rows: LogitsRows, logits: Tensor) -> Tensor:
        for old in kept:
            old.fill_(99.0)
        answer = mutating(rows, logits)
        kept.extend([logits, answer])
        return answer

    params = [greedy(), greedy(logits_processors=[remembering], logprobs=2), greedy(logprobs=2)]
    with LLM(counting(), tokenizer=tokenizer, speculative_config=config) as llm:
        outputs = generate(llm, [[10], [3], [3]], params)
        clean(llm)
    assert [o.error for o in outputs] == [None] * 3
    assert [o.outputs[0].token_ids for o in outputs] == [count(11, 8), *[count(4, 8)] * 2]
    assert outputs[1].outputs[0].logprobs == outputs[2].outputs[0].logprobs


def test_what_a_processor_returned_is_not_edited_by_the_next_one(tokenizer: Any) -> None:
    constant = torch.arange(VOCAB, dtype=torch.float64)[None]

    def always(rows: LogitsRows, logits: Tensor) -> Tensor:
        return constant

    def without_the_best(rows: LogitsRows, logits: Tensor) -> Tensor:
        logits[:, int(logits.argmax())] = -math.inf
        return logits

    params = greedy(4, logits_processors=[always, without_the_best], ignore_eos=True)
    with LLM(counting(), tokenizer=tokenizer) as llm:
        (output,) = generate(llm, [[3]], params)
    assert output.outputs[0].token_ids == [30, 30, 30, 30]


def allergic(rows: LogitsRows, logits: Tensor) -> Tensor:
    """Cannot say what follows a six."""
    for i in range(len(rows)):
        if 6 in rows.output_token_ids(i):
            raise ValueError("six")
    return logits


@pytest.mark.parametrize("end", [{"stop": ["sat"]}, {"stop_token_ids": [6]}, {"max_tokens": 3}])
def test_a_processor_fails_only_where_plain_decoding_would_ask_it(
    end: dict[str, Any], tokenizer: Any, clean: Clean
) -> None:
    params = SamplingParams(
        **{"temperature": 0, "max_tokens": 8, "logits_processors": [allergic], **end}
    )
    for config in (None, ORACLE):
        with LLM(counting(), tokenizer=tokenizer, speculative_config=config) as llm:
            (output,) = generate(llm, [[3]], params)
            clean(llm)
        assert (output.outputs[0].token_ids, output.error) == ([4, 5, 6], None), config


def test_a_processor_is_not_failed_by_a_draft_that_is_refused(tokenizer: Any) -> None:
    config = {"method": ConstantSpeculator, "token": 6, "num_speculative_tokens": 2}
    params = greedy(5, logits_processors=[allergic])
    with LLM(counting(), tokenizer=tokenizer, speculative_config=config) as llm:
        (output,) = generate(llm, [[9]], params)
    assert (output.outputs[0].token_ids, output.error) == (count(10, 5), None)


@CONFIGS
@pytest.mark.parametrize("end", [{"stop": ["sat"]}, {"stop_token_ids": [6]}, {"max_tokens": 3}])
def test_an_end_comes_before_a_row_that_excludes_everything(
    end: dict[str, Any], config: Any, tokenizer: Any, clean: Clean
) -> None:
    def nothing_after_six(rows: LogitsRows, logits: Tensor) -> Tensor:
        for i in range(len(rows)):
            if 6 in rows.output_token_ids(i):
                logits[i] = -math.inf
        return logits

    values = {"max_tokens": 9, "logits_processors": [nothing_after_six], **end}
    params = [SamplingParams(temperature=0, **values), greedy()]
    with LLM(counting(), tokenizer=tokenizer, speculative_config=config) as llm:
        output, other = generate(llm, [[3], [10]], params)
        clean(llm)
    assert (output.outputs[0].token_ids, output.error) == ([4, 5, 6], None)
    assert (other.outputs[0].token_ids, other.error) == (count(11, 8), None)
