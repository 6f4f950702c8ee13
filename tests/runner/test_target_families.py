"""Every family served: packed, chunked, verified rows equal the model's own whole forward.

Fifteen seconds on one core: some twenty models are built.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from specdec.errors import TargetError
from specdec.runner import linear
from specdec.runner.target import Rows, TargetModel

VOCAB = 97
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MIXED = ["sliding_attention", "full_attention"]

# name -> (prefix of the classes, changes of the base).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral_window": ("Mistral", {"sliding_window": 7}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 16, "sliding_window": 7, "layer_types": _MIXED, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 7, "layer_types": _MIXED}),
    "gpt2": ("GPT2", {"n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "opt": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt_neox": ("GPTNeoX", {}),
    "stablelm": ("StableLm", {}),
    "qwen3_moe": ("Qwen3Moe", {**_MOE, "head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 9}),
    "gpt_oss": (
        "GptOss",
        {"num_local_experts": 4, "head_dim": 16, "sliding_window": 7, "layer_types": _MIXED},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 20,
            "num_key_value_heads": 4,
        },
    ),
    "granite": ("Granite", {"attention_multiplier": 0.07, "residual_multiplier": 0.5}),
    "llama4": (
        "Llama4",
        {
            "attention_chunk_size": 8,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "head_dim": 16,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "attn_temperature_tuning": False,
        },
    ),
}


def build(name: str, *, dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    """Build a family's tiny model, seeded."""
    prefix, own = FAMILIES[name]
    options = {**_BASE, **own, **changes}
    config_class = next(
        getattr(transformers, prefix + suffix)
        for suffix in ("TextConfig", "Config")
        if hasattr(transformers, prefix + suffix)
    )
    known = config_class()
    options = {k: v for k, v in options.items() if hasattr(known, k) or k in own}
    head = "LMHeadModel" if prefix == "GPT2" else "ForCausalLM"
    return build_from(getattr(transformers, prefix + head), config_class(**options), dtype)


def build_from(model: Any, config: Any, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(0)
    built: PreTrainedModel = model(config).to(dtype).eval()
    if dtype == torch.float64 and built._can_set_experts_implementation():
        built.set_experts_implementation("eager")  # the grouped product knows no float64
    generator = torch.Generator().manual_seed(1)
    for name, parameter in built.named_parameters():
        # Initialised to zero, these would hide what they take part in.
        if parameter.ndim == 1 or "sinks" in name:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data += 0.2 * noise.to(dtype)
    return built


def own_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The model's own eager forward of one whole sequence: [tokens, vocab]."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits: Tensor = model(tokens[None], use_cache=False).logits[0]
    model.set_attn_implementation(before or "eager")
    return logits


# Rows per request and forward: whole and cut chunks, decode, verification; 0 = not in this step.
LENGTHS = (41, 23, 29, 11)
SCHEDULE = ((20, 5, 17, 0), (18, 12, 1, 4), (1, 1, 7, 5), (1, 4, 3, 1), (1, 1, 1, 1))


def sequences(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (n,), generator=generator) for n in LENGTHS]


