from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from paceline import Estimator, Experiment, Workspace
from paceline.errors import TargetError
from paceline.targets.configured import Configured, add
from paceline.testing.sim.target import SimTarget
from tests.helpers import make_job

STEPS = {"at": 0.2, "every": 0.2, "until": 0.7, "line": "step {n}"}
FIRST = {"at": 0, "line": "rank {rank} of {size} on {node}"}


@pytest.fixture
def run_sim(tmp_path, capfd):
    """Runs events on a simulated cluster to the end. values: of the target, or of the job."""

    def run(events, *, target, **job):
        workspace = Workspace(tmp_path / "ws")
        add(tmp_path / "ws", Configured(name="cluster", kind="sim", settings=target), replace=True)
        source = tmp_path / "source"
        source.mkdir(exist_ok=True)
        (source / "train.py").write_text(f"EVENTS = {events!r}\n")
        values = {"distributed_backend": "gloo", "process_count_per_node": 2, **job}
        estimator = Estimator(str(source), entry_script="train.py", compute_target="cluster", **values)
        found = Experiment(workspace, "sim").submit(estimator)
        found.wait_for_completion(raise_on_error=False)
        return found

    return run


def logs(run, tmp_path) -> list[str]:
    folder = tmp_path / "ws/runs" / run.id / "logs"
    return [(folder / f"rank_{rank}.log").read_text() for rank in range(run.record().job.world_size)]


def shells_of_agents() -> set[Path]:
    """The remote shells of simulated agents on this machine: their socket has no number."""
    found = set()
    for path in Path("/dev/shm").glob("paceline-*/rsh"):
        with contextlib.suppress(OSError):  # the folder of another test, which may vanish
            found |= {path} if "/agent\n" in path.read_text() else set()
    return found


@pytest.mark.promise("simulated-nodes-run-real-agents")
@pytest.mark.parametrize("shared", [False, True])
def test_run_on_simulated_nodes_has_logs_and_metrics_of_each_rank(run_sim, tmp_path, shared):
    metric, before = {"at": 0.1, "metric": "loss", "value": 0.5}, shells_of_agents()
    run = run_sim([FIRST, STEPS, metric, {"at": 0.8, "exit": 0}], target={"nodes": 3, "shared": shared}, node_count=3)
    assert run.status == "Completed"
    steps = "step 0\nstep 1\nstep 2\n"
    assert logs(run, tmp_path) == [f"rank {rank} of 6 on sim{rank // 2}\n{steps}" for rank in range(6)]
    assert run.get_metrics("loss") == {"loss": [0.5] * 6}
    assert not list(Path("/tmp").glob(f"paceline-{run.id[-8:]}*"))
    assert shells_of_agents() <= before


def test_failure_of_a_simulated_run_names_the_failed_rank_and_its_node(run_sim):
    error = {"at": 0.3, "exit": 1, "error": "ValueError: bad batch", "ranks": [3]}
    run = run_sim([FIRST, error], target={"nodes": 2}, node_count=2)
    assert run.status == "Failed"
    assert (run.failure.cause, run.failure.rank, run.failure.node) == ("exception", 3, "sim1")
    assert "bad batch" in run.failure.message


@pytest.mark.parametrize("fault", ["dead", "killed"])
def test_lost_simulated_node_is_replaced_by_another(run_sim, fault):
    target = {"nodes": 3, fault: 1, "seed": 3, "silence_s": 12.0, "fault_after_s": 3.0, "fault_within_s": 0.2}
    # The run gets the first two of three nodes. With this seed, one of them fails, and the third node replaces it.
    run = run_sim([FIRST, {"at": 24, "exit": 0}], target=target, node_count=2, max_restarts=1)
    first, second = run.record().attempts
    assert (first.cause, run.status) == ("node_lost", "Completed")
    assert set(second.nodes) != set(first.nodes)


def test_failure_cause_is_disk_if_the_disk_of_a_simulated_node_is_full(run_sim):
    target = {"nodes": 2, "full_disks": 1, "fault_after_s": 0.5, "fault_within_s": 0}
    run = run_sim([FIRST, {"at": 0.2, "every": 0.2, "line": "step {n}"}], target=target, node_count=2)
    assert (run.status, run.failure.cause) == ("Failed", "disk")


def test_invalid_event_of_a_simulated_script_fails_the_run_and_is_named(run_sim, tmp_path):
    run = run_sim([{"jump": 1}], target={"nodes": 1}, node_count=1)
    assert run.status == "Failed"
    assert "event 0 of 'train.py' has no key 'jump'" in logs(run, tmp_path)[0]


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"node_count": 5}, "node_count=5"),
        ({"distributed_backend": "mpi", "node_count": 2}, "without GPUs, mpirun and data"),
        ({"use_gpu": True}, "without GPUs, mpirun and data"),
    ],
)
def test_jobs_that_can_not_be_simulated_are_refused(job, message):
    with pytest.raises(TargetError) as error:
        SimTarget("cluster", {"nodes": 4}).check(make_job(**{"distributed_backend": "gloo", **job}))
    assert message in str(error.value)


def test_simulation_module_does_not_import_pytest():
    text = Path(os.path.dirname(__file__), "../../../src/paceline/testing/__init__.py").read_text()
    assert "import pytest" not in text
