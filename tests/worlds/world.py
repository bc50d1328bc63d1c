"""One world: a run, its machines, the people who look at it, and the faults that a seed draws."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import PacelineError
from paceline.job.job import Job
from paceline.runs import follow, read, remote_status, store, tags_and_properties
from paceline.runs.claim import Claim
from paceline.runs.folder import RunFolder
from paceline.runs.logs import LogLine
from paceline.runs.record import RunRecord, utc_now
from paceline.supervisor import __main__ as supervisor_main
from paceline.supervisor import supervise
from paceline.targets.local import LocalTarget
from paceline.targets.local_leases import LEASES_VARIABLE, LocalQueue, leases_dir
from tests.worlds import disks
from tests.worlds.disks import Disk, Disks
from tests.worlds.engine import Engine
from tests.worlds.kernel import Host, Kernel, Process
from tests.worlds.machines import Cluster, Machine, Plan

#: Simulated seconds in which a world's run has to end, and after it everything that belongs to it.
HORIZON_S, AFTER_S = 200.0, 60.0

#: Fault -> its weight in the drawing of faults.
FAULTS = {
    "kill worker": 3,
    "kill agent": 2,
    "kill node's guardian": 1,
    "power off": 2,
    "cut": 2,
    "cut one way": 2,
    "stall": 3,
    "suspend node": 2,
    "suspend supervisor": 2,
    "kill supervisor": 2,
    "kill guardian": 1,
    "kill both": 1,
    "cancel": 2,
    "terminate": 1,
    "full disk": 2,
    "slow disk": 2,
    "failing disk": 1,
    "clock jump": 3,
    "leave": 1,
}


#: Faults of worlds with an engine.
ENGINE_FAULTS: tuple[str, ...] = (
    "interrupt",
    "lose supervisor's node",
    "cut off supervisor's node",
    "lie",
    "lie",
    "cancel",
)
#: An engine's fault that each world gets ("--fault"), or "".
forced = ""


@dataclass
class Seen:
    """The run's records that one reader has read, each with the time."""

    records: list[tuple[float, RunRecord]] = field(default_factory=list)


