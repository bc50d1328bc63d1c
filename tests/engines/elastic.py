"""Elastic runs as tests of each target observe them: a script that counts steps, and the facts about its attempts."""

from __future__ import annotations

import paceline as pl
from paceline.runs.record import Attempt
from tests.helpers import wait_until

#: This script counts ten steps a second, and rank 0 saves every fifth step. If a host shares no folder with this
#: machine, its new checkpoints arrive after 2 s.
COUNTS = """
import os, sys, time
from paceline.system.run_variables import EXIT_RESIZE, MAX_NODES_VARIABLE, MIN_NODES_VARIABLE, is_resize_requested

rank, size = int(os.environ["PACELINE_RANK"]), int(os.environ["PACELINE_WORLD_SIZE"])
assert int(os.environ[MIN_NODES_VARIABLE]) <= int(os.environ["HOROVOD_CROSS_SIZE"]) <= int(os.environ[MAX_NODES_VARIABLE])
folder = os.environ["PACELINE_CHECKPOINT_DIR"]
step = max([int(name[5:]) for name in os.listdir(folder) if name.startswith("step_")], default=0)
print(f"attempt {os.environ['PACELINE_ATTEMPT']}: rank {rank} of {size} goes on from {step}, pid {os.getpid()}", flush=True)
while not os.path.exists(sys.argv[1]) and step < 6000:
    time.sleep(0.1)
    step += 1
    if rank == 0 and step % 5 == 0:
        open(f"{folder}/step_{step}", "w").close()
        if is_resize_requested():
            sys.exit(EXIT_RESIZE)
"""


def wait_for_attempt(run: pl.Run, number: int, world_size: int, timeout: float = 90) -> Attempt:
    """The attempt once all of its workers have begun; it has to have this size."""

    def begun() -> bool:
        assert not run.record().is_terminal, run.record().failure
        # Wait until each worker has printed. A node that shares no folder with this machine first has to send this
        # output.
        logs = [run.folder.rank_log(number, rank) for rank in range(world_size)]
        return len(run.record().attempts) >= number and all(log.exists() and log.read_text() for log in logs)

    wait_until(begun, f"attempt {number} with {world_size} workers, not {run.record().attempts}", timeout)
    attempt = run.record().attempts[number - 1]
    assert attempt.world_size == world_size
    return attempt


def wait_for_step(run: pl.Run, step: int) -> None:
    """Return as soon as rank 0 has counted so far, by the files that have arrived."""
    kept = run.folder.checkpoints
    wait_until(lambda: any(int(path.name[5:]) >= step for path in kept.glob("step_*")), f"step {step}", 60)


def began_at(run: pl.Run, attempt: int, rank: int = 0) -> int:
    """The step with which a rank went on."""
    return int(run.folder.rank_log(attempt, rank).read_text().partition("from ")[2].partition(",")[0])


def pid_of(run: pl.Run, attempt: int, rank: int) -> int:
    return int(run.folder.rank_log(attempt, rank).read_text().partition("pid ")[2])
