"""What a look at the schedules takes and starts: times, versions, ended runs; overlaps, pauses, failures and kills."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import EngineError, JobError, ScheduleError
from paceline.runs import states, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.schedules import tick as ticking
from paceline.schedules.occurrences import Occurrence
from paceline.schedules.schedule import Schedule, named_occurrence
from paceline.schedules.schedules import Schedules
from paceline.system.files import read_json, write_json
from tests.helpers import make_run, run_python, write_tree

NOW = dt.datetime(2026, 1, 10, 12, 0, 20, tzinfo=dt.timezone.utc)


class Lab:
    """A workspace with schedules whose runs are records alone."""

    def __init__(self, folder: Path) -> None:
        self.schedules = Schedules(folder / "ws")
        self.runs_dir = folder / "ws" / "runs"
        self.runs_dir.mkdir(parents=True)
        self.started: list[str] = []
        self.error: Exception | None = None
        self._locks: dict[str, int] = {}

    def add(self, name: str = "job", **values: object) -> None:
        given = {"file": "/job.yaml", "created_utc": "2026-01-10T00:00:00.000Z", **values}
        before = given.pop("before", ())
        self.schedules.save(Schedule(name=name, **given), before)  # type: ignore[arg-type]

    def start(self, schedule: Schedule, occurrence: Occurrence, keep: Callable[[str], None]) -> None:
        if self.error is not None:
            raise self.error
        run_id = f"exp_{1700000000 + len(self.started)}_00000000"
        keep(run_id)
        self.run(run_id, tags={ticking.TAG: schedule.name})
        self.started.append(occurrence.what)

    def run(self, run_id: str, tags: dict[str, str] | None = None) -> None:
        folder, self._locks[run_id] = make_run(self.runs_dir, run_id, states.RUNNING)
        tags_and_properties.set_tags(folder.notes, tags or {})

    def end(self, run_id: str, status: str = states.COMPLETED) -> None:
        folder = RunFolder(self.runs_dir / run_id)
        store.change(folder, store.stored(folder), status)
        os.close(self._locks.pop(run_id))

    def end_all(self) -> None:
        for run_id in [*self._locks]:
            self.end(run_id)

    def tick(self, *, minutes: float = 0.0) -> list[str]:
        """Return what has started since the last look."""
        before = len(self.started)
        self.problems = ticking.tick(self.schedules.workspace_dir, self.start, NOW + dt.timedelta(minutes=minutes))
        return self.started[before:]

    def states(self, name: str = "job") -> list[tuple[str, str, str]]:
        """Return status, text and reason of each occurrence, the newest first."""
        return [(one.status, one.what, one.reason) for one in self.schedules.occurrences(name).latest(50)]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_tick_starts_one_run_per_due_time_and_records_missed_times(lab: Lab) -> None:
    lab.add(cron="0 * * * *", time_zone="UTC")

    assert lab.tick() == ["2026-01-10T12:00:00+00:00"]
    assert lab.tick() == []
    (one,) = lab.schedules.occurrences("job").latest(9)
    assert not one.is_late
    assert (one.missed_count, one.missed_first, one.missed_last) == (
        11,
        "2026-01-10T01:00:00+00:00",
        "2026-01-10T11:00:00+00:00",
    )
    lab.end_all()
    assert lab.tick(minutes=60) == ["2026-01-10T13:00:00+00:00"]
    assert lab.schedules.occurrences("job").latest(1)[0].missed_count == 0


@pytest.mark.promise("schedule-missed-times")
def test_late_tick_starts_one_run_for_all_missed_times_or_none_if_configured_to_skip(lab: Lab) -> None:
    lab.add("once", cron="30 * * * *", time_zone="UTC")
    lab.add("skip", cron="30 * * * *", time_zone="UTC", missed="skip")

    assert lab.tick() == ["2026-01-10T11:30:00+00:00"]
    (once,) = lab.schedules.occurrences("once").latest(9)
    (skip,) = lab.schedules.occurrences("skip").latest(9)
    assert (once.status, once.is_late, once.missed_count) == ("started", True, 11)
    assert (skip.status, skip.is_late, skip.missed_count) == ("missed", True, 11)
    assert "was off at that time" in skip.reason
    lab.end_all()
    assert len(lab.tick(minutes=31)) == 2, "both start at the next time"


@pytest.mark.parametrize("overlap", ["queue", "skip"])
def test_due_time_during_a_run_waits_or_is_skipped_as_configured(lab: Lab, overlap: str) -> None:
    lab.add(cron="* * * * *", time_zone="UTC", overlap=overlap)
    assert len(lab.tick()) == 1

    assert [lab.tick(minutes=minute) for minute in (1, 2, 3)] == [[], [], []]
    status, what, reason = lab.states()[0]
    assert what == "2026-01-10T12:03:00+00:00"
    if overlap == "skip":
        assert (status, reason) == ("skipped", "run exp_1700000000_00000000 was going on")
    else:
        assert (status, reason) == ("waiting", "waits for the end of run exp_1700000000_00000000")
        assert [row[0] for row in lab.states()] == ["waiting", "skipped", "skipped", "started"]
    lab.end_all()
    assert lab.tick(minutes=3.2) == ([what] if overlap == "queue" else [])


@pytest.mark.promise("schedule-triggers")
def test_each_new_model_or_dataset_version_starts_a_run_and_earlier_versions_start_none(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {("model", "digits"): [1, 2], ("dataset", "mnist"): [1]}
    monkeypatch.setattr(Schedules, "versions", lambda _, kind, name: known[kind, name])
    lab.add(on_model=("digits",), on_dataset=("mnist",), versions={"model:digits": 2, "dataset:mnist": 0})

    assert lab.tick() == ["mnist:1"]
    known["model", "digits"] += [3, 4]
    assert lab.tick() == [], "its run goes on"
    assert {row[:2] for row in lab.states()} == {
        ("started", "mnist:1"),
        ("waiting", "digits:3"),
        ("waiting", "digits:4"),
    }
    found = []
    for _ in range(3):
        lab.end_all()
        found += lab.tick()
    assert found == ["digits:3", "digits:4"]


def test_schedule_starts_a_run_after_each_completed_run_of_an_experiment_except_its_own_runs(lab: Lab) -> None:
    ids = [f"train_170000000{number}_00000000" for number in range(5)]
    for run_id in [*ids, "other_1700000000_00000000", f"{ids[0]}_1"]:
        lab.run(run_id, tags={ticking.TAG: "job"} if run_id == ids[3] else {})
    lab.end(ids[0])
    lab.add(after=("train",), before=[ids[0]])
    assert lab.tick() == []
    for run_id, status in ((ids[1], states.COMPLETED), (ids[2], states.FAILED), (ids[3], states.COMPLETED)):
        lab.end(run_id, status)
    lab.end("other_1700000000_00000000")
    lab.end(f"{ids[0]}_1")

    assert lab.tick() == [ids[1]]
    assert ("skipped", ids[2], "it ended as Failed") in lab.states()
    assert ("skipped", ids[3], "it is the work of this schedule") in lab.states()
    assert not any(ids[4] == what for _, what, _ in lab.states())


def test_texts_of_a_schedule_name_the_end_of_its_runs_and_quote_its_parameters() -> None:
    schedule = Schedule(name="one", after=("train",), ended="failed", template="a", parameters={"why": "no more"})

    assert (schedule.when, schedule.job) == ("after train (failed)", "--template a 'why=no more'")


def test_schedule_created_after_its_trigger_run_has_ended_starts_one_run(lab: Lab) -> None:
    lab.run("train_1700000000_00000000")
    lab.end("train_1700000000_00000000", states.FAILED)
    lab.add(after=("train_1700000000_00000000",), ended="failed")

    assert lab.tick() == ["train_1700000000_00000000"]
    lab.end_all()
    assert lab.tick() == []


def test_times_during_a_pause_start_no_run_after_the_schedule_is_resumed(lab: Lab) -> None:
    lab.add(cron="0 * * * *", time_zone="UTC")
    lab.schedules.pause("job")

    assert lab.tick() == []
    with pytest.raises(ScheduleError, match="paused already"):
        lab.schedules.pause("job")
    assert ticking.resume(lab.schedules, "job") > 12
    assert lab.states()[0][::2] == ("skipped", "the schedule was paused")
    assert lab.tick() == []
    with pytest.raises(ScheduleError, match="is not paused"):
        ticking.resume(lab.schedules, "job")


def test_start_refused_by_an_engine_is_retried_but_an_invalid_job_file_is_not(lab: Lab) -> None:
    lab.add(cron="0 * * * *", time_zone="UTC")
    lab.error = EngineError("no answer of the host")

    assert lab.tick() == []
    assert lab.states()[0] == ("waiting", "2026-01-10T12:00:00+00:00", "will be tried again: no answer of the host")
    lab.error = None
    assert lab.tick(minutes=1) == ["2026-01-10T12:00:00+00:00"]
    lab.end_all()
    lab.error = JobError("no such file")
    assert lab.tick(minutes=60) == []
    assert lab.problems == ["schedule job, time 2026-01-10T13:00:00+00:00: no such file"]
    assert lab.states()[0] == ("failed", "2026-01-10T13:00:00+00:00", "no such file")
    assert lab.tick(minutes=62) == []
    assert lab.problems == []


def test_start_that_an_engine_refuses_for_an_hour_fails(lab: Lab) -> None:
    lab.add(cron="0 0 1 * *", time_zone="UTC", created_utc="2025-12-31T00:00:00.000Z")
    lab.error = EngineError("no answer of the host")
    lab.tick()
    lab.tick(minutes=59)
    assert lab.states()[0][0] == "waiting"
    lab.tick(minutes=61)

    assert lab.states()[0][::2] == ("failed", "no answer of the host")


def test_schedule_of_another_user_is_not_started(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.add(cron="* * * * *", time_zone="UTC")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)

    assert lab.tick() == []


def test_is_due_returns_true_for_a_due_schedule_without_starting_a_run(lab: Lab) -> None:
    lab.add(cron="* * * * *", time_zone="UTC")
    workspace_dir = lab.schedules.workspace_dir
    assert ticking.is_due(workspace_dir)
    lab.schedules.pause("job")
    assert not ticking.is_due(workspace_dir)
    lab.add("yearly", cron="0 0 1 1 *", time_zone="UTC", created_utc=dt.datetime.now(dt.timezone.utc).isoformat())
    assert not ticking.is_due(workspace_dir)
    done = ticking.start_now(lab.schedules, "yearly", lab.start)
    assert not ticking.is_due(workspace_dir), "its run goes on"
    lab.end(str(done.run_id))
    assert ticking.is_due(workspace_dir), "its end is to be written down"


def test_new_schedule_has_no_history_of_a_removed_schedule_of_the_same_name(lab: Lab) -> None:
    lab.add(cron="0 * * * *", time_zone="UTC")
    lab.tick()
    with pytest.raises(ScheduleError, match="exists already"):
        lab.add(cron="0 * * * *", time_zone="UTC")
    lab.schedules.remove("job")
    assert len(lab.schedules) == 0
    # These files are left if a removal is killed.
    (lab.schedules.folder("job") / "done").mkdir(parents=True)
    (lab.schedules.folder("job") / "done" / "time-20260110T120000Z.json").write_text("{}")
    lab.end_all()
    lab.add(cron="0 * * * *", time_zone="UTC")

    assert lab.tick() == ["2026-01-10T12:00:00+00:00"]


def test_records_of_old_due_times_are_deleted_and_no_due_time_starts_a_second_run(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.schedules.occurrences.KEPT", 3)
    lab.add(cron="* * * * *", time_zone="UTC", created_utc="2026-01-10T11:59:00.000Z")
    for minute in range(6):
        lab.tick(minutes=minute)
        lab.end_all()

    assert len(lab.started) == 6
    lab.tick(minutes=5)
    assert len(lab.states()) <= 4
    assert len(lab.started) == 6


def test_due_time_claimed_by_one_process_is_not_claimed_by_another(lab: Lab) -> None:
    lab.add(cron="0 * * * *", time_zone="UTC")
    kept = lab.schedules.occurrences("job")
    one = Occurrence(key="model-a-1", kind="model", what="a:1", time_utc=NOW.isoformat())

    assert kept.claim(one)
    assert not kept.claim(one)
    kept.finish(dataclasses.replace(one, status="skipped"))
    assert not kept.claim(one)
    with lab.schedules.locked():
        assert lab.tick() == [], "another look goes on"


#: This program checks the schedules once, and is killed before and after each of its file changes. The next check is killed
#: too. Then it counts the runs.
KILLED = """
import datetime as dt, os, signal, sys
from pathlib import Path
from paceline.schedules import tick as ticking
from paceline.schedules.schedule import Schedule
from paceline.schedules.schedules import Schedules
Schedules.versions = lambda self, kind, name: [1, 2, 3]
ticking._Look._end = lambda self, one: "Completed"
now = dt.datetime(2026, 1, 10, 12, 0, 20, tzinfo=dt.timezone.utc)

