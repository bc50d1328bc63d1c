"""SVG of a sweep's figures. Names and values are untrusted text and escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from paceline.runs import states
from paceline.runs.visible import visible
from paceline.sweeps.pictures.figure_data import BEST, FAILED, GREY, Column, Front, History, Line, Numbers, line_of
from paceline.sweeps.pictures.importance import Importance

WIDTH = 960
_HEIGHT = 320
#: Margins of a figure in pixels, with room for texts: left, right, top, bottom.
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 90, 34, 44
#: Distance in pixels from the axes down to the points of trials without a value.
_NONE = 22
_LONGEST = 16
#: Descriptions of the pictures for screen readers. The page's table of trials has the numbers.
_SAID = {
    "parallel": "A line for each trial, through its hyperparameters to its metric",
    "history": "The metric of each trial, and the best so far",
    "front": "Two metrics of the trials against each other",
    "slice": "A point for each trial",
    "importance": "The share of each hyperparameter",
}
#: Number of lines above which lines are drawn thinner.
DENSE = 250

#: Trial number -> name that is shown instead of the number, such as the name of a run.
Names = Mapping[int, str]


def parallel(columns: Sequence[Column], lines: Sequence[Line], names: Names | None = None) -> str:
    """Return an SVG with a line through all columns for each trial.

    If a trial lacks a column's value, its line passes below the column's axis. names: Trial number -> name to show.
    """
    apart = max(92.0, (WIDTH - _LEFT - _RIGHT) / max(1, len(columns) - 1))
    width = round(_LEFT + _RIGHT + apart * (len(columns) - 1))
    bottom = _TOP + _HEIGHT
    xs = [_LEFT + n * apart for n in range(len(columns))]
    parts = []
    for line in lines:
        ys = [bottom + _NONE if place is None else bottom - place * _HEIGHT for place in line.places]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        colour, dashes = line_of(line.status, line.shade)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        parts.append(
            f'<polyline class="trial" data-trial="{line.number}" points="{points}" stroke="{colour}"{dashed}>'
            f"<title>{_said(columns, line, names)}</title></polyline>"
        )
    for n, (x, column) in enumerate(zip(xs, columns, strict=True)):
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts += [
            _text(x - 6, bottom - place * _HEIGHT + 4, text, "tick", "end") for place, text in column.axis.ticks()
        ]
        parts.append(_text(x, _TOP - 14, column.name, "name", "middle"))
        # Add an invisible rectangle in which the mouse can select a part of the axis.
        parts.append(
            f'<rect class="brush" data-axis="{n}" data-name="{escape(visible(column.name))}" x="{x - 10:.1f}" y="{_TOP}" '
            f'width="20" height="{_HEIGHT}"/>'
        )
    if any(place is None for line in lines for place in line.places):
        parts.append(_text(8, bottom + _NONE + 4, "no value", "tick", "start"))
    return _svg(width, bottom + _BOTTOM, "parallel dense" if len(lines) > DENSE else "parallel", parts)


def history(picture: History) -> str:
    """Return an SVG of each trial's metric and the best value so far."""
    last = max([point[0] for point in picture.points] + [point[0] for point in picture.best])
    bottom, right = _TOP + _HEIGHT, WIDTH - _RIGHT / 3

    def x(number: float) -> float:
        return _LEFT + (right - _LEFT) * number / max(1, last)

    def y(place: float) -> float:
        return bottom - place * _HEIGHT

    parts = []
    for place, text in picture.axis.ticks():
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{right:.1f}" y1="{y(place):.1f}" y2="{y(place):.1f}"/>'
            + _text(_LEFT - 8, y(place) + 4, text, "tick", "end")
        )
    whole = [number for number in _ticks(last) if number <= last]
    parts += [_text(x(number), bottom + 18, str(number), "tick", "middle") for number in whole]
    parts.append(_text((_LEFT + right) / 2, bottom + 36, "trial", "tick", "middle"))
    parts.append(_text(_LEFT, _TOP - 14, picture.name, "name", "start", 60))
    steps = ""
    for number, place in picture.best:
        steps += f"H{x(number):.1f}V{y(place):.1f}" if steps else f"M{x(number):.1f} {y(place):.1f}"
    parts.append(f'<path class="best" d="{steps}H{right:.1f}"/>')
    for number, place, status in picture.points:
        parts.append(_mark(number, x(number), y(place), status))
    return _svg(WIDTH, bottom + _BOTTOM, "history", parts)


