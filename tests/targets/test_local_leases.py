from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import TargetError
from paceline.runs.folder import RunFolder
from paceline.system import locks
from paceline.targets import host_leases, leases, local_leases
from paceline.targets.local_leases import (
    LEASES_VARIABLE,
    Lease,
    LeaseRequest,
    LocalDemand,
    LocalQueue,
    SharedQueue,
    leases_dir,
)
from tests.helpers import start_python


class Machine:
    """A machine with a queue, and runs on it, each of which has a supervisor until it is killed."""

    def __init__(self, top: Path, cores: int = 4, gpus: tuple[str, ...] = ()) -> None:
        self.top, self.queue = top, LocalQueue(top / "leases", cores, gpus)
        self.locks: dict[str, int] = {}

    def run_dir(self, name: str) -> Path:
        return self.top / "runs" / name

    def submit(self, name: str, cores: int = 1, gpus: int = 0, ports: int = 2, **more: Any) -> None:
        self.run_dir(name).mkdir(parents=True)
        self.locks[name] = locks.take(RunFolder(self.run_dir(name)).lock)
        demand = LocalDemand(nodes=1, cores=cores, gpus=gpus)
        self.queue.enqueue(self.run_dir(name), demand, LeaseRequest(ports=ports, **more))

    def kill(self, name: str) -> None:
        os.close(self.locks.pop(name))

    def ask(self, name: str) -> Lease | list[str]:
        found: Any = self.queue.try_grant(self.run_dir(name))
        return found if is_granted(found) else [ticket["run_id"] for ticket in found]

    def release(self, name: str) -> None:
        self.queue.release(self.run_dir(name))

    def close(self) -> None:
        for fd in self.locks.values():
            os.close(fd)

    def tickets(self) -> list[str]:
        return sorted(name for name in os.listdir(self.top / "leases/tickets") if name.endswith(".ticket"))


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch):
    """A waiting run looks at the folder each time, and not five times in a second."""
    for name in ("_LOOK_S", "_PLACE_S", "_ALIVE_S"):
        monkeypatch.setattr(leases, name, 0.0)


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path, cores=4, gpus=("0", "1", "2", "3"))
    yield machine
    machine.close()


def is_granted(answer: object) -> bool:
    return isinstance(answer, Lease)


# --- The queue


def test_lease_has_the_requested_cores_gpus_and_ports(machine):
    machine.submit("a", cores=3, gpus=2, ports=4)
    lease = machine.ask("a")
    assert (lease.cores, lease.gpus, len(lease.ports)) == (3, ("0", "1"), 4)


def test_repeated_lease_request_of_a_run_returns_the_same_lease(machine):
    machine.submit("a", gpus=1)
    assert machine.ask("a") == machine.ask("a")


def test_runs_share_the_machine_as_long_as_there_is_room(machine):
    for name in "abc":
        machine.submit(name, cores=2)
    assert is_granted(machine.ask("a"))
    assert is_granted(machine.ask("b"))
    assert machine.ask("c") == ["a", "b"]
    machine.release("a")
    assert is_granted(machine.ask("c"))


def test_small_run_does_not_overtake_a_large_run(machine):
    machine.submit("first", cores=3)
    machine.submit("large", cores=4)
    machine.submit("small", cores=1)
    assert is_granted(machine.ask("first"))
    assert machine.ask("large") == ["first"]
    assert machine.ask("small") == ["large"]
    machine.release("first")
    assert machine.ask("small") == ["large"]
    assert is_granted(machine.ask("large"))
    machine.release("large")
    assert is_granted(machine.ask("small"))


def test_runs_are_granted_in_order_of_submission(machine):
    for name in ("z", "a", "m"):
        machine.submit(name, cores=4)
    assert machine.ask("m") == ["z", "a"]
    assert machine.ask("a") == ["z"]
    assert is_granted(machine.ask("z"))


def test_gpus_are_shared_without_overlap(machine):
    for name, count in (("a", 1), ("b", 2), ("c", 2)):
        machine.submit(name, gpus=count)
    assert machine.ask("a").gpus == ("0",)
    assert machine.ask("b").gpus == ("1", "2")
    assert machine.ask("c") == ["a", "b"]
    machine.release("a")
    assert machine.ask("c").gpus == ("0", "3")


