"""Speculators that do one thing on purpose: always right, always wrong, raising, recording.

Give the class itself as the method::

    LLM(model, speculative_config={"method": OracleSpeculator, "streams": streams})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from specdec.hookspecs import hookimpl
from specdec.speculator import Speculator
from specdec.types import Capabilities, Draft
from specdec_kernels import DenseQ, SparseQ, sample_draft

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.config import SpeculatorConfig
    from specdec.types import HostStep, Pools, RequestChanges, Step, TargetInfo


@attrs.frozen
class StreamOptions:
    """streams: prompt tokens → the tokens that plain decoding emits after them."""

    streams: Mapping[Any, Any] = attrs.field(factory=dict)


class OracleSpeculator(Speculator):
    """Drafts what plain decoding emits, so every draft is accepted.

    Completions that share a prompt (n > 1) are served in the order of the stream's rows.
    """

    Options: ClassVar[type] = StreamOptions

    def __init__(self, target: TargetInfo, config: SpeculatorConfig) -> None:
        self.vocab_size = target.vocab_size
        self.streams = {tuple(k): list(v) for k, v in config.options.streams.items()}
        self.text: dict[int, list[int]] = {}

    @classmethod
    def load(cls, target: TargetInfo, config: SpeculatorConfig) -> Self:
        """Remember the streams."""
        return cls(target, config)

    def capabilities(self) -> Capabilities:
        """A rule without randomness, on the host."""
        return Capabilities(drawn="deterministic", host_tokens=True)

    def requests_changed(self, changes: RequestChanges) -> None:
        """Look up the stream of every request that got a slot."""
        for slot in changes.left:
            self.text.pop(slot, None)
        for request in changes.arrived:
            prompt = request.tokens[: request.prompt_length]
            self.text[request.slot] = [*prompt, *self.streams.get(prompt, ())]

    @hookimpl
    def propose(self, step: Step, k: int) -> Draft:
        """The next tokens of the stream."""
        host = step.host
        assert host is not None
        tokens = np.full((len(host.slots), k), -1, dtype=np.int64)
        for request, slot in enumerate(host.slots.tolist()):
            if slot >= 0 and host.k[request]:
                self.fill(tokens[request], slot, host)
        return Draft(tokens=torch.from_numpy(tokens).to(step.slots.device))

    def fill(self, row: NDArray[np.int64], slot: int, host: HostStep) -> None:
        """Write the drafts of one request into its row."""
        length = int(host.length[slot])
        right = self.text[slot][length : length + len(row)]
        row[: len(right)] = right


class WrongSpeculator(OracleSpeculator):
    """Never drafts what plain decoding emits, so no draft is accepted under greedy or coupled."""

    def fill(self, row: NDArray[np.int64], slot: int, host: HostStep) -> None:
        """The oracle's tokens, each moved by one."""
        super().fill(row, slot, host)
        row[row >= 0] = (row[row >= 0] + 1) % self.vocab_size


@attrs.frozen
class PlaceholderOptions(StreamOptions):
    """column: the draft that is left out; those after it are there and must not count."""

    column: int = 1


class PlaceholderSpeculator(OracleSpeculator):
    """The oracle with a -1 in one column."""

    Options: ClassVar[type] = PlaceholderOptions

    def __init__(self, target: TargetInfo, config: SpeculatorConfig) -> None:
        super().__init__(target, config)
        self.column = config.options.column

    def fill(self, row: NDArray[np.int64], slot: int, host: HostStep) -> None:
        """The oracle's tokens but one."""
        super().fill(row, slot, host)
        row[self.column : self.column + 1] = -1


@attrs.frozen
class ConstantOptions:
    """token: what is always drafted; it may lie outside the vocabulary."""

    token: int = 0


