"""Remove what a save leaves in the process: the handler of SIGTERM, and the last saved state."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from paceline.checkpoint import leaving, saving
from paceline.checkpoint.leaving import TimeLimit


@pytest.fixture(autouse=True)
def as_if_new(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(leaving, "_is_listening", False)
    monkeypatch.setattr(saving, "_last", None)
    monkeypatch.setattr(saving, "_limit", TimeLimit())
    yield
    saving.wait()
    signal.signal(signal.SIGTERM, before)
    if leaving._pipe is not None:
        signal.set_wakeup_fd(-1)
        # Closing the pipe ends the thread that reads from it.
        os.close(leaving._pipe)
        leaving._pipe = None
