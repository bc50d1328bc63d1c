"""A sweep's page: its trials as a table, and the pictures that `SweepRun.draw` draws."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from paceline.runs.folder import RunFolder
from paceline.sweeps import children, results
from paceline.sweeps.live import table
from paceline.sweeps.live.board import Standing
from paceline.sweeps.pictures import draw, svg
from paceline.sweeps.pictures.sketch import Sketch
from paceline.sweeps.spec import SweepSpec
from paceline.ui import render, run_page
from paceline.ui.views.common import folder_of

#: Trials in the table.
_ROWS = 500


async def page(request: Request) -> Response:
    folder = folder_of(request)
    found = await asyncio.to_thread(run_page.head, folder)
    if found["record"].sweep is None:
        raise HTTPException(404, f"run {folder.run_id} is no sweep; its kind is {found['record'].kind}.")
    board = await asyncio.to_thread(_board, request.app.state, folder, found["record"])
    return render.page(request, "sweep.html", tab="sweep", **found, **board)


async def part(request: Request) -> Response:
    """The table and the pictures anew."""
    folder = folder_of(request)
    found = await asyncio.to_thread(run_page.head, folder)
    board = await asyncio.to_thread(_board, request.app.state, folder, found["record"])
    return render.page(request, "sweep_part.html", tab="sweep", **found, **board)


def _board(state: Any, folder: RunFolder, record: Any) -> dict[str, Any]:
    spec = SweepSpec.from_json(record.sweep)
    trials = children.trials(folder, spec)
    sketch = _sketch(state, folder, spec, trials)
    rows = results.rows(trials, spec)
    columns = [column for column in results.column_names(rows, spec) if column not in ("trial", "run_id", "status")]
    order = {trial.number: place for place, trial in enumerate(results.best_trials(trials, spec))}
    rows.sort(key=lambda row: (order.get(row["trial"], len(order)), -row["trial"]))
    return {
        "lines": table.lines(Standing(record=record, spec=spec, trials=tuple(trials))),
        "columns": columns,
        "rows": rows[:_ROWS],
        "more": max(0, len(rows) - _ROWS),
        "best": set(order),
        "sketch": sketch,
        # Numbers alone, so nothing in it can end the element.
        "places": json.dumps({line.number: [_short(place) for place in line.places] for line in sketch.lines}),
        "svg": svg,
    }


def _sketch(state: Any, folder: RunFolder, spec: SweepSpec, trials: list[Any]) -> Sketch:
    """The pictures; the importance, which takes a forest some seconds, once for each number of trials that have ended."""
    kept: dict[Any, Sketch] = state.__dict__.setdefault("sketches", {})
    ended = sum(trial.is_over for trial in trials)
    key = (folder.run_id, ended, tuple(len(trial.curve) for trial in trials))
    if key not in kept:
        for other in [other for other in kept if other[0] == folder.run_id] or [*kept][:-8]:
            del kept[other]
        kept[key] = draw.sketched(f"Sweep {folder.run_id}", spec, trials)
    return kept[key]


def _short(place: float | None) -> float | None:
    return None if place is None else round(place, 4)
