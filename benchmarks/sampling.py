"""What it costs a node that its load and its workers' are sampled every 5 seconds.

    meter     one process that samples 8 workers of this machine, each with 4 threads and 2 forked children: processor time of a
              look that looks up everything, as a share of a core at one look in 5 s, and what the meter adds to the process
    local     a run of 8 workers on this machine: its supervisor, which samples them
    ssh       a run of 8 workers on 2 ssh hosts, network namespaces of this machine (as root): the agent of one, which samples 4
    worker    what a step's count, and a wait's, cost the worker

In the runs the process that samples is compared with the same one of a run without samples (PACELINE_SAMPLE_SECONDS=0), over a
minute of each: what it does besides is not sampling. Runs are measured in turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from common import median, program, report, scratch
from elsewhere import LACKS, ssh
from paceline.system import processes
from paceline.system.step_clock import WAIT, StepClock

WORKERS = 8
LOOKS = 60
EVERY_S = 5.0
ROUNDS = 3
MEASURED_S = 60.0
CALLS = 100_000
MOST_SHARE, MOST_MB = 0.005, 40.0
_TICKS = os.sysconf("SC_CLK_TCK")

SCRIPT = """
import os, threading, time
def waits():
    time.sleep(10**6)
for _ in range(3):
    threading.Thread(target=waits, daemon=True).start()
for _ in range(2):
    if os.fork() == 0:
        waits()
print("up", flush=True)
waits()
"""

#: Prints the processor time of a look, and how much the process has grown.
METER = """
import os, sys, time
def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
before = resident()
from paceline.observe.node import counters, load
from paceline.observe.node.load import LoadMeter
# What is looked up seldom is looked up each time.
load._FAMILY_S = counters._FILES_S = 0.0
load._SHARE = counters._SHARE = 1e9
asked = {"folder": sys.argv[1], "run_id": "none", "ranks": dict(enumerate(map(int, sys.argv[3:])))}
meter = LoadMeter()
meter.look(asked)
took = []
for _ in range(int(sys.argv[2])):
    time.sleep(0.05)
    begun = time.process_time()
    found = meter.look(asked)
    took.append(time.process_time() - begun)
assert len(found["ranks"]) == len(sys.argv) - 3
print(sum(took) / len(took), resident() - before)
"""


def meter(folder: Path) -> None:
    started = [
        subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, start_new_session=True)
        for _ in range(WORKERS)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        words = [sys.executable, "-c", METER, str(folder), str(LOOKS), *(str(process.pid) for process in started)]
        found = [
            subprocess.run(words, check=True, capture_output=True, text=True).stdout.split() for _ in range(ROUNDS)
        ]
    finally:
        for process in started:
            os.killpg(process.pid, 9)
            process.wait()
    look_s = median([float(one[0]) for one in found])
    grown_mb = median([float(one[1]) * 1024 / 1e6 for one in found])
    share = look_s / EVERY_S
    report(
        "sampling_meter",
        f"a look at {WORKERS} workers with {4 * WORKERS} threads and {2 * WORKERS} processes below them",
        "at most 0.5 % of a core and 40 MB",
        share <= MOST_SHARE and grown_mb <= MOST_MB,
        share_of_a_core=share,
        look_ms=1e3 * look_s,
        memory_mb=grown_mb,
    )


def of_runs(name: str, submit: Callable[[dict[str, str]], Path], cancel: Callable[[str], None]) -> None:
    """submit: starts a run of `WORKERS` with these variables; its folder. cancel: ends it."""
    with_samples, without = [], []
    for _ in range(ROUNDS):
        for found, seconds in ((with_samples, f"{EVERY_S:g}"), (without, "0")):
            folder = submit({"PACELINE_SAMPLE_SECONDS": seconds})
            found.append(_taken(folder))
            cancel(folder.name)
    share = median([one[0] for one in with_samples]) - median([one[0] for one in without])
    more_mb = median([one[1] for one in with_samples]) - median([one[1] for one in without])
    report(
        f"sampling_{name}",
        f"what the process that samples takes more than without, {WORKERS} workers, {name}",
        "at most 0.5 % of a core and 40 MB",
        share <= MOST_SHARE and more_mb <= MOST_MB,
        share_of_a_core=max(0.0, share),
        memory_mb=max(0.0, more_mb),
        share_with=median([one[0] for one in with_samples]),
        share_without=median([one[0] for one in without]),
        memory_with_mb=median([one[1] for one in with_samples]),
    )


def _taken(folder: Path) -> tuple[float, float]:
    """(share of a core, MB) of the process that has started the first worker: the supervisor, or the node's agent."""
    deadline = time.monotonic() + 120
    while sum("up" in path.read_text() for path in (folder / "logs").glob("rank_*.log")) < WORKERS:
        assert time.monotonic() < deadline, "the workers have started"
        time.sleep(0.1)
    sampler = int(_stat(_first_worker(folder.name))[1])
    time.sleep(10.0)
    before, begun = _cpu_s(sampler), time.monotonic()
    time.sleep(MEASURED_S)
    share = (_cpu_s(sampler) - before) / (time.monotonic() - begun)
    with open(f"/proc/{sampler}/status") as file:
        resident = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
    return share, resident * 1024 / 1e6


