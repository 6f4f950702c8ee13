"""Put an engine together: target, speculator, memory, session."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from specdec import checkpoints, plugins
from specdec.acceptance import conditional, rates_for_length
from specdec.config import SpeculativeConfig
from specdec.errors import (
    PLUGIN_ERRORS,
    ConfigError,
    PluginError,
    SpecdecError,
    blame,
)
from specdec.legality import Agreement, settle
from specdec.length_policy import FallingLength, FixedLength, LengthPolicy
from specdec.length_table import drafts_by_batch
from specdec.runner import memory
from specdec.runner.drafting import Drafting
from specdec.runner.editing import Editing
from specdec.runner.engine import Engine
from specdec.runner.engine_settings import EngineSettings
from specdec.runner.kv_cache import BlockPool
from specdec.runner.memory import BLOCK_SIZE
from specdec.runner.model_support import UNLIMITED_LEN
from specdec.runner.sampling import kernel_verify
from specdec.runner.scheduler import Scheduler
from specdec.runner.state import Slots
from specdec.runner.target import TargetModel
from specdec.session import Session
from specdec.speculator import Speculator
from specdec.step_counter import StepCounter
from specdec.types import Capabilities, Draft, Pools, Step, TargetInfo, Verdict
from specdec_kernels import EditInputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


@attrs.define(eq=False)
class Assembly:
    """An engine and what has to be freed with it. label: how errors name the speculator."""

    target: TargetModel
    engine: Engine
    max_model_len: int
    speculator: Speculator | None
    label: str

    def close(self) -> None:
        """Free everything, the speculator first."""
        try:
            if self.speculator is not None:
                _call(self.label, "close", self.speculator.close)
        finally:
            self.target.close()


def assemble(
    model: str | Path | PreTrainedModel,
    config: SpeculativeConfig | None,
    settings: EngineSettings,
    *,
    dtype: torch.dtype | str,
    device: torch.device | str | None,
    observers: Iterable[object],
    load: Mapping[str, Any],
) -> Assembly:
    """Load the target and the speculator and size the cache.

    Whatever can be checked without weights is checked before they are read.
    """
    choice = _choose(config)
    own = config.resolve(choice.speculator, choice.method) if config and choice else None
    if device is None:
        on_module = getattr(model, "device", None)
        device = on_module or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"device is {device!r}, but it has to be 'cpu', 'cuda', 'cuda:N' or a torch device"
        ) from error
    target = TargetModel.load(
        model, dtype=dtype, device=device, deterministic=settings.deterministic, **load
    )
    label = choice.label if choice else "no speculator"
    speculator: Speculator | None = None
    try:
        max_model_len = _context(settings.max_model_len, target)
        capabilities, agreement = None, None
        if config is not None and choice is not None and own is not None:
            told = _target_info(model, target, max_model_len, settings, load.get("revision"))
            loaded = _call(label, "load", lambda: choice.speculator.load(told, own))
            if not isinstance(loaded, Speculator):
                raise PluginError(
                    f"{label}: load() gave {type(loaded).__name__}; "
                    "an instance of the speculator is expected"
                )
            speculator = loaded
            capabilities = _call(label, "capabilities", speculator.capabilities)
            if not isinstance(capabilities, Capabilities):
                raise PluginError(
                    f"{label}: capabilities() gave {type(capabilities).__name__}; "
                    "specdec.Capabilities is expected"
                )
            agreement = settle(config, capabilities, label)
            if agreement.drafts >= max_model_len:
                raise ConfigError(
                    f"num_speculative_tokens is {agreement.drafts}, which no sequence of "
                    f"max_model_len={max_model_len} tokens has room for"
                )
            wanted = (
                capabilities.hidden_states,
                capabilities.post_norm,
                capabilities.pre_head,
            )
            _call(label, "capabilities", lambda: target.capture(*wanted))
        engine = _engine(
            target, speculator, config, capabilities, agreement, settings,
            label=label, max_model_len=max_model_len, observers=observers,
        )  # fmt: skip
    except BaseException:
        try:
            if speculator is not None:
                speculator.close()
        except Exception:  # the first error says more than that of cleaning up
            logger.exception("%s raised in close", label)
        target.close()
        raise
    return Assembly(
        target=target,
        engine=engine,
        max_model_len=max_model_len,
        speculator=speculator,
        label=label,
    )


@attrs.frozen
class _Choice:
    """A speculator's class. label: how errors name it."""

    speculator: type[Speculator]
    method: str
    label: str


def _choose(config: SpeculativeConfig | None) -> _Choice | None:
    if config is None:
        return None
    method = config.method
    if isinstance(method, type):
        return _Choice(method, method.__name__, f"speculator {method.__name__} (given as a class)")
    if method is None:
        assert config.model is not None  # parse refuses a configuration with neither
        method = checkpoints.detect(config.model, config.revision)
    info = plugins.find(method)
    return _Choice(plugins.load(info), info.method, str(info))


def _call(label: str, what: str, call: Callable[[], Any]) -> Any:
    """Run a life-cycle method; an error says whose it was."""
    try:
        return call()
    except SpecdecError as error:
        error.add_note(f"raised by {label} in {what}")
        raise
    except PLUGIN_ERRORS as error:
        raise PluginError(blame(label, error, what)) from error


