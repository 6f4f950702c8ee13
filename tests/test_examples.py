"""Every file in examples/ runs on a tiny model, says what it promises and stays short."""

from __future__ import annotations

import runpy
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from specdec.testing import save_tiny_model

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LONGEST = 40  # lines

needs_ngram = pytest.mark.skipif(
    not entry_points(group="specdec.plugins", name="ngram"), reason="ngram is not installed"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random Llama and a tokenizer of bytes."""
    folder = str(tmp_path_factory.mktemp("model"))
    save_tiny_model(folder)
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@needs_ngram
def test_generate_answers_every_prompt(run: Any, model: str) -> None:
    said = run("generate.py", model, "one, one, one, one", "two", "--max-tokens", "8")
    assert said.count("->") == 2
    assert said.count("tokens per step") == 2


def test_own_speculator_changes_nothing(run: Any, model: str) -> None:
    assert "same tokens as without: True" in run("own_speculator.py", model, "again again")


@needs_ngram
def test_observe_prints_every_step(run: Any, model: str) -> None:
    *steps, last = run("observe.py", model, "ab ab ab ab").splitlines()
    assert steps[0] == "step 1, slot 0: prompt, 0 drafts, 1 emitted"
    assert last == f"24 tokens in {len(steps)} steps"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < LONGEST


def test_every_example_is_tested() -> None:
    tested = Path(__file__).read_text(encoding="utf-8")
    assert [p.name for p in EXAMPLES.glob("*.py") if f'"{p.name}"' not in tested] == []
