"""What the kernels are told of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import specdec_kernels
from specdec import LLM, SamplingParams
from specdec.testing import BigramSpeculator, toy_target
from specdec_kernels import Verified

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
