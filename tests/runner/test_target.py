"""Loading a target, what it says about itself, and whom it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.errors import ConfigError, TargetError
from specdec.runner import attention, product
from specdec.runner.kv_cache import KVSpec
from specdec.runner.linear import PackedLinear
from specdec.runner.model_loading import check_module, resolve_device
from specdec.runner.norm import RMSNorm
from specdec.runner.target import Rows, TargetModel

_BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(model: str, config: str, **changes: Any) -> PreTrainedModel:
    config_class = getattr(transformers, config)
    known = config_class()
    options = {k: v for k, v in {**_BASE, **changes}.items() if hasattr(known, k) or k in changes}
    torch.manual_seed(0)
    built: PreTrainedModel = getattr(transformers, model)(config_class(**options)).double().eval()
    return built


def llama(**changes: Any) -> PreTrainedModel:
    return build("LlamaForCausalLM", "LlamaConfig", **changes)


def one_request(target: TargetModel, tokens: Tensor, keep: Tensor | None = None) -> Rows:
    n = len(tokens)
    target.allocate(-(-n // 4) + 1, 4)
    return Rows(
        tokens=tokens,
        positions=torch.arange(n),
        query_start=[0, n],
        context=[n],
        block_tables=torch.arange(1, -(-n // 4) + 1)[None],
        logits_rows=torch.arange(n) if keep is None else keep,
    )


TOKENS = torch.arange(11) * 7 % 97


def test_a_loaded_model_describes_itself() -> None:
    model = llama(sliding_window=None)
    target = TargetModel.load(model)
    assert target.model is model
    assert target.config is model.config
    assert (target.vocab_size, target.hidden_size, target.num_layers) == (97, 32, 3)
    assert target.kv_specs == [KVSpec(2, 8, 8)] * 3
    assert target.max_position_embeddings == 128
    assert target.dtype == torch.float64
    assert target.device.type == "cpu"
    assert target.embedding is model.get_input_embeddings()
    assert target.lm_head.weight.shape == (97, 32)
    assert len(target.layers) == 3
    assert not target.deterministic


def test_windows_and_unequal_dims_are_in_the_specs() -> None:
    gemma = build(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        head_dim=16,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    windows = [spec.window for spec in TargetModel.load(gemma).kv_specs]
    assert windows == [7, None, 7]


def test_captured_states_are_the_models_hidden_states() -> None:
    model = llama()
    with torch.inference_mode():
        own = model(TOKENS[None], output_hidden_states=True).hidden_states
    target = TargetModel.load(model)
    target.capture([0, 2, 3], post_norm=True)

    out = target.forward(one_request(target, TOKENS))

    assert sorted(out.captured) == [0, 2, 3]
    torch.testing.assert_close(out.captured[0], own[0][0])
    torch.testing.assert_close(out.captured[2], own[2][0])
    assert out.post_norm is not None
    torch.testing.assert_close(out.post_norm, own[3][0])
    # The last layer's output before the norm: the norm of it is what the model reports.
    torch.testing.assert_close(model.model.norm(out.captured[3]), own[3][0])


def test_capture_replaces_and_close_removes_every_hook() -> None:
    target = TargetModel.load(llama())
    target.capture([0, 3], post_norm=True)
    target.capture([1], post_norm=False)
    out = target.forward(one_request(target, TOKENS))
    assert sorted(out.captured) == [1]
    assert out.post_norm is None

    target.close()

    for module in target.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    with pytest.raises(RuntimeError, match="allocate"):
        target.forward(one_request_without_cache())


def one_request_without_cache() -> Rows:
    zero = torch.zeros(1, dtype=torch.int64)
    return Rows(zero, zero, [0, 1], [1], torch.ones(1, 1, dtype=torch.int64), zero)


def test_only_its_own_forwards_are_captured() -> None:
    model = llama()
    first, second = TargetModel.load(model), TargetModel.load(model)
    rows, other = one_request(first, TOKENS), one_request(second, TOKENS[:5])
    for target in (first, second):
        target.capture([0, 3], post_norm=True)

    second.forward(other)
    model(TOKENS[None, :3])
    assert first._hooks.take() == ({}, None)
    assert second._hooks.take() == ({}, None)

    out = first.forward(rows)
    assert [len(states) for states in out.captured.values()] == [len(TOKENS)] * 2
    assert out.post_norm is not None
    assert len(out.post_norm) == len(TOKENS)


def test_captures_end_with_a_forward_that_raised() -> None:
    target = TargetModel.load(llama())
    rows = one_request(target, TOKENS)
    target.capture([0, 2], post_norm=False)
    broken = target.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        target.forward(rows)
    broken.remove()

    target.model(TOKENS[None, :3])

    captured, _ = target._hooks.take()
    assert [len(states) for states in captured.values()] == [len(TOKENS)]  # not 3 rows


def test_an_unknown_capture_id_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no capture id 4; ids are 0 .* to 3"):
        TargetModel.load(llama()).capture([1, 4], post_norm=False)


def test_only_the_wanted_logits_come_back() -> None:
    model = llama()
    with torch.inference_mode():
        own = model(TOKENS[None]).logits[0]
    target = TargetModel.load(model)
    keep = torch.tensor([10, 3])
    out = target.forward(one_request(target, TOKENS, keep))
    torch.testing.assert_close(out.logits, own[keep])
    assert target.forward(one_request(target, TOKENS, keep[:0])).logits.shape == (0, 97)


def test_a_module_passed_in_stays_usable_by_itself() -> None:
    model = llama()
    with torch.inference_mode():
        before = model(TOKENS[None]).logits
        TargetModel.load(model)
        assert torch.equal(model(TOKENS[None]).logits, before)
    assert model.config._attn_implementation != attention.NAME


def test_two_models_do_not_disturb_each_other() -> None:
    first, second = TargetModel.load(llama()), TargetModel.load(llama(num_hidden_layers=2))
    rows, other = one_request(first, TOKENS), one_request(second, TOKENS)
    expected = first.forward(rows).logits
    second.forward(other)
    assert torch.equal(first.forward(rows).logits, expected)
    assert second.attention_calls == 2


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "bloom": (
        lambda: build("BloomForCausalLM", "BloomConfig", n_head=4, n_layer=2),
        r"BloomForCausalLM cannot be served: its attention does not go through",
    ),
    "falcon": (
        lambda: build("FalconForCausalLM", "FalconConfig", alibi=True),
        r"FalconForCausalLM cannot be served: its attention does not go through",
    ),
    "mamba2": (
        lambda: build(
            "Mamba2ForCausalLM", "Mamba2Config", num_heads=8, head_dim=8, state_size=8, n_groups=1
        ),
        r"Mamba2ForCausalLM cannot be served: ",
    ),
    "lfm2": (
        lambda: build(
            "Lfm2ForCausalLM",
            "Lfm2Config",
            layer_types=["conv", "full_attention", "conv"],
        ),
        r"Lfm2ForCausalLM cannot be served: it has layers of type conv, whose state is not",
    ),
    "gpt_neo": (
        lambda: build("GPTNeoForCausalLM", "GPTNeoConfig", attention_types=[[["global"], 3]]),
        r"GPTNeoForCausalLM cannot be served: its causal mask is indexed by the rows",
    ),
    "t5": (
        lambda: build(
            "T5ForConditionalGeneration", "T5Config", d_model=32, d_kv=8, d_ff=48, num_layers=2
        ),
        r"T5ForConditionalGeneration cannot be served: it is an encoder-decoder",
    ),
    "bert": (
        lambda: build("BertLMHeadModel", "BertConfig"),
        r"BertLMHeadModel cannot be served: it is an encoder, whose attention is bidirectional",
    ),
    "headless": (
        lambda: build("LlamaModel", "LlamaConfig"),
        r"LlamaModel cannot be served: it has no language-model head",
    ),
    "rope_dynamic": (
        lambda: llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        r"LlamaForCausalLM cannot be served: rope type 'dynamic'",
    ),
    "diffllama": (
        lambda: build("DiffLlamaForCausalLM", "DiffLlamaConfig"),
        r"DiffLlamaForCausalLM cannot be served: a layer calls its attention more than once",
    ),
    "doge": (
        lambda: build("DogeForCausalLM", "DogeConfig"),
        r"DogeForCausalLM cannot be served: it keeps data in its attention mask",
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_served_is_refused_with_the_reason(family: str) -> None:
    builder, reason = REFUSED[family]
    with pytest.raises(TargetError, match=reason):
        TargetModel.load(builder())


@pytest.mark.parametrize(
    ("family", "dropped", "changes"),
    [
        ("Mistral", "sliding_window", {"sliding_window": 5}),
        ("Gemma2", "softcap", {"head_dim": 16, "attn_logit_softcapping": 2.0}),
        ("Granite", "scaling", {"attention_multiplier": 0.05}),
    ],
)
def test_the_probe_notices_what_attention_ignores(
    family: str, dropped: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(*args: Any, **kwargs: Any) -> Any:
        kwargs[dropped] = None
        return attention.paged_attention(*args, **kwargs)

    interface = transformers.AttentionInterface
    model = build(f"{family}ForCausalLM", f"{family}Config", **changes)
    TargetModel.load(model)
    interface.register(attention.NAME, forgetful)
    try:
        with pytest.raises(
            TargetError, match=rf"{family}ForCausalLM cannot be served: .* logit difference"
        ):
            TargetModel.load(model)
    finally:
        interface.register(attention.NAME, attention.paged_attention)


def test_the_probe_notices_slots_that_were_never_written() -> None:
    def misplaced(*args: Any, **kwargs: Any) -> Any:
        context = attention._context.get()
        assert context is not None
        if context.plan is not None:
            context.plan.slots[0] = 0
        return attention.paged_attention(*args, **kwargs)

    model = llama()
    transformers.AttentionInterface.register(attention.NAME, misplaced)
    try:
        with pytest.raises(TargetError, match="max logit difference inf"):
            TargetModel.load(model)
    finally:
        transformers.AttentionInterface.register(attention.NAME, attention.paged_attention)


def test_the_probe_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise AssertionError("probed")

    monkeypatch.setattr("specdec.runner.target.probe_packed", fail)
    assert TargetModel.load(llama(), probe=False).kv_specs == [KVSpec(2, 8, 8)] * 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bfloat16 checkpoint with layers wide enough to be packed."""
    model = llama(hidden_size=128, intermediate_size=256, num_attention_heads=8)
    model.to(torch.bfloat16).save_pretrained(tmp_path)  # type: ignore[arg-type]
    return tmp_path


