from __future__ import annotations

import io
import os

import pytest

from paceline.runs import states, store
from paceline.runs.follow import RunWatch, Show, prefix, state_text, stream
from paceline.runs.logs import LogLine
from paceline.runs.record import Attempt, duration_text, end_text
from tests.helpers import RUN_ID, make_job, make_record, make_run, write_tree


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (3.21, "3.2 s"),
        (59.9, "59.9 s"),
        (59.96, "1 min 0 s"),
        (60, "1 min 0 s"),
        (125.4, "2 min 5 s"),
        (3599.9, "1 h 0 min"),
        (12_000, "3 h 20 min"),
        (100_000, "27 h 46 min"),
    ],
)
def test_duration_is_formatted_as_seconds_as_minutes_and_seconds_or_as_hours_and_minutes(seconds, text):
    assert duration_text(seconds) == text


def test_state_text_of_a_queued_run_has_its_waiting_reason():
    assert state_text(make_record(status="Queued", waiting_for="waits for 1 run (a)")) == "Queued: waits for 1 run (a)"
    assert state_text(make_record(status="Running")) == "Running"


def test_final_status_text_has_the_duration_and_the_user_who_canceled_the_run():
    times = {"started_utc": "2026-01-02T03:04:05.000Z", "ended_utc": "2026-01-02T03:04:08.200Z"}
    assert end_text(make_record(status="Completed", **times)) == "Completed in 3.2 s"
    assert end_text(make_record(status="Canceled", canceled_by="me", **times)) == "Canceled in 3.2 s, by me"
    assert end_text(make_record(status="Canceled", canceled_by="me")) == "Canceled, by me"


@pytest.mark.parametrize(
    ("world_size", "attempts", "text"), [(1, 1, ""), (2, 1, "[rank 3] "), (2, 2, "[2: rank 3] "), (1, 2, "")]
)
def test_log_prefix_has_rank_and_attempt_if_there_are_several(world_size, attempts, text):
    assert prefix(LogLine(2, 3, "x"), world_size, attempts) == text


def test_run_watch_reads_a_changed_run_record_again(tmp_path):
    folder, fd = make_run(tmp_path / "runs", status=states.QUEUED)
    watch = RunWatch(folder)
    assert watch.look().status == states.QUEUED
    store.change(folder, store.stored(folder), states.RUNNING)
    assert watch.look().status == states.RUNNING
    os.close(fd)


