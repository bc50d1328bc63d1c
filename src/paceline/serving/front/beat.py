"""A sign of life for whoever looks after the server: a byte each second, for as long as its loop goes round."""

from __future__ import annotations

import asyncio
import contextlib
import os

_PAUSE_S = 1.0


async def beat(fd: int) -> None:
    """Write a byte into a pipe each second, until cancelled."""
    os.set_blocking(fd, False)
    while True:
        # Nobody reads, for the moment or any more.
        with contextlib.suppress(OSError):
            os.write(fd, b".")
        await asyncio.sleep(_PAUSE_S)
