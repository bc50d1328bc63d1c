"""A run's pages beside its curves: the head and one piece, both of which follow the run until it has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord
from paceline.ui import render, run_page
from paceline.ui.pieces import PagePiece, PiecesSeen, stamp_of
from paceline.ui.views.common import events, folder_of, place_of

#: What a piece's template shows of a run.
Find = Callable[[RunFolder, RunRecord], dict[str, Any]]


def routes(name: str, find: Find) -> list[Route]:
    """The page of this name, and the stream of what changes in it."""
    path = f"/runs/{{run_id}}/{name}"
    return [
        Route(path, lambda request: _page(request, name, find)),
        Route(f"{path}/live", lambda request: live(request, name, find)),
    ]


def _page(request: Request, name: str, find: Find) -> Response:
    """The page `run_<name>.html` around the piece `run_<name>_part.html`."""
    folder = folder_of(request)
    head = run_page.head(folder)
    found = find(folder, head["record"])
    place = f"head:{stamp_of(head)},{name}:{stamp_of(found)}"
    return render.page(request, f"run_{name}.html", tab=name, place=place, **head, **found)


def live(request: Request, name: str, find: Find | None) -> Response:
    """The same two as they change; the head alone where there is no `find`."""
    folder = folder_of(request)

    def look() -> PiecesSeen:
        head = run_page.head(folder)
        pieces = {"head": head_piece(request, name, head)}
        if find is not None:
            found = find(folder, head["record"])
            template = f"run_{name}_part.html"
            pieces[name] = PagePiece(stamp_of(found), lambda: render.text(request, template, **head, **found))
        return PiecesSeen(pieces, is_over=head["record"].is_terminal)

    streams = request.app.state.pieces
    return events(request, streams.follow(request.url.path, look, place_of(request)))


def head_piece(request: Request, tab: str, head: dict[str, Any]) -> PagePiece:
    """The top of a run's page."""
    return PagePiece(stamp_of(head), lambda: render.text(request, "run_head.html", tab=tab, **head))
