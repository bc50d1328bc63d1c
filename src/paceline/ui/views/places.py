"""The pages of models, services and compute targets. Each page has one live piece."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paceline.models import described
from paceline.models.model import Model
from paceline.runs.logs import last_lines
from paceline.runs.visible import visible
from paceline.services import store as services_store
from paceline.services.record import ServiceRecord
from paceline.targets import configured
from paceline.targets.status_of_all import TargetLook, look_at_all
from paceline.ui import render
from paceline.ui.index import Index, IndexEntry
from paceline.ui.pieces import PagePiece, PiecesSeen, stamp_of
from paceline.ui.views.common import events, place_of
from paceline.workspace import Workspace

#: Seconds for which a target's status is cached, to limit the calls to engines.
_FRESH_S = 10.0
_LIMIT_S = 8.0
_LOG_LINES = 200
#: Most runs that are listed below a target.
_MOST_RUNS = 50

#: A function that returns the data of one of these pages.
_Find = Callable[[Request], render.TemplateValues]
_Answer = Callable[[Request], Response]


def routes() -> list[Route]:
    """Return two routes for each page: the page, and the stream of its changes."""
    pages: list[tuple[str, str, _Find]] = [
        ("/models", "models", _models),
        ("/models/{name}/{version:int}", "model", _model),
        ("/services", "services", _services),
        ("/services/{name}", "service", _service),
    ]
    listed = [Route("/compute", _compute), Route("/live/compute", _live("compute", _targets))]
    for path, name, find in pages:
        listed += [Route(path, _page(name, find)), Route(f"/live{path}", _live(name, find))]
    return listed


def _compute(request: Request) -> Response:
    """Return the page at once, without the targets' status.

    The status follows in the stream, because an engine may take seconds to answer.
    """
    names = configured.names(request.app.state.workspace_dir)
    return render.page(request, "compute.html", names=names, stamp="")


def _page(name: str, find: _Find) -> _Answer:
    def page(request: Request) -> Response:
        values = find(request)
        return render.page(request, f"{name}.html", stamp=stamp_of(values), **values)

    return page


def _live(name: str, find: _Find) -> _Answer:
    def live(request: Request) -> Response:
        def look() -> PiecesSeen:
            values = find(request)
            piece = PagePiece(stamp_of(values), lambda: render.text(request, f"{name}_part.html", **values))
            return PiecesSeen({"main": piece})

        streams = request.app.state.pieces
        return events(request, streams.follow(request.url.path, look, place_of(request)))

    return live


def _models(request: Request) -> render.TemplateValues:
    by_name: dict[str, list[dict[str, Any]]] = {}
    for one in Model.list(_workspace(request)):
        by_name.setdefault(one.name, []).append(described.summary(one))
    return {"models": by_name}


def _model(request: Request) -> render.TemplateValues:
    name, version = request.path_params["name"], request.path_params["version"]
    return {"model": described.details(Model(_workspace(request), name, version=version))}


def _services(request: Request) -> render.TemplateValues:
    directory: Path = request.app.state.workspace_dir
    return {"services": [(record, _models_of(directory, record)) for record in services_store.all_records(directory)]}


def _service(request: Request) -> render.TemplateValues:
    folder = services_store.folder_of(request.app.state.workspace_dir, request.path_params["name"])
    return {
        "service": services_store.record(folder),
        "revisions": list(reversed(services_store.revisions(folder))),
        "log": "\n".join(visible(line) for line in last_lines(folder.log, _LOG_LINES, window=1 << 18)),
    }


def _targets(request: Request) -> render.TemplateValues:
    state = request.app.state
    index: Index = state.index
    index.refresh()
    going: dict[str, list[IndexEntry]] = {}
    # List the oldest run first, as in a queue. A sweep is left out, because its trials are listed.
    for entry in reversed(index.entries()):
        if not entry.is_terminal and entry.kind == "script":
            going.setdefault(entry.target, []).append(entry)
    return {"targets": _looks(state), "going": going, "most": _MOST_RUNS}


def _looks(state: State) -> list[TargetLook]:
    kept: tuple[float, list[TargetLook]] | None = getattr(state, "looks", None)
    if kept is not None and time.monotonic() - kept[0] < _FRESH_S:
        return kept[1]
    looks = look_at_all(state.workspace_dir, configured.names(state.workspace_dir), _LIMIT_S)
    state.looks = (time.monotonic(), looks)
    return looks


def _workspace(request: Request) -> Workspace:
    return Workspace(request.app.state.workspace_dir, create=False)


def _models_of(directory: Path, record: ServiceRecord) -> list[str]:
    if record.revision is None:
        return []
    folder = services_store.folder_of(directory, record.name)
    for revision in services_store.revisions(folder):
        if revision.number == record.revision:
            return list(revision.model_names)
    return []
