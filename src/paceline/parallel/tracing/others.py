"""The random generators that are not torch's: Python's and numpy's, if that is loaded."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Hashable, Iterator


def _numpy_state() -> Hashable:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    state = numpy.random.get_state(legacy=False)["state"]
    return state["key"].tobytes(), state["pos"]


#: Which it is -> its state, which a draw changes.
GENERATORS: tuple[tuple[str, Callable[[], Hashable]], ...] = (
    ("Python's `random`", random.getstate),
    ("numpy's random numbers", _numpy_state),
)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Both are put back when the block ends."""
    own, numpy = random.getstate(), sys.modules.get("numpy")
    others = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(own)
        if numpy is not None:
            numpy.random.set_state(others)
