"""What does drawing ids in two levels cost in agreement of coupled drafts, and what does it save?

    python benchmarks/noise.py --model DIR --prompts question.jsonl [--drafters NAME ...]
    python benchmarks/noise.py --words
    python benchmarks/noise.py --time        (needs a CUDA device)

Each command writes its part of results/noise.json (or of --json FILE) and the table beside it anew.

Agreement: a model writes answers at temperature 1; at each of their tokens, p is its law and q that
of a worse copy (`noise_drafters.py`). With the same Gumbel noise added to both, one level draws i
from both with probability 1 / sum_j max(p_j / p_i, q_j / q_i) (Moulton and Jiang 2018,
arXiv:1809.04052; for speculative decoding Daliri, Musco and Suresh 2024, arXiv:2408.07978). Two
levels have noises of their own, so theirs is that of the groups' masses times that within the
group. Groups of n: n consecutive ids, as the package draws. "n, strided": V / n apart. "32 by 128":
128 apart, within blocks of 4,096. "32 by 1024, in eights": four times eight consecutive ids.
Nothing is sampled, but one draw per position with `specdec_kernels.noise` checks it.

Bounds: sum_i min(p_i, q_i), which `standard` reaches with q known, and sum_i p_i q_i of independent
draws. Of 5: the expected number of drafts kept out of 5, the sum over i of the product of the first
i agreements of 5 successive positions: as if the text went on as recorded. Errors are standard
errors with whole answers as the units.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
import noise_table
import noise_words
from environment import environment
from noise_drafters import DRAFTERS, Text, load, logits_of, write
from noise_schemes import FLAT, SCHEMES, TINY, Floats, Scheme, consecutive

from specdec_kernels import make_stream, noise

TEMPERATURES = (1.0, 0.6)
K = 5
SAMPLED = [FLAT, consecutive(noise.GROUP)]


def laws(logits: Tensor, temperature: float) -> Floats:
    """Of rows [n, V]."""
    return (logits.double() / temperature).softmax(-1).numpy()


def draws(logits: list[Tensor], scheme: Scheme, seed: int) -> list[Tensor]:
    """One id per row at temperature 1, keyed by seed, text and position."""
    found = []
    for i, rows in enumerate(logits):
        stream = torch.full((len(rows),), make_stream(seed, i))
        found.append(scheme.draw(rows, stream, torch.arange(len(rows))))
    return found


def mean(values: list[Floats]) -> dict[str, float]:
    """Over the positions of all texts, and its standard error with texts as the units."""
    sums, counts = np.array([v.sum() for v in values]), np.array([v.size for v in values])
    center = sums.sum() / counts.sum()
    units = len(values)
    spread = ((sums - center * counts) ** 2).sum() * units / (units - 1)
    return {"mean": float(center), "error": float(math.sqrt(spread) / counts.sum())}


def kept(values: Floats) -> Floats:
    """Expected drafts kept out of K from each position that has K after it: [positions]."""
    windows = np.lib.stride_tricks.sliding_window_view(values, K)
    kept: Floats = windows.cumprod(-1).sum(-1)
    return kept


def compare(
    p_logits: list[Tensor], q_logits: list[Tensor], temperature: float
) -> dict[str, list[Floats]]:
    """Agreement at every position of every text: of every scheme, and the bounds."""
    rules: dict[str, Callable[[Floats, Floats], float]] = {
        "maximal": lambda p, q: float(np.minimum(p, q).sum()),
        "independent": lambda p, q: float((p * q).sum()),
        "greedy drafts": lambda p, q: float(p[q.argmax()]),
        **{scheme.name: scheme.agreement for scheme in SCHEMES},
    }
    found: dict[str, list[Floats]] = {name: [] for name in rules}
    for p_rows, q_rows in zip(p_logits, q_logits, strict=True):
        pairs = list(zip(laws(p_rows, temperature), laws(q_rows, temperature), strict=True))
        for name, rule in rules.items():
            found[name].append(np.array([rule(p, q) for p, q in pairs]))
    return found


def summary(found: dict[str, list[Floats]]) -> dict[str, Any]:
    """Means, also of what each row has less or more than flat draws."""
    windowed = {name: [kept(v) for v in per if len(v) >= K] for name, per in found.items()}

    def beyond_flat(table: dict[str, list[Floats]], name: str) -> dict[str, float]:
        return mean([a - b for a, b in zip(table[name], table[FLAT.name], strict=True)])

    return {
        name: {
            "agreement": mean(found[name]),
            "agreement beyond flat": beyond_flat(found, name),
            "of 5": mean(windowed[name]),
            "of 5 beyond flat": beyond_flat(windowed, name),
        }
        for name in found
    }


def sampled(
    expected: list[Floats], target: list[Tensor], drafts: list[Tensor], scheme: Scheme, seed: int
) -> dict[str, float]:
    """How many draws agree, against what is expected; z is standard normal if all is right."""
    chance = np.concatenate(expected)
    pairs = zip(draws(target, scheme, seed), draws(drafts, scheme, seed), strict=True)
    equal = sum(int((a == b).sum()) for a, b in pairs)
    spread = math.sqrt(float((chance * (1 - chance)).sum()))
    return {
        "draws": len(chance),
        "agree": equal,
        "expected": round(float(chance.sum()), 1),
        "z": round((equal - float(chance.sum())) / max(spread, TINY), 2),
    }


def measure(args: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> None:
    """Every drafter; what is found is saved one by one."""
    texts: list[Text] = write(args.model, args.prompts, args.count, args.tokens)
    own = logits_of(load(args.model), texts)
    made_on = {
        "environment": environment(),
        "command": (
            f"python benchmarks/noise.py --model {Path(args.model).name} "
            f"--prompts {args.prompts.name} --count {args.count} --tokens {args.tokens}"
        ),
        "model": Path(args.model).name,
        "prompts_file": args.prompts.name,
        "prompts_sha256": hashlib.sha256(args.prompts.read_bytes()).hexdigest(),
        "texts": len(texts),
        "positions": sum(text.written for text in texts),
        "vocabulary": own[0].shape[1],
    }
    for name in args.drafters:
        drafter = DRAFTERS[name]
        theirs = [rows / drafter.temperature for rows in own]
        if drafter.change is not None:
            model = load(args.model)
            drafter.change(model)
            theirs = logits_of(model, texts)
            del model
        row: dict[str, Any] = {"says": drafter.says}
        for temperature in TEMPERATURES:
            found = compare(own, theirs, temperature)
            row[f"T={temperature}"] = summary(found)
            if temperature == 1.0:
                seed = list(DRAFTERS).index(name)  # of their own: the checks are independent
                row["sampled"] = {
                    scheme.name: sampled(found[scheme.name], own, theirs, scheme, seed)
                    for scheme in SAMPLED
                }
            shown = ("maximal", "flat", SAMPLED[1].name, "32 by 128", "independent")
            agreement = (f"{n} {mean(found[n])['mean']:.4f}" for n in shown)
            print(f"{name:14} T={temperature}  " + "  ".join(agreement), flush=True)
        print(" " * 14, row["sampled"], flush=True)
        save({**made_on, "drafters": {name: row}})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--count", type=int, default=48, help="prompts")
    parser.add_argument("--tokens", type=int, default=48, help="of every answer, at most")
    parser.add_argument("--drafters", nargs="+", choices=list(DRAFTERS), default=list(DRAFTERS))
    parser.add_argument("--words", action="store_true", help="check the words of the noise")
    parser.add_argument("--time", action="store_true", help="time every scheme on a GPU")
    parser.add_argument(
        "--json", type=Path, default=Path(__file__).resolve().parent / "results" / "noise.json"
    )
    args = parser.parse_args()
    if bool(args.model) != bool(args.prompts):
        parser.error("--model and --prompts go together")
    if not (args.model or args.words or args.time):
        parser.error("nothing to do: give --model and --prompts, --words or --time")

    def save(part: dict[str, Any], name: str = "acceptance") -> None:
        report = json.loads(args.json.read_text(encoding="utf-8")) if args.json.exists() else {}
        old = report.get(name, {})
        if "drafters" in part and old.get("command") == part["command"]:
            part = {**part, "drafters": {**old["drafters"], **part["drafters"]}}
        report[name] = part
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        args.json.with_suffix(".md").write_text(noise_table.table(report), encoding="utf-8")

    if args.words:
        found = noise_words.report()
        print(json.dumps(found, indent=1))
        save(
            {
                "environment": environment(),
                "command": "python benchmarks/noise.py --words",
                **found,
            },
            "words",
        )
    if args.model:
        measure(args, save)
    if args.time:
        import noise_time  # needs triton

        save(noise_time.measure(), "time")


if __name__ == "__main__":
    main()
