"""The compute target, against a stand-in for a cluster."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import TargetError
from paceline.runs import remote_status, states
from paceline.runs.folder import RunFolder
from paceline.runs.record import user_name
from paceline.system import locks
from paceline.system.files import write_json
from paceline.targets.ray import RayTarget
from tests.helpers import make_job, make_record, make_run
from tests.targets.ray.fake_cluster import FakeCluster, fake_cluster


def target(cluster: FakeCluster, **settings: Any) -> RayTarget:
    return RayTarget("lab", {"address": cluster.address, **settings})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found, fd = make_run(tmp_path / "ws" / "runs", job=make_job(grace_period_seconds=7))

    os.close(fd)
    return found


def start(cluster: FakeCluster, folder: RunFolder) -> dict[str, Any]:
    """Ray's job of the run, once it is submitted."""
    assert target(cluster).start_supervisor(folder.path, -1, folder.path / "lib", "/my/python") == 0
    return cluster.jobs[f"paceline-{folder.run_id}"]


def look(cluster: FakeCluster, folder: RunFolder, status: str = states.RUNNING) -> remote_status.JobStatus:
    # Delete the cached answer.
    for path in (folder.path.parent.parent / "engines").glob("*.json"):
        path.unlink()
    return target(cluster).look(folder, make_record(folder.run_id, status=status))


def test_a_job_that_can_never_fit_is_refused(cluster: FakeCluster) -> None:
    cluster.add_node("10.0.0.1", CPU=4.0)
    cluster.add_node("10.0.0.2", CPU=4.0, state="DEAD")
    two = make_job(node_count=2, distributed_backend="gloo")
    with pytest.raises(TargetError, match=r"'lab': the run needs 2 nodes .* the cluster has 10\.0\.0\.1 \(4 CPU\)\."):
        target(cluster).check(two)
    target(cluster, autoscaling=True).check(two)
    target(cluster).check(make_job())


def test_preview_lists_only_ray_nodes_that_fit_the_job(cluster: FakeCluster) -> None:
    cluster.add_node("10.0.0.1", CPU=1.0)
    cluster.add_node("10.0.0.2", CPU=4.0, GPU=2.0)
    job = make_job(process_count_per_node=2, distributed_backend="nccl", use_gpu=True)
    (node,) = target(cluster).preview(job).nodes
    assert (node.name, node.cores, node.gpus) == ("10.0.0.2", 2, ("0", "1"))


def test_failure_message_is_read_from_the_job_log_if_ray_reports_only_the_command(
    cluster: FakeCluster, folder: RunFolder
) -> None:
    cluster.logs = "paceline: pc0 does not see it\nRunning entrypoint for job 1: the command\n"
    start(cluster, folder).update({"status": "FAILED", "message": "last logs:\nthe command"})
    assert look(cluster, folder).message == "pc0 does not see it."


