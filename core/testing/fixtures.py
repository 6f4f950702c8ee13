"""A pytest plugin for authors: `pytest_plugins = ["specdec.testing.fixtures"]`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specdec.testing.checks import assert_lossless


@pytest.fixture
def lossless() -> Callable[..., None]:
    """`lossless("method:key=value")` fails unless the method leaves every token as it was."""
    return assert_lossless
