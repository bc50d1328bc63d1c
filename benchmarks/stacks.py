"""How long `paceline stacks` takes, from a shell, and what it takes from the workers that it looks at.

    local     8 workers of one machine
    ssh       8 workers on 2 ssh hosts, network namespaces of this machine (as root)
    board     what it costs a rank to note a collective

A worker loses time while its threads write down where they are. Each worker sleeps for 2 ms again and again, and keeps
the longest lateness of half a second. The time lost is the median of those in which it was looked at, less the median of
the others: what is left are the scheduler's pauses, of which a machine with fewer cores than workers has many.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from common import median, program, report, scratch
from elsewhere import LACKS, ssh
from paceline.system import collective_state

ROUNDS = 5
WORKERS = 8
LOOKED_S = 2.0
CALLS = 100_000

SCRIPT = """
import os, threading, time
def waits():
    time.sleep(10**6)
for _ in range(3):
    threading.Thread(target=waits, daemon=True).start()
top = os.environ["PACELINE_OUTPUT_DIR"]
rank = os.environ["RANK"]
print("up", flush=True)
while True:
    begun, longest, count = time.monotonic(), 0.0, 0
    while time.monotonic() - begun < 0.5:
        before = time.monotonic()
        time.sleep(0.002)
        longest = max(longest, time.monotonic() - before - 0.002)
    with open(os.path.join(top, f"longest_{rank}"), "a") as file:
        file.write(f"{time.time()} {longest}\\n")
"""


def measured(name: str, submit: list[str], environment: dict[str, str], target_s: float) -> None:
    told = json.loads(subprocess.run(submit, env=environment, check=True, capture_output=True, text=True).stdout)
    run_id = told["run_id"]
    folder = Path(told["folder"])
    paceline = program("paceline")
    deadline = time.monotonic() + 120
    while sum("up" in path.read_text() for path in (folder / "logs").glob("rank_*.log")) < WORKERS:
        assert time.monotonic() < deadline, "the workers have started"
        time.sleep(0.1)
    time.sleep(LOOKED_S)
    figures, spans = [], []
    for number in range(ROUNDS + 1):
        begun, begun_at = time.monotonic(), time.time()
        done = subprocess.run([paceline, "stacks", run_id, "--json"], env=environment, check=True, capture_output=True)
        if number:
            figures.append(time.monotonic() - begun)
            spans.append((begun_at, time.time() + 0.5))
        found = json.loads(done.stdout)["ranks"]
        assert all(len(one["threads"]) == 4 for one in found.values()), "every thread of every worker"
        time.sleep(LOOKED_S)
    # From elsewhere the user's files come when they rest, and at the end.
    subprocess.run([paceline, "cancel", "--wait", run_id], env=environment, check=True, capture_output=True)
    with_look, without = lost(folder, spans)
    seconds = median(figures)
    lost_s = max(0.0, with_look - without)
    report(
        f"stacks_{name}",
        f"paceline stacks of {WORKERS} workers, {name}, and what it takes from a worker",
        f"under {target_s:g} s; under 50 ms",
        seconds < target_s and lost_s < 0.05,
        seconds=seconds,
        longest_s=max(figures),
        lost_s=lost_s,
        pause_without_s=without,
    )


def lost(folder: Path, spans: list[tuple[float, float]]) -> tuple[float, float]:
    """The median of the longest pauses of windows with a look in them, and of those without."""
    pauses: tuple[list[float], list[float]] = ([], [])
    for path in (folder / "outputs").glob("longest_*"):
        for line in path.read_text().splitlines():
            at, longest = map(float, line.split())
            looked_at = any(begin < at < end for begin, end in spans)
            pauses[0 if looked_at else 1].append(longest)
    return median(pauses[0]), median(pauses[1])


def on_local(folder: Path) -> None:
    script = folder / "source" / "stays.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    words = [program("paceline"), "submit", str(script), "-j", f"1x{WORKERS}", "--backend", "gloo", "--json"]
    measured("local", words, dict(os.environ), 1.0)


def on_ssh() -> None:
    with ssh(2) as there:
        script = there.folder / "source" / "stays.py"
        script.parent.mkdir()
        script.write_text(SCRIPT)
        options = ("-j", f"2x{WORKERS // 2}", "--backend", "gloo", "--json")
        measured("ssh", there.command("submit", *there.run_words(script, *options)), dict(there.environment), 3.0)


def note_calls(folder: Path) -> None:
    written = collective_state.RankBoard(str(folder / "board"))
    text = collective_state.entry_text("process set 0", "allreduce", "gradient", "[1000] float32", 4000, "0-7")
    begun = time.perf_counter()
    for number in range(CALLS):
        written.end(written.begin(text, number))
    each_us = (time.perf_counter() - begun) / CALLS * 1e6
    report("stacks_board", "a collective noted on a rank's board", "at most 5 us", each_us <= 5, each_us=each_us)


def main() -> None:
    asked = sys.argv[1:] or ["local", "ssh", "board"]
    with scratch() as folder:
        if "local" in asked:
            on_local(folder)
        if "board" in asked:
            note_calls(folder)
    if "ssh" in asked:
        if lack := LACKS["ssh"]():
            print(f"skipped ssh: this machine lacks {lack}")
        else:
            on_ssh()


if __name__ == "__main__":
    main()
