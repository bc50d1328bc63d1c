"""Output of clusters of each version: `recorded/README.md`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.targets.slurm.states import (
    JobState,
    counts,
    expand,
    gpu_count,
    parse_job,
    parse_sacct,
    parse_sinfo,
    parse_squeue,
)
from tests.targets.slurm.recordings import VERSIONS, recorded

ODD = "a name | with 'bars\" & ünï, [1-2]"


def by_name(jobs: list[JobState]) -> dict[str, JobState]:
    return {job.name: job for job in jobs}


@pytest.mark.parametrize("version", VERSIONS)
def test_job_states_and_nodes_are_parsed_from_squeue_output_of_each_slurm_version(version: str):
    jobs = by_name(parse_squeue(recorded(f"squeue-{version}.txt")))
    assert {
        short: (jobs[f"paceline-{short}"].state, jobs[f"paceline-{short}"].nodes)
        for short in (
            "done",
            "failed",
            "cancel-root",
            "cancel-pending",
            "timeout",
            "lost",
            "running",
            "held",
        )
    } == {
        "done": ("COMPLETED", "n1"),
        "failed": ("FAILED", "n1"),
        "cancel-root": ("CANCELLED", "n1"),
        "cancel-pending": ("CANCELLED", ""),
        "timeout": ("TIMEOUT", "n1"),
        "lost": ("NODE_FAIL", "n2"),
        "running": ("RUNNING", "n[1-2]"),
        "held": ("PENDING", ""),
    }
    assert {
        short: jobs[f"paceline-{short}"].reason
        for short in (
            "running",
            "held",
            "heldadmin",
            "begin",
            "dependency",
            "never",
            "requeuehold",
            "launch-failed",
            "partition_nodes",
            "partition_time",
            "partition_down",
            "qos_one2",
            "qos_tiny",
            "acct_jobs2",
            "reservation",
        )
    } == {
        "running": "",
        "held": "JobHeldUser",
        "heldadmin": "JobHeldAdmin",
        "begin": "BeginTime",
        "dependency": "Dependency",
        "never": "DependencyNeverSatisfied",
        "requeuehold": "job requeued in held state",
        "launch-failed": "launch failed requeued held",
        "partition_nodes": "PartitionNodeLimit",
        "partition_time": "PartitionTimeLimit",
        "partition_down": "PartitionDown",
        "qos_one2": "QOSMaxJobsPerUserLimit",
        "qos_tiny": "QOSMaxNodePerJobLimit",
        "acct_jobs2": "AssocMaxJobsLimit",
        "reservation": "Reservation",
    }
    assert jobs["paceline-drained"].reason.startswith("ReqNodeNotAvail, ")
    assert jobs[ODD].state == "FAILED"


@pytest.mark.parametrize("version", VERSIONS)
def test_completing_slurm_job_is_not_reported_as_ended(version: str):
    jobs = by_name(parse_squeue(recorded(f"squeue-ending-{version}.txt")))
    assert jobs["paceline-ending"].state == "COMPLETING"
    assert jobs["paceline-lost"].state == "NODE_FAIL"


@pytest.mark.parametrize("version", VERSIONS)
def test_job_states_exit_codes_and_canceling_users_are_parsed_from_sacct_output_of_each_version(version: str):
    jobs = by_name(parse_sacct(recorded(f"sacct-{version}.txt")))
    by = {short: jobs[f"paceline-{short}"].by for short in ("cancel-root", "cancel-own", "failed")}
    assert by == {"cancel-root": "0", "cancel-own": "1001", "failed": None}
    ends = {short: jobs[f"paceline-{short}"] for short in ("failed", "missing", "signaled", "launch")}
    assert {short: (job.state, job.exit_code, job.signal) for short, job in ends.items()} == {
        "failed": ("FAILED", 7, 0),
        "missing": ("FAILED", 127, 0),
        "signaled": ("FAILED", 0, 9),
        "launch": ("FAILED", 1, 0) if version == "20.11" else ("FAILED", 0, 53),
    }
    assert (jobs["paceline-timeout"].state, jobs["paceline-timeout"].nodes) == ("TIMEOUT", "n1")
    assert (jobs["paceline-lost"].state, jobs["paceline-lost"].nodes) == ("NODE_FAIL", "n2")
    assert jobs["paceline-cancel-pending"].nodes == ""
    # The quality of service of the first job was deleted. The second job ran several times, and has its last state.
    assert jobs["paceline-invalid-qos"].state == jobs["paceline-launch-failed"].state == "PENDING"
    # sacct writes a quote as a backquote.
    assert jobs[ODD.replace('"', "`")].exit_code == 3


def test_signal_of_an_out_of_memory_job_is_read_from_sacct():
    (job,) = parse_sacct("7|OUT_OF_MEMORY|0:125|OutOfMemory|n1|x\n")
    assert (job.state, job.exit_code, job.signal, job.reason) == ("OUT_OF_MEMORY", 0, 125, "OutOfMemory")


def test_last_sacct_line_of_a_requeued_job_is_used():
    jobs = parse_sacct("7|PREEMPTED|0:0|None|n1|x\n7|TIMEOUT|0:0|None|n2|x\n")
    assert [(job.state, job.nodes) for job in jobs] == [("TIMEOUT", "n2")]


@pytest.mark.parametrize("version", VERSIONS)
def test_sinfo_output_lists_each_node_once(version: str):
    nodes = parse_sinfo(recorded(f"sinfo-{version}.txt"))
    assert sorted(
        (node.name, node.cores, node.used_cores, node.gpus, node.used_gpus, node.reason) for node in nodes
    ) == [
        ("n1", 8, 8, 2, 1, ""),
        ("n2", 8, 2, 2, 1, ""),
        ("n3", 8, 0, 2, 0, "bad fan"),
    ]
    states = {node.name: node.state for node in nodes}
    assert (states["n1"], states["n2"]) == ("allocated", "mixed")
    assert "drain" in states["n3"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_node_that_does_not_answer_is_down(version: str):
    states = {node.name: node.state for node in parse_sinfo(recorded(f"sinfo-down-{version}.txt"))}
    assert (states["n2"], states["n3"]) == ("down*", "idle")


@pytest.mark.parametrize("version", VERSIONS)
def test_scontrol_show_job_is_parsed_for_each_slurm_version(version: str):
    jobs = [parse_job(line) for line in recorded(f"scontrol-{version}.txt").splitlines()]
    old = version == "20.11"
    assert [(job.name, job.state, job.exit_code, job.signal, job.nodes) for job in jobs if job is not None] == [
        ("paceline-failed", "FAILED", 7, 0, "n1"),
        ("paceline-missing", "FAILED", 127, 0, "n1"),
        (ODD, "FAILED", 3, 0, "n1"),
        ("paceline-launch", "FAILED", 1 if old else 0, 0 if old else 53, "n1"),
        ("paceline-running", "RUNNING", 0, 0, "n[1-2]"),
    ]


def test_scontrol_show_job_output_is_parsed():
    text = (
        "JobId=15 JobName=paceline-lab_1_2 UserId=root(0) JobState=FAILED Reason=NonZeroExitCode Dependency=(null) "
        "Requeue=0 Restarts=1 BatchFlag=1 Reboot=0 ExitCode=127:0 ReqNodeList=(null) ExcNodeList=(null) NodeList=pb[0-1] "
        "BatchHost=pb0 Comment=JobState=RUNNING ExitCode=0:0 \n"
    )
    assert parse_job(text) == JobState(
        job_id="15",
        state="FAILED",
        reason="NonZeroExitCode",
        nodes="pb[0-1]",
        name="paceline-lab_1_2",
        exit_code=127,
        signal=0,
    )
    assert parse_job("slurm_load_jobs error: Invalid job id specified\n") is None


@pytest.mark.parametrize("text", ["", "\n", "garbage", "{}"])
def test_empty_or_unreadable_slurm_output_is_parsed_as_an_empty_list(text: str):
    assert parse_squeue(text) == parse_sacct(text) == parse_sinfo(text) == []


def test_job_state_round_trips_through_json():
    job = JobState(job_id="1", state="FAILED", exit_code=7, by="bob")
    assert JobState.from_json(job.to_json()) == job


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("a[1-2]b[3-4]", ["a1b3", "a1b4", "a2b3", "a2b4"]),
        ("rack1-n[098-101]", ["rack1-n098", "rack1-n099", "rack1-n100", "rack1-n101"]),
        ("", []),
    ],
)
def test_node_list_is_expanded_in_order(text: str, names: list[str]):
    assert expand(text) == names


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=20), st.integers(1, 5))
def test_node_list_with_leading_zeros_is_expanded_to_the_same_names_in_order(numbers: list[int], width: int):
    names = [f"n{str(number).zfill(width)}" for number in numbers]
    assert expand("n[" + ",".join(name[1:] for name in names) + "]") == names


def test_core_counts_are_expanded_per_node():
    assert counts("4(x2),2") == [4, 4, 2]
    assert counts("") == []


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("gpu:a100:4(S:0-1),shard:8", 4),
        ("gpu:2(IDX:0-1)", 2),
        ("(null)", 0),
        ("", 0),
        ("gpu:a:1,gpu:b:3", 4),
        ("gpu:0(IDX:N/A)", 0),
    ],
)
def test_gpus_are_counted_among_generic_resources(gres: str, count: int):
    assert gpu_count(gres) == count
