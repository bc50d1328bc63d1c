"""Operations that some ranks wait for and others have not asked for: told in the log, in a file, and ended at a limit."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence

from paceline.collectives.coordinator import Coordinator, Late

_log = logging.getLogger(__name__)
#: Names the file that `report` appends to; whoever starts the ranks sets it.
FILE_VARIABLE = "PACELINE_STALL_FILE"
#: Between two looks: a part of the limit, in these bounds.
_SHORTEST_S, _LONGEST_S = 0.02, 1.0


class StallWatch:
    """Looks after the operations of one process set, on its first rank.

    number: the process set's; ranks: its ranks in the world. warning_s, shutdown_s: 0 is never.
    """

    def __init__(self, number: int, ranks: Sequence[int], warning_s: float, shutdown_s: float) -> None:
        self._number = number
        self._ranks = tuple(ranks)
        self._warning_s, self._shutdown_s = warning_s, shutdown_s
        limits = [limit for limit in (warning_s, shutdown_s) if limit]
        self._pause_s = min(max(min(limits) / 4, _SHORTEST_S), _LONGEST_S) if limits else float("inf")
        self._next_s = time.monotonic() + self._pause_s if limits else float("inf")
        self._warned_s = 0.0
        self._reported: dict[tuple[str, str], tuple[Late, float]] = {}

    def look(self, coordinator: Coordinator) -> None:
        """Warn of what has waited for too long, and end it at the limit. Costs nothing most of the time."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._pause_s
        if self._warning_s:
            self._warn(coordinator.waiting(self._warning_s), now_s)
        if self._shutdown_s:
            late = coordinator.waiting(self._shutdown_s)
            if late:
                coordinator.end(
                    f"{self._told(late[0])} (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={self._shutdown_s:g}), "
                    "so the ranks have stopped waiting for each other"
                )

    def _warn(self, late: Sequence[Late], now_s: float) -> None:
        found = {one.key: one for one in late}
        for key in [key for key in self._reported if key not in found]:
            one, reported_s = self._reported.pop(key)
            report(one._replace(age_s=one.age_s + now_s - reported_s), self._number, self._ranks, resolved=True)
        new = [one for key, one in found.items() if key not in self._reported]
        for one in new:
            self._reported[one.key] = (one, now_s)
            report(one, self._number, self._ranks)
        # What stays late is said again, once in each `warning_s`.
        if new or (found and now_s - self._warned_s >= self._warning_s):
            self._warned_s = now_s
            _log.warning(
                "Some ranks wait for tensors that others have not submitted; a rank may have stopped, or the ranks "
                "may take different paths through the script.\n  %s",
                "\n  ".join(self._told(one) for one in late),
            )

    def _told(self, late: Late) -> str:
        missing = [str(self._ranks[rank]) for rank in late.missing]
        return (
            f"{late.key[0]} {late.key[1]!r} has waited for {late.age_s:.{0 if late.age_s > 10 else 1}f} s, "
            f"missing on rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        )


def report(
    late: Late,
    process_set: int,
    ranks: Sequence[int],
    *,
    resolved: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Append a JSON line to the file that PACELINE_STALL_FILE names, if it does. ranks: the process set's in the world.

    One line when an operation is late, and one with `"resolved": true` when it was done after all.
    """
    path = environ.get(FILE_VARIABLE, "")
    if not path:
        return
    line = json.dumps(
        {
            "time_s": time.time(),
            "operation": late.key[0],
            "name": late.key[1],
            "process_set": process_set,
            "waited_s": round(late.age_s, 3),
            "missing_ranks": [ranks[rank] for rank in late.missing],
            "submitted_ranks": [ranks[rank] for rank in late.submitted],
            "resolved": resolved,
        }
    )
    try:
        # One write of a whole line: others may append to the same file.
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(file, line.encode() + b"\n")
        finally:
            os.close(file)
    except OSError as error:
        _log.warning("a stalled operation can't be written to %s=%r: %s", FILE_VARIABLE, path, error)