def _first_worker(run_id: str) -> int:
    """Found by its variables: hosts have numbers of processes of their own."""
    wanted = {f"PACELINE_RUN_ID={run_id}".encode(), b"RANK=0"}
    for pid in processes.with_variable("PACELINE_RUN_ID", run_id):
        variables = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        parent = set(Path(f"/proc/{_stat(pid)[1]}/environ").read_bytes().split(b"\0"))
        # The one that its parent was not started as; those below it were.
        if wanted <= variables and not wanted <= parent:
            return pid
    raise AssertionError("the first worker runs")


def _cpu_s(pid: int) -> float:
    words = _stat(pid)
    return (int(words[11]) + int(words[12])) / _TICKS


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _submitted(words: list[str], environment: Mapping[str, str]) -> Path:
    told = subprocess.run(words, env=dict(environment), check=True, capture_output=True, text=True).stdout
    return Path(json.loads(told)["folder"])


def on_local(folder: Path) -> None:
    script = folder / "source" / "stays.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    words = [program("paceline"), "submit", str(script), "-j", f"1x{WORKERS}", "--backend", "gloo", "--json"]
    cancel = [program("paceline"), "cancel", "--wait"]
    of_runs(
        "local",
        lambda variables: _submitted(words, {**os.environ, **variables}),
        lambda run_id: subprocess.run([*cancel, run_id], check=True, capture_output=True) and None,
    )


def on_ssh() -> None:
    with ssh(2) as there:
        script = there.folder / "source" / "stays.py"
        script.parent.mkdir()
        script.write_text(SCRIPT)
        options = ("-j", f"2x{WORKERS // 2}", "--backend", "gloo", "--json")
        words = there.command("submit", *there.run_words(script, *options))
        of_runs(
            "ssh",
            lambda variables: _submitted(words, {**there.environment, **variables}),
            lambda run_id: (
                subprocess.run(
                    there.command("cancel", "--wait", run_id),
                    env=dict(there.environment),
                    check=True,
                    capture_output=True,
                )
                and None
            ),
        )


def worker(folder: Path) -> None:
    clock, optimizer = StepClock(str(folder / "steps_0")), object()
    begun = time.perf_counter()
    for _ in range(CALLS):
        clock.step(optimizer)
        clock.end(WAIT, clock.begin(WAIT))
    each_us = (time.perf_counter() - begun) / CALLS * 1e6
    report("sampling_worker", "a step and a wait counted by a worker", "at most 5 us", each_us <= 5, each_us=each_us)


def main() -> None:
    asked = sys.argv[1:] or ["meter", "worker", "local", "ssh"]
    with scratch() as folder:
        if "meter" in asked:
            meter(folder)
        if "worker" in asked:
            worker(folder)
        if "local" in asked:
            on_local(folder)
    if "ssh" in asked:
        if lack := LACKS["ssh"]():
            print(f"skipped ssh: this machine lacks {lack}")
        else:
            on_ssh()


if __name__ == "__main__":
    main()
