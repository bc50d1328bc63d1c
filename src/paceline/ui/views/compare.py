"""The page that compares runs: their curves and their differences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypedDict

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from paceline.reports import diff
from paceline.runs import store
from paceline.runs.folder import RunFolder
from paceline.runs.ids import check_run_id
from paceline.runs.metrics import json_safe
from paceline.runs.record import RunRecord
from paceline.ui import render, run_page
from paceline.ui.views.common import as_json, curve_query, runs_dir

#: Most runs in a comparison. More runs are hard to distinguish.
_MOST = 12
#: Kind of difference in `paceline diff` -> heading on the page.
_TITLES = {
    "parameters": "Parameters",
    "topology": "Topology",
    "settings": "Settings",
    "code": "Code",
    "data": "Data",
    "environment": "Environment",
}
_WHOLE = ("parameters", "code")


class ComparedRow(TypedDict):
    """A compared fact, with its value in each run."""

    name: str
    values: list[str]
    differs: bool


class Section(TypedDict):
    """A section of compared facts, such as the parameters of the runs."""

    title: str
    rows: list[ComparedRow]


def page(request: Request) -> Response:
    folders = _folders(request)
    heads = [run_page.head(folder) for folder in folders]
    sections = differences([(head["record"], folder) for head, folder in zip(heads, folders, strict=True)])
    return render.page(request, "compare.html", runs=heads, sections=sections)


def curves(request: Request) -> Response:
    """Return a curve for each run and metric: that of the run's lowest rank, over all attempts."""
    query = curve_query(request)
    drawn: list[dict[str, object]] = []
    listed: dict[str, run_page.MetricJson] = {}
    for place, folder in enumerate(_folders(request)):
        one = run_page.curves_of(request.app.state.curves, folder, query)
        lowest = {entry["name"]: entry["ranks"][0] for entry in one["names"] if not entry["node"]}
        for entry in one["names"]:
            if not entry["node"]:
                listed.setdefault(entry["name"], entry)
        drawn += [
            {**curve, "run": place}
            for curve in one["curves"]
            if not curve["node"] and curve["rank"] == lowest[curve["name"]]
        ]
    return as_json({"names": [*listed.values()], "curves": drawn, "others": 0})


def _folders(request: Request) -> list[RunFolder]:
    ids = list(dict.fromkeys(request.query_params.getlist("run")))
    if not ids:
        raise HTTPException(400, "No run is named. Choose some in the list of runs, and then Compare.")
    if len(ids) > _MOST:
        raise HTTPException(400, f"{len(ids)} runs are chosen; {_MOST} at most can be compared.")
    return [store.find(runs_dir(request), check_run_id(run_id)) for run_id in ids]


def differences(runs: Sequence[tuple[RunRecord, RunFolder]]) -> list[Section]:
    """Return the compared facts in sections, with the value of each run.

    The sections of parameters and code list all facts, the other sections only differences.
    """
    columns = [diff.sides(folder, record) for record, folder in runs]
    sections: list[Section] = []
    for part, title in _TITLES.items():
        of_runs = [column[part] for column in columns]
        rows: list[ComparedRow] = []
        for name in dict.fromkeys(name for values in of_runs for name in values):
            values = [_text(values.get(name)) for values in of_runs]
            is_different = len(set(values)) > 1
            if is_different or part in _WHOLE:
                rows.append({"name": name, "values": values, "differs": is_different})
        if rows:
            sections.append({"title": title, "rows": sorted(rows, key=lambda row: not row["differs"])})
    return sections


def changes(request: Request) -> Response:
    """Compare the source files of two runs, and find where their metrics diverge.

    This is a separate piece of the page, because it may take long.
    """
    folders = _folders(request)
    if len(folders) != 2:
        raise HTTPException(400, f"{len(folders)} runs are named; sources are compared of two.")
    return render.page(request, "compare_part.html", diff=diff.compare(*folders))


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(json_safe(value), ensure_ascii=False)
