"""`paceline list` in a workspace with 10,000 runs that have ended."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from pathlib import Path

import paceline as pl
from common import in_turn, median, program, report, scratch
from paceline.runs.folder import RunFolder

ROUNDS = 7
RUNS = 10_000


def make_runs(folder: Path) -> None:
    """10,000 runs, a minute apart: a real one, and copies of what lies in its folder, each with its own record."""
    (folder / "source").mkdir()
    (folder / "source" / "train.py").write_text("import paceline\npaceline.Run.get_context().log('loss', 0.1)\n")
    workspace = pl.Workspace.from_config()
    estimator = pl.Estimator(source_directory=folder / "source", entry_script="train.py")
    run = pl.Experiment(workspace, "many").submit(estimator, tags={"kind": "benchmark"})
    run.wait_for_completion()
    job = json.loads(run.folder.job.read_text())
    files = {path.relative_to(run.folder.path): path for path in sorted(run.folder.path.rglob("*"))}
    newest = int(run.id.split("_")[1])
    for number in range(1, RUNS):
        run_id = f"many_{newest - 60 * number}_{secrets.token_hex(4)}"
        copy = RunFolder(workspace.runs_dir / run_id)
        copy.path.mkdir()
        for name, path in files.items():
            if path.is_symlink():
                (copy.path / name).symlink_to(os.readlink(path))
            elif path.is_dir():
                (copy.path / name).mkdir()
            else:
                (copy.path / name).write_bytes(path.read_bytes())
        copy.job.write_text(json.dumps(job | {"run_id": run_id}) + "\n")


def seconds_of(*words: str) -> float:
    before = time.perf_counter()
    subprocess.run([program("paceline"), "list", *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - before


def main() -> None:
    with scratch() as folder:
        make_runs(folder)
        listed = subprocess.run([program("paceline"), "list", "--all", "--json"], check=True, capture_output=True)
        assert len(json.loads(listed.stdout)) == RUNS, "every run is listed"
        times = in_turn(ROUNDS, seconds_of, lambda: seconds_of("--all"), lambda: seconds_of("--all", "--json"))
    plain, every, as_json = map(median, times)
    report(
        "list_runs",
        f"paceline list with {RUNS:,} runs in the workspace",
        "under 1 s",
        plain < 1,
        list_s=plain,
        list_all_s=every,
        list_all_json_s=as_json,
        rounds=ROUNDS,
    )


if __name__ == "__main__":
    main()
