from __future__ import annotations

import gc

import pytest

from specdec.runner.collection import no_collection


def test_collection_waits_for_the_end_of_the_step_also_if_it_fails() -> None:
    def step() -> None:
        with no_collection():
            assert not gc.isenabled()
            raise KeyError

    with pytest.raises(KeyError):
        step()
    assert gc.isenabled()


def test_collection_that_the_user_turned_off_stays_off() -> None:
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
