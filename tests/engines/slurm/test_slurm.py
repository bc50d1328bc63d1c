"""Real runs on a real Slurm: two nodes in namespaces, its controller on this machine."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.errors import TargetError
from paceline.runs import remote_status, states
from paceline.runs.remote_status import engine
from paceline.system.files import read_json
from paceline.targets import configured, polling
from paceline.targets.configured import Configured
from paceline.targets.slurm import SlurmTarget, query
from tests.engines import slurm_lab
from tests.engines.beside import LIMIT, LOUD, STOPS, WAITS, check_exec, check_hang, check_short
from tests.engines.beside_azureml import check_driver
from tests.engines.conformance import FRESH_S, GRACE_S
from tests.engines.conftest import require_engine
from tests.engines.elastic import COUNTS, began_at, wait_for_attempt, wait_for_step
from tests.engines.lab import (
    KEEP,
    Lab,
    exit_codes,
    log_text,
    processes_below,
    seen,
    wait_for_end,
    wait_for_file,
    wait_for_status,
)
from tests.engines.slurm_lab import SlurmLab
from tests.helpers import start_python, wait_until

TWO = {"node_count": 2, "distributed_backend": "gloo"}
#: This script prints when it begins. It works until a signal ends it, and prints that too.
WORK = """
    import os, signal, sys, time
    def end(number, frame):
        print("told to end", flush=True)
        time.sleep(0.5)
        print("ended in peace", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, end)
    with open(f"outputs/begun_{os.environ['PACELINE_RANK']}_{os.environ['PACELINE_ATTEMPT']}", "w") as file:
        file.write(os.uname().nodename)
    time.sleep(600)
"""


def need(*, accounting: bool = False) -> None:
    lacks = slurm_lab.missing(accounting=accounting)
    require_engine(f"Slurm ({lacks})" if lacks else "Slurm", not lacks)


@pytest.fixture
def cluster(slurm_cluster: SlurmLab) -> SlurmLab:
    return slurm_cluster


@pytest.fixture
def slurm(cluster: SlurmLab, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmLab]:
    """The cluster, with no job, as compute target `cluster` of the lab's workspace. In the end no job may be left."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote_status, "_GRACE_S", GRACE_S)
    monkeypatch.setattr(polling, "FRESH_S", FRESH_S)
    add(lab, time="10")
    yield cluster
    try:
        # A run's record is final shortly before its Slurm job ends.
        wait_until(lambda: not cluster.run("squeue", "-h"), "no job is left")
    finally:
        cluster.settle()


def add(lab: Lab, name: str = "cluster", **settings: Any) -> None:
    configured.add(lab.workspace_dir, Configured(name=name, kind="slurm", settings=settings), replace=True)


def submit(lab: Lab, script: str, target: str = "cluster", **values: Any) -> pl.Run:
    return lab.submit(script, compute_target=target, **values)


def complete(lab: Lab, script: str, target: str = "cluster", **values: Any) -> pl.Run:
    return lab.complete(script, compute_target=target, **values)


