"""Data of a run's pages."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.models import registry
from paceline.runs import excluded_files, read, states, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.follow import hang_status
from paceline.runs.record import RunRecord, parse_utc
from paceline.runs.remote_status import refresh
from paceline.system.files import read_json
from paceline.ui.curves import CurveStore, RunCurves, thinned

#: Most curves of a metric by default.
MOST_RANKS = 8
#: Metrics in the first response; the page requests the others when they become visible.
FIRST = 24
_ROWS, _ITEMS = 200, 40
_REPORT_CHARS = 20_000


def head(folder: RunFolder) -> dict[str, Any]:
    """Return the data of the header of a run's pages."""
    refresh(folder)
    record = read.record(folder)
    notes = tags_and_properties.read(folder.notes)
    return {
        "record": record,
        # "Running, hangs since ..."; empty unless the run hangs now.
        "hang_report": _start_of(folder.hang_report(len(record.attempts))) if record.hang else "",
        "hangs": status if (status := hang_status(record)) != record.status else "",
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


def details(folder: RunFolder, record: RunRecord) -> dict[str, Any]:
    """Return job, environment, code and data."""
    environment = read_json(folder.environment) or {}
    data = read_json(folder.data) or {}
    return {
        "shown_job": record.job.shown() if record.job else None,
        "environment": environment,
        # With exact versions if the environment was built.
        "packages": sorted(map(str, (*environment.get("conda", ()), *environment.get("pip", ())))),
        "inputs": data.get("inputs") or [],
        "outputs": data.get("outputs") or [],
        "git": dict(record.git),
        "models": registry.ids_of_run(folder),
        "folder": str(folder.path),
    }


def curves_of(store: CurveStore, folder: RunFolder, *, axis: str, **asked: Any) -> dict[str, Any]:
    """Return `curves_json` of a run's curves, with times relative to its start."""
    record = read.record(folder)
    started_s = parse_utc(record.started_utc or record.created_utc).timestamp()
    with store.open(folder, has_times=axis != "step") as found:
        found.look()
        return curves_json(found, axis=axis, origin_s=started_s, **asked)


def curves_json(
    curves: RunCurves,
    *,
    pixels: int,
    names: Sequence[str] = (),
    ranks: Sequence[int] | None = None,
    axis: str = "step",
    origin_s: float = 0.0,
    window: tuple[float, float] | None = None,
    all_attempts: bool = False,
) -> dict[str, Any]:
    """Return the names of all metrics, and the points of the requested ones; by default the first ones.

    Each curve has "axis" as `x`, and its number of values as `n`: by it a page recognizes new values in later events.
    """
    by_name: dict[tuple[bool, str], list[Any]] = {}
    for key in sorted(curves.curves, key=lambda key: (key.rank, key.attempt)):
        by_name.setdefault((key.is_node, key.name), []).append(key)
    order = {(key.is_node, key.name): number for number, key in reversed([*enumerate(curves.curves)])}
    listed, drawn = [], []
    for place, of in enumerate(sorted(by_name, key=lambda of: (of[0], _node_place(of[1]) if of[0] else (), order[of]))):
        is_node, name = of
        keys = by_name[of]
        there = sorted({key.rank for key in keys})
        chosen = set(there[:MOST_RANKS] if ranks is None or is_node else ranks)
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
        if name not in names if names else place >= FIRST and not is_node:
            continue
        for key in keys:
            if key.rank not in chosen:
                continue
            curve = curves.curves[key]
            cuts = () if all_attempts else curves.cuts(key)
            xs, ys = thinned(
                curve,
                pixels,
                axis="step" if is_node else axis,
                origin_s=origin_s,
                window=window,
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


def others_of(curves: RunCurves) -> list[dict[str, Any]]:
    """Return images, tables, rows and texts by name, newest first. Rows of one name form one table."""
    found: dict[str, dict[str, Any]] = {}
    for other in curves.others:
        one = found.setdefault(
            other.name, {"name": other.name, "kind": other.kind, "items": [], "columns": [], "rows": []}
        )
        one["kind"] = other.kind
        if other.kind == "image" and isinstance(other.value, str):
            one["items"].insert(0, {"file": other.value, "rank": other.rank, "step": other.step})
        elif other.kind in ("row", "table") and isinstance(other.value, Mapping):
            _add_rows(one, other.value)
        else:
            one["items"].insert(0, {"text": str(other.value)[:500], "rank": other.rank, "step": other.step})
    for one in found.values():
        one["more"] = max(0, len(one["rows"]) - _ROWS) + max(0, len(one["items"]) - _ITEMS)
        one["rows"] = [[row.get(column) for column in one["columns"]] for row in one["rows"][-_ROWS:]]
        del one["items"][_ITEMS:]
    return [*found.values()]


def _add_rows(one: dict[str, Any], value: Mapping[str, Any]) -> None:
    columns = {str(key): item if isinstance(item, list) else [item] for key, item in value.items()}
    one["columns"] += [column for column in columns if column not in one["columns"]]
    for number in range(max((len(items) for items in columns.values()), default=0)):
        one["rows"].append({key: items[number] for key, items in columns.items() if number < len(items)})


#: Facts about nodes and workers, in order.
_NODE_ORDER = ("cpu", "gpu", "memory", "disk", "net", "rank")


def _node_place(name: str) -> tuple[int, str]:
    first = next((place for place, what in enumerate(_NODE_ORDER) if name.startswith(what)), len(_NODE_ORDER))
    return first, name


def _last(ys: Any) -> float | str | None:
    if not len(ys):
        return None
    value = float(ys[-1])
    return value if value - value == 0 else str(value)
