"""Panels of logged media, tables and texts on a run's page.

A panel shows the values logged under one name at one position. The position is a step, or the number of the logging call if
the values have no step. `curves` indexes the logs, and a panel reads only the lines that it shows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from paceline.errors import FileNameError
from paceline.runs.folder import check_file_name
from paceline.ui.curves import Other, RunCurves

#: Maximum number of panels of a page, of items of a panel, of rows of a table, and of columns of a table.
_PANELS, _ITEMS, _ROWS, _COLUMNS = 100, 16, 200, 60
_LONGEST_TEXT, _LONGEST_CELL = 20_000, 300
#: Width and height of a histogram's picture in pixels.
_WIDTH, _HEIGHT = 400, 120


class HistogramBar(TypedDict):
    """A bar of a histogram's SVG picture."""

    x: float
    y: float
    width: float
    height: float
    label: str


class Item(TypedDict, total=False):
    """A logged image, table or text in a panel. Which keys exist depends on the kind."""

    rank: int
    file: str
    text: str
    is_cut: bool
    columns: list[str]
    rows: list[list[object]]
    more: int
    bars: list[HistogramBar]
    low: float
    high: float
    most: int


class Panel(TypedDict):
    """The images, tables or texts logged under one name at one step or call.

    count: Number of steps or calls with values. at: Index of the shown step or call. label: The caption, such as "step
    30". more: Number of values of this step or call that are left out.
    """

    name: str
    kind: str
    count: int
    at: int
    label: str
    items: list[Item]
    ranks: list[int]
    more: int


class Panels(TypedDict):
    """A run's panels of images, tables and texts. more: number of omitted panels."""

    panels: list[Panel]
    more: int


@dataclass(frozen=True)
class _Position:
    label: str
    items: list[Other]


def panels_of(curves: RunCurves) -> Panels:
    """Return a panel for each logged name, with its latest images, tables or texts."""
    names = [*curves.others]
    return {"panels": [panel_of(curves, name) for name in names[:_PANELS]], "more": max(0, len(names) - _PANELS)}


def panel_of(curves: RunCurves, name: str, at: int = -1, rank: float | None = None) -> Panel:
    """Return the panel of the media, table or texts logged under a name.

    at: Index of the step or logging call to show, or -1 for the latest. rank: Return only values of this rank; None for all.
    """
    logged = curves.others.get(name, [])
    # If a script has logged different kinds of values by one name, show the kind that it has logged last.
    kind = logged[-1].kind if logged else "value"
    logged = [one for one in logged if one.kind == kind]
    ranks = sorted({one.rank for one in logged})
    # Show all rows of a name as one table, even if their steps differ.
    positions = (kind != "row" and _positions(logged)) or [_Position("", logged)]
    at = range(len(positions))[min(at, len(positions) - 1)]
    shown = positions[at]
    chosen = [one for one in shown.items if rank in (None, one.rank)]
    if kind == "row":
        items, more = [_rows(chosen)], 0
    else:
        items, more = [_item(one) for one in chosen[:_ITEMS]], max(0, len(chosen) - _ITEMS)
    return {
        "name": name,
        "kind": {"value": "text", "list": "text", "row": "table"}.get(kind, kind),
        "count": len(positions),
        "at": at,
        "label": shown.label,
        "items": items,
        "ranks": ranks,
        "more": more,
    }


def _positions(logged: Sequence[Other]) -> list[_Position]:
    """Group values by step, or by logging call if they have no step."""
    groups: dict[tuple[int, int], list[Other]] = {}
    calls = Counter[tuple[int, int]]()
    for one in logged:
        calls[one.rank, one.attempt] += one.step is None
        key = (0, calls[one.rank, one.attempt]) if one.step is None else (1, one.step)
        group = groups.setdefault(key, [])
        # If a later attempt of this rank has logged this step, too, drop the rank's values from earlier attempts.
        if one.step is not None and group and group[-1].attempt < one.attempt:
            group[:] = [other for other in group if other.rank != one.rank]
        group.append(one)
    return [
        _Position(
            f"step {number}" if has_step else f"call {number}",
            sorted(groups[has_step, number], key=lambda one: one.rank),
        )
        for has_step, number in sorted(groups)
    ]


def _item(one: Other) -> Item:
    value = one.read()
    match one.kind, value:
        case (("image" | "audio" | "video" | "html"), _):
            return {"rank": one.rank, **_file(value)}
        case "table", Mapping():
            return {"rank": one.rank, **_table(value)}
        case "histogram", _ if bars := _bars(value):
            return {"rank": one.rank, **bars}
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return {"rank": one.rank, "text": text[:_LONGEST_TEXT], "is_cut": len(text) > _LONGEST_TEXT}


def _file(value: object) -> Item:
    # The value may be a file's address in the SDK of `azureml`: aml://artifactId/ExperimentRun/dcid.<run>/<file>.
    text = str(value)
    name = text.split("/", 5)[-1] if text.startswith("aml://") else text
    try:
        return {"file": check_file_name(name)}
    except FileNameError:
        return {"text": text[:_LONGEST_CELL], "is_cut": False}


def _rows(logged: Sequence[Other]) -> Item:
    values = [value for one in logged[-_ROWS:] if isinstance(value := one.read(), Mapping)]
    columns = [*dict.fromkeys(str(key) for value in values for key in value)][:_COLUMNS]
    rows = [[_cell(value.get(column)) for column in columns] for value in values]
    return {"rank": 0, "columns": columns, "rows": rows, "more": max(0, len(logged) - _ROWS)}


def _table(value: Mapping[str, object]) -> Item:
    lists = {str(key): item if isinstance(item, list) else [item] for key, item in [*value.items()][:_COLUMNS]}
    longest = max((len(items) for items in lists.values()), default=0)
    rows = [
        [_cell(items[number]) if number < len(items) else None for items in lists.values()]
        for number in range(min(longest, _ROWS))
    ]
    return {"columns": [*lists], "rows": rows, "more": max(0, longest - _ROWS)}


def _cell(value: object) -> object:
    return value if value is None or isinstance(value, (int, float)) else str(value)[:_LONGEST_CELL]


def _bars(value: object) -> Item | None:
    counts, edges = (value.get("counts"), value.get("edges")) if isinstance(value, Mapping) else (None, None)
    if not (
        isinstance(counts, list) and isinstance(edges, list) and counts and len(edges) == len(counts) + 1
    ) or not all(isinstance(number, (int, float)) and number - number == 0 for number in [*counts, *edges]):
        return None
    low, high, most = edges[0], edges[-1], max(counts)
    if not high > low or len(counts) > 2000 or min(counts) < 0:
        return None
    scale = _WIDTH / (high - low)
    bars: list[HistogramBar] = [
        {
            "x": round((left - low) * scale, 2),
            "y": round(_HEIGHT * (1 - count / (most or 1)), 2),
            "width": round(max((right - left) * scale - 0.6, 0.4), 2),
            "height": round(_HEIGHT * count / (most or 1), 2),
            "label": f"{left:.4g} to {right:.4g}: {count:g}",
        }
        for left, right, count in zip(edges, edges[1:], counts, strict=False)
    ]
    return {"bars": bars, "low": low, "high": high, "most": most}
