"""Where messages come from: a person at a terminal, or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from specdec.errors import PromptError

FENCE = '"""'  # a line that starts with it opens a message of several lines
PROMPT, CONTINUED = "> ", ". "


class Terminal:
    """Reads messages from stdin, one a line.

    interactive: a person is there, who is prompted. With readline where Python has it: lines can
    be edited, and the arrow keys bring earlier ones back.
    """

    def __init__(self, *, words: Sequence[str] = ()) -> None:
        self.interactive = sys.stdin.isatty()
        # input() edits lines only if it writes to a terminal as well
        self._edits = self.interactive and sys.stdout.isatty()
        if self._edits:
            _complete(words)

    def messages(self) -> Iterator[str]:
        """Yield what is typed until the input ends; lines of space alone do not count.

        Ctrl-C at the prompt throws the line away. Raise PromptError for bytes that are no text.
        """
        while (message := self._message()) is not None:
            if message.strip():
                yield message

    def _message(self) -> str | None:
        try:
            line = self._line(PROMPT)
            if line is None or not line.startswith(FENCE):
                return line
            lines = [line.removeprefix(FENCE)]
            while not lines[-1].rstrip().endswith(FENCE):
                following = self._line(CONTINUED)
                if following is None:
                    raise PromptError(f"the input ended in a message that {FENCE} had opened")
                lines.append(following)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            print("\n(Ctrl-D or /exit leaves)", file=sys.stderr)
            return ""
        return "\n".join(lines).rstrip().removesuffix(FENCE).strip("\n")

    def _line(self, prompt: str) -> str | None:
        """Return the next line without its end, None if there is none."""
        try:
            if self._edits:
                return input(prompt)
            if self.interactive:
                print(prompt, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
        except EOFError:
            line = ""
        except UnicodeDecodeError as error:
            raise PromptError(f"stdin cannot be read as text: {error}") from error
        if not line:
            if self.interactive:
                print(file=sys.stderr)
            return None
        return line.removesuffix("\n")


def _complete(words: Sequence[str]) -> None:
    """Let readline edit lines and complete the words, where there is one."""
    try:
        import readline
    except ImportError:  # Windows
        return

    def match(text: str, state: int) -> str | None:
        found = [word for word in words if word.startswith(text)]
        return found[state] if text and state < len(found) else None

    readline.set_completer(match)
    readline.set_completer_delims(" ")
    readline.parse_and_bind("tab: complete")
