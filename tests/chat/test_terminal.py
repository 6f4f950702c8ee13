"""Where messages come from."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from specdec import PromptError
from specdec.chat.terminal import Terminal


class Keyboard(io.StringIO):
    """A terminal on which lines are typed; `^C` stands for the keys."""

    def isatty(self) -> bool:
        return True

    def readline(self, *_: Any) -> Any:
        line = super().readline()
        if line.startswith("^C"):
            raise KeyboardInterrupt
        return line


def messages(monkeypatch: pytest.MonkeyPatch, stdin: io.TextIOBase) -> Iterator[str]:
    monkeypatch.setattr(sys, "stdin", stdin)
    return Terminal().messages()


def test_a_line_is_a_message_and_empty_lines_are_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(messages(monkeypatch, io.StringIO("one\n\n  \n two\nthree"))) == [
        "one",
        " two",
        "three",
    ]
    assert capsys.readouterr() == ("", "")


def test_quotes_hold_several_lines_together(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '"""one\n\n  two\n"""\n"""\nthree"""\n"""four"""\n'
    assert list(messages(monkeypatch, io.StringIO(text))) == ["one\n\n  two", "three", "four"]


def test_quotes_that_are_never_closed_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PromptError, match="the input ended in a message"):
        list(messages(monkeypatch, io.StringIO('"""one\ntwo\n')))


def test_bytes_that_are_no_text_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8")
    with pytest.raises(PromptError, match="stdin cannot be read as text"):
        list(messages(monkeypatch, stdin))


def test_a_person_is_prompted_and_interrupts_a_line_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = Keyboard('^C\none\n"""two\n^C\nthree\n')
    assert list(messages(monkeypatch, keys)) == ["one", "three"]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("(Ctrl-D or /exit leaves)") == 2
    assert captured.err.count("> ") == 5


def test_a_pipe_passes_an_interrupt_on(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keyboard("^C\n")
    monkeypatch.setattr(keys, "isatty", lambda: False)
    with pytest.raises(KeyboardInterrupt):
        list(messages(monkeypatch, keys))