class ConstantSpeculator(Speculator):
    """Always drafts one token: end-of-sequence, say, or an id that the target does not have."""

    Options: ClassVar[type] = ConstantOptions

    def __init__(self, token: int = 0) -> None:
        self.token = token

    @classmethod
    def load(cls, target: TargetInfo, config: SpeculatorConfig) -> Self:
        """Remember the token."""
        return cls(config.options.token)

    def capabilities(self) -> Capabilities:
        """A rule without randomness."""
        return Capabilities(drawn="deterministic", graph_safe=True)

    @hookimpl
    def propose(self, step: Step, k: int) -> Draft:
        """The token, k times."""
        return Draft(tokens=torch.full_like(step.next_token[:, None], self.token).repeat(1, k))


@attrs.frozen
class RaisingOptions:
    """token: it raises when this token is the next of a request; hook: in which hook."""

    token: int = 0
    hook: str = "propose"


class RaisingSpeculator(Speculator):
    """Drafts nothing, and raises for requests that have come to a certain token."""

    Options: ClassVar[type] = RaisingOptions

    def __init__(self, options: RaisingOptions) -> None:
        self.options = options

    @classmethod
    def load(cls, target: TargetInfo, config: SpeculatorConfig) -> Self:
        """Remember the token."""
        return cls(config.options)

    def capabilities(self) -> Capabilities:
        """A rule without randomness."""
        return Capabilities(drawn="deterministic")

    def _check(self, step: Step, hook: str) -> None:
        met = (step.next_token == self.options.token) & (step.slots >= 0) & step.samples
        if hook == self.options.hook and bool(met.any()):
            raise RuntimeError(f"the token {self.options.token} was met")

    @hookimpl
    def extract_hidden_states(self, step: Step) -> None:
        """Raise if this is the hook to raise in."""
        self._check(step, "extract_hidden_states")

    @hookimpl
    def propose(self, step: Step) -> None:
        """Raise if this is the hook to raise in."""
        self._check(step, "propose")


@attrs.frozen
class BigramOptions:
    """table: [vocab, vocab] draft logits after each token; candidates: C of a sparse q, 0 = dense.

    with_q: hand the law to verification.
    """

    table: Any = None
    candidates: int = 0
    with_q: bool = True


class BigramSpeculator(Speculator):
    """Draws drafts one after another from a table of logits, in every way a drafter can."""

    Options: ClassVar[type] = BigramOptions

    def __init__(self, target: TargetInfo, config: SpeculatorConfig) -> None:
        options = config.options
        self.table: Tensor = torch.as_tensor(
            options.table, dtype=torch.float32, device=target.device
        )
        self.options = options
        self.how = {"probabilistic": "independent"}.get(
            config.draft_sample_method, config.draft_sample_method
        )
        self.needs_q = self.how == "independent" and options.with_q

    @classmethod
    def load(cls, target: TargetInfo, config: SpeculatorConfig) -> Self:
        """Remember the table."""
        return cls(target, config)

    def capabilities(self) -> Capabilities:
        """Draws as the configuration says."""
        drawn = {"greedy": "deterministic"}.get(self.how, self.how)
        form = ("sparse" if self.options.candidates else "dense") if self.needs_q else None
        return Capabilities(drawn=drawn, q=form)  # type: ignore[arg-type]

    def allocate(self, pools: Pools) -> None:
        """Room for q: by slot and column."""
        shape = (pools.num_slots, pools.max_drafts)
        candidates = self.options.candidates
        device = self.table.device
        self.logits = torch.zeros(*shape, self.table.shape[1], device=device)
        self.lse = torch.zeros(shape, device=device)
        self.ids = torch.zeros(*shape, candidates, dtype=torch.int64, device=device)
        self.kept = torch.zeros(*shape, candidates, device=device)

    @hookimpl
    def propose(self, step: Step, k: int) -> Draft:
        """Walk the table k times from the next token. Padding walks along, in nobody's place."""
        slots, state = step.slots, step.state
        tokens = torch.full((step.batch, k), -1, dtype=torch.int64, device=slots.device)
        last, position = step.next_token, state.length[slots]
        for column in range(k):
            logits = self.table[last]
            if self.options.candidates:
                kept, ids = logits.topk(self.options.candidates, dim=-1)
                logits = torch.full_like(logits, -torch.inf).scatter(1, ids, kept)
                self.ids[slots, column], self.kept[slots, column] = ids, kept
            self.logits[slots, column] = logits
            drawn = sample_draft(
                logits,
                position + column,
                slots,
                state.sampling,
                how=self.how,
                column=column,
                vocab_size=self.table.shape[1],
                lse=None if self.how == "greedy" else self.lse,
            )
            tokens[:, column] = drawn
            last = drawn.clamp(min=0)  # -1 for padding
        q: DenseQ | SparseQ | None = None
        if self.needs_q:
            q = DenseQ(self.logits, self.lse)
            if self.options.candidates:
                q = SparseQ(self.ids, self.kept)
        return Draft(tokens=tokens, q=q)


