"""The runs of a benchmark: every configuration in every setting, taking turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import attrs

from specdec.bench.load import Answer, Load, Server
from specdec.bench.workload import Task

if TYPE_CHECKING:
    from specdec.sampling_params import SamplingParams


@attrs.frozen
class Setting:
    """What a run was made with."""

    configuration: str
    temperature: float
    concurrency: int


@attrs.frozen(eq=False, kw_only=True)
class Run:
    """A run over every task. tokens: also those of answers that were broken off.

    complete: it was not interrupted.
    """

    setting: Setting
    repetition: int
    seconds: float
    tokens: int
    answers: tuple[Answer, ...]
    complete: bool

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Measurement:
    """Runs what there is to run and remembers it.

    params: of a task at a temperature, `params(task, temperature=...)`. first, every_turn, raw:
    as for `Load`.
    """

    def __init__(
        self,
        servers: Mapping[str, Server],
        tasks: Sequence[Task],
        *,
        temperatures: Sequence[float],
        concurrencies: Sequence[int],
        repeat: int,
        params: Callable[..., SamplingParams],
        first: Mapping[int, list[int]],
        every_turn: bool,
        raw: bool,
    ) -> None:
        self.servers = servers
        self.tasks = tasks
        self.temperatures = temperatures
        self.concurrencies = concurrencies
        self.repeat = repeat
        self.params = params
        self.first = first
        self.every_turn = every_turn
        self.raw = raw
        self.runs: list[Run] = []

    @property
    def total(self) -> int:
        """Answers that all runs ask for together."""
        each = sum(task.length(every_turn=self.every_turn) for task in self.tasks)
        return each * sum(1 for _ in self.order())

    def order(self) -> Iterator[tuple[int, Setting]]:
        """Every repetition has every setting; who goes first in a setting changes with it."""
        names = list(self.servers)
        for repetition in range(self.repeat):
            turn = repetition % len(names)
            for temperature in self.temperatures:
                for concurrency in self.concurrencies:
                    for name in names[turn:] + names[:turn]:
                        yield repetition, Setting(name, temperature, concurrency)

    def warm(self, prompts: int, params: Callable[[float], SamplingParams]) -> None:
        """Let every configuration answer so many prompts in every setting, unmeasured."""
        tasks = self.tasks[:prompts]
        for setting in dict.fromkeys(setting for _, setting in self.order()):
            once = partial(_always, params(setting.temperature))
            self._load(setting, tasks, once, every_turn=False).run()

    def run(self, ended: Callable[[Answer], None], after: Callable[[Run], None]) -> None:
        """Run everything. A run that is interrupted is remembered as incomplete.

        ended: called after every answer; after: after every run.
        """
        for repetition, setting in self.order():
            load = self._load(
                setting,
                self.tasks,
                partial(self.params, temperature=setting.temperature),
                every_turn=self.every_turn,
                ended=ended,
            )
            complete = False
            try:
                load.run()
                complete = True
            finally:
                if load.tokens or load.answers:
                    self.runs.append(
                        Run(
                            setting=setting,
                            repetition=repetition,
                            seconds=load.seconds,
                            tokens=load.tokens,
                            answers=tuple(load.answers),
                            complete=complete,
                        )
                    )
            after(self.runs[-1])

    def _load(
        self,
        setting: Setting,
        tasks: Sequence[Task],
        params: Callable[[Task], SamplingParams],
        *,
        every_turn: bool,
        ended: Callable[[Answer], None] = lambda answer: None,
    ) -> Load:
        return Load(
            self.servers[setting.configuration],
            tasks,
            concurrency=setting.concurrency,
            first=self.first,
            params=params,
            every_turn=every_turn,
            raw=self.raw,
            ended=ended,
        )


def _always(params: SamplingParams, task: Task) -> SamplingParams:
    return params
