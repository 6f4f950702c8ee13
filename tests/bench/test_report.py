"""Tables for people, JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.bench.load import Answer
from specdec.bench.measurement import Run, Setting
from specdec.bench.report import Report, lines
from specdec.bench.workload import Task
from specdec.metrics import SpeculationMetrics


def run(
    name: str,
    *,
    temperature: float = 0.0,
    concurrency: int = 1,
    seconds: float = 1.0,
    tokens: tuple[int, ...] = (1, 2),
    categories: str = "ab",
    complete: bool = True,
) -> Run:
    drafted = name != "plain"
    numbers = SpeculationMetrics(num_plain_steps=2)
    if drafted:
        numbers = SpeculationMetrics(
            num_drafts=2, num_draft_tokens=4, num_accepted_tokens=1,
            drafted_per_pos=[2, 2], accepted_per_pos=[1, 0],
        )  # fmt: skip
    answers = [
        Answer(
            task=Task(line=i, name=str(i), category=category, turns=("x",)),
            turn=0,
            prompt_tokens=3,
            tokens=np.array(tokens, dtype=np.int32),
            seconds=0.5,
            first=0.0625,
            gaps=[(0.03, 1)],
            finish_reason="length",
            error=None,
            speculation=numbers,
        )
        for i, category in enumerate(categories)
    ]
    return Run(
        setting=Setting(name, temperature, concurrency),
        repetition=0,
        seconds=seconds,
        tokens=len(tokens) * len(answers),
        answers=tuple(answers),
        complete=complete,
    )


def report(runs: list[Run], *, promised: bool = True, baseline: str | None = "plain") -> Report:
    names = dict.fromkeys(r.setting.configuration for r in runs)
    return Report(
        head={
            "model": "m",
            "dtype": "float32",
            "baseline": baseline,
            "environment": {"device_name": "a box", "threads": 1},
            "prompts": {"file": "f", "lines": [1, 2], "turns": "first", "chat_template": True},
            "settings": {"max_tokens": 8, "deterministic": False},
            "configurations": [{"name": n, "speculative_config": f"given {n}"} for n in names],
        },
        baseline=baseline,
        repeats={r.setting: promised for r in runs},
    )


def told(runs: list[Run], *, partial: bool = False, **settings: Any) -> list[str]:
    return list(lines(report(runs, **settings).as_dict(runs, partial=partial)))


def rows(found: list[str], first: str) -> list[list[str]]:
    """The cells below the header that starts with this word."""
    start = next(i for i, line in enumerate(found) if line.startswith(f"| {first}"))
    body = found[start + 2 :]
    end = next(i for i, line in enumerate(body) if not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body[:end]]


def test_the_first_table_is_about_speed() -> None:
    found = told([run("plain", seconds=2.0), run("fast", seconds=1.0)])
    assert rows(found, "configuration") == [
        ["plain", "0", "1", "2.0", "2.0 - 2.0", "-", "62.5", "62.5", "30.0", "30.0", "-"],
        ["fast", "0", "1", "4.0", "4.0 - 4.0", "2.00", "62.5", "62.5", "30.0", "30.0", "2/2"],
    ]
    assert "fast: given fast" in found


def test_the_second_is_about_acceptance_where_something_was_drafted() -> None:
    found = told([run("plain"), run("fast")])
    first = next(i for i, line in enumerate(found) if line.startswith("| configuration"))
    ((name, *_, per_step, length, accepted, shares),) = rows(found[first + 1 :], "configuration")
    assert name == "fast"
    assert [per_step, length, accepted, shares] == ["1.50", "1.50", "2 / 8", "0.50 0.00"]
    alone = told([run("plain")])
    assert not any("accepted of drafted" in line for line in alone)


def test_the_third_splits_categories_with_the_fewest_in_flight() -> None:
    runs = [run(n, concurrency=c) for n in ("plain", "fast") for c in (4, 1)]
    split = rows(told(runs), "category")
    assert split[0][8] == "1.50"
    # nothing was drafted, so nothing has a length
    assert rows(told([run("plain")]), "category")[0][8:10] == ["-", "-"]
    assert [row[:4] for row in split] == [["a", "fast", "0", "1"], ["b", "fast", "0", "1"]]
    assert [row[0] for row in rows(told([run("plain")]), "category")] == ["a", "b"]
    one = told([run("plain", categories="aa")])
    assert not any(line.startswith("| category") for line in one)


def test_equality_that_is_not_promised_stands_in_brackets() -> None:
    found = told([run("plain"), run("fast", tokens=(1, 3))], promised=False)
    assert rows(found, "configuration")[1][-1] == "(0/2)"
    assert not any("near-ties" in line for line in found)
    assert any("near-ties" in line for line in told([run("plain"), run("fast", tokens=(1, 3))]))


def test_a_partial_report_says_so_and_marks_what_was_broken_off() -> None:
    found = told([run("plain"), run("fast", complete=False)], partial=True)
    assert any(line.startswith("PARTIAL") for line in found)
    assert rows(found, "configuration")[1][3] == "4.0*"
    assert rows(found, "configuration")[0][3] == "4.0"
    assert not any("PARTIAL" in line for line in told([run("plain")]))


def test_the_json_holds_cells_runs_and_answers(tmp_path: Path) -> None:
    runs = [run("plain"), run("fast")]
    file = tmp_path / "r.json"
    file.write_text("old")
    report(runs).write(file, runs, partial=True)
    found = json.loads(file.read_text(encoding="utf-8"))
    assert (found["format"], found["partial"], found["model"]) == (1, True, "m")
    assert [c["configuration"] for c in found["cells"]] == ["plain", "fast"]
    assert [len(r["answers"]) for r in found["runs"]] == [2, 2]
    assert found["runs"][1]["answers"][0]["num_accepted_tokens"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    assert list(lines(found)) == told(runs, partial=True)


def test_a_file_that_was_there_survives_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    file.write_text("old")
    broken = report([run("plain")])
    with pytest.raises(KeyError):
        broken.write(file, [run("other")], partial=True)
    assert file.read_text() == "old"
