"""A warning before a disk is full that the run writes to, once for each disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.remote.agent.machine import is_low

#: How often to look.
_LOOK_S = 20.0


class DiskWatch:
    """Looks after the disks of these folders, as the nodes see them. warn: told of each that is about to be full."""

    def __init__(self, nodes: Any, paths: Sequence[str], warn: Callable[[str], None]) -> None:
        self._ask = getattr(nodes, "disks", None)
        self._paths, self._warn = paths, warn
        self._next = 0.0
        self._told: set[tuple[str, int]] = set()

    def look(self) -> None:
        """Ask the nodes, if it is time to."""
        if self._ask is None or time.monotonic() < self._next:
            return
        for place, (free, total, number) in self._ask(self._paths).items():
            node = place.partition(" on ")[2]
            if is_low(free, total) and (node, number) not in self._told:
                self._told.add((node, number))
                self._warn(
                    f"the disk of {place} is nearly full: {_text(free)} of {_text(total)} are left. "
                    "Free some space; when it is full, the run fails."
                )
        self._next = time.monotonic() + _LOOK_S


def _text(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 10**9 else f"{size / 1e6:.1f} MB"
