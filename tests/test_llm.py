"""The API: what it takes, what it gives back, and how it ends."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from specdec import (
    LLM,
    Capabilities,
    ConfigError,
    Draft,
    KVLayer,
    OutOfMemoryError,
    PluginError,
    PromptError,
    RequestOutput,
    SamplingParams,
    Speculator,
    Step,
    TargetError,
    hookimpl,
)
from specdec.testing import (
    BigramSpeculator,
    ConstantSpeculator,
    RecordingSpeculator,
    tiny_target,
    toy_target,
)

PAGE = 16 * 2 * 32 * 8  # tokens of a page, keys and values, width, bytes: of `counting`


def counting(vocab: int = 32, **settings: Any) -> PreTrainedModel:
    """After token t comes t + 1."""
    return toy_target(torch.eye(vocab).roll(1, dims=1) * 20, **settings)


def count(first: int, number: int) -> list[int]:
    return list(range(first, first + number))


def greedy(most: int | None = 8, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=most, **values)


class Successor(Speculator):
    """Drafts what the counting target says."""

    def capabilities(self) -> Capabilities:
        return Capabilities()

    @hookimpl
    def propose(self, step: Step, k: int) -> Draft:
        return Draft(tokens=(step.next_token[:, None] + torch.arange(1, k + 1)) % 32)


class Caching(Successor):
    """Wants pages of its own."""

    def capabilities(self) -> Capabilities:
        return Capabilities(kv_layers=[KVLayer(heads=1, k_dim=32, v_dim=32)])


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


# -- generate ----------------------------------------------------------------


def test_outputs_come_in_the_order_of_the_prompts_and_say_what_happened() -> None:
    with LLM(counting(eos_token_id=9), speculative_config={"method": Successor}) as llm:
        outputs = llm.generate(
            [[1, 2], [20], [5]],
            [greedy(12), greedy(2), greedy(3, ignore_eos=True, stop_token_ids=[6])],
            use_tqdm=False,
        )
        assert llm.lossless
    assert tokens(outputs) == [count(3, 7), [21, 22], [6]]
    assert [o.outputs[0].finish_reason for o in outputs] == ["stop", "length", "stop"]
    assert [o.outputs[0].stop_reason for o in outputs] == [None, None, 6]
    assert [o.prompt_token_ids for o in outputs] == [[1, 2], [20], [5]]
    assert [o.request_id for o in outputs] == ["0", "1", "2"]
    assert all(o.finished and o.error is None and o.prompt is None for o in outputs)
    assert [o.outputs[0].text for o in outputs] == ["", "", ""]  # no tokenizer


def test_times_and_numbers_of_a_request_are_filled_in() -> None:
    with LLM(counting(), speculative_config={"method": Successor}) as llm:
        (output,) = llm.generate([3, 4], greedy(10), use_tqdm=False)
        assert llm.metrics.as_dict() == output.metrics.speculative_decoding.as_dict()
    metrics = output.metrics
    assert (metrics.num_prompt_tokens, metrics.num_generated_tokens) == (2, 10)
    assert metrics.first_scheduled_time is not None
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert (
        metrics.arrival_time
        <= metrics.first_scheduled_time
        <= metrics.first_token_time
        <= metrics.finished_time
    )
    # the prompt's token, 6 of a whole block, then 2 drafts and one more
    numbers = metrics.speculative_decoding
    assert (numbers.num_drafts, numbers.num_draft_tokens, numbers.num_accepted_tokens) == (2, 7, 7)
    assert numbers.accepted_per_pos == [2, 2, 1, 1, 1]


def test_several_completions_of_a_prompt_share_a_request() -> None:
    with LLM(tiny_target()) as llm:
        (output,) = llm.generate([1, 2], SamplingParams(n=3, seed=1, max_tokens=6), use_tqdm=False)
        assert llm.metrics.num_plain_steps == 15
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert output.metrics.num_generated_tokens == 18
    assert output.metrics.speculative_decoding.num_plain_steps == 15
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3


def test_no_prompts_give_no_outputs() -> None:
    with LLM(counting()) as llm:
        assert llm.generate([], use_tqdm=False) == []
        assert list(llm.stream([])) == []


def test_the_longest_prompt_gets_one_token_and_a_huge_budget_ends_at_the_context() -> None:
    with LLM(counting(), max_model_len=20, speculative_config={"method": Successor}) as llm:
        assert llm.max_model_len == 20
        longest, open_end = llm.generate(
            [count(0, 19), count(0, 15)], [greedy(100), greedy(10**30)], use_tqdm=False
        )
    assert tokens([longest, open_end]) == [[19], count(15, 5)]
    assert longest.outputs[0].finish_reason == "length"


def test_many_requests_run_through_few_slots() -> None:
    prompts = [[n % 20] * (1 + n % 5) for n in range(200)]
    params = [greedy(1 + n % 7) for n in range(200)]
    with LLM(counting(), speculative_config={"method": Successor}, max_num_seqs=7) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert tokens(outputs) == [count(n % 20 + 1, 1 + n % 7) for n in range(200)]


def test_more_drafts_than_there_is_room_for_are_cut() -> None:
    config = {"method": Successor, "num_speculative_tokens": 12}
    with pytest.raises(ConfigError, match="is 12, which no sequence of max_model_len=12 tokens"):
        LLM(counting(), speculative_config=config, max_model_len=12)
    config["num_speculative_tokens"] = 11
    with LLM(counting(), speculative_config=config, max_model_len=12) as llm:
        assert tokens(llm.generate([[1, 2]], greedy(None), use_tqdm=False)) == [count(3, 10)]


def test_a_vocabulary_of_one_token() -> None:
    for rule in ("coupled", "standard", "block"):
        config = {"method": ConstantSpeculator, "rejection_sample_method": rule}
        with LLM(toy_target(torch.zeros(1, 1)), speculative_config=config) as llm:
            assert tokens(llm.generate([[0]], SamplingParams(max_tokens=9), use_tqdm=False)) == [
                [0] * 9
            ]


@pytest.mark.parametrize(
    "values",
    [
        {"top_k": 10**30},
        {"top_k": 61},
        {"top_p": 1e-300},
        {"min_p": 1e-300},
        {"min_p": 1.0},
        {"temperature": 1e-5},
        {"temperature": 1e6},
        {"temperature": 0.3, "top_k": 4, "top_p": 0.5, "min_p": 0.2},
        {"seed": -(2**63)},
        {"stop_token_ids": [5] * 500},
    ],
    ids=str,
)
def test_extreme_sampling_parameters_emit_the_same_tokens_with_drafts(
    values: dict[str, Any],
) -> None:
    model = tiny_target()
    table = torch.randn(61, 61, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(**{"seed": 3, "max_tokens": 8, **values})
    config = {"method": BigramSpeculator, "table": table, "num_speculative_tokens": 3}
    with LLM(model) as plain, LLM(model, speculative_config=config) as drafted:
        expected = plain.generate([[1, 2, 3]], params, use_tqdm=False)
        assert tokens(drafted.generate([[1, 2, 3]], params, use_tqdm=False)) == tokens(expected)
    assert expected[0].outputs[0].token_ids


# -- mistakes ----------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Any:
    with LLM(counting(), max_model_len=24) as llm:
        yield llm


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[]], None, "the prompt is empty; give at least one token"),
        ([[1], []], None, "prompt 1 is empty"),
        ([[1], [2, 32]], None, "prompt 1 holds the token id 32; ids are 0 to 31"),
        ([-1], None, "the prompt holds the token id -1"),
        ([2**70], None, "the prompt holds the token id 1180591620717411303424"),
        ([0] * 24, None, "the prompt has 24 tokens, but max_model_len is 24 and at least one"),
        ("text", None, "a text prompt needs a tokenizer"),
        ([[1], [2]], [greedy()], "2 prompts but 1 SamplingParams; give one, or one each"),
        ([[1]], [greedy()] * 2, "1 prompts but 2 SamplingParams"),
        ([[1]], [None], "sampling_params holds None, which is no SamplingParams"),
        ([[1]], {"temperature": 0}, "sampling_params is of type dict; give SamplingParams"),
        ([[1]], 0.5, "sampling_params is of type float"),
        ([1], greedy(stop_token_ids=[32]), "the prompt: stop_token_ids holds 32; ids are 0 to 31"),
    ],
    ids=str,
)
def test_mistakes_are_told_before_anything_runs(
    small: LLM, prompts: Any, params: Any, message: str
) -> None:
    before = small.metrics.num_plain_steps
    with pytest.raises(PromptError, match=message):
        small.generate(prompts, params, use_tqdm=False)
    with pytest.raises(PromptError, match=message):
        small.stream(prompts, params)  # at once, not at the first step
    assert small.metrics.num_plain_steps == before


def test_a_request_that_outgrows_the_whole_cache_is_refused() -> None:
    # one page of 16 tokens, as the other belongs to nobody
    with LLM(counting(), max_model_len=24, kv_cache_memory=2 * PAGE) as llm:
        with pytest.raises(
            OutOfMemoryError,
            match="the prompt can grow to 17 tokens, but the key-value cache holds 16; lower max",
        ):
            llm.generate([[1, 2]], greedy(15), use_tqdm=False)
        assert tokens(llm.generate([[4, 5]], greedy(14), use_tqdm=False)) == [count(6, 14)]


def test_more_stop_tokens_than_are_kept_are_refused() -> None:
    with LLM(tiny_target(vocab=300, eos_token_id=299)) as llm:
        many = list(range(256))
        with pytest.raises(PromptError, match="has 257 stop tokens, 256 of its own and the others"):
            llm.generate([1], SamplingParams(stop_token_ids=many), use_tqdm=False)
        llm.generate([1], SamplingParams(stop_token_ids=many[1:]), use_tqdm=False)
        llm.generate([1], SamplingParams(stop_token_ids=many, ignore_eos=True), use_tqdm=False)


def test_chat_takes_conversations_only(small: LLM) -> None:
    for prompts in ("hello", [1, 2], ["hello"]):
        with pytest.raises(PromptError, match="chat takes messages"):
            small.chat(prompts)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0, but it has to be an integer from 1 up"),
        ({"max_num_batched_tokens": 1.5}, "max_num_batched_tokens is 1.5"),
        ({"max_model_len": 1}, "max_model_len is 1, but a prompt and a token need 2"),
        ({"max_model_len": 257}, "max_model_len is 257, but LlamaForCausalLM was made for 256"),
        ({"kv_cache_memory": -5}, "kv_cache_memory is -5"),
        ({"enforce_eager": "yes"}, "enforce_eager is 'yes', but it has to be True or False"),
        ({"deterministic": 1}, "deterministic is 1, but it has to be True or False"),
        ({"seed": 1.0}, "seed is 1.0, but it has to be an integer of 64 bits"),
        ({"seed": True}, "seed is True"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"device": "nope"}, "device is 'nope', but it has to be 'cpu'"),
        ({"device": 1.5}, "device is 1.5"),
        ({"observers": 3}, "observers is 3, but it has to be a list"),
        ({"tokenizer": 5}, "tokenizer is of type int"),
        ({"skip_tokenizer_init": True, "tokenizer": "x"}, "contradicts giving a tokenizer"),
        ({"max_modle_len": 5}, "no argument 'max_modle_len'; did you mean 'max_model_len'"),
        ({"tensor_parallel_size": 2}, "is refused: specdec runs a target on one device"),
        ({"speculative_config": {"method": Successor, "num_speculative_tokens": 0}}, "at least 1"),
        (
            {"speculative_config": {"method": Successor, "num_speculative_token": 3}},
            "did you mean 'num_speculative_tokens'",
        ),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(counting(), **values)


def test_neutral_keywords_of_vllm_pass() -> None:
    LLM(counting(), tensor_parallel_size=1, enable_prefix_caching=False).close()


def test_a_cache_too_small_for_a_single_page_is_refused() -> None:
    with pytest.raises(
        OutOfMemoryError,
        match=rf"needs {2 * PAGE} bytes at least \(0 of them for the speculator\), but 100 are",
    ):
        LLM(counting(), kv_cache_memory=100)


def test_a_cache_too_small_for_the_drafters_pages_says_so() -> None:
    with pytest.raises(
        OutOfMemoryError,
        match=rf"needs {2 * PAGE + 2 * 16 * 64 * 8} bytes .*\({2 * 16 * 64 * 8} of them for the sp",
    ):
        LLM(counting(), speculative_config={"method": Caching}, kv_cache_memory=2 * PAGE)


def test_an_observer_without_the_hook_is_refused() -> None:
    with pytest.raises(PluginError, match="an observer has the hook step_finished"):
        LLM(counting(), observers=[object()])


def test_more_drafts_than_a_speculator_can_are_refused() -> None:
    class Short(Successor):
        def capabilities(self) -> Capabilities:
            return Capabilities(max_drafts=2)

    with pytest.raises(ConfigError, match="drafts between 1 and 2 tokens a step"):
        LLM(counting(), speculative_config={"method": Short, "num_speculative_tokens": 3})
    with LLM(counting(), speculative_config={"method": Short}) as llm:
        llm.generate([1], greedy(), use_tqdm=False)
        assert len(llm.metrics.drafted_per_pos) == 2


@pytest.mark.parametrize("model", [3, None, torch.nn.Linear(2, 2), "/no/such/folder"], ids=str)
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(TargetError):
        LLM(model)


def test_a_model_that_is_no_causal_lm_is_refused(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        intermediate_size=8,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(TargetError, match=r"BertForMaskedLM.*not a causal language model"):
        LLM(tmp_path, skip_tokenizer_init=True)


# -- stream ------------------------------------------------------------------


def test_a_stream_yields_what_grew_and_ends_finished() -> None:
    with LLM(counting(), speculative_config={"method": Successor}) as llm:
        seen = [
            (o.request_id, o.outputs[0].token_ids, o.finished)
            for o in llm.stream([[1], [7]], [greedy(9), greedy(2)])
        ]
    assert seen == [
        ("0", [2], False),
        ("1", [8], False),
        ("0", count(2, 7), False),
        ("1", [8, 9], True),
        ("0", count(2, 9), True),
    ]


@pytest.mark.parametrize("how", ["break", "close", "forget"])
def test_leaving_a_stream_aborts_its_requests(how: str) -> None:
    with LLM(counting(), max_num_seqs=2) as llm:
        scheduler = llm._loaded.engine.scheduler
        free = scheduler.pool.free
        stream = llm.stream([[1], [2], [3]], greedy(20))
        if how == "break":
            for _ in stream:
                break
            del stream
        else:
            next(stream)
            assert len(scheduler.running) == 2
            if how == "close":
                stream.close()  # type: ignore[attr-defined]
            del stream
        gc.collect()
        assert scheduler.pool.free == free
        assert not scheduler.running
        assert not scheduler.waiting
        assert tokens(llm.generate([[1]], greedy(), use_tqdm=False)) == [count(2, 8)]


def test_a_stream_that_is_never_read_takes_nothing() -> None:
    with LLM(counting()) as llm:
        stream = llm.stream([[1]], greedy())
        assert not llm._loaded.engine.busy
        del stream


def test_streams_read_in_turns_keep_their_tokens_apart() -> None:
    config = {"method": Successor, "num_speculative_tokens": 2}
    with LLM(counting(), speculative_config=config, max_num_seqs=3) as llm:
        one = llm.stream([[1], [5]], greedy(10))
        two = llm.stream([[9], [13]], greedy(6))
        last: dict[str, list[int]] = {}
        for _ in range(2):
            for stream in (one, two):
                output = next(stream)
                last[output.request_id] = output.outputs[0].token_ids
        # generate runs beside them and does not wait for their readers
        assert tokens(llm.generate([[20]], greedy(), use_tqdm=False)) == [count(21, 8)]
        for stream in (two, one):
            for output in stream:
                last[output.request_id] = output.outputs[0].token_ids
        assert llm._loaded.engine.scheduler.pool.free == llm._loaded.engine.scheduler._capacity
    assert last == {"0": count(2, 10), "1": count(6, 10), "2": count(10, 6), "3": count(14, 6)}


def test_a_stream_whose_requests_ended_while_another_was_read_still_yields_them() -> None:
    with LLM(counting()) as llm:
        slow = llm.stream([[1]], greedy(5))
        next(slow)
        llm.generate([[2]], greedy(12), use_tqdm=False)
        outputs = list(slow)
    assert [o.outputs[0].token_ids for o in outputs] == [count(2, 5)]
    assert outputs[0].finished


# -- step by step ------------------------------------------------------------


def finish(llm: LLM) -> dict[str, list[RequestOutput]]:
    """Step until nothing is left; the outputs of every request, in order."""
    seen: dict[str, list[RequestOutput]] = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            seen.setdefault(output.request_id, []).append(output)
    return seen


def test_requests_can_be_added_between_steps_of_ones_own() -> None:
    config = {"method": Successor, "num_speculative_tokens": 2}
    with LLM(counting(), speculative_config=config) as llm:
        assert not llm.has_unfinished_requests()
        assert llm.step() == []
        one = llm.add_request([1], greedy(5))
        assert (llm.has_unfinished_requests(), llm.num_unfinished_requests) == (True, 1)
        seen = [[(o.request_id, o.outputs[0].token_ids, o.finished) for o in llm.step()]]
        two = llm.add_request([20], greedy(2))
        while llm.has_unfinished_requests():
            seen.append([(o.request_id, o.outputs[0].token_ids, o.finished) for o in llm.step()])
        assert llm.num_unfinished_requests == 0
        assert llm.step() == []
    assert (one, two) == ("0", "1")
    assert seen == [
        [("0", [2], False)],
        [("0", [2, 3, 4, 5], False), ("1", [21], False)],
        [("0", count(2, 5), True), ("1", [21, 22], True)],
    ]


def test_a_step_with_nothing_of_its_own_to_do_runs_nothing() -> None:
    with LLM(counting()) as llm:
        other = llm.stream([[1]], greedy(3))
        next(other)
        before = llm.metrics.num_plain_steps
        assert llm.step() == []
        assert llm.metrics.num_plain_steps == before
        assert [o.outputs[0].token_ids for o in other] == [[2, 3], [2, 3, 4]]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("way", ["stream", "step"])
def test_deltas_joined_are_the_cumulative_output_and_final_only_gives_one(
    way: str, drafts: int, model_folder: Path
) -> None:
    config = {
        "method": BigramSpeculator, "table": torch.zeros(17, 17), "num_speculative_tokens": 3,
    } if drafts else None  # fmt: skip
    values: dict[str, Any] = {
        "n": 2, "seed": 4, "max_tokens": 12, "logprobs": 1, "prompt_logprobs": 0,
        "ignore_eos": True, "skip_special_tokens": False, "stop": ["never", "on a on"],
    }  # fmt: skip
    seen: dict[str, list[RequestOutput]] = {}
    with LLM(model_folder, speculative_config=config) as llm:
        for kind in ("cumulative", "delta", "final_only"):
            params = SamplingParams(output_kind=kind, **values)
            if way == "stream":
                seen[kind] = list(llm.stream("the cat sat", params))
            else:
                name = llm.add_request("the cat sat", params)
                seen[kind] = finish(llm)[name]
        (whole,) = llm.generate("the cat sat", SamplingParams(**values), use_tqdm=False)
    (final,) = seen["final_only"]
    assert len(seen["cumulative"]) == len(seen["delta"]) > 3
    for index in range(2):
        grown = [o.outputs[index] for o in seen["cumulative"]]
        parts = [o.outputs[index] for o in seen["delta"]]
        for number, so_far in enumerate(grown, 1):
            joined = parts[:number]
            assert so_far.text == "".join(p.text for p in joined)
            assert so_far.token_ids == [t for p in joined for t in p.token_ids]
            assert so_far.logprobs == [entry for p in joined for entry in p.logprobs or []]
            assert so_far.cumulative_logprob == parts[number - 1].cumulative_logprob
            assert so_far.finish_reason == parts[number - 1].finish_reason
        for other in (final.outputs[index], whole.outputs[index]):
            assert attrs.asdict(other) == attrs.asdict(grown[-1])
        assert parts[0].token_ids != grown[-1].token_ids
    for outputs in seen.values():
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert all(o.prompt_logprobs == whole.prompt_logprobs for o in outputs)


def test_a_generation_is_given_whole_whatever_kind_of_output_is_asked_for() -> None:
    with LLM(counting()) as llm:
        for kind in ("cumulative", "delta", "final_only"):
            (output,) = llm.generate([1], greedy(4, output_kind=kind), use_tqdm=False)
            assert output.outputs[0].token_ids == count(2, 4)


def test_requests_have_the_ids_that_they_are_given() -> None:
    with LLM(counting()) as llm:
        assert llm.add_request([1], greedy(2), request_id="mine") == "mine"
        with pytest.raises(
            PromptError, match="request_id 'mine' is in use by a request that still"
        ):
            llm.add_request([2], greedy(2), request_id="mine")
        assert llm.add_request([2], greedy(2)) == "0"
        assert set(finish(llm)) == {"mine", "0"}
        assert llm.add_request([3], greedy(2), request_id="mine") == "mine"  # it is free again
        assert [o.outputs[0].token_ids for o in finish(llm)["mine"]] == [[4], [4, 5]]


@pytest.mark.parametrize("wrong", [3, None, [3], ["0", None]])
def test_ids_to_abort_are_texts(wrong: Any) -> None:
    with LLM(counting()) as llm:
        llm.add_request([1], greedy(2))
        with pytest.raises(PromptError, match=r"request_ids .*text"):
            llm.abort_request(wrong)
        assert [o.outputs[0].token_ids for o in finish(llm)["0"]] == [[2], [2, 3]]


@pytest.mark.parametrize("wrong", ["", 3, b"x"])
def test_an_id_is_a_text(wrong: Any) -> None:
    with LLM(counting()) as llm:
        with pytest.raises(PromptError, match=r"request_id is .*, but it has to be a text"):
            llm.add_request([1], request_id=wrong)
        assert not llm.has_unfinished_requests()


def test_a_number_that_a_user_took_is_not_given_twice() -> None:
    with LLM(counting()) as llm:
        llm.add_request([1], greedy(9), request_id="0")
        llm.add_request([1], greedy(9), request_id="1")
        assert llm.add_request([2], greedy(2)) == "2"
        assert llm.num_unfinished_requests == 3


def test_one_prompt_is_added_at_a_time(model_folder: Path) -> None:
    with LLM(model_folder) as llm:
        for prompts, number in (([[4], [5]], 2), ([], 0), (["the", "cat"], 2)):
            with pytest.raises(
                PromptError, match=f"one prompt is taken at a time, these are {number}"
            ):
                llm.add_request(prompts)  # type: ignore[arg-type]
        assert not llm.has_unfinished_requests()
        chat: Any = [{"role": "user", "content": "the cat"}]
        for prompt in ("the cat", [4, 5], {"prompt": "the cat"}, chat):
            llm.add_request(prompt, greedy(2))
        assert llm.num_unfinished_requests == 4
        ends = [outputs[-1] for outputs in finish(llm).values()]
    assert [o.prompt_token_ids for o in ends] == [[4, 5], [4, 5], [4, 5], [2, 4, 5, 3]]


def test_mistakes_are_told_when_a_request_is_added_and_leave_nothing(small: LLM) -> None:
    free = small._loaded.engine.scheduler.pool.free
    with pytest.raises(PromptError, match="the prompt holds the token id 32"):
        small.add_request([32])
    with pytest.raises(PromptError, match="the prompt has 24 tokens, but max_model_len is 24"):
        small.add_request([0] * 24)
    assert not small.has_unfinished_requests()
    assert not small._loaded.engine.busy
    assert small._loaded.engine.scheduler.pool.free == free


def test_a_request_can_be_aborted_by_its_id_wherever_it_is() -> None:
    with LLM(counting(), max_num_seqs=1) as llm:
        scheduler = llm._loaded.engine.scheduler
        llm.add_request([1], greedy(9), request_id="runs")
        llm.add_request([5], greedy(9), request_id="waits")
        llm.add_request([9], greedy(2), request_id="stays")
        llm.step()
        llm.step()
        llm.abort_request(["runs", "waits", "never there"])
        assert not scheduler.running
        assert llm.num_unfinished_requests == 3  # their last outputs were not read yet
        ended = {o.request_id: o for o in llm.step()}
        assert set(ended) == {"runs", "waits"}
        assert all(o.finished for o in ended.values())
        assert {o.outputs[0].finish_reason for o in ended.values()} == {"abort"}
        assert ended["runs"].outputs[0].token_ids == [2, 3]
        assert ended["waits"].outputs[0].token_ids == []
        llm.abort_request("runs")  # it has ended
        assert tokens(finish(llm)["stays"])[-1] == [10, 11]
        assert scheduler.pool.free == scheduler.num_blocks


def test_an_abort_after_the_end_does_not_change_what_is_told() -> None:
    with LLM(counting()) as llm:
        name = llm.add_request([1], greedy(2))
        llm.step()
        # another reader ends it, before its own reader looks
        llm.generate([[5]], greedy(6), use_tqdm=False)
        llm.abort_request(name)
        (output,) = llm.step()
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("length", [2, 3])


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
def test_requests_go_on_while_others_of_the_same_llm_are_generated(kind: str) -> None:
    with LLM(counting()) as llm:
        name = llm.add_request([1], greedy(20, output_kind=kind))
        first = llm.step()
        assert [o.outputs[0].token_ids for o in first] == ([] if kind == "final_only" else [[2]])
        assert tokens(llm.generate([[10]], greedy(6), use_tqdm=False)) == [count(11, 6)]
        steps = llm.metrics.num_plain_steps
        outputs = llm.step()
        if kind == "final_only":
            assert outputs == []
        else:
            # all that came meanwhile, at once, and without a step
            assert llm.metrics.num_plain_steps == steps
            (output,) = outputs
            assert output.outputs[0].token_ids == (
                count(2, 7) if kind == "cumulative" else count(3, 6)
            )
        for _ in llm.stream([[10]], greedy(20)):
            pass
        (last,) = finish(llm)[name]
    assert last.finished
    assert last.outputs[0].token_ids[-1] == 21


def test_a_step_that_breaks_off_is_raised_and_its_requests_are_told_with_the_next() -> None:
    class Once:
        steps = 0

        @hookimpl
        def step_finished(self) -> None:
            self.steps += 1
            if self.steps == 2:
                raise KeyboardInterrupt

    with LLM(counting(), observers=[Once()], max_num_seqs=1) as llm:
        llm.add_request([1], greedy(9), request_id="hit")
        llm.add_request([5], greedy(2), request_id="waits")
        llm.step()
        with pytest.raises(KeyboardInterrupt):
            llm.step()
        (output,) = llm.step()
        assert (output.request_id, output.outputs[0].finish_reason) == ("hit", "error")
        assert output.error == "a step was broken off by KeyboardInterrupt"
        assert tokens(finish(llm)["waits"])[-1] == [6, 7]


def test_one_row_a_step_is_enough_for_everybody() -> None:
    with LLM(counting(), speculative_config={"method": Successor}, max_num_batched_tokens=1) as llm:
        outputs = llm.generate([[1, 2, 3], [7]], greedy(4), use_tqdm=False)
        # a draft would be a second row
        assert llm.metrics.num_draft_tokens == 0
        assert llm.metrics.skipped["batch"] > 0
    assert tokens(outputs) == [count(4, 4), count(8, 4)]


def test_more_completions_than_a_step_has_rows_take_turns() -> None:
    with (
        LLM(tiny_target(), max_num_batched_tokens=3, max_num_seqs=8) as few,
        LLM(tiny_target()) as many,
    ):
        params = SamplingParams(n=7, seed=3, max_tokens=5)
        expected, actual = (
            [c.token_ids for c in llm.generate([1, 2], params, use_tqdm=False)[0].outputs]
            for llm in (many, few)
        )
    assert actual == expected


# -- priorities, memory, log-probabilities -----------------------------------


def test_priorities_are_refused_unless_the_policy_takes_them() -> None:
    with LLM(counting()) as llm:
        for use in (
            lambda: llm.generate([[1], [2]], priority=[0, 1]),
            lambda: llm.stream([1], priority=-1),
            lambda: llm.add_request([1], priority=1),
        ):
            with pytest.raises(
                PromptError, match=r"first come, first served.*scheduling_policy='pr"
            ):
                use()
        assert not llm._loaded.engine.busy
        assert tokens(llm.generate([1], greedy(2), priority=0, use_tqdm=False)) == [[2, 3]]


def test_the_lowest_priority_is_served_first() -> None:
    with LLM(counting(), max_num_seqs=1, scheduling_policy="priority") as llm:
        stream = llm.stream([[1], [5], [9]], greedy(2), priority=[7, -7, 0])
        order = [o.request_id for o in stream if o.finished]
        assert order == ["1", "2", "0"]
        outputs = llm.generate([[1], [5]], greedy(2), priority=3, use_tqdm=False)
    assert tokens(outputs) == [[2, 3], [6, 7]]


def test_an_urgent_request_sets_another_aside_and_both_are_right() -> None:
    with LLM(counting(), max_num_seqs=1, scheduling_policy="priority") as llm:
        slow = llm.add_request([1], greedy(12), priority=1)
        for _ in range(4):
            llm.step()
        urgent = llm.add_request([15], greedy(3), priority=0)
        seen = finish(llm)
    assert next(iter(seen)) == urgent
    assert tokens(seen[urgent])[-1] == [16, 17, 18]
    assert tokens(seen[slow])[-1] == count(2, 12)
    assert [seen[name][-1].metrics.num_preemptions for name in (slow, urgent)] == [1, 0]


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        ([1], "2 prompts but 1 priorities; give one, or one each"),
        ([1, "2"], "priority is '2', but it has to be an integer, lower first"),
        ([1, True], "priority is True"),
        ([0, 2**62], "priority is 4611686018427387904"),
    ],
)
def test_wrong_priorities_are_told_before_anything_runs(priority: Any, message: str) -> None:
    with LLM(counting(), scheduling_policy="priority") as llm:
        with pytest.raises(PromptError, match=message):
            llm.generate([[1], [2]], priority=priority, use_tqdm=False)
        assert not llm._loaded.engine.busy


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scheduling_policy": "priorty"}, "it has to be fcfs, priority; did you mean 'priority'"),
        ({"scheduling_policy": 1}, "scheduling_policy is 1"),
        (
            {"gpu_memory_utilization": 0.5},
            "is for a CUDA device, and the model is on cpu; kv_cache",
        ),
        ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization is 0, but .* number in \(0, 1\]"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization is True"),
        (
            {"gpu_memory_utilization": 0.5, "kv_cache_memory": 10**6},
            "kv_cache_memory and gpu_memory_utilization both size the key-value cache; give one",
        ),
        ({"max_logprobs": -2}, "max_logprobs is -2, but it has to be an integer from -1 up"),
        ({"max_logprobs": 1.0}, "max_logprobs is 1.0"),
        (
            {"per_request_spec_decode_metrics": "sumary"},
            "it has to be detailed, summary; did you mean 'summary'",
        ),
    ],
    ids=str,
)
def test_settings_of_the_scheduler_that_make_no_sense_are_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(counting(), **values)


def test_no_more_logprobs_are_given_than_the_llm_allows() -> None:
    with LLM(counting()) as llm:
        for values, said in (
            ({"logprobs": 21}, "the prompt: logprobs asks for 21, but max_logprobs is 20;"),
            ({"prompt_logprobs": 21}, "prompt_logprobs asks for 21"),
            ({"logprobs": -1}, r"asks for the whole vocabulary \(-1\), but max_logprobs is 20"),
        ):
            for use in (llm.generate, llm.stream, llm.add_request):
                with pytest.raises(PromptError, match=said):
                    use([1], greedy(**values))
        (output,) = llm.generate([1], greedy(1, logprobs=20), use_tqdm=False)
    assert len((output.outputs[0].logprobs or [])[0]) == 20
    with LLM(counting(), max_logprobs=-1) as llm:
        for asked in (-1, 40):
            (output,) = llm.generate([1], greedy(1, logprobs=asked), use_tqdm=False)
            assert len((output.outputs[0].logprobs or [])[0]) == 32
    with LLM(counting(), max_logprobs=0) as llm:
        llm.generate([1], greedy(1, logprobs=0, prompt_logprobs=0), use_tqdm=False)
        with pytest.raises(PromptError, match="logprobs asks for 1, but max_logprobs is 0"):
            llm.generate([1], greedy(1, logprobs=1), use_tqdm=False)


@pytest.mark.parametrize("drafted", [False, True])
def test_logprobs_are_those_of_the_model_whatever_edits_the_request_has(drafted: bool) -> None:
    table = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    law = table.log_softmax(dim=-1)
    config = {
        "method": BigramSpeculator, "table": table, "num_speculative_tokens": 3
    } if drafted else None  # fmt: skip
    params = SamplingParams(
        seed=3, max_tokens=9, temperature=0.6, top_k=5, presence_penalty=1.0, logprobs=2,
        prompt_logprobs=1, logit_bias={2: 3.0},
    )  # fmt: skip
    with LLM(toy_target(table), speculative_config=config, max_num_batched_tokens=4) as llm:
        (output,) = llm.generate([[3, 1, 4, 1, 5, 2, 6]], params, use_tqdm=False)
    completion = output.outputs[0]
    whole = [*output.prompt_token_ids, *completion.token_ids]
    entries = [*(output.prompt_logprobs or []), *(completion.logprobs or [])]
    assert len(entries) == len(whole)
    assert entries[0] is None
    total = 0.0
    for number, (before, token) in enumerate(itertools.pairwise(whole), 1):
        entry, row = entries[number], law[before]
        assert entry is not None
        assert next(iter(entry)) == token
        assert entry[token].logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert entry[token].rank == int((row >= row[token]).sum())
        wanted = 1 if number < len(output.prompt_token_ids) else 2
        likeliest = row.topk(wanted).indices.tolist()
        assert list(entry) == list(dict.fromkeys([token, *likeliest]))
        total += float(row[token]) if wanted == 2 else 0.0
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)


# -- text --------------------------------------------------------------------


def test_text_goes_in_and_comes_out(model_folder: Path) -> None:
    with LLM(model_folder) as llm:
        prompts: list[Any] = ["the cat", [4, 5]]
        text, ids = llm.generate(prompts, greedy(6), use_tqdm=False)
        (hidden,) = llm.generate("the cat", greedy(6, detokenize=False), use_tqdm=False)
        assert llm.tokenizer is not None
        expected = llm.tokenizer.decode(text.outputs[0].token_ids, skip_special_tokens=True)
    assert (text.prompt, text.prompt_token_ids) == ("the cat", [4, 5])
    assert ids.prompt is None
    assert text.outputs[0].text == ids.outputs[0].text == expected != ""
    assert hidden.outputs[0].text == ""
    assert hidden.outputs[0].token_ids == text.outputs[0].token_ids


def test_special_tokens_are_left_out_of_the_text_unless_they_are_wanted(
    model_folder: Path,
) -> None:
    ends = counting(17, eos_token_id=1)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    with LLM(ends, tokenizer=tokenizer) as llm:
        without, with_them = llm.generate(
            ["it", "it"], [greedy(9), greedy(9, skip_special_tokens=False)], use_tqdm=False
        )
    assert without.outputs[0].token_ids == [16, 0, 1]
    assert without.outputs[0].text == "."
    # the token that stopped it is never part of the text
    assert with_them.outputs[0].text == ". <unk>"


def test_a_chat_is_a_generation_from_the_template(model_folder: Path) -> None:
    chat = [{"role": "user", "content": "the cat"}]
    with LLM(model_folder) as llm:
        (answer,) = llm.chat(chat, greedy(5), use_tqdm=False)
        (same,) = llm.generate([[2, 4, 5, 3]], greedy(5), use_tqdm=False)
        assert len(llm.chat([chat, chat], greedy(5), use_tqdm=False)) == 2
    assert answer.prompt == "<user> the cat <bot> "
    assert answer.outputs[0].token_ids == same.outputs[0].token_ids


def test_without_a_tokenizer_ids_are_served(model_folder: Path) -> None:
    with LLM(model_folder, skip_tokenizer_init=True) as llm:
        assert llm.tokenizer is None
        (output,) = llm.generate([4, 5], greedy(5), use_tqdm=False)
        with pytest.raises(PromptError, match="needs a tokenizer"):
            llm.generate("the cat", use_tqdm=False)
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) > 0


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    tiny_target().save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"no tokenizer could be loaded.*skip_tokenizer_init=True"
    ):
        LLM(tmp_path)
    with LLM(tmp_path, skip_tokenizer_init=True) as llm:
        assert llm.generate([1], greedy(2), use_tqdm=False)[0].finished


def test_the_ends_of_sequence_of_model_and_tokenizer_count_together(model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)  # its <eos> is 1
    model: Any = counting(17, eos_token_id=6)
    model.generation_config.eos_token_id = [9, 6]
    with LLM(model, tokenizer=tokenizer) as llm:
        assert llm.eos_token_ids == {1, 6, 9}
        assert tokens(llm.generate([[4], [7], [15]], greedy(12), use_tqdm=False)) == [
            [5, 6],
            [8, 9],
            [16, 0, 1],
        ]


def byte_tokenizer() -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=core)


def test_a_streamed_text_never_ends_in_half_a_character() -> None:
    tokenizer = byte_tokenizer()
    wanted = "aé€😀b"
    ids = tokenizer(wanted)["input_ids"]
    assert len(ids) == 11
    table = torch.zeros(256, 256)
    for here, after in itertools.pairwise(ids):
        table[here, after] = 20.0
    with LLM(toy_target(table), tokenizer=tokenizer) as llm:
        texts = [o.outputs[0].text for o in llm.stream([ids[0]], greedy(10))]
        cut = [o.outputs[0].text for o in llm.stream([ids[0]], greedy(3))]
    assert texts == ["", "é", "é", "é", "é€", "é€", "é€", "é€", "é€😀", "é€😀b"]
    assert cut == ["", "é", "é\ufffd"]  # the end of it is told as it is


# -- the end -----------------------------------------------------------------


def test_a_closed_llm_says_so_and_closes_again() -> None:
    llm = LLM(counting(), speculative_config={"method": RecordingSpeculator})
    speculator: Any = llm.speculator
    stream = llm.stream([[1]], greedy())
    next(stream)
    assert not speculator.closed
    llm.close()
    assert speculator.closed
    llm.close()
    for use in (
        lambda: llm.generate([[1]]),
        lambda: llm.stream([[1]]),
        lambda: next(stream),
        lambda: llm.metrics,
        lambda: llm.max_model_len,
        lambda: llm.capabilities,
        lambda: llm.speculator,
        lambda: llm.lossless,
    ):
        with pytest.raises(ConfigError, match="this LLM is closed"):
            use()


def test_closing_aborts_what_runs_and_refuses_what_comes() -> None:
    llm = LLM(counting(), max_num_seqs=1)
    llm.add_request([1], greedy(9))
    llm.add_request([5], greedy(9))
    llm.step()
    engine = llm._loaded.engine
    ended: list[Any] = [*engine.scheduler.running.values(), *engine.scheduler.waiting]
    assert len(ended) == 2
    llm.close()
    assert [s.finish_reason for s in ended] == ["abort", "abort"]
    assert [s.emitted for s in ended] == [[2], []]
    assert not engine.busy
    assert engine.scheduler.pool.free == engine.scheduler.num_blocks
    for use in (
        lambda: llm.step(),
        lambda: llm.add_request([1]),
        lambda: llm.abort_request("0"),
        lambda: llm.chat([{"role": "user", "content": "it"}]),
    ):
        with pytest.raises(ConfigError, match="this LLM is closed"):
            use()
    llm.close()


def test_what_was_loaded_can_be_asked_for() -> None:
    with LLM(counting()) as plain:
        assert (plain.speculator, plain.capabilities, plain.lossless) == (None, None, True)
        assert plain.max_model_len == 256
    with LLM(counting(), speculative_config={"method": Successor}) as llm:
        assert isinstance(llm.speculator, Successor)
        assert llm.capabilities == Capabilities()


def test_one_model_serves_several_llms_one_after_another_and_at_once() -> None:
    model = counting()
    with LLM(model) as one, LLM(model, speculative_config={"method": Successor}) as two:
        for llm in (one, two, one):
            assert tokens(llm.generate([[1]], greedy(), use_tqdm=False)) == [count(2, 8)]


def test_parameters_can_be_shared_and_copied() -> None:
    params = greedy()
    copy: SamplingParams = attrs.evolve(params)
    assert copy == params


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"revision": "main"}, "revision says how to load a model, but the model was passed in"),
        ({"hf_token": "x"}, "hf_token says how to load a model"),
        ({"trust_remote_code": True}, "trust_remote_code says how to load a model"),
        ({"trust_remote_code": "false"}, "trust_remote_code is 'false', but it has to be True or"),
        ({"skip_tokenizer_init": "no"}, "skip_tokenizer_init is 'no', but it has to be True or"),
        ({"tokenizer_revision": "main"}, "tokenizer_revision says how to load a tokenizer, but"),
        ({"tokenizer_kwargs": {}}, "tokenizer_kwargs says how to load a tokenizer, but none is"),
        (
            {"skip_tokenizer_init": True, "tokenizer_kwargs": {}},
            "skip_tokenizer_init=True contradicts giving tokenizer_kwargs",
        ),
    ],
)
def test_what_would_be_ignored_for_a_module_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(counting(), **settings)


def test_a_folder_has_no_revisions(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder and has none"):
        LLM(model_folder, revision="main")
