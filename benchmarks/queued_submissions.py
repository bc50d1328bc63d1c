"""200 runs that wait in Slurm's queue, read by several processes at once: how often the scheduler is asked.

Programs in front of Slurm's own write down each call. Two processes run `paceline list`, two ask each run for its
state, from the first submission to half a minute after the last.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import paceline as pl
from common import program, report

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.engines import slurm_lab

RUNS = 200
READ_S = 30.0
#: Of these each is a question to the scheduler or its accounting about how jobs stand.
ASKING = ("squeue", "sacct", "scontrol", "sinfo")
COUNTED = (*ASKING, "sbatch", "scancel")

WRAPPER = """#!/bin/sh
echo "$(date +%s.%N) {name} $*" >> {calls}
exec {real} "$@"
"""
LISTING = "while true; do {paceline} list --all --json > {folder}/list.$$ && echo list >> {folder}/looks; done"
READING = """
import sys, paceline as pl
looks = open(sys.argv[1], "a", buffering=1)
while True:
    for run in pl.Experiment(pl.Workspace.from_config(), "queued").get_runs():
        run.status
    print("read", file=looks)
"""


def put_in_front(folder: Path, environment: Mapping[str, str]) -> None:
    """Let this process and its children find programs that count before those that they stand for."""
    os.environ.update(environment)
    (folder / "bin").mkdir()
    for name in COUNTED:
        real = slurm_lab._find(name)
        path = folder / "bin" / name
        path.write_text(WRAPPER.format(name=name, calls=folder / "calls", real=real))
        path.chmod(0o755)
    os.environ["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"


def readers(folder: Path) -> list[subprocess.Popen[bytes]]:
    listing = LISTING.format(paceline=program("paceline"), folder=folder)
    reading = [sys.executable, "-c", READING, str(folder / "looks")]
    return [
        subprocess.Popen(words, start_new_session=True, stdout=subprocess.DEVNULL)
        for words in (["sh", "-c", listing], ["sh", "-c", listing], reading, reading)
    ]


def submit_all(folder: Path) -> float:
    """Seconds that it took."""
    (folder / "source").mkdir()
    (folder / "source" / "train.py").write_text("print('never')\n")
    experiment = pl.Experiment(pl.Workspace.from_config(), "queued")
    estimator = pl.Estimator(source_directory=folder / "source", entry_script="train.py", compute_target="there")
    before = time.monotonic()
    for _ in range(RUNS):
        experiment.submit(estimator)
    return time.monotonic() - before


def most_in(window_s: float, times: list[float]) -> int:
    """The most calls that any stretch of this length has."""
    return max((sum(begin <= time < begin + window_s for time in times) for begin in times), default=0)


def main() -> None:
    lack = slurm_lab.missing()
    if lack:
        raise SystemExit(f"This machine lacks {lack}.")
    with slurm_lab.cluster("pq") as lab:
        folder = lab.hosts.folder / "bench"
        folder.mkdir()
        put_in_front(folder, {"PACELINE_WORKSPACE": str(folder / "ws"), **lab.environment})
        subprocess.run([program("paceline"), "compute", "add", "there", "--kind", "slurm"], check=True)
        lab.run("sbatch", "-N2", "--exclusive", "--output=/dev/null", "--wrap=sleep 3600")
        begun, started = time.time(), readers(folder)
        try:
            submitted_s = submit_all(folder)
            quiet = time.time()
            time.sleep(READ_S)
        finally:
            for reader in started:
                os.killpg(reader.pid, 9)
                reader.wait()
        calls = [line.split(maxsplit=2) for line in (folder / "calls").read_text().splitlines()]
        looks = collections.Counter((folder / "looks").read_text().split())
        listed = json.loads(subprocess.check_output([program("paceline"), "list", "--all", "--json"]))
    states = collections.Counter(run["status"] for run in listed)
    assert states == {"Queued": RUNS}, f"all runs wait: {states}"
    # --- what a look asks
    asked = [(float(when), f"{name} {words}") for when, name, words in calls if name in ASKING and float(when) > begun]
    times = [when for when, _ in asked]
    report(
        "queued_submissions",
        f"{RUNS} queued runs on Slurm, read by 4 processes: questions to the scheduler",
        "one for all runs, at most 1 in any 5 s",
        most_in(5.0, times) <= 1 and len({words for _, words in asked}) == 1,
        most_in_5_s=most_in(5.0, times),
        questions=len(asked),
        kinds_of_question=len({words for _, words in asked}),
        questions_after_the_last_submission=sum(when > quiet for when in times),
        looks_at_all_runs=looks["list"] + looks["read"],
        submissions_s=submitted_s,
        sbatch_calls_per_run=sum(name == "sbatch" and float(when) > begun for when, name, _ in calls) / RUNS,
        question=sorted({words for _, words in asked}),
    )


if __name__ == "__main__":
    main()
