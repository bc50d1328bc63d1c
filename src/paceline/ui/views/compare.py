"""Runs beside one another: their curves over each other, and what they differ in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from paceline.runs import read, store
from paceline.runs.folder import RunFolder
from paceline.runs.ids import check_run_id
from paceline.runs.record import RunRecord, parse_utc
from paceline.system.files import read_json
from paceline.ui import render, run_page
from paceline.ui.views.common import as_json, pixels, runs_dir, window

#: More runs than this can't be told from each other.
_MOST = 12


async def page(request: Request) -> Response:
    folders = _folders(request)

    def read_them() -> list[dict[str, Any]]:
        return [run_page.head(folder) for folder in folders]

    heads = await asyncio.to_thread(read_them)
    sections = await asyncio.to_thread(
        lambda: differences([(one["record"], folder) for one, folder in zip(heads, folders, strict=True)])
    )
    return render.page(request, "compare.html", runs=heads, sections=sections)


async def curves(request: Request) -> Response:
    """The curves of all runs; of each run one for a metric: of all attempts together, on its lowest rank that has it."""
    folders = _folders(request)
    axis = request.query_params.get("axis", "step")
    names = request.query_params.getlist("name")
    asked: dict[str, Any] = {"pixels": pixels(request), "window": window(request), "axis": axis, "names": names}

    def read_them() -> dict[str, Any]:
        drawn: list[Any] = []
        listed: dict[str, dict[str, Any]] = {}
        for place, folder in enumerate(folders):
            record = read.record(folder)
            started = parse_utc(record.started_utc or record.created_utc).timestamp()
            with request.app.state.curves.open(folder, has_times=axis != "step") as found:
                found.look()
                one = run_page.curves_json(found, origin_s=started, **asked)
            lowest = {listed_["name"]: listed_["ranks"][0] for listed_ in one["names"] if not listed_["node"]}
            for listed_ in one["names"]:
                if not listed_["node"]:
                    listed.setdefault(listed_["name"], listed_)
            drawn += [
                {**curve, "run": place}
                for curve in one["curves"]
                if not curve["node"] and curve["rank"] == lowest[curve["name"]]
            ]
        return {"names": [*listed.values()], "curves": drawn, "others": 0}

    return as_json(await asyncio.to_thread(read_them))


def _folders(request: Request) -> list[RunFolder]:
    ids = list(dict.fromkeys(request.query_params.getlist("run")))
    if not ids:
        raise HTTPException(400, "No run is named. Choose some in the list of runs, and then Compare.")
    if len(ids) > _MOST:
        raise HTTPException(400, f"{len(ids)} runs are chosen; {_MOST} at most can be compared.")
    return [store.find(runs_dir(request), check_run_id(run_id)) for run_id in ids]


def differences(runs: list[tuple[RunRecord, RunFolder]]) -> list[dict[str, Any]]:
    """Sections of rows: what is compared, the value of each run, whether they differ. Of parameters and so on all; of packages
    those that differ."""
    tables = [
        ("Parameters", [_parameters(record) for record, _ in runs], False),
        ("Job", [_job(record) for record, _ in runs], False),
        ("Code", [_code(record) for record, _ in runs], False),
        ("Data", [_data(folder) for _, folder in runs], False),
        ("Packages", [_packages(folder) for _, folder in runs], True),
    ]
    sections: list[dict[str, Any]] = []
    for title, columns, only_different in tables:
        rows: list[dict[str, Any]] = []
        for name in dict.fromkeys(name for column in columns for name in column):
            values = [column.get(name, "") for column in columns]
            is_different = len(set(values)) > 1
            if is_different or not only_different:
                rows.append({"name": name, "values": values, "differs": is_different})
        if rows:
            sections.append({"title": title, "rows": sorted(rows, key=lambda row: not row["differs"])})
    return sections


def _parameters(record: RunRecord) -> dict[str, str]:
    """The arguments by name: `--lr 0.1` and `--lr=0.1` are the same; one without a name by its place."""
    if record.job is None:
        return {}
    found: dict[str, str] = {}
    words = list(record.job.arguments)
    place = 0
    while words:
        word = words.pop(0)
        if not word.startswith("-") or _is_number(word):
            place += 1
            found[f"argument {place}"] = word
            continue
        name, equals, value = word.partition("=")
        if not equals and words and (not words[0].startswith("-") or _is_number(words[0])):
            value = words.pop(0)
        found[name] = value if equals or value else "given"
    return found


def _job(record: RunRecord) -> dict[str, str]:
    job = record.job
    if job is None:
        return {"target": record.target or ""}
    return {
        "script": " ".join(job.entry_words),
        "target": record.target or "",
        "nodes": str(job.node_count),
        "processes": str(job.world_size),
        "backend": str(job.distributed_backend or ""),
        **{f"variable {name}": str(value) for name, value in job.shown().get("environment_variables", {}).items()},
    }


def _code(record: RunRecord) -> dict[str, str]:
    git: Mapping[str, Any] = record.git
    return {
        "snapshot": (record.snapshot_id or "")[:16],
        "commit": str(git.get("commit", ""))[:12],
        "branch": str(git.get("branch") or ""),
        "uncommitted changes": {True: "yes", False: "no"}.get(bool(git.get("dirty")), "") if git else "",
    }


def _data(folder: RunFolder) -> dict[str, str]:
    data = read_json(folder.data) or {}
    found = {}
    for one in data.get("inputs") or []:
        place = one.get("dataset") or json.dumps(one.get("sources"))
        found[str(one.get("name"))] = f"{place} {one.get('content') or one.get('fingerprint') or ''}".strip()
    return found


def _packages(folder: RunFolder) -> dict[str, str]:
    found = {}
    for package in run_page.packages_of(folder):
        name, _, version = package.partition("==")
        found[name] = version or package
    return found


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
