"""Whether anybody still waits for what the model is computing, as the front says in a byte of shared memory."""

from __future__ import annotations

import mmap

_flag: mmap.mmap | None = None


def watch(fd: int) -> None:
    """Read the front's byte from this file."""
    global _flag
    _flag = mmap.mmap(fd, 1)


def is_client_disconnected() -> bool:
    """Return True once the client of the request that is being computed has disconnected.

    For a scoring script: a long `run` may look now and then, and return early. Its result is thrown away. For a function of
    several requests it is True once the clients of all of them have. A look takes less than a microsecond.
    """
    return _flag is not None and _flag[0] == 1
