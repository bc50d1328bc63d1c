"""Limits on connections: their number, their idle time, and the size of a request head.

uvicorn accepts heads of any size, and waits without limit for incomplete requests and for clients that do not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

#: Seconds in which a request's head must arrive, and in which a client must read some bytes of its response.
HEAD_S, READ_S = 15.0, 60.0
#: Seconds in which a body must arrive, plus one second for each `BODY_BYTES_PER_S` received bytes.
BODY_S, BODY_BYTES_PER_S = 30.0, 64 << 10
_LOOK_S = 1.0
#: Maximum number of bytes of a request's path and headers together, because both are held in memory.
HEAD_BYTES = 64 << 10


def protocol(limit: int, log: Callable[[int], None]) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol class, limited to `limit` connections.

    Further connections get status 503 and are closed. The class uses httptools if it is installed. The application may
    set `scope["state"]["connection"].on_lost`, a function that is called when the connection ends.

    log: Called with the HTTP status of each response that the class sends without the application.
    """
    base: Any
    try:
        from uvicorn.protocols.http import httptools_impl

        base = httptools_impl.HttpToolsProtocol
    except ImportError:
        from uvicorn.protocols.http import h11_impl

        base = h11_impl.H11Protocol

    full = raw_answer(
        "503 Service Unavailable", f"all {limit} connections are taken; come again.", "retry-after: 1\r\n"
    )

    class Counted(base):  # type: ignore[misc]
        def __init__(
            self, config: Any, server_state: Any, app_state: dict[str, object], *others: Any, **more: Any
        ) -> None:
            super().__init__(config, server_state, {**app_state, "connection": self}, *others, **more)

        def connection_made(self, transport: Any) -> None:
            self.heard, self.head, self.coming = 0, 0, 0
            self.on_lost: Callable[[], None] | None = None
            self.is_lost = False
            #: HTTP status of the response that was sent instead of the application's response, such as 408, or None.
            self.status: int | None = None
            super().connection_made(transport)
            if len(self.connections) > limit:
                self.refuse(503, full)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.is_lost = True
            if self.on_lost is not None:
                self.on_lost()

        def send_400_response(self, msg: str) -> None:
            is_head = self.cycle is None or self.cycle.response_complete
            if is_head and self.head + self.coming > HEAD_BYTES:
                self.refuse(431, _LARGE)
            else:
                self.refuse(400, raw_answer("400 Bad Request", msg))

        def refuse(self, status: int, answer: bytes) -> None:
            """Send `answer` without calling the application, and close the connection."""
            cycle = self.cycle
            if cycle is None or cycle.response_complete:
                log(status)
            self.status = status
            with contextlib.suppress(OSError, RuntimeError):
                self.transport.write(answer)
                self.transport.close()

        def data_received(self, data: bytes) -> None:
            self.heard += len(data)
            self.coming = len(data)
            super().data_received(data)
            cycle = self.cycle
            if cycle is not None and not cycle.response_complete:
                self.head = 0
                return
            self.head += len(data)
            if self.head > HEAD_BYTES and not self.transport.is_closing():
                self.refuse(431, _LARGE)

    return Counted


def raw_answer(status: str, message: str, headers: str = "") -> bytes:
    body = json.dumps({"message": message}).encode()
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{headers}"
        "connection: close\r\n\r\n"
    )
    return head.encode() + body


async def watch(connections: set[Any]) -> None:
    """Close connections whose request or response makes no progress, until cancelled."""
    slow: dict[Any, _Slow] = {}
    unread: dict[Any, tuple[int, float]] = {}
    while True:
        await asyncio.sleep(_LOOK_S)
        now = time.monotonic()
        for table in (slow, unread):
            for gone in [each for each in table if each not in connections]:
                del table[gone]
        for each in list(connections):
            transport = each.transport
            if transport is None or transport.is_closing():
                continue
            if (size := transport.get_write_buffer_size()) > 0:
                before, since = unread.get(each, (-1, now))
                unread[each] = (size, since if before == size else now)
                if now - unread[each][1] > READ_S:
                    transport.abort()
                    continue
            else:
                unread.pop(each, None)
            cycle = each.cycle
            is_body = cycle is not None and not cycle.response_complete
            # Skip connections that are idle after a response, because uvicorn closes idle connections by its own timer.
            if (is_body and (not cycle.more_body or cycle.response_started)) or (
                not is_body and each.timeout_keep_alive_task is not None
            ):
                slow.pop(each, None)
                continue
            stalled = slow.get(each)
            request = cycle if is_body else None
            if stalled is None or stalled.request is not request:
                slow[each] = _Slow(request, now, each.heard)
            elif now - stalled.since > (
                BODY_S + (each.heard - stalled.heard) / BODY_BYTES_PER_S if is_body else HEAD_S
            ):
                each.refuse(408, _LATE)


class _Slow(NamedTuple):
    request: Any
    since: float
    heard: int


_LARGE = raw_answer("431 Request Header Fields Too Large", f"path and headers have more than {HEAD_BYTES} bytes.")
_LATE = raw_answer("408 Request Timeout", "the request did not come whole in time.")
