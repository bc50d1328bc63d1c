"""PNG files of a sweep's figures, drawn by matplotlib."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.runs import states
from paceline.runs.visible import visible
from paceline.sweeps.pictures.figure_data import BEST, FAILED, GREY, Column, Front, History, Line, Sketch, line_of
from paceline.sweeps.pictures.importance import Importance
from paceline.sweeps.pictures.svg import DENSE

HISTORY, FRONT, PARALLEL, IMPORTANCE = "history.png", "front.png", "parallel_coordinates.png", "importance.png"
_LONGEST = 24
#: Dash pattern of a line in SVG -> the same pattern in matplotlib.
_DASHES = {"": "-", "3 3": ":", "7 4": "--"}
#: Vertical position of points without a value: below the axes, as a fraction of the axes' height.
_NONE = -0.07


def write(sketch: Sketch, folder: Path) -> list[Path]:
    """Draw the figures into the folder. Return the files.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: A file cannot be written.
    """
    with warnings.catch_warnings():
        # Ignore matplotlib's warnings about missing characters and an unwritable cache folder.
        warnings.simplefilter("ignore")
        paths: list[Path] = []
        if sketch.histories:
            paths.append(_save(_histories(sketch.histories), folder / HISTORY))
        if any(front.points for front in sketch.fronts):
            paths.append(_save(_fronts(sketch.fronts), folder / FRONT))
        if sketch.lines:
            paths.append(_save(_parallel(sketch.columns, sketch.lines), folder / PARALLEL))
        if any(bars for _, bars in sketch.importances):
            paths.append(_save(_importances(sketch.importances), folder / IMPORTANCE))
        return paths


def _figure(width: float, height: float, panels: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Do not use pyplot, which keeps figures in memory and may look for a display.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(panels, 1, squeeze=False)[:, 0])


def _histories(histories: Sequence[History]) -> Any:
    figure, panels = _figure(9, 3.6 * len(histories), len(histories))
    for panel, history in zip(panels, histories, strict=True):
        _scatter(panel, [((number, place), status) for number, place, status in history.points])
        last = max([point[0] for point in history.points] + [point[0] for point in history.best])
        steps = [*history.best, (last, history.best[-1][1])]
        panel.step(*zip(*steps, strict=True), where="post", color="#2c7fb8", label="the best so far", zorder=0)
        _ticks(panel, history.axis.ticks())
        panel.set(ylim=(-0.04, 1.04))
        panel.grid(axis="y", color="#e4e6ea")
        panel.set_axisbelow(True)
        panel.xaxis.get_major_locator().set_params(integer=True)
        _name(panel.set_xlabel("trial"), panel.set_ylabel(_short(history.name)))
        panel.legend(fontsize=8, frameon=False, loc="best")
    return figure


def _fronts(fronts: Sequence[Front]) -> Any:
    figure, panels = _figure(6.5, 4.2 * len(fronts), len(fronts))
    for panel, front in zip(panels, fronts, strict=True):
        _scatter(panel, [(places, status) for _, places, status in front.points])
        if front.best:
            panel.plot(*zip(*front.best, strict=True), color="#2c7fb8", label="Pareto front", zorder=0)
        _ticks(panel, front.up.axis.ticks())
        across = front.across.axis.ticks()
        panel.set_xticks([place for place, _ in across], [text for _, text in across], fontsize=8)
        panel.set(xlim=(-0.04, 1.04), ylim=(-0.04, 1.04))
        _name(panel.set_xlabel(_short(front.across.name)), panel.set_ylabel(_short(front.up.name)))
        panel.legend(fontsize=8, frameon=False, loc="best")
    return figure


def _scatter(panel: Any, points: Sequence[tuple[tuple[float, float], str]]) -> None:
    looks = {
        states.COMPLETED: {"marker": "o", "color": BEST, "label": "completed"},
        states.FAILED: {"marker": "x", "color": FAILED, "label": "failed"},
        "": {"marker": "o", "color": GREY, "label": "stopped or running", "facecolors": "none"},
    }
    for status, look in looks.items():
        places = [place for place, seen in points if (seen if seen in looks else "") == status]
        if places:
            panel.scatter(*zip(*places, strict=True), s=18, linewidths=1.2, **look)


def _parallel(columns: Sequence[Column], lines: Sequence[Line]) -> Any:
    figure, (panel,) = _figure(max(7.0, 1.5 * len(columns)), 4.2)
    xs = list(range(len(columns)))
    width, alpha = (0.6, 0.45) if len(lines) > DENSE else (1.1, 0.8)
    for line in lines:
        colour, dashes = line_of(line.status, line.shade)
        ys = [_NONE if place is None else place for place in line.places]
        panel.plot(xs, ys, color=colour, linestyle=_DASHES[dashes], linewidth=width, alpha=alpha)
    for x, column in zip(xs, columns, strict=True):
        panel.axvline(x, 0.1, 0.97, color="#444", linewidth=0.9)
        for place, text in column.axis.ticks():
            written = panel.text(x - 0.03, place, _short(text, 12), fontsize=7, ha="right", va="center", color="#444")
            written.set_bbox({"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.5})
            _name(written)
    if any(place is None for line in lines for place in line.places):
        panel.text(-0.45, _NONE, "no value", fontsize=7, va="center", color="#666")
    panel.set(xlim=(-0.5, len(columns) - 0.8), ylim=(-0.12, 1.04), yticks=[])
    panel.set_xticks(xs, [_short(column.name) for column in columns], fontsize=8)
    panel.xaxis.tick_top()
    # Get the labels after moving the ticks, because labels above the axis are other objects.
    _name(*panel.get_xticklabels())
    panel.tick_params(length=0)
    for side in panel.spines.values():
        side.set_visible(False)
    return figure


def _importances(importances: Sequence[tuple[str, tuple[Importance, ...]]]) -> Any:
    most = max(len(found) for _, found in importances)
    figure, panels = _figure(7, (1 + 0.35 * most) * len(importances), len(importances))
    for panel, (metric, found) in zip(panels, importances, strict=True):
        bars = panel.barh(
            range(len(found)), [100 * importance.share for importance in found], color="#2c7fb8", height=0.7
        )
        panel.bar_label(
            bars,
            [
                f"{100 * importance.share:.1f} %{f' among {importance.trials} trials' if importance.is_conditional else ''}"
                for importance in found
            ],
            fontsize=8,
            padding=3,
        )
        panel.set_yticks(range(len(found)), [_short(importance.name) for importance in found], fontsize=8)
        panel.invert_yaxis()
        panel.margins(x=0.15)
        _name(panel.set_xlabel(f"share of the variance of {_short(metric)}, %", fontsize=8), *panel.get_yticklabels())
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    return figure


def _ticks(panel: Any, ticks: Sequence[tuple[float, str]]) -> None:
    panel.set_yticks([place for place, _ in ticks], [text for _, text in ticks], fontsize=8)


def _name(*texts: Any) -> None:
    for text in texts:
        text.set_parse_math(False)


def _short(text: str, longest: int = _LONGEST) -> str:
    shown = visible(text)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def _save(figure: Any, path: Path) -> Path:
    # Write to another name first, so that viewers never see an incomplete picture.
    beside = path.with_name(f".{path.name}.new")
    try:
        figure.savefig(beside, format="png", dpi=150)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path
