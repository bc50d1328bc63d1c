"""Many runs are the indexes of one Job, and each of them can end alone."""

from __future__ import annotations

import base64
import json
import os
import secrets
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("lightkube")

from paceline.errors import TargetError
from paceline.job.job import Job
from paceline.runs import states, store
from paceline.runs.folder import RunFolder
from paceline.runs.remote_status import GONE, QUEUED, JobStatus, engine, note_engine
from paceline.system.files import read_json, write_json
from paceline.targets.kubernetes import leftovers, look, many, pod, reasons, submission, ticket
from paceline.targets.kubernetes.api import Cluster
from paceline.targets.kubernetes.manifests import ObjectNames, job_manifest, many_name, port_of
from paceline.targets.kubernetes.pod import PodLeader
from paceline.targets.kubernetes.settings import KubernetesSettings
from paceline.targets.kubernetes.target import KubernetesTarget
from paceline.targets.kubernetes.ticket import PodTicket
from tests.helpers import make_run

SETTINGS = KubernetesSettings(name="k8s", context="c", namespace="lab")
PARENT = "tuned_1700000000_0a1b2c3d"


class Objects:
    """A cluster that stores objects by their names."""

    server = "https://cluster"
    namespace = "lab"

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}

    def create(self, kind: str, body: Any) -> None:
        assert body["metadata"]["name"] not in self.objects
        self.objects[body["metadata"]["name"]] = body

    def delete(self, kind: str, name: str) -> None:
        self.objects.pop(name, None)


@pytest.fixture
def runs(tmp_path: Path) -> list[RunFolder]:
    """Three runs of one Job, from number 4 on."""
    found = []
    for index in range(3):
        folder, fd = make_run(tmp_path / "ws" / "runs", run_id=f"{PARENT}_{4 + index}", status=states.NOT_STARTED)
        os.close(fd)
        about = {"index": index, "count": 3, "job_id": "pl-a", "workspace": "w", "mirrored": True}
        note_engine(folder, "kubernetes", uid="u", submitted=1.0, submitting=1.0, server=Objects.server, **about)
        found.append(folder)
    return found


def dropped_in(cluster: Objects) -> dict[str, Any]:
    data = cluster.objects["pl-a-dropped"]["data"][ticket.DROPPED]
    return cast("dict[str, Any]", json.loads(base64.b64decode(data)))


def drop(cluster: Objects, folder: RunFolder, request: dict[str, Any]) -> None:
    many.drop(cast("Cluster", cluster), SETTINGS, folder, engine(folder), request)


# --- Submission of many runs


def names(**values: Any) -> ObjectNames:
    given = {"job": "pl-a", "run_id": f"{PARENT}_0", "workspace": "w", "secrets": {"library.0": "l"}, "count": 16}
    return ObjectNames(**{**given, "at_once": 4, **values})


def test_job_of_many_runs_has_an_index_for_each_run_and_limits_how_many_run_at_once() -> None:
    manifest: Any = job_manifest(Job(entry_script="train.py"), SETTINGS, names(parts=["pl-a-part-1"]))
    spec = manifest["spec"]

    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (16, 4, "Indexed")
    # Without a success policy, the end of one run does not end the others.
    assert "successPolicy" not in spec
    (start,) = [one for one in spec["template"]["spec"]["volumes"] if one["name"] == "start"]
    sources = [one["secret"] for one in start["projected"]["sources"]]
    assert sources == [{"name": "pl-a"}, {"name": "pl-a-part-1"}, {"name": "pl-a-dropped", "optional": True}]
    assert manifest["metadata"]["annotations"]["paceline/runs"] == "16"


@pytest.mark.parametrize(("at_once", "least"), [(4, "1"), (1, None)])
def test_kueue_may_start_some_of_many_runs_before_there_is_room_for_all(at_once: int, least: str | None) -> None:
    manifest: Any = job_manifest(Job(entry_script="train.py"), replace(SETTINGS, queue="gpus"), names(at_once=at_once))

    assert manifest["metadata"]["annotations"].get("kueue.x-k8s.io/job-min-parallelism") == least


