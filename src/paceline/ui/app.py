"""The ASGI application of the live page: paths and their views.

Each request reads the workspace's files, so a page always shows the current state.

/                         the runs
/runs/ID                  a run: state, curves, log; further paths for its files, details and sweep
/runs/ID/live             changes (server-sent events)
/compare?run=A&run=B      a comparison of runs
/models  /services  /compute
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from paceline.errors import FileNameError, ModelError, PacelineError, RunNotFoundError, ServiceNotFoundError
from paceline.runs.search.index import FactsCache, RunIndex
from paceline.ui import bundle, render
from paceline.ui.config import UiConfig
from paceline.ui.curves import CurveStore
from paceline.ui.feed import RunFeeds
from paceline.ui.guard import Guard, Token
from paceline.ui.pieces import PieceStreams
from paceline.ui.shares import SharedLinks
from paceline.ui.views import (
    actions,
    compare,
    details,
    files,
    listing,
    log,
    places,
    run,
    saved,
    shares,
    start,
    steps,
    sweep,
)
from paceline.ui.visitors import ANYBODY, Visitor, Visitors

#: Maximum bytes of a submitted form. Its largest fields are notes, or the text of a job file.
_MOST_BODY = 1 << 18


@dataclass(frozen=True)
class Heading:
    """The values of the heading at the top of every web page.

    Attributes:
        read_only: Whether the visitor may not change the run, model or service of the page.
        can_start: Whether the visitor may start runs.
        can_share: Whether the visitor may create share links.
        is_shared: Whether the visitor came by a share link instead of the token.
    """

    workspace: str
    workspace_name: str
    read_only: bool
    can_start: bool
    can_share: bool
    is_shared: bool = False
    visitor: Visitor = ANYBODY


class _Static(StaticFiles):
    """The page's static files, whose URLs change with their content."""

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        shared = bundle.SHARED.get(path)
        return super().lookup_path(path) if shared is None else (str(shared), shared.stat())

    async def get_response(self, path: str, scope: Any) -> Response:
        response = await super().get_response(path.partition("/")[2], scope)
        response.headers["cache-control"] = "public, max-age=31536000, immutable"
        return response


def make_app(config: UiConfig, token: Token | None = None) -> Starlette:
    """Return the page's ASGI application for a workspace.

    Raises:
        WorkspaceError: The token can't be read or written.
        UserError: The members file has an error.
    """
    workspace_dir = Path(config.workspace)
    token = token or Token(workspace_dir)
    routes = [
        Route("/", listing.page),
        Route("/live", listing.live),
        *compare.routes(),
        Route("/complete", listing.complete),
        *places.routes(),
        Route("/runs/{run_id}", run.page),
        Route("/runs/{run_id}/live", run.live),
        Route("/runs/{run_id}/head", run.head),
        Route("/runs/{run_id}/head/live", run.head_live),
        Route("/runs/{run_id}/curves", run.curves),
        Route("/runs/{run_id}/others", run.others),
        Route("/runs/{run_id}/own", run.own),
        *log.routes(),
        *files.routes(),
        *details.routes(),
        *sweep.routes(),
        *steps.routes(),
        Route("/runs/{run_id}/stacks", run.stacks, methods=["POST"]),
        *actions.routes(),
        *start.routes(),
        *saved.routes(),
        *shares.routes(),
        Mount("/static", _Static(directory=bundle.STATIC)),
    ]
    visitors = Visitors(config)
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Guard, config=config, token=token, shares=SharedLinks(workspace_dir), visitors=visitors),
            Middleware(GZipMiddleware, minimum_size=1000, compresslevel=5),
        ],
        exception_handlers={PacelineError: _failed, HTTPException: _failed, Exception: _broken},
        max_body_size=_MOST_BODY,
    )
    curves = CurveStore()
    # An event that is set when the server shuts down. Event streams wait for it, because they would never end otherwise.
    app.state.closing = asyncio.Event()
    app.state.config, app.state.token, app.state.curves = config, token, curves
    app.state.workspace_dir = workspace_dir
    # Read metric logs for at most 0.5 s in each refresh, because pages wait for the refresh.
    app.state.index = RunIndex(
        workspace_dir / "runs", metrics_s=0.5, cache=FactsCache(workspace_dir / "runs"), is_busy=curves.is_open
    )
    app.state.rows = listing.RunRows()
    app.state.feeds = RunFeeds(workspace_dir / "runs", curves)
    app.state.pieces = PieceStreams()
    app.state.targets, app.state.loads = places.TargetWatch(workspace_dir), {}
    name = workspace_dir.parent.name if workspace_dir.name == ".paceline" else workspace_dir.name
    app.state.ui = Heading(str(workspace_dir), name, config.read_only, not config.read_only, not config.read_only)
    return app


_MISSING = (RunNotFoundError, ServiceNotFoundError, FileNameError, ModelError)


def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        status, text = error.status_code, error.detail
    else:
        status, text = (404 if isinstance(error, _MISSING) else 409), str(error)
    return _say(request, status, text)


def _broken(request: Request, error: Exception) -> Response:
    return _say(
        request, 500, f"Paceline has a bug: {type(error).__name__}: {error}. The server's output has the traceback."
    )


def _say(request: Request, status: int, text: str) -> Response:
    if status == 404 and (gone := actions.deleted_page(request)) is not None:
        return gone
    if "text/html" in request.headers.get("accept", ""):
        return render.page(request, "error.html", status, said=text, code=status)
    return JSONResponse({"error": text}, status)
