"""What a benchmark says: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from specdec.bench.measurement import Run, Setting
from specdec.bench.summary import cells
from specdec.cli_report import positions, table

FORMAT = 1  # of the JSON; raised when a key changes its meaning
_SETTING = ("configuration", "T", "c")


@attrs.frozen(kw_only=True)
class Report:
    """Turns runs into numbers.

    head: what was measured, and on what; stands at the top of the JSON. baseline, repeats: as
    for `cells`.
    """

    head: Mapping[str, Any]
    baseline: str | None
    repeats: Mapping[Setting, bool]

    def as_dict(self, runs: Sequence[Run], *, partial: bool) -> dict[str, Any]:
        """Return everything, ready for JSON. partial: not everything was run."""
        return {
            "format": FORMAT,
            "partial": partial,
            **self.head,
            "cells": cells(runs, baseline=self.baseline, repeats=self.repeats),
            "runs": [_run(run) for run in runs],
        }

    def write(self, path: Path, runs: Sequence[Run], *, partial: bool) -> None:
        """Write the JSON, whole or not at all; to what the path names, if that is no file."""
        text = json.dumps(self.as_dict(runs, partial=partial), indent=1, ensure_ascii=False)
        path = path.resolve()
        if path.exists() and not path.is_file():  # a pipe or a device is not to be replaced
            path.write_text(text + "\n", encoding="utf-8")
            return
        beside = path.with_name(path.name + ".part")
        beside.write_text(text + "\n", encoding="utf-8")
        beside.replace(path)


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables of a report as Markdown.

    Categories are shown with as few requests in flight as there were; the JSON has the rest.
    """
    measured = found["cells"]
    yield from _title(found)
    yield ""
    yield from table(
        (*_SETTING, "tokens/s", "from - to", "speed-up", "first token, ms", "p99",
         "next token, ms", "p99", "equal"),
        [_speed_row(cell) for cell in measured],
    )  # fmt: skip
    drafting = [cell for cell in measured if cell["speculation"]["num_drafts"]]
    if drafting:
        yield ""
        yield from table(
            (*_SETTING, "tokens/step", "accepted length", "accepted of drafted", "by position"),
            [(*_setting(cell), *_acceptance(cell)) for cell in drafting],
        )
    rows = list(_category_rows(_told_by_category(found)))
    if len({row[0] for row in rows}) > 1:
        yield ""
        yield from table(
            ("category", *_SETTING, "answers", "tokens/s", "speed-up", "tokens/step",
             "accepted length", "by position", "equal"),
            rows,
            left=2,
        )  # fmt: skip
    yield ""
    yield from _notes(found)


def _title(found: Mapping[str, Any]) -> Iterator[str]:
    where, prompts, settings = found["environment"], found["prompts"], found["settings"]
    yield (
        f"{found['model']}, {found['dtype']}, on {where['device_name']}, threads: "
        f"{where['threads']}; {len(prompts['lines'])} prompts of {prompts['file']}, "
        f"{prompts['turns']} turn{'s' if prompts['turns'] == 'all' else ''}"
        f"{'' if prompts['chat_template'] else ', raw'}; {settings['max_tokens']} tokens at most"
    )
    for configuration in found["configurations"]:
        if configuration["speculative_config"] not in (None, configuration["name"]):
            yield f"{configuration['name']}: {configuration['speculative_config']}"
    if found["partial"]:
        yield (
            "PARTIAL: it was interrupted. Rates with * are of a run that was broken off; rows "
            "that are missing were not begun."
        )


