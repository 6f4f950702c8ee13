"""What is published: every wheel and sdist is built as a release would be, and looked into.

About five seconds: each distribution is built as a wheel, as an sdist and as the wheel of that
sdist, then the wheels are installed into a folder and imported there. No network is used.
"""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from configparser import ConfigParser
from email.parser import HeaderParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("hatchling", reason="wheels are built with hatchling, which is not installed")

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [ROOT, *sorted(p.parent for p in ROOT.glob("plugins/*/pyproject.toml"))]
SKIPPED = ("__pycache__", ".pyc")


class Build(NamedTuple):
    """One distribution, built three ways."""

    folder: Path
    project: dict[str, Any]
    wheel: Path
    sdist: Path
    wheel_of_sdist: Path

    @property
    def info(self) -> str:
        """The name of the metadata folder inside the wheel."""
        return f"{self.project['name'].replace('-', '_')}-{self.project['version']}.dist-info"


def run(*args: str | Path, cwd: Path, **env: str) -> str:
    """Run a command, return what it prints; a failure shows everything it said."""
    done = subprocess.run(
        [str(a) for a in args], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True
    )
    said = f"{' '.join(map(str, args))}\n{done.stdout}{done.stderr}"
    assert done.returncode == 0, said
    return done.stdout


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def read(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name).decode("utf-8")


def files(folder: Path, name: str) -> set[str]:
    """A package's files under its import name."""
    found = (p for p in folder.rglob("*") if p.is_file())
    return {
        f"{name}/{p.relative_to(folder).as_posix()}"
        for p in found
        if not any(part in str(p) for part in SKIPPED)
    }


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Build]:
    made = tmp_path_factory.mktemp("dist")
    again = tmp_path_factory.mktemp("dist-of-sdist")
    for folder in FOLDERS:
        run(sys.executable, "-m", "hatchling", "build", "-d", made, cwd=folder)
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    sdists = sorted(made.glob("*.tar.gz"))
    run(sys.executable, "-m", "pip", "wheel", *offline, "-w", again, *sdists, cwd=made)
    result = {}
    for folder in FOLDERS:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        stem = f"{project['name'].replace('-', '_')}-{project['version']}"
        wheel = f"{stem}-py3-none-any.whl"
        paths = (made / wheel, made / f"{stem}.tar.gz", again / wheel)
        assert all(p.is_file() for p in paths), sorted(made.iterdir()) + sorted(again.iterdir())
        result[folder] = Build(folder, project, *paths)
    return result


@pytest.fixture(params=FOLDERS, ids=lambda p: p.name if p != ROOT else "core")
def build(request: pytest.FixtureRequest, builds: dict[Path, Build]) -> Build:
    return builds[request.param]


def test_wheel_holds_the_packages_and_nothing_else(build: Build) -> None:
    if build.folder == ROOT:
        packages = {"specdec": ROOT / "core", "specdec_kernels": ROOT / "kernels"}
    else:
        package = f"specdec_plugin_{build.folder.name}"
        packages = {package: build.folder / package}
    expected = set().union(*(files(folder, name) for name, folder in packages.items()))
    assert {f"{name}/py.typed" for name in packages} <= expected
    inside = {name for name in names(build.wheel) if not name.startswith(f"{build.info}/")}
    assert inside == expected


def test_wheel_of_the_sdist_is_the_wheel(build: Build) -> None:
    assert names(build.wheel_of_sdist) == names(build.wheel)


def test_sdist_holds_no_link_and_no_build_product(build: Build) -> None:
    with tarfile.open(build.sdist) as archive:
        members = archive.getmembers()
    assert [m.name for m in members if not (m.isfile() or m.isdir())] == []
    assert [m.name for m in members if any(part in m.name for part in SKIPPED)] == []


def test_wheel_metadata_says_what_pyproject_says(build: Build) -> None:
    headers = HeaderParser().parsestr(read(build.wheel, f"{build.info}/METADATA"))
    assert headers["License-Expression"] == "Apache-2.0"
    assert headers["Requires-Python"] == build.project["requires-python"]
    needed = headers.get_all("Requires-Dist", [])
    always = [line for line in needed if "extra ==" not in line]
    extras = build.project.get("optional-dependencies", {})
    assert len(always) == len(build.project["dependencies"])
    assert len(needed) - len(always) == sum(map(len, extras.values()))
    assert headers.get_all("Provides-Extra", []) == sorted(extras)
    entries = ConfigParser(delimiters=("=",))
    entries.optionxform = str  # type: ignore[assignment, method-assign]  # keep the case of names
    if f"{build.info}/entry_points.txt" in names(build.wheel):
        entries.read_string(read(build.wheel, f"{build.info}/entry_points.txt"))
    declared = dict(build.project.get("entry-points", {}))
    if "scripts" in build.project:
        declared["console_scripts"] = build.project["scripts"]
    assert {group: dict(entries[group]) for group in entries.sections()} == declared


def test_core_carries_its_licence(builds: dict[Path, Build]) -> None:
    core = builds[ROOT]
    assert f"{core.info}/licenses/LICENSE" in names(core.wheel)


@pytest.fixture(scope="session")
def site(builds: dict[Path, Build], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels installed in it, as on a machine without a package index."""
    folder = tmp_path_factory.mktemp("site")
    options = ("--no-deps", "--no-index", "--no-compile", "--quiet", "--target", folder)
    wheels = [build.wheel for build in builds.values()]
    run(sys.executable, "-m", "pip", "install", *options, *wheels, cwd=folder)
    return folder


def python(site: Path, code: str) -> list[str]:
    """Run code with the wheels and the dependencies on the path, and the checkout off it.

    -S leaves out the path files by which an editable install finds the checkout, -P the current
    folder.
    """
    dependencies = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    path = os.pathsep.join([str(site), *dependencies])
    command = (sys.executable, "-S", "-P", "-c", code)
    return run(*command, cwd=site, PYTHONPATH=path, TRITON_INTERPRET="1").split("\n")[:-1]


def test_wheels_import_without_the_checkout(site: Path) -> None:
    packages = ["specdec", "specdec_kernels", *(f"specdec_plugin_{f.name}" for f in FOLDERS[1:])]
    code = "".join(f"import {name}\nprint({name}.__file__)\n" for name in packages)
    lines = python(site, code)
    assert lines == [str(site / package / "__init__.py") for package in packages]


@pytest.mark.parametrize("plugin", FOLDERS[1:], ids=lambda p: p.name)
def test_installed_plugin_is_found_and_loads(site: Path, plugin: Path) -> None:
    project = tomllib.loads((plugin / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    value = project["entry-points"]["specdec.plugins"][plugin.name]
    code = (
        "from importlib.metadata import entry_points\n"
        f"(entry,) = entry_points(group='specdec.plugins', name={plugin.name!r})\n"
        "print(entry.value, entry.load().__module__.partition('.')[0])"
    )
    (line,) = python(site, code)
    assert line == f"{value} specdec_plugin_{plugin.name}"
