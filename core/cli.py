"""The command line: `specdec generate`, `specdec chat`, `specdec bench`, `specdec plugins`.

A module per sub-command; torch is imported by those that need it, when they run.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from specdec import cli_bench, cli_chat, cli_generate, cli_plugins
from specdec._structure import printable
from specdec.errors import SpecdecError

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
COMMANDS = {
    "generate": cli_generate,
    "chat": cli_chat,
    "bench": cli_bench,
    "plugins": cli_plugins,
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of every sub-command; `run` holds what it does."""
    parser = argparse.ArgumentParser(
        prog="specdec", description="Speculative decoding with pluggable speculators."
    )
    from specdec import __version__

    parser.add_argument("--version", action="version", version=f"specdec-core {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status: 0, 1 (it failed), 2 (misuse), 130 (^C)."""
    parsed = build_parser().parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
        return status
    except SpecdecError as error:
        notes = getattr(error, "__notes__", ())
        lines = [f"specdec: {error}", *(f"  ({n})" for n in notes)]
        # names in it may be a plugin's, so no control characters
        print(*map(printable, "\n".join(lines).split("\n")), sep="\n", file=sys.stderr)
        return MISUSED
    except KeyboardInterrupt:
        print("specdec: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader went away
        _give_stdout_up()
        return FAILED
    except OSError as error:
        if error.errno not in FULL:
            raise
        _give_stdout_up()
        print(f"specdec: cannot write: {error.strerror}", file=sys.stderr)
        return FAILED


def _give_stdout_up() -> None:
    """Point stdout elsewhere, so that Python's exit does not fail on what is left to write."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
