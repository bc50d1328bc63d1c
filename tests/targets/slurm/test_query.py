import threading
from pathlib import Path

import pytest

from paceline.runs.failure import CAUSES
from paceline.runs.remote_status import GONE, QUEUED, RUNNING
from paceline.targets.slurm.query import Query, has_ended, look_of, waits_for
from paceline.targets.slurm.scheduler import AwayError, Scheduler
from paceline.targets.slurm.settings import SlurmSettings
from paceline.targets.slurm.states import JobState, parse_squeue
from tests.helpers import run_python, write_program
from tests.targets.slurm.conftest import FakeSlurm
from tests.targets.slurm.recordings import VERSIONS, failure, recorded

NO_ACCOUNTING = "Slurm accounting storage is disabled\n"


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(tmp_path: Path, clock: Clock) -> Query:
    return Query(tmp_path / "engines", Scheduler("c", SlurmSettings.of("c", {})), "1000", clock=clock)


def test_200_queued_runs_need_one_squeue_call(slurm: FakeSlurm, tmp_path: Path, clock: Clock):
    slurm.say("squeue", "".join(f"{number}|PENDING|Priority||paceline-r{number}\n" for number in range(200)))
    for number in range(200):
        job = make(tmp_path, clock).job(str(number), clock.now - 10)
        assert job is not None
        assert job.reason == "Priority"
    assert slurm.calls == ["squeue -h -r -u 1000 -t all -o %i|%T|%r|%N|%j"]
    clock.now += 5.1
    make(tmp_path, clock).job("7", 0)
    assert slurm.count("squeue") == 2


