"""A run on simulated nodes with the real supervisor: its start, its cost, a dead node and a cancel.

    python benchmarks/scale.py --nodes 100 1000 [--shared] [--rounds 3]

The nodes are those of the compute target `sim`: real agents and frames, workers that only play events. Seconds count from the
moment at which the supervisor has its nodes. A worker's first line counts when the supervisor has it. The simulation takes the
same cores, so its processor seconds are a figure of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import time
from pathlib import Path

import paceline
from common import median, report, scratch
from paceline.runs.folder import RunFolder
from paceline.runs.record import parse_utc
from paceline.runs.run import Run
from paceline.runs.states import TERMINAL
from paceline.targets.configured import Configured, add

PER_NODE = 8
QUIET_S, LOGS_S = 15.0, 15.0
SILENCE_S = 15.0
TICKS = os.sysconf("SC_CLK_TCK")

EVENTS = """EVENTS = [
    {{"at": 0, "line": "first line of rank {{rank}}"}},
    {{"at": {logs_at}, "every": 1, "until": {logs_end}, "line": "step {{n}}: loss 0.12345 of rank {{rank}}"}},
    {{"at": {logs_at}, "every": 1, "until": {logs_end}, "metric": "loss", "value": 0.12345}},
]
"""


class Cost:
    """Processor seconds and memory of the supervisor and of the processes that simulate."""

    def __init__(self, run_id: str) -> None:
        self.supervisors = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    if b"paceline.supervisor" in words and any(run_id.encode() in word for word in words):
                        self.supervisors.append(int(entry.name))
        #: pid -> seconds at the last look, which outlive the process.
        self._known: dict[int, float] = {}

    def seconds(self) -> tuple[float, float]:
        """(of the supervisor and its guardian, of the simulation) until now."""
        children = {child for parent in self.supervisors for child in _children(parent)}
        for pid in {*self.supervisors, *self._known, *children}:
            self._known[pid] = max(_cpu_s(pid), self._known.get(pid, 0.0))
        own = sum(self._known[pid] for pid in self.supervisors)
        return own, sum(self._known.values()) - own

    def memory_mib(self) -> float:
        """Of the supervisor alone; the guardian's pages are nearly all shared with it."""
        return max(_rss_mib(pid) for pid in self.supervisors)


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def _rss_mib(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return 0.0


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in path.read_text().split()]
    return found


def measure(nodes: int, folder: Path, settings: dict[str, object]) -> dict[str, float]:
    """One run to its cancel, and one with a dead node."""
    _add_cluster({"nodes": nodes, **settings})
    # Seconds, of a busy machine, in which all workers have certainly started.
    start_s = 10 + nodes / 25
    logs_at = start_s + QUIET_S
    run, begun = _submitted(folder, nodes, EVENTS.format(logs_at=logs_at, logs_end=logs_at + LOGS_S + start_s))
    cost = Cost(run.id)
    before = cost.seconds()
    first_s = _first_lines(_folder(run), nodes * PER_NODE) - begun
    after = cost.seconds()
    found = {
        "first lines, s": first_s,
        "first lines, supervisor's CPU s": after[0] - before[0],
        "first lines, simulation's CPU s": after[1] - before[1],
    }
    _wait_until(begun + start_s + 2)
    found["cores at rest"], found["simulation's cores at rest"] = _cores(cost, begun + logs_at - 2)
    # Workers count from their own start, the last of them from its first line.
    _wait_until(begun + first_s + logs_at)
    found["cores with logs"], found["simulation's cores with logs"] = _cores(
        cost, begun + first_s + logs_at + LOGS_S - 5
    )
    found["memory, MiB"] = cost.memory_mib()
    asked, before = time.time(), cost.seconds()
    run.cancel()
    while run.status not in TERMINAL:
        after = cost.seconds()
        time.sleep(0.1)
    found["cancel, s"] = time.time() - asked
    found["cancel, supervisor's CPU s"] = after[0] - before[0]
    found["cancel, simulation's CPU s"] = after[1] - before[1]
    dies_s = start_s + 5
    _add_cluster({"nodes": nodes, "dead": 1, "fault_after_s": dies_s, "fault_within_s": 0, **settings})
    run, begun = _submitted(folder, nodes, EVENTS.format(logs_at=0, logs_end=0))
    run.wait_for_completion(raise_on_error=False)
    found["dead node named, s"] = _lost_at(_folder(run)) - (begun + dies_s)
    found["run ended after it, s"] = time.time() - (begun + dies_s)
    return found


