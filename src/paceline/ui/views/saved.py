"""Saved views of pages: save, list, rename and remove."""

from __future__ import annotations

from typing import TypedDict

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from paceline.errors import UserError
from paceline.runs.search.saved_views import SavedView, SavedViews
from paceline.ui import render
from paceline.ui.views.common import form_of


class ShownViews(TypedDict):
    """The saved views of a page, as its template `saved_views.html` takes them."""

    views_of: str
    saved_views: list[SavedView]


def routes() -> list[Route]:
    """Return the routes of saved views."""
    return [Route("/views", page), Route("/views", change, methods=["POST"])]


def shown_on(request: Request, page_name: str) -> ShownViews:
    """Return the saved views of a page, for its template."""
    views = SavedViews(request.app.state.workspace_dir)
    return {"views_of": page_name, "saved_views": [view for view in views.values() if view.page == page_name]}


def page(request: Request) -> Response:
    return render.page(request, "views.html", views=[*SavedViews(request.app.state.workspace_dir).values()])


async def change(request: Request) -> Response:
    """Save, rename or remove a saved view of a page (form fields `action` and `name`)."""
    form = await form_of(request)
    views = SavedViews(request.app.state.workspace_dir)
    name = form.get("name", "").strip()
    match form.get("action"):
        case "save":
            view = SavedView(
                name=name,
                page=form.get("page", "runs"),
                query=form.get("query", "").removeprefix("?"),
                layout=form.get("layout", ""),
            )
            views.save(view, replace=form.get("replace") == "1")
        case "rename":
            views.rename(name, form.get("new_name", "").strip())
        case "remove":
            views.remove(name)
        case other:
            raise UserError(f"action {other!r} of a view must be save, rename or remove.")
    return RedirectResponse("./views", 303)
