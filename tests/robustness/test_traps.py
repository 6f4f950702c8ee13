"""The known traps of speculative decoding, one test each; where it is not here, why.

Met by another test, named by its file and itself:

E3: robustness/parameters_at_every_row drafts_change_nothing_under_any_parameter
E4: runner/losslessness max_tokens_holds_in_a_block
E5: runner/losslessness max_model_len_holds_in_a_block
E6: runner/commit a_chunk_moves_on_in_the_prompt_and_draws_nothing
E13: runner/losslessness no_drafter_changes_a_token
E16: kernels/verify padding_requests_emit_nothing_and_disturb_nothing
E19: runner/engine a_wrong_answer_ends_only_the_request_it_was_given_for
E20: kernels/verify hopeless_rows_give_ids_in_range
E22: kernels/noise extreme_words_give_finite_noise_and_uniforms_inside_the_interval
E23: kernels/verify equal_laws_accept_everything_and_leave_a_defined_residual
E26: kernels/distribution bias_if_the_residual_shares_the_drafts_noise
E28: kernels/verify ragged_mixed_batches_are_well_formed
E29: runner/losslessness a_seeded_request_does_not_see_what_else_runs
E30: robustness/parameters_at_every_row drafts_change_nothing_under_any_parameter
E31: robustness/parameters_at_every_row drafts_change_nothing_under_any_parameter
E35: sampling_params a_processor_of_transformers_is_refused_with_the_way_to_wrap_it
E41: parameter_table what_edits_logits_is_refused_where_drafts_are_kept_untested
E42: runner/row_logprobs rows_of_rejected_drafts_are_dropped_not_shifted
E43: robustness/parameters_at_every_row drafts_change_nothing_under_any_parameter
E49: runner/kv_cache a_fresh_pool_counts_upwards_and_keeps_block_zero
E52: runner/target a_family_that_cannot_be_served_is_refused_with_the_reason
E56: runner/batch the_row_before_the_next_chunk_is_paired_with_the_prompts_next_token
E64: layout core_and_kernels_never_name_the_method
E65: runner/engine drafts_end_where_the_drafter_reaches_no_further
E67: legality every_way_of_drawing_under_every_rule
E68: runner/verification_law tokens_have_the_targets_law
E71: runner/batch requests_come_and_go_in_slots_and_the_speculator_is_told_once
E72: runner/hidden_state_alignment features_equal_the_models_own_states_at_every_index
E73: kernels/sample_draft a_mapped_coupled_draft_uses_the_noise_of_the_target_ids

Not here, because there is no:

E10: tensor parallelism, whose ranks would have to agree on slots
E14: captured graph of one shape; decoding requests bring the rows that they have
E15: prefill on another machine
E17: capture, so no index that is left from one
E24: kernel with pointers of its own; torch counts in 64 bits
E32: kernel whose threads would have to wait for each other
E34: thinking budget; the parameter is refused
E36: grammar; its parameters are refused
E37: grammar
E38: grammar
E39: grammar
E40: grammar, so every draft that is counted is tested
E45: prefix cache
E46: prefix cache
E47: prefix cache
E51: drafter of several modules that look ahead
E53: model with positions of more than one dimension
E54: shared-prefix attention
E55: schedule ahead of the step before it
E58: data parallelism
E59: data parallelism
E60: tensor parallelism
E61: verification in chunks; a step holds the rows of whole requests
E62: verification of fewer drafts than were scheduled
E63: tensor parallelism
E66: drafter in core that shares weights
E69: drafter of several modules that look ahead
E70: default of a method in core; its plugin's tests compare them with its README
E74: way to switch counting off
"""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from specdec import LLM, SamplingParams, hookimpl
from specdec.runner.rows import Rows
from specdec.testing import (
    BigramSpeculator,
    ConstantSpeculator,
    OracleSpeculator,
    RecordingSpeculator,
    WrongSpeculator,
    emitted,
    tiny_target,
    toy_target,
)
from specdec.testing.speculators import StreamOptions
from specdec.types import HostStep, Step, Verdict

VOCAB, EOS = 32, 1
PAGE = 16 * 2 * 2 * 8 * 8  # bytes: tokens of a page, keys and values, heads, head size, float64
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
PROMPTS = [[7], [3, 9, 3, 20, 3, 9], list(range(5, 20)), [2] * 31]


