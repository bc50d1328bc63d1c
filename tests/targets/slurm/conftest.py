"""A scheduler made of small shell programs: files have their output, and each call appends a line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers import write_program

_PROGRAM = """#!/bin/sh
cd {folder}
name=$(basename "$0")
echo "$name $*" >> calls
[ "$name" = sbatch ] && cat > script
[ "$name" = sbatch ] && env > environment
cat "$name.err" >&2 2>/dev/null
cat "$name.out" 2>/dev/null
exit $(cat "$name.code" 2>/dev/null || echo 0)
"""


class FakeSlurm:
    """What each program says next: `say("squeue", "1|RUNNING|None|n1|x")`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def say(self, program: str, out: str = "", *, err: str = "", code: int = 0) -> None:
        (self.folder / f"{program}.out").write_text(out)
        (self.folder / f"{program}.err").write_text(err)
        (self.folder / f"{program}.code").write_text(str(code))

    @property
    def calls(self) -> list[str]:
        """The calls so far, each a line: the program's name and its arguments."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def count(self, program: str) -> int:
        return sum(call.split()[0] == program for call in self.calls)

    @property
    def script(self) -> str:
        """What sbatch was given."""
        return (self.folder / "script").read_text()

    @property
    def environment(self) -> dict[str, str]:
        """What sbatch found in its environment."""
        lines = (self.folder / "environment").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    folder = tmp_path / "slurm"
    for name in ("sbatch", "squeue", "sacct", "scancel", "scontrol", "sinfo", "srun"):
        write_program(folder / "bin" / name, _PROGRAM.format(folder=f"'{folder}'"))
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    return FakeSlurm(folder)
