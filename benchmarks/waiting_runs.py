"""50 runs that wait for this machine's cores: the share of one core that their supervisors take together, and their memory."""

from __future__ import annotations

import os
import time
from pathlib import Path

import paceline as pl
from common import report, scratch
from paceline.runs import states
from paceline.system import processes

RUNS, SECONDS = 50, 120.0
SCRIPT = "import time\ntime.sleep(3600)\n"


def main() -> None:
    with scratch() as folder:
        (folder / "source").mkdir()
        (folder / "source" / "train.py").write_text(SCRIPT)
        estimator = pl.Estimator(source_directory=folder / "source", entry_script="train.py", cores=os.cpu_count() or 1)
        experiment = pl.Experiment(pl.Workspace.from_config(), "waiting")
        runs = [experiment.submit(estimator) for _ in range(RUNS + 1)]
        try:
            while [run.status for run in runs] != [states.RUNNING] + [states.QUEUED] * RUNS:
                time.sleep(1)
            time.sleep(30)
            pids = [pid for run in runs[1:] for pid in processes.with_variable(processes.SUPERVISOR_VARIABLE, run.id)]
            before, began_s = sum(map(cpu_s, pids)), time.monotonic()
            time.sleep(SECONDS)
            share = (sum(map(cpu_s, pids)) - before) / (time.monotonic() - began_s)
            memory_mib = sum(map(own_mib, pids))
        finally:
            for run in runs:
                run.cancel()
            for run in runs:
                run.wait_for_completion(raise_on_error=False)
    report(
        "waiting_runs",
        measure=f"{RUNS} waiting runs on one machine: share of one core, of supervisors and guardians together",
        target="below 0.01",
        met=share < 0.01,
        share_of_a_core=share,
        processes=len(pids),
        memory_mib=memory_mib,
    )


def cpu_s(pid: int) -> float:
    fields = processes.stat_of(pid)
    assert fields is not None, f"process {pid} has ended"
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    main()
