"""Every error specdec raises on purpose.

SpecdecError
├── ConfigError            a setting is wrong or does not fit another (also a ValueError)
├── PromptError            a prompt or its sampling cannot be served (also a ValueError)
├── PluginError            a speculator cannot be found, imported, registered or trusted
│   └── SpeculatorError    a speculator raised or answered wrongly while it ran
├── ProcessorError         a logits processor of a request raised or answered wrongly
├── TargetError            this model cannot be served
└── OutOfMemoryError       the key-value cache cannot hold what was asked
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SpecdecError(Exception):
    """The root of the tree: catch it to catch everything specdec raises on purpose."""


class ConfigError(SpecdecError, ValueError):
    """A setting is wrong, unknown, or does not fit another one."""


class PromptError(SpecdecError, ValueError):
    """One prompt, or the sampling parameters that came with it, cannot be served."""


class PluginError(SpecdecError):
    """A speculator cannot be found, imported, registered or trusted."""


class SpeculatorError(PluginError):
    """A speculator raised, or answered with something a hook does not allow, while it ran."""


class ProcessorError(SpecdecError):
    """A logits processor that a request brought raised, or answered wrongly, while it ran."""


class TargetError(SpecdecError):
    """This model cannot be served; the message names the model and the reason."""


class OutOfMemoryError(SpecdecError):
    """The key-value cache cannot hold what was asked of it."""


# What a plugin may raise and core turns into an error of its own: `sys.exit` in a plugin is no
# reason to leave the process of whoever uses it. An interrupt by the user passes.
PLUGIN_ERRORS = (Exception, SystemExit)


def blame(who: str, error: BaseException, where: str) -> str:
    """Say `WHO raised TYPE in WHERE: TEXT`, whatever the error's own `__str__` does."""
    try:
        text = str(error)
    except Exception:  # the text of somebody else's error must not hide the error
        text = "(its text cannot be read)"
    return f"{who} raised {type(error).__name__} in {where}: {text}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the closest of `known`, or nothing if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def listed(names: Iterable[str]) -> str:
    """Return the names sorted and joined by commas, or `none`."""
    return ", ".join(sorted(names)) or "none"
