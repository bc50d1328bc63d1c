"""`paceline run` of a script that prints, in a project with 200 GB of ignored data in 50,000 files, against one without data.

Beside them: the script under plain Python, and the bytes that the run has copied.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from common import in_turn, median, program, report, scratch

ROUNDS = 10
FOLDERS, FILES, FILE_BYTES = 50, 1000, 4 * 2**20


def make_project(top: Path, *, with_data: bool) -> None:
    top.mkdir()
    (top / "train.py").write_text("print('trained')\n")
    (top / ".gitignore").write_text("data/\n")
    subprocess.run(["git", "init", "--quiet"], cwd=top, check=True)
    subprocess.run(["git", "add", "."], cwd=top, check=True)
    for number in range(FOLDERS if with_data else 0):
        folder = top / "data" / str(number)
        folder.mkdir(parents=True)
        for file in range(FILES):
            # Sparse: they have their size and take no room.
            with open(folder / f"{file}.bin", "wb") as opened:
                opened.truncate(FILE_BYTES)


def seconds(command: list[str], project: Path) -> float:
    before = time.perf_counter()
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    return time.perf_counter() - before


def copied_bytes(workspace: Path) -> int:
    files = [path for path in (workspace / "snapshots").rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


def main() -> None:
    with scratch() as folder:
        small, large = folder / "small", folder / "large"
        make_project(small, with_data=False)
        make_project(large, with_data=True)
        run = [program("paceline"), "run", "-q", "train.py"]
        # The first run makes the workspace.
        seconds(run, small)
        with_data, without, plain = in_turn(
            ROUNDS,
            lambda: seconds(run, large),
            lambda: seconds(run, small),
            lambda: seconds([sys.executable, "train.py"], small),
        )
        more, start = median(with_data) - median(without), median(without) - median(plain)
        copied = copied_bytes(Path(os.environ["PACELINE_WORKSPACE"]))
        report(
            "ignored_data",
            "paceline run beside 50,000 files and 200 GB of ignored data, over the same without",
            "at most 0.5 s more, 0.15 s over Python; nothing of the data copied",
            more <= 0.5 and start <= 0.15 and copied < FILE_BYTES,
            with_data_s=median(with_data),
            without_s=median(without),
            python_s=median(plain),
            more_s=more,
            over_python_s=start,
            copied_bytes=copied,
        )


if __name__ == "__main__":
    main()
