"""Runs that want the same hosts, in threads, with books that are real and agents that are not."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import EngineError, TargetError
from paceline.targets import host_leases as leases
from paceline.targets.ssh import allocate
from paceline.targets.ssh.allocate import Gathering, HeldHosts, HostDemand
from paceline.targets.ssh.hosts import SshHost
from paceline.targets.ssh.members import HostMember
from paceline.targets.ssh.target import SshTarget
from tests.helpers import make_job

HOSTS = tuple(SshHost(name=f"h{index}", slots=2) for index in range(3))
FOURTH = SshHost(name="h3", slots=2)


class FakeMember(HostMember):
    """A member whose node's program runs in this process."""

    def ask(self, verb: str, given: Any) -> Any:
        _here.name = self.host.name
        if self.link.lost:
            raise TargetError(self.link.lost)
        answer: dict[str, Any] = getattr(leases, verb)(dict(given))
        return answer


class FakeOpening:
    """Agents that are there at once. down: hosts without. gpus, names: of the machines behind the hosts."""

    def __init__(self, down: Sequence[str] = (), gpus: int = 0, names: dict[str, str] | None = None) -> None:
        self.down, self.gpus, self.names = set(down), gpus, names or {}
        self.failures: dict[SshHost, str] = {}
        self.pending: list[SshHost] = []
        self._members: dict[SshHost, HostMember] = {}

    def open(self, hosts: Any) -> None:
        for host in hosts:
            if host.name in self.down:
                self.failures[host] = "it is down"
                continue
            self.failures.pop(host, None)
            if host not in self._members:
                hello = SimpleNamespace(
                    boot_id="1",
                    host=self.names.get(host.name, host.name),
                    gpus=tuple(map(str, range(self.gpus))),
                    user="me",
                    pid=os.getpid(),
                    cores=2,
                )
                self._members[host] = FakeMember(host=host, link=SimpleNamespace(lost=None, hello=hello))  # type: ignore[arg-type]

    def wait(self, timeout_s: float) -> bool:
        return True

    def wait_for_those_alike(self, longest_s: float, more_s: float) -> None:
        pass

    def members(self, hosts: Sequence[SshHost]) -> list[HostMember]:
        return [self._members[host] for host in hosts if host in self._members and not self._members[host].link.lost]


_here = threading.local()


