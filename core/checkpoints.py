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
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError, PluginError, listed
from specdec.plugins import PluginInfo, conflicts, installed, normalise

KINDS = ("arch", "key", "file", "tensor")


class Checkpoint:
    """Names in a checkpoint folder or Hub repository; weights are never read."""

    def __init__(self, model: str, revision: str | None = None) -> None:
        self.model = model
        self.revision = revision
        self.folder = Path(model).expanduser()
        self.is_local = self.folder.is_dir()

    @cached_property
    def files(self) -> list[str]:
        """Names of its files."""
        if self.is_local:
            return sorted(e.name for e in os.scandir(self.folder) if e.is_file())
        from huggingface_hub import list_repo_files

        try:
            return sorted(list_repo_files(self.model, revision=self.revision))
        except Exception as error:  # offline, private, or no such repository
            raise ConfigError(
                f"the checkpoint {self.model!r} is no folder here and could not be listed on the "
                f"Hub ({type(error).__name__}: {error}); name the method, or give a local folder"
            ) from error

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Its config.json; empty if it has none."""
        if "config.json" not in self.files:
            return {}
        if self.is_local:
            path = self.folder / "config.json"
        else:
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(self.model, "config.json", revision=self.revision))
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{path} holds no JSON object")
        return found

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

                metadata = parse_safetensors_file_metadata(
                    self.model, name, revision=self.revision
                )
                names.update(metadata.tensors)
        return sorted(names)

    def matches(self, pattern: str) -> bool:
        """Whether every condition of the pattern holds."""
        return all(self._holds(c) for c in pattern.split("&"))

    def _holds(self, condition: str) -> bool:
        if condition.startswith("!"):
            return not self._holds(condition[1:])
        kind, _, text = condition.partition(":")
        if kind == "arch":
            return text in (self.config.get("architectures") or ())
        if kind == "file":
            return bool(fnmatch.filter(self.files, text))
        if kind == "tensor":
            return bool(fnmatch.filter(self.tensors, text))
        if kind == "key":
            path, _, wanted = text.partition(":")
            value: Any = self.config
            for part in path.split("."):
                if not isinstance(value, Mapping) or part not in value:
                    return False
                value = value[part]
            return not wanted or str(value) == wanted or json.dumps(value) == wanted
        raise PluginError(
            f"the checkpoint pattern {condition!r} is of no known kind (known: {listed(KINDS)})"
        )


def _header(path: Path) -> list[str]:
    """Names in the header of a safetensors file (8 bytes of length, then JSON)."""
    with path.open("rb") as file:
        prefix = file.read(8)
        size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 < size <= path.stat().st_size - 8:
            raise ConfigError(f"{path} is no safetensors file, or it is cut short")
        try:
            header = json.loads(file.read(size))
        except ValueError as error:
            raise ConfigError(f"the header of {path} is broken: {error}") from error
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
        if bare in {normalise(n) for n in info.names} and not Path(model).exists():
            return info.method
    checkpoint = Checkpoint(model, revision)
    hits = [(i, p) for i in known for p in i.patterns if checkpoint.matches(p)]
    matched = {p for _, p in hits}
    for conflict in conflicts(known):
        if any(f"pattern {p!r} " in conflict for p in matched):
            raise PluginError(conflict)
    methods = {i.method for i, _ in hits}
    if len(methods) == 1:
        return methods.pop()
    if methods:
        raise ConfigError(
            f"the checkpoint {model!r} fits several methods ({listed(methods)}); name one: "
            "METHOD:model=..."
        )
    raise ConfigError(
        f"no installed speculator claims the checkpoint {model!r} (architectures: "
        f"{listed(checkpoint.config.get('architectures') or ())}); name the method: "
        f"METHOD:model=... (installed: {listed(n for i in known for n in i.names)})"
    )
