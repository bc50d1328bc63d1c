"""A report: runs in one HTML file that needs no server and no network."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypedDict

from markupsafe import Markup, escape

from paceline.errors import FileNameError, RunNotFoundError, UserError
from paceline.reports.compare import KINDS, ComparedFact, RunTable, compact_facts, run_table
from paceline.runs import read, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, parse_utc, utc_now
from paceline.sweeps.live_trials import Board
from paceline.sweeps.pictures import draw, svg
from paceline.sweeps.pictures.figure_data import Numbers, Sketch
from paceline.system.files import write_whole
from paceline.system.names import did_you_mean, some
from paceline.system.units import is_number_text
from paceline.ui import bundle, render
from paceline.ui.curves import RunCurves
from paceline.ui.files import PICTURES, opened
from paceline.ui.panels import panel_of
from paceline.ui.run_page import BandJson, CurveJson, CurveQuery, MetricJson, curves_json

#: Maximum number of runs in a report, of bytes of the report's file, and of points of all curves together.
MOST_RUNS, LARGEST, _POINTS = 200, 32 << 20, 300_000
#: Minimum and maximum number of sections of a curve. The report contains each section's least and greatest value.
_PIECES = (20, 2000)
#: Maximum number of images of one run, of bytes of one image, and of bytes of all images together.
_IMAGES, _LARGEST_IMAGE, _ALL_IMAGES = 24, 2 << 20, 12 << 20
#: Limits of a frame in a notebook: maximum number of metrics, maximum number of points, and height in pixels.
_FRAME_METRICS, _FRAME_POINTS, _FRAME_HEIGHT = 24, 20_000, 800
#: An anonymous report shows only facts of these kinds.
_ANONYMOUS = ("parameters", "metrics", "topology")


class ReportImage(TypedDict):
    """An image of a report. source: a data: URL."""

    name: str
    label: str
    source: str


class ReportRun(TypedDict):
    """A run in a report. started: start time; "" in anonymous reports."""

    name: str
    run_id: str
    status: str
    kind: str
    started: str
    duration: float | None
    tags: dict[str, str | None]
    notes: str
    images: list[ReportImage]
    sketch: Sketch | None


class ReportCurves(TypedDict):
    """The curves of all runs, as the script `report.js` reads them.

    curves: Each a `CurveJson` with two more keys: `run`, the run's index, and `t`, the x values in seconds since the run's
    start. starts: Start time of each run in seconds since 1970.
    """

    names: list[MetricJson]
    curves: list[dict[str, object]]
    starts: list[float]


def write_report(
    folders: Sequence[RunFolder], path: Path, *, metrics: Collection[str] = (), anonymous: bool = False
) -> None:
    """Write a report of runs to an HTML file.

    Args:
        folders: The runs, 200 at most.
        path: The HTML file; an existing file is replaced.
        metrics: Names or patterns of metrics, such as `val/*`. Default: all.
        anonymous: Leave out texts that may name people, hosts, folders or projects.

    Raises:
        RunNotFoundError: The record of a run can't be read.
        UserError: No metric matches, there are too many runs, or the file would be too large or can't be written.
    """
    text = report_text(folders, metrics=metrics, anonymous=anonymous)
    try:
        write_whole(path, text)
    except OSError as error:
        raise UserError(f"the report {str(path)!r} can't be written: {error.strerror}.") from error


def report_text(folders: Sequence[RunFolder], *, metrics: Collection[str] = (), anonymous: bool = False) -> str:
    """Return the HTML of a report, as `write_report` writes it."""
    if not 0 < len(folders) <= MOST_RUNS:
        raise UserError(f"a report has 1 to {MOST_RUNS} runs, got {len(folders)}.")
    records = [read.record(folder) for folder in folders]
    curves, runs, room = _Curves(metrics), list[ReportRun](), _ALL_IMAGES
    logs = []
    for number, (folder, record) in enumerate(zip(folders, records, strict=True)):
        logged = RunCurves(folder, has_times=True)
        logged.look()
        logs.append(logged)
        images = [] if anonymous else [*_images(folder, logged, room)]
        room -= sum(len(image["source"]) for image in images)
        runs.append(_run(number, folder, record, images, anonymous=anonymous))
    shown = curves.of(records, logs)
    if anonymous:
        shown["starts"] = []
    table = run_table(folders)
    facts = [fact for fact in table.facts if fact.kind != "metrics" or curves.has(fact.name)]
    facts = [*_without_names(facts)] if anonymous else facts
    data = {
        **shown,
        "table": {
            "runs": [run["run_id"] for run in runs],
            "facts": compact_facts(RunTable(runs=table.runs, facts=tuple(facts))),
        },
    }
    text = _document(data, runs, is_anonymous=anonymous)
    if (size := len(text.encode())) > LARGEST:
        raise UserError(
            f"the report would have {size >> 20} MiB, and {LARGEST >> 20} MiB are the most. Name fewer runs, or choose metrics."
        )
    return text


def charts_frame(folder: RunFolder) -> str:
    """Return a notebook's HTML frame with a run's curves; "" without curves."""
    record, logged = read.record(folder), RunCurves(folder, has_times=True)
    logged.look()
    shown = _Curves((), most=_FRAME_METRICS, points=_FRAME_POINTS).of([record], [logged])
    if not shown["curves"]:
        return ""
    text = _document({**shown}, [_run(0, folder, record, [], anonymous=False)], only_curves=True)
    height = min(_FRAME_HEIGHT, 120 + 300 * -(-len(shown["names"]) // 2))
    style = f"width: 100%; height: {height}px; border: 0"
    return f'<iframe title="Curves" sandbox="allow-scripts allow-downloads" style="{style}" srcdoc="{escape(text)}"></iframe>'


def _document(
    data: Mapping[str, object], runs: Sequence[ReportRun], *, is_anonymous: bool = False, only_curves: bool = False
) -> str:
    scripts = (bundle.classic("theme.js", "uplot.js"), bundle.modules("report.js"))
    style = bundle.styles("ui.css", "uplot.css", "pictures.css", "compare.css")
    return render.part(
        "report.html",
        policy=f"default-src 'none'; script-src {' '.join(one.allowed for one in scripts)}; style-src {style.allowed}; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        scripts=[Markup(one.text) for one in scripts],
        style=Markup(style.text),
        data=Markup(_in_html(data)),
        runs=runs,
        kinds=KINDS,
        is_anonymous=is_anonymous,
        only_curves=only_curves,
        made="" if is_anonymous else utc_now(),
        svg=svg,
        place_texts=[draw.places(run["sketch"]) if run["sketch"] else "" for run in runs],
    )


def _in_html(value: object) -> str:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _run(number: int, folder: RunFolder, record: RunRecord, images: list[ReportImage], *, anonymous: bool) -> ReportRun:
    notes = tags_and_properties.read(folder.notes)
    sketch = _sketch(folder, record, anonymous=anonymous) if record.sweep is not None else None
    if anonymous:
        name, run_id = f"Run {number + 1}", ""
    else:
        name, run_id = notes.name or record.run_id, record.run_id
    return {
        "name": name,
        "run_id": run_id,
        "status": record.status,
        "kind": record.kind,
        "started": "" if anonymous else record.started_utc or "",
        "duration": record.duration_s,
        "tags": {} if anonymous else notes.tags,
        "notes": "" if anonymous else notes.description or "",
        "images": images,
        "sketch": sketch,
    }


def _sketch(folder: RunFolder, record: RunRecord, *, anonymous: bool) -> Sketch:
    standing = Board(folder).look()
    found = draw.sketched(f"Sweep {record.run_id}", standing.spec, standing.trials)
    if not anonymous:
        return found
    # Keep only numeric columns, because the values of other hyperparameters may contain names or paths.
    kept = [place for place, column in enumerate(found.columns) if isinstance(column.axis, Numbers)]
    lines = [
        replace(line, places=tuple(line.places[at] for at in kept), texts=tuple(line.texts[at] for at in kept))
        for line in found.lines
    ]
    return replace(
        found,
        title="",
        columns=tuple(found.columns[at] for at in kept),
        lines=tuple(lines),
        slices=tuple(one for one in found.slices if isinstance(one.across.axis, Numbers)),
        remarks=(),
    )


class _Curves:
    """A selector of a report's curves by patterns of metric names."""

    def __init__(self, patterns: Collection[str], most: int | None = None, points: int = _POINTS) -> None:
        self._patterns, self._most, self._points = patterns, most, points

    def has(self, name: str) -> bool:
        return not self._patterns or any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def of(self, records: Sequence[RunRecord], logs: Sequence[RunCurves]) -> ReportCurves:
        """Return one run's curves of all ranks, or each run's curves of its lowest rank.

        Raises:
            UserError: No metric matches the patterns.
        """
        listed: dict[str, MetricJson] = {}
        for logged in logs:
            # Request a metric "", which does not exist. The response then lists all metrics, but has no curves.
            for entry in curves_json(logged, CurveQuery(pixels=1, names=("",)))["names"]:
                if not entry["node"]:
                    listed.setdefault(entry["name"], {**entry, "last": entry["last"] if len(logs) == 1 else ""})
        names = [name for name in listed if self.has(name)][: self._most]
        if self._patterns and not names:
            raise UserError(
                f"no metric of these runs matches {', '.join(map(repr, self._patterns))}. They have: "
                f"{some([*listed], 10) or 'none'}.{did_you_mean(next(iter(self._patterns)), listed)}"
            )
        count = sum(key.name in names and not key.is_node for logged in logs for key in logged.curves)
        pieces = max(_PIECES[0], min(_PIECES[1], self._points // (2 * max(1, count))))
        starts = [parse_utc(record.started_utc or record.created_utc).timestamp() for record in records]
        drawn: list[dict[str, object]] = []
        for number, (logged, start_s) in enumerate(zip(logs, starts, strict=True)):
            query = CurveQuery(pixels=pieces, names=names or ("",), has_bands=len(logs) == 1)
            by_step = curves_json(logged, query)
            by_time = curves_json(logged, replace(query, axis="relative"), start_s)
            lowest = {entry["name"]: entry["ranks"][0] for entry in by_step["names"] if not entry["node"]}
            drawn += [
                {**_short(curve), "run": number, "t": [None if x is None else round(x, 3) for x in timed["x"]]}
                for curve, timed in zip(by_step["curves"], by_time["curves"], strict=True)
                if not curve["node"] and (len(logs) == 1 or curve["rank"] == lowest[curve["name"]])
            ]
        return {"names": [listed[name] for name in names], "curves": drawn, "starts": starts}


def _short(curve: CurveJson | BandJson) -> dict[str, object]:
    return {
        key: [None if y is None else float(f"{y:.7g}") for y in value]
        if key in ("y", "lo", "hi") and isinstance(value, list)
        else value
        for key, value in curve.items()
    }


def _images(folder: RunFolder, logged: RunCurves, room: int) -> Iterator[ReportImage]:
    count = 0
    for name in logged.others:
        panel = panel_of(logged, name)
        for item in panel["items"] if panel["kind"] == "image" else ():
            source = _data_address(folder, item.get("file", ""))
            if source and len(source) <= room and count < _IMAGES:
                room, count = room - len(source), count + 1
                rank = f", rank {item['rank']}" if len(panel["ranks"]) > 1 else ""
                yield {"name": name, "label": f"{panel['label']}{rank}", "source": source}


def _data_address(folder: RunFolder, name: str) -> str:
    kind = PICTURES.get(os.path.splitext(name)[1].lower())
    if kind is None:
        return ""
    try:
        with opened(folder, name)[0] as file:
            content = file.read(_LARGEST_IMAGE + 1)
    except (OSError, FileNameError, RunNotFoundError):
        return ""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}" if len(content) <= _LARGEST_IMAGE else ""


def _without_names(facts: Sequence[ComparedFact]) -> Iterator[ComparedFact]:
    """Yield the compared values with "text 1", "text 2", ... in place of texts.

    A text may name a person or a host. Equal texts get the same number. Leave out environment variables.
    """
    known: dict[str, str] = {}

    def plain(value: object) -> object:
        if value is None or isinstance(value, (bool, int, float)):
            return value
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        if text in ("", "true", "false") or is_number_text(text):
            return value
        return known.setdefault(text, f"text {len(known) + 1}")

    for fact in facts:
        # Leave out environment variables (names with a $), because users choose these names, which may be private.
        if fact.kind in _ANONYMOUS and not fact.name.startswith("$"):
            yield replace(fact, values=tuple(map(plain, fact.values)))
