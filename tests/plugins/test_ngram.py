"""The n-gram speculator against its rule, written down naively."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import (
    ConfigError,
    Draft,
    HostStep,
    RequestChanges,
    RequestInfo,
    SlotState,
    SpeculativeConfig,
    Step,
    TargetInfo,
    Verdict,
)
from specdec.session import Session
from specdec_kernels import EditInputs

pytest.importorskip("specdec_plugin_ngram", reason="specdec-plugin-ngram is not installed")

from specdec_plugin_ngram import NgramOptions, NgramSpeculator, index

README = Path(__file__).parents[2] / "plugins" / "ngram" / "README.md"
SLOTS = 4
VOCAB = 50
MAX_LEN = 200


def rule(tokens: Sequence[int], k: int, shortest: int, longest: int) -> list[int]:
    """The documented rule, word for word."""
    length = len(tokens)
    for n in range(min(longest, length), shortest - 1, -1):
        for end in range(length - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[length - n :]:
                text = list(tokens)
                for i in range(k):
                    text.append(text[end + i])
                return text[length:]
    return []


def padded(drafts: list[int], k: int) -> list[int]:
    return drafts + [-1] * (k - len(drafts))


class Bench:
    """Requests in slots, and a session that drafts for them."""

    def __init__(self, shortest: int = 2, longest: int = 3, slots: int = SLOTS) -> None:
        self.speculator = NgramSpeculator(
            slots, NgramOptions(prompt_lookup_max=longest, prompt_lookup_min=shortest)
        )
        self.session = self.session_of(self.speculator)
        # what lies beyond `length` is stale: plausible tokens that must not be read
        self.history = np.random.default_rng(0).integers(0, 3, (slots, MAX_LEN))
        self.length = np.zeros(slots, np.int64)

    @staticmethod
    def session_of(speculator: NgramSpeculator) -> Session:
        return Session(
            speculator,
            label="speculator 'ngram'",
            rule="coupled",
            verify=refuse,
            vocab_size=VOCAB,
            device=torch.device("cpu"),
            capabilities=speculator.capabilities(),
        )

    def write(self, slot: int, tokens: Sequence[int]) -> None:
        length = self.length[slot]
        self.history[slot, length : length + len(tokens)] = tokens
        self.length[slot] += len(tokens)

    def tokens(self, slot: int) -> list[int]:
        tokens: list[int] = self.history[slot, : self.length[slot]].tolist()
        return tokens

    def change(self, *, added: Sequence[int] = (), finished: Sequence[int] = ()) -> None:
        met = [RequestInfo(s, str(s), tuple(self.tokens(s)), len(self.tokens(s))) for s in added]
        changes = RequestChanges(added=tuple(met), finished=tuple(finished))
        self.speculator.requests_changed(changes)

    def propose(self, slots: Sequence[int], k: Sequence[int], columns: int) -> list[list[int]]:
        draft = self.session.propose(self.step(slots, k), None, columns)
        assert draft is not None
        rows: list[list[int]] = draft.tokens.tolist()
        return rows

    def step(self, slots: Sequence[int], k: Sequence[int]) -> Step:
        batch = len(slots)
        ones, flags = torch.ones(batch, dtype=torch.int64), torch.zeros(batch, dtype=torch.bool)
        state = torch.zeros(len(self.length))
        start = torch.arange(batch + 1)
        return Step(
            tokens=ones,
            positions=ones,
            query_start=start,
            slots=torch.tensor(slots),
            num_drafts=ones,
            is_prefill=flags,
            samples=flags,
            logits_rows=ones,
            predicted=ones,
            logits_start=start,
            valid_rows=ones,
            next_token=ones,
            k=torch.tensor(k),
            state=SlotState(**{field.name: state for field in attrs.fields(SlotState)}),
            host=HostStep(np.array(slots), np.array(k), self.history, self.length),
        )


def refuse(step: Step, draft: Draft, logits: torch.Tensor, edits: EditInputs | None) -> Verdict:
    raise AssertionError("nothing is verified here")


@attrs.frozen
class Turn:
    """One step: what each slot commits, wants and does; slots in `restart` begin anew."""

    commits: list[list[int]]
    wanted: list[int]
    order: list[int]
    restart: list[int]
    again: bool


tokens_of_few = st.lists(st.integers(0, 2), min_size=1, max_size=12)
turns = st.lists(
    st.builds(
        Turn,
        commits=st.lists(tokens_of_few, min_size=SLOTS, max_size=SLOTS),
        wanted=st.lists(st.integers(0, 5), min_size=SLOTS, max_size=SLOTS),
        order=st.lists(st.sampled_from([*range(SLOTS)]), max_size=SLOTS, unique=True),
        restart=st.lists(st.sampled_from([*range(SLOTS)]), max_size=2, unique=True),
        again=st.booleans(),
    ),
    min_size=1,
    max_size=12,
)
sizes = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted)


def check_against_the_rule(script: list[Turn], shortest: int, longest: int) -> None:
    bench = Bench(shortest, longest)
    for turn in script:
        for slot in turn.restart:
            bench.length[slot] = 0
        bench.change(finished=turn.restart)
        for slot in turn.order:
            bench.write(slot, turn.commits[slot])
        slots = [-1, *turn.order, -1]
        wanted = [0, *(turn.wanted[slot] for slot in turn.order), 0]
        expected = [
            padded(rule(bench.tokens(slot), k, shortest, longest) if slot >= 0 else [], 5)
            for slot, k in zip(slots, wanted, strict=True)
        ]
        assert bench.propose(slots, wanted, 5) == expected
        if turn.again:  # as core does after an error: one by one
            for i, slot in enumerate(slots):
                assert bench.propose([slot], [wanted[i]], 5) == [expected[i]]


@given(script=turns, size=sizes)
@settings(deadline=None)
def test_drafts_equal_the_rule(script: list[Turn], size: list[int]) -> None:
    check_against_the_rule(script, *size)


@given(script=turns, size=sizes)
@settings(deadline=None, max_examples=40)
def test_drafts_equal_the_rule_when_every_hash_collides(
    script: list[Turn], size: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "spread", np.zeros_like)
        check_against_the_rule(script, *size)


@given(script=turns, size=sizes)
@settings(deadline=None, max_examples=40)
def test_drafts_equal_the_rule_when_prompts_are_added_in_pieces(
    script: list[Turn], size: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "PIECE", 3)
        check_against_the_rule(script, *size)


def test_the_longest_ngram_wins_over_a_later_shorter_one() -> None:
    bench = Bench(1, 3)
    bench.write(0, [7, 8, 9, 4, 9, 5, 7, 8, 9])
    assert bench.propose([0], [2], 2) == [[4, 9]]


def test_the_last_of_equally_long_ngrams_wins() -> None:
    bench = Bench(2, 3)
    bench.write(0, [7, 8, 1, 7, 8, 2, 7, 8])
    assert bench.propose([0], [1], 1) == [[2]]


def test_a_continuation_that_reaches_the_end_repeats_its_period() -> None:
    bench = Bench(2, 3)
    bench.write(0, [4, 5, 6, 4, 5, 6, 4, 5])
    assert bench.propose([0], [7], 7) == [[6, 4, 5, 6, 4, 5, 6]]


def test_nothing_is_drafted_without_a_match() -> None:
    bench = Bench(2, 3)
    bench.write(0, [1, 2, 3, 4])
    assert bench.propose([0], [3], 3) == [[-1, -1, -1]]


def test_a_request_that_wants_nothing_is_still_indexed() -> None:
    bench = Bench(2, 3)
    bench.write(0, [1, 2, 3, 1, 2])
    assert bench.propose([0], [0], 3) == [[-1, -1, -1]]
    assert bench.speculator.index.done[0] == 4


def test_requests_do_not_see_each_others_tokens() -> None:
    bench = Bench(2, 3)
    bench.write(0, [1, 2, 3, 4])
    bench.write(1, [1, 2])
    assert bench.propose([0, 1], [2, 2], 2) == [[-1, -1], [-1, -1]]


def test_a_batch_of_padding_and_no_columns_are_answered() -> None:
    bench = Bench()
    bench.write(0, [1, 2, 3, 1, 2])
    assert bench.propose([-1, -1], [0, 0], 2) == [[-1, -1], [-1, -1]]
    assert bench.propose([0], [0], 0) == [[]]


def test_a_slot_that_is_used_again_starts_empty() -> None:
    bench = Bench(2, 3)
    bench.write(0, [1, 2, 3, 1, 2, 3])
    bench.propose([0], [1], 1)
    bench.length[0] = 0
    bench.write(0, [1, 2])
    bench.change(finished=[0], added=[0])
    assert bench.propose([0], [1], 1) == [[-1]]


def test_the_memory_of_requests_that_left_is_given_back() -> None:
    bench = Bench()
    for slot in range(SLOTS):
        bench.write(slot, [*range(VOCAB)] * 3)
    bench.propose([*range(SLOTS)], [1] * SLOTS, 1)
    full = bench.speculator.index.table.nbytes
    bench.change(finished=[0, 1, 2])
    left = bench.speculator.index.table.nbytes
    assert 0 < left <= full / 2
    assert bench.propose([3], [3], 3) == [[0, 1, 2]]
    bench.change(finished=[3])
    assert bench.speculator.index.table.nbytes == 0


def test_no_memory_is_taken_for_requests_that_are_not_there() -> None:
    speculator = NgramSpeculator(256, NgramOptions())
    assert speculator.index.table.nbytes == 0


def test_an_index_stays_in_proportion_to_its_tokens() -> None:
    bench = Bench(2, 3)
    bench.write(0, [1])
    for _ in range(MAX_LEN - 1):
        bench.write(0, [1])
        bench.propose([0], [1], 1)
    # two sizes, at most 8 cells per token each, and room for as much again
    assert bench.speculator.index.table.size <= 2 * 2 * 8 * MAX_LEN


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (1, 3)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 1}, (1, 1)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 6}, (2, 6)),
    ],
)
def test_sizes_mirror_each_other(given: dict[str, int], expected: tuple[int, int]) -> None:
    speculator = load(given)
    found = speculator.index.sizes
    assert (found.min(), found.max()) == expected


@pytest.mark.parametrize(
    ("given", "together"),
    [({}, []), ({"prompt_lookup_min": 1, "prompt_lookup_max": 3}, [6, 7])],
)
def test_single_tokens_are_looked_up_by_default_while_a_request_runs_alone(
    given: dict[str, int], together: list[int]
) -> None:
    bench = Bench()
    bench.speculator = load(given)
    bench.session = bench.session_of(bench.speculator)
    bench.write(0, [5, 6, 7, 4, 5])
    bench.write(1, [8, 9])
    assert bench.propose([0, -1], [2, 0], 2) == [[6, 7], [-1, -1]]
    assert bench.propose([0, 1], [2, 2], 2) == [padded(together, 2), [-1, -1]]
    assert bench.propose([0], [2], 2) == [[6, 7]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt_lookup_max": 0}, "prompt_lookup_max is 0, but it has to be at least 1"),
        ({"prompt_lookup_min": -1}, "prompt_lookup_min is -1, but it has to be at least 1"),
        ({"prompt_lookup_max": 257}, "prompt_lookup_max is 257; n-grams of at most 256 tokens"),
        ({"prompt_lookup_min": 2**63}, f"prompt_lookup_min is {2**63}; n-grams of at most 256"),
        (
            {"prompt_lookup_min": 5, "prompt_lookup_max": 2},
            "prompt_lookup_min=5 is larger than prompt_lookup_max=2",
        ),
        ({"prompt_lookup_max": "3"}, "prompt_lookup_max is '3', but it has to be an integer"),
        ({"prompt_lookup": 3}, "'ngram' has no key 'prompt_lookup'; did you mean"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(given)


def load(options: dict[str, int] | dict[str, object]) -> NgramSpeculator:
    config = SpeculativeConfig.parse({"method": "ngram", **options})
    assert config is not None
    target = TargetInfo(
        name="toy",
        config=None,
        vocab_size=VOCAB,
        hidden_size=1,
        num_layers=1,
        max_model_len=MAX_LEN,
        max_num_seqs=SLOTS,
        dtype=torch.float32,
        device=torch.device("cpu"),
        embedding=torch.nn.Embedding(VOCAB, 1),
        lm_head=torch.nn.Linear(1, VOCAB),
    )
    return NgramSpeculator.load(target, config.resolve(NgramSpeculator, "ngram"))


def test_the_entry_point_names_the_speculator() -> None:
    (found,) = entry_points(group="specdec.plugins", name="ngram")
    assert found.load() is NgramSpeculator


def documented(text: str) -> Iterator[tuple[str, str]]:
    """The fields of a docstring of the form `name: meaning`, lines joined."""
    for name, meaning in re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", text, re.MULTILINE):
        yield name, " ".join(meaning.split())


def test_the_readme_lists_the_options_as_the_class_documents_them() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (.+?) \|$", README.read_text(), re.MULTILINE)
    fields = {field.name: field.default for field in attrs.fields(NgramOptions)}
    assert NgramOptions.__doc__ is not None
    assert {name: meaning for name, _, meaning in rows} == dict(documented(NgramOptions.__doc__))
    assert {name: default for name, default, _ in rows} == {
        name: "unset" if default is None else f"`{default}`" for name, default in fields.items()
    }
