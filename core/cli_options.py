"""Options that several sub-commands share, and what becomes of them."""

from __future__ import annotations

import argparse
import json
import re
import sys
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import attrs

from specdec._structure import shown
from specdec.errors import ConfigError, PromptError, listed, nearest

if TYPE_CHECKING:
    from specdec.sampling_params import SamplingParams

CONFIG_HELP = "METHOD, METHOD:key=value,... or JSON; without it, plain decoding"
# fields of SamplingParams that have an option, and those that a command sets itself
_OPTIONS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos")
_TAKEN = ("n", "detokenize", "output_kind")
_FUNCTIONS = "logits_processors"
_DIGITS = 18  # of a number that is counted with
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?) *([a-z]*)", re.ASCII | re.IGNORECASE)
_UNITS = {"": 1, "b": 1} | {
    letter + rest: base**power
    for power, letter in enumerate("kmgt", start=1)
    for rest, base in (("", 1024), ("b", 1000), ("ib", 1024))
}


def add_model(parser: argparse.ArgumentParser, *, slots: bool) -> argparse._ArgumentGroup:
    """Declare what an `LLM` is made from, but for speculation.

    slots: with `--max-num-seqs`; commands without it know how many sequences they need.
    """
    model = parser.add_argument_group("model")
    model.add_argument("--model", required=True, help="folder or Hub id of the target")
    model.add_argument("--tokenizer", help="folder or Hub id, if not the model's own")
    model.add_argument("--revision", help="of the model on the Hub")
    model.add_argument("--dtype", default="auto", help="auto (default), float32, bfloat16, ...")
    model.add_argument("--device", help="cpu, cuda, ...; by default CUDA if there is any")
    model.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="longest prompt plus answer, in tokens; by default what the model was made for",
    )
    if slots:
        model.add_argument(
            "--max-num-seqs",
            type=int,
            default=64,
            metavar="N",
            help="completions that run at once (default: 64)",
        )
    model.add_argument(
        "--kv-cache-memory",
        metavar="BYTES",
        help="for keys and values, also as 1GB, 512MiB or 4G (G is GiB); by default a share of "
        "what is free",
    )
    model.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that the model brings"
    )
    model.add_argument(
        "--deterministic",
        action="store_true",
        help="float32 on a CPU: logits do not depend on what is computed together",
    )
    return model


def engine(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `LLM` that `add_model` declared. Raise ConfigError."""
    names = (
        "tokenizer", "revision", "dtype", "device", "max_model_len", "max_num_seqs",
        "kv_cache_memory", "trust_remote_code", "deterministic",
    )  # fmt: skip
    found = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return {**found, "kv_cache_memory": _memory(args.kv_cache_memory)}


def _memory(text: str | None) -> int | None:
    """Read a number of bytes, with or without a unit."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    size = int(Fraction(match[1]) * unit) if match and unit else 0
    if not size:
        raise ConfigError(
            f"--kv-cache-memory is {shown(text)}, but it has to be a number of bytes above 0, "
            "such as 1000000000, 1GB, 512MiB or 4G"
        )
    return size


def add_sampling(
    parser: argparse.ArgumentParser, *, max_tokens: int, temperature: bool = True
) -> argparse._ArgumentGroup:
    """Declare how an answer is sampled.

    max_tokens: the default. temperature: leave it out where the command has one of its own.
    """
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help=f"of an answer, at most (default: {max_tokens})",
    )
    if temperature:
        group.add_argument(
            "--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy"
        )
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="likeliest tokens that reach P"
    )
    group.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="the K likeliest tokens; 0: all"
    )
    group.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="P times as likely as the likeliest"
    )
    group.add_argument("--seed", type=int, metavar="N", help="makes sampled answers repeatable")
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on past the end-of-sequence token"
    )
    group.add_argument(
        "--sampling-params",
        metavar="JSON",
        help="""further SamplingParams, such as '{"stop_token_ids": [13]}'""",
    )
    return group


def sampling(args: argparse.Namespace, **values: Any) -> SamplingParams:
    """What `add_sampling` declared, and the values that the command adds or replaces.

    Raises:
        PromptError: a value is wrong, or `--sampling-params` names what has an option.
    """
    from specdec.sampling_params import SamplingParams

    given = {name: getattr(args, name) for name in _OPTIONS if hasattr(args, name)}
    return SamplingParams(**{**given, **further(args.sampling_params), **values})


def further(text: str | None) -> dict[str, Any]:
    """Read the value of `--sampling-params`. Raise PromptError."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"--sampling-params {shown(text)} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise PromptError(f"--sampling-params {shown(text)} has to be a JSON object")
    from specdec.sampling_params import _REFUSED, SamplingParams

    own = (*_OPTIONS, *_TAKEN, _FUNCTIONS)
    free = [f.name for f in attrs.fields(SamplingParams) if f.name not in own]
    for name in found:
        # those that are refused everywhere come with their reason when they are read
        if name in free or name in _REFUSED:
            continue
        if name in _OPTIONS:
            why = f"; use --{name.replace('_', '-')} for it"
        elif name in _TAKEN:
            why = f", which the command decides itself (it takes: {listed(free)})"
        elif name == _FUNCTIONS:
            why = ": they are functions, which JSON cannot hold; LLM.generate takes them"
        else:
            hint = nearest(name, [*free, *_OPTIONS])
            why = f", which is no sampling parameter{hint} (it takes: {listed(free)})"
        raise PromptError(f"--sampling-params holds {shown(name)}{why}")
    return found


def check_text(text: str, what: str) -> str:
    """Return the text; raise PromptError if it holds what is no character.

    Python decodes bytes that are no UTF-8, of arguments and perhaps stdin, to surrogates.
    """
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise PromptError(f"{what} {shown(text)} is not valid UTF-8; give it as UTF-8 text")
    return text


def why(error: OSError | ValueError) -> str:
    """Say what went wrong with a file, without its name, which the message has already."""
    return getattr(error, "strerror", None) or str(error)


def quiet() -> None:
    """Keep transformers' progress bars off a stderr that is no terminal."""
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()  # type: ignore[no-untyped-call]


def digits(text: str) -> int | None:
    """Read an integer from 0 up of no more digits than one can mean; None for anything else."""
    written = text.isascii() and text.isdecimal() and len(text) <= _DIGITS
    return int(text) if written else None


def count(text: str) -> int:
    """Read an integer from 1 up."""
    found = digits(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no integer from 1 up")
    return found


def count_or_none(text: str) -> int:
    """Read an integer from 0 up."""
    return 0 if text == "0" else count(text)


def counts(text: str) -> list[int]:
    """Read integers from 1 up, with commas between them."""
    return list(dict.fromkeys(map(count, text.split(","))))


def numbers(text: str) -> list[float]:
    """Read numbers with commas between them."""
    try:
        return list(dict.fromkeys(map(float, text.split(","))))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is no list of numbers such as 0,0.7"
        ) from error
