"""The promises of the layout: who imports whom, one name and one version everywhere.

All of it is read from the files, so a plugin folder that is deleted takes its cases with it.
"""

import ast
import functools
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = sorted(p.parent for p in ROOT.glob("plugins/*/pyproject.toml"))
GROUP = "specdec.plugins"

each_plugin = pytest.mark.parametrize("plugin", PLUGINS, ids=lambda p: p.name)

# Words of core that hold a plugin's name but mean something else. Each needs its reason.
OTHER_MEANINGS = {
    "get_mtp_target_hidden_states": "a method that target models of transformers may have",
}
# Tables of what other engines call things. Their keys are quoted to be refused with a reason, or
# to pass if they ask for nothing, so they hold names of methods that core knows nothing of.
FOREIGN_KEYS = ("core/config_keys.py", "core/llm_keys.py")


# --- reading --------------------------------------------------------------


@functools.cache
def pyproject(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', '?')}"


class Import(NamedTuple):
    """One imported thing: `from a.b import c` is the module `a.b` and the full name `a.b.c`."""

    module: str
    full: str
    place: str


def imports(path: Path, package: str, home: Path) -> Iterator[Import]:
    """Every import of a file, relative ones spelt out, those under TYPE_CHECKING included."""
    inside = path.relative_to(home).parent.parts
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, alias.name, where(path, node))
        elif isinstance(node, ast.ImportFrom):
            parts = [node.module] if node.module else []
            if node.level:
                above = (package, *inside)
                parts = [*above[: len(above) - node.level + 1], *parts]
            module = ".".join(parts)
            for alias in node.names:
                yield Import(module, f"{module}.{alias.name}", where(path, node))


def all_imports(folder: Path, package: str) -> list[Import]:
    return [found for path in sources(folder) for found in imports(path, package, folder)]


def top(name: str) -> str:
    return name.partition(".")[0]


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


# --- who imports whom -----------------------------------------------------


def test_kernels_import_torch_and_triton_and_nothing_of_ours() -> None:
    allowed = {"specdec_kernels", "torch", "triton", *sys.stdlib_module_names}
    found = all_imports(ROOT / "kernels", "specdec_kernels")
    wrong = [f"{i.place} imports {i.full}" for i in found if top(i.module) not in allowed]
    assert wrong == [], "kernels/ depends on torch, triton and the standard library alone"


def test_core_imports_no_plugin() -> None:
    found = all_imports(ROOT / "core", "specdec")
    wrong = [f"{i.place} imports {i.full}" for i in found if i.module.startswith("specdec_plugin")]
    assert wrong == [], "core finds plugins by their entry points and never by import"


def test_the_contract_does_not_lean_on_the_runner() -> None:
    contract = [p for p in ROOT.glob("core/*.py") if p.stem in ("config", "hookspecs", "types")]
    found = [i for path in contract for i in imports(path, "specdec", ROOT / "core")]
    wrong = [f"{i.place} imports {i.full}" for i in found if within(i.full, "specdec.runner")]
    assert wrong == [], "the runner is built on these modules; pass a value or a callable instead"


@each_plugin
def test_plugin_imports_public_names_only(plugin: Path) -> None:
    own = f"specdec_plugin_{plugin.name}"
    wrong = []
    for i in all_imports(plugin / own, own):
        private = any(p.startswith("_") and not p.startswith("__") for p in i.full.split("."))
        if top(i.module).startswith("specdec_plugin_") and top(i.module) != own:
            wrong.append(f"{i.place} imports another plugin, {i.full}")
        elif within(i.full, "specdec.runner"):
            wrong.append(f"{i.place} imports the runner, {i.full}")
        elif top(i.module) in ("specdec", "specdec_kernels") and private:
            wrong.append(f"{i.place} imports a private name, {i.full}")
    assert wrong == [], "a plugin sees the public names of specdec and specdec_kernels, no others"