def test_concurrent_queries_share_one_squeue_call(slurm: FakeSlurm, tmp_path: Path, clock: Clock):
    slurm.say("squeue", "1|RUNNING|None|n1|paceline-r\n")
    threads = [threading.Thread(target=lambda: make(tmp_path, clock).job("1", 0)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    code = (
        "import sys\nfrom pathlib import Path\nfrom paceline.targets.slurm.query import Query\n"
        "from paceline.targets.slurm.scheduler import Scheduler\nfrom paceline.targets.slurm.settings import SlurmSettings\n"
        "query = Query(Path(sys.argv[1]), Scheduler('c', SlurmSettings.of('c', {})), '1000', clock=lambda: float(sys.argv[2]))\n"
        "print(query.job('1', 0).state)"
    )
    assert run_python(code, tmp_path / "engines", clock.now + 1).strip() == "RUNNING"
    assert slurm.count("squeue") == 1


def test_squeue_answer_from_before_a_submission_does_not_hide_the_submitted_job(
    slurm: FakeSlurm, tmp_path: Path, clock: Clock
):
    # Regression: with 200 submitted runs, each status query for a run called squeue separately.
    slurm.say("squeue", "")
    slurm.say("sacct", err=NO_ACCOUNTING, code=1)
    query = make(tmp_path, clock)
    assert query.job("1", clock.now - 1) is None
    for number in range(2, 20):
        clock.now += 0.1
        assert query.job(str(number), clock.now) == JobState(job_id=str(number), state="PENDING")
    assert slurm.count("squeue") == 1
    slurm.say("squeue", "2|PENDING|Priority||paceline-r\n")
    clock.now += 5
    job = query.job("2", clock.now - 5)
    assert job is not None
    assert job.reason == "Priority"
    assert query.job("3", clock.now - 5) is None
    assert slurm.count("squeue") == 2


def test_sacct_is_called_once_for_all_finished_jobs(slurm: FakeSlurm, tmp_path: Path, clock: Clock):
    query = make(tmp_path, clock)
    for job_id in ("1", "2", "3"):
        query.remember(job_id)
    slurm.say("squeue", "3|RUNNING|None|n1|paceline-r\n99|RUNNING|None|n1|of another kind\n")
    slurm.say("sacct", "1|CANCELLED by 0|0:0|None|n1|x\n2|NODE_FAIL|0:0|None|n2|x\n")
    first, second = query.job("1", 0), query.job("2", 0)
    assert first is not None
    assert (first.state, first.by) == ("CANCELLED", "root")
    assert second is not None
    assert second.state == "NODE_FAIL"
    clock.now += 60
    query.job("1", 0)
    # Paceline does not query ended jobs again, because their state does not change.
    assert [call for call in slurm.calls if call.startswith("sacct")] == [
        "sacct -X -j 1,2 -n -P -o JobID,State,ExitCode,Reason,NodeList,JobName"
    ]


def test_tasks_that_squeue_lists_only_as_one_canceled_array_are_each_reported_as_canceled(
    slurm: FakeSlurm, tmp_path: Path, clock: Clock
):
    # Slurm 22.05 lists an array in this form if its last two tasks were canceled while they waited.
    slurm.say("squeue", "7|CANCELLED|Priority||paceline-r_0-3\n7_1|RUNNING|None|n1|paceline-r_0-3\n")
    slurm.say("sacct", err=NO_ACCOUNTING, code=1)
    query = make(tmp_path, clock)
    query.remember("7", *(f"7_{task}" for task in range(4)))
    states = {task: query.job(f"7_{task}", 0) for task in (1, 2, 3)}
    assert {task: job and (job.job_id, job.state) for task, job in states.items()} == {
        1: ("7_1", "RUNNING"),
        2: ("7_2", "CANCELLED"),
        3: ("7_3", "CANCELLED"),
    }
    # Paceline keeps the state of a task that squeue no longer lists.
    slurm.say("squeue", "7_1|RUNNING|None|n1|paceline-r_0-3\n")
    clock.now += 60
    job = query.job("7_3", 0)
    assert job is not None
    assert job.state == "CANCELLED"
    assert query.job_named("paceline-r_0-3", 2) is None
    named = query.job_named("paceline-r_0-3", 1)
    assert named is not None
    assert named.job_id == "7_1"


def test_canceling_user_is_queried_again_while_sacct_lags(slurm: FakeSlurm, tmp_path: Path, clock: Clock):
    # Regression: Slurm's accounting reported later that root had canceled the run, but the run's record kept "canceled
    # by the engine".
    query = make(tmp_path, clock)
    query.remember("1")
    slurm.say("squeue", "1|CANCELLED|None|n1|paceline-r\n2|RUNNING|None|n1|paceline-s\n")
    slurm.say("sacct", "1|RUNNING|0:0|None|n1|paceline-r\n")
    behind = query.job("1", 0)
    assert behind is not None
    assert (behind.state, behind.by) == ("CANCELLED", None)
    slurm.say("sacct", "1|CANCELLED by 0|0:0|None|n1|paceline-r\n")
    clock.now += 6
    query.job("2", 0)  # a query for one job reads all jobs
    told = query.job("1", 0)
    assert told is not None
    assert (told.state, told.by) == ("CANCELLED", "root")
    clock.now += 6
    query.job("1", 0)
    assert slurm.count("sacct") == 2


def test_canceling_user_id_is_resolved_on_the_cluster(slurm: FakeSlurm, tmp_path: Path, clock: Clock):
    # Regression: with a login host, user id 1001 was resolved on the submitting machine, where this id belongs to
    # another person.
    write_program(
        slurm.folder / "bin" / "id",
        f'#!/bin/sh\necho "id $*" >> \'{slurm.folder}/calls\'\n[ "$2" = 1001 ] && echo alice-of-the-cluster\n',
    )
    slurm.say("squeue", "")
    slurm.say(
        "sacct", "".join(f"{job}|CANCELLED by {uid}|0:0|None||x\n" for job, uid in ((1, 1001), (2, 1001), (3, 9)))
    )
    query = make(tmp_path, clock)
    for job_id in ("1", "2", "3"):
        query.remember(job_id)
    by = [getattr(query.job(job_id, 0), "by", None) for job_id in ("1", "2", "3")]
    assert by == ["alice-of-the-cluster", "alice-of-the-cluster", "user 9"]
    assert [call for call in slurm.calls if call.startswith("id ")] == ["id -nu 1001", "id -nu 9"]


def test_last_job_state_from_squeue_is_kept_if_slurm_has_no_accounting(slurm: FakeSlurm, tmp_path: Path, clock: Clock):
    slurm.say("sacct", err=NO_ACCOUNTING, code=1)
    slurm.say("squeue", "1|FAILED|NonZeroExitCode|n1|paceline-r\n")
    slurm.say("scontrol", "JobId=1 JobState=FAILED Reason=NonZeroExitCode ExitCode=127:0 NodeList=n1\n")
    query = make(tmp_path, clock)
    job = query.job("1", 0)
    assert job is not None
    assert (job.state, job.exit_code) == ("FAILED", 127)
    slurm.say("squeue", "")
    clock.now += 600
    later = query.job("1", 0)
    assert later == job
    query.job("5", 0)
    # The first call of sacct reported that there is no accounting, so sacct is not called again.
    assert slurm.count("sacct") == 1


def test_unreachable_slurm_accounting_keeps_the_job_state_of_squeue(slurm: FakeSlurm, tmp_path: Path, clock: Clock):
    query = make(tmp_path, clock)
    query.remember("2")
    said = failure("22.05", "slurmdbd down: sacct")
    slurm.say("sacct", err=said.stderr, code=said.returncode)
    slurm.say("squeue", "1|RUNNING|None|n1|paceline-r\n3|CANCELLED|None||paceline-s\n")
    for job_id, state in (("1", "RUNNING"), ("3", "CANCELLED")):
        job = query.job(job_id, 0)
        assert job is not None
        assert job.state == state
    with pytest.raises(AwayError, match=r"Slurm's accounting does not answer .*Connection refused"):
        query.job("2", 0)
    clock.now += 6
    slurm.say("sacct", "2|NODE_FAIL|0:0|None|n2|x\n")
    job = query.job("2", 0)
    assert job is not None
    assert job.state == "NODE_FAIL"


def test_query_of_a_job_unknown_to_slurm_returns_none(slurm: FakeSlurm, tmp_path: Path, clock: Clock):
    slurm.say("sacct", "")
    assert make(tmp_path, clock).job("1", 0) is None


def test_requeued_job_is_pending_again(slurm: FakeSlurm, tmp_path: Path, clock: Clock):
    slurm.say("sacct", err=NO_ACCOUNTING, code=1)
    query = make(tmp_path, clock)
    for state in ("NODE_FAIL", "PENDING"):
        slurm.say("squeue", f"1|{state}|None||paceline-r\n")
        job = query.job("1", 0)
        assert job is not None
        assert job.state == state
        clock.now += 6


def test_after_an_unreachable_slurm_controller_squeue_is_called_again_only_after_5_s(
    slurm: FakeSlurm, tmp_path: Path, clock: Clock
):
    query = make(tmp_path, clock)
    query.remember("1")
    slurm.say("squeue", err="Unable to contact slurm controller (connect failure)", code=1)
    for _ in range(3):
        with pytest.raises(AwayError):
            query.job("1", 0)
    assert slurm.count("squeue") == 1
    clock.now += 6
    slurm.say("squeue", "1|RUNNING|None|n1|paceline-r\n")
    job = query.job("1", 0)
    assert job is not None
    assert job.state == "RUNNING"


def test_squeue_failure_is_cached_for_the_next_queries_even_if_the_call_was_slow(
    slurm: FakeSlurm, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    # If the controller is unreachable, squeue itself retries for a long time.
    slurm.say("squeue", err="Unable to contact slurm controller (connect failure)", code=1)
    ask = Query._squeue

    def slowly(query: Query) -> list[JobState]:
        clock.now += 30
        return ask(query)

    monkeypatch.setattr(Query, "_squeue", slowly)
    for job_id in ("1", "2", "3"):
        with pytest.raises(AwayError):
            make(tmp_path, clock).job(job_id, 0)
    assert slurm.count("squeue") == 1


def test_slurm_job_is_found_by_its_name(slurm: FakeSlurm, tmp_path: Path, clock: Clock):
    slurm.say("squeue", "4|PENDING|Priority||other\n5|PENDING|Priority||paceline-r\n")
    job = make(tmp_path, clock).job_named("paceline-r")
    assert job is not None
    assert job.job_id == "5"
    assert make(tmp_path, clock).job_named("paceline-s") is None


def test_truncated_or_unwritable_cache_of_slurm_queries_is_ignored(slurm: FakeSlurm, tmp_path: Path, clock: Clock):
    slurm.say("squeue", "1|RUNNING|None|n1|paceline-r\n")
    query = make(tmp_path, clock)
    query.job("1", 0)
    for path in (tmp_path / "engines").glob("*.json"):
        path.write_text('{"time": 18000')
    assert query.job("1", 0) is not None
    assert Query(Path("/proc/nowhere"), Scheduler("c", SlurmSettings.of("c", {})), "1000").job("1", 0) is not None


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
def test_reason_code_of_a_pending_slurm_job_is_explained_in_words(reason: str, words: str):
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
def test_job_that_can_never_start_is_reported(reason: str, words: str):
    said = waits_for(job("PENDING", reason=reason))
    assert said.startswith("Slurm job 7: it can't start as it is: ")
    assert said.endswith(f" ({reason})")
    assert words in said


@pytest.mark.parametrize("version", VERSIONS)
def test_every_waiting_reason_in_the_recorded_squeue_output_is_explained(version: str):
    waiting = [found for found in parse_squeue(recorded(f"squeue-{version}.txt")) if found.state == "PENDING"]
    assert len({found.reason for found in waiting}) > 10
    for found in waiting:
        assert look_of(found).state == QUEUED
        assert " waits (" not in waits_for(found), found


@pytest.mark.parametrize(
    "state", ["RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STAGE_OUT", "SIGNALING", "RESIZING"]
)
def test_slurm_job_that_holds_nodes_is_reported_as_running(state: str):
    assert look_of(job(state)).state == RUNNING
    assert not has_ended(job(state))


@pytest.mark.parametrize(
    ("state", "cause", "words"),
    [
        ("CANCELLED", "cancel", "was canceled"),
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
def test_each_slurm_end_state_has_a_known_cause(state: str, cause: str, words: str):
    look = look_of(job(state, nodes="n[1-2]"))
    assert (look.state, look.cause) == (GONE, cause)
    assert cause in CAUSES or cause == "cancel"
    assert words in look.message


def test_canceling_user_is_reported():
    assert look_of(job("CANCELLED", by="alice")).by == "alice"
    assert "by alice" in look_of(job("CANCELLED", by="alice")).message
    assert look_of(job("CANCELLED")).by is None


def test_node_without_the_run_folder_is_reported():
    failed = job("FAILED", exit_code=0, signal=53, nodes="n1")
    assert "the node can't open files in '/home/me/runs/x'" in look_of(failed, run_dir="/home/me/runs/x").message
    # Slurm 20.11 reports the same failure with exit code 1 and no signal.
    older = look_of(job("FAILED", exit_code=1, signal=0, nodes="n1"), run_dir="/home/me/runs/x")
    assert "the node can't open files in '/home/me/runs/x'" in older.message
    missing = look_of(job("FAILED", exit_code=127, nodes="n1"), python="/env/bin/python").message
    assert (
        missing
        == "Slurm job 7 could not run '/env/bin/python' on n1. Set python on the target to one that its nodes have."
    )
