"""The first prompts of tasks, tokenized once for every configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.bench.workload import Task
from specdec.chat.conversation import Conversation
from specdec.errors import PromptError
from specdec.prompts import read_prompts

if TYPE_CHECKING:
    from specdec.llm import LLM


def first_prompts(
    llm: LLM, tasks: Sequence[Task], file: Path, *, raw: bool
) -> dict[int, list[int]]:
    """Return the token ids of every task's first prompt, by its line.

    file: names the lines in messages. raw: without the chat template.

    Raises:
        PromptError: a prompt cannot be rendered or is longer than the context.
    """
    found = {}
    for task in tasks:
        where = f"{file}, line {task.line}"
        if raw and task.messages:
            has = getattr(llm.tokenizer, "chat_template", None)
            why = "--raw uses none" if has else "the model has none"
            raise PromptError(f"{where}: messages need a chat template, and {why}")
        try:
            (read,) = read_prompts(task.prompt(Conversation(raw), 0), llm.tokenizer)
        except PromptError as error:
            raise PromptError(f"{where}: {error}") from error
        if len(read.token_ids) >= llm.max_model_len:
            raise PromptError(
                f"{where}: the prompt has {len(read.token_ids)} tokens, but the context is "
                f"{llm.max_model_len} and has to hold a token of the answer too"
            )
        found[task.line] = read.token_ids
    return found
