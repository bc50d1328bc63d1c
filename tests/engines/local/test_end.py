"""Ends that come from outside: cancel, the time limit; the grace that workers get, and that nothing outlives a run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.runs import states
from paceline.system import processes
from tests.engines.lab import DAEMON, Lab, exit_codes, is_alive, log_text, wait_for_end, wait_for_file, wait_for_status
from tests.helpers import wait_until

SLEEP = "import time\ntime.sleep(600)\n"
IGNORE_SIGTERM = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"outputs/deaf_{os.environ['PACELINE_RANK']}", "w").write("deaf")
time.sleep(600)
"""


def test_running_run_can_be_canceled(lab: Lab, way: dict[str, Any]) -> None:
    run = lab.submit("open('outputs/there', 'a').write('x')\n" + SLEEP, **way)
    wait_for_status(run, states.RUNNING)
    wait_for_file(run.folder.outputs / "there")
    run.cancel()

    assert run.status in (states.CANCEL_REQUESTED, states.FINALIZING, states.CANCELED)
    assert wait_for_end(run) == states.CANCELED
    record = run.record()
    assert (record.exit_code, record.failure) == (143, None)
    assert record.canceled_by
    assert set(exit_codes(run).values()) == {143}
    assert record.attempts[0].cause == "cancel"


def test_queued_run_can_be_canceled(lab: Lab) -> None:
    cores = len(os.sched_getaffinity(0))
    holder = lab.submit(SLEEP, process_count_per_node=cores, distributed_backend="gloo")
    wait_for_status(holder, states.RUNNING)
    waiter = lab.submit("open('outputs/ran', 'w')\n")
    wait_for_status(waiter, states.QUEUED)
    wait_until(lambda: waiter.record().waiting_for, "the queued run says what it waits for")
    assert waiter.record().waiting_for == f"waits for 1 run ({holder.id})"

    waiter.cancel()
    assert wait_for_end(waiter) == states.CANCELED
    assert waiter.record().attempts == ()
    assert waiter.get_file_names() == ["logs/driver.log"]
    assert holder.status == states.RUNNING
    holder.cancel()
    assert wait_for_end(holder) == states.CANCELED


def test_canceling_a_run_that_has_ended_changes_nothing(lab: Lab) -> None:
    run = lab.complete("print('done')\n")
    before = run.folder.state.read_bytes()
    run.cancel()

    assert run.folder.state.read_bytes() == before
    assert run.status == states.COMPLETED


@pytest.mark.promise("cancel-gives-workers-their-grace")
def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace_period(lab: Lab, parent: dict[str, Any]) -> None:
    run = lab.submit(IGNORE_SIGTERM, **parent | {"grace_period_seconds": 0.3})
    for rank in range(len(parent) or 1):
        wait_for_file(run.folder.outputs / f"deaf_{rank}")
    run.cancel()

    assert wait_for_end(run) == states.CANCELED
    assert "did not end within 0.3 s of SIGTERM: killed" in run.folder.driver_log.read_text()


@pytest.mark.promise("cancel-gives-workers-their-grace")
def test_worker_can_save_a_checkpoint_during_the_grace_period_after_a_cancel(lab: Lab, parent: dict[str, Any]) -> None:
    # Only the worker gets the signal, so its children, such as data loaders, still run in the grace period.
    script = """
        import os, signal, subprocess, sys, time
        loader = subprocess.Popen(["/bin/sleep", "600"])
        def save(number, frame):
            time.sleep(0.3)
            assert loader.poll() is None
            with open(os.path.join(os.environ["PACELINE_CHECKPOINT_DIR"], f"rank_{os.environ['PACELINE_RANK']}"), "w") as file:
                file.write("all of it")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        open(f"outputs/ready_{os.environ['PACELINE_RANK']}", "w").write("x")
        while True:
            time.sleep(600)
    """
    run = lab.submit(script, **parent)
    ranks = range(len(parent) or 1)
    for rank in ranks:
        wait_for_file(run.folder.outputs / f"ready_{rank}")
    run.cancel()

    assert wait_for_end(run) == states.CANCELED
    saved = {path.name: path.read_text() for path in run.folder.checkpoints.iterdir()}
    assert saved == {f"rank_{rank}": "all of it" for rank in ranks}


def test_other_ranks_get_a_grace_period_before_they_are_ended_when_one_rank_fails(lab: Lab) -> None:
    script = """
        import os, signal, sys, time
        if os.environ["PACELINE_RANK"] == "1":
            while not os.path.exists("outputs/ready"):
                time.sleep(0.01)
            sys.exit(5)
        def save(number, frame):
            time.sleep(0.3)
            print("saved")
            sys.exit(9)
        signal.signal(signal.SIGTERM, save)
        open("outputs/ready", "w")
        while True:
            time.sleep(600)
    """
    run = lab.finish(script, process_count_per_node=2, distributed_backend="gloo")

    assert log_text(run, 0) == "saved\n"
    assert run.failure is not None
    assert (run.failure.rank, run.failure.exit_code) == (1, 5)
    assert run.failure.victims == ((0, "was ended by Paceline because of it."),)


@pytest.mark.promise("time-limit-ends-run-time")
def test_a_run_past_its_time_limit_has_failed(lab: Lab) -> None:
    run = lab.finish("print('on time')\n" + SLEEP, max_run_duration_seconds=15)

    assert run.status == states.FAILED
    assert run.failure is not None
    assert (run.failure.cause, run.failure.exit_code, run.record().exit_code) == ("time_limit", 124, 124)
    assert "max_run_duration_seconds=15" in run.failure.message
    assert log_text(run) == "on time\n"


