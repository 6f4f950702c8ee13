"""Ranges, types and refusals of sampling parameters."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from specdec import PromptError, SamplingParams


def test_the_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert attrs.asdict(params) == {
        "n": 1,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": None,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": None,
        "bad_words": (),
        "allowed_token_ids": None,
        "logits_processors": (),
        "min_tokens": 0,
        "max_tokens": 16,
        "ignore_eos": False,
        "stop_token_ids": None,
        "stop": (),
        "include_stop_str_in_output": False,
        "detokenize": True,
        "skip_special_tokens": True,
        "logprobs": None,
        "prompt_logprobs": None,
        "output_kind": "cumulative",
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 0}, "n is 0, but it has to be at least 1"),
        ({"n": 2.0}, "n is 2.0, but it has to be an integer"),
        ({"n": True}, "n is True, but it has to be an integer"),
        ({"temperature": -0.1}, "temperature is -0.1, but it has to be a number from 0 to 1000000"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": 1e7}, "temperature is 10000000.0"),
        ({"temperature": "hot"}, "temperature is 'hot', but it has to be a number"),
        ({"temperature": None}, "temperature is None"),
        ({"top_k": -2}, "top_k is -2, but it has to be -1, 0 or more"),
        ({"top_k": 1.5}, "top_k is 1.5, but it has to be an integer"),
        ({"top_p": 0}, r"top_p is 0, but it has to be in \(0, 1\]"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"min_p": -0.1}, r"min_p is -0.1, but it has to be in \[0, 1\]"),
        ({"min_p": 2}, "min_p is 2"),
        ({"seed": 2**63}, "seed is 9223372036854775808, but it has to fit 64 bits"),
        ({"seed": 1.0}, "seed is 1.0, but it has to be an integer or null"),
        ({"max_tokens": 0}, "max_tokens is 0, but it has to be at least 1 or None: a request gen"),
        (
            {"repetition_penalty": 0},
            r"repetition_penalty is 0, but it has to be above 0 .*1 is off",
        ),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty is 1e-300"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty is inf"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1, but it has to be from -2 to 2"),
        ({"presence_penalty": float("nan")}, "presence_penalty is nan"),
        ({"frequency_penalty": -3}, "frequency_penalty is -3, but it has to be from -2 to 2"),
        ({"frequency_penalty": "much"}, "frequency_penalty is 'much', but it has to be a number"),
        ({"logit_bias": 5}, "logit_bias is 5, but it has to be an object or null"),
        ({"logit_bias": np.array([1, 2])}, r"logit_bias is \[1, 2\], but it has to be an object"),
        ({"logit_bias": {3: 101}}, "logit_bias of the id 3 is 101, but it has to be from -100 to"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias of the id 3 is nan"),
        ({"logit_bias": {3: float("-inf")}}, "logit_bias of the id 3 is -inf"),
        ({"logit_bias": {3: 10**400}}, "logit_bias of the id 3 is 1000000000"),
        ({"logit_bias": {3: True}}, "logit_bias of the id 3 is True, but it has to be a number"),
        ({"logit_bias": {3: np.array([1, 2])}}, r"logit_bias of the id 3 is \[1, 2\], but it has"),
        ({"logit_bias": {"cat": 1}}, "logit_bias has the key 'cat', but keys are token ids"),
        ({"logit_bias": {"²": 1}}, "logit_bias has the key '²', but keys are token ids"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias has the key '999"),
        ({"logit_bias": {1.5: 1}}, "logit_bias has the key 1.5"),
        ({"logit_bias": {True: 1}}, "logit_bias has the key True"),
        ({"logit_bias": {-1: 1}}, "logit_bias holds a negative id"),
        ({"logit_bias": {5: 1, "5": 2}}, "logit_bias has the id 5 twice"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias holds 1025 ids; 1024 at most"),
        ({"bad_words": "cat"}, "bad_words is 'cat', but it has to be a list"),
        ({"bad_words": [""]}, "bad_words holds an empty text"),
        ({"bad_words": [1]}, "bad_words is .*, but it has to be a list"),
        ({"bad_words": torch.tensor([1, 2])}, "bad_words is .*, but it has to be a list"),
        ({"bad_words": ["x"] * 129}, "bad_words holds 129 words; 128 at most"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty: no token could be drawn"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids holds a negative id"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids is .*, but it has to be a list"),
        ({"allowed_token_ids": [1] * 1025}, "allowed_token_ids holds 1025 ids; 1024 at most"),
        ({"min_tokens": -1}, "min_tokens is -1, but it has to be at least 0"),
        ({"min_tokens": 17}, "min_tokens is 17, more than max_tokens, 16"),
        ({"stop": [""]}, "stop holds an empty text"),
        ({"stop": ["a", "\ud800"]}, "stop holds a text that no answer can have"),
        ({"stop": ""}, "stop holds an empty text"),
        ({"stop": 3}, "stop is 3, but it has to be a list"),
        ({"stop": [np.array(["a", "b"])]}, "stop is .*, but it has to be a list"),
        ({"stop": ["x"] * 65}, "stop holds 65 texts; 64 at most"),
        ({"stop": ["x" * 1025]}, "stop holds a text of 1025 characters; 1024 at most"),
        ({"stop": "x", "detokenize": False}, "detokenize=False, but stop texts are looked for in"),
        ({"logprobs": -2}, "logprobs is -2, but it has to be 0 or more, -1 for the whole vocab"),
        ({"prompt_logprobs": -2}, "prompt_logprobs is -2"),
        ({"logprobs": True}, "logprobs is True, but it has to be an integer or null"),
        (
            {"output_kind": "some"},
            "output_kind is 'some', but it has to be 'cumulative' or 'delta'",
        ),
        ({"logits_processors": len}, "logits_processors is .*, but it has to be a list"),
        ({"logits_processors": [3]}, "logits_processors is .*, but it has to be a list"),
        ({"logits_processors": [lambda rows: rows]}, r"cannot be called with \(rows, logits\)"),
        ({"stop_token_ids": [-1]}, "stop_token_ids holds a negative id"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids is"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5, but it has to be a list"),
        ({"ignore_eos": 1}, "ignore_eos is 1, but it has to be true or false"),
        ({"n": 10_001}, "n is 10001, but it can be 10000 at most: all completions of a prompt"),
        ({"n": 2, "temperature": 0}, "n is 2 at temperature 0: the completions would all be"),
        ({"temprature": 1}, "no key 'temprature'; did you mean 'temperature'"),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("structured_outputs", {"json": {}}, "a grammar has to be asked at every draft"),
        ("guided_decoding", {"regex": "a"}, "a grammar has to be asked at every draft"),
        ("guided_json", {"type": "object"}, "a grammar has to be asked at every draft"),
        ("response_format", {"type": "json_object"}, "a grammar has to be asked at every draft"),
        ("best_of", 2, "sample n and choose"),
        ("truncate_prompt_tokens", 5, "cut the prompt yourself"),
        ("structured_outputs", np.array([1, 2]), "a grammar has to be asked"),
        ("extra_args", {"x": np.array([1, 2])}, "nothing would read them"),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],
)
def test_parameters_that_would_be_ignored_are_refused_with_the_reason(
    name: str, value: Any, reason: str
) -> None:
    with pytest.raises(PromptError, match=f"{name}=.* is refused: .*{reason}"):
        SamplingParams(**{name: value})


class _Incomparable:
    def __eq__(self, other: object) -> bool:
        raise TypeError("not to be compared")

    __hash__ = None  # type: ignore[assignment]


def test_what_cannot_be_compared_is_refused_too() -> None:
    with pytest.raises(PromptError, match=r"^the sampling parameter best_of=.* is refused: "):
        SamplingParams(best_of=_Incomparable())
    with pytest.raises(PromptError, match=r"logits_processors is .*, but it has to be a list"):
        SamplingParams(logits_processors=_Incomparable())


def test_a_processor_of_transformers_is_refused_with_the_way_to_wrap_it() -> None:
    from transformers import LogitsProcessorList, MinPLogitsWarper

    for own in (MinPLogitsWarper(0.5), LogitsProcessorList()):
        with pytest.raises(PromptError, match=f"holds a {type(own).__name__} .*row_by_row"):
            SamplingParams(logits_processors=[own])


def test_values_that_ask_for_nothing_pass() -> None:
    assert SamplingParams(stop=np.array([]), min_tokens=np.int64(0)) == SamplingParams()
    pasted = SamplingParams(
        repetition_penalty=1.0,
        presence_penalty=0,
        logit_bias=None,
        stop=[],
        min_tokens=0,
        logprobs=None,
        include_stop_str_in_output=False,
        bad_words=None,
        logits_processors=None,
        allowed_token_ids=None,
        structured_outputs=None,
        use_beam_search=False,
        spaces_between_special_tokens=True,
        extra_args=None,
        seed=-1,
    )
    assert pasted == SamplingParams()
    assert SamplingParams(logit_bias={}, stop=None, logits_processors=[]) == SamplingParams()


@pytest.mark.parametrize("name", ["structured_outputs", "guided_json", "response_format"])
def test_an_empty_grammar_is_a_grammar(name: str) -> None:
    with pytest.raises(PromptError, match=f"{name}={{}} is refused"):
        SamplingParams(**{name: {}})


def test_numbers_of_numpy_and_torch_become_pythons() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        seed=torch.tensor(7),
        max_tokens=np.int32(4),
        stop_token_ids=np.array([1, 2]),
        ignore_eos=np.bool_(True),
    )
    assert params == SamplingParams(
        temperature=0.5, top_k=3, seed=7, max_tokens=4, stop_token_ids=[1, 2], ignore_eos=True
    )
    assert SamplingParams(stop_token_ids=[np.int64(5)]).stop_token_ids == [5]
    assert type(params.seed) is int


def test_lists_and_ids_come_in_one_form() -> None:
    assert SamplingParams(stop="end").stop == SamplingParams(stop=["end"]).stop == ("end",)
    assert SamplingParams(stop=np.array(["a", "b"])).stop == ("a", "b")
    assert SamplingParams(bad_words=["a"]).bad_words == ("a",)
    assert SamplingParams(allowed_token_ids=np.array([1, 2])).allowed_token_ids == (1, 2)
    biased = SamplingParams(logit_bias={"5": 1, np.int64(7): np.float32(0.5), 2: torch.tensor(3)})
    assert biased.logit_bias == {5: 1, 7: 0.5, 2: 3}
    assert [type(k) for k in biased.logit_bias] == [int] * 3
    assert SamplingParams(logits_processors=[max]).logits_processors == (max,)


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 1e-6},
        {"repetition_penalty": 1_000_000, "presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": {0: -100, 1: 100}},
        {"min_tokens": 16},
        {"min_tokens": 10**6, "max_tokens": None},
        {"stop": ["x" * 1024] * 64, "include_stop_str_in_output": True},
        {"logprobs": -1, "prompt_logprobs": 0},
        {"output_kind": "delta"},
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],
)
def test_the_ends_of_ranges_are_served(values: dict[str, Any]) -> None:
    SamplingParams(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 0.9},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {3: 1.0}},
        {"bad_words": ["cat"]},
        {"allowed_token_ids": [3]},
        {"min_tokens": 1},
        {"logits_processors": [max]},
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],
)
def test_requests_know_whether_they_edit_logits(values: dict[str, Any]) -> None:
    assert SamplingParams(**values).edits is True
    assert SamplingParams(temperature=0, top_k=3, stop="x", logprobs=2, seed=3).edits is False


EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "logit_bias": {3: 1.0},
    "bad_words": ["cat"],
    "allowed_token_ids": [3],
    "logits_processors": [max],
    "stop_token_ids": [5],
    "stop": "end",
}


def test_parameters_can_be_hashed_copied_and_changed_by_nobody() -> None:
    params = SamplingParams(**EVERYTHING)
    assert len({params, SamplingParams(**EVERYTHING)}) == 1
    for copied in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert copied == params
    changed: Any = attrs.evolve
    assert changed(params, seed=1) == SamplingParams(**EVERYTHING, seed=1)
    mine = {4: 1.0}
    taken = SamplingParams(logit_bias=mine)
    mine[5] = 1.0
    assert taken.logit_bias == {4: 1.0}


@pytest.mark.parametrize(
    ("temperature", "greedy", "effective"),
    [(0, True, 0.0), (9e-6, True, 0.0), (1e-5, False, 0.01), (0.01, False, 0.01), (2, False, 2)],
)
def test_tiny_temperatures_are_greedy_or_the_least_that_divides_well(
    temperature: float, greedy: bool, effective: float
) -> None:
    params = SamplingParams(temperature=temperature)
    assert (params.greedy, params.effective_temperature) == (greedy, effective)


def test_parameters_cannot_be_changed_but_copied_with_a_change() -> None:
    params = SamplingParams(seed=3)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        params.seed = 4  # type: ignore[misc]
    changed: Any = attrs.evolve
    assert changed(params, max_tokens=2) == SamplingParams(seed=3, max_tokens=2)
