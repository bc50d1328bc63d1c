from __future__ import annotations

import dataclasses

import pytest

from paceline.runs.failure import FailureReport
from paceline.supervisor.hints import with_hints
from tests.helpers import make_job

GPUS = {"use_gpu": True, "framework": "pytorch"}


def report(exception: str | None) -> FailureReport:
    return FailureReport(cause="exception", message="Rank 1 failed.", exception=exception)


def test_a_failure_that_speaks_for_itself_is_left_alone():
    told = report("ValueError: bad batch")
    assert with_hints(told, make_job()) is told


@pytest.mark.parametrize(
    ("visibility", "use_gpu", "is_told"), [("worker", True, True), ("node", True, False), ("worker", False, False)]
)
def test_a_script_that_takes_the_gpu_of_its_local_rank_is_told_of_gpu_visibility(visibility, use_gpu, is_told):
    job = make_job(use_gpu=use_gpu, gpu_visibility=visibility)
    told = with_hints(report("RuntimeError: CUDA error: invalid device ordinal"), job)
    assert ("gpu_visibility='node'" in told.message) == is_told


def test_fit_under_keras_3_is_told_what_works():
    told = with_hints(report("ValueError: Attempt to convert a value (PerReplica:{"), make_job())
    assert told.message.startswith("Rank 1 failed. Under tf.distribute's strategies")
    assert "TF_USE_LEGACY_KERAS" in told.message


def test_what_the_ranks_waited_for_comes_last():
    told = with_hints(report(None), make_job(), "At its end the ranks were stalled: x.")
    assert told.message == "Rank 1 failed. At its end the ranks were stalled: x."


def test_of_a_script_that_can_not_be_loaded_is_said_why_no_attempt_follows_if_one_was_asked_for():
    told = report("SyntaxError: invalid syntax")
    asked = make_job(max_restarts=1, restart_on_exception=True)
    assert with_hints(told, asked).message.endswith("so none follows. Mend the source and submit it again.")
    assert with_hints(told, make_job(max_restarts=1)) is told
    assert with_hints(dataclasses.replace(told, attempt=2), asked).message == told.message


@pytest.mark.parametrize(
    ("values", "is_told"),
    [
        ({"distributed_backend": "mpi"}, True),
        ({"distributed_backend": "mpi", "environment_variables": {"OMPI_MCA_btl": "self,vader,tcp"}}, False),
        ({"distributed_backend": "gloo"}, False),
    ],
)
def test_a_script_that_starts_processes_by_mpi_is_told_what_it_needs(values, is_told):
    told = with_hints(report("mpi4py.MPI.Exception: MPI_ERR_INTERN: internal error"), make_job(**values))
    assert ("OMPI_MCA_btl=self,vader,tcp" in told.message) == is_told