@attrs.frozen
class RecordingOptions:
    """layers: capture ids to ask for; post_norm, pre_head: ask for these states as well."""

    layers: Sequence[int] = ()
    post_norm: bool = False
    pre_head: bool = False


class RecordingSpeculator(Speculator):
    """Drafts the next token over and over, and keeps what every hook was given, by request."""

    Options: ClassVar[type] = RecordingOptions

    def __init__(self, options: RecordingOptions) -> None:
        self.options = options
        self.changes: list[tuple[str, int]] = []
        self.calls: list[dict[str, Any]] = []
        self.features: dict[int, dict[int, Tensor]] = {}
        self.pairs: dict[int, dict[int, int]] = {}
        self.pools: Pools | None = None
        self.closed = False

    @classmethod
    def load(cls, target: TargetInfo, config: SpeculatorConfig) -> Self:
        """Remember what to ask for."""
        return cls(config.options)

    def capabilities(self) -> Capabilities:
        """A rule without randomness that wants hidden states."""
        return Capabilities(
            drawn="deterministic",
            hidden_states=tuple(self.options.layers),
            post_norm=self.options.post_norm,
            pre_head=self.options.pre_head,
        )

    def allocate(self, pools: Pools) -> None:
        """Keep the pools."""
        self.pools = pools

    def requests_changed(self, changes: RequestChanges) -> None:
        """Write down who came and went."""
        self.changes += [("finished", s) for s in changes.finished]
        self.changes += [("preempted", s) for s in changes.preempted]
        self.changes += [("added", r.slot) for r in changes.added]
        self.changes += [("resumed", r.slot) for r in changes.resumed]
        for request in changes.arrived:
            self.features[request.slot] = {}
            self.pairs[request.slot] = {}

    @hookimpl
    def propose(self, step: Step, hidden: Tensor | None, k: int) -> Draft:
        """Write down every valid row: its feature, and the token that follows it."""
        for request, slot in enumerate(step.slots.tolist()):
            if slot < 0:
                continue
            first = int(step.query_start[request])
            valid = int(step.valid_rows[request])
            tokens = [*step.tokens[first : first + valid].tolist()[1:]]
            tokens.append(int(step.next_token[request]))
            for row, following in zip(range(first, first + valid), tokens, strict=False):
                position = int(step.positions[row])
                self.pairs[slot][position] = following
                if hidden is not None:
                    self.features[slot][position] = hidden[row].clone()
        self.calls.append(
            {
                "slots": step.slots.tolist(),
                "k": step.k.tolist(),
                "is_prefill": step.is_prefill.tolist(),
                "samples": step.samples.tolist(),
                "valid_rows": step.valid_rows.tolist(),
            }
        )
        return Draft(tokens=step.next_token[:, None].repeat(1, k))

    def close(self) -> None:
        """Write down that it was closed."""
        self.closed = True
