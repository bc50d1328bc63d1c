"""A submission finds the only queue of Kueue, and can be repeated after a fault of the API."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("lightkube")

from paceline.errors import EngineError, TargetError
from paceline.job.job import Job
from paceline.runs.folder import RunFolder
from paceline.targets.kubernetes import api, submission
from paceline.targets.kubernetes.api import ApiRefusedError, Cluster
from paceline.targets.kubernetes.settings import KubernetesSettings
from tests.helpers import make_run


class Queues:
    """A cluster that lists LocalQueues, or refuses to."""

    def __init__(self, *names: str, refused: int = 0) -> None:
        self._names, self._refused = names, refused

    def items(self, kind: str) -> list[dict[str, dict[str, str]]]:
        assert kind == "localqueues"
        if self._refused:
            raise ApiRefusedError("no", self._refused)
        return [{"metadata": {"name": name}} for name in self._names]


@pytest.mark.parametrize(
    ("queues", "found"),
    [(Queues("gpus"), "gpus"), (Queues(), None), (Queues("gpus", "cpus"), None)],
    ids=["one", "none", "two"],
)
def test_kueue_queue_is_used_automatically_if_a_namespace_has_only_one(queues: Queues, found: str | None) -> None:
    assert submission._only_queue(cast("Cluster", queues)) == found


@pytest.mark.parametrize("code", [403, 404])
def test_cluster_without_kueue_or_the_right_to_list_queues_has_no_queue(code: int) -> None:
    assert submission._only_queue(cast("Cluster", Queues(refused=code))) is None


# --- faults of the API during a submission


class Faulty(Cluster):
    """A cluster whose API creates an object of one kind, and then fails once to answer."""

    server = "https://cluster"

    def __init__(self, fails_at: str) -> None:
        self.title, self.namespace = "compute target 'k8s'", "lab"
        self.objects: dict[tuple[str, str], Any] = {}
        self._fails_at = fails_at

    def items(self, kind: str, **_: Any) -> Any:
        return []

    def get(self, kind: str, name: str, **_: Any) -> Any:
        return self.objects.get((kind, name))

    def create(self, kind: str, body: Any, **_: Any) -> Any:
        name = body["metadata"]["name"]
        if (kind, name) in self.objects:
            raise ApiRefusedError("exists", 409)
        self.objects[kind, name] = {**body, "metadata": {**body["metadata"], "uid": f"uid-{name}"}}
        if f"{kind}/{name}".startswith(self._fails_at):
            self._fails_at = "none"
            raise EngineError("no answer")
        return self.objects[kind, name], []


def submitted(cluster: Faulty, folder: RunFolder) -> Any:
    job, settings = Job(entry_script="train.py"), KubernetesSettings(name="k8s", context="c", namespace="lab")
    return cluster.patiently(
        lambda: submission.submit(cluster, job, settings, [folder], "w", live=False, at_once=1), 60.0
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(submission, "packed_library", lambda _: b"library")
    monkeypatch.setattr(api.time, "sleep", lambda _: None)
    found, fd = make_run(tmp_path / "ws" / "runs")
    os.close(fd)
    return found


@pytest.mark.parametrize("fails_at", ["jobs", "secrets/pl-", "services"])
def test_submission_goes_on_after_the_api_failed_to_answer(folder: RunFolder, fails_at: str) -> None:
    cluster = Faulty(fails_at)

    assert submitted(cluster, folder)["uid"].startswith("uid-pl-digits")

    (start,) = [one for (kind, name), one in cluster.objects.items() if kind == "secrets" and name.startswith("pl-")]
    told = json.loads(base64.b64decode(start["data"]["ticket.json"]))
    assert told["key"] == folder.exec_key.read_text()
    assert {kind for kind, _ in cluster.objects} == {"jobs", "secrets", "services"}


def test_submission_refuses_a_job_of_another_run_with_the_same_name(folder: RunFolder) -> None:
    cluster = Faulty("none")
    submitted(cluster, folder)
    for (kind, _), found in cluster.objects.items():
        found["metadata"]["annotations"]["paceline/run-id"] = "another" if kind == "jobs" else ""

    with pytest.raises(TargetError, match="is not of run digits_1700000000_00000001"):
        submitted(cluster, folder)
