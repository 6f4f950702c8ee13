"""List the installed speculators, or show what one of them would do for a target.

The list comes from metadata alone: neither torch nor a plugin is imported.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import attrs

from specdec import checkpoints, config_text, plugins
from specdec._structure import printable
from specdec.config import CORE_RULES, SpeculativeConfig
from specdec.errors import PLUGIN_ERRORS, ConfigError, PluginError, SpecdecError, blame

if TYPE_CHECKING:
    from specdec.plugins import PluginInfo
    from specdec.types import Capabilities, TargetInfo

PROBLEMS = 1  # exit status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `specdec plugins`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="describe this one; needs --target")
    parser.add_argument("--target", metavar="MODEL", help="folder or Hub id; no weights are read")
    parser.add_argument("--target-revision", metavar="REVISION", help="of the target on the Hub")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that the target brings"
    )
    parser.add_argument(
        "--speculative-config", "-sc", metavar="CONFIG", help="key=value,... or JSON; as for an LLM"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """List or describe; returns 1 if the list shows problems."""
    if args.name is None:
        for option in ("target", "speculative_config"):
            if getattr(args, option) is not None:
                raise ConfigError(
                    f"--{option.replace('_', '-')} needs a NAME: specdec plugins NAME --target "
                    "MODEL ('specdec plugins' lists the names)"
                )
        return _list(args.json)
    if args.target is None:
        raise ConfigError(f"specdec plugins {args.name} needs --target MODEL")
    info, capabilities, target, config = _load(args)
    found = {
        "method": info.method,
        "distribution": info.distribution,
        "version": info.version,
        "target": target.name,
        **_described(info, capabilities, target, config),
    }
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        width = max(len(key) for key in found) + 2
        for key, value in found.items():
            label = key.replace("_", " ") + ":"
            if isinstance(value, dict):
                print(label)
                for name, text in value.items():
                    print(f"  {printable(name)}: {printable(text)}")
            else:
                print(f"{label:{width}}{_spelt(key, value)}")
    return 0


def _list(as_json: bool) -> int:
    infos = plugins.installed()
    problems = [
        *plugins.conflicts(infos),
        *plugins.stray_patterns(),
        *(f"{i}: {p}" for i in infos for p in map(checkpoints.pattern_problem, i.patterns) if p),
    ]
    notes = [n for n in (plugins.shadowed(), plugins.unknown_disabled(infos)) if n]
    if as_json:
        listed = [
            {
                "method": i.method,
                "aliases": i.aliases,
                "distribution": i.distribution,
                "version": i.version,
                "checkpoints": i.patterns,
                "enabled": i.enabled,
            }
            for i in infos
        ]
        print(json.dumps({"plugins": listed, "problems": problems, "notes": notes}, indent=2))
    else:
        _print_table(infos)
        for line in (*(f"problem: {p}" for p in problems), *(f"note: {n}" for n in notes)):
            print(printable(line))
    return PROBLEMS if problems else 0


def _print_table(infos: list[PluginInfo]) -> None:
    if not infos:
        print("no speculators are installed; each is a package: pip install specdec-plugin-METHOD")
        return
    rows: list[tuple[str, ...]] = [("METHOD", "ALIASES", "DISTRIBUTION", "VERSION", "CHECKPOINTS")]
    for i in infos:
        method = i.method if i.enabled else f"{i.method} (disabled)"
        aliases, patterns = ", ".join(i.aliases), ", ".join(i.patterns)
        cells = (method, aliases or "-", i.distribution, i.version, patterns or "-")
        rows.append(tuple(map(printable, cells)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (f"{cell:{w}}" for cell, w in zip(row, widths, strict=True))
        print("  ".join(padded).rstrip())


def _load(
    args: argparse.Namespace,
) -> tuple[PluginInfo, Capabilities, TargetInfo, SpeculativeConfig]:
    """Load the speculator for the target on the meta device and ask what it does."""
    info = plugins.find(args.name)
    text = args.speculative_config
    given = SpeculativeConfig.parse(
        {"method": info.method, **(config_text.parse(text) if text else {})}
    )
    assert given is not None  # only None is plain decoding
    if plugins.find(str(given.method)) != info:
        raise ConfigError(
            f"--speculative-config names the method {given.method!r}, but {info} is described"
        )
    config = attrs.evolve(given, method=info.method)
    speculator_class = plugins.load(info)
    own = config.resolve(speculator_class, info.method)
    target = _target_info(args)
    from specdec.types import Capabilities

    where = "load"
    try:
        speculator = speculator_class.load(target, own)
        try:
            where = "capabilities"
            capabilities = speculator.capabilities()
        finally:
            speculator.close()
    except SpecdecError:
        raise
    except PLUGIN_ERRORS as error:
        raise PluginError(blame(str(info), error, where)) from error
    if not isinstance(capabilities, Capabilities):
        raise PluginError(f"{info}: capabilities() gave a {type(capabilities).__name__}")
    return info, capabilities, target, config


def _target_info(args: argparse.Namespace) -> TargetInfo:
    import torch
    from transformers import AutoModelForCausalLM

    from specdec.errors import TargetError
    from specdec.runner.model_loading import load_config, reason
    from specdec.runner.model_support import UNLIMITED_LEN, position_limit
    from specdec.types import TargetInfo

    config = load_config(
        args.target,
        revision=args.target_revision,
        trust_remote_code=args.trust_remote_code,
        token=None,
        hf_overrides=None,
    )
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, trust_remote_code=args.trust_remote_code
            )
    except Exception as error:  # whatever a model's own code raises
        raise TargetError(f"{args.target!r} cannot be built: {reason(error, config)}") from error
    text = config.get_text_config()
    return TargetInfo(
        name=args.target,
        config=text,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        max_model_len=position_limit(config) or UNLIMITED_LEN,
        max_num_seqs=64,
        dtype=model.dtype,
        device=torch.device("meta"),
        embedding=model.get_input_embeddings(),
        lm_head=model.get_output_embeddings(),
    )


def _described(
    info: PluginInfo, capabilities: Capabilities, target: TargetInfo, config: SpeculativeConfig
) -> dict[str, Any]:
    c = capabilities
    drafts: int | str
    rules: dict[str, str] = {}
    from specdec.legality import settle

    for rule in (*CORE_RULES, *(r.name for r in c.verification)):
        try:
            settle(_under(config, rule), c, str(info))
            rules[rule] = "yes"
        except SpecdecError as error:
            rules[rule] = f"no: {error}"
    try:
        drafts = settle(config, c, str(info)).drafts
    except SpecdecError as error:
        drafts = f"none: {error}"
    states = [f"entering layer {i}" if i else "embedding" for i in c.hidden_states]
    return {
        "drafts": drafts,
        "max_drafts": c.max_drafts,
        "max_context": c.max_context,
        "drawn": c.drawn,
        "q": c.q,
        "confidence": c.writes_confidence,
        "hidden_states": [
            *states,
            *(["after the final norm"] if c.post_norm else []),
            *(["before the head"] if c.pre_head else []),
        ],
        "cache_layers": len(c.kv_layers),
        "cache_bytes_per_token": sum(
            layer.heads * (layer.k_dim + layer.v_dim) * (layer.dtype or target.dtype).itemsize
            for layer in c.kv_layers
        ),
        "host_tokens": c.host_tokens,
        "graph_safe": c.graph_safe,
        "rejection_sample_methods": rules,
    }


def _under(config: SpeculativeConfig, rule: str) -> SpeculativeConfig:
    """The same configuration under another rule, with what the rule needs."""
    if rule == config.rejection_sample_method:
        return config
    length = 1.0 if rule == "synthetic" else None
    return attrs.evolve(
        config,
        rejection_sample_method=rule,
        synthetic_acceptance_length=length,
        synthetic_acceptance_rates=None,
    )


def _spelt(key: str, value: Any) -> str:
    if value is None:
        return "no limit" if key in ("max_drafts", "max_context") else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(printable, value)) or "none"
    return printable(value)