@pytest.mark.promise("runs-ask-share-gpu-same")
def test_fractional_gpu_shares_are_packed_and_whole_gpus_stay_free(tmp_path):
    machine = Machine(tmp_path, cores=99, gpus=("0", "1", "2"))
    for name, count, share in (
        *(("a", 1, 0.5), ("b", 1, 1.0), ("c", 1, 0.5), ("d", 2, 0.3), ("e", 1, 1.0)),
        *((f"f{number}", 1, 0.1) for number in range(7)),
    ):
        machine.submit(name, gpus=count, gpu_share=share)
    assert machine.ask("a").gpus == ("0",)
    assert machine.ask("b").gpus == ("1",)
    assert machine.ask("c").gpus == ("0",)
    # Run d needs two GPUs, but only GPU 2 is free. The runs on the other GPUs leave no share for d.
    assert machine.ask("d") == ["a", "b", "c"]
    machine.release("a")
    assert machine.ask("d").gpus == ("0", "2")
    assert machine.ask("e") == ["b", "c", "d"]
    machine.release("b")
    assert machine.ask("e").gpus == ("1",)
    # GPU 0 has a share of 0.2 left, and GPU 2 has 0.7.
    assert [machine.ask(f"f{number}").gpus for number in range(6)] == [("0",)] * 2 + [("2",)] * 4
    machine.close()


def test_run_that_requests_more_cores_than_exist_gets_the_whole_machine(machine):
    machine.submit("a", cores=100)
    machine.submit("b", cores=1)
    assert is_granted(machine.ask("a"))
    assert machine.ask("b") == ["a"]


def test_lease_request_of_a_run_outside_the_queue_raises(machine):
    machine.submit("a")
    with pytest.raises(LookupError, match="no place in the queue"):
        machine.ask("b")


def test_releasing_a_lease_that_is_not_held_raises_no_error(machine):
    machine.release("nobody")
    machine.submit("a")
    machine.release("a")
    machine.release("a")
    assert machine.tickets() == []


# --- After kills


def test_killed_run_releases_its_lease(machine):
    machine.submit("a", cores=4, gpus=4)
    machine.submit("b", cores=4, gpus=4)
    assert is_granted(machine.ask("a"))
    assert machine.ask("b") == ["a"]
    machine.kill("a")
    assert is_granted(machine.ask("b"))
    assert len(machine.tickets()) == 1


def test_killed_waiting_run_does_not_block_the_queue(machine):
    for name in "abc":
        machine.submit(name, cores=4)
    assert is_granted(machine.ask("a"))
    machine.kill("b")
    machine.release("a")
    assert is_granted(machine.ask("c"))


def test_killed_process_releases_its_lease(machine):
    code = """
import sys, time
from pathlib import Path
from paceline.system import locks
from paceline.targets.local_leases import LocalDemand, LocalQueue, LeaseRequest
top, run_dir = Path(sys.argv[1]), Path(sys.argv[2])
run_dir.mkdir(parents=True)
fd = locks.take(run_dir / "lock")
queue = LocalQueue(top / "leases", 4, ())
queue.enqueue(run_dir, LocalDemand(nodes=1, cores=4, gpus=0), LeaseRequest(ports=2))
print(type(queue.try_grant(run_dir)).__name__, flush=True)
time.sleep(60)
"""
    with start_python(code, machine.top, machine.run_dir("other")) as process:
        assert process.stdout.readline() == "Lease\n"
        machine.submit("mine")
        assert machine.ask("mine") == ["other"]
        process.kill()
        process.wait()
    assert is_granted(machine.ask("mine"))


def test_run_with_a_removed_folder_is_dropped_from_the_queue(machine):
    machine.submit("a", cores=4)
    machine.submit("b", cores=4)
    for path in (machine.run_dir("a") / "lock", machine.run_dir("a")):
        path.unlink() if path.is_file() else path.rmdir()
    assert is_granted(machine.ask("b"))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}"])
