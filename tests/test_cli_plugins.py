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


@pytest.mark.parametrize("where", ["load", "capabilities"])
def test_a_plugin_that_exits_is_an_error_that_names_it(
    model_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    value = f"{__name__}:Leaving"
    entry: Any = EntryPoint(name="some", value=value, group=plugins.METHODS)
    info = plugins.PluginInfo("some", (), value, "dist-some", "1.0", entry_point=entry)
    monkeypatch.setattr(plugins, "find", lambda name: info)
    monkeypatch.setattr(plugins, "load", lambda found: Leaving)
    monkeypatch.setattr(Leaving, "where", where)
    assert main(["plugins", "some", "--target", str(model_folder)]) == 2
    said = f"specdec: speculator 'some' of dist-some 1.0 raised SystemExit in {where}: 0\n"
    assert capsys.readouterr().err == said
