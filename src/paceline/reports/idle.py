"""How long the GPUs that a run held did nothing: from the looks at its nodes that lie beside its metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.runs.folder import RunFolder, node_logs
from paceline.system.files import json_lines

_BUSY = re.compile(r"gpu\d+_percent")

#: (node, name) of each GPU -> (time in seconds since 1970, percent of it in which a kernel ran), in order.
Looks = Mapping[tuple[int, str], list[tuple[float, float]]]


def gpu_looks(folder: RunFolder) -> Looks:
    """What was seen of the run's GPUs: every 5 s for the first ten minutes, then every 30 s; empty where nothing tells."""
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for node, path in node_logs(folder.metrics).items():
        for line in json_lines(path):
            match line:
                case {"name": str(name), "value": int() | float() as busy, "step": int(at)} if _BUSY.fullmatch(name):
                    found.setdefault((node, name), []).append((float(at), float(busy)))
    return found


def idle_hours(looks: Looks, start_s: float, end_s: float, held: int) -> float:
    """Hours of one GPU in which no kernel ran on a GPU that was held from start to end, in seconds since 1970.

    A look stands for the time since the one before it, and all together for the whole time: so 0 where there is none.
    held: how many were held; of more than these nobody knows which were the run's own, and 0 is the answer.
    """
    hours = 0.0
    within = {gpu: [one for one in seen if start_s <= one[0] <= end_s] for gpu, seen in looks.items()}
    measured = [seen for seen in within.values() if seen]
    if len(measured) > held:
        return 0.0
    for seen in measured:
        before, idle, total = start_s, 0.0, 0.0
        for at, busy in seen:
            idle += (at - before) * (1 - min(max(busy, 0.0), 100.0) / 100)
            total += at - before
            before = at
        hours += (idle / total if total > 0 else 0.0) * (end_s - start_s) / 3600
    return hours
