"""The snapshot of an unchanged tree of 2,000 files, against `cp -r` of it; and beside them the whole submit call."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from pathlib import Path

import paceline as pl
from common import in_turn, median, report, scratch
from paceline import snapshot

ROUNDS = 15
FILES = 2000


def make_tree(source: Path) -> None:
    """2,000 files of 1 to 8 KiB in 40 folders, one of them a script."""
    rng = random.Random(0)
    for number in range(FILES - 1):
        path = source / f"package_{number % 40}" / f"module_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"# a line of source\n" * rng.randrange(55, 440))
    (source / "train.py").write_text("print('trained')\n")


def seconds_to_take(source: Path, workspace: pl.Workspace) -> float:
    before = time.perf_counter()
    taken = snapshot.take(source, workspace.path / "snapshots", workspace.path)
    seconds = time.perf_counter() - before
    assert not taken.is_new, "nothing has changed"
    assert taken.file_count == FILES, "all files belong to it"
    return seconds


def seconds_to_copy(source: Path, target: Path) -> float:
    before = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    seconds = time.perf_counter() - before
    shutil.rmtree(target)
    return seconds


def seconds_to_submit(source: Path, workspace: pl.Workspace) -> float:
    """The call's time; the run itself is waited for, so that it does not disturb the next measurement."""
    estimator = pl.Estimator(source_directory=source, entry_script="train.py")
    before = time.perf_counter()
    run = pl.Experiment(workspace, "resubmit").submit(estimator)
    seconds = time.perf_counter() - before
    run.wait_for_completion()
    return seconds


def main() -> None:
    with scratch() as folder:
        source, workspace = folder / "source", pl.Workspace.from_config()
        make_tree(source)
        snapshot.take(source, workspace.path / "snapshots", workspace.path)
        # Files written just before their hash was taken are hashed once more, as in git: let that be over.
        time.sleep(1)
        snapshot.take(source, workspace.path / "snapshots", workspace.path)
        taken, copied = in_turn(
            ROUNDS,
            lambda: seconds_to_take(source, workspace),
            lambda: seconds_to_copy(source, folder / "copy"),
        )
        # Not in turn with the others: a run copies the tree too, and what that leaves to the disk would slow cp -r.
        [submitted] = in_turn(ROUNDS, lambda: seconds_to_submit(source, workspace))
    ratio = median(taken) / median(copied)
    report(
        "resubmit",
        f"snapshot of an unchanged tree of {FILES:,} files against cp -r",
        "at most a quarter of cp -r's time",
        ratio <= 1 / 4,
        ours_s=median(taken),
        cp_s=median(copied),
        ratio=ratio,
        whole_submit_call_s=median(submitted),
        rounds=ROUNDS,
    )


if __name__ == "__main__":
    main()
