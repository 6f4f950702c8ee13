"""From runs to numbers: a cell for every configuration in every setting."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from specdec.bench.load import Answer
from specdec.bench.measurement import Run, Setting
from specdec.metrics import SpeculationMetrics

Key = tuple[int, int, int]  # repetition, line, turn


def cells(
    runs: Sequence[Run], *, baseline: str | None, repeats: Mapping[Setting, bool]
) -> list[dict[str, Any]]:
    """Sum up the runs of every setting, in the order of their first run; ready for JSON.

    baseline: the configuration that others are compared with, itself left out. repeats: where
    the tokens are promised to be those of the baseline.
    """
    by_setting: dict[Setting, list[Run]] = {}
    for run in runs:
        by_setting.setdefault(run.setting, []).append(run)
    # a run that was broken off counts only where there is nothing else
    used = {s: [r for r in found if r.complete] or found for s, found in by_setting.items()}
    result = []
    for setting, found in used.items():
        plain = None
        if baseline is not None and setting.configuration != baseline:
            plain = used.get(attrs.evolve(setting, configuration=baseline))
        result.append(_cell(setting, found, plain, repeats[setting]))
    return result


def _cell(
    setting: Setting, runs: list[Run], plain: list[Run] | None, repeats: bool
) -> dict[str, Any]:
    answers, others = _answers(runs), _answers(plain or [])
    gaps = [gap for answer in answers.values() for gap in answer.gaps]
    per_token = [np.repeat(seconds / tokens, tokens) for seconds, tokens in gaps]
    in_order = sorted((a.task for a in answers.values()), key=lambda task: task.line)
    categories = dict.fromkeys(task.category for task in in_order)
    return {
        **attrs.asdict(setting),
        "runs": len(runs),
        "complete": all(run.complete for run in runs),
        "tokens_per_second": _spread([run.rate for run in runs]),
        "speed_up": None if plain is None else _speed_up(runs, plain),
        "time_to_first_token": _latency([a.first for a in answers.values() if a.first]),
        "inter_token_latency": _latency(np.concatenate(per_token) if per_token else []),
        "time_between_outputs": _latency([seconds for seconds, _ in gaps]),
        **_part(answers, others, compared=plain is not None, repeats=repeats),
        "categories": {
            "none" if name is None else name: _category(name, answers, others, plain, repeats)
            for name in categories
        },
    }


def _category(
    name: str | None,
    answers: Mapping[Key, Answer],
    others: Mapping[Key, Answer],
    plain: list[Run] | None,
    repeats: bool,
) -> dict[str, Any]:
    mine = {k: a for k, a in answers.items() if a.task.category == name}
    theirs = {k: a for k, a in others.items() if a.task.category == name}
    rate, other = _rate_of_a_request(mine), _rate_of_a_request(theirs)
    return {
        "tokens_per_second_of_a_request": rate,
        "speed_up": rate / other if rate and other else None,
        **_part(mine, theirs, compared=plain is not None, repeats=repeats),
    }


def _answers(runs: Sequence[Run]) -> dict[Key, Answer]:
    return {(run.repetition, a.task.line, a.turn): a for run in runs for a in run.answers}


def _part(
    answers: Mapping[Key, Answer], others: Mapping[Key, Answer], *, compared: bool, repeats: bool
) -> dict[str, Any]:
    speculation = SpeculationMetrics()
    for answer in answers.values():
        speculation.add(answer.speculation)
    pairs = [(a, others[k]) for k, a in answers.items() if k in others]
    whole = [(a, b) for a, b in pairs if a.error is None and b.error is None]
    equal = sum(np.array_equal(a.tokens, b.tokens) for a, b in whole)
    return {
        "answers": len(answers),
        "failed": sum(answer.error is not None for answer in answers.values()),
        "tokens": sum(len(answer.tokens) for answer in answers.values()),
        "speculation": speculation.as_dict(),
        "equal": {"answers": equal, "compared": len(whole), "promised": repeats}
        if compared
        else None,
    }


def _speed_up(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any] | None:
    """Of the runs of a repetition, which took turns: what slows a machine slows them all."""
    by_repetition = {run.repetition: run.rate for run in plain}
    rates = [(r.rate, by_repetition[r.repetition]) for r in runs if r.repetition in by_repetition]
    ratios = [rate / other for rate, other in rates if other]
    return _spread(ratios) if ratios else None


def _rate_of_a_request(answers: Mapping[Key, Answer]) -> float | None:
    seconds = sum(answer.seconds for answer in answers.values())
    return sum(len(answer.tokens) for answer in answers.values()) / seconds if seconds else None


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "each": list(values),
    }


def _latency(seconds: Any) -> dict[str, float] | None:
    """Median and 99th percentile, in seconds; None without any."""
    if not len(seconds):
        return None
    median, late = np.percentile(seconds, [50, 99])
    return {"median": float(median), "p99": float(late)}
