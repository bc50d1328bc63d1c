"""Pipelines on this machine, in a workspace of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from tests.helpers import write_tree

#: A script that obeys its arguments: `out=FOLDER` writes a file there, `in=FOLDER` reads one, `meet=FILE=OTHER` makes a file
#: and waits for another, `wait=FILE` waits for a file, `fail` raises. Each run leaves a mark in the folder `ran`.
SCRIPT = """
import os, sys, time
import paceline

run = paceline.Run.get_context()
ran = os.environ["RAN"]
with open(os.path.join(ran, os.environ["STEP"]), "a") as marks:
    marks.write("x")
value = 1
for word in sys.argv[1:]:
    what, _, rest = word.partition("=")
    if what == "in":
        with open(os.path.join(rest, "value.txt")) as file:
            value += int(file.read())
    elif what == "out":
        with open(os.path.join(rest, "value.txt"), "w") as file:
            file.write(str(value))
    elif what == "meet":
        own, _, other = rest.partition("=")
        open(own, "w").close()
        while not os.path.exists(other):
            time.sleep(0.02)
    elif what == "wait":
        while not os.path.exists(rest):
            time.sleep(0.02)
    elif what == "add":
        value += int(rest)
    elif what == "fail":
        raise ValueError("no luck with this one")
run.log("value", value)
with open("outputs/note.txt", "w") as note:
    note.write(str(value))
"""


class Place:
    """Where pipelines of a test run."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.source = write_tree(top / "source", {"step.py": SCRIPT})
        (top / "ran").mkdir()
        self.workspace = pl.Workspace(top / ".paceline")
        self.experiment = pl.Experiment(self.workspace, "piped")

    def step(self, name: str, *arguments: Any, **options: Any) -> pl.Step:
        """A step of the script. Words of the form ("in=", data) are one word."""
        words: list[Any] = [f"{a[0]}{a[1]}" if isinstance(a, tuple) else a for a in arguments]
        estimator = pl.Estimator(
            self.source,
            entry_script="step.py",
            arguments=words,
            inputs=[a[1] for a in arguments if isinstance(a, tuple)],
            environment_variables={"RAN": str(self.top / "ran"), "STEP": name},
            **options.pop("estimator", {}),
        )
        return pl.Step(name, estimator, **options)

    def ran(self) -> dict[str, str]:
        """Step -> a mark for each time that its script ran."""
        return {path.name: path.read_text() for path in sorted((self.top / "ran").iterdir())}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path / "leases"))
    return Place(tmp_path)


@pytest.fixture
def submit(place: Place) -> Callable[..., pl.PipelineRun]:
    """Submit a pipeline of these steps."""

    def submit(*steps: pl.Step, **options: Any) -> pl.PipelineRun:
        given = {key: options.pop(key) for key in ("pipeline_parameters", "regenerate_outputs") if key in options}
        run = place.experiment.submit(pl.Pipeline(list(steps), **options), **given)
        assert isinstance(run, pl.PipelineRun)
        return run

    return submit
