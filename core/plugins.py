"""Find speculators by the metadata of what is installed, and import only the one asked for."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import attrs

from specdec._structure import shown
from specdec.errors import PluginError, listed, nearest

if sys.version_info >= (3, 12):
    from importlib import metadata
else:
    import importlib_metadata as metadata

if TYPE_CHECKING:
    from specdec.speculator import Speculator

METHODS = "specdec.plugins"
CHECKPOINTS = "specdec.checkpoints"
DISABLE = "SPECDEC_DISABLE_PLUGINS"
OURS = "specdec-core"
UNNAMED = "a distribution without a name"


@attrs.frozen
class PluginInfo:
    """What the metadata of an installed distribution says of one speculator.

    method: the name to show; `aliases` work as well. patterns: checkpoints it claims.
    value: `module:class`, not imported. enabled: not switched off by SPECDEC_DISABLE_PLUGINS,
        which lists methods, aliases or distributions.
    """

    method: str
    aliases: tuple[str, ...]
    value: str
    distribution: str
    version: str
    patterns: tuple[str, ...] = ()
    enabled: bool = True
    entry_point: metadata.EntryPoint = attrs.field(repr=False, eq=False, kw_only=True)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that selects this speculator."""
        return (self.method, *self.aliases)

    def __str__(self) -> str:
        return f"speculator {self.method!r} of {self.distribution} {self.version}"


def normalise(name: str) -> str:
    """Make `Draft-Model` and `draft_model` one name."""
    return name.strip().lower().replace("-", "_")


def installed(found: Iterable[metadata.EntryPoint] | None = None) -> list[PluginInfo]:
    """List the installed speculators by method, from metadata alone: nothing is imported.

    found: entry points of both groups to list instead of the installed ones.

    Raises:
        PluginError: the entry points of some distribution cannot be read.
    """
    methods: dict[tuple[str, str, str], list[metadata.EntryPoint]] = {}
    patterns: dict[tuple[str, str, str], list[str]] = {}
    for point in _entry_points() if found is None else found:
        key = (*_origin(point.dist), point.value)
        if point.group == METHODS:
            methods.setdefault(key, []).append(point)
        else:
            patterns.setdefault(key, []).append(point.name)
    off = disabled()
    infos = []
    for key, points in methods.items():
        name, version, value = key
        # the method a distribution is named after comes first, the rest are aliases
        points.sort(key=lambda p: (not normalise(name).endswith("_" + normalise(p.name)), p.name))
        first, *others = points
        names = {normalise(n) for n in (name, *(p.name for p in points))}
        infos.append(
            PluginInfo(
                method=first.name,
                aliases=tuple(p.name for p in others),
                value=value,
                distribution=name,
                version=version,
                patterns=tuple(sorted(patterns.get(key, ()))),
                enabled=not (names & off or "*" in off),
                entry_point=first,
            )
        )
    return sorted(infos, key=lambda info: (info.method, info.distribution))


def _entry_points() -> list[metadata.EntryPoint]:
    try:
        return [
            *metadata.entry_points(group=METHODS),
            *metadata.entry_points(group=CHECKPOINTS),
        ]
    except Exception as error:  # one broken file stops the scan of all, so find out which
        for dist in metadata.distributions():
            try:
                list(dist.entry_points)
            except Exception as cause:
                name, version = _origin(dist)
                where = getattr(dist, "_path", "an unknown place")
                raise PluginError(
                    f"the entry points of {name} {version} ({where}) cannot be read; reinstall or "
                    f"remove it ({type(cause).__name__}: {cause})"
                ) from cause
        raise PluginError(f"the installed distributions cannot be listed: {error}") from error


def _origin(dist: Any) -> tuple[str, str]:
    """Name and version of a distribution, which a half-removed one may have lost."""
    try:
        return str(dist.name), str(dist.version)
    except Exception:  # what it is depends on the version of importlib_metadata
        return UNNAMED, "?"


def disabled() -> frozenset[str]:
    """What SPECDEC_DISABLE_PLUGINS switches off: methods, distributions; `*` stands for all."""
    return frozenset(normalise(n) for n in os.environ.get(DISABLE, "").split(",") if n.strip())


