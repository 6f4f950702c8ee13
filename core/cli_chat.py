"""Chat in the terminal, streaming; after every answer the numbers of its speculation."""

from __future__ import annotations

import argparse

from specdec import cli_options
from specdec.chat.conversation import Conversation
from specdec.chat.terminal import Terminal
from specdec.config import SpeculativeConfig
from specdec.errors import ConfigError, SpecdecError

FAILED = 1  # exit status: a message of a pipe got no answer, or a command could not be done


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `specdec chat`."""
    model = cli_options.add_model(parser, slots=False)
    model.add_argument(
        "--speculative-config", "-sc", metavar="CONFIG", help=cli_options.CONFIG_HELP
    )
    chat = parser.add_argument_group("chat")
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    chat.add_argument(
        "--raw",
        action="store_true",
        help="no chat template and no roles: the model continues the text so far",
    )
    cli_options.add_sampling(parser, max_tokens=512)


def run(args: argparse.Namespace) -> int:
    """Chat until the input ends; returns 1 if stdin was no terminal and something failed."""
    config = SpeculativeConfig.parse(args.speculative_config)
    params = cli_options.sampling(args)

    from specdec.chat.chat import Chat
    from specdec.chat.commands import COMMANDS, Leave, is_command, message_of, perform, set_system
    from specdec.llm import LLM

    cli_options.quiet()
    engine = {**cli_options.engine(args), "max_num_seqs": 1}
    with LLM(args.model, speculative_config=config, **engine) as llm:
        if not args.raw and not getattr(llm.tokenizer, "chat_template", None):
            raise ConfigError(
                f"the tokenizer of {args.model!r} has no chat template, so it knows no roles; "
                "with --raw the model continues the text that you type"
            )
        terminal = Terminal(words=[f"/{name}" for name in COMMANDS])
        chat = Chat(llm, Conversation(args.raw), params, interactive=terminal.interactive)
        if args.system is not None:
            set_system(chat, args.system)
        if terminal.interactive:
            speculation = args.speculative_config or "plain decoding"
            chat.say(f"{args.model}, {speculation}; /help shows the commands, Ctrl-D leaves")
        failed = False
        for line in terminal.messages():
            try:
                if is_command(line):
                    perform(chat, line)
                else:
                    chat.answer(message_of(line))
            except Leave:
                break
            except SpecdecError as error:
                chat.say(f"specdec: {error}")
                failed = True
        return FAILED if failed and not terminal.interactive else 0