@pytest.fixture(autouse=True)
def books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host has its own folder, and waiting goes fast."""
    monkeypatch.setattr(leases, "parent_dir", lambda: str(tmp_path / "leases" / _here.name))
    for host in (*HOSTS, FOURTH):
        # The threads that stand for hosts have the same process id, which is part of file names. So each host gets a
        # folder of its own.
        _here.name = host.name
        with leases.locked():
            pass
    monkeypatch.setattr(allocate, "_POLL_S", 0.001)
    monkeypatch.setattr(allocate, "_SLOWEST_POLL_S", 0.002)
    monkeypatch.setattr(allocate, "_LOOK_AROUND_S", 0.02)


def demand(key: str, count: int, cores: int = 2, gpus: int = 0) -> HostDemand:
    return HostDemand(count=count, cores=cores, gpus=gpus, key=key, run_id=f"run_{key}")


def patient(text: str) -> bool:
    return False


def names(held: Sequence[HeldHosts] | None) -> list[str]:
    assert held is not None
    return [item.member.host.name for item in held]


def give_back(held: Sequence[HeldHosts], key: str) -> None:
    for item in held:
        item.member.ask("give_back", {"key": key})


def test_free_hosts_are_taken_in_the_order_of_the_list() -> None:
    assert names(Gathering(FakeOpening(), HOSTS, demand("1", 2)).gather(patient)) == ["h0", "h1"]  # type: ignore[arg-type]


def test_busy_or_unreachable_hosts_are_skipped() -> None:
    assert names(Gathering(FakeOpening(), HOSTS, demand("1", 1)).gather(patient)) == ["h0"]  # type: ignore[arg-type]
    assert names(Gathering(FakeOpening(["h1"]), HOSTS, demand("2", 1)).gather(patient)) == ["h2"]  # type: ignore[arg-type]


def test_elastic_run_takes_free_hosts_and_waits_only_for_its_minimum() -> None:
    elastic = HostDemand(count=1, more=2, cores=2, gpus=0, key="1", run_id="run_1")
    first = Gathering(FakeOpening(["h1"]), HOSTS, elastic).gather(patient)  # type: ignore[arg-type]
    assert names(first) == ["h0", "h2"]
    # All hosts but h1 are held, and h1 is reachable again.
    second = HostDemand(count=1, more=1, cores=2, gpus=0, key="2", run_id="run_2")
    assert names(Gathering(FakeOpening(), HOSTS, second).gather(patient)) == ["h1"]  # type: ignore[arg-type]


def test_too_few_hosts_are_reported_with_each_reason() -> None:
    opening = FakeOpening(["h1"], gpus=1, names={"h2": "h0"})
    with pytest.raises(EngineError) as caught:
        Gathering(opening, HOSTS, demand("1", 2, gpus=1)).gather(patient)  # type: ignore[arg-type]
    assert str(caught.value).splitlines() == [
        "the job needs 2 hosts, and 1 of 3 is to be had:",
        "  h1: it is down",
        "  h2: it is the same machine as h0 (h0), which a job gets once",
    ]
    with pytest.raises(TargetError, match="h0: it has 1 GPU, and the job asks for 2 on each"):
        # h0 has too few GPUs for the job, whether or not other hosts answer.
        Gathering(FakeOpening(gpus=1), HOSTS, demand("1", 1, gpus=2)).gather(patient)  # type: ignore[arg-type]


def test_queued_run_takes_any_host_that_becomes_free() -> None:
    first = Gathering(FakeOpening(), HOSTS, demand("1", 2)).gather(patient)
    second = Gathering(FakeOpening(), HOSTS, demand("2", 1)).gather(patient)
    assert (names(first), names(second)) == (["h0", "h1"], ["h2"])
    heard: list[str] = []

    def waiting(text: str) -> bool:
        if text.startswith("waits on") and text not in heard:
            heard.append(text)
            # While the run waits on one host, another host becomes free.
            give_back(*((second, "2") if "h0" in text or "h1" in text else (first, "1")))  # type: ignore[arg-type]
        return False

    third = Gathering(FakeOpening(), HOSTS, demand("3", 1)).gather(waiting)

    assert heard[0].startswith("waits on h")
    assert "run_1" in heard[0] or "run_2" in heard[0]
    assert heard[0].split()[2] not in names(third), "it queued there, and got another"


def test_run_canceled_while_it_waits_for_ssh_hosts_holds_none() -> None:
    holder = Gathering(FakeOpening(), HOSTS[1:], demand("1", 2)).gather(patient)
    assert Gathering(FakeOpening(), HOSTS, demand("2", 3)).gather(lambda text: "waits on" in text) is None

    give_back(holder or [], "1")
    for host in HOSTS:
        _here.name = host.name
        assert leases.look({})["tickets"] == []


def test_run_that_waits_for_several_hosts_holds_none_of_them() -> None:
    hosts = [*HOSTS, FOURTH]
    first = Gathering(FakeOpening(), HOSTS, demand("1", 3)).gather(patient)
    other = Gathering(FakeOpening(), [FOURTH], demand("2", 1)).gather(patient)
    found: list[int] = []

    def waiting(text: str) -> bool:
        if text.startswith("waits on") and not found:
            give_back(other or [], "2")  # one host becomes free, but the run needs three
        if text.startswith("waits on"):
            _here.name = "h3"
            found.append(len(leases.look({})["tickets"]))
            time.sleep(0.001)
        return len(found) > 60

    assert Gathering(FakeOpening(), hosts, demand("3", 3)).gather(waiting) is None
    assert set(found) == {0}
    give_back(first or [], "1")


def test_host_lost_during_the_wait_is_released() -> None:
    holder = Gathering(FakeOpening(), HOSTS, demand("1", 3)).gather(patient)
    opening = FakeOpening()

    def waiting(text: str) -> bool:
        if text.startswith("waits on h"):
            host = next(host for host in HOSTS if host.name == text.split()[2])
            opening._members[host].link.lost = "cut off"  # type: ignore[misc]
            give_back(holder or [], "1")
        return False

    found = Gathering(opening, HOSTS, demand("2", 2)).gather(waiting)
    assert len(names(found)) == 2


def test_unreachable_host_is_retried_until_the_wait_limit() -> None:
    opening = FakeOpening(["h0", "h1", "h2"])

    def waiting(text: str) -> bool:
        if "tries h0, h1, h2 again" in text:
            opening.down.clear()
            opening.open(HOSTS)
        return False

    assert names(Gathering(opening, HOSTS, demand("1", 2), patience_s=60).gather(waiting)) == ["h0", "h1"]  # type: ignore[arg-type]


def test_concurrent_runs_with_overlapping_host_lists_all_start_and_share_no_core() -> None:
    dice = random.Random(6)
    used: dict[str, int] = dict.fromkeys(("h0", "h1", "h2"), 0)
    lock, trouble, done = threading.Lock(), list[str](), list[str]()

    def run(number: int) -> None:
        with contextlib.suppress(StopIteration):
            key, count, cores = f"{number:02}", dice.randint(1, 3), dice.randint(1, 2)
            hosts = dice.sample(HOSTS, 3)  # each run has its own list of hosts
            held = Gathering(FakeOpening(), hosts, demand(key, count, cores)).gather(patient)  # type: ignore[arg-type]
            assert held is not None
            with lock:
                for item in held:
                    used[item.member.host.name] += cores
                    if used[item.member.host.name] > 2:
                        trouble.append(f"{key}: {used}")
            time.sleep(0.002)
            with lock:
                for item in held:
                    used[item.member.host.name] -= cores
            give_back(held, key)
            done.append(key)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)

    assert trouble == []
    assert sorted(done) == [f"{number:02}" for number in range(16)]


def test_waiting_message_names_the_runs_on_the_host_their_users_and_the_start_of_a_hang() -> None:
    holders = [
        {"run_id": "a_1", "uid": 7, "user": "ann", "hangs_since": None},
        {"run_id": "b_2", "uid": 8, "user": "bob", "hangs_since": "2026-11-23 06:12:03 UTC"},
    ]
    assert allocate._waits_for("gpu1", {"ahead": [], "holders": holders, "uid": 7}) == (
        "waits on gpu1 for 2 runs (a_1, b_2 of bob). b_2 hangs since 2026-11-23 06:12:03 UTC"
    )


def test_next_attempt_tries_the_hosts_last_that_it_has_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    class Recorder:
        def __init__(self, opening: object, hosts: Sequence[SshHost], *_: object) -> None:
            tried[:] = [host.name for host in hosts]

        def gather(self, waiting: object) -> None:
            return None

    monkeypatch.setattr(allocate, "Gathering", Recorder)
    target = SshTarget("lab", {"hosts": ["h0", "h1", "h2"]})
    target._held = [
        HeldHosts(member=HostMember(host=SshHost(name=name), link=SimpleNamespace(lost=lost)), gpus=())  # type: ignore[arg-type]
        for name, lost in (("h0", "h0: it is silent"), ("h1", None))
    ]
    job = make_job(node_count=2, distributed_backend="gloo")
    assert target.wait_for_nodes(job, tmp_path / "runs" / "run", lambda _: False) is None
    assert tried == ["h1", "h2", "h0"]
