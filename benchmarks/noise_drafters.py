"""What `noise.py` compares: a model's logits over text of its own, and those of worse copies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

LONGEST = 64  # tokens of a prompt with its template: longer ones are left out


@attrs.frozen
class Text:
    """A prompt and what the model wrote after it."""

    ids: Tensor  # int64 [tokens]
    written: int  # the last so many are the model's own


@attrs.frozen
class Drafter:
    """A worse copy of the model: `change` works in place; logits are divided by `temperature`."""

    says: str
    change: Callable[[Any], None] | None = None
    temperature: float = 1.0


def _matrices(model: Any) -> Iterator[Tensor]:
    """The linear layers; embeddings and head stay as they are."""
    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                yield module.weight.data


def _disturb(strength: float, model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    for weight in _matrices(model):
        noise = torch.empty_like(weight).normal_(generator=generator)
        weight.add_(noise, alpha=strength * float(weight.std()))


def _cut(count: int, model: Any) -> None:
    model.model.layers = model.model.layers[:-count]
    model.config.num_hidden_layers -= count


def _quantise(bits: int, model: Any) -> None:
    most = 2 ** (bits - 1) - 1
    for weight in _matrices(model):
        step = weight.abs().amax(1, keepdim=True) / most
        weight.copy_((weight / step).round() * step)


DRAFTERS = {
    "noise 0.05": Drafter("noise on weights, 0.05 of their deviation", partial(_disturb, 0.05)),
    "noise 0.1": Drafter("the same, 0.1", partial(_disturb, 0.1)),
    "2 layers less": Drafter("without the last 2 layers", partial(_cut, 2)),
    "6 layers less": Drafter("without the last 6 layers", partial(_cut, 6)),
    "int8": Drafter("weights rounded to 8 bits, a scale per output", partial(_quantise, 8)),
    "int4": Drafter("the same, 4 bits", partial(_quantise, 4)),
    "T x 0.7": Drafter("the model itself at 0.7 times the temperature", temperature=0.7),
}


def load(path: str) -> Any:
    """The model in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


@torch.inference_mode()
def write(path: str, prompts: Path, count: int, tokens: int) -> list[Text]:
    """What the model answers at temperature 1 to prompts spread over the file's short ones."""
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines() if line]
    asked = [next(iter(row.get("turns") or [row.get("question") or row["prompt"]])) for row in rows]
    chats = [
        str(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        )
        for text in asked
    ]
    chats = [text for text in chats if len(tokenizer(text).input_ids) <= LONGEST]
    if len(chats) < count:
        raise SystemExit(f"{prompts.name} has {len(chats)} prompts of {LONGEST} tokens at most")
    chats = [chats[i * len(chats) // count] for i in range(count)]
    batch = tokenizer(chats, padding=True, return_tensors="pt")
    torch.manual_seed(0)
    out = load(path).generate(
        **batch, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens
    )
    texts = []
    for ids, mask in zip(out, batch.attention_mask, strict=True):
        answer = ids[len(mask) :]
        ended = (answer == tokenizer.eos_token_id).nonzero()
        written = int(ended[0]) + 1 if len(ended) else len(answer)
        texts.append(Text(torch.cat([ids[: len(mask)][mask.bool()], answer[:written]]), written))
    return texts


@torch.inference_mode()
def logits_of(model: Any, texts: list[Text]) -> list[Tensor]:
    """What the model says before every token that was written: float32 [written, V] a text."""
    found = []
    for text in texts:
        out = model(text.ids[None, :-1], use_cache=False, logits_to_keep=text.written)
        found.append(out.logits[0].clone())
    return found
