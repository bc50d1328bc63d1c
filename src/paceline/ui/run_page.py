"""The data that a run's pages show."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypedDict

from paceline.job.job import Job
from paceline.models import registry
from paceline.observe import goodput, loads
from paceline.runs import excluded_files, read, run_data, states, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, hang_status, parse_utc
from paceline.runs.remote_status import refresh
from paceline.system.files import read_json, stamp_of
from paceline.ui import bands, banners
from paceline.ui.banners import SlowRanks
from paceline.ui.curves import CurveStore, Key, RunCurves, thinned
from paceline.ui.pieces import stamp_of as text_stamp
from paceline.ui.render import TemplateValues
from paceline.ui.wait_picture import WaitPicture, picture_of_hang

#: By default a metric's chart shows the curves of at most this many ranks. The user may choose other ranks.
MOST_RANKS = 8
#: Number of metrics in the first response. The page requests the other metrics when they become visible.
FIRST = 24
#: Number of metrics that the first response lists. A list of 12,000 metrics would have 1.3 MB.
LISTED = 300
_REPORT_CHARS = 20_000
#: Maximum number of a run's tags, properties and comments on a page; maximum characters of a tag or property.
_MOST_TAGS, _MOST_PROPERTIES, _LONGEST, _MOST_COMMENTS = 200, 2_000, 2_000, 100


class RunHead(TypedDict):
    """The data of the header of a run's pages."""

    record: RunRecord
    #: The beginning of the report about the hang, or "" if the run does not hang now.
    hang_report: str
    #: A text such as "Running, hangs since ...", or "" if the run does not hang now.
    hangs: str
    #: The picture of the ranks that wait for each other, or None if the run does not hang now.
    hang_picture: WaitPicture | None
    slow: SlowRanks | None
    #: The word that the page shows as the run's state: "Hangs", or the run's status.
    shown_state: str
    #: What the user can do after a failure.
    remedy: str
    run_id: str
    name: str
    has_name: bool
    tags: Mapping[str, str | None]
    more_tags: int
    properties: Mapping[str, str | None]
    more_properties: int
    description: str | None
    #: Stamp of the description in the form. If the stored description has changed since, the server does not overwrite it.
    description_stamp: str
    comments: list[tags_and_properties.Comment]
    more_comments: int
    is_archived: bool
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

    Attributes:
        pixels: Width of the picture, which limits the number of points.
        names: Names of the metrics to draw; empty for the first `first` metrics of the run.
        ranks: The ranks to draw; None for the first few ranks.
        window: First and last visible x; None for the whole axis.
        node_ranks: The nodes, and the ranks, whose CPU, GPU and memory load is drawn; None for all nodes and ranks.
        has_bands: Whether to draw many ranks as a band.
        listed: The metrics to list: "all", "first" (the first `LISTED` metrics) or "asked" (the metrics in `names`).
        first: Number of metrics to draw if `names` is empty.
        most_s: Maximum number of seconds for reading new lines of the metric logs.
    """

    pixels: int
    names: Sequence[str] = ()
    ranks: Sequence[int] | None = None
    axis: str = "step"
    window: tuple[float, float] | None = None
    all_attempts: bool = False
    node_ranks: tuple[Collection[int], Collection[int]] | None = None
    has_bands: bool = False
    listed: Literal["all", "first", "asked"] = "all"
    first: int = FIRST
    most_s: float = math.inf


class MetricJson(TypedDict):
    """A metric in a page's list. node: 1 for a node's metric."""

    name: str
    node: int
    ranks: list[int]
    attempts: list[int]
    count: int
    last: float | str | None


class CurveJson(TypedDict):
    """The points of a metric's curve to draw.

    n: Number of logged values. A page compares `n` with the numbers in later events to detect new values.
    """

    name: str
    rank: int
    attempt: int
    node: int
    n: int
    steps: bool
    x: list[float | None]
    y: list[float | None]


class BandJson(CurveJson):
    """A band over `of` ranks: the mean (`y`), least (`lo`) and greatest (`hi`) values."""

    lo: list[float | None]
    hi: list[float | None]
    of: int


class CurvesJson(TypedDict):
    """The response to a `CurveQuery`: a list of metrics, and the requested curves.

    unlisted: Number of metrics that the list leaves out. others: Number of logged images, tables and texts.
    has_more: Whether the logs have values that were not read yet.
    """

    names: list[MetricJson]
    curves: list[CurveJson]
    unlisted: int
    others: int
    has_more: bool


def head(folder: RunFolder) -> RunHead:
    """Return the data of the header of a run's pages."""
    refresh(folder)
    record = read.record(folder)
    notes = _notes_at(folder.notes, stamp_of(folder.notes))
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
        "tags": _clipped(notes.tags, _MOST_TAGS),
        "more_tags": max(0, len(notes.tags) - _MOST_TAGS),
        "properties": _clipped(notes.properties, _MOST_PROPERTIES),
        "more_properties": max(0, len(notes.properties) - _MOST_PROPERTIES),
        "description": notes.description,
        "description_stamp": text_stamp(notes.description),
        "comments": [*notes.comments.values()][-_MOST_COMMENTS:],
        "more_comments": max(0, len(notes.comments) - _MOST_COMMENTS),
        "is_archived": notes.is_archived,
        "can_cancel": not record.is_terminal and record.status not in (states.CANCEL_REQUESTED, states.FINALIZING),
        "can_rerun": None not in (record.job, record.snapshot_id) and record.sweep is None and record.pipeline is None,
        "job": record.job,
        "command": shlex.join(record.command),
        "left_out": excluded_files.lines(record, limit=excluded_files.LIMIT),
        "world_size": record.world_size,
        "rank_count": len(folder.ranks(record.world_size)),
    }


