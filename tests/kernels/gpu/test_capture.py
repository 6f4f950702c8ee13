"""Captured in a CUDA graph and replayed on other inputs; no call waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import (
    DenseQ,
    EditInputs,
    Edits,
    SparseQ,
    Verified,
    draft_vocabulary,
    sample,
    sample_draft,
    token_logprobs,
    verify,
)

pytestmark = pytest.mark.gpu
VOCAB, K, B = 5000, 3, 4
Make = Callable[..., Any]
Given = dict[str, Tensor]


def inputs(device: torch.device, seed: int) -> Given:
    """What changes from step to step."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = B * (K + 1)
    made: dict[str, Any] = {"device": device, "generator": generator}
    logits = torch.randn(rows, VOCAB, **made).mul(3).bfloat16()
    drafts = logits.view(B, K + 1, VOCAB)[:, :K].argmax(-1)
    ids = torch.randint(VOCAB, (B, K, 1), **made) + torch.arange(8, device=device)
    return {
        "logits": logits,
        "drafts": drafts.where(torch.rand(B, K, **made) < 0.8, -1),
        "positions": torch.arange(rows, device=device) + seed,
        "q": torch.randn(B, K, VOCAB, **made).bfloat16(),
        "ids": ids % VOCAB,
        "tokens": torch.randint(VOCAB, (rows,), **made),
    }


def operations(given: Given, make_sampling: Make) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    device = given["logits"].device
    start = torch.arange(B + 1, device=device) * (K + 1)
    slots, rows = (
        torch.arange(B, device=device),
        torch.arange(B * (K + 1), device=device) // (K + 1),
    )
    sampling = make_sampling(B, temperature=[0.0, 0.7, 1.0, 1.3], top_p=0.9, top_k=40, min_p=0.01)
    rates = torch.full((K,), 0.7, device=device)
    targets = torch.arange(VOCAB, device=device).flip(0).contiguous()
    table = draft_vocabulary(targets, VOCAB)
    logits, drafts, positions = given["logits"], given["drafts"], given["positions"]
    none = torch.empty(B, 0, dtype=torch.int64, device=device)
    history = torch.arange(B * 9, device=device).view(B, 9)
    inputs = EditInputs(
        history,
        torch.ones(B, dtype=torch.int64, device=device),
        Edits(
            repetition_penalty=torch.full((B,), 1.3, device=device),
            presence_penalty=torch.zeros(B, device=device),
            frequency_penalty=torch.ones(B, device=device),
            bias_ids=none,
            bias=torch.empty(B, 0, device=device),
            allowed_ids=none,
            stop_ids=none,
            min_length=torch.zeros(B, dtype=torch.int64, device=device),
            bad_words=torch.full((B, 1, 1), 7, device=device),
        ),
    )
    laws = {
        "no": None,
        "dense": DenseQ(given["q"]),
        "sparse": SparseQ(given["ids"], given["q"][..., :8].contiguous()),
    }

    def judge(method: str, law: str, truncate: bool) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: tuple(
            verify(
                logits, start, drafts, positions, slots, sampling, method=method, q=laws[law],
                acceptance_rates=rates if method == "synthetic" else None, truncate=truncate,
            )[:3]
        )  # fmt: skip

    def edited() -> tuple[Tensor, ...]:
        found = verify(
            logits, start, drafts, positions, slots, sampling, method="coupled", edits=inputs
        )
        assert found.empty is not None
        return found.tokens, found.count, found.rows, found.empty

    def draft() -> tuple[Tensor, ...]:
        lse = torch.zeros(B, K, device=device)
        kept = torch.zeros(B, K, 8, dtype=logits.dtype, device=device)
        candidates = SparseQ(torch.zeros(B, K, 8, dtype=torch.int64, device=device), kept)
        where = logits[:B], positions[:B], slots, sampling
        one = sample_draft(
            *where, how="independent", column=1, candidates=candidates, lse=lse, vocab_size=VOCAB
        )
        two = sample_draft(*where, how="coupled", column=0, vocab_map=table)
        return one, two, lse, *candidates

    found = {
        f"{method} {law} {truncate}": judge(method, law, truncate)
        for method in ("coupled", "standard", "block", "synthetic")
        for law in (("no",) if method in ("coupled", "synthetic") else ("no", "dense", "sparse"))
        for truncate in (True, False)
    }
    found["edits"] = edited
    found["sample"] = lambda: (sample(logits, positions, rows, sampling),)
    found["draft"] = draft
    found["logprobs"] = lambda: tuple(token_logprobs(logits, given["tokens"], 5))
    return found


def test_graphs_replay_on_other_inputs(make_sampling: Make, device: torch.device) -> None:
    given = inputs(device, 0)
    for name, run in operations(given, make_sampling).items():
        for key, value in inputs(device, 0).items():
            given[key].copy_(value)
        run()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for key, value in inputs(device, 1).items():
            given[key].copy_(value)
        graph.replay()
        expected = run()
        for got, want in zip(captured, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=name)


def test_graphs_write_results_where_asked(make_sampling: Make, device: torch.device) -> None:
    given, sampling = inputs(device, 0), make_sampling(B, temperature=[0.0, 0.7, 1.0, 1.3])
    start, slots = torch.arange(B + 1, device=device) * (K + 1), torch.arange(B, device=device)
    rows = slots.repeat_interleave(K + 1)
    tokens = torch.full((B, K + 1), 99, device=device)
    out, drawn = Verified(tokens, tokens[:, 0].clone(), tokens.clone()), rows.clone()

    def run(out: Verified | None, drawn: Tensor | None) -> tuple[Tensor, ...]:
        logits, drafts, positions = given["logits"], given["drafts"], given["positions"]
        chains = logits, start, drafts, positions, slots, sampling
        found = verify(*chains, method="standard", q=DenseQ(given["q"]), out=out)
        return *found[:3], sample(logits, positions, rows, sampling, out=drawn)

    run(out, drawn)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(out, drawn)
    for key, value in inputs(device, 1).items():
        given[key].copy_(value)
    graph.replay()
    assert all(map(torch.equal, (*out[:3], drawn), run(None, None)))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_no_call_waits_for_the_device(make_sampling: Make, device: torch.device) -> None:
    runs = operations(inputs(device, 2), make_sampling)
    for run in runs.values():
        run()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for run in runs.values():
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
