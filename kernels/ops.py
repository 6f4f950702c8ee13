"""The functions of this package as operators of torch, for code that `torch.compile` traces.

The public functions come here while they are traced, and only then: a call through torch's operator
machinery takes longer than one of theirs. An operator takes tensors, numbers and text, so tuples
are taken apart here and put together again inside; when the traced code runs, the operator calls
the public function, which checks its arguments then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec_kernels.types import DenseQ, EditInputs, Edits, Sampling, SparseQ, Verified

if TYPE_CHECKING:
    from specdec_kernels.candidates import DraftVocabulary

_SAMPLING = "Tensor[] sampling"  # the fields of `Sampling`
# history, prompt_length and the fields of `Edits`; none without edits
_EDITS = "Tensor[] edits, Tensor? grammar, Tensor? grammar_start"


def verify(
    logits: Tensor,
    logits_start: Tensor,
    draft_tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    sampling: Sampling,
    *,
    method: str,
    q: DenseQ | SparseQ | None,
    acceptance_rates: Tensor | None,
    truncate: bool,
    edits: EditInputs | None,
) -> Verified:
    """`specdec_kernels.verify` as an operator."""
    if not (q is None or isinstance(q, DenseQ | SparseQ)):
        raise TypeError(f"verify: q must be None, DenseQ or SparseQ, not {type(q).__name__}")
    ids = q.ids if isinstance(q, SparseQ) else None
    lse = q.lse if isinstance(q, DenseQ) else None
    law = None if q is None else q.logits
    tokens, count, rows, empty = _verify(
        logits, logits_start, draft_tokens, positions, slots, list(sampling),
        method, law, ids, lse, acceptance_rates, truncate, *_apart(edits),
    )  # fmt: skip
    return Verified(tokens, count, rows, None if edits is None else empty)


def sample(
    logits: Tensor,
    positions: Tensor,
    slots: Tensor,
    sampling: Sampling,
    *,
    truncate: bool,
    edits: EditInputs | None,
) -> Tensor:
    """`specdec_kernels.sample` as an operator."""
    tokens: Tensor = _sample(logits, positions, slots, list(sampling), truncate, *_apart(edits))
    return tokens


def sample_draft(
    logits: Tensor,
    positions: Tensor,
    slots: Tensor,
    sampling: Sampling,
    *,
    how: str,
    column: int,
    vocab_map: Tensor | DraftVocabulary | None,
    vocab_size: int | None,
    candidates: SparseQ | None,
    lse: Tensor | None,
) -> Tensor:
    """`specdec_kernels.sample_draft` as an operator; it writes `candidates` and `lse`."""
    groups = members = None
    targets = vocab_map
    if vocab_map is not None and not isinstance(vocab_map, Tensor):
        if vocab_size not in (None, vocab_map.vocab_size):
            raise ValueError(
                f"sample_draft: vocab_size is {vocab_size}; vocab_map was made for "
                f"{vocab_map.vocab_size}"
            )
        targets, groups, members, vocab_size = vocab_map
    ids, kept = (None, None) if candidates is None else candidates
    tokens: Tensor = _sample_draft(
        logits, positions, slots, list(sampling), how, column,
        targets, groups, members, vocab_size, ids, kept, lse,
    )  # fmt: skip
    return tokens


def process_logits(logits: Tensor, slots: Tensor, sampling: Sampling) -> Tensor:
    """`specdec_kernels.process_logits` as an operator."""
    processed: Tensor = _process_logits(logits, slots, list(sampling))
    return processed


def token_logprobs(logits: Tensor, tokens: Tensor, n: int) -> list[Tensor]:
    """The fields of what `specdec_kernels.token_logprobs` gives, by an operator."""
    return list(_token_logprobs(logits, tokens, n))


def edit_logits(
    logits: Tensor,
    logits_start: Tensor,
    draft_tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    *,
    history: Tensor,
    prompt_length: Tensor,
    edits: Edits,
    grammar: Tensor | None,
    grammar_start: Tensor | None,
) -> Tensor:
    """`specdec_kernels.edit_logits` as an operator; it always gives a new tensor."""
    inputs = EditInputs(history, prompt_length, edits, grammar, grammar_start)
    edited: Tensor = _edit_logits(
        logits, logits_start, draft_tokens, positions, slots, *_apart(inputs)
    )
    return edited


def _apart(edits: EditInputs | None) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    if edits is None:
        return [], None, None
    tensors = [edits.history, edits.prompt_length, *edits.edits]
    return tensors, edits.grammar, edits.grammar_start


def _together(
    edits: Sequence[Tensor], grammar: Tensor | None, grammar_start: Tensor | None
) -> EditInputs | None:
    if not edits:
        return None
    history, prompt_length, *fields = edits
    return EditInputs(history, prompt_length, Edits(*fields), grammar, grammar_start)


@torch.library.custom_op(
    "specdec::verify",
    mutates_args=(),
    schema=(
        "(Tensor logits, Tensor logits_start, Tensor draft_tokens, Tensor positions, Tensor slots, "
        f"{_SAMPLING}, str method, Tensor? q_logits, Tensor? q_ids, Tensor? q_lse, "
        f"Tensor? acceptance_rates, bool truncate, {_EDITS}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _verify(
    logits: Tensor, logits_start: Tensor, draft_tokens: Tensor, positions: Tensor, slots: Tensor,
    sampling: Sequence[Tensor],
    method: str, q_logits: Tensor | None, q_ids: Tensor | None, q_lse: Tensor | None,
    acceptance_rates: Tensor | None, truncate: bool,
    edits: Sequence[Tensor], grammar: Tensor | None, grammar_start: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from specdec_kernels import verify

    q: DenseQ | SparseQ | None = None
    if q_logits is not None:
        q = DenseQ(q_logits, q_lse) if q_ids is None else SparseQ(q_ids, q_logits)
    found = verify(
        logits, logits_start, draft_tokens, positions, slots, Sampling(*sampling),
        method=method, q=q, acceptance_rates=acceptance_rates, truncate=truncate,
        edits=_together(edits, grammar, grammar_start),
    )  # fmt: skip
    empty = found.empty
    if empty is None:
        empty = torch.empty((0, 0), dtype=torch.bool, device=logits.device)
    return found.tokens, found.count, found.rows, empty


@_verify.register_fake
def _(logits: Tensor, logits_start: Tensor, draft_tokens: Tensor, *more: Any) -> tuple[Tensor, ...]:
    requests, drafts = draft_tokens.shape
    tokens = draft_tokens.new_empty((requests, drafts + 1))
    edits = more[-3]
    empty = tokens.new_empty(tokens.shape if edits else (0, 0), dtype=torch.bool)
    return tokens, draft_tokens.new_empty((requests,)), torch.empty_like(tokens), empty


@torch.library.custom_op(
    "specdec::sample",
    mutates_args=(),
    schema=(
        f"(Tensor logits, Tensor positions, Tensor slots, {_SAMPLING}, bool truncate, {_EDITS}) "
        "-> Tensor"
    ),
)
def _sample(
    logits: Tensor, positions: Tensor, slots: Tensor,
    sampling: Sequence[Tensor],
    truncate: bool, edits: Sequence[Tensor], grammar: Tensor | None, grammar_start: Tensor | None,
) -> Tensor:  # fmt: skip
    from specdec_kernels import sample

    inputs = _together(edits, grammar, grammar_start)
    return sample(logits, positions, slots, Sampling(*sampling), truncate=truncate, edits=inputs)


@torch.library.custom_op(
    "specdec::sample_draft",
    mutates_args=("ids", "kept", "lse"),
    schema=(
        f"(Tensor logits, Tensor positions, Tensor slots, {_SAMPLING}, str how, int column, "
        "Tensor? targets, Tensor? groups, Tensor? members, int? vocab_size, "
        "Tensor(a!)? ids, Tensor(b!)? kept, Tensor(c!)? lse) -> Tensor"
    ),
)
def _sample_draft(
    logits: Tensor, positions: Tensor, slots: Tensor,
    sampling: Sequence[Tensor],
    how: str, column: int, targets: Tensor | None, groups: Tensor | None, members: Tensor | None,
    vocab_size: int | None, ids: Tensor | None, kept: Tensor | None, lse: Tensor | None,
) -> Tensor:  # fmt: skip
    from specdec_kernels import DraftVocabulary, sample_draft

    vocab_map: Tensor | DraftVocabulary | None = targets
    if targets is not None and groups is not None and members is not None:
        assert vocab_size is not None
        vocab_map = DraftVocabulary(targets, groups, members, vocab_size)
    return sample_draft(
        logits, positions, slots, Sampling(*sampling), how=how, column=column,
        vocab_map=vocab_map, vocab_size=vocab_size,
        candidates=None if ids is None or kept is None else SparseQ(ids, kept), lse=lse,
    )  # fmt: skip


@_sample.register_fake
@_sample_draft.register_fake
def _(logits: Tensor, positions: Tensor, slots: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(slots, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "specdec::process_logits",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor slots, {_SAMPLING}) -> Tensor",
)
def _process_logits(logits: Tensor, slots: Tensor, sampling: Sequence[Tensor]) -> Tensor:
    from specdec_kernels import process_logits

    return process_logits(logits, slots, Sampling(*sampling))


@_process_logits.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


@torch.library.custom_op(
    "specdec::token_logprobs",
    mutates_args=(),
    schema="(Tensor logits, Tensor tokens, int n) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _token_logprobs(logits: Tensor, tokens: Tensor, n: int) -> tuple[Tensor, ...]:
    from specdec_kernels import token_logprobs

    # a long list of the likeliest is a view of the whole order, and the fake is contiguous
    return tuple(x.contiguous() for x in token_logprobs(logits, tokens, n))


@_token_logprobs.register_fake
def _(logits: Tensor, tokens: Tensor, n: int) -> tuple[Tensor, ...]:
    rows = logits.shape[0]
    ids, values = tokens.new_empty((rows, n)), logits.new_empty((rows, n), dtype=torch.float32)
    logprob, rank = logits.new_empty((rows,), dtype=torch.float32), tokens.new_empty((rows,))
    return logprob, rank, ids, values, torch.empty_like(ids)


@torch.library.custom_op(
    "specdec::edit_logits",
    mutates_args=(),
    schema=(
        "(Tensor logits, Tensor logits_start, Tensor draft_tokens, Tensor positions, Tensor slots, "
        f"{_EDITS}) -> Tensor"
    ),
)
def _edit_logits(
    logits: Tensor, logits_start: Tensor, draft_tokens: Tensor, positions: Tensor, slots: Tensor,
    edits: Sequence[Tensor], grammar: Tensor | None, grammar_start: Tensor | None,
) -> Tensor:  # fmt: skip
    from specdec_kernels.edits import edited_copy

    inputs = _together(edits, grammar, grammar_start)
    assert inputs is not None
    return edited_copy(logits, logits_start, draft_tokens, positions, slots, inputs)


@_edit_logits.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    wide = logits.dtype == torch.float64
    return logits.new_empty(logits.shape, dtype=torch.float64 if wide else torch.float32)
