"""Copies of a workspace's Jobs and pods, which watches keep current."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from paceline.errors import EngineError, TargetError
from paceline.targets.kubernetes.manifests import WORKSPACE_LABEL
from paceline.targets.kubernetes.objects import BatchJob, Deployment, Pod

if TYPE_CHECKING:
    from paceline.targets.kubernetes.api import Cluster
#: Minimum seconds between two list requests: before the first watch has started, and after a watch has broken.
_NEW_S, _FRESH_S = 0.3, 3.0
#: If no caller has read a watch's data for this many seconds, the watch is not renewed at its end.
_IDLE_S = 60.0
_JOB_LABEL = "batch.kubernetes.io/job-name"


def job_and_pods(cluster: Cluster, workspace: str, name: str) -> tuple[BatchJob | None, Sequence[Pod]]:
    """Return a run's Job (None if it does not exist) and the Job's pods.

    Raises:
        EngineError: The API does not answer.
        ApiRefusedError: The user may not read the objects.
    """
    jobs, pods = _watched(cluster, workspace)
    job = cast("BatchJob | None", jobs.read().get(name))
    if job is None:
        # The watched list may not have a new Job yet, so query the API.
        job = cast("BatchJob | None", cluster.get("jobs", name))
        return job, cast("list[Pod]", cluster.items("pods", labelSelector=f"{_JOB_LABEL}={name}")) if job else []
    found = cast("list[Pod]", list(pods.read().values()))
    return job, [pod for pod in found if pod["metadata"].get("labels", {}).get(_JOB_LABEL) == name]


@functools.lru_cache(maxsize=16)
def _watched(cluster: Cluster, workspace: str) -> tuple[Watched, Watched]:
    selector = f"{WORKSPACE_LABEL}={workspace}"
    return Watched(cluster, "jobs", selector), Watched(cluster, "pods", selector)


class Watched:
    """A local, thread-safe copy of the cluster's objects of one kind.

    The first read only lists the objects, because most programs read once. A later read lists them again and starts a
    watch, which keeps the copy current. After a watch has ended, the next read lists the objects again.
    """

    def __init__(self, cluster: Cluster, kind: str, selector: str) -> None:
        self._cluster, self._kind, self._selector = cluster, kind, selector
        self._found: dict[str, BatchJob | Deployment | Pod] = {}
        self._is_watching = False
        self._pause_s = _NEW_S
        self._listed = self._read = float("-inf")
        self._guard = threading.Lock()

    def read(self) -> dict[str, BatchJob | Deployment | Pod]:
        """Return {name: object}, at most some seconds old.

        Raises:
            EngineError: The API does not answer.
            ApiRefusedError: The user may not list the objects.
        """
        with self._guard:
            self._read = now = time.monotonic()
            if not self._is_watching and now - self._listed >= self._pause_s:
                items, version = self._cluster.listed(self._kind, labelSelector=self._selector)
                self._found = {one["metadata"]["name"]: one for one in cast("list[BatchJob | Deployment | Pod]", items)}
                self._is_watching = self._listed > 0
                self._listed = now
                if self._is_watching:
                    self._pause_s = _FRESH_S
                    threading.Thread(target=self._watch, args=(version,), name="paceline-watch", daemon=True).start()
            return dict(self._found)

    def _watch(self, version: str) -> None:
        began = float("-inf")
        with contextlib.suppress(EngineError, TargetError):
            # Renew only a watch that has lasted a while. A watch that ends at once would be renewed without a pause.
            while time.monotonic() - began > _FRESH_S and time.monotonic() - self._read < _IDLE_S:
                began = time.monotonic()
                for kind, item in self._cluster.watch(self._kind, version, labelSelector=self._selector):
                    found = cast("BatchJob | Deployment | Pod", item)
                    version = found["metadata"]["resourceVersion"]
                    with self._guard:
                        if kind == "DELETED":
                            self._found.pop(found["metadata"]["name"], None)
                        elif kind != "BOOKMARK":
                            self._found[found["metadata"]["name"]] = found
        with self._guard:
            self._is_watching = False
