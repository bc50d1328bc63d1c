import pytest

from paceline.runs.elsewhere import GONE, QUEUED, RUNNING
from paceline.runs.failure import CAUSES
from paceline.targets.slurm.reasons import can_never_start, has_ended, look_of, waits_for
from paceline.targets.slurm.states import JobState


def job(state: str, **values: object) -> JobState:
    return JobState(**{"job_id": "7", "state": state, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "jobs with a higher priority are ahead (Priority)"),
        ("Resources", "next in line"),
        ("QOSMaxJobsPerUserLimit", "as many jobs as your quality of service allows"),
        (
            "ReqNodeNotAvail, UnavailableNodes:gpu[01-04]",
            "nodes that it needs are down, drained or reserved (ReqNodeNotAvail, Un",
        ),
        ("launch failed requeued held", "`scontrol release 7` lets it try again"),
        ("SomethingOf2031", "waits (SomethingOf2031)"),
        ("", "not looked at by the scheduler yet"),
    ],
)
def test_why_a_job_waits_is_said_in_words(reason: str, words: str):
    look = look_of(job("PENDING", reason=reason))
    assert look.state == QUEUED
    assert words in look.message
    assert not can_never_start(job("PENDING", reason=reason))


@pytest.mark.parametrize(
    "reason", ["BadConstraints", "InvalidQOS", "InvalidAccount", "PartitionNodeLimit", "PartitionTimeLimit"]
)
def test_a_job_that_can_never_start_is_said_to(reason: str):
    waiting = job("PENDING", reason=reason)
    assert can_never_start(waiting)
    assert "it can't start as it is: " in waits_for(waiting)
    assert f"({reason})" in waits_for(waiting)


@pytest.mark.parametrize(
    "state", ["RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STAGE_OUT", "SIGNALING", "RESIZING"]
)
def test_a_job_that_holds_nodes_runs(state: str):
    assert look_of(job(state)).state == RUNNING
    assert not has_ended(job(state))


@pytest.mark.parametrize(
    ("state", "cause", "words"),
    [
        ("CANCELLED", "canceled", "was canceled"),
        ("TIMEOUT", "time_limit", "its time limit"),
        ("DEADLINE", "time_limit", "its deadline"),
        ("NODE_FAIL", "node_lost", "A node of Slurm job 7 was lost (n[1-2])"),
        ("BOOT_FAIL", "node_lost", "did not start"),
        ("PREEMPTED", "preempted", "With max_restarts"),
        ("OUT_OF_MEMORY", "memory", "the setting memory"),
        ("FAILED", "engine", "without a word"),
        ("COMPLETED", "engine", "without a word"),
    ],
)
def test_each_end_has_a_cause_that_runs_know(state: str, cause: str, words: str):
    look = look_of(job(state, nodes="n[1-2]"))
    assert (look.state, look.cause) == (GONE, cause)
    assert cause in CAUSES or cause == "canceled"
    assert words in look.message


def test_who_has_canceled_is_named():
    assert look_of(job("CANCELLED", by="0")).by == "root"
    assert look_of(job("CANCELLED", by="alice")).by == "alice"
    assert look_of(job("CANCELLED", by="4000000000")).by == "user 4000000000"
    assert "by root" in look_of(job("CANCELLED", by="0")).message
    assert look_of(job("CANCELLED")).by is None


def test_a_node_that_does_not_see_the_run_is_told_from_other_failures():
    failed = job("FAILED", exit_code=0, signal=53, nodes="n1")
    assert "the node can't open files in '/home/me/runs/x'" in look_of(failed, run_dir="/home/me/runs/x").message
    missing = look_of(job("FAILED", exit_code=127, nodes="n1"), python="/env/bin/python").message
    assert (
        missing
        == "Slurm job 7 could not run '/env/bin/python' on n1. Set python on the target to one that its nodes have."
    )
