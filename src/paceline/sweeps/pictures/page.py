"""All pictures of a sweep and the table of its trials as one HTML file, which needs no network.

What the trials' names and values hold is other people's text. It is escaped where it is text, and the script has none of it but
numbers; the page's own policy forbids everything that does not lie in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from paceline.runs.visible import visible
from paceline.sweeps.pictures import svg
from paceline.sweeps.pictures.sketch import Column, Line, Sketch


def page(sketch: Sketch) -> str:
    """The whole file."""
    parts = [f"<h1>{_text(sketch.title)}</h1>", *[f"<p>{_text(remark)}</p>" for remark in sketch.remarks]]
    for history in sketch.histories:
        parts.append(f"<h2>History of {_text(history.name)}</h2>{svg.history(history)}")
        parts.append('<p class="key">● completed ○ stopped or running × failed — the best so far</p>')
    for front in sketch.fronts:
        parts.append(f"<h2>{_text(front.up.name)} against {_text(front.across.name)}</h2>{svg.front(front)}")
        parts.append(
            '<p class="key">The last values of each trial — those to which no other is better in all metrics</p>'
        )
    if sketch.lines:
        parts.append(f"<h2>Parallel coordinates</h2>{svg.parallel(sketch.columns, sketch.lines)}")
        parts.append(
            '<p class="key">The darker, the better; dashes: stopped or running; red: failed. Draw over an axis to choose a '
            "part of it; a click on it shows all again.</p>"
        )
    for metric, found in sketch.importances:
        parts.append(f"<h2>Importance for {_text(metric)}</h2>{svg.importance(found)}")
        parts.append(
            "<p class=\"key\">Each hyperparameter's share of the metric's variance (fANOVA); of one that not all trials have, "
            "among those that do.</p>"
        )
    if sketch.lines:
        parts.append(f"<h2>Trials</h2>{_table(sketch.columns, list(reversed(sketch.lines)))}")
    # Numbers alone, so nothing in it can end the element.
    places = json.dumps({line.number: [_short(place) for place in line.places] for line in sketch.lines})
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">"
        f'<meta name="viewport" content="width=device-width"><title>{_text(sketch.title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + f'\n<script type="application/json" id="places">{places}</script>\n<script>{_SCRIPT}</script>\n</body></html>\n'
    )


def _table(columns: Sequence[Column], lines: Sequence[Line]) -> str:
    names = ["trial", "status", *(column.name for column in columns)]
    head = "".join(f"<th>{_text(name)}</th>" for name in names)
    rows = "".join(
        f'<tr class="trial" data-trial="{line.number}">'
        + "".join(f"<td>{_text(text)}</td>" for text in (str(line.number), line.status, *line.texts))
        + "</tr>\n"
        for line in lines
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table>"


def _short(place: float | None) -> float | None:
    return None if place is None else round(place, 4)


def _text(text: str) -> str:
    return escape(visible(text))


_STYLE = """
:root { color-scheme: light; }
body { font: 14px/1.4 system-ui, sans-serif; color: #222; background: #fff; margin: 24px; max-width: 1400px; }
h1 { font-size: 19px; } h2 { font-size: 16px; margin: 28px 0 4px; } .key { color: #666; font-size: 12px; margin: 2px 0; }
svg { max-width: 100%; height: auto; font: 11px system-ui, sans-serif; }
svg.parallel { overflow: visible; }
.parallel .trial { fill: none; stroke-width: 1.5; opacity: .75; }
.dense .trial { stroke-width: .8; opacity: .45; }
.frame { fill: none; stroke: #ccc; } .axis { stroke: #444; } .grid { stroke: #e4e6ea; } .tick { fill: #666; }
.name { fill: #222; font-weight: 600; }
.parallel .tick { paint-order: stroke; stroke: #fff; stroke-width: 3px; }
.best { fill: none; stroke: #2c7fb8; stroke-width: 2; } .mark { stroke-width: 1.5; } .bar { fill: #2c7fb8; }
.brush { fill: transparent; cursor: ns-resize; } .brush.set { fill: rgba(44, 127, 184, .25); }
.off { opacity: .04 !important; } tr.off { display: none; }
.on { stroke: #ff7f0e !important; stroke-width: 3 !important; opacity: 1 !important; } tr.on { background: #ffe9d1; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 2px 12px 2px 0; border-bottom: 1px solid #eee; white-space: nowrap; }
th { cursor: pointer; }
"""

_SCRIPT = """
"use strict";
const places = JSON.parse(document.getElementById("places").textContent);
const all = Array.from(document.querySelectorAll(".trial"));
const byTrial = {};
for (const one of all) (byTrial[one.dataset.trial] ||= []).push(one);

// One trial is shown in every picture, and in the table.
for (const one of all) {
  one.addEventListener("mouseenter", () => byTrial[one.dataset.trial].forEach(e => e.classList.add("on")));
  one.addEventListener("mouseleave", () => byTrial[one.dataset.trial].forEach(e => e.classList.remove("on")));
}

// axis -> [low, high], from 0 to 1
const chosen = {};
function choose() {
  for (const [trial, elements] of Object.entries(byTrial)) {
    const at = places[trial];
    const off = at && Object.entries(chosen).some(
      ([axis, [low, high]]) => at[axis] === null || at[axis] < low || at[axis] > high);
    elements.forEach(e => e.classList.toggle("off", Boolean(off)));
  }
}
for (const brush of document.querySelectorAll(".brush")) {
  const axis = brush.dataset.axis, svg = brush.ownerSVGElement;
  const top = Number(brush.getAttribute("y")), height = Number(brush.getAttribute("height"));
  const shown = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const name of ["x", "width"]) shown.setAttribute(name, brush.getAttribute(name));
  shown.setAttribute("class", "brush set");
  shown.setAttribute("height", 0);
  shown.setAttribute("pointer-events", "none");
  svg.insertBefore(shown, brush);
  const place = event => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    return Math.min(1, Math.max(0, 1 - (point.y - top) / height));
  };
  let from = null;
  brush.addEventListener("pointerdown", event => { from = place(event); brush.setPointerCapture(event.pointerId); });
  brush.addEventListener("pointermove", event => {
    if (from === null) return;
    const to = place(event), low = Math.min(from, to), high = Math.max(from, to);
    shown.setAttribute("y", top + (1 - high) * height);
    shown.setAttribute("height", (high - low) * height);
    chosen[axis] = [low, high];
  });
  brush.addEventListener("pointerup", event => {
    if (from !== null && Math.abs(place(event) - from) < 0.01) {
      delete chosen[axis];
      shown.setAttribute("height", 0);
    }
    from = null;
    choose();
  });
}

for (const head of document.querySelectorAll("th")) {
  head.addEventListener("click", () => {
    const column = head.cellIndex, body = head.closest("table").tBodies[0], down = head.dataset.down !== "1";
    head.dataset.down = down ? "1" : "";
    const rows = Array.from(body.rows);
    const value = row => row.cells[column].textContent;
    rows.sort((a, b) => {
      const x = value(a), y = value(b), p = Number(x), q = Number(y);
      // What has no value stands last, whichever way.
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = Number.isNaN(p) || Number.isNaN(q) ? x.localeCompare(y) : p - q;
      return down ? order : -order;
    });
    rows.forEach(row => body.appendChild(row));
  });
}
"""
