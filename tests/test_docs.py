"""README and docs/ are true: their code runs, their links lead somewhere, generated parts are new.

Every block of a page runs in order, in one namespace and in an empty folder, which holds:

* `path-or-hub-id`: a tiny random Llama in float64, with a tokenizer of bytes and a chat template;
* `prompts.txt`: two prompts.

By language: python runs. sh is read line by line: `specdec` runs, `make` has the target, `pip
install` names distributions or folders of the checkout, `python FILE` names a file that knows the
options. toml is a pyproject.toml: its entry points name classes of the page, and from there on its
distribution counts as installed. json is a speculative_config. text is not read.

A block under `<!-- needs: METHOD -->` is left out where that method is not installed, and under
`<!-- not run: REASON -->` always. About 15 s: the pages load some eighty small models.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import attrs
import pytest

from specdec import LLM, SamplingParams, SpeculativeConfig, Speculator, plugins
from specdec.checkpoints import pattern_problem
from specdec.cli import main
from specdec.runner.drafting import Drafting
from specdec.runner.engine import Engine
from specdec.sampling_params import _REFUSED
from specdec.testing import save_tiny_model

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("plugins/*/README.md")),
]
BLOCK = re.compile(r"(?:^<!-- ([^\n]+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = ("python", "sh", "toml", "json", "text")
FOLDERS = r"(core|kernels|tests|tools|benchmarks|docs|examples|models)/[\w./]*$"
MODEL = '"$(python models/smollm2.py)"'  # in a command line, stands for the path of a model

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


class Block(NamedTuple):
    language: str
    code: str
    line: int
    needs: str | None
    not_run: str | None


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        mark, language, code = found.groups()
        kind, _, what = (mark or "").partition(": ")
        line = text.count("\n", 0, found.start(3)) + 1
        yield Block(
            language,
            code,
            line,
            needs=what if kind == "needs" else None,
            not_run=what if kind == "not run" else None,
        )


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def is_installed(method: str) -> bool:
    return bool(entry_points(group=plugins.METHODS, name=method))


# --- what a page finds ----------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a page runs."""
    save_tiny_model(tmp_path / "path-or-hub-id", max_model_len=512)
    (tmp_path / "prompts.txt").write_text("Count: 1, 2, 3, 1, 2, 3\nHello\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that a page's code becomes: types of attrs classes are looked up in it."""
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    return module


# --- running a page -------------------------------------------------------


@each_page
def test_every_block_runs(
    page: Path, folder: Path, namespace: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[dict[str, Any]] = []
    for block in blocks(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: a block of {block.language or 'nothing'}"
        if block.not_run is not None or (block.needs and not is_installed(block.needs)):
            continue
        if block.language == "python":
            lines = "\n" * (block.line - 1)  # tracebacks then show the page's line
            exec(compile(lines + block.code, str(page), "exec"), vars(namespace))
        elif block.language == "sh":
            for line in block.code.replace("\\\n", " ").splitlines():
                run_line(line, where)
        elif block.language == "toml":
            packed.append(tomllib.loads(block.code))
            install(packed[-1], namespace, folder / "site", monkeypatch)
        elif block.language == "json":
            check_config(block.code)
    for pyproject in packed:
        check_entry_points(pyproject, namespace)


def run_line(line: str, where: str) -> None:
    command, *arguments = shlex.split(line.replace(MODEL, "path-or-hub-id"), comments=True)
    if command == "specdec":
        assert main(arguments) == 0, f"{where}: {line}"
    elif command == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        target = next(a for a in arguments if "=" not in a)
        assert re.search(rf"^\.PHONY:.* {target}\b", makefile, re.MULTILINE), f"{where}: {line}"
    elif command == "pip":
        assert arguments.pop(0) == "install"
        for what in arguments:
            known = (ROOT / what / "pyproject.toml").is_file() if "." in what else what in NAMES
            assert known, f"{where}: {what} is neither a distribution nor a folder of ours"
    elif command in ("python", "python3"):
        script = ROOT / arguments.pop(0)
        source = script.read_text(encoding="utf-8")
        unknown = [a for a in arguments if a.startswith("--") and a not in source]
        assert not unknown, f"{where}: {script.name} has no {unknown}"
    else:
        raise AssertionError(f"{where}: nobody checks the command {command}")


def projects() -> list[Path]:
    return [ROOT, *sorted(p.parent for p in ROOT.glob("plugins/*/pyproject.toml"))]


NAMES = {
    tomllib.loads((p / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
    for p in projects()
}


def install(
    pyproject: dict[str, Any], page: ModuleType, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the distribution be found, with the page for its package."""
    project = pyproject["project"]
    groups = project["entry-points"]
    assert set(groups) == {plugins.METHODS, plugins.CHECKPOINTS}
    monkeypatch.setitem(sys.modules, project["name"].replace("-", "_"), page)
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, names in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in names.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(site)


def check_entry_points(pyproject: dict[str, Any], page: ModuleType) -> None:
    """Every entry point names a speculator that the page has defined by its end."""
    groups = pyproject["project"]["entry-points"]
    assert set(groups[plugins.CHECKPOINTS].values()) <= set(groups[plugins.METHODS].values())
    for pattern in groups[plugins.CHECKPOINTS]:
        assert pattern_problem(pattern) is None
    for value in groups[plugins.METHODS].values():
        package, _, name = value.partition(":")
        assert package == pyproject["project"]["name"].replace("-", "_")
        assert issubclass(getattr(page, name), Speculator)


def check_config(text: str) -> None:
    config = SpeculativeConfig.parse(text)
    assert config is not None
    if is_installed(str(config.method)):
        info = plugins.find(str(config.method))
        config.resolve(plugins.load(info), info.method)


def test_blocks_that_do_not_run_are_few_and_say_why() -> None:
    reasons = [b.not_run for page in PAGES for b in blocks(page) if b.not_run is not None]
    assert all(reasons)
    assert len(reasons) <= 2


# --- generated parts ------------------------------------------------------


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("docs")


def test_generated_pages_are_up_to_date(generator: Any) -> None:
    old = [str(path.relative_to(ROOT)) for path in generator.stale()]
    assert old == [], "run: python tools/docs.py"


def rows(text: str) -> list[str]:
    """The first cell of every row of the tables in a text, without its backticks."""
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def test_tables_of_the_configuration_name_what_there_is(generator: Any) -> None:
    parts = generator.parts()
    assert rows(parts["keys"]) == [
        f.name for f in attrs.fields(SpeculativeConfig) if f.name != "extra"
    ]
    arguments = [n for n in inspect.signature(LLM).parameters if n != "unsupported"]
    assert rows(parts["llm"]) == arguments
    assert rows(parts["sampling"]) == [f.name for f in attrs.fields(SamplingParams)]


def test_defaults_in_the_tables_are_the_defaults(generator: Any) -> None:
    for part, cls in (("keys", SpeculativeConfig), ("sampling", SamplingParams)):
        shown = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", generator.parts()[part], re.M))
        assert shown == {f.name: repr(f.default) for f in attrs.fields(cls) if f.name != "extra"}


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        (
            "Prose.\n\na: one.\nb, c: two\n    lines.",
            {"a": "one."} | dict.fromkeys("bc", "two lines."),
        ),
        ("a: one; `b`: two: three.", {"a": "one.", "b": "two: three."}),
        ("a: one. Of d: no name.", {"a": "one. Of d: no name."}),
    ],
)
def test_entries_of_a_docstring(generator: Any, docstring: str, expected: dict[str, str]) -> None:
    assert generator.entries(docstring, ["a", "b", "c"])[1] == expected


# --- what the pages say ---------------------------------------------------


def slug(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        inside = path.relative_to(ROOT).parts
        if inside[0] == "plugins" and not ROOT.joinpath(*inside[:2]).is_dir():
            continue  # that plugin was deleted
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name} links to {target}"


@each_page
def test_names_and_files_that_are_mentioned_exist(page: Path) -> None:
    for word in re.findall(r"`([^`\n]+)`", prose(page)):
        if re.fullmatch(r"specdec(_kernels)?(\.\w+)+", word) and word not in GROUPS:
            resolve(word)
        elif found := re.fullmatch(r"(Engine|Drafting)\.(\w+)", word):
            assert hasattr({"Engine": Engine, "Drafting": Drafting}[found[1]], found[2]), word
        elif re.match(FOLDERS, word) and "NAME" not in word:
            assert (ROOT / word).exists(), f"{page.name} mentions {word}"


GROUPS = (plugins.METHODS, plugins.CHECKPOINTS)


def resolve(dotted: str) -> None:
    """Import the longest module of the name and look the rest up in it."""
    parts = dotted.split(".")
    found: Any = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], start=1):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[: i + 1]))
        found = getattr(found, part)


def test_readme_names_every_sampling_parameter_that_is_not_served() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [name for name, (_, why) in _REFUSED.items() if "not served" in why]
    assert [name for name in missing if f"`{name}`" not in text] == []


def test_readme_names_folders_and_distributions_as_they_are() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(\S+)/` \| `(\w+)` \| `([\w-]+)` \|$", text, re.MULTILINE)
    there = [row for row in table if (ROOT / row[0]).is_dir()]
    assert {name for *_, name in there} == NAMES
    for folder, package, _ in there:
        importlib.import_module(package)
        assert (ROOT / folder).is_dir()


def test_json_in_docs_is_json() -> None:
    found = [b.code for page in PAGES for b in blocks(page) if b.language == "json"]
    assert all(isinstance(json.loads(code), dict) for code in found)