def _context(wanted: int | None, target: TargetModel) -> int:
    limit = target.max_position_embeddings
    if wanted is None:
        return limit or UNLIMITED_LEN
    if limit is not None and wanted > limit:
        raise ConfigError(
            f"max_model_len is {wanted}, but {target.name} was made for {limit} tokens"
        )
    if wanted < 2:
        raise ConfigError(f"max_model_len is {wanted}, but a prompt and a token need 2")
    return wanted


def _target_info(
    model: object,
    target: TargetModel,
    max_model_len: int,
    settings: EngineSettings,
    revision: str | None,
) -> TargetInfo:
    return TargetInfo(
        name=str(model) if isinstance(model, str | Path) else target.name,
        model=str(model) if isinstance(model, str | Path) else None,
        revision=revision,
        config=target.config,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        max_model_len=max_model_len,
        max_num_seqs=settings.max_num_seqs,
        dtype=target.dtype,
        device=target.device,
        embedding=target.embedding,
        lm_head=target.lm_head,
    )


def _engine(
    target: TargetModel,
    speculator: Speculator | None,
    config: SpeculativeConfig | None,
    capabilities: Capabilities | None,
    agreement: Agreement | None,
    settings: EngineSettings,
    *,
    label: str,
    max_model_len: int,
    observers: Iterable[object],
) -> Engine:
    drafts = agreement.drafts if agreement else 0
    lookahead = capabilities.lookahead_slots if capabilities else 0
    max_blocks = -(-(max_model_len + lookahead) // BLOCK_SIZE)
    pages = memory.allocate(
        target,
        capabilities.kv_layers if capabilities else (),
        workspace=capabilities.workspace_bytes if capabilities else 0,
        budget=settings.kv_cache_memory,
        utilization=settings.gpu_memory_utilization,
        sequences=settings.max_num_seqs,
        max_blocks=max_blocks,
    )
    memory.check_history(settings.max_num_seqs, max_model_len)
    slots = Slots(settings.max_num_seqs, max_model_len, max_blocks, drafts, target.device)
    scheduler = Scheduler(
        slots,
        BlockPool(pages.num_blocks),
        BLOCK_SIZE,
        settings.max_num_batched_tokens,
        lookahead,
        fixed_chunks=settings.deterministic,
        preempts_for_priority=settings.scheduling_policy == "priority",
    )
    counter = StepCounter(
        settings.max_num_seqs + 1,
        drafts,
        detailed=settings.per_request_spec_decode_metrics == "detailed",
    )
    rule = agreement.rule.name if agreement else "coupled"
    rates = _rates(config, drafts, target.device) if config else None

    def verify(step: Step, draft: Draft, logits: torch.Tensor, edits: EditInputs | None) -> Verdict:
        return kernel_verify(
            step, logits, draft.tokens,
            method=rule, q=draft.q, acceptance_rates=rates, edits=edits,
        )  # fmt: skip

    session = Session(
        speculator,
        label=label,
        rule=rule,
        verify=verify,
        vocab_size=target.vocab_size,
        device=target.device,
        capabilities=capabilities,
        observers=[*observers, counter],
    )
    drafting = None
    if speculator is not None and capabilities and agreement and config:
        pools = Pools(
            kv=pages.drafter,
            target_kv=pages.target if capabilities.reads_target_kv else (),
            num_blocks=pages.num_blocks,
            block_size=BLOCK_SIZE,
            num_slots=settings.max_num_seqs + 1,
            max_drafts=drafts,
            max_rows=settings.max_num_batched_tokens,
        )
        _call(label, "allocate", lambda: speculator.allocate(pools))
        reach = [n for n in (capabilities.max_context, config.max_model_len) if n is not None]
        drafting = Drafting(
            speculator=speculator,
            capabilities=capabilities,
            session=session,
            slots=slots,
            agreement=agreement,
            policy=_policy(config, drafts, settings.max_num_seqs),
            max_context=min([max_model_len, *reach]),
        )
    return Engine(
        target=target,
        slots=slots,
        scheduler=scheduler,
        session=session,
        drafting=drafting,
        counter=counter,
        editing=Editing(slots, target.vocab_size, target.device),
    )


def _policy(config: SpeculativeConfig, drafts: int, max_num_seqs: int) -> LengthPolicy:
    table = None
    if config.num_speculative_tokens_per_batch_size is not None:
        table = drafts_by_batch(config.num_speculative_tokens_per_batch_size, drafts, max_num_seqs)
    if config.length_policy == "falling":
        return FallingLength(drafts, max_num_seqs, table)
    return FixedLength(drafts, table)


def _rates(config: SpeculativeConfig, drafts: int, device: torch.device) -> torch.Tensor | None:
    rates = config.synthetic_acceptance_rates
    if config.synthetic_acceptance_length is not None:
        rates = rates_for_length(config.synthetic_acceptance_length, drafts)
    if rates is None:
        return None
    return torch.tensor(conditional(rates), dtype=torch.float32, device=device)
