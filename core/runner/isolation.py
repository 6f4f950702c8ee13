"""Ask a speculator request by request, once it has raised for a whole step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

import attrs
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.types import Draft, HostStep, Step, TargetOutputs
from specdec_kernels import DenseQ, SparseQ

logger = logging.getLogger(__name__)
T = TypeVar("T")

Failures = dict[int, str]  # index of a request in the step → why it ends


def one_by_one(
    step: Step, call: Callable[[int], T], error: SpecdecError, *, among: Tensor | None = None
) -> tuple[dict[int, T], Failures]:
    """Ask for every request alone, after a call for all of them raised `error`.

    among: [batch] bool, the requests to ask for; all by default.

    Returns the answers and, for requests whose own call raised, the reasons.
    """
    answers: dict[int, T] = {}
    failed: Failures = {}
    asked = step.slots >= 0 if among is None else (step.slots >= 0) & among
    requests: list[int] = asked.nonzero()[:, 0].tolist()
    # what a plugin raised needs its traceback, a wrong answer of it none
    cause = error if error.__cause__ is not None else None
    more = "; asking request by request" if len(requests) > 1 else ""
    logger.error("%s%s", error, more, exc_info=cause)
    for request in requests:
        if len(requests) == 1:
            failed[request] = str(error)
            break
        try:
            answers[request] = call(request)
        except SpecdecError as own:
            failed[request] = str(own)
    return answers, failed


def only(step: Step, request: int) -> Step:
    """The same step with one request in it, and its rows."""
    first, last = (int(x) for x in step.query_start[request : request + 2])
    read, end = (int(x) for x in step.logits_start[request : request + 2])
    one = slice(request, request + 1)
    host = step.host
    return attrs.evolve(
        step,
        tokens=step.tokens[first:last],
        positions=step.positions[first:last],
        query_start=step.query_start[request : request + 2] - first,
        slots=step.slots[one],
        num_drafts=step.num_drafts[one],
        is_prefill=step.is_prefill[one],
        samples=step.samples[one],
        logits_rows=step.logits_rows[read:end] - first,
        predicted=step.predicted[read:end],
        logits_start=step.logits_start[request : request + 2] - read,
        valid_rows=step.valid_rows[one],
        next_token=step.next_token[one],
        k=step.k[one],
        host=None
        if host is None
        else HostStep(
            slots=host.slots[one], k=host.k[one], history=host.history, length=host.length
        ),
    )


def only_outputs(outputs: TargetOutputs, step: Step, request: int) -> TargetOutputs:
    """What the target left behind for one request of the step."""
    first, last = (int(x) for x in step.query_start[request : request + 2])
    captured: Mapping[int, Tensor] = {i: t[first:last] for i, t in outputs.captured.items()}
    return TargetOutputs(
        captured=captured,
        post_norm=None if outputs.post_norm is None else outputs.post_norm[first:last],
        pre_head=None if outputs.pre_head is None else outputs.pre_head[first:last],
    )


def join(step: Step, drafts: Mapping[int, Draft], k: int) -> Draft:
    """One draft of the whole step from those of single requests, each without its batch axis."""
    tokens = step.next_token.new_full((step.batch, k), -1)
    for request, draft in drafts.items():
        tokens[request] = draft.tokens
    laws = {int(step.slots[b]): d.q for b, d in drafts.items() if d.q is not None}
    shapes = {tuple(part if part is None else part.shape for part in x) for x in laws.values()}
    if len(laws) < len(drafts) or len(shapes) != 1:
        # judged as if they were certain, drafts of any law leave the output exact
        return Draft(tokens=tokens)
    first = next(iter(laws.values()))
    slots = step.state.length.shape[0]
    whole = parts(first, lambda part: part.new_zeros((slots, *part.shape)))
    for slot, law in laws.items():
        for into, part in zip(whole, law, strict=True):
            if into is not None and part is not None:
                into[slot] = part
    return Draft(tokens=tokens, q=whole)


def parts(law: DenseQ | SparseQ, of: Callable[[Tensor], Tensor]) -> DenseQ | SparseQ:
    """The law with something made of each of its tensors."""
    if isinstance(law, SparseQ):
        return SparseQ(*map(of, law))
    return DenseQ(of(law.logits), None if law.lse is None else of(law.lse))
