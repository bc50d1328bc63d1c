"""One HTML file with a sweep's pictures and the table of its trials.

It works offline.

Names and values of trials are untrusted text. They are escaped, the script contains only numbers, and the page's policy forbids
loading anything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from paceline.runs.visible import visible
from paceline.sweeps.pictures import svg
from paceline.sweeps.pictures.figure_data import Column, Line, Sketch

#: The live page serves these as files.
SCRIPT, STYLE = (Path(__file__).with_name(f"pictures.{kind}") for kind in ("js", "css"))


def page(sketch: Sketch) -> str:
    """Return the HTML text."""
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
    for metric, found in sketch.importances:
        parts.append(f"<h2>Importance for {_text(metric)}</h2>{_picture(svg.importance(found))}")
        parts.append(
            "<p class=\"key\">Each hyperparameter's share of the metric's variance (fANOVA); of one that not all trials have, "
            "among those that do.</p>"
        )
    if sketch.lines:
        parts.append(f"<h2>Trials</h2>{_table(sketch.columns, list(reversed(sketch.lines)))}")
    # Only numbers, so nothing can close the element.
    places = json.dumps({line.number: [_short(place) for place in line.places] for line in sketch.lines})
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">"
        f'<meta name="viewport" content="width=device-width"><title>{_text(sketch.title)}</title>'
        f"<style>{_STYLE}{STYLE.read_text('utf-8')}</style></head>\n<body>\n"
        + "\n".join(parts)
        + f'\n<script type="application/json" id="places">{places}</script>\n'
        + f'<script type="module">\n{SCRIPT.read_text("utf-8")}\nprepare(document);\n</script>\n</body></html>\n'
    )


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
