"""What a line that starts with a slash does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from specdec._structure import shown
from specdec.cli_options import check_text, digits, why
from specdec.errors import PromptError, nearest
from specdec.prompts import read_prompts

if TYPE_CHECKING:
    from specdec.chat.chat import Chat

SLASH = "/"


class Leave(Exception):
    """The chat is over."""


def is_command(line: str) -> bool:
    """Whether a line is one; a message that starts with a slash is written with two."""
    return line.startswith(SLASH) and not line.startswith(2 * SLASH)


def message_of(line: str) -> str:
    """Return the message that a line which is no command stands for."""
    return line.removeprefix(SLASH) if line.startswith(2 * SLASH) else line


def perform(chat: Chat, line: str) -> None:
    """Do what a command says.

    Raises:
        Leave: the chat is to end.
        PromptError: there is no such command, or it cannot be done.
    """
    name, _, argument = line.removeprefix(SLASH).partition(" ")
    argument = argument.strip()
    command = COMMANDS.get(name)
    if command is None:
        known = ", ".join(SLASH + name for name in COMMANDS)
        raise PromptError(
            f"there is no command {shown(SLASH + name)}{nearest(name, COMMANDS)} (known: {known}; "
            "a message that starts with a slash is written with two)"
        )
    if argument and not command.argument:
        raise PromptError(f"/{name} takes nothing after it, but {shown(argument)} stands there")
    command.run(chat, argument)


def set_system(chat: Chat, text: str) -> None:
    """Set the system message, or take it away; raise PromptError if it would be ignored."""
    conversation = chat.conversation
    if conversation.raw:
        raise PromptError("--raw continues plain text, in which there is no system message")
    before, conversation.system = conversation.system, check_text(text, "the message") or None
    try:
        (rendered,) = read_prompts(conversation.prompt("Hello"), chat.llm.tokenizer)
        if " ".join(text.split()) not in " ".join((rendered.text or "").split()):
            raise PromptError("the model's chat template leaves the system message out")
    except PromptError:
        conversation.system = before
        raise


def _system(chat: Chat, text: str) -> None:
    before = chat.conversation.system
    set_system(chat, text)
    was = "there was none" if before is None else f"it was {shown(before)}"
    chat.say(f"(the system message is {'set' if text else 'gone'}; {was})")


def _reset(chat: Chat, _: str) -> None:
    count = len(chat.conversation.turns)
    chat.conversation.turns.clear()
    kept = "" if chat.conversation.system is None else "; the system message stays"
    chat.say(f"(turns forgotten: {count}{kept})")


def _undo(chat: Chat, _: str) -> None:
    if not chat.conversation.turns:
        raise PromptError("there is nothing to take back")
    turn = chat.conversation.turns.pop()
    chat.say(f"(taken back, with its answer: {shown(turn.message)})")


def _drop(chat: Chat, text: str) -> None:
    turns = chat.conversation.turns
    if not turns:
        raise PromptError("there is nothing to forget")
    count = digits(text) if text else 1
    if not count or count > len(turns):
        raise PromptError(
            f"/drop takes how many turns to forget, but {shown(text)} stands there; "
            f"turns remembered: {len(turns)}"
        )
    first, before = turns[0], len(turns)
    del turns[:count]
    chat.say(f"(turns forgotten: {count} of {before}, the first {shown(first.message)})")


def _save(chat: Chat, name: str) -> None:
    if not name:
        raise PromptError("/save needs the name of a file")
    path = Path(name).expanduser()
    text = json.dumps(chat.conversation.as_dict(), ensure_ascii=False)
    try:
        # only a file that this chat wrote is written again
        with path.open("w" if path.resolve() in chat.saved else "x", encoding="utf-8") as file:
            file.write(text + "\n")
    except FileExistsError as error:
        raise PromptError(f"{name} is there already; give a new name") from error
    except (OSError, ValueError) as error:  # ValueError: no name that a file can have
        raise PromptError(f"{name} cannot be written: {why(error)}") from error
    chat.saved.add(path.resolve())
    chat.say(f"(turns saved in {name}: {len(chat.conversation.turns)})")


def _stats(chat: Chat, _: str) -> None:
    chat.say(f"[{chat.statistics()}]")


def _help(chat: Chat, _: str) -> None:
    width = max(len(f"{name} {c.argument}") for name, c in COMMANDS.items()) + 2
    for name, command in COMMANDS.items():
        chat.say(f"/{f'{name} {command.argument}':{width}}{command.help}")
    chat.say('A line that starts with """ opens a message of several lines; """ ends it.')
    chat.say("Ctrl-C ends an answer, Ctrl-D the chat. // sends a message that starts with /.")


def _exit(chat: Chat, _: str) -> None:
    raise Leave


@attrs.frozen
class Command:
    """What a command does. argument: its name in the help; empty if it takes none."""

    run: Callable[[Chat, str], None]
    argument: str
    help: str


COMMANDS = {
    "reset": Command(_reset, "", "forget every turn"),
    "undo": Command(_undo, "", "take the last turn back"),
    "drop": Command(_drop, "[N]", "forget the oldest turn, or the N oldest"),
    "system": Command(_system, "[TEXT]", "set the system message; without TEXT there is none"),
    "save": Command(_save, "FILE", "write the conversation as JSON"),
    "stats": Command(_stats, "", "numbers of the whole chat"),
    "help": Command(_help, "", "show this"),
    "exit": Command(_exit, "", "leave"),
}