def test_damaged_queue_ticket_is_ignored(machine, text):
    machine.submit("a", cores=4)
    (machine.top / "leases/tickets/00000000.ticket").write_text(text)
    (machine.top / "leases/tickets/00000002.ticket.5ab.new").write_text(text)
    assert is_granted(machine.ask("a"))


def test_concurrent_submissions_of_many_processes_are_all_queued(tmp_path):
    code = """
import sys
from pathlib import Path
from paceline.system import locks
from paceline.targets.local_leases import LocalDemand, LocalQueue, LeaseRequest
top, name = Path(sys.argv[1]), sys.argv[2]
queue, kept = LocalQueue(top / "leases", 4, ()), []
for number in range(10):
    run_dir = top / "runs" / f"{name}{number}"
    run_dir.mkdir(parents=True)
    kept.append(locks.take(run_dir / "lock"))
    queue.enqueue(run_dir, LocalDemand(nodes=1, cores=1, gpus=0), LeaseRequest(ports=2))
print("done", flush=True)
sys.stdin.readline()
"""
    started = [start_python(code, tmp_path, name, stdin=-1) for name in "abcd"]
    assert [process.stdout.readline() for process in started] == ["done\n"] * 4
    machine = Machine(tmp_path)
    assert machine.tickets() == [f"{number:08d}.ticket" for number in range(1, 41)]
    for process in started:
        process.communicate("\n")


# --- Random sequences of events


steps = st.lists(
    st.tuples(
        st.sampled_from(["submit", "ask", "ask", "release", "kill"]),
        st.integers(0, 5),
        st.integers(1, 5),
        st.integers(0, 2),
    ),
    max_size=25,
)


@settings(max_examples=40)
@given(steps)
def test_random_event_sequences_grant_no_resource_twice_and_keep_the_queue_order(steps):
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder), cores=4, gpus=("0", "1"))
        waiting: list[str] = []
        held: dict[str, Lease] = {}
        asked: dict[str, tuple[int, int]] = {}
        for number, (step, choice, cores, gpus) in enumerate(steps):
            alive = [*held, *waiting]
            name = alive[choice % len(alive)] if alive else None
            if step == "submit":
                machine.submit(f"r{number}", cores=cores, gpus=gpus)
                waiting.append(f"r{number}")
                asked[f"r{number}"] = (cores, gpus)
            elif name is None:
                continue
            elif step == "ask":
                answer = machine.ask(name)
                if isinstance(answer, Lease) and name not in held:
                    before = waiting[: waiting.index(name)]
                    waiting.remove(name)
                    held[name] = answer
                    # A run may overtake earlier runs in the queue only if these still fit too, so that it delays none
                    # of them.
                    assert sum(min(asked[other][0], 4) for other in [*held, *before]) <= 4
                    assert sum(asked[other][1] for other in [*held, *before]) <= 2
            else:
                machine.release(name) if step == "release" else machine.kill(name)
                waiting = [other for other in waiting if other != name]
                held.pop(name, None)
            granted = list(held.values())
            assert sum(min(lease.cores, 4) for lease in granted) <= 4
            for given_out in (
                [gpu for lease in granted for gpu in lease.gpus],
                [p for lease in granted for p in lease.ports],
            ):
                assert len(given_out) == len(set(given_out))
        if waiting and not held:
            assert is_granted(machine.ask(waiting[0]))  # an empty machine grants the first run
        machine.close()


# --- Ports


def test_ports_differ_within_a_run_and_between_runs(machine):
    for name in "abcd":
        machine.submit(name, ports=5)
    ports = [port for name in "abcd" for port in machine.ask(name).ports]
    assert len(set(ports)) == 20
    assert all(20000 <= port < 32000 for port in ports)


# --- The lease folder


def test_lease_folder_is_set_by_its_variable(monkeypatch, tmp_path):
    monkeypatch.setenv(LEASES_VARIABLE, str(tmp_path / "mine"))
    assert leases_dir() == tmp_path / "mine"


def test_leases_are_in_the_state_folder_under_the_host_name(monkeypatch, tmp_path):
    monkeypatch.delenv(LEASES_VARIABLE)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert leases_dir() == tmp_path / "state/paceline/leases" / socket.gethostname()