def counting(**settings: Any) -> PreTrainedModel:
    """After token t comes t + 1."""
    return toy_target(torch.eye(VOCAB).roll(1, dims=1) * 20, **settings)


def count(first: int, number: int) -> list[int]:
    return [(first + i) % VOCAB for i in range(number)]


def greedy(most: int = 12, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=most, **values)


def oracle(number: int = 4, length: int = 40, **options: Any) -> dict[str, Any]:
    """Knows the counting target for prompts of one token, and goes on past every end."""
    return {
        "method": OracleSpeculator,
        "streams": {(n,): count(n + 1, length) for n in range(VOCAB)},
        "num_speculative_tokens": number,
        **options,
    }


def small() -> PreTrainedModel:
    return tiny_target(vocab=VOCAB, layers=1, scale=0.7)


def mixed(most: int = 14, **values: Any) -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9}, {"top_k": 4}, {}]
    return [SamplingParams(seed=n, max_tokens=most, **k, **values) for n, k in enumerate(kinds)]


def right_streams(params: list[SamplingParams]) -> dict[Any, list[int]]:
    plain = emitted(small(), PROMPTS, params)
    return {tuple(p): ids[0] for p, ids in zip(PROMPTS, plain, strict=True)}


# -- every trap has its place ------------------------------------------------


def test_every_trap_is_tested_here_or_elsewhere_or_cannot_be_met() -> None:
    here = {int(m) for m in re.findall(r"^def test_e(\d+)_", Path(__file__).read_text(), re.M)}
    elsewhere, absent = (
        dict(re.findall(r"^E(\d+): (.+)$", part, re.M))
        for part in str(__doc__).split("Not here")
    )  # fmt: skip
    places = [*here, *map(int, elsewhere), *map(int, absent)]
    assert sorted(places) == list(range(1, 76))


def test_tests_that_are_named_exist() -> None:
    root = Path(__file__).parents[2]
    table = str(__doc__).split("Not here")[0]
    places = re.findall(r"^E\d+: ((?:\w+/)?)(\w+) (\w+)$", table, re.M)
    assert len(places) > 20
    for folder, module, test in places:
        file, name = f"tests/{folder}test_{module}.py", f"test_{test}"
        functions = {
            n.name for n in ast.parse((root / file).read_text()).body if hasattr(n, "name")
        }
        assert name in functions, (file, name)


# -- life cycle and lengths --------------------------------------------------


@pytest.mark.parametrize("end", range(5, 11))
def test_e01_an_end_inside_accepted_drafts_drops_the_rest_and_is_counted_before(end: int) -> None:
    """The end of sequence is looked for before stop tokens; what is said is of the tokens kept."""
    params = greedy(stop_token_ids=[end], logprobs=1)
    with LLM(counting(eos_token_id=end), speculative_config=oracle()) as llm:
        (output,) = llm.generate([[3]], params, use_tqdm=False)
        computed = llm._loaded.engine.slots.computed[0]
    completion, metrics = output.outputs[0], output.metrics
    assert completion.token_ids == count(4, end - 3)
    assert len(completion.logprobs or []) == len(completion.token_ids)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    speculation = metrics.speculative_decoding
    assert speculation.num_accepted_tokens == 4 * speculation.num_drafts
    assert metrics.num_generated_tokens == len(completion.token_ids)
    assert computed == end - 3  # keys and values up to the last token, which nobody continues


@pytest.mark.parametrize("values", [{"min_tokens": 6}, {"ignore_eos": True}])
def test_e02_an_end_that_is_drafted_too_early_is_an_ordinary_token(values: dict[str, Any]) -> None:
    """A drafter that always ends is refused before the minimum, and cannot end what goes on."""
    table = torch.eye(VOCAB).roll(1, dims=1) * 20
    table[:, EOS] = 15  # what the model wants next to the right token
    params = greedy(9, **values)
    config = {"method": ConstantSpeculator, "token": EOS, "num_speculative_tokens": 3}
    for first, right in ((28, [29, 30, 31, 0]), (5, count(6, 9))):
        model = toy_target(table, eos_token_id=EOS)
        ((ids,),) = emitted(model, [[first]], params, config)
        assert ids[: len(right)] == right
        assert [[ids]] == emitted(model, [[first]], params)


