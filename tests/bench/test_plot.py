"""The picture of a report."""

from __future__ import annotations

import builtins
import importlib
from pathlib import Path
from typing import Any

import pytest

from specdec import ConfigError
from specdec.bench import plot

CELL = {
    "temperature": 0.0,
    "concurrency": 1,
    "tokens_per_second": {"median": 2.0, "min": 1.0, "max": 4.0},
}


def report(*cells: dict[str, Any]) -> dict[str, Any]:
    return {"model": "some$model_1", "partial": True, "cells": list(cells)}


def cell(name: str, rates: list[float], **values: Any) -> dict[str, Any]:
    numbers = {"acceptance_rate_per_pos": rates, "drafted_per_pos": [1] * len(rates)}
    return {**CELL, "configuration": name, "speculation": numbers, **values}


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'specdec-core\[bench\]'"):
        plot.check(Path("a.png"))


@pytest.mark.parametrize("name", ["a", "a.jpeg", "png"])
def test_a_picture_of_another_kind_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"has to end in one of \.pdf, \.png, \.svg"):
        plot.check(Path(name))


def test_importing_the_module_needs_no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def guarded(name: str, *args: Any, **kwargs: Any) -> Any:
        assert not name.startswith("matplotlib")
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guarded)
    importlib.reload(plot)


@pytest.mark.parametrize("suffix", plot.SUFFIXES)
def test_every_setting_is_drawn(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    file = tmp_path / f"a{suffix}"
    plot.check(file)
    cells = [
        cell(name, rates, temperature=temperature, concurrency=concurrency)
        for name, rates in (("plain", []), ("_fast$", [0.5, 0.25]), ("other", [0.9]))
        for temperature in (0.0, 0.7)
        for concurrency in (1, 4)
    ]
    plot.draw(report(*cells[:-1]), file)  # the last one was not begun
    assert file.stat().st_size > 5000


def test_the_title_names_a_folder_without_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    (tmp_path / "some-model").mkdir()
    monkeypatch.chdir(tmp_path / "some-model")
    for model in (tmp_path / "some-model", ".", "org/some-model"):
        plot.draw({**report(cell("plain", [])), "model": str(model)}, tmp_path / "a.svg")
        text = (tmp_path / "a.svg").read_text(encoding="utf-8")
        assert ("<!-- org/some-model (partial) -->" in text) == (model == "org/some-model")
        assert ("<!-- some-model (partial) -->" in text) == (model != "org/some-model")


def test_plain_decoding_alone_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    plot.draw(report(cell("plain", [])), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000