# Cache the result: a program may set a million tags, which take seconds to read, and a page polls every second.
@lru_cache(maxsize=32)
def _notes_at(path: Path, stamp: object) -> tags_and_properties.Notes:
    return tags_and_properties.read(path)


def _clipped(texts: Mapping[str, str | None], most: int) -> dict[str, str | None]:
    return {key: value and str(value)[:_LONGEST] for key, value in islice(texts.items(), most)}


def _start_of(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_REPORT_CHARS)
    except OSError:
        return ""


@dataclass(frozen=True)
class NodeRanks:
    """A node of a run, and the ranks on it."""

    number: int
    name: str
    ranks: list[int]


def ranks_of_nodes(folder: RunFolder) -> list[NodeRanks]:
    """Return a run's nodes and their ranks by the last utilization sample."""
    # Another program may have written the sample, because users may share the folder. Ignore a sample of unexpected structure.
    try:
        sample = loads.last(folder) or {"nodes": {}, "ranks": {}}
        by_name: dict[str, list[int]] = {}
        for rank, load in sample["ranks"].items():
            by_name.setdefault(str(load.get("node")), []).append(int(rank))
        names = {int(number): str(load.get("name", "")) for number, load in sample["nodes"].items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        return []
    return [
        NodeRanks(number, name or f"node {number}", by_name.get(name, [])) for number, name in sorted(names.items())
    ]


def details(folder: RunFolder, record: RunRecord) -> TemplateValues:
    """Return the data of a run's details: job, environment, code and data."""
    environment = read_json(folder.environment) or {}
    return {
        "shown_job": record.job.shown() if record.job else None,
        "environment": environment,
        # If Paceline has built the run's environment, list the exact versions of its packages.
        "packages": sorted(map(str, (*environment.get("conda", ()), *environment.get("pip", ())))),
        **run_data.read_data(folder),
        "git": dict(record.git),
        "models": registry.ids_of_run(folder),
        "folder": str(folder.path),
        "goodput": goodput.goodput(folder, record) if record.job and record.attempts else None,
    }


def curves_of(store: CurveStore, folder: RunFolder, query: CurveQuery) -> CurvesJson:
    """Return a run's metrics and the requested curves."""
    record = read.record(folder)
    started_s = parse_utc(record.started_utc or record.created_utc).timestamp()
    with store.open(folder, has_times=query.axis != "step") as found:
        found.look(query.most_s)
        return curves_json(found, query, started_s)


def curves_json(curves: RunCurves, query: CurveQuery, origin_s: float = 0.0) -> CurvesJson:
    """Return a run's metrics and requested curves. origin_s: start of the axis "relative"."""
    by_name: dict[tuple[bool, str], list[Key]] = {}
    # List metrics in the order in which the script first logged them.
    for key in [*curves.curves]:
        by_name.setdefault((key.is_node, key.name), []).append(key)
    plain = [of for of in by_name if not of[0]]
    nodes = sorted((of for of in by_name if of[0]), key=lambda of: _node_place(of[1]))
    asked = set(query.names)
    first = plain[:LISTED] if query.listed == "first" else plain
    listed: list[MetricJson] = []
    drawn: list[CurveJson] = []
    for place, of in enumerate([*first, *nodes]):
        is_node, name = of
        is_asked = name in asked
        if query.listed == "asked" and not is_asked:
            continue
        keys = sorted(by_name[of], key=lambda key: (key.rank, key.attempt))
        entry = _metric_json(curves, keys)
        listed.append(entry)
        if not is_asked if asked else place >= query.first and not is_node:
            continue
        chosen, is_band = _chosen_ranks(query, entry["ranks"], name, is_node=is_node)
        shown = [key for key in keys if key.rank in chosen]
        of_place = replace(query, axis="step", window=None) if is_node else query
        if is_band:
            drawn += _bands(curves, shown, of_place, origin_s)
        else:
            drawn += [_curve_json(curves, key, of_place, origin_s) for key in shown]
    return {
        "names": listed,
        "curves": drawn,
        "unlisted": len(plain) - len(first),
        "others": curves.other_count,
        "has_more": curves.has_more,
    }


def _metric_json(curves: RunCurves, keys: Sequence[Key]) -> MetricJson:
    last = max(keys, key=lambda key: (key.attempt, -key.rank)) if len(keys) > 1 else keys[0]
    return {
        "name": last.name,
        "node": int(last.is_node),
        "ranks": sorted({key.rank for key in keys}),
        "attempts": sorted({key.attempt for key in keys}),
        "count": sum([len(curves.curves[key].ys) for key in keys]),
        "last": _last(curves.curves[last].ys),
    }


def _chosen_ranks(query: CurveQuery, there: Sequence[int], name: str, *, is_node: bool) -> tuple[Collection[int], bool]:
    """Return the ranks or nodes to draw, and whether to draw a band."""
    of_name: Collection[int] | None = query.ranks
    if is_node:
        of_name = None if query.node_ranks is None else query.node_ranks[name.startswith("rank_")]
    shown = [rank for rank in there if of_name is None or rank in of_name]
    if query.has_bands and len(shown) >= bands.RANKS and (is_node or of_name is None):
        return set(shown), True
    return set(shown[:MOST_RANKS] if of_name is None else shown), False


def _curve_json(curves: RunCurves, key: Key, query: CurveQuery, origin_s: float) -> CurveJson:
    curve = curves.curves[key]
    cuts = () if query.all_attempts else curves.cuts(key)
    xs, ys = thinned(curve, query.pixels, axis=query.axis, origin_s=origin_s, window=query.window, cuts=cuts)
    return _json_of(key, len(curve.ys), curve.has_steps, xs, ys)


def _bands(curves: RunCurves, keys: Sequence[Key], query: CurveQuery, origin_s: float) -> Iterator[BandJson]:
    """Yield a metric's band over all ranks for each attempt, with rank -1."""
    for attempt in sorted({key.attempt for key in keys}):
        mine = [key for key in keys if key.attempt == attempt and len(curves.curves[key].ys)]
        if not mine:
            continue
        cuts = () if query.all_attempts else curves.cuts(mine[0])
        band = bands.band_of([curves.curves[key] for key in mine], axis=query.axis, origin_s=origin_s, cuts=cuts)
        xs, mean, least, greatest = bands.thinned_band(band, query.pixels, query.window)
        one = _json_of(replace(mine[0], rank=-1), band.count, curves.curves[mine[0]].has_steps, xs, mean)
        yield {**one, "lo": least, "hi": greatest, "of": len(mine)}


def _json_of(key: Key, count: int, has_steps: bool, xs: list[float | None], ys: list[float | None]) -> CurveJson:
    return {
        "name": key.name,
        "rank": key.rank,
        "attempt": key.attempt,
        "node": int(key.is_node),
        "n": count,
        "steps": has_steps,
        "x": xs,
        "y": ys,
    }


#: Beginnings of the names of a node's metrics, such as "cpu" for CPU load, in the order in which pages show the metrics.
_NODE_ORDER = ("cpu", "gpu", "memory", "disk", "net", "rank")


def _node_place(name: str) -> tuple[int, str]:
    first = next((place for place, what in enumerate(_NODE_ORDER) if name.startswith(what)), len(_NODE_ORDER))
    return first, name


def _last(ys: Any) -> float | str | None:
    if not len(ys):
        return None
    value = float(ys[-1])
    return value if value - value == 0 else str(value)
