import pytest

from paceline.runs.failure import CAUSES
from paceline.runs.remote_status import GONE, QUEUED, RUNNING
from paceline.targets.slurm.reasons import has_ended, look_of, waits_for
from paceline.targets.slurm.states import JobState, parse_squeue
from tests.targets.slurm.recordings import VERSIONS, recorded


def job(state: str, **values: object) -> JobState:
    return JobState(**{"job_id": "7", "state": state, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "jobs with a higher priority are ahead (Priority)"),
        ("Resources", "next in line"),
        ("QOSMaxJobsPerUserLimit", "you have reached the quality of service's limit on jobs"),
        ("MaxGRESPerAccount", "your account has reached the quality of service's limit on GPUs"),
        ("AssocGrpCPUMinutesLimit", "all jobs of the account together have reached its limit on core minutes"),
        ("AssocGrpCPURunMinutesLimit", "all jobs of the account together have reached its limit on core minutes"),
        ("AssocMaxJobsLimit", "you have reached the account's limit on jobs"),
        (
            "ReqNodeNotAvail, UnavailableNodes:gpu[01-04]",
            "nodes that it needs are down, drained or reserved (ReqNodeNotAvail, Un",
        ),
        ("launch failed requeued held", "`scontrol release 7` lets it try again"),
        ("launch_failed_requeued_held", "`scontrol release 7` lets it try again"),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "nodes that it needs are down, drained or reserved (Nodes required",
        ),
        ("SomethingOf2031", "waits (SomethingOf2031)"),
        ("", "not looked at by the scheduler yet"),
    ],
)
def test_why_a_job_waits_is_said_in_words(reason: str, words: str):
    look = look_of(job("PENDING", reason=reason))
    assert look.state == QUEUED
    assert words in look.message
    assert "can't start" not in look.message


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("BadConstraints", "no node has what it asks for"),
        ("InvalidQOS", "see the setting qos"),
        ("InvalidAccount", "see the setting account"),
        ("PartitionNodeLimit", "see node_count and partition"),
        ("PartitionTimeLimit", "see the setting time"),
        (
            "QOSMaxNodePerJobLimit",
            "it asks for more nodes than the quality of service allows to one job; see node_count",
        ),
        (
            "QOSMaxWallDurationPerJobLimit",
            "more time than the quality of service allows to one job; see the setting time",
        ),
        ("AssocMaxGRESPerJob", "it asks for more GPUs than the account allows to one job"),
        ("AssocMaxMemPerNode", "more memory than the account allows to one node; see the setting memory"),
        ("QOSMinCpuNotSatisfied", "the quality of service wants a job to ask for more cores"),
    ],
)
def test_a_job_that_can_never_start_is_said_to(reason: str, words: str):
    said = waits_for(job("PENDING", reason=reason))
    assert said.startswith("Slurm job 7: it can't start as it is: ")
    assert said.endswith(f" ({reason})")
    assert words in said


@pytest.mark.parametrize("version", VERSIONS)
def test_whatever_a_cluster_gave_as_a_reason_is_said_in_words(version: str):
    waiting = [found for found in parse_squeue(recorded(f"squeue-{version}.txt")) if found.state == "PENDING"]
    assert len({found.reason for found in waiting}) > 10
    for found in waiting:
        assert look_of(found).state == QUEUED
        assert " waits (" not in waits_for(found), found


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
    assert look_of(job("CANCELLED", by="alice")).by == "alice"
    assert "by alice" in look_of(job("CANCELLED", by="alice")).message
    assert look_of(job("CANCELLED")).by is None


def test_a_node_that_does_not_see_the_run_is_told_from_other_failures():
    failed = job("FAILED", exit_code=0, signal=53, nodes="n1")
    assert "the node can't open files in '/home/me/runs/x'" in look_of(failed, run_dir="/home/me/runs/x").message
    # All that 20.11 says of the same.
    older = look_of(job("FAILED", exit_code=1, signal=0, nodes="n1"), run_dir="/home/me/runs/x")
    assert "the node can't open files in '/home/me/runs/x'" in older.message
    missing = look_of(job("FAILED", exit_code=127, nodes="n1"), python="/env/bin/python").message
    assert (
        missing
        == "Slurm job 7 could not run '/env/bin/python' on n1. Set python on the target to one that its nodes have."
    )
