"""The page with the list of runs, and its live changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias
from urllib.parse import urlencode

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import QueryError
from paceline.runs import states
from paceline.runs.record import duration_text
from paceline.runs.search.completion import complete as completions
from paceline.runs.search.facts import HANGS, RunFacts
from paceline.runs.search.fields import RunField, cell_text, field_of, quoted, sorted_runs, split_fields
from paceline.runs.search.groups import RunGroup, grouped
from paceline.runs.search.index import RunIndex, archived_ids
from paceline.runs.search.query import LIVE, LONGEST, Compare, predicate
from paceline.runs.search.summaries import headline
from paceline.system.units import value_text
from paceline.ui import render
from paceline.ui.feed import message
from paceline.ui.pieces import stamp_of
from paceline.ui.views import saved
from paceline.ui.views.common import PATIENCE_S, as_json, events, place_of, whole

#: A function that returns the present page's URL with some query parameters changed.
Link: TypeAlias = Callable[..., str]
#: Number of runs on one page.
ROWS = 100
_LOOK_S = 1.0
_SILENCE_LOOKS = 15

#: Maximum number of rendered rows in the cache. A row takes about a kilobyte, and a page has a hundred rows.
_MOST = 2000
#: Maximum number of metrics that a row of the list shows.
_NAMES = 3

#: Columns in their usual order, except the first: name -> heading. A column shows the field of its name, except for _NO_FIELDS.
_HEADINGS = {
    "state": "State",
    "experiment": "Experiment",
    "target": "Target",
    "created": "Created",
    "duration": "Took",
    "latest": "Latest values",
    "tags": "Tags",
}
_NO_FIELDS = ("latest", "tags")
_MOST_COLUMNS, _MOST_PINNED = 40, 6
#: Runs can be grouped by fields of these kinds, because a query can select the runs that have one value of the field.
_NAMED_KINDS = ("text", "any", "state")


@dataclass(frozen=True)
class RunQuery:
    """The filters, the order and the columns of a list of runs.

    Attributes:
        text: A query (`paceline.runs.search.query`).
        state: A state of runs (see `states.ALL`), or "live" for runs that have not ended; "" for all.
        parent: Id of a run, to list only its children; "" for all runs.
        archived: True for archived runs only, False for others only. Ignored if `text` has a condition on `archived`.
        sort: A field, with "-" for descending order; "" for newest first.
        columns: Fields of the columns after the first column, pinned columns first.
        group: The field by which runs are grouped, or "".
        opened: The groups, by value of the field, that show their runs.
        wrong: The error of the first invalid field, or None.
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
    columns: tuple[str, ...] = tuple(_HEADINGS)
    pinned: tuple[str, ...] = ()
    group: str = ""
    opened: tuple[str, ...] = ()
    wrong: QueryError | None = None
    page: int = 1

    @property
    def is_filtered(self) -> bool:
        return bool(self.text or self.experiment or self.state or self.target or self.user or self.tags or self.parent)


@dataclass(frozen=True)
class ColumnHeading:
    """The heading of a column.

    left, right, pin, remove: URLs that move, pin or remove the column; "" for an impossible change.
    """

    name: str
    text: str
    is_field: bool
    is_pinned: bool
    left: str
    right: str
    pin: str
    remove: str


@dataclass(frozen=True)
class RunOverview:
    """A summary of all runs for list pages. top: runs without a parent that are not archived."""

    entries: Sequence[RunFacts]
    top: list[RunFacts]
    choices: dict[str, list[str]]
    live: int


_latest: RunOverview | None = None


def overview(entries: Sequence[RunFacts]) -> RunOverview:
    """Return a summary of these runs for list pages, cached per list object."""
    global _latest
    found = _latest
    if found is None or found.entries is not entries:
        hidden = archived_ids(entries)
        top = [facts for facts in entries if not facts.is_child and facts.run_id not in hidden]
        values = {name: {getattr(facts, name) for facts in entries} for name in ("experiment", "target", "user")}
        choices = {name: sorted(filter(None, found)) for name, found in values.items()}
        _latest = found = RunOverview(entries, top, choices, sum(not facts.is_terminal for facts in entries))
    return found


