#!/usr/bin/env python3
"""Set up, run, test and check the project with nothing but Python and pip.

  python3 tools/dev.py setup          install all, editable, in .venv unless one is active
  python3 tools/dev.py demo [...]     run the demo
  python3 tools/dev.py test [...]     ruff, ruff format, mypy, then pytest: all four run
  python3 tools/dev.py check          the first three
  python3 tools/dev.py wheels         build the wheel of every distribution into dist/
  python3 tools/dev.py clean [--all]  delete caches and builds; with --all the .venv too

All but clean set up first, which is quick when nothing changed. Further arguments of demo and
test go to the demo and to pytest.
"""

# No syntax younger than Python 3.6 in this file: an old interpreter has to get as far as the
# message below, not to a SyntaxError.
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIRES = re.search(
    r'^requires-python = ">=3\.(\d+)"',
    (ROOT / "pyproject.toml").read_text(encoding="utf-8"),
    re.MULTILINE,
)
assert REQUIRES, "pyproject.toml: requires-python is expected to read >=3.N"
OLDEST = (3, int(REQUIRES.group(1)))
if sys.version_info < OLDEST:
    sys.exit(
        "dev.py: this is Python {0}.{1}, specdec needs 3.{2} or newer. Run dev.py with another "
        "one: python3.{2} tools/dev.py setup, or make setup PYTHON=python3.{2}".format(
            *sys.version_info[:2], OLDEST[1]
        )
    )

VENV = ROOT / ".venv"
CPU = ROOT / "constraints" / "cpu.txt"
STAMP = ".specdec-setup"

# What mypy reads besides src/. Folders without Python in them are left out of the call: mypy
# refuses them, and plugins/ is one for somebody who deleted every plugin.
TYPED = ("plugins", "tests", "tools", "benchmarks", "examples", "models")

CACHES = (".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", "build", "dist")

# What pip says when it cannot reach an index. "from versions: none" is its last word then.
OFFLINE = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError"
    r"|Network is unreachable|Temporary failure in name resolution|from versions: none"
)

# Run by the environment's Python: names the editable plugins whose folder is gone.
STALE = """
import importlib.metadata, json, pathlib, sys, urllib.parse, urllib.request
home = pathlib.Path(sys.argv[1])
for dist in importlib.metadata.distributions():
    origin = json.loads(dist.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        url = urllib.parse.urlsplit(origin["url"])
        folder = pathlib.Path(urllib.request.url2pathname(url.path))
        if folder.parent == home and not (folder / "pyproject.toml").is_file():
            print(dist.metadata["Name"])
"""


def say(message: str) -> None:
    print(f"dev.py: {message}", file=sys.stderr, flush=True)


def stop(message: str) -> None:
    sys.exit(f"dev.py: {message}")


def projects() -> list[Path]:
    """The folders that are distributions: the root first, then whichever plugins are there."""
    return [ROOT, *sorted(p.parent for p in ROOT.glob("plugins/*/pyproject.toml"))]


# --- the environment ------------------------------------------------------


def active() -> bool:
    """Whether the running interpreter belongs to an environment its user chose.

    conda's base environment is active in every shell of many people and does not count.
    """
    if sys.prefix != sys.base_prefix:
        return True
    conda = os.environ.get("CONDA_PREFIX")
    chosen = conda and os.environ.get("CONDA_DEFAULT_ENV") != "base"
    return bool(chosen) and Path(sys.prefix) == Path(conda or "")


def python() -> Path:
    """The interpreter to work with: an active environment's, else .venv's."""
    if active():
        return Path(sys.executable)
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def tool(py: Path, name: str) -> Path:
    """An installed command. `python -m` would put the checkout on sys.path as well."""
    return py.with_name(name)


def call(*args: str | Path, **env: str) -> int:
    """Run a command in the checkout and return its exit status."""
    return subprocess.run([str(a) for a in args], cwd=ROOT, env={**os.environ, **env}).returncode


