"""Keep Python's garbage collector out of a step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Put cyclic garbage collection off until the end, unless it is off already.

    A step makes thousands of short-lived objects, so the collector would start several times in it
    and walk through what a model and its libraries hold. What is due then runs after the step.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
