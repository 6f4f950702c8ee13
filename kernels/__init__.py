"""Verification and sampling for speculative decoding: functions of tensors, with keyed randomness.

Nothing here knows of models, requests or plugins. The functions below check their arguments (shape,
dtype, device; no values, so no device synchronisation) and call the implementation for the device.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor

from specdec_kernels import ops, reference
from specdec_kernels._checks import Arguments, device_of, write, write_verified
from specdec_kernels.candidates import DraftVocabulary, draft_vocabulary
from specdec_kernels.edits import edit_logits, empty_rows
from specdec_kernels.logprobs import TokenLogprobs, token_logprobs
from specdec_kernels.noise import make_stream
from specdec_kernels.types import DenseQ, EditInputs, Edits, Sampling, SparseQ, Verified

__all__ = [
    "DenseQ",
    "DraftVocabulary",
    "EditInputs",
    "Edits",
    "Sampling",
    "SparseQ",
    "TokenLogprobs",
    "Verified",
    "draft_vocabulary",
    "edit_logits",
    "empty_rows",
    "make_stream",
    "process_logits",
    "sample",
    "sample_draft",
    "token_logprobs",
    "verify",
]

METHODS = ("coupled", "standard", "block", "synthetic")
DRAWS = ("greedy", "coupled", "independent")

# Device types with an implementation of their own; the reference serves all others.
_IMPLEMENTATIONS = {"cuda": "specdec_kernels.gpu.verification"}


def _implementation(device: torch.device) -> ModuleType:
    name = _IMPLEMENTATIONS.get(device.type)
    return reference if name is None else importlib.import_module(name)


def verify(
    logits: Tensor,
    logits_start: Tensor,
    draft_tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    sampling: Sampling,
    *,
    method: str,
    q: DenseQ | SparseQ | None = None,
    acceptance_rates: Tensor | None = None,
    truncate: bool = True,
    edits: EditInputs | None = None,
    out: Verified | None = None,
) -> Verified:
    """Accept a prefix of every request's drafts and add one token of the target's own.

    Shapes: B requests, R rows of logits, at most K drafts each, V ids.

    logits: any float dtype [R, V]. Row i of a request is what the target says after i drafts.
    logits_start: int64 [B + 1]. Rows logits_start[b] to logits_start[b + 1] belong to request b. Of
        n rows, n - 1 test a draft each and the last one continues them; K + 1 are used at most.
    draft_tokens: int64 [B, K]. -1, or any id outside [0, V), is no draft: the request's drafts end
        before it, and the row that would have tested it gives the next token unconditionally.
    positions: int64 [R], the absolute index in the sequence of the token that the row predicts.
    slots: int64 [B], where `sampling` and `q` keep the request; -1 is padding (count 0).
    method: how drafts of sampled requests are judged. Greedy requests keep drafts that equal the
        argmax (lowest id first) under every method but "synthetic".
        "coupled": draw the target's token for each row with keyed noise, keep drafts while they
            equal it. The tokens are those of `sample`, whatever was drafted, and q has no say.
        "standard": keep d with probability min(1, p(d) / q(d)), else draw from max(p - q, 0)
            (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318).
        "block": judge blocks by their joint ratio; keeps at least as many drafts in expectation
            (Sun et al. 2024, "Block verification", arXiv:2403.10444).
        "synthetic": keep draft i with probability acceptance_rates[i]: for load tests, NOT
            lossless.
    q: the law the drafts were drawn from; None when they are deterministic or the law is unknown.
        Drafts drawn with `how="coupled"` have no law that "standard" or "block" may be given.
    acceptance_rates: float32 [K or more], for "synthetic": given that all drafts before were kept.
    truncate: False leaves out min-p, top-k and top-p whatever `sampling` holds: on a GPU a batch
        that is known not to use them then saves their launches.
    edits: judge the rows as `edit_logits` makes them, and leave `logits` as they are: on a GPU
        without an edited copy of them (float64 aside). All rows then count as float32.
    out: tensors that the result is written into and that are returned, for callers that need it in
        the same place every time; with `empty` if there are edits. None makes new ones.

    Every token emitted but the accepted drafts is drawn from its row; `Verified.rows` names the
    rows. A row that excludes all ids (-inf or NaN) gives id 0; with edits, `Verified.empty` says
    which did.

    Example: two greedy drafts over V = 3; the second is wrong and is replaced.

    >>> logits = torch.tensor([[0.0, 9.0, 0.0], [9.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
    >>> off = torch.zeros(1)
    >>> greedy = Sampling(torch.tensor([7]), off, torch.tensor([0]), torch.ones(1), off)
    >>> out = verify(
    ...     logits,
    ...     logits_start=torch.tensor([0, 3]),
    ...     draft_tokens=torch.tensor([[1, 2]]),
    ...     positions=torch.tensor([5, 6, 7]),
    ...     slots=torch.tensor([0]),
    ...     sampling=greedy,
    ...     method="coupled",
    ... )
    >>> out.tokens, out.count, out.rows
    (tensor([[ 1,  0, -1]]), tensor([2]), tensor([[ 0,  1, -1]]))
    """
    if torch.compiler.is_compiling():
        verified = ops.verify(
            logits,
            logits_start,
            draft_tokens,
            positions,
            slots,
            sampling,
            method=method,
            q=q,
            acceptance_rates=acceptance_rates,
            truncate=truncate,
            edits=edits,
        )
        return verified if out is None else write_verified(verified, out)
    check = Arguments("verify", device_of("verify", "logits", logits))
    check.one_of("method", method, METHODS)
    check.logits("logits", logits, "R V")
    check.starts("logits_start", logits_start)
    check.tensor("draft_tokens", draft_tokens, "B K", torch.int64)
    check.tensor("positions", positions, "R", torch.int64)
    check.tensor("slots", slots, "B", torch.int64)
    check.sampling(sampling)
    check.q(q)
    check.rates(method, acceptance_rates)
    if edits is not None:
        check.edit_inputs(edits, "B")
    verified = _implementation(logits.device).verify(
        logits,
        logits_start,
        draft_tokens,
        positions,
        slots,
        sampling,
        method=method,
        q=q,
        acceptance_rates=acceptance_rates,
        truncate=truncate,
        edits=edits,
    )
    return verified if out is None else write_verified(verified, out)


def sample(
    logits: Tensor,
    positions: Tensor,
    slots: Tensor,
    sampling: Sampling,
    *,
    truncate: bool = True,
    edits: EditInputs | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Plain decoding: one token per row.

    logits: any float dtype [R, V]; positions: int64 [R], the index of the token drawn;
    slots: int64 [R], -1 for padding; truncate, edits, out: as for `verify`, each row a request.
    Returns int64 [R], -1 for padding.
    Bit for bit the token that `verify` emits for a request of this one row without drafts, under
    any lossless method.

    >>> sampling = Sampling(
    ...     stream=torch.tensor([make_stream(seed=1, index=0)]),
    ...     temperature=torch.tensor([0.8]),
    ...     top_k=torch.tensor([1]),
    ...     top_p=torch.ones(1),
    ...     min_p=torch.zeros(1),
    ... )
    >>> sample(torch.tensor([[0.0, 3.0, 1.0]]), torch.tensor([4]), torch.tensor([0]), sampling)
    tensor([1])
    """
    if torch.compiler.is_compiling():
        tokens = ops.sample(logits, positions, slots, sampling, truncate=truncate, edits=edits)
        return tokens if out is None else write("sample", tokens, out)
    check = Arguments("sample", device_of("sample", "logits", logits))
    check.logits("logits", logits, "R V")
    check.tensor("positions", positions, "R", torch.int64)
    check.tensor("slots", slots, "R", torch.int64)
    check.sampling(sampling)
    if edits is not None:
        check.edit_inputs(edits, "R")
    tokens = _implementation(logits.device).sample(
        logits, positions, slots, sampling, truncate=truncate, edits=edits
    )
    return tokens if out is None else write("sample", tokens, out)


def sample_draft(
    logits: Tensor,
    positions: Tensor,
    slots: Tensor,
    sampling: Sampling,
    *,
    how: str,
    column: int,
    vocab_map: Tensor | DraftVocabulary | None = None,
    vocab_size: int | None = None,
    candidates: SparseQ | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """One draft per request, from the drafter's logits. Only temperature applies to drafts.

    logits: any float dtype [B, Vd]; positions: int64 [B], the index of the token drafted; slots:
    int64 [B], -1 for padding. Returns int64 [B], ids of the target; -1 for padding.

    how: "greedy": the argmax; no noise, and q=None in `verify`.
        "coupled": with the noise that the target will draw this position with, so that the two
            agree as often as their logits allow. Legal only with method "coupled".
        "independent": with noise of its own. Keep the logits as DenseQ, or a candidate set as
            SparseQ, for "standard" and "block".
        Greedy requests take the argmax (of the drafter's ids the lowest) however they are asked.
    column: which draft of its step this is; independent noise differs between columns, because a
        position may be drafted again in a later step.
    vocab_map: int64 [Vd], distinct target ids of the drafter's ids; needs vocab_size. Or what
        `draft_vocabulary` made of them, once: faster on a GPU.
    vocab_size: the target's V. Without a map, ids from V on are never drafted.
    candidates: draw among the C likeliest ids alone (of equal ones the drafter's lowest), and write
        them at [slot, column], likeliest first, -1 for none; logits before temperature, in the
        dtype of `logits`.
    lse: float32 [slots, column + 1 or more], written at [slot, column]: the log-sum-exp of the
        logits over temperature that the draft was drawn from. Greedy requests write neither.

    >>> off = torch.zeros(1)
    >>> greedy = Sampling(torch.tensor([7]), off, torch.tensor([0]), torch.ones(1), off)
    >>> sample_draft(
    ...     torch.tensor([[0.1, 0.7]]),
    ...     torch.tensor([5]),
    ...     torch.tensor([0]),
    ...     greedy,
    ...     how="greedy",
    ...     column=0,
    ...     vocab_map=torch.tensor([10, 42]),
    ...     vocab_size=50,
    ... )
    tensor([42])
    """
    if torch.compiler.is_compiling():
        return ops.sample_draft(
            logits,
            positions,
            slots,
            sampling,
            how=how,
            column=column,
            vocab_map=vocab_map,
            vocab_size=vocab_size,
            candidates=candidates,
            lse=lse,
        )
    check = Arguments("sample_draft", device_of("sample_draft", "logits", logits))
    check.one_of("how", how, DRAWS)
    check.logits("logits", logits, "B Vd")
    check.tensor("positions", positions, "B", torch.int64)
    check.tensor("slots", slots, "B", torch.int64)
    check.sampling(sampling)
    if isinstance(vocab_map, DraftVocabulary):
        check.tensor("vocab_map.targets", vocab_map.targets, "Vd", torch.int64)
        if vocab_size not in (None, vocab_map.vocab_size):
            raise ValueError(
                f"sample_draft: vocab_size is {vocab_size}; vocab_map was made for "
                f"{vocab_map.vocab_size}"
            )
    elif vocab_map is not None:
        check.tensor("vocab_map", vocab_map, "Vd", torch.int64)
        if vocab_size is None:
            raise ValueError("sample_draft: vocab_map needs vocab_size, the target's vocabulary")
    check.written(how, column, candidates, lse, logits.dtype)
    if vocab_size is not None and vocab_size < 1:
        raise ValueError(f"sample_draft: vocab_size is {vocab_size}; expected 1 or more")
    tokens: Tensor = _implementation(logits.device).sample_draft(
        logits,
        positions,
        slots,
        sampling,
        how=how,
        column=column,
        vocab_map=vocab_map,
        vocab_size=vocab_size,
        candidates=candidates,
        lse=lse,
    )
    return tokens


def process_logits(logits: Tensor, slots: Tensor, sampling: Sampling) -> Tensor:
    """The law that sampled rows are drawn from: new float32 [R, V] log-weights, -inf for excluded.

    logits: any float dtype [R, V]; slots: int64 [R], padding counts as slot 0.

    In this order: divide by temperature; min-p (keep what is at least min_p as likely as the
    likeliest id); top-k; top-p (of the law that is left, the shortest sorted prefix with a mass of
    at least top_p, one id at least). Each is one cut per row that keeps *every* id with a value at
    or above it: ids that tie with the last one kept are kept. NaN is excluded. Greedy rows are
    only converted.

    >>> sampling = Sampling(
    ...     stream=torch.tensor([7]),
    ...     temperature=torch.tensor([0.5]),
    ...     top_k=torch.tensor([2]),
    ...     top_p=torch.ones(1),
    ...     min_p=torch.zeros(1),
    ... )
    >>> process_logits(torch.tensor([[0.0, 3.0, 1.0, 1.0]]), torch.tensor([0]), sampling)
    tensor([[-inf, 6., 2., 2.]])
    """
    if torch.compiler.is_compiling():
        return ops.process_logits(logits, slots, sampling)
    check = Arguments("process_logits", device_of("process_logits", "logits", logits))
    check.logits("logits", logits, "R V")
    check.tensor("slots", slots, "R", torch.int64)
    check.sampling(sampling)
    processed: Tensor = _implementation(logits.device).process_logits(logits, slots, sampling)
    return processed
