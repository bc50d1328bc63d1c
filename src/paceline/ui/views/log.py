"""The log of a run: lines as JSON, and the whole log as text."""

from __future__ import annotations

from itertools import chain

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from paceline.errors import UserError
from paceline.ui import log_view
from paceline.ui.views import common

#: Maximum number of lines of a log in one response, and of characters of a search.
_MOST_LINES, _LONGEST_SEARCH = 20_000, 1000


def routes() -> list[Route]:
    """Return the routes of a run's log."""
    return [Route("/runs/{run_id}/log", _lines), Route("/runs/{run_id}/log/text", _text)]


def _lines(request: Request) -> Response:
    """Return lines of the log as JSON.

    Query: `last`, `rank`, `attempt`, `level`, `search`, `regex=1`; `of=driver` or `prepare`. With `line`, return the
    lines around that line, of which `last` lines come before it.
    """
    folder, place = common.folder_of(request), request.query_params.get("line")
    try:
        query = _query(request)
        if place:
            found = log_view.around(folder, place, query.rank, query.last)
        else:
            found = log_view.find(folder, query, common.reader_check(request))
    except UserError as error:
        raise HTTPException(400, str(error)) from error
    return common.as_json(found)


def _text(request: Request) -> Response:
    """Return the log lines that the query selects, as a text file."""
    folder = common.folder_of(request)
    headers = {"content-disposition": f'attachment; filename="{folder.run_id}.log"'}
    parts = log_view.text(folder, _query(request))
    # Read the first part before the response begins, because a later error could not become an error response.
    first = next(parts, b"")
    return StreamingResponse(chain([first], parts), media_type="text/plain", headers=headers)


def _query(request: Request) -> log_view.LogQuery:
    asked = request.query_params
    rank, attempt = (common.whole(request, name, -1, least=-1) for name in ("rank", "attempt"))
    return log_view.LogQuery(
        source=asked.get("of", "workers"),
        rank=None if rank < 0 else rank,
        attempt=None if attempt < 0 else attempt,
        last=common.whole(request, "last", 500, least=1, most=_MOST_LINES),
        search=asked.get("search", "")[:_LONGEST_SEARCH],
        is_regex=asked.get("regex") == "1",
        level=asked.get("level", ""),
    )
