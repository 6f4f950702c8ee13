"""The object behind a method's name: its life cycle around the hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs

from specdec.types import Capabilities

if TYPE_CHECKING:
    from typing import Self

    from specdec.config import SpeculatorConfig
    from specdec.types import Pools, RequestChanges, TargetInfo


@attrs.frozen
class NoOptions:
    """Options of a speculator that has none of its own."""


class Speculator:
    """Base class of every speculator: core calls these methods in the order they stand here.

    `load` → `capabilities` → `allocate` → `requests_changed`, between steps, and the hooks of
    `specdec.hookspecs`, once per step → `close`. Only `capabilities` has to be written, and the
    hook `propose`. Instances are compared by identity; one belongs to one runner.
    """

    Options: ClassVar[type] = NoOptions
    """An attrs class: the configuration keys that belong to this method, with defaults."""

    reads_model: ClassVar[bool] = False
    """Whether it loads a checkpoint; the keys `model`, `revision` and `code_revision` are refused
    if not."""

    @classmethod
    def load(cls, target: TargetInfo, config: SpeculatorConfig) -> Self:
        """Build the speculator for this target, reading its checkpoint if it has one.

        target: shapes, dtype, device and modules of the target.
        config: the shared keys, and `config.options`, an instance of `Options`.
        Raise `specdec.ConfigError` or `specdec.PluginError` if the two do not fit, saying why.
        """
        return cls()

    def capabilities(self) -> Capabilities:
        """Say what this speculator needs and does, now that the target is known. Called once."""
        raise NotImplementedError(f"{type(self).__name__}.capabilities is not written")

    def allocate(self, pools: Pools) -> None:
        """Take the memory that the runner set aside. Called once, before the first step."""

    def requests_changed(self, changes: RequestChanges) -> None:
        """Drop what belongs to requests that left their slot, then meet those that got one.

        Called between steps, only if something changed. The rows of a resumed request come by
        again from `RequestInfo.computed` on. If it raises, core tells it of every change alone,
        and a request whose arrival makes it raise ends with an error that names the speculator:
        what was dropped or met already must not spoil the second call.
        """

    def close(self) -> None:
        """Free everything. Called once, also after an error."""
