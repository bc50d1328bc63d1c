"""Logs of an attempt that has ended, made as short as what was kept of them."""

from __future__ import annotations

import contextlib

from paceline.runs.folder import RunFolder
from paceline.system import gaps
from paceline.system.files import write_whole


def shorten_logs(folder: RunFolder, attempt: int, world_size: int) -> None:
    """Close the gaps in the logs of these ranks, and let the notes on their order say where things are now."""
    closed = {}
    for rank in range(world_size):
        if gap := gaps.close(str(folder.rank_log(attempt, rank))):
            closed[str(rank)] = gap
    if not closed:
        return
    order = folder.log_order(attempt)
    with contextlib.suppress(OSError):  # a full disk: lines are less well ordered, that is all
        lines = []
        for line in order.read_text().splitlines():
            words = line.split()
            if len(words) == 3 and words[1] in closed:
                words[2] = str(closed[words[1]].place(int(words[2])))
            lines.append(" ".join(words) + "\n")
        write_whole(order, "".join(lines))
