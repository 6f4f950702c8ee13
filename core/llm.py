"""The API: load a model, optionally with a speculator, and generate."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs

from specdec.config import SpeculativeConfig
from specdec.errors import ConfigError, PromptError
from specdec.llm_keys import refuse
from specdec.outputs import RequestMetrics, RequestOutput, SpeculationMetrics
from specdec.prompts import Prompt, is_chat, read_prompts
from specdec.request import Request, check_prompt, check_stops
from specdec.runner.assemble import Assembly, EngineSettings, assemble
from specdec.runner.sequence import Sequence as Running
from specdec.sampling_params import SamplingParams
from specdec.sources import check_sources
from specdec.tokenizer import eos_ids, load_tokenizer
from specdec_kernels import make_stream

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from specdec.speculator import Speculator
    from specdec.types import Capabilities


class LLM:
    """A target model, optionally with a speculator, ready to generate.

    model: a folder, a Hub id, or a transformers causal LM that is used as it is.
    speculative_config: a dict, JSON text or a short string (`specdec.SpeculativeConfig`); None
        decodes plainly. Tokens are the same either way unless the configuration names a
        verification method whose tokens depend on the drafts.
    tokenizer: another folder or Hub id for it, or a transformers tokenizer; tokenizer_revision,
        tokenizer_kwargs: passed on to transformers. skip_tokenizer_init: prompts come as token
        ids and `text` stays empty.
    dtype: "auto" (the checkpoint's; float32 for half-precision checkpoints on a CPU) or a torch
        dtype or its name. device: e.g. "cpu", "cuda"; by default CUDA if there is any.
    revision, trust_remote_code, hf_token, hf_overrides: how transformers finds and reads the
        model; hf_overrides changes keys of its configuration.
    max_model_len: longest prompt plus completion, by default what the model was made for.
    max_num_seqs: completions that run at once. max_num_batched_tokens: prompt tokens per step.
    kv_cache_memory: bytes for the key-value cache; by default enough for every sequence at full
        length, but no more than a share of the free memory.
    seed: of requests that bring none.
    enforce_eager: run without captured graphs, which the CPU loop always does.
    deterministic: float32 on a CPU: a token's logits do not depend, bit for bit, on what was
        computed with it, so equality with plain decoding holds on real models too. What counts
        is where a prompt is cut, which max_num_batched_tokens alone decides. Slower. A module
        that is passed in is changed for good.
    observers: objects with the hook `step_finished`.

    Usable as a context manager; `close` frees the model and every plugin.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
        tokenizer_revision: str | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        skip_tokenizer_init: bool = False,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        hf_token: str | bool | None = None,
        hf_overrides: dict[str, Any] | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        kv_cache_memory: int | None = None,
        seed: int = 0,
        enforce_eager: bool = False,
        deterministic: bool = False,
        observers: Iterable[object] = (),
        **unsupported: Any,
    ) -> None:
        self._assembly: Assembly | None = None
        if unsupported:
            known = [n for n in inspect.signature(LLM).parameters if n != "unsupported"]
            refuse(unsupported, known)
        config = SpeculativeConfig.parse(speculative_config)
        settings = EngineSettings(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_memory=kv_cache_memory,
            enforce_eager=enforce_eager,
            deterministic=deterministic,
        )
        self.seed = _seed(seed)
        if not isinstance(observers, Iterable):
            raise ConfigError(
                f"observers is {observers!r}, but it has to be a list of objects with the hook "
                "step_finished"
            )
        check_sources(
            model,
            tokenizer,
            skip_tokenizer_init=skip_tokenizer_init,
            trust_remote_code=trust_remote_code,
            remote={"revision": revision, "hf_token": hf_token, "hf_overrides": hf_overrides},
            tokenizer_options={
                "tokenizer_revision": tokenizer_revision,
                "tokenizer_kwargs": tokenizer_kwargs,
            },
        )
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self._assembly = assemble(
            model,
            config,
            settings,
            dtype=dtype,
            device=device,
            observers=observers,
            load={
                "revision": revision,
                "trust_remote_code": trust_remote_code,
                "token": hf_token,
                "hf_overrides": hf_overrides,
            },
        )
        self._ordinals = itertools.count()
        try:
            # after the model: where that cannot be found, its own error says so best
            if not skip_tokenizer_init:
                self.tokenizer = load_tokenizer(
                    model,
                    tokenizer,
                    # the model's revision says nothing of another repository
                    revision=tokenizer_revision or (revision if tokenizer is None else None),
                    trust_remote_code=trust_remote_code,
                    token=hf_token,
                    extra={} if tokenizer_kwargs is None else tokenizer_kwargs,
                )
            self.eos_token_ids = eos_ids(self._assembly.target.model, self.tokenizer)
        except BaseException:
            self.close()
            raise

    # -- what was loaded ---------------------------------------------------

    @property
    def _loaded(self) -> Assembly:
        if self._assembly is None:
            raise ConfigError("this LLM is closed")
        return self._assembly

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion, in tokens."""
        return self._loaded.max_model_len

    @property
    def capabilities(self) -> Capabilities | None:
        """What the speculator declared; None without one."""
        drafting = self._loaded.engine.drafting
        return drafting.capabilities if drafting else None

    @property
    def speculator(self) -> Speculator | None:
        """The speculator in use; None without one."""
        drafting = self._loaded.engine.drafting
        return drafting.speculator if drafting else None

    @property
    def lossless(self) -> bool:
        """Whether the verification in force keeps the target's law."""
        drafting = self._loaded.engine.drafting
        return drafting is None or drafting.agreement.rule.lossless

    @property
    def rejection_sample_method(self) -> str | None:
        """The verification in force; None without a speculator."""
        drafting = self._loaded.engine.drafting
        return drafting.agreement.rule.name if drafting else None

    @property
    def metrics(self) -> SpeculationMetrics:
        """Speculation over every request that has ended, added up."""
        return self._loaded.engine.totals

    # -- generate ----------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for every prompt; outputs come in the order of the prompts.

        prompts: text, token ids, chat messages (`[{"role": ..., "content": ...}]`, rendered by
            the model's template), or `{"prompt": text}` / `{"prompt_token_ids": ids}`; one or a
            list.
        sampling_params: one for all or one each; `SamplingParams()` by default.
        use_tqdm: show progress on stderr if it is a terminal.

        A request that fails ends with finish_reason "error" and says why in `error`; the others
        are unharmed. If the call is interrupted, its requests are aborted and the LLM stays
        usable.

        Raises:
            PromptError: a prompt or its parameters cannot be served; nothing was generated.
            OutOfMemoryError: a request alone could outgrow the cache; nothing was generated.
        """
        requests = self._requests(prompts, sampling_params)
        from tqdm.auto import tqdm

        with (
            tqdm(
                total=len(requests),
                desc="Generated",
                unit="prompt",
                disable=None if use_tqdm else True,
            ) as bar,
            closing(self._run(requests, every_step=False)) as ended,
        ):
            for _ in ended:
                bar.update()
                done = self.metrics
                if done.num_drafts:
                    bar.set_postfix_str(f"{done.mean_acceptance_length:.2f} tokens/draft")
        return [r.output(self.tokenizer, final=True) for r in requests]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate the answer to one conversation, or to each of a list of them.

        Raises:
            PromptError: as `generate`, and for prompts that are no conversations.
        """
        if not is_chat(messages):
            raise PromptError(
                "chat takes messages, [{'role': ..., 'content': ...}, ...], or a list of such "
                "conversations; generate takes text and token ids"
            )
        return self.generate(messages, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Generate, yielding a request's output so far after every step that added to it.

        Mistakes in the arguments raise here, not in the loop. `text` never ends in half a
        character. Numbers about speculation are there once a request has ended.
        Leaving the loop early aborts what still runs. Several streams of one LLM may
        be read in turns: a step runs the requests of all.
        """
        return self._stream(self._requests(prompts, sampling_params))

    def _stream(self, requests: list[Request]) -> Iterator[RequestOutput]:
        with closing(self._run(requests, every_step=True)) as running:
            for request in running:
                yield request.output(self.tokenizer, final=request.finished)

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        """Check everything before anything runs."""
        loaded = self._loaded
        texts = read_prompts(prompts, self.tokenizer)
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            params = [sampling_params] * len(texts)
        elif isinstance(sampling_params, Sequence):
            params = list(sampling_params)
        else:
            raise PromptError(
                f"sampling_params is of type {type(sampling_params).__name__}; give "
                "SamplingParams, or a list of them, one per prompt"
            )
        if len(params) != len(texts):
            raise PromptError(
                f"{len(texts)} prompts but {len(params)} SamplingParams; give one, or one each"
            )
        for other in params:
            if not isinstance(other, SamplingParams):
                raise PromptError(f"sampling_params holds {other!r}, which is no SamplingParams")
        vocab = loaded.target.vocab_size
        for number, (prompt, one) in enumerate(zip(texts, params, strict=True)):
            where = f"prompt {number}" if len(texts) > 1 else "the prompt"
            check_prompt(
                prompt.token_ids, where, vocab_size=vocab, max_model_len=loaded.max_model_len
            )
            check_stops(one, self.eos_token_ids, where, vocab_size=vocab)
            loaded.engine.scheduler.check(self._longest(prompt.token_ids, one), where)
        # ordinals are taken only once every prompt is known to be good
        return [
            self._request(prompt.text, prompt.token_ids, one)
            for prompt, one in zip(texts, params, strict=True)
        ]

    def _longest(self, ids: Sequence[int], params: SamplingParams) -> int:
        """Tokens of prompt and completion at most."""
        if params.max_tokens is None:
            return self.max_model_len
        return min(self.max_model_len, len(ids) + params.max_tokens)

    def _request(self, text: str | None, ids: list[int], params: SamplingParams) -> Request:
        ordinal = next(self._ordinals)
        seed = params.seed
        if seed is None:
            # unseeded requests differ from each other and repeat with the engine's seed
            seed = make_stream(self.seed, ordinal)
        own = frozenset(params.stop_token_ids or ())
        stops = own if params.ignore_eos else own | self.eos_token_ids
        longest = self._longest(ids, params)
        metrics = RequestMetrics(arrival_time=time.perf_counter(), num_prompt_tokens=len(ids))
        sequences = [
            Running(
                request_id=str(ordinal),
                index=index,
                prompt=ids,
                params=params,
                stream=make_stream(seed, index),
                stop_ids=tuple(sorted(stops)),
                own_stop_ids=own,
                max_length=longest,
                metrics=attrs.evolve(metrics, speculative_decoding=SpeculationMetrics()),
            )
            for index in range(params.n)
        ]
        return Request(prompt=text, sequences=sequences, metrics=metrics)

    def _run(self, requests: list[Request], *, every_step: bool) -> Generator[Request]:
        """Run until the requests have ended; yield those that ended, or that moved in a step."""
        engine = self._loaded.engine
        owner = {id(s): r for r in requests for s in r.sequences}
        left = set(owner)
        # our own list: whoever reads another stream of this LLM moves our sequences along too
        news: list[Running] = []
        try:
            for request in requests:
                for sequence in request.sequences:
                    sequence.news = news
                    engine.add(sequence)
            while left:
                if not news:
                    self._loaded.engine.step()
                moved: dict[int, Request] = {}
                for sequence in news:
                    if sequence.finish_reason is not None:
                        left.discard(id(sequence))
                    mine = owner[id(sequence)]
                    moved[id(mine)] = mine
                news.clear()
                yield from (r for r in moved.values() if every_step or r.finished)
        finally:
            engine.abort(s for r in requests for s in r.sequences)

    # -- end ---------------------------------------------------------------

    def close(self) -> None:
        """Free the model, the cache and the speculator. Calling it again does nothing."""
        if self._assembly is not None:
            assembly, self._assembly = self._assembly, None
            assembly.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _seed(seed: object) -> int:
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
        raise ConfigError(f"seed is {seed!r}, but it has to be an integer of 64 bits")
    return seed