def _add_cluster(settings: dict[str, object]) -> None:
    described = Configured(name="cluster", kind="sim", settings={"silence_s": SILENCE_S, **settings})
    add(Path(os.environ["PACELINE_WORKSPACE"]), described, replace=True)


def _submitted(folder: Path, nodes: int, text: str) -> tuple[Run, float]:
    """The run, and when the supervisor had its nodes."""
    (folder / "train.py").write_text(text)
    job = paceline.Estimator(
        source_directory=str(folder),
        entry_script="train.py",
        compute_target="cluster",
        node_count=nodes,
        process_count_per_node=PER_NODE,
        distributed_backend="gloo",
    )
    run = paceline.Experiment(paceline.Workspace(os.environ["PACELINE_WORKSPACE"]), "scale").submit(job)
    events = _folder(run).events
    while True:
        for line in events.read_text().splitlines():
            entry = json.loads(line)
            if entry["status"] == "Preparing":
                return run, parse_utc(entry["time_utc"]).timestamp()
        time.sleep(0.05)


def _folder(run: Run) -> RunFolder:
    return RunFolder(Path(os.environ["PACELINE_WORKSPACE"]) / "runs" / run.id)


def _first_lines(folder: RunFolder, count: int) -> float:
    """When the last of the ranks' first lines came to the supervisor."""
    while True:
        with os.scandir(folder.attempt(1)) if folder.attempt(1).exists() else os.scandir(folder.path) as found:
            times = [one.stat() for one in found if one.name.startswith("rank_")]
        if sum(one.st_size > 0 for one in times) == count:
            return max(one.st_mtime for one in times)
        time.sleep(0.2 + count / 40000)


def _cores(cost: Cost, until: float) -> tuple[float, float]:
    began, before = time.time(), cost.seconds()
    _wait_until(until)
    passed, after = time.time() - began, cost.seconds()
    return (after[0] - before[0]) / passed, (after[1] - before[1]) / passed


def _wait_until(at: float) -> None:
    time.sleep(max(0.0, at - time.time()))


def _lost_at(folder: RunFolder) -> float:
    for line in folder.driver_log.read_text().splitlines():
        if re.search(r"node \S+ is lost", line):
            return parse_utc(line.split("Z ")[0].replace(" ", "T") + "Z").timestamp()
    return float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--processes", type=int, default=None)
    given = parser.parse_args()
    settings: dict[str, object] = {
        "shared": given.shared,
        **({"processes": given.processes} if given.processes else {}),
    }
    for nodes in given.nodes:
        rounds = []
        for _ in range(given.rounds):
            with scratch() as folder:
                (folder / "source").mkdir()
                rounds.append(measure(nodes, folder / "source", settings))
        figures = {name: round(median([one[name] for one in rounds]), 2) for name in rounds[0]}
        met = (
            figures["first lines, s"] - figures["first lines, simulation's CPU s"] / 2 <= 3
            and figures["cores at rest"] <= 0.3
            and figures["memory, MiB"] <= 300
            and figures["dead node named, s"] <= SILENCE_S + 5
            and figures["cancel, s"] <= 3
        )
        measure_text = f"a run on {nodes} simulated nodes with {PER_NODE} workers each, median of {given.rounds}"
        target = (
            "first lines 3 s beyond the simulation's own cost, 0.3 cores, 300 MiB, a dead node after 20 s, cancel 3 s"
        )
        report(f"scale_{nodes}", measure_text, target, met, **figures, load=os.getloadavg()[0])


if __name__ == "__main__":
    main()
