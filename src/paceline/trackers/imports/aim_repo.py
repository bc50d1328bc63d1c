"""Read Aim's repositories from a temporary copy, because `aim` writes into its folder."""

from __future__ import annotations

import atexit
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import UserError
from paceline.runs import states
from paceline.system.scratch import Scratch
from paceline.system.serialization import flat
from paceline.trackers.imports.old_run import UNFINISHED, BrokenRun, OldRun, Point

if TYPE_CHECKING:
    from aim import Run  # type: ignore[import-not-found,unused-ignore]


def runs(path: Path) -> Iterator[OldRun | BrokenRun]:
    """Yield the runs of an Aim repository: the folder `.aim` or its parent."""
    old = path if path.name == ".aim" else path / ".aim"
    if not old.is_dir():
        raise UserError(f"{str(path)!r} has no folder .aim. Name the folder in which you called `aim init`.")
    try:
        from aim import Repo, Run
        from aim.sdk.index_manager import RepoIndexManager  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise UserError("Aim's repositories need aim, on Python 3.12 or older: pip install aim.") from error
    # Keep the copy until this program ends, because callers read the runs' values after this generator has ended.
    copy = Scratch("aim")
    atexit.register(copy.close)
    shutil.copytree(old, copy.path / ".aim", symlinks=True)
    repo = Repo.from_path(str(copy.path))
    index = RepoIndexManager.get_index_manager(repo)
    keys = sorted(repo.list_all_runs())
    # Index all runs before reading the first run: Aim opens the index once, and would not see runs that are added later.
    for key in keys:
        index.index(key)
    damaged = set(repo.list_corrupted_runs())
    for key in keys:
        # RocksDB raises errors of several classes. Their only common base class is Exception.
        try:
            if key in damaged:
                raise ValueError("its database is damaged")
            yield _run(Run(key, repo=repo, read_only=True))
        except Exception as error:
            yield BrokenRun(key, f"aim can't read it: {error}")


def _run(run: Run) -> OldRun:
    try:
        attributes = run[...]
    except KeyError:
        attributes = {}
    return OldRun(
        key=str(run.hash),
        experiment=str(run.experiment or "aim"),
        name=run.name,
        description=run.description,
        state=UNFINISHED if run.end_time is None else states.COMPLETED,
        started_s=run.creation_time,
        ended_s=run.end_time,
        params=dict(flat(attributes)),
        tags=dict.fromkeys(map(str, run.tags), ""),
        points=functools.partial(_points, run),
    )


def _points(run: Run) -> Iterator[Point]:
    for metric in run.metrics():
        context = [f"{key}={value}" for key, value in sorted(flat(metric.context.to_dict()))]
        for step, (value, _, time_s) in metric.data.items():
            yield Point(" ".join([str(metric.name), *context]), value, step, time_s)
