"""Requests are checked here, whole, before the engine hears of any of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

import attrs

from specdec._sampling_values import plain
from specdec._structure import shown
from specdec.errors import PromptError
from specdec.logprobs import LogprobLog, PromptLogprobLog
from specdec.metrics import SpeculationMetrics
from specdec.output_text import OutputText
from specdec.outputs import RequestMetrics
from specdec.parameter_table import check_parameters
from specdec.prompts import Prompt, TokenizedPrompt, read_prompts
from specdec.request import Request
from specdec.request_checks import bad_word_ids, check_edits, check_prompt, check_stops, check_text
from specdec.runner.row_logprobs import top_count
from specdec.runner.scheduler import Scheduler
from specdec.runner.sequence import Sequence as Running
from specdec.sampling_params import SamplingParams
from specdec_kernels import make_stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specdec.types import VerificationRule


@attrs.define(eq=False, kw_only=True)
class Intake:
    """Makes requests of prompts and sampling parameters.

    eos: end-of-sequence tokens. seed: of requests that bring none. rule: the verification in
    force; None decodes plainly. max_logprobs: the most that a request may ask for; -1 for any.
    priorities: whether requests may have one. num_drafts: K of the speculator, 0 without one.
    names: ids in use that users gave.
    """

    scheduler: Scheduler
    tokenizer: PreTrainedTokenizerBase | None
    eos: frozenset[int]
    vocab_size: int
    max_model_len: int
    seed: int
    rule: VerificationRule | None
    max_logprobs: int
    priorities: bool
    num_drafts: int = 0
    names: Container[str] = ()
    _numbers: itertools.count[int] = attrs.field(factory=itertools.count)
    _ordinals: itertools.count[int] = attrs.field(factory=itertools.count)
    _arrivals: itertools.count[int] = attrs.field(factory=itertools.count)

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None = None,
        request_id: str | None = None,
        *,
        single: bool = False,
    ) -> list[Request]:
        """Read and check everything; a mistake raises before any request exists.

        request_id: of the only prompt; by default requests are numbered. single: refuse more than
            one prompt.

        Raises:
            PromptError: a prompt or its parameters cannot be served.
            OutOfMemoryError: a request alone could outgrow the cache.
        """
        texts = read_prompts(prompts, self.tokenizer)
        if single and len(texts) != 1:
            raise PromptError(f"one prompt is taken at a time, these are {len(texts)}")
        params = _params(sampling_params, len(texts))
        priorities = self._priorities(priority, len(texts))
        bad_words = []
        for number, (prompt, one) in enumerate(zip(texts, params, strict=True)):
            where = f"prompt {number}" if len(texts) > 1 else "the prompt"
            bad_words.append(self._check(prompt, one, where))
        # ordinals are taken only once every prompt is known to be good
        return [
            self._request(prompt, one, rank, words, request_id)
            for prompt, one, rank, words in zip(texts, params, priorities, bad_words, strict=True)
        ]

    def _check(
        self, prompt: TokenizedPrompt, params: SamplingParams, where: str
    ) -> tuple[tuple[int, ...], ...]:
        """Check one prompt; returns the tokens of its bad words."""
        ids = prompt.token_ids
        check_prompt(ids, where, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        check_stops(params, self.eos, where, vocab_size=self.vocab_size)
        if self.rule is not None:
            check_parameters(params, self.rule, where)
        words = bad_word_ids(params.bad_words, self.tokenizer, where)
        check_edits(params, where, vocab_size=self.vocab_size, eos=self.eos, bad_words=words)
        for name in ("logprobs", "prompt_logprobs"):
            self._check_logprobs(getattr(params, name), name, where)
        check_text(params, where, tokenizer=self.tokenizer)
        longest = self._longest(ids, params)
        if params.min_tokens > longest - len(ids):
            raise PromptError(
                f"{where}: min_tokens is {shown(params.min_tokens)}, but after the prompt at most "
                f"{longest - len(ids)} tokens fit"
            )
        self.scheduler.check(longest, where)
        return tuple(tuple(word) for word in words)

    def _check_logprobs(self, asked: int | None, name: str, where: str) -> None:
        if asked is None or self.max_logprobs < 0:
            return
        if asked < 0 or asked > self.max_logprobs:
            wanted = "the whole vocabulary (-1)" if asked < 0 else shown(asked)
            raise PromptError(
                f"{where}: {name} asks for {wanted}, but max_logprobs is {self.max_logprobs}; "
                "LLM(max_logprobs=...) raises it, -1 to any number"
            )

    def _priorities(self, priority: object, count: int) -> list[int]:
        if priority is None:
            return [0] * count
        given = plain(priority)
        ranks = given if isinstance(given, list | tuple) else [given] * count
        if len(ranks) != count:
            raise PromptError(f"{count} prompts but {len(ranks)} priorities; give one, or one each")
        for one in ranks:
            if not isinstance(one, int) or isinstance(one, bool) or not -(2**62) < one < 2**62:
                raise PromptError(
                    f"priority is {shown(one)}, but it has to be an integer, lower first"
                )
        if any(ranks) and not self.priorities:
            raise PromptError(
                "requests run first come, first served, so a priority is refused; "
                "LLM(scheduling_policy='priority') takes them"
            )
        return list(ranks)

    def _free_name(self) -> str:
        """The next number that nobody uses as an id."""
        return next(n for n in map(str, self._numbers) if n not in self.names)

    def _longest(self, ids: Sequence[int], params: SamplingParams) -> int:
        """Tokens of prompt and completion at most."""
        if params.max_tokens is None:
            return self.max_model_len
        return min(self.max_model_len, len(ids) + params.max_tokens)

    def _request(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        priority: int,
        bad_words: tuple[tuple[int, ...], ...],
        request_id: str | None,
    ) -> Request:
        ids = prompt.token_ids
        ordinal = next(self._ordinals)
        name = request_id if request_id is not None else self._free_name()
        seed = params.seed
        if seed is None:
            # unseeded requests differ from each other and repeat with the engine's seed
            seed = make_stream(self.seed, ordinal)
        own = frozenset(params.stop_token_ids or ())
        stops = own if params.ignore_eos else own | self.eos
        metrics = RequestMetrics(arrival_time=time.perf_counter(), num_prompt_tokens=len(ids))
        per_token = top_count(params.logprobs, self.vocab_size)
        of_prompt = top_count(params.prompt_logprobs, self.vocab_size)
        sequences = [
            Running(
                request_id=name,
                index=index,
                prompt=ids,
                params=params,
                stream=make_stream(seed, index),
                stop_ids=tuple(sorted(stops)),
                own_stop_ids=own if params.ignore_eos else own - self.eos,
                max_length=self._longest(ids, params),
                metrics=attrs.evolve(
                    metrics,
                    speculative_decoding=SpeculationMetrics(
                        drafted_per_pos=[0] * self.num_drafts,
                        accepted_per_pos=[0] * self.num_drafts,
                    ),
                ),
                text=OutputText(
                    self.tokenizer,
                    stop=params.stop,
                    include_stop_str_in_output=params.include_stop_str_in_output,
                    skip_special_tokens=params.skip_special_tokens,
                    min_tokens=params.min_tokens,
                    detokenize=params.detokenize,
                ),
                bad_words=bad_words,
                logprobs=LogprobLog(per_token) if per_token >= 0 else None,
                # the same for every completion
                prompt_logprobs=PromptLogprobLog(of_prompt)
                if of_prompt >= 0 and not index
                else None,
                priority=priority,
                arrival=next(self._arrivals),
            )
            for index in range(params.n)
        ]
        return Request(
            request_id=name,
            prompt=prompt.text,
            sequences=sequences,
            metrics=metrics,
            tokenizer=self.tokenizer,
        )


def _params(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One for each prompt."""
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    if not isinstance(sampling_params, Sequence):
        raise PromptError(
            f"sampling_params is of type {type(sampling_params).__name__}; give "
            "SamplingParams, or a list of them, one per prompt"
        )
    params = list(sampling_params)
    if len(params) != count:
        raise PromptError(
            f"{count} prompts but {len(params)} SamplingParams; give one, or one each"
        )
    for other in params:
        if not isinstance(other, SamplingParams):
            raise PromptError(f"sampling_params holds {other!r}, which is no SamplingParams")
    return params
