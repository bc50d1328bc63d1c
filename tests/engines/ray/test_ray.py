"""Real runs on a real Ray cluster of three nodes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline as pl
from paceline.data.stores.datastore import Datastore
from paceline.errors import TargetError
from paceline.runs import remote_status, states
from paceline.system import processes
from paceline.targets import configured, polling
from tests.engines.beside import LIMIT, LOUD, STOPS, WAITS, check_exec, check_hang, check_short
from tests.engines.conformance import FRESH_S, GRACE_S
from tests.engines.conftest import use_mpirun
from tests.engines.container_lab import words_of
from tests.engines.elastic import COUNTS, began_at, wait_for_attempt, wait_for_step
from tests.engines.lab import KEEP, WHEEL, Lab, exit_codes, log_text, seen, wait_for_end
from tests.engines.local.worlds.test_listening import listening
from tests.engines.ray_lab import TOKEN, TOKEN_VARIABLE, RayLab
from tests.helpers import wait_until

#: A nasty text for all names that reach a shell, a script or JSON.
NASTY = "a 'b\" $(touch oops); {x} \\n"
TWO = {"node_count": 2, "distributed_backend": "gloo", "compute_target": "cluster"}
#: In its first attempt this script waits until a signal ends it without error. In the next attempt it ends by itself.
WAITING = KEEP + (
    "import signal, socket, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
    "path = os.path.join(os.environ['PACELINE_CHECKPOINT_DIR'], 'rank' + os.environ['PACELINE_RANK'])\n"
    "keep({'before': os.path.exists(path), 'host': socket.gethostname()}, 'seen' + os.environ['PACELINE_ATTEMPT'])\n"
    "open(path, 'w').close()\n"
    "print('waiting', flush=True)\n"
    "while os.environ['PACELINE_ATTEMPT'] == '1': time.sleep(0.05)\n"
)
_numbers = itertools.count()


@pytest.fixture
def cluster(ray_cluster: RayLab) -> RayLab:
    return ray_cluster.whole()


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.setattr(remote_status, "_GRACE_S", GRACE_S)
    monkeypatch.setattr(polling, "FRESH_S", FRESH_S)


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: RayLab) -> Iterator[None]:
    """On no node, a process of a run."""
    yield
    wait_until(lambda: not cluster.left(), f"nothing is left: {cluster.left()}", 30)


@pytest.fixture
def lab(cluster: RayLab) -> Lab:
    """Scripts go in, in a workspace that the cluster sees."""
    lab = Lab(cluster.folder / f"lab {next(_numbers)} {NASTY.replace(chr(92), '')}")
    lab.folder.mkdir()
    cluster.add_target(lab.workspace_dir)
    return lab


@pytest.fixture
def plain_lab(cluster: RayLab) -> Lab:
    lab = Lab(cluster.folder / f"lab{next(_numbers)}")
    cluster.add_target(lab.workspace_dir)
    return lab


def status_in_ray(cluster: RayLab, run: pl.Run) -> str:
    return str(cluster.ask(f"/api/jobs/paceline-{run.id}")["status"])


def wait_until_running(run: pl.Run) -> None:
    """As `wait_for_status`; Ray starts several processes until then, which takes its time on a busy machine."""

    def runs() -> bool:
        record = run.record()
        assert not record.is_terminal, f"{record.status}: {record.failure}"
        return record.status == states.RUNNING

    wait_until(runs, "the run is Running", 60)


def hosts_of(run: pl.Run, attempt: int = 1) -> tuple[str, ...]:
    return tuple(run.record().attempts[attempt - 1].nodes)


@pytest.mark.promise("run-slurm-ray-goes-machine")
def test_workers_on_two_ray_nodes_train_together_and_inherit_no_environment_variable_of_ray(
    cluster: RayLab, lab: Lab
) -> None:
    run = lab.complete(
        KEEP
        + "import socket, torch, torch.distributed as dist\n"
        + "dist.init_process_group('gloo')\n"
        + "total = torch.tensor([float(os.environ['PACELINE_RANK']) + 1])\n"
        + "dist.all_reduce(total)\n"
        + "keep({'sum': total.item(), 'host': socket.gethostname(), 'environment': dict(os.environ), 'argv': sys.argv[1:]})\n"
        + "import paceline; paceline.Run.get_context().log('sum', total.item())\n",
        script_params={"--name": NASTY},
        environment_variables={"NASTY": NASTY},
        **TWO,
    )
    assert [seen(run, rank)["sum"] for rank in (0, 1)] == [3.0, 3.0]
    assert seen(run)["host"] != seen(run, 1)["host"]
    assert hosts_of(run) == (seen(run)["host"], seen(run, 1)["host"])
    assert run.get_metrics()["sum"] == [3.0, 3.0]
    for rank in (0, 1):
        found = seen(run, rank)["environment"]
        assert not [name for name in found if name.startswith(("RAY_", "__RAY")) and name != "RAY_LAB_HOST"]
        assert "LD_PRELOAD" not in found
        assert found["NASTY"] == NASTY
        assert seen(run, rank)["argv"] == ["--name", NASTY]
        assert found["GLOO_SOCKET_IFNAME"] == "eth0"
    assert not list(cluster.folder.rglob("oops"))
    wait_until(lambda: status_in_ray(cluster, run) == "SUCCEEDED", "Ray's job has ended")


# Only `make proof` runs this test, because the conformance tests already run mpirun.
@pytest.mark.proof
def test_mpirun_on_ray_nodes_starts_workers_through_pacelines_remote_shell(
    plain_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_mpirun(WHEEL, monkeypatch)
    run = plain_lab.complete(
        KEEP
        + "import socket\nfrom mpi4py import MPI\n"
        + "keep({'sum': MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank), 'host': socket.gethostname()})\n",
        process_count_per_node=2,
        **{**TWO, "distributed_backend": "mpi"},
    )
    assert [seen(run, rank)["sum"] for rank in range(4)] == [6, 6, 6, 6]
    assert len({seen(run, rank)["host"] for rank in range(4)}) == 2


# Only `make proof` runs this test: with a shared folder, a command reaches its node as on Slurm. A later test covers
# clusters without a shared folder.
@pytest.mark.proof
def test_exec_runs_a_command_on_the_ray_node_of_a_worker(cluster: RayLab, lab: Lab) -> None:
    check_exec(lab.submit(WAITS, **TWO, environment_variables={"MINE": "abc"}))


def test_waiting_run_reports_the_nodes_it_needs_and_ray_job_stop_cancels_a_run_with_a_grace_period(
    cluster: RayLab, lab: Lab
) -> None:
    first = lab.submit(WAITING, process_count_per_node=2, **{**TWO, "node_count": 3})
    wait_until_running(first)
    logs = [first.folder.live_log(rank) for rank in range(6)]
    wait_until(lambda: all(log.exists() and log.read_text() == "waiting\n" for log in logs), "all ranks wait", 60)
    # Supervisors listen only on the address that the cluster knows for this machine.
    marked = processes.with_variable(processes.SUPERVISOR_VARIABLE, first.id)
    supervisors = [pid for pid in marked if "paceline.supervisor" in words_of(pid)]
    assert listening(supervisors).keys() == {cluster.hosts.addresses[cluster.head]}
    second = lab.submit(WAITING, **TWO)
    wait_until(lambda: "free:" in str(second.record().waiting_for), "the second run says what it waits for", 30)
    assert second.status == states.QUEUED
    assert re.search(r"waits for 2 nodes with 1 CPU each; free: \S+ 0 of 2 CPU", second.record().waiting_for or "")
    second.cancel()
    assert wait_for_end(second) == states.CANCELED
    assert second.record().canceled_by != "Ray (ray job stop)"
    assert first.status == states.RUNNING
    cluster.ask(f"/api/jobs/paceline-{first.id}/stop", "POST")
    assert wait_for_end(first) == states.CANCELED
    assert "Ray" in (first.record().canceled_by or "")
    assert [log_text(first, rank) for rank in range(6)] == ["waiting\nsaved\n"] * 6


@pytest.mark.promise("elastic-run-goes-nodes-left")
@pytest.mark.proof
@pytest.mark.timeout(600)
def test_elastic_run_continues_with_rays_remaining_nodes(cluster: RayLab, plain_lab: Lab) -> None:
    """A node crashes, which Ray takes for alive for a while, and comes back as another."""
    gate = cluster.folder / "gate_elastic"
    gate.unlink(missing_ok=True)
    run = plain_lab.submit(
        COUNTS,
        arguments=[str(gate)],
        node_count=(1, 3),
        process_count_per_node=2,
        distributed_backend="gloo",
        compute_target="cluster",
        elastic_seconds=1,
    )
    first = wait_for_attempt(run, 1, 6)
    wait_for_step(run, 5)
    lost = next(name for name in first.nodes if name != cluster.head)
    cluster.hosts.kill(lost)
    try:
        assert set(wait_for_attempt(run, 2, 4).nodes) == set(first.nodes) - {lost}
    finally:
        cluster.revive(lost)
    third = wait_for_attempt(run, 3, 6, timeout=120)
    assert (set(third.nodes), third.reason) == (set(first.nodes), "more nodes")
    assert 5 <= began_at(run, 2) < began_at(run, 3)
    gate.touch()
    assert wait_for_end(run) == states.COMPLETED
    assert [attempt.cause for attempt in run.record().attempts] == ["node_lost", "resized", None]


@pytest.mark.promise("cluster-can-never-hold-refused")
def test_demand_larger_than_the_cluster_is_refused_at_submission(lab: Lab) -> None:
    with pytest.raises(
        TargetError, match=r"the run needs 4 nodes with 1 CPU each, on different nodes; the cluster has"
    ):
        lab.submit("", **{**TWO, "node_count": 4})
    with pytest.raises(TargetError, match=r"needs 1 node with 1 CPU and 1 GPU; the cluster has .* 0 GPU"):
        lab.submit("", compute_target="cluster", use_gpu=True)
    assert not list((lab.workspace_dir / "runs").glob("*"))


def test_submission_to_ray_with_a_wrong_token_is_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "wrong")
    with pytest.raises(TargetError, match="does not take this token"):
        lab.submit("", compute_target="cluster")


def test_failure_names_a_workspace_that_the_ray_cluster_cannot_see(cluster: RayLab, tmp_path: Path) -> None:
    lab = Lab(tmp_path / "mine")
    cluster.add_target(lab.workspace_dir)
    run = lab.finish("", compute_target="cluster")
    failure = run.record().failure
    assert failure is not None
    assert failure.message.startswith(f"The cluster's head, {cluster.head}, does not see {run.folder.path}")
    assert "datastore" in failure.message


@pytest.mark.promise("without-shared-folder-everything-ray")
def test_ray_run_without_a_shared_folder_exchanges_its_files_through_a_datastore(
    cluster: RayLab, tmp_path: Path
) -> None:
    lab = Lab(tmp_path / NASTY)
    store, gate = cluster.folder / f"store {NASTY}", cluster.folder / "gate_datastore"
    cluster.add_target(lab.workspace_dir, datastore="lab")
    Datastore.register(pl.Workspace(lab.workspace_dir), "lab", str(store))
    run = lab.submit(
        KEEP
        + "import time\n"
        + "print('begun', flush=True)\n"
        + "kept = os.path.join(os.environ['PACELINE_CHECKPOINT_DIR'], 'c' + os.environ['PACELINE_RANK'])\n"
        + "open(kept, 'wb').write(b'x' * 5_000_000)\n"
        + "import paceline; paceline.Run.get_context().log('loss', 0.5)\n"
        + f"while not os.path.exists({str(gate)!r}): time.sleep(0.05)\n"
        + "keep({'dir': os.environ['PACELINE_RUN_DIR'], 'data': open('data.txt').read()})\n",
        {"data.txt": "here"},
        **TWO,
    )
    # Any process that reads the run gets its logs, even while the run is still running.
    wait_until(lambda: not run.record().is_terminal and run.folder.live_log(0).exists(), "the log is here", 60)
    wait_until(lambda: run.record().is_terminal or log_text(run) == "begun\n", "the log is here", 60)
    assert not run.record().is_terminal
    gate.touch()
    assert wait_for_end(run) == states.COMPLETED
    assert [seen(run, rank)["data"] for rank in (0, 1)] == ["here", "here"]
    assert seen(run)["dir"] != str(run.folder.path)
    assert sorted(path.stat().st_size for path in run.folder.checkpoints.iterdir()) == [5_000_000] * 2
    assert run.get_metrics()["loss"] == [0.5, 0.5]
    assert exit_codes(run) == {"0": 0, "1": 0}
    # No file of the run is left in the store or on a node.
    assert [path.name for path in store.rglob("*") if path.is_file()] == [f"{run.record().snapshot_id}.tar.gz"]
    for name in cluster.hosts.names:
        found = cluster.hosts.run(name, ["find", "/tmp", "-name", f"*{run.id}*", "-not", "-path", "/tmp/ray/*"])
        assert found.stdout == ""


@pytest.mark.proof
def test_exec_reaches_a_worker_of_a_ray_cluster_without_a_shared_folder(cluster: RayLab, tmp_path: Path) -> None:
    lab = Lab(tmp_path / NASTY)
    store = cluster.folder / f"store {next(_numbers)} {NASTY}"
    cluster.add_target(lab.workspace_dir, datastore="lab")
    Datastore.register(pl.Workspace(lab.workspace_dir), "lab", str(store))
    run = lab.submit(LOUD, **TWO, log_limit=LIMIT, environment_variables={"MINE": "abc"})
    check_exec(run)
    check_short(run)
    assert [path.name for path in store.rglob("*") if path.is_file()] == [f"{run.record().snapshot_id}.tar.gz"]


@pytest.mark.proof
def test_hang_on_two_ray_nodes_is_detected_and_its_missing_rank_named(cluster: RayLab, tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    cluster.add_target(lab.workspace_dir, datastore="lab")
    Datastore.register(pl.Workspace(lab.workspace_dir), "lab", str(cluster.folder / f"store{next(_numbers)}"))
    check_hang(lab.submit(STOPS, **TWO, hang_seconds=3))


def test_ray_target_reports_its_nodes_and_cores_and_doctor_examines_two_of_them(cluster: RayLab, lab: Lab) -> None:
    target = configured.find_target("cluster", lab.workspace_dir)
    status = target.status()  # type: ignore[attr-defined]
    assert (len(status.up), status.cores, status.gpus) == (3, 6, 0)
    with target.examine(2) as links:  # type: ignore[attr-defined]
        names = {link.run(["hostname"]).stdout.decode().strip() for link in links}
    assert len(names) == 2
    assert names <= set(cluster.hosts.names)


# This test is last, because it does not wait until the lost node returns. It kills only Ray's processes and Paceline's
# agent on the node. The elastic test above and the tests of SSH hosts cover the crash of a whole host.
@pytest.mark.promise("lost-node-ends-attempt-left", "restarts-next-attempt-other-nodes")
def test_lost_ray_node_ends_the_attempt_and_the_next_attempt_uses_other_nodes(cluster: RayLab, lab: Lab) -> None:
    run = lab.submit(WAITING, max_restarts=1, **TWO)
    wait_until_running(run)
    wait_until(lambda: len(list(run.folder.checkpoints.glob("rank*"))) == 2, "both ranks wait")
    killed = next(name for name in hosts_of(run) if name != cluster.head)
    cluster.lose_ray(killed)

    assert wait_for_end(run) == states.COMPLETED
    first, second = run.record().attempts
    assert first.cause == "node_lost"
    assert killed not in second.nodes
    assert [seen(run, rank, "seen2")["before"] for rank in (0, 1)] == [True, True]
    wait_until(lambda: not cluster.left(), f"nothing is left: {cluster.left()}", 30)
    cluster.lose(killed)
