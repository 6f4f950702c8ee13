"""Which sampling parameter is served under which verification method: declared, then enforced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, get_args

import attrs

from specdec._structure import shown
from specdec.config import CORE_RULES
from specdec.errors import PromptError
from specdec.sampling_params import SamplingParams
from specdec.types import VerificationRule

# exact: what comes out is as in plain decoding, under `coupled` token by token, else in law.
# own tokens: it shapes what the target draws itself; drafts that are kept had no part in it.
# up to the rule: it is handed to the rule, which says itself what it makes of it.
Word = Literal["exact", "own tokens", "up to the rule", "refused"]
WORDS: tuple[Word, ...] = get_args(Word)

LOSSLESS, LOSSY = "own lossless rule", "own lossy rule"  # of a speculator
COLUMNS = (*CORE_RULES, LOSSLESS, LOSSY)

_Row = Mapping[str, Word]
_EXACT: _Row = dict.fromkeys(COLUMNS, "exact")
# the law that is drawn from
_LAW: _Row = {**_EXACT, "synthetic": "own tokens", LOSSY: "up to the rule"}
# a draft that is kept without being tested may be one that the edit excludes
_EDIT: _Row = {**_EXACT, "synthetic": "refused", LOSSY: "refused"}

TABLE: Mapping[str, _Row] = {
    "n": _EXACT,
    "temperature": _LAW,
    "top_k": _LAW,
    "top_p": _LAW,
    "min_p": _LAW,
    "seed": _LAW,
    "repetition_penalty": _EDIT,
    "presence_penalty": _EDIT,
    "frequency_penalty": _EDIT,
    "logit_bias": _EDIT,
    "bad_words": _EDIT,
    "allowed_token_ids": _EDIT,
    "logits_processors": _EDIT,
    "min_tokens": _EDIT,
    # these cut what was emitted, or say of it what the target says
    "max_tokens": _EXACT,
    "ignore_eos": _EXACT,
    "stop_token_ids": _EXACT,
    "stop": _EXACT,
    "include_stop_str_in_output": _EXACT,
    "detokenize": _EXACT,
    "skip_special_tokens": _EXACT,
    "logprobs": _EXACT,
    "prompt_logprobs": _EXACT,
    "output_kind": _EXACT,
}


def column_of(rule: VerificationRule) -> str:
    """The column of a rule: its name if it is core's own."""
    if rule.name in CORE_RULES:
        return rule.name
    return LOSSLESS if rule.lossless else LOSSY


def check_parameters(params: SamplingParams, rule: VerificationRule, where: str) -> None:
    """Refuse parameters that the rule in force cannot honour. Plain decoding honours all.

    where: names the prompt in messages.

    Raises:
        PromptError: the first such parameter, the rule, and which rules serve it.
    """
    column = column_of(rule)
    for name in _asked(params):
        if TABLE[name][column] != "refused":
            continue
        serve = [c for c in COLUMNS if TABLE[name][c] != "refused"]
        named = [repr(c) for c in serve if c in CORE_RULES]
        own = ", or a lossless rule of the speculator's own" if LOSSLESS in serve else ""
        raise PromptError(
            f"{where}: {name}={shown(getattr(params, name))} is refused under "
            f"rejection_sample_method={rule.name!r}: it keeps drafts that the edited logits may "
            f"exclude; use {', '.join(named)}{own}"
        )


def markdown() -> str:
    """The table in Markdown, a line per parameter."""
    heads = ["parameter", *(f"`{c}`" if c in CORE_RULES else c for c in COLUMNS)]
    lines = [heads, ["---"] * len(heads)]
    lines += [[f"`{name}`", *(row[c] for c in COLUMNS)] for name, row in TABLE.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _asked(params: SamplingParams) -> Iterator[str]:
    """Names of the parameters that differ from their defaults."""
    for field in attrs.fields(SamplingParams):
        if getattr(params, field.name) != field.default:
            yield field.name
