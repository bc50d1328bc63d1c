"""Small things that several tests make: jobs, records, runs on disk, launches, trees of files, other processes."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.job.job import Job
from paceline.job.plan import Launch, Node, NodeSetup, port_count
from paceline.runs import states, store
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, utc_now

RUN_ID = "digits_1700000000_00000001"


def make_job(**values: Any) -> Job:
    """A job of `train.py`, with these values."""
    return Job(**({"entry_script": "train.py"} | values))


def make_record(run_id: str = RUN_ID, **values: Any) -> RunRecord:
    """A record of a submitted run that this process looks after."""
    given: dict[str, Any] = {
        "experiment": run_id.partition("_")[0],
        "created_utc": utc_now(),
        "job": make_job(),
        "owner": store.owner(),
    }
    return RunRecord(run_id=run_id, **(given | values))


def make_run(
    runs_dir: Path, run_id: str = RUN_ID, status: str = states.NOT_STARTED, **values: Any
) -> tuple[RunFolder, int]:
    """Make a run in this state. Return it with the open file of its lock: after a close, no process supervises the run."""
    record = make_record(run_id, **values)
    fd = store.create(runs_dir, record)
    folder = RunFolder(runs_dir / run_id)
    if status != record.status:
        store.change(folder, record, status)
    return folder, fd


def make_launch(job: Job, *, node_count: int | None = None, gpus: int = 0, cores: int = 8, **values: Any) -> Launch:
    """A launch of `job` on stand-in nodes with `gpus` devices each; its paths exist nowhere."""
    nodes = tuple(
        Node(
            node_rank=rank,
            name=f"node-{rank}",
            address=f"10.0.0.{rank + 1}",
            cores=cores,
            gpus=tuple(str(rank * gpus + index) for index in range(gpus)),
        )
        for rank in range(node_count or job.node_count)
    )
    run_dir = Path("/shared/team/.paceline/runs") / RUN_ID
    given: dict[str, Any] = {
        "job": job,
        "run_id": RUN_ID,
        "experiment": "digits",
        "workspace_name": "team",
        "run_dir": run_dir,
        "work_dir": run_dir / "work",
        "scratch_dir": Path("/dev/shm/paceline-0"),
        "library_dir": Path("/shared/team/.paceline/lib/0"),
        "nodes": nodes,
        "prepared": (NodeSetup(python="/env/bin/python"),) * len(nodes),
        "ports": tuple(range(20000, 20000 + port_count(job))),
        "secret": "5e" * 32,
    }
    return Launch(**(given | values))


def write_tree(top: Path, files: Mapping[str, str | bytes]) -> Path:
    """`top`, with these files below it."""
    for name, content in files.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return top


def remove_in_use(path: Path) -> None:
    """Remove a folder in which other processes may make files meanwhile."""
    gone = path.with_name(f".gone-{path.name}-00000000")
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def replace_lock(lock: Path) -> None:
    """Replace a lock's file, so that its holder excludes nobody, as after a lost lease of NFS."""
    beside = lock.with_name("beside")
    beside.write_bytes(lock.read_bytes())
    os.replace(beside, lock)


def fill_disk(disk: Path) -> None:
    """Leave no block free on this file system."""
    with open(disk / "filler", "wb", buffering=0) as file:
        size = 1 << 16
        while size:
            try:
                if file.write(b"0" * size) < size:
                    size //= 2
            except OSError:
                size //= 2


def free_port() -> int:
    """Return a free port below the kernel's ephemeral ports, which a connection may take before the test uses them."""
    while True:
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", random.SystemRandom().randrange(20000, 32000))) as server,
        ):
            return int(server.getsockname()[1])


def old_python() -> str | None:
    """Return a Python as old as those of login hosts, if there is one."""
    places = [*Path.home().glob(".pyenv/versions/3.6.*/bin/python3"), Path("/usr/bin/python3.6")]
    return next((str(path) for path in places if path.exists()), None)


def write_program(path: Path, text: str) -> Path:
    """An executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def start_python(
    code: str, *arguments: object, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[str]:
    """Another Python that runs `code`, with its standard output to be read."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(
        command, env={**os.environ, **(environment or {})}, stdout=subprocess.PIPE, text=True, **options
    )


def run_python(
    code: str, *arguments: object, environment: Mapping[str, str] | None = None, timeout: float = 240
) -> str:
    """What another Python that runs `code` prints; it has to end with 0."""
    process = start_python(code, *arguments, environment=environment)
    try:
        text, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, text
    return text


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the content of each file below the folder, in which a run may still write and rename files."""
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and not path.is_symlink():
                found[path] = path.read_bytes()
    return found


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    """Return once `condition` holds. timeout_s: what a quiet machine may need; a busy one gets three times as much."""
    began = looked = time.monotonic()
    while not condition():
        now = time.monotonic()
        waited = now - began
        assert waited < 3 * timeout_s, f"waited {3 * timeout_s:g} s in vain: {what}"
        # Poll less often, the longer the wait takes and the longer one check takes. A check on a login host starts a Python
        # process, and finding the processes of three hosts takes as long as reading a run's record a hundred times.
        time.sleep(min(0.3, max(0.005, waited / 25, 3 * (now - looked))))
        looked = time.monotonic()
