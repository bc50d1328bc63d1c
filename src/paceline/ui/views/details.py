"""The page of a run's details, with the differences from another run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paceline.errors import PacelineError
from paceline.reports import diff
from paceline.reports.compare import text_of
from paceline.runs import read, store
from paceline.runs.folder import RunFolder
from paceline.runs.ids import check_run_id
from paceline.runs.record import RunRecord
from paceline.runs.search.facts import RunFacts
from paceline.ui import render, run_page
from paceline.ui.pieces import stamp_of
from paceline.ui.views import common

#: Maximum number of runs in the list for a choice; maximum number of records to read to find the script's previous run.
_CHOICES, _RECORDS = 100, 20
_TITLES = {
    "parameters": "Parameters",
    "code": "Code",
    "environment": "Environment",
    "data": "Data",
    "topology": "Nodes and processes",
    "settings": "Settings",
}


class DifferenceRow(TypedDict):
    """A property, such as a parameter, and its text in two runs."""

    name: str
    mine: str
    theirs: str


def routes() -> list[Route]:
    """Return the routes of a run's details."""
    _, live = common.routes("details", run_page.details)
    return [Route("/runs/{run_id}/details", _page), live]


def _page(request: Request) -> Response:
    folder = common.folder_of(request)
    head = run_page.head(folder)
    values = run_page.details(folder, head["record"])
    place = f"head:{stamp_of(head)},details:{stamp_of(values)}"
    request.app.state.index.refresh_within(common.PATIENCE_S)
    choices = _choices(request.app.state.index.entries(), head["record"])
    wanted = request.query_params.get("with", "").strip()
    if wanted:
        other: RunFolder | None = store.find(common.runs_dir(request), check_run_id(wanted))
    else:
        other = _previous([RunFolder(common.runs_dir(request) / one.run_id) for one in choices], head["record"])
    found = differences((folder, head["record"]), (other, read.record(other))) if other else {}
    shown: render.TemplateValues = {
        "other": other.run_id if other else "",
        "choices": choices[:_CHOICES],
        "differences": found,
    }
    return render.page(request, "run_details.html", tab="details", place=place, **head, **values, **shown)


def differences(
    mine: tuple[RunFolder, RunRecord], theirs: tuple[RunFolder, RunRecord]
) -> dict[str, list[DifferenceRow]]:
    """Return two runs' differing properties as {table title: rows}."""
    own, other = diff.sides(*mine), diff.sides(*theirs)
    found: dict[str, list[DifferenceRow]] = {}
    for kind, title in _TITLES.items():
        names = [name for name in {**own[kind], **other[kind]} if own[kind].get(name) != other[kind].get(name)]
        if names:
            found[title] = [
                DifferenceRow(name=name, mine=text_of(own[kind].get(name)), theirs=text_of(other[kind].get(name)))
                for name in names
            ]
    return found


def _choices(entries: Sequence[RunFacts], record: RunRecord) -> list[RunFacts]:
    """Return the runs to compare with, the most similar first.

    Runs of this run's experiment and sweep come first. Among them, runs that are older than this run come first.
    """
    others = [one for one in entries if one.run_id != record.run_id]
    return sorted(
        others,
        key=lambda one: (
            one.experiment != record.experiment,
            one.parent != record.parent_run_id,
            one.created_utc > record.created_utc,
        ),
    )


def _previous(folders: Sequence[RunFolder], record: RunRecord) -> RunFolder | None:
    for folder in folders[:_RECORDS]:
        try:
            found = read.record(folder)
        # Skip a run that was removed after the listing, or whose record is unreadable.
        except (PacelineError, OSError):
            continue
        if (found.experiment, found.created_utc <= record.created_utc) != (record.experiment, True):
            return None
        if _script(found) == _script(record):
            return folder
    return None


def _script(record: RunRecord) -> Sequence[str]:
    return record.job.entry_words if record.job else ()
