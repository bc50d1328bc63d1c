"""Read Aim's repositories from a temporary copy, because `aim` writes into its folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import UserError
from paceline.runs import states
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
    # Each yielded run must keep this temporary copy alive, because callers read the run's values after this generator has ended.
    copy = tempfile.TemporaryDirectory(prefix="paceline-aim-")
    shutil.copytree(old, os.path.join(copy.name, ".aim"), symlinks=True)
    repo = Repo.from_path(copy.name)
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
            yield _run(Run(key, repo=repo, read_only=True), copy)
        except Exception as error:
            yield BrokenRun(key, f"aim can't read it: {error}")


def _run(run: Run, copy: tempfile.TemporaryDirectory[str]) -> OldRun:
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
        points=_points_of(run, copy),
    )


def _points_of(run: Run, copy: tempfile.TemporaryDirectory[str]) -> Callable[[], Iterable[Point]]:
    def points() -> Iterator[Point]:
        assert os.path.isdir(copy.name), "removed while it is read"
        for metric in run.metrics():
            context = [f"{key}={value}" for key, value in sorted(flat(metric.context.to_dict()))]
            for step, (value, _, time_s) in metric.data.items():
                yield Point(" ".join([str(metric.name), *context]), value, step, time_s)

    return points
