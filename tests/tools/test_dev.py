"""What tools/dev.py decides; nothing is installed here, `make setup` itself does that."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).resolve().parents[2] / "tools" / "dev.py"


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, pointed at a small checkout in a temporary folder."""
    spec = importlib.util.spec_from_file_location("specdec_dev", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for folder in ("constraints", "plugins/one", "plugins/two", "src/specdec", "tests", "tools"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("pyproject.toml", "plugins/one/pyproject.toml", "plugins/two/pyproject.toml"):
        (tmp_path / file).write_text(f"# {file}\n")
    (tmp_path / "constraints" / "cpu.txt").write_text("torch==1\n")
    (tmp_path / "src" / "specdec" / "__init__.py").touch()
    (tmp_path / "tools" / "dev.py").touch()
    for name, value in {"ROOT": tmp_path, "VENV": tmp_path / ".venv"}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "CPU", tmp_path / "constraints" / "cpu.txt")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "tools" / "dev.py"))
    # as if no environment were active, so that nothing here can touch the real one
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    return module


@pytest.fixture
def stamp(dev: ModuleType) -> Path:
    """The path of the stamp, beside an interpreter that is there."""
    python: Path = dev.python()
    python.parent.mkdir(parents=True)
    python.touch()
    return Path(dev.VENV / dev.STAMP)


def test_setup_installs_once_and_again_after_a_change(
    dev: ModuleType, stamp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(dev, "create", lambda py: None)
    monkeypatch.setattr(dev, "forget_deleted_plugins", lambda py: None)
    monkeypatch.setattr(dev, "pip", lambda py, *args: calls.append(" ".join(map(str, args))))
    monkeypatch.setattr(dev.shutil, "which", lambda name: None)
    dev.setup()
    assert len(calls) == 2
    assert f"--editable {dev.ROOT} --editable {dev.ROOT / 'plugins' / 'one'}" in calls[1]
    assert f"--constraint {dev.CPU}" in calls[1]
    dev.setup()
    assert len(calls) == 2
    monkeypatch.setattr(dev.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    dev.setup()
    assert len(calls) == 4
    assert "--constraint" not in calls[3]
    (dev.ROOT / "plugins" / "two" / "pyproject.toml").unlink()
    dev.setup()
    assert len(calls) == 6
    assert "two" not in calls[5]


def test_interrupted_setup_leaves_no_stamp(
    dev: ModuleType, stamp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(py: Path, *args: object) -> None:
        raise KeyboardInterrupt

    stamp.write_text("of an earlier setup")
    monkeypatch.setattr(dev, "create", lambda py: None)
    monkeypatch.setattr(dev, "pip", interrupt)
    with pytest.raises(KeyboardInterrupt):
        dev.setup()
    assert not stamp.exists()


def test_checkout_without_links_is_refused(dev: ModuleType, stamp: Path) -> None:
    (dev.ROOT / "src" / "specdec" / "__init__.py").unlink()
    with pytest.raises(SystemExit, match=r"core\.symlinks true"):
        dev.setup()


def test_all_checks_and_the_tests_run_though_the_first_fails(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def call(command: Path, *args: str, **env: str) -> int:
        ran.append(command.name)
        return int("format" in args)

    monkeypatch.setattr(dev, "call", call)
    with pytest.raises(SystemExit, match="ruff format failed"):
        dev.test(Path("bin/python"), ["-k", "x"])
    assert ran == ["ruff", "ruff", "mypy", "pytest"]


def test_mypy_is_given_folders_with_python_and_every_plugin_as_a_root(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[tuple[str, ...], dict[str, str]]] = []

    def call(command: Path, *args: str, **env: str) -> int:
        calls.append((args, env))
        return 0

    monkeypatch.setattr(dev, "call", call)
    assert dev.check(Path("bin/python")) == []
    args, env = calls[-1]
    assert args == ("src", "tools")
    assert [Path(p).name for p in env["MYPYPATH"].split(dev.os.pathsep)] == ["one", "two"]


@pytest.mark.parametrize(
    ("argv", "words"), [(["tset"], "no command 'tset'"), (["check", "x"], "takes no arguments")]
)
def test_wrong_command_is_explained(dev: ModuleType, argv: list[str], words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        dev.main(argv)