class World:
    """The simulation of one seed."""

    def __init__(self, kernel: Kernel, found: Disks, root: Path, seed: int) -> None:
        self.kernel, self.disks, self.root, self.seed = kernel, found, root, seed
        # The events of a world and the order of its tasks come from separate random sources. So a world can be repeated
        # with fewer faults.
        chance = self.chance = random.Random(f"events {seed}")
        self.home = Host("home")
        self.home_disk = found.of["ws"] = Disk("ws")
        self.home.disk = self.home_disk
        #: Whether the workers run on the supervisor's machine (the target `local`).
        self.is_local = chance.random() < 0.25 and not forced
        is_shared = self.is_local or chance.random() < 0.25
        nodes, per_node = chance.randint(1, 3), chance.choice((1, 1, 2))
        spare = chance.choice((0, 0, 1, 2))
        self.machines = []
        for number in range(nodes + spare):
            machine = Machine(f"sim{number}", str(root / f"node{number}"))
            os.mkdir(machine.folder)
            machine.disk = self.home_disk if is_shared else found.of.setdefault(f"node{number}", Disk(f"node{number}"))
            machine.offset_s = chance.choice((0.0, 0.0, 3.0, -20.0))
            self.machines.append(machine)
        self.plan = Plan(chance)
        max_restarts = chance.choice((0, 0, 1, 2))
        self._plan_failures(chance, nodes * per_node, max_restarts)
        self.silence_s = chance.choice((1.0, 3.0, 5.0))
        self.cluster = Cluster(
            kernel,
            self.home,
            self.machines,
            self.plan,
            chance,
            is_shared=is_shared,
            silence_s=self.silence_s,
            latency_s=chance.choice((0.0001, 0.005, 0.1)),
            waits_s=chance.choice((0.0, 0.0, 1.0)),
            leaves_at=None,
        )
        self.cluster.disks = found
        kernel.cluster = self.cluster
        size = nodes * per_node
        elastic = chance.random() < 0.15 and nodes > 1
        replaces = size > 1 and max_restarts > 0 and not elastic and chance.random() < 0.4
        on_hang = chance.choice(("report", "fail", "restart" if max_restarts else "fail"))
        if chance.random() < 0.1:
            self.plan.hangs = (chance.randint(1, max_restarts + 1), chance.randrange(self.plan.steps))
        self.job = Job(
            entry_script="train.py",
            compute_target="local" if self.is_local else "cluster",
            distributed_backend="gloo" if nodes * per_node > 1 else None,
            node_count=nodes,
            process_count_per_node=per_node,
            node_range=(1, nodes) if elastic else None,
            max_restarts=max_restarts,
            restart_on_exception=max_restarts > 0 and chance.random() < 0.5,
            grace_period_seconds=chance.choice((0.5, 2.0)),
            max_run_duration_seconds=chance.choice((None, None, None, 3.0)),
            on_failure="replace" if replaces else "restart",
            hang_seconds=4.0 if self.plan.hangs else 600.0,
            on_hang=on_hang if self.plan.hangs else "report",
            warm=chance.choice(("auto", "off")),
        )
        #: (time, fault, details) of each fault, as it happened.
        self.happened: list[tuple[float, str]] = []
        self.faults = self._drawn_faults(chance)
        self.seen = [Seen() for _ in range(2)]
        has_engine = not self.is_local and (chance.random() < 0.3 or bool(forced))
        self.engine = Engine(kernel, chance, self._begin) if has_engine else None
        self.cluster.engine = self.engine
        if self.engine is not None:
            self.faults = [
                (at_s, self.chance.choice(ENGINE_FAULTS) if chance.random() < 0.5 else kind)
                for at_s, kind in self.faults
            ]
        if forced:
            self.faults.append((self.plan.start_s + chance.random() * self.plan.steps * self.plan.step_s, forced))
        self.is_followed = chance.random() < 0.3
        #: Lines that a follower of the run has seen, and its final record.
        self.followed: list[LogLine] = []
        self.followed_to: RunRecord | None = None
        #: Tags that people have set by calls that returned.
        self.tags: list[str] = []
        self.supervisor = self.guardian = None
        self.folder = RunFolder(root / "ws" / "runs" / "digits_1700000000_00000001")
        #: Errors that readers got instead of a record.
        self.unread: list[tuple[float, Exception]] = []
        self.is_asked = False  # whether a person has asked for the run's end

    def _plan_failures(self, chance: random.Random, size: int, restarts: int) -> None:
        for attempt in range(1, restarts + 2):
            if chance.random() < 0.2:
                self.plan.fails[attempt, chance.randrange(size)] = chance.randrange(self.plan.steps)
            if chance.random() < 0.1:
                self.plan.exits[attempt, chance.randrange(size)] = (
                    chance.randrange(self.plan.steps),
                    chance.choice((1, 3)),
                )

    def _drawn_faults(self, chance: random.Random) -> list[tuple[float, str]]:
        count = chance.choice((0, 1, 1, 2, 2, 3, 4, 5))
        length_s = self.plan.start_s + self.plan.steps * self.plan.step_s + 2.0
        kinds = chance.choices(list(FAULTS), list(FAULTS.values()), k=count)
        return sorted((chance.random() * length_s, kind) for kind in kinds)

    # --- processes of the supervisor's machine

    def start(self) -> None:
        """Submit the run, and start everything else."""
        submitter = Process(self.kernel, "submitter", self.home, None)
        self.kernel.spawn(submitter, lambda: self._submit(submitter))
        for at_s, kind in self.faults:
            # Much happens in few simulated moments, so half of the faults come after a number of switches between tasks.
            if self.chance.random() < 0.5:
                self.kernel.after(at_s, lambda kind=kind: self._happen(kind))
            else:
                switch = int(30 * 100 ** self.chance.random())
                self.kernel.at_switches.append((switch, lambda kind=kind: self._happen(kind)))
        if self.plan.hangs:
            # Cancel the run late, because not every hang is detected: a failing disk may lose a stack dump.
            self.kernel.after(100.0, lambda: self._happen("cancel"))
        self.kernel.at_switches.sort(key=lambda one: -one[0])

    def _submit(self, submitter: Process) -> None:
        record = RunRecord(
            run_id=self.folder.run_id,
            experiment="digits",
            created_utc=utc_now(),
            job=self.job,
            target=self.job.compute_target,
            owner=store.owner(),
        )
        source = self.root / "ws" / "snapshots" / "1"
        source.mkdir(parents=True)
        (source / "train.py").write_text("print()\n")
        fd = store.create(self.folder.path.parent, record)
        self.folder.snapshot.symlink_to(source)
        if self.is_local:
            LocalTarget().enqueue(self.job, self.folder.path)
        if self.engine is None:
            self._begin(self.home, fd)
        else:
            self.engine.submit(self.folder)
            os.close(fd)
        for number, seen in enumerate(self.seen):
            reader = Process(self.kernel, f"reader{number}", self.home, None)
            self.kernel.spawn(reader, lambda seen=seen: self._read(seen))
        if self.is_followed:
            follower = Process(self.kernel, "reader who follows", self.home, None)
            self.kernel.spawn(follower, self._follow)
        if self.plan.has_tags:
            person = Process(self.kernel, "person", self.home, None)
            self.kernel.spawn(person, self._tag)
        submitter.end(0)

    def _begin(self, host: Host, fd: int | None = None) -> tuple[Process, list[Process]]:
        """Start the guardian and the supervisor, as `python -m paceline.supervisor` does.

        fd: The run's lock; None if this program has to take the lock itself.
        """
        guardian = self.guardian = Process(self.kernel, "guardian", host, None)
        log = disks._os["open"](self.folder.driver_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self.disks.paths[log] = str(self.folder.driver_log)
        guardian.stdout, guardian.env = log, {"PACELINE_SUPERVISOR": self.folder.run_id}
        processes = [guardian]
        if fd is not None:
            guardian.locks.add(fd)
            self.kernel.lock_holders[fd].add(guardian)

        def guard() -> None:
            claim = Claim.take(self.folder.lock, fd)
            if store.has_ended(self.folder):
                guardian.end(0)
            supervisor = self.supervisor = Process(self.kernel, "supervisor", host, guardian)
            supervisor.stdout, supervisor.env = log, dict(guardian.env)
            processes.append(supervisor)
            for lock in guardian.locks:
                supervisor.locks.add(lock)
                self.kernel.lock_holders[lock].add(supervisor)
            self.kernel.spawn(supervisor, lambda: supervisor.end(self._supervise(claim) << 8))
            guardian.end(supervisor_main._guard(self.folder, supervisor.pid, claim) << 8)

        self.kernel.spawn(guardian, guard)
        return guardian, processes

    def _supervise(self, claim: Claim) -> int:
        supervise.supervise(self.folder, claim)
        return 0

    def _read(self, seen: Seen) -> None:
        """Look at the run again and again, as `paceline list` and the page do."""
        ended_at = None
        while True:
            try:
                found = read.record(self.folder)
            except (OSError, PacelineError) as error:
                # Only a failing disk may prevent a reader from getting the record.
                self.unread.append((self.kernel.now, error))
                self.kernel.sleep(1.0)
                continue
            seen.records.append((self.kernel.now, found))
            if found.is_terminal and ended_at is None:
                ended_at = self.kernel.now
            if ended_at is not None and self.kernel.now > ended_at + AFTER_S:
                with contextlib.suppress(OSError, PacelineError):
                    # The lease of a run whose processes were all killed ends when a process reads the queue.
                    LocalQueue(leases_dir(), 8, ()).look()
                return
            self.kernel.sleep(0.05 + self.kernel.random() * (0.6 if ended_at is None else 10))

    def _follow(self) -> None:
        """Follow the run, as `paceline logs --follow` does."""
        try:
            show = follow.Show(self.folder, line=self.followed.append, state=lambda record: None)
            self.followed_to = show.to_the_end()
        except (OSError, PacelineError) as error:
            self.unread.append((self.kernel.now, error))

    def _tag(self) -> None:
        for number in range(20):
            self.kernel.sleep(self.kernel.random())
            with contextlib.suppress(OSError):
                tags_and_properties.set_tags(self.folder.notes, {f"person{number}": "set"})
                self.tags.append(f"person{number}")

    # --- faults

    def _happen(self, kind: str) -> None:
        method: Callable[[random.Random], str | None] = getattr(self, "_" + kind.replace(" ", "_").replace("'", ""))
        told = method(self.chance)
        if told is not None:
            self.happened.append((self.kernel.now, f"{kind}: {told}"))
            self.kernel.note(f"fault: {kind}: {told}")

    def _node(self, chance: random.Random) -> Machine | None:
        used = [one for one in self.machines if one.agents and not one.is_off]
        return chance.choice(used) if used else None

    def _kill_worker(self, chance: random.Random) -> str | None:
        living = [one for _, one in sorted(self.cluster.written.items()) if one.process.is_alive]
        if not living:
            return None
        victim = chance.choice(living).process
        victim.deliver(signal.SIGKILL)
        return victim.name

    def _kill_agent(self, chance: random.Random) -> str | None:
        if (node := self._node(chance)) is None:
            return None
        node.agents[-1].deliver(signal.SIGKILL)
        return node.name

    def _kill_nodes_guardian(self, chance: random.Random) -> str | None:
        if (node := self._node(chance)) is None or node.agents[-1].parent is None:
            return None
        node.agents[-1].parent.deliver(signal.SIGKILL)
        return node.name

    def _power_off(self, chance: random.Random) -> str | None:
        if (node := self._node(chance)) is None:
            return None
        node.is_off = True
        for wires in node.wires:
            for wire in wires:
                wire.is_cut = True
        return node.name

    def _cut(self, chance: random.Random) -> str | None:
        if (node := self._node(chance)) is None:
            return None
        for wire in node.wires[-1]:
            wire.is_cut = True
        return node.name

    def _cut_one_way(self, chance: random.Random) -> str | None:
        if (node := self._node(chance)) is None:
            return None
        way = chance.randrange(2)
        node.wires[-1][way].is_cut = True
        return f"{node.name}, {('to the node', 'from the node')[way]}"

    def _stall(self, chance: random.Random) -> str | None:
        if (node := self._node(chance)) is None:
            return None
        length_s = self.silence_s * chance.choice((0.3, 0.8, 1.0, 1.2, 2.0))
        ways = chance.choice(((0,), (1,), (0, 1)))
        for way in ways:
            node.wires[-1][way].stalls_until = self.kernel.now + length_s
        return f"{node.name} {ways} for {length_s:.2f} s"

    def _suspend_node(self, chance: random.Random) -> str | None:
        if (node := self._node(chance)) is None:
            return None
        node.resumes_at = self.kernel.now + self.silence_s * chance.choice((0.3, 0.8, 1.0, 1.2, 2.0))
        return f"{node.name} until {node.resumes_at:.2f}"

    def _suspend_supervisor(self, chance: random.Random) -> str | None:
        self.home.resumes_at = self.kernel.now + self.silence_s * chance.choice((0.3, 0.8, 1.0, 1.2, 2.0))
        return f"until {self.home.resumes_at:.2f}"

    def _kill_supervisor(self, chance: random.Random) -> str | None:
        return self._killed(self.supervisor)

    def _kill_guardian(self, chance: random.Random) -> str | None:
        return self._killed(self.guardian)

    def _kill_both(self, chance: random.Random) -> str | None:
        return f"{self._killed(self.guardian)}, {self._killed(self.supervisor)}"

    def _killed(self, process: Process | None) -> str | None:
        return process.name if process is not None and process.deliver(signal.SIGKILL) else None

    def _cancel(self, chance: random.Random) -> str | None:
        if self.supervisor is None:
            return None
        person = Process(self.kernel, "person", self.home, None)
        self.kernel.spawn(person, self._ask_for_end)
        self.is_asked = True
        return "ann"

    def _ask_for_end(self) -> None:
        for _ in range(50):
            with contextlib.suppress(OSError):  # a person tries again on a failing disk
                return read.request_cancel(self.folder, by="ann")
            self.kernel.sleep(1.0)

    def _terminate(self, chance: random.Random) -> str | None:
        victim = chance.choice((self.supervisor, self.guardian))
        if victim is None or not victim.deliver(signal.SIGTERM):
            return None
        self.is_asked = True
        return victim.name

    def _interrupt(self, chance: random.Random) -> str | None:
        return self.engine.interrupt() if self.engine else None

    def _lose_supervisors_node(self, chance: random.Random) -> str | None:
        return self.engine.lose(again=chance.random() < 0.6) if self.engine else None

    def _cut_off_supervisors_node(self, chance: random.Random) -> str | None:
        return self.engine.cut_off() if self.engine else None

    def _lie(self, chance: random.Random) -> str | None:
        if self.engine is None:
            return None
        told, length_s = (
            chance.choice(("gone", "running", "queued", "old", "unreachable")),
            chance.choice((1.0, 8.0, 25.0)),
        )
        self.engine.lie = (self.kernel.now + length_s, told)
        return f"{told} for {length_s} s"

    def _twice(self, chance: random.Random) -> str | None:
        return None

    def _disk(self, chance: random.Random) -> Disk:
        return chance.choice(sorted(self.disks.of.values(), key=lambda disk: disk.name))

    def _full_disk(self, chance: random.Random) -> str | None:
        disk = self._disk(chance)
        disk.fill()
        return self._healed(chance, disk)

    def _slow_disk(self, chance: random.Random) -> str | None:
        disk = self._disk(chance)
        disk.slow_s = chance.choice((0.01, 0.1, 0.5))
        return self._healed(chance, disk, always=True)

    def _failing_disk(self, chance: random.Random) -> str | None:
        disk = self._disk(chance)
        disk.fails = chance.choice((0.05, 0.5))
        return self._healed(chance, disk)

    def _healed(self, chance: random.Random, disk: Disk, *, always: bool = False) -> str:
        if not always and chance.random() < 0.4:
            return f"{disk.name} for ever"
        length_s = chance.choice((0.5, 3.0, 10.0))
        self.kernel.after(length_s, disk.heal)
        return f"{disk.name} for {length_s} s"

    def _clock_jump(self, chance: random.Random) -> str | None:
        host = chance.choice((self.home, *self.machines))
        host.offset_s += chance.choice((-3600.0, -5.0, 5.0, 86400.0))
        return f"{host.name} to {host.offset_s}"

    def _leave(self, chance: random.Random) -> str | None:
        self.cluster.leaves_at = self.kernel.now
        return ""


def simulate(kernel: Kernel, found: Disks, root: Path, seed: int, *, keeps_events: bool = False) -> World:
    """Run the world of a seed to its end, in a kernel that no world has used yet."""
    kernel.__init__(seed, random.Random(f"preempts {seed}").choice((0.0, 0.05, 0.3)), keeps_events=keeps_events)
    found.prefix, found.of = f"{root}/", {}
    found.paths.clear()
    for name in ("runs", "leases", "tmp"):
        os.makedirs(root / "ws" / name)
    random.seed(seed)
    world = World(kernel, found, root, seed)
    remote_status.teller = lambda folder: world.cluster  # type: ignore[assignment, return-value]
    os.environ[LEASES_VARIABLE], tempfile.tempdir = f"{root}/ws/leases", f"{root}/ws/tmp"

    def target(run_dir: Path) -> LocalTarget | Cluster:
        return LocalTarget() if world.is_local else world.cluster

    supervise.target_of_run = supervisor_main.target_of_run = target
    world.start()
    kernel.run(HORIZON_S + AFTER_S)
    kernel.task = None
    return world
