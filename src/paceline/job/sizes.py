"""A job's number of nodes, or the range of an elastic job."""

from __future__ import annotations

import re
from typing import Any

from paceline.errors import JobError

#: Text between the minimum and the maximum number of nodes.
_BETWEEN = ".."
_RANGE = re.compile(r"(\d+)(?:\.\.(\d+))?", re.ASCII)


def node_range(given: Any) -> tuple[int, int]:
    """Return (minimum, maximum) for a `node_count` such as 3, (2, 4) or "2..4".

    Raises:
        JobError: The value has none of these forms, or the minimum is above the maximum.
    """
    ends = given
    if isinstance(given, str):
        found = _RANGE.fullmatch(given)
        ends = (int(found[1]), int(found[2] or found[1])) if found else None
    elif isinstance(given, int):
        ends = (given, given)
    ok = isinstance(ends, (tuple, list)) and len(ends) == 2
    if not ok or not all(isinstance(end, int) and not isinstance(end, bool) for end in ends):
        raise JobError(
            f"node_count={given!r} is neither an integer of 1 or more nor two of them, the fewest and the most nodes. "
            "Write node_count=4, or node_count=(2, 4)."
        )
    least, most = ends
    shown = repr(tuple(given)) if isinstance(given, list) else given if isinstance(given, str) else repr(given)
    if least < 1:
        raise JobError(
            f"node_count={shown} is not an integer of 1 or more."
            if isinstance(given, int)
            else f"node_count={shown}: a run has at least one node. Write {_as_given(given, 1, max(1, most))}."
        )
    if least > most:
        raise JobError(f"node_count={shown}: the fewest nodes come first. Write {_as_given(given, most, least)}.")
    return least, most


def _as_given(given: object, least: int, most: int) -> str:
    return range_text(least, most) if isinstance(given, str) else f"({least}, {most})"


def range_text(least: int, most: int) -> str:
    """Return the range in the form of the command line: "2..4", or "2"."""
    return f"{least}{_BETWEEN}{most}" if least != most else str(least)
