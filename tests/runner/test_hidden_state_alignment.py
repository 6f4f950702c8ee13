"""Features that a speculator is given are the target's own states at the same index."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from specdec import LLM, Draft, SamplingParams, Step, hookimpl
from specdec.testing import RecordingSpeculator, emitted
from specdec.testing.speculators import RecordingOptions
from specdec.types import RequestChanges

PROMPTS = [list(range(3, 20)), [5], [9, 8, 7, 9, 8, 7, 9]]
LAYERS = 3

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 6, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {"sliding_window": 5, "head_dim": 8}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": LAYERS, "n_head": 4}),
}

# Gemma 2 attends eagerly when it runs by itself, and that rounds its softmax to float32
TOLERANCE = {"llama": 1e-9, "mistral": 1e-9, "gemma2": 1e-5, "gpt2": 1e-9}


def family(name: str) -> PreTrainedModel:
    model, config, changes = FAMILIES[name]
    options: dict[str, Any] = {
        "vocab_size": 41,
        "initializer_range": 0.3,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        **changes,
    }
    if name != "gpt2":
        options |= {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
        }
    torch.manual_seed(1)
    built: Any = getattr(transformers, model)(getattr(transformers, config)(**options))
    typed: PreTrainedModel = built.double().eval()
    return typed


def own_states(model: Any, tokens: list[int]) -> Tensor:
    """What `TargetOutputs` names: entering layers 0 to n - 1, leaving the last, after the norm.

    The latter stands there twice: these models expose nothing else before their head.
    """
    if model.config.model_type == "gemma2":
        # what it takes by default in some versions of transformers leaves out the soft cap
        model.set_attn_implementation("eager")
    decoder = model.get_decoder()
    layers = decoder.h if hasattr(decoder, "h") else decoder.layers
    seen: list[Tensor] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        seen.append(output if isinstance(output, Tensor) else output[0])

    handle = layers[-1].register_forward_hook(keep)
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    handle.remove()
    last = states[LAYERS][0]
    return torch.cat([*(s[0] for s in states[:LAYERS]), seen[0][0], last, last], dim=-1)


@attrs.frozen
class GuidedOptions(RecordingOptions):
    """streams: prompt → tokens to draft; every third is drafted wrongly."""

    streams: Any = None


class GuidedSpeculator(RecordingSpeculator):
    """Records what it is given, and drafts what is accepted in part."""

    Options: ClassVar[type] = GuidedOptions

    def __init__(self, options: GuidedOptions) -> None:
        super().__init__(options)
        self.text: dict[int, list[int]] = {}
        self.by_prompt: dict[tuple[int, ...], int] = {}
        made.append(self)

    def requests_changed(self, changes: RequestChanges) -> None:
        super().requests_changed(changes)
        assert isinstance(self.options, GuidedOptions)
        for request in changes.added:
            self.by_prompt[request.tokens] = request.slot
            self.text[request.slot] = [*request.tokens, *self.options.streams[request.tokens]]

    @hookimpl
    def propose(self, step: Step, hidden: Tensor | None, k: int) -> Draft:
        super().propose(step, hidden, k)
        tokens = torch.full((step.batch, k), -1)
        for request, slot in enumerate(step.slots.tolist()):
            if slot >= 0:
                length = int(step.state.length[slot])
                for column, token in enumerate(self.text[slot][length : length + k]):
                    wrong = (length + column) % 3 == 0
                    tokens[request, column] = (token + wrong) % 41
        return Draft(tokens=tokens)


made: list[GuidedSpeculator] = []


@pytest.mark.parametrize("chunk", [512, 5], ids=["one-chunk", "several-chunks"])
@pytest.mark.parametrize("name", FAMILIES)
def test_features_equal_the_models_own_states_at_every_index(name: str, chunk: int) -> None:
    model = family(name)
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=14)
    plain = emitted(model, PROMPTS, params)
    config = {
        "method": GuidedSpeculator,
        "layers": tuple(range(LAYERS + 1)),
        "post_norm": True,
        "pre_head": True,
        "streams": {tuple(p): ids[0] for p, ids in zip(PROMPTS, plain, strict=True)},
        "num_speculative_tokens": 4,
    }
    with LLM(model, speculative_config=config, max_num_batched_tokens=chunk) as llm:
        llm.generate(PROMPTS, params, use_tqdm=False)
        metrics = llm.metrics
    # rows of prompts, of accepted drafts and of tokens after a refused one were all seen
    assert 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens
    recorded = made[-1]
    prefills = sum(any(c["is_prefill"]) for c in recorded.calls)
    assert prefills == (1 if chunk == 512 else 6)
    for prompt, (ids,) in zip(PROMPTS, plain, strict=True):
        text = [*prompt, *ids]
        slot = recorded.by_prompt[tuple(prompt)]
        features = recorded.features[slot]
        # the last token is emitted, but never processed
        assert sorted(features) == list(range(len(text) - 1))
        assert recorded.pairs[slot] == dict(enumerate(text[1:]))
        ours = torch.stack([features[i] for i in range(len(text) - 1)])
        torch.testing.assert_close(
            ours, own_states(model, text[:-1]), rtol=TOLERANCE[name], atol=TOLERANCE[name]
        )


def test_layers_come_in_ascending_order_whatever_order_they_are_asked_in() -> None:
    model = family("llama")
    config: dict[str, Any] = {"method": GuidedSpeculator, "streams": {(4, 5, 6): ()}}
    found = []
    for layers in ((3, 1), (1, 3), (3, 1, 3)):
        with LLM(model, speculative_config={**config, "layers": layers}) as llm:
            llm.generate([4, 5, 6], SamplingParams(max_tokens=1), use_tqdm=False)
        found.append(torch.stack([made[-1].features[0][i] for i in range(3)]))
    assert found[0].shape == (3, 64)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    torch.testing.assert_close(
        found[0], own_states(model, [4, 5, 6])[:, [*range(32, 64), *range(96, 128)]]
    )


def test_a_drafter_that_asks_for_no_states_gets_none() -> None:
    config = {"method": GuidedSpeculator, "streams": {(4,): ()}}
    with LLM(family("llama"), speculative_config=config) as llm:
        llm.generate([4], SamplingParams(max_tokens=2), use_tqdm=False)
    assert made[-1].features == {0: {}}
    assert made[-1].pairs[0].keys() == {0, 1}
