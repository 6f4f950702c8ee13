"""Telling a checkpoint's method from its names alone."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, cast

import attrs
import pytest

from specdec import checkpoints
from specdec.checkpoints import Checkpoint, detect, pattern_problem
from specdec.errors import ConfigError, PluginError
from specdec.plugins import PluginInfo


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*arguments: object, **options: object) -> None:
        raise ConnectionError("offline")

    for name in ("list_repo_files", "hf_hub_download", "parse_safetensors_file_metadata"):
        monkeypatch.setattr(huggingface_hub, name, offline)


def write_safetensors(path: Path, *tensors: str) -> None:
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            **{t: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for t in tensors},
        }
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An EAGLE-3-like checkpoint."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3", "Other"],
        "speculators_config": {"algorithm": "eagle3", "k": 5, "tree": False, "none": None},
        "model_type": "llama",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_safetensors(tmp_path / "model.safetensors", "midlayer.fc.weight", "t2d")
    (tmp_path / "extra_head.pt").write_bytes(b"")
    return tmp_path


def info(method: str, *patterns: str, dist: str = "", **more: Any) -> PluginInfo:
    return PluginInfo(
        method=method,
        aliases=(),
        value=f"{method}:Some",
        distribution=dist or f"specdec-plugin-{method}",
        version="1.0",
        patterns=patterns,
        entry_point=cast(Any, None),
        **more,
    )


# --- patterns -------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "holds"),
    [
        ("arch:LlamaForCausalLMEagle3", True),
        ("arch:Other", True),
        ("arch:LlamaForCausalLM", False),
        ("key:speculators_config.algorithm:eagle3", True),
        ("key:speculators_config.algorithm:eagle", False),
        ("key:speculators_config.algorithm", True),
        ("key:speculators_config.missing", False),
        ("key:speculators_config.none", True),
        ("key:model_type.deeper", False),
        ("key:speculators_config.k:5", True),
        ("key:speculators_config.tree:false", True),
        ("file:extra_head.pt", True),
        ("file:*.pt", True),
        ("file:*.gguf", False),
        ("file:EXTRA_head.pt", False),
        ("tensor:midlayer.*", True),
        ("tensor:t2d", True),
        ("tensor:layers.*", False),
        ("tensor:__metadata__", False),
        ("!file:*.gguf", True),
        ("!arch:Other", False),
        ("!!arch:Other", True),
        ("arch:Other&tensor:t2d", True),
        ("arch:Other & tensor:t2d", True),
        ("arch:Other&!tensor:t2d", False),
        ("arch:Missing&tensor:t2d", False),
    ],
)
def test_a_pattern_holds_if_its_conditions_do(folder: Path, pattern: str, holds: bool) -> None:
    assert Checkpoint(str(folder)).matches(pattern) is holds
    assert pattern_problem(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "near"),
    [("arhc:X", "arch"), ("tensors:X", "tensor"), ("arch", "arch"), ("arch:", None), ("", None)],
)
def test_a_pattern_of_no_known_kind_names_the_distribution(
    folder: Path, pattern: str, near: str | None
) -> None:
    with pytest.raises(PluginError) as caught:
        detect(str(folder), infos=[info("foo", pattern), info("bar", "arch:Other")])
    said = str(caught.value)
    assert said.startswith("speculator 'foo' of specdec-plugin-foo 1.0 has a broken entry point")
    assert f"the checkpoint pattern {pattern!r} is none" in said
    if near:
        assert f"did you mean {near!r}?" in said


def test_tensors_are_read_only_if_a_pattern_asks(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"broken")
    assert Checkpoint(str(folder)).matches("arch:Other")
    assert not Checkpoint(str(folder)).matches("arch:Missing&tensor:t2d")
    with pytest.raises(ConfigError, match="is no safetensors file"):
        Checkpoint(str(folder)).matches("tensor:t2d")


# --- detection ------------------------------------------------------------


def test_the_method_is_told_by_its_pattern(folder: Path) -> None:
    infos = [info("foo", "arch:Nope"), info("bar", "arch:Nope2", "tensor:midlayer.*")]
    assert detect(str(folder), infos=infos) == "bar"


def test_two_patterns_of_one_method_are_no_conflict(folder: Path) -> None:
    assert detect(str(folder), infos=[info("bar", "arch:Other", "tensor:t2d")]) == "bar"


def test_two_methods_that_fit_have_to_be_told_apart_by_the_user(folder: Path) -> None:
    infos = [info("foo", "arch:Other"), info("bar", "tensor:t2d")]
    with pytest.raises(
        ConfigError, match=r"fits several methods \(bar, foo\); name one: METHOD:mo"
    ):
        detect(str(folder), infos=infos)


def test_two_distributions_with_the_pattern_that_matched_are_both_named(folder: Path) -> None:
    infos = [info("foo", "arch:Other"), info("bar", "arch:Other")]
    with pytest.raises(PluginError) as caught:
        detect(str(folder), infos=infos)
    said = str(caught.value)
    assert "the pattern 'arch:Other' is claimed by specdec-plugin-bar 1.0 (bar:Some) and" in said
    assert "specdec-plugin-foo 1.0" in said


def test_a_clash_over_another_pattern_does_not_matter(folder: Path) -> None:
    infos = [info("foo", "arch:X"), info("bar", "arch:X"), info("baz", "arch:Other")]
    assert detect(str(folder), infos=infos) == "baz"


def test_what_is_switched_off_claims_nothing(folder: Path) -> None:
    infos = [info("foo", "arch:Other", enabled=False), info("bar", "tensor:t2d")]
    assert detect(str(folder), infos=infos) == "bar"


def test_a_checkpoint_of_nobody_says_what_it_is(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(str(folder), infos=[info("foo", "arch:X")])
    assert str(caught.value) == (
        f"no installed speculator claims the checkpoint {str(folder)!r} (architectures: "
        "LlamaForCausalLMEagle3, Other); name the method: METHOD:model=... (installed: foo)"
    )


@pytest.mark.parametrize("model", ["foo", "[foo]", "Foo", "f-o"])
def test_a_model_that_is_the_name_of_a_method_is_that_method(model: str) -> None:
    infos = [attrs.evolve(info("foo"), aliases=("f_o",))]
    assert detect(model, infos=infos) == "foo"


def test_a_folder_of_a_methods_name_is_a_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    infos = [info(folder.name.lower()), info("bar", "arch:Other")]
    assert detect(folder.name, infos=infos) == "bar"


# --- checkpoints that are not well ----------------------------------------


@pytest.mark.parametrize(
    "content", [b"{", b"\xff", b"[1]", b"[" * 100_000], ids=["cut", "binary", "list", "deep"]
)
def test_a_config_that_is_no_json_object_is_refused(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json (cannot be read as JSON|holds no JSON)"):
        Checkpoint(str(folder)).matches("arch:X")


@pytest.mark.parametrize("found", [None, 3, "LlamaForCausalLM", {"a": 1}, [3, None]])
def test_architectures_of_another_kind_match_nothing(folder: Path, found: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": found}))
    assert not Checkpoint(str(folder)).matches("arch:Llama")
    with pytest.raises(ConfigError, match="architectures: none"):
        detect(str(folder), infos=[info("foo", "arch:Llama")])


def test_a_checkpoint_without_config_has_files_and_tensors(folder: Path) -> None:
    (folder / "config.json").unlink()
    checkpoint = Checkpoint(str(folder))
    assert not checkpoint.matches("arch:Other")
    assert checkpoint.matches("file:extra_head.pt&tensor:t2d&!key:model_type")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 0),
        struct.pack("<Q", 100) + b"{}",
        struct.pack("<Q", 2**63),
        struct.pack("<Q", 2) + b"{x",
        struct.pack("<Q", 3) + b"[1]",
        struct.pack("<Q", 50_000) + b"[" * 50_000,
        struct.pack("<Q", 1) + b"\xff",
    ],
    ids=["empty", "short", "no header", "cut", "huge", "no json", "list", "deep", "binary"],
)
def test_a_broken_safetensors_file_is_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        _ = Checkpoint(str(folder)).tensors


def test_links_that_lead_nowhere_are_no_files(folder: Path) -> None:
    before = Checkpoint(str(folder)).files
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    (folder / "a.pt").symlink_to("b.pt")
    (folder / "b.pt").symlink_to("a.pt")
    (folder / "gone.pt").symlink_to("nowhere.pt")
    (folder / "linked.pt").symlink_to("config.json")
    assert Checkpoint(str(folder)).files == sorted([*before, "linked.pt"])


@pytest.mark.parametrize(
    "model",
    ["org/nowhere", "./nowhere", "~nobody-here/x", "a\0b", "x" * 5000, "\ud800", ""],
    ids=["hub", "path", "home", "nul", "long", "surrogate", "empty"],
)
def test_a_checkpoint_that_is_not_there_is_refused_with_the_reason(model: str) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(model, infos=[info("foo", "arch:X")])
    said = str(caught.value)
    assert "is no folder here and could not be listed on the Hub (ConnectionError: offline)" in said
    assert len(said) < 1000


def test_a_hub_repository_is_read_by_its_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    class Metadata:
        tensors = {"midlayer.fc.weight": None}  # noqa: RUF012

    asked: list[tuple[str, object]] = []

    def files(model: str, revision: str | None) -> list[str]:
        asked.append((model, revision))
        return ["config.json", "model.safetensors", "onnx/model.safetensors"]

    monkeypatch.setattr(huggingface_hub, "list_repo_files", files)
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *a, **k: str(folder / "config.json")
    )
    monkeypatch.setattr(
        huggingface_hub, "parse_safetensors_file_metadata", lambda *a, **k: Metadata
    )
    assert detect("org/x", "v2", infos=[info("bar", "arch:Other&tensor:midlayer.*")]) == "bar"
    assert asked == [("org/x", "v2")]
    assert checkpoints.Checkpoint("org/x").files == ["config.json", "model.safetensors"]


def test_a_hub_file_that_cannot_be_fetched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(
        huggingface_hub, "list_repo_files", lambda *a, **k: ["config.json", "m.safetensors"]
    )
    for pattern in ("arch:X", "tensor:x"):
        with pytest.raises(ConfigError, match="could not be read on the Hub"):
            detect("org/x", infos=[info("foo", pattern)])
