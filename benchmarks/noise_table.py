"""results/noise.md, from the report of `noise.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

BOUNDS = ("maximal", "independent", "greedy drafts")


def table(report: dict[str, Any]) -> str:
    """Everything that was measured, as Markdown."""
    lines = ["# One level of noise or two"]
    if "acceptance" in report:
        lines += _acceptance(report["acceptance"])
    if "words" in report:
        lines += _words(report["words"])
    if "time" in report:
        lines += _time(report["time"])
    return "\n".join(lines) + "\n"


def _made_on(environment: dict[str, Any]) -> str:
    packages = ("python", "torch", "transformers", "triton", "numpy")
    versions = ", ".join(f"{name} {environment[name]}" for name in packages)
    return f"{environment['device']}; {versions}; commit {environment['commit']}."


def _acceptance(found: dict[str, Any]) -> Iterator[str]:
    drafters = found["drafters"]
    schemes = [name for name in next(iter(drafters.values()))["T=1.0"] if name not in BOUNDS]
    yield f"""
{_made_on(found["environment"])}
`{found["command"]}`

{found["model"]} in float32: {found["texts"]} answers of its own to prompts of
{found["prompts_file"]}, {found["positions"]} positions, {found["vocabulary"]} ids. See `noise.py`
for what is computed and what the groups are. In brackets: the standard error of the last digits.
"""
    for temperature in ("T=1.0", "T=0.6"):
        for what, digits in (("agreement", 4), ("of 5", 3)):
            rows = {name: drafter[temperature] for name, drafter in drafters.items()}
            title = "Agreement per position" if what == "agreement" else "Drafts kept of 5"
            yield f"## {title}, {temperature}\n"
            yield f"Bounds and flat draws; then {10**digits} times what others have beyond flat.\n"
            head = ["drafter", "maximal", "independent", "greedy drafts", "flat", *schemes[1:]]
            yield "| " + " | ".join(head) + " |"
            yield "| --- |" + " ---: |" * (len(head) - 1)
            for name, row in rows.items():
                cells = [
                    _value(row[rule][what], digits)
                    for rule in ("maximal", "independent", "greedy drafts", "flat")
                ]
                cells += [_scaled(row[rule][f"{what} beyond flat"], digits) for rule in schemes[1:]]
                yield f"| {name} | " + " | ".join(cells) + " |"
            means = [
                sum(row[rule][what]["mean"] for row in rows.values()) / len(rows)
                for rule in ("maximal", "independent", "greedy drafts", "flat")
            ]
            less = [
                sum(row[rule][f"{what} beyond flat"]["mean"] for row in rows.values()) / len(rows)
                for rule in schemes[1:]
            ]
            cells = [f"{value:.{digits}f}" for value in means]
            cells += [f"{value * 10**digits:+.0f}" for value in less]
            yield "| *mean* | " + " | ".join(cells) + " |\n"
    yield (
        "Drafters: " + "; ".join(f"{name}: {row['says']}" for name, row in drafters.items()) + ".\n"
    )
    yield "## One draw per position, T=1.0\n"
    yield "Draws with `specdec_kernels.noise` that agree; what is expected; the difference as z.\n"
    checked = list(next(iter(drafters.values()))["sampled"])
    yield "| drafter | " + " | ".join(checked) + " |"
    yield "| --- |" + " --- |" * len(checked)
    for name, row in drafters.items():
        cells = [
            f"{row['sampled'][scheme]['agree']} of {row['sampled'][scheme]['draws']}, "
            f"{row['sampled'][scheme]['expected']}, {row['sampled'][scheme]['z']:+.2f}"
            for scheme in checked
        ]
        yield f"| {name} | " + " | ".join(cells) + " |"
    for scheme in checked:
        total = sum(row["sampled"][scheme]["z"] ** 2 for row in drafters.values())
        yield f"\nSum of z² of {scheme}: {total:.1f} of {len(drafters)} drafters."


def _value(found: dict[str, float], digits: int) -> str:
    return f"{found['mean']:.{digits}f} ({found['error'] * 10**digits:.0f})"


def _scaled(found: dict[str, float], digits: int) -> str:
    return f"{found['mean'] * 10**digits:+.0f} ({found['error'] * 10**digits:.0f})"


def _words(found: dict[str, Any]) -> Iterator[str]:
    yield f"""
## The words

{_made_on(found["environment"])}
`{found["command"]}`

{found["count"]} words each, in standard deviations: chi-squares of 256 cells (the high byte, the
low byte, the high four bits of two words that follow each other or stand at the same id) and
correlations. {found["above_2"]} of {found["checks"]} lie above 2, where {found["expected_above_2"]}
are expected; the largest is {found["largest"]}.

| what counts up, or differs | checks |
| --- | --- |"""
    for name, checks in found["z"].items():
        yield f"| {name} | " + ", ".join(f"{check} {z:+.2f}" for check, z in checks.items()) + " |"


def _time(found: dict[str, Any]) -> Iterator[str]:
    yield f"""
## Time

{_made_on(found["environment"])}
`{found["command"]}`

Microseconds of drawing an id for {found["rows"]} rows of each of B requests, {found["vocabulary"]}
ids, bfloat16, T = 1, two launches, from graph replays with inputs that are not in the cache. The
floor is one read of the rows at the bandwidth of a copy, {found["copy_bandwidth"] / 1e12:.2f} TB/s.
"""
    batches = sorted({row["batch"] for row in found["cases"]})
    yield "| scheme | " + " | ".join(f"B={batch}" for batch in batches) + " |"
    yield "| --- |" + " ---: |" * len(batches)
    floors = {row["batch"]: row["floor"] for row in found["cases"]}
    yield "| floor | " + " | ".join(f"{floors[batch]:.1f}" for batch in batches) + " |"
    for scheme in dict.fromkeys(row["scheme"] for row in found["cases"]):
        times = {r["batch"]: r["microseconds"] for r in found["cases"] if r["scheme"] == scheme}
        yield f"| {scheme} | " + " | ".join(f"{times[b]:.1f}" for b in batches) + " |"
    wrong = sum(row["different_from_reference"] for row in found["cases"])
    compared = sum(row["compared"] for row in found["cases"])
    yield f"\nRows with another token than the reference's: {wrong} of {compared}."
