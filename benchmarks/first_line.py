"""From the shell to the first line of a trivial script: paceline against python, torchrun and mpirun.

The script writes down when its first line ran, so neither side is charged for showing its output or for ending.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from common import in_turn, median, program, report, scratch, seconds_to_marks
from paceline.launchers.mpi import find_open_mpi

ROUNDS = 11

SCRIPT = """
import os, time
now = time.time()
rank = os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK", "0")
with open(os.path.join(os.environ["FIRST_LINE"], rank), "w") as file:
    file.write(repr(now))
"""


def first_line(folder: Path, command: list[str]) -> float:
    """Seconds from the start of `command` until every worker has come to its first line."""
    marks = folder / "marks"
    return seconds_to_marks(marks, command, env={**os.environ, "FIRST_LINE": str(marks)})


def main() -> None:
    with scratch() as folder:
        (folder / "source").mkdir()
        script = folder / "source" / "trivial.py"
        script.write_text(SCRIPT)

        def side(*command: str):
            return lambda: first_line(folder, [*command])

        paceline = [program("paceline"), "run", str(script)]
        ours, theirs = in_turn(ROUNDS, side(*paceline), side(sys.executable, str(script)))
        more = median(ours) - median(theirs)
        report(
            "first_line_one",
            "shell to first line, 1 process, paceline run, and that minus python",
            "at most 0.2 s",
            median(ours) <= 0.2,
            ours_s=median(ours),
            python_s=median(theirs),
            more_s=more,
            rounds=ROUNDS,
        )
        two = [*paceline, "-j", "2", "--backend"]
        ours, theirs = in_turn(
            ROUNDS, side(*two, "gloo"), side(program("torchrun"), "--nproc-per-node", "2", str(script))
        )
        ratio = median(ours) / median(theirs)
        report(
            "first_line_gloo",
            "shell to first line, 2 workers, paceline run --backend gloo against torchrun",
            "at most a third of torchrun's time",
            ratio <= 1 / 3,
            ours_s=median(ours),
            torchrun_s=median(theirs),
            ratio=ratio,
            rounds=ROUNDS,
        )
        mpirun = find_open_mpi(sys.executable)
        if os.geteuid() == 0:
            os.environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        bare = [mpirun.mpirun, "--bind-to", "none", "-n", "2", sys.executable, str(script)]
        ours, theirs = in_turn(ROUNDS, side(*two, "mpi"), side(*bare))
        more = median(ours) - median(theirs)
        report(
            "first_line_mpi",
            "shell to first line, 2 workers, paceline run --backend mpi against bare mpirun",
            "at most 0.5 s more",
            more <= 0.5,
            ours_s=median(ours),
            mpirun_s=median(theirs),
            more_s=more,
            open_mpi=".".join(map(str, mpirun.version)),
            rounds=ROUNDS,
        )


if __name__ == "__main__":
    main()
