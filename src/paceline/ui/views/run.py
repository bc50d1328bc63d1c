"""The main page of a run: its state, curves and log."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from paceline.observe.stacks import take
from paceline.runs import tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.record import utc_now
from paceline.ui import panels, render, run_page
from paceline.ui.curves import READ_S, CurveStore
from paceline.ui.guard import POLICY
from paceline.ui.own_charts import OwnQuery, own_chart
from paceline.ui.views import common, saved
from paceline.ui.views.common import as_json, curve_query, events, folder_of, form_of, number, place_of, whole
from paceline.ui.wait_picture import wait_picture

#: Content-Security-Policy of the page with panels: it permits media players, and frames that show logged HTML.
_POLICY = f"{POLICY}; frame-src 'self'; media-src 'self'"


async def page(request: Request) -> Response:
    folder = folder_of(request)
    if folder.run_id != request.path_params["run_id"]:
        # The path has an abbreviated id, which matches only one run. Redirect to the path with the full id.
        return RedirectResponse(f"./{folder.run_id}", 303)
    # Read the curves now, because the browser requests them as soon as it has loaded the page.
    reading = asyncio.get_running_loop().run_in_executor(None, _read_on, request.app.state.curves, folder)
    reading.add_done_callback(lambda done: done.exception())
    found = await asyncio.to_thread(run_page.head, folder)
    record = found["record"]
    if not request.url.query and (own := "sweep" if record.sweep else "steps" if record.pipeline else ""):
        # A sweep or a pipeline has no curves of its own. Show the page of its trials or steps.
        return RedirectResponse(f"./{folder.run_id}/{own}", 303)
    nodes = found["job"].node_count if found["job"] else 1
    shown = render.page(
        request,
        "run.html",
        tab="run",
        nodes=nodes,
        places=await asyncio.to_thread(run_page.ranks_of_nodes, folder),
        settings=request.url.query,
        **saved.shown_on(request, "run"),
        **found,
    )
    shown.headers["content-security-policy"] = _POLICY
    return shown


def head(request: Request) -> Response:
    """Render the header of a run's page again after a change of state."""
    return render.page(request, "run_head.html", tab="run", **run_page.head(folder_of(request)))


async def head_live(request: Request) -> Response:
    """Stream changes of a run's header, for the pages of its files."""
    return common.live(request, "files", None)


async def live(request: Request) -> Response:
    feed = request.app.state.feeds.of(folder_of(request).run_id)
    return events(request, feed.watch(place_of(request)))


def curves(request: Request) -> Response:
    """Return the points of the requested curves as JSON.

    Query: `name` (several), `ranks`, `axis`, `from`, `to`, `px`, `attempts=all`, `node` (a number), `list` (`asked`: list only
    the metrics in `name`; `all`: list all metrics; else only the first metrics), `whole=1` (all values, not thinned).
    Otherwise the response may be a part of a large run: with `has_more`, the page has to send the request again.
    """
    folder = folder_of(request)
    query, listed = curve_query(request), request.query_params.get("list")
    if query.axis not in ("step", "time", "relative"):
        raise HTTPException(400, f"axis must be step, time or relative, got {query.axis!r}.")
    query = replace(
        query,
        ranks=_ranks(request),
        all_attempts=request.query_params.get("attempts") == "all",
        node_ranks=_node_ranks(folder, whole(request, "node", -1, least=-1)),
        has_bands=True,
        listed="asked" if listed == "asked" else "all" if listed == "all" else "first",
        most_s=query.most_s if request.query_params.get("whole") else READ_S,
    )
    return as_json(run_page.curves_of(request.app.state.curves, folder, query))


def own(request: Request) -> Response:
    """Return the data of a user-defined chart as JSON. Query: `kind`, `y`, `x`."""
    given = request.query_params
    query = OwnQuery(kind=given.get("kind", ""), y=given.get("y", ""), x=given.get("x", ""))
    with request.app.state.curves.open(folder_of(request)) as found:
        found.look()
        return as_json(own_chart(found, query))


def others(request: Request) -> Response:
    """Render all panels of media, tables and texts, or one panel (query: `name`, `at`, `rank`)."""
    folder = folder_of(request)
    name, rank = request.query_params.get("name"), number(request, "rank")
    at = whole(request, "at", -1, least=-1)
    with request.app.state.curves.open(folder) as found:
        found.look()
        if name is None:
            return render.page(request, "run_others.html", run_id=folder.run_id, **panels.panels_of(found))
        one = panels.panel_of(found, name, at, rank)
    return render.page(request, "run_other.html", one=one, run_id=folder.run_id)


def _read_on(curves: CurveStore, folder: RunFolder) -> None:
    while True:
        with curves.open(folder) as found:
            found.look(READ_S)
            if not found.has_more:
                return
        # Pause, so that a request that waits for these curves gets them first.
        time.sleep(0.01)


def _node_ranks(folder: RunFolder, node: int) -> tuple[list[int], list[int]] | None:
    """Return ([node], its ranks), or None for all nodes if `node` is negative."""
    if node < 0:
        return None
    nodes = run_page.ranks_of_nodes(folder)
    return [node], next((one.ranks for one in nodes if one.number == node), [])


def _ranks(request: Request) -> list[int] | None:
    text = request.query_params.get("ranks", "")
    if not text:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise HTTPException(400, f"ranks={text!r}: give numbers, such as 0,3.") from None


async def stacks(request: Request) -> Response:
    """Show the current stack of each worker, and which ranks wait for which."""
    await form_of(request)
    folder = folder_of(request)
    found = await asyncio.to_thread(take, folder)
    name = tags_and_properties.read(folder.notes).name or folder.run_id
    picture = wait_picture(found.told)
    return render.page(
        request, "run_stacks.html", stacks=found, picture=picture, name=name, run_id=folder.run_id, taken_utc=utc_now()
    )