class Watching:
    """Looks at every row that is computed."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self.prompts = prompts
        self.rows = 0

    @hookimpl
    def step_finished(self, step: Step, verdict: Verdict) -> None:
        start = step.query_start.tolist()
        for request, slot in enumerate(step.slots.tolist()):
            rows = range(start[request], start[request + 1])
            length = int(step.state.prompt_length[slot])
            prompt = step.state.history[slot, :length].tolist()
            assert slot < 0 or prompt in self.prompts
            for row in rows:
                position = int(step.positions[row])
                if position < length:
                    self.rows += 1
                    assert int(step.tokens[row]) == prompt[position]


def test_e07_drafts_are_never_written_over_the_tail_of_a_prompt() -> None:
    """Rows at prompt positions hold prompt tokens, in chunks of every size, beside drafts."""
    for budget in (2, 3, 5, 16):
        watching = Watching(PROMPTS)
        config = {"method": ConstantSpeculator, "token": 4, "num_speculative_tokens": 3}
        with LLM(
            small(),
            speculative_config=config,
            observers=[watching],
            max_num_batched_tokens=budget,
        ) as llm:
            llm.generate(PROMPTS, mixed(), use_tqdm=False)
        assert watching.rows == sum(map(len, PROMPTS))


@pytest.mark.parametrize("config", [None, oracle(), {"method": BigramSpeculator, "table": TABLE}])
def test_e08_output_that_is_computed_again_after_a_preemption_stays_output(
    config: Any, tokenizer: Any
) -> None:
    """Penalties, bad words and the minimum of a request that was set aside know its output."""
    words = tokenizer.convert_ids_to_tokens(range(4, len(tokenizer)))
    edits: list[dict[str, Any]] = [
        {"frequency_penalty": 1.0, "bad_words": ["the cat", "dog", "mat and"], "ignore_eos": True},
        {"repetition_penalty": 1.3, "min_tokens": 38, "stop_token_ids": [5, 6, 7, 8, 9]},
        # every word may be the beginning of a stop string, so some text is always held back
        {"presence_penalty": 1.5, "stop": [f"{w} zebra" for w in words], "ignore_eos": True},
    ]
    params = [
        SamplingParams(temperature=t, seed=3, max_tokens=42, logprobs=1, **e)
        for t in (0, 0.8)
        for e in edits
    ]
    prompts = [[n, 3, n] for n in range(len(params))]
    with LLM(small(), tokenizer=tokenizer, max_num_seqs=1, max_model_len=64) as llm:
        alone = llm.generate(prompts, params, use_tqdm=False)
    if config is not None and "streams" in config:
        config["streams"] = {tuple(o.prompt_token_ids): o.outputs[0].token_ids for o in alone}
    with LLM(
        small(), tokenizer=tokenizer, speculative_config=config, kv_cache_memory=8 * PAGE,
        max_model_len=64,
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for output, right in zip(outputs, alone, strict=True):
        assert output.outputs[0].token_ids == right.outputs[0].token_ids
        assert output.outputs[0].text == right.outputs[0].text
        assert len(output.outputs[0].logprobs or []) == len(right.outputs[0].token_ids)
    assert sum(o.metrics.num_preemptions for o in outputs) > 0


def test_e09_a_slot_keeps_no_draft_of_a_request_that_was_aborted() -> None:
    """The next request in the slot has nothing under test until something was drafted for it."""
    with LLM(counting(), speculative_config=oracle(), max_num_seqs=1) as llm:
        slots = llm._loaded.engine.slots
        llm.add_request([3], greedy(20), request_id="a")
        llm.step()
        assert slots.num_drafts[0] == 4
        llm.abort_request("a")
        assert slots.num_drafts[0] == 0
        llm.add_request([5], greedy(8), request_id="b")
        last = {}
        while llm.has_unfinished_requests():
            last = {o.request_id: o for o in llm.step()}
    assert last["b"].outputs[0].token_ids == count(6, 8)
    speculation = last["b"].metrics.speculative_decoding
    assert speculation.num_accepted_tokens == speculation.num_draft_tokens


@attrs.frozen
class RaggedOptions(StreamOptions):
    """every: a request drafts only at positions that it divides. most: drafts by position."""

    every: int = 1
    most: int = 9


class RaggedSpeculator(OracleSpeculator):
    """The oracle with another number of drafts at every position, and wrong ones among them."""

    Options: ClassVar[type] = RaggedOptions

    def __init__(self, target: Any, config: Any) -> None:
        super().__init__(target, config)
        self.options = config.options

    def fill(self, row: NDArray[np.int64], slot: int, host: HostStep) -> None:
        length = int(host.length[slot])
        if (length + slot) % self.options.every:
            return
        super().fill(row, slot, host)
        row[length % self.options.most :] = -1
        row[2:3][row[2:3] >= 0] = length % VOCAB  # a filler is a draft like any other


@pytest.mark.parametrize("every", [1, 2, 5, 10**6])
def test_e11_requests_and_steps_without_drafts_draw_as_those_with_drafts(every: int) -> None:
    """None drafted for some requests, or for all: the tokens of an engine without a drafter."""
    params = mixed()
    streams = right_streams(params)
    config = {
        "method": RaggedSpeculator,
        "streams": streams,
        "every": every,
        "num_speculative_tokens": 4,
    }
    found = emitted(small(), PROMPTS, params, config)
    assert [ids for (ids,) in found] == list(streams.values())


@pytest.mark.parametrize("most", [1, 2, 3, 5, 6])
def test_e12_drafts_of_any_number_up_to_the_most_are_verified(most: int) -> None:
    """Fewer than was asked for, none, or a filler at the end: the tokens stay the same."""
    params = mixed()
    streams = right_streams(params)
    config = {
        "method": RaggedSpeculator,
        "streams": streams,
        "most": most,
        "num_speculative_tokens": 5,
    }
    with LLM(small(), speculative_config=config, max_num_seqs=3) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        metrics = llm.metrics
    assert [o.outputs[0].token_ids for o in outputs] == list(streams.values())
    assert metrics.skipped.get("nothing_proposed", 0) > 0
    assert (metrics.num_draft_tokens > 0) == (most > 1)


# -- vocabulary and numerics -------------------------------------------------


def test_e18_a_head_that_is_wider_than_the_tokenizer_is_served(tokenizer: Any) -> None:
    """Ids without a word have no text, with logprobs and stop strings as well."""
    assert len(tokenizer) < VOCAB
    for config in (None, oracle()):
        with LLM(counting(), tokenizer=tokenizer, speculative_config=config) as llm:
            params = greedy(30, logprobs=VOCAB - 12, stop=["cat"], ignore_eos=True)
            (output,) = llm.generate([[14]], params, use_tqdm=False)
        completion = output.outputs[0]
        assert completion.token_ids == count(15, 23)
        assert completion.text == "it . the "
        named = [(e[t].decoded_token or "") for t, e in zip(
            completion.token_ids, completion.logprobs or [], strict=True
        )]  # fmt: skip
        assert named[:2] == ["it", "."]
        assert not any(named[2:17])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_e21_logits_that_are_no_numbers_harm_only_their_own_rows(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids stay in range, and requests beside them keep their tokens."""
    params = [
        greedy(8, logprobs=2),
        SamplingParams(seed=1, max_tokens=8, top_p=0.9, logprobs=2),
        greedy(8),
        greedy(8, presence_penalty=1.0),
    ]
    found = []
    for config in (None, {"method": ConstantSpeculator, "token": 7, "num_speculative_tokens": 2}):
        with LLM(counting(), speculative_config=config) as llm:
            target = llm._loaded.target
            forward = target.forward

            def broken(rows: Rows, forward: Any = forward) -> Any:
                outputs = forward(rows)
                last = rows.tokens[rows.logits_rows]
                outputs.logits[last == 6] = value
                outputs.logits[(last == 7) | (last == 0), 3:9] = value
                return outputs

            monkeypatch.setattr(target, "forward", broken)
            outputs = llm.generate([[4], [4], [12], [4]], params, use_tqdm=False)
            scheduler = llm._loaded.engine.scheduler
            assert scheduler.pool.free == scheduler.num_blocks
        found.append([o.outputs[0].token_ids for o in outputs])
        assert outputs[2].outputs[0].token_ids == count(13, 8)
        assert [o.error for o in outputs[:3]] == [None] * 3
    assert found[0] == found[1]
    assert all(0 <= i < VOCAB for ids in found[0] for i in ids)


