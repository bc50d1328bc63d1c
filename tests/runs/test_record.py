from __future__ import annotations

import dataclasses
import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runs import states
from paceline.runs.failure import FailureReport
from paceline.runs.record import Attempt, RunRecord, merged, parse_utc, user_name, utc_now, utc_text
from tests.helpers import make_job, make_record

FULL = RunRecord(
    run_id="digits_1_2",
    experiment="digits",
    kind="script",
    status=states.FAILED,
    parent_run_id="digits_1_1",
    created_utc="2026-01-02T03:04:05.678Z",
    started_utc="2026-01-02T03:04:06.000Z",
    ended_utc="2026-01-02T03:04:08.500Z",
    submitted_by="me",
    target="local",
    source_directory="/code",
    snapshot_id="0" * 64,
    git={"commit": "abc", "dirty": True},
    job=make_job(arguments=("--a", "b")),
    owner={"pid": 5, "host": "h", "boot_id": "b"},
    scratch_dir="/dev/shm/x",
    waiting_for="waits",
    size="nodes 3 of 2..4",
    attempts=(
        Attempt(
            number=1,
            started_utc="2026-01-02T03:04:06.000Z",
            ended_utc="2026-01-02T03:04:07.000Z",
            nodes=("n",),
            exit_codes={"0": 137},
            cause="killed",
            world_size=4,
            reason="start",
            replaced=({"started_utc": "2026-01-02T03:04:06.500Z", "ranks": [1, 2], "cause": "killed"},),
        ),
        Attempt(number=2, started_utc="2026-01-02T03:04:08.000Z"),
    ),
    exit_code=1,
    failure=FailureReport(cause="exception", message="m", rank=1, last_lines=("a", "b"), victims=((0, "was lost"),)),
    canceled_by="you",
    warnings=("2 workers, none joined a process group: each has trained alone.",),
    hang={"since_utc": "2026-05-04T03:02:01.000Z", "text": "Rank 1 is stopped.", "report": "attempts/1/hang.txt"},
    left_out=({"name": "outputs/etc", "why": "a link that leads out of the run, to '/etc'"},),
    left_out_count=1,
)


def through_json(record: RunRecord) -> RunRecord:
    return RunRecord.from_json(json.loads(json.dumps(record.to_json())))


def test_example_run_record_of_the_tests_sets_every_field():
    defaults = RunRecord(run_id="", experiment="")
    same = {field.name for field in fields(RunRecord) if getattr(FULL, field.name) == getattr(defaults, field.name)}
    # FULL sets every field but these: it is an ordinary run, not a sweep, a trial, a pipeline, a step or a program.
    assert same == {"kind", "sweep", "trial", "step", "pipeline", "program"}


@pytest.mark.parametrize(
    "record", [FULL, RunRecord(run_id="a", experiment="a"), make_record()], ids=["full", "bare", "new"]
)
def test_a_record_goes_to_json_and_back_unchanged(record):
    assert through_json(record) == record


def test_run_record_fields_of_a_newer_version_are_ignored_when_it_is_read():
    data = FULL.to_json() | {"colour": "blue"}
    data["attempts"][0]["colour"] = data["failure"]["colour"] = "blue"
    assert RunRecord.from_json(data) == FULL


@pytest.mark.parametrize("status", states.ALL)
def test_completed_failed_and_canceled_are_the_terminal_run_states(status):
    assert RunRecord(run_id="a", experiment="a", status=status).is_terminal == (
        status in ("Completed", "Failed", "Canceled")
    )


def test_run_state_names_are_a_subset_of_those_of_the_azure_sdk():
    assert set(states.ALL) <= {
        *("NotStarted", "Queued", "Preparing", "Provisioning", "Starting", "Running", "CancelRequested", "Canceled"),
        *("Finalizing", "Completed", "Failed", "Unapproved", "NotResponding", "Pausing", "Paused"),
    }


def test_duration_of_a_run_is_measured_from_start_to_end():
    assert FULL.duration_s == 2.5


def test_duration_of_a_run_before_its_start_is_none():
    assert make_record().duration_s is None


def test_duration_of_a_running_run_counts_up_to_now():
    assert 0 <= make_record(started_utc=utc_now()).duration_s < 60


def test_clock_set_back_gives_no_negative_duration():
    assert make_record(started_utc="2026-01-02T03:04:06.000Z", ended_utc="2026-01-02T03:04:05.000Z").duration_s == 0


@given(st.datetimes(timezones=st.timezones()))
def test_time_text_of_a_run_record_keeps_milliseconds(time):
    text = utc_text(time)
    assert text.endswith("Z")
    assert abs((parse_utc(text) - time).total_seconds()) < 0.001


def test_time_texts_sort_in_chronological_order():
    assert utc_now() <= utc_now()
    assert len({len(utc_text(parse_utc(text))) for text in ("2026-01-02T03:04:05Z", "2026-01-02T03:04:05.120Z")}) == 1


def test_user_id_without_a_name_is_shown_as_unknown(monkeypatch):
    def nobody():
        raise KeyError("uid")

    monkeypatch.setattr("getpass.getuser", nobody)
    assert user_name() == "unknown"


def test_job_json_and_state_json_together_hold_the_whole_record():
    job, state = (json.loads(json.dumps(part)) for part in (FULL.job_json(), FULL.state_json()))
    assert set(job) & set(state) == {"version"}
    assert list(merged(job, state).items()) == list(json.loads(json.dumps(FULL.to_json())).items())
    assert RunRecord.from_json(job).with_state(state) == FULL


def test_applying_a_partial_state_changes_only_its_fields():
    changed = FULL.with_state({"status": "Failed", "experiment": "other", "job": None})
    assert changed == dataclasses.replace(FULL, status="Failed")
