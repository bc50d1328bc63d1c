"""SIGKILL, at random, of any process of a run, in any state.

After each kill the run ends in the true state with a reason, no process of it is left, and the logged lines of its
workers can be read. 4 kills here, 500 with `make chaos`. A failure prints the seed that repeats it
(PACELINE_CHAOS_SEED).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.environments.store import EnvironmentStore
from paceline.errors import LauncherError
from paceline.launchers.mpi import find_open_mpi
from paceline.runs import metrics, read, states, store
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord
from paceline.system import locks, processes
from paceline.targets.local_leases import Lease, LeaseRequest, LocalDemand, LocalQueue, leases_dir
from tests.environments.wheels import make_wheel

KILLS = int(os.environ.get("PACELINE_CHAOS_KILLS", "4"))
SEED = int(os.environ.get("PACELINE_CHAOS_SEED", str(random.SystemRandom().randrange(1 << 30))))

#: Time limit in seconds, which only keeps the test from hanging. Programs start slowly on a busy disk.
PATIENCE_S = 180

VICTIMS = ("worker", "supervisor", "guardian", "launcher", "submitter", "node")
STATES = (states.NOT_STARTED, states.QUEUED, states.PREPARING, states.STARTING, states.RUNNING, states.FINALIZING)

#: This script logs 30 values and prints the count after each. It also starts a child process in a session of its own.
SCRIPT = """
import os, subprocess, sys, time
import paceline

subprocess.Popen(["sleep", "600"], start_new_session=True)
if "PACELINE_INPUT_data" in os.environ:
    import spam
    assert open(os.environ["PACELINE_INPUT_data"] + "/a.txt").read() == "a" * 100000
    open(os.environ["PACELINE_INPUT_left"] + "/" + os.environ["PACELINE_RANK"], "w").write("left")
run = paceline.Run.get_context()
place = os.path.join(os.environ["PACELINE_RUN_DIR"], "said_" + os.environ["PACELINE_RANK"])
said = os.open(place, os.O_WRONLY | os.O_CREAT, 0o666)
for count in range(1, 31):
    run.log("count", count)
    os.pwrite(said, b"%5d" % count, 0)
    print("count", count, flush=True)
    time.sleep(0.01)
"""

#: This program submits a run and waits for it, as a user's program would. It prints the run's id as soon as the run exists.
SUBMITTER = """
import sys, time
import paceline as pl
backend = sys.argv[2] or None
needs = {}
if sys.argv[3]:
    store = pl.Workspace.from_config().get_default_datastore()
    needs = dict(pip_packages=[sys.argv[3]], layered=True,
                 inputs=[store.path("in", "data").as_download(), store.path(f"out/{time.time_ns()}", "left").as_upload()])
estimator = pl.PyTorch(source_directory=sys.argv[1], entry_script="train.py", node_count=2 if backend else 1,
                       distributed_backend=backend, grace_period_seconds=2, **needs)
