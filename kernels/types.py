"""What the ops take and return. Letters are those of the README: B requests, R rows, K drafts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Sampling(NamedTuple):
    """How every request samples, by slot. Greedy requests ignore everything but temperature.

    stream: int64 [slots], the request's random stream, see `make_stream`.
    temperature: float32 [slots]; below 1e-5 the request is greedy.
    top_k: int64 [slots]; 0 is off.
    top_p: float32 [slots]; 1 is off.
    min_p: float32 [slots]; 0 is off.
    """

    stream: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


class Edits(NamedTuple):
    """What every request wants done to its logits before they are sampled, by slot.

    Columns may be any number, none included; a slot uses those that it needs. Ids outside [0, V)
    are ignored.

    repetition_penalty: float32 [slots], above 0; 1 is off. Logits of ids in the prompt or the
        output are divided by it if they are positive, else multiplied.
    presence_penalty: float32 [slots]; 0 is off. Taken off once for ids in the output.
    frequency_penalty: float32 [slots]; 0 is off. Taken off for each time that an id is in the
        output.
    bias_ids: int64 [slots, E], distinct within a slot; -1 is unused. bias: float32 [slots, E],
        added to them.
    allowed_ids: int64 [slots, A]; -1 is unused. All others are excluded; a slot without any allows
        all.
    stop_ids: int64 [slots, S]; -1 is unused. Excluded from rows that predict a position below
        min_length: int64 [slots], prompt included.
    bad_words: int64 [slots, W, L], each word at the end of its columns, -1 before it. Its last
        token is excluded wherever the output ends in the others; a word of one token always.
    """

    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    bias_ids: Tensor
    bias: Tensor
    allowed_ids: Tensor
    stop_ids: Tensor
    min_length: Tensor
    bad_words: Tensor


class EditInputs(NamedTuple):
    """What `verify` and `sample` edit logits by, as `edit_logits` takes it.

    history: int64 [slots, T]; prompt_length: int64 [slots]; edits: by slot.
    grammar: int32 [masks, V / 32 rounded up], or None. Of a row's mask, bit x % 32 of word x // 32
        says whether id x is allowed. It comes before all other edits.
    grammar_start: int64 [B], the mask of a request's first row, which those of its other rows
        follow; -1 for none. By default the mask of a row has the row's own index.
    """

    history: Tensor
    prompt_length: Tensor
    edits: Edits
    grammar: Tensor | None = None
    grammar_start: Tensor | None = None


class DenseQ(NamedTuple):
    """The law every draft was drawn from, in full.

    logits: any float dtype [slots, K or more, Vd], as the drafter drew from them, *before*
        temperature. Vd may differ from the target's V: the law is the softmax over the ids that
        both have, and 0 elsewhere.
    lse: float32 [slots, K or more], or None: the log-sum-exp of those ids' logits over temperature,
        as `sample_draft` writes it. With it no row of q is read for its sum. -inf, +inf and NaN
        make the row no law: the draft counts as certain, which is exact for any draft.
    """

    logits: Tensor
    lse: Tensor | None = None


class SparseQ(NamedTuple):
    """The law of drafts that were drawn among C candidates.

    ids: int64 [slots, K or more, C], target ids, distinct within a row; -1 is no candidate.
    logits: any float dtype [slots, K or more, C], before temperature.
    """

    ids: Tensor
    logits: Tensor


class Verified(NamedTuple):
    """What a step emits.

    tokens: int64 [B, K + 1], the accepted drafts and then one token of the target; -1 past `count`.
    count: int64 [B], 1 to K + 1, and 0 for padding and for requests without rows.
    rows: int64 [B, K + 1], the row of `logits` each token was decided on; -1 past `count`.
    empty: bool [B, K + 1], of calls with edits: whether that row excludes every id, so that the
        token means nothing; False past `count`. None without edits.
    """

    tokens: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    rows: Tensor
    empty: Tensor | None = None
