"""Which rule should `ngram` draft by? Record what a model writes, then replay rules over it.

Speculation is lossless, so what a model writes does not depend on the drafts: one recording
serves every rule. `compare` jumps along each recorded text as a runner would, and counts steps,
drafts and tokens. `time` measures the plugin itself.

    python benchmarks/ngram_rules.py record --prompts spec_bench.jsonl --out greedy.json
    python benchmarks/ngram_rules.py record --prompts spec_bench.jsonl --out sampled.json \
        --each 8 --temperature 0.8
    python benchmarks/ngram_rules.py record --repetitive --out repetitive.json
    python benchmarks/ngram_rules.py compare greedy.json sampled.json repetitive.json
    python benchmarks/ngram_rules.py time

`compare` and `time` write their part of results/ngram_rules.json, and results/ngram_rules.md
anew.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int64]
RESULTS = Path(__file__).parent / "results"
MODEL = Path("~/.cache/specdec/SmolLM2-135M-Instruct").expanduser()
NEW_TOKENS = 128
DRAFTS = (3, 5, 8)
SETS = ("translation", "summarization", "qa", "math_reasoning", "rag")  # the rest is MT-bench
REPETITIVE = (  # where short periods are to be expected: what Spec-Bench lacks
    "Draw a horizontal line of 80 dashes.",
    "Write the word 'ha' one hundred times.",
    "Write an 8x8 matrix of zeros as a Python list of lists.",
    "Write a Markdown table with 5 columns and 10 empty rows.",
    "Print a chess board as text, with a dot for every empty field.",
    "Write the binary number that consists of 64 ones.",
    "Write a CSV file with 12 rows and 6 columns where every value is 0.0.",
    'Write a JSON list of 20 objects {"id": 0, "name": "", "value": null}.',
    "Write the HTML of an empty table with 6 rows and 4 columns.",
    "Draw a rectangle of asterisks, 20 wide and 6 high.",
    "Write 'la la la' as the text of a song, three verses.",
    "Fill a Python dictionary: the letters a to z, every value None.",
    "Write the decimal expansion of 1/3 with 60 digits.",
    "Write the decimal expansion of 1/7 with 60 digits.",
    "Write a SQL statement that inserts 15 rows of zeros into the table t(a, b, c).",
    "Write a C array of 64 bytes, all 0x00.",
)


class Rule(NamedTuple):
    """How a source is chosen. `overlap`: at the end of the text, go on with the drafts."""

    tie: str  # recent, earliest, context (longest match of any length), majority, vote
    overlap: bool
    shortest: int
    longest: int


class Count(NamedTuple):
    """Decode steps of a replay, and what they emitted and drafted."""

    steps: int = 0
    emitted: int = 0
    drafted: int = 0
    covered: int = 0  # steps with a draft

    def __add__(self, other: object) -> Count:
        assert isinstance(other, Count)
        return Count(*(a + b for a, b in zip(self, other, strict=True)))


SIZES = ((1, 2), (1, 3), (1, 5), (2, 3), (2, 4), (2, 5), (2, 8), (3, 3), (3, 5), (5, 5))
OTHERS = (("recent", False), *((tie, o) for tie in ("earliest", "majority") for o in (True, False)))
CHOSEN = Rule("recent", True, 2, 3)
RULES = [
    *(CHOSEN._replace(shortest=low, longest=high) for low, high in SIZES),
    *(Rule(*other, low, high) for low, high in ((1, 3), (2, 3), (5, 5)) for other in OTHERS),
    *(Rule("vote", False, low, high) for low, high in ((1, 3), (2, 3), (5, 5))),
    *(Rule("context", True, n, n) for n in (1, 2, 3)),
]


# --- record ---------------------------------------------------------------------------------


def questions(path: Path, each: int) -> Iterator[tuple[str, str]]:
    """Yield (category, first turn), `each` per category and spread over it."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        category = row["category"] if row["category"] in SETS else "mt_bench"
        found.setdefault(category, []).append(row["turns"][0])
    for category, texts in sorted(found.items()):
        for text in texts[:: len(texts) // each][:each]:
            yield category, text


def record(args: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    stop = tokenizer.eos_token_id
    chosen = (
        [("repetitive", text) for text in REPETITIVE]
        if args.repetitive
        else list(questions(args.prompts, args.each))
    )
    prompts = []
    for category, text in chosen:
        chat = [{"role": "user", "content": text}]
        encoded: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        prompts.append((category, list(encoded["input_ids"])))
    prompts.sort(key=lambda prompt: len(prompt[1]))
    sampling: dict[str, Any] = {"do_sample": False}
    if args.temperature:
        sampling = {"do_sample": True, "temperature": args.temperature, "top_k": 0, "top_p": 1.0}
    streams = []
    for at in range(0, len(prompts), 8):
        batch = prompts[at : at + 8]
        width = max(len(ids) for _, ids in batch)
        output = model.generate(
            torch.tensor([[stop] * (width - len(ids)) + ids for _, ids in batch]),
            attention_mask=torch.tensor(
                [[0] * (width - len(ids)) + [1] * len(ids) for _, ids in batch]
            ),
            max_new_tokens=NEW_TOKENS,
            pad_token_id=stop,
            **sampling,
        )[:, width:].tolist()
        for (category, ids), written in zip(batch, output, strict=True):
            end = written.index(stop) + 1 if stop in written else len(written)
            streams.append({"category": category, "prompt": ids, "output": written[:end]})
        print(f"{at + len(batch)} of {len(prompts)} prompts", flush=True)
    args.out.write_text(json.dumps(streams))


# --- compare --------------------------------------------------------------------------------


def favourite(tokens: Ints) -> np.int64:
    """Return the most frequent token, the latest of several."""
    _, inverse, count = np.unique(tokens, return_inverse=True, return_counts=True)
    often = count[inverse]
    return np.int64(tokens[np.flatnonzero(often == often.max())[-1]])


def draft(tokens: Ints, match: Ints, rule: Rule) -> Ints:
    """Draft for `tokens`; match[e]: how many tokens before e equal those at the end."""
    length, most = len(tokens), int(match.max())
    n = min(most, rule.longest)
    if n < rule.shortest:
        return tokens[:0]
    ends = np.flatnonzero(match >= n)
    if rule.tie == "vote":
        drafts: list[np.int64] = []
        for _ in range(max(DRAFTS)):
            ends = ends[ends < length]
            if not len(ends):
                break
            drafts.append(favourite(tokens[ends]))
            ends = ends[tokens[ends] == drafts[-1]] + 1
        return np.array(drafts, np.int64)
    if rule.tie == "recent":
        source = ends[-1]
    elif rule.tie == "earliest":
        source = ends[0]
    elif rule.tie == "context":
        source = np.flatnonzero(match == most)[-1]
    else:
        source = ends[tokens[ends] == favourite(tokens[ends])][-1]
    column = np.arange(max(DRAFTS))
    wanted = source + (column % (length - source) if rule.overlap else column)
    drafted: Ints = tokens[wanted[wanted < length]]
    return drafted


def replay(stream: dict[str, Any], rules: list[Rule]) -> dict[tuple[Rule, int], Count]:
    """Decode the recorded text with every rule and number of drafts."""
    tokens = np.array(stream["prompt"] + stream["output"])
    first, total = len(stream["prompt"]) + 1, len(tokens)  # prefill gives the first token
    drafted = {rule: np.zeros(total, np.int64) for rule in rules}
    right = {rule: np.zeros(total, np.int64) for rule in rules}
    match = np.zeros(total + 1, np.int64)
    for length in range(1, total):
        same = tokens[: length - 1] == tokens[length - 1]
        match[1:length] = np.where(same, match[: length - 1] + 1, 0)
        if length < first:
            continue
        for rule in rules:
            guess = draft(tokens[:length], match[:length], rule)
            follows = tokens[length : length + len(guess)]
            drafted[rule][length] = len(guess)
            right[rule][length] = (guess[: len(follows)] == follows).cumprod().sum()
    counts = {}
    for rule in rules:
        for k in DRAFTS:
            count, at = Count(), first
            while at < total:
                drafts = min(int(drafted[rule][at]), k, total - at - 1)
                emitted = min(int(right[rule][at]), drafts) + 1
                count += Count(1, emitted, drafts, int(drafts > 0))
                at += emitted
            counts[rule, k] = count
    return counts


def compare(args: argparse.Namespace) -> None:
    rows = []
    for path in args.recordings:
        streams = json.loads(path.read_text())
        sums: dict[tuple[Rule, int, str], Count] = {}
        for stream in streams:
            for (rule, k), count in replay(stream, RULES).items():
                for category in {stream["category"], "all"}:
                    key = (rule, k, category)
                    sums[key] = sums.get(key, Count()) + count
        rows += [
            {
                "recording": path.stem,
                **rule._asdict(),
                "k": k,
                "category": category,
                "tokens_per_step": round(count.emitted / count.steps, 4),
                "drafts_per_step": round(count.drafted / count.steps, 4),
                "coverage": round(count.covered / count.steps, 4),
                "steps": count.steps,
            }
            for (rule, k, category), count in sums.items()
            if category == "all" or rule == CHOSEN  # the rest would be half a megabyte
        ]
        print(f"{path.stem}: {len(streams)} texts, {sum(len(s['output']) for s in streams)} tokens")
    write("compare", rows)


# --- time -----------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> None:
    """Time a proposal after two new tokens per request, and the first step with its prompt."""
    from specdec import HostStep
    from specdec_plugin_ngram import NgramOptions, NgramSpeculator

    class Facts:
        """The fields of a step that ngram reads."""

        def __init__(self, host: HostStep) -> None:
            self.host, self.slots = host, torch.from_numpy(host.slots)
            self.batch = len(host.slots)

    random = np.random.default_rng(0)
    rows = []
    for batch in (1, 8, 64):
        for context in (256, 4096, 32768):
            history = random.integers(0, 2000, (batch, context + 2 * args.steps + 2))
            history[:, context // 2 :] = history[:, : history.shape[1] - context // 2]
            speculator = NgramSpeculator(batch, NgramOptions())
            length = np.full(batch, context)
            spent = []
            for _ in range(args.steps + 1):
                host = HostStep(np.arange(batch), np.full(batch, 5), history, length)
                step: Any = Facts(host)
                start = time.perf_counter()
                speculator.propose(step, 5)
                spent.append(1e6 * (time.perf_counter() - start))
                length = length + 2
            low, middle, high = statistics.quantiles(spent[1:], n=4)
            rows.append(
                {
                    "batch": batch,
                    "context": context,
                    "propose_us": round(middle),
                    "quartiles_us": [round(low), round(high)],
                    "prompt_us_per_token": round(spent[0] / (batch * context), 3),
                    "table_mib": round(speculator.index.table.nbytes / 2**20, 2),
                }
            )
            print(rows[-1])
    write("time", rows)


# --- results --------------------------------------------------------------------------------


def write(part: str, rows: list[dict[str, Any]]) -> None:
    """Put the rows into the JSON file, and write the Markdown file from all of it."""
    path = RESULTS / "ngram_rules.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    results["device"] = f"{cpu()}, {torch.get_num_threads()} thread(s)"
    results["versions"] = {
        "python": platform.python_version(),
        **{name: version(name) for name in ("numpy", "torch", "transformers")},
    }
    results[part] = rows
    # one row per line: small enough to read, and to compare from commit to commit
    text = ",\n".join(
        f'"{name}": ' + ("[\n" + ",\n".join(map(json.dumps, value)) + "\n]")
        if isinstance(value, list)
        else f'"{name}": {json.dumps(value)}'
        for name, value in results.items()
    )
    path.write_text("{\n" + text + "\n}\n")
    (RESULTS / "ngram_rules.md").write_text(report(results))


def cpu() -> str:
    """The name of the processor, where the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({platform.machine()})" if names else platform.machine()


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def report(results: dict[str, Any]) -> str:
    """Say in a page what the rows say."""
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = ["# Rules for n-gram drafts", "", f"{results['device']}; {versions}.", ""]
    if "compare" in results:
        lines += compared(results["compare"])
    if "time" in results:
        lines += [
            f"## Time of a proposal, sizes {CHOSEN.shortest} to {CHOSEN.longest}",
            "",
            "Median and quartiles in µs for 5 drafts after 2 new tokens per request; the prompt is",
            "taken in once, in µs per token.",
            "",
            *table(
                ["batch", "context", "propose", "quartiles", "prompt", "table MiB"],
                [
                    [
                        str(row["batch"]),
                        str(row["context"]),
                        str(row["propose_us"]),
                        "-".join(map(str, row["quartiles_us"])),
                        f"{row['prompt_us_per_token']:.2f}",
                        f"{row['table_mib']:.1f}",
                    ]
                    for row in results["time"]
                ],
            ),
        ]
    return "\n".join(lines)


def compared(rows: list[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(row["recording"] for row in rows))
    found = {
        (row["recording"], Rule(*(row[f] for f in Rule._fields)), row["k"], row["category"]): row
        for row in rows
    }

    def cells(rule: Rule) -> list[str]:
        picked = [found[name, rule, 5, "all"] for name in names]
        return [f"{row['tokens_per_step']:.3f} ({row['drafts_per_step']:.2f})" for row in picked]

    def profit(rule: Rule, name: str) -> str:
        row = found[name, rule, 5, "all"]
        return f"{(row['tokens_per_step'] - 1) / row['drafts_per_step']:.2f}"

    small = [rule for rule in RULES if (rule.shortest, rule.longest) in ((2, 3), (1, 3))]
    own = [rule for rule in RULES if rule[:2] == CHOSEN[:2]]
    first = names[0]
    categories = sorted({row["category"] for row in rows if row["recording"] == first} - {"all"})
    by_category = [
        [
            category,
            *(f"{found[first, CHOSEN, k, category]['tokens_per_step']:.2f}" for k in DRAFTS),
            f"{100 * found[first, CHOSEN, 5, category]['coverage']:.0f} %",
        ]
        for category in [*categories, "all"]
    ]
    return [
        "Tokens emitted per decode step, and in brackets drafts per step, with 5 drafts. A step",
        "without drafts emits 1. Recordings: what the model wrote, see the script.",
        "",
        "## Which of several occurrences, and what at the end of the text",
        "",
        *table(
            ["occurrence", "at the end", "sizes", *names],
            [
                [
                    rule.tie,
                    "go on with the drafts" if rule.overlap else "stop",
                    f"{rule.shortest}-{rule.longest}",
                    *cells(rule),
                ]
                for rule in sorted(small, key=lambda r: r.shortest, reverse=True)
            ],
        ),
        "## Which sizes",
        "",
        "The last columns say what a draft may cost, as a share of a step without drafts, before",
        "drafting is slower than plain decoding.",
        "",
        *table(
            ["sizes", *names, *(f"may cost, {name}" for name in names)],
            [
                [
                    f"{rule.shortest}-{rule.longest}",
                    *cells(rule),
                    *(profit(rule, name) for name in names),
                ]
                for rule in own
            ],
        ),
        f"## The rule chosen, by category of {first}",
        "",
        *table(
            ["category", *(f"{k} drafts" for k in DRAFTS), "steps with a draft (5)"], by_category
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("record", help="let the model write")
    command.add_argument("--prompts", type=Path, help="Spec-Bench's question.jsonl")
    command.add_argument("--repetitive", action="store_true", help="own prompts instead")
    command.add_argument("--model", type=Path, default=MODEL)
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--each", type=int, default=16, help="prompts per category")
    command.add_argument("--temperature", type=float, default=0.0)
    command.set_defaults(run=record)
    command = commands.add_parser("compare", help="replay rules over recordings")
    command.add_argument("recordings", type=Path, nargs="+")
    command.set_defaults(run=compare)
    command = commands.add_parser("time", help="time the plugin")
    command.add_argument("--steps", type=int, default=300)
    command.set_defaults(run=measure)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
