"""Edits of logits in a step: every row with its own context, and what becomes of those in error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from specdec import LLM, RequestOutput, SamplingParams
from specdec.logits_processors import LogitsRows
from specdec.runner.batch import Batch, build
from specdec.runner.commit import Block
from specdec.runner.editing import Edited, Editing
from specdec.runner.sampling import KernelVerdict
from specdec.runner.scheduler import Schedule
from specdec.runner.sequence import Sequence
from specdec.runner.state import Slots
from specdec.testing import ConstantSpeculator, OracleSpeculator, WrongSpeculator, toy_target
from specdec.types import Verdict
from specdec_kernels.edits import edited_copy

CPU = torch.device("cpu")
VOCAB, K = 16, 3


@pytest.fixture
def place(new_sequence: Callable[..., Sequence]) -> Callable[..., Sequence]:
    """Gives slots to requests, of 4 tokens of prompt and some output, with drafts."""

    def make(
        editing: Editing, slot: int, output: list[int], drafts: list[int], **fields: Any
    ) -> Sequence:
        params = SamplingParams(**{"temperature": 0, **fields.pop("params", {})})
        prompt = [1, 2, 3, 4]
        one = new_sequence(prompt, emitted=output, params=params, slot=slot, **fields)
        slots = editing.slots
        slots.place(slot, one)
        slots.computed[slot] = len(one.known) - 1
        slots.drafts[slot, : len(drafts)] = drafts
        slots.num_drafts[slot] = len(drafts)
        editing.place(one)
        return one

    return make


Place = Callable[..., Sequence]


def new_editing() -> Editing:
    return Editing(Slots(4, 32, 8, K, CPU), VOCAB, CPU)


def decoding(slots: Slots, *which: int) -> Batch:
    index, ones = np.array(which), np.ones(len(which), dtype=bool)
    schedule = Schedule(index, 1 + slots.num_drafts[index], ~ones, ones, ~ones)
    return build(schedule, slots, device=CPU)


def logits_for(batch: Batch) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = len(batch.step.logits_rows)
    return torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64)


def forbid_last(rows: LogitsRows, logits: Tensor) -> Tensor:
    """No token twice in a row; the last one of every row is its own."""
    for i in range(len(rows)):
        logits[i, int(rows.token_ids(i)[-1])] = -torch.inf
    return logits


def broken(rows: LogitsRows, logits: Tensor) -> Tensor:
    raise ZeroDivisionError("by nothing")


def judged(edited: Edited, batch: Batch) -> Tensor:
    """The rows as the rule that judges them sees them."""
    if edited.inputs is None:
        return edited.logits
    step = batch.step
    start, positions, slots = step.logits_start, step.predicted, step.slots
    return edited_copy(edited.logits, start, batch.drafts, positions, slots, edited.inputs)


by_kernels_or_before = pytest.mark.parametrize("shown", [False, True])

# -- apply -------------------------------------------------------------------


def test_without_anybody_who_asks_the_logits_pass_untouched(place: Place) -> None:
    editing = new_editing()
    place(editing, 0, [5], [6])
    batch = decoding(editing.slots, 0)
    logits = logits_for(batch)
    edited = editing.apply(batch, logits)
    assert edited.logits is logits
    assert (edited.inputs, edited.failed, len(edited.asking)) == (None, {}, 0)


@by_kernels_or_before
def test_requests_that_ask_for_nothing_keep_their_bits_beside_one_that_does(
    place: Place, shown: bool
) -> None:
    editing = new_editing()
    place(editing, 0, [5], [6, 7])
    place(editing, 1, [5], [6], params={"frequency_penalty": 1.0})
    place(editing, 2, [], [])
    batch = decoding(editing.slots, 0, 1, 2)
    before = logits_for(batch)
    edited = editing.apply(batch, before.clone(), shown=shown)
    changed = (judged(edited, batch) != before).any(dim=1)
    assert changed.tolist() == [False] * 3 + [True] * 2 + [False]
    assert edited.asking.tolist() == [1]
    # one who asks may be in a slot and not in the step
    other = decoding(editing.slots, 0, 2)
    logits = logits_for(other)
    passed = editing.apply(other, logits, shown=shown)
    assert (passed.logits is logits, passed.inputs) == (True, None)


def test_edits_are_handed_on_with_the_logits_as_they_are(place: Place) -> None:
    editing = new_editing()
    place(editing, 0, [5], [6, 7], params={"repetition_penalty": 2.0, "bad_words": ["x"]})
    batch = decoding(editing.slots, 0)
    before = logits_for(batch)
    logits = before.clone()
    edited = editing.apply(batch, logits)
    assert edited.logits is logits
    assert edited.inputs is not None
    assert torch.equal(logits, before)
    # no more of the history than the step has: kernels take scratch for it
    assert edited.inputs.history.shape[1] == 5


@pytest.mark.parametrize("processors", [False, True])
def test_a_row_is_edited_as_if_the_drafts_before_it_stood(place: Place, processors: bool) -> None:
    asks = {
        "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25,
        "logit_bias": {3: 1.0}, "min_tokens": 3, "allowed_token_ids": [2, 3, 5, 6, 7, 8, 9],
        "logits_processors": [forbid_last] if processors else (),
    }  # fmt: skip
    fields = {"params": asks, "stop_ids": (9,), "bad_words": ((5, 6), (6, 7, 8))}
    drafts = [6, 7, 6]
    editing = new_editing()
    place(editing, 0, [5], drafts, **fields)
    batch = decoding(editing.slots, 0)
    logits = logits_for(batch)
    edited = judged(editing.apply(batch, logits.clone()), batch)
    for row in range(K + 1):
        alone = new_editing()
        place(alone, 0, [5, *drafts[:row]], [], **fields)
        own = decoding(alone.slots, 0)
        one = judged(alone.apply(own, logits[row : row + 1].clone()), own)
        assert torch.equal(edited[row : row + 1], one), row
    if not processors:
        return
    # the context of every row counts: each hides something else
    hidden = [set(torch.nonzero(row.isinf())[:, 0].tolist()) - {0, 1, 4} for row in edited]
    assert len({frozenset(h - set(range(10, 16))) for h in hidden}) == 4


@by_kernels_or_before
def test_what_was_emitted_before_a_preemption_is_output_and_not_prompt(
    place: Place, shown: bool
) -> None:
    asks = {"presence_penalty": 1.0, "min_tokens": 3}
    editing = new_editing()
    place(editing, 0, [5, 6], [7], params=asks, stop_ids=(9,))
    batch = decoding(editing.slots, 0)
    logits = logits_for(batch)
    edited = judged(editing.apply(batch, logits.clone(), shown=shown), batch)
    taken = logits - edited
    assert torch.nonzero(taken[0] > 0.5)[:, 0].tolist() == [5, 6, 9]  # 9 is hidden
    assert torch.nonzero(taken[1] > 0.5)[:, 0].tolist() == [5, 6, 7]
    # two were emitted, so one is missing: the row after the draft may stop
    assert edited[:, 9].isinf().tolist() == [True, False]


def test_a_processor_sees_the_rows_of_its_own_request_alone(place: Place) -> None:
    seen: list[tuple[Any, ...]] = []

    def look(rows: LogitsRows, logits: Tensor) -> Tensor:
        contexts = [rows.output_token_ids(i).tolist() for i in range(len(rows))]
        seen.append((rows.prompt_token_ids.tolist(), contexts, rows.position(0), logits.clone()))
        return logits + 1

    editing = new_editing()
    place(editing, 0, [9], [9, 9])
    place(editing, 1, [5], [6, 7], params={"logits_processors": [look]})
    batch = decoding(editing.slots, 0, 1)
    before = logits_for(batch)
    edited = editing.apply(batch, before.clone()).logits
    ((prompt, contexts, position, given),) = seen
    assert (prompt, contexts, position) == ([1, 2, 3, 4], [[5], [5, 6], [5, 6, 7]], 5)
    assert torch.equal(given, before[3:])
    assert torch.equal(edited, torch.cat([before[:3], before[3:] + 1]))


def test_processors_come_after_all_other_edits(place: Place) -> None:
    seen: list[Tensor] = []

    def look(rows: LogitsRows, logits: Tensor) -> Tensor:
        seen.append(logits.clone())
        return logits

    editing = new_editing()
    asks = {"logits_processors": [look], "logit_bias": {3: 7.0}, "allowed_token_ids": [3, 4]}
    place(editing, 0, [], [], params=asks)
    batch = decoding(editing.slots, 0)
    logits = logits_for(batch)
    editing.apply(batch, logits.clone())
    assert seen[0][0, 3] == logits[0, 3] + 7
    assert seen[0].isfinite().sum() == 2


def test_a_chunk_of_a_prompt_has_no_rows_to_process(place: Place) -> None:
    editing = new_editing()
    place(editing, 0, [], [], params={"logits_processors": [broken]})
    editing.slots.computed[0] = 0
    one = np.ones(1, dtype=bool)
    schedule = Schedule(np.array([0]), np.array([2]), one, ~one, one)
    batch = build(schedule, editing.slots, device=CPU)
    assert editing.apply(batch, torch.empty(0, VOCAB)).failed == {}


def test_a_processor_that_fails_leaves_its_rows_and_those_of_others_as_they_were(
    place: Place,
) -> None:
    editing = new_editing()
    asks = {"logits_processors": [broken], "logit_bias": {3: 7.0}}
    place(editing, 0, [5], [6], params=asks)
    place(editing, 2, [5], [6], params={"logits_processors": [forbid_last]})
    batch = decoding(editing.slots, 0, 2)
    before = logits_for(batch)
    edited = editing.apply(batch, before.clone())
    assert list(edited.failed) == [0]
    assert "logits_processors[0] (broken) raised ZeroDivisionError" in edited.failed[0]
    assert "by nothing" in edited.failed[0]
    before[:2, 3] += 7
    assert torch.equal(edited.logits[:2], before[:2])
    assert edited.logits[2:].isinf().sum(dim=1).tolist() == [1, 1]


def test_a_slot_that_was_cleared_asks_for_nothing(place: Place) -> None:
    editing = new_editing()
    place(editing, 0, [], [], params={"logits_processors": [broken], "min_tokens": 5})
    editing.clear(0)
    editing.clear(0)  # once is enough
    place(editing, 0, [], [])
    batch = decoding(editing.slots, 0)
    logits = logits_for(batch)
    assert editing.apply(batch, logits).logits is logits


# -- rows that exclude every token -------------------------------------------


def block_of(batch: Batch, *kept: int) -> Block:
    count = np.array(kept)
    none = np.zeros(len(kept), dtype=bool)
    tokens = np.full((len(kept), K + 1), 7)
    return Block(batch.schedule, tokens, count, count.copy(), none.copy(), none.copy())


def verdict_of(batch: Batch, *kept: int) -> Verdict:
    """As if so many tokens of each request were emitted."""
    rows = torch.full((batch.step.batch, K + 1), -1)
    for request, number in enumerate(kept):
        first = int(batch.step.logits_start[request])
        rows[request, :number] = torch.arange(first, first + number)
    return Verdict(torch.where(rows >= 0, 7, -1), (rows >= 0).sum(dim=1), rows)


def excluding(*rows: int) -> Callable[[LogitsRows, Tensor], Tensor]:
    """A processor that leaves nothing of these of its rows."""

    def exclude(_: LogitsRows, logits: Tensor) -> Tensor:
        logits[list(rows)] = -torch.inf
        return logits

    return exclude


@pytest.mark.parametrize(
    ("emptied", "emitted", "kept"), [([0], 3, 0), ([2], 3, 2), ([1, 2], 4, 1), ([3], 4, 3)]
)
def test_a_block_ends_before_the_first_token_that_no_row_allows(
    place: Place, emptied: list[int], emitted: int, kept: int
) -> None:
    editing = new_editing()
    place(editing, 0, [5], [6, 7, 8])
    place(editing, 1, [5], [6, 7, 8], params={"logits_processors": [excluding(*emptied)]})
    batch = decoding(editing.slots, 0, 1)
    edited = editing.apply(batch, logits_for(batch))
    block = block_of(batch, 4, emitted)
    block.stopped[1] = True
    failed = editing.cut_where_empty(edited, verdict_of(batch, 4, emitted), block)
    assert block.kept.tolist() == [4, kept]
    assert block.stopped.tolist() == [False, False]
    assert list(failed) == [1]
    assert "exclude every token" in failed[1]


def test_rows_past_what_stands_may_exclude_everything(place: Place) -> None:
    editing = new_editing()
    place(editing, 0, [5], [6, 7, 8], params={"logits_processors": [excluding(2, 3)]})
    batch = decoding(editing.slots, 0)
    edited = editing.apply(batch, logits_for(batch))
    block = block_of(batch, 2)
    block.full[0] = True
    assert editing.cut_where_empty(edited, verdict_of(batch, 2), block) == {}
    assert (block.kept.tolist(), block.full.tolist()) == ([2], [True])


def test_of_a_request_whose_processor_failed_nothing_stands(place: Place) -> None:
    editing = new_editing()
    place(editing, 0, [5], [6], params={"logits_processors": [broken]})
    place(editing, 1, [5], [6], params={"logits_processors": [forbid_last]})
    batch = decoding(editing.slots, 0, 1)
    edited = editing.apply(batch, logits_for(batch))
    block = block_of(batch, 2, 2)
    assert editing.cut_where_empty(edited, verdict_of(batch, 2, 2), block) == {}
    assert block.kept.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("emptied", "emitted", "kept"), [([0], 3, 0), ([2], 3, 2), ([1, 2], 4, 1), ([3], 4, 3)]
)
def test_a_block_ends_before_the_first_token_that_the_kernels_found_no_other_for(
    place: Place, emptied: list[int], emitted: int, kept: int
) -> None:
    editing = new_editing()
    place(editing, 0, [5], [6, 7, 8])
    place(editing, 1, [5], [6, 7, 8], params={"logit_bias": {3: 1.0}})
    batch = decoding(editing.slots, 0, 1)
    edited = editing.apply(batch, logits_for(batch))
    verdict = verdict_of(batch, 4, emitted)
    empty = torch.zeros_like(verdict.rows, dtype=torch.bool)
    empty[1, emptied] = True
    empty[0] = True  # the model's own: that request asked for nothing
    block = block_of(batch, 4, emitted)
    said = KernelVerdict(verdict.tokens, verdict.count, verdict.rows, empty=empty)
    failed = editing.cut_where_empty(edited, said, block)
    assert block.kept.tolist() == [4, kept]
    assert list(failed) == [1]


def test_the_models_own_empty_rows_are_not_looked_for(place: Place) -> None:
    editing = new_editing()
    place(editing, 0, [5], [])
    batch = decoding(editing.slots, 0)
    nothing = torch.full((1, VOCAB), -torch.inf)
    block = block_of(batch, 1)
    untouched = Edited(nothing)
    assert editing.cut_where_empty(untouched, verdict_of(batch, 1), block) == {}
    assert block.kept.tolist() == [1]


# -- in the loop -------------------------------------------------------------

WORDS = 17  # of the tokenizer


def run(folder: Path, params: list[SamplingParams], drafts: Any) -> list[RequestOutput]:
    """Prompts [4], [4, 4], ... to a model that counts: the next word of the list, again and again.

    drafts: a speculator that knows it; None decodes plainly.
    """
    model = toy_target(torch.eye(WORDS).roll(1, dims=1) * 20)
    config: dict[str, Any] | None = None
    prompts = [[4] * (n + 1) for n in range(len(params))]
    if drafts is not None:
        streams = {tuple(p): [(5 + i) % WORDS for i in range(20)] for p in prompts}
        config = {"method": drafts, "streams": streams, "num_speculative_tokens": 4}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with LLM(model, tokenizer=tokenizer, speculative_config=config) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        scheduler = llm._loaded.engine.scheduler
        assert scheduler.pool.free == scheduler.num_blocks
    return outputs


def greedy(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, **values})


def empty_after(number: int) -> Callable[[LogitsRows, Tensor], Tensor]:
    """A processor that allows nothing once so many tokens are out."""

    def processor(rows: LogitsRows, logits: Tensor) -> Tensor:
        for i in range(len(rows)):
            if len(rows.output_token_ids(i)) >= number:
                logits[i] = -torch.inf
        return logits

    return processor


each_drafter = pytest.mark.parametrize("drafts", [None, OracleSpeculator, WrongSpeculator])
# nothing is left after three tokens: by a processor, and by what kernels do
each_way_to_exclude = pytest.mark.parametrize(
    "nothing",
    [
        {"logits_processors": [empty_after(3)]},
        {"allowed_token_ids": [5, 6, 7], "bad_words": ["on cat", "on sat", "on on"]},
    ],
    ids=["processor", "parameters"],
)


@each_drafter
@each_way_to_exclude
def test_a_request_that_excludes_every_token_ends_with_what_it_had(
    model_folder: Path, nothing: dict[str, Any], drafts: Any
) -> None:
    params = [greedy(), greedy(**nothing), greedy()]
    one, empty, other = run(model_folder, params, drafts)
    assert (empty.outputs[0].finish_reason, empty.outputs[0].token_ids) == ("error", [5, 6, 7])
    assert empty.outputs[0].text == "cat sat on"
    assert "exclude every token" in str(empty.error)
    assert one.outputs[0].token_ids == other.outputs[0].token_ids == list(range(5, 13))


@each_drafter
@each_way_to_exclude
def test_a_stop_that_comes_before_a_row_without_tokens_is_a_stop(
    model_folder: Path, nothing: dict[str, Any], drafts: Any
) -> None:
    by_token, by_limit, by_text = run(
        model_folder,
        [
            greedy(**nothing, stop_token_ids=[7]),
            greedy(**nothing, max_tokens=3),
            greedy(**nothing, stop=["on"]),
        ],
        drafts,
    )
    assert [o.error for o in (by_token, by_limit, by_text)] == [None] * 3
    completions = [o.outputs[0] for o in (by_token, by_limit, by_text)]
    assert [c.finish_reason for c in completions] == ["stop", "length", "stop"]
    assert [c.stop_reason for c in completions] == [7, None, "on"]
    assert [c.token_ids for c in completions] == [[5, 6, 7]] * 3


@each_drafter
def test_a_processor_that_fails_ends_its_request_and_no_other(
    model_folder: Path, drafts: Any
) -> None:
    def fails_late(rows: LogitsRows, logits: Tensor) -> Tensor:
        assert rows.position(0) < 4, "that far"
        return logits

    params = [greedy(), greedy(logits_processors=[fails_late]), greedy(logprobs=0)]
    one, failed, other = run(model_folder, params, drafts)
    assert failed.outputs[0].finish_reason == "error"
    assert "fails_late" in str(failed.error)
    assert "that far" in str(failed.error)
    # what was emitted before is a beginning of what would have come
    assert failed.outputs[0].token_ids == list(range(5, 13))[: len(failed.outputs[0].token_ids)]
    assert one.outputs[0].token_ids == other.outputs[0].token_ids == list(range(5, 13))


def test_a_request_that_excludes_its_drafts_refuses_them(model_folder: Path) -> None:
    (plain,) = run(model_folder, [greedy(bad_words=["on a", "mat"])], None)
    (drafted,) = run(model_folder, [greedy(bad_words=["on a", "mat"])], OracleSpeculator)
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert 8 not in plain.outputs[0].token_ids[2:4]


def test_a_stop_token_that_is_drafted_too_early_is_refused(model_folder: Path) -> None:
    model = toy_target(torch.eye(WORDS).roll(1, dims=1) * 20, eos_token_id=1)
    config = {"method": ConstantSpeculator, "token": 1, "num_speculative_tokens": 3}
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    with LLM(model, tokenizer=tokenizer, speculative_config=config) as llm:
        (output,) = llm.generate([[15]], greedy(min_tokens=5), use_tqdm=False)
    # 16, 0, then 1 is excluded twice
    tokens = output.outputs[0].token_ids
    assert tokens[:2] == [16, 0]
    assert 1 not in tokens[:4]
    assert len(tokens) >= 5
