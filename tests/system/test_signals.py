from __future__ import annotations

import os
import signal
import threading

import pytest

from paceline.system.signals import handled


def test_signal_handlers_are_restored_after_a_with_block_that_raises():
    before, heard = signal.getsignal(signal.SIGHUP), []
    with pytest.raises(RuntimeError), handled(lambda number, frame: heard.append(number), signal.SIGHUP):  # noqa: PT012
        os.kill(os.getpid(), signal.SIGHUP)
        raise RuntimeError
    assert heard == [signal.SIGHUP]
    assert signal.getsignal(signal.SIGHUP) is before


def test_signal_block_outside_the_main_thread_installs_no_handlers():
    ran = threading.Event()

    def run() -> None:
        with handled(lambda number, frame: None, signal.SIGHUP):
            ran.set()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ran.is_set()