run = pl.Experiment(pl.Workspace.from_config(), "chaos").submit(estimator)
run.wait_for_completion(raise_on_error=False)
"""


@dataclass
class Kill:
    """One round: the program, the killed process and the time of the kill."""

    backend: str
    victim: str
    state: str
    delay_s: float
    queued: bool
    needs: bool


def rounds() -> list[Kill]:
    dice = random.Random(SEED)
    backends = ["", "gloo"]
    try:
        find_open_mpi(sys.executable)
        backends.append("mpi")
    except LauncherError:
        pass
    return [
        Kill(
            backend=(backend := dice.choice(backends)),
            needs=(needs := dice.random() < 0.4),
            victim=(victim := dice.choice([one for one in VICTIMS if is_there(one, backend, needs)])),
            state=(state := dice.choice((states.PREPARING, states.FINALIZING) if victim == "node" else STATES)),
            delay_s=dice.choice([0.0, dice.uniform(0, 0.02), dice.uniform(0, 0.3)]),
            queued=state == states.QUEUED,
        )
        for _ in range(KILLS)
    ]


def is_there(victim: str, backend: str, needs: bool) -> bool:
    """Whether such a run has such a process: mpirun, or one that prepares a node."""
    return {"launcher": backend == "mpi", "node": needs}.get(victim, True)


@pytest.mark.promise("whatever-killed-moment-run-ends")
@pytest.mark.timeout(600 + 10 * KILLS)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc to find the processes of a run")
def test_killing_any_process_of_a_run_neither_leaves_it_unfinished_nor_damages_built_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text(SCRIPT)
    for number in range(100):
        (source / f"module_{number}.py").write_text(f"number = {number}\n" * 200)
    workspace = tmp_path / "workspace"
    monkeypatch.setenv("PACELINE_WORKSPACE", str(workspace))
    data = workspace / "data" / "in" / "a.txt"
    data.parent.mkdir(parents=True)
    data.write_text("a" * 100000)
    killed_in: dict[tuple[str, str], int] = {}
    for number, kill in enumerate(rounds()):
        try:
            # Use a new version of the package every two rounds: for a known version, the run would reuse the
            # environment of an earlier round.
            wheel = make_wheel(tmp_path / "wheels", "spam", f"1.{number // 2}") if kill.needs else None
            was_killed = play(kill, source, workspace, wheel)
        except AssertionError as error:
            raise AssertionError(f"round {number} of PACELINE_CHAOS_SEED={SEED}: {kill}: {error}") from error
        if was_killed:
            killed_in[kill.victim, kill.state] = killed_in.get((kill.victim, kill.state), 0) + 1
    for built in EnvironmentStore(workspace / "environments").all():
        assert subprocess.run([built.python, "-c", "import spam, paceline"], check=False).returncode == 0, built
    assert sum(killed_in.values()) >= KILLS // 3, f"too few of the kills met a living process: {killed_in}"


def play(kill: Kill, source: Path, workspace: Path, wheel: Path | None) -> bool:
    """Submit, kill, and check what is left. Return whether there was a process to kill."""
    before = set(store.ids(workspace / "runs"))
    blocker = block_the_machine(workspace) if kill.queued else None
    submitter = subprocess.Popen([sys.executable, "-c", SUBMITTER, str(source), kill.backend, str(wheel or "")])
    try:
        folder = new_run(workspace, before, submitter)
        if folder is None:
            return False
        wait_for_state(folder, kill.state)
        time.sleep(kill.delay_s)
        pid = find_victim(kill, folder, submitter)
        killed = pid is not None and processes.send(pid, signal.SIGKILL)
        if kill.queued:
            time.sleep(0.05)
    finally:
        if blocker is not None:
            os.close(blocker)
    if kill.victim == "submitter":
        submitter.wait(timeout=PATIENCE_S)
    record = wait_for_end(folder)
    submitter.wait(timeout=PATIENCE_S)
    check(kill, killed, folder, record)
    return killed


def block_the_machine(workspace: Path) -> int:
    """Hold all cores, as another run would, so that the next run has to queue; closing the file lets go of them."""
    from paceline.system.processes import core_count

    other = workspace / "runs" / f".blocker-{time.monotonic_ns()}"
    other.mkdir(parents=True)
    fd = locks.take(RunFolder(other).lock)
    assert fd is not None
    queue = LocalQueue(leases_dir(), core_count(), ())
    queue.enqueue(other, LocalDemand(nodes=1, cores=core_count(), gpus=0), LeaseRequest())
    deadline = time.monotonic() + PATIENCE_S
    while not isinstance(queue.try_grant(other), Lease):
        assert time.monotonic() < deadline, "the machine did not become free"
        time.sleep(0.01)
    return fd


def new_run(workspace: Path, before: set[str], submitter: subprocess.Popen[bytes]) -> RunFolder | None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        new = set(store.ids(workspace / "runs")) - before
        if new:
            return RunFolder(workspace / "runs" / new.pop())
        assert submitter.poll() is None, "the submitter ended without a run"
        time.sleep(0.002)
    raise AssertionError("no run appeared")


def wait_for_state(folder: RunFolder, state: str) -> None:
    """Until the run is in the state, or past it."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        events = folder.events.read_text() if folder.events.exists() else ""
        if f'"status": "{state}"' in events or any(f'"status": "{end}"' in events for end in states.TERMINAL):
            return
        time.sleep(0.002)
    raise AssertionError(f"the run did not become {state}: {events}")