@pytest.mark.promise("time-limit-ends-run-time")
def test_time_in_the_queue_is_excluded_from_the_time_limit(lab: Lab) -> None:
    cores = len(os.sched_getaffinity(0))
    holder = lab.submit("import time\ntime.sleep(16)\n", process_count_per_node=cores, distributed_backend="gloo")
    run = lab.complete("print('ran')\n", max_run_duration_seconds=15)

    assert log_text(run) == "ran\n"
    assert wait_for_end(holder) == states.COMPLETED


@pytest.mark.promise("process-run-left-over")
@pytest.mark.parametrize("end", ["success", "failure", "cancel"])
def test_daemon_started_by_a_worker_ends_with_the_run(lab: Lab, parent: dict[str, Any], end: str) -> None:
    ending = {
        "success": "",
        "failure": "if os.environ['PACELINE_RANK'] == '0': raise ValueError\ntime.sleep(600)",
        "cancel": "time.sleep(600)",
    }[end]
    # Each rank waits until all ranks have started a daemon.
    wait = "while len(os.listdir('outputs')) < int(os.environ['PACELINE_WORLD_SIZE']): time.sleep(0.01)\n"
    run = lab.submit(DAEMON + f"import time\ndaemon()\n{wait}{ending}\n", **parent)
    daemons = [run.folder.outputs / f"daemon_{rank}" for rank in range(len(parent) or 1)]
    if end == "cancel":
        # The daemons still run before the cancel, so the end of the run must be what ends them.
        assert all(is_alive(daemon) for daemon in daemons)
        run.cancel()

    expected = {"success": states.COMPLETED, "failure": states.FAILED, "cancel": states.CANCELED}
    assert wait_for_end(run) == expected[end]
    wait_until(lambda: not any(is_alive(daemon) for daemon in daemons), "the daemons have ended")


def test_scratch_folder_is_removed_at_the_end_of_the_run(lab: Lab, mpirun: str) -> None:
    script = """
        import json, os, signal
        with open(os.path.join(os.environ["PACELINE_RUN_DIR"], "state.json")) as file:
            scratch = json.load(file)["scratch_dir"]
        if os.environ["PACELINE_RANK"] == "0":
            open("outputs/scratch", "w").write(scratch)
            open(os.path.join(scratch, "left"), "w").write("by a killed worker")
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    """
    run = lab.finish(script, process_count_per_node=2, distributed_backend="mpi")

    scratch = Path((run.folder.outputs / "scratch").read_text())
    assert scratch.name.startswith("paceline-")
    assert not scratch.exists()
    assert run.record().scratch_dir is None


@pytest.mark.promise("run-goes-program-submitted-ends")
@pytest.mark.parametrize("how", ["it exits", "it is killed with all its group"])
def test_run_continues_after_its_submitting_program_ended(lab: Lab, how: str) -> None:
    lab.write("import os, time\nwhile not os.path.exists('outputs/go'): time.sleep(0.01)\nprint('went on')\n")
    code = "print(experiment.submit(estimator).id, flush=True)\n"
    if how != "it exits":
        code += "import signal; os.killpg(0, signal.SIGKILL)\n"
    program = lab.submit_elsewhere(code, start_new_session=True)
    run_id = program.communicate(timeout=180)[0].strip()
    assert program.returncode == (0 if how == "it exits" else -9)

    run = pl.Run(lab.experiment, run_id)
    wait_for_status(run, states.RUNNING)
    (run.folder.outputs / "go").touch()
    assert wait_for_end(run) == states.COMPLETED
    assert log_text(run) == "went on\n"


def test_sigterm_to_the_supervisor_process_cancels_the_run(lab: Lab) -> None:
    run = lab.submit(SLEEP)
    wait_for_status(run, states.RUNNING)
    os.kill(run.record().owner["pid"], 15)

    assert wait_for_end(run) == states.CANCELED
    assert run.record().canceled_by == "SIGTERM"


def test_interrupting_wait_for_completion_does_not_end_the_run(lab: Lab) -> None:
    lab.write(SLEEP)
    program = lab.submit_elsewhere(
        """
        from paceline.runs import run as module
        wait = module._wait
        module._wait = lambda folder: (print("waits", flush=True), wait(folder))[1]
        run = experiment.submit(estimator)
        print(run.id, flush=True)
        run.wait_for_completion()
        """,
        stderr=-1,
    )
    assert program.stdout is not None
    run = pl.Run(lab.experiment, program.stdout.readline().strip())
    wait_for_status(run, states.RUNNING)
    assert program.stdout.readline() == "waits\n"
    program.send_signal(2)
    _, errors = program.communicate(timeout=180)

    assert f"Run {run.id} goes on. Cancel it with: paceline cancel {run.id}" in errors
    assert run.status == states.RUNNING
    run.cancel()
    assert wait_for_end(run) == states.CANCELED


@pytest.mark.promise("daemon-left-output-ends-next")
def test_daemon_of_a_run_is_killed_when_the_run_is_next_read_after_both_supervisor_processes_died(lab: Lab) -> None:
    # The daemon was started with `env -i setsid`, so only its open output file shows that it belongs to the run.
    run = lab.submit(DAEMON + f"import time\ndaemon()\n{SLEEP}")
    daemon = int(wait_for_file(run.folder.outputs / "daemon_0"))
    supervisor = int(run.record().owner["pid"])
    guardian = int((processes.stat_of(supervisor) or ["", "0"])[1])
    for pid in (guardian, supervisor):
        assert processes.send(pid, signal.SIGKILL)
    assert wait_for_end(run) == states.FAILED
    wait_until(lambda: not processes.is_alive(daemon), "the daemon has ended")
    lab.complete("pass\n")  # the next run frees the cores that the killed run held
