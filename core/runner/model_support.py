"""Can this transformers model run on a paged cache, packed? Flags mislead, so it is tried.

Static checks come first, because they name the reason. Then a probe: two short requests, packed
and in two chunks, against the model's own eager forward of each. It catches every silent failure
seen except those that only show at lengths the probe does not reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from specdec.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from specdec.runner.kv_cache import KVSpec

_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_ROPE_TYPES = {
    "dynamic": "its rotary frequencies depend on the longest position of a call",
    "longrope": "its rotary frequencies depend on the longest position of a call",
}
_MODEL_TYPES = {
    "doge": "it keeps data in its attention mask",
    "gpt_neo": "its causal mask is indexed by the rows of a call, not by position",
}
_PROBE_TOKENS = 64  # longest request of the probe
# Largest accepted logit difference over the logit scale. Negative controls (a dropped window, sink,
# softcap or scale) are at 1e-1 and above, right answers at 1e-5 and below in float32.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def architecture(model: PreTrainedModel) -> str:
    """Return the name errors use for a model."""
    return type(model).__name__


def refuse(name: str, reason: str) -> TargetError:
    """Return the error for a model that cannot be served."""
    return TargetError(f"{name} cannot be served: {reason}")


def check_config(config: PretrainedConfig, name: str) -> None:
    """Refuse what the configuration alone rules out. Raise TargetError."""
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise refuse(name, "it is an encoder-decoder, not a causal language model")
    if text.model_type in _MODEL_TYPES:
        raise refuse(name, _MODEL_TYPES[text.model_type])
    if getattr(text, "use_bidirectional_attention", None):
        raise refuse(name, "its attention is bidirectional")
    foreign = sorted(set(getattr(text, "layer_types", None) or []) - _LAYER_TYPES)
    if foreign:
        raise refuse(
            name,
            f"it has layers of type {', '.join(foreign)}, whose state is not a paged key-value "
            "cache; full, sliding and chunked attention can be served",
        )
    for rope in _rope_types(getattr(text, "rope_parameters", None)):
        if rope in _ROPE_TYPES:
            raise refuse(
                name,
                f"rope type {rope!r}: {_ROPE_TYPES[rope]}, so requests would change each other",
            )


def check_model(model: PreTrainedModel) -> None:
    """Refuse what the class rules out. Raise TargetError."""
    name = architecture(model)
    if model.get_output_embeddings() is None:
        raise refuse(name, "it has no language-model head")
    if not type(model)._can_set_attn_implementation():
        raise refuse(name, "its attention does not go through transformers' AttentionInterface")


def find_layers(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """Return the decoder and its list of layers. Raise TargetError if they cannot be told."""
    count = model.config.get_text_config().num_hidden_layers
    # Llama 4 text models answer get_decoder() with themselves: look one level down as well.
    for decoder in (model.get_decoder(), *model.children()):
        lists = {
            name: child
            for name, child in decoder.named_children()
            if isinstance(child, nn.ModuleList) and len(child) == count
        }
        for name in ("layers", "h", *(lists if len(lists) == 1 else ())):
            if name in lists:
                return decoder, lists[name]
    raise refuse(architecture(model), f"no single list of its {count} layers was found")


def position_limit(config: PretrainedConfig) -> int | None:
    """Return how many positions the model serves, None if nothing limits them."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    # Llama 4 scales queries by the row's index in the call instead of its position; below
    # floor_scale both scales are 1.
    if getattr(text, "attn_temperature_tuning", False) and hasattr(text, "floor_scale"):
        floor = int(text.floor_scale) - 1
        limit = floor if limit is None else min(limit, floor)
    return limit


def chunk_sizes(config: PretrainedConfig, layers: int) -> list[int | None]:
    """Return the attention chunk of every layer. Llama 4 does not pass it to its attention."""
    text = config.get_text_config()
    size = getattr(text, "attention_chunk_size", None)
    types = getattr(text, "layer_types", None) or [""] * layers
    return [size if kind == "chunked_attention" else None for kind in types]


def check_layers(seen: Sequence[tuple[nn.Module, KVSpec]], layers: int, name: str) -> list[KVSpec]:
    """Order the specs of one recorded forward by layer. Raise TargetError unless one per layer."""
    if any(getattr(module, "is_causal", True) is False for module, _ in seen):
        raise refuse(name, "its attention is bidirectional (an encoder)")
    if len({id(module) for module, _ in seen}) != len(seen):
        raise refuse(name, "a layer calls its attention more than once")
    if len(seen) != layers:
        raise refuse(
            name,
            f"{len(seen)} of its {layers} layers use attention; the others keep a state that is "
            "not a paged key-value cache",
        )
    by_layer: dict[Any, KVSpec] = {getattr(module, "layer_idx", None): s for module, s in seen}
    if sorted(by_layer, key=str) != sorted(range(layers), key=str):
        raise refuse(name, "its attention modules do not carry their layer's index")
    return [by_layer[i] for i in range(layers)]


@attrs.frozen
class ProbeReport:
    """What the load-time probe found."""

    difference: float  # largest absolute logit difference
    scale: float  # largest absolute logit of the model's own forward
    reached: bool  # whether it was longer than every window and chunk


def probe(
    name: str,
    vocab_size: int,
    dtype: torch.dtype,
    reaches: Sequence[int],
    packed: Callable[[list[Tensor], list[tuple[int, int]]], list[Tensor]],
    plain: Callable[[Tensor], Tensor],
    *,
    limit: int | None,
) -> ProbeReport:
    """Compare packed, chunked logits with the model's own.

    reaches: windows and chunks of the layers. packed(sequences, spans): logits of the rows
    start .. end of every sequence, in one forward. plain(sequence): logits of every row.
    Raise TargetError if they differ by more than the dtype explains.
    """
    longest = max(reaches, default=0)
    length = max(19, min(longest + 7, _PROBE_TOKENS))
    if limit is not None:
        length = min(length, limit)
    generator = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(vocab_size, (n,), generator=generator) for n in (length, max(length // 2, 1))
    ]
    # The second call mixes a chunk and a single row, as serving does.
    cuts = [length * 3 // 5, len(sequences[1]) - 1]
    first = packed(sequences, [(0, cuts[0]), (0, cuts[1])])
    second = packed(sequences, [(cuts[0], length), (cuts[1], len(sequences[1]))])
    worst, mean, scale = 0.0, 0.0, 0.0
    for i, sequence in enumerate(sequences):
        expected = plain(sequence).double()
        got = torch.cat([first[i], second[i]]).double()
        rows = (got - expected).abs().amax(-1)
        # NaN would pass every comparison; it means an unwritten slot was read.
        rows = torch.nan_to_num(rows, nan=float("inf"))
        worst = max(worst, rows.max().item())
        mean = max(mean, rows.mean().item())
        scale = max(scale, expected.abs().max().item())
    # In half precision a router may flip on a near-tie: single rows prove nothing there.
    judged = mean if dtype.itemsize == 2 else worst
    if not judged <= _TOLERANCE[dtype] * scale:
        raise refuse(
            name,
            "packed and chunked, its logits are not those of its own forward (max logit "
            f"difference {worst:.2g} at scale {scale:.2g})",
        )
    return ProbeReport(worst, scale, reached=length > longest)


def _rope_types(parameters: Any) -> list[str]:
    """Collect rope types from flat or per-layer-type parameters."""
    if not isinstance(parameters, dict):
        return []
    own = [str(parameters[key]) for key in ("rope_type", "type") if key in parameters]
    return own + [kind for value in parameters.values() for kind in _rope_types(value)]
