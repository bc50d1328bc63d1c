"""The function that Python calls at each call and return (`sys.setprofile`): taken away for a while, and put back."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Nothing is called until the block ends: fake tensors make thousands of calls, each of which would cost one more."""
    before = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        put_back(before)


def put_back(profiler: Any) -> None:
    """Let it be called again, whatever `sys.getprofile` has given."""
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        # Before Python 3.12 cProfile's profiler is no function, and only it can set itself again.
        sys.setprofile(None)
        profiler.enable()