def test_nothing_is_imported_by_its_folder_name() -> None:
    loaded = [name for name in ("core", "kernels") if name in sys.modules]
    assert loaded == [], "core/ is imported as specdec and kernels/ as specdec_kernels"


# --- core does not know the methods ---------------------------------------


def words(module: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Every identifier and every string that the program can see; docstrings are for people."""
    prose = {
        id(node.value)
        for node in ast.walk(module)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in prose:
                yield node.value, node
            continue
        for _, value in ast.iter_fields(node):
            for word in value if isinstance(value, list) else [value]:
                if isinstance(word, str):
                    yield word, node


def naming(module: ast.Module, names: set[str]) -> Iterator[tuple[str, ast.AST]]:
    """The words that hold one of the names, in either spelling of a dash."""
    for word, node in words(module):
        rest = word.casefold().replace("-", "_")
        for innocent in OTHER_MEANINGS:
            rest = rest.replace(innocent, "")
        if any(name in rest for name in names):
            yield word, node


def method_names(plugin: Path) -> set[str]:
    declared = pyproject(plugin)["project"].get("entry-points", {}).get(GROUP, {})
    return {name.casefold().replace("-", "_") for name in (plugin.name, *declared)}


@each_plugin
def test_core_and_kernels_never_name_the_method(plugin: Path) -> None:
    found = [
        f"{where(path, node)}: {word!r}"
        for path in sources(ROOT / "core") + sources(ROOT / "kernels")
        if str(path.relative_to(ROOT)) not in FOREIGN_KEYS
        for word, node in naming(tree(path), method_names(plugin))
    ]
    assert found == [], (
        f"core decides from capabilities, never from the name {plugin.name!r}. If the word means "
        "something else, add it to OTHER_MEANINGS with the reason."
    )


def test_what_is_exempt_is_there() -> None:
    found = {
        word.casefold()
        for path in sources(ROOT / "core") + sources(ROOT / "kernels")
        for word, _ in words(tree(path))
    }
    gone = [word for word in OTHER_MEANINGS if not any(word in other for other in found)]
    assert gone == [], "no longer in core: drop it from OTHER_MEANINGS"
    for name in FOREIGN_KEYS:
        kinds = {type(node) for node in tree(ROOT / name).body}
        assert ast.ClassDef not in kinds, f"{name} is exempt as a table; move the code"


def test_the_search_for_names_sees_code_and_skips_prose() -> None:
    seen = 'def f(foo_k, *, a):\n    # foo\n    return a.myfoo(FOO="a foo", b=f"{a}-Foo")\n'
    spared = '"""foo"""\nclass A:\n    """foo"""\n    x = 1\n    """foo: what x is"""\n'
    hits = sorted(word for word, _ in naming(ast.parse(seen), {"foo"}))
    assert hits == ["-Foo", "FOO", "a foo", "foo_k", "myfoo"]
    assert list(naming(ast.parse(spared), {"foo"})) == []


# --- one name, one version ------------------------------------------------


@each_plugin
def test_plugin_has_one_name_everywhere(plugin: Path) -> None:
    name, package = plugin.name, f"specdec_plugin_{plugin.name}"
    project = pyproject(plugin)["project"]
    assert project["name"] == f"specdec-plugin-{name.replace('_', '-')}"
    assert (plugin / package / "__init__.py").is_file()
    assert (plugin / package / "py.typed").is_file(), "mypy takes untyped packages for Any"
    declared = project["entry-points"][GROUP]
    assert name in declared
    for alias, value in declared.items():
        assert re.fullmatch(rf"{package}(\.\w+)*:\w+", value), f"{alias} points outside: {value}"


def test_every_pyproject_has_the_same_version() -> None:
    versions = {str(f.relative_to(ROOT)): pyproject(f)["project"]["version"] for f in PLUGINS}
    versions["."] = pyproject(ROOT)["project"]["version"]
    assert len(set(versions.values())) == 1, versions


def test_every_pyproject_wants_the_same_python() -> None:
    wanted = {str(f.relative_to(ROOT)): pyproject(f)["project"]["requires-python"] for f in PLUGINS}
    wanted["."] = pyproject(ROOT)["project"]["requires-python"]
    assert len(set(wanted.values())) == 1, wanted


@each_plugin
def test_plugin_accepts_the_core_beside_it(plugin: Path) -> None:
    needs = [Requirement(text) for text in pyproject(plugin)["project"]["dependencies"]]
    core = pyproject(ROOT)["project"]
    (on_core,) = [n for n in needs if n.name == core["name"]]
    assert on_core.specifier.contains(core["version"], prereleases=True)
    assert not on_core.specifier.contains("99"), "the hooks may change: give an upper bound"


@pytest.mark.parametrize("folder", [ROOT, *PLUGINS], ids=lambda p: p.name if p != ROOT else "core")
def test_installed_metadata_is_that_of_the_checkout(folder: Path) -> None:
    project = pyproject(folder)["project"]
    dist = importlib.metadata.distribution(project["name"])
    entries = {(e.group, e.name): e.value for e in dist.entry_points if e.group.startswith(GROUP)}
    declared = {
        (group, name): value
        for group, names in project.get("entry-points", {}).items()
        for name, value in names.items()
        if group.startswith(GROUP)
    }
    assert (dist.version, entries) == (project["version"], declared), "run: make setup"


# --- nothing of the machine it was written on -----------------------------

# Absolute paths that mean the same everywhere, or nothing anywhere.
EVERYWHERE = "bin dev etc lib no nowhere proc sys tmp usr var"
# In pieces, so that this file does not find itself.
FOREIGN = re.compile(
    "|".join(
        (
            # an absolute path of two or more parts: not the end of a relative one, nor of a URL
            r"(?:(?<![\w.}\])/~*-])|(?<=file://))/(?!(?:"
            + EVERYWHERE.replace(" ", "|")
            + r")/)[\w.-]+/[\w.-]+",
            r"[A-Z]:\\\\?" + "Users",
            "files" + r"\.pythonhosted\.org",
            "pypi" + r"\.org/simple",
            r"registry\." + r"(?:npmjs|yarnpkg)\.",
            r"https?://" + r"[\w.-]*(?:artifactory|nexus|devpi|pypi-proxy|pypi-mirror)",
            r"https?://" + r"[^/\s:@\"']+:[^/\s@\"']+@",
        )
    )
)


def repository_files() -> list[Path]:
    """What git tracks or would track; without git, everything but hidden and built folders."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
        names = [ROOT / name for name in done.stdout.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        names = []
        for folder, inner, files in os.walk(ROOT):
            skipped = ("__pycache__", "build", "dist")
            inner[:] = [d for d in inner if d == ".ci" or not (d[0] == "." or d in skipped)]
            names += [Path(folder, file) for file in files]
    return [p for p in names if p.is_file() and not p.is_symlink()]


def test_the_search_for_paths_sees_those_of_one_machine_alone() -> None:
    folder = "/" + "home/joe"
    for seen in (
        folder,
        f"cd {folder}/x",
        f"PATH=/bin:{folder}",
        f"'{folder}'",
        f"file://{folder}",
    ):
        assert FOREIGN.search(seen), seen
    for spared in (
        "/tmp/a/b",
        "/proc/self/maps",
        "a/b/c",
        "../a/b",
        "~/a/b",
        "https://a.b/c/d",
        "/x",
    ):
        assert not FOREIGN.search(spared), spared


def test_no_file_tells_of_the_machine_it_was_written_on() -> None:
    found = []
    for path in repository_files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        for hit in FOREIGN.finditer(text):
            line = text.count("\n", 0, hit.start()) + 1
            found.append(f"{path.relative_to(ROOT)}:{line}: {hit.group()}")
    assert found == [], "write paths relative to the checkout; leave registries to pip"
