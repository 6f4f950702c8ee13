"""Loading a tokenizer: where it comes from, and what is said when it cannot be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specdec.errors import ConfigError
from specdec.tokenizer import check_token, load_tokenizer


def load(model: Any, tokenizer: Any = None, **changes: Any) -> PreTrainedTokenizerBase | None:
    settings: dict[str, Any] = {
        "revision": None, "trust_remote_code": False, "token": None, "extra": None
    }  # fmt: skip
    return load_tokenizer(model, tokenizer, **{**settings, **changes})


@pytest.fixture
def own() -> PreTrainedTokenizerBase:
    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    make: Any = PreTrainedTokenizerFast
    built: PreTrainedTokenizerBase = make(tokenizer_object=words, eos_token="<unk>")
    return built


@pytest.fixture
def folder(own: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    own.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What transformers is asked for; it fails as it does without a network."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def unreachable(source: str, **options: Any) -> None:
        calls.append((source, options))
        raise OSError("We couldn't connect to the Hub.\nMore lines.")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", unreachable)
    return calls


def test_the_models_own_is_the_default_and_another_may_be_named(folder: Path) -> None:
    for source in ((folder, None), (str(folder), None), ("org/model", folder), (object(), folder)):
        found = load(*source)
        assert found is not None
        assert found.eos_token_id == 1


def test_a_tokenizer_is_used_as_it_is(own: PreTrainedTokenizerBase) -> None:
    assert load("org/model", own) is own


def test_a_module_has_none_of_its_own() -> None:
    assert load(object()) is None


def test_arguments_reach_transformers(folder: Path) -> None:
    found = load(folder, extra={"eos_token": "a"})
    assert found is not None
    assert found.eos_token_id == 0


@pytest.mark.parametrize(
    ("model", "tokenizer", "source"),
    [("org/model", None, "org/model"), (object(), "org/words", "org/words")],
)
def test_a_source_that_gives_none_is_named_with_the_reason(
    model: Any, tokenizer: Any, source: str, asked: list[tuple[str, dict[str, Any]]]
) -> None:
    with pytest.raises(ConfigError) as said:
        load(model, tokenizer, revision="v1", token="secret")
    assert str(said.value) == (
        f"no tokenizer could be loaded from {source!r} (OSError: We couldn't connect to the Hub.) "
        "- name another with tokenizer=, or pass skip_tokenizer_init=True and token ids"
    )
    assert asked == [(source, {"revision": "v1", "trust_remote_code": False, "token": "secret"})]


@pytest.mark.parametrize("extra", [["use_fast"], "use_fast", 1, True])
def test_arguments_that_are_no_mapping_are_refused(extra: object, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^tokenizer_kwargs is of type .*; give a dict"):
        load(folder, extra=extra)


def test_an_argument_given_twice_is_a_setting_gone_wrong(folder: Path) -> None:
    with pytest.raises(ConfigError, match="multiple values for keyword argument 'revision'"):
        load(folder, extra={"revision": "v2"})


def test_another_type_of_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^tokenizer is of type int; give a folder"):
        load("org/model", 5)


@pytest.mark.parametrize("token", [5, b"secret", ["secret"], {"token": "secret"}])
def test_what_is_no_token_of_the_hub_is_refused_unread(token: object, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^hf_token is of type ") as said:
        load(folder, token=token)
    assert "secret" not in str(said.value)


@pytest.mark.parametrize("token", [None, True, False, "secret"])
def test_a_token_may_be_said_or_stored(token: object) -> None:
    check_token(token)
