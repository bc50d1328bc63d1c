"""The pages of all models, of a model's versions side by side, and of a version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from paceline.errors import ModelError
from paceline.models import compare, described
from paceline.models.model import Model
from paceline.services import store as services_store
from paceline.services.service import Service
from paceline.targets import configured
from paceline.ui import render
from paceline.ui.markup import RENDERED, render_markdown
from paceline.ui.views.common import form_of, tag_of, whole_number, workspace_of

#: Maximum number of versions to compare; number of versions that the page compares by default.
_MOST, _FIRST = 8, 3
#: Maximum number of characters of a description.
_MOST_TEXT = 50_000
_TITLES = {
    "metrics": "Metrics of the run",
    "origin": "Origin",
    "parameters": "Parameters",
    "signature": "Inputs and outputs",
    "files": "Files",
    "code": "Code",
    "data": "Data",
    "topology": "Topology",
    "environment": "Environment",
}

#: A function that changes a model version according to a form. It returns the next page, or None for the version's page.
_Change = Callable[[Model, dict[str, str]], "str | None"]


class FactSection(TypedDict):
    """A part of a comparison of model versions, such as metrics."""

    title: str
    facts: list[compare.VersionFact]


def routes() -> list[Route]:
    """Return the routes of the forms on the page of a model version."""
    changes: dict[str, _Change] = {
        "alias": _alias,
        "tag": _tag,
        "describe": _describe,
        "delete": _delete,
        "deploy": _deploy,
        "serve": _serve,
    }
    path = "/models/{name}/{version:int}"
    return [Route(f"{path}/{name}", _post(change), methods=["POST"]) for name, change in changes.items()]


def listed(request: Request) -> render.TemplateValues:
    """Return all models with their versions, the newest version first."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in _rows(request, None):
        by_name.setdefault(row["name"], []).append(row)
    return {"models": by_name}


def versions(request: Request) -> render.TemplateValues:
    """Return a model's versions, and a comparison of the properties of chosen versions.

    Raises:
        ModelNotFoundError: The model does not exist.
        HTTPException: A version in the query is not a number, or too many are chosen (400).
    """
    latest = Model(workspace_of(request), request.path_params["name"])
    rows = _rows(request, latest.name)
    numbers = _chosen(request.query_params.getlist("version")) or [row["version"] for row in rows[:_FIRST]]
    compared = [Model(latest.workspace, latest.name, version=number) for number in numbers]
    runs = list(dict.fromkeys(model.run_id for model in compared if model.run_id))
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))[:_MOST]
    sections, problem = _sections(request, compared)
    return {
        **{"name": latest.name, "versions": rows, "metric_names": names, "compared": numbers, "runs": runs},
        **{"sections": sections, "problem": problem},
    }


def version(request: Request) -> render.TemplateValues:
    """Return a model version's files, its origin, and the services that use it.

    Raises:
        ModelNotFoundError: The version does not exist.
    """
    workspace = workspace_of(request)
    model = Model(workspace, request.path_params["name"], version=request.path_params["version"])
    sections, problem = _sections(request, [model])
    return {
        "model": described.details(model),
        "description": render_markdown(model.description or "", longest=RENDERED),
        "others": [one.version for one in Model.list(workspace, model.name) if one.version != model.version],
        "sections": {section["title"]: section["facts"] for section in sections},
        "problem": problem,
        "services": workspace.services_of(model.id),
        "all_services": [folder.name for folder in services_store.all_folders(workspace.path)],
        "targets": configured.names(workspace.path),
    }


def _rows(request: Request, name: str | None) -> list[dict[str, Any]]:
    workspace = workspace_of(request)
    in_use = services_store.models_in_use(workspace.path)
    return [
        {**described.summary(model), "metrics": compare.metrics(model.record), "services": in_use.get(model.id, [])}
        for model in Model.list(workspace, name)
    ]


def _chosen(texts: Sequence[str]) -> list[int]:
    try:
        numbers = sorted({int(text) for text in texts}, reverse=True)
    except ValueError:
        raise HTTPException(400, f"version={texts!r}: give numbers of versions, such as version=1&version=2.") from None
    if len(numbers) > _MOST:
        raise HTTPException(400, f"{len(numbers)} versions are chosen; at most {_MOST} can be compared.")
    return numbers


def _sections(request: Request, models: Sequence[Model]) -> tuple[list[FactSection], str]:
    try:
        found = compare.compare(request.app.state.workspace_dir, [model.record for model in models])
    except ModelError as error:
        return [], str(error)
    parts = {part: [fact for fact in found if fact.part == part] for part in _TITLES}
    return [{"title": _TITLES[part], "facts": facts} for part, facts in parts.items() if facts], ""


def _post(change: _Change) -> Callable[[Request], Any]:
    async def post(request: Request) -> Response:
        form = await form_of(request)

        def do() -> str:
            place = request.path_params
            model = Model(workspace_of(request), place["name"], version=place["version"])
            return change(model, form) or f"../{model.version}"

        return RedirectResponse(await asyncio.to_thread(do), 303)

    return post


def _alias(model: Model, form: dict[str, str]) -> None:
    """Point an alias at the model version (field `alias`), or remove an alias (`remove`)."""
    if form.get("remove"):
        model.remove_alias(form["remove"])
    else:
        model.set_alias(form.get("alias", "").strip())


def _tag(model: Model, form: dict[str, str]) -> None:
    key, value, gone = tag_of(form)
    if gone:
        model.remove_tags(gone)
    else:
        model.add_tags({key: value})


def _describe(model: Model, form: dict[str, str]) -> None:
    text = form.get("description", "").replace("\r\n", "\n").strip()
    if len(text) > _MOST_TEXT:
        raise HTTPException(400, f"A description has at most {_MOST_TEXT} characters, got {len(text)}.")
    model.update(description=text)


def _delete(model: Model, form: dict[str, str]) -> str:
    model.delete()
    return "../../../models"


def _deploy(model: Model, form: dict[str, str]) -> str:
    """Deploy a model version as a new service. Return the service page's URL."""
    name = form.get("service", "").strip()
    model.deploy(
        model.workspace,
        name,
        target=form.get("target") or configured.LOCAL,
        port=whole_number(form, "port"),
        workers=whole_number(form, "workers") or 1,
        auth=True if form.get("auth") else None,
    )
    return f"../../../services/{name}"


def _serve(model: Model, form: dict[str, str]) -> str:
    """Let an existing service serve the model version. Return the service page's URL."""
    service = Service(model.workspace, form.get("service", ""))
    service.update(model.id, wait=False)
    return f"../../../services/{service.name}"
