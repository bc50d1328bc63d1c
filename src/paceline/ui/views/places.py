"""Models, services and compute targets."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from paceline.models import described
from paceline.models.model import Model
from paceline.services import log as service_log
from paceline.services import read as services_read
from paceline.services import store as services_store
from paceline.targets import configured
from paceline.targets.looks import look_at_all
from paceline.ui import render
from paceline.workspace import Workspace

#: A target's answer holds so long: an engine must not be asked for each who looks.
_FRESH_S = 10.0
_LIMIT_S = 8.0
_LOG_LINES = 200


async def models(request: Request) -> Response:
    workspace = _workspace(request)

    def read_them() -> list[dict[str, Any]]:
        return [described.summary(model) for model in Model.list(workspace)]

    found = await asyncio.to_thread(read_them)
    by_name: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        by_name.setdefault(one["name"], []).append(one)
    return render.page(request, "models.html", models=by_name)


async def model(request: Request) -> Response:
    workspace = _workspace(request)
    name, version = request.path_params["name"], request.path_params["version"]

    def read_it() -> dict[str, Any]:
        return described.details(Model(workspace, name, version=version))

    return render.page(request, "model.html", model=await asyncio.to_thread(read_it))


async def services(request: Request) -> Response:
    directory: Path = request.app.state.workspace_dir
    found = await asyncio.to_thread(lambda: [*services_read.all_records(directory)])

    def models_of(record: Any) -> list[str]:
        return _models_of(directory, record)

    return render.page(request, "services.html", services=[(record, models_of(record)) for record in found])


async def service(request: Request) -> Response:
    directory: Path = request.app.state.workspace_dir
    folder = services_store.folder_of(directory, request.path_params["name"])

    def read_it() -> dict[str, Any]:
        record = services_read.record(folder)
        return {
            "service": record,
            "revisions": list(reversed(services_store.revisions(folder))),
            "log": service_log.last_lines(folder, _LOG_LINES),
        }

    return render.page(request, "service.html", **await asyncio.to_thread(read_it))


async def compute(request: Request) -> Response:
    """The page at once; what the targets say comes by a request of its own, for an engine may take seconds."""
    names = await asyncio.to_thread(configured.names, request.app.state.workspace_dir)
    return render.page(request, "compute.html", names=names)


async def compute_live(request: Request) -> Response:
    found = await asyncio.to_thread(_looks, request.app.state)
    return render.page(request, "compute_part.html", targets=found)


def _looks(state: Any) -> list[Any]:
    kept: tuple[float, list[Any]] | None = getattr(state, "looks", None)
    if kept is not None and time.monotonic() - kept[0] < _FRESH_S:
        return kept[1]
    found = look_at_all(state.workspace_dir, configured.names(state.workspace_dir), _LIMIT_S)
    state.looks = (time.monotonic(), found)
    return found


def _workspace(request: Request) -> Workspace:
    return Workspace(request.app.state.workspace_dir, create=False)


def _models_of(directory: Path, record: Any) -> list[str]:
    if record.revision is None:
        return []
    folder = services_store.folder_of(directory, record.name)
    for revision in services_store.revisions(folder):
        if revision.number == record.revision:
            return list(revision.model_names)
    return []
