"""Files of prompts: the forms that are read, what is wrong with others, and which are chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import PromptError
from specdec.bench.workload import Task, choose, read
from specdec.chat.conversation import Conversation


def written(folder: Path, *lines: Any) -> Path:
    file = folder / "prompts.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts), encoding="utf-8")
    return file


def test_every_form_is_read(tmp_path: Path) -> None:
    system = {"role": "system", "content": "be brief"}
    question = {"role": "user", "content": "why?"}
    file = written(
        tmp_path,
        {"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": ["r"]},
        "",
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"},
        {"messages": [system, question, {"role": "assistant", "content": "because"}]},
    )
    one, two, three = read(file)
    assert (one.line, one.name, one.category, one.turns) == (1, "81", "writing", ("one", "two"))
    assert (two.line, two.name, two.category, two.turns) == (
        3,
        "HumanEval/0",
        None,
        ("def f():\n",),
    )
    assert (three.line, three.name) == (4, "4")
    assert three.prompt(Conversation(), 0) == [system, question]
    assert [t.length(every_turn=True) for t in (one, two, three)] == [2, 1, 1]
    assert one.length(every_turn=False) == 1


def test_a_mark_of_the_byte_order_and_separators_in_text_do_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + '{"prompt": "a\u2028b"}\r\n'.encode())
    assert [t.turns for t in read(file)] == [("a\u2028b",)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "this is no JSON (Expecting property name"),
        ("[" * 100_000, "this is no JSON"),
        ("[1]", "this is no JSON object: [1]"),
        ({}, "it has the keys none; it has to have exactly one of messages, prompt, turns"),
        ({"question": "a"}, "it has the keys 'question'; it has to have exactly one of"),
        ({"prompt": "a", "turns": ["b"]}, "it has 'prompt', 'turns'; it has to have exactly one"),
        ({"prompt": 3}, "prompt is 3; it has to be text that is not empty"),
        ({"prompt": " \n"}, "prompt is ' \\n'; it has to be text that is not empty"),
        ({"prompt": "\ud800"}, "prompt holds a lone surrogate"),
        ({"turns": []}, "turns is []; it has to be a list of at least one text"),
        ({"turns": "a"}, "turns is 'a'; it has to be a list"),
        ({"turns": ["a", None]}, "turn 1 is None; it has to be text"),
        ({"turns": ["a"], "category": 3}, "category is 3; it has to be text"),
        ({"turns": ["a"], "question_id": [3]}, "question_id is [3]; it has to be text or a number"),
        ({"messages": "a"}, "messages is 'a'; it has to be a list"),
        ({"messages": ["a"]}, "message 0 is 'a'; it needs a role and a content"),
        ({"messages": [{"role": "user"}]}, "it needs a role and a content"),
        ({"messages": [{"role": "user", "content": ""}]}, "message 0 is ''"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "holds nothing to answer"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path: Path, line: Any, said: str) -> None:
    file = written(tmp_path, {"prompt": "good"}, "", line)
    with pytest.raises(PromptError) as caught:
        read(file)
    assert str(caught.value).startswith(f"{file}, line 3: ")
    assert said in str(caught.value)


def test_a_file_that_cannot_be_read_or_is_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"nowhere\.jsonl cannot be read"):
        read(tmp_path / "nowhere.jsonl")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(PromptError, match="bytes cannot be read"):
        read(tmp_path / "bytes")
    with pytest.raises(PromptError, match="holds no prompts"):
        read(written(tmp_path, "", " "))


def tasks(categories: str) -> list[Task]:
    return [Task(line=i, name=str(i), category=c, turns=("x",)) for i, c in enumerate(categories)]


@settings(max_examples=50)
@given(st.text("abc", max_size=12), st.integers(1, 15), st.none() | st.integers(1, 5))
def test_chosen_tasks_keep_their_order_and_limits(
    categories: str, limit: int, per_category: int | None
) -> None:
    every = tasks(categories)
    chosen = choose(every, limit=limit, per_category=per_category)
    assert [t.line for t in chosen] == sorted({t.line for t in chosen})
    left = choose(every, limit=None, per_category=per_category)
    assert len(chosen) == min(limit, len(left))
    for category in set(categories):
        lines = [i for i, c in enumerate(categories) if c == category]
        assert [t.line for t in left if t.category == category] == lines[:per_category]
    assert chosen == choose(every, limit=limit, per_category=per_category)


def test_a_limit_is_spread_over_the_file() -> None:
    assert [t.line for t in choose(tasks("a" * 10), limit=4, per_category=None)] == [0, 2, 5, 7]
