"""Two supervisors of one run: an engine has lost the first one, which was only suspended, and starts a second one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from paceline.runs import read, states
from paceline.system import locks, processes
from paceline.system.files import read_json
from tests.helpers import replace_lock, wait_until
from tests.supervisor.test_supervise import WAITS, Stage

#: Settings of supervisors. FIRST has node a. SECOND and HASTY have node b: SECOND waits for the run's lock until the
#: end of the first supervisor, and HASTY waits only for a moment.
FIRST, SECOND, HASTY = ({"name": name, "guarded_s": wait_s} for name, wait_s in (("a", 600), ("b", 600), ("b", 0.1)))


class Pair(Stage):
    """A run whose first guardian and supervisor are suspended."""

    def __init__(self, tmp_path: Path, **job) -> None:
        super().__init__(tmp_path, WAITS, is_of_engine=True, max_restarts=1, **job)
        self.guardian = self.start(FIRST)
        self.pid = self.worker()
        wait_until(lambda: self.record().status == states.RUNNING, "the run is Running")
        self.supervisor = self.record().owner["pid"]
        self.send(signal.SIGSTOP)

    def send(self, number: int) -> None:
        for pid in (self.guardian.pid, self.supervisor):
            processes.send(pid, number)

    def state(self) -> bytes:
        return self.folder.state.read_bytes()

    def log(self) -> str:
        return self.folder.driver_log.read_text()


@pytest.fixture
def pair(tmp_path):
    pair = Pair(tmp_path)
    yield pair
    pair.send(signal.SIGKILL)
    processes.send(pair.pid, signal.SIGKILL)
    pair.guardian.wait(180)


def test_second_supervisor_leaves_a_run_whose_suspended_supervisor_holds_the_lock(pair):
    before = pair.state()
    assert pair.start(HASTY).wait(180) == 75
    assert pair.state() == before
    assert f"process {pair.guardian.pid} (" in pair.log()
    assert f"the last supervisor or controller is process {pair.guardian.pid} on " in pair.log()
    pair.send(signal.SIGCONT)
    processes.send(pair.pid, signal.SIGKILL)
    assert pair.guardian.wait(180) == 0
    assert [one.cause for one in pair.record().attempts] == ["killed", None]
    assert pair.record().status == states.COMPLETED
    # A third supervisor gets the lock, and finds that the run has ended.
    ended = pair.state()
    assert pair.start(SECOND).wait(180) == 0
    assert pair.state() == ended
    assert pair.told() == ["gave a", "took a", "released"]


def test_reader_leaves_the_record_of_a_suspended_supervisor_as_it_is(pair):
    pair.folder.engine.unlink()
    before = pair.state()
    assert read.record(pair.folder).status == states.RUNNING
    assert pair.state() == before
    assert processes.is_alive(pair.pid)


@pytest.mark.parametrize("killed", ["nothing", "guardian", "supervisor"])
def test_suspended_supervisor_that_has_lost_its_lock_leaves_the_run_to_the_second(pair, killed):
    if killed != "nothing":
        processes.send({"guardian": pair.guardian.pid, "supervisor": pair.supervisor}[killed], signal.SIGKILL)
    replace_lock(pair.folder.lock)
    assert pair.start(SECOND).wait(180) == 0
    ended, told = pair.state(), pair.told()
    assert pair.record().status == states.COMPLETED
    assert [one.cause for one in pair.record().attempts] == ["node_lost", None]
    assert processes.is_alive(pair.pid)
    pair.send(signal.SIGCONT)
    wait_until(
        lambda: not processes.is_alive(pair.supervisor) and not processes.is_alive(pair.pid), "the first one's end"
    )
    assert pair.guardian.wait(180) == (-signal.SIGKILL if killed == "guardian" else 75)
    assert (pair.state(), pair.told()) == (ended, told)
    assert "gave a" in told
    assert "took a" not in told
    assert not pair.folder.closing.exists()
    assert " has taken over its work" in pair.log()


def test_suspended_supervisor_leaves_a_run_that_a_reader_has_closed(pair):
    pair.folder.engine.unlink()
    replace_lock(pair.folder.lock)
    assert read.record(pair.folder).status == states.FAILED
    ended = pair.state()
    pair.send(signal.SIGCONT)
    assert pair.guardian.wait(180) == 75
    assert pair.state() == ended
    assert pair.told() == ["gave a"]


def test_supervisor_starts_without_a_lock_on_a_file_system_that_has_none(tmp_path):
    stage = Stage(tmp_path, "print('trained')", is_of_engine=True)
    assert stage.see_through({"name": "a", "guarded_s": 600, "no_locks": True}).status == states.COMPLETED
    assert "can't be locked: Function not implemented" in stage.folder.driver_log.read_text()
    assert b" on " in (locks.claimed(stage.folder.lock) or b"")
    assert read_json(stage.folder.state)["status"] == states.COMPLETED
