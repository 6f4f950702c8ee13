"""`specdec plugins NAME`: what a plugin raises does not end the process."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from specdec import Capabilities, Speculator, plugins
from specdec.cli import main


class Leaving(Speculator):
    """Ends the process wherever it is told to."""

    where = ""

    @classmethod
    def load(cls, target: Any, config: Any) -> Leaving:
        cls.leave("load")
        return cls()

    def capabilities(self) -> Capabilities:
        self.leave("capabilities")
        return Capabilities()

    @classmethod
    def leave(cls, here: str) -> None:
        if cls.where == here:
            raise SystemExit(0)


def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `some` be the name of the class."""
    value = f"{__name__}:Leaving"
    entry: Any = EntryPoint(name="some", value=value, group=plugins.METHODS)
    info = plugins.PluginInfo("some", (), value, "dist-some", "1.0", entry_point=entry)
    monkeypatch.setattr(plugins, "find", lambda name: info)
    monkeypatch.setattr(plugins, "load", lambda found: Leaving)


@pytest.mark.parametrize("where", ["load", "capabilities"])
def test_a_plugin_that_exits_is_an_error_that_names_it(
    model_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    installed(monkeypatch)
    monkeypatch.setattr(Leaving, "where", where)
    assert main(["plugins", "some", "--target", str(model_folder)]) == 2
    said = f"specdec: speculator 'some' of dist-some 1.0 raised SystemExit in {where}: 0\n"
    assert capsys.readouterr().err == said


def test_a_description_is_lines_that_a_person_can_read(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch)
    assert main(["plugins", "some", "--target", str(model_folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    told = {name: said.strip() for name, _, said in (line.partition(":") for line in lines)}
    assert told["max drafts"] == told["max context"] == "no limit"
    assert told["hidden states"] == told["q"] == "none"
    assert told["  coupled"] == "yes"
