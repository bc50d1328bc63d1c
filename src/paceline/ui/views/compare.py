"""The page that compares runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict
from urllib.parse import quote, urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from paceline.errors import FileNameError, QueryError, RunNotFoundError
from paceline.reports import compare, diff
from paceline.reports.compare import PARTS, FactsOf, RunTable, compact_facts, run_table
from paceline.runs import read, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord
from paceline.runs.search.facts import RunFacts, read_facts, stamp_hash
from paceline.runs.search.fields import quoted
from paceline.runs.search.index import RunIndex
from paceline.runs.search.query import LONGEST
from paceline.runs.search.summaries import goal_of
from paceline.sweeps.pictures import chosen_runs, draw, svg
from paceline.ui import render, run_page
from paceline.ui.report import report_text
from paceline.ui.views import saved
from paceline.ui.views.common import PATIENCE_S, as_json, curve_query, runs_dir
from paceline.ui.views.listing import RunQuery, selected

#: Maximum number of runs in a comparison. Some proxies refuse the longer URL of more runs.
MOST = 200
#: Maximum number of metrics with a chart; number of metrics whose curves are in the first response.
_CHARTS, _FIRST = 200, 2
#: Maximum number of points of all curves in a chart together; minimum number of points of each curve.
_POINTS, _FEWEST = 12_000, 60
#: Maximum number of run names that the input field suggests.
_OFFERED = 12


class ComparedRun(TypedDict):
    """A run in the legend of the compared curves."""

    run_id: str
    name: str
    status: str


class ShownImages(TypedDict):
    """Images that one run logged under one name.

    run: Index of the run in the comparison. images: Each image's step, and its path for a URL.
    """

    run: int
    images: list[tuple[int, str]]


@dataclass(frozen=True)
class ChosenRuns:
    """The runs that a request names.

    places: Index of each run in the request, where missing runs count too. missing: An error text for each missing run.
    """

    folders: tuple[RunFolder, ...]
    records: tuple[RunRecord, ...]
    places: tuple[int, ...]
    missing: tuple[str, ...]

    def names(self) -> list[str]:
        """Return the display name of each compared run, or its id."""
        return [tags_and_properties.read(folder.notes).name or folder.run_id for folder in self.folders]


def routes() -> list[Route]:
    """Return the routes of the page that compares runs, and of its parts."""
    views: dict[str, Callable[[Request], Response]] = {
        "": page,
        "/table": table,
        "/curves": curves,
        "/changes": changes,
        "/pictures": pictures,
        "/images": images,
        "/names": names,
        "/report": report,
    }
    return [Route(f"/compare{path}", view) for path, view in views.items()]


def page(request: Request) -> Response:
    chosen = requested_runs(request)
    given = list(dict.fromkeys(request.query_params.getlist("run")))
    ids = list(dict.fromkeys(folder.run_id for folder in chosen.folders))
    if not chosen.missing and given != ids:
        # The URL may name a run by its display name or by a part of its id. Redirect to a URL with complete ids.
        others = [(key, value) for key, value in request.query_params.multi_items() if key != "run"]
        return RedirectResponse(f"./compare?{urlencode([*(('run', run_id) for run_id in ids), *others])}", 303)
    shown: list[ComparedRun] = [
        {"run_id": record.run_id, "name": name, "status": record.status}
        for record, name in zip(chosen.records, chosen.names(), strict=True)
    ]
    return render.page(
        request,
        "compare.html",
        runs=shown,
        query=urlencode([("run", run["run_id"]) for run in shown]),
        settings=any(name != "run" for name in request.query_params),
        missing=chosen.missing,
        is_live=any(not record.is_terminal for record in chosen.records),
        kinds=compare.KINDS,
        most=MOST,
        **saved.shown_on(request, "compare"),
    )


def table(request: Request) -> Response:
    """Return the table of compared runs as JSON.

    A row `[kind, name, part, values]` compares one fact, such as a parameter. `values` has one item if all runs agree.
    """
    chosen = requested_runs(request)
    facts = compact_facts(run_table(chosen.folders, _facts_of(request)))
    return as_json({"runs": [folder.run_id for folder in chosen.folders], "facts": facts})


def curves(request: Request) -> Response:
    """Return the curves of each run's lowest rank as JSON.

    A request without metrics gets the names of all metrics, and the curves of the first metrics of the first run.
    """
    chosen, query = requested_runs(request), curve_query(request)
    lists_all = not query.names
    query = replace(
        query,
        listed="all" if lists_all else "asked",
        first=_FIRST,
        pixels=min(query.pixels, max(_FEWEST, _POINTS // (2 * len(chosen.folders)))),
    )
    drawn: list[dict[str, object]] = []
    listed: dict[str, run_page.MetricJson] = {}
    for place, folder in zip(chosen.places, chosen.folders, strict=True):
        one = run_page.curves_of(request.app.state.curves, folder, query)
        if not query.names:
            query = replace(
                query, names=[*dict.fromkeys(curve["name"] for curve in one["curves"] if not curve["node"])] or [""]
            )
        lowest = {entry["name"]: entry["ranks"][0] for entry in one["names"] if not entry["node"]}
        for entry in one["names"]:
            if not entry["node"]:
                # Leave the last value out of the legend, because each of the compared runs has its own last value.
                listed.setdefault(entry["name"], {**entry, "last": ""})
        drawn += [
            {**curve, "run": place}
            for curve in one["curves"]
            if not curve["node"] and curve["rank"] == lowest[curve["name"]]
        ]
    shown = [*listed.values()][:_CHARTS]
    more = {"more": len(listed) - len(shown)} if lists_all else {}
    return as_json({"names": shown, "curves": drawn, "others": 0, **more})


def changes(request: Request) -> Response:
    """Render the differences of two runs' source files, and where their metrics diverge.

    The page loads this part separately, because rendering may take long.
    """
    folders = requested_runs(request).folders
    if len(folders) != 2:
        raise HTTPException(400, f"{len(folders)} runs are named; sources are compared of two.")
    return render.page(request, "compare_part.html", diff=diff.compare(*folders))


def pictures(request: Request) -> Response:
    """Render plots of the runs' parameters and metrics.

    Query: `y` and `x` are "parameters/NAME" or "metrics/NAME"; `part` of metrics is "last", "best", "min" or "max".
    """
    chosen, query = requested_runs(request), request.query_params
    part = query.get("part", "last")
    if part not in PARTS:
        raise HTTPException(400, f"part={part!r}: choose one of {', '.join(PARTS)}.")
    found = run_table(chosen.folders, _facts_of(request))
    axes = _axes(found, part)
    metrics = [key for key in axes if key.startswith("metrics/")]
    y, x = query.get("y", ""), query.get("x", "")
    y = y if y in metrics else next(iter(metrics), "")
    x = x if x in axes else next((key for key in axes if key != y), "")
    sketch = chosen_runs.sketched(
        {key.partition("/")[2]: values for key, values in axes.items() if key not in metrics},
        y.partition("/")[2],
        axes.get(y, ()),
        [record.status for record in chosen.records],
        goal_of(y.partition("/")[2]) or "maximize",
    )
    scatter = chosen_runs.scatter(x.partition("/")[2], axes[x], y.partition("/")[2], axes[y]) if x and y else None
    return render.page(
        request,
        "compare_pictures.html",
        sketch=sketch,
        places=draw.places(sketch) if sketch else "{}",
        scatter=scatter,
        svg=svg,
        x=x,
        y=y,
        part=part,
        parts=PARTS,
        axes=axes,
        metrics=metrics,
        names=dict(enumerate(chosen.names())),
    )


def images(request: Request) -> Response:
    """Render the logged images of the compared runs side by side."""
    chosen = requested_runs(request)
    found: dict[str, list[ShownImages]] = {}
    for place, folder in enumerate(chosen.folders):
        for name, of_run in _images_of(request, folder).items():
            found.setdefault(name, []).append({"run": place, "images": of_run})
    return render.page(request, "compare_images.html", found=found, runs=chosen.folders, names=chosen.names())


def report(request: Request) -> Response:
    """Return the report of the runs for download. Query: `metric` (several), `anonymous=1`."""
    given = request.query_params
    text = report_text(
        requested_runs(request).folders,
        metrics=[name for name in given.getlist("metric") if name],
        anonymous=given.get("anonymous") == "1",
    )
    return Response(text, media_type="text/html", headers={"content-disposition": 'attachment; filename="report.html"'})


def names(request: Request) -> Response:
    """Suggest runs that match the query `q`; an invalid query counts as plain words."""
    index: RunIndex = request.app.state.index
    index.refresh_within(PATIENCE_S)
    text = request.query_params.get("q", "")[:LONGEST]
    try:
        found = selected(index.entries(), RunQuery(text=text, trials=True))
    except QueryError:
        found = selected(index.entries(), RunQuery(text=" ".join(map(quoted, text.split())), trials=True))
    taken = set(request.query_params.getlist("run"))
    offered = [entry for entry in found if entry.run_id not in taken][:_OFFERED]
    return as_json([{"run_id": entry.run_id, "name": entry.name, "status": entry.status} for entry in offered])


def requested_runs(request: Request) -> ChosenRuns:
    """Return the runs that the query parameters `run` name, without missing runs.

    Raises:
        HTTPException: No run or too many runs are named (400), or none of them exists (404).
    """
    given = [text for text in dict.fromkeys(request.query_params.getlist("run")) if text]
    if not given:
        raise HTTPException(400, "No run is named. Choose some in the list of runs, and then Compare.")
    if len(given) > MOST:
        raise HTTPException(400, f"{len(given)} runs are chosen; {MOST} at most can be compared. Remove some.")
    found: dict[str, tuple[RunFolder, RunRecord, int]] = {}
    errors: dict[str, str] = {}
    for place, text in enumerate(given):
        try:
            folder = store.find(runs_dir(request), text)
            found.setdefault(folder.run_id, (folder, read.record(folder), place))
        except (RunNotFoundError, FileNameError) as error:
            errors[text] = str(error)
    if not found:
        raise HTTPException(404, next(iter(errors.values())))
    folders, records, places = zip(*found.values(), strict=True)
    return ChosenRuns(folders, records, places, tuple(errors.values()))


def _facts_of(request: Request) -> FactsOf:
    """Return a function that returns a run's summary, if possible from the index."""
    index: RunIndex = request.app.state.index

    def facts_of(folder: RunFolder) -> RunFacts | None:
        known = index.get(folder.run_id)
        is_fresh = known and known.is_terminal and known.notes_stamp == stamp_hash(folder.notes)
        return known if is_fresh else read_facts(folder)

    return facts_of


def _axes(found: RunTable, part: str) -> dict[str, Sequence[object]]:
    return {
        f"{fact.kind}/{fact.name}": fact.values
        for fact in found.facts
        if (fact.kind == "parameters" and fact.differs) or (fact.kind == "metrics" and fact.part == part)
    }


def _images_of(request: Request, folder: RunFolder) -> dict[str, list[tuple[int, str]]]:
    found: dict[str, list[tuple[int, str]]] = {}
    with request.app.state.curves.open(folder) as curves:
        curves.look()
        for name, logged in curves.others.items():
            found[name] = [
                (number if other.step is None else other.step, quote(os.fsencode(value)))
                for number, other in enumerate(logged)
                if other.kind == "image" and isinstance(value := other.read(), str)
            ]
    return {name: sorted(images) for name, images in found.items() if images}
