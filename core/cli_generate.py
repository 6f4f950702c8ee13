"""Generate for one or more prompts, streaming; optionally prove equality with plain decoding."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec import cli_options, cli_report
from specdec.comparison import Comparison, tokens_of
from specdec.config import SpeculativeConfig
from specdec.errors import ConfigError, PromptError
from specdec.metrics import SpeculationMetrics

if TYPE_CHECKING:
    from specdec.llm import LLM
    from specdec.outputs import RequestOutput
    from specdec.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `specdec generate`."""
    model = cli_options.add_model(parser, slots=True)
    model.add_argument(
        "--speculative-config", "-sc", metavar="CONFIG", help=cli_options.CONFIG_HELP
    )
    prompt = parser.add_argument_group("prompts")
    prompt.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated")
    prompt.add_argument(
        "--prompts-file", type=Path, metavar="FILE", help="one prompt a line; - is stdin"
    )
    prompt.add_argument(
        "--raw", action="store_true", help="do not wrap prompts in the model's chat template"
    )
    sampling = cli_options.add_sampling(parser, max_tokens=128)
    sampling.add_argument(
        "--n", type=int, default=1, metavar="N", help="completions per prompt (default: 1)"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--compare",
        action="store_true",
        help="also decode plainly: show the gain and whether the tokens are equal; "
        "exit status 1 if they should be and are not",
    )
    output.add_argument(
        "--json",
        action="store_true",
        help="one JSON object a prompt, no stream; with --compare, one more at the end",
    )


def run(args: argparse.Namespace) -> int:
    """Generate; returns 1 if a request failed or a comparison did."""
    config = SpeculativeConfig.parse(args.speculative_config)
    if args.compare and config is None:
        raise ConfigError("--compare needs --speculative-config: there is nothing to compare with")
    texts = _texts(args)
    params = cli_options.sampling(args, n=args.n)

    from specdec.llm import LLM

    cli_options.quiet()
    engine = cli_options.engine(args)
    with LLM(args.model, speculative_config=config, **engine) as llm:
        prompts = _prompts(llm, texts, raw=args.raw)
        if args.compare:
            _warm(llm, prompts)
        outputs, seconds = _timed(lambda: _generate(llm, texts, prompts, params, as_json=args.json))
        lossless, method = llm.lossless, llm.rejection_sample_method
    if not args.json:
        metrics = SpeculationMetrics()
        for output in outputs:
            metrics.add(output.metrics.speculative_decoding)
        print(cli_report.summary(tokens_of(outputs), seconds, metrics), file=sys.stderr)
        if cut := _cut_off(outputs, args.max_tokens):
            print(cut, file=sys.stderr)
    failed = [o for o in outputs if o.error]
    for output in failed:
        print(f"specdec: request {output.request_id} failed: {output.error}", file=sys.stderr)
    if not args.compare:
        return 1 if failed else 0

    with LLM(args.model, **engine) as plain:
        prompts = _prompts(plain, texts, raw=args.raw)
        _warm(plain, prompts)
        reference, plain_seconds = _timed(lambda: plain.generate(prompts, params, use_tqdm=False))
    comparison = Comparison.of(
        outputs, reference, seconds, plain_seconds, lossless=lossless,
        # sampled tokens repeat under every draft only if the rule says so
        repeats=lossless and (params.greedy or method in (None, "coupled")),
    )  # fmt: skip
    # the answers own stdout if a program reads them
    print(*comparison.lines(), sep="\n", file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps({"comparison": comparison.as_dict()}))
    return 1 if failed or comparison.broken else 0


def _warm(llm: LLM, prompts: list[Any]) -> None:
    """Pay for what the first call sets up once, so that it is in neither of the times."""
    from specdec.sampling_params import SamplingParams

    llm.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)


def _texts(args: argparse.Namespace) -> list[str]:
    texts = list(args.prompt or ())
    if args.prompts_file is not None:
        if str(args.prompts_file) == "-":
            try:
                text = sys.stdin.read()
            except (OSError, UnicodeDecodeError) as error:
                raise PromptError(f"stdin cannot be read as text: {error}") from error
        else:
            try:
                text = args.prompts_file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                why = cli_options.why(error)
                raise PromptError(f"{args.prompts_file} cannot be read: {why}") from error
        # not `splitlines`, which also splits at separators that a prompt may hold
        lines = text.removeprefix("\ufeff").split("\n")
        texts += [line for line in lines if line.strip()]
    if not texts:
        raise PromptError("there is no prompt; give --prompt TEXT or --prompts-file FILE")
    return [cli_options.check_text(text, "the prompt") for text in texts]


def _prompts(llm: LLM, texts: list[str], *, raw: bool) -> list[Any]:
    if raw or not getattr(llm.tokenizer, "chat_template", None):
        return list(texts)
    return [[{"role": "user", "content": text}] for text in texts]


def _generate(
    llm: LLM, texts: list[str], prompts: list[Any], params: SamplingParams, *, as_json: bool
) -> list[RequestOutput]:
    """Generate all prompts; a single completion is printed as it grows."""
    if as_json or len(prompts) > 1 or params.n > 1:
        outputs = llm.generate(prompts, params, use_tqdm=not as_json)
        for text, output in zip(texts, outputs, strict=True):
            if as_json:
                print(json.dumps(_as_json(output), ensure_ascii=False))
                continue
            print(f"=== {text}")
            for completion in output.outputs:
                print(completion.text)
        return outputs
    printed = 0
    last: RequestOutput | None = None
    for last in llm.stream(prompts, params):
        text = last.outputs[0].text
        print(text[printed:], end="", flush=True)
        printed = len(text)
    print()
    assert last is not None  # a request ends, whatever happens to it
    return [last]


def _cut_off(outputs: list[RequestOutput], most: int) -> str | None:
    """Say which limit ended answers before the model did, and how many; None if none was."""
    found = [c for o in outputs for c in o.outputs if c.finish_reason == "length"]
    if not found:
        return None
    option, context = "--max-tokens allows no more", "the context is full"
    whys = sorted({option if len(c.token_ids) >= most else context for c in found})
    total = sum(len(o.outputs) for o in outputs)
    many = "" if total == 1 else f", {len(found)} of {total} answers"
    return f"(cut off{many}: {'; '.join(whys)})"


def _as_json(output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": output.prompt,
        "outputs": [
            {"text": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason}
            for c in output.outputs
        ],
        "error": output.error,
        "speculative_decoding": output.metrics.speculative_decoding.as_dict(),
    }


def _timed(call: Callable[[], list[RequestOutput]]) -> tuple[list[RequestOutput], float]:
    start = time.perf_counter()
    return call(), time.perf_counter() - start
