"""The server of a service on another machine: a run whose only worker is the server.

A run, on ssh hosts or Slurm, already builds environments, copies the source, fetches the log and ends all processes.
The run's source folder is the revision as `paceline package` writes it. An update is a second run. Once the second run
is ready, it gets all new connections. The first run is canceled, and ends after its open requests.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, RunNotFoundError
from paceline.job.environment import EnvironmentSpec
from paceline.job.job import Job
from paceline.job.plan import NodeSetup
from paceline.runs import read, states
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord
from paceline.services import keys, revise
from paceline.services.folder import ServiceFolder
from paceline.services.listener import ConnectionRelay, Place
from paceline.services.log import GrowingLog
from paceline.services.package.versions import server_versions
from paceline.services.package.write import package
from paceline.services.record import Revision, ServiceRecord
from paceline.submit import SourceCopy, submit
from paceline.system import processes
from paceline.system.files import read_json, write_json
from paceline.system.scratch import Scratch
from paceline.targets import configured

#: The line with the server's address that `package/start.py` prints.
_LISTENS = re.compile(r"^paceline: this service listens at port (\d+) of (\S+)$", re.MULTILINE)
_LOOK_S = 0.5
_PAUSE_S = 0.1
#: Seconds to wait for the end of canceled runs, in addition to their grace period.
_END_S = 60.0


@dataclass
class _Served:
    """A run whose worker serves a revision.

    tag: A text that identifies the revision and its settings.
    keys_time: Time of the last change of the service's keys before the run got them (`keys.changed_ns`).
    port: The server's port on its node, or None while unknown.
    address: An address of the node that this machine can reach, or "-" if there is none.
    forward: The ssh process that forwards connections to the server.
    """

    tag: str
    folder: RunFolder
    keys_time: int
    record: RunRecord | None = None
    port: int | None = None
    address: str = "-"
    node: str | None = None
    forward: subprocess.Popen[bytes] | None = None
    place: Place | None = None
    is_ready: bool = False
    log: GrowingLog | None = None
    ended: str | None = None


class AwayServer:
    """The base class of servers on other machines, configured only at their start."""

    #: Whether `reload` passes new keys to the server.
    takes_keys = False
    #: The server has no process on this machine.
    pid: int | None = None

    def keep(self, *arguments: object) -> None:
        """Do nothing, since the server never reads a changed configuration."""

    def reload(self) -> None:
        """Do nothing, since the server never reads a changed configuration."""


class RemoteServer(AwayServer):
    """A server on another machine, with the methods of `paceline.services.server.Server`."""

    def __init__(self, folder: ServiceFolder, listener: socket.socket, target: str) -> None:
        self._folder, self._target = folder, target
        self._kind = configured.read(folder.workspace_dir, target).kind
        self._relay = ConnectionRelay(listener)
        self._present: _Served | None = None
        self._next: _Served | None = None
        #: Earlier runs that still answer their open requests.
        self._retired: list[_Served] = []
        self._refused: tuple[str, str] | None = None
        self._next_look_s = 0.0
        self._scratch: Scratch | None = None
        self._forwards = 0

    @property
    def is_up(self) -> bool:
        return self._present is not None

    @property
    def pids(self) -> set[int]:
        """The processes on this machine that belong to the server, such as ssh."""
        return {each.forward.pid for each in self._all() if each.forward is not None}

    @property
    def run_id(self) -> str | None:
        return None if self._present is None else self._present.folder.run_id

    @property
    def note(self) -> str | None:
        """A sentence that tells users where the server runs, or None if unknown."""
        served = self._present
        if served is None or served.node is None or served.port is None:
            return None
        run = f"run {served.folder.run_id} on {served.node}"
        if self._kind == "ssh":
            return f"It is {run}, where it listens at 127.0.0.1, port {served.port}; connections to the URI are led there by ssh."
        limit = served.record.job.max_run_duration_seconds if served.record and served.record.job else None
        until = f" It ends with the job's time limit of {limit:g} s, and is submitted again." if limit else ""
        return f"It is {run}, which answers at http://{served.node}:{served.port} too, with the same keys.{until}"

    def start(self, tag: str, record: ServiceRecord, revision: Revision, workers: int, setup: NodeSetup) -> None:
        """Submit a run that serves, or adopt the run of a previous supervisor."""
        self._present = self._adopted(tag, revision, workers) or self._submitted(tag, record, revision, workers)
        self._next_look_s = 0.0

    def change(self, tag: str, record: ServiceRecord, revision: Revision, workers: int, setup: NodeSetup) -> None:
        """Submit a run that serves another revision. The present run serves until it is ready."""
        if self._next is not None:
            self._retire(self._next)
        self._next = self._submitted(tag, record, revision, workers)
        self._next_look_s = 0.0

    @property
    def answers(self) -> bool:
        """Whether the server of the present run can answer requests."""
        return self._present is not None and self._present.is_ready and self._present.ended is None

    def is_ready(self, tag: str) -> bool:
        self._look()
        for served in (self._next, self._present):
            if served is not None and served.tag == tag and served.is_ready:
                # Send new connections to this run before retiring the previous run, so that no connection goes to a retired run.
                self._relay.place = served.place
                if served is self._next:
                    before, self._present, self._next = self._present, served, None
                    if before is not None:
                        self._retire(before)
                self._write_memory(served)
                return True
        return False

    def refusal(self, tag: str) -> str | None:
        if self._next is not None and self._next.tag == tag and self._next.ended is not None:
            self._refused = (tag, self._next.ended)
            self._drop(self._next)
            self._next = None
        return self._refused[1] if self._refused is not None and self._refused[0] == tag else None

    def ended(self) -> str | None:
        self._look()
        return None if self._present is None else self._present.ended

    def stop(self) -> None:
        """Cancel all runs of the service, and wait until they have ended."""
        served = self._all()
        for each in served:
            self._retire(each)
        jobs = [each.record.job for each in served if each.record is not None]
        grace_s = max((job.grace_period_seconds for job in jobs if job is not None), default=30.0)
        deadline = time.monotonic() + _END_S + grace_s
        while time.monotonic() < deadline and any(not _is_over(each) for each in served):
            time.sleep(_PAUSE_S)
        self.clear()
        self._relay.close()

    def leave(self) -> None:
        """Let the next supervisor adopt the present run. Cancel the run of an update."""
        if self._next is not None:
            self._retire(self._next)
        for each in self._all():
            self._drop(each)
        self._relay.close()
        if self._scratch is not None:
            self._scratch.close()

    def clear(self) -> None:
        """Cancel and forget all remaining runs, after the present run has ended."""
        for each in self._all():
            self._retire(each)
            self._drop(each)
        self._present = self._next = None
        self._retired = []
        self._relay.place = None
        self._memory.unlink(missing_ok=True)
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None

    # --- the runs that serve requests

    @property
    def _memory(self) -> Path:
        return self._folder.path / "run.json"

    def _write_memory(self, served: _Served) -> None:
        write_json(self._memory, {"run_id": served.folder.run_id, "tag": served.tag, "keys": served.keys_time})

    def _adopted(self, tag: str, revision: Revision, workers: int) -> _Served | None:
        """Return a previous supervisor's run that serves this revision, or None."""
        known = read_json(self._memory)
        if not isinstance(known, dict):
            return None
        folder = RunFolder(self._folder.workspace_dir / "runs" / known["run_id"])
        try:
            record = read.record(folder)
        except RunNotFoundError:
            return None
        words = record.job.arguments if record.job is not None else ()
        is_same = known["tag"].split(".")[0] == str(revision.number) and ("--workers", str(workers)) == tuple(
            words[-2:]
        )
        keys_time = keys.changed_ns(self._folder)
        if record.is_terminal or not is_same or known.get("keys", keys_time) != keys_time:
            if not record.is_terminal:
                read.request_cancel(folder, by=f"service {self._folder.name}")
            return None
        return _Served(tag, folder, keys_time)

    def _submitted(self, tag: str, record: ServiceRecord, revision: Revision, workers: int) -> _Served:
        place, keys_time = self._folder.path / "submitted", keys.changed_ns(self._folder)
        shutil.rmtree(place, ignore_errors=True)
        try:
            write_package(self._folder, revision, place, workers)
            run = submit(
                self._job(record, revision, workers),
                SourceCopy(directory=place, is_whole=True),  # copy every file, because `place` is removed below
                self._folder.workspace_dir,
                f"service-{self._folder.name}",
                tags={"service": self._folder.name, "revision": str(revision.number)},
                values=key_variables(self._folder, record),
            )
        finally:
            shutil.rmtree(place, ignore_errors=True)
        served = _Served(tag, run, keys_time)
        if self._present is None:
            self._write_memory(served)
        return served

    def _job(self, record: ServiceRecord, revision: Revision, workers: int) -> Job:
        host = "127.0.0.1" if self._kind == "ssh" else "0.0.0.0"
        words = ["--host", host, "--port", "0", *(() if record.has_keys else ("--no-key",)), "--workers", str(workers)]
        drain_s = revision.settings.get("drain_s") or 30.0
        return Job(
            entry_script="start.py",
            arguments=tuple(words),
            compute_target=self._target,
            environment=with_server_packages(revision.environment),
            # Run the server at normal priority, so that it responds quickly on a node where other workers compute.
            environment_variables={"PACELINE_SCHEDULING": "normal", **revision.variables},
            secrets={name: f"env:{name}" for name in key_variables(self._folder, record)},
            grace_period_seconds=drain_s + 5.0,
        )

    def _retire(self, served: _Served) -> None:
        with contextlib.suppress(PacelineError, OSError):
            if not read.record(served.folder).is_terminal:
                read.request_cancel(served.folder, by=f"service {self._folder.name}")
        if served is not self._present and served not in self._retired:
            self._retired.append(served)

    def _all(self) -> list[_Served]:
        return [*(each for each in (self._present, self._next) if each is not None), *self._retired]

    def _drop(self, served: _Served) -> None:
        if served.forward is not None:
            served.forward.kill()
            served.forward.wait()
            served.forward = None

    # --- the state of the runs

    def _look(self) -> None:
        if time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + _LOOK_S
        for served in (self._present, self._next):
            if served is not None and served.ended is None:
                self._look_at(served)
        for served in list(self._retired):
            if _is_over(served):
                self._drop(served)
                self._retired.remove(served)

    def _look_at(self, served: _Served) -> None:
        try:
            record = served.record = read.record(served.folder)
        except (PacelineError, OSError):
            return  # try again at the next check, when the engine may respond
        self._show(served, record)
        if record.is_terminal:
            failure = record.failure.message if record.failure is not None else record.status
            served.ended = f"run {record.run_id} has ended: {failure}{_last_words(served.folder, record)}"
            self._drop(served)
            return
        if served.port is None and (listens := _LISTENS.search(_log(served.folder, record))):
            served.port, served.address, served.node = int(listens[1]), listens[2], record.attempts[-1].nodes[0]
        if served.port is None or served.node is None:
            return
        if served.forward is not None and served.forward.poll() is not None:
            served.forward = None  # the ssh connection broke, so make another one
        if self._kind == "ssh" and served.forward is None:
            served.forward, served.place = self._forwarded(served.node, served.port)
            if served is self._present and served.is_ready:
                self._relay.place = served.place
        if served.is_ready:
            return
        # Try the node's name and the address that the server reports, because this machine may not resolve the name.
        hosts = [served.node, *([served.address] if served.address != "-" else [])]
        places: list[Place | None] = [served.place] if self._kind == "ssh" else [(host, served.port) for host in hosts]
        for place in places:
            if place is not None and _answers(place):
                served.place, served.is_ready = place, True
                break

    def _show(self, served: _Served, record: RunRecord) -> None:
        if not record.attempts:
            return
        path = served.folder.rank_log(record.attempts[-1].number, 0)
        if served.log is None or served.log.path != path:  # a new attempt writes another log file
            served.log = GrowingLog(path)
        # If the disk is full, the service goes on, and its log lacks these lines.
        with contextlib.suppress(OSError):
            sys.stdout.write(served.log.new())
            sys.stdout.flush()

    def _forwarded(self, node: str, port: int) -> tuple[subprocess.Popen[bytes], str]:
        target: Any = configured.read(self._folder.workspace_dir, self._target).make()
        if self._scratch is None:
            self._scratch = Scratch("service")
        self._forwards += 1
        path = str(self._scratch.path / str(self._forwards))
        process = subprocess.Popen(
            target.forward_words(node, path, port),
            stdin=subprocess.DEVNULL,
            preexec_fn=processes.ends_with_parent(),  # noqa: PLW1509 - no lock is taken between fork and exec
        )
        return process, path


