"""What the tests of a benchmark share: a server whose answers and times are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from specdec import CompletionOutput, PromptError, RequestOutput
from specdec.bench.workload import Task
from specdec.metrics import SpeculationMetrics
from specdec.outputs import RequestMetrics


class Letters:
    """A token is a letter."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


@attrs.define
class Served:
    prompt: list[int]
    answer: list[int]
    given: int = 0
    aborted: bool = False


class Server:
    """Answers a prompt with its letters turned round, `per_step` tokens a step, one second each.

    clock: what time it is. most: requests that were in flight at once at most.
    """

    tokenizer = Letters()

    def __init__(self, per_step: int = 1) -> None:
        self.per_step = per_step
        self.clock = 0.0
        self.most = 0
        self.steps: list[int] = []
        self.prompts: list[str] = []
        self.requests: dict[str, Served] = {}
        self.before_step: Callable[[], None] = lambda: None

    def add_request(self, prompt: Any, params: Any) -> str:
        ids = prompt["prompt_token_ids"]
        text = self.tokenizer.decode(ids)
        if "!" in text:
            raise PromptError("no shouting")
        self.prompts.append(text)
        name = str(len(self.prompts))
        self.requests[name] = Served(ids, ids[::-1])
        self.most = max(self.most, len(self.requests))
        return name

    def step(self) -> list[RequestOutput]:
        self.before_step()
        self.clock += 1
        self.steps.append(len(self.requests))
        outputs = []
        for name, served in list(self.requests.items()):
            served.given = min(served.given + self.per_step, len(served.answer))
            done = served.given == len(served.answer) or served.aborted
            outputs.append(self.output(name, served, done))
            if done:
                del self.requests[name]
        return outputs

    def output(self, name: str, served: Served, done: bool) -> RequestOutput:
        failed = done and "?" in self.tokenizer.decode(served.prompt)
        return RequestOutput(
            request_id=name,
            prompt=None,
            prompt_token_ids=served.prompt,
            outputs=[
                CompletionOutput(
                    index=0,
                    text="",
                    token_ids=served.answer[: served.given],
                    finish_reason=("error" if failed else "length") if done else None,
                )
            ],
            finished=done,
            metrics=RequestMetrics(
                arrival_time=0.0,
                speculative_decoding=SpeculationMetrics(
                    num_drafts=2, num_draft_tokens=4, num_accepted_tokens=3,
                    drafted_per_pos=[2, 2], accepted_per_pos=[2, 1],
                ),
            ),
            error="no questions" if failed else None,
        )  # fmt: skip

    def abort_request(self, names: Any) -> None:
        for name in names:
            self.requests[name].aborted = True


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Server]:
    """Make a server whose clock is the only one."""

    def make(per_step: int = 1) -> Server:
        made = Server(per_step)
        monkeypatch.setattr("specdec.bench.load.time.perf_counter", lambda: made.clock)
        return made

    return make


@pytest.fixture
def tasks() -> Callable[..., list[Task]]:
    """Make tasks out of turns, one text or several each; the first letter is the category."""

    def make(*prompts: str | tuple[str, ...]) -> list[Task]:
        turns = [(p,) if isinstance(p, str) else p for p in prompts]
        return [
            Task(line=i, name=str(i), category=t[0][0], turns=t) for i, t in enumerate(turns, 1)
        ]

    return make
