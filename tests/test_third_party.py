"""A speculator that somebody else publishes: a project, built, installed, chosen and run.

Two projects are built into wheels and installed with pip into a fresh environment that sees this
one's packages. What happens there is looked at from outside, in processes of that environment.
Slow: pip builds and installs (5 s), and one process imports transformers and runs every case
against a random Llama (10 s).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hatchling", reason="wheels are built with hatchling, which is not installed")

PYPROJECT = """
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
dependencies = ["specdec-core>=0.1,<0.2"]

[project.entry-points."specdec.plugins"]
{methods}

[project.entry-points."specdec.checkpoints"]
{checkpoints}
"""

METHODS = {
    "parrot": "acme_parrot:Parrot",
    "parrot2": "acme_parrot:Parrot",
    "parrot_broken": "acme_parrot.broken:Broken",
    "parrot_signature": "acme_parrot.bad:Signature",
    "parrot_misspelt": "acme_parrot.bad:Misspelt",
    "parrot_shape": "acme_parrot.bad:Shape",
    "parrot_ids": "acme_parrot.bad:Ids",
    "parrot_raises": "acme_parrot.bad:Raises",
    "parrot_load": "acme_parrot.bad:Load",
    "parrot_rule": "acme_parrot.rule:Rule",
    "claimed": "acme_parrot:Claimed",
}

GOOD = """
from pathlib import Path

import attrs
import torch

from specdec import Capabilities, ConfigError, Draft, Speculator, hookimpl


@attrs.frozen
class Options:
    shift: int = 0


class Parrot(Speculator):
    "Says the last two tokens again and again, or the one its checkpoint says, plus a shift."

    Options = Options
    reads_model = True

    def __init__(self, target, config):
        self.vocab = target.vocab_size
        self.shift = config.options.shift
        self.word = None
        if config.model is not None:
            text = (Path(config.model) / "word.txt").read_text()
            self.word = int(text)
            if self.word >= self.vocab:
                raise ConfigError(f"the word {self.word} is not in the vocabulary")

    @classmethod
    def load(cls, target, config):
        return cls(target, config)

    def capabilities(self):
        return Capabilities(default_drafts=3, host_tokens=True)

    @hookimpl
    def propose(self, step, k):
        tokens = torch.full((step.batch, k), -1)
        for b, slot in enumerate(step.host.slots):
            end = step.host.length[slot]
            for i in range(step.host.k[b]):
                word = step.host.history[slot, end - 2 + i % 2] if self.word is None else self.word
                tokens[b, i] = (int(word) + self.shift) % self.vocab
        return Draft(tokens=tokens)


class Claimed(Parrot):
    pass
"""

BAD = """
import attrs

from acme_parrot import Parrot
from specdec import Draft, hookimpl

MARKED = 13  # the first token of the request that fails


class Signature(Parrot):
    @hookimpl
    def propose(self, step, k=4):
        return None


class Misspelt(Parrot):
    @hookimpl
    def extract_hiden_states(self, outputs):
        return None


class Shape(Parrot):
    @hookimpl
    def propose(self, step, k):
        return Draft(tokens=super().propose(step, k).tokens[:, :1])


def marked(step):
    first = step.host.history[:, 0]
    return [b for b, slot in enumerate(step.host.slots) if slot >= 0 and first[slot] == MARKED]


class Ids(Parrot):
    @hookimpl
    def propose(self, step, k):
        draft = super().propose(step, k)
        draft.tokens[marked(step)] = self.vocab
        return draft


class Raises(Parrot):
    @hookimpl
    def propose(self, step, k):
        if marked(step):
            raise RuntimeError("I do not repeat that")
        return super().propose(step, k)


class Load(Parrot):
    @classmethod
    def load(cls, target, config):
        return target.no_such_field
"""

RULE = """
import torch

from acme_parrot import Parrot
from specdec import Capabilities, Verdict, VerificationRule, hookimpl


class Rule(Parrot):
    "Brings a rule that takes every draft."

    def capabilities(self):
        rule = VerificationRule("take_all", lossless=False)
        return Capabilities(default_drafts=3, host_tokens=True, verification=[rule])

    @hookimpl
    def verify(self, step, draft, logits):
        batch, k = draft.tokens.shape
        tokens = torch.full((batch, k + 1), -1)
        rows = tokens.clone()
        count = torch.zeros(batch, dtype=torch.int64)
        for b in range(batch):
            start, end = step.logits_start[b : b + 2].tolist()
            n = end - start
            if not n:
                continue
            tokens[b, : n - 1] = draft.tokens[b, : n - 1]
            tokens[b, n - 1] = logits[end - 1].argmax()
            rows[b, :n] = torch.arange(start, end)
            count[b] = n
        return Verdict(tokens=tokens, count=count, rows=rows)
"""

# Runs in the fresh environment: every case against the same model, results as JSON.
CASES = """
import contextlib, io, json, logging, sys, tempfile
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from specdec import LLM, SamplingParams, SpecdecError
from specdec.cli import main

