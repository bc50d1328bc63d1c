"""Bands for curves of many ranks: the mean, minimum and maximum at each step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.ui.curves import Curve, finite

#: If at least this many ranks have a curve of a metric, the page draws a band, unless the user has chosen particular ranks.
RANKS = 8


@dataclass
class Band:
    """Mean, least and greatest value of several ranks at each x.

    count: Number of logged values of all ranks.
    """

    xs: list[float] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    greatest: list[float] = field(default_factory=list)
    count: int = 0


def band_of(
    curves: Sequence[Curve], *, axis: str = "step", origin_s: float = 0.0, cuts: Iterable[tuple[float, float]] = ()
) -> Band:
    """Return the band of the curves of several ranks in one attempt.

    The band joins values of the same step, or of the same index if a rank has logged no steps. If the x axis is time, x is
    the time of the first rank. cuts: Ranges (first, last) of steps to leave out, because later attempts logged them again.
    """
    has_steps = all(curve.has_steps for curve in curves)
    places = [curve.steps if has_steps else range(len(curve.ys)) for curve in curves]
    # Usually all ranks log equal steps, and some ranks one step less. So compare only as many steps as the shortest curve has.
    common = min(len(curve.ys) for curve in curves)
    if any(curve.has_nan for curve in curves) or any(places[0][:common] != other[:common] for other in places[1:]):
        common = 0
    ys = [curve.ys[:common] for curve in curves]
    rows = [*zip(*ys, strict=True)]
    found = Band([*places[0][:common]], [sum(row) / len(curves) for row in rows], [*map(min, rows)], [*map(max, rows)])
    times = dict(zip(places[0], curves[0].xs(axis, origin_s), strict=False)) if axis != "step" else {}
    _add_rest(found, [(place, curve.ys, common) for place, curve in zip(places, curves, strict=True)])
    cut = [*cuts] * has_steps
    kept = [n for n, x in enumerate(found.xs) if not any(low <= x <= high for low, high in cut)]
    xs = [times.get(x, math.nan) if axis != "step" else x for x in found.xs]
    return Band(
        [xs[n] for n in kept],
        [found.mean[n] for n in kept],
        [found.least[n] for n in kept],
        [found.greatest[n] for n in kept],
        sum(len(curve.ys) for curve in curves),
    )


def _add_rest(found: Band, rest: Iterable[tuple[Sequence[float], Sequence[float], int]]) -> None:
    by_place: dict[float, list[float]] = {}
    for places, ys, start in rest:
        for at, y in zip(places[start:], ys[start:], strict=True):
            by_place.setdefault(at, []).extend([y] * math.isfinite(y))
    for at, values in sorted(by_place.items()):
        found.xs.append(at)
        found.mean.append(sum(values) / (len(values) or math.nan))
        found.least.append(min(values, default=math.nan))
        found.greatest.append(max(values, default=math.nan))


def thinned_band(band: Band, pixels: int, window: tuple[float, float] | None = None) -> tuple[list[float | None], ...]:
    """Return x, mean, least and greatest values to draw, at most one per pixel."""
    low, high = window or (-math.inf, math.inf)
    kept = [n for n, x in enumerate(band.xs) if low <= x <= high]
    pieces = min(pixels, len(kept))
    parts = [kept[n * len(kept) // pieces : (n + 1) * len(kept) // pieces] for n in range(pieces)]
    return (
        [finite(band.xs[part[len(part) // 2]]) for part in parts],
        [finite(sum(band.mean[n] for n in part) / len(part)) for part in parts],
        [finite(min(band.least[n] for n in part)) for part in parts],
        [finite(max(band.greatest[n] for n in part)) for part in parts],
    )