def start(schedule, occurrence, keep):
    # As the command line's: a run of this id that is there already is not submitted again.
    if occurrence.run_id and (runs / occurrence.run_id).exists():
        return
    run_id = f"{occurrence.key}.{os.urandom(4).hex()}"
    keep(run_id)
    os.mkdir(runs / run_id)

def child(step):
    left = step
    def dying(name):
        act = getattr(os, name)
        def called(*words, **options):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            done = act(*words, **options)
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return done
        return called
    for name in ("link", "replace", "rename", "unlink", "mkdir"):
        setattr(os, name, dying(name))
    assert ticking.tick(workspace_dir, start, now) == []

def look(step=0):
    if (pid := os.fork()) == 0:
        child(step)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL

step = kills = 0
is_killed = True
while is_killed:
    step += 1
    workspace_dir = Path(sys.argv[1]) / str(step)
    runs = workspace_dir / "runs"
    runs.mkdir(parents=True)
    Schedules(workspace_dir).save(Schedule(name="job", file="/job.yaml", cron="0 * * * *", time_zone="UTC",
        on_model=("a",), created_utc="2026-01-10T11:30:00.000Z"), ())
    is_killed = look(step)
    kills += is_killed + look(1 + step % 11)
    for _ in range(5):
        look()
    found = sorted(name.partition(".")[0] for name in os.listdir(runs))
    wanted = ["model-a-1", "model-a-2", "model-a-3", "time-20260110T120000Z"]
    assert found == wanted, (step, found)
    assert os.listdir(workspace_dir / "schedules" / "job" / "open") == [], step
