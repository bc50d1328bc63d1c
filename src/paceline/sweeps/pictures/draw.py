"""A sweep's pictures, as files in a folder."""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.runs import states
from paceline.runs.driver_log import say
from paceline.runs.folder import RunFolder
from paceline.sweeps.pictures import png
from paceline.sweeps.pictures.figure_data import Sketch, sketch
from paceline.sweeps.pictures.importance import LEAST, Importance, importances, missing
from paceline.sweeps.pictures.page import page
from paceline.sweeps.results import values_of
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Trial
from paceline.system.detached_process import library_dir
from paceline.system.files import write_whole

PAGE = "sweep.html"
TABLE = "importance.csv"

#: A sweep of thousands of trials takes seconds; what takes longer than this hangs.
LIMIT_S = 120


@dataclass(frozen=True)
class Shares:
    """How much each hyperparameter matters, by metric, and why something of that is left out."""

    found: tuple[tuple[str, tuple[Importance, ...]], ...] = ()
    remarks: tuple[str, ...] = ()


def sketched(title: str, spec: SweepSpec, trials: Sequence[Trial], known: Shares | None = None) -> Sketch:
    """What there is to be drawn of these trials; what can't be is among its remarks. known: the `shares` of an earlier look."""
    judged = shares(spec, trials) if known is None else known
    return sketch(title, spec, trials, judged.found, judged.remarks)


def shares(spec: SweepSpec, trials: Sequence[Trial]) -> Shares:
    """The importance of hyperparameters among these trials; with many, it takes seconds."""
    found: list[tuple[str, tuple[Importance, ...]]] = []
    remarks: list[str] = []
    # What a failed trial has logged is not trusted.
    sound = [trial for trial in trials if trial.status != states.FAILED]
    for number, metric in enumerate(spec.metrics):
        told = [(trial, values[number]) for trial in sound if len(values := values_of(trial, spec)) > number]
        valued = [(trial, value) for trial, value in told if value is not None and math.isfinite(value)]
        of = f" for {metric}" if spec.further else ""
        if len(valued) < LEAST:
            remarks.append(
                f"Importance{of} is left out: it needs {LEAST} trials with a value, and {len(valued)} have one."
            )
        elif lacking := missing():
            remarks.append(lacking)
            break
        elif of_metric := importances(valued, spec.space):
            found.append((metric, of_metric))
        else:
            remarks.append(f"Importance{of} is left out: all trials came to the same value.")
    return Shares(tuple(found), tuple(remarks))


def into(folder: Path, drawn: Sketch) -> list[str]:
    """Write all there is into a folder, which is made; the paths.

    Raises:
        OSError: it can't be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_page(folder / PAGE, drawn)
    written = [folder / PAGE]
    if drawn.importances:
        write_importances(folder / TABLE, drawn)
        written.append(folder / TABLE)
    if not without_png():
        written += png.write(drawn, folder)
    return [str(path) for path in written]


def write_page(path: Path, drawn: Sketch) -> None:
    """Write the HTML file.

    Raises:
        OSError: it can't be written.
    """
    write_whole(path, page(drawn))


def without_png() -> str | None:
    """Why no PNG can be drawn, as a sentence; None where it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "No PNG is drawn: that needs matplotlib, which this Python does not have. pip install matplotlib."
    return None


def write_importances(path: Path, drawn: Sketch) -> None:
    """Write the shares as a table.

    Raises:
        OSError: it can't be written.
    """
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(["metric", "parameter", "importance", "trials"])
    rows.writerows(
        [metric, one.name, round(one.share, 6), one.trials] for metric, found in drawn.importances for one in found
    )
    write_whole(path, text.getvalue())


def run(folder: RunFolder) -> None:
    """Draw them into the sweep's outputs. That it can't be done is said, and no reason for a sweep to fail."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "paceline.sweeps.pictures", str(folder.path)],
            env={**os.environ, "PYTHONPATH": str(library_dir(folder.path.parents[1])), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"the pictures could not be drawn: {error}")
        return
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        say(f"the pictures could not be drawn: {said[-1] if said else f'exit code {done.returncode}'}")
