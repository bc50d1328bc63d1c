"""One job of `horovodrun`: start, watch and end a process beside each rank."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
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
from paceline.system.scratch import Scratch
from paceline.system.signals import handled

if TYPE_CHECKING:
    from paceline.supervisor.diagnosis.diagnose import ErrorFile

#: After the first report of a failure, wait this many seconds: another rank may have failed earlier, but report it later.
_SETTLE_S = 0.25
#: Kill the remaining ranks after this many seconds, which is longer than a rank's own grace period from SIGTERM to SIGKILL.
_GRACE_S = 8.0
#: Signal handlers only record the signal. The driver reacts to a recorded signal within this many seconds.
_TICK_S = 0.1
#: An error message ends with at most this many output lines of mpirun or ssh.
_LAUNCHER_LINES = 20


@dataclass(frozen=True, kw_only=True)
class ElasticPart:
    """The parameters of a job that may continue on other hosts.

    The driver calls `have_changed` several times a second; it returns True if the job should move to other hosts.
    `commits` maps names to the files with the earlier attempt's state, which rank 0 gets.
    """

    commits: Mapping[str, bytes]
    have_changed: Callable[[], bool]


class RanksDriver:
    """A running job of `horovodrun`. After `run`, no process of the job is left."""

    def __init__(self, job: RanksJob, output: Output, elastic: ElasticPart | None = None) -> None:
        self._elastic = elastic
        #: Whether this driver has told the ranks that the hosts have changed.
        self.is_asked_to_change = False
        self._kept_at = 0.0
        self._job, self._output = job, output
        output.grow(len(job.slots))
        self._ranks = [RankEnd(host=slot.host) for slot in job.slots]
        routes = self._routes()
        # If this machine finds no route to the hosts (for example, only ssh knows their names), listen at all addresses. The
        # ranks then try each name of this machine.
        is_anywhere = not routes and not job.is_local
        #: Names or addresses of this machine that the ranks can try.
        self._names = [*routes, *([socket.gethostname()] if is_anywhere else []), "127.0.0.1"]
        self._listener = RankListener([""] if is_anywhere else self._names)
        self._launchers: list[tuple[Started, subprocess.Popen[bytes]]] = []
        self._signal: int | None = None
        self._closed = False
        # Time when this driver told the ranks to end. An earlier exception on a rank is the rank's own failure.
        self._asked_at = float("inf")

    def run(self) -> RankOutcome:
        """Run the job to its end and return its outcome."""
        # Use /dev/shm, because on a disk the kernel would repeatedly write the ranks' shared memory to the disk.
        top = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
        # `_scratch` is for Open MPI's shared memory, `_kept` for files of the ranks. These files may be too large for /dev/shm.
        self._scratch, self._kept = Scratch("horovodrun", top), Scratch("horovodrun")
        problem = None
        try:
            # Start the listener before the ranks, which connect to it. Set the signal handlers before any process starts, so that
            # no signal ends this process while ranks run. SIGHUP arrives when the terminal closes, and would also end this
            # process before the ranks.
            signals = handled(self._on_signal, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            with self._listener, signals, open(self._log_path, "wb") as log:
                self._start(log)
                problem = self._gather()
                # The ranks still wait for the start message. After a signal, don't send it, because `_end` ends the ranks.
                if problem is None and self._signal is None:
                    self._tell()
                    problem = self._watch()
                self._end()
        finally:
            self._close()
            # All launchers have ended, so their logs are complete now.
            if problem or self._job.verbose:
                problem = self._with_launchers_words(problem)
            for folder in (self._scratch, self._kept):
                folder.close()
        return RankOutcome(self._ranks, problem, self._signal)

    def _start(self, log: Any) -> None:
        job = self._job
        addresses = self._listener.addresses
        if addresses[0][0] == "":
            addresses = [(name, addresses[0][1]) for name in self._names]
        contact = {"addresses": addresses, "key": self._listener.key.hex()}
        for command in start.commands(job, contact, str(self._scratch.path)):
            if job.verbose:
                print(f"horovodrun: {shlex.join(command.argv)}", file=sys.stderr)
            # Start the launcher in a new session, because Ctrl-C must reach only this process, which then ends the ranks.
            process = subprocess.Popen(
                command.argv,
                env=dict(command.environment),
                # Pass the key on standard input, because every user of the machine can read a command line.
                stdin=subprocess.PIPE if command.text else subprocess.DEVNULL,
                # Write the output to a file: no process reads it while the job runs, and a full pipe would block the launcher.
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            if process.stdin is not None:
                # A launcher may have ended already, such as an ssh that can't log in. A later check reports this.
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(command.text.encode())
                    process.stdin.flush()
            # Append each launcher immediately, so that it is ended even if the next launcher can't be started.
            self._launchers.append((command, process))

    def _routes(self) -> list[str]:
        """Return this machine's addresses on the routes to other hosts."""
        addresses = []
        for host in dict.fromkeys(slot.host for slot in self._job.slots):
            if is_here(host):
                continue
            # Connecting a datagram socket sends nothing. It only makes the kernel choose the own address for this route.
            try:
                # The port 9 has no meaning here, because the route depends only on the address.
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                    probe.connect((host, 9))
                    addresses.append(probe.getsockname()[0])
            except OSError:
                return []
        return [address for address in dict.fromkeys(addresses) if address != "127.0.0.1"]

    def _gather(self) -> str | None:
        """Wait until every rank has connected. Return an error text, or None."""
        deadline = time.monotonic() + self._job.start_timeout_s
        while any(rank.connection is None for rank in self._ranks):
            # The signal handler runs in this thread. After each short wait, check whether it has recorded a signal.
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
                # Refuse a rank that runs on another host than planned. Local and cross ranks are computed from the planned hosts,
                # so two ranks on that host could get the same local rank.
                if is_here(place.host) and hello["host"] != socket.gethostname():
                    return (
                        f"mpirun has started rank {hello['rank']} on {hello['host']}, but it belongs on {place.host}: it takes "
                        "the hosts in another order. Name each machine once, by one name."
                    )
                continue
            missing = [rank for rank, place in enumerate(self._ranks) if place.connection is None]
            # With mpirun, one launcher starts all ranks. Without it, each rank has its own launcher.
            for command, process in self._launchers:
                code = process.poll()
                theirs = [rank for rank in missing if rank in command.ranks]
                # First handle all connections in the queue, because one of them may come from a missing rank.
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
        """Send every rank its command, environment and files."""
        job, head = self._job, self._ranks[0]
        is_local = self._job.is_local or is_here(head.host)
        # If all ranks run here, use the loopback address, which other machines can't reach. Otherwise use a name or an address of
        # rank 0's host that the other hosts know.
        assert head.hello is not None, "every rank has come up"
        master = (self._names[0] if is_local else head.host, int(head.hello["port"]))
        shared = {**job.environment, **(start.exported(job.mpi_args) if job.transport == "mpi" else {})}
        for slot, place, count in zip(job.slots, self._ranks, threads(job.slots, self._ranks), strict=True):
            # Add defaults only for variables that the user has not set. The rank's own variables override both.
            environment = start.for_host(shared, slot.host)
            environment = with_defaults(environment, count, is_one_machine=self._job.is_local)
            environment |= variables(slot, len(job.slots), job.transport, master)
            commits = self._elastic.commits if self._elastic is not None and slot.rank == 0 else {}
            files = {**job.files, **commits}
            assert place.connection is not None
            # If the rank has ended, ignore the error here: the thread that reads the rank's connection reports the end.
            with contextlib.suppress(OSError):
                wire.send(
                    place.connection,
                    {
                        "argv": list(job.argv),
                        "environment": environment,
                        "directory": job.directory,
                        "files": list(files),
                        # Ranks may remove these folders only if all of them run here: other hosts may use the paths otherwise.
                        "scratch": [str(self._kept.path), str(self._scratch.path)] if self._job.is_local else [],
                        "is_elastic": self._elastic is not None,
                    },
                )
                for content in files.values():
                    place.connection.send_bytes(content)

    def _watch(self) -> str | None:
        """Wait until the ranks end or must stop. Return an error text if mpirun was killed."""
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
            # Only report a negative code, which means that mpirun was killed. Ranks report their own ends, and Open MPI 5 exits
            # with 0 even after the loss of a host.
            code = self._launchers[0][1].poll() if self._job.transport == "mpi" else None
            if code is not None and code < 0:
                return f"mpirun ended with exit code {processes.shell_code(code)} before the ranks did."
        return None

    def _look(self, timeout_s: float) -> None:
        """Process incoming messages for at most this many seconds."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                rank, data = self._listener.events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            self._take(rank, data)
            # Stop at the deadline even if messages are left: the caller has other checks, and a rank may print forever.
            if time.monotonic() > deadline:
                return

    def _take(self, rank: int, data: bytes | None) -> None:
        place = self._ranks[rank]
        if data is None:
            if place.exit_code is None:
                # The rank's parent process (rank.py) or its host died without a report. Use 137, the shells' code for SIGKILL.
                place.is_lost = True
                gone = f"the process beside it on host {place.host} is gone"
                self._ended(rank, 137, {"exception": gone, "exit_code": 137})
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
            # A rank sends its files one after the other, so this content belongs to the file that the rank announced last.
            place.files[next(reversed(place.files))] += content
            self._kept_at = time.monotonic()
        elif mark == b"E":
            end: wire.RankEndMessage = json.loads(content)
            self._ended(rank, end["exit_code"], end["error"])

    def _ended(self, rank: int, exit_code: int, error: ErrorFile | None) -> None:
        place = self._ranks[rank]
        self._output.finish(rank)
        place.exit_code, place.ended_at = exit_code, time.time()
        # An exception after the request to end is a result of this request, so ignore it.
        place.error = None if place.stopped and (error or {}).get("time", 0) > self._asked_at else error

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # This handler runs in the main thread, as `run` does. Only reader threads can use the connections at the same time.
        if self._signal is not None:
            self._close()  # a second signal ends the job at once
        self._signal = number

    def _end(self) -> None:
        """Ask the running ranks to end, and wait up to a grace period."""
        self._asked_at = time.time()
        # Send SIGINT as SIGINT: a script that catches KeyboardInterrupt can then save its state.
        word = {"interrupt": True} if self._signal == signal.SIGINT else {"end": True}
        for place in self._say(word):
            place.stopped = True
        deadline = time.monotonic() + _GRACE_S
        # While parts of a large commit arrive, wait longer, because sending the commit takes time.
        while any(p.stopped and p.exit_code is None for p in self._ranks) and (
            time.monotonic() < max(deadline, self._kept_at + _GRACE_S)
        ):
            self._look(_TICK_S)
            # After half of the grace period, send SIGTERM to the ranks that have ignored SIGINT.
            if word != {"end": True} and time.monotonic() > deadline - _GRACE_S / 2:
                word = {"end": True}
                self._say(word)

    def _say(self, word: Mapping[str, bool]) -> list[RankEnd]:
        """Send `word`, such as {"end": True}, to the running ranks. Return them."""
        running = []
        for place in self._ranks:
            if place.connection is not None and place.exit_code is None:
                running.append(place)
                with contextlib.suppress(OSError):
                    wire.send(place.connection, word)
        return running

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for place in self._ranks:
            if place.connection is not None:
                wire.hang_up(place.connection)
        # Wait at most two seconds in total, because there may be a launcher for each rank.
        deadline = time.monotonic() + 2.0
        for _, process in self._launchers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.05, deadline - time.monotonic()))
            # Use SIGTERM, so that mpirun can remove its files. It should end soon, because the ranks have ended.
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(2.0)
            if process.poll() is None:
                # List all descendants before killing any process: the kernel gives a dead process's children another parent.
                for pid in [*processes.descendants(process.pid), process.pid]:
                    processes.send(pid, signal.SIGKILL)
                process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()

    @property
    def _log_path(self) -> str:
        return str(self._scratch.path / "launcher.log")

    def _with_launchers_words(self, problem: str | None) -> str | None:
        with contextlib.suppress(OSError):
            with open(self._log_path, encoding="utf-8", errors="replace") as file:
                lines = [line.rstrip() for line in file if line.strip()]
            if lines and problem is None:
                print("\n".join(lines), file=sys.stderr)
            elif lines and problem is not None:
                return "\n".join([problem, *(f"    {line}" for line in lines[-_LAUNCHER_LINES:])])
        return problem
