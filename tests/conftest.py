"""What several test files share: one thread, and a saved model with a tokenizer of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

# The models are tiny, and threads that wait for each other on a busy machine cost twenty times
# what they gain. Before torch is imported; processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

SPECIAL = ["<unk>", "<eos>", "<user>", "<bot>"]
PLAIN = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "see", "it", "."]
WORDS = [*SPECIAL, *PLAIN]
TEMPLATE = (
    "{% for m in messages %}<user> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<bot> {% endif %}"
)


def word_tokenizer() -> Any:
    """One token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(
        tokenizer_object=core,
        unk_token="<unk>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<bot>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in float64 whose tokens are words; `<eos>` ends, a chat template is there."""
    from specdec.testing import tiny_target

    folder = tmp_path_factory.mktemp("model")
    model = tiny_target(vocab=len(WORDS), eos_token_id=1, seed=3)
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder
