"""Edits by slot: who comes, who goes, and what the kernel makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import SamplingParams
from specdec.runner.edit_arrays import EditArrays
from specdec_kernels import Edits, edit_logits

CPU = torch.device("cpu")
VOCAB = 9


def place(
    arrays: EditArrays,
    slot: int,
    *,
    prompt_length: int = 3,
    stop_ids: Sequence[int] = (),
    words: Sequence[Sequence[int]] = (),
    **asked: Any,
) -> None:
    params = SamplingParams(**asked, bad_words=["?"] * len(words))
    arrays.place(slot, params, prompt_length=prompt_length, stop_ids=stop_ids, bad_words=words)


def columns(edits: Edits) -> tuple[int, ...]:
    return (
        edits.bias_ids.shape[1],
        edits.bias.shape[1],
        edits.allowed_ids.shape[1],
        edits.stop_ids.shape[1],
        *edits.bad_words.shape[1:],
    )


def test_what_a_request_asks_for_is_in_its_slot() -> None:
    arrays = EditArrays(3, VOCAB, CPU)
    place(
        arrays,
        1,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logit_bias={4: 2.0, 7: -100},
        allowed_token_ids=[4, 5, 7],
        min_tokens=2,
        stop_ids=[0, 8],
        words=[[1], [2, 3, 4]],
    )
    edits = arrays.edits
    assert edits.repetition_penalty.tolist() == [1, 1.5, 1]
    assert edits.presence_penalty.tolist() == [0, 0.5, 0]
    assert edits.frequency_penalty.tolist() == [0, -0.25, 0]
    assert edits.bias_ids.tolist() == [[-1, -1], [4, 7], [-1, -1]]
    assert edits.bias[1].tolist() == [2, -100]
    assert edits.allowed_ids[1].tolist() == [4, 5, 7]
    assert edits.stop_ids[1].tolist() == [0, 8]
    assert edits.min_length.tolist() == [0, 5, 0]
    assert edits.bad_words[1].tolist() == [[-1, -1, 1], [2, 3, 4]]


def test_stop_tokens_count_only_before_a_minimum_and_if_the_head_has_them() -> None:
    arrays = EditArrays(2, VOCAB, CPU)
    place(arrays, 0, repetition_penalty=2.0, stop_ids=[1, 2])
    assert arrays.edits.stop_ids.shape == (2, 0)
    place(arrays, 0, min_tokens=1, stop_ids=[1, VOCAB, 99])
    assert arrays.edits.stop_ids.tolist() == [[1], [-1]]


def test_arrays_widen_and_keep_what_is_in_them() -> None:
    arrays = EditArrays(3, VOCAB, CPU)
    place(arrays, 0, logit_bias={1: 1.0}, words=[[1, 2]])
    place(arrays, 1, logit_bias={2: 2.0, 3: 3.0, 4: 4.0}, words=[[3], [4, 5, 6]])
    edits = arrays.edits
    assert edits.bias_ids.tolist() == [[1, -1, -1], [2, 3, 4], [-1, -1, -1]]
    assert edits.bad_words[0].tolist() == [[-1, 1, 2], [-1, -1, -1]]
    assert edits.bad_words[1].tolist() == [[-1, -1, 3], [4, 5, 6]]


def test_nothing_of_the_request_before_stays() -> None:
    arrays = EditArrays(2, VOCAB, CPU)
    place(arrays, 1, repetition_penalty=2.0)  # somebody else, so that the arrays stay wide
    place(
        arrays,
        0,
        presence_penalty=1.0,
        logit_bias={1: 1.0, 2: 2.0},
        allowed_token_ids=[1, 2],
        min_tokens=3,
        stop_ids=[4],
        words=[[1, 2], [3]],
    )
    place(arrays, 0, logit_bias={5: 1.0})
    edits = arrays.edits
    assert edits.presence_penalty[0] == 0
    assert edits.bias_ids[0].tolist() == [5, -1]
    assert edits.min_length[0] == 0
    for ids in (edits.allowed_ids, edits.stop_ids, edits.bad_words):
        assert (ids[0] == -1).all()
    place(arrays, 0)
    assert arrays.asks(np.array([0, 1])).tolist() == [False, True]
    assert (arrays.edits.bias_ids[0] == -1).all()


def test_it_is_active_while_anybody_asks() -> None:
    arrays = EditArrays(4, VOCAB, CPU)
    seen = [arrays.active]
    place(arrays, 0, temperature=0.5, top_k=3, stop="x", stop_ids=[1])
    seen.append(arrays.active)
    place(arrays, 1, logits_processors=[max])
    place(arrays, 2, min_tokens=1)
    place(arrays, 2, min_tokens=2)
    seen.append(arrays.active)
    assert arrays.asks(np.array([2, 0, -1, 1])).tolist() == [True, False, False, True]
    arrays.clear(1)
    arrays.clear(1)
    arrays.clear(0)
    seen.append(arrays.active)
    arrays.clear(2)
    seen.append(arrays.active)
    assert seen == [False, False, True, True, False]


def test_arrays_are_narrow_again_once_nobody_asks() -> None:
    arrays = EditArrays(2, VOCAB, CPU)
    place(arrays, 0, logit_bias={1: 1.0}, min_tokens=2, stop_ids=[3], words=[[1] * 50] * 20)
    assert columns(arrays.edits) == (1, 1, 0, 1, 20, 50)
    arrays.clear(0)
    assert columns(arrays.edits) == (0,) * 6
    assert arrays.edits.min_length.tolist() == [0, 0]


def test_host_and_cpu_share_memory_until_arrays_widen() -> None:
    arrays = EditArrays(2, VOCAB, CPU)
    place(arrays, 0, repetition_penalty=2.0)
    before = arrays.edits
    place(arrays, 1, repetition_penalty=3.0)
    assert arrays.edits is before
    assert before.repetition_penalty.tolist() == [2, 3]


def test_another_device_is_brought_up_to_date_by_upload() -> None:
    class Elsewhere(EditArrays):
        """A device of its own: the CPU, but never the same memory."""

        def _on_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
            return torch.from_numpy(array.copy())

    arrays = Elsewhere(2, VOCAB, torch.device("meta"))
    place(arrays, 0, repetition_penalty=2.0, logit_bias={1: 1.0})
    there = arrays.edits
    place(arrays, 1, repetition_penalty=3.0, logit_bias={2: 1.0})
    assert there.repetition_penalty.tolist() == [2, 1]
    arrays.upload()
    assert arrays.edits is there
    assert there.repetition_penalty.tolist() == [2, 3]
    assert there.bias_ids.tolist() == [[1], [2]]
    arrays.clear(0)
    arrays.upload()
    assert there.bias_ids.tolist() == [[-1], [2]]
    place(arrays, 0, logit_bias={3: 1.0, 4: 1.0})  # wider: other tensors
    arrays.upload()
    assert arrays.edits.bias_ids.tolist() == [[3, 4], [2, -1]]


few = st.integers(0, VOCAB - 1)
requests = st.fixed_dictionaries(
    {
        "prompt_length": st.integers(1, 5),
        "stop_ids": st.lists(few, max_size=3),
        "words": st.lists(st.lists(few, min_size=1, max_size=3), max_size=3),
    },
    optional={
        "repetition_penalty": st.sampled_from([0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-1.0, 1.0]),
        "logit_bias": st.dictionaries(few, st.sampled_from([-1.0, 1.0]), max_size=4),
        "allowed_token_ids": st.lists(few, min_size=1, max_size=4),
        "min_tokens": st.integers(0, 4),
    },
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.none() | requests), min_size=1, max_size=8))
def test_a_slot_means_the_same_whoever_was_there_and_whoever_else_is(
    happened: list[tuple[int, dict[str, Any] | None]],
) -> None:
    arrays = EditArrays(4, VOCAB, CPU)
    there: dict[int, dict[str, Any]] = {}
    for slot, request in happened:
        if request is None:
            arrays.clear(slot)
            there.pop(slot, None)
        else:
            place(arrays, slot, **request)
            there[slot] = request
    fresh = EditArrays(4, VOCAB, CPU)
    for slot, request in there.items():
        place(fresh, slot, **request)
    assert arrays.active == fresh.active
    assert torch.equal(edited(arrays.edits), edited(fresh.edits))


def edited(edits: Edits) -> torch.Tensor:
    """Logits of three requests, one per slot, after the edits."""
    return edit_logits(
        torch.arange(3.0 * 2 * VOCAB).reshape(6, VOCAB) - 20,
        torch.tensor([0, 2, 4, 6]),
        torch.tensor([[1], [2], [3]]),
        torch.tensor([6, 7, 6, 7, 6, 7]),
        torch.arange(3),
        history=torch.tensor([[0, 1, 2, 3, 4, 5, 6]] * 4),
        prompt_length=torch.tensor([2, 3, 4, 0]),
        edits=edits,
    )
