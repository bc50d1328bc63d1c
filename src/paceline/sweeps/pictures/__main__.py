"""Draw a sweep's pictures: `python -m paceline.sweeps.pictures RUN_DIR`.

The pictures are written into the sweep's outputs.
The controller runs this module in a separate process, because drawing takes much memory and may crash.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    # Disable garbage collection, because this short process spends most of its time on imports.
    gc.disable()

from paceline.runs import store
from paceline.runs.driver_log import say
from paceline.runs.folder import RunFolder
from paceline.sweeps import trial_runs
from paceline.sweeps.pictures import LIMIT_S, draw
from paceline.sweeps.spec import SweepSpec


def main(argv: list[str]) -> int:
    # The controller kills this process at the time limit. If the controller is dead, this alarm ends the process.
    signal.alarm(LIMIT_S + 10)
    folder = RunFolder(Path(argv[0]))
    spec = SweepSpec.from_json(store.stored(folder).sweep or {})
    trials = trial_runs.trials(folder, spec)
    _load_without_documentation()
    drawn = draw.sketched(f"Sweep {folder.run_id}: {len(trials)} trials", spec, trials)
    draw.into(folder.outputs, drawn)
    # Write the remarks that the page shows to the log, too: they say why a picture is missing.
    for remark in (*drawn.remarks, draw.without_png()):
        if remark:
            say(remark)
    return 0


def _load_without_documentation() -> None:
    """Import matplotlib, if installed, without building its docstrings."""
    # Ignore errors of this import: drawing imports matplotlib again, and reports them.
    with contextlib.suppress(Exception):
        from matplotlib import artist

        artist.kwdoc = lambda artist: ""


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit at once, because Python would free matplotlib's objects one by one.
    os._exit(code)