def write_package(folder: ServiceFolder, revision: Revision, place: Path, workers: int) -> None:
    """Write a revision into a new folder `place`, for a server on another machine."""
    spec = revise.spec_of(folder, revision)
    if spec.source_directory is not None:
        spec = replace(spec, source_directory=str(folder.revision(revision.number).source))
    package(folder.workspace_dir, spec, place, name=folder.name, workers=workers, elsewhere=True)


def with_server_packages(environment: EnvironmentSpec) -> EnvironmentSpec:
    """Return a model's environment with the packages that the server needs.

    An existing interpreter gets a layer with only the packages that it lacks.
    """
    needed = server_versions()
    return replace(
        environment,
        layered=environment.layered or not environment.needs_build,
        pip_packages=(*environment.pip_packages, *(name.partition("==")[0] for name in needed.requirements[:2])),
        locked_pip=(*environment.locked_pip, *needed.constraints) if environment.locked_pip else (),
    )


def key_variables(folder: ServiceFolder, record: ServiceRecord) -> dict[str, str]:
    """Return the service's keys as environment variables for its server; {} without keys."""
    if not record.has_keys:
        return {}
    primary, secondary = keys.read(folder)
    return {"PACELINE_KEY": primary, "PACELINE_SECONDARY_KEY": secondary}


def _is_over(served: _Served) -> bool:
    try:
        return read.record(served.folder).is_terminal
    except RunNotFoundError:
        return True
    except (PacelineError, OSError):
        return False


def _log(folder: RunFolder, record: RunRecord) -> str:
    try:
        return folder.rank_log(record.attempts[-1].number, 0).read_text(errors="replace")
    except (OSError, IndexError):
        return ""


def _last_words(folder: RunFolder, record: RunRecord) -> str:
    lines = _log(folder, record).splitlines()[-8:]
    return "\n" + "\n".join(f"  {line}" for line in lines) if lines and record.status != states.CANCELED else ""


def _answers(place: Place) -> bool:
    with contextlib.suppress(OSError):
        family = socket.AF_UNIX if isinstance(place, str) else socket.AF_INET
        with socket.socket(family) as probe:
            probe.settimeout(5)
            probe.connect(place)
            probe.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return b" 200 " in probe.recv(64)
    return False
