"""The metrics of a run as curves, drawn with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from paceline.errors import UserError
from paceline.runs.series import MetricSeries

_COLUMNS = 3
_WIDTH, _HEIGHT = 4.2, 2.8


def plot(found: Mapping[str, MetricSeries], title: str) -> Any:
    """A figure with axes for each metric that has numbers, a curve for each rank and attempt; by step, or where values have none
    by their number.

    Raises:
        UserError: matplotlib is not installed, or there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("plot() needs matplotlib: pip install matplotlib.") from error
    curves = {name: drawn for name, one in found.items() if (drawn := _curves(one))}
    if not curves:
        raise UserError(f"{title} has no metric with numbers to draw.")
    columns = min(_COLUMNS, len(curves))
    rows = math.ceil(len(curves) / columns)
    # Not by pyplot, which would keep the figure, and might choose a window to draw it in.
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
    figure.suptitle(_plain(title))
    for number, (name, drawn) in enumerate(curves.items()):
        axes = figure.add_subplot(rows, columns, number + 1)
        for label, (steps, values) in drawn.items():
            # A single value is a point, which a line does not show.
            axes.plot(steps, values, marker="o" if len(values) == 1 else None, label=label)
        axes.set_title(_plain(name), fontsize="medium")
        axes.grid(alpha=0.3)
        if len(drawn) > 1:
            axes.legend(fontsize="small")
    return figure


def _curves(one: MetricSeries) -> dict[str, tuple[list[float], list[float]]]:
    """Label -> steps and numbers, of each rank and attempt that has any."""
    found: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
    for step, value, rank, attempt in zip(one.steps, one.values, one.ranks, one.attempts, strict=True):
        if isinstance(value, (int, float)):
            steps, values = found.setdefault((rank, attempt), ([], []))
            steps.append(len(steps) if step is None else step)
            values.append(value)
    several = len({attempt for _, attempt in found}) > 1
    return {
        f"rank {rank}" + (f", attempt {attempt}" if several else ""): drawn for (rank, attempt), drawn in found.items()
    }


def _plain(text: str) -> str:
    # Between two of them matplotlib reads mathematics.
    return text.replace("$", r"\$")