def test_submitting_many_runs_in_one_job_is_refused_if_each_run_needs_several_nodes() -> None:
    target = KubernetesTarget("k8s", {"context": "c", "namespace": "lab"})
    target.check_alike(Job(entry_script="train.py"))

    with pytest.raises(TargetError, match=r"this job has 2 nodes\. Submit the runs one by one"):
        target.check_alike(Job(entry_script="train.py", node_count=2, distributed_backend="gloo"))


def test_files_of_many_runs_are_divided_over_several_kubernetes_secrets() -> None:
    archives = {f"run.{index}": b"x" * (300 << 10) for index in range(5)}

    groups = list(submission._grouped(archives))

    assert [list(group) for group in groups] == [["run.0", "run.1"], ["run.2", "run.3"], ["run.4"]]
    assert {name: data for group in groups for name, data in group.items()} == archives


def test_job_of_many_runs_and_the_job_of_its_first_run_have_different_names() -> None:
    ids = [f"{PARENT}_{number}" for number in range(3)]

    assert len({many_name(ids), many_name(ids[:2]), many_name(ids[:1]), *map(port_of, ids)}) == 6


# --- The pod of a run


def described(tmp_path: Path, runs: list[RunFolder]) -> Path:
    texts = {"run_id": runs[0].run_id, "job": "j", "workspace": "w", "key": secrets.token_hex(32), "library": "l"}
    found = PodTicket(**texts, port=1, node_count=1, gang_wait_s=300.0, silence_s=15.0)
    path = tmp_path / "ticket.json"
    path.write_bytes(ticket.message(replace(found, runs=[run.run_id for run in runs]).to_json()))
    return path


