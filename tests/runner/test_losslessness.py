"""Tokens with a speculator are the tokens without it, however requests are batched.

Slow because every case runs a model twice; the models are tiny and in float64, so that equality
does not hang on rounding.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from transformers import PreTrainedModel

from specdec import LLM, SamplingParams
from specdec.testing import (
    BigramSpeculator,
    ConstantSpeculator,
    OracleSpeculator,
    PlaceholderSpeculator,
    WrongSpeculator,
    assert_lossless,
    assert_same_tokens,
    emitted,
    tiny_target,
    toy_target,
)
from specdec.testing.speculators import StreamOptions
from specdec.types import HostStep

VOCAB = 61
SLIDING = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 8}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 6, "head_dim": 8}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {"sliding_window": 5, "head_dim": 8, "layer_types": SLIDING},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"sliding_window": 5, "head_dim": 8, "layer_types": SLIDING},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
}


def family(name: str) -> PreTrainedModel:
    model, config, changes = FAMILIES[name]
    options: dict[str, Any] = {
        "vocab_size": VOCAB,
        "initializer_range": 0.3,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
        **changes,
    }
    if name == "gpt2":
        options["n_positions"] = 128
    else:
        options |= {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
        }
    torch.manual_seed(0)
    built: Any = getattr(transformers, model)(getattr(transformers, config)(**options))
    typed: PreTrainedModel = built.double().eval()
    return typed


@attrs.frozen
class EveryOptions(StreamOptions):
    """every: of so many positions one is drafted wrongly."""

    every: int = 3


class StumblingSpeculator(OracleSpeculator):
    """The oracle with an error every few tokens: blocks are accepted in part."""

    Options: ClassVar[type] = EveryOptions

    def __init__(self, target: Any, config: Any) -> None:
        super().__init__(target, config)
        self.every = config.options.every

    def fill(self, row: NDArray[np.int64], slot: int, host: HostStep) -> None:
        super().fill(row, slot, host)
        positions = int(host.length[slot]) + np.arange(len(row))
        wrong = (positions % self.every == 0) & (row >= 0)
        row[wrong] = (row[wrong] + 1) % self.vocab_size


PROMPTS = [
    [7],
    [1, 2, 3, 4, 5, 1, 2, 3, 4],
    [60, 59, 0, 0, 0, 0, 0, 0, 0, 0, 12, 13, 14],
    list(range(20, 37)),
    [3, 3, 3, 3, 3],
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=18),
    SamplingParams(temperature=0.8, seed=1, max_tokens=20),
    SamplingParams(temperature=1.0, top_k=5, seed=2, max_tokens=16),
    SamplingParams(temperature=1.3, top_p=0.8, seed=3, max_tokens=19),
    SamplingParams(temperature=0.7, min_p=0.1, seed=4, max_tokens=11),
]


def streams_of(model: Any, prompts: list[list[int]], params: Any) -> dict[Any, list[int]]:
    plain = emitted(model, prompts, params)
    return {tuple(p): ids[0] for p, ids in zip(prompts, plain, strict=True)}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_emits_its_own_tokens_with_and_without_drafts(name: str) -> None:
    model = family(name)
    prompt = torch.tensor([PROMPTS[2]])
    generated: Any = model
    own = generated.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=18, do_sample=False
    )[0, len(PROMPTS[2]) :].tolist()
    greedy = SamplingParams(temperature=0, max_tokens=18)
    assert emitted(model, [PROMPTS[2]], greedy) == [[own]]

    streams = streams_of(model, PROMPTS, PARAMS)
    config = {"method": StumblingSpeculator, "streams": streams, "num_speculative_tokens": 4}
    assert_same_tokens(model, config, PROMPTS, PARAMS)
    with LLM(model, speculative_config=config, max_num_batched_tokens=6, max_num_seqs=3) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        metrics = llm.metrics
    assert {tuple(o.prompt_token_ids): o.outputs[0].token_ids for o in outputs} == streams
    # blocks were accepted in part, each position now and then
    assert 0.3 < (metrics.acceptance_rate or 0) < 0.9
    assert min(metrics.accepted_per_pos[:2]) > 0


TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        (OracleSpeculator, {}),
        (StumblingSpeculator, {"every": 2}),
        (WrongSpeculator, {}),
        (PlaceholderSpeculator, {"column": 0}),
        (PlaceholderSpeculator, {"column": 1}),
        (ConstantSpeculator, {"token": 5}),
        (BigramSpeculator, {"table": TABLE, "draft_sample_method": "greedy"}),
        (BigramSpeculator, {"table": TABLE, "draft_sample_method": "coupled"}),
        (BigramSpeculator, {"table": TABLE, "draft_sample_method": "probabilistic"}),
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else "-".join(map(str, list(v.values())[-1:])),
)
def test_no_drafter_changes_a_token(method: Any, options: dict[str, Any], k: int) -> None:
    # token 5 ends a completion: the constant drafter proposes it everywhere
    model = tiny_target(vocab=VOCAB, eos_token_id=5)
    if issubclass(method, OracleSpeculator):
        options = {**options, "streams": streams_of(model, PROMPTS, PARAMS)}
    config = {"method": method, "num_speculative_tokens": k, **options}
    assert_same_tokens(model, config, PROMPTS, PARAMS)


def test_a_falling_length_and_lengths_by_batch_change_no_token() -> None:
    model = tiny_target(vocab=VOCAB)
    config = {
        "method": StumblingSpeculator,
        "streams": streams_of(model, PROMPTS, PARAMS),
        "num_speculative_tokens": 6,
        "length_policy": "falling",
        "num_speculative_tokens_per_batch_size": [[1, 1, 6], [2, 3, 2], [4, 64, 0]],
    }
    assert_same_tokens(model, config, PROMPTS, PARAMS)


def test_the_conformance_check_passes_for_a_coupled_drafter() -> None:
    assert_lossless(
        {"method": BigramSpeculator, "table": TABLE}, model=tiny_target(vocab=VOCAB), drafts=(3,)
    )


# -- ends inside a block -----------------------------------------------------


def counting(vocab: int = 32, **settings: Any) -> PreTrainedModel:
    """After token t comes t + 1."""
    return toy_target(torch.eye(vocab).roll(1, dims=1) * 20, **settings)


def count(first: int, number: int) -> list[int]:
    return list(range(first, first + number))


@pytest.fixture
def oracle() -> dict[str, Any]:
    """Knows the counting target and goes on past every end."""
    return {
        "method": OracleSpeculator,
        "streams": {tuple(count(0, n)): count(n, 31 - n) for n in range(1, 31)},
        "num_speculative_tokens": 4,
    }


@pytest.mark.parametrize("eos", range(4, 12))
def test_nothing_is_emitted_after_an_end_of_sequence_in_a_block(
    oracle: dict[str, Any], eos: int
) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    with LLM(counting(eos_token_id=eos), speculative_config=oracle) as llm:
        (output,) = llm.generate(count(0, 3), params, use_tqdm=False)
        ignored = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        (on,) = llm.generate(count(0, 3), ignored, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.token_ids == count(3, eos - 2)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert on.outputs[0].token_ids == count(3, 20)
    assert on.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("stop", range(4, 10))
def test_a_stop_token_of_the_request_ends_it_in_a_block_and_is_named(
    oracle: dict[str, Any], stop: int
) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop, stop, 31]
    )
    with LLM(counting(eos_token_id=4), speculative_config=oracle) as llm:
        (output,) = llm.generate(count(0, 3), params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.token_ids == count(3, stop - 2)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("most", range(1, 12))
def test_max_tokens_holds_in_a_block(oracle: dict[str, Any], most: int) -> None:
    with LLM(counting(), speculative_config=oracle) as llm:
        (output,) = llm.generate(
            count(0, 3), SamplingParams(temperature=0, max_tokens=most), use_tqdm=False
        )
    assert output.outputs[0].token_ids == count(3, most)
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("room", [1, 2, 4, 5, 7])
def test_max_model_len_holds_in_a_block(oracle: dict[str, Any], room: int) -> None:
    with LLM(counting(), speculative_config=oracle, max_model_len=20) as llm:
        (output,) = llm.generate(
            count(0, 20 - room), SamplingParams(temperature=0, max_tokens=None), use_tqdm=False
        )
    assert output.outputs[0].token_ids == count(20 - room, room)
    assert output.outputs[0].finish_reason == "length"


def test_a_stop_and_a_limit_at_the_same_token_count_as_a_stop(oracle: dict[str, Any]) -> None:
    with LLM(counting(eos_token_id=6), speculative_config=oracle) as llm:
        (output,) = llm.generate(
            count(0, 3), SamplingParams(temperature=0, max_tokens=4), use_tqdm=False
        )
    assert output.outputs[0].token_ids == count(3, 4)
    assert output.outputs[0].finish_reason == "stop"


# -- batching ----------------------------------------------------------------


def test_chunks_slots_and_a_small_cache_change_no_token() -> None:
    model = tiny_target(vocab=VOCAB)
    prompts = [[(i * j) % VOCAB for i in range(n)] for j, n in enumerate([3, 4, 5, 8, 9, 16, 17])]
    params = [SamplingParams(temperature=0.9 * (n % 2), seed=n, max_tokens=12) for n in range(7)]
    plain = emitted(model, prompts, params)
    streams = {tuple(p): ids[0] for p, ids in zip(prompts, plain, strict=True)}
    config = {"method": StumblingSpeculator, "streams": streams, "num_speculative_tokens": 3}
    page = 16 * 2 * 2 * 2 * 8 * 8  # tokens, layers, keys and values, heads, dim, bytes
    tried: list[dict[str, Any]] = [
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 4},
        {"max_num_batched_tokens": 8, "max_num_seqs": 2},
        {"max_num_seqs": 1},
        {"kv_cache_memory": 4 * page},
    ]
    for settings in tried:
        with LLM(model, speculative_config=config, **settings) as llm:
            scheduler = llm._loaded.engine.scheduler
            free = scheduler.pool.free
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert scheduler.pool.free == free
            assert not scheduler.running
        assert [[c.token_ids for c in o.outputs] for o in outputs] == plain, settings
    assert free == 3  # so the last of the settings made requests wait for pages


def test_more_completions_than_slots_keep_their_tokens() -> None:
    model = tiny_target(vocab=VOCAB)
    params = SamplingParams(temperature=0.9, n=5, seed=8, max_tokens=10)
    (plain,) = emitted(model, [PROMPTS[1]], params)
    config = {"method": BigramSpeculator, "table": TABLE, "num_speculative_tokens": 3}
    (drafted,) = emitted(model, [PROMPTS[1]], params, config, max_num_seqs=2)
    assert drafted == plain
    assert len({tuple(ids) for ids in plain}) == 5
    # completion 0 is what n=1 gives
    one = SamplingParams(temperature=0.9, seed=8, max_tokens=10)
    assert emitted(model, [PROMPTS[1]], one) == [[plain[0]]]


def test_a_seeded_request_does_not_see_what_else_runs() -> None:
    model = tiny_target(vocab=VOCAB)
    prompt, params = PROMPTS[3], SamplingParams(temperature=1.0, seed=77, max_tokens=14)
    ((alone,),) = emitted(model, [prompt], params)
    chance = random.Random(0)
    for k in (1, 2, 4, 7):
        neighbours = [
            [chance.randrange(VOCAB) for _ in range(chance.randint(1, 20))]
            for _ in range(chance.randint(0, 6))
        ]
        place = chance.randint(0, len(neighbours))
        prompts = [*neighbours[:place], prompt, *neighbours[place:]]
        others = [
            SamplingParams(temperature=chance.choice([0, 1]), max_tokens=chance.randint(1, 12))
            for _ in neighbours
        ]
        every = [*others[:place], params, *others[place:]]
        found = emitted(
            model,
            prompts,
            every,
            {"method": BigramSpeculator, "table": TABLE, "num_speculative_tokens": k},
            max_num_seqs=chance.randint(1, 8),
            max_num_batched_tokens=chance.randint(1, 30),
            seed=chance.randrange(1000),
        )
        assert found[place] == [alone]


def test_requests_without_a_seed_repeat_with_the_engine_and_differ_from_each_other() -> None:
    model = tiny_target(vocab=VOCAB)
    params = SamplingParams(temperature=1.0, max_tokens=12)
    twice = [PROMPTS[1]] * 2

    def run(seed: int, rounds: int) -> list[list[list[int]]]:
        with LLM(model, seed=seed) as llm:
            return [
                [o.outputs[0].token_ids for o in llm.generate(twice, params, use_tqdm=False)]
                for _ in range(rounds)
            ]

    first = run(3, 2)
    assert run(3, 2) == first
    assert run(4, 2) != first
    assert len({tuple(ids) for outputs in first for ids in outputs}) == 4


def test_a_refused_call_does_not_move_the_streams_of_later_requests() -> None:
    model = tiny_target(vocab=VOCAB)
    params = SamplingParams(temperature=1.0, max_tokens=12)
    (expected,) = emitted(model, [PROMPTS[1]], params, kv_cache_memory=6 * 8192)
    with LLM(model, kv_cache_memory=6 * 8192) as llm:
        for bad in ([PROMPTS[0], []], [PROMPTS[0], [VOCAB]]):
            with pytest.raises(ValueError, match="prompt 1"):
                llm.generate(bad, params, use_tqdm=False)
        with pytest.raises(Exception, match="prompt 1 can grow to 241 tokens"):
            llm.generate(
                [[1], [1]],
                [params, SamplingParams(max_tokens=240)],
                use_tqdm=False,
            )
        (output,) = llm.generate([PROMPTS[1]], params, use_tqdm=False)
    assert [output.outputs[0].token_ids] == expected


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_context_as_long_as_the_heads_of_a_group_is_not_taken_for_a_chunk(kv_heads: int) -> None:
    # query heads that share a key head stand as rows: as many rows as keys, and not causal
    model = tiny_target(num_key_value_heads=kv_heads)
    for length in range(1, 6):
        prompt = list(range(57, 57 - length, -1))
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        params = SamplingParams(temperature=0, max_tokens=12)
        assert emitted(model, [prompt], params) == [[expected[0, length:].tolist()]]
