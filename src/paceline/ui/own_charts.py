"""Charts that users compose: a metric over another metric, bars or a histogram."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from paceline.errors import UserError
from paceline.ui.curves import Curve, Key, RunCurves, finite

KINDS = ("line", "scatter", "bar", "histogram")
_RANKS, _POINTS, _BARS, _BINS = 8, 4000, 60, 30


class OwnCurve(TypedDict):
    """A series of a user's own chart: label and points."""

    text: str
    x: list[float | None]
    y: list[float | None]


class OwnChart(TypedDict):
    """The data of a chart that a user has composed.

    labels: Names of the bars; None for other charts. width: Width of a bar in x. note: A message about omitted values, or "".
    """

    curves: list[OwnCurve]
    labels: list[str] | None
    width: float
    note: str


@dataclass(frozen=True, kw_only=True)
class OwnQuery:
    """A page's request for a chart that a user has composed.

    kind: "line", "scatter", "bar" or "histogram". x, y: Names of metrics; for bars, y is a text that the names contain.
    """

    kind: str
    y: str
    x: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}.")


def own_chart(curves: RunCurves, query: OwnQuery) -> OwnChart:
    """Return the data of the chart that a user's query describes."""
    own = {key: curve for key, curve in curves.curves.items() if not key.is_node and len(curve.ys)}
    if query.kind == "bar":
        return _bars(own, query.y)
    if query.kind == "histogram":
        return _histogram([curve for key, curve in own.items() if key.name == query.y])
    return _pairs(own, query)


def _pairs(curves: Mapping[Key, Curve], query: OwnQuery) -> OwnChart:
    drawn: list[OwnCurve] = []
    keys = sorted((key for key in curves if key.name == query.y), key=lambda key: (key.rank, key.attempt))
    both = [(key, other) for key in keys if (other := Key(query.x, key.rank, key.attempt)) in curves]
    left_out = 0
    for key, other in both[:_RANKS]:
        y, x = curves[key], curves[other]
        by_step = y.has_steps and x.has_steps
        x_at, y_at = (x.steps, y.steps) if by_step else (range(len(x.ys)), range(len(y.ys)))
        across = dict(zip(x_at, x.ys, strict=True))
        pairs = [(across[at], value) for at, value in zip(y_at, y.ys, strict=True) if at in across]
        pairs = [pair for pair in pairs if math.isfinite(sum(pair))]
        stride = 1 + len(pairs) // _POINTS
        left_out += len(pairs) - len(pairs[::stride])
        attempt = f", attempt {key.attempt}" * (key.attempt > 1)
        drawn.append(
            {
                "text": f"rank {key.rank}{attempt}",
                "x": [finite(a) for a, _ in pairs[::stride]],
                "y": [finite(b) for _, b in pairs[::stride]],
            }
        )
    notes = [f"{left_out} points are left out"] * (left_out > 0) + [f"the first {_RANKS} of {len(both)} curves"] * (
        len(both) > _RANKS
    )
    return {"curves": drawn, "labels": None, "width": 1.0, "note": "; ".join(notes)}


def _bars(curves: Mapping[Key, Curve], text: str) -> OwnChart:
    keys = sorted((key for key in curves if text in key.name), key=lambda key: (key.name, key.rank, key.attempt))
    names = list(dict.fromkeys(key.name for key in keys))
    ranks = {f"rank {key.rank}": curves[key].ys[-1] for key in keys}
    # If the chart has several metrics, show each metric's last value, from the last attempt of the lowest rank that logged it.
    lowest = {key.name: key.rank for key in reversed(keys)}
    metrics = {key.name: curves[key].ys[-1] for key in keys if key.rank == lowest[key.name]}
    bars = ranks if len(names) == 1 else metrics
    shown = list(bars)[:_BARS]
    note = f"{len(bars) - _BARS} more bars are left out" * (len(bars) > _BARS)
    ys = [finite(bars[name]) for name in shown]
    curve: OwnCurve = {
        "text": " ".join(names) * (len(names) == 1) or text,
        "x": [*map(float, range(len(shown)))],
        "y": ys,
    }
    return {"curves": [curve][: len(shown)], "labels": shown, "width": 1.0, "note": note}


def _histogram(curves: Sequence[Curve]) -> OwnChart:
    values = [value for curve in curves for value in curve.ys if math.isfinite(value)]
    if not values:
        return {"curves": [], "labels": None, "width": 1.0, "note": "no finite values"}
    low, high = min(values), max(values)
    # If all values are equal, draw one bar of width 1, with the value at its middle.
    # Compute halves of all numbers: the difference of two values can be larger than any float.
    half = (high / 2 - low / 2) / _BINS
    bins, half, middle = (_BINS, half, 0.5) if half else (1, 0.5, 0.0)
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int((value / 2 - low / 2) / half))] += 1
    x = [finite(2 * (low / 2 + half * (place + middle))) for place in range(bins)]
    others = sum(len(curve.ys) for curve in curves) - len(values)
    curve: OwnCurve = {"text": "values", "x": x, "y": [*map(float, counts)]}
    return {
        "curves": [curve],
        "labels": None,
        "width": 2 * half,
        "note": f"{others} values are not finite" * (others > 0),
    }
