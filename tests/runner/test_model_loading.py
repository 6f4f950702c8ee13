"""Folders that hold something else than they should are refused, and the error says what."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from specdec.errors import ConfigError, SpecdecError, TargetError
from specdec.runner.target import TargetModel
from specdec.testing import tiny_target

logger = logging.getLogger("transformers.modeling_utils")
Edit = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tiny_target(dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A sound Llama of two layers, to be spoilt."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit_tensors(folder: Path, edit: Edit) -> None:
    path = folder / "model.safetensors"
    tensors = edit(load_file(path))
    save_file({k: v.clone() for k, v in tensors.items()}, path, metadata={"format": "pt"})


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def reports() -> Iterator[list[str]]:
    """What transformers logs where it reads weights."""
    seen: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    handler = Handler()
    logger.addHandler(handler)
    yield seen
    logger.removeHandler(handler)
    assert logger.filters == []


def refused(kind: type[SpecdecError], folder: Path, **options: Any) -> str:
    with pytest.raises(SpecdecError) as caught:
        TargetModel.load(folder, **options)
    assert type(caught.value) is kind
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 1500
    return said


# -- weights that are not those of the model ---------------------------------


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda t: {k.replace("layers.1.", "layer.1."): v for k, v in t.items()},
            "9 missing (model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight,"
            " model.layers.1.mlp.gate_proj.weight and 6 more), 9 unused (model.layer.1.",
        ),
        (
            lambda t: {k: v for k, v in t.items() if "layers.0.mlp.up" not in k},
            "1 missing (model.layers.0.mlp.up_proj.weight)",
        ),
        (lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"}, "1 missing (lm_head.wei"),
        (lambda t: {**t, "foo.bar": torch.zeros(2)}, "1 unused (foo.bar)"),
        (
            lambda t: t | {k.replace("layers.1.", "layers.2."): v for k, v in t.items()},
            "9 unused (model.layers.2.input_layernorm.weight, ",
        ),
        (
            lambda t: {**t, "model.norm.weight": torch.ones(5)},
            "1 of another shape (model.norm.weight is [5] and not [32])",
        ),
    ],
    ids=["renamed", "left out", "no head", "extra", "extra layer", "shape"],
)
def test_weights_that_are_not_the_models_are_refused_by_name(
    folder: Path, edit: Edit, said: str, reports: list[str]
) -> None:
    edit_tensors(folder, edit)
    message = refused(TargetError, folder)
    start = f"the tensors of '{folder}' are not those of LlamaForCausalLM as it is configured: "
    assert message.startswith(start)
    assert said in message
    assert reports == []  # transformers has a table of the same


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"num_hidden_layers": 5}, "27 missing (model.layers.2.input_layernorm.weight, "),
        ({"num_hidden_layers": 1}, "9 unused (model.layers.1.input_layernorm.weight, "),
        ({"hidden_size": 5}, "21 of another shape (lm_head.weight is [61, 32] and not [61, 5], "),
        ({"vocab_size": 5}, "2 of another shape (lm_head.weight is [61, 32] and not [5, 32], "),
    ],
    ids=str,
)
def test_overrides_that_do_not_fit_the_weights_are_to_blame(
    folder: Path, overrides: dict[str, Any], said: str
) -> None:
    message = refused(ConfigError, folder, hf_overrides=overrides)
    assert message.startswith(f"with hf_overrides={overrides}, the tensors of ")
    assert said in message


def build(kind: str, **config: Any) -> PreTrainedModel:
    sizes = {
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    model, settings = getattr(transformers, kind), {**sizes, **config}
    built: PreTrainedModel = model(model.config_class(**settings)).eval()
    return built


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("LlamaForCausalLM", {}),
        ("Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8}),
        ("GemmaForCausalLM", {"num_key_value_heads": 2, "head_dim": 8}),
        ("GPT2LMHeadModel", {}),
    ],
)
def test_tied_and_untied_heads_load(
    kind: str, config: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    build(kind, tie_word_embeddings=tied, **config).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in saved) is not tied
    TargetModel.load(tmp_path).close()


MOE = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 16,
}  # fmt: skip
DEEPSEEK = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "num_key_value_heads": 4, **MOE,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "config", "layer", "loads"),
    [
        ("DeepseekV3ForCausalLM", DEEPSEEK, 61, True),  # transformers leaves this one out itself
        ("DeepseekV3ForCausalLM", {**DEEPSEEK, "num_nextn_predict_layers": 1}, 2, True),
        ("DeepseekV3ForCausalLM", {**DEEPSEEK, "num_nextn_predict_layers": 1}, 3, False),
        ("DeepseekV3ForCausalLM", {**DEEPSEEK, "num_nextn_predict_layers": 0}, 2, False),
        ("Glm4MoeForCausalLM", {**MOE, "head_dim": 8, "num_key_value_heads": 2}, 92, True),
    ],
)
def test_layers_that_predict_further_tokens_are_left_out(
    kind: str, config: dict[str, Any], layer: int, loads: bool, tmp_path: Path
) -> None:
    build(kind, **config).save_pretrained(tmp_path)
    name = f"model.layers.{layer}.eh_proj.weight"
    edit_tensors(tmp_path, lambda t: {**t, name: torch.ones(2)})
    if loads:
        TargetModel.load(tmp_path).close()
    else:
        assert f"1 unused ({name})" in refused(TargetError, tmp_path)


# -- files that are broken ---------------------------------------------------


class _Code:
    def __reduce__(self) -> Any:
        return print, ("a checkpoint ran code",)


@pytest.mark.parametrize("overrides", [None, {"rms_norm_eps": 1e-3}], ids=["", "overridden"])
@pytest.mark.parametrize(
    "spoil",
    [lambda b: b[: len(b) // 2], lambda b: b[:50], lambda _: b"", lambda _: b"\xff" * 4000],
    ids=["cut", "cut header", "empty", "garbage"],
)
def test_a_broken_safetensors_file_is_a_target_error(
    folder: Path, spoil: Callable[[bytes], bytes], overrides: dict[str, Any] | None
) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(spoil(path.read_bytes()))
    message = refused(TargetError, folder, hf_overrides=overrides)
    assert message.startswith(f"cannot load '{folder}': SafetensorError: ")


@pytest.mark.parametrize("garbage", [True, False], ids=["garbage", "code"])
def test_a_pickle_that_is_not_only_tensors_is_refused_unread(
    folder: Path, garbage: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model.safetensors").unlink()
    if garbage:
        (folder / "pytorch_model.bin").write_bytes(b"xxx")
    else:
        torch.save({"a": _Code()}, folder / "pytorch_model.bin")
    message = refused(TargetError, folder)
    assert "its weights are pickled and hold more than tensors" in message
    assert "convert them to safetensors" in message
    assert "ran code" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "content", [b"{", b"", b"[]", b"null", b"\xff\xfe\x00", b"[" * 100_000],
    ids=["cut", "empty", "list", "null", "binary", "deep"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_broken_json_file_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    message = refused(TargetError, folder)
    assert message.startswith(f"{folder / name} ")
    assert "cannot be read as JSON: " in message or "holds no JSON object" in message
    assert "Hub" not in message


def test_a_file_that_an_index_names_in_vain_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"a": "gone.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refused(TargetError, folder)
    assert "gone.safetensors" in message
    assert "Hub" not in message


# -- configurations that no model can be built from --------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_position_embeddings": 0}, "it was made for 0 positions, but a prompt and a token"),
        ({"max_position_embeddings": -1}, "it was made for -1 positions"),
        ({"max_position_embeddings": 1}, "it was made for 1 positions"),
        ({"max_position_embeddings": "x"}, "expected int, got str"),
        (
            {"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}},
            "rope_parameters names 'foo', which transformers does not know",
        ),
        ({"hidden_act": "foo"}, "hidden_act names 'foo', which transformers does not know"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"architectures": 5}, "cannot "),
        ({"text_config": 5}, "cannot "),
        ({"dtype": "foo"}, "foo"),
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_is_a_target_error(
    folder: Path, values: dict[str, Any], said: str
) -> None:
    edit_config(folder, **values)
    message = refused(TargetError, folder)
    assert said in message
    assert str(folder) in message


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({5: 5}, "hf_overrides has the key 5, but keys have to be text"),
        ([1], "hf_overrides is of type list; give a dict"),
        ({"hidden_size": "a"}, "hf_overrides: hidden_size cannot be 'a': "),
        ({"hidden_act": "foo"}, "cannot be loaded: hidden_act names 'foo', which transformers"),
        ({"num_attention_heads": 0}, "with hf_overrides={'num_attention_heads': 0}, '"),
        ({"rope_parameters": None}, "with hf_overrides={'rope_parameters': None}, '"),
        ({"architectures": 5}, "hf_overrides"),
    ],
    ids=str,
)
def test_overrides_that_no_model_can_be_built_from_are_to_blame(
    folder: Path, overrides: Any, said: str
) -> None:
    assert said in refused(ConfigError, folder, hf_overrides=overrides)


def test_what_a_models_own_forward_raises_is_a_target_error_with_its_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_target()
    monkeypatch.setattr(model.model.norm, "forward", lambda _: 1 / 0)
    with pytest.raises(TargetError, match="two short requests raised ZeroDivisionError") as caught:
        TargetModel.load(model)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("where", ["AutoConfig", "AutoModelForCausalLM"])
def test_an_interrupt_while_loading_passes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(getattr(transformers, where), "from_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        TargetModel.load(folder)


def test_transformers_own_table_is_shown_with_an_error_that_refers_to_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, reports: list[str]
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        logger.warning("Llama LOAD REPORT from: here")
        raise RuntimeError("see the report above")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fails)
    assert "RuntimeError: see the report above" in refused(TargetError, folder)
    assert reports == ["Llama LOAD REPORT from: here"]


def test_a_device_that_cannot_take_the_model_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "to", full)
    message = refused(ConfigError, folder)
    assert message.startswith("device is 'cpu', but the model cannot be moved there: ")
    assert message.endswith("OutOfMemoryError: CUDA out of memory")
