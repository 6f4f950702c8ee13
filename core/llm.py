"""The API: load a model, optionally with a speculator, and generate."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from specdec.config import SpeculativeConfig
from specdec.errors import ConfigError, PromptError
from specdec.followed import FollowedRequests
from specdec.intake import Intake
from specdec.llm_keys import refuse
from specdec.metrics import SpeculationMetrics
from specdec.outputs import RequestOutput
from specdec.prompts import Prompt, is_chat
from specdec.request import Request
from specdec.request_checks import check_ids, check_request_id
from specdec.runner.assemble import Assembly, assemble
from specdec.runner.engine_settings import EngineSettings
from specdec.sampling_params import SamplingParams
from specdec.sources import check_sources
from specdec.tokenizer import eos_ids, load_tokenizer

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
    max_num_seqs: completions that run at once. max_num_batched_tokens: tokens of a step at most,
        of prompts and of running requests with their drafts; what a prompt has more comes in
        chunks. Never more completions run than that many tokens.
    scheduling_policy: "fcfs" (first come, first served) or "priority": a lower `priority`
        number goes first, and sets aside running requests with a higher number where there is no
        room for both.
    kv_cache_memory: bytes for the key-value cache; by default enough for every sequence at full
        length, but no more than a share of the free memory. gpu_memory_utilization: on CUDA
        instead, the share of the device's memory that model and cache may take together. If
        the cache runs full, the last request is set aside and computed again later; its tokens
        stay the same.
    max_logprobs: the most log-probabilities per token that a request may ask for; -1 is any
        number.
    seed: of requests that bring none.
    enforce_eager: run without captured graphs, which the CPU loop always does.
    deterministic: float32 on a CPU: a token's logits do not depend, bit for bit, on what was
        computed with it, so equality with plain decoding holds on real models too. What counts
        is where a prompt is cut, which max_num_batched_tokens alone decides. Slower. A module
        that is passed in is changed for good.
    observers: objects with the hook `step_finished`.
    per_request_spec_decode_metrics: "summary", or "detailed": with the numbers of every step.

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
        scheduling_policy: str = "fcfs",
        kv_cache_memory: int | None = None,
        gpu_memory_utilization: float | None = None,
        max_logprobs: int = 20,
        seed: int = 0,
        enforce_eager: bool = False,
        deterministic: bool = False,
        observers: Iterable[object] = (),
        per_request_spec_decode_metrics: str = "summary",
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
            scheduling_policy=scheduling_policy,
            kv_cache_memory=kv_cache_memory,
            gpu_memory_utilization=gpu_memory_utilization,
            max_logprobs=max_logprobs,
            per_request_spec_decode_metrics=per_request_spec_decode_metrics,
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
            drafting = self._assembly.engine.drafting
            self._added = FollowedRequests(self._assembly.engine, every_step=True)
            self._intake = Intake(
                scheduler=self._assembly.engine.scheduler,
                tokenizer=self.tokenizer,
                eos=self.eos_token_ids,
                vocab_size=self._assembly.target.vocab_size,
                max_model_len=self._assembly.max_model_len,
                seed=self.seed,
                rule=drafting.agreement.rule if drafting else None,
                max_logprobs=max_logprobs,
                priorities=scheduling_policy == "priority",
                num_drafts=drafting.k if drafting else 0,
                names=self._added,
            )
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
    def dtype(self) -> torch.dtype:
        """Of the target's weights."""
        return self._loaded.target.dtype

    @property
    def device(self) -> torch.device:
        """Where the target is."""
        return self._loaded.target.device

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
        """Speculation over every request so far, those that run included, added up."""
        return self._loaded.engine.totals

    # -- generate ----------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for every prompt; outputs come in the order of the prompts, whole.

        prompts: text, token ids, chat messages (`[{"role": ..., "content": ...}]`, rendered by
            the model's template), or `{"prompt": text}` / `{"prompt_token_ids": ids}`; one or a
            list.
        sampling_params: one for all or one each; `SamplingParams()` by default.
        priority: one for all or one each, a lower number first; needs
            `scheduling_policy="priority"`.
        use_tqdm: show progress on stderr if it is a terminal.

        A request that fails ends with finish_reason "error" and says why in `error`; the others
        are unharmed. If the call is interrupted, its requests are aborted and the LLM stays
        usable.

        Raises:
            PromptError: a prompt or its parameters cannot be served; nothing was generated.
            OutOfMemoryError: a request alone could outgrow the cache; nothing was generated.
        """
        self._open()
        requests = self._intake.requests(prompts, sampling_params, priority)
        followed = FollowedRequests(self._loaded.engine, every_step=False)
        from tqdm.auto import tqdm

        with (
            tqdm(
                total=len(requests),
                desc="Generated",
                unit="prompt",
                disable=None if use_tqdm else True,
            ) as bar,
            closing(self._run(requests, followed)) as ended,
        ):
            for _ in ended:
                bar.update()
                if not bar.disable:
                    done = self.metrics
                    bar.set_postfix_str(f"{done.mean_acceptance_length:.2f} tokens/draft")
        return [followed.output(request, whole=True) for request in requests]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
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
        return self.generate(messages, sampling_params, priority=priority, use_tqdm=use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """Generate, yielding a request's output after every step that added to it.

        What an output holds is up to `SamplingParams.output_kind`. Mistakes in the arguments
        raise here, not in the loop. `text` never ends in half a character, nor in what may be the
        beginning of a stop string. Numbers about speculation are there once a request has ended.
        Leaving the loop early aborts what still runs. Several streams of one LLM may
        be read in turns: a step runs the requests of all.
        """
        self._open()
        return self._stream(self._intake.requests(prompts, sampling_params, priority))

    def _stream(self, requests: list[Request]) -> Iterator[RequestOutput]:
        followed = FollowedRequests(self._loaded.engine, every_step=True)
        with closing(self._run(requests, followed)) as moved:
            for request in moved:
                yield followed.output(request)

    def _run(self, requests: list[Request], followed: FollowedRequests) -> Generator[Request]:
        """Run until the requests have ended; yield those that a reader wants to see."""
        try:
            followed.start(requests)
            while followed:
                _ = self._loaded  # nobody steps an engine that was closed in between
                yield from followed.step()
        finally:
            followed.abort_all()

    # -- step by step ------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a prompt for `step`; returns the request's id, by default a number.

        To embed the engine in a loop of your own. Not to be called from several threads at once.

        Raises:
            PromptError: the prompt, its parameters or the id (in use) cannot be served.
            OutOfMemoryError: the request alone could outgrow the cache.
        """
        self._open()
        if request_id is not None:
            check_request_id(request_id, self._added)
        made = self._intake.requests(prompt, sampling_params, priority, request_id, single=True)
        self._added.start(made)
        return made[0].request_id

    def step(self) -> list[RequestOutput]:
        """Run one step; the outputs of requests of `add_request` that it moved or ended.

        What an output holds is up to `SamplingParams.output_kind`. The last output of every
        request has `finished`; one that was aborted gives a last output, too.
        """
        self._open()
        return [self._added.output(request) for request in self._added.step()]

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests of `add_request`; what they emitted comes with the next `step`.

        Ids of requests that have ended are ignored: an abort may cross with an end.
        """
        self._open()
        self._added.abort(check_ids(request_ids))

    def has_unfinished_requests(self) -> bool:
        """Whether any request of `add_request` has outputs to come."""
        return bool(self._added)

    @property
    def num_unfinished_requests(self) -> int:
        """Requests of `add_request` whose last output was not handed out yet."""
        return len(self._added)

    # -- end ---------------------------------------------------------------

    def _open(self) -> None:
        """Refuse to work once closed."""
        _ = self._loaded

    def close(self) -> None:
        """Free the model, the cache and the speculator. Calling it again does nothing.

        Requests that run are aborted.
        """
        if self._assembly is not None and self._assembly.engine.stepping:
            raise ConfigError("this LLM is in the middle of a step; close it afterwards")
        if self._assembly is not None:
            assembly, self._assembly = self._assembly, None
            assembly.engine.abort_all()
            if hasattr(self, "_added"):  # not if loading failed
                self._added.forget_all()
            assembly.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _seed(seed: object) -> int:
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
        raise ConfigError(f"seed is {seed!r}, but it has to be an integer of 64 bits")
    return seed