def test_e25_ties_go_to_the_lowest_id_with_and_without_drafts() -> None:
    """Half of the vocabulary ties at every row, in bfloat16 too."""
    table = (TABLE > 0).float() * 3
    for dtype in (torch.float64, torch.bfloat16):
        model: Any = toy_target(table)
        model.to(dtype)
        right, last = [], 7
        for _ in range(10):
            last = int(table[last].argmax())
            right.append(last)
        config = {"method": OracleSpeculator, "streams": {(7,): right}}
        for speculative in (None, config, {"method": BigramSpeculator, "table": table}):
            assert emitted(model, [[7]], greedy(10), speculative) == [[right]]


@pytest.mark.parametrize("rule", ["coupled", "standard", "block"])
def test_e27_greedy_requests_ignore_the_law_of_drafts_that_were_drawn(rule: str) -> None:
    """No temperature to divide by: drafts are the argmax, and so is what is emitted."""
    config = {
        "method": BigramSpeculator,
        "table": TABLE,
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": rule,
        "num_speculative_tokens": 3,
    }
    params = [greedy(14) if n % 2 else SamplingParams(seed=n, max_tokens=14) for n in range(4)]
    plain = emitted(small(), PROMPTS, params)
    found = emitted(small(), PROMPTS, params, config)
    assert found[1::2] == plain[1::2]
    # the drafter's own law: all of its drafts hold, so they are the argmax
    with LLM(toy_target(TABLE), speculative_config=config) as llm:
        llm.generate(PROMPTS, greedy(14), use_tqdm=False)
        assert llm.metrics.acceptance_rate == 1


