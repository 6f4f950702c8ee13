"""Ranges, types and refusals of sampling parameters."""

from __future__ import annotations

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
        "max_tokens": 16,
        "ignore_eos": False,
        "stop_token_ids": None,
        "detokenize": True,
        "skip_special_tokens": True,
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
        ({"max_tokens": 0}, "max_tokens is 0, but it has to be at least 1 or None"),
        ({"stop_token_ids": [-1]}, "stop_token_ids holds a negative id"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids is"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5, but it has to be a list"),
        ({"ignore_eos": 1}, "ignore_eos is 1, but it has to be true or false"),
        ({"n": 10_001}, "n is 10001, but it can be 10000 at most: all completions of a prompt"),
        ({"n": 2, "temperature": 0}, "n is 2 at temperature 0: the completions would all be"),
        ({"temprature": 1}, "no key 'temprature'; did you mean 'temperature'"),
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("logprobs", 5, "not served yet"),
        ("prompt_logprobs", 0, "not served yet"),
        ("stop", ["x"], "stop_token_ids is"),
        ("repetition_penalty", 1.1, "not served yet"),
        ("presence_penalty", -0.5, "not served yet"),
        ("logit_bias", {3: 1.0}, "not served yet"),
        ("min_tokens", 2, "not served yet"),
        ("structured_outputs", {"json": {}}, "a grammar has to be asked at every draft"),
        ("best_of", 2, "sample n and choose"),
    ],
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", np.array([1, 2])),
        ("logit_bias", {3: np.array([1, 2])}),
        ("stop", np.array(["a"])),
        ("stop", [np.array(["a", "b"])]),
        ("bad_words", torch.tensor([1, 2])),
        ("logits_processors", _Incomparable()),
    ],
    ids=str,
)
def test_arrays_for_parameters_that_would_be_ignored_are_refused_too(name: str, value: Any) -> None:
    with pytest.raises(PromptError, match=f"^the sampling parameter {name}=.* is refused: "):
        SamplingParams(**{name: value})


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
    )
    assert pasted == SamplingParams()


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
