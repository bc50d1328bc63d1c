from __future__ import annotations

import io
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import paceline as pl
from paceline.runs import notebook as run_notebook
from paceline.runs import states, store, tags_and_properties
from paceline.runs.failure import FailureReport
from paceline.sweeps import live_trials
from paceline.sweeps.live_trials import Board, Shown, Standing, shown
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Trial
from tests.helpers import make_record
from tests.sweeps.made import add_trial, log_values, make_sweep

SPEC = SweepSpec(space=Space({"x": pl.uniform(0, 1)}), metric="loss", goal="minimize")

TABLE_SPEC = SweepSpec(space=Space({"--x": pl.uniform(0, 1), "y": pl.choice(1, [2])}), metric="loss", goal="minimize")
TIMES = {"started_utc": "2026-01-01T00:00:00Z", "ended_utc": "2026-01-01T00:00:02Z"}


def test_live_board_shows_new_values_at_each_refresh(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, SPEC, states.RUNNING)
    board = Board(sweep)
    assert board.look().trials == ()
    first = add_trial(sweep, 0, {"x": 0.1}, (3.0,), states.RUNNING)
    add_trial(sweep, 1, {"x": 0.2}, (2.0,), states.FAILED)
    assert [(t.status, t.curve) for t in board.look().trials] == [("Running", (3.0,)), ("Failed", (2.0,))]
    log_values(first, "loss", (1.0,))
    store.change(first, store.stored(first), states.COMPLETED)
    standing = board.look()
    assert (standing.record.status, standing.spec) == ("Running", SPEC)
    assert [(t.status, t.curve) for t in standing.trials] == [("Completed", (3.0, 1.0)), ("Failed", (2.0,))]


