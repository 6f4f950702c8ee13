"""First prompts: as `generate` renders them, or refused with their line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec import LLM, PromptError
from specdec.bench.prompts import first_prompts
from specdec.bench.workload import Task

FILE = Path("prompts.jsonl")
MESSAGES = Task(line=7, name="7", category=None, messages=({"role": "user", "content": "a dog"},))


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> Iterator[LLM]:
    with LLM(model_folder, max_model_len=8, max_num_seqs=1) as made:
        yield made


def task(*turns: str) -> Task:
    return Task(line=3, name="3", category=None, turns=turns)


def test_the_first_turn_is_rendered_or_taken_as_it_is(llm: LLM) -> None:
    assert first_prompts(llm, [task("the cat", "a dog")], FILE, raw=False) == {3: [2, 4, 5, 3]}
    assert first_prompts(llm, [task("the cat", "a dog")], FILE, raw=True) == {3: [4, 5]}
    assert first_prompts(llm, [MESSAGES], FILE, raw=False) == {7: [2, 8, 11, 3]}


def test_messages_are_refused_without_a_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PromptError, match=r"^prompts\.jsonl, line 7: .* and --raw uses none"):
        first_prompts(llm, [MESSAGES], FILE, raw=True)
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    with pytest.raises(PromptError, match="and the model has none"):
        first_prompts(llm, [MESSAGES], FILE, raw=True)


def test_a_prompt_that_leaves_no_room_for_a_token_is_refused(llm: LLM) -> None:
    assert first_prompts(llm, [task("it " * 7)], FILE, raw=True)
    with pytest.raises(PromptError, match=r"line 3: the prompt has 8 tokens, but the context is 8"):
        first_prompts(llm, [task("it " * 8)], FILE, raw=True)


def test_a_prompt_that_the_template_refuses_is_named(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ raise_exception('no') }}")
    with pytest.raises(PromptError, match=r"^prompts\.jsonl, line 3: the chat template refused"):
        first_prompts(llm, [task("it")], FILE, raw=False)