def run(*args: str | Path, **env: str) -> None:
    """Run a command in the checkout; its failure, already on the screen, ends dev.py too."""
    status = call(*args, **env)
    if status:
        sys.exit(status)


def pip(py: Path, *args: str | Path) -> None:
    """Run pip, showing only what takes time; on failure show its log and say what to do."""
    # pip's five retries for each of thirty packages are minutes, offline; two ride out a hiccup
    quiet = {"PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off", "PIP_RETRIES": "2"}
    log: list[str] = []
    with subprocess.Popen(
        [str(a) for a in (py, "-m", "pip", *args)],
        cwd=ROOT,
        env={**quiet, **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        assert child.stdout is not None
        for line in map(str.strip, child.stdout):
            if OFFLINE.search(line) and not any(map(OFFLINE.search, log)):
                say("the package index does not answer; pip goes on trying")
            elif line.startswith(("Downloading", "Installing collected")):
                say(line[:92])
            log.append(line)
    if not child.returncode:
        return
    print(*log[-15:], sep="\n", file=sys.stderr)
    if any(map(OFFLINE.search, log)):
        stop(
            "pip could not reach a package index (its words are above). Setting up needs one "
            "once; connect, or point pip to a mirror (PIP_INDEX_URL) or to a folder of wheels "
            "(PIP_FIND_LINKS), and run this again."
        )
    stop("pip failed; its reason is above. Nothing is marked as done: run this again once fixed.")


def usable(py: Path) -> bool:
    """Whether an interpreter is there, has pip and is new enough."""
    probe = [str(py), "-c", f"import pip, sys; sys.exit(sys.version_info < {OLDEST})"]
    return py.exists() and not subprocess.run(probe, stderr=subprocess.DEVNULL).returncode


def create(py: Path) -> None:
    """Make .venv, or make it anew where it is half made or its Python has become too old."""
    if usable(py):
        return
    if active():
        stop(
            f"the active environment {sys.prefix} has no pip. Run `python -m ensurepip` in it, "
            "or deactivate it and let dev.py make .venv."
        )
    say(f"making .venv with Python {sys.version_info[0]}.{sys.version_info[1]}")
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if made.returncode or not usable(py):
        shutil.rmtree(VENV, ignore_errors=True)
        print(made.stdout.strip(), file=sys.stderr)
        stop(
            "this Python cannot make virtual environments (the reason is above). On Debian and "
            f"Ubuntu: apt install python3.{sys.version_info[1]}-venv. Or activate an "
            "environment of your own and run this again."
        )


def digest(constrained: bool) -> str:
    """Everything an installed environment depends on, hashed.

    This file counts, for its pip options; the checkout's place counts, for an environment that
    served another checkout before.
    """
    inputs = [Path(__file__).resolve(), CPU, *(p / "pyproject.toml" for p in projects())]
    parts = [str(ROOT), str(constrained)]
    parts += [f"{p.relative_to(ROOT)}:{hashlib.sha256(p.read_bytes()).hexdigest()}" for p in inputs]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def forget_deleted_plugins(py: Path) -> None:
    """Uninstall plugins whose folder was deleted: their entry points would load nothing."""
    command = [str(py), "-c", STALE, str(ROOT / "plugins")]
    gone = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    if gone:
        say(f"uninstalling {', '.join(gone)}: the folder is gone")
        pip(py, "uninstall", "--yes", *gone)


def setup() -> Path:
    """Create the environment if it is missing and install what changed; return its Python."""
    # torch's CUDA build needs no constraint: a GPU machine keeps the torch and triton it has
    constrained = not shutil.which("nvidia-smi")
    py = python()
    stamp = (Path(sys.prefix) if active() else VENV) / STAMP
    wanted = digest(constrained)
    if stamp.is_file() and stamp.read_text() == wanted and py.exists():
        return py

    if not (ROOT / "src" / "specdec" / "__init__.py").is_file():
        stop(
            "src/specdec is not a link to core/. Your git made plain files of the links in src/: "
            "run `git config core.symlinks true`, then `git checkout -- src` (on Windows with "
            "developer mode on)."
        )
    # first of all: from here until the end the environment is neither the old nor the new one
    stamp.unlink(missing_ok=True)
    create(py)
    say("installing; the first time this fetches torch and takes a minute or more")
    # --group needs pip 25.1. hatchling has to be there because isolated builds are off, which
    # saves a build environment per distribution. No --upgrade: once satisfied, no network.
    pip(py, "install", "pip>=25.1", "hatchling>=1.27")
    args: list[str | Path] = ["--no-build-isolation", "--group", "dev"]
    if constrained:
        args += ["--constraint", CPU]
    for project in projects():
        args += ["--editable", project]
    pip(py, "install", *args)
    forget_deleted_plugins(py)
    # whole or not at all
    partial = stamp.with_name(STAMP + ".part")
    partial.write_text(wanted)
    partial.replace(stamp)
    say(f"ready: {py}")
    return py


# --- the commands ---------------------------------------------------------


def check(py: Path) -> list[str]:
    """Lint and type-check everything; return the names of the checks that failed."""
    typed = ["src", *(name for name in TYPED if any((ROOT / name).rglob("*.py")))]
    # every plugin folder is a root of imports of its own, whatever pyproject.toml lists
    path = os.pathsep.join(str(p) for p in projects()[1:])
    checks = {
        "ruff check": call(tool(py, "ruff"), "check", "."),
        "ruff format": call(tool(py, "ruff"), "format", "--check", "."),
        "mypy": call(tool(py, "mypy"), *typed, MYPYPATH=path),
    }
    return [name for name, status in checks.items() if status]


def test(py: Path, rest: list[str]) -> None:
    """Run every check, then pytest: its closing line comes last, where CI looks for it."""
    failed = check(py)
    if failed:
        say(f"{' and '.join(failed)} failed (above); running the tests all the same")
    # a file is one worker's, so that what its fixtures build is built once; the closing line that
    # CI looks for is pytest's own all the same
    workers = min(os.cpu_count() or 1, 4)
    spread = ["-n", str(workers), "--dist", "loadfile"] if workers > 1 and not rest else []
    status = call(tool(py, "pytest"), *spread, *rest)
    if failed:
        stop(f"{' and '.join(failed)} failed, see above the tests")
    sys.exit(status)


def wheels(py: Path) -> None:
    """Build the wheel of every distribution into dist/, replacing those of earlier builds."""
    dist = ROOT / "dist"
    for old in dist.glob("specdec_*.whl"):
        old.unlink()
    pip(py, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", dist, *projects())
    for wheel in sorted(dist.glob("specdec_*.whl")):
        print(wheel.relative_to(ROOT))


def clean(everything: bool) -> None:
    """Delete what the commands above leave behind; the environment only when asked to."""
    doomed = [ROOT / name for name in CACHES]
    for folder in ("core", "kernels", "plugins", "tests", "tools", "benchmarks", "models"):
        doomed += (ROOT / folder).rglob("__pycache__")
    if everything:
        doomed.append(VENV)
    for path in doomed:
        shutil.rmtree(path, ignore_errors=True)


def main(argv: list[str]) -> None:
    command, rest = (argv[0] if argv else "help"), argv[1:]
    if command in ("help", "-h", "--help"):
        print((__doc__ or "").strip())
    elif command == "demo":
        run(setup(), ROOT / "tools" / "demo.py", *rest)
    elif command == "test":
        test(setup(), rest)
    elif command == "clean" and rest in ([], ["--all"]):
        clean(everything=bool(rest))
    elif command not in ("setup", "check", "wheels"):
        stop(f"no command {' '.join(argv)!r}; there are setup, demo, test, check, wheels, clean")
    elif rest:
        stop(f"{command} takes no arguments, got {' '.join(rest)}")
    elif command == "setup":
        setup()
    elif command == "check":
        sys.exit(1 if check(setup()) else 0)
    else:
        wheels(setup())


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit("\ndev.py: interrupted; run it again, it takes up where it has to")
