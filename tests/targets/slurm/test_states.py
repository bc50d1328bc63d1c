"""`recorded/` holds what each version prints, cut to a few jobs and fields; that of 22.05 is met for real in
tests/engines/test_slurm.py."""

from pathlib import Path

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

RECORDED = Path(__file__).parent / "recorded"
VERSIONS = ["21.08", "22.05", "23.02", "23.11", "24.05", "25.05"]
NEW = ["23.11", "24.05", "25.05"]


def read(name: str) -> str:
    return (RECORDED / name).read_text()


def test_squeue_plain():
    jobs = parse_squeue(read("squeue-20.11.txt"))
    assert [(job.job_id, job.state, job.reason, job.nodes) for job in jobs] == [
        ("4211", "PENDING", "Priority", ""),
        ("4212", "PENDING", "ReqNodeNotAvail, UnavailableNodes:gpu[01-04]", ""),
        ("4213", "PENDING", "launch failed requeued held", ""),
        ("4209", "RUNNING", "", "gpu[05-06]"),
        ("4190_[3-9]", "PENDING", "JobArrayTaskLimit", ""),
        ("4188", "CANCELLED", "", "gpu07"),
    ]
    assert jobs[0].name == "paceline-lab_1795267590_1a2b3c4d"
    assert jobs[4].name == "sweep | of mine"


@pytest.mark.parametrize("version", VERSIONS)
def test_squeue_json(version: str):
    jobs = {job.job_id: job for job in parse_squeue(read(f"squeue-{version}.json"))}
    assert (jobs["4211"].state, jobs["4211"].reason) == ("PENDING", "Priority")
    assert jobs["4211"].name == "paceline-lab_1795267590_1a2b3c4d"
    assert (jobs["4209"].state, jobs["4209"].reason, jobs["4209"].nodes) == ("RUNNING", "", "gpu[05-06]")
    assert jobs["4188"].state == "CANCELLED"
    assert (jobs["4187"].state, jobs["4187"].exit_code) == ("FAILED", 7)


@pytest.mark.parametrize("version", NEW)
def test_a_job_that_is_still_ending_is_not_over_yet(version: str):
    jobs = {job.job_id: job for job in parse_squeue(read(f"squeue-{version}.json"))}
    assert jobs["4186"].state == "COMPLETING"


def test_sacct_plain_tells_who_has_canceled_and_of_a_requeued_job_the_last():
    jobs = {job.job_id: job for job in parse_sacct(read("sacct-20.11.txt"))}
    assert (jobs["4188"].state, jobs["4188"].by, jobs["4188"].signal) == ("CANCELLED", "0", 15)
    assert (jobs["4187"].state, jobs["4187"].exit_code) == ("FAILED", 7)
    assert (jobs["4185"].state, jobs["4185"].nodes) == ("NODE_FAIL", "gpu[01-02]")
    assert jobs["4184"].state == "OUT_OF_MEMORY"
    assert (jobs["4183"].state, jobs["4183"].nodes) == ("TIMEOUT", "gpu02")
    assert (jobs["4182"].signal, jobs["4182"].name) == (53, "a name | with bars")


@pytest.mark.parametrize("version", VERSIONS)
def test_sacct_json(version: str):
    jobs = {job.job_id: job for job in parse_sacct(read(f"sacct-{version}.json"))}
    assert (jobs["4188"].state, jobs["4188"].by) == ("CANCELLED", "bob")
    assert (jobs["4187"].state, jobs["4187"].exit_code, jobs["4187"].by) == ("FAILED", 7, None)
    assert (jobs["4185"].state, jobs["4185"].nodes) == ("NODE_FAIL", "gpu[01-02]")
    assert (jobs["4184"].state, jobs["4184"].signal) == ("OUT_OF_MEMORY", 9)


@pytest.mark.parametrize("name", ["sinfo-20.11.txt", *(f"sinfo-{version}.json" for version in VERSIONS)])
def test_sinfo_tells_each_node_once(name: str):
    nodes = parse_sinfo(read(name))
    assert [(node.name, node.cores, node.used_cores, node.gpus, node.used_gpus) for node in nodes] == [
        ("gpu01", 64, 16, 4, 2),
        ("gpu02", 64, 0, 4, 0),
    ]
    assert nodes[0].state == "mixed"
    assert "drain" in nodes[1].state
    assert nodes[1].reason == "bad fan"


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
