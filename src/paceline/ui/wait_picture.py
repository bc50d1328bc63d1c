"""A drawing of which ranks wait for which: groups of ranks as boxes, waits as arrows.

layer 0     ranks that no other rank is waiting for
layer 1     ranks that layer 0 is waiting for, and so on: the cause is at the bottom
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import copysign

from paceline.observe import wait_graph
from paceline.observe.node.messages import WorkersReport
from paceline.observe.wait_graph import Wait
from paceline.runs.folder import RunFolder
from paceline.system.files import read_json

#: Maximum number of boxes, each for one group of ranks. If there are more groups, the last box shows all remaining ranks.
_MOST = 12
_MOST_RANGES = 5
#: Width and height of a box, horizontal and vertical gap, and padding, all in pixels; maximum characters of a line in a box.
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _PAD, _CHARS = 316, 78, 24, 40, 6, 46
#: Pixels by which an arrow moves to the side if it passes a row of boxes.
_ASIDE = 60
_PER_ROW = 3


@dataclass
class Box:
    """A group of ranks that wait in the same way.

    place: Where in the code the ranks are. waits: The collective in which they wait, or "". is_cause: Whether the group
    causes the hang: other ranks wait for it, and it waits for no ranks. x, y: The top left corner.
    """

    ranks: tuple[int, ...]
    name: str
    place: str
    waits: str = ""
    row: int = 0
    is_cause: bool = False
    x: float = 0.0
    y: float = 0.0

    @property
    def lines(self) -> list[str]:
        """Return the box's text in at most three lines: place in the code, and wait."""
        lines = textwrap.wrap(self.place, _CHARS, max_lines=2 if self.waits else 3, placeholder=" …")
        return [*lines, *textwrap.wrap(self.waits, _CHARS, max_lines=1, placeholder=" …")]


@dataclass(frozen=True)
class Arrow:
    """An arrow from a box to the box that it waits for. path: the SVG path."""

    sentence: str
    path: str


@dataclass
class WaitPicture:
    """A picture of waiting ranks: boxes, arrows, and sentences that say the same."""

    boxes: list[Box] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    width: int = 0
    height: int = 0
    box_width: int = _WIDTH
    box_height: int = _HEIGHT


def picture_of_hang(folder: RunFolder, attempt: int) -> WaitPicture | None:
    """Return the picture of an attempt's last hang, or None without a hang."""
    report = read_json(folder.hang_report(attempt).with_suffix(".json"))
    # Another program may have written the report, because users may share the folder. Ignore a report of unexpected structure.
    try:
        return wait_picture(report) if report else None
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None


def wait_picture(told: WorkersReport) -> WaitPicture:
    """Return the picture of waiting ranks from stack dumps of all ranks."""
    waits = wait_graph.waits(told)
    groups = _groups(told, waits)
    boxes = [Box(ranks, _title(ranks), place) for ranks, place in groups]
    of_rank = {rank: number for number, (ranks, _) in enumerate(groups) for rank in ranks}
    edges: dict[tuple[int, int], Wait] = {}
    for wait in waits:
        for first in sorted({of_rank[rank] for rank in wait.ranks}):
            for second in sorted({of_rank[rank] for rank in wait.for_ranks}):
                if first != second:
                    edges.setdefault((first, second), wait)
    for number, box in enumerate(boxes):
        mine = next((wait for (first, _), wait in edges.items() if first == number), None)
        box.waits = f"waits in {_wait_text(mine)}" if mine else ""
        box.is_cause = any(second == number for _, second in edges) and all(first != number for first, _ in edges)
    width, height = _place(boxes, edges)
    arrows = [_arrow(boxes[first], boxes[second], wait) for (first, second), wait in edges.items()]
    stuck = [
        f"{_title(wait.ranks)}: all ranks have come to {wait.collective}, and it does not end."
        for wait in waits
        if not wait.for_ranks
    ]
    sentences = [arrow.sentence for arrow in arrows] + stuck + [f"{box.name}: {box.place}." for box in boxes]
    return WaitPicture(boxes, arrows, sentences, width, height)


