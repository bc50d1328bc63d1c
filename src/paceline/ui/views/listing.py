"""The page with the list of runs, and its live changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import QueryError
from paceline.runs import states
from paceline.runs.search.completion import complete as completions
from paceline.runs.search.facts import RunFacts
from paceline.runs.search.fields import RunField, field_of, sorted_runs
from paceline.runs.search.index import RunIndex
from paceline.runs.search.query import LIVE, LONGEST, predicate
from paceline.runs.search.summaries import headline
from paceline.ui import render
from paceline.ui.feed import message
from paceline.ui.pieces import stamp_of
from paceline.ui.views.common import as_json, events, place_of, whole

#: Number of runs on one page.
ROWS = 100
#: Seconds that a page waits for a refresh of the index. Later changes arrive by the stream.
_PATIENCE_S = 0.4
_LOOK_S = 1.0
_SILENCE_LOOKS = 15

#: Most rendered rows in the cache, about a kilobyte each. A page has a hundred rows.
_MOST = 2000
#: Most metrics in a row.
_NAMES = 3


#: Heading of a column of every list -> its field.
_HEADINGS = {
    "run": "Run",
    "state": "State",
    "experiment": "Experiment",
    "target": "Target",
    "created": "Created",
    "took": "Took",
}
#: Most columns that a reader adds.
_MOST_COLUMNS = 20


@dataclass(frozen=True)
class RunQuery:
    """The filters and the sort order of a list of runs.

    text: a query (`paceline.runs.search.query`). state: one of `states.ALL`, or "live". sort: a field, with "-" for the reverse
    order; "" for newest first. parent: only children of this run. archived: only archived runs, else only others, unless the text
    says which. columns: fields of further columns.
    """

    text: str = ""
    experiment: str = ""
    state: str = ""
    target: str = ""
    user: str = ""
    tags: tuple[str, ...] = ()
    trials: bool = False
    parent: str = ""
    archived: bool = False
    sort: str = ""
    columns: tuple[str, ...] = ()
    page: int = 1

    @property
    def is_filtered(self) -> bool:
        return bool(self.text or self.experiment or self.state or self.target or self.user or self.tags or self.parent)


def query_of(request: Request) -> RunQuery:
    given = request.query_params
    columns = [name for name in map(_known_field, given.getlist("column")) if name]
    sort = given.get("sort", "")
    return RunQuery(
        text=given.get("q", "")[:LONGEST],
        experiment=given.get("experiment", ""),
        state=given.get("state", ""),
        target=given.get("target", ""),
        user=given.get("user", ""),
        tags=tuple(tag for tag in given.getlist("tag") if tag),
        trials=given.get("trials", "") == "1",
        parent=given.get("parent", ""),
        archived=given.get("archived", "") == "1",
        sort=sort if _known_field(sort.removeprefix("-")) else "",
        columns=tuple(dict.fromkeys(columns))[:_MOST_COLUMNS],
        page=whole(request, "page", 1, least=1),
    )


def _known_field(text: str) -> str:
    """Return the field's name, or "" if there is no such field."""
    try:
        return field_of(text).name
    except QueryError:
        return ""


def selected(entries: Sequence[RunFacts], query: RunQuery) -> list[RunFacts]:
    """Return the runs that pass all filters, in the query's order.

    Raises:
        QueryError: The query's text is wrong.
    """
    # Filter by one value after another: a list of 100,000 runs passes most filters as a whole.
    passing = list(entries)
    if "archived" not in query.text:
        passing = [facts for facts in passing if facts.is_archived == query.archived]
    if query.parent:
        passing = [facts for facts in passing if facts.parent == query.parent]
    elif not query.trials:
        passing = [facts for facts in passing if not facts.is_child]
    for name in ("experiment", "target", "user"):
        if wanted := getattr(query, name):
            passing = [facts for facts in passing if getattr(facts, name) == wanted]
    if query.state:
        passing = [facts for facts in passing if query.state in (facts.status, None if facts.is_terminal else LIVE)]
    for key, _, value in (word.partition("=") for word in query.tags):
        passing = [facts for facts in passing if key in facts.tags and (not value or facts.tags[key] == value)]
    if query.text:
        passing = list(filter(predicate(query.text), passing))
    return sorted_runs(passing, query.sort) if query.sort else passing