logging.disable(logging.ERROR)  # the engine logs what the outputs say as well
torch.set_num_threads(1)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
)).double().eval()
prompts = [[13, 5, 9, 2], [4, 4, 4], [7, 30, 2, 2, 19, 6], [1]]
greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
sampled = SamplingParams(temperature=0.8, seed=7, max_tokens=16, ignore_eos=True)

def run(config, params):
    try:
        with LLM(model, speculative_config=config, max_num_seqs=4, max_model_len=64) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return {
                "tokens": [o.outputs[0].token_ids for o in outputs],
                "finish": [o.outputs[0].finish_reason for o in outputs],
                "errors": [o.error for o in outputs],
                "drafts": llm.metrics.num_draft_tokens,
                "accepted": llm.metrics.num_accepted_tokens,
                "lossless": llm.lossless,
            }
    except SpecdecError as error:
        return {
            "raised": type(error).__name__,
            "message": str(error),
            "cause": type(error.__cause__).__name__,
        }

cases = json.load(sys.stdin)
results = {name: run(config, greedy) for name, config in cases.items()}
results["plain"] = run(None, greedy)
results["plain sampled"] = run(None, sampled)
results["sampled"] = run("parrot", sampled)
with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
    model.config.save_pretrained(folder)
    results["status"] = main(["plugins", "parrot", "--target", folder, "--json"])
    results["described"] = json.loads(out.getvalue())
