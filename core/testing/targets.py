"""Targets whose right answer is known, or that cost next to nothing: real transformers models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


def _built(config: LlamaConfig, dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    model: Any = LlamaForCausalLM(config)
    built: LlamaForCausalLM = model.to(dtype).eval()
    return built


def toy_target(
    table: Tensor, *, max_model_len: int = 256, eos_token_id: int | None = None
) -> LlamaForCausalLM:
    """A Llama in float64 whose logits after token `t` are `table[t]`, whatever came before.

    table: [vocab, vocab] logits.

    The embedding is one-hot, attention and feed-forward add nothing, the head is the table: so
    the law of any continuation is a product of rows of `softmax(table)`.
    """
    vocab = table.shape[0]
    width = max(8, 2 * (-(-vocab // 2)))  # an even head size, at least 8
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=max_model_len,
        rms_norm_eps=0.0,
        eos_token_id=eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = _built(config)
    with torch.no_grad():
        embedding: Any = model.get_input_embeddings().weight
        embedding.zero_()
        embedding[:, :vocab] = torch.eye(vocab, dtype=torch.float64)
        decoder: Any = model.model
        layer = decoder.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        # the norm turns a one-hot vector of this width into one of length sqrt(width)
        head = model.lm_head.weight
        head.zero_()
        head[:, :vocab] = table.double().T / width**0.5
    return model


def tiny_target(
    *,
    vocab: int = 61,
    layers: int = 2,
    seed: int = 0,
    scale: float = 1.0,
    max_model_len: int = 256,
    dtype: torch.dtype = torch.float64,
    eos_token_id: int | None = None,
    **config: Any,
) -> LlamaForCausalLM:
    """A small random Llama.

    scale: of its logits; larger gives a law with fewer contenders. config: further settings of
    `transformers.LlamaConfig`, and other values for those set here.
    """
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_model_len,
        "initializer_range": 0.3,  # attention has to matter, or the output repeats itself
        "eos_token_id": eos_token_id,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    model = _built(LlamaConfig(**{**settings, **config}), dtype)
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    return model


def save_tiny_model(folder: str | Path, **settings: Any) -> None:
    """Write a `tiny_target` with a tokenizer and a chat template, as a folder that `LLM` loads.

    settings: of `tiny_target`, except `vocab`. The tokenizer has a token per byte, so any text
    goes in and comes out.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast  # its constructor has no types
    tokenizer = fast(tokenizer_object=bytewise)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(folder)
    tiny_target(vocab=len(alphabet), **settings).save_pretrained(folder)
