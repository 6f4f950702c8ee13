"""Checks that a speculator leaves the output of its target as it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.config import SpeculativeConfig
from specdec.llm import LLM
from specdec.sampling_params import SamplingParams
from specdec.testing.targets import tiny_target, toy_target

Config = Mapping[str, Any] | str


def emitted(
    model: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    speculative_config: Config | None = None,
    **llm: Any,
) -> list[list[list[int]]]:
    """Token ids that are emitted for each prompt and completion.

    Raises:
        AssertionError: a request failed.
    """
    with LLM(model, speculative_config=speculative_config, **llm) as engine:
        return _tokens(engine, prompts, params)


def _tokens(
    engine: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
) -> list[list[list[int]]]:
    outputs = engine.generate(list(prompts), params, use_tqdm=False)
    for output in outputs:
        assert output.error is None, output.error
    return [[c.token_ids for c in o.outputs] for o in outputs]


def assert_same_tokens(
    model: Any,
    speculative_config: Config,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    **llm: Any,
) -> None:
    """Fail unless the tokens are those of plain decoding, request by request."""
    plain = emitted(model, prompts, params, **llm)
    ours = emitted(model, prompts, params, speculative_config, **llm)
    for number, (expected, actual) in enumerate(zip(plain, ours, strict=True)):
        assert actual == expected, (
            f"prompt {number} with {speculative_config!r}: {actual} instead of {expected}"
        )


def assert_lossless(
    speculative_config: Config,
    *,
    model: Any = None,
    prompts: Sequence[Sequence[int]] | None = None,
    drafts: Iterable[int] = (1, 3, 6),
    max_tokens: int = 24,
    must_draft: bool = True,
    **llm: Any,
) -> None:
    """Fail unless greedy and seeded output equal plain decoding's, in every way they are batched.

    speculative_config: what a user would write; `num_speculative_tokens` is set here.
    model: a transformers model in float64; by default a tiny random Llama.
    drafts: numbers of draft tokens to try; those beyond the speculator's most are skipped.
    must_draft: fail as well if it never drafted anything: then nothing was shown.

    Runs the prompts alone and together, with mixed temperatures and lengths, with prompts split
    into chunks, with fewer slots than requests, with a stop token inside the drafts, and with rows
    that are padding.
    """
    model = tiny_target() if model is None else model
    vocab = model.config.get_text_config().vocab_size
    prompts = _prompts(vocab) if prompts is None else prompts
    parsed = SpeculativeConfig.parse(speculative_config)
    assert parsed is not None
    mixed = [_params(i, max_tokens) for i in range(len(prompts))]
    plain = emitted(model, prompts, mixed, **llm)
    # a token that plain decoding meets half-way: as a stop token it falls inside a block
    met = [ids[0][min(len(ids[0]) - 1, max_tokens // 2)] for ids in plain]
    stopping = [
        SamplingParams(
            temperature=p.temperature, seed=p.seed, max_tokens=max_tokens, stop_token_ids=[t]
        )
        for p, t in zip(mixed, met, strict=True)
    ]
    stopped = emitted(model, prompts, stopping, **llm)
    ways: list[tuple[str, Sequence[SamplingParams], list[list[list[int]]], dict[str, Any]]] = [
        ("together", mixed, plain, {}),
        ("prompts in chunks of 5", mixed, plain, {"max_num_batched_tokens": 5}),
        ("two at a time", mixed, plain, {"max_num_seqs": 2}),
        ("with stop tokens", stopping, stopped, {}),
    ]
    tried = [k for k in drafts if k <= _most_drafts(model, speculative_config, **llm)]
    assert tried, f"the speculator can draft none of the numbers {list(drafts)} of tokens"
    for k in tried:
        config = _with(speculative_config, k)
        drafted = 0
        for what, params, expected, setting in ways:
            with LLM(model, speculative_config=config, **{**llm, **setting}) as engine:
                actual = _tokens(engine, prompts, params)
                drafted += engine.metrics.num_draft_tokens
            assert actual == expected, f"{what}, k={k}: {actual} instead of {expected}"
        with LLM(model, speculative_config=config, **llm) as engine:
            engine._loaded.engine.target.least_rows = 8
            actual = _tokens(engine, prompts, mixed)
        assert actual == plain, f"with padding rows, k={k}: {actual} instead of {plain}"
        assert drafted or not must_draft, (
            f"k={k}: nothing was ever drafted, so nothing was shown; give prompts for which the "
            "speculator drafts, or must_draft=False"
        )
        alone = [
            emitted(model, [p], s, config, **llm)[0]
            for p, s in zip(prompts[:3], mixed[:3], strict=True)
        ]
        assert alone == plain[:3], f"alone, k={k}: {alone} instead of {plain[:3]}"


def assert_law(
    speculative_config: Config,
    *,
    table: Tensor | None = None,
    prompt: Sequence[int] = (0, 1, 2, 0, 1, 2, 0, 1),
    tokens: int = 4,
    samples: int = 6000,
    temperature: float = 1.0,
) -> None:
    """Fail unless sequences come out with the target's own probabilities (chi-square).

    table: [vocab, vocab] logits of a toy target, few tokens; by default 3 of them.
    tokens: emitted per sequence; use more than the number of drafts plus one, so that a random
        number used in two steps shows. samples: sequences drawn.

    For rules whose tokens depend on the drafts (`standard`, `block`), where equality is no test.
    """
    table = default_table() if table is None else table
    model = toy_target(table, max_model_len=len(prompt) + tokens + 1)
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens)
        for seed in range(samples)
    ]
    drawn = emitted(model, [list(prompt)] * samples, params, speculative_config, max_num_seqs=256)
    statistic, freedom = chi_square(
        [ids[0] for ids in drawn], table.double() / temperature, prompt[-1]
    )
    # mean `freedom`, variance twice that: six deviations are far beyond chance
    limit = freedom + 6 * (2 * freedom) ** 0.5
    assert statistic < limit, (
        f"{speculative_config!r}: chi-square {statistic:.0f} with {freedom} degrees of freedom; "
        f"the target's law gives less than {limit:.0f}"
    )


def default_table() -> Tensor:
    """Logits of three tokens, none of them rare."""
    return torch.tensor([[0.5, 1.2, -0.4], [1.0, -0.6, 0.4], [-0.3, 0.6, 0.9]])


def chi_square(sequences: Sequence[Sequence[int]], logits: Tensor, last: int) -> tuple[float, int]:
    """Pearson's statistic of whole sequences against a bigram law, and its degrees of freedom."""
    law = logits.softmax(dim=-1)
    vocab, length = law.shape[0], len(sequences[0])
    cells = torch.ones(1, dtype=torch.float64)
    ends = torch.tensor([last])
    for _ in range(length):
        cells = (cells[:, None] * law[ends]).flatten()
        ends = torch.arange(vocab).repeat(len(ends))
    index = torch.zeros(len(sequences), dtype=torch.int64)
    for column in torch.tensor(sequences).T:
        index = index * vocab + column
    counts = torch.bincount(index, minlength=len(cells)).double()
    expected = cells * len(sequences)
    # cells too rare for the approximation are counted as one
    common = expected >= 5
    counts = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    kept = expected > 0
    statistic = float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    return statistic, int(kept.sum()) - 1


