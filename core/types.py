"""What crosses the boundary between the runner and a speculator.

Letters used in every shape: `batch` requests in the step, `rows` query rows of all of them,
`logit_rows` rows whose logits were computed, `K` draft columns, `slots` places for requests,
`vocab` the target's vocabulary. Ids, positions, counts and indices are int64.

**Padding.** Tensors are as large as the runner's bucket, not as the requests in it. A request
whose `slots` entry is -1 is padding: it owns no rows and its answers are ignored. Rows past
`query_start[-1]` are padding too. The CPU loop pads as the captured one does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import attrs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, device, dtype, nn

    from specdec_kernels import DenseQ, Sampling, SparseQ

Drawn = Literal["deterministic", "coupled", "independent"]
QForm = Literal["dense", "sparse"]

# Why a decode step of a request verified no draft. `StepReport.skipped` holds indices into it.
SKIP_REASONS = ("nothing_proposed", "budget", "context", "policy", "memory", "batch")


@attrs.frozen(eq=False)
class SlotState:
    """What the runner knows of each request, by slot. On the device; read only.

    A slot keeps its request from admission until it finishes or is preempted; entries of free
    slots are stale. There is one place more than requests can have: the last belongs to nobody,
    so that -1, the slot of a padding request, is a harmless index to read from and, in buffers
    of a speculator's own of the same length, to write to.
    """

    history: Tensor  # [slots, max_model_len] the whole prompt, then every emitted token
    length: Tensor  # [slots] tokens of `history` that are known: the prompt's and the emitted
    computed: Tensor  # [slots] tokens the target has processed for good: its valid cache length
    prompt_length: Tensor  # [slots] tokens of the prompt
    stream: Tensor  # [slots] random stream of the request
    temperature: Tensor  # [slots] float32, 0 = greedy
    top_k: Tensor  # [slots] 0 = off
    top_p: Tensor  # [slots] float32, 1 = off
    min_p: Tensor  # [slots] float32, 0 = off
    block_tables: Tensor  # [slots, max_blocks] pages of the target's cache, in order

    @property
    def sampling(self) -> Sampling:
        """How every slot samples, as the functions of `specdec_kernels` take it."""
        from specdec_kernels import Sampling

        return Sampling(
            stream=self.stream,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
        )


@attrs.frozen(eq=False)
class HostStep:
    """Numpy mirrors of a step, for speculators that draft on the host (`host_tokens`).

    Taken once a step, after the commit. Read only; valid during the call that received them.
    """

    slots: NDArray[np.int64]  # [batch], -1 = padding
    k: NDArray[np.int64]  # [batch] drafts wanted now
    history: NDArray[np.int64]  # [slots, max_model_len]
    length: NDArray[np.int64]  # [slots]


@attrs.frozen(eq=False)
class Step:
    """One forward pass of the target over rows of many requests. Read only.

    Request `b` owns rows `query_start[b]:query_start[b + 1]`. A decoding request has one row
    for its last token and one per draft under test; a request in prefill has a chunk of its
    prompt. The fields marked *commit* are meaningful only once the step was verified, that is
    in `extract_hidden_states`, `propose` and `step_finished`.
    """

    tokens: Tensor  # [rows]
    positions: Tensor  # [rows] index of the row's token in its sequence
    query_start: Tensor  # [batch + 1]
    slots: Tensor  # [batch] -1 = padding: as an index, the place that belongs to nobody
    num_drafts: Tensor  # [batch] drafts among the request's rows: its last rows
    is_prefill: Tensor  # [batch] bool: a chunk of the prompt, or of tokens known already
    samples: Tensor  # [batch] bool: a token is drawn after the rows (all but non-final chunks)
    logits_rows: Tensor  # [logit_rows] index into rows; entries past logits_start[-1] are padding
    predicted: Tensor  # [logit_rows] sequence index of the token that the row of logits predicts
    logits_start: Tensor  # [batch + 1] request b owns logits logits_start[b]:logits_start[b + 1]
    valid_rows: Tensor  # [batch] commit: leading rows of the request whose token was committed
    next_token: Tensor  # [batch] commit: token after the last valid row (drawn, or of the prompt)
    k: Tensor  # [batch] commit: drafts wanted next, at most the argument `k` of `propose`
    state: SlotState  # what is known of every slot; `length` is that after the commit
    host: HostStep | None = None  # commit: mirrors, if the capabilities ask for `host_tokens`
    truncates: bool = True  # some request may use top_k, top_p or min_p: the kernels' `truncate`

    @property
    def batch(self) -> int:
        """Requests in the step, padding included."""
        return self.slots.shape[0]


@attrs.frozen(eq=False)
class TargetOutputs:
    """What the target's forward pass left behind for `extract_hidden_states`.

    captured: residual stream *entering* layer `id`, [rows, hidden]; id 0 is the embedding's
        output, id num_layers what the last layer gave before the final norm. Only the ids that
        the capabilities asked for.
    post_norm: hidden states after the final norm, [rows, hidden]; None if not asked for.
    pre_head: what the target exposes before a head that compresses it, [rows, width]; the states
        after the final norm if it exposes nothing; None if not asked for.
    """

    captured: Mapping[int, Tensor]
    post_norm: Tensor | None
    pre_head: Tensor | None = None


@attrs.frozen(eq=False)
class Draft:
    """Tokens a speculator proposes, one row per request of the step.

    tokens: [batch, k] target ids, int64, -1 where nothing is proposed; the first -1 of a row
        ends it. k is the argument of `propose`.
    q: the law the tokens were drawn from, by slot and column and before temperature (see
        `specdec_kernels.DenseQ` and `SparseQ`), `Pools.num_slots` slots and k or more columns;
        None if they were not drawn from one, or if it is not known. The same buffers may be
        returned every step.
    confidence: [batch, K] float32, the probability that a draft is accepted given that those
        before it were; must not depend on the drawn token itself. None if not known.
    parents: reserved for trees; None means a chain.
    """

    tokens: Tensor
    q: DenseQ | SparseQ | None = None
    confidence: Tensor | None = None
    parents: Tensor | None = None


@attrs.frozen(eq=False)
class Verdict:
    """What the target says of a draft.

    tokens: [batch, K + 1] emitted tokens: accepted drafts, then one of the target's own; -1
        past `count`.
    count: [batch] tokens emitted, 1 to drafts + 1; 0 for a request that draws nothing.
    rows: [batch, K + 1] index into the step's logits of the row that each emitted token
        continues; -1 past `count`.
    """

    tokens: Tensor
    count: Tensor
    rows: Tensor


@attrs.frozen
class KVLayer:
    """Cache entry of one draft attention layer, per token. Pages follow the target's tables."""

    heads: int  # key heads
    k_dim: int  # of a head
    v_dim: int
    window: int | None = None  # tokens back that the layer attends over; None: all
    dtype: dtype | None = None  # None: the target's


