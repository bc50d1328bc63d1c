"""Helpers that several views use: the run in a path, numbers in a query, event streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from pathlib import Path
from urllib.parse import parse_qs, unquote_to_bytes

from anyio import from_thread
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from paceline.runs import store
from paceline.runs.folder import RunFolder
from paceline.runs.ids import check_run_id
from paceline.runs.record import ACTS_FOR, RunRecord
from paceline.ui import render, run_page
from paceline.ui.members import OWN
from paceline.ui.pieces import Look, PagePiece, PiecesSeen, stamp_of
from paceline.ui.visitors import need, permit, visitor_of
from paceline.workspace import Workspace

#: Minimum and maximum of the query parameter `px`, the width of a chart. It limits the number of points of a curve.
_PIXELS = (50, 4000)
#: Maximum number of characters of a run's name, of a tag's key, or of a tag's value.
LONGEST_TAG = 500

#: Maximum seconds for which a page waits for a refresh of the index. A list receives later changes by its event stream.
PATIENCE_S = 0.4

#: A function that returns the values for the template of one part of a run's page.
Find = Callable[[RunFolder, RunRecord], render.TemplateValues]


def runs_dir(request: Request) -> Path:
    folder: Path = request.app.state.workspace_dir / "runs"
    return folder


def workspace_of(request: Request) -> Workspace:
    return Workspace(request.app.state.workspace_dir, create=False)


def folder_of(request: Request) -> RunFolder:
    """Return the run whose full id is in the path.

    Raises:
        RunNotFoundError, FileNameError: The workspace has no run with this id.
    """
    run_id = check_run_id(request.path_params["run_id"])
    folder = RunFolder(runs_dir(request) / run_id)
    return folder if folder.state.exists() else store.find(runs_dir(request), run_id)


def number(request: Request, name: str) -> float | None:
    """Return the number in the query parameter `name`; None if missing.

    Raises:
        HTTPException: The value is not a number (400).
    """
    text = request.query_params.get(name, "")
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise HTTPException(400, f"{name}={text!r} is not a number.") from None


def whole(request: Request, name: str, default: int, *, least: int = 0, most: int = 10**9) -> int:
    """Return the query parameter `name` as a number within limits; `default` if missing.

    Raises:
        HTTPException: The value is not a whole number (400).
    """
    text = request.query_params.get(name, "")
    try:
        return min(max(int(text), least), most) if text else default
    except ValueError:
        raise HTTPException(400, f"{name}={text!r} is not a whole number.") from None


def curve_query(request: Request) -> run_page.CurveQuery:
    """Return the curves that a URL requests: `name` (several), `axis`, `from`, `to`, `px`, `whole`.

    Raises:
        HTTPException: A value is not a number (400).
    """
    low, high = number(request, "from"), number(request, "to")
    return run_page.CurveQuery(
        names=request.query_params.getlist("name"),
        axis=request.query_params.get("axis", "step"),
        window=None if low is None or high is None else (low, high),
        pixels=sys.maxsize
        if request.query_params.get("whole")
        else whole(request, "px", 500, least=_PIXELS[0], most=_PIXELS[1]),
    )


def reader_check(request: Request) -> Callable[[], None]:
    """Return a function that raises HTTPException once the browser has disconnected.

    A view calls this function in the view's thread.
    """
    next_s = 0.0

    def check() -> None:
        nonlocal next_s
        # Check for a disconnect only every 0.2 s, because a check takes longer than reading a block of a log.
        if time.monotonic() < next_s:
            return
        next_s = time.monotonic() + 0.2
        if from_thread.run(request.is_disconnected):
            raise HTTPException(499, "The reader has closed the connection.")

    return check


class EventStream(Response):
    """A response of server-sent events. It ends with the events, browser or server.

    This class is faster than Starlette's StreamingResponse, which passes each event through four layers.
    """

    media_type = "text/event-stream"

    def __init__(self, stream: AsyncGenerator[bytes, None], closing: asyncio.Event) -> None:
        # This header asks proxies not to buffer the events.
        super().__init__(headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._stream, self._closing = stream, closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        tasks = [
            asyncio.ensure_future(one) for one in (self._tell(send), self._until_gone(receive), self._closing.wait())
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            await self._stream.aclose()
        if isinstance(ends[0], Exception) and not isinstance(ends[0], OSError):
            raise ends[0]
        with contextlib.suppress(OSError):
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _tell(self, send: Send) -> None:
        async for data in self._stream:
            await send({"type": "http.response.body", "body": data, "more_body": True})

    @staticmethod
    async def _until_gone(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


def events(request: Request, stream: AsyncGenerator[bytes, None]) -> EventStream:
    return EventStream(stream, request.app.state.closing)


def pieces(request: Request, look: Look, look_s: float | None = None) -> EventStream:
    """Stream the changed parts of a page, which `look` returns every `look_s` seconds.

    Visitors who see the same forms share one poll. The forms depend on the member, and on the use of a share link.
    """
    key = f"{'shared' * render.is_shared(request)}{visitor_of(request)}{request.url.path}"
    return events(request, request.app.state.pieces.follow(key, look, place_of(request), look_s))


def place_of(request: Request) -> str:
    """Return the id of the last event that a reconnecting browser has, or ""."""
    return request.headers.get("last-event-id") or request.query_params.get("place", "")


def as_json(value: object) -> Response:
    """Return a JSON response in ASCII, as names may have lone surrogates."""
    return Response(json.dumps(value, separators=(",", ":")), media_type="application/json")


def file_name(request: Request, part: str) -> str:
    """Return the file name after `/<part>/` in the path, which may have any bytes."""
    raw = request.scope.get("raw_path", b"").partition(f"/{part}/".encode())[2]
    return os.fsdecode(unquote_to_bytes(raw))


def refuse_read_only(request: Request) -> None:
    """Raise HTTPException (403) if the sender of a form may change nothing."""
    need(request, OWN)
    if request.app.state.config.read_only:
        raise HTTPException(403, "This server only shows the workspace: it was started with --read-only.")
    if render.is_shared(request):
        raise HTTPException(403, "This link only shows pages. It changes nothing.")


async def form_of(request: Request) -> dict[str, str]:
    """Return the last value of each field of a form."""
    return {name: values[-1] for name, values in (await fields_of(request)).items()}


async def fields_of(request: Request) -> dict[str, list[str]]:
    """Check that the sender may send the form. Return {field: values}.

    Raises:
        HTTPException: The form is from another site, the server is read-only, or the sender may not change this (403).
    """
    refuse_read_only(request)
    # Parse the form here: it has few fields, which do not justify a dependency on python-multipart.
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        raise HTTPException(415, "A form is sent as application/x-www-form-urlencoded.")
    fields = parse_qs((await request.body()).decode("utf-8", "replace"), keep_blank_values=True)
    key, visitor = fields.get("form_key", [""])[-1], visitor_of(request)
    if not visitor.is_script and not request.app.state.token.is_form_key(key, visitor.name):
        raise HTTPException(
            403,
            "This form belongs to another server, or to a page that was opened before the token changed. Reload the page.",
        )
    folder = folder_of(request) if "run_id" in request.path_params else None
    await asyncio.to_thread(permit, request, {name: values[-1] for name, values in fields.items()}, folder)
    ACTS_FOR.set(visitor.name)
    return fields


def refuse_unknown_fields(form: Iterable[str], known: Iterable[str]) -> None:
    """Raise HTTPException (400) if a form has an unknown field."""
    if unknown := sorted({*form} - {"form_key", *known}):
        raise HTTPException(400, f"The form has an unknown field {unknown[0]!r}. Reload the page.")


def digits(text: str) -> int | None:
    """Return a text of 1 to 9 digits as a number, else None."""
    # Don't use `isdigit`: it accepts superscripts, which int() refuses. int() also refuses more than 4,300 digits.
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def whole_number(form: Mapping[str, str], name: str) -> int | None:
    """Return the whole number in a form's field; None if empty.

    Raises:
        HTTPException: The text is not a whole number (400).
    """
    text = form.get(name, "").strip()
    found = digits(text)
    if text and found is None:
        raise HTTPException(400, f"{name} must be a whole number, got {text[:40]!r}.")
    return found


def tag_of(form: Mapping[str, str]) -> tuple[str, str | None, str]:
    """Return a form's tag change: (new key, value or None, key to remove).

    A missing key is "".

    Raises:
        HTTPException: The key or the value is too long (400).
    """
    key, value, gone = (form.get(name, "").strip() for name in ("key", "value", "remove"))
    if max(len(key), len(value)) > LONGEST_TAG:
        raise HTTPException(400, f"A tag and its value have at most {LONGEST_TAG} characters each.")
    return key, value or None, gone


def routes(name: str, find: Find) -> list[Route]:
    """Return the routes of a run's page `name` and its live changes.

    find: A function that gets a run and returns the values for the page's template.
    """
    path = f"/runs/{{run_id}}/{name}"
    return [
        Route(path, lambda request: page(request, name, find)),
        Route(f"{path}/live", lambda request: live(request, name, find)),
    ]


def page(request: Request, name: str, find: Find) -> Response:
    """Render the page `run_<name>.html`, with `run_<name>_part.html` in it, from the values of `find`."""
    folder = folder_of(request)
    head = run_page.head(folder)
    values = find(folder, head["record"])
    place = f"head:{stamp_of(head)},{name}:{stamp_of(values)}"
    return render.page(request, f"run_{name}.html", tab=name, place=place, **head, **values)


def live(request: Request, name: str, find: Find | None) -> Response:
    """Stream changes of the run's header and, with `find`, of the page's content."""
    folder = folder_of(request)

    def look() -> PiecesSeen:
        head = run_page.head(folder)
        found = {"head": head_piece(request, name, head)}
        if find is not None:
            values = find(folder, head["record"])
            template = f"run_{name}_part.html"
            found[name] = PagePiece(stamp_of(values), lambda: render.text(request, template, **head, **values))
        return PiecesSeen(found, is_over=head["record"].is_terminal)

    look()  # raise errors here: after the beginning of the stream, no error page is possible
    return pieces(request, look)


def head_piece(request: Request, tab: str, head: run_page.RunHead) -> PagePiece:
    """Return the live header of a run's page, with `tab` selected."""
    return PagePiece(stamp_of(head), lambda: render.text(request, "run_head.html", tab=tab, **head))
