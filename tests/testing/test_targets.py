"""Targets whose right answer is known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.testing import save_tiny_model, tiny_target, toy_target


@pytest.mark.parametrize("vocab", [1, 2, 3, 8, 9, 33])
def test_logits_of_a_toy_are_the_tables_row_of_the_last_token(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    table = torch.randn(vocab, vocab, generator=generator) * 3
    model = toy_target(table)
    tokens = torch.randint(0, vocab, (1, 12), generator=generator)
    with torch.no_grad():
        logits = model(tokens).logits[0]
    assert logits.dtype == torch.float64
    # the norm rounds to float32
    torch.testing.assert_close(logits, table.double()[tokens[0]], rtol=1e-6, atol=1e-6)


def test_a_tiny_target_repeats_with_its_seed_and_attends_to_what_came_before() -> None:
    model, same, other = tiny_target(), tiny_target(), tiny_target(seed=1)
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        logits = model(tokens).logits
        assert torch.equal(logits, same(tokens).logits)
        assert not torch.allclose(logits, other(tokens).logits)
        changed = model(torch.tensor([[4, 2, 3]])).logits
    assert (logits[0, 2] - changed[0, 2]).abs().max() > 0.1


def test_a_larger_scale_means_fewer_contenders() -> None:
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        wide = tiny_target()(tokens).logits
        narrow = tiny_target(scale=3)(tokens).logits
    torch.testing.assert_close(narrow, wide * 3, rtol=1e-5, atol=1e-5)


def test_the_shape_of_a_tiny_target_can_be_chosen() -> None:
    model = tiny_target(
        vocab=7, layers=3, max_model_len=40, dtype=torch.float32, tie_word_embeddings=True
    )
    assert model.dtype == torch.float32
    assert (model.config.vocab_size, model.config.num_hidden_layers) == (7, 3)
    assert model.config.max_position_embeddings == 40
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert not model.training


def test_a_saved_tiny_model_takes_and_gives_text(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, seed=2)
    with LLM(tmp_path) as llm:
        assert llm.tokenizer is not None
        assert llm.tokenizer.decode(llm.tokenizer("naïve €")["input_ids"]) == "naïve €"
        (output,) = llm.generate(
            [{"role": "user", "content": "hi"}],
            SamplingParams(temperature=0, max_tokens=5),
            use_tqdm=False,
        )
    assert output.prompt == "hi\n"
    assert len(output.outputs[0].token_ids) == 5
    assert output.outputs[0].text
