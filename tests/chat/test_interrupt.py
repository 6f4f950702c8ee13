"""Ctrl-C while an answer is written."""

from __future__ import annotations

import signal
import threading

import pytest

from specdec.chat.interrupt import Interrupt


def test_the_first_is_noted_and_the_second_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        seen = [interrupt.asked]
        signal.raise_signal(signal.SIGINT)
        seen.append(interrupt.asked)
        assert seen == [False, True]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_elsewhere_than_in_the_main_thread_nothing_is_touched() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def enter() -> None:
        with Interrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]
    assert signal.getsignal(signal.SIGINT) is before
