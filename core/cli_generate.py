"""Generate for one or more prompts, streaming; optionally prove equality with plain decoding."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec._structure import shown
from specdec.config import SpeculativeConfig
from specdec.errors import ConfigError, PromptError
from specdec.outputs import SpeculationMetrics

if TYPE_CHECKING:
    from specdec.llm import LLM
    from specdec.outputs import RequestOutput
    from specdec.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `specdec generate`."""
    model = parser.add_argument_group("model")
    model.add_argument("--model", required=True, help="folder or Hub id of the target")
    model.add_argument(
        "--speculative-config",
        "-sc",
        metavar="CONFIG",
        help="METHOD, METHOD:key=value,... or JSON; without it, plain decoding",
    )
    model.add_argument("--tokenizer", help="folder or Hub id, if not the model's own")
    model.add_argument("--revision", help="of the model on the Hub")
    model.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, ...")
    model.add_argument("--device", help="cpu, cuda, ...; by default CUDA if there is any")
    model.add_argument("--max-model-len", type=int, metavar="N")
    model.add_argument("--max-num-seqs", type=int, default=64, metavar="N")
    model.add_argument("--trust-remote-code", action="store_true")
    model.add_argument(
        "--deterministic",
        action="store_true",
        help="float32 on a CPU: logits do not depend on what is computed together",
    )
    prompt = parser.add_argument_group("prompts")
    prompt.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated")
    prompt.add_argument(
        "--prompts-file", type=Path, metavar="FILE", help="one prompt a line; - is stdin"
    )
    prompt.add_argument(
        "--raw", action="store_true", help="do not wrap prompts in the model's chat template"
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=128, metavar="N")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy")
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--top-k", type=int, default=0)
    sampling.add_argument("--min-p", type=float, default=0.0)
    sampling.add_argument("--seed", type=int)
    sampling.add_argument("--n", type=int, default=1, help="completions per prompt")
    sampling.add_argument("--ignore-eos", action="store_true")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--compare",
        action="store_true",
        help="also decode plainly: show the gain and whether the tokens are equal; "
        "exit status 1 if they should be and are not",
    )
    output.add_argument("--json", action="store_true", help="one JSON object a prompt, no stream")


def run(args: argparse.Namespace) -> int:
    """Generate; returns 1 if a request failed or a comparison did."""
    config = SpeculativeConfig.parse(args.speculative_config)
    if args.compare and config is None:
        raise ConfigError("--compare needs --speculative-config: there is nothing to compare with")
    texts = _texts(args)

    from transformers.utils.logging import disable_progress_bar

    from specdec.llm import LLM
    from specdec.sampling_params import SamplingParams

    if not sys.stderr.isatty():
        # that of reading weights draws wherever stderr goes
        disable_progress_bar()  # type: ignore[no-untyped-call]
    params = SamplingParams(
        n=args.n,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
    )
    with LLM(args.model, speculative_config=config, **_engine(args)) as llm:
        prompts = _prompts(llm, texts, raw=args.raw)
        if args.compare:
            _warm(llm, prompts)
        outputs, seconds = _timed(lambda: _generate(llm, texts, prompts, params, as_json=args.json))
        lossless = llm.lossless
        # sampled tokens repeat under every draft only if the rule says so
        repeats = lossless and (params.greedy or llm.rejection_sample_method in (None, "coupled"))
    if not args.json:
        print(_summary(outputs, seconds), file=sys.stderr)
    failed = [o for o in outputs if o.error]
    for output in failed:
        print(f"specdec: request {output.request_id} failed: {output.error}", file=sys.stderr)
    if not args.compare:
        return 1 if failed else 0

    with LLM(args.model, **_engine(args)) as plain:
        prompts = _prompts(plain, texts, raw=args.raw)
        _warm(plain, prompts)
        reference, plain_seconds = _timed(lambda: plain.generate(prompts, params, use_tqdm=False))
    lines, equal = _compared(outputs, reference, seconds, plain_seconds, repeats, lossless)
    # the answers own stdout if a program reads them
    print(*lines, sep="\n", file=sys.stderr if args.json else sys.stdout)
    return 1 if failed or not (equal or not repeats) else 0


