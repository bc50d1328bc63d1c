"""One queue of a machine for all of its users: an urgent run on a full machine, and five Unix users for three simulated days.

urgent    seconds from `paceline run --priority urgent` to its first line, if the run that holds all GPUs saves its step and
          leaves at once, and if it ignores SIGTERM for its grace period; and the steps that the first kind does again
days      five users ask for GPUs through the real files of the queue, on a simulated clock (needs root)

python benchmarks/shared_queue.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from common import median, program, report, scratch

ROUNDS, GRACE_S, SEEDS = 5, 10, (1, 2, 3)
TRAIN = """
import os, pathlib, signal, sys, time
saved = pathlib.Path(os.environ["PACELINE_CHECKPOINT_DIR"]) / "step"
step, asked = int(saved.read_text()) if saved.exists() else 0, []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
print("starts at", step, flush=True)
while True:
    time.sleep(0.05)
    step += 1
    if asked and sys.argv[1] == "leaves":
        saved.write_text(str(step))
        print("saved", step, flush=True)
        sys.exit(1)
"""


def paceline(*words: object) -> str:
    done = subprocess.run([program("paceline"), *map(str, words)], capture_output=True, text=True, check=True)
    return done.stdout


def urgent(folder: Path, kind: str) -> tuple[float, int]:
    """Seconds to the first line of an urgent run, and the preempted run's steps between its end and its next start."""
    given = ("--gpu", "-j", "2", "--backend", "gloo", "--cores", 0, "--grace", f"{GRACE_S}s")
    run_id = paceline("submit", "-q", *given, folder / "train.py", "--", kind).strip()
    log = folder / "workspace" / "runs" / run_id / "logs" / "rank_0.log"
    while not log.exists() or "starts at" not in log.read_text():
        time.sleep(0.1)
    before = time.time()
    line = paceline("run", "-q", "--gpu", "--cores", 0, "--priority", "urgent", folder / "urgent.py")
    took_s, again = float(line) - before, -1
    while again < 0:
        time.sleep(0.1)
        told = paceline("logs", run_id)
        starts = [int(step) for step in re.findall(r"starts at (\d+)", told)]
        if len(starts) >= 4:  # two workers, two attempts
            again = max(map(int, re.findall(r"saved (\d+)", told)), default=starts[-1]) - starts[-1]
    paceline("cancel", "--wait", run_id)
    return took_s, again


def main() -> None:
    with scratch() as folder:
        os.environ["PACELINE_GPUS"] = "0,1"
        (folder / "train.py").write_text(TRAIN)
        (folder / "urgent.py").write_text("import time\nprint(repr(time.time()), flush=True)\n")
        paceline("share", "init")
        left = [urgent(folder, "leaves") for _ in range(ROUNDS)]
        ignored = [urgent(folder, "ignores")[0] for _ in range(ROUNDS)]
        steps = max(again for _, again in left)
        report(
            "urgent",
            "an urgent run on a full machine: to its first line, and the steps that the preempted run does again",
            f"the grace period ({GRACE_S} s) + 5 s; at most 1 step",
            max(seconds for seconds, _ in left) <= 5 and max(ignored) <= GRACE_S + 5 and steps <= 1,
            leaves_median_s=median([seconds for seconds, _ in left]),
            leaves_longest_s=max(seconds for seconds, _ in left),
            ignores_median_s=median(ignored),
            ignores_longest_s=max(ignored),
            steps_again=steps,
            rounds=ROUNDS,
        )
    if os.geteuid() != 0:
        print("skipped the days: they need root, to be five users")
        return
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.targets.test_shared_by_users import shared_folder, simulated_days

    drifts, idle, seconds, equal = [], [], [], []
    for seed in SEEDS:
        began = time.monotonic()
        with shared_folder() as folder:
            days, orders = simulated_days(folder, seed)
        seconds.append(time.monotonic() - began)
        drifts.append(days.drift)
        idle.append(days.idle)
        equal.append(orders == [orders[0]] * len(orders))
    report(
        "shared_days",
        "five Unix users, 8 GPUs, three simulated days: difference from the shares; GPUs idle though a run fits",
        "within 0.02; below 0.01; the same order for all; a minute",
        max(drifts) <= 0.02 and max(idle) < 0.01 and all(equal) and max(seconds) <= 60,
        drift=max(drifts),
        idle=max(idle),
        longest_s=max(seconds),
        seeds=len(SEEDS),
    )


if __name__ == "__main__":
    main()