def _groups(told: WorkersReport, waits: Sequence[Wait]) -> list[tuple[tuple[int, ...], str]]:
    waiting: dict[int, list[int]] = {}
    awaited: dict[int, list[int]] = {}
    for number, wait in enumerate(waits):
        for rank in wait.ranks:
            waiting.setdefault(rank, []).append(number)
        for rank in wait.for_ranks:
            awaited.setdefault(rank, []).append(number)
    found: dict[tuple[object, ...], list[int]] = {}
    places = {int(rank): wait_graph.stands(int(rank), told).removeprefix("is in ") for rank in told["ranks"]}
    for rank, place in sorted(places.items()):
        is_only_waiting = rank in waiting and rank not in awaited
        key = (*waiting.get(rank, ()), "|", *awaited.get(rank, ()), "" if is_only_waiting else place)
        found.setdefault(key, []).append(rank)
    groups = sorted(found.values(), key=len)
    # Give the smallest groups of ranks their own boxes, because the ranks that cause a hang are usually few.
    kept, rest = groups[: _MOST - 1], groups[_MOST - 1 :]
    if rest:
        kept.append(sorted(rank for ranks in rest for rank in ranks))
    return [
        (tuple(ranks), places[ranks[0]] if len(rest) < 2 or ranks is not kept[-1] else "at several lines")
        for ranks in kept
    ]


def _title(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    # Group consecutive ranks: within a sequence such as 4, 5, 6 the difference between rank and list index is constant.
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    texts = ["–".join(dict.fromkeys((str(run[0]), str(run[-1])))) for run in runs]
    more = ", …" * (len(texts) > _MOST_RANGES)
    count = f" ({len(ranks)})" * (len(ranks) > _MOST_RANGES)
    return f"Ranks {', '.join(texts[:_MOST_RANGES])}{more}{count}"


def _place(boxes: Sequence[Box], edges: Iterable[tuple[int, int]]) -> tuple[int, int]:
    layer = dict.fromkeys(range(len(boxes)), 0)
    # If boxes wait for each other in a cycle, each round moves them to a lower row. So limit the number of rounds.
    for _ in boxes:
        for first, second in edges:
            if layer[second] <= layer[first] < len(boxes):
                layer[second] = layer[first] + 1
    layers: dict[int, list[Box]] = {}
    for number, box in enumerate(boxes):
        layers.setdefault(layer[number], []).append(box)
    rows = [
        members[start : start + _PER_ROW]
        for _, members in sorted(layers.items())
        for start in range(0, len(members), _PER_ROW)
    ]
    widest = max((len(row) for row in rows), default=0)
    width = widest * (_WIDTH + _GAP_X) - _GAP_X + 2 * (_PAD + _ASIDE * (len(rows) > 2))
    for number, row in enumerate(rows):
        left = (width - len(row) * (_WIDTH + _GAP_X) + _GAP_X) / 2
        for column, box in enumerate(row):
            box.row = number
            box.x, box.y = left + column * (_WIDTH + _GAP_X), _PAD + number * (_HEIGHT + _GAP_Y)
    return width, len(rows) * (_HEIGHT + _GAP_Y) - _GAP_Y + 2 * _PAD


def _wait_text(wait: Wait) -> str:
    return f"{wait.collective}, {wait.seconds:.0f} s"


def _arrow(first: Box, second: Box, wait: Wait) -> Arrow:
    verb = "waits" if len(first.ranks) == 1 else "wait"
    sentence = f"{first.name} {verb} for {second.name[0].lower()}{second.name[1:]} in {_wait_text(wait)}."
    x1, x2, y1, y2 = first.x + _WIDTH / 2, second.x + _WIDTH / 2, first.y + _HEIGHT / 2, second.y + _HEIGHT / 2
    rows = second.row - first.row
    if rows == 0:
        side = copysign(_WIDTH / 2, x2 - x1)
        return Arrow(sentence, f"M{x1 + side:.0f} {y1:.0f}L{x2 - side:.0f} {y2:.0f}")
    down = copysign(_HEIGHT / 2, rows)
    # Shift an arrow that leads up, so that it does not cover an arrow that leads down. Lead a long arrow around boxes.
    shift = 40 * (rows < 0)
    aside = copysign(_WIDTH / 2 + 2 * _ASIDE, rows) * (abs(rows) > 1)
    x1, x2, y1, y2 = x1 + shift, x2 + shift, y1 + down, y2 - down
    bend = f"{x1 + aside:.0f} {y1 + down:.0f} {x2 + aside:.0f} {y2 - down:.0f}"
    return Arrow(sentence, f"M{x1:.0f} {y1:.0f}C{bend} {x2:.0f} {y2:.0f}")
