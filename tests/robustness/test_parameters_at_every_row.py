"""Each sampling parameter holds at every row of a step, and where it did not, that would be seen.

Requests are run with drafts that are all right, all wrong, or right but for the parameter, and
compared with plain decoding. Then the engine is broken on purpose, so that the parameter reaches
the first row alone, or the last, or a context without the drafts: the comparison has to fail then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec import LLM, SamplingParams
from specdec.logits_processors import LogitsRows, run_processors
from specdec.output_text import OutputText
from specdec.runner import commit, editing, engine
from specdec.runner.drafting import Drafting
from specdec.runner.sequence_logprobs import SequenceLogprobs
from specdec.testing import OracleSpeculator, WrongSpeculator, tiny_target, toy_target
from specdec_kernels import edit_logits, reference, rejection
from specdec_kernels import edits as kernel_edits

VOCAB, K = 32, 4
EOS = 1
Patch = pytest.MonkeyPatch


@functools.cache
def counting() -> PreTrainedModel:
    """After token t comes t + 1. The words of the tokenizer are 4 to 16, its end is 1."""
    return toy_target(torch.eye(VOCAB).roll(1, dims=1) * 20)


@functools.cache
def ending() -> PreTrainedModel:
    """It counts only where it may not end."""
    table = torch.eye(VOCAB).roll(1, dims=1) * 20
    table[:, EOS] = 30
    return toy_target(table)


@functools.cache
def chattering() -> PreTrainedModel:
    """No token is sure."""
    return tiny_target(vocab=VOCAB, layers=1, scale=0.7, seed=5)


def rolled(rows: LogitsRows, logits: Tensor) -> Tensor:
    """What was written says by how much the ids are moved."""
    moved = [int(rows.output_token_ids(i).sum()) for i in range(len(rows))]
    return torch.stack([row.roll(by) for row, by in zip(logits, moved, strict=True)])


# -- what is run -------------------------------------------------------------


@attrs.frozen
class Scenario:
    """A request on which a parameter can be seen.

    without: stands in for the parameter where it is left out. mutants: ways to break the engine
    that have to show in the output.
    """

    name: str
    params: dict[str, Any]
    without: dict[str, Any]
    mutants: tuple[str, ...]
    model: Callable[[], PreTrainedModel] = chattering
    prompt: tuple[int, ...] = (3, 9, 3, 20)


ROWS = ("first row", "last row", "all but the last row")
EDITS = tuple(f"edits: {name}" for name in ROWS)
CONTEXT = (*EDITS, "edits: no drafts", "edits: drafts too early")
MINIMUM = (*EDITS, "edits: one position")
PROCESSED = tuple(f"processors: {name}" for name in (*ROWS, "no drafts"))
LAW = tuple(f"law: {name}" for name in ROWS)
ENDS = ("ends: first token", "ends: last token")

GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
SAMPLED = {**GREEDY, "temperature": 1.0, "seed": 11}
COUNTED = {"temperature": 0.0, "max_tokens": 14}


def edit(name: str, value: Any, off: Any, mutants: tuple[str, ...], **more: Any) -> Scenario:
    return Scenario(name, {**GREEDY, name: value, **more}, {name: off}, mutants)


def law(name: str, value: float, off: float) -> Scenario:
    return Scenario(name, {**SAMPLED, name: value}, {name: off}, LAW)


def count(
    name: str, first: int, given: dict[str, Any], without: dict[str, Any], mutants: tuple[str, ...]
) -> Scenario:
    return Scenario(name, {**COUNTED, **given}, without, mutants, counting, (first,))


SCENARIOS = [
    edit("repetition_penalty", 1.6, 1.0, CONTEXT),
    edit("presence_penalty", 2.0, 0.0, CONTEXT),
    edit("frequency_penalty", 1.5, 0.0, CONTEXT),
    edit("logit_bias", {7: 4.0, 8: 4.2, 30: 3.5}, None, EDITS),
    edit("allowed_token_ids", [2, 5, 9, 12, 21, 30], None, EDITS),
    edit("bad_words", ["a", "sat"], (), EDITS, logit_bias={8: 9.0, 6: 8.0, 9: 7.0}),
    # wherever the boundary between committed tokens and drafts is, a word goes over it
    Scenario(
        "bad_words of two tokens",
        {**GREEDY, "bad_words": ["cat the", "the mat"], "allowed_token_ids": [4, 5, 9]},
        {"bad_words": ()},
        ("edits: no drafts", "edits: drafts too early"),
    ),
    # an end is what the model wants everywhere, or where it is met in turn
    Scenario("min_tokens", {**COUNTED, "min_tokens": 8}, {"min_tokens": 0}, MINIMUM, ending, (3,)),
    count(
        "min_tokens before stop tokens",
        3,
        {"min_tokens": 9, "stop_token_ids": [6, 8, 31]},
        {"min_tokens": 0},
        ("edits: first row", "edits: one position"),
    ),
    edit("logits_processors", [rolled], (), PROCESSED),
    law("temperature", 0.4, 1.0),
    law("top_k", 2, 0),
    law("top_p", 0.5, 1.0),
    law("min_p", 0.4, 0.0),
    count("end of sequence", 27, {}, {"ignore_eos": True}, ENDS),
    count("ignore_eos", 27, {"ignore_eos": True}, {"ignore_eos": False}, ("ends: always",)),
    count("stop_token_ids", 3, {"stop_token_ids": [9, 31]}, {"stop_token_ids": None}, ENDS),
    count("stop", 3, {"stop": ["on a"]}, {"stop": ()}, ("strings: step",)),
    count("stop inside a word", 3, {"stop": ["ma"]}, {"stop": ()}, ("strings: step",)),
    count("max_tokens", 3, {"max_tokens": 8}, {"max_tokens": 20}, ("limit: step",)),
    edit("logprobs", 2, None, ("logprobs: first row", "logprobs: last row")),
    edit("logprobs", -1, None, ("logprobs: edited",), presence_penalty=2.0),
]
IDS = [f"{s.name}-{i}" for i, s in enumerate(SCENARIOS)]
DRAFTERS = {"right": OracleSpeculator, "wrong": WrongSpeculator, "unaware": OracleSpeculator}


@attrs.frozen
class Said:
    """All that a completion says, and how it was drafted."""

    tokens: list[int]
    text: str
    end: tuple[Any, ...]
    logprobs: list[dict[int, tuple[Any, ...]]]
    accepted_per_draft: float | None = attrs.field(eq=False)


PLAIN: dict[Any, Said] = {}


def say(
    scenario: Scenario, tokenizer: Any, config: dict[str, Any] | None = None, **instead: Any
) -> Said:
    params = SamplingParams(**{**scenario.params, **instead})
    with LLM(
        scenario.model(), tokenizer=tokenizer, speculative_config=config, max_logprobs=-1
    ) as llm:
        (output,) = llm.generate([list(scenario.prompt)], params, use_tqdm=False)
        metrics = llm.metrics
    completion = output.outputs[0]
    logprobs = [
        {token: (round(e.logprob, 3), e.rank) for token, e in entry.items()}
        for entry in completion.logprobs or []
    ]
    return Said(
        completion.token_ids,
        completion.text,
        (completion.finish_reason, completion.stop_reason, output.error),
        logprobs,
        metrics.num_accepted_tokens / metrics.num_drafts if metrics.num_drafts else None,
    )


def plainly(scenario: Scenario, tokenizer: Any, *, aware: bool = True) -> Said:
    """Plain decoding, with the parameter or without it."""
    key = (scenario.name, repr(scenario.params), aware)
    if key not in PLAIN:
        PLAIN[key] = say(scenario, tokenizer, **({} if aware else scenario.without))
    return PLAIN[key]


def drafted(drafter: str, scenario: Scenario, tokenizer: Any, k: int = K) -> dict[str, Any]:
    """A drafter that goes on after every end; `unaware` of the parameter."""
    stream = plainly(scenario, tokenizer, aware=drafter != "unaware").tokens
    streams = {scenario.prompt: [*stream, *range(stream[-1] + 1, VOCAB)]}
    return {"method": DRAFTERS[drafter], "streams": streams, "num_speculative_tokens": k}


# -- the engine as it is -----------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS, ids=IDS)
def test_drafts_change_nothing_under_any_parameter(scenario: Scenario, tokenizer: Any) -> None:
    plain = plainly(scenario, tokenizer)
    without = plainly(scenario, tokenizer, aware=False)
    assert without != plain, "the parameter cannot be seen"
    for drafter in DRAFTERS:
        for k in (1, K, 7) if drafter == "right" else (K,):
            said = say(scenario, tokenizer, drafted(drafter, scenario, tokenizer, k))
            assert said == plain, (drafter, k)
            if drafter == "right":
                assert said.accepted_per_draft is not None
                assert said.accepted_per_draft > 0.6 * k  # nearly whole blocks at once


@pytest.mark.parametrize("least", range(1, 12))
def test_a_minimum_may_be_reached_at_any_draft(least: int, tokenizer: Any) -> None:
    given = {**COUNTED, "min_tokens": least}
    scenario = Scenario("", given, {"min_tokens": 0}, (), ending, (3,))
    plain = plainly(scenario, tokenizer)
    assert plain.tokens.index(EOS) == least == len(plain.tokens) - 1
    for drafter in DRAFTERS:
        assert say(scenario, tokenizer, drafted(drafter, scenario, tokenizer)) == plain


# -- the engine broken on purpose --------------------------------------------


def seen_by(which: str, local: Tensor, rows: Tensor) -> Tensor:
    """The rows that a parameter reaches: their place in their request, of how many."""
    last = local == rows - 1
    return {"first row": local == 0, "last row": last, "all but the last row": ~last}[which]


def break_edits(patch: Patch, how: str) -> None:
    def broken(
        logits: Tensor, start: Tensor, drafts: Tensor, positions: Tensor, slots: Tensor, **more: Any
    ) -> Tensor:
        owner = torch.repeat_interleave(torch.arange(len(slots)), start.diff())
        if how == "no drafts":
            drafts = torch.full_like(drafts, -1)
        elif how == "drafts too early":
            drafts = drafts.roll(-1, dims=1)
        elif how == "one position":
            positions = positions[start[owner]]
        before = logits.clone()
        edited = edit_logits(logits, start, drafts, positions, slots, **more)
        if how in ROWS:
            local = torch.arange(len(owner)) - start[owner]
            spared = ~seen_by(how, local, start.diff()[owner])
            edited[: len(owner)][spared] = before[: len(owner)][spared]
        return edited

    patch.setattr(kernel_edits, "edit_logits", broken)


class Blind(LogitsRows):
    """Rows that look as if nothing had been drafted."""

    def output_token_ids(self, row: int) -> Any:
        return super().output_token_ids(0)


def break_processors(patch: Patch, how: str) -> None:
    def broken(processors: Any, rows: LogitsRows, logits: Tensor) -> Tensor:
        if how == "no drafts":
            known, length = rows.token_ids(len(rows) - 1), rows.position(0)
            start = len(rows.prompt_token_ids)
            rows = Blind(known, length=length, prompt_length=start, drafts=known[length:])
        edited = run_processors(processors, rows, logits)
        if how in ROWS:
            spared = ~seen_by(how, torch.arange(len(rows)), torch.tensor(len(rows)))
            edited[spared] = logits[spared]
        return edited

    patch.setattr(editing, "run_processors", broken)


def break_law(patch: Patch, how: str) -> None:
    def broken(given: Any, rows: Tensor, slots: Tensor) -> Tensor:
        sampling = given.sampling
        off = sampling._replace(
            temperature=torch.ones_like(sampling.temperature),
            top_k=torch.zeros_like(sampling.top_k),
            top_p=torch.ones_like(sampling.top_p),
            min_p=torch.zeros_like(sampling.min_p),
        )
        right = rejection.drawn(given, rows, slots)
        wrong = rejection.drawn(given._replace(sampling=off), rows, slots)
        seen = seen_by(how, rows - rows[0], torch.tensor(len(rows)))  # there is one request
        return right.where(seen, wrong)

    rules = (reference._RULES["coupled"][0], reference._match(broken))
    patch.setitem(reference._RULES, "coupled", rules)


def break_ends(patch: Patch, how: str) -> None:
    def broken(*arguments: Any) -> commit.Block:
        block = commit.cut(*arguments)
        for request, kept in enumerate(block.kept.tolist()):
            ended = bool(block.stopped[request])
            met = block.tokens[request, 1 : block.count[request]] == EOS
            if (how == "first token" and ended and kept > 1) or (
                how == "last token" and ended and kept < block.count[request]
            ):
                block.end(request, int(block.count[request]))
            elif how == "always" and met.any():
                block.end(request, int(met.argmax()) + 2)
                block.stopped[request] = True
            elif how == "step" and block.full[request]:
                block.kept[request] = block.count[request]
        return block

    patch.setattr(engine, "cut", broken)
    if how == "step":  # a drafter is not even asked for what would be cut
        wanted = lambda self, which, going: np.where(going, K, 0)  # noqa: E731
        patch.setattr(Drafting, "wanted", wanted)


def break_strings(patch: Patch, how: str) -> None:
    append = OutputText.append

    def broken(self: OutputText, tokens: Any, reason: Any = None) -> Any:
        match = append(self, tokens, reason)
        return match and attrs.evolve(match, kept=len(tokens))

    patch.setattr(OutputText, "append", broken)


def break_logprobs(patch: Patch, how: str) -> None:
    keep, record, apply = SequenceLogprobs.keep, SequenceLogprobs.record, editing.Editing.apply
    waiting: list[Any] = []

    def wait(self: Any, batch: Any, logits: Tensor) -> None:
        waiting.append((self, batch))

    def one_row(self: Any, block: Any, verdict: Any) -> None:
        column = 0 if how == "first row" else verdict.count - 1
        rows = verdict.rows.gather(1, torch.zeros_like(verdict.rows) + column)
        record(self, block, attrs.evolve(verdict, rows=rows))

    def late(self: Any, batch: Any, logits: Tensor, *, shown: bool) -> editing.Edited:
        edited = apply(self, batch, logits, shown=shown)
        asker, same = waiting.pop()
        keep(asker, same, apply(self, batch, logits.clone(), shown=True).logits)
        return edited

    if how == "edited":
        patch.setattr(SequenceLogprobs, "keep", wait)
        patch.setattr(editing.Editing, "apply", late)
    else:
        patch.setattr(SequenceLogprobs, "record", one_row)


BREAK = {
    "edits": break_edits,
    "processors": break_processors,
    "law": break_law,
    "ends": break_ends,
    "limit": break_ends,
    "strings": break_strings,
    "logprobs": break_logprobs,
}
MUTANTS = [(s, m) for s in SCENARIOS for m in s.mutants]


@pytest.mark.parametrize(("scenario", "mutant"), MUTANTS, ids=[f"{s.name}-{m}" for s, m in MUTANTS])
def test_the_comparison_sees_an_engine_that_forgets_rows(
    scenario: Scenario, mutant: str, tokenizer: Any, monkeypatch: Patch
) -> None:
    plain = plainly(scenario, tokenizer)
    # whether an end is in the middle of a block is up to the number of drafts
    tried = [("right", K), ("unaware", K), ("right", K - 1)]
    configs = [drafted(drafter, scenario, tokenizer, k) for drafter, k in tried]
    what, how = mutant.split(": ")
    BREAK[what](monkeypatch, how)
    assert any(say(scenario, tokenizer, config) != plain for config in configs)
