"""What the tests of robustness share: what a request gives alone, and how to run many at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from specdec import LLM, CompletionOutput, Logprob, RequestOutput, SamplingParams
from specdec.testing import tiny_target

VOCAB = 32
MAX_MODEL_LEN = 64
PAGE = 16 * 2 * 2 * 8 * 8  # bytes: tokens of a page, keys and values, heads, head size, float64
Entries = Mapping[int, Logprob]


@attrs.frozen(eq=False)
class Case:
    """A request that can be made any number of times; it is seeded unless it is greedy."""

    number: int
    prompt: tuple[int, ...]
    params: SamplingParams


@attrs.define(eq=False)
class Gathered:
    """What was handed out for a request, whichever way its outputs came."""

    case: Case
    last: RequestOutput | None = None
    aborted: bool = False
    completions: dict[int, CompletionOutput] = attrs.field(factory=dict)  # the last of each index
    token_ids: dict[int, list[int]] = attrs.field(factory=dict)
    text: dict[int, str] = attrs.field(factory=dict)
    logprobs: dict[int, list[Entries]] = attrs.field(factory=dict)


def assert_clean(llm: LLM) -> None:
    """Nothing is left of any request: no page, no slot, no edit, no name."""
    engine = llm._loaded.engine
    scheduler = engine.scheduler
    assert scheduler.pool.free == scheduler.num_blocks
    assert not scheduler.running
    assert not scheduler.waiting
    assert not engine.busy
    assert sorted(scheduler._free) == list(range(engine.slots.max_num_seqs))
    assert not engine.slots.running.any()
    assert not engine.editing.arrays.active
    assert not engine.editing._processed
    assert not engine._ended
    assert not llm.has_unfinished_requests()


def assert_entries(actual: list[Entries] | None, expected: list[Entries] | None, most: int) -> None:
    """The first `most` log-probabilities agree; float32 may round the last bit differently."""
    if actual is None or expected is None:
        assert actual is expected
        return
    for mine, right in zip(actual[:most], expected[:most], strict=True):
        # two likeliest that differ by less than that may change places
        assert sorted(e.logprob for e in mine.values()) == pytest.approx(
            sorted(e.logprob for e in right.values()), abs=1e-5
        )
        for token in mine.keys() & right.keys():
            assert mine[token].logprob == pytest.approx(right[token].logprob, abs=1e-5)
            assert mine[token].decoded_token == right[token].decoded_token
        assert next(iter(mine)) == next(iter(right))  # the token itself
        assert mine[next(iter(mine))].rank == right[next(iter(mine))].rank


class Driver:
    """Runs cases through an LLM step by step, and compares what came out with `alone`."""

    def __init__(self, llm: LLM, alone: Callable[[Case], RequestOutput]) -> None:
        self.llm = llm
        self.alone = alone
        self.open: dict[str, Gathered] = {}
        self.done: list[Gathered] = []
        self.idle = 0  # steps in a row that handed nothing out

    def add(self, case: Case, priority: int = 0) -> str:
        """Queue a case."""
        name = self.llm.add_request(list(case.prompt), case.params, priority=priority)
        self.open[name] = Gathered(case)
        return name

    def generate(self, case: Case) -> None:
        """Run a case to its end, by `LLM.generate`; the others move along."""
        (output,) = self.llm.generate([list(case.prompt)], case.params, use_tqdm=False)
        gathered = Gathered(case, output)
        for completion in output.outputs:
            gathered.completions[completion.index] = completion
            gathered.token_ids[completion.index] = completion.token_ids
            gathered.text[completion.index] = completion.text
            gathered.logprobs[completion.index] = list(completion.logprobs or [])
        self.done.append(gathered)
        self._check(gathered)

    def abort(self, name: str) -> None:
        """Abort a request; it may have ended just now."""
        self.llm.abort_request(name)
        self.open[name].aborted = True

    def step(self) -> None:
        """Run a step, and gather what it hands out."""
        outputs = self.llm.step()
        self.idle = 0 if outputs else self.idle + 1
        assert self.idle < 300, "nothing moves any more"
        for output in outputs:
            gathered = self.open[output.request_id]
            self._gather(gathered, output)
            if output.finished:
                del self.open[output.request_id]
                self.done.append(gathered)
                self._check(gathered)

    def drain(self) -> None:
        """Run until nothing is left; everything was given back then."""
        while self.llm.has_unfinished_requests():
            self.step()
        assert not self.open
        assert_clean(self.llm)

    def _gather(self, gathered: Gathered, output: RequestOutput) -> None:
        kind = gathered.case.params.output_kind
        assert output.finished or kind != "final_only"
        for completion in output.outputs:
            index = completion.index
            gathered.completions[index] = completion
            ids = gathered.token_ids.setdefault(index, [])
            text = gathered.text.get(index, "")
            logprobs = gathered.logprobs.setdefault(index, [])
            if kind == "delta":
                ids += completion.token_ids
                logprobs += completion.logprobs or []
                gathered.text[index] = text + completion.text
                continue
            assert completion.token_ids[: len(ids)] == ids  # nothing is taken back
            assert completion.text.startswith(text)
            gathered.token_ids[index] = completion.token_ids
            gathered.text[index] = completion.text
            gathered.logprobs[index] = list(completion.logprobs or [])
        gathered.last = output

    def _check(self, gathered: Gathered) -> None:
        case, last = gathered.case, gathered.last
        right = self.alone(case)
        assert last is not None
        assert sorted(gathered.completions) == list(range(case.params.n))
        for expected in right.outputs:
            completion = gathered.completions[expected.index]
            index, what = completion.index, (case, completion)
            ids, logprobs = gathered.token_ids[index], gathered.logprobs[index]
            if completion.finish_reason == "abort":
                assert gathered.aborted, what
                assert ids == expected.token_ids[: len(ids)], what
            else:
                assert ids == expected.token_ids, what
                assert gathered.text[index] == expected.text, what
                assert completion.finish_reason == expected.finish_reason, what
                assert completion.stop_reason == expected.stop_reason, what
            if case.params.logprobs is None:
                assert completion.logprobs is None
                assert not logprobs
            else:
                assert len(logprobs) == len(ids), what
                assert_entries(logprobs, list(expected.logprobs or []), len(ids))
                total = sum(e[t].logprob for e, t in zip(logprobs, ids, strict=True))
                assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)
        if not gathered.aborted:
            assert last.error == right.error, case
        mine, whole = last.prompt_logprobs, right.prompt_logprobs
        if mine is None or whole is None:
            assert mine is whole
        elif mine[1:]:  # an abort may come before all of the prompt was computed
            assert gathered.aborted or len(mine) == len(whole)
            assert mine[0] is None
            assert_entries(list(filter(None, mine)), list(filter(None, whole)), len(mine) - 1)


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Any:
    """A token per word: ids 4 to 16 are words, 1 is the end, those from 17 on have no text."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="session")
def small_model() -> Any:
    """A random Llama in float64 with one layer."""
    return tiny_target(
        vocab=VOCAB,
        layers=1,
        hidden_size=32,
        intermediate_size=32,
        max_model_len=MAX_MODEL_LEN,
        scale=0.7,
    )


@pytest.fixture(scope="session")
def alone(small_model: Any, tokenizer: Any) -> Callable[[Case], RequestOutput]:
    """What a case gives alone, in plain decoding, in an engine that nobody else used."""
    known: dict[int, RequestOutput] = {}

    def run(case: Case) -> RequestOutput:
        if case.number not in known:
            with LLM(small_model, tokenizer=tokenizer, max_num_seqs=3, max_logprobs=-1) as llm:
                known[case.number] = llm.generate([list(case.prompt)], case.params, use_tqdm=False)[
                    0
                ]
        return known[case.number]

    return run


@pytest.fixture(scope="session")
def make_case() -> type[Case]:
    return Case


@pytest.fixture
def make_driver(alone: Callable[[Case], RequestOutput]) -> Callable[[LLM], Driver]:
    return lambda llm: Driver(llm, alone)


@pytest.fixture
def clean() -> Callable[[LLM], None]:
    return assert_clean