print(json.dumps(results))
"""


def write_project(
    home: Path, name: str, version: str, methods: dict[str, str], checkpoints: dict[str, str],
    modules: dict[str, str],
) -> Path:  # fmt: skip
    def table(entries: dict[str, str]) -> str:
        return "\n".join(f'"{k}" = "{v}"' for k, v in entries.items())

    folder = home / name
    package = folder / name.replace("-", "_")
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        PYPROJECT.format(
            name=name, version=version, methods=table(methods), checkpoints=table(checkpoints)
        )
    )
    for module, text in modules.items():
        (package / f"{module}.py").write_text(text)
    return folder


def call(
    *command: str | Path, stdin: str = "", ok: bool = True
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SPECDEC"))}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)), input=stdin, capture_output=True, text=True, env=environment
    )
    assert not ok or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("third-party")


@pytest.fixture(scope="module")
def python(home: Path) -> Path:
    """The interpreter of a fresh environment with both wheels installed."""
    parrot = write_project(
        home, "acme-parrot", "2.5", METHODS, {"file:word.txt&!file:model.bin": METHODS["parrot"]},
        {"__init__": GOOD, "bad": BAD, "rule": RULE, "broken": "import no_such_library\n"},
    )  # fmt: skip
    other = write_project(
        home, "zeta-claim", "0.1", {"claimed": "zeta_claim:Claimed"}, {},
        {"__init__": "raise SystemExit('imported although not chosen')\n"},
    )  # fmt: skip
    wheels = home / "wheels"
    offline = ("--no-deps", "--no-index", "--quiet")
    pip = (sys.executable, "-m", "pip")
    call(*pip, "wheel", *offline, "--no-build-isolation", "-w", wheels, parrot, other)
    call(sys.executable, "-m", "venv", "--without-pip", home / "venv")
    python = home / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    (site,) = (home / "venv").glob("**/site-packages")
    call(*pip, "--python", python, "install", *offline, *sorted(wheels.glob("*.whl")))
    # this environment's packages, and its path files, which an editable install lives by
    here = sysconfig.get_paths()["purelib"]
    (site / "zz_rest.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    return python


@pytest.fixture(scope="module")
def checkpoint(home: Path) -> str:
    folder = home / "checkpoint"
    folder.mkdir()
    (folder / "word.txt").write_text("3")
    return str(folder)


@pytest.fixture(scope="module")
def results(python: Path, checkpoint: str) -> dict[str, Any]:
    """What every case came to, by its name."""
    cases = {
        "good": "parrot",
        "alias": {"method": "Parrot2", "shift": 1, "num_speculative_tokens": 5},
        "detected": {"model": checkpoint},
        "unknown key": "parrot:shfit=1",
        "unknown method": "parot",
        "rule": "parrot_rule:rejection_sample_method=take_all",
        "rule not named": "parrot_rule",
        "rule misspelt": "parrot_rule:rejection_sample_method=take_al",
        "claimed": "claimed",
        **{m: m for m in METHODS if m.startswith("parrot_")},
    }
    done = call(python, "-c", CASES, stdin=json.dumps(cases))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_list_shows_it_and_the_clash_without_importing_anything(python: Path) -> None:
    done = call(python, "-X", "importtime", "-m", "specdec", "plugins", "--json", ok=False)
    assert done.returncode == 1, done.stderr[-2000:]
    found = json.loads(done.stdout)
    ours = {p["method"]: p for p in found["plugins"] if p["distribution"] == "acme-parrot"}
    assert ours["parrot"] == {
        "method": "parrot",
        "aliases": ["parrot2"],
        "distribution": "acme-parrot",
        "version": "2.5",
        "checkpoints": ["file:word.txt&!file:model.bin"],
        "enabled": True,
    }
    assert sorted(ours) == sorted(m for m in METHODS if m != "parrot2")
    (problem,) = found["problems"]
    assert problem.startswith(
        "the name 'claimed' is claimed by acme-parrot 2.5 (acme_parrot:Claimed) and "
        "zeta-claim 0.1 (zeta_claim:Claimed)"
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "specdec.plugins" in imported
    assert not imported & {"torch", "transformers", "acme_parrot", "zeta_claim"}


def test_it_gives_the_tokens_of_plain_decoding(results: dict[str, Any]) -> None:
    plain = results["plain"]
    assert plain["errors"] == [None] * 4
    for name in ("good", "alias", "detected", "rule not named"):
        assert results[name].get("tokens") == plain["tokens"], (name, results[name])
        assert results[name]["drafts"] > 0
        assert results[name]["lossless"]
    assert results["good"]["accepted"] > 0
    assert results["sampled"]["tokens"] == results["plain sampled"]["tokens"]
    assert results["plain sampled"]["tokens"] != plain["tokens"]


def test_a_rule_of_its_own_is_used_if_named(results: dict[str, Any]) -> None:
    own = results["rule"]
    assert own["errors"] == [None] * 4
    assert not own["lossless"]
    assert own["accepted"] == own["drafts"] > 0


@pytest.mark.parametrize(
    ("case", "kind", "said"),
    [
        ("unknown method", "PluginError", "no speculator named 'parot'; installed: "),
        ("unknown method", "PluginError", "; did you mean 'parrot'?"),
        ("unknown key", "ConfigError", "'parrot' has no key 'shfit'; did you mean 'shift'?"),
        ("claimed", "PluginError", "acme-parrot 2.5 (acme_parrot:Claimed) and zeta-claim 0.1"),
        (
            "parrot_broken",
            "PluginError",
            "speculator 'parrot_broken' of acme-parrot 2.5 (acme_parrot.broken:Broken) failed to "
            "import: ModuleNotFoundError: No module named 'no_such_library'",
        ),
        (
            "parrot_signature",
            "PluginError",
            "speculator 'parrot_signature' of acme-parrot 2.5 does not fit the hooks: its hook "
            "propose has a default for the argument 'k'",
        ),
        ("parrot_misspelt", "PluginError", "no hook; did you mean 'extract_hidden_states'?"),
        ("parrot_load", "PluginError", "of acme-parrot 2.5 raised AttributeError in load: "),
        ("rule misspelt", "ConfigError", "'take_al' is neither core's nor of speculator 'parrot_r"),
        ("rule misspelt", "ConfigError", "did you mean 'take_all'?"),
    ],
)
def test_one_that_cannot_be_used_is_refused_before_anything_runs(
    results: dict[str, Any], case: str, kind: str, said: str
) -> None:
    found = results[case]
    assert found.get("raised") == kind, found
    assert said in found["message"]


def test_the_cause_of_a_broken_import_is_chained(results: dict[str, Any]) -> None:
    assert results["parrot_broken"]["cause"] == "ModuleNotFoundError"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("parrot_raises", "raised RuntimeError in the hook propose: I do not repeat that"),
        ("parrot_ids", "answered the hook propose with draft tokens that hold 64; -1 to 63 is"),
    ],
)
def test_only_the_request_it_fails_on_ends_with_an_error(
    results: dict[str, Any], case: str, said: str
) -> None:
    found, plain = results[case], results["plain"]
    assert found.get("finish") == ["error", "length", "length", "length"], found
    assert found["tokens"][1:] == plain["tokens"][1:]
    assert found["errors"][1:] == [None] * 3
    assert found["errors"][0].startswith(f"speculator '{case}' of acme-parrot 2.5 {said}")
    # what it had emitted before is what plain decoding emits
    assert found["tokens"][0] == plain["tokens"][0][: len(found["tokens"][0])]
    assert found["drafts"] > 0


def test_one_that_is_always_wrong_fails_every_request_by_name(results: dict[str, Any]) -> None:
    found = results["parrot_shape"]
    assert found.get("finish") == ["error"] * 4, found
    for error in found["errors"]:
        assert error.startswith(
            "speculator 'parrot_shape' of acme-parrot 2.5 answered the hook propose with draft "
            "tokens of shape "
        )


def test_it_is_described_for_a_target(results: dict[str, Any]) -> None:
    assert results["status"] == 0
    found = results["described"]
    assert (found["distribution"], found["drafts"]) == ("acme-parrot", 3)
    assert found["drawn"] == "deterministic"
    assert set(found["rejection_sample_methods"].values()) == {"yes"}


def test_an_error_on_the_command_line_is_one_clean_line(python: Path) -> None:
    done = call(python, "-m", "specdec", "plugins", "parot", "--target", "x", ok=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("specdec: no speculator named 'parot'")
