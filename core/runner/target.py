"""The target: an unmodified transformers model, run packed over the paged cache."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from specdec.errors import ConfigError, SpecdecError, TargetError
from specdec.runner import model_support
from specdec.runner.attention import NAME, AttentionContext, attending
from specdec.runner.attention_plan import plan_attention
from specdec.runner.hidden_states import HiddenStateHooks
from specdec.runner.kv_cache import KVSpec, PagedKVCache
from specdec.runner.linear import PackedLinear
from specdec.runner.model_loading import (
    check_device,
    check_module,
    load_config,
    load_model,
    reason,
    resolve_device,
    resolve_dtype,
)
from specdec.runner.model_probe import probe_exact, probe_packed
from specdec.runner.model_support import architecture, refuse
from specdec.runner.packing import pack_model
from specdec.runner.product import LEAST_ROWS
from specdec.runner.row_blocks import RowBlocks
from specdec.runner.rows import Rows, TargetOutputs
from specdec.tokenizer import check_token

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Rows", "TargetModel", "TargetOutputs"]

logger = logging.getLogger(__name__)


class TargetModel:
    """A causal LM of transformers that reads and writes a paged cache of ours.

    Build it with `load`. Used by one thread at a time. The model's attention implementation is
    ours only while a forward runs, so a module that was passed in stays usable by itself.
    """

    def __init__(
        self, model: PreTrainedModel, *, pack: bool, deterministic: bool, probe: bool
    ) -> None:
        self.model = model
        self.name = architecture(model)
        self.config = model.config.get_text_config()
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.deterministic = deterministic
        model_support.check_model(model)
        decoder, self.layers = model_support.find_layers(model)
        self.num_layers = len(self.layers)
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.config.vocab_size
        self.max_position_embeddings = model_support.position_limit(model.config)
        self._chunks = model_support.chunk_sizes(model.config, self.num_layers)
        self._configs = self._switchable_configs()
        self._hooks = HiddenStateHooks(decoder, self.layers, self.name)
        self._cache: PagedKVCache | None = None
        self._blocks: RowBlocks | None = None
        self._wants_pre_head = False
        self.attention_calls = 0  # of the last forward
        self.least_rows = 1  # fewer rows take no less time: pad them once, not in every layer
        with torch.inference_mode():
            self.kv_specs: list[KVSpec] = self._record_layers()
            if probe:
                probe_packed(self)
            self._pack(pack)
            if deterministic:
                probe_exact(self)

    @classmethod
    def load(
        cls,
        model: str | Path | PreTrainedModel,
        *,
        dtype: torch.dtype | str | None = "auto",
        device: torch.device | str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        token: str | bool | None = None,
        hf_overrides: dict[str, Any] | None = None,
        deterministic: bool = False,
        probe: bool = True,
        pack: bool | None = None,
    ) -> TargetModel:
        """Load a model and make sure it can be served.

        model: Hub id, local folder, or a transformers model, used as it is (dtype and device have
            to fit it, or be left at their defaults).
        dtype: `auto` (or None) is the checkpoint's own, on a CPU float32 for half-precision
            checkpoints.
        device: by default that of a module passed in, the CPU otherwise.
        hf_overrides: configuration keys to change before the model is built.
        deterministic: a row's logits do not depend on the rows computed with it, bit for bit.
            float32 on a CPU; in float64 only attention is fixed, which is as good as exact. In
            float32 it replaces linear layers and activations, for good and in a module passed in
            as well: its weights are then readable, but no longer to be trained or saved.
        probe: compare with the model's own forward first. Turn off only for a known model.
        pack: repack linear layers (float32 on a CPU). By default a model loaded here is packed,
            a module passed in only if `deterministic` needs it; packing changes it for good.
            Several targets may share such a module.

        Raise ConfigError for wrong settings, TargetError for a model that cannot be served.
        """
        kind = resolve_dtype(dtype)
        place = resolve_device(device)
        check_token(token)
        if isinstance(model, PreTrainedModel):
            check_module(model, dtype=kind, device=place, hf_overrides=hf_overrides)
            model.eval()  # type: ignore[no-untyped-call]
            built, packs = model, bool(pack) or (pack is None and deterministic)
        elif isinstance(model, (str, Path)):
            source: dict[str, Any] = {
                "revision": revision, "trust_remote_code": trust_remote_code, "token": token
            }  # fmt: skip
            place = place or torch.device("cpu")
            check_device(place)
            config = load_config(model, hf_overrides=hf_overrides, **source)
            built = load_model(
                model, config, dtype=kind, device=place, hf_overrides=hf_overrides, **source
            )
            packs = pack is not False
        else:
            raise TargetError(
                f"a model is a Hub id, a folder or a transformers PreTrainedModel; got a "
                f"{type(model).__name__}"
            )
        if deterministic:
            _check_deterministic(built, packs=packs)
        try:
            return cls(built, pack=packs, deterministic=deterministic, probe=probe)
        except SpecdecError:
            raise
        except Exception as error:  # whatever a model's own code raises
            raise refuse(
                architecture(built), f"a forward of two short requests raised {reason(error)}"
            ) from error

    @property
    def embedding(self) -> nn.Module:
        """The input embedding."""
        return self.model.get_input_embeddings()

    @property
    def lm_head(self) -> nn.Module:
        """The output head; its `weight` is [vocab, hidden] and stays readable when packed."""
        head = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        assert isinstance(head, torch.nn.Module)
        return head

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Create the cache; block 0 is for padding rows. Replaces one that exists."""
        self._cache = None  # free the old one before
        self._cache = PagedKVCache(self.kv_specs, num_blocks, block_size, self.dtype, self.device)

    @property
    def cache(self) -> PagedKVCache:
        """The cache, once allocated."""
        if self._cache is None:
            raise RuntimeError("call TargetModel.allocate before using the cache")
        return self._cache

    def capture(self, ids: Sequence[int], post_norm: bool, pre_head: bool = False) -> None:
        """Choose the hidden states that later forwards return, replacing an earlier choice.

        ids: id i is the residual stream entering layer i: 0 is the embedding's output, num_layers
            the last layer's output before the final norm. Hooks sit on these layers only.
        post_norm: also the states after the final norm, for every row.
        pre_head: also what the model's method `get_mtp_target_hidden_states()` gives after a
            forward, [rows or more, width]: the residual before a head that compresses it. The
            states after the final norm where there is no such method, or it gives None.
        """
        self._hooks.choose(ids, post_norm=post_norm, pre_head=pre_head)
        self._wants_pre_head = pre_head

    def forward(self, rows: Rows) -> TargetOutputs:
        """Compute the rows, store their keys and values, return logits and captured states."""
        return self.forward_on(rows, self.cache)

    def close(self) -> None:
        """Remove hooks and free the cache. The model itself is the caller's to drop."""
        self._hooks.remove()
        self._cache = None

    @torch.inference_mode()
    def forward_on(self, rows: Rows, cache: PagedKVCache) -> TargetOutputs:
        """As `forward`, over another cache of the same layout."""
        plan = plan_attention(
            rows.positions,
            rows.query_start,
            rows.context,
            rows.block_tables,
            cache.block_size,
            deterministic=self.deterministic,
            is_prefill=rows.is_prefill,
        )
        context = AttentionContext(self.name, cache, plan, self._chunks, self.deterministic)
        if self._blocks is not None:
            self._blocks.plan(plan.rows, rows.query_start, rows.is_prefill)
        try:
            with self._hooks.watching():
                logits = self._call(context, rows.tokens, rows.positions, rows.logits_rows)
        finally:
            if self._blocks is not None:
                self._blocks.clear()
        self.attention_calls = context.calls
        pre_head = self._exposed(plan.rows) if self._wants_pre_head else None
        return TargetOutputs(logits, *self._hooks.take(), pre_head)

    def _exposed(self, rows: int) -> Tensor | None:
        """What the model exposes before its head, for this forward's rows."""
        method = getattr(self.model, "get_mtp_target_hidden_states", None)
        states: Tensor | None = method() if method is not None else None
        if states is None:
            return self._hooks.last_post_norm
        states = states[0] if states.ndim == 3 else states
        if states.shape[0] < rows:
            raise refuse(
                self.name,
                f"its get_mtp_target_hidden_states() gave {states.shape[0]} rows of {rows}",
            )
        return states[:rows]  # the buffer behind it may be longer

    def _call(
        self, context: AttentionContext, tokens: Tensor, positions: Tensor, keep: Tensor
    ) -> Tensor:
        with attending(context), self._implementation(NAME):
            output = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=keep,
            )
        logits: Tensor = output.logits[0]
        return logits

    @contextmanager
    def _implementation(self, name: str) -> Iterator[None]:
        """Switch the attention implementation for one forward.

        The attribute behind the public setter: the setter walks every module of the model.
        """
        before = [config._attn_implementation_internal for config in self._configs]
        for config in self._configs:
            config._attn_implementation_internal = name
        try:
            yield
        finally:
            for config, old in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = old

    def _switchable_configs(self) -> list[Any]:
        """Set our implementation the public way once, see where it took, and undo it."""
        accepted = inspect.signature(self.model.forward).parameters
        for name in ("position_ids", "logits_to_keep"):
            if name not in accepted:
                raise refuse(self.name, f"its forward takes no {name}")
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(NAME)
        taken: dict[int, Any] = {}
        for module in self.model.modules():
            config = getattr(module, "config", None)
            if getattr(config, "_attn_implementation", None) == NAME:
                taken[id(config)] = config
        took = self.config._attn_implementation == NAME
        self.model.set_attn_implementation(before or "eager")
        if not took:
            raise refuse(self.name, "it did not take our attention implementation")
        return list(taken.values())

    def own_forward(self, tokens: Tensor) -> Tensor:
        """Return the model's own eager logits of one sequence: [tokens] -> [tokens, vocab]."""
        with self._implementation("eager"):
            logits: Tensor = self.model(tokens[None], use_cache=False).logits[0]
        return logits

    @property
    def reaches(self) -> list[int]:
        """Windows and chunks of the layers that have one."""
        windows = [spec.window for spec in self.kv_specs]
        return [reach for reach in [*windows, *self._chunks] if reach is not None]

    def _record_layers(self) -> list[KVSpec]:
        """Run two rows without a cache to see every layer's shapes."""
        context = AttentionContext(self.name, None, None, self._chunks, deterministic=False)
        tokens = torch.zeros(2, dtype=torch.int64, device=self.device)
        positions = torch.arange(2, device=self.device)
        self._call(context, tokens, positions, positions[:0])
        return model_support.check_layers(context.seen, self.num_layers, self.name)

    def _pack(self, pack: bool) -> None:
        if pack and self.device.type == "cpu" and self.dtype == torch.float32:
            self._blocks = pack_model(
                self.model, self.lm_head, self._record_layers, deterministic=self.deterministic
            )
            if any(isinstance(module, PackedLinear) for module in self.model.modules()):
                self.least_rows = LEAST_ROWS


def _check_deterministic(model: PreTrainedModel, *, packs: bool) -> None:
    if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"deterministic=True needs float32 (or float64) on a CPU; the model is {model.dtype} "
            f"on {model.device}"
        )
    if model.dtype == torch.float32 and not packs:
        raise ConfigError("deterministic=True in float32 replaces linear layers; drop pack=False")