def _told_by_category(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The cells to split: not the baseline's, which the speed-ups tell of, if there are others."""
    measured = found["cells"]
    least = min(cell["concurrency"] for cell in measured)
    few = [cell for cell in measured if cell["concurrency"] == least]
    return [cell for cell in few if cell["configuration"] != found["baseline"]] or few


def _notes(found: Mapping[str, Any]) -> Iterator[str]:
    counts = sorted({cell["runs"] for cell in found["cells"]})
    yield (
        f"T: temperature; c: requests in flight; medians of {' or '.join(map(str, counts))} runs. "
        "A next token's time is its share of its step; tokens/s of a category are those of one "
        "request."
    )
    equalities = [cell["equal"] for cell in found["cells"] if cell["equal"]]
    if equalities:
        yield (
            f"equal: answers with the tokens of {found['baseline']}; in brackets where the rule "
            "does not promise it."
        )
    broken = any(e["promised"] and e["answers"] < e["compared"] for e in equalities)
    if broken and not found["settings"]["deterministic"]:
        yield (
            "Where tokens differ that should not: near-ties can round differently in one-row and "
            "several-row products; --deterministic removes that on a CPU in float32."
        )


def _speed_row(cell: Mapping[str, Any]) -> Sequence[str]:
    rate, speed_up = cell["tokens_per_second"], cell["speed_up"]
    first, following = cell["time_to_first_token"], cell["inter_token_latency"]
    return (
        *_setting(cell),
        f"{rate['median']:.1f}{'' if cell['complete'] else '*'}",
        f"{rate['min']:.1f} - {rate['max']:.1f}",
        f"{speed_up['median']:.2f}" if speed_up else "-",
        *(f"{1000 * first[key]:.1f}" if first else "-" for key in ("median", "p99")),
        *(f"{1000 * following[key]:.1f}" if following else "-" for key in ("median", "p99")),
        _equal(cell),
    )


def _category_rows(measured: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    for name in dict.fromkeys(name for cell in measured for name in cell["categories"]):
        for cell in measured:
            part = cell["categories"].get(name)
            if part is None:
                continue  # broken off before an answer
            rate, speed_up = part["tokens_per_second_of_a_request"], part["speed_up"]
            tokens_per_step, length, _, by_position = _acceptance(part)
            yield (
                name,
                *_setting(cell),
                str(part["answers"]),
                f"{rate:.1f}" if rate else "-",
                f"{speed_up:.2f}" if speed_up else "-",
                tokens_per_step,
                length,
                by_position,
                _equal(part),
            )


def _setting(cell: Mapping[str, Any]) -> tuple[str, str, str]:
    return cell["configuration"], f"{cell['temperature']:g}", str(cell["concurrency"])


def _acceptance(part: Mapping[str, Any]) -> tuple[str, str, str, str]:
    numbers = part["speculation"]
    return (
        f"{numbers['tokens_per_step']:.2f}",
        f"{numbers['mean_acceptance_length']:.2f}" if numbers["num_drafts"] else "-",
        f"{numbers['num_accepted_tokens']} / {numbers['num_draft_tokens']}",
        " ".join(positions(numbers)) or "-",
    )


def _equal(part: Mapping[str, Any]) -> str:
    equal = part["equal"]
    if equal is None:
        return "-"
    text = f"{equal['answers']}/{equal['compared']}"
    return text if equal["promised"] else f"({text})"


def _run(run: Run) -> dict[str, Any]:
    return {
        **attrs.asdict(run.setting),
        "repetition": run.repetition,
        "complete": run.complete,
        "seconds": run.seconds,
        "tokens": run.tokens,
        "answers": [
            {
                "line": answer.task.line,
                "id": answer.task.name,
                "category": answer.task.category,
                "turn": answer.turn,
                "prompt_tokens": answer.prompt_tokens,
                "tokens": len(answer.tokens),
                "seconds": answer.seconds,
                "time_to_first_token": answer.first,
                "finish_reason": answer.finish_reason,
                "error": answer.error,
                "num_drafts": answer.speculation.num_drafts,
                "num_draft_tokens": answer.speculation.num_draft_tokens,
                "num_accepted_tokens": answer.speculation.num_accepted_tokens,
            }
            for answer in run.answers
        ],
    }