@attrs.frozen
class VerificationRule:
    """A verification method that a speculator brings along.

    It runs only if the configuration names it, and is reported as lossy unless `lossless`.
    """

    name: str  # what `rejection_sample_method` says; none of core's own
    lossless: bool  # whether the target's law is kept
    needs_q: bool = False  # refused with sampled drafts whose law is not handed over
    accepts_coupled: bool = False  # exact although drafts share the target's noise


# one per type: mypy does not follow a bare `tuple` as a converter


def _ints(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _layers(values: Iterable[KVLayer]) -> tuple[KVLayer, ...]:
    return tuple(values)


def _rules(values: Iterable[VerificationRule]) -> tuple[VerificationRule, ...]:
    return tuple(values)


@attrs.frozen
class Capabilities:
    """What a speculator needs and does. Core decides from these alone, never from a name.

    drawn: how draft tokens come about. "deterministic": no randomness (a rule, an argmax).
        "coupled": with the target's own noise, legal only under `coupled` verification.
        "independent": with the draft streams of `specdec_kernels.sample_draft`.
    q: the form of `Draft.q` that is returned when sampled drafts meet a method that reads it.
    max_drafts: the most tokens it can draft in one step; None = no limit.
    default_drafts: `num_speculative_tokens` if the user names none; None = core's default.
    max_context: drafts only for sequences up to this many tokens; None = no limit.
    hidden_states: capture ids of the residual stream it wants (see `TargetOutputs`).
    post_norm: wants the hidden states after the target's final norm.
    pre_head: wants `TargetOutputs.pre_head`.
    kv_layers: its own attention layers, to be paged along with the target's.
    reads_target_kv: wants `Pools.target_kv`.
    lookahead_slots: cache places beyond the committed tokens that drafting writes to.
    workspace_bytes: memory that `allocate` takes beside `Pools.kv` (buffers of q, scratch); it
        comes out of the runner's budget before pages are counted.
    host_tokens: wants `Step.host`.
    graph_safe: `propose` may be captured once and replayed: fixed shapes, no host reads. A
        promise for loops that capture; the CPU loop calls it every step.
    writes_confidence: fills `Draft.confidence`; refused in an answer if it is not declared.
    verification: rules of its own.
    """

    drawn: Drawn = "deterministic"
    q: QForm | None = None
    max_drafts: int | None = None
    default_drafts: int | None = None
    max_context: int | None = None
    hidden_states: tuple[int, ...] = attrs.field(default=(), converter=_ints)
    post_norm: bool = False
    pre_head: bool = False
    kv_layers: tuple[KVLayer, ...] = attrs.field(default=(), converter=_layers)
    reads_target_kv: bool = False
    lookahead_slots: int = 0
    workspace_bytes: int = 0
    host_tokens: bool = False
    graph_safe: bool = False
    writes_confidence: bool = False
    verification: tuple[VerificationRule, ...] = attrs.field(default=(), converter=_rules)


@attrs.frozen(eq=False)
class TargetInfo:
    """The target as a speculator sees it at load. Read only.

    On the `meta` device (`specdec plugins NAME --target M`) the modules hold no weights.
    """

    name: str  # for messages: path, Hub id, or the class of an instance that was passed
    config: Any  # transformers' text configuration
    vocab_size: int  # rows of the head: ids are 0 to vocab_size - 1
    hidden_size: int  # width of the residual stream
    num_layers: int  # capture ids go from 0 to this
    max_model_len: int  # longest sequence that is served
    max_num_seqs: int  # slots
    dtype: dtype  # of the weights and hidden states
    device: device
    embedding: nn.Module  # tokens to residual stream
    lm_head: nn.Module  # normed residual stream to logits; `weight` is [vocab, hidden]
    model: str | None = None  # path or Hub id; None for an instance that was passed
    revision: str | None = None  # of `model` on the Hub


@attrs.frozen
class RequestInfo:
    """A request that was given a slot."""

    slot: int  # its place until it ends or is preempted
    request_id: str  # its name in messages
    tokens: tuple[int, ...] = attrs.field(repr=False)  # prompt, and what it had emitted before
    prompt_length: int  # tokens of the prompt among them
    computed: int = 0  # leading tokens whose rows will not come by: they were cached


@attrs.frozen(kw_only=True)
class RequestChanges:
    """Which requests got a slot or left theirs since the last call.

    A slot that was left may be given away in the same call: handle those that left first.
    """

    added: tuple[RequestInfo, ...] = ()  # new requests
    preempted: tuple[int, ...] = ()  # slots of requests that were set aside
    resumed: tuple[RequestInfo, ...] = ()  # requests set aside before, with a slot again
    finished: tuple[int, ...] = ()  # slots of requests that ended

    @property
    def left(self) -> tuple[int, ...]:
        """Slots that are free now, unless they are in `arrived`."""
        return (*self.finished, *self.preempted)

    @property
    def arrived(self) -> tuple[RequestInfo, ...]:
        """Requests that have a slot now."""
        return (*self.added, *self.resumed)


@attrs.frozen
class EndedRequest:
    """A request that ended in a step."""

    slot: int  # that it had; -1 if it ended without one
    request_id: str  # its name in messages
    finish_reason: str  # "stop", "length", "abort" or "error"


@attrs.frozen(eq=False, kw_only=True)
class StepReport:
    """What a step did, in numbers, for observers. Arrays are numpy's, [batch] without padding.

    drafted, accepted, emitted are counted before stop tokens and limits cut the block, `kept`
    after: a decoding request emits one token more than it accepted drafts.
    """

    slots: NDArray[np.int64]
    is_decode: NDArray[np.bool_]  # a token was drawn, and not after the last chunk of a prompt
    drafted: NDArray[np.int64]  # drafts verified
    accepted: NDArray[np.int64]
    emitted: NDArray[np.int64]
    kept: NDArray[np.int64]  # tokens that were committed
    skipped: NDArray[np.int64]  # why nothing was verified: into SKIP_REASONS; -1 where it was
    changes: RequestChanges | None  # of slots, before the forward; None if there were none
    ended: tuple[EndedRequest, ...]  # in this step, or between it and the one before
    num_running: int  # requests with a slot, after the step
    num_waiting: int
    num_preempted: int  # preemptions since the engine was built
    free_blocks: int  # pages of the cache
    num_blocks: int  # pages that requests can have
    prompt_tokens: int  # rows of prompts that were computed
    seconds: float  # that the step took


@attrs.frozen(eq=False)
class Pools:
    """Memory taken from the runner's budget for a speculator, handed to `allocate`.

    kv: one (keys, values) pair per entry of `Capabilities.kv_layers`, each
        [num_blocks * block_size, heads, dim]; a token at position p of a slot lies at
        `block_tables[slot, p // block_size] * block_size + p % block_size`. Block 0 belongs to
        nobody: padding writes there.
    target_kv: the same of the target's own layers if the capabilities ask for them. Read only:
        valid up to `SlotState.computed` of each slot. On a CPU all of these are views, not
        contiguous.
    max_rows: rows that a step can have at most.
    """

    kv: tuple[tuple[Tensor, Tensor], ...]
    target_kv: tuple[tuple[Tensor, Tensor], ...]
    num_blocks: int  # pages, block 0 included
    block_size: int  # tokens per page
    num_slots: int  # places by slot, the one that belongs to nobody included
    max_drafts: int  # K: columns of every draft
    max_rows: int
