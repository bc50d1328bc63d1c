"""Watch an attempt's nodes: more nodes, full disks, and kills for memory.

When more nodes are available, the workers must end at their next checkpoint (docs/decisions/0018-elastic.md).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.job.plan import Launch
from paceline.launchers.environment import resize_request
from paceline.remote.agent.machine import is_low
from paceline.runs.driver_log import say
from paceline.system.files import write_whole
from paceline.targets import Nodes

#: Seconds between two queries whether the compute target has more nodes.
_LOOK_S = 1.0

#: Seconds between two checks of the disks.
_DISK_LOOK_S = 20.0

#: Seconds between two queries how many processes the kernel has killed for memory.
_OOM_LOOK_S = 5.0


class ResizeWatch:
    """A watch for additional nodes of an elastic run.

    not_before_s: Seconds from the attempt's start until the watch begins.
    more: Returns how many nodes the run could have, without blocking.
    note: Called with a sentence after the watch has requested the workers' end.
    """

    def __init__(
        self, launch: Launch, nodes: Nodes, not_before_s: float, more: Callable[[], int], note: Callable[[str], None]
    ) -> None:
        self._launch, self._nodes, self._more, self._note = launch, nodes, more, note
        self._next = time.monotonic() + not_before_s
        self._most = launch.job.node_range[1] if launch.job.node_range else launch.job.node_count
        #: Number of nodes in the last request to the workers to end so that the run gets more nodes; 0 before the first request.
        self.requested = 0

    def look(self) -> None:
        """Ask the workers to end if more nodes are available, once `not_before_s` is over."""
        now = time.monotonic()
        if self.requested or len(self._launch.nodes) >= self._most or now < self._next:
            return
        self._next = now + _LOOK_S
        found = min(self._more(), self._most)
        if found > len(self._launch.nodes):
            self._ask(found)

    def _ask(self, count: int) -> None:
        self.requested = count
        here = len(self._launch.nodes)
        say(f"{count} nodes are to be had, and the run has {here}: asked the workers to end at their next checkpoint")
        path, text = resize_request(self._launch), json.dumps({"nodes": count})
        put: Callable[[int, str, bytes], None] | None = getattr(self._nodes, "put", None)
        if put is None:
            # These nodes share the supervisor's folders, so one file written on this machine reaches the workers of all nodes.
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, text)
        else:
            for node in self._launch.nodes:
                with contextlib.suppress(OSError):  # ignore a lost node, which ends the attempt anyway
                    put(node.node_rank, str(path), text.encode())
        self._note(f"goes on with {count} nodes after its next checkpoint")


class DiskWatch:
    """A watch on the nodes' disks at `paths`. `warn` gets a text for each nearly full disk."""

    def __init__(self, nodes: Any, paths: Sequence[str], warn: Callable[[str], None]) -> None:
        self._ask = getattr(nodes, "disks", None)
        self._paths, self._warn = paths, warn
        self._next = 0.0
        self._told: set[tuple[str, int]] = set()

    def look(self) -> None:
        """Check the nodes' free disk space, unless it was checked recently."""
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
        self._next = time.monotonic() + _DISK_LOOK_S


class OomWatch:
    """A watch on how many processes the nodes' kernels kill for memory.

    The kernel counts the processes of all users since the machine's start. So only kills of the last 5 to 10 seconds may
    explain the end of a worker.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        #: Node rank -> the count at the last query, and at the query before it.
        self._last = self._before = nodes.oom_kills()
        self._next = time.monotonic() + _OOM_LOOK_S

    def look(self) -> None:
        """Query the nodes for kills, unless they were queried recently."""
        began_s = time.monotonic()
        if began_s < self._next:
            return
        self._before, self._last = self._last, self._last | self._nodes.oom_kills()
        # If nodes answer slowly, ask less often.
        self._next = time.monotonic() + max(_OOM_LOOK_S, 10 * (time.monotonic() - began_s))

    def has_killed(self, node_rank: int) -> bool:
        """Return whether a node's kernel has recently killed a process for memory."""
        now = self._nodes.oom_kills().get(node_rank, 0)
        return now > self._before.get(node_rank, now)


def _text(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 10**9 else f"{size / 1e6:.1f} MB"
