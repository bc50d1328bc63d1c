"""An HTTP server for models: a group of processes that `python -m paceline.serving CONFIG.json` starts.

    clients ── front ──┬── model process    one thread, one model
                       ├── model process
                       └── ...

The front is the process that holds all connections. It runs no user code, and needs starlette and uvicorn. A model
process runs the scoring script or the model. It needs the standard library alone, because its interpreter is the
model's own. Each model process has a socket to the front, which sends it one request or one batch at a time.
"""

from __future__ import annotations

import mmap

_flag: mmap.mmap | None = None


def watch_client(fd: int) -> None:
    """Let `is_client_disconnected` read the file `fd`, whose byte is 1 after a disconnect."""
    global _flag
    _flag = mmap.mmap(fd, 1)


def is_client_disconnected() -> bool:
    """Return True once the client of the current request has disconnected.

    A long `run` in a scoring script may call this now and then, and return early, since the server discards the result.
    In a function that gets several requests, the result is True once all their clients have disconnected. A call takes
    less than a microsecond.
    """
    return _flag is not None and _flag[0] == 1