def test_watch_detects_a_run_that_loses_its_supervisor(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.runs.follow._LOOK_S", 0)
    folder, fd = make_run(tmp_path / "runs", status=states.RUNNING)
    watch = RunWatch(folder)
    os.close(fd)
    assert watch.look().status == states.FAILED


def test_followed_run_shows_states_and_log_lines_in_chronological_order(tmp_path):
    job = make_job(distributed_backend="gloo", node_count=2)
    folder, fd = make_run(tmp_path / "runs", job=job)
    record = store.stored(folder)
    first, second = (
        Attempt(number=1, started_utc="2026-01-02T03:04:05.000Z"),
        Attempt(number=2, started_utc="2026-01-02T03:04:06.000Z"),
    )
    steps = iter(
        [
            lambda r: store.change(folder, r, states.QUEUED, waiting_for="waits for 1 run (a)"),
            lambda r: store.change(folder, r, states.RUNNING, waiting_for=None, attempts=(first,)),
            lambda r: store.change(folder, r, states.STARTING, attempts=(first, second)),
            lambda r: store.change(folder, r, states.COMPLETED),
        ]
    )
    write_tree(folder.attempt(1), {"rank_0.log": "zero\n", "rank_1.log": "one\n"})
    write_tree(folder.attempt(2), {"rank_0.log": "again"})
    seen: list[str] = []

    def state(now):
        nonlocal record
        seen.append(state_text(now))
        record = next(steps)(record)

    def line(found):
        seen.append(f"{found.attempt}.{found.rank} {found.text}")

    def attempt(before, now):
        seen.append(f"#{before.number} to {now.number}")

    final = Show(folder, line=line, state=state, attempt=attempt).to_the_end()
    os.close(fd)
    assert final.status == states.COMPLETED
    assert seen.index("1.1 one") < seen.index("#1 to 2") < seen.index("Starting")
    assert seen.index("#1 to 2") < seen.index("2.0 again")
    assert [text for text in seen if text[0].isupper()] == [
        "NotStarted",
        "Queued: waits for 1 run (a)",
        "Running",
        "Starting",
    ]
    assert [text for text in seen if text[0].isdigit()] == ["1.0 zero", "1.1 one", "2.0 again"]


def test_finished_attempts_are_shown_in_order(tmp_path):
    # Regression: both attempts of a quick run ended between two polls, and the first attempt was not shown.
    folder, fd = make_run(tmp_path / "runs")
    write_tree(folder.path, {f"attempts/{number}/rank_0.log": f"line {number}\n" for number in (1, 2, 3)})
    attempts = tuple(
        Attempt(number=number, started_utc="2026-01-02T03:04:05.000Z", cause="exception") for number in (1, 2, 3)
    )
    store.change(folder, store.stored(folder), states.COMPLETED, attempts=attempts)
    os.close(fd)
    out = io.StringIO()
    stream(folder, out)
    assert out.getvalue().splitlines()[2:-1] == [
        "line 1",
        "-- Attempt 1 ended (exception); attempt 2 starts.",
        "line 2",
        "-- Attempt 2 ended (exception); attempt 3 starts.",
        "line 3",
    ]


def test_following_a_run_after_a_keyboard_interrupt_repeats_and_loses_no_line(tmp_path):
    # Regression: after Ctrl-C and the answer "cancel", lines that had been read but not yet shown were lost.
    folder, fd = make_run(tmp_path / "runs", status=states.RUNNING)
    write_tree(folder.attempt(1), {"rank_0.log": "".join(f"{number}\n" for number in range(100)) + "end"})
    seen: list[str] = []

    def line(found):
        seen.append(found.text)
        if found.text in ("3", "50"):
            raise KeyboardInterrupt

    shown = Show(folder, line=line, state=lambda record: None)
    with pytest.raises(KeyboardInterrupt):
        shown.to_the_end()
    store.change(folder, store.stored(folder), states.COMPLETED)
    os.close(fd)
    interruptions = 1
    while True:
        try:
            shown.to_the_end()
            break
        except KeyboardInterrupt:
            interruptions += 1
    assert (seen, interruptions) == ([*map(str, range(100)), "end"], 2)


def test_following_a_run_with_selected_ranks_shows_only_log_lines_of_those_ranks(tmp_path):
    folder, fd = make_run(tmp_path / "runs", job=make_job(distributed_backend="gloo", node_count=2))
    write_tree(folder.attempt(1), {"rank_0.log": "zero\n", "rank_1.log": "one\n"})
    store.change(folder, store.stored(folder), states.COMPLETED)
    os.close(fd)
    seen = []
    Show(folder, line=seen.append, state=lambda record: None, ranks=[1]).to_the_end()
    assert seen == [LogLine(1, 1, "one")]


def test_streamed_run_output_is_plain_text_with_rank_prefixes(tmp_path):
    job = make_job(distributed_backend="gloo", node_count=2)
    folder, fd = make_run(tmp_path / "runs", job=job)
    write_tree(folder.attempt(1), {"rank_0.log": "zero\n", "rank_1.log": "größe\n"})
    store.change(folder, store.stored(folder), states.CANCELED, canceled_by="me")
    os.close(fd)
    out = io.StringIO()
    stream(folder, out)
    assert out.getvalue().splitlines() == [
        f"RunId: {RUN_ID}",
        f"Folder: {folder.path}",
        "[rank 0] zero",
        "[rank 1] größe",
        "-- Canceled, by me",
    ]
