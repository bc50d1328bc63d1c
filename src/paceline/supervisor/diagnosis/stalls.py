"""What ranks were waiting for in vain when an attempt ended, from the lines that the collectives' engine leaves.

A line: {time_s, operation, name, process_set, waited_s, missing_ranks, resolved}, one when an operation is late, and one
when it was done after all (`paceline.collectives.stall`).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

_SHOWN = 3


def stalled_text(path: Path) -> str | None:
    """A sentence on the operations that are still late; None where none is, or nobody has said so."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return None
    late: dict[tuple[Any, ...], tuple[float, list[int]]] = {}
    for line in lines:
        try:
            told = json.loads(line)
            key = (told["operation"], told["name"], told["process_set"])
            entry = (float(told["time_s"]) - float(told["waited_s"]), sorted(map(int, told["missing_ranks"])))
            is_done = bool(told.get("resolved"))
        except (ValueError, TypeError, KeyError):
            continue  # half a line: the rank was killed while it wrote
        late.pop(key, None)
        if not is_done:
            late[key] = entry
    if not late:
        return None
    now = time.time()
    shown = [
        f"{operation} {name!r} has waited for rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} "
        f"for {max(0.0, now - since):.0f} s"
        for (operation, name, _), (since, missing) in list(late.items())[:_SHOWN]
    ]
    more = f"; and {len(late) - _SHOWN} more" if len(late) > _SHOWN else ""
    return f"At its end the ranks were stalled: {'; '.join(shown)}{more}."
