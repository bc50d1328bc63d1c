"""Several runs on one machine: they share its cores and wait for each other in order of submission."""

from __future__ import annotations

import os
from typing import Any

import pytest

import paceline as pl
from paceline.runs import states
from tests.engines.lab import Lab, wait_for_status
from tests.helpers import wait_until

CORES = len(os.sched_getaffinity(0))
ALL_CORES: dict[str, Any] = {"process_count_per_node": CORES, "distributed_backend": "gloo"}


@pytest.mark.promise("runs-share-cores-gpus-order")
def test_runs_start_in_order_of_submission(lab: Lab) -> None:
    gate = lab.folder / "gate"
    holder = lab.submit(f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n", **ALL_CORES)
    wait_for_status(holder, states.RUNNING)
    runs = [lab.submit("print('ran')\n", **(ALL_CORES if number % 2 else {})) for number in range(5)]
    for run in runs:
        wait_for_status(run, states.QUEUED)
    # The last run needs only one core, but it waits behind all earlier runs.
    wait_until(lambda: (runs[4].record().waiting_for or "").startswith("waits for 4 runs"), "the last run waits", 60)
    gate.touch()
    for run in runs:
        run.wait_for_completion()

    starts = [run.record().started_utc or "" for run in runs]
    assert starts == sorted(starts)
    ends = [run.record().ended_utc or "" for run in [holder, *runs]]
    # Runs 1 and 3 need all cores, so they start only after all earlier runs have ended.
    assert all(ends[number] <= starts[number] for number in (1, 3))


@pytest.mark.promise("runs-share-cores-gpus-order")
def test_concurrent_runs_never_exceed_the_core_count(lab: Lab) -> None:
    script = """
        import os, time
        here = os.path.join(os.environ["PACELINE_WORKSPACE"], "running")
        os.makedirs(here, exist_ok=True)
        mine = os.path.join(here, os.environ["PACELINE_RUN_ID"])
        open(mine, "w").close()
        print(len(os.listdir(here)))
        time.sleep(0.05)
        os.unlink(mine)
    """
    runs = [lab.submit(script) for _ in range(3 * CORES)]
    for run in runs:
        run.wait_for_completion()

    at_once = [int(run.folder.live_log(0).read_text()) for run in runs]
    assert max(at_once) <= CORES


@pytest.mark.promise("killed-run-gives-everything-back")
def test_queued_run_starts_after_the_supervisor_of_a_running_run_is_killed(lab: Lab) -> None:
    holder = lab.submit("import time\ntime.sleep(600)\n", **ALL_CORES)
    wait_for_status(holder, states.RUNNING)
    next_one = lab.submit("print('ran')\n")
    wait_for_status(next_one, states.QUEUED)
    os.kill(holder.record().owner["pid"], 9)
    next_one.wait_for_completion()

    wait_until(lambda: holder.record().is_terminal, "the killed run has failed")
    assert holder.failure is not None
    assert (holder.status, holder.failure.cause) == (states.FAILED, "supervisor")
    assert "while the run was Running" in holder.failure.message


@pytest.mark.parametrize("each", [2, pytest.param(10, marks=pytest.mark.proof)])
def test_submissions_at_once_from_several_processes_all_complete(lab: Lab, each: int) -> None:
    lab.write("import sys\nprint('number', sys.argv[1])\n")
    code = """
        for number in map(int, sys.argv[1:]):
            print(experiment.submit(estimator, script_params={str(number): ""}).id)
    """
    programs = [lab.submit_elsewhere(code, *range(first, first + each)) for first in range(0, 4 * each, each)]
    ids = [run_id for program in programs for run_id in program.communicate(timeout=300)[0].split()]

    runs = [pl.Run(lab.experiment, run_id) for run_id in ids]
    for run in runs:
        run.wait_for_completion()
    texts = [run.folder.live_log(0).read_text() for run in runs]
    assert texts == [f"number {number}\n" for number in range(4 * each)]
    assert len(set(ids)) == 4 * each
    # All runs share one copy of the source folder.
    assert len([path for path in (lab.workspace_dir / "snapshots").iterdir() if path.name[0] != "."]) == 1
