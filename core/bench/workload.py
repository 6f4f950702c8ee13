"""The prompts to measure with: one JSON object a line, in the forms that public sets have."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from specdec._structure import shown
from specdec.chat.conversation import Conversation
from specdec.cli_options import why
from specdec.errors import PromptError, listed

FORMS = ("turns", "prompt", "messages")
_NAMES = ("question_id", "task_id", "id")


@attrs.frozen(eq=False)
class Task:
    """A line of the file.

    turns: what the user says, turn by turn; a line with messages has none. messages: the roles
    and contents up to the answer. category: None if the line names none.
    """

    line: int
    name: str
    category: str | None
    turns: tuple[str, ...] = ()
    messages: tuple[dict[str, str], ...] = ()

    def length(self, *, every_turn: bool) -> int:
        """Answers that it asks for."""
        return len(self.turns) if every_turn and self.turns else 1

    def prompt(self, conversation: Conversation, turn: int) -> Any:
        """Return the prompt of a turn, after the turns of the conversation."""
        return list(self.messages) if self.messages else conversation.prompt(self.turns[turn])


def read(path: Path) -> list[Task]:
    """Read a file of tasks.

    Raises:
        PromptError: it cannot be read, or a line is no task; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path} cannot be read: {why(error)}") from error
    tasks = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                tasks.append(_task(line, number))
            except PromptError as error:
                raise PromptError(f"{path}, line {number}: {error}") from error
    if not tasks:
        raise PromptError(f"{path} holds no prompts; each is a JSON object on a line of its own")
    return tasks


def choose(tasks: Sequence[Task], *, limit: int | None, per_category: int | None) -> list[Task]:
    """Return the first tasks of each category, and of these so many, evenly spread; in order."""
    seen: Counter[str | None] = Counter()
    chosen = []
    for task in tasks:
        seen[task.category] += 1
        if per_category is None or seen[task.category] <= per_category:
            chosen.append(task)
    if limit is not None and limit < len(chosen):
        chosen = [chosen[i * len(chosen) // limit] for i in range(limit)]
    return chosen


def _task(line: str, number: int) -> Task:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"this is no JSON ({error}): {shown(line)}") from error
    if not isinstance(found, dict):
        raise PromptError(f"this is no JSON object: {shown(found)}")
    forms = [form for form in FORMS if form in found]
    if len(forms) != 1:
        has = listed(map(repr, forms)) if forms else f"the keys {listed(map(repr, found))}"
        raise PromptError(f"it has {has}; it has to have exactly one of {listed(FORMS)}")
    category = found.get("category")
    if not isinstance(category, str | None):
        raise PromptError(f"category is {shown(category)}; it has to be text")
    name = next((found[key] for key in _NAMES if key in found), number)
    if not isinstance(name, str | int):
        raise PromptError(f"question_id is {shown(name)}; it has to be text or a number")
    value = found[forms[0]]
    if forms[0] == "messages":
        return Task(number, str(name), category, messages=_messages(value))
    if forms[0] == "prompt":
        return Task(number, str(name), category, turns=(_text(value, "prompt"),))
    if not isinstance(value, list) or not value:
        raise PromptError(f"turns is {shown(value)}; it has to be a list of at least one text")
    turns = tuple(_text(turn, f"turn {i}") for i, turn in enumerate(value))
    return Task(number, str(name), category, turns=turns)


def _messages(value: object) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list):
        raise PromptError(f"messages is {shown(value)}; it has to be a list of messages")
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, dict) or {"role", "content"} - set(message):
            raise PromptError(f"message {i} is {shown(message)}; it needs a role and a content")
        role = _text(message["role"], f"the role of message {i}")
        messages.append({"role": role, "content": _text(message["content"], f"message {i}")})
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()  # what some model answered: to be answered anew
    if not messages:
        raise PromptError("messages holds nothing to answer")
    return tuple(messages)


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise PromptError(f"{what} is {shown(value)}; it has to be text that is not empty")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise PromptError(f"{what} holds a lone surrogate, which is no character")
    return value
