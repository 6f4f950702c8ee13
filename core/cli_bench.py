"""Measure configurations on a file of prompts: speed, acceptance, latency, equal tokens."""

from __future__ import annotations

import argparse
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec import cli_options
from specdec._structure import printable
from specdec.errors import ConfigError

if TYPE_CHECKING:
    from specdec.bench.measurement import Measurement, Run
    from specdec.bench.report import Report
    from specdec.bench.workload import Task
    from specdec.llm import LLM
    from specdec.sampling_params import SamplingParams

FAILED, INTERRUPTED = 1, 130
_WARM_TOKENS = 16
_REASONS = 3  # of failures that are shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `specdec bench`."""
    model = cli_options.add_model(parser, slots=False)
    model.add_argument(
        "--speculative-config",
        "-sc",
        action="append",
        default=[],
        metavar="CONFIG",
        help="METHOD, METHOD:key=value,... or JSON; once for every configuration; plain decoding "
        "is measured beside them",
    )
    model.add_argument("--no-baseline", action="store_true", help="do not measure plain decoding")
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON lines with turns, prompt or messages, such as those of Spec-Bench",
    )
    prompts.add_argument(
        "--per-category", type=cli_options.count, metavar="N", help="the first N of every category"
    )
    prompts.add_argument(
        "--limit", type=cli_options.count, metavar="N", help="N of them, evenly spread"
    )
    prompts.add_argument(
        "--turns",
        choices=("first", "all"),
        default="first",
        help="answer the first turn (default), or all, each after the model's own answers",
    )
    prompts.add_argument(
        "--raw", action="store_true", help="do not wrap prompts in the model's chat template"
    )
    sampling = cli_options.add_sampling(parser, max_tokens=128, temperature=False)
    sampling.add_argument(
        "--temperature",
        type=cli_options.numbers,
        default=[0.0],
        metavar="T,...",
        help="each is measured; 0 (default) is greedy",
    )
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument(
        "--concurrency",
        type=cli_options.counts,
        default=[1],
        metavar="N,...",
        help="requests in flight, each number is measured (default: 1)",
    )
    measuring.add_argument(
        "--repeat",
        type=cli_options.count,
        default=3,
        metavar="N",
        help="runs of everything (default: 3)",
    )
    measuring.add_argument(
        "--warmup",
        type=cli_options.count_or_none,
        default=1,
        metavar="N",
        help="prompts that are answered in every setting before (default: 1)",
    )
    measuring.add_argument(
        "--threads", type=cli_options.count, metavar="N", help="of torch, on a CPU"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="everything, after every run")
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="needs matplotlib")


def run(args: argparse.Namespace) -> int:
    """Measure; returns 1 if an answer failed, 130 if it was interrupted after it had begun."""
    from specdec.bench import workload
    from specdec.bench.configurations import BASELINE, check_methods, configurations

    compared = configurations(args.speculative_config, baseline=not args.no_baseline)
    check_methods(compared)
    tasks = workload.choose(
        workload.read(args.prompts), limit=args.limit, per_category=args.per_category
    )
    _check(args, tasks)

    import torch

    from specdec.bench.environment import environment
    from specdec.bench.measurement import Measurement, Setting
    from specdec.bench.prompts import first_prompts
    from specdec.bench.report import Report
    from specdec.llm import LLM

    if args.threads:
        torch.set_num_threads(args.threads)
    cli_options.quiet()
    engine = {**cli_options.engine(args), "max_num_seqs": max(args.concurrency)}
    with ExitStack() as stack:
        llms: dict[str, LLM] = {}
        for one in compared:
            print(f"loading {printable(one.name)}", file=sys.stderr, flush=True)
            llm = LLM(args.model, speculative_config=one.config, **engine)
            llms[one.name] = stack.enter_context(llm)
        llm = llms[compared[0].name]
        raw = args.raw or not getattr(llm.tokenizer, "chat_template", None)
        measurement = Measurement(
            llms,
            tasks,
            temperatures=args.temperature,
            concurrencies=args.concurrency,
            repeat=args.repeat,
            params=lambda task, temperature: _params(args, temperature, task.line),
            first=first_prompts(llm, tasks, args.prompts, raw=raw),
            every_turn=args.turns == "all",
            raw=raw,
        )
        report = Report(
            head={
                **_head(args, llm, tasks, raw=raw),
                "baseline": None if args.no_baseline else BASELINE,
                "configurations": [one.as_dict(llms[one.name]) for one in compared],
                "environment": environment(llm.device),
            },
            baseline=None if args.no_baseline else BASELINE,
            repeats={
                Setting(one.name, temperature, concurrency): one.promises_equal(
                    llms[one.name], greedy=_params(args, temperature, 0).greedy
                )
                for one in compared
                for temperature in args.temperature
                for concurrency in args.concurrency
            },
        )
        return _measure(args, measurement, report)