# -- state of sampling, and logprobs -----------------------------------------


def test_e33_a_minimum_that_leaves_nothing_ends_in_an_error_with_and_without_drafts(
    tokenizer: Any,
) -> None:
    """The end is masked, and the other id that is allowed is a bad word: no id is drawn."""
    table = torch.zeros(VOCAB, VOCAB)
    table[:, 5], table[:, EOS] = 20, 30
    params = greedy(9, allowed_token_ids=[EOS, 5], min_tokens=5, bad_words=["cat cat cat"])
    said = []
    for config in (None, {**oracle(), "streams": {(3,): [5] * 9}}, oracle()):
        with LLM(toy_target(table), tokenizer=tokenizer, speculative_config=config) as llm:
            output, other = llm.generate([[3], [4]], [params, greedy(3)], use_tqdm=False)
        assert other.error is None
        said.append((output.outputs[0].token_ids, output.outputs[0].finish_reason, output.error))
    assert said[0][:2] == ([5, 5], "error")
    assert "exclude every token" in str(said[0][2])
    assert said[1:] == said[:1] * 2


@pytest.mark.parametrize(
    "end", [{"stop": ["on"]}, {"stop_token_ids": [7]}, {"max_tokens": 4}, {"stop": ["sat on"]}]
)
def test_e44_a_step_that_is_cut_has_logprobs_of_the_tokens_that_stay(
    end: dict[str, Any], tokenizer: Any
) -> None:
    """Whichever end cuts the block."""
    values = {"max_tokens": 12, "logprobs": 2, **end}
    params = SamplingParams(temperature=0, **values)
    with LLM(counting(), tokenizer=tokenizer, speculative_config=oracle(7)) as llm:
        (output,) = llm.generate([[3]], params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.token_ids == [4, 5, 6, 7]
    entries = completion.logprobs or []
    assert [next(iter(e)) for e in entries] == completion.token_ids
    assert completion.cumulative_logprob == pytest.approx(0, abs=1e-5)


# -- caches ------------------------------------------------------------------


class Poison:
    """Makes everything in the cache that is not committed unusable, after every step."""

    def __init__(self) -> None:
        self.llm: LLM | None = None

    @hookimpl
    def step_finished(self) -> None:
        assert self.llm is not None
        engine = self.llm._loaded.engine
        places = torch.ones(engine.target.cache.num_blocks * 16, dtype=torch.bool)
        for slot, sequence in engine.scheduler.running.items():
            computed = np.arange(int(engine.slots.computed[slot]))
            places[engine.slots.block_tables[slot][computed // 16] * 16 + computed % 16] = False
            assert set(sequence.blocks) <= set(engine.slots.block_tables[slot].tolist())
        for layer in range(engine.target.num_layers):
            engine.target.cache.k(layer)[places] = math.nan
            engine.target.cache.v(layer)[places] = math.nan


@pytest.mark.parametrize("method", [OracleSpeculator, WrongSpeculator, RaggedSpeculator])
def test_e48_nothing_past_the_committed_tokens_is_read_from_the_cache(method: type) -> None:
    """Keys and values of drafts that were refused are overwritten before anybody sees them."""
    params = mixed(20)
    streams = right_streams(params)
    config = {"method": method, "streams": streams, "num_speculative_tokens": 5}
    poison = Poison()
    with LLM(
        small(), speculative_config=config, observers=[poison], kv_cache_memory=7 * PAGE,
        max_model_len=64, max_num_batched_tokens=13,
    ) as llm:  # fmt: skip
        poison.llm = llm
        llm._loaded.engine.target.least_rows = 8
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == list(streams.values())


def test_e50_a_drafter_is_fed_in_steps_that_draft_nothing() -> None:
    """Every position of every request reaches it, with the token that follows."""
    config = {
        "method": RecordingSpeculator,
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 64, 0]],
    }
    with LLM(small(), speculative_config=config, max_num_batched_tokens=7) as llm:
        speculator: Any = llm.speculator
        names = [llm.add_request(p, s) for p, s in zip(PROMPTS[:3], mixed(), strict=False)]
        lengths: dict[int, list[int]] = {}
        while llm.has_unfinished_requests():
            llm.step()
            for slot, sequence in llm._loaded.engine.scheduler.running.items():
                llm._loaded.engine.sync(sequence)
                lengths[slot] = sequence.known
                pairs = speculator.pairs[slot]
                committed = int(llm._loaded.engine.slots.computed[slot])
                assert pairs == {i: sequence.known[i + 1] for i in range(committed)}
        assert len(lengths) == len(names)
        assert llm.metrics.skipped["policy"] > 10


def test_e57_the_law_of_drafts_follows_its_request_wherever_it_moves() -> None:
    """Drafts with the target's own law all hold, though rows and slots change all the time."""
    config = {
        "method": BigramSpeculator,
        "table": TABLE,
        "rejection_sample_method": "standard",
        "num_speculative_tokens": 3,
    }
    with LLM(
        toy_target(TABLE), speculative_config=config, max_num_seqs=5, max_model_len=64,
        kv_cache_memory=9 * 16 * 2 * VOCAB * 8, scheduling_policy="priority",
    ) as llm:  # fmt: skip
        for n in range(40):
            params = SamplingParams(temperature=0.7 + n % 3 / 4, seed=n, max_tokens=3 + 7 * n % 40)
            llm.add_request([n % VOCAB] * (1 + n % 11), params, priority=-(n % 4))
            for _ in range(2):
                llm.step()
            if n % 5 == 4:
                llm.abort_request(str(n - 2))
        while llm.has_unfinished_requests():
            llm.step()
        metrics, preemptions = llm.metrics, llm._loaded.engine.scheduler.num_preemptions
    assert preemptions > 3
    assert metrics.num_draft_tokens > 300
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens


# -- configuration -----------------------------------------------------------


@pytest.mark.parametrize("number", [127, 128, 129, 150])
def test_e75_a_step_may_hold_more_drafts_than_128(number: int) -> None:
    """All of them are verified at once."""
    config = oracle(number, length=240)
    with LLM(counting(), speculative_config=config) as llm:
        (output,) = llm.generate([[3]], greedy(200), use_tqdm=False)
        metrics = llm.metrics
    assert output.outputs[0].token_ids == count(4, 200)
    assert metrics.num_drafts == 2
    assert metrics.accepted_per_pos[number - 1] == 1
