"""A worker's clock: which time it counts, for which readers, and which processes have none."""

from __future__ import annotations

import os
import threading

import pytest

from paceline.system import step_clock
from paceline.system.step_clock import DATA, WAIT, StepClock, begin, clock, read, timed


@pytest.fixture
def made(tmp_path, monkeypatch):
    """This process's clock, and its path."""
    monkeypatch.setattr(step_clock, "_clock", None)
    now = [100.0]
    monkeypatch.setattr(step_clock.time, "monotonic", lambda: now[0])
    found = begin({"PACELINE_WATCH_DIR": str(tmp_path), "PACELINE_RANK": "3"})
    return found, str(tmp_path / "steps_3"), now


def test_step_counts_are_read_from_another_process(made):
    counted, path, now = made
    since = counted.begin(DATA)
    now[0] += 2
    # A timer that is still running counts up to now.
    assert read(path).data_s == pytest.approx(2)
    # A second timer inside a running one does not count.
    assert counted.begin(WAIT) == 0.0
    counted.end(DATA, since)
    since = counted.begin(WAIT)
    now[0] += 3
    counted.end(WAIT, since)
    counted.waited(0.5)
    # `other` makes only one step, as an optimizer that is only tried, so its step does not count.
    other, optimizer = object(), object()
    for one in (other, optimizer, optimizer):
        counted.step(one)
    found = read(path)
    assert (found.steps, found.data_s, found.wait_s) == (2, pytest.approx(2), pytest.approx(3.5))


def test_metric_logged_repeatedly_marks_a_step_if_no_optimizer_is_known(made):
    counted, path, _ = made
    for name in ("accuracy", "loss", "loss"):
        counted.tick(name)
    assert read(path).steps == 2
    counted.step(object())
    assert read(path).steps == 1


def test_step_clock_counts_no_time_of_other_threads_and_forked_children(made):
    counted, path, now = made
    threading.Thread(target=lambda: counted.begin(WAIT)).start()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if clock() is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert clock() is counted
    now[0] += 1
    assert read(path).wait_s == 0.0


def test_step_clock_times_a_function_that_raises(made):
    _, path, now = made

    def waits():
        now[0] += 4
        raise KeyError

    with pytest.raises(KeyError):
        timed(waits, WAIT)()
    assert read(path).wait_s == pytest.approx(4)


def test_step_clock_is_not_started_without_a_watch_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(step_clock, "_clock", None)
    assert begin({"PACELINE_RANK": "0"}) is None
    assert begin({"PACELINE_WATCH_DIR": str(tmp_path / "none"), "PACELINE_RANK": "0"}) is None
    assert timed(lambda: 7, WAIT)() == 7
    assert read(str(tmp_path / "steps_0")) is None
    (tmp_path / "steps_0").write_bytes(b"half")
    assert read(str(tmp_path / "steps_0")) is None


def test_step_clock_file_has_80_bytes(tmp_path):
    StepClock(str(tmp_path / "steps_0"))
    assert (tmp_path / "steps_0").stat().st_size == 80
