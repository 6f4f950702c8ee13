"""What was said so far, and the prompt that it makes."""

from __future__ import annotations

from typing import Any

import attrs


@attrs.define(eq=False)
class Turn:
    """A message and the answer to it."""

    message: str
    answer: str


@attrs.define(eq=False)
class Conversation:
    """Turns, oldest first, and a system message before them.

    raw: there are no roles: the prompt is the text so far, and each message starts a new line.
    """

    raw: bool = False
    system: str | None = None
    turns: list[Turn] = attrs.field(factory=list)

    def add(self, message: str, answer: str) -> None:
        """Remember a turn."""
        self.turns.append(Turn(message, answer))

    def prompt(self, message: str | None = None) -> Any:
        """Return messages for a chat template, or text if raw, that end in `message`."""
        if self.raw:
            said = "".join(f"{turn.message}{turn.answer}\n" for turn in self.turns)
            return said + (message or "")
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.message})
            messages.append({"role": "assistant", "content": turn.answer})
        if message is not None:
            messages.append({"role": "user", "content": message})
        return messages

    def as_dict(self) -> dict[str, Any]:
        """Return it as a line of a file of prompts: `specdec bench` reads it."""
        return {"prompt" if self.raw else "messages": self.prompt()}
