"""Helpers of tests of sweeps: a script, a sweep on disk, a moment to wait for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.runs.folder import RunFolder
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.system.detached_process import library_dir
from paceline.workspace_dir import note_made
from tests.helpers import make_run, write_tree

SCRIPT = """
import argparse, sys, time
import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--x", type=float)
parser.add_argument("--kind", default="a")
parser.add_argument("--fail", action="store_true")
parser.add_argument("--values", type=int, default=3)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--name", default="score")
parser.add_argument("--cost", type=float)
given = parser.parse_args()
run = paceline.Run.get_context()
for step in range(given.values):
    run.log(given.name, given.x + step / 100, step=step)
    if given.cost is not None:
        run.log("cost", given.cost, step=step)
    time.sleep(given.pause)
if given.fail:
    raise ValueError("no luck with this one")
"""

#: A timeout that only guards against hanging.
_LIMIT_S = 180

SWEEP_ID = "tuned_1700000000_00000001"


@contextmanager
def sweep_on_disk(tmp_path: Path, script: str = "", space: Any = None, **values: Any) -> Iterator[RunFolder]:
    """Make a sweep that only this process supervises, which holds its lock. values: of its spec."""
    spec = SweepSpec(space=Space(space or {"x": [1, 2]}), **{"metric": "score", **values})
    folder, fd = make_run(
        tmp_path / ".paceline" / "runs", SWEEP_ID, kind="sweep", sweep=spec.to_json(), snapshot_id="1", target="local"
    )
    try:
        folder.snapshot.symlink_to(write_tree(tmp_path / ".paceline/snapshots/1", {"train.py": script}))
        yield folder
    finally:
        os.close(fd)


#: Each Python process runs this code at its start. It hides matplotlib from the process that draws a sweep, and runs
#: the sitecustomize of tests/warm/site in all other processes.
_HIDING = """
import os, sys
if "paceline.sweeps.pictures" in sys.orig_argv:
    sys.modules["matplotlib"] = None
else:
    here = os.path.dirname(__file__)
    sys.path.remove(here)
    del sys.modules["sitecustomize"]
    try:
        import sitecustomize
    except ModuleNotFoundError:
        pass
    sys.path.insert(0, here)
"""


def hide_matplotlib(workspace_dir: Path) -> None:
    """Hide matplotlib from the processes that draw this workspace's sweeps, so that their ends draw no PNG."""
    workspace_dir.mkdir(parents=True, exist_ok=True)
    note_made(workspace_dir)
    # The sweep's processes load Paceline from this folder, which comes before all others on their import path.
    write_tree(library_dir(workspace_dir), {"sitecustomize.py": _HIDING})


def hold_script(folder: Path) -> Path:
    """Let the script in `folder` wait for a file. Return its path: a test makes the file to let the runs go on."""
    go, script = folder / "go", folder / "source" / "train.py"
    script.write_text(
        f"import os, time\nwhile not os.path.exists({os.fspath(go)!r}):\n    time.sleep(0.02)\n{script.read_text()}"
    )
    return go


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not true():
        assert time.monotonic() < deadline, "it has not come to that"
        time.sleep(0.05)
