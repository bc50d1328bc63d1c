"""A run's pages: state, curves and log; its files; what it was made of."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from paceline.runs import downloads, read
from paceline.runs.folder import RunFolder
from paceline.runs.log_start import last_lines_start
from paceline.runs.logs import LogLine, PrepareFollower, last_lines, lines_of
from paceline.runs.record import RunRecord
from paceline.runs.visible import visible_line
from paceline.ui import files as run_files
from paceline.ui import render, run_page
from paceline.ui.curves import CurveStore
from paceline.ui.feed import line_json
from paceline.ui.pieces import stamp_of
from paceline.ui.views import side
from paceline.ui.views.common import as_json, curves_asked, events, file_name, folder_of, number, place_of, whole

#: Lines that a page asks for at once, and that a search gives.
_MOST_LINES, _MOST_FOUND = 20_000, 2_000
#: The supervisor's log and those of preparation are short; of one that is not, the end.
_WINDOW = 1 << 20


async def page(request: Request) -> Response:
    folder = folder_of(request)
    if folder.run_id != request.path_params["run_id"]:
        # A part of an id that is one run's alone.
        return RedirectResponse(f"./{folder.run_id}", 303)
    # The page will ask for them as soon as it is there; of a long run they take as long to read as it takes to come there.
    reading = asyncio.get_running_loop().run_in_executor(None, _read_on, request.app.state.curves, folder)
    reading.add_done_callback(lambda done: done.exception())
    found = await asyncio.to_thread(run_page.head, folder)
    nodes = found["job"].node_count if found["job"] else 1
    return render.page(request, "run.html", tab="run", nodes=nodes, settings=request.url.query, **found)


def head(request: Request) -> Response:
    """The top of the page anew, once the state has changed."""
    return render.page(request, "run_head.html", tab="run", **run_page.head(folder_of(request)))


async def head_live(request: Request) -> Response:
    """The top of the page of one file."""
    return side.live(request, "files", None)


async def live(request: Request) -> Response:
    feed = request.app.state.feeds.of(folder_of(request).run_id)
    return events(request, feed.watch(place_of(request)))


def curves(request: Request) -> Response:
    """The points of curves: `name` (several), `ranks`, `axis`, `from` and `to`, `px`, `attempts=all`."""
    folder = folder_of(request)
    asked = curves_asked(request)
    if asked["axis"] not in ("step", "time", "relative"):
        raise HTTPException(400, f"axis={asked['axis']!r}: there are step, time and relative.")
    asked |= {"ranks": _ranks(request), "all_attempts": request.query_params.get("attempts") == "all"}
    return as_json(run_page.curves_of(request.app.state.curves, folder, **asked))


def others(request: Request) -> Response:
    """Images and tables that were logged, as a piece of the page."""
    folder = folder_of(request)
    with request.app.state.curves.open(folder) as found:
        found.look()
        others = run_page.others_of(found)
    return render.page(request, "run_others.html", others=others, run_id=folder.run_id)


def log(request: Request) -> Response:
    """Lines of the log: `last` of them, those of `rank` and `attempt`, those with `search` in them; `of=driver` or `prepare`."""
    folder = folder_of(request)
    last = whole(request, "last", 500, least=1, most=_MOST_LINES)
    search = request.query_params.get("search", "")
    of = request.query_params.get("of", "workers")
    rank, attempt = number(request, "rank"), number(request, "attempt")
    record = read.record(folder)
    if of in ("driver", "prepare"):
        return as_json({"lines": _side_lines(folder, record, of, last, search), "more": False})
    chosen = [one for one in folder.ranks(record.world_size) if rank is None or one == rank]
    attempts = [one.number for one in record.attempts if attempt is None or one.number == attempt]
    # From the start where something is looked for, which may stand anywhere.
    start = None if search else last_lines_start(folder, attempts, chosen, last)
    found = lines_of(folder, attempts, chosen, start, in_blocks=bool(search))
    if search:
        found = _with(search.lower(), found)
    lines = deque(found, maxlen=_MOST_FOUND if search else last)
    return as_json({"lines": [*map(line_json, lines)], "more": len(lines) == lines.maxlen})


def look(request: Request) -> Response:
    folder = folder_of(request)
    found, seen = run_page.head(folder), run_files.look(folder, file_name(request, "look"))
    place = f"head:{stamp_of(found)}"
    return render.page(request, "run_look.html", tab="files", seen=seen, place=place, **found)


def file(request: Request) -> Response:
    return run_files.download(folder_of(request), file_name(request, "file"))


def files(folder: RunFolder, record: RunRecord) -> dict[str, Any]:
    """What the page of all files shows."""
    listed = downloads.files(folder)
    return {"files": listed, "total": sum(file.size_bytes for file in listed)}


def _read_on(curves: CurveStore, folder: RunFolder) -> None:
    with curves.open(folder) as found:
        found.look()


def _ranks(request: Request) -> list[int] | None:
    text = request.query_params.get("ranks", "")
    if not text:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise HTTPException(400, f"ranks={text!r}: give numbers, such as 0,3.") from None


def _with(wanted: str, blocks: Iterator[LogLine]) -> Iterator[LogLine]:
    """Yield the lines that have this text, in any case. Most blocks have none, and are not cut into lines."""
    for block in blocks:
        if wanted in block.text.lower():
            yield from (replace(block, text=line) for line in block.text.split("\n") if wanted in line.lower())


def _side_lines(folder: RunFolder, record: RunRecord, of: str, last: int, search: str) -> list[list[Any]]:
    if of == "driver":
        texts = [(0, text) for text in last_lines(folder.driver_log, last, window=_WINDOW)]
    else:
        follower = PrepareFollower(folder, record.job.node_count if record.job else 1)
        texts = [(line.rank, line.text) for line in follower.new()]
        follower.close()
    wanted = [(rank, text) for rank, text in texts if search.lower() in text.lower()]
    return [[0, rank, visible_line(text), 1] for rank, text in wanted[-last:]]
