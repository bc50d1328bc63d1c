"""Charts that a user composes: a metric over another one, bars of last values, a histogram of values."""

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
    """A series of a chart."""

    text: str
    x: list[float | None]
    y: list[float | None]


class OwnChart(TypedDict):
    """The data of a chart. labels: names of bars; None for numbers. width: of a bar. note: what the chart leaves out."""

    curves: list[OwnCurve]
    labels: list[str] | None
    width: float
    note: str


@dataclass(frozen=True, kw_only=True)
class OwnQuery:
    """The chart that a page requests. y: a metric; for bars, a text in names of metrics. x: the horizontal metric."""

    kind: str
    y: str
    x: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}.")


def own_chart(curves: RunCurves, query: OwnQuery) -> OwnChart:
    """Return the data of a chart, from the values that `curves` has read."""
    own = {key: curve for key, curve in curves.curves.items() if not key.is_node and len(curve.ys)}
    if query.kind == "bar":
        return _bars(own, query.y)
    if query.kind == "histogram":
        return _histogram([curve for key, curve in own.items() if key.name == query.y])
    return _pairs(own, query)


def _pairs(curves: Mapping[Key, Curve], query: OwnQuery) -> OwnChart:
    """Join two metrics by rank, attempt and step; by position where a metric has no steps."""
    drawn: list[OwnCurve] = []
    keys = sorted((key for key in curves if key.name == query.y), key=lambda key: (key.rank, key.attempt))
    both = [(key, other) for key in keys if (other := Key(query.x, key.rank, key.attempt)) in curves]
    left_out = 0
    for key, other in both[:_RANKS]:
        y, x = curves[key], curves[other]
        by_step = y.has_steps and x.has_steps
        across = dict(zip(x.steps if by_step else range(len(x.ys)), x.ys, strict=True))
        pairs = [
            (across[at], value)
            for at, value in zip(y.xs("step", 0) if by_step else range(len(y.ys)), y.ys, strict=True)
            if at in across
        ]
        pairs = [pair for pair in pairs if math.isfinite(sum(pair))]
        stride = 1 + len(pairs) // _POINTS
        left_out += len(pairs) - len(pairs[::stride])
        attempt = f", attempt {key.attempt}" if key.attempt > 1 else ""
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
    """Return the last value of each metric whose name has this text; of one metric, that of each rank."""
    last: dict[Key, float] = {}
    for key in sorted(curves, key=lambda key: (key.name, key.rank, key.attempt)):
        if text in key.name:
            last[Key(key.name, key.rank, 0)] = curves[key].ys[-1]
    names = list(dict.fromkeys(key.name for key in last))
    if len(names) == 1:
        bars = {f"rank {key.rank}": value for key, value in last.items()}
    else:
        # Of several metrics, the lowest rank that has logged one.
        bars = {key.name: value for key, value in reversed(last.items())}
        bars = {name: bars[name] for name in names}
    shown = list(bars)[:_BARS]
    note = f"{len(bars) - _BARS} more bars are left out" if len(bars) > _BARS else ""
    ys = [finite(bars[name]) for name in shown]
    curve: OwnCurve = {"text": names[0] if len(names) == 1 else text, "x": [*map(float, range(len(shown)))], "y": ys}
    return {"curves": [curve] if shown else [], "labels": shown, "width": 1.0, "note": note}


def _histogram(curves: Sequence[Curve]) -> OwnChart:
    """Count all values of a metric in equal intervals."""
    low = min((min(filter(math.isfinite, curve.ys), default=math.inf) for curve in curves), default=math.inf)
    high = max((max(filter(math.isfinite, curve.ys), default=-math.inf) for curve in curves), default=-math.inf)
    width = (high - low) / _BINS
    if not math.isfinite(width):
        return {"curves": [], "labels": None, "width": 1.0, "note": "no finite values"}
    width = width or 1.0
    counts = [0] * (_BINS if high > low else 1)
    others = 0
    for curve in curves:
        for value in curve.ys:
            if math.isfinite(value):
                counts[min(len(counts) - 1, int((value - low) / width))] += 1
            else:
                others += 1
    x = [finite(low + width * (place + (0.5 if high > low else 0))) for place in range(len(counts))]
    note = f"{others} values are not finite" if others else ""
    return {
        "curves": [{"text": "values", "x": x, "y": [*map(float, counts)]}],
        "labels": None,
        "width": width,
        "note": note,
    }