def packed_logits(
    target: TargetModel,
    tokens: list[Tensor],
    schedule: tuple[tuple[int, ...], ...] = SCHEDULE,
    *,
    block_size: int = 4,
    padding: int = 2,
    runs: bool = False,
) -> list[Tensor]:
    """Run sequences through the paged cache by `schedule`; the logits of every row, by request.

    runs: a request's pages follow each other; otherwise they are scattered.
    """
    blocks = -(-max(len(t) for t in tokens) // block_size)
    total = blocks * len(tokens) + 1
    target.allocate(total, block_size)
    target.cache.fill(float("nan"))
    device = target.device
    order = torch.randperm(total - 1, generator=torch.Generator().manual_seed(2)) + 1
    tables = (order.sort().values if runs else order).view(len(tokens), blocks).to(device)
    done = [0] * len(tokens)
    logits: list[list[Tensor]] = [[] for _ in tokens]
    for counts in schedule:
        spans = [(d, d + n) for d, n in zip(done, counts, strict=True)]
        start = [0]
        for count in counts:
            start.append(start[-1] + count)
        pieces = [t[a:b].cpu() for t, (a, b) in zip(tokens, spans, strict=True)]
        pad = torch.zeros(padding, dtype=torch.int64)
        rows = Rows(
            tokens=torch.cat([*pieces, pad]).to(device),
            positions=torch.cat([torch.arange(a, b) for a, b in spans] + [pad]).to(device),
            query_start=start,
            context=[b for _, b in spans],
            block_tables=tables,
            logits_rows=torch.arange(start[-1], device=device),
        )
        out = target.forward(rows).logits
        for i, part in enumerate(torch.split(out, list(counts))):
            logits[i].append(part)
        done = [b for _, b in spans]
    assert done == [len(t) for t in tokens]
    return [torch.cat(parts) for parts in logits]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_have_the_logits_of_the_whole_sequence(family: str) -> None:
    model = build(family)
    tokens = sequences()
    expected = [own_logits(model, t) for t in tokens]
    scale = max(e.abs().max().item() for e in expected)
    assert scale > 0.01

    target = TargetModel.load(model)
    for runs in (False, True):
        got = packed_logits(target, tokens, runs=runs)
        for have, want in zip(got, expected, strict=True):
            torch.testing.assert_close(have, want, rtol=0, atol=2e-5 * scale)


MOE = {"qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "llama4"}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - MOE))
def test_deterministic_rows_are_the_same_bits_in_any_schedule(family: str) -> None:
    # Widths below a vector register, where every rounding that depends on the row count shows.
    model = build(family, dtype=torch.float32)
    tokens = sequences()
    expected = [own_logits(model, t) for t in tokens]
    target = TargetModel.load(model, deterministic=True)
    # The same chunks, then rows one by one.
    single = (
        *((20, 5, 17, 0), (18, 12, 0, 4)),
        *((1, 1, 1, 1),) * 3,
        *((0, 1, 1, 1),) * 3,
        *((0, 0, 1, 1), *((0, 0, 1, 0),) * 5),
    )

    mixed = packed_logits(target, tokens)
    got = packed_logits(target, tokens, single, runs=True)

    for a, b, want in zip(mixed, got, expected, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, want, rtol=0, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("family", ["llama", "gpt2", *sorted(MOE)])
def test_layers_packed_for_speed_compute_what_they_replaced(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_SMALL", 0)
    model = build(family, dtype=torch.float32)
    tokens = sequences()
    expected = [own_logits(model, t) for t in tokens]
    got = packed_logits(TargetModel.load(model, pack=True), tokens, runs=True)
    for have, want in zip(got, expected, strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=1e-4 * want.abs().max().item())


@pytest.mark.parametrize("family", sorted(MOE))
def test_stacked_experts_cannot_be_deterministic(family: str) -> None:
    reason = r"cannot be served: deterministic=True is not possible, its logits depend on the num"
    with pytest.raises(TargetError, match=reason):
        TargetModel.load(build(family, dtype=torch.float32), deterministic=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_code_serves_a_cuda_device(family: str, dtype: torch.dtype) -> None:
    model = build(family, dtype=dtype).to("cuda")  # type: ignore[arg-type]
    tokens = [t.cuda() for t in sequences()]
    target = TargetModel.load(model)  # the probe runs too
    got = packed_logits(target, tokens)
    expected = [own_logits(model, t) for t in tokens]
    scale = max(e.abs().max().item() for e in expected)
    worst = max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True))
    # A router may flip on a near-tie in bfloat16, so only the probe judges there.
    assert dtype == torch.bfloat16 or worst < 1e-3 * scale
    assert all(logits.isfinite().all() for logits in got)