def _prompts(vocab: int) -> list[list[int]]:
    """Prompts of several lengths, some of which repeat themselves."""
    generator = torch.Generator().manual_seed(0)

    def random(length: int) -> list[int]:
        return torch.randint(0, vocab, (length,), generator=generator).tolist()

    phrase = random(4)
    return [random(1), phrase * 3 + phrase[:2], random(17), [vocab - 1] * 7, random(6) + phrase]


def _params(number: int, max_tokens: int) -> SamplingParams:
    """Greedy and seeded parameters of every kind, in turn."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.2, "top_p": 0.9},
        {"temperature": 0.7, "min_p": 0.05},
    ]
    seed, length = 100 + number, max_tokens - number
    return SamplingParams(seed=seed, max_tokens=length, **kinds[number % len(kinds)])


def _with(speculative_config: Config, drafts: int) -> dict[str, Any]:
    """The configuration as a dict, with another number of drafts."""
    from specdec import config_text

    if isinstance(speculative_config, str):
        speculative_config = config_text.parse(speculative_config)
    return {**speculative_config, "num_speculative_tokens": drafts}


def _most_drafts(model: Any, speculative_config: Config, **llm: Any) -> float:
    """The most tokens that the speculator drafts in a step."""
    with LLM(model, speculative_config=_with(speculative_config, 1), **llm) as engine:
        assert engine.capabilities is not None
        most = engine.capabilities.max_drafts
    return float("inf") if most is None else most
