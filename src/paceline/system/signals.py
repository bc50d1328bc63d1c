"""Signals that are handled for a while."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], object], *numbers: int) -> Iterator[None]:
    """Have these signals handled while the block runs; what was there before comes back however it ends.

    Elsewhere than in the main thread they can't be, and nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