def test_pod_uses_its_job_completion_index_to_find_its_run_id_archive_and_port(
    tmp_path: Path, runs: list[RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "2")

    found = PodTicket.read(described(tmp_path, runs))

    assert (found.run_id, found.archive, found.port) == (runs[2].run_id, "run.2", port_of(runs[2].run_id))


def test_pod_of_a_run_that_was_canceled_before_the_pod_started_exits_with_0_and_runs_nothing(
    tmp_path: Path, runs: list[RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod, "START", str(tmp_path))
    monkeypatch.setattr(pod, "TOP", str(tmp_path / "top"))
    monkeypatch.setattr(pod.signal, "signal", lambda *_: None)
    monkeypatch.setattr(ticket, "port_of", lambda run_id: 0)  # any free port
    write_json(tmp_path / ticket.DROPPED, {runs[1].run_id: {}})
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")

    assert PodLeader(PodTicket.read(described(tmp_path, runs)), "", "", {}).run() == 0

    assert not (tmp_path / "top").exists()


def test_running_pod_cancels_its_run_once_the_list_of_canceled_runs_includes_that_run(
    tmp_path: Path, runs: list[RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod, "START", str(tmp_path))
    monkeypatch.setattr(pod, "TOP", str(tmp_path))
    monkeypatch.setattr(pod, "_LIVE_S", 0.0)
    monkeypatch.setattr(ticket, "port_of", lambda run_id: 0)  # any free port
    (tmp_path / "workspace" / "w").mkdir(parents=True)
    (tmp_path / "ws" / "runs").rename(tmp_path / "workspace" / "w" / "runs")
    leader = PodLeader(PodTicket.read(described(tmp_path, runs)), "", "", {})
    leader._supervisor = 1
    ended = threading.Event()
    monkeypatch.setattr(pod, "has_reaped", lambda _: ended.is_set())
    monkeypatch.setattr(pod, "_TICK_S", 0.01)
    request = leader._folder.cancel_request
    watching = threading.Thread(target=leader._watch, args=(None,))
    watching.start()

    write_json(tmp_path / ticket.DROPPED, {runs[1].run_id: {"by": "other"}})
    assert not ended.wait(0.2)
    assert not request.exists()
    write_json(tmp_path / ticket.DROPPED, {runs[0].run_id: {"by": "me"}})
    while read_json(request) != {"by": "me"}:
        assert not ended.wait(0.01)

    ended.set()
    watching.join()


# --- Reading the status of runs


def test_secret_for_canceled_runs_has_the_cancel_request_of_each_canceled_run(runs: list[RunFolder]) -> None:
    cluster = Objects()
    for folder in (runs[0], runs[2]):
        drop(cluster, folder, {"by": folder.run_id[-1]})

    assert dropped_in(cluster) == {runs[0].run_id: {"by": "4"}, runs[2].run_id: {"by": "6"}}
    body = cluster.objects["pl-a-dropped"]
    assert body["immutable"] is False
    assert body["metadata"]["ownerReferences"][0]["uid"] == "u"


def pod_of(index: int, state: dict[str, Any], phase: str = "Running") -> Any:
    annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
    status = {"phase": phase, "containerStatuses": [{"name": "paceline", "state": state}]}
    return {"metadata": {"name": f"pl-a-{index}-x", "uid": str(index), "annotations": annotations}, "status": status}


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> tuple[KubernetesTarget, Objects, list[Any]]:
    """A target, its cluster, and the pods of its Job, which a test may change."""
    job = {"metadata": {"name": "pl-a", "uid": "u"}, "spec": {"completions": 3, "parallelism": 2}, "status": {}}
    cluster, pods = Objects(), list[Any]()
    made = object.__new__(KubernetesTarget)
    made._checked = SETTINGS
    monkeypatch.setattr(made, "_cluster", lambda: cluster)
    monkeypatch.setattr(look, "job_and_pods", lambda *_: (job if "deleted" not in cluster.objects else None, pods))
    monkeypatch.setattr(look, "_reason", lambda *_: look._Reason(asked=0.0, versions=()))
    monkeypatch.setattr(leftovers, "remove_unused", lambda *_, **__: cluster.objects.update(deleted=True))
    return made, cluster, pods


def looked(target: KubernetesTarget, folder: RunFolder) -> JobStatus:
    return target.look(folder, store.stored(folder))


def test_canceling_a_queued_run_of_a_shared_job_leaves_the_other_runs_queued(
    target: tuple[KubernetesTarget, Objects, list[Any]], runs: list[RunFolder]
) -> None:
    made, cluster, _ = target
    write_json(runs[1].cancel_request, {"by": "me"})

    made.cancel(runs[1], store.stored(runs[1]))

    assert dropped_in(cluster) == {runs[1].run_id: {"by": "me"}}
    found = looked(made, runs[1])
    assert (found.state, found.cause, found.by) == (GONE, "cancel", "me")
    assert looked(made, runs[2]) == JobStatus(state=QUEUED, message="its Job runs at most 2 pods at the same time")
    assert "deleted" not in cluster.objects


def test_job_of_many_runs_is_deleted_only_after_its_last_run_is_canceled(
    target: tuple[KubernetesTarget, Objects, list[Any]], runs: list[RunFolder]
) -> None:
    made, cluster, _ = target
    for folder in runs:
        assert "deleted" not in cluster.objects
        write_json(folder.cancel_request, {})
        made.cancel(folder, store.stored(folder))
        assert looked(made, folder).state == GONE
    assert "deleted" in cluster.objects


def test_run_whose_pod_cannot_begin_fails_alone_and_keeps_its_reason(
    target: tuple[KubernetesTarget, Objects, list[Any]], runs: list[RunFolder]
) -> None:
    made, cluster, pods = target
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "not found"}}
    pods += [pod_of(0, waiting, "Pending"), pod_of(1, {"waiting": {"reason": "ContainerCreating"}}, "Pending")]

    found = looked(made, runs[0])

    assert (found.state, found.cause) == (GONE, "engine")
    assert "The image can't be pulled" in found.message
    assert dropped_in(cluster) == {runs[0].run_id: {}}
    assert looked(made, runs[1]).state == QUEUED
    # Somebody deletes the Job while the run's end is not recorded yet.
    cluster.objects["deleted"] = True
    assert looked(made, runs[0]) == found


def test_cancel_request_that_did_not_reach_the_api_is_sent_again_at_the_next_status_read(
    target: tuple[KubernetesTarget, Objects, list[Any]], runs: list[RunFolder]
) -> None:
    made, cluster, _ = target
    write_json(runs[0].path / ticket.DROPPED, {"by": "me"})

    assert looked(made, runs[0]).state == GONE

    assert dropped_in(cluster) == {runs[0].run_id: {"by": "me"}}


def test_incomplete_submission_record_of_a_run_is_completed_from_another_run_of_the_same_job(
    target: tuple[KubernetesTarget, Objects, list[Any]], runs: list[RunFolder]
) -> None:
    made, cluster, _ = target
    noted = engine(runs[2])
    runs[2].engine.write_text(json.dumps({name: noted[name] for name in noted if name not in ("submitted", "uid")}))
    note_engine(runs[0], "kubernetes", secrets=["s"])

    assert looked(made, runs[2]).state == QUEUED

    assert {name: engine(runs[2])[name] for name in ("submitted", "uid", "secrets")} == {
        "submitted": 1.0,
        "uid": "u",
        "secrets": ["s"],
    }
    assert "deleted" not in cluster.objects


@pytest.mark.parametrize(("index", "is_done"), [(0, True), (1, False), (3, True), (5, True), (6, False), (7, True)])
def test_job_status_says_which_of_many_runs_have_succeeded(index: int, is_done: bool) -> None:
    job: Any = {"status": {"completedIndexes": "0,2-5,7"}}

    assert reasons.is_complete(job, index, is_one_of_many=True) is is_done


def test_prune_keeps_the_job_of_many_runs_until_all_have_ended(runs: list[RunFolder]) -> None:
    annotations = {"paceline/run-id": runs[0].run_id, "paceline/runs": "3"}
    deleted: list[str] = []

    class Namespace:
        namespace = "lab"

        def items(self, kind: str, **_: object) -> list[Any]:
            return [] if kind != "jobs" else [{"metadata": {"name": "pl-a", "annotations": annotations}}]

        def delete(self, kind: str, name: str) -> None:
            deleted.append(name)

    def clear() -> int:
        return len(list(leftovers.clear(cast("Cluster", Namespace()), "w", runs[0].path.parent, dry_run=False)))

    for folder in runs[:2]:
        store.write(folder, replace(store.stored(folder), status=states.CANCELED))
    (runs[2].path / "engine.json").unlink()
    fd = os.open(runs[2].lock, os.O_RDWR | os.O_CREAT)
    import fcntl

    fcntl.flock(fd, fcntl.LOCK_EX)
    assert clear() == 0
    os.close(fd)
    store.write(runs[2], replace(store.stored(runs[2]), status=states.COMPLETED))

    assert (clear(), deleted) == (1, ["pl-a"])


@pytest.fixture
def submitting(
    target: tuple[KubernetesTarget, Objects, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> KubernetesTarget:
    """A target whose submissions succeed, and during which a user cancels the last run."""
    made, cluster, _ = target
    made.name = "k8s"
    monkeypatch.setattr(made, "_may_forward", lambda *_: False)
    monkeypatch.setattr(cluster, "patiently", lambda call, *_: call(), raising=False)
    monkeypatch.setattr(cluster, "delete", lambda kind, _: cluster.objects.update({f"deleted {kind}": True}))

    def submit(_cluster: Any, _job: Any, _settings: Any, folders: list[RunFolder], *_: Any, **__: Any) -> Any:
        write_json(folders[-1].cancel_request, {"by": "me"})
        made.cancel(folders[-1], store.stored(folders[-1]))
        cluster.objects.pop("deleted jobs", None)  # the Job does not exist until now
        return {"uid": "u", "secrets": [], "upload": 0}

    monkeypatch.setattr(submission, "submit", submit)
    return made


@pytest.mark.parametrize("count", [1, 3], ids=["one run", "many runs"])
def test_cancel_during_a_submission_ends_the_run_that_the_submission_creates(
    submitting: KubernetesTarget, runs: list[RunFolder], count: int
) -> None:
    for folder in runs:
        folder.engine.unlink()

    submitting.start_supervisors(Job(entry_script="train.py"), [run.path for run in runs[:count]], Path(), "", 3)

    objects = cast("Objects", submitting._cluster()).objects
    assert ("deleted jobs" in objects) is (count == 1)
    requests = [one["data"][ticket.DROPPED] for name, one in objects.items() if name.endswith("-dropped")]
    assert [json.loads(base64.b64decode(one)) for one in requests] == [{runs[2].run_id: {"by": "me"}}] * (count == 3)
