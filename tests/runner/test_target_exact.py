"""deterministic=True: a row's logits are the same bits whatever shares the forward with it.

float32 with realistic widths, because rounding only depends on the row count in wide products.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specdec.errors import ConfigError, TargetError
from specdec.runner import attend, linear, product
from specdec.runner.linear import PackedLinear
from specdec.runner.target import Rows, TargetModel

BLOCK = 16
VOCAB = 5003


def llama(*, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 2,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": VOCAB,
            "tie_word_embeddings": True,
            **changes,
        }
    )
    model: PreTrainedModel = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.eval()  # type: ignore[no-untyped-call]
    return model


class Run:
    """Requests on one target; `step` feeds the next rows of each and returns their logits."""

    def __init__(self, target: TargetModel, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.target = target
        blocks = -(-max(lengths) // BLOCK)
        target.allocate(blocks * len(lengths) + 1, BLOCK)
        self.tables = torch.arange(1, blocks * len(lengths) + 1).view(len(lengths), blocks)
        self.tokens = [torch.randint(VOCAB, (n,), generator=generator) for n in lengths]
        self.done = [0] * len(lengths)

    def step(self, counts: list[int], is_prefill: list[bool] | None = None) -> list[Tensor]:
        spans = [(d, d + n) for d, n in zip(self.done, counts, strict=True)]
        start = [0]
        for count in counts:
            start.append(start[-1] + count)
        rows = Rows(
            tokens=torch.cat([t[a:b] for t, (a, b) in zip(self.tokens, spans, strict=True)]),
            positions=torch.cat([torch.arange(a, b) for a, b in spans]),
            query_start=start,
            context=[b for _, b in spans],
            block_tables=self.tables,
            logits_rows=torch.arange(start[-1]),
            is_prefill=is_prefill,
        )
        self.done = [b for _, b in spans]
        return list(torch.split(self.target.forward(rows).logits, counts))


def alone(target: TargetModel, request: int, lengths: list[int], prefix: int, rows: int) -> Tensor:
    """Logits after the prefix, `rows` at a time, with no neighbour."""
    run = Run(target, lengths)
    counts = [0] * len(lengths)

    def feed(count: int) -> Tensor:
        counts[request] = count
        return run.step(counts)[request]

    feed(prefix)
    left = lengths[request] - prefix
    return torch.cat([feed(min(rows, left - i)) for i in range(0, left, rows)])


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel.load(llama(), deterministic=True)


@pytest.mark.parametrize("prefix", [30, 250, 507])  # 250 and 507: the keys cross a block's edge
def test_rows_do_not_depend_on_how_many_are_fed_at_once(target: TargetModel, prefix: int) -> None:
    expected = alone(target, 0, [prefix + 12], prefix, 1)

    for rows in (2, 4, 6, 12):
        assert torch.equal(alone(target, 0, [prefix + 12], prefix, rows), expected), rows


def test_rows_do_not_depend_on_their_neighbours(target: TargetModel) -> None:
    prefix = [40, 17, 255, 90, 33, 64, 128, 21]
    lengths = [n + 6 for n in prefix]
    run = Run(target, lengths)
    run.step(prefix)

    together = run.step([6] * 8)

    for i, logits in enumerate(together):
        assert torch.equal(logits, alone(target, i, lengths, prefix[i], 1))


def test_rows_do_not_depend_on_a_chunk_beside_them(target: TargetModel) -> None:
    lengths = [46, 120]
    expected = alone(target, 0, lengths, 40, 2)
    run = Run(target, lengths)
    first = run.step([40, 30])
    second = run.step([6, 90])

    assert torch.equal(second[0], expected)
    chunks = Run(target, lengths)
    assert torch.equal(chunks.step([0, 30])[1], first[1])
    assert torch.equal(chunks.step([0, 90])[1], second[1])


@pytest.mark.parametrize("prefix", [30, 240])  # 240: the keys cross a block's edge
def test_many_drafts_are_computed_as_few_are(target: TargetModel, prefix: int) -> None:
    lengths = [prefix + 21, 120]
    expected = alone(target, 0, lengths, prefix, 1)

    verified = Run(target, lengths)
    verified.step([prefix, 0], [True, True])
    assert torch.equal(verified.step([21, 0], [False, True])[0], expected)

    beside = Run(target, lengths)
    beside.step([prefix, 30], [True, True])
    assert torch.equal(beside.step([21, 90], [False, True])[0], expected)


def test_the_exact_path_is_the_one_that_ran(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, int]] = []
    products: list[int] = []
    exactly, multiply = attend._attend_exactly, product.packed_product

    def spy_attention(rows: Tensor, k: Tensor, v: Tensor, tile: Any, rule: Any) -> Tensor:
        shapes.append((tile.q, tile.keys))
        return exactly(rows, k, v, tile, rule)

    def spy_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        products.append(x.numel() // x.shape[-1])
        return multiply(x, packed, bias)

    monkeypatch.setattr(attend, "_attend_exactly", spy_attention)
    monkeypatch.setattr(product, "packed_product", spy_product)
    run = Run(target, [300, 36])
    run.step([40, 0])
    assert shapes == []
    assert set(products) == {40, *[n for n in products if n <= 8]}

    products.clear()
    run.step([6, 6])
    assert shapes == [(8, 256), (8, 256)]
    assert max(products) <= 8


def test_without_it_attention_takes_the_ordinary_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Tensor:
        raise AssertionError("exact attention ran")

    monkeypatch.setattr(attend, "_attend_exactly", fail)
    plain = TargetModel.load(llama(), pack=True)
    run = Run(plain, [40])
    run.step([34])
    run.step([6])
    assert not plain.deterministic


def test_ordinary_rows_do_depend_on_their_number() -> None:
    # The control: if this were equal too, the tests above would prove nothing.
    plain = TargetModel.load(llama())
    assert not torch.equal(alone(plain, 0, [42], 30, 1), alone(plain, 0, [42], 30, 6))


def test_exact_logits_agree_with_ordinary_ones(target: TargetModel) -> None:
    ordinary = TargetModel.load(llama())
    expected = alone(ordinary, 0, [300], 280, 4)
    torch.testing.assert_close(alone(target, 0, [300], 280, 4), expected, rtol=0, atol=1e-5)


def test_a_module_that_was_replaced_already_serves_another_target() -> None:
    model = llama()
    first, second = (TargetModel.load(model, deterministic=True) for _ in range(2))
    assert second._blocks is first._blocks  # the layers ask these how to cut their rows
    assert torch.equal(alone(second, 0, [42], 30, 12), alone(second, 0, [42], 30, 1))
    assert torch.equal(alone(first, 0, [42], 30, 12), alone(second, 0, [42], 30, 1))


def test_a_module_packed_for_speed_alone_is_refused() -> None:
    model = llama()
    TargetModel.load(model, pack=True)
    with pytest.raises(ConfigError, match="packed by a target without deterministic=True"):
        TargetModel.load(model, deterministic=True)


def test_half_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs float32 .* the model is torch\.bfloat16"):
        TargetModel.load(llama(dtype=torch.bfloat16), deterministic=True)


def test_it_needs_its_linear_layers() -> None:
    with pytest.raises(ConfigError, match="drop pack=False"):
        TargetModel.load(llama(), deterministic=True, pack=False)


def test_a_model_whose_rows_stay_dependent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Stands for weights outside linear layers, such as stacked experts.
    monkeypatch.setattr(linear, "packable", lambda layer: False)
    with pytest.raises(TargetError, match=r"LlamaForCausalLM .* depend on the number of rows"):
        TargetModel.load(llama(), deterministic=True)


def test_packed_modules_replaced_every_linear_layer(target: TargetModel) -> None:
    kinds = {type(m) for m in target.model.modules()}
    assert PackedLinear in kinds
    assert torch.nn.Linear not in kinds
