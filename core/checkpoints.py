"""Find the method of a checkpoint by the patterns that installed distributions declare.

An entry point of the group `specdec.checkpoints` has a pattern for its name and the speculator
for its value. A pattern is one or more conditions joined by `&`, each negated by a leading `!`::

    arch:LlamaForCausalLMEagle3                  an entry of config.json's "architectures"
    key:speculators_config.algorithm:eagle3      a value in config.json; without it, any value
    file:medusa_lm_head.pt                       a file of the checkpoint (globs work)
    tensor:midlayer.*                            a tensor of its safetensors files (globs work)

Only names are read: of tensors no more than the headers. (`=` cannot stand in the name of an
entry point, so a key and its value are joined by a colon.)
"""

from __future__ import annotations

import fnmatch
import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from specdec._structure import shown
from specdec.errors import ConfigError, PluginError, listed, nearest
from specdec.plugins import PluginInfo, claimed, installed, normalise

KINDS = ("arch", "file", "key", "tensor")
T = TypeVar("T")
_LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library itself


class Checkpoint:
    """Names in a checkpoint folder or Hub repository; weights are never read.

    Only the files at its top are seen.
    """

    def __init__(self, model: str, revision: str | None = None) -> None:
        self.model = model
        self.revision = revision
        self.is_local = is_folder(model)
        self.folder = Path(model).expanduser() if self.is_local else Path(model)

    @cached_property
    def files(self) -> list[str]:
        """Names of its files."""
        if self.is_local:
            try:
                names = os.listdir(self.folder)
            except OSError as error:
                raise ConfigError(f"the folder {self.model!r} cannot be read: {error}") from error
            # a link that leads nowhere, or in a loop, is no file
            return sorted(n for n in names if os.path.isfile(self.folder / n))
        from huggingface_hub import list_repo_files

        found = self._from_hub(
            "listed", lambda: list_repo_files(self.model, revision=self.revision)
        )
        return sorted(name for name in found if "/" not in name)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Its config.json; empty if it has none."""
        if "config.json" not in self.files:
            return {}
        if self.is_local:
            path = self.folder / "config.json"
        else:
            from huggingface_hub import hf_hub_download

            fetch = partial(hf_hub_download, self.model, "config.json", revision=self.revision)
            path = Path(self._from_hub("read", fetch))
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{path} holds no JSON object")
        return found

    @property
    def architectures(self) -> list[str]:
        """The "architectures" of its config.json."""
        found = self.config.get("architectures")
        return [a for a in found if isinstance(a, str)] if isinstance(found, list) else []

    @cached_property
    def tensors(self) -> list[str]:
        """Names of the tensors in its safetensors files."""
        names: set[str] = set()
        for name in self.files:
            if not name.endswith(".safetensors"):
                continue
            if self.is_local:
                names.update(_header(self.folder / name))
            else:
                from huggingface_hub import parse_safetensors_file_metadata

                fetch = partial(
                    parse_safetensors_file_metadata, self.model, name, revision=self.revision
                )
                names.update(self._from_hub("read", fetch).tensors)
        return sorted(names)

    def _from_hub(self, done: str, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except Exception as error:  # offline, private, or no such repository
            raise ConfigError(
                f"the checkpoint {shown(self.model)} is no folder here and could not be {done} on "
                f"the Hub ({type(error).__name__}: {error}); name the method, or give a local "
                "folder"
            ) from error

    def matches(self, pattern: str) -> bool:
        """Whether every condition of the pattern holds."""
        return all(self._holds(c) for c in pattern.split("&"))

    def _holds(self, condition: str) -> bool:
        condition = condition.strip()
        if condition.startswith("!"):
            return not self._holds(condition[1:])
        if problem := pattern_problem(condition):
            raise PluginError(problem)
        kind, _, text = condition.partition(":")
        if kind == "arch":
            return text in self.architectures
        if kind == "file":
            return any(fnmatch.fnmatchcase(name, text) for name in self.files)
        if kind == "tensor":
            return any(fnmatch.fnmatchcase(name, text) for name in self.tensors)
        path, _, wanted = text.partition(":")
        value: Any = self.config
        for part in path.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return False
            value = value[part]
        return not wanted or wanted in (str(value), json.dumps(value))


def pattern_problem(pattern: str) -> str | None:
    """Say what is wrong with a pattern, if anything."""
    for condition in pattern.split("&"):
        kind, _, text = condition.strip().lstrip("!").partition(":")
        if kind not in KINDS or not text:
            return (
                f"the checkpoint pattern {pattern!r} is none{nearest(kind, KINDS)} "
                f"(it takes KIND:TEXT of the kinds {listed(KINDS)}, joined by &)"
            )
    return None


def is_folder(model: str) -> bool:
    """Whether the text names a folder here; text that cannot be a path does not."""
    try:
        return bool(model) and Path(model).expanduser().is_dir()
    except (OSError, RuntimeError, ValueError):  # too long, no such home, a NUL byte
        return False


def _header(path: Path) -> list[str]:
    """Names in the header of a safetensors file (8 bytes of length, then JSON)."""
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 0 < size <= min(path.stat().st_size - 8, _LONGEST_HEADER):
                raise ConfigError(f"{path} is no safetensors file, or it is cut short")
            header = json.loads(file.read(size))
    except (ValueError, RecursionError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the header of {path} cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise ConfigError(f"the header of {path} holds no JSON object")
    return [name for name in header if name != "__metadata__"]


def detect(
    model: str, revision: str | None = None, infos: Iterable[PluginInfo] | None = None
) -> str:
    """Return the method that the checkpoint is for.

    A model that is just the name of an installed method, in brackets or not, is that method.

    Raises:
        ConfigError: nobody, or more than one method, claims the checkpoint.
        PluginError: two distributions claim the pattern that matched.
    """
    known = [i for i in (installed() if infos is None else infos) if i.enabled]
    bare = normalise(model.strip("[]"))
    for info in known:
        if bare in {normalise(n) for n in info.names} and not is_folder(model):
            return info.method
    checkpoint = Checkpoint(model, revision)
    hits: dict[str, list[PluginInfo]] = {}
    for info in known:
        for pattern in info.patterns:
            if _matches(checkpoint, pattern, info):
                hits.setdefault(pattern, []).append(info)
    for pattern, owners in hits.items():
        if len(owners) > 1:
            raise PluginError(claimed("pattern", pattern, owners))
    methods = {i.method for owners in hits.values() for i in owners}
    if len(methods) == 1:
        return methods.pop()
    if methods:
        raise ConfigError(
            f"the checkpoint {model!r} fits several methods ({listed(methods)}); name one: "
            "METHOD:model=..."
        )
    raise ConfigError(
        f"no installed speculator claims the checkpoint {model!r} (architectures: "
        f"{listed(checkpoint.architectures)}); name the method: METHOD:model=... "
        f"(installed: {listed(n for i in known for n in i.names)})"
    )


def _matches(checkpoint: Checkpoint, pattern: str, info: PluginInfo) -> bool:
    try:
        return checkpoint.matches(pattern)
    except PluginError as error:
        raise PluginError(
            f"{info} has a broken entry point: {error}; name the method, or remove it"
        ) from error
