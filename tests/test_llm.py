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
