"""The page of a sweep: a table of its trials, and the pictures of `SweepRun.draw`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from paceline.runs.folder import RunFolder
from paceline.sweeps import live_trials, results, start
from paceline.sweeps.again import read_space, space_text, submit_again
from paceline.sweeps.live_trials import Board, Standing
from paceline.sweeps.pictures import draw, svg
from paceline.sweeps.samplers.samplers import NAMES
from paceline.sweeps.spec import SweepSpec
from paceline.ui import render, run_page
from paceline.ui.pieces import PagePiece, PiecesSeen, stamp_of
from paceline.ui.views import common
from paceline.ui.views.common import folder_of

#: Maximum number of trials that the table lists.
_ROWS = 500
#: Seconds between polls. If pictures changed more often, they would be hard to read.
_LOOK_S = 2.0


def routes() -> list[Route]:
    """Return the routes of a sweep's page."""
    return [
        Route("/runs/{run_id}/sweep", page),
        Route("/runs/{run_id}/sweep/live", live),
        Route("/runs/{run_id}/more", more, methods=["POST"]),
        Route("/runs/{run_id}/again", again, methods=["POST"]),
    ]


def page(request: Request) -> Response:
    folder = folder_of(request)
    head = _head(folder)
    standing = Board(folder).look()
    shown, place = _shown(request.app.state, standing), f"head:{stamp_of(head)},sweep:{_stamp(standing)}"
    actions: render.TemplateValues = {
        "spec": standing.spec,
        "space": space_text(standing.spec.space),
        "samplers": NAMES,
    }
    return render.page(request, "run_sweep.html", tab="sweep", place=place, **head, **shown, **actions)


async def more(request: Request) -> Response:
    """Add trials to the sweep (form field `trials`)."""
    form = await common.form_of(request)
    folder = folder_of(request)
    await asyncio.to_thread(start.more, folder, _count(form, "trials"))
    return RedirectResponse(f"../{folder.run_id}/sweep", 303)


async def again(request: Request) -> Response:
    """Start a sweep like this one, with a changed search space.

    Form fields: `space`, `trials`, `concurrent`, `sampler`, `learn` ("1": use the results of this sweep).
    """
    form = await common.form_of(request)
    folder = folder_of(request)

    def submit() -> RunFolder:
        before = SweepSpec.from_json(_head(folder)["record"].sweep or {})
        return submit_again(
            folder,
            request.app.state.workspace_dir,
            space=read_space(form.get("space", ""), before.space),
            trials=_count(form, "trials"),
            concurrent=_count(form, "concurrent"),
            sampler=form.get("sampler", "").strip(),
            learn=form.get("learn") == "1",
        )

    made = await asyncio.to_thread(submit)
    return RedirectResponse(f"../{made.run_id}/sweep", 303)


def _count(form: Mapping[str, str], name: str) -> int:
    text = form.get(name, "").strip()
    if (count := common.digits(text)) is None:
        raise HTTPException(400, f"{name}={text[:50]!r} is not a whole number of 1 or more.")
    return count


def live(request: Request) -> Response:
    """Stream changes of a sweep's header, table and pictures."""
    folder, state = folder_of(request), request.app.state
    _head(folder)
    # Use one `Board` (the trials' data) for all polls, because its method `look` reads only new lines.
    board = Board(folder)

    def look() -> PiecesSeen:
        head, standing = run_page.head(folder), board.look()
        piece = PagePiece(
            _stamp(standing), lambda: render.text(request, "run_sweep_part.html", **head, **_shown(state, standing))
        )
        pieces = {"head": common.head_piece(request, "sweep", head), "sweep": piece}
        return PiecesSeen(pieces, is_over=standing.record.is_terminal)

    return common.pieces(request, look, _LOOK_S)


def _head(folder: RunFolder) -> run_page.RunHead:
    """Return the data of a sweep's header; raise 404 for other runs."""
    head = run_page.head(folder)
    if (record := head["record"]).sweep is None:
        raise HTTPException(404, f"run {folder.run_id} is not a sweep; its kind is {record.kind}.")
    return head


def _stamp(standing: Standing) -> str:
    """Return a hash that changes when the sweep's page must be rendered again."""
    trials = [
        (trial.number, trial.shown, len(trial.curve), *map(len, trial.further), trial.started_utc)
        for trial in standing.trials
    ]
    return stamp_of(standing.record, trials)


def _shown(state: Any, standing: Standing) -> render.TemplateValues:
    spec, trials = standing.spec, standing.trials
    sketch = draw.sketched(f"Sweep {standing.record.run_id}", spec, trials, _shares(state, standing))
    rows = results.rows(trials, spec)
    columns = [column for column in results.column_names(rows, spec) if column not in ("trial", "run_id", "status")]
    order = {trial.number: place for place, trial in enumerate(results.best_trials(trials, spec))}
    rows.sort(key=lambda row: (order.get(row["trial"], len(order)), -row["trial"]))
    return {
        "lines": live_trials.lines(standing),
        "columns": columns,
        "rows": rows[:_ROWS],
        "more": max(0, len(rows) - _ROWS),
        "best": set(order),
        "sketch": sketch,
        "places": draw.places(sketch),
        "svg": svg,
    }


def _shares(state: Any, standing: Standing) -> draw.Shares:
    """Return each hyperparameter's importance in a sweep, cached until the next trial ends."""
    kept: dict[tuple[str, int], draw.Shares] = state.__dict__.setdefault("shares", {})
    run_id, ended = standing.record.run_id, sum(trial.is_over for trial in standing.trials)
    if (run_id, ended) not in kept:
        for other in [other for other in kept if other[0] == run_id] or [*kept][:-8]:
            kept.pop(other, None)  # another request may have removed this entry
        kept[run_id, ended] = draw.shares(standing.spec, [trial for trial in standing.trials if trial.is_over])
    return kept[run_id, ended]
