"""Finding speculators among what is installed: folders of metadata stand for distributions.

What is slow is the first import of transformers, for the tests that describe a speculator.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec import cli_plugins, plugins
from specdec.cli import main
from specdec.errors import PluginError, SpecdecError, TargetError
from specdec.speculator import Speculator

Install = Callable[..., Path]

MODULE = """
from specdec import Capabilities, Draft, Speculator, hookimpl

class Some(Speculator):
    def capabilities(self):
        return Capabilities()

    @hookimpl
    def propose(self, step, k):
        return None

number = 3
"""


def add_distribution(
    site: Path,
    name: str,
    methods: dict[str, str],
    checkpoints: dict[str, str] | None = None,
    version: str = "1.0",
) -> Path:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = ["[specdec.plugins]", *(f"{k} = {v}" for k, v in methods.items())]
    lines += ["[specdec.checkpoints]", *(f"{k} = {v}" for k, v in (checkpoints or {}).items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path that distributions are added to; what is installed stays."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(plugins.DISABLE, raising=False)
    return tmp_path


@pytest.fixture
def install(site: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    def install(name: str, methods: dict[str, str], *more: Any, module: str = MODULE) -> Path:
        for value in methods.values():
            top = value.partition(":")[0]
            (site / f"{top}.py").write_text(textwrap.dedent(module))
            monkeypatch.delitem(sys.modules, top, raising=False)
        return add_distribution(site, name, methods, *more)

    return install


def raised(call: Callable[[], object], kind: type[SpecdecError] = PluginError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# --- listing --------------------------------------------------------------


def test_a_distribution_is_listed_with_its_names_and_patterns(install: Install) -> None:
    install(
        "specdec-plugin-fast",
        {"fast3": "fast_m:Some", "fast": "fast_m:Some", "fast_old": "fast_m:Some"},
        {"arch:FastModel": "fast_m:Some", "file:fast.bin": "fast_m:Some"},
    )
    (info,) = [i for i in plugins.installed() if i.distribution == "specdec-plugin-fast"]
    assert (info.method, info.aliases) == ("fast", ("fast3", "fast_old"))
    assert info.patterns == ("arch:FastModel", "file:fast.bin")
    assert (info.version, info.value, info.enabled) == ("1.0", "fast_m:Some", True)
    assert str(info) == "speculator 'fast' of specdec-plugin-fast 1.0"


def test_a_distribution_may_bring_several_speculators(install: Install) -> None:
    install("many", {"one": "many_m:Some", "two": "many_m:Other"}, {"arch:Two": "many_m:Other"})
    found = {i.method: i.patterns for i in plugins.installed() if i.distribution == "many"}
    assert found == {"one": (), "two": ("arch:Two",)}


def test_listing_many_distributions_is_quick_and_imports_none_of_them(tmp_path: Path) -> None:
    for n in range(150):
        (tmp_path / f"many_{n}.py").write_text("raise RuntimeError('imported')\n")
        add_distribution(
            tmp_path,
            f"specdec-plugin-many{n}",
            {f"many{n}": f"many_{n}:Some"},
            {f"arch:Many{n}": f"many_{n}:Some"},
        )
    code = """
    import sys, time
    before = time.process_time()
    from specdec import plugins
    infos = plugins.installed()
    spent = time.process_time() - before
    assert plugins.conflicts(infos) == []
    assert plugins.find("MANY149", infos).method == "many149"
    heavy = [m for m in sys.modules if m in ("torch", "transformers", "numpy")]
    plugin = [m for m in sys.modules if m.startswith(("many_", "specdec_plugin"))]
    print(sum(i.method.startswith("many") for i in infos), heavy, plugin)
    print(spent)
    """
    environment = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    best = 99.0
    for _ in range(3):  # the least of three: others use the machine as well
        out = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            capture_output=True, text=True, check=True, env=environment,
        ).stdout  # fmt: skip
        listed, spent = out.splitlines()
        assert listed == "150 [] []"
        best = min(best, float(spent))
    assert best < 0.3


def test_loading_one_imports_no_other(install: Install) -> None:
    install("dist-a", {"aaa": "module_a:Some"})
    install("dist-b", {"bbb": "module_b:Some"}, module="raise RuntimeError('imported')")
    found = plugins.load(plugins.find("aaa"))
    assert issubclass(found, Speculator)
    assert "module_a" in sys.modules
    assert "module_b" not in sys.modules


@pytest.mark.parametrize("spelling", ["fast", "FAST", "fast3", "Fast-Old", " fast_old "])
def test_a_name_or_alias_is_found_in_any_spelling(install: Install, spelling: str) -> None:
    install("fast", {"fast": "f_m:Some", "fast3": "f_m:Some", "fast_old": "f_m:Some"})
    assert plugins.find(spelling).distribution == "fast"


# --- what goes wrong ------------------------------------------------------


def test_an_unknown_name_gets_the_nearest_or_a_command(install: Install) -> None:
    install("dist", {"lookahead": "l_m:Some"})
    said = raised(lambda: plugins.find("lookahed"))
    assert said.startswith("no speculator named 'lookahed'; installed: ")
    assert said.endswith("; did you mean 'lookahead'?")
    assert raised(lambda: plugins.find("Brand-new")).endswith(
        "; if somebody publishes it, its distribution is likely called specdec-plugin-brand-new"
    )
    # what cannot be the name of a package becomes no part of a command
    assert "pip" not in raised(lambda: plugins.find("x; rm -rf /"))
    assert len(raised(lambda: plugins.find("?" * 10_000))) < 1000


def test_two_distributions_with_one_name_are_both_named(install: Install) -> None:
    install("dist-a", {"same": "module_a:Some"})
    install("dist-b", {"Same": "module_b:Some"}, None, "2.0")
    said = raised(lambda: plugins.find("same"))
    assert "the name 'same' is claimed by" in said
    assert "dist-a 1.0 (module_a:Some) and dist-b 2.0 (module_b:Some)" in said
    assert said in plugins.conflicts(plugins.installed())


def test_a_conflict_is_settled_by_switching_one_distribution_off(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("dist-a", {"same": "module_a:Some"}, {"arch:Same": "module_a:Some"})
    install("dist-b", {"same": "module_b:Some"}, {"arch:Same": "module_b:Some"})
    monkeypatch.setenv(plugins.DISABLE, "dist-a")
    infos = plugins.installed()
    assert plugins.find("same", infos).distribution == "dist-b"
    assert plugins.conflicts(infos) == []


def test_a_pattern_that_two_claim_is_a_conflict(install: Install) -> None:
    install("dist-a", {"aaa": "module_a:Some"}, {"arch:Same": "module_a:Some"})
    install("dist-b", {"bbb": "module_b:Some"}, {"arch:Same": "module_b:Some"})
    (conflict,) = plugins.conflicts(plugins.installed())
    assert "the pattern 'arch:Same' is claimed by dist-a 1.0" in conflict
    assert "dist-b 1.0" in conflict


@pytest.mark.parametrize("switched_off", ["fast", "fast3", "FAST", "x, fast ", "*", "the-dist"])
def test_a_speculator_is_switched_off_by_any_of_its_names(
    install: Install, monkeypatch: pytest.MonkeyPatch, switched_off: str
) -> None:
    install("the-dist", {"fast": "f_m:Some", "fast3": "f_m:Some"})
    monkeypatch.setenv(plugins.DISABLE, switched_off)
    said = raised(lambda: plugins.find("fast"))
    assert said == (
        "speculator 'fast' of the-dist 1.0 is switched off by "
        f"SPECDEC_DISABLE_PLUGINS={switched_off}"
    )


def test_a_name_that_is_switched_off_in_vain_is_said() -> None:
    assert plugins.unknown_disabled([]) is None


def test_a_broken_import_names_the_distribution_and_chains_the_cause(install: Install) -> None:
    install(
        "dist-broken", {"broken": "broken_m:Some"}, None, "9.8.7", module="import no_such_thing"
    )
    with pytest.raises(PluginError) as caught:
        plugins.load(plugins.find("broken"))
    assert str(caught.value) == (
        "speculator 'broken' of dist-broken 9.8.7 (broken_m:Some) failed to import: "
        "ModuleNotFoundError: No module named 'no_such_thing'"
    )
    cause = caught.value.__cause__
    assert isinstance(cause, ModuleNotFoundError)
    assert cause.__traceback__ is not None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("wrong_m:number", "gives 3; it has to name a subclass of specdec.Speculator"),
        ("wrong_m:Draft", "it has to name a subclass of specdec.Speculator"),
        ("wrong_m", "it has to name a subclass of specdec.Speculator"),
        ("wrong_m:Missing", "has no attribute 'Missing'"),
        ("no_such_module:Some", "No module named 'no_such_module'"),
        ("not a reference!", "failed to import: "),
    ],
)
def test_an_entry_point_that_is_no_speculator_is_refused(
    site: Path, monkeypatch: pytest.MonkeyPatch, value: str, said: str
) -> None:
    (site / "wrong_m.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "wrong_m", raising=False)
    add_distribution(site, "dist-wrong", {"wrong": value})
    message = raised(lambda: plugins.load(plugins.find("wrong")))
    assert message.startswith("speculator 'wrong' of dist-wrong 1.0")
    assert said in message


def test_an_interrupt_during_import_passes_and_an_exit_is_a_failure(install: Install) -> None:
    install("dist-stop", {"stops": "stop_m:Some"}, module="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        plugins.load(plugins.find("stops"))
    install("dist-exit", {"exits": "exit_m:Some"}, module="import sys\nsys.exit('no GPU here')")
    assert raised(lambda: plugins.load(plugins.find("exits"))) == (
        "speculator 'exits' of dist-exit 1.0 (exit_m:Some) failed to import: "
        "SystemExit: no GPU here"
    )


@pytest.mark.parametrize(
    "content", [b"[specdec.plugins]\nno value\n", b"\xff\xfe"], ids=["no value", "no text"]
)
def test_metadata_that_cannot_be_read_names_its_folder(site: Path, content: bytes) -> None:
    folder = add_distribution(site, "dist-torn", {"torn": "torn_m:Some"})
    (folder / "entry_points.txt").write_bytes(content)
    said = raised(plugins.installed)
    assert "the entry points of dist-torn 1.0" in said
    assert str(folder) in said


def test_a_distribution_without_a_name_is_still_listed(site: Path) -> None:
    folder = add_distribution(site, "dist-torn", {"torn": "torn_m:Some"})
    (folder / "METADATA").unlink()
    info = plugins.find("torn")
    assert info.distribution == plugins.UNNAMED
    assert "torn_m" in raised(lambda: plugins.load(info))


def test_a_pattern_for_no_speculator_is_a_problem(install: Install) -> None:
    install("dist-a", {"aaa": "module_a:Some"}, {"arch:A": "module_a:Smoe"})
    assert plugins.stray_patterns() == [
        "the checkpoint pattern 'arch:A' of dist-a 1.0 stands for module_a:Smoe, "
        "which is no entry point of the group specdec.plugins there"
    ]


# --- specdec plugins ------------------------------------------------------


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    cli_plugins.add_arguments(parser)
    status = cli_plugins.run(parser.parse_args(words))
    return status, capsys.readouterr().out


def test_the_list_shows_names_distributions_and_patterns(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(
        "dist-fast", {"fast": "f_m:Some", "fast3": "f_m:Some"}, {"arch:Fast": "f_m:Some"}, "3.1"
    )
    status, out = command(capsys)
    assert status == 0
    assert out.splitlines()[0].split() == [
        "METHOD", "ALIASES", "DISTRIBUTION", "VERSION", "CHECKPOINTS",
    ]  # fmt: skip
    (row,) = [line.split() for line in out.splitlines() if "dist-fast" in line]
    assert row == ["fast", "fast3", "dist-fast", "3.1", "arch:Fast"]
    status, out = command(capsys, "--json")
    assert status == 0
    assert {
        "method": "fast",
        "aliases": ["fast3"],
        "distribution": "dist-fast",
        "version": "3.1",
        "checkpoints": ["arch:Fast"],
        "enabled": True,
    } in json.loads(out)["plugins"]


def test_problems_are_listed_and_give_status_one(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("dist-a", {"same": "module_a:Some"}, {"architecture:A": "module_a:Some"})
    install("dist-b", {"same": "module_b:Some"}, {"arch:B": "module_b:Other"})
    status, out = command(capsys)
    assert status == 1
    problems = [line for line in out.splitlines() if line.startswith("problem: ")]
    assert len(problems) == 3
    assert "the name 'same' is claimed by dist-a 1.0" in problems[0]
    assert "'arch:B' of dist-b 1.0 stands for module_b:Other" in problems[1]
    assert "speculator 'same' of dist-a 1.0: the checkpoint pattern 'architecture:A'" in problems[2]
    status, out = command(capsys, "--json")
    assert (status, len(json.loads(out)["problems"])) == (1, 3)


def test_control_characters_of_a_name_are_not_written_to_the_terminal(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"fast\x07": "f_m:Some"}
    install("dist-\x1b[31mred", names, {"arch:\x1b[0m": "f_m:Other"}, "1\x9b", module="1 / 0")
    status, out = command(capsys)
    assert status == 1  # the pattern stands for no speculator
    assert out.replace("\n", "").isprintable()
    (row,) = [line.split() for line in out.splitlines() if line.startswith("fast")]
    assert row == ["fast\\x07", "-", "dist-\\x1b[31mred", "1\\x9b", "-"]
    assert "dist-\\x1b[31mred 1\\x9b stands for f_m:Other" in out
    assert main(["plugins", "fast\x07", "--target", "/no/such"]) == 2
    err = capsys.readouterr().err
    assert "dist-\\x1b[31mred" in err
    assert err.replace("\n", "").isprintable()


def test_what_is_switched_off_is_listed_as_disabled(
    install: Install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("dist-fast", {"fast": "f_m:Some"})
    monkeypatch.setenv(plugins.DISABLE, "fast,nothing_here")
    status, out = command(capsys)
    assert status == 0
    assert "fast (disabled)" in out
    assert "note: SPECDEC_DISABLE_PLUGINS names nothing_here, not installed" in out


def test_a_foreign_distribution_of_our_name_is_noticed(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plugins.shadowed() is None
    add_distribution(site, "specdec", {}, None, "0.7")
    status, out = command(capsys)
    assert status == 0
    assert "note: the distribution 'specdec' 0.7 is not ours (specdec-core is)" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fast"], "specdec plugins fast needs --target MODEL"),
        (["--target", "x"], "--target needs a NAME"),
        (["--speculative-config", "x"], "--speculative-config needs a NAME"),
        (["nobody", "--target", "x"], "no speculator named 'nobody'"),
    ],
)
def test_wrong_words_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert said in raised(lambda: command(capsys, *words), SpecdecError)


# --- specdec plugins NAME --target M --------------------------------------

DESCRIBED = """
import attrs, torch
from specdec import Capabilities, KVLayer, Speculator, VerificationRule, hookimpl

