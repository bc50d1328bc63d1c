"""The pages of share links and members, and the page that other sites embed."""

from __future__ import annotations

from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from paceline.runs import store
from paceline.ui import render
from paceline.ui.members import ADMIN, Accounts, last_changes
from paceline.ui.shares import MOST_DAYS, PREFIX, Share, SharedLinks
from paceline.ui.views import compare
from paceline.ui.views.common import digits, fields_of, runs_dir
from paceline.ui.visitors import ANYBODY, need, visitor_of

#: A share link stores these query parameters of a page with curves.
_SETTINGS = ("metric", "axis", "smooth", "scale", "ranks", "attempts", "from", "to")

#: Maximum number of lines from the log of changes on one page.
_CHANGES = 500


def routes() -> list[Route]:
    """Return the routes of share links, of embedded curves, and of members."""
    return [
        Route("/shares", page),
        Route("/shares", change, methods=["POST"]),
        Route("/members", members),
        Route("/embed", embed),
        Route("/embed/curves", compare.curves),
    ]


def page(request: Request) -> Response:
    """Render share links and a form for a link. Query: `run` (several)."""
    return _rendered(request, [run_id for run_id in request.query_params.getlist("run") if run_id])


async def change(request: Request) -> Response:
    """Create a share link (fields `run`, `days`, `origins`, `settings`), or remove a link (`withdraw`)."""
    form = await fields_of(request)
    shares = SharedLinks(request.app.state.workspace_dir)
    if gone := form.get("withdraw", [""])[-1]:
        shares.withdraw(gone)
        return RedirectResponse("./shares", 303)
    runs = tuple(
        dict.fromkeys(store.find(runs_dir(request), run_id).run_id for run_id in form.get("run", ()) if run_id)
    )
    text = form.get("days", [""])[-1]
    if (days := digits(text)) is None:
        raise HTTPException(400, f"days={text[:50]!r} must be a whole number from 1 to {MOST_DAYS}.")
    share, token = shares.make(runs, days, tuple(form.get("origins", [""])[-1].split()))
    settings = form.get("settings", [""])[-1]
    path = f"{PREFIX.strip('/')}/{token}/" + (f"embed{'?' if settings else ''}{settings}" if runs else "")
    return _rendered(request, list(runs), share, path)


def embed(request: Request) -> Response:
    """Render only the curves of runs, for other sites to embed."""
    chosen = compare.requested_runs(request)
    ids, names = [folder.run_id for folder in chosen.folders], chosen.names()
    return render.page(
        request,
        "embed.html",
        runs=list(zip(ids, names, [record.status for record in chosen.records], strict=True)),
        curves=f"runs/{ids[0]}/curves" if len(ids) == 1 else "embed/curves",
        is_live=any(not record.is_terminal for record in chosen.records),
        rank_count=len(chosen.folders[0].ranks(chosen.records[0].world_size)) if len(ids) == 1 else 1,
    )


def _rendered(request: Request, runs: list[str], made: Share | None = None, path: str = "") -> Response:
    settings = [(name, value) for name, value in request.query_params.multi_items() if name in _SETTINGS]
    return render.page(
        request,
        "shares.html",
        shares=SharedLinks(request.app.state.workspace_dir).all(),
        runs=runs,
        made=made,
        path=path,
        most_days=MOST_DAYS,
        settings=urlencode(settings),
    )


def members(request: Request) -> Response:
    """Show admins the service accounts and the log of members' changes."""
    if visitor_of(request) is ANYBODY:
        raise HTTPException(404, "This page has no members. `paceline ui --members FILE` gives it some.")
    need(request, ADMIN)
    folder = request.app.state.workspace_dir
    return render.page(request, "members.html", actions=last_changes(folder, _CHANGES), accounts=Accounts(folder).all())
