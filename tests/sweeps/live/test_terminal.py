from __future__ import annotations

import io
from pathlib import Path

import paceline as pl
from paceline.runs import states
from paceline.sweeps.live import terminal
from paceline.sweeps.live.table import Shown
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from tests.sweeps.made import add_trial, make_sweep


def test_a_sweep_that_has_ended_is_drawn_once(tmp_path: Path) -> None:
    spec = SweepSpec(space=Space({"x": pl.uniform(0, 1)}), metric="loss", goal="minimize")
    sweep = make_sweep(tmp_path, spec)
    add_trial(sweep, 0, {"x": 0.25}, (3.0,))
    stream = io.StringIO()
    assert terminal.to_the_end(sweep, stream).status == states.COMPLETED
    assert "0      Completed  3     1       5.0 s  0.25" in stream.getvalue()


def test_markup_and_control_characters_are_shown_as_they_are() -> None:
    from rich.console import Console

    stream = io.StringIO()
    seen = Shown(lines=("[bold]a\x1b[2J",), header=("TRIAL", "x[/]"), rows=(("0", "[red]\x07"),), more=3)
    Console(file=stream, width=80).print(terminal.drawn(seen))
    assert [line.rstrip() for line in stream.getvalue().splitlines()] == [
        *("[bold]a\\x1b[2J", "TRIAL  x[/]", "0      [red]\\x07", "and 3 more"),
    ]
