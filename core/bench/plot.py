"""The picture of a report: speed by requests in flight, acceptance by position."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.cli_report import drafted_shares
from specdec.errors import ConfigError, listed

SUFFIXES = (".pdf", ".png", ".svg")
_WIDTH, _HEIGHT = 11, 4  # inches of a row of the picture


def check(path: Path) -> None:
    """Make sure that a picture can be drawn, before anything is measured. Raise ConfigError."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path} has to end in one of {listed(SUFFIXES)}")
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            "--plot draws with matplotlib, which is not installed: "
            "pip install 'specdec-core[bench]'"
        ) from error


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw a report: a row for each temperature.

    Bars are medians and their whiskers reach from the slowest run to the fastest.
    """
    figures: Any = importlib.import_module("matplotlib.figure")
    cells = found["cells"]
    names = list(dict.fromkeys(cell["configuration"] for cell in cells))
    temperatures = list(dict.fromkeys(cell["temperature"] for cell in cells))
    size = (_WIDTH, _HEIGHT * len(temperatures))
    figure = figures.Figure(figsize=size, layout="constrained")
    rows = figure.subplots(len(temperatures), 2, squeeze=False)
    for (speed, acceptance), temperature in zip(rows, temperatures, strict=True):
        of_row = [cell for cell in cells if cell["temperature"] == temperature]
        _speed(speed, of_row, names)
        _acceptance(acceptance, of_row, names)
        speed.set_title(f"temperature {temperature:g}")
    title = _model(str(found["model"])) + (" (partial)" if found["partial"] else "")
    figure.suptitle(title, parse_math=False)
    figure.savefig(path, dpi=150)


def _speed(axes: Any, cells: list[Mapping[str, Any]], names: list[str]) -> None:
    concurrencies = sorted({cell["concurrency"] for cell in cells})
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        mine = [cell for cell in cells if cell["configuration"] == name]
        rates = [cell["tokens_per_second"] for cell in mine]
        median = [rate["median"] for rate in rates]
        axes.bar(
            [concurrencies.index(c["concurrency"]) + (number + 0.5) * width - 0.4 for c in mine],
            median,
            width,
            yerr=[
                [m - rate["min"] for m, rate in zip(median, rates, strict=True)],
                [rate["max"] - m for m, rate in zip(median, rates, strict=True)],
            ],
            capsize=3,
            color=f"C{number % 10}",
            label=_label(name),
        )
    axes.set_xticks(range(len(concurrencies)), [str(c) for c in concurrencies])
    axes.set_xlabel("requests in flight")
    axes.set_ylabel("tokens per second")
    axes.legend()


def _acceptance(axes: Any, cells: list[Mapping[str, Any]], names: list[str]) -> None:
    """One line a configuration: acceptance hardly depends on what else is in flight."""
    axes.set_xlabel("draft")
    axes.set_ylabel("share of steps that accept it")
    axes.set_ylim(0, 1)
    least = min(cell["concurrency"] for cell in cells)
    for cell in cells:
        shares = drafted_shares(cell["speculation"])
        if shares and cell["concurrency"] == least:
            number = names.index(cell["configuration"])
            label = _label(cell["configuration"])
            places = range(1, len(shares) + 1)
            axes.plot(places, shares, marker="o", color=f"C{number % 10}", label=label)
    if axes.lines:
        axes.set_xticks(range(1, 1 + max(len(line.get_xdata()) for line in axes.lines)))
        axes.legend()


def _model(name: str) -> str:
    """Name a model: a folder without where it lies, a Hub id as it is."""
    path = Path(name).expanduser()
    return path.resolve().name if path.is_dir() else name


def _label(name: str) -> str:
    # a label that starts with an underscore is left out, and dollars enclose mathematics
    return name.replace("$", r"\$").removeprefix("_")