def _check(args: argparse.Namespace, tasks: list[Task]) -> None:
    """Refuse now what would fail when everything is measured."""
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ConfigError(f"{option} {path}: it has to be a file in a folder that is there")
    if args.plot is not None:
        from specdec.bench import plot

        plot.check(args.plot)
    most = max(args.concurrency)
    if most > len(tasks):
        raise ConfigError(
            f"--concurrency {most} needs {most} prompts at least, better several times as many, "
            f"but there are {len(tasks)}"
        )
    for temperature in args.temperature:
        _params(args, temperature, tasks[-1].line)


def _params(args: argparse.Namespace, temperature: float, line: int) -> SamplingParams:
    """Of a task: its seed depends on its line alone, so that any choice of tasks repeats it."""
    return cli_options.sampling(
        args,
        temperature=temperature,
        seed=(args.seed or 0) + line,
        # text is made only where the engine has to look for something in it
        detokenize=bool(cli_options.further(args.sampling_params).get("stop")),
    )


def _head(args: argparse.Namespace, llm: LLM, tasks: list[Task], *, raw: bool) -> dict[str, Any]:
    """What was asked for, ready for JSON."""
    settings = (
        "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos",
        "sampling_params", "concurrency", "repeat", "warmup", "deterministic",
    )  # fmt: skip
    return {
        "command": shlex.join(["specdec", *sys.argv[1:]]),
        "model": args.model,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "max_model_len": llm.max_model_len,
        "prompts": {
            "file": str(args.prompts),
            "lines": [task.line for task in tasks],
            "turns": args.turns,
            "chat_template": not raw,
        },
        "settings": {name: getattr(args, name) for name in settings},
    }


def _measure(args: argparse.Namespace, measurement: Measurement, report: Report) -> int:
    from tqdm import tqdm

    from specdec.sampling_params import SamplingParams

    measurement.warm(
        args.warmup,
        lambda temperature: SamplingParams(
            temperature=temperature, top_p=args.top_p, top_k=args.top_k, min_p=args.min_p,
            seed=0, max_tokens=min(_WARM_TOKENS, args.max_tokens), detokenize=False,
        ),
    )  # fmt: skip
    bar = tqdm(total=measurement.total, unit="answer", disable=None)

    def after(run: Run) -> None:
        s = run.setting
        tqdm.write(
            f"{printable(s.configuration)}, T={s.temperature:g}, c={s.concurrency}, run "
            f"{run.repetition + 1} of {args.repeat}: {run.rate:.1f} tokens/s",
            file=sys.stderr,
        )
        if args.json is not None:
            report.write(args.json, measurement.runs, partial=True)

    partial = True
    try:
        with bar:
            measurement.run(lambda _: bar.update(), after)
        partial = False
    except KeyboardInterrupt:
        if not measurement.runs:
            raise
        print("specdec: interrupted; what follows is partial", file=sys.stderr)
        return INTERRUPTED
    finally:
        if measurement.runs:
            _tell(args, measurement.runs, report, partial=partial)
    return FAILED if _failures(measurement.runs) else 0


def _tell(args: argparse.Namespace, runs: list[Run], report: Report, *, partial: bool) -> None:
    from specdec.bench.report import lines

    if args.json is not None:
        report.write(args.json, runs, partial=partial)
    found = report.as_dict(runs, partial=partial)
    print(*lines(found), sep="\n", flush=True)
    if args.plot is not None:
        from specdec.bench import plot

        plot.draw(found, args.plot)
    failures = _failures(runs)
    for line in dict.fromkeys(failures[:_REASONS]):
        print(printable(f"specdec: {line}"), file=sys.stderr)
    if len(failures) > _REASONS:
        print(f"specdec: {len(failures)} answers failed; the JSON has all", file=sys.stderr)


def _failures(runs: list[Run]) -> list[str]:
    return [
        f"{run.setting.configuration}: line {answer.task.line}, turn {answer.turn} failed: "
        f"{answer.error}"
        for run in runs
        for answer in run.answers
        if answer.error is not None
    ]
