"""A tensor that some ranks wait for and others never submit: the run's error names it and the missing ranks."""

from __future__ import annotations

import pytest

from tests.engines.lab import Lab, wait_for_end, wait_for_file

WAIT = """
    import os, time
    import numpy
    from paceline import collectives

    engine = collectives.start()
    if engine.rank == 0:
        engine.allreduce("gradient.3", numpy.ones(1)).wait()
    while not os.path.exists(os.environ["PACELINE_STALL_FILE"]):
        time.sleep(0.05)
"""
WORLD = {
    "distributed_backend": "mpi",
    "process_count_per_node": 2,
    "environment_variables": {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.3"},
}
TOLD = "At its end the ranks were stalled: allreduce 'gradient.3' has waited for rank 1 for "


@pytest.fixture(autouse=True)
def wheel(any_mpirun: str) -> None:
    """With the Open MPI of the wheel, which mpi4py is built for."""


@pytest.mark.promise("stall-names-ranks-missing")
def test_failure_report_names_the_stalled_collective(lab: Lab) -> None:
    run = lab.finish(WAIT + "    raise ValueError('mine')\n", **WORLD)
    assert run.failure is not None
    assert run.failure.rank == 1
    assert "ValueError: mine" in run.failure.message
    assert TOLD in run.failure.message


def test_driver_log_of_a_canceled_run_names_the_stalled_collective(lab: Lab) -> None:
    run = lab.submit(WAIT + "    time.sleep(600)\n", **WORLD)
    wait_for_file(run.folder.stalled(1))
    run.cancel()
    assert wait_for_end(run) == "Canceled"
    assert f"canceled. {TOLD}" in run.folder.driver_log.read_text()


@pytest.mark.proof
def test_time_limit_report_names_the_stalled_collective(lab: Lab) -> None:
    run = lab.finish(WAIT + "    time.sleep(600)\n", max_run_duration_seconds=6, **WORLD)
    assert run.failure is not None
    assert run.failure.cause == "time_limit"
    assert TOLD in run.failure.message


@pytest.mark.proof
def test_failure_report_omits_a_collective_stall_that_was_resolved(lab: Lab) -> None:
    late = WAIT + (
        "    if engine.rank == 1:\n"
        "        engine.allreduce('gradient.3', numpy.ones(1)).wait()\n"
        "        while 'true' not in open(os.environ['PACELINE_STALL_FILE']).read(): time.sleep(0.05)\n"
        "        raise ValueError('mine')\n"
        "    time.sleep(600)\n"
    )
    run = lab.finish(late, **WORLD)
    assert run.failure is not None
    assert "stalled" not in run.failure.message