def scatter(picture: Front, names: Names | None = None) -> str:
    """Return an SVG scatter plot of two columns, a point per trial."""
    return front(picture, names, "slice")


def front(picture: Front, names: Names | None = None, kind: str = "front") -> str:
    """Return an SVG of two metrics with a line through the Pareto front."""
    bottom, right = _TOP + _HEIGHT, _LEFT + 1.5 * _HEIGHT

    def at(places: tuple[float, float]) -> tuple[float, float]:
        return _LEFT + (right - _LEFT) * places[0], bottom - places[1] * _HEIGHT

    parts = [f'<rect class="frame" x="{_LEFT}" y="{_TOP}" width="{right - _LEFT:.1f}" height="{_HEIGHT}"/>']
    for place, text in picture.up.axis.ticks():
        parts.append(_text(_LEFT - 8, at((0, place))[1] + 4, text, "tick", "end"))
    for place, text in picture.across.axis.ticks():
        parts.append(_text(at((place, 0))[0], bottom + 16, text, "tick", "middle"))
    parts.append(_text(_LEFT, _TOP - 14, picture.up.name, "name", "start", 60))
    parts.append(_text(right, bottom + 34, picture.across.name, "name", "end", 60))
    if picture.best:
        line = " ".join("{:.1f},{:.1f}".format(*at(places)) for places in picture.best)
        parts.append(f'<polyline class="best" points="{line}"/>')
    parts += [_mark(number, *at(places), status, names) for number, places, status in picture.points]
    return _svg(right + _RIGHT, bottom + _BOTTOM, kind, parts)


def importance(found: Sequence[Importance]) -> str:
    """Return an SVG with a bar for each hyperparameter's importance."""
    left, height = 190, 26
    most = max([one.share for one in found], default=0) or 1
    parts = []
    for n, one in enumerate(found):
        y = 8 + n * height
        width = (WIDTH - left - 170) * one.share / most
        parts.append(_text(left - 8, y + 14, one.name, "name", "end", 26))
        parts.append(f'<rect class="bar" x="{left}" y="{y}" width="{width:.1f}" height="{height - 8}"/>')
        text = f"{100 * one.share:.1f} %{f' among {one.trials} trials' if one.is_conditional else ''}"
        parts.append(_text(left + width + 6, y + 14, text, "tick", "start", 40))
    return _svg(WIDTH, 16 + len(found) * height, "importance", parts)


def _mark(number: int, x: float, y: float, status: str, names: Names | None = None) -> str:
    whose = f'class="mark trial" data-trial="{number}"'
    title = f"<title>{escape(visible(_trial(number, names)))}, {status}</title>"
    if status == states.COMPLETED:
        return f'<circle {whose} cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{BEST}" stroke="none">{title}</circle>'
    if status == states.FAILED:
        cross = f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"
        return f'<path {whose} d="{cross}" fill="none" stroke="{FAILED}">{title}</path>'
    # Draw a hollow circle for a stopped or live trial, whose value is not final.
    return f'<circle {whose} cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="#fff" stroke="{GREY}">{title}</circle>'


def _ticks(last: int) -> list[int]:
    return sorted({round(place * last) for place, _ in Numbers(0, max(1, last)).ticks()})


def _trial(number: int, names: Names | None) -> str:
    return names[number] if names else f"trial {number}"


def _said(columns: Sequence[Column], line: Line, names: Names | None) -> str:
    values = [f"{c.name} {text}" for c, text in zip(columns, line.texts, strict=True) if text]
    return escape(visible(f"{_trial(line.number, names)}, {line.status}\n" + "\n".join(values), lines=True))


def _text(x: float, y: float, text: str, kind: str, anchor: str, longest: int = _LONGEST) -> str:
    shown = visible(text)
    title = ""
    if len(shown) > longest:
        title, shown = f"<title>{escape(shown)}</title>", f"{shown[: longest - 1]}…"
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(shown)}{title}</text>'


def _svg(width: float, height: float, kind: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{_SAID[kind.partition(" ")[0]]}">' + "\n".join(parts) + "</svg>"
    )
