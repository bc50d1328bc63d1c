"""Real runs: scripts that are submitted to `local` and started by whatever Open MPI this machine has."""

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
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline import processes
from paceline.runs.record import RunRecord

#: Written at the top of scripts that leave what they saw in `outputs/`, one file a rank.
KEEP = textwrap.dedent(
    """\
    import json, os, sys
    def keep(value, name="seen"):
        with open(f"outputs/{name}_{os.environ['RANK']}.json", "w") as file:
            json.dump(value, file)
    """
)


def require_engine(name: str, found: object, why: str = "not found") -> None:
    """Skip the test where the machine lacks an engine; with PACELINE_REQUIRE_ENGINES set, fail it."""
    if found:
        return
    if _REQUIRED:
        pytest.fail(f"PACELINE_REQUIRE_ENGINES is set, but {name} can't be used: {why}")
    pytest.skip(f"needs {name}: {why}")


#: Read before the fixtures take the variable away.
_REQUIRED = bool(os.environ.get("PACELINE_REQUIRE_ENGINES"))

WHEEL, SYSTEM = "Open MPI's wheel", "the system's Open MPI"


@functools.cache
def find_mpirun(which: str) -> str | None:
    """The mpirun beside this Python, or the first on PATH that is another one."""
    beside = Path(sysconfig.get_path("scripts")) / "mpirun"
    if which == WHEEL:
        return str(beside) if beside.exists() else None
    folders = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if Path(folder) != beside.parent]
    found = shutil.which("mpirun", path=os.pathsep.join(folders))
    if found is None:
        return None
    text = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return found if re.search(r"\(Open MPI\) ([4-9]|\d\d)", text) else None


@pytest.fixture(params=[WHEEL, SYSTEM], ids=["wheel", "system"])
def mpirun(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each Open MPI of this machine in turn; runs with backend "mpi" use it."""
    return _use_mpirun(request.param, monkeypatch)


@pytest.fixture
def any_mpirun(monkeypatch: pytest.MonkeyPatch) -> str:
    """One Open MPI, for what does not depend on which."""
    return _use_mpirun(WHEEL if find_mpirun(WHEEL) else SYSTEM, monkeypatch)


def _use_mpirun(which: str, monkeypatch: pytest.MonkeyPatch) -> str:
    found = find_mpirun(which)
    require_engine(which, found, "no mpirun of version 4 or later there")
    assert found is not None
    monkeypatch.setenv("PACELINE_MPIRUN", found)
    return found


@pytest.fixture(params=[None, "gloo", WHEEL, SYSTEM], ids=["single", "gloo", "mpi-wheel", "mpi-system"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Each way to start workers: what an estimator is given for one process, or two of each backend."""
    if request.param in (WHEEL, SYSTEM):
        _use_mpirun(request.param, monkeypatch)
        return {"process_count_per_node": 2, "distributed_backend": "mpi"}
    return {"process_count_per_node": 2, "distributed_backend": "gloo"} if request.param else {}


class Lab:
    """Scripts go in, runs come out. Every run of a test lies in the workspace `<tmp_path>/ws`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = folder / "src"
        self._workspace: pl.Workspace | None = None

    @property
    def workspace(self) -> pl.Workspace:
        if self._workspace is None:
            self._workspace = pl.Workspace(self.folder / "ws")
        return self._workspace

    @property
    def experiment(self) -> pl.Experiment:
        return pl.Experiment(self.workspace, "lab")

    def write(self, script: str, files: Mapping[str, str] | None = None, name: str = "train.py") -> None:
        """Put the script and its files, all dedented, into the source folder."""
        for path, text in {name: script, **(files or {})}.items():
            (self.source / path).parent.mkdir(parents=True, exist_ok=True)
            (self.source / path).write_text(textwrap.dedent(text))

    def submit(self, script: str, files: Mapping[str, str] | None = None, **values: Any) -> pl.Run:
        """A run of the script. values: the estimator's, with a short grace period where there is none."""
        self.write(script, files)
        values = {"grace_period_seconds": 5, **values}
        kind = values.pop("estimator", pl.Estimator)
        tags = values.pop("tags", None)
        return self.experiment.submit(kind(str(self.source), entry_script="train.py", **values), tags=tags)

    def finish(self, script: str, files: Mapping[str, str] | None = None, **values: Any) -> pl.Run:
        """A run of the script that has ended, however it did."""
        run = self.submit(script, files, **values)
        run.wait_for_completion(raise_on_error=False)
        return run

    def complete(self, script: str, files: Mapping[str, str] | None = None, **values: Any) -> pl.Run:
        """A run of the script that has ended well."""
        run = self.submit(script, files, **values)
        run.wait_for_completion()
        return run


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A place to submit scripts from. Fails the test if a process of a run is there after its end."""
    yield Lab(tmp_path)
    deadline = time.monotonic() + 10
    while (left := processes_below(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"left behind (and killed now): {left}"
    assert not list((tmp_path / "leases").glob("tickets/*")), "a run has ended but not given back what it held"


def processes_below(folder: Path) -> dict[int, str]:
    """pid -> command line of the living processes of runs whose folder lies below `folder`."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or not processes.is_alive(int(entry.name)):
                continue
            words = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        of_run = any(word.startswith(b"PACELINE_RUN_DIR=" + os.fsencode(folder)) for word in words)
        if of_run or (b"paceline.supervisor\0" + os.fsencode(folder)) in command:
            found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def seen(run: pl.Run, rank: int = 0, name: str = "seen") -> Any:
    """What the script kept with `keep`."""
    return json.loads((run.folder.outputs / f"{name}_{rank}.json").read_text())


def log_text(run: pl.Run, rank: int = 0) -> str:
    return run.folder.live_log(rank).read_text(errors="replace")


def exit_codes(record: RunRecord, attempt: int = 1) -> dict[str, int]:
    return dict(record.attempts[attempt - 1].exit_codes)


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    """Return once `condition` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain: {what}"
        time.sleep(0.01)


def wait_for_file(path: Path) -> str:
    """The text of a file that a script writes, once it is there."""
    wait_until(lambda: path.exists() and path.stat().st_size, f"{path.name} is written")
    return path.read_text()


def python_program(code: str) -> list[str]:
    """The command line of another Python that runs this code."""
    return [sys.executable, "-c", textwrap.dedent(code)]
