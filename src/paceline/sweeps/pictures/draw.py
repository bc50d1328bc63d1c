"""Writes a sweep's pictures into a folder."""

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

#: Drawing thousands of trials takes seconds; after this time it hangs.
LIMIT_S = 120


@dataclass(frozen=True)
class Shares:
    """The importance of hyperparameters by metric, and remarks about missing ones."""

    found: tuple[tuple[str, tuple[Importance, ...]], ...] = ()
    remarks: tuple[str, ...] = ()


def sketched(title: str, spec: SweepSpec, trials: Sequence[Trial], known: Shares | None = None) -> Sketch:
    """Return the figure data of these trials.

    `known` are the `shares` of an earlier call.
    """
    judged = shares(spec, trials) if known is None else known
    return sketch(title, spec, trials, judged.found, judged.remarks)


def shares(spec: SweepSpec, trials: Sequence[Trial]) -> Shares:
    """Return the importance of hyperparameters. With many trials it takes seconds."""
    found: list[tuple[str, tuple[Importance, ...]]] = []
    remarks: list[str] = []
    # Values of failed trials are not reliable.
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
    """Write all files into a folder, which is created. Return their paths.

    Raises:
        OSError: A file cannot be written.
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
        OSError: It cannot be written.
    """
    write_whole(path, page(drawn))


def without_png() -> str | None:
    """Return why PNG files cannot be drawn, as a sentence, or None."""
    if importlib.util.find_spec("matplotlib") is None:
        return "No PNG is drawn: that needs matplotlib, which this Python does not have. pip install matplotlib."
    return None


def write_importances(path: Path, drawn: Sketch) -> None:
    """Write the importance as a CSV file.

    Raises:
        OSError: It cannot be written.
    """
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(["metric", "parameter", "importance", "trials"])
    rows.writerows(
        [metric, one.name, round(one.share, 6), one.trials] for metric, found in drawn.importances for one in found
    )
    write_whole(path, text.getvalue())


def run(folder: RunFolder) -> None:
    """Draw the pictures into the sweep's outputs, in a process of their own.

    Errors are logged and do not fail the sweep.
    """
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
