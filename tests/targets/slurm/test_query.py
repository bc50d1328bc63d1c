import threading
from pathlib import Path

import pytest

from paceline.targets.slurm.query import Query
from paceline.targets.slurm.scheduler import AwayError, Scheduler
from paceline.targets.slurm.settings import SlurmSettings
from paceline.targets.slurm.states import JobState
from tests.helpers import run_python, write_program
from tests.targets.slurm.conftest import FakeSlurm
from tests.targets.slurm.recordings import failure

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


def test_200_queued_runs_cost_one_question(slurm: FakeSlurm, tmp_path: Path, clock: Clock):
    slurm.say("squeue", "".join(f"{number}|PENDING|Priority||paceline-r{number}\n" for number in range(200)))
    for number in range(200):
        job = make(tmp_path, clock).job(str(number), clock.now - 10)
        assert job is not None
        assert job.reason == "Priority"
    assert slurm.calls == ["squeue -h -r -u 1000 -t all -o %i|%T|%r|%N|%j"]
    clock.now += 5.1
    make(tmp_path, clock).job("7", 0)
    assert slurm.count("squeue") == 2


def test_processes_that_ask_at_once_share_the_answer(slurm: FakeSlurm, tmp_path: Path, clock: Clock):
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


def test_an_answer_from_before_a_submission_says_nothing_of_it_and_is_not_asked_for_again(
    slurm: FakeSlurm, tmp_path: Path, clock: Clock
):
    # Each of 200 submissions, looked at while it is made, was once a question of its own.
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


def test_accounting_is_asked_once_for_all_that_squeue_lists_no_more(slurm: FakeSlurm, tmp_path: Path, clock: Clock):
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
    # What has ended stays so: it is not asked for again.
    assert [call for call in slurm.calls if call.startswith("sacct")] == [
        "sacct -X -j 1,2 -n -P -o JobID,State,ExitCode,Reason,NodeList,JobName"
    ]


def test_tasks_of_an_array_are_told_from_each_other_also_where_they_were_canceled_together(
    slurm: FakeSlurm, tmp_path: Path, clock: Clock
):
    # As Slurm 22.05 lists an array of which the last two tasks were canceled while they waited.
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
    # What squeue has forgotten is kept.
    slurm.say("squeue", "7_1|RUNNING|None|n1|paceline-r_0-3\n")
    clock.now += 60
    job = query.job("7_3", 0)
    assert job is not None
    assert job.state == "CANCELLED"
    assert query.job_named("paceline-r_0-3", 2) is None
    named = query.job_named("paceline-r_0-3", 1)
    assert named is not None
    assert named.job_id == "7_1"


def test_who_has_canceled_a_job_is_asked_again_while_accounting_is_behind_squeue(
    slurm: FakeSlurm, tmp_path: Path, clock: Clock
):
    # Story: a run that root had ended by scancel was "canceled by the engine" for good, with accounting and all.
    query = make(tmp_path, clock)
    query.remember("1")
    slurm.say("squeue", "1|CANCELLED|None|n1|paceline-r\n2|RUNNING|None|n1|paceline-s\n")
    slurm.say("sacct", "1|RUNNING|0:0|None|n1|paceline-r\n")
    behind = query.job("1", 0)
    assert behind is not None
    assert (behind.state, behind.by) == ("CANCELLED", None)
    slurm.say("sacct", "1|CANCELLED by 0|0:0|None|n1|paceline-r\n")
    clock.now += 6
    query.job("2", 0)  # whoever looks asks for all
    told = query.job("1", 0)
    assert told is not None
    assert (told.state, told.by) == ("CANCELLED", "root")
    clock.now += 6
    query.job("1", 0)
    assert slurm.count("sacct") == 2


def test_who_has_canceled_is_named_as_the_engine_s_machine_knows_them(slurm: FakeSlurm, tmp_path: Path, clock: Clock):
    # Story: behind a login host, number 1001 was looked up here, where it is another person.
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


def test_without_accounting_the_last_word_of_squeue_is_kept(slurm: FakeSlurm, tmp_path: Path, clock: Clock):
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
    # It was told once that there is none.
    assert slurm.count("sacct") == 1


def test_accounting_that_is_away_leaves_the_word_of_squeue_and_nobody_is_called_lost(
    slurm: FakeSlurm, tmp_path: Path, clock: Clock
):
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


def test_a_job_that_nobody_knows_is_none(slurm: FakeSlurm, tmp_path: Path, clock: Clock):
    slurm.say("sacct", "")
    assert make(tmp_path, clock).job("1", 0) is None


def test_a_job_that_was_put_back_into_the_queue_lives_again(slurm: FakeSlurm, tmp_path: Path, clock: Clock):
    slurm.say("sacct", err=NO_ACCOUNTING, code=1)
    query = make(tmp_path, clock)
    for state in ("NODE_FAIL", "PENDING"):
        slurm.say("squeue", f"1|{state}|None||paceline-r\n")
        job = query.job("1", 0)
        assert job is not None
        assert job.state == state
        clock.now += 6


def test_a_controller_that_is_away_is_asked_again_after_5_s_and_nothing_is_forgotten(
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


def test_an_answer_that_took_longer_than_it_stays_fresh_still_serves_everybody(
    slurm: FakeSlurm, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    # Of a controller that is away, squeue itself makes sure for a long time.
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


def test_a_job_is_found_by_its_name(slurm: FakeSlurm, tmp_path: Path, clock: Clock):
    slurm.say("squeue", "4|PENDING|Priority||other\n5|PENDING|Priority||paceline-r\n")
    job = make(tmp_path, clock).job_named("paceline-r")
    assert job is not None
    assert job.job_id == "5"
    assert make(tmp_path, clock).job_named("paceline-s") is None


def test_a_torn_file_and_a_folder_that_can_not_be_written_to_do_no_harm(slurm: FakeSlurm, tmp_path: Path, clock: Clock):
    slurm.say("squeue", "1|RUNNING|None|n1|paceline-r\n")
    query = make(tmp_path, clock)
    query.job("1", 0)
    for path in (tmp_path / "engines").glob("*.json"):
        path.write_text('{"time": 18000')
    assert query.job("1", 0) is not None
    assert Query(Path("/proc/nowhere"), Scheduler("c", SlurmSettings.of("c", {})), "1000").job("1", 0) is not None
