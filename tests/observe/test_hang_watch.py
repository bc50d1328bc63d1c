"""When a run is found to hang, with looks that a test gives."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.observe import hang_watch
from paceline.observe.hang_watch import HangWatch
from paceline.runs.folder import RunFolder
from tests.helpers import make_job, make_launch


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Looks:
    """Tells at once what `ranks` says."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.count = clock, 0
        self.ranks: dict[str, Any] = {}

    def begin(self, done, *, native: bool = False) -> None:
        self.count += 1
        done(
            {
                "time": self.clock.now,
                "run_id": "lab_1_2",
                "attempt": 1,
                "work_dir": "/w",
                "ranks": self.ranks,
                "notes": [],
            }
        )


@pytest.fixture
def made(tmp_path, monkeypatch):
    """(watch, its looks, its clock, its notes, the run's folder); `go(s)` lets so many seconds pass."""
    clock = Clock()
    monkeypatch.setattr(hang_watch, "time", clock)
    folder = RunFolder(tmp_path / "lab_1_2")
    folder.attempt(1).mkdir(parents=True)
    folder.metrics.mkdir()
    folder.logs.mkdir()
    noted: list[Any] = []

    def make(**values: Any):
        looks = Looks(clock)
        looks.ranks = {"0": {"pid": 7, "state": "S", "cpu_s": 1.0, "io_bytes": 5, "threads": [], "node": "n"}}
        launch = make_launch(make_job(**{"hang_seconds": 100, **values}))
        watch = HangWatch(launch, folder, looks, noted.append)

        def go(seconds: float) -> None:
            for _ in range(int(seconds)):
                clock.now += 1.0
                watch.look()

        return watch, looks, go, noted, folder

    return make


@pytest.mark.promise("run-hangs-noticed-rank-collective")
def test_hang_of_a_run_is_recorded_once_and_its_end_is_recorded(made):
    watch, looks, go, noted, folder = made()
    go(98)
    assert looks.count == 0, "nothing is looked at before the limit"
    looks.ranks["0"]["state"] = "T"
    # Load samples that the nodes write about themselves are not a sign of progress.
    for number in range(60):
        (folder.metrics / "node_0.jsonl").write_text("x" * number)
        go(1)
    assert [bool(hang) for hang in noted] == [True]
    assert noted[0]["text"].startswith("Rank 0: it is stopped, by SIGSTOP or Ctrl-Z")
    assert noted[0]["report"] == "attempts/1/hang.txt"
    assert noted[0]["text"] in folder.hang_report(1).read_text()
    assert json.loads(folder.hang_report(1).with_suffix(".json").read_text())["waiting"][0].startswith(
        "Rank 0: it is stopped"
    )
    assert watch.failure is None, "on_hang is 'report'"
    go(200)
    assert len(noted) == 1
    folder.rank_log(1, 0).write_text("it goes on\n")
    go(10)
    assert noted[1:] == [None]
    assert [list(json.loads(line)) for line in folder.hangs(1).read_text().splitlines()] == [
        ["since_utc"],
        ["until_utc"],
    ]


def test_new_output_or_metrics_reset_the_hang_timeout(made):
    _, looks, go, noted, folder = made()
    for number in range(5):
        go(80)
        path = folder.rank_log(1, 0) if number % 2 else folder.metric_log(0)
        path.write_text("x" * (number + 1))
    assert looks.count == 0
    assert noted == []


def test_computing_ranks_are_not_reported_as_hanging_and_are_probed_rarely(made):
    _, looks, go, noted, _ = made()
    begin = looks.begin

    def computing(done, **values: Any) -> None:
        looks.ranks = {"0": {**looks.ranks["0"], "cpu_s": looks.ranks["0"]["cpu_s"] + 5.0}}
        begin(done, **values)

    looks.begin = computing
    go(1000)
    assert noted == []
    assert looks.count < 80


@pytest.mark.parametrize(("values", "looks_at_it"), [({"hang_seconds": 0}, False), ({"on_hang": "fail"}, True)])
def test_hang_limit_0_disables_the_check_and_on_hang_fail_ends_the_run(made, values, looks_at_it):
    watch, looks, go, _, _ = made(**values)
    go(300)
    assert bool(looks.count) == looks_at_it
    if looks_at_it:
        assert watch.failure is not None
        assert watch.failure.cause == "hang"
        assert watch.failure.message.startswith("The run hung: nothing came for ")


def test_workers_wait_for_a_lost_rank_only_if_two_stack_dumps_a_second_apart_say_so(made):
    clock = Clock()
    looks = Looks(clock)
    looks.look = lambda: None  # type: ignore[attr-defined]
    frames = [{"file": "/w/train.py", "line": 3, "function": "step"}]
    entry = {"channel": "torch 0", "kind": "all_reduce", "name": "", "number": 3, "ranks": "", "began": 5.0}
    rank = {"pid": 7, "state": "S", "cpu_s": 1.0, "io_bytes": 5, "threads": [{"name": "main", "frames": frames}]}
    looks.ranks = {"0": {**rank, "board": [{**entry, "shape": "", "bytes": 0}]}, "1": {"silent": "it is lost"}}
    waits = hang_watch.LostWait(looks, [1])
    waits.look()
    assert looks.count == 0
    for count in (1, 2):
        clock.now += 1.0
        hang_watch.time.now += 1.0  # type: ignore[attr-defined]
        waits.look()
        assert waits.stuck == ({0} if count == 2 else set())
        assert looks.count == count
    # Further dumps come more and more rarely.
    for count in (2, 3):
        clock.now += 1.0
        hang_watch.time.now += 1.0  # type: ignore[attr-defined]
        waits.look()
        assert looks.count == count
    assert waits.stuck == {0}
