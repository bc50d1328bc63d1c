"""An HTTP server for models: a group of processes that `python -m paceline.serving CONFIG.json` starts.

    clients ── front ──┬── model process    one thread, one model
                       ├── model process
                       └── ...

The front is the process that holds all connections. The front runs no user code, and needs starlette and uvicorn. A
model process runs the scoring script or the model, with the model's own interpreter. So its Paceline code needs the
standard library alone. The front sends one request or one batch at a time to a model process, through a socket.
"""

from __future__ import annotations

import mmap

_flag: mmap.mmap | None = None


def watch_client(fd: int) -> None:
    """Let `is_client_disconnected` read `fd`, a file whose byte becomes 1 on a disconnection."""
    global _flag
    _flag = mmap.mmap(fd, 1)


def is_client_disconnected() -> bool:
    """Return True once the client of the current request has disconnected.

    A long `run` in a scoring script may call this function now and then. If the client has disconnected, `run` may
    return early, because the server discards its result. In a function that gets several requests, the result is True
    once the clients of all these requests have disconnected. A call takes less than a microsecond.
    """
    return _flag is not None and _flag[0] == 1
