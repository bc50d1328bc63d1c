"""How long a run on other machines takes to end: when it is canceled, and when one of its nodes dies.

    cancel       from the start of `paceline cancel` until no process of the run is left on any node. The script ignores
                 SIGTERM, so the whole grace period goes by; what comes beside it counts.
    node lost    from the death of a node until the run has its next attempt (ssh, ray, which have another node) or has
                 failed (slurm, which has none). Beside it, when the engine's own tool calls the node dead.

A node dies with all that runs on it and without a word: an ssh host's link is cut first; of a Slurm node the slurmd and
its steps are killed, a Ray node goes with its network. The machines are network namespaces of this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from common import median, report
from elsewhere import Elsewhere, ray, slurm, ssh, wanted
from paceline.system import processes
from paceline.system.files import read_json

ROUNDS = 3
GRACE_S = 2.0
#: Beyond the target, the run and the engine are given up.
LIMIT_S = 75.0
TICK_S = 0.05

SCRIPT = """
import os, signal, sys, time
if os.environ["PACELINE_ATTEMPT"] != "1":
    sys.exit()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "RANK") if name in os.environ)
with open(os.path.join({marks!r}, os.environ["PACELINE_RUN_ID"] + "_" + rank), "w"):
    pass
while True:
    time.sleep(1)
"""


def started(there: Elsewhere, *options: str) -> Path:
    """The folder of a run whose two workers have come to where they stay."""
    marks, source = there.folder / "marks", there.folder / "source"
    for folder in (marks, source):
        folder.mkdir(exist_ok=True)
    script = source / "stays.py"
    script.write_text(SCRIPT.format(marks=str(marks)))
    run_dir = there.submit(script, "-j", "2x1", "--grace", f"{GRACE_S:g}", *options)
    until(lambda: len(list(marks.glob(f"{run_dir.name}_*"))) == 2, "the workers have started")
    return run_dir


def until(condition: Callable[[], object], what: str) -> float:
    """The time at which this came true."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(TICK_S)
    return time.time()


def cancel_s(there: Elsewhere, *options: str) -> float:
    """Seconds beyond the grace period from a cancel until nothing of the run is left."""
    run_dir = started(there, *options)
    before = time.time()
    there.call("cancel", run_dir.name)
    # The namespaces of processes are below this machine's own: all nodes' processes are seen here.
    gone = until(lambda: not processes.with_variable("PACELINE_RUN_ID", run_dir.name), "no process is left")
    until(lambda: status(run_dir, there) == "Canceled", "the run is canceled")
    return gone - before - GRACE_S


def measure_cancel(there: Elsewhere, name: str, *options: str) -> None:
    more = [cancel_s(there, *options) for _ in range(ROUNDS)]
    report(
        f"cancel_{name}",
        f"paceline cancel to no process on any node of {name}, beyond the grace period",
        "at most 5 s",
        max(more) <= 5.0,
        median_s=median(more),
        longest_s=max(more),
        grace_s=GRACE_S,
        rounds=ROUNDS,
    )


def measure_loss(
    there: Elsewhere,
    name: str,
    kill: Callable[[str], None],
    is_dead: Callable[[str], bool] | None,
    *options: str,
    head: str = "",
) -> None:
    """kill: lets a node of this name die; is_dead: whether the engine's own tool says so, None where there is none.
    head: is spared."""
    run_dir = started(there, *options)
    node = next(name for name in reversed(attempts(run_dir)[0]["nodes"]) if name != head)
    noticed: list[float] = []

    def watch() -> None:
        assert is_dead is not None
        with contextlib.suppress(AssertionError):
            noticed.append(until(lambda: is_dead(node), "the engine has noticed"))

    watching = threading.Thread(target=watch, daemon=True)
    before = time.time()
    kill(node)
    if is_dead is not None:
        watching.start()
    # The record is the supervisor's, which is not on that node: no reader has a part in it.
    over = until(lambda: len(attempts(run_dir)) > 1 or stored(run_dir)["status"] == "Failed", "the run has noticed")
    ours_s = over - before
    until(lambda: status(run_dir, there) in ("Completed", "Failed"), "the run has ended")
    if is_dead is None:
        report(
            f"node_lost_{name}",
            f"death of a node of {name} to the run's next attempt",
            "at most 30 s",
            ours_s <= 30.0,
            ours_s=ours_s,
        )
        return
    watching.join(LIMIT_S)
    engine_s = noticed[0] - before if noticed else LIMIT_S
    report(
        f"node_lost_{name}",
        f"death of a node of {name} to the run's next attempt or failure, minus {name}'s own notice",
        "at most 10 s more",
        ours_s - engine_s <= 10.0,
        ours_s=ours_s,
        engine_s=engine_s,
        more_s=ours_s - engine_s,
    )


def stored(run_dir: Path) -> dict[str, object]:
    return read_json(run_dir / "state.json") or {}


def attempts(run_dir: Path) -> list[dict[str, list[str]]]:
    found = stored(run_dir).get("attempts")
    return found if isinstance(found, list) else []


def status(run_dir: Path, there: Elsewhere) -> str:
    """As a reader sees it, who asks the engine."""
    told: dict[str, str] = json.loads(there.call("show", run_dir.name, "--json"))
    return told["status"]


def on_ssh() -> None:
    with ssh(3) as there:
        measure_cancel(there, "ssh", "--backend", "mpi")

        def kill(name: str) -> None:
            there.hosts.cut(name)
            there.hosts.kill(name)

        measure_loss(there, "ssh", kill, None, "--backend", "mpi", "--max-restarts", "1")


def on_slurm() -> None:
    with slurm() as (there, lab):
        measure_cancel(there, "slurm", "--backend", "gloo")

        def kill(name: str) -> None:
            for pid in lab.hosts.processes(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        def is_down(name: str) -> bool:
            words = ["sinfo", "-h", "-n", name, "-o", "%T"]
            done = subprocess.run(words, env=there.environment, check=False, capture_output=True, text=True)
            return done.stdout.startswith("down")

        measure_loss(there, "slurm", kill, is_down, "--backend", "gloo")


def on_ray() -> None:
    with ray() as (there, lab):
        measure_cancel(there, "ray", "--backend", "gloo")

        def is_dead(name: str) -> bool:
            nodes = lab.ask("/api/v0/nodes?detail=1")["data"]["result"]["result"]
            found = [node["state"] for node in nodes if node["node_ip"] == lab.hosts.addresses[name]]
            return "ALIVE" not in found

        options = ("--backend", "gloo", "--max-restarts", "1")
        measure_loss(there, "ray", lab.hosts.kill, is_dead, *options, head=lab.head)


def main() -> None:
    for name in wanted():
        {"ssh": on_ssh, "slurm": on_slurm, "ray": on_ray}[name]()


if __name__ == "__main__":
    sys.exit(main())