@attrs.frozen
class Options:
    width: int = 8

class Some(Speculator):
    Options = Options

    def __init__(self, target, config):
        assert target.embedding.weight.device.type == target.lm_head.weight.device.type == "meta"
        assert target.embedding.weight.shape == (target.vocab_size, target.hidden_size) == (96, 32)
        self.width = config.options.width
        self.drawn = {"greedy": "deterministic", "coupled": "coupled",
                      "probabilistic": "independent"}[config.draft_sample_method]

    @classmethod
    def load(cls, target, config):
        return cls(target, config)

    def capabilities(self):
        return Capabilities(
            drawn=self.drawn, q="dense" if self.drawn == "independent" else None,
            default_drafts=3, max_drafts=7, hidden_states=(0, 2),
            post_norm=True, kv_layers=[KVLayer(2, self.width, 8, dtype=torch.float16)],
            verification=[VerificationRule("own_rule", lossless=False)],
        )

    @hookimpl
    def propose(self, k): return None

    def close(self): print("closed")
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_speculator_is_described_for_a_target_without_weights(
    install: Install, tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    install("dist-some", {"some": "some_m:Some"}, module=DESCRIBED)
    status, out = command(capsys, "some", "--target", tiny, "--json", "-sc", "width=16")
    assert status == 0
    closed, _, text = out.partition("\n")
    assert closed == "closed"
    found = json.loads(text)
    rules = found.pop("rejection_sample_methods")
    assert found == {
        "method": "some",
        "distribution": "dist-some",
        "version": "1.0",
        "target": tiny,
        "drafts": 3,
        "max_drafts": 7,
        "max_context": None,
        "drawn": "coupled",
        "q": None,
        "confidence": False,
        "hidden_states": ["embedding", "entering layer 2", "after the final norm"],
        "cache_layers": 1,
        "cache_bytes_per_token": 2 * (16 + 8) * 2,
        "host_tokens": False,
        "graph_safe": False,
    }
    assert list(rules) == ["coupled", "standard", "block", "synthetic", "own_rule"]
    assert rules["coupled"] == "yes"
    assert rules["standard"].startswith("no: ")
    assert "coupled" in rules["own_rule"]


def test_the_description_is_also_written_for_people(
    install: Install, tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    install("dist-some", {"some": "some_m:Some"}, module=DESCRIBED)
    config = "some:draft_sample_method=greedy,num_speculative_tokens=5"
    status, out = command(capsys, "some", "--target", tiny, "-sc", config)
    assert status == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "drafts: 5" in lines
    assert "drawn: deterministic" in lines
    assert "hidden states: embedding, entering layer 2, after the final norm" in lines
    assert "max context: no limit" in lines
    assert "graph safe: no" in lines
    assert "standard: yes" in lines


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-sc", "width=a"], "width is 'a', but it has to be an integer"),
        (["-sc", "widht=3"], "did you mean 'width'?"),
        (["-sc", "other:width=3"], "no speculator named 'other'"),
        (["-sc", "draft_sample_method=greedy,num_speculative_tokens=0"], "at least 1"),
    ],
)
def test_a_description_of_what_cannot_be_is_refused(
    install: Install, tiny: str, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    install("dist-some", {"some": "some_m:Some"}, module=DESCRIBED)
    assert said in raised(lambda: command(capsys, "some", "--target", tiny, *words), SpecdecError)


def test_a_target_that_is_not_there_is_refused(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install("dist-some", {"some": "some_m:Some"}, module=DESCRIBED)
    nowhere = str(tmp_path / "nowhere")
    said = raised(lambda: command(capsys, "some", "--target", nowhere), SpecdecError)
    assert nowhere in said


def test_a_target_that_cannot_be_built_says_why(
    install: Install, tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    install("dist-some", {"some": "some_m:Some"}, module=DESCRIBED)
    path = Path(tiny, "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_act": "foo"}))
    said = raised(lambda: command(capsys, "some", "--target", tiny), TargetError)
    assert said.endswith(
        "cannot be built: hidden_act names 'foo', which transformers does not know"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "def load(cls, target, config):\n        1 / 0",
            "ZeroDivisionError in load: division",
        ),
        ("def capabilities(self):\n        return 3", "capabilities() gave a int"),
    ],
)
def test_a_speculator_that_fails_to_load_is_named(
    install: Install, tiny: str, capsys: pytest.CaptureFixture[str], change: str, said: str
) -> None:
    start = change.partition("\n")[0]
    module = DESCRIBED.replace(f"    {start}\n", f"    {change}\n\n    def unused(self):\n")
    module = module.replace(
        "def unused(self):\n        return cls", "def unused(cls):\n        return cls"
    )
    install("dist-some", {"some": "some_m:Some"}, module=module)
    message = raised(lambda: command(capsys, "some", "--target", tiny))
    assert message.startswith("speculator 'some' of dist-some 1.0")
    assert said in message
