"""Hold a Ray placement group for a supervisor, in a driver process.

supervisor ── driver (has Ray) ~~ Ray ~~> task on each node ── agent
    │ listens  <──────────────────────────────── connects ──────┘
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import EngineError, TargetError
from paceline.targets.base import Waiting
from paceline.targets.ray.demand import ClusterDemand, NodeResources, too_large, waits_for
from paceline.targets.ray.driver_process import DriverProcess, driver_process
from paceline.targets.ray.listener import Reception, Taken

#: Maximum seconds for Ray to start a task's process. The start takes several seconds on a busy machine.
_TASK_S = 90.0
_TICK_S = 0.05


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """A request for a placement group that provides a run's nodes.

    Attributes:
        ray_python: An interpreter that has Ray.
        python: The interpreter of jobs that do not set an interpreter. With None, these jobs use the submitting
            program's interpreter (`submitter`) if all nodes have it, else Ray's interpreter.
        patience_s: Seconds to wait if the cluster is too small; None for no limit, for autoscaling clusters.
        silence_s: Seconds without a message after which a node counts as lost.
        address: This node's address for other nodes; "" if only Ray knows it.
        least: The smallest number of nodes for an elastic run; None if the run needs all nodes.
        avoid: Ray's ids of nodes that were just lost, and that Ray should not choose yet.
    """

    demand: ClusterDemand
    run_id: str
    ray_python: str
    library_dir: Path
    folder: str
    python: str | None
    submitter: str | None
    patience_s: float | None
    is_shared: bool
    silence_s: float
    address: str = ""
    least: int | None = None
    avoid: tuple[str, ...] = ()

    @property
    def needed(self) -> ClusterDemand:
        """The resources for the fewest nodes with which the run can start."""
        return self.demand if self.least is None else ClusterDemand(bundles=self.demand.bundles[: self.least])


class LostError(EngineError):
    """The error that a node was lost while the run waited for others."""


class Holding:
    """A placement group held by a driver process, and its nodes' connections."""

    def __init__(self, asked: GroupRequest) -> None:
        self._asked = asked
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lost: dict[int, str] = {}
        self._failed: str | None = None
        self._placed = False
        self._count = len(asked.demand.bundles)
        #: Number of nodes that an elastic run could get in addition to its present nodes.
        self.spare = 0
        self._closed = False
        self._text = "waits for Ray"
        self._too_large_since: float | None = None
        self._too_large = ""
        #: An event that is set when the driver sends a message or a node connects.
        self._news = threading.Event()
        self._reception = _reception(self._news.set, asked.address)
        try:
            self._driver = self._start_driver()
        except BaseException:
            self._reception.close()
            raise
        # `_read` queues events; only the thread that calls `wait` and `lost` handles them and changes state.
        threading.Thread(target=self._read, name="paceline-ray-driver", daemon=True).start()

    def wait(self, waiting: Waiting) -> dict[int, Taken] | None:
        """Return all nodes' connections by rank, or None if `waiting` cancels the wait.

        Raises:
            LostError: A node has died.
            EngineError: Ray does not answer.
            TargetError: The cluster can't hold the run.
        """
        placed_at: float | None = None
        # An elastic run also waits for the placement, which determines its number of nodes.
        while len(self._reception.taken) < self._count or (self._asked.least is not None and not self._placed):
            # Clear the event before reading messages: clearing it afterwards would lose a message that arrives in between.
            self._news.clear()
            self._hear()
            if self._lost:
                # Report a lost node rather than the driver's failure: if all nodes are lost, the driver fails, too.
                rank, why = min(self._lost.items())
                raise LostError(f"node {rank} of the run: {why}.")
            if self._failed is not None:
                raise EngineError(f"Ray can't give the run its nodes: {self._failed}.")
            if self._placed:
                placed_at = placed_at or time.monotonic()
                if time.monotonic() - placed_at > _TASK_S:
                    raise EngineError(
                        f"Ray has placed the run on {self._count} nodes, but after {_TASK_S:g} s only "
                        f"{len(self._reception.taken)} have connected to this one. Can the nodes reach each other on all ports?"
                    )
            elif self._is_too_large():
                raise TargetError(f"{self._too_large}. Ask for less, or add nodes to the cluster.")
            if waiting(self._text):
                return None
            self._news.wait(_TICK_S)
        return dict(self._reception.taken)

    def lost(self) -> dict[int, str]:
        """Return {rank: Ray's reason} of nodes whose task has ended."""
        self._hear()
        if self._closed:
            return {}
        if self._failed is not None and not self._lost:
            return dict.fromkeys(range(self._count), self._failed)
        return dict(self._lost)

    def close(self) -> None:
        """Release the placement group, and wait for the driver's end. Idempotent."""
        if self._closed:
            return
        self._closed = True
        # Close the port before ending the driver, so that no further task connects.
        self._reception.close()
        self._driver.end()

    # Methods that start the driver process and read its messages

    def _start_driver(self) -> DriverProcess:
        asked = self._asked
        driver = driver_process(asked.ray_python, asked.library_dir)
        request = {
            "bundles": [dict(bundle) for bundle in asked.demand.bundles],
            "name": f"paceline {asked.run_id}",
            "port": self._reception.port,
            "token": self._reception.token,
            **({"host": self._reception.host} if self._reception.host else {}),
            **({"least": asked.least, "avoid": list(asked.avoid)} if asked.least is not None else {}),
        }
        driver.tell(json.dumps(request).encode())
        return driver

    def _read(self) -> None:
        with self._driver.says as lines:
            for line in lines:
                with contextlib.suppress(ValueError):
                    self._events.put(json.loads(line))
                    self._news.set()
        # The driver's output has ended, which means that the driver has ended.
        self._events.put({"is": "failed", "why": "the process that holds its nodes has ended; see the driver's log"})
        self._news.set()

    def _hear(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._take_event(self._events.get_nowait())

    def _take_event(self, event: Mapping[str, Any]) -> None:
        what = event.get("is")
        if what == "waiting":
            nodes = [NodeResources.from_json(data) for data in event["nodes"]]
            self._text = waits_for(self._asked.needed, nodes)
            why = too_large(self._asked.needed, nodes)
            if why is None:
                self._too_large_since = None
            else:
                self._too_large = why
                self._text = f"waits for nodes: {why}"
                self._too_large_since = self._too_large_since or time.monotonic()
        elif what == "placed":
            self._placed = True
            self._count = int(event.get("count", self._count))
            self._text = "waits for its nodes to connect"
        elif what == "spare":
            self.spare = int(event["count"])
        elif what == "ended":
            self._lost.setdefault(int(event["rank"]), str(event["why"]))
        elif what == "failed":
            self._failed = self._failed or str(event["why"]).rstrip(".")

    def _is_too_large(self) -> bool:
        patience = self._asked.patience_s
        since = self._too_large_since
        return patience is not None and since is not None and time.monotonic() - since >= patience


def _reception(on_taken: Callable[[], None], address: str) -> Reception:
    if address:
        with contextlib.suppress(OSError):  # fails if another machine has this address and forwards to this machine
            return Reception(on_taken, address)
    return Reception(on_taken)
