"""What several test files share: one thread, and a saved model with a tokenizer of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from specdec.runner.sequence import Sequence

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


@pytest.fixture(scope="session")
def new_sequence() -> Callable[..., Sequence]:
    """Makes a `Sequence` of a prompt, without text; other fields by name.

    It may grow by 8 tokens; `params` is greedy.
    """
    from specdec import SamplingParams
    from specdec.output_text import OutputText
    from specdec.outputs import RequestMetrics
    from specdec.runner.sequence import Sequence

    def make(prompt: Iterable[int], **fields: Any) -> Sequence:
        ids = list(prompt)
        text = OutputText(None, stop=(), include_stop_str_in_output=False, skip_special_tokens=True)
        values: dict[str, Any] = {
            "request_id": "0",
            "index": 0,
            "params": SamplingParams(temperature=0),
            "stream": 1,
            "stop_ids": (),
            "own_stop_ids": frozenset(),
            "max_length": len(ids) + 8,
            "metrics": RequestMetrics(arrival_time=0.0),
            "text": text,
        }
        return Sequence(prompt=ids, **{**values, **fields})

    return make


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, int], int]:
    """Makes pages of 4 tokens; gives the `kv_cache_memory` of so many of them for a model.

    So short sequences cross pages, and run out of them. One page more is counted in: the one that
    belongs to nobody.
    """
    from specdec.runner import assemble, memory

    block = 4
    monkeypatch.setattr(memory, "BLOCK_SIZE", block)
    monkeypatch.setattr(assemble, "BLOCK_SIZE", block)

    def size(model: Any, pages: int) -> int:
        config = model.config.get_text_config()
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_token = 2 * config.num_key_value_heads * head * config.num_hidden_layers
        return int((pages + 1) * block * per_token * model.dtype.itemsize)

    return size
