"""`python -m paceline.sweeps.pictures RUN_DIR`: draw the pictures of a sweep that ends into its outputs.

In a process of its own: what draws takes more memory than the sweep's controller may, and could take it down.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    # This process ends before what the collector could free would matter, and most of its time goes by with loading.
    gc.disable()

from paceline.runs import store
from paceline.runs.driver_log import say
from paceline.runs.folder import RunFolder
from paceline.sweeps import trial_runs
from paceline.sweeps.pictures import draw
from paceline.sweeps.pictures.draw import LIMIT_S
from paceline.sweeps.spec import SweepSpec


def main(argv: list[str]) -> int:
    # The controller ends this process in time; one that was killed meanwhile can't, and another one draws the pictures anew.
    signal.alarm(LIMIT_S + 10)
    folder = RunFolder(Path(argv[0]))
    spec = SweepSpec.from_json(store.stored(folder).sweep or {})
    trials = trial_runs.trials(folder, spec)
    _load_without_documentation()
    drawn = draw.sketched(f"Sweep {folder.run_id}: {len(trials)} trials", spec, trials)
    draw.into(folder.outputs, drawn)
    # The page says why something is not drawn, and the log too, for who looks there for the files.
    for remark in (*drawn.remarks, draw.without_png()):
        if remark:
            say(remark)
    return 0


def _load_without_documentation() -> None:
    """Where there is matplotlib, load it without the texts that it would write for `help()` on each of its classes."""
    # If it can't be loaded, whoever draws says so.
    with contextlib.suppress(Exception):
        from matplotlib import artist

        artist.kwdoc = lambda artist: ""


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: Python would free all of matplotlib, object by object.
    os._exit(code)