def begin(lab: Lab, *, ranks: int = 2, **values: Any) -> pl.Run:
    """A run of `WORK` whose workers have begun."""
    run = submit(lab, WORK, **{**TWO, "process_count_per_node": ranks // 2, **values})
    begun(run, 1, ranks)
    return run


def begun(run: pl.Run, attempt: int, ranks: int = 2) -> list[str]:
    """The hosts that an attempt's workers are on, once they have begun."""
    files = [run.folder.outputs / f"begun_{rank}_{attempt}" for rank in range(ranks)]

    def have_begun() -> bool:
        return all(file.exists() for file in files)

    try:
        wait_until(lambda: have_begun() or run.record().is_terminal, f"attempt {attempt} has begun", 90)
        assert have_begun(), "the run has ended"
    except AssertionError as error:
        pytest.fail(f"{error}\n{run.record()}\n{run.folder.driver_log.read_text()}")
    return [wait_for_file(file) for file in files]


def job_id(run: pl.Run) -> str:
    return str(engine(run.folder)["job_id"])


# --- tests of what a run's workers get


# `make test` uses only Gloo here: the conformance tests and the test of srun's workers below also compare mpirun's
# workers.
@pytest.mark.promise("run-slurm-ray-goes-machine")
@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=pytest.mark.proof)])
def test_workers_on_slurm_get_the_same_ranks_and_world_size_variables_as_on_this_machine(
    slurm: SlurmLab, lab: Lab, backend: str, request: pytest.FixtureRequest
):
    if backend == "mpi":
        request.getfixturevalue("any_mpirun")
    script = KEEP + (
        "mpi = None\n"
        "if os.environ.get('OMPI_COMM_WORLD_SIZE'):\n"
        "    from mpi4py import MPI\n"
        "    mpi = MPI.COMM_WORLD.allreduce(int(os.environ['PACELINE_RANK']))\n"
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'NODE_RANK', 'PACELINE_ATTEMPT')\n"
        "own = {name: os.environ[name] for name in names} | {'mpi': mpi, 'argv': sys.argv[1:]}\n"
        "keep(own)\n"
        "keep(sorted(os.environ), 'names')\n"
        "keep(os.uname().nodename, 'host')\n"
        "print('rank', os.environ['PACELINE_RANK'])\n"
    )
    values = {
        "node_count": 2,
        "process_count_per_node": 2,
        "distributed_backend": backend,
        "script_params": {"--text": "a'b\"c $NOWHERE;#&", "--n": 3},
    }
    here = lab.complete(script, **values)
    there = complete(lab, script, **values)
    for rank in range(4):
        assert seen(there, rank) == seen(here, rank)
        assert seen(there, rank, "host") == slurm.hosts.names[rank // 2]
        assert log_text(there, rank) == log_text(here, rank) == f"rank {rank}\n"
        ours = {name for name in seen(there, rank, "names") if name.startswith(("SLURM", "SRUN_", "SBATCH_"))}
        assert not ours, "a framework would take them for its own place"
    assert exit_codes(there) == exit_codes(here)
    wait_until(lambda: slurm.states()[job_id(there)] == "COMPLETED", "the job has ended well")


@pytest.mark.proof
def test_exec_runs_a_command_on_the_slurm_node_of_a_worker(slurm: SlurmLab, lab: Lab):
    check_exec(submit(lab, WAITS, **TWO, environment_variables={"MINE": "abc"}))


@pytest.mark.proof
def test_hang_on_two_slurm_nodes_is_detected_and_its_missing_rank_named(slurm: SlurmLab, lab: Lab):
    check_hang(submit(lab, STOPS, **TWO, hang_seconds=3))


def test_failed_script_on_slurm_keeps_its_exit_code(slurm: SlurmLab, lab: Lab):
    run = lab.finish(
        "import os, sys\nsys.exit(7 if os.environ['PACELINE_RANK'] == '1' else 0)", compute_target="cluster", **TWO
    )
    record = run.record()
    assert (record.status, record.exit_code) == ("Failed", 7)
    assert record.failure is not None
    assert (record.failure.rank, record.failure.cause) == (1, "exception")


@pytest.mark.promise("names-characters-reach-everything-they")
def test_names_with_shell_characters_reach_slurm_unchanged(slurm: SlurmLab, tmp_path: Path, lab: Lab):
    nasty = Lab(tmp_path / "w s'\"$(touch x);&#%j")
    nasty.folder.mkdir()
    add(
        nasty,
        time="10",
        setup=["export FROM_SETUP='a b;$(touch y)'"],
        options=["--mail-type=FAIL", "--mail-user=$(touch z) 'a\" #b"],
    )
    run = complete(nasty, KEEP + "keep([os.environ['FROM_SETUP'], os.getcwd()])", **TWO)
    setup, folder = seen(run, 1)
    assert setup == "a b;$(touch y)"
    assert folder.startswith(str(nasty.folder))
    assert slurm.run("scontrol", "show", "job", job_id(run)).count("$(touch z) 'a\" #b") == 1
    assert not {"x", "y", "z"} & {path.name for path in tmp_path.rglob("?")}


@pytest.mark.promise("cluster-can-never-hold-refused")
def test_error_names_the_option_that_slurm_refuses_and_no_run_is_created(slurm: SlurmLab, lab: Lab):
    add(lab, "wrong", partition="no such; $(partition)")
    with pytest.raises(
        TargetError, match=r"Slurm refuses the job: invalid partition specified: no such.*--partition=no such"
    ):
        submit(lab, "pass", "wrong")
    with pytest.raises(TargetError, match=r"node configuration is not available.*--nodes=9"):
        submit(lab, "pass", node_count=9, distributed_backend="gloo")
    add(lab, "gpus", gres="gpu:a100:1")
    with pytest.raises(TargetError, match=r"Slurm refuses the job: .*--gres=gpu:a100:1"):
        submit(lab, "pass", "gpus")
    with pytest.raises(TargetError, match="Slurm has no partition 'mian'; it has main, short, urgent"):
        SlurmTarget("mistyped", {"partition": "mian"}).status()
    assert not list((lab.workspace_dir / "runs").glob("*"))
    assert not slurm.run("squeue", "-h")


def test_each_worker_sees_its_slurm_gpu(slurm: SlurmLab, lab: Lab):
    script = KEEP + "keep(os.environ.get('CUDA_VISIBLE_DEVICES'))"
    run = complete(lab, script, **TWO, process_count_per_node=2, use_gpu=True)
    assert [seen(run, rank) for rank in range(4)] == ["0", "1", "0", "1"]
    assert SlurmTarget().status().gpus == 4
    run = complete(lab, script, use_gpu=True)
    assert seen(run) in ("0", "1")


def test_the_doctor_examines_nodes_of_a_short_allocation(slurm: SlurmLab, lab: Lab, monkeypatch: pytest.MonkeyPatch):
    with SlurmTarget().examine() as links:
        assert sorted(link.hello.host for link in links) == sorted(slurm.hosts.names)
        assert slurm.run("squeue", "-h", "-o", "%j %l").split() == ["paceline-doctor", "10:00"]
    monkeypatch.setattr("paceline.targets.slurm.examine._WAIT_S", 1)
    with pytest.raises(TargetError, match="has not given 9 nodes within 1 s"), SlurmTarget().examine(9):
        pass
    wait_until(lambda: not slurm.run("squeue", "-h"), "the allocation has ended")
    wait_until(
        lambda: not any("paceline" in text for text in slurm.hosts.processes(slurm.hosts.names[1]).values()),
        "no agent is left",
    )


# --- tests of MPI with srun


def with_pmix(slurm: SlurmLab, lab: Lab) -> None:
    """Let srun start MPI's workers on `cluster`."""
    # Debian's slurm-wlm has the PMIx plugin, but not the library that the plugin loads.
    tried = slurm.hosts.run(slurm.hosts.names[0], ["srun", "--mpi=pmix", "--immediate=30", "true"], check=False)
    require_engine("Slurm whose srun can load PMIx (libpmix-dev)", tried.returncode == 0)
    add(lab, time="10", mpi="pmix")


@pytest.mark.promise("srun-starts-mpi-s-workers")
@pytest.mark.usefixtures("any_mpirun")
def test_srun_and_mpirun_give_mpi_workers_the_same_ranks(slurm: SlurmLab, lab: Lab):
    script = KEEP + (
        "from mpi4py import MPI\n"
        "world = MPI.COMM_WORLD\n"
        "names = ('LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'NODE_RANK', 'OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_LOCAL_RANK')\n"
        "own = {name: os.environ[name] for name in (*names, 'CUDA_VISIBLE_DEVICES', 'SLURM_MINE')}\n"
        "keep([own, world.rank, world.allreduce(2 ** world.rank), sys.argv[1:], os.uname().nodename])\n"
        "keep(sorted(os.environ), 'names')\n"
        "print('rank', os.environ['PACELINE_RANK'])\n"
    )
    values = {
        "node_count": 2,
        "process_count_per_node": 2,
        "distributed_backend": "mpi",
        "use_gpu": True,
        "script_params": {"--text": "a'b\"c $NOWHERE;#&"},
        "environment_variables": {"SLURM_MINE": "1"},
    }
    by_mpirun = complete(lab, script, **values)
    with_pmix(slurm, lab)
    by_srun = complete(lab, script, **values)
    assert "srun (pid" in by_srun.folder.driver_log.read_text()
    for rank in range(4):
        assert seen(by_srun, rank) == seen(by_mpirun, rank)
        assert seen(by_srun, rank)[1:3] == [rank, 15]
        assert log_text(by_srun, rank) == f"rank {rank}\n"
        names = [set(seen(run, rank, "names")) for run in (by_srun, by_mpirun)]
        # Ignore the variables of MPI, and the library path, which mpirun changes to find its own libraries.
        own = ("PMIX_", "PRTE_", "OMPI_", "OPAL_", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
        only = {name for name in names[0] ^ names[1] if not name.startswith(own)}
        assert not only, "the environment does not depend on what has started the workers"
    assert exit_codes(by_srun) == dict.fromkeys("0123", 0)
    wait_until(lambda: slurm.states()[job_id(by_srun)] == "COMPLETED", "the job has ended well")


#: In this script, rank 1 exits or kills itself, as its argument says. Before that it waits until all other ranks have
#: left MPI, because MPI would abort them. The other ranks save their state when they get SIGTERM.
FAILS = """
    import os, signal, sys, time
    from mpi4py import MPI
    rank = MPI.COMM_WORLD.rank
    def end(number, frame):
        time.sleep(1.5)
        print("saved", flush=True)
        os._exit(0)
    signal.signal(signal.SIGTERM, end)
    MPI.COMM_WORLD.allreduce(1)
    open(f"outputs/past_{rank}", "w").close()
    if rank == 1:
        while len([name for name in os.listdir("outputs") if name.startswith("past_")]) < 4:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == "kill" else os._exit(int(sys.argv[2]))
    time.sleep(600)
"""


@pytest.mark.usefixtures("any_mpirun")
# `make test` uses only "kill": the worker's parent process reports a killed worker and a failed worker in the same way.
@pytest.mark.parametrize("how", [pytest.param("7", marks=pytest.mark.proof), "kill"])
def test_srun_workers_get_their_grace_period_when_another_fails(slurm: SlurmLab, lab: Lab, how: str):
    with_pmix(slurm, lab)
    values = {
        "node_count": 2,
        "process_count_per_node": 2,
        "distributed_backend": "mpi",
        "script_params": {"--how": how},
    }
    run = lab.finish(FAILS, compute_target="cluster", **values)
    code = 137 if how == "kill" else int(how)
    record = run.record()
    assert (record.status, record.exit_code) == ("Failed", code)
    assert record.failure is not None
    assert (record.failure.rank, record.failure.cause) == (1, "killed" if how == "kill" else "exception")
    assert exit_codes(run) == {"0": 0, "1": code, "2": 0, "3": 0}
    assert [log_text(run, rank) for rank in (0, 2, 3)] == ["saved\n"] * 3


@pytest.mark.usefixtures("any_mpirun")
def test_pmix_library_that_srun_can_not_load_is_named_with_its_package(slurm: SlurmLab, lab: Lab):
    # Debian's slurm-wlm has the PMIx plugin but not its library. Regression: the only message was "exit code 1".
    listed = slurm.run("srun", "--mpi=list")
    require_engine("Slurm with a plugin for PMIx", "pmix" in listed.split())
    add(lab, time="10", mpi="pmix")
    libraries = [path for path in Path("/usr/lib").rglob("libpmix.so*") if not path.is_symlink()]
    hidden = [(name, str(path)) for name in slurm.hosts.names for path in libraries]
    try:
        for name, path in hidden:
            slurm.hosts.run(name, ["mount", "--bind", "/dev/null", path])
        run = lab.finish("pass", compute_target="cluster", process_count_per_node=2, distributed_backend="mpi")
    finally:
        for name, path in hidden:
            slurm.hosts.run(name, ["umount", path])
    assert run.status == "Failed", run.folder.driver_log.read_text()
    assert run.failure is not None
    assert "libpmix-dev" in run.failure.message, (run.failure.message, run.failure.last_lines)


# --- tests of the queue


@pytest.mark.promise("however-many-runs-wait-slurm")
def test_three_waiting_runs_read_their_reasons_by_one_squeue_call_and_their_jobs_can_be_canceled(
    slurm: SlurmLab, lab: Lab, monkeypatch: pytest.MonkeyPatch
):
    add(lab, "later", options=["--begin=now+1hour"])
    runs = [submit(lab, "pass", "later") for _ in range(3)]
    slurm.run("scontrol", "hold", job_id(runs[2]))
    reasons = {"BeginTime", "JobHeldUser", "JobHeldAdmin"}
    wait_until(lambda: set(slurm.run("squeue", "-h", "-o", "%r").split()) <= reasons, "the scheduler has seen them")
    time.sleep(polling.FRESH_S)
    asked: list[float] = []
    ask = query.Query._squeue
    monkeypatch.setattr(query.Query, "_squeue", lambda self: asked.append(time.time()) or ask(self))
    monkeypatch.setattr(polling, "FRESH_S", 3600.0)
    records = [run.record() for run in runs]
    assert [record.status for record in records] == ["Queued"] * 3
    assert records[0].waiting_for == (
        f"Slurm job {job_id(runs[0])}: not before its earliest start; after a requeue Slurm waits two minutes (BeginTime)"
    )
    assert "held" in str(records[2].waiting_for)
    assert len(asked) == 1
    for run in runs:
        run.cancel()
    assert {slurm.states()[job_id(run)] for run in runs} == {"CANCELLED"}
    for run in runs:
        assert wait_for_end(run) == "Canceled"


# --- tests of the ways to end a run


@pytest.mark.promise("cancel-leaves-process-node")
def test_cancel_grants_the_grace_period_and_leaves_no_processes(slurm: SlurmLab, lab: Lab):
    run = begin(lab, ranks=4)
    assert processes_below(lab.folder)
    run.cancel()
    assert wait_for_end(run) == "Canceled"
    assert "ended in peace" in log_text(run, 3)
    wait_until(lambda: not slurm.run("squeue", "-h"), "the job is over")
    wait_until(lambda: not processes_below(lab.folder), "no process is left")


def test_scancel_from_outside_cancels_the_run(slurm: SlurmLab, lab: Lab):
    run = begin(lab)
    slurm.run("scancel", job_id(run))
    assert wait_for_end(run) == "Canceled"
    assert "told to end" in log_text(run, 1)
    wait_until(lambda: not processes_below(lab.folder), "no process is left")


def test_slurm_time_limit_warning_gives_workers_their_grace_period(slurm: SlurmLab, lab: Lab):
    run = begin(lab)
    # slurmstepd sends this signal because of --signal=B:USR2@N.
    slurm.run("scancel", "--batch", "--signal=USR2", job_id(run))
    assert wait_for_end(run) == "Failed"
    record = run.record()
    assert record.failure is not None
    assert (record.failure.cause, record.exit_code) == ("time_limit", 124)
    assert "ended in peace" in log_text(run, 0)
    assert "ended in peace" in log_text(run, 1)


def test_job_with_a_killed_supervisor_fails_and_leaves_no_processes(slurm: SlurmLab, lab: Lab):
    run = begin(lab)
    found = [pid for pid, command in processes_below(lab.folder).items() if "paceline.supervisor" in command]
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    assert wait_for_end(run) == "Failed"
    wait_until(lambda: not processes_below(lab.folder), "no process is left", 30)


# --- tests of further attempts


@pytest.mark.promise("preempted-run-goes-checkpoint")
def test_preempted_run_resumes_from_its_checkpoint(slurm: SlurmLab, lab: Lab):
    add(lab, time="10", exclusive=True)
    script = """
        import os, signal, sys, time
        path = os.path.join(os.environ["PACELINE_CHECKPOINT_DIR"], f"step_{os.environ['PACELINE_RANK']}")
        if os.path.exists(path):
            print("goes on from step", open(path).read(), flush=True)
            sys.exit()
        def save(number, frame):
            with open(path, "w") as file:
                file.write("41")
            sys.exit()
        signal.signal(signal.SIGTERM, save)
        open(f"outputs/begun_{os.environ['PACELINE_RANK']}_1", "w").write("here")
        time.sleep(600)
    """
    run = submit(lab, script, **TWO, max_restarts=1)
    begun(run, 1)
    slurm.run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=exit 0")
    assert wait_for_end(run) == "Completed"
    record = run.record()
    assert [(attempt.number, attempt.cause) for attempt in record.attempts] == [(1, "preempted"), (2, None)]
    assert [log_text(run, rank) for rank in (0, 1)] == ["goes on from step 41\n"] * 2


@pytest.mark.promise("restarts-next-attempt-other-nodes")
def test_run_continues_after_a_lost_slurm_node_is_replaced(slurm: SlurmLab, lab: Lab):
    run = begin(lab, max_restarts=1)
    name = slurm.hosts.names[1]
    slurm.kill_node(name)
    try:
        wait_until(lambda: slurm.states().get(job_id(run)) == "PENDING", "the job is back in the queue", 60)
    finally:
        slurm.boot_node(name)
    assert begun(run, 2) == list(slurm.hosts.names)
    assert run.record().attempts[0].cause == "node_lost"
    run.cancel()
    assert wait_for_end(run) == "Canceled"
    slurm.settle()


@pytest.mark.promise("elastic-run-goes-nodes-left")
@pytest.mark.proof
@pytest.mark.timeout(600)
def test_elastic_run_continues_with_slurms_remaining_nodes(slurm: SlurmLab, lab: Lab, tmp_path: Path):
    """A node is lost and comes back, and the job is preempted and gets a smaller allocation."""
    gate, (here, other) = tmp_path / "gate", slurm.hosts.names
    run = submit(lab, COUNTS, arguments=[str(gate)], node_count=(1, 2), distributed_backend="gloo", elastic_seconds=1)
    assert wait_for_attempt(run, 1, 2).nodes == (here, other)
    wait_for_step(run, 5)
    slurm.kill_node(other)
    try:
        assert wait_for_attempt(run, 2, 1).nodes == (here,)
        assert slurm.states()[job_id(run)] == "RUNNING", "it has kept what it had left"
    finally:
        slurm.boot_node(other)
    # A second Slurm job, which waited in the queue, has added the node.
    assert wait_for_attempt(run, 3, 2, timeout=120).nodes == (here, other)
    assert sorted(slurm.states().values()).count("RUNNING") == 2
    wait_for_step(run, began_at(run, 3) + 5)

    urgent = ["--partition=urgent", "--nodes=1", f"--nodelist={here}", "--exclusive", "--output=/dev/null"]
    slurm.run("sbatch", *urgent, "--wrap=sleep 300")
    fourth = wait_for_attempt(run, 4, 1, timeout=240)
    assert (fourth.nodes, fourth.reason) == ((other,), "preempted")
    assert 5 <= began_at(run, 2) < began_at(run, 3) < began_at(run, 4)
    gate.touch()
    assert wait_for_end(run) == "Completed"
    assert [attempt.cause for attempt in run.record().attempts] == ["node_lost", "resized", "preempted", None]
    wait_until(lambda: "paceline" not in slurm.run("squeue", "-h", "-o", "%j"), "the second job went with the run")
    slurm.settle()


# --- tests with an interrupted Slurm controller


@pytest.mark.promise("while-slurm-s-controller-away")
def test_slurm_controller_outage_fails_no_run(slurm: SlurmLab, lab: Lab, monkeypatch: pytest.MonkeyPatch):
    run = begin(lab)
    slurm.stop_controller()
    try:
        monkeypatch.setattr(polling, "FRESH_S", 0.0)
        for name, value in slurm.impatient.items():
            monkeypatch.setenv(name, value)
        wait_until(lambda: run.record().status == "NotResponding", "that is seen", 60)
        assert "controller" in str(run.record().waiting_for)
    finally:
        slurm.start_controller()
    monkeypatch.undo()
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    wait_for_status(run, "Running")
    run.cancel()
    assert wait_for_end(run) == "Canceled"


@pytest.mark.promise("while-slurm-s-controller-away")
def test_submission_waits_during_a_slurm_controller_outage(slurm: SlurmLab, lab: Lab, monkeypatch: pytest.MonkeyPatch):
    slurm.stop_controller()
    for name, value in slurm.impatient.items():
        monkeypatch.setenv(name, value)
    runs: list[pl.Run] = []
    submitter = threading.Thread(target=lambda: runs.append(submit(lab, "print('here')")))
    try:
        submitter.start()
        time.sleep(4)
    finally:
        # Start the controller in the main thread, because it would end with another thread.
        slurm.start_controller()
        submitter.join(300)
    (run,) = runs
    assert wait_for_end(run) == "Completed"
    assert len([name for name in slurm.run("squeue", "-h", "-t", "all", "-o", "%j").split() if run.id in name]) == 1


# --- tests with a login host


@pytest.mark.promise("run-through-login-host-one")
def test_run_through_a_login_host_equals_one_submitted_on_the_cluster(
    slurm: SlurmLab, lab: Lab, monkeypatch: pytest.MonkeyPatch
):
    first = slurm.hosts.names[0]
    slurm.hosts.run(first, ["mount", "--bind", str(slurm.folder), "/etc/slurm"])
    monkeypatch.delenv("SLURM_CONF")
    settings = {
        "login": first,
        "ssh_config": str(slurm.hosts.ssh_config),
        "folder": str(lab.folder / "far away;$(touch x)"),
        "python": sys.executable,
        "time": "10",
    }
    add(lab, "far", **settings)
    script = KEEP + "keep(os.environ['PACELINE_RUN_DIR'])\nprint('there', flush=True)"
    # This run fails, and leaves an output that belongs into a folder of this machine. Until long after its end, no
    # process reads the run.
    own = pl.Datastore.register(pl.Workspace(lab.workspace_dir), "own", lab.folder / "store")
    leave = "import sys\nfor name in 'ab':\n    open(f'{sys.argv[2]}/{name}', 'w').write(name)\nsys.exit(3)"
    failing = submit(lab, leave, "far", script_params={"--out": own.path("m", "model").as_upload()})
    loud = submit(lab, LOUD, "far", **TWO, log_limit=LIMIT, environment_variables={"MINE": "abc"})
    run = complete(lab, script, "far", **TWO)
    assert seen(run, 1).startswith(settings["folder"])
    assert log_text(run, 1) == "there\n"
    other = submit(lab, WORK, "far", **TWO)
    wait_for_status(other, "Running")
    other.cancel()
    assert wait_for_end(other) == "Canceled"

    check_exec(loud)
    check_short(loud)

    there = Path(str(engine(failing.folder)["run_dir"]))
    wait_until(lambda: (read_json(there / "state.json") or {}).get("status") == "Failed", "it has failed there", 60)
    assert read_json(failing.folder.state)["status"] not in states.TERMINAL
    # Kill the first process that reads the run after it has stored one of the two output files.
    looks = (
        "import os, sys, time\nfrom pathlib import Path\nfrom paceline.data.transfer import upload\n"
        "from paceline.runs import read\n"
        "from paceline.runs.folder import RunFolder\nput, upload._AT_ONCE = upload._put_file, 1\n"
        "upload._put_file = lambda *args: (put(*args), os.kill(os.getpid(), 9))\n"
        "while not read.record(RunFolder(Path(sys.argv[1]))).is_terminal:\n    time.sleep(0.2)\n"
    )
    process = start_python(looks, failing.folder.path)
    process.communicate(timeout=180)
    assert process.returncode == -signal.SIGKILL
    assert read_json(failing.folder.state)["status"] == "Finalizing"
    assert len(list((lab.folder / "store" / "m").iterdir())) == 1
    assert wait_for_end(failing) == "Failed"
    assert failing.failure is not None
    assert (failing.failure.cause, failing.failure.exit_code) == ("exception", 3)
    assert {path.name: path.read_text() for path in (lab.folder / "store" / "m").iterdir()} == {"a": "a", "b": "b"}
    slurm.hosts.run(first, ["umount", "/etc/slurm"])


# --- tests with Slurm's accounting


@pytest.fixture(scope="module")
def accounts() -> Iterator[SlurmLab]:
    need(accounting=True)
    with slurm_lab.cluster("pbd", 1, accounting=True, settings="MinJobAge=2\n") as lab:
        yield lab


@pytest.mark.proof
def test_user_who_canceled_a_slurm_job_is_read_from_sacct_after_squeue_has_dropped_the_job(
    accounts: SlurmLab, lab: Lab, monkeypatch: pytest.MonkeyPatch
):
    for name, value in accounts.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote_status, "_GRACE_S", GRACE_S)
    add(lab, "later", options=["--begin=now+1hour"])
    run = submit(lab, "pass", "later")
    assert run.record().status == "Queued"
    accounts.run("scancel", job_id(run))
    wait_until(lambda: job_id(run) not in accounts.states(), "squeue has forgotten it", 60)
    assert wait_for_end(run) == "Canceled"
    assert run.record().canceled_by == "root"


@pytest.mark.promise("same-lines-train-ssh-hosts")
def test_azure_sdk_driver_trains_on_a_slurm_cluster(slurm: SlurmLab, lab: Lab) -> None:
    check_driver(lab, "cluster")