def query_of(request: Request) -> RunQuery:
    given = request.query_params
    sort, group, added = (given.get(name, "") for name in ("sort", "group", "add"))
    columns = _columns(given.get("columns", "")) or list(_HEADINGS)
    pinned = [name for name in _columns(given.get("pin", "")) if name in columns][:_MOST_PINNED]
    wrong = next(filter(None, map(_field_error, (added, group, sort.removeprefix("-")))), None)
    shown = dict.fromkeys([*pinned, *columns, *_columns(added)])
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
        columns=tuple(shown)[:_MOST_COLUMNS],
        pinned=tuple(pinned),
        group=_known_field(group),
        opened=tuple(given.getlist("open")),
        wrong=wrong,
        page=whole(request, "page", 1, least=1),
    )


def _known_field(text: str) -> str:
    try:
        return field_of(text).name
    except QueryError:
        return ""


def _columns(text: str) -> list[str]:
    names = (name.strip() for name in split_fields(text))
    return list(filter(None, (name if name in _NO_FIELDS else _known_field(name) for name in names)))


def _field_error(text: str) -> QueryError | None:
    try:
        field_of(text) if text and text not in _NO_FIELDS else None
    except QueryError as error:
        return error
    return None


def selected(entries: Sequence[RunFacts], query: RunQuery) -> list[RunFacts]:
    """Return the runs that pass all filters, in the query's order.

    Raises:
        QueryError: The query's text is wrong.
    """
    # Apply only the filters that are set, one after the other, because there may be 100,000 runs.
    if query.archived or query.parent or query.trials or "archived" in query.text:
        passing = list(entries)
        if "archived" not in query.text:
            # If the page lists the trials of a sweep, show them even if the sweep is archived.
            hidden = set() if query.parent else archived_ids(passing)
            passing = [facts for facts in passing if (facts.is_archived or facts.run_id in hidden) == query.archived]
        if query.parent:
            passing = [facts for facts in passing if facts.parent == query.parent]
        elif not query.trials:
            passing = [facts for facts in passing if not facts.is_child]
    else:
        passing = overview(entries).top
    for name in ("experiment", "target", "user"):
        if wanted := getattr(query, name):
            passing = [facts for facts in passing if getattr(facts, name) == wanted]
    if query.state:
        passing = [
            facts
            for facts in passing
            if query.state in (facts.state, facts.status, None if facts.is_terminal else LIVE)
        ]
    for key, _, value in (word.partition("=") for word in query.tags):
        passing = [facts for facts in passing if key in facts.tags and (not value or facts.tags[key] == value)]
    if query.text:
        passing = list(filter(predicate(query.text), passing))
    return sorted_runs(passing, query.sort) if query.sort else passing


