"""The data that a run's pages show."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from paceline.job.job import Job
from paceline.models import registry
from paceline.runs import excluded_files, read, run_data, states, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.follow import hang_status
from paceline.runs.record import RunRecord, parse_utc
from paceline.runs.remote_status import refresh
from paceline.system.files import read_json
from paceline.ui import banners
from paceline.ui.banners import SlowRanks
from paceline.ui.curves import CurveStore, Key, RunCurves, thinned
from paceline.ui.render import TemplateValues
from paceline.ui.wait_picture import WaitPicture, picture_of_hang

#: Most ranks whose curve a metric shows if the page requests no particular ranks.
MOST_RANKS = 8
#: Number of metrics in the first response. The page requests others when they become visible.
FIRST = 24
_ROWS, _ITEMS = 200, 40
_REPORT_CHARS = 20_000


class RunHead(TypedDict):
    """The data of the header on all pages of a run."""

    record: RunRecord
    #: First part of the report on the hang. Empty unless the run hangs now.
    hang_report: str
    #: A text such as "Running, hangs since ...". Empty unless the run hangs now.
    hangs: str
    #: Who waits for whom. None unless the run hangs now.
    hang_picture: WaitPicture | None
    slow: SlowRanks | None
    #: "Hangs", or the status.
    shown_state: str
    #: The next step after a failure.
    remedy: str
    run_id: str
    name: str
    has_name: bool
    tags: Mapping[str, str | None]
    properties: Mapping[str, str]
    description: str | None
    can_cancel: bool
    can_rerun: bool
    job: Job | None
    command: str
    left_out: list[str]
    world_size: int
    rank_count: int


@dataclass(frozen=True, kw_only=True)
class CurveQuery:
    """The curves that a page requests.

    names: of metrics; empty for the first ones. ranks: None for the first ones. pixels: width of the picture. window: visible
    part of the axis.
    """

    pixels: int
    names: Sequence[str] = ()
    ranks: Sequence[int] | None = None
    axis: str = "step"
    window: tuple[float, float] | None = None
    all_attempts: bool = False


class MetricJson(TypedDict):
    """A metric in the list of a page. node: 1 for a fact about a node. last: the last value."""

    name: str
    node: int
    ranks: list[int]
    attempts: list[int]
    count: int
    last: float | str | None


class CurveJson(TypedDict):
    """The points of a curve.

    n: number of values, by which a page recognizes new values in later events.
    """

    name: str
    rank: int
    attempt: int
    node: int
    n: int
    steps: bool
    x: list[float | None]
    y: list[float | None]


class CurvesJson(TypedDict):
    """The answer to a `CurveQuery`: all metrics, and points of the requested curves.

    others: number of images, tables and texts that were logged.
    """

    names: list[MetricJson]
    curves: list[CurveJson]
    others: int


class LoggedItems(TypedDict):
    """Logged images, texts or table rows of one name. more: number of items not shown."""

    name: str
    kind: str
    items: list[dict[str, object]]
    columns: list[str]
    rows: list[list[object]]
    more: int


def head(folder: RunFolder) -> RunHead:
    """Return the data of the header of a run's pages."""
    refresh(folder)
    record = read.record(folder)
    notes = tags_and_properties.read(folder.notes)
    return {
        "record": record,
        "hang_report": _start_of(folder.hang_report(len(record.attempts))) if record.hang else "",
        "hangs": status if (status := hang_status(record)) != record.status else "",
        "hang_picture": picture_of_hang(folder, len(record.attempts)) if record.hang else None,
        "slow": banners.slow_ranks(folder, record),
        "shown_state": banners.shown_state(record),
        "remedy": banners.remedy(record),
        "run_id": record.run_id,
        "name": notes.name or record.run_id,
        "has_name": bool(notes.name),
        "tags": notes.tags,
        "properties": notes.properties,
        "description": notes.description,
        "can_cancel": not record.is_terminal and record.status not in (states.CANCEL_REQUESTED, states.FINALIZING),
        "can_rerun": None not in (record.job, record.snapshot_id) and record.sweep is None and record.pipeline is None,
        "job": record.job,
        "command": shlex.join([*record.job.entry_words, *record.job.arguments]) if record.job else "",
        "left_out": excluded_files.lines(record, limit=excluded_files.LIMIT),
        "world_size": record.world_size,
        "rank_count": len(folder.ranks(record.world_size)),
    }


def _start_of(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_REPORT_CHARS)
    except OSError:
        return ""


def details(folder: RunFolder, record: RunRecord) -> TemplateValues:
    """Return the data of the page of details: job, environment, code and data."""
    environment = read_json(folder.environment) or {}
    return {
        "shown_job": record.job.shown() if record.job else None,
        "environment": environment,
        # Show exact versions if Paceline has built the environment.
        "packages": sorted(map(str, (*environment.get("conda", ()), *environment.get("pip", ())))),
        **run_data.read_data(folder),
        "git": dict(record.git),
        "models": registry.ids_of_run(folder),
        "folder": str(folder.path),
    }


