"""One job of `horovodrun`: start a process beside each rank, watch them all, end them together."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from paceline.compat.horovod.runner import start, wire
from paceline.compat.horovod.runner.hosts import is_here
from paceline.compat.horovod.runner.output import Output
from paceline.compat.horovod.runner.ranks import RankEnd, RankOutcome, named, threads, variables, with_defaults
from paceline.compat.horovod.runner.start import RanksJob, Started
from paceline.compat.horovod.runner.wire import RankListener
from paceline.system import processes
from paceline.system.signals import handled

if TYPE_CHECKING:
    from paceline.supervisor.diagnosis.diagnose import ErrorFile

#: After the first failure, how long others get to report theirs, which may have come earlier.
_SETTLE_S = 0.25
#: More than a rank gets between SIGTERM and SIGKILL.
_GRACE_S = 8.0
#: A signal, which its handler only notes down, is acted upon within this time.
_TICK_S = 0.1
#: This many last lines of what mpirun or ssh has said are shown below a problem.
_LAUNCHER_LINES = 20


@dataclass(frozen=True, kw_only=True)
class ElasticPart:
    """The elastic part of a job, which may continue on other hosts.

    `have_changed` returns True once the job should move to other hosts; it is called several times a second. `commits` holds the
    earlier attempt's files, for rank 0.
    """

    commits: Mapping[str, bytes]
    have_changed: Callable[[], bool]


class RanksDriver:
    """A job in progress. When `run` returns, no process of the job is left."""

    def __init__(self, job: RanksJob, output: Output, elastic: ElasticPart | None = None) -> None:
        self._elastic = elastic
        #: Whether the ranks have received the message about other hosts.
        self.is_asked_to_change = False
        self._kept_at = 0.0
        self._job, self._output = job, output
        output.grow(len(job.slots))
        self._ranks = [RankEnd(host=slot.host) for slot in job.slots]
        routes = self._routes()
        # Without a route to a host (a name that only ssh knows), ranks may connect from any address, and try each name of
        # this machine.
        is_anywhere = not routes and not job.is_local
        #: The ranks' hosts may reach this machine by these.
        self._names = [*routes, *([socket.gethostname()] if is_anywhere else []), "127.0.0.1"]
        self._listener = RankListener([""] if is_anywhere else self._names)
        self._launchers: list[tuple[Started, subprocess.Popen[bytes]]] = []
        self._signal: int | None = None
        self._closed = False
        # Before the ranks are asked to end, every exception is a failure of its own.
        self._asked_at = float("inf")

    def run(self) -> RankOutcome:
        """Run the job to its end."""
        # On a disk, the kernel would write the ranks' shared memory back to it again and again.
        top = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
        # Open MPI's shared memory; what the ranks keep may be more than fits there.
        self._scratch = tempfile.mkdtemp(prefix="horovodrun-", dir=top)
        self._kept = tempfile.mkdtemp(prefix="horovodrun-")
        problem = None
        try:
            # The listener before the processes that connect to it. The handlers before any process, so that no signal ends this
            # process while a part of the job runs.
            # SIGHUP as well: it arrives when the terminal closes, and would end this process before the ranks can end.
            signals = handled(self._on_signal, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            with self._listener, signals, open(self._log_path, "wb") as log:
                self._start(log)
                problem = self._gather()
                # Where a signal has come by now, ranks that are up wait for their command; `_end` lets them go without one.
                if problem is None and self._signal is None:
                    self._tell()
                    problem = self._watch()
                self._end()
        finally:
            self._close()
            # After `_close`, when each launcher has ended and its log is whole.
            if problem or self._job.verbose:
                problem = self._with_launchers_words(problem)
            for folder in (self._scratch, self._kept):
                shutil.rmtree(folder, ignore_errors=True)
        return RankOutcome(self._ranks, problem, self._signal)

    def _start(self, log: Any) -> None:
        job = self._job
        addresses = self._listener.addresses
        if addresses[0][0] == "":
            addresses = [(name, addresses[0][1]) for name in self._names]
        contact = {"addresses": addresses, "key": self._listener.key.hex()}
        for command in start.commands(job, contact, self._scratch):
            if job.verbose:
                print(f"horovodrun: {shlex.join(command.argv)}", file=sys.stderr)
            # A session of its own: Ctrl-C reaches this process alone, which ends the ranks in order.
            process = subprocess.Popen(
                command.argv,
                env=dict(command.environment),
                # The key is in that text. On a command line every user of the machine could read it.
                stdin=subprocess.PIPE if command.text else subprocess.DEVNULL,
                # A file, not a pipe: a full pipe would block the launcher, whose output is not read while the job runs.
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            if process.stdin is not None:
                # `_gather` detects a launcher that has ended already, such as an ssh that cannot log in.
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(command.text.encode())
                    process.stdin.flush()
            # At once, so that `_close` also ends this one if the next can't be started.
            self._launchers.append((command, process))

    def _routes(self) -> list[str]:
        """Return this machine's addresses on the routes to other hosts."""
        addresses = []
        for host in dict.fromkeys(slot.host for slot in self._job.slots):
            if is_here(host):
                continue
            # Nothing is sent: connecting a datagram socket only asks which way leads there.
            try:
                # Port 9 stands for any port; which way is taken depends on the address alone.
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                    probe.connect((host, 9))
                    addresses.append(probe.getsockname()[0])
            except OSError:
                return []
        return [address for address in dict.fromkeys(addresses) if address != "127.0.0.1"]

    def _gather(self) -> str | None:
        """Wait until every rank has come up. Return the reason if one has not."""
        deadline = time.monotonic() + self._job.start_timeout_s
        while any(rank.connection is None for rank in self._ranks):
            # The signal handler sets it between any two lines of this thread, so check it after each short wait.
            if self._signal is not None:
                return None
            with contextlib.suppress(queue.Empty):
                connection, hello = self._listener.joined.get(timeout=_TICK_S)
                if not 0 <= hello["rank"] < len(self._ranks):
                    return (
                        f"mpirun has started a rank {hello['rank']}, but there are {len(self._ranks)}. A setting of Open MPI's "
                        "(OMPI_MCA_*, PRTE_MCA_*, --mpi-args) changes how many it starts; take it away."
                    )
                place = self._ranks[hello["rank"]]
                place.connection, place.hello = connection, hello
                # Local and cross ranks follow from the order of the hosts as given. A rank on another host than its own
                # would have a neighbour's.
                if is_here(place.host) and hello["host"] != socket.gethostname():
                    return (
                        f"mpirun has started rank {hello['rank']} on {hello['host']}, but it belongs on {place.host}: it takes "
                        "the hosts in another order. Name each machine once, by one name."
                    )
                continue
            missing = [rank for rank, place in enumerate(self._ranks) if place.connection is None]
            # Under mpirun one launcher stands for all ranks; without it there is one for each.
            for command, process in self._launchers:
                code = process.poll()
                theirs = [rank for rank in missing if rank in command.ranks]
                # Not while one is queued that has come up: it may be one of these.
                if code is not None and theirs and self._listener.joined.empty():
                    return (
                        f"{named(theirs, self._ranks)} could not be started: {os.path.basename(command.argv[0])} ended with "
                        f"exit code {processes.shell_code(code)}."
                    )
            if time.monotonic() > deadline:
                return (
                    f"{named(missing, self._ranks)} did not come up within --start-timeout {self._job.start_timeout_s:g} s. "
                    "Check that each host is up, that ssh logs in there without a password, and that "
                    f"{sys.executable} and Paceline lie there at the same place; or allow more time."
                )
        return None

    def _tell(self) -> None:
        """Send every rank its program."""
        job, head = self._job, self._ranks[0]
        is_local = self._job.is_local or is_here(head.host)
        # On one machine the loopback address, which no other machine reaches; else rank 0's host, by a name or address that
        # the others know.
        assert head.hello is not None, "every rank has come up"
        master = (self._names[0] if is_local else head.host, int(head.hello["port"]))
        shared = {**job.environment, **(start.exported(job.mpi_args) if job.transport == "mpi" else {})}
        for slot, place, count in zip(job.slots, self._ranks, threads(job.slots, self._ranks), strict=True):
            # Each over the one before: defaults, then what the user has set, then the variables of the rank.
            environment = start.for_host(shared, slot.host)
            environment = with_defaults(environment, count, is_one_machine=self._job.is_local)
            environment |= variables(slot, len(job.slots), job.transport, master)
            commits = self._elastic.commits if self._elastic is not None and slot.rank == 0 else {}
            files = {**job.files, **commits}
            assert place.connection is not None
            # A rank that is gone meanwhile is reported by the thread that reads its connection.
            with contextlib.suppress(OSError):
                wire.send(
                    place.connection,
                    {
                        "argv": list(job.argv),
                        "environment": environment,
                        "directory": job.directory,
                        "files": list(files),
                        # On another host these paths would be somebody else's folders.
                        "scratch": [self._kept, self._scratch] if self._job.is_local else [],
                        "is_elastic": self._elastic is not None,
                    },
                )
                for content in files.values():
                    place.connection.send_bytes(content)

    def _watch(self) -> str | None:
        """Wait until the ranks have ended or a stop is due."""
        # Return the reason if the launcher has gone.
        failed_at: float | None = None
        while any(place.exit_code is None for place in self._ranks):
            self._look(_TICK_S)
            if self._signal is not None:
                return None
            if self._elastic is not None and not self.is_asked_to_change and self._elastic.have_changed():
                self.is_asked_to_change = True
                self._say({"hosts": True})
            if failed_at is None and any(place.exit_code for place in self._ranks):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > _SETTLE_S:
                return None
            # A negative code: mpirun was killed. Its other exit codes are not looked at, for ranks tell their own ends, and
            # Open MPI 5 exits with 0 when it has lost a host.
            code = self._launchers[0][1].poll() if self._job.transport == "mpi" else None
            if code is not None and code < 0:
                return f"mpirun ended with exit code {processes.shell_code(code)} before the ranks did."
        return None

    def _look(self, timeout_s: float) -> None:
        """Process incoming messages for at most this time."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                rank, data = self._listener.events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            self._take(rank, data)
            # A rank that prints without a pause would keep `_watch` from ever looking at anything else.
            if time.monotonic() > deadline:
                return

    def _take(self, rank: int, data: bytes | None) -> None:
        place = self._ranks[rank]
        if data is None:
            if place.exit_code is None:
                # The process beside the rank has gone without a word, or its host.
                # 137 is what a shell says of a process that SIGKILL has ended.
                place.is_lost = True
                self._ended(rank, 137, {"exception": f"the process beside it on host {place.host} is gone"})
            return
        mark, content = data[:1], data[1:]
        if mark == b"o":
            self._output.write(rank, "stdout", content)
        elif mark == b"e":
            self._output.write(rank, "stderr", content)
        elif mark == b"f":
            name = content[8:].decode()
            place.sizes[name], place.files[name] = int.from_bytes(content[:8], "little"), bytearray()
        elif mark == b"k":
            # The newest name is the one that is on its way; names come in order.
            place.files[next(reversed(place.files))] += content
            self._kept_at = time.monotonic()
        elif mark == b"E":
            end: wire.RankEndMessage = json.loads(content)
            self._ended(rank, end["exit_code"], end["error"])

    def _ended(self, rank: int, exit_code: int, error: ErrorFile | None) -> None:
        place = self._ranks[rank]
        self._output.finish(rank)
        place.exit_code, place.ended_at = exit_code, time.time()
        # An exception after the request to end is not a failure of its own.
        place.error = None if place.stopped and (error or {}).get("time", 0) > self._asked_at else error

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Runs in the main thread, which is that of `run`: nothing else uses the connections meanwhile but their readers.
        if self._signal is not None:
            self._close()  # the second time: at once
        self._signal = number

    def _end(self) -> None:
        """Ask the running ranks to end, and wait for them for a while."""
        self._asked_at = time.time()
        # SIGINT is passed on as SIGINT: a script that catches KeyboardInterrupt saves its state as it would on its own.
        word = {"interrupt": True} if self._signal == signal.SIGINT else {"end": True}
        for place in self._say(word):
            place.stopped = True
        deadline = time.monotonic() + _GRACE_S
        # A large commit may take longer: wait while pieces of it arrive.
        while any(p.stopped and p.exit_code is None for p in self._ranks) and (
            time.monotonic() < max(deadline, self._kept_at + _GRACE_S)
        ):
            self._look(_TICK_S)
            # After half of the time, a rank that has taken no notice of SIGINT is sent SIGTERM.
            if word != {"end": True} and time.monotonic() > deadline - _GRACE_S / 2:
                word = {"end": True}
                self._say(word)

    def _say(self, word: Mapping[str, bool]) -> list[RankEnd]:
        """Send a message to the running ranks, and return these."""
        running = []
        for place in self._ranks:
            if place.connection is not None and place.exit_code is None:
                running.append(place)
                with contextlib.suppress(OSError):
                    wire.send(place.connection, word)
        return running

    def _close(self) -> None:
        """Close everything: the process beside a rank kills it when its connection closes."""
        if self._closed:
            return
        self._closed = True
        for place in self._ranks:
            if place.connection is not None:
                wire.hang_up(place.connection)
        # Two seconds for all of them together: without mpirun there is one launcher for each rank.
        deadline = time.monotonic() + 2.0
        for _, process in self._launchers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.05, deadline - time.monotonic()))
            # Its ranks are gone, so mpirun should end, and remove its files if it has the time.
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(2.0)
            if process.poll() is None:
                # List all processes before killing the first: orphans would no longer be found below it.
                for pid in [*processes.descendants(process.pid), process.pid]:
                    processes.send(pid, signal.SIGKILL)
                process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()

    @property
    def _log_path(self) -> str:
        return os.path.join(self._scratch, "launcher.log")

    def _with_launchers_words(self, problem: str | None) -> str | None:
        with contextlib.suppress(OSError):
            with open(self._log_path, encoding="utf-8", errors="replace") as file:
                lines = [line.rstrip() for line in file if line.strip()]
            if lines and problem is None:
                print("\n".join(lines), file=sys.stderr)
            elif lines and problem is not None:
                return "\n".join([problem, *(f"    {line}" for line in lines[-_LAUNCHER_LINES:])])
        return problem