def _warm(llm: LLM, prompts: list[Any]) -> None:
    """Pay for what the first call sets up once, so that it is in neither of the times."""
    from specdec.sampling_params import SamplingParams

    llm.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)


def _engine(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "tokenizer": args.tokenizer,
        "revision": args.revision,
        "dtype": args.dtype,
        "device": args.device,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "trust_remote_code": args.trust_remote_code,
        "deterministic": args.deterministic,
    }


def _texts(args: argparse.Namespace) -> list[str]:
    texts = list(args.prompt or ())
    if args.prompts_file is not None:
        if str(args.prompts_file) == "-":
            try:
                lines = sys.stdin.read().splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise PromptError(f"stdin cannot be read as text: {error}") from error
        else:
            try:
                lines = args.prompts_file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise PromptError(f"{args.prompts_file} cannot be read: {error}") from error
        texts += [line for line in lines if line.strip()]
    if not texts:
        raise PromptError("there is no prompt; give --prompt TEXT or --prompts-file FILE")
    for text in texts:
        # Python decodes bytes that are no UTF-8, of arguments and perhaps stdin, to surrogates
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise PromptError(f"the prompt {shown(text)} is not valid UTF-8; give it as UTF-8 text")
    return texts


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


def _tokens(outputs: list[RequestOutput]) -> int:
    return sum(len(c.token_ids) for o in outputs for c in o.outputs)


def _summary(outputs: list[RequestOutput], seconds: float) -> str:
    metrics = SpeculationMetrics()
    for output in outputs:
        metrics.add(output.metrics.speculative_decoding)
    tokens = _tokens(outputs)
    line = f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds:.1f} tokens/s)"
    if not metrics.num_drafts and metrics.skipped:
        line += "; 1.00 tokens/step: nothing was drafted (" + ", ".join(
            f"{reason.replace('_', ' ')}: {count} steps"
            for reason, count in metrics.skipped.items()
        )
        line += ")"
    if metrics.num_drafts:
        rates = ", ".join(f"{n / metrics.num_drafts:.2f}" for n in metrics.accepted_per_pos)
        line += (
            f"; {metrics.tokens_per_step:.2f} tokens/step, "
            f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens} drafts accepted; "
            f"acceptance by position: {rates}"
        )
    return line


def _compared(
    outputs: list[RequestOutput],
    reference: list[RequestOutput],
    seconds: float,
    plain_seconds: float,
    repeats: bool,
    lossless: bool,
) -> tuple[list[str], bool]:
    """Lines of a comparison, and whether all tokens are equal."""
    pairs = [
        (f"{number}/{c.index}", c.token_ids, d.token_ids)
        for number, (a, b) in enumerate(zip(outputs, reference, strict=True))
        for c, d in zip(a.outputs, b.outputs, strict=True)
    ]
    different = [(name, a, b) for name, a, b in pairs if a != b]
    rate = _tokens(outputs) / seconds
    plain_rate = _tokens(reference) / plain_seconds
    lines = [
        f"plain decoding: {plain_rate:.1f} tokens/s; gain: {rate / plain_rate:.2f}x (each ran once)"
    ]
    if repeats:
        verdict = "equal" if not different else f"{len(different)} of {len(pairs)} differ"
        lines.append(f"tokens with and without speculation: {verdict}")
        for name, ours, plain in different[:5]:
            at = next(
                (i for i, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b),
                min(len(ours), len(plain)),
            )
            lines.append(f"  completion {name} differs from token {at} on")
        if different:
            lines.append("  near-ties can round differently in one-row and several-row products;")
            lines.append("  --deterministic removes that on a CPU in float32")
    elif lossless:
        lines.append(
            "sampled tokens depend on the drafts under this rule; their law is the target's "
            f"({len(pairs) - len(different)} of {len(pairs)} completions happen to be equal)"
        )
    else:
        lines.append("this rule is not lossless: the law of the tokens is not the target's")
    return lines, not different