print(kills)
"""


@pytest.mark.promise("schedule-never-twice")
def test_tick_killed_at_any_file_change_loses_no_due_time_and_starts_none_twice(tmp_path: Path) -> None:
    assert int(run_python(KILLED, tmp_path)) >= 50


def test_schedule_with_an_error_is_due_and_does_not_stop_other_schedules(lab: Lab) -> None:
    lab.add("a", cron="* * * * *", time_zone="Gone/Nowhere")
    lab.add("b", cron="0 0 1 1 *", time_zone="UTC", created_utc=dt.datetime.now(dt.timezone.utc).isoformat())
    assert ticking.is_due(lab.schedules.workspace_dir)
    lab.add("c", cron="* * * * *", time_zone="UTC")

    assert lab.tick() == ["2026-01-10T12:00:00+00:00"]
    assert [text.partition(" is not known")[0] for text in lab.problems] == ["schedule a: time zone 'Gone/Nowhere'"]


#: Values that other users of a shared workspace could write in the place of an object or a text.
WRONG = ("x", 7, [], [{}], {"run_id": ["x"]}, {"run_id": "../../x\0"}, None)


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_model_version_with_a_wrong_record_of_its_run_starts_a_run(lab: Lab, wrong: object) -> None:
    for version, document in ((1, {"run": wrong}), (2, wrong)):
        write_tree(lab.schedules.workspace_dir / "models" / "m" / str(version), {"model.json": json.dumps(document)})
    lab.add("a", on_model=("m",))
    lab.add("b", cron="* * * * *", time_zone="UTC")

    assert lab.tick() == ["m:1", "2026-01-10T12:00:00+00:00"]
    assert lab.problems == []


@pytest.mark.parametrize("field", ["status", "owner", "attempts", "failure", "started_utc"])
@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_run_with_a_wrong_record_does_not_stop_schedules_that_wait_for_its_experiment(
    lab: Lab, field: str, wrong: object
) -> None:
    for number, change in ((0, {field: wrong}), (1, {})):
        folder, lock = make_run(lab.runs_dir, f"train_170000000{number}_00000000", states.RUNNING)
        os.close(lock)
        write_json(folder.state, {**read_json(folder.state), "status": states.COMPLETED, **change})
    lab.runs_dir.joinpath(f"train_{'1' * 200}_00000000").mkdir()
    lab.add("a", after=("train",))
    lab.add("b", cron="* * * * *", time_zone="UTC")

    started = lab.tick()
    lab.end_all()
    started += lab.tick() + lab.tick()
    assert {"train_1700000001_00000000", "2026-01-10T12:00:00+00:00"} <= {*started}
    assert lab.problems == []


def test_event_with_the_longest_possible_name_is_claimed(lab: Lab) -> None:
    for kind, name in (("run", "e" * 200), ("dataset", "e" * 240)):
        ones = [named_occurrence(kind, f"{name}_1700000000_0000000{number}", NOW) for number in range(2)]
        assert all(lab.schedules.occurrences("job").claim(one) for one in ones)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("cron", 7), ("on_model", "m"), ("after", [1]), ("parameters", []), ("versions", {"model:m": "1"}), ("user", {})],
)
def test_schedule_with_a_value_of_a_wrong_type_counts_as_damaged(lab: Lab, field: str, wrong: object) -> None:
    lab.add(cron="* * * * *", time_zone="UTC")
    path = lab.schedules.folder("job").with_suffix(".json")
    write_json(path, {**read_json(path), field: wrong})

    assert [*lab.schedules] == []
    assert lab.tick() == []
    assert lab.problems == []


def test_occurrence_with_a_value_of_a_wrong_type_is_skipped(lab: Lab) -> None:
    lab.add(cron="0 * * * *", time_zone="UTC")
    lab.tick()
    done = lab.schedules.folder("job") / "done"
    done.mkdir(exist_ok=True)
    for name, changed in (("a", {"time_utc": 5}), ("b", {"status": []}), ("c", {"missed_count": True})):
        one = {"key": f"hand-{name}", "kind": "hand", "what": "", "time_utc": "2026", **changed}
        write_json(done / f"hand-{name}.json", one)

    assert len(lab.states()) == 1
