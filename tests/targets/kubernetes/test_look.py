"""A process's copy of Jobs and pods follows a watch, and a run whose Job is complete is not lost with its pod's log."""

from __future__ import annotations

import os
import queue
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from paceline.errors import EngineError
from paceline.runs import states, store
from paceline.runs.folder import RunFolder
from paceline.runs.remote_status import GONE, QUEUED, RUNNING, UNREACHABLE, JobStatus, engine
from paceline.system.files import write_json
from paceline.targets.kubernetes import look
from paceline.targets.kubernetes.api import ApiRefusedError, Cluster
from paceline.targets.kubernetes.hub import Pulled
from paceline.targets.kubernetes.ticket import COMPLAINT, log_lines
from tests.helpers import make_run, wait_until


def thing(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


class Objects:
    """A cluster with the lists of `pages`, each used once, and the events that a test puts into `events`."""

    def __init__(self, *pages: list[dict[str, Any]]) -> None:
        self._pages = list(pages)
        self.listed_count = 0
        self.watched_from: list[str] = []
        self.events: queue.Queue[tuple[str, dict[str, Any]] | Exception | None] = queue.Queue()

    def listed(self, kind: str, **params: str) -> tuple[list[dict[str, Any]], str]:
        self.listed_count += 1
        return self._pages.pop(0), str(100 * self.listed_count)

    def watch(self, kind: str, version: str, **params: str) -> Iterator[tuple[str, dict[str, Any]]]:
        self.watched_from.append(version)
        while (event := self.events.get(timeout=30)) is not None:
            if isinstance(event, Exception):
                raise event
            yield event


def watched(cluster: Objects, monkeypatch: pytest.MonkeyPatch) -> look.Watched:
    monkeypatch.setattr(look, "_LIST_S", 0.0)
    monkeypatch.setattr(look, "_RELIST_S", 0.0)
    return look.Watched(cast("Cluster", cluster), "pods", "a=b")


def test_first_read_of_kubernetes_objects_lists_them_and_later_reads_follow_the_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Objects([thing("a", 1)], [thing("a", 1), thing("b", 2)])
    found = watched(cluster, monkeypatch)
    assert list(found.read()) == ["a"]
    assert cluster.watched_from == []
    assert sorted(found.read()) == ["a", "b"]
    cluster.events.put(("ADDED", thing("c", 3)))
    cluster.events.put(("DELETED", thing("a", 4)))
    cluster.events.put(("MODIFIED", thing("b", 5)))
    cluster.events.put(("BOOKMARK", thing("", 6)))
    cluster.events.put(None)  # the API server ends the watch

    wait_until(lambda: cluster.watched_from == ["200", "6"], "the watch goes on after its last version")

    assert {name: one["metadata"]["resourceVersion"] for name, one in found.read().items()} == {"b": "5", "c": "3"}
    assert cluster.listed_count == 2
    cluster.events.put(EngineError("the test ends"))


def test_kubernetes_objects_are_listed_again_after_their_watch_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Objects([thing("a", 1)], [thing("a", 1)], [thing("b", 9)])
    found = watched(cluster, monkeypatch)
    found.read()
    found.read()

    cluster.events.put(EngineError("too old resource version"))

    wait_until(lambda: list(found.read()) == ["b"], "the list replaces the copy")
    wait_until(lambda: cluster.watched_from == ["200", "300"], "a watch follows the list")
    cluster.events.put(EngineError("the test ends"))


def test_watch_of_kubernetes_objects_ends_if_unused_and_the_next_read_lists_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Objects([], [], [thing("a", 9)])
    found = watched(cluster, monkeypatch)
    monkeypatch.setattr(look, "_IDLE_S", -1.0)
    found.read()
    found.read()

    wait_until(lambda: not found._is_watching, "the watch ends")

    assert cluster.watched_from == []
    assert list(found.read()) == ["a"]


# --- a complete Job


def pod_of(job: str, phase: str, state: dict[str, Any]) -> dict[str, Any]:
    labels = {"batch.kubernetes.io/job-name": job}
    about = {"name": f"{job}-0-x", "uid": "1", "resourceVersion": "1", "labels": labels}
    annotations = {"batch.kubernetes.io/job-completion-index": "0"}
    status = {"phase": phase, "containerStatuses": [{"name": "paceline", "state": state}]}
    return {"metadata": {**about, "annotations": annotations}, "status": status}


DONE = pod_of("pl-a", "Succeeded", {"terminated": {"exitCode": 0}})
RUNS = pod_of("pl-a", "Running", {"running": {}})


class Complete:
    """A cluster with a complete Job: its pods as lists and watches show them, as the API shows them, and a pod's log."""

    title = "compute target 'k8s'"

    def __init__(self, log: bytes | Exception, *, watched: list[Any], present: list[Any]) -> None:
        conditions = [{"type": "Complete", "status": "True"}]
        job = {"metadata": {"name": "pl-a", "resourceVersion": "2"}, "status": {"conditions": conditions}}
        self._lists, self._present, self._log = {"jobs": [job], "pods": watched}, present, log

    def listed(self, kind: str, **params: str) -> tuple[list[Any], str]:
        return self._lists[kind], "2"

    def items(self, kind: str, **params: str) -> list[Any]:
        assert (kind, params) == ("pods", {"labelSelector": "batch.kubernetes.io/job-name=pl-a"})
        return self._present

    def log(self, pod: str, container: str) -> bytes:
        if isinstance(self._log, Exception):
            raise self._log
        return self._log


@pytest.fixture
def log(tmp_path: Path) -> bytes:
    """The log of a pod whose run has completed."""
    folder, fd = make_run(tmp_path / "pod", status=states.COMPLETED)
    os.close(fd)
    packed = zlib.compress(b"".join(Pulled(folder).frames(is_final=True)))
    return "\n".join(log_lines(0, packed)).encode()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """The local copy of that run."""
    folder, fd = make_run(tmp_path / "here", status=states.RUNNING)
    os.close(fd)
    return folder


def looked(cluster: Complete, run: RunFolder) -> JobStatus:
    return look.look(cast("Cluster", cluster), run, {"workspace": "w", "job_id": "pl-a", "submitted": 1.0})


@pytest.mark.parametrize("watched", [[DONE], [RUNS], []], ids=["ended", "running", "absent"])
def test_result_of_a_complete_job_is_read_from_its_pods_log_whatever_the_watch_shows(
    run: RunFolder, log: bytes, watched: list[Any]
) -> None:
    # Simulate that the run's files were fetched just now.
    write_json(run.path / "mirrored.json", {"known": {}, "time": time.time()})

    assert looked(Complete(log, watched=watched, present=[DONE]), run).state == RUNNING

    assert store.stored(run).status == states.COMPLETED


@pytest.mark.parametrize(
    "error",
    [EngineError("no route"), ApiRefusedError("unauthorized", 401), ApiRefusedError("pod does not exist", 404)],
    ids=["kubelet is away", "kubelet ends", "kubelet starts"],
)
def test_complete_job_is_unreachable_while_its_pod_exists_and_the_log_cannot_be_read(
    run: RunFolder, error: Exception
) -> None:
    found = looked(Complete(error, watched=[DONE], present=[DONE]), run)

    assert (found.state, found.message) == (UNREACHABLE, f"the run has ended, and its result is not here yet: {error}")


def test_result_of_a_complete_job_is_lost_with_its_pod(run: RunFolder) -> None:
    assert looked(Complete(b"", watched=[], present=[]), run).state == GONE


# --- ended pods beside a pod 0 that runs


class Training(Complete):
    """A cluster with an unfinished Job and these pods."""

    def __init__(self, *pods: Any) -> None:
        super().__init__(b"", watched=list(pods), present=list(pods))
        self._lists["jobs"] = [{"metadata": {"name": "pl-a", "uid": "u", "resourceVersion": "2"}, "status": {}}]


def other_pod(name: str, index: str, phase: str, state: dict[str, Any], **about: str) -> dict[str, Any]:
    pod = pod_of("pl-a", phase, state)
    pod["metadata"] |= {"name": name, "uid": name, **about}
    pod["metadata"]["annotations"] = {"batch.kubernetes.io/job-completion-index": index}
    return pod


@pytest.mark.parametrize(
    "other",
    [
        other_pod("pl-a-0-a", "0", "Failed", {"terminated": {"exitCode": 70, "message": f"{COMPLAINT}no room"}}),
        other_pod("pl-a-1-a", "1", "Pending", {"waiting": {"reason": "ErrImagePull", "message": "x: not found"}}),
    ],
    ids=["failed pod 0 was replaced", "image of pod 1 is missing"],
)
def test_status_query_leaves_a_training_run_alone_whatever_its_other_pods_report(run: RunFolder, other: Any) -> None:
    assert looked(Training(RUNS, other), run).state == RUNNING

    assert looked(Training(other), run).state == GONE


def test_one_connection_serves_all_status_queries_while_a_run_waits_for_its_other_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, fd = make_run(tmp_path / "here")
    os.close(fd)
    opened: list[str] = []

    class Mirror:
        def __init__(self, connection: str) -> None:
            opened.append(connection)

        def pull(self, folder: RunFolder) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(look, "_connected", lambda *_: "connection")
    monkeypatch.setattr(look.readers, "PodMirror", Mirror)
    monkeypatch.setattr(look, "_reason", lambda *_: look._Reason(asked=0.0, versions=()))
    noted = {"workspace": "w", "job_id": "pl-a", "submitted": 1.0, "forwards": True}

    states_found = {look.look(cast("Cluster", Training(RUNS)), folder, noted).state for _ in range(10)}

    look.readers.keep_mirror(folder, None)
    assert (states_found, len(opened)) == ({QUEUED}, 1)


def test_ends_of_pods_are_recorded_in_the_order_in_which_their_containers_ended(run: RunFolder) -> None:
    pods = [
        other_pod("pl-a-0-a", "0", "Failed", {"terminated": {"exitCode": 137, "finishedAt": "2026-11-29T05:02:00Z"}}),
        other_pod("pl-a-1-a", "1", "Failed", {"terminated": {"exitCode": 1, "finishedAt": "2026-11-29T05:01:00Z"}}),
    ]

    looked(Training(*pods, RUNS), run)

    assert list(engine(run)["ends"]) == ["pl-a-1-a", "pl-a-0-a"]