def test_leases_are_in_tmp_if_the_state_folder_cannot_be_created(monkeypatch, tmp_path):
    monkeypatch.delenv(LEASES_VARIABLE)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert leases_dir() == Path(f"/tmp/paceline-{os.getuid()}/leases")


def test_lease_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    # Regression: runs used tickets in a folder into which every user could write.
    monkeypatch.delenv(LEASES_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    own = tmp_path / "paceline-own"
    monkeypatch.setattr(local_leases, "_own_folder", lambda: own)
    assert leases_dir() == own / "leases"
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    with pytest.raises(
        TargetError, match=rf"paceline-own' can be written to by everybody.*name a folder \({LEASES_VARIABLE}"
    ):
        leases_dir()


def test_error_names_the_process_that_holds_the_lease_lock_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(local_leases, "_GUARD_S", 0.05)
    queue = LocalQueue(tmp_path, 4, ())
    fd = locks.take(tmp_path / "guard")
    with pytest.raises(TargetError, match=rf"leases can't be read: process {os.getpid()} \(.*has held the lock"):
        queue.release(tmp_path)
    os.close(fd)
    queue.release(tmp_path)


# --- Elastic runs


def test_elastic_run_takes_all_free_nodes(machine):
    demands = [LocalDemand(nodes=count, cores=count, gpus=0) for count in (4, 3, 2)]
    machine.submit("other", cores=1)
    machine.submit("elastic", cores=2)
    assert is_granted(machine.ask("other"))
    found = machine.queue.try_grant(machine.run_dir("elastic"), demands)
    assert (found.nodes, found.cores) == (3, 3)
    # A second request of the same run returns the same nodes.
    assert machine.queue.try_grant(machine.run_dir("elastic"), demands).nodes == 3
    assert machine.queue.most_nodes(machine.run_dir("elastic"), demands[:1]) == 0
    machine.release("other")
    assert machine.queue.most_nodes(machine.run_dir("elastic"), demands[:1]) == 4
    machine.submit("waits", cores=4)
    assert not is_granted(machine.ask("waits"))
    assert machine.queue.most_nodes(machine.run_dir("elastic"), demands[:1]) == 0, "somebody else is served first"


def test_elastic_run_on_a_shared_machine_does_not_grow_onto_a_gpu_in_use_outside_paceline(tmp_path, monkeypatch):
    monkeypatch.setenv(LEASES_VARIABLE, str(tmp_path))
    used: dict[str, str] = {}
    monkeypatch.setattr(host_leases, "used_gpus", lambda gpus, own: used)
    queue, run_dir = SharedQueue(4, ("0", "1", "2")), tmp_path / "runs/elastic"
    queue.enqueue(run_dir, LocalDemand(nodes=1, cores=1, gpus=1), LeaseRequest())
    assert is_granted(queue.try_grant(run_dir))
    demands = [LocalDemand(nodes=count, cores=count, gpus=count) for count in (3, 2)]
    assert queue.most_nodes(run_dir, demands) == 3
    used["2"] = "used by bob's python"
    assert queue.most_nodes(run_dir, demands) == 2


def test_elastic_run_queues_for_its_smallest_node_count(machine):
    demands = [LocalDemand(nodes=count, cores=count, gpus=0) for count in (4, 3, 2)]
    machine.submit("first", cores=3)
    machine.submit("elastic", cores=2)
    assert is_granted(machine.ask("first"))
    assert machine.queue.try_grant(machine.run_dir("elastic"), demands)[0]["run_id"] == "first"
    machine.release("first")
    assert machine.queue.try_grant(machine.run_dir("elastic"), demands).nodes == 4


def test_queue_of_more_runs_than_the_limit_for_other_users_gives_each_run_its_own_ticket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_TICKETS", 2)
    machine = Machine(tmp_path, cores=4)
    try:
        for name in "abcd":
            machine.submit(name)
        assert len(machine.tickets()) == 4
        assert all(is_granted(machine.ask(name)) for name in "abcd")
    finally:
        machine.close()
