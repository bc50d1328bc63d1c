"""The pages of services: state, request rates, log, and forms that call and change a service."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from paceline.errors import PacelineError
from paceline.runs.logs import last_lines
from paceline.runs.visible import visible
from paceline.services import load, store
from paceline.services.folder import ServiceFolder
from paceline.services.record import HEALTHY, ServiceRecord
from paceline.services.service import Service
from paceline.ui import render
from paceline.ui.pieces import PagePiece, PiecesSeen, stamp_of
from paceline.ui.views.common import as_json, form_of, number, pieces, whole_number, workspace_of

_LOG_LINES = 200
#: Time limit in seconds for a call of the service by the page; maximum characters of the answer that the page shows.
_CALL_S, _MOST_ANSWER = 20.0, 100_000

#: A function that changes a service according to a form.
_Change = Callable[[Service, dict[str, str]], object]


def routes() -> list[Route]:
    """Return the routes of a service's page, its request rates and its forms."""
    changes: dict[str, _Change] = {
        "stop": lambda service, form: service.stop(wait=False),
        "start": lambda service, form: service.start(wait=False),
        "reload": lambda service, form: service.reload(wait=False),
        "scale": lambda service, form: service.scale(whole_number(form, "workers") or 0, wait=False),
        "rollback": lambda service, form: service.rollback(whole_number(form, "revision"), wait=False),
    }
    return [
        Route("/services/{name}", _page),
        Route("/live/services/{name}", _live),
        Route("/services/{name}/load", _load),
        Route("/services/{name}/call", _call, methods=["POST"]),
        *(Route(f"/services/{{name}}/{name}", _post(change), methods=["POST"]) for name, change in changes.items()),
    ]


def listed(request: Request) -> render.TemplateValues:
    """Return all services with the models that they serve."""
    directory = request.app.state.workspace_dir
    return {"services": [(record, _models(directory, record)) for record in store.all_records(directory)]}


def _models(directory: Any, record: ServiceRecord) -> list[str]:
    if record.revision is None:
        return []
    revisions = store.revisions(store.folder_of(directory, record.name))
    return [name for revision in revisions if revision.number == record.revision for name in revision.model_names]


def _folder(request: Request) -> ServiceFolder:
    return store.folder_of(request.app.state.workspace_dir, request.path_params["name"])


def _load_of(request: Request, folder: ServiceFolder) -> load.ServiceLoad:
    kept: dict[str, load.ServiceLoad] = request.app.state.loads
    return kept.setdefault(folder.name, load.ServiceLoad(folder))


def _find(request: Request) -> tuple[render.TemplateValues, str]:
    """Return template values of a service's page, and its log's last lines."""
    folder = _folder(request)
    record = store.record(folder)
    replicas = load.replicas(folder, _load_of(request, folder).last)
    revisions = list(reversed(store.revisions(folder)))
    values = {"service": record, "revisions": revisions, "replicas": replicas, "is_up": record.state == HEALTHY}
    return values, "\n".join(visible(line) for line in last_lines(folder.log, _LOG_LINES, window=1 << 18))


def _page(request: Request) -> Response:
    values, log = _find(request)
    example = load.example_input(_folder(request), values["service"]) if values["is_up"] else ""
    stamp = f"main:{stamp_of(values)},log:{stamp_of(log)}"
    return render.page(request, "service.html", stamp=stamp, log=log, example=example, **values)


def _live(request: Request) -> Response:
    def look() -> PiecesSeen:
        values, log = _find(request)
        return PiecesSeen(
            {
                "main": PagePiece(stamp_of(values), lambda: render.text(request, "service_part.html", **values)),
                "log": PagePiece(stamp_of(log), lambda: render.text(request, "service_log.html", log=log)),
            }
        )

    return pieces(request, look)


def _load(request: Request) -> Response:
    """Return a service's request rates and latencies after the time `after`, as JSON."""
    folder = _folder(request)
    watched = _load_of(request, folder)
    after = number(request, "after") or 0.0
    points = [point for point in watched.points(store.stored(folder)) if point["t"] > after]
    return as_json({"points": points, "error": watched.error})


async def _call(request: Request) -> Response:
    """Send the form's `data` to the service, and return the response as text."""
    form = await form_of(request)
    service = Service(workspace_of(request), _folder(request).name)
    began = time.perf_counter()
    try:
        answer = await asyncio.to_thread(service.run, form.get("data", "").encode(), _CALL_S)
    except PacelineError as error:
        return as_json({"error": visible(str(error), lines=True)[:_MOST_ANSWER]})
    text = answer if isinstance(answer, str) else _text(answer)
    took = f"{1000 * (time.perf_counter() - began):.1f} ms"
    return as_json({"answer": visible(text, lines=True)[:_MOST_ANSWER], "took": took})


def _text(answer: object) -> str:
    if isinstance(answer, bytes):
        return f"{len(answer)} bytes, which are not text"
    return json.dumps(answer, indent=2, ensure_ascii=False)


def _post(change: _Change) -> Callable[[Request], Any]:
    async def post(request: Request) -> Response:
        form = await form_of(request)
        service = Service(workspace_of(request), _folder(request).name)
        await asyncio.to_thread(change, service, form)
        return RedirectResponse(f"../{service.name}", 303)

    return post