def test_ray_stop_timeout_exceeds_the_grace_period_of_the_workers(cluster: FakeCluster, folder: RunFolder) -> None:
    job = start(cluster, folder)
    assert job["runtime_env"]["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "27"
    assert "paceline.supervisor" in job["entrypoint"]
    told = json.loads(folder.engine.read_text())
    assert (told["engine"], told["job_id"]) == ("ray", f"paceline-{folder.run_id}")


def test_token_is_not_stored_in_the_job(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB", "hush-hush")
    with fake_cluster(token="hush-hush") as cluster:
        target(cluster, token_env="LAB").start_supervisor(folder.path, -1, folder.path / "lib", "/my/python")
        assert "hush-hush" not in json.dumps(cluster.jobs)
    assert not [path for path in folder.path.rglob("*") if path.is_file() and b"hush-hush" in path.read_bytes()]


@pytest.mark.parametrize(
    ("values", "state", "cause", "message"),
    [
        ({"status": "RUNNING"}, "running", None, ""),
        ({"status": "STOPPED"}, "gone", "cancel", "was stopped"),
        ({"status": "SUCCEEDED", "message": "Job finished successfully."}, "gone", "engine", "finished successfully"),
        (
            {"status": "FAILED", "error_type": "JOB_SUPERVISOR_ACTOR_DIED", "message": "died."},
            "gone",
            "node_lost",
            "died",
        ),
        (
            {"status": "FAILED", "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR", "message": "code 137"},
            "gone",
            "supervisor",
            "code 137",
        ),
        (
            {"status": "FAILED", "message": "last logs:\nRunning entrypoint\npaceline: pc0 does not see it\n"},
            "gone",
            "engine",
            "pc0 does not see it.",
        ),
    ],
)
def test_status_of_a_ray_job_is_mapped_to_a_run_status(
    cluster: FakeCluster, folder: RunFolder, values: dict[str, str], state: str, cause: str | None, message: str
) -> None:
    start(cluster, folder).update(values)
    found = look(cluster, folder)
    assert found.state == state
    assert cause is None or found.cause == cause
    assert message in found.message


def test_pending_job_is_queued_until_its_supervisor_writes_a_state(cluster: FakeCluster, folder: RunFolder) -> None:
    start(cluster, folder)
    assert look(cluster, folder, states.NOT_STARTED) == remote_status.JobStatus(state="queued", message="Wait")
    assert look(cluster, folder, states.PREPARING).state == "running"


def test_run_whose_job_ray_does_not_know_is_reported_as_gone_after_a_delay(
    cluster: FakeCluster, folder: RunFolder
) -> None:
    start(cluster, folder)
    cluster.jobs.clear()
    assert look(cluster, folder).state == "queued"
    told = json.loads(folder.engine.read_text())
    folder.engine.write_text(json.dumps({**told, "time": time.time() - 60}))
    found = look(cluster, folder)
    assert found.state == "gone"
    assert "knows no job of this run" in found.message


def test_canceling_a_run_or_releasing_its_nodes_stops_its_ray_job(cluster: FakeCluster, folder: RunFolder) -> None:
    job = start(cluster, folder)
    target(cluster).cancel(folder, make_record(folder.run_id))
    assert job["status"] == "STOPPED"
    job["status"] = "RUNNING"
    target(cluster).release(folder.path)
    assert job["status"] == "STOPPED"


def test_run_canceled_before_its_ray_job_exists_is_stopped_after_the_submission(
    cluster: FakeCluster, folder: RunFolder
) -> None:
    write_json(folder.cancel_request, {"by": "me"})
    assert start(cluster, folder)["status"] == "STOPPED"


def test_releasing_nodes_from_inside_a_ray_job_does_not_stop_that_job(
    cluster: FakeCluster, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(cluster, folder)
    monkeypatch.setenv("PACELINE_RAY_PYTHON", "/ray/python")
    target(cluster).release(folder.path)
    assert job["status"] == "PENDING"


def test_ray_target_status_counts_resources_used_by_other_jobs(cluster: FakeCluster) -> None:
    cluster.add_node("10.0.0.1", CPU=4.0, GPU=2.0)
    cluster.add_node("10.0.0.2", state="DEAD")
    status = target(cluster).status()
    assert (status.cores, status.used_cores, status.gpus, status.used_gpus) == (4, 2, 2, 1)
    assert (status.state, status.queued, status.running, status.jobs) == ("degraded", 0, 0, ())


def test_ray_target_status_names_the_users_of_the_cluster(cluster: FakeCluster, folder: RunFolder) -> None:
    start(cluster, folder)
    cluster.jobs["other"] = {"submission_id": "other", "type": "SUBMISSION", "status": "RUNNING", "metadata": None}
    cluster.jobs["over"] = {"submission_id": "over", "type": "SUBMISSION", "status": "STOPPED"}
    own, other = target(cluster).status().jobs
    assert (own.run_id, own.user, own.is_waiting, own.reason) == (folder.run_id, user_name(), True, "Wait. So.")
    assert (other.run_id, other.user, other.is_waiting, other.cores) == ("other", "", False, None)


def test_waiting_for_nodes_outside_a_ray_job_raises_target_error(cluster: FakeCluster, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="only available inside a Ray job"):
        target(cluster).wait_for_nodes(make_job(), tmp_path, lambda text: False)


def test_ray_is_not_queried_while_the_outputs_of_a_run_are_still_being_stored(
    folder: RunFolder, tmp_path: Path
) -> None:
    away = RayTarget("lab", {"address": "http://127.0.0.1:1", "datastore": "lab"})
    fd = locks.take(folder.lock)
    assert fd is not None
    write_json(folder.home, {"host": "", "folders": {}, "end": {}})
    assert away.look(folder, make_record(folder.run_id)).state == remote_status.RUNNING
    away.cancel(folder, make_record(folder.run_id))
    os.close(fd)


def test_run_unknown_to_ray_is_reported_as_running_while_another_process_fetches_its_files(
    cluster: FakeCluster, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = target(cluster, datastore="lab")
    for answer, state in ((True, remote_status.RUNNING), (False, remote_status.GONE)):
        monkeypatch.setattr(
            "paceline.targets.ray.object_sync.fetch_run", lambda settings, folder, answer=answer: answer
        )
        assert away.look(folder, make_record(folder.run_id)).state == state


@pytest.mark.parametrize(
    ("settings", "is_there", "python"),
    [
        ({"python": "/opt/python"}, True, "/opt/python"),
        ({}, True, sys.executable),
        ({}, False, None),
        # If the run is sent through a datastore, its script uses Ray's own interpreter.
        ({"datastore": "lab"}, True, None),
    ],
    ids=["set", "there", "not there", "through a datastore"],
)
def test_script_uses_the_configured_python_or_the_python_of_the_submitter_if_all_nodes_have_it(
    cluster: FakeCluster, settings: dict[str, str], is_there: bool, python: str | None
) -> None:
    links = [SimpleNamespace(exists=lambda path: True), SimpleNamespace(exists=lambda path: is_there)]
    assert target(cluster, **settings).script_python(links) == python