def find(method: str, infos: Iterable[PluginInfo] | None = None) -> PluginInfo:
    """Pick the speculator called `method`.

    Raises:
        PluginError: nobody has that name, two distributions claim it, or it is disabled.
    """
    known = installed() if infos is None else list(infos)
    wanted = normalise(method)
    named = [i for i in known if wanted in {normalise(n) for n in i.names}]
    hits = [i for i in named if i.enabled]
    if not named:
        names = [n for i in known if i.enabled for n in i.names]
        # a name can become part of a suggested command only if it could name a distribution
        plain = re.fullmatch(r"[a-z0-9_]+", wanted) is not None
        hint = nearest(wanted, names)
        if not hint and plain:
            name = f"specdec-plugin-{wanted.replace('_', '-')}"
            hint = f"; if somebody publishes it, its distribution is likely called {name}"
        raise PluginError(f"no speculator named {shown(method)}; installed: {listed(names)}{hint}")
    if not hits:
        raise PluginError(f"{named[0]} is switched off by {DISABLE}={os.environ.get(DISABLE)}")
    if len(hits) > 1:
        raise PluginError(claimed("name", method, hits))
    return hits[0]


def conflicts(infos: Iterable[PluginInfo]) -> list[str]:
    """Name every method name and checkpoint pattern that two enabled speculators claim."""
    claims: dict[tuple[str, str], list[PluginInfo]] = {}
    for info in infos:
        if not info.enabled:
            continue
        for name in {normalise(n) for n in info.names}:
            claims.setdefault(("name", name), []).append(info)
        for pattern in info.patterns:
            claims.setdefault(("pattern", pattern), []).append(info)
    return [
        claimed(what, text, who) for (what, text), who in sorted(claims.items()) if len(who) > 1
    ]


def claimed(what: str, text: str, who: Iterable[PluginInfo]) -> str:
    """Say that several speculators claim one name or pattern, and what to do."""
    owners = sorted(f"{i.distribution} {i.version} ({i.value})" for i in who)
    return (
        f"the {what} {text!r} is claimed by {' and '.join(owners)}; uninstall one of them, or "
        f"switch one off by its distribution: {DISABLE}=NAME"
    )


def stray_patterns(found: Iterable[metadata.EntryPoint] | None = None) -> list[str]:
    """Name every checkpoint pattern whose value is no speculator of its distribution."""
    points = list(_entry_points() if found is None else found)
    known = {(*_origin(p.dist), p.value) for p in points if p.group == METHODS}
    return [
        f"the checkpoint pattern {p.name!r} of {' '.join(_origin(p.dist))} stands for {p.value}, "
        f"which is no entry point of the group {METHODS} there"
        for p in points
        if p.group == CHECKPOINTS and (*_origin(p.dist), p.value) not in known
    ]


def unknown_disabled(infos: Iterable[PluginInfo]) -> str | None:
    """Say so if SPECDEC_DISABLE_PLUGINS names something that is not installed."""
    known = {normalise(n) for i in infos for n in (*i.names, i.distribution)}
    unknown = disabled() - known - {"*"}
    return f"{DISABLE} names {listed(unknown)}, not installed" if unknown else None


def load(info: PluginInfo) -> type[Speculator]:
    """Import one speculator's class; no other plugin is imported.

    Raises:
        PluginError: its import failed (the cause is chained), or it is no speculator class.
    """
    from specdec.speculator import Speculator

    try:
        found = info.entry_point.load()
    except (Exception, SystemExit) as error:  # whatever a module raises while it is imported
        raise PluginError(
            f"{info} ({info.value}) failed to import: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Speculator)):
        raise PluginError(
            f"{info}: the entry point {info.value} gives {shown(found)}; "
            "it has to name a subclass of specdec.Speculator"
        )
    return found


def shadowed() -> str | None:
    """Say so if a foreign distribution owns the import name `specdec` as well."""
    try:
        foreign = metadata.distribution("specdec")
    except metadata.PackageNotFoundError:
        return None
    return (
        f"the distribution 'specdec' {_origin(foreign)[1]} is not ours ({OURS} is) and installs a "
        "package of the same name; uninstall it: pip uninstall specdec"
    )
