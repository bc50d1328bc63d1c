"""A sweep of 10,000 trials: the memory of its controller, and how soon `paceline sweep show` has them."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import paceline as pl
from common import in_turn, median, program, report, scratch
from paceline.runs import store
from paceline.runs.folder import RunFolder

ROUNDS = 5
MOST_S = 1.0
MOST_MIB = 300
#: Values of the metric that each trial has logged.
VALUES = 20


def make_sweep(folder: Path, trials: int) -> RunFolder:
    """A sweep that has ended, with this many trials: a few real ones, and copies of one with points and curves of their own."""
    (folder / "source").mkdir()
    (folder / "source" / "train.py").write_text("import paceline\npaceline.Run.get_context().log('loss', 0.1)\n")
    estimator = pl.Estimator(source_directory=folder / "source", entry_script="train.py")
    space = {"--lr": pl.loguniform(1e-4, 1), "--layers": pl.randint(1, 9), "--kind": pl.choice("a", "b", "c")}
    sweep = pl.Sweep(estimator, space, metric="loss", goal="minimize", trials=4, seed=1)
    run = pl.Experiment(pl.Workspace.from_config(), "many").submit(sweep)
    run.wait_for_completion()
    folders = run.folder.path.parent
    first = RunFolder(folders / f"{run.id}_0")
    job = json.loads(first.job.read_text())
    source = random.Random(1)
    for number in range(4, trials):
        chosen = run.spec.space.draw(lambda dimension: dimension.expression.raw_at(source.random()))
        trial = {"number": number, "chosen": chosen, "values": run.spec.space.values(chosen)}
        copy = RunFolder(folders / f"{run.id}_{number}")
        for part in (copy.metrics, copy.outputs, copy.logs, copy.checkpoints):
            part.mkdir(parents=True)
        lines = [
            {"name": "loss", "value": 1 / (1 + step) + source.random(), "time": 1.0, "step": step}
            for step in range(VALUES)
        ]
        copy.metric_log(0).write_text("".join(json.dumps(line) + "\n" for line in lines))
        copy.lock.touch()
        copy.job.write_text(json.dumps(job | {"run_id": copy.run_id, "trial": trial}) + "\n")
        copy.state.write_bytes(first.state.read_bytes())
    whole = json.loads(run.folder.state.read_text())
    whole["sweep"]["trials"] = trials
    run.folder.state.write_text(json.dumps(whole) + "\n")
    return RunFolder(run.folder.path)


def controller_mib(sweep: RunFolder) -> float:
    """The most memory that a controller takes that goes on with the sweep: it reads all trials, proposes and starts 8 more."""
    record = store.stored(sweep)
    assert record.sweep is not None
    trials = record.sweep["trials"]
    run = pl.Workspace.from_config().get_run(sweep.run_id)
    assert record.is_terminal
    # 10,000 are the most that a sweep may have, so it begins a little below.
    run.more(8)
    deadline, most = time.monotonic() + 600, 0.0
    while True:
        now = run.record()
        if now.is_terminal and now.sweep["trials"] == trials + 8:
            return most
        status = Path(f"/proc/{now.owner.get('pid')}/status")
        if status.exists() and now.owner.get("pid") != os.getpid():
            peak = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM")]
            most = max(most, float(peak[0]) / 1024) if peak else most
        assert time.monotonic() < deadline, "the sweep does not come to its end"
        time.sleep(0.05)


def seconds_of(*words: str) -> float:
    before = time.perf_counter()
    subprocess.run([program("paceline"), "sweep", "show", *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    given = parser.parse_args()
    with scratch() as folder:
        sweep = make_sweep(folder, given.trials - 8)
        mib = controller_mib(sweep)
        shown = subprocess.run(
            [program("paceline"), "sweep", "show", sweep.run_id, "--json"], check=True, capture_output=True
        )
        assert len(json.loads(shown.stdout)["trials"]) == given.trials, "every trial is shown"
        top, every = map(
            median, in_turn(ROUNDS, lambda: seconds_of(sweep.run_id, "--top", "10"), lambda: seconds_of(sweep.run_id))
        )
    report(
        "sweep_large_memory",
        f"memory of a sweep's controller with {given.trials:,} trials, at most",
        f"at most {MOST_MIB} MB",
        mib * 2**20 / 1e6 <= MOST_MIB,
        mb=mib * 2**20 / 1e6,
        trials=given.trials,
    )
    report(
        "sweep_large_show",
        f"paceline sweep show with {given.trials:,} trials",
        f"under {MOST_S:g} s",
        every < MOST_S,
        seconds=every,
        top_10_seconds=top,
        rounds=ROUNDS,
    )


if __name__ == "__main__":
    sys.exit(main())