def curves_of(store: CurveStore, folder: RunFolder, query: CurveQuery) -> CurvesJson:
    """Return the `curves_json` of a run. Times are relative to the run's start."""
    record = read.record(folder)
    started_s = parse_utc(record.started_utc or record.created_utc).timestamp()
    with store.open(folder, has_times=query.axis != "step") as found:
        found.look()
        return curves_json(found, query, started_s)


def curves_json(curves: RunCurves, query: CurveQuery, origin_s: float = 0.0) -> CurvesJson:
    """Return the list of all metrics, and the points of the requested metrics."""
    by_name: dict[tuple[bool, str], list[Key]] = {}
    for key in sorted(curves.curves, key=lambda key: (key.rank, key.attempt)):
        by_name.setdefault((key.is_node, key.name), []).append(key)
    order = {(key.is_node, key.name): number for number, key in reversed([*enumerate(curves.curves)])}
    listed: list[MetricJson] = []
    drawn: list[CurveJson] = []
    for place, of in enumerate(sorted(by_name, key=lambda of: (of[0], _node_place(of[1]) if of[0] else (), order[of]))):
        is_node, name = of
        keys = by_name[of]
        there = sorted({key.rank for key in keys})
        chosen = set(there[:MOST_RANKS] if query.ranks is None or is_node else query.ranks)
        last = max(keys, key=lambda key: (key.attempt, -key.rank))
        listed.append(
            {
                "name": name,
                "node": int(is_node),
                "ranks": there,
                "attempts": sorted({key.attempt for key in keys}),
                "count": sum(len(curves.curves[key].ys) for key in keys),
                "last": _last(curves.curves[last].ys),
            }
        )
        if name not in query.names if query.names else place >= FIRST and not is_node:
            continue
        for key in keys:
            if key.rank not in chosen:
                continue
            curve = curves.curves[key]
            cuts = () if query.all_attempts else curves.cuts(key)
            xs, ys = thinned(
                curve,
                query.pixels,
                axis="step" if is_node else query.axis,
                origin_s=origin_s,
                window=query.window,
                cuts=cuts,
            )
            drawn.append(
                {
                    "name": name,
                    "rank": key.rank,
                    "attempt": key.attempt,
                    "node": int(is_node),
                    "n": len(curve.ys),
                    "steps": curve.has_steps,
                    "x": xs,
                    "y": ys,
                }
            )
    return {"names": listed, "curves": drawn, "others": len(curves.others) + curves.left_out}


def others_of(curves: RunCurves) -> list[LoggedItems]:
    """Return the logged images, tables, rows and texts by name, newest first.

    The rows of one name form one table.
    """
    found: dict[str, LoggedItems] = {}
    rows: dict[str, list[dict[str, object]]] = {}
    for other in curves.others:
        one = found.setdefault(
            other.name, {"name": other.name, "kind": other.kind, "items": [], "columns": [], "rows": [], "more": 0}
        )
        one["kind"] = other.kind
        if other.kind == "image" and isinstance(other.value, str):
            one["items"].insert(0, {"file": other.value, "rank": other.rank, "step": other.step})
        elif other.kind in ("row", "table") and isinstance(other.value, Mapping):
            _add_rows(one["columns"], rows.setdefault(other.name, []), other.value)
        else:
            one["items"].insert(0, {"text": str(other.value)[:500], "rank": other.rank, "step": other.step})
    for one in found.values():
        of_one = rows.get(one["name"], [])
        one["more"] = max(0, len(of_one) - _ROWS) + max(0, len(one["items"]) - _ITEMS)
        one["rows"] = [[row.get(column) for column in one["columns"]] for row in of_one[-_ROWS:]]
        del one["items"][_ITEMS:]
    return [*found.values()]


def _add_rows(columns: list[str], rows: list[dict[str, object]], value: Mapping[str, object]) -> None:
    lists = {str(key): item if isinstance(item, list) else [item] for key, item in value.items()}
    columns += [column for column in lists if column not in columns]
    for number in range(max((len(items) for items in lists.values()), default=0)):
        rows.append({key: items[number] for key, items in lists.items() if number < len(items)})


#: Beginnings of the names of facts about nodes and workers, in the order in which pages show them.
_NODE_ORDER = ("cpu", "gpu", "memory", "disk", "net", "rank")


def _node_place(name: str) -> tuple[int, str]:
    first = next((place for place, what in enumerate(_NODE_ORDER) if name.startswith(what)), len(_NODE_ORDER))
    return first, name


def _last(ys: Any) -> float | str | None:
    if not len(ys):
        return None
    value = float(ys[-1])
    return value if value - value == 0 else str(value)
