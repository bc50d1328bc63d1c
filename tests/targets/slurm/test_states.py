"""What clusters of each version have printed: `recorded/README.md`."""

import dataclasses

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
from tests.targets.slurm.recordings import JSON, PLAIN, WRITTEN, recorded, written

ODD = "a name | with 'bars\" & ünï, [1-2]"
SQUEUE = [*(f"squeue-{version}.txt" for version in PLAIN), *(f"squeue-{version}.json" for version in JSON)]
#: sacct has a backquote in the place of a quote.
SACCT = [f"sacct-{version}.txt" for version in PLAIN] + [
    f"sacct-{version}.json" for version in JSON if version != "22.05"
]


def by_name(jobs: list[JobState]) -> dict[str, JobState]:
    return {job.name: job for job in jobs}


@pytest.mark.parametrize("name", SQUEUE)
def test_squeue(name: str):
    jobs = by_name(parse_squeue(recorded(name)))
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


@pytest.mark.parametrize(("version", "cluster"), JSON.items())
def test_squeue_says_the_same_as_json(version: str, cluster: str):
    # Numbers of an array's tasks, and exit codes, are in JSON alone.
    found, plain = (
        {
            job.job_id: dataclasses.replace(job, exit_code=None, signal=None)
            for job in parse_squeue(recorded(name))
            if "array" not in job.name
        }
        for name in (f"squeue-{version}.json", f"squeue-{cluster}.txt")
    )
    assert found == plain
    jobs = by_name(parse_squeue(recorded(f"squeue-{version}.json")))
    assert jobs["paceline-failed"].exit_code == 7
    assert jobs["paceline-missing"].exit_code == 127
    assert jobs["paceline-signaled"].signal == 9
    assert jobs["paceline-launch"].signal == 53


@pytest.mark.parametrize(
    "name",
    [*(f"squeue-ending-{version}.txt" for version in PLAIN), *(f"squeue-ending-{version}.json" for version in JSON)],
)
def test_a_job_that_is_still_ending_is_not_over_yet(name: str):
    jobs = by_name(parse_squeue(recorded(name)))
    assert jobs["paceline-ending"].state == "COMPLETING"
    assert jobs["paceline-lost"].state == "NODE_FAIL"


@pytest.mark.parametrize("name", SACCT)
def test_sacct(name: str):
    jobs = by_name(parse_sacct(recorded(name)))
    old, is_json = "20.11" in name, name.endswith(".json")
    by = {short: jobs[f"paceline-{short}"].by for short in ("cancel-root", "cancel-own", "failed")}
    alone = {"cancel-root": "root", "cancel-own": "alice"} if is_json else {"cancel-root": "0", "cancel-own": "1001"}
    assert by == {**alone, "failed": None}
    assert (jobs["paceline-failed"].state, jobs["paceline-failed"].exit_code) == ("FAILED", 7)
    assert jobs["paceline-signaled"].signal == 9
    assert (jobs["paceline-launch"].exit_code, jobs["paceline-launch"].signal or 0) == (
        (1, 0) if old else (None if is_json else 0, 53)
    )
    assert (jobs["paceline-timeout"].state, jobs["paceline-timeout"].nodes) == ("TIMEOUT", "n1")
    assert (jobs["paceline-lost"].state, jobs["paceline-lost"].nodes) == ("NODE_FAIL", "n2")
    assert jobs["paceline-cancel-pending"].nodes == ""
    # sacct writes a quote as a backquote.
    assert jobs[ODD.replace('"', "`")].exit_code == 3


def test_what_the_json_of_sacct_22_05_leaves_out_is_not_known():
    text = recorded("sacct-22.05.json")
    jobs = by_name(parse_sacct(text))
    assert jobs["paceline-cancel-own"].by == "alice"
    assert jobs["paceline-launch"].signal == 53
    # "return_code": 0, where the plain form has 7:0.
    assert (jobs["paceline-failed"].state, jobs["paceline-failed"].exit_code) == ("FAILED", None)
    # A job whose quality of service was deleted has no state, and those after it are missing: so the plain form is asked
    # for, see test_query.
    assert (jobs["paceline-invalid-qos"].state, "paceline-ending" in jobs) == ("", False)
    # Each of the times that a job was in the queue, where other versions have the last alone.
    assert text.count("paceline-launch-failed") == 2
    assert jobs["paceline-launch-failed"].state == "PENDING"


