"""Functions that write a sweep's pictures into a folder."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from paceline.runs import states
from paceline.runs.visible import visible
from paceline.sweeps.pictures import png, svg
from paceline.sweeps.pictures.figure_data import Column, Line, Sketch, sketch
from paceline.sweeps.pictures.importance import LEAST, Importance, importances, missing
from paceline.sweeps.results import values_of
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Trial
from paceline.system.files import write_whole

PAGE = "sweep.html"
TABLE = "importance.csv"

#: Script and style of the HTML page. The live web page serves them as files.
SCRIPT, STYLE = (Path(__file__).with_name(f"pictures.{kind}") for kind in ("js", "css"))


@dataclass(frozen=True)
class Shares:
    """The importance of each hyperparameter for each metric of a sweep.

    `found` has the importances by metric. `remarks` says why importances are missing.
    """

    found: tuple[tuple[str, tuple[Importance, ...]], ...] = ()
    remarks: tuple[str, ...] = ()


def sketched(title: str, spec: SweepSpec, trials: Sequence[Trial], known: Shares | None = None) -> Sketch:
    """Return the figure data of trials. known: Importances, if computed already."""
    judged = shares(spec, trials) if known is None else known
    return sketch(title, spec, trials, judged.found, judged.remarks)


def shares(spec: SweepSpec, trials: Sequence[Trial]) -> Shares:
    """Compute the importance of hyperparameters. This takes seconds for many trials."""
    importances_by_metric: list[tuple[str, tuple[Importance, ...]]] = []
    remarks: list[str] = []
    # Leave out failed trials, whose values are not reliable.
    sound = [trial for trial in trials if trial.status != states.FAILED]
    for number, metric in enumerate(spec.metrics):
        trial_values = [(trial, values[number]) for trial in sound if len(values := values_of(trial, spec)) > number]
        valued = [(trial, value) for trial, value in trial_values if value is not None and math.isfinite(value)]
        of = f" for {metric}" if spec.further else ""
        if len(valued) < LEAST:
            remarks.append(f"Importance{of} is left out: it needs values of {LEAST} runs, got {len(valued)}.")
        elif lacking := missing():
            remarks.append(lacking)
            break
        elif of_metric := importances(valued, spec.space):
            importances_by_metric.append((metric, of_metric))
        else:
            remarks.append(f"Importance{of} is left out: all trials came to the same value.")
    return Shares(tuple(importances_by_metric), tuple(remarks))


def into(folder: Path, drawn: Sketch) -> list[str]:
    """Write a sweep's pictures and tables into a folder. Return their paths.

    Raises:
        OSError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_page(folder / PAGE, drawn)
    written = [folder / PAGE]
    if drawn.importances:
        write_importances(folder / TABLE, drawn)
        written.append(folder / TABLE)
    if not without_png():
        written += png.write(drawn, folder)
    return [str(path) for path in written]


def write_page(path: Path, drawn: Sketch) -> None:
    """Write a sweep's pictures into one HTML file.

    Raises:
        OSError: The file cannot be written.
    """
    write_whole(path, page(drawn))


def without_png() -> str | None:
    """Return why PNG files cannot be drawn, as a sentence, or None."""
    if importlib.util.find_spec("matplotlib") is None:
        return "No PNG is drawn: that needs matplotlib, which this Python does not have. pip install matplotlib."
    return None


def write_importances(path: Path, drawn: Sketch) -> None:
    """Write the importance of hyperparameters as a CSV file.

    Raises:
        OSError: The file cannot be written.
    """
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(["metric", "parameter", "importance", "trials"])
    rows.writerows(
        [metric, importance.name, round(importance.share, 6), importance.trials]
        for metric, shares in drawn.importances
        for importance in shares
    )
    write_whole(path, text.getvalue())


def page(sketch: Sketch) -> str:
    """Return the HTML page with a sweep's pictures."""
    parts = [f"<h1>{_text(sketch.title)}</h1>", *[f"<p>{_text(remark)}</p>" for remark in sketch.remarks]]
    for history in sketch.histories:
        parts.append(f"<h2>History of {_text(history.name)}</h2>{_picture(svg.history(history))}")
        parts.append('<p class="key">● completed ○ stopped or running × failed — the best so far</p>')
    for front in sketch.fronts:
        parts.append(f"<h2>{_text(front.up.name)} against {_text(front.across.name)}</h2>{_picture(svg.front(front))}")
        parts.append(
            '<p class="key">The last values of each trial — those to which no other is better in all metrics</p>'
        )
    if sketch.lines:
        parts.append(f"<h2>Parallel coordinates</h2>{_picture(svg.parallel(sketch.columns, sketch.lines))}")
        parts.append(
            '<p class="key">The darker, the better; dashes: stopped or running; red: failed. Draw over an axis to choose a '
            "part of it; a click on it shows all again.</p>"
        )
    for across in sketch.slices:
        parts.append(
            f"<h2>{_text(across.up.name)} over {_text(across.across.name)}</h2>{_picture(svg.scatter(across))}"
        )
    for metric, shares in sketch.importances:
        parts.append(f"<h2>Importance for {_text(metric)}</h2>{_picture(svg.importance(shares))}")
        parts.append(
            "<p class=\"key\">Each hyperparameter's share of the metric's variance (fANOVA); of one that not all trials have, "
            "among those that do.</p>"
        )
    if sketch.lines:
        parts.append(f"<h2>Trials</h2>{_table(sketch.columns, list(reversed(sketch.lines)))}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">"
        f'<meta name="viewport" content="width=device-width"><title>{_text(sketch.title)}</title>'
        f"<style>{_STYLE}{STYLE.read_text('utf-8')}</style></head>\n<body>\n"
        + "\n".join(parts)
        + f'\n<script type="application/json" id="places">{places(sketch)}</script>\n'
        + f'<script type="module">\n{SCRIPT.read_text("utf-8")}\nprepare(document);\n</script>\n</body></html>\n'
    )


def places(sketch: Sketch) -> str:
    """Return JSON of {trial number: positions on the axes}, for the page's script."""
    return json.dumps({line.number: [_short(place) for place in line.places] for line in sketch.lines})


def _table(columns: Sequence[Column], lines: Sequence[Line]) -> str:
    names = ["trial", "status", *(column.name for column in columns)]
    head = "".join(f'<th><button type="button" class="sort">{_text(name)}</button></th>' for name in names)
    rows = "".join(
        f'<tr class="trial" data-trial="{line.number}">'
        + "".join(f"<td>{_text(text)}</td>" for text in (str(line.number), line.status, *line.texts))
        + "</tr>\n"
        for line in lines
    )
    return f'<table class="trials"><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table>'


def _picture(drawn: str) -> str:
    return f'<div class="picture">{drawn}</div>'


def _short(place: float | None) -> float | None:
    return None if place is None else round(place, 4)


def _text(text: str) -> str:
    return escape(visible(text))


_STYLE = """
:root { color-scheme: light; }
body { font: 14px/1.4 system-ui, sans-serif; color: #222; background: #fff; margin: 24px; max-width: 1400px; }
h1 { font-size: 19px; } h2 { font-size: 16px; margin: 28px 0 4px; } .key { color: #666; font-size: 12px; margin: 2px 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 2px 12px 2px 0; border-bottom: 1px solid #eee; white-space: nowrap; }
tr.on { background: #ffe9d1; }
"""