def packable_llama(**changes: Any) -> PreTrainedModel:
    model = llama(hidden_size=128, intermediate_size=256, **changes)
    model.to(torch.float32)  # type: ignore[arg-type]
    return model


def test_layers_of_one_input_are_one_product_in_a_packed_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    widths: list[int] = []
    real = product.packed_product

    def spy(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        out = real(x, packed, bias)
        widths.append(out.shape[-1])
        return out

    target = TargetModel.load(packable_llama(vocab_size=512), pack=True)
    rows = one_request(target, TOKENS)
    monkeypatch.setattr(product, "packed_product", spy)
    target.forward(rows)
    # q, k, v; o; gate, up; down, three times, and the head
    assert widths == [128 + 64 + 64, 128, 512, 128] * 3 + [512]


class Flattening(nn.Module):
    """A feed-forward that looks at answers as one row, which parts of something wider are not."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate, self.up, self.down = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate(x).view(-1).sigmoid() * self.up(x).view(-1)
        out: Tensor = self.down(both.view(*x.shape[:-1], -1))
        return out


def test_layers_whose_answers_have_to_be_contiguous_stay_apart() -> None:
    models = [packable_llama(), packable_llama()]
    for model in models:
        for layer in model.model.layers:
            layer.mlp = Flattening(layer.mlp)
    plain, packed = TargetModel.load(models[0]), TargetModel.load(models[1], pack=True)
    assert any(isinstance(module, PackedLinear) for module in packed.model.modules())
    got = packed.forward(one_request(packed, TOKENS)).logits
    want = plain.forward(one_request(plain, TOKENS)).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * want.abs().max().item())


def test_rows_padded_to_the_least_number_have_the_same_logits() -> None:
    assert TargetModel.load(packable_llama()).least_rows == 1
    target = TargetModel.load(packable_llama(), pack=True)
    last = attrs.evolve(
        one_request(target, TOKENS, torch.tensor([0])),
        tokens=TOKENS[-1:],
        positions=torch.tensor([10]),
        query_start=[0, 1],
    )
    target.forward(one_request(target, TOKENS))  # on a cache of its own: fills it
    want = target.forward(last).logits
    more = torch.zeros(target.least_rows - 1, dtype=torch.int64)
    padded = attrs.evolve(
        last, tokens=torch.cat([last.tokens, more]), positions=torch.cat([last.positions, more])
    )
    assert len(padded.tokens) == 4
    torch.testing.assert_close(target.forward(padded).logits, want, rtol=1e-5, atol=1e-4)


def test_norms_are_replaced_in_a_model_packed_for_speed_alone() -> None:
    def norms(**options: Any) -> set[type]:
        target = TargetModel.load(packable_llama(), **options)
        return {type(m) for m in target.model.modules() if type(m).__name__.endswith("RMSNorm")}

    assert norms(pack=True) == {RMSNorm}
    assert RMSNorm not in norms()
    assert RMSNorm not in norms(deterministic=True)


def test_a_half_precision_folder_is_float32_and_packed_on_a_cpu(folder: Path) -> None:
    target = TargetModel.load(folder)
    assert target.dtype == torch.float32
    assert any(isinstance(module, PackedLinear) for module in target.model.modules())
    plain = TargetModel.load(str(folder), pack=False)
    assert not any(isinstance(module, PackedLinear) for module in plain.model.modules())
    got = target.forward(one_request(target, TOKENS)).logits
    want = plain.forward(one_request(plain, TOKENS)).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_a_dtype_asked_for_is_the_one_loaded(folder: Path) -> None:
    target = TargetModel.load(folder, dtype="bfloat16")
    assert target.dtype == torch.bfloat16
    assert not any(isinstance(module, PackedLinear) for module in target.model.modules())
    out = target.forward(one_request(target, TOKENS))
    assert out.logits.dtype == torch.bfloat16


def test_overrides_reach_the_configuration(folder: Path) -> None:
    target = TargetModel.load(
        folder, hf_overrides={"rms_norm_eps": 1e-3, "max_position_embeddings": 64}
    )
    assert target.model.config.rms_norm_eps == 1e-3
    assert target.max_position_embeddings == 64


def test_an_unknown_override_names_the_nearest_key(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"LlamaConfig has no key 'rms_norm_epsilon'; did you mean 'rms_norm_eps'"
    ):
        TargetModel.load(folder, hf_overrides={"rms_norm_epsilon": 1.0})


def test_settings_that_do_not_fit_a_module_are_refused() -> None:
    with pytest.raises(ConfigError, match="already built"):
        TargetModel.load(llama(), hf_overrides={"rms_norm_eps": 1.0})
    with pytest.raises(ConfigError, match=r"is torch\.float64 on cpu; convert it before"):
        TargetModel.load(llama(), dtype="float32")
    with pytest.raises(ConfigError, match=r"asking for dtype='torch\.float32', device='meta'"):
        TargetModel.load(llama(), dtype="float32", device="meta")
    with pytest.raises(TargetError, match="got a Linear"):
        TargetModel.load(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["int8", "nn", "", 3, torch.int8, ["float32"]])
def test_a_dtype_that_cannot_be_used_is_named_with_those_that_can(dtype: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^dtype .* cannot be used; known: auto, bfloat16"
    ) as said:
        TargetModel.load(llama(), dtype=dtype)
    assert repr(dtype) in str(said.value)


def test_no_dtype_is_that_of_the_model() -> None:
    assert TargetModel.load(llama(), dtype=None).dtype == torch.float64


@pytest.mark.parametrize("device", ["nowhere", "cuda:x", 1.5])
def test_a_device_that_is_none_is_refused(device: Any) -> None:
    with pytest.raises(ConfigError, match=r"^device is .*, but it has to be 'cpu', 'cuda'"):
        TargetModel.load(llama(), device=device)


def test_a_module_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    elsewhere = torch.device("cuda:1")  # which need not be there
    monkeypatch.setattr(transformers.LlamaForCausalLM, "device", elsewhere, raising=False)
    for device in ("cpu", "cuda:0", torch.device("cuda", 0)):
        with pytest.raises(ConfigError, match=r"float64 on cuda:1; convert it before .* device="):
            TargetModel.load(model, device=device)
    for fitting in (None, "cuda", "cuda:1"):
        check_module(model, dtype=None, device=resolve_device(fitting), hf_overrides=None)


def test_what_is_no_token_of_the_hub_is_refused_unread() -> None:
    with pytest.raises(ConfigError, match=r"^hf_token is of type int; give a string") as said:
        TargetModel.load("org/model", token=12345)  # type: ignore[arg-type]
    assert "12345" not in str(said.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"no model at '.*nowhere': there is no such folder"):
        TargetModel.load(tmp_path / "nowhere")
    with pytest.raises(TargetError, match=r"holds no config\.json"):
        TargetModel.load(tmp_path)


def test_an_unreachable_hub_id_suggests_a_local_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("We couldn't connect to the Hub.\nMore lines.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(
        TargetError,
        match=r"cannot load 'org/model \(revision v1\)': We couldn't .* Tried .* local folder",
    ):
        TargetModel.load("org/model", revision="v1")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            r"BertForMaskedLM .* is not a causal",
        ),
        ({"model_type": "t5", "architectures": ["T5Model"]}, r"T5Model .* encoder-decoder"),
        ({"model_type": "vit"}, r"ViTConfig .* names no architecture"),
        ({"model_type": "unheard_of"}, r"cannot read the configuration of .*unheard_of"),
    ],
)
def test_a_folder_without_a_causal_model_is_refused_before_weights_are_read(
    config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match=reason):
        TargetModel.load(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    llama().config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "architectures": ["LlamaForCausalLM"]})
    )
    with pytest.raises(TargetError, match=r"cannot load .*no file named .*safetensors"):
        TargetModel.load(tmp_path)


def test_states_before_the_head_are_what_the_model_exposes() -> None:
    model = llama()
    shown: dict[str, Tensor | None] = {"states": torch.arange(40.0).view(20, 2)}
    expose: Any = lambda: shown["states"]  # noqa: E731
    model.get_mtp_target_hidden_states = expose
    target = TargetModel.load(model)
    target.capture([], post_norm=False, pre_head=True)
    outputs = target.forward(one_request(target, TOKENS))
    assert outputs.post_norm is None
    # the buffer is longer than the step: its first rows are the step's
    assert outputs.pre_head is not None
    assert torch.equal(outputs.pre_head, torch.arange(40.0).view(20, 2)[: len(TOKENS)])

    shown["states"] = None
    target.capture([], post_norm=True, pre_head=True)
    outputs = target.forward(one_request(target, TOKENS))
    assert outputs.pre_head is not None
    assert outputs.post_norm is not None
    assert torch.equal(outputs.pre_head, outputs.post_norm)

    shown["states"] = torch.zeros(1, 2)
    with pytest.raises(TargetError, match="gave 1 rows of"):
        target.forward(one_request(target, TOKENS))


def test_states_before_the_head_are_the_normed_ones_of_a_model_that_exposes_none() -> None:
    target = TargetModel.load(llama())
    target.capture([], post_norm=False, pre_head=True)
    outputs = target.forward(one_request(target, TOKENS))
    target.capture([], post_norm=True)
    normed = target.forward(one_request(target, TOKENS))
    assert outputs.post_norm is None
    assert normed.pre_head is None
    assert outputs.pre_head is not None
    assert normed.post_norm is not None
    assert torch.equal(outputs.pre_head, normed.post_norm)


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a machine without CUDA says")
def test_a_device_that_is_not_here_is_refused_before_anything_is_read(folder: Path) -> None:
    with pytest.raises(ConfigError, match="device is 'cuda', but torch finds 0 CUDA devices here"):
        TargetModel.load(folder, device="cuda")
