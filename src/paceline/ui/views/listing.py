"""The page with the list of runs, and its live changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from paceline.runs import states
from paceline.ui import render
from paceline.ui.feed import message
from paceline.ui.index import LIVE, SORTS, Index, IndexEntry, RunQuery, selected
from paceline.ui.latest import LatestValues
from paceline.ui.pieces import stamp_of
from paceline.ui.views.common import events, place_of, whole

#: Number of runs on one page.
ROWS = 100
#: Seconds that a page waits for a refresh of the index. Later changes arrive by the stream.
_PATIENCE_S = 0.4
_LOOK_S = 1.0
_SILENCE_LOOKS = 15

#: Most rendered rows in the cache, about a kilobyte each. A page has a hundred rows.
_MOST = 2000


def query_of(request: Request) -> RunQuery:
    given = request.query_params
    sort = given.get("sort", "")
    return RunQuery(
        text=given.get("q", "")[:200],
        experiment=given.get("experiment", ""),
        state=given.get("state", ""),
        target=given.get("target", ""),
        user=given.get("user", ""),
        tags=tuple(tag for tag in given.getlist("tag") if tag),
        trials=given.get("trials", "") == "1",
        parent=given.get("parent", ""),
        archived=given.get("archived", "") == "1",
        sort=sort if sort.lstrip("-") in SORTS or sort == "created" else "",
        page=whole(request, "page", 1, least=1),
    )


async def page(request: Request) -> Response:
    index: Index = request.app.state.index
    query = query_of(request)
    await _refreshed(index)
    entries = index.entries()
    matching = selected(entries, query)
    root = render.root_of(request.scope["path"])
    rows = await asyncio.to_thread(request.app.state.rows.of, _on_page(matching, query), root)
    return render.page(
        request,
        "runs.html",
        query=query,
        rows=rows.values(),
        place=_place(rows, len(matching)),
        total=len(matching),
        of=len(index.ids),
        # True while the first refresh goes on, which may take long with ten thousand runs.
        is_partial=len(entries) < len(index.ids),
        pages=max(1, -(-len(matching) // ROWS)),
        choices=_choices(entries),
        live=sum(not entry.is_terminal for entry in entries),
        link=_linker(request),
        sorts=SORTS,
        states=(LIVE, *states.ALL),
    )


async def live(request: Request) -> Response:
    """Stream the changed rows of the page with this query."""
    index: Index = request.app.state.index
    query = query_of(request)
    root = render.root_of(request.scope["path"])
    return events(request, _changes(index, request.app.state.rows, query, root, place_of(request)))


async def _changes(index: Index, made: RunRows, query: RunQuery, root: str, place: str) -> AsyncGenerator[bytes, None]:
    """Yield changed rows. place: id of the last event, or `_place` of the page."""
    told: dict[str, Markup] = {}
    shown: list[IndexEntry] = []
    version, looks, is_first = -1, 0, True
    yield b"retry: 1000\n\n"
    while True:
        await asyncio.to_thread(index.refresh)
        # Render the rows of active runs again: their new metric values do not change the index's version.
        if index.version != version or any(not entry.is_terminal for entry in shown):
            version = index.version
            matching = selected(index.entries(), query)
            shown = _on_page(matching, query)
            rows = await asyncio.to_thread(made.of, shown, root)
            changed = {run_id: row for run_id, row in rows.items() if told.get(run_id) != row}
            now = _place(rows, len(matching))
            # Compare with the page at first, which may be older than the first refresh.
            if now != place if is_first else changed or list(told) != list(rows):
                data = {"order": list(rows), "rows": changed, "total": len(matching), "first": is_first}
                yield message("rows", data, now)
            told, is_first = rows, False
        looks += 1
        if looks % _SILENCE_LOOKS == 0:
            yield b": still here\n\n"
        await asyncio.sleep(_LOOK_S)


async def _refreshed(index: Index) -> None:
    """Wait briefly for a refresh of the index, which may take long."""
    task = asyncio.create_task(asyncio.to_thread(index.refresh))
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.shield(task), _PATIENCE_S)


def _place(rows: dict[str, Markup], total: int) -> str:
    """Return an id of the shown rows, by which the stream avoids repeating them."""
    return stamp_of(rows, total)


def _on_page(matching: list[IndexEntry], query: RunQuery) -> list[IndexEntry]:
    first = (query.page - 1) * ROWS
    return matching[first : first + ROWS]


def _choices(entries: list[IndexEntry]) -> dict[str, list[str]]:
    """Return the values that each filter offers."""
    return {
        "experiment": sorted({entry.experiment for entry in entries}),
        "target": sorted({entry.target for entry in entries if entry.target}),
        "user": sorted({entry.user for entry in entries if entry.user}),
    }


def _linker(request: Request) -> Any:
    """Return a function that returns the page's URL with changes of its query. The value "" removes a key."""
    given = [(key, value) for key, value in request.query_params.multi_items() if key not in ("page", "token")]

    def link(**changes: object) -> str:
        kept = [(key, value) for key, value in given if key not in changes and value]
        return "?" + urlencode([*kept, *((key, str(value)) for key, value in changes.items() if value)])

    return link


class RunRows:
    def __init__(self, latest: LatestValues) -> None:
        self._latest = latest
        self._known: dict[str, tuple[object, Markup]] = {}

    def of(self, entries: Sequence[IndexEntry], root: str) -> dict[str, Markup]:
        """Return run id -> HTML of the row. root: relative path to the top of the page."""
        values = self._latest.of(entries)
        return {entry.run_id: self._row(entry, root, values) for entry in entries}

    def _row(self, entry: IndexEntry, root: str, values: dict[str, Any]) -> Markup:
        shown = (root, entry.record_stamp, entry.notes_stamp, values[entry.run_id])
        known = self._known.get(entry.run_id)
        if known is None or known[0] != shown or not entry.is_terminal:
            if len(self._known) >= _MOST:
                self._known.clear()
            # Jinja has escaped all values in this HTML.
            row = Markup(render.part("run_row.html", run=entry, root=root, latest=values))
            known = self._known[entry.run_id] = (shown, row)
        return known[1]