def find_victim(kill: Kill, folder: RunFolder, submitter: subprocess.Popen[bytes]) -> int | None:
    if kill.victim == "submitter":
        return submitter.pid if submitter.poll() is None else None
    if kill.victim in ("supervisor", "guardian"):
        pids = sorted(pid for pid in processes.with_variable(processes.SUPERVISOR_VARIABLE, folder.run_id))
        place = 0 if kill.victim == "guardian" else 1
        return pids[place] if len(pids) > place else None
    pids = processes.with_variable("PACELINE_RUN_DIR", str(folder.path))
    wanted = [pid for pid in pids if is_one(kill.victim, pid)]
    return random.choice(wanted) if wanted else None


def is_one(victim: str, pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    if victim == "node" or b"paceline.node" in words:
        return victim == "node" and b"paceline.node" in words
    is_launcher = os.path.basename(words[0]) in (b"mpirun", b"prterun", b"orterun")
    return is_launcher if victim == "launcher" else not is_launcher and b"train.py" in words


def wait_for_end(folder: RunFolder) -> RunRecord:
    deadline = time.monotonic() + PATIENCE_S
    # The end of the supervisor is visible before the final record is written, so wait for the stored record too.
    while not ((record := read.record(folder)).is_terminal and store.stored(folder).is_terminal):
        assert time.monotonic() < deadline, f"the run is still {record.status}"
        time.sleep(0.03)
    return record


def check(kill: Kill, killed: bool, folder: RunFolder, record: RunRecord) -> None:
    events = [json.loads(line)["status"] for line in folder.events.read_text().splitlines() if line]
    # Killing the guardian or the submitting program must not affect the run once the run is queued.
    harmless = kill.victim in ("guardian", "submitter") and states.QUEUED in events
    if not killed or harmless:
        assert record.status == states.COMPLETED, f"ended as {record.status}: {record.failure}"
    if record.status == states.FAILED:
        assert record.failure is not None, "failed, and does not say why"
        expected = {
            "worker": {"killed", "launcher"},
            "launcher": {"launcher"},
            "supervisor": {"supervisor", "not_started"},
            "submitter": {"not_started"},
            "guardian": {"not_started"},
            "node": {"prepare"},
        }[kill.victim]
        assert record.failure.cause in expected, f"failed for another reason: {record.failure}"
        assert record.exit_code not in (0, None), "failed with exit code 0"
    else:
        assert record.status == states.COMPLETED, f"ended as {record.status}"
    assert events[-1] == record.status, "the last event is not the end"
    check_logged(folder, complete=record.status == states.COMPLETED)
    check_nothing_left(folder, record)


def check_logged(folder: RunFolder, *, complete: bool) -> None:
    """Every value whose `log` had returned is there."""
    for said in folder.path.glob("said_*"):
        rank = int(said.name.split("_")[1])
        found = metrics.read(folder.metrics, rank=rank).get("count", [])
        values = found if isinstance(found, list) else [found]
        told = int(said.read_text() or 0)
        assert values[:told] == list(range(1, told + 1)), f"rank {rank} had logged {told} values; there are {values}"
        if complete:
            assert told == 30, f"completed, but rank {rank} logged {told} of 30 values"


def check_stored(folder: RunFolder, record: RunRecord) -> None:
    """What the workers left is in the store, whole."""
    assert record.job is not None
    for reference in record.job.inputs:
        if reference.is_output:
            target = folder.path.parent.parent / "data" / reference.sources[0].path
            found = {path.name: path.read_text() for path in target.iterdir()}
            assert found == {str(rank): "left" for rank in range(record.job.world_size)}


def check_nothing_left(folder: RunFolder, record: RunRecord) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        left = [
            *processes.with_variable("PACELINE_RUN_DIR", str(folder.path)),
            *processes.with_variable(processes.SUPERVISOR_VARIABLE, folder.run_id),
        ]
        if not left:
            break
        time.sleep(0.1)  # each search for processes reads /proc of the whole machine, so pause
    assert not left, f"processes {left} outlived the run"
    if record.status == states.COMPLETED:
        views = Path(os.environ["PACELINE_DATA_CACHE"]) / "views" / folder.run_id
        assert not views.exists(), f"{views} outlived the run"
        assert not list(folder.uploads.glob("*")), "outputs were not stored"
        check_stored(folder, record)
    scratch = json.loads(folder.state.read_text()).get("scratch_dir")
    assert scratch is None or not Path(scratch).exists(), f"{scratch} outlived the run"
    tickets = [ticket["run_dir"] for ticket in LocalQueue(leases_dir(), 1, ()).look()["tickets"]]
    assert str(folder.path) not in tickets, "the run still holds its lease"