async def page(request: Request) -> Response:
    index: RunIndex = request.app.state.index
    query = query_of(request)
    await _refreshed(index)
    entries = index.entries()
    error: QueryError | None = None
    try:
        matching = await asyncio.to_thread(selected, entries, query)
    except QueryError as wrong:
        matching, error = [], wrong
    root = render.root_of(request.scope["path"])
    rows = request.app.state.rows.of(_on_page(matching, query), root, query.columns)
    return render.page(
        request,
        "runs.html",
        query=query,
        error=error,
        rows=rows.values(),
        place=_place(rows, len(matching)),
        total=len(matching),
        of=len(index.ids),
        # True while the first refresh goes on, which may take long with ten thousand runs.
        is_partial=len(entries) < len(index.ids),
        unread=index.unread,
        pages=max(1, -(-len(matching) // ROWS)),
        choices=_choices(index),
        live=sum(not entry.is_terminal for entry in entries),
        link=_linker(request),
        headings=_HEADINGS,
        states=(LIVE, *states.ALL),
    )


def complete(request: Request) -> Response:
    """Return suggestions for the query at the cursor, and the error of the query."""
    query = request.query_params.get("q", "")[:LONGEST]
    found = completions(
        query, whole(request, "at", len(query), least=0, most=len(query)), request.app.state.index.entries()
    )
    return as_json({"suggestions": [one._asdict() for one in found]})


async def live(request: Request) -> Response:
    """Stream the changed rows of the page with this query."""
    index: RunIndex = request.app.state.index
    query = query_of(request)
    root = render.root_of(request.scope["path"])
    return events(request, _changes(index, request.app.state.rows, query, root, place_of(request)))


async def _changes(
    index: RunIndex, made: RunRows, query: RunQuery, root: str, place: str
) -> AsyncGenerator[bytes, None]:
    """Yield changed rows. place: id of the last event, or `_place` of the page."""
    told: dict[str, Markup] = {}
    matching: list[RunFacts] = []
    shown: list[RunFacts] = []
    version, looks, is_first = -1, 0, True
    yield b"retry: 1000\n\n"
    while True:
        await asyncio.to_thread(index.refresh)
        if index.version != version:
            version = index.version
            with contextlib.suppress(QueryError):
                matching = await asyncio.to_thread(selected, index.entries(), query)
            shown = _on_page(matching, query)
            rows = made.of(shown, root, query.columns)
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


async def _refreshed(index: RunIndex) -> None:
    """Wait briefly for a refresh of the index, which may take long."""
    task = asyncio.create_task(asyncio.to_thread(index.refresh))
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.shield(task), _PATIENCE_S)


def _place(rows: dict[str, Markup], total: int) -> str:
    """Return an id of the shown rows, by which the stream avoids repeating them."""
    return stamp_of(rows, total)


def _on_page(matching: list[RunFacts], query: RunQuery) -> list[RunFacts]:
    first = (query.page - 1) * ROWS
    return matching[first : first + ROWS]


def _choices(index: RunIndex) -> dict[str, list[str]]:
    """Return the values that each filter offers."""
    entries = index.entries()
    return {
        "experiment": sorted({entry.experiment for entry in entries}),
        "target": sorted({entry.target for entry in entries if entry.target}),
        "user": sorted({entry.user for entry in entries if entry.user}),
    }


def _linker(request: Request) -> Any:
    """Return a function that returns the page's URL with changes of its query.

    The value "" removes a key, and `column` removes one column.
    """
    given = [(key, value) for key, value in request.query_params.multi_items() if key not in ("page", "token")]

    def link(column: str = "", **changes: object) -> str:
        kept = [
            (key, value)
            for key, value in given
            if key not in changes and value and not (key == "column" and _known_field(value) in ("", column))
        ]
        return "?" + urlencode([*kept, *((key, str(value)) for key, value in changes.items() if value)])

    return link


class RunRows:
    """A cache of the rendered rows of ended runs."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, Markup]] = {}

    def of(self, entries: Sequence[RunFacts], root: str, columns: tuple[str, ...] = ()) -> dict[str, Markup]:
        """Return run id -> HTML of the row. root: relative path to the top of the page. columns: further fields."""
        fields = [field_of(name) for name in columns]
        return {entry.run_id: self._row(entry, root, fields) for entry in entries}

    def _row(self, facts: RunFacts, root: str, fields: Sequence[RunField]) -> Markup:
        shown = (root, fields, facts.status, facts.notes_stamp, facts.metrics)
        known = self._known.get(facts.run_id)
        if known is None or known[0] != shown or not facts.is_terminal:
            if len(self._known) >= _MOST:
                self._known.clear()
            cells = [(field, field.get(facts)) for field in fields]
            # Jinja has escaped all values in this HTML.
            row = Markup(
                render.part("run_row.html", run=facts, root=root, latest=headline(facts.metrics, _NAMES), cells=cells)
            )
            known = self._known[facts.run_id] = (shown, row)
        return known[1]
