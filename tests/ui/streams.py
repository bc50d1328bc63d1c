"""Server-sent events as a page gets them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette

PATIENCE_S = 60.0


class Watcher:
    """A page, with the events that it has received."""

    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self.stream = stream
        self.told: list[tuple[str, Any]] = []
        self.place = ""

    async def until(self, wanted: Callable[[str, Any], bool]) -> Any:
        """Read up to the first event of this kind, and return its data."""

        async def look() -> Any:
            async for data in self.stream:
                for block in data.decode().split("\n\n"):
                    fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line and line[0] != ":")
                    if "event" in fields:
                        self.place = fields.get("id", self.place)
                        value = json.loads(fields["data"])
                        self.told.append((fields["event"], value))
                        if wanted(fields["event"], value):
                            return value
            raise AssertionError(f"the stream has ended: {self.told}")

        return await asyncio.wait_for(look(), PATIENCE_S)

    async def line(self, text: str) -> Any:
        return await self.until(lambda event, value: event == "log" and any(text in line[2] for line in value["lines"]))

    def lines(self) -> list[str]:
        return [line[2] for event, value in self.told if event == "log" for line in value["lines"]]


@contextlib.asynccontextmanager
async def opened(app: Starlette, cookie: str, path: str) -> AsyncIterator[Watcher]:
    """A stream of the application; in the end its reader closes it."""
    told: asyncio.Queue[bytes | None] = asyncio.Queue()
    gone = asyncio.Event()
    route, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": "GET",
        "path": route,
        "raw_path": route.encode(),
        "query_string": query.encode(),
        "headers": [(b"host", b"127.0.0.1:7223"), (b"cookie", cookie.encode())],
    }

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200, message
        else:
            await told.put(message["body"])

    async def bodies() -> AsyncIterator[bytes]:
        while (body := await told.get()) is not None:
            yield body

    task = asyncio.create_task(app(scope, receive, send))
    task.add_done_callback(lambda _: told.put_nowait(None))
    try:
        yield Watcher(bodies())
    finally:
        gone.set()
        await task
