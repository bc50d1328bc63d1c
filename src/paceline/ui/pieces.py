"""Parts of web pages that update live. The server polls once for all browsers, and sends only changed parts."""

from __future__ import annotations

import asyncio
import hashlib
import html
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from paceline.errors import PacelineError
from paceline.runs.visible import visible
from paceline.ui.feed import message

#: Minimum seconds between two polls.
_LOOK_S = 1.0
_REST = 10.0  # minimum pause, as a multiple of the time that the last poll took
_SILENCE_S = 15.0


@dataclass(frozen=True)
class PagePiece:
    """A part of a page that updates live.

    stamp: A text that changes with the content. make: Returns the part's HTML, with URLs relative to the stream's URL.
    """

    stamp: str
    make: Callable[[], str]


@dataclass(frozen=True)
class PiecesSeen:
    """A page's live parts by name, at one poll. is_over: all are final."""

    pieces: Mapping[str, PagePiece]
    is_over: bool = False

    @property
    def place(self) -> str:
        """Return the parts' names and stamps as text, such as "head:1f..,files:9a..".

        A stream uses this text as the id of its events.
        """
        return ",".join(f"{name}:{piece.stamp}" for name, piece in self.pieces.items())


Look: TypeAlias = Callable[[], PiecesSeen]


def stamp_of(*values: object) -> str:
    """Return a short hash of the `repr` of values, such as records."""
    return hashlib.sha256(repr(values).encode("utf-8", "surrogatepass")).hexdigest()[:16]


class _Watched:
    """The live parts of a page, polled once for all its browsers."""

    def __init__(self, look: Look, look_s: float) -> None:
        self.watchers = 0
        self._look, self._look_s = look, look_s
        self._lock = asyncio.Lock()
        self._next = 0.0
        self._seen = PiecesSeen({})
        self._made: dict[str, tuple[str, str]] = {}

    async def now(self) -> PiecesSeen:
        async with self._lock:
            if (began := time.monotonic()) >= self._next:
                self._seen = await asyncio.to_thread(self._safely)
                ended = time.monotonic()
                self._next = ended + max(self._look_s, _REST * (ended - began))
        return self._seen

    async def html(self, name: str, piece: PagePiece) -> str:
        async with self._lock:
            if self._made.get(name, ("",))[0] != piece.stamp:
                self._made[name] = (piece.stamp, await asyncio.to_thread(piece.make))
            return self._made[name][1]

    def _safely(self) -> PiecesSeen:
        try:
            return self._look()
        # If the page's object, such as a run, can't be read any more, show the error in place of all pieces, and poll further.
        except (PacelineError, OSError) as error:
            text = visible(str(error), lines=True)
            gone = PagePiece(stamp_of(text), lambda: f'<p class="box failure">{html.escape(text)}</p>')
            return PiecesSeen(dict.fromkeys(self._seen.pieces, gone) or {"main": gone})


class PieceStreams:
    """The streams of all pages with live parts, for the event loop."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}

    async def follow(
        self, key: str, look: Look, place: str, look_s: float | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield an event with a part's name and HTML whenever the part changes.

        key: Identifies the page. Browsers with the same key share one poll. look: Returns the page's current parts.
        place: The `PiecesSeen.place` of the parts that the browser has; "" for no parts. look_s: Seconds between two polls.
        """
        look_s = _LOOK_S if look_s is None else look_s
        watched = self._watched.setdefault(key, _Watched(look, look_s))
        watched.watchers += 1
        known = dict(part.split(":", 1) for part in place.split(",") if ":" in part)
        spoke = time.monotonic()
        try:
            yield b"retry: 1000\n\n"
            while True:
                seen = await watched.now()
                for name, piece in seen.pieces.items():
                    if known.get(name) == piece.stamp:
                        continue
                    data = {"name": name, "html": await watched.html(name, piece)}
                    known[name], spoke = piece.stamp, time.monotonic()
                    yield message("part", data, ",".join(f"{one}:{stamp}" for one, stamp in known.items()))
                if seen.is_over:
                    yield message("end", {})
                    return
                if time.monotonic() - spoke > _SILENCE_S:
                    spoke = time.monotonic()
                    yield b": still here\n\n"
                await asyncio.sleep(look_s)
        finally:
            watched.watchers -= 1
            if not watched.watchers and self._watched.get(key) is watched:
                del self._watched[key]