def test_live_table_shows_a_trial_as_paused_and_continues_its_values_after_it_resumes(tmp_path: Path) -> None:
    spec = SweepSpec(space=Space({"x": pl.uniform(0, 1)}), metric="loss", goal="minimize", stop=pl.ASHA(promote=True))
    sweep = make_sweep(tmp_path, spec, states.RUNNING)
    first = add_trial(sweep, 0, {"x": 0.1}, (3.0, 2.0), states.RUNNING, first_step=0)
    board = Board(sweep)
    assert board.look().trials[0].shown == states.RUNNING
    tags_and_properties.set_tags(first.notes, {"paused": "it waits"})
    store.change(first, store.stored(first), states.CANCELED)
    assert [(t.shown, t.status) for t in board.look().trials] == [("Paused", states.CANCELED)]
    told = {"from": first.run_id, "rung": 2, "why": "it is good"}
    # The trial continues from a checkpoint that is older than its last value.
    second = add_trial(sweep, 0, {"x": 0.1}, (1.5,), states.RUNNING, leg=2, first_step=1, told=told)
    (trial,) = board.look().trials
    assert (trial.run_id, trial.shown, trial.curve, trial.rung) == (second.run_id, states.RUNNING, (3.0, 1.5), 2)
    log_values(second, "loss", (1.0,), 2)
    assert board.look().trials[0].curve == (3.0, 1.5, 1.0)
    tags_and_properties.set_tags(second.notes, {"paused": "it waits again"})
    store.change(second, store.stored(second), states.CANCELED)
    assert board.look().trials[0].shown == "Paused"
    # The end of the sweep ends its waiting trials too.
    tags_and_properties.set_tags(second.notes, {"stopped": "it was not good enough"})
    store.change(sweep, store.stored(sweep), states.COMPLETED)
    assert board.look().trials[0].shown == states.CANCELED


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a notebook has shown, the last state of one output."""
    outputs: list[str] = []

    def display(html: str, *, display_id: bool) -> Any:
        assert display_id
        outputs.append(html)
        return SimpleNamespace(update=lambda html: outputs.__setitem__(0, html))

    ipython, shown = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    shown.HTML, shown.display = str, display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    return outputs


@pytest.mark.promise("sweep-live-table-terminal-notebook")
def test_notebook_table_of_a_sweep_is_updated_in_place_until_the_sweep_ends(tmp_path: Path, kernel: list[str]) -> None:
    spec = SweepSpec(space=Space({"x": pl.uniform(0, 1)}), metric="loss", goal="minimize")
    sweep = make_sweep(tmp_path, spec, states.RUNNING)
    assert run_notebook.is_here()
    end = threading.Timer(0.2, lambda: store.change(sweep, store.stored(sweep), states.COMPLETED))
    end.start()
    assert live_trials.follow_in_notebook(sweep).status == states.COMPLETED
    end.join()
    assert len(kernel) == 1
    assert "is Completed" in kernel[0]


def test_terminal_ipython_is_not_a_notebook(kernel: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", SimpleNamespace)
    assert not run_notebook.is_here()


def test_html_table_of_trials_escapes_names_and_values() -> None:
    seen = Shown(lines=("<b>",), header=("TRIAL", "STATUS", "<i>"), rows=(("0", "Failed", "<script>\x1b"),), more=2)
    assert live_trials.table_html(seen) == (
        "<div>&lt;b&gt;</div><table><thead><tr><th>TRIAL</th><th>STATUS</th><th>&lt;i&gt;</th></tr></thead><tbody><tr><td>0</td>"
        '<td style="color: firebrick">Failed</td><td>&lt;script&gt;\\x1b</td></tr></tbody></table><div>and 2 more</div>'
    )


def test_live_table_of_an_ended_sweep_is_printed_once(tmp_path: Path) -> None:
    spec = SweepSpec(space=Space({"x": pl.uniform(0, 1)}), metric="loss", goal="minimize")
    sweep = make_sweep(tmp_path, spec)
    add_trial(sweep, 0, {"x": 0.25}, (3.0,))
    stream = io.StringIO()
    assert live_trials.follow_on_terminal(sweep, stream).status == states.COMPLETED
    assert "0      Completed  3     1       5.0 s  0.25" in stream.getvalue()


def test_live_trials_table_shows_markup_literally_and_escapes_control_characters() -> None:
    from rich.console import Console

    stream = io.StringIO()
    seen = Shown(lines=("[bold]a\x1b[2J",), header=("TRIAL", "x[/]"), rows=(("0", "[red]\x07"),), more=3)
    Console(file=stream, width=80).print(live_trials.drawn(seen))
    assert [line.rstrip() for line in stream.getvalue().splitlines()] == [
        *("[bold]a\\x1b[2J", "TRIAL  x[/]", "0      [red]\\x07", "and 3 more"),
    ]


def trial(number: int, value: float | None, status: str = states.COMPLETED, **values: Any) -> Trial:
    curve = () if value is None else (value,)
    return Trial(number=number, run_id="", status=status, curve=curve, values={"--x": 0.125} | values, **TIMES)


def standing(*trials: Trial, **record: Any) -> Standing:
    given = {"status": states.RUNNING, "kind": "sweep", **TIMES}
    return Standing(record=make_record(**(given | record)), spec=TABLE_SPEC, trials=trials)


def test_best_trials_are_listed_first_and_missing_values_as_a_dash():
    seen = shown(standing(trial(0, None, states.FAILED), trial(1, 0.5, y=[2]), trial(2, 0.25)), 10)
    assert seen.header == ("TRIAL", "STATUS", "loss", "VALUES", "TIME", "x", "y")
    assert seen.rows == (
        ("2", "Completed", "0.25", "1", "2.0 s", "0.125", "-"),
        ("1", "Completed", "0.5", "1", "2.0 s", "0.125", "[2]"),
        ("0", "Failed", "-", "0", "2.0 s", "0.125", "-"),
    )
    assert seen.lines[0].endswith("is Running for 2.0 s: 3 of 20 trials ended, 1 failed")
    assert seen.lines[1] == "Best: trial 2, loss 0.25 with x 0.125"


def test_live_table_of_few_rows_shows_the_best_trials_and_some_running_trials():
    ended = [trial(number, number / 10) for number in range(10)]
    running = [trial(number, number / 10, states.RUNNING) for number in range(10, 20)]
    seen = shown(standing(*ended, *running), 6)
    assert [row[0] for row in seen.rows] == ["0", "1", "2", "10", "11", "12"]
    assert seen.more == 14
    assert len(shown(standing(*ended), 6).rows) == 6


def test_live_table_of_a_failed_sweep_shows_its_warnings_and_failure_message():
    report = FailureReport(cause="trials", message="all trials have failed.")
    record = {"status": states.FAILED, "warnings": ("no metric",), "failure": report}
    lines = shown(standing(trial(0, None, states.CANCELED), **record), 5).lines
    assert lines[0].endswith("is Failed in 2.0 s: 1 of 20 trials ended, 1 stopped")
    assert lines[1:] == ("Warning: no metric", "all trials have failed.")