def test_of_a_job_that_ran_several_times_sacct_s_last_word_counts():
    jobs = parse_sacct("7|PREEMPTED|0:0|None|n1|x\n7|TIMEOUT|0:0|None|n2|x\n")
    assert [(job.state, job.nodes) for job in jobs] == [("TIMEOUT", "n2")]


@pytest.mark.parametrize("name", [*(f"sinfo-{it}.txt" for it in PLAIN), *(f"sinfo-{it}.json" for it in JSON)])
def test_sinfo_tells_each_node_once(name: str):
    nodes = parse_sinfo(recorded(name))
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


@pytest.mark.parametrize("name", [*(f"sinfo-down-{it}.txt" for it in PLAIN), *(f"sinfo-down-{it}.json" for it in JSON)])
def test_a_node_that_does_not_answer_is_down(name: str):
    states = {node.name: node.state for node in parse_sinfo(recorded(name))}
    assert states["n2"] in ("down*", "down+not_responding")
    assert states["n3"] == "idle"


@pytest.mark.parametrize("version", WRITTEN)
def test_json_of_versions_that_were_not_had(version: str):
    jobs = {job.job_id: job for job in parse_squeue(written(f"squeue-{version}.json"))}
    assert (jobs["4211"].state, jobs["4211"].reason) == ("PENDING", "Priority")
    assert (jobs["4209"].state, jobs["4209"].reason, jobs["4209"].nodes) == ("RUNNING", "", "gpu[05-06]")
    assert (jobs["4187"].state, jobs["4187"].exit_code) == ("FAILED", 7)
    ends = {job.job_id: job for job in parse_sacct(written(f"sacct-{version}.json"))}
    assert (ends["4188"].state, ends["4188"].by) == ("CANCELLED", "bob")
    assert (ends["4184"].state, ends["4184"].signal) == ("OUT_OF_MEMORY", 9)
    nodes = parse_sinfo(written(f"sinfo-{version}.json"))
    assert [(node.name, node.cores, node.used_cores, node.gpus, node.used_gpus) for node in nodes] == [
        ("gpu01", 64, 16, 4, 2),
        ("gpu02", 64, 0, 4, 0),
    ]


@pytest.mark.parametrize("version", PLAIN)
def test_scontrol_show_job_of_each_version(version: str):
    jobs = [parse_job(line) for line in recorded(f"scontrol-{version}.txt").splitlines()]
    old = version == "20.11"
    assert [(job.name, job.state, job.exit_code, job.signal, job.nodes) for job in jobs if job is not None] == [
        ("paceline-failed", "FAILED", 7, 0, "n1"),
        ("paceline-missing", "FAILED", 127, 0, "n1"),
        (ODD, "FAILED", 3, 0, "n1"),
        ("paceline-launch", "FAILED", 1 if old else 0, 0 if old else 53, "n1"),
        ("paceline-running", "RUNNING", 0, 0, "n[1-2]"),
    ]


def test_scontrol_show_job():
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


@pytest.mark.parametrize("text", ["", "\n", "garbage", "{}", '{"jobs": null}', '{"sinfo": 3}'])
def test_an_answer_without_jobs_has_none(text: str):
    assert parse_squeue(text) == parse_sacct(text) == parse_sinfo(text) == []


def test_states_go_to_json_and_back():
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
def test_lists_of_nodes_are_written_out_in_order(text: str, names: list[str]):
    assert expand(text) == names


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=20), st.integers(1, 5))
def test_a_list_of_numbers_with_leading_zeros_comes_back(numbers: list[int], width: int):
    names = [f"n{str(number).zfill(width)}" for number in numbers]
    assert expand("n[" + ",".join(name[1:] for name in names) + "]") == names


def test_counts_of_cores_are_one_for_each_node():
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
