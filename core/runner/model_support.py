"""Can this transformers model run packed, on a paged cache? What can be told without running it.

These checks name the reason; flags mislead, so `model_probe` then tries it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from specdec.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PretrainedConfig, PreTrainedModel

    from specdec.runner.kv_cache import KVSpec

UNLIMITED_LEN = 32768  # context of a model that names no limit

_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_ROPE_TYPES = {
    "dynamic": "its rotary frequencies depend on the longest position of a call",
    "longrope": "its rotary frequencies depend on the longest position of a call",
}
_MODEL_TYPES = {
    "doge": "it keeps data in its attention mask",
    "gpt_neo": "its causal mask is indexed by the rows of a call, not by position",
}


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
    limit: Any = position_limit(config)  # of a configuration that does not check its types
    if limit is not None and (not isinstance(limit, int) or limit < 2):
        raise refuse(
            name, f"it was made for {limit!r} positions, but a prompt and a token need 2 at least"
        )
    if getattr(text, "use_bidirectional_attention", None):
        raise refuse(name, "its attention is bidirectional")
    foreign = sorted(set(getattr(text, "layer_types", None) or []) - _LAYER_TYPES)
    if foreign:
        raise refuse(
            name,
            f"it has layers of type {', '.join(foreign)}, whose state is not a paged key-value "
            "cache; full, sliding and chunked attention can be served",
        )
    for rope in rope_types(getattr(text, "rope_parameters", None)):
        if rope in _ROPE_TYPES:
            raise refuse(
                name,
                f"rope type {rope!r}: {_ROPE_TYPES[rope]}, so requests would change each other",
            )


def check_model(model: PreTrainedModel) -> None:
    """Refuse what the class rules out. Raise TargetError."""
    name = architecture(model)
    if model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
        raise refuse(name, "it has no language-model head")
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    if any(getattr(module, "is_causal", True) is False for module in decoder.modules()):
        raise refuse(name, "it is an encoder, whose attention is bidirectional")
    if not type(model)._can_set_attn_implementation():
        raise refuse(name, "its attention does not go through transformers' AttentionInterface")


def find_layers(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """Return the decoder and its list of layers. Raise TargetError if they cannot be told."""
    count = model.config.get_text_config().num_hidden_layers
    # Llama 4 text models answer get_decoder() with themselves: look one level down as well.
    own: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    for decoder in (own, *model.children()):
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


def rope_types(parameters: Any) -> list[str]:
    """Collect rope types from flat or per-layer-type parameters."""
    if not isinstance(parameters, dict):
        return []
    own = [str(parameters[key]) for key in ("rope_type", "type") if key in parameters]
    return own + [kind for value in parameters.values() for kind in rope_types(value)]