def page(request: Request) -> Response:
    index: RunIndex = request.app.state.index
    query = query_of(request)
    index.refresh_within(PATIENCE_S, is_quick=True)
    error = query.wrong
    try:
        matching = _selected_now(index, query)
    except QueryError as wrong:
        matching, error = [], wrong
    entries = index.entries()
    root = render.root_of(request.scope["path"])
    link = _linker(request, query)
    rows, count = _rows(request.app.state.rows, matching, query, root, link)
    return render.page(
        request,
        "runs.html",
        query=query,
        error=error,
        rows=rows.values(),
        place=stamp_of(rows, len(matching)),
        total=len(matching),
        of=len(index.ids),
        # Whether the index has not yet read all runs. Its first refresh takes long if there are ten thousand runs.
        is_partial=len(entries) < len(index.ids),
        unread=index.unread,
        pages=max(1, -(-count // ROWS)),
        choices=overview(entries).choices,
        live=overview(entries).live,
        link=link,
        columns=_headings(query, link),
        arranged="" if query.columns == tuple(_HEADINGS) else ",".join(query.columns),
        added="add" in request.query_params,
        states=(LIVE, *states.ALL, HANGS),
        **saved.shown_on(request, "runs"),
    )


def complete(request: Request) -> Response:
    """Return completions of a search query at the cursor, and the query's error, as JSON."""
    query = request.query_params.get("q", "")[:LONGEST]
    found = completions(
        query, whole(request, "at", len(query), least=0, most=len(query)), request.app.state.index.entries()
    )
    return as_json({"suggestions": [one._asdict() for one in found]})


async def live(request: Request) -> Response:
    """Stream the changed rows of a list page."""
    index: RunIndex = request.app.state.index
    query = query_of(request)
    root = render.root_of(request.scope["path"])
    made = partial(_rows, request.app.state.rows, query=query, root=root, link=_linker(request, query))
    return events(request, _changes(index, made, query, place_of(request)))


async def _changes(
    index: RunIndex, made: Callable[[list[RunFacts]], tuple[dict[str, Markup], int]], query: RunQuery, place: str
) -> AsyncGenerator[bytes, None]:
    """Yield events with the changed rows of a list of runs.

    made: Returns the page's rows of matching runs, and the total. place: Event id of the rows that the browser already has.
    """
    told: dict[str, Markup] = {}
    matching: list[RunFacts] = []
    version, looks, is_first = -1, 0, True
    yield b"retry: 1000\n\n"
    while True:
        await asyncio.to_thread(index.refresh_within, PATIENCE_S, told)
        if index.version != version:
            version = index.version
            with contextlib.suppress(QueryError):
                matching = await asyncio.to_thread(selected, index.entries(), query)
            rows, _ = await asyncio.to_thread(made, matching)
            changed = {run_id: row for run_id, row in rows.items() if told.get(run_id) != row}
            now = stamp_of(rows, len(matching))
            # At the first message, only the event id `place` of the page's rows is known. So compare the ids.
            if now != place if is_first else changed or list(told) != list(rows):
                data = {"order": list(rows), "rows": changed, "total": len(matching), "first": is_first}
                yield message("rows", data, now)
            told, is_first = rows, False
        looks += 1
        if looks % _SILENCE_LOOKS == 0:
            yield b": still here\n\n"
        await asyncio.sleep(_LOOK_S)


def _selected_now(index: RunIndex, query: RunQuery) -> list[RunFacts]:
    """Return the matching runs, after rereading tags and names of the displayed runs.

    Raises:
        QueryError: The query's text is wrong.
    """
    entries = index.entries()
    matching = selected(entries, query)
    shown = matching[(query.page - 1) * ROWS : query.page * ROWS]
    index.refresh_notes((facts.run_id for facts in shown), PATIENCE_S)
    return matching if index.entries() is entries else selected(index.entries(), query)


def _rows(
    made: RunRows, matching: list[RunFacts], query: RunQuery, root: str, link: Link
) -> tuple[dict[str, Markup], int]:
    fields = [(name, None if name in _NO_FIELDS else field_of(name)) for name in query.columns]
    place = slice((query.page - 1) * ROWS, query.page * ROWS)
    if not query.group:
        return made.of(matching[place], root, fields, query.pinned), len(matching)
    by = field_of(query.group)
    groups = grouped(matching, by, query.sort)
    rows: dict[str, Markup] = {}
    for group in groups[place]:
        is_open = group.text in query.opened
        opened = [text for text in query.opened if text != group.text] + ([] if is_open else [group.text])
        rows[f"group {group.text}"] = Markup(
            render.part(
                "run_group.html",
                group=group,
                by=by.name,
                is_open=is_open,
                toggle=link(open=opened, page=query.page),
                more=_more(group, by, query, link) if is_open and len(group.runs) > ROWS else "",
                most=ROWS,
                cells=[(name, _group_cell(group, name, field)) for name, field in fields],
                pinned=query.pinned,
            )
        )
        if is_open:
            rows |= made.of(group.runs[:ROWS], root, fields, query.pinned)
    return rows, len(groups)


def _more(group: RunGroup, by: RunField, query: RunQuery, link: Link) -> str:
    if group.value in (None, "") or by.kind not in _NAMED_KINDS:
        return ""
    named = str(Compare(by, "=", (str(group.value),)))
    return link(q=f"({query.text}) and {named}" if query.text else named, group="", open=[])


def _group_cell(group: RunGroup, name: str, field: RunField | None) -> list[tuple[str, str]]:
    """Summarize a group's runs in the column `name` as (metric name or "", text) pairs."""
    if name == "latest":
        names = [metric for metric, _ in headline(group.runs[0].metrics, _NAMES)]
        spreads = ((metric, group.spread(field_of(f"metrics.{quoted(metric)}"))) for metric in names)
        return [(metric, str(one)) for metric, one in spreads if one is not None]
    if field is None or field.kind == "time":
        return []
    if field.kind == "state":
        counts = Counter(facts.state for facts in group.runs).most_common()
        return [("", f"{state} {count}" if counts[1:] else state) for state, count in counts]
    if (found := group.spread(field)) is not None:
        return [("", found.text(duration_text if field.kind == "duration" else value_text))]
    return [("", cell_text(group.runs[0], field))] if group.common(field) not in (None, "") else []


def _headings(query: RunQuery, link: Link) -> list[ColumnHeading]:
    columns = query.columns

    def moved(place: int, by: int) -> str:
        names = [*columns]
        if not 0 <= place + by < len(names) or (names[place] in query.pinned) != (names[place + by] in query.pinned):
            return ""
        names[place], names[place + by] = names[place + by], names[place]
        pinned = [name for name in names if name in query.pinned]
        return link(columns=names, pin=pinned)

    def heading(place: int, name: str) -> ColumnHeading:
        pinned = [one for one in query.pinned if one != name]
        return ColumnHeading(
            name=name,
            text=_HEADINGS.get(name, name),
            is_field=name not in _NO_FIELDS,
            is_pinned=name in query.pinned,
            left=moved(place, -1),
            right=moved(place, 1),
            pin=link(columns=columns, pin=pinned if name in query.pinned else [*pinned, name]),
            remove=link(columns=[one for one in columns if one != name], pin=pinned) if columns[1:] else "",
        )

    return [heading(place, name) for place, name in enumerate(columns)]


def _linker(request: Request, query: RunQuery) -> Link:
    """Return a function that returns this page's URL with changed query parameters."""
    dropped = ("page", "token", "place", "add")
    given = [(key, value) for key, value in request.query_params.multi_items() if key not in dropped and value]

    def link(**changes: object) -> str:
        if query.columns != tuple(_HEADINGS):
            changes.setdefault("columns", query.columns)
        kept = [(key, value) for key, value in given if key not in changes]
        for key, value in changes.items():
            match value:
                case list() | tuple() if key in ("columns", "pin"):
                    kept.append((key, ",".join(value) if list(value) != list(_HEADINGS) else ""))
                case list() | tuple():
                    kept += [(key, text) for text in value]
                case _:
                    kept.append((key, str(value or "")))
        return "?" + urlencode([(key, value) for key, value in kept if value])

    return link


class RunRows:
    """A cache of the rendered rows of ended runs."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, Markup]] = {}

    def of(
        self,
        entries: Sequence[RunFacts],
        root: str,
        fields: Sequence[tuple[str, RunField | None]] = (),
        pinned: tuple[str, ...] = (),
    ) -> dict[str, Markup]:
        """Return the rendered table row of each run, keyed by run id.

        Args:
            entries: The runs.
            root: Relative path to the page of all runs.
            fields: Name and field of each column.
            pinned: The names of pinned columns.
        """
        return {entry.run_id: self._row(entry, root, fields, pinned) for entry in entries}

    def _row(
        self, facts: RunFacts, root: str, fields: Sequence[tuple[str, RunField | None]], pinned: tuple[str, ...]
    ) -> Markup:
        shown = (root, fields, pinned, facts.status, facts.notes_stamp, facts.metrics)
        known = self._known.get(facts.run_id)
        if known is None or known[0] != shown or not facts.is_terminal:
            if len(self._known) >= _MOST:
                self._known.clear()
            cells = [(name, field, None if field is None else field.get(facts)) for name, field in fields]
            # Mark the HTML as safe, because the template has escaped all values.
            latest = headline(facts.metrics, _NAMES)
            row = Markup(render.part("run_row.html", run=facts, root=root, latest=latest, cells=cells, pinned=pinned))
            known = self._known[facts.run_id] = (shown, row)
        return known[1]
