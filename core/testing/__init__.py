"""For authors of speculators: targets whose answer is known, drafters that behave badly, checks.

Nothing here is imported by the rest of specdec. With pytest, one line in `conftest.py` gives
the fixture `lossless`::

    pytest_plugins = ["specdec.testing.fixtures"]
"""

from __future__ import annotations

from specdec.testing.checks import (
    assert_law,
    assert_lossless,
    assert_same_tokens,
    emitted,
)
from specdec.testing.speculators import (
    BigramSpeculator,
    ConstantSpeculator,
    OracleSpeculator,
    PlaceholderSpeculator,
    RaisingSpeculator,
    RecordingSpeculator,
    WrongSpeculator,
)
from specdec.testing.targets import save_tiny_model, tiny_target, toy_target

__all__ = [
    "BigramSpeculator",
    "ConstantSpeculator",
    "OracleSpeculator",
    "PlaceholderSpeculator",
    "RaisingSpeculator",
    "RecordingSpeculator",
    "WrongSpeculator",
    "assert_law",
    "assert_lossless",
    "assert_same_tokens",
    "emitted",
    "save_tiny_model",
    "tiny_target",
    "toy_target",
]
