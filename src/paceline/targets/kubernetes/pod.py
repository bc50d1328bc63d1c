"""The first process of each pod, which runs the supervisor or an agent.

    index 0     the run's supervisor as its child, and a port (`hub`) for the other pods and the submitting machine
    others      connect to index 0, and start an agent, which starts the workers, for each attempt

A pod exits with 0 only if the run has ended. After any other exit, Kubernetes replaces the pod.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from paceline.remote.foreign_python import bootstrap_words
from paceline.remote.replica.changes import LARGE, Stamp, stamp_of
from paceline.remote.wire import frame
from paceline.runs import states, store
from paceline.runs.folder import RunFolder
from paceline.runs.record import Attempt, utc_now
from paceline.system import processes
from paceline.system.files import read_json, write_json
from paceline.system.handshake import authenticate, serve_each
from paceline.system.links import entries
from paceline.system.listening import keep_alive
from paceline.targets.kubernetes import ticket as messages
from paceline.targets.kubernetes.hub import Hub, Pulled, folders_of, listen
from paceline.targets.kubernetes.manifests import ADDRESS_VARIABLE, CODE, FAILURES_VARIABLE, START, TOP, VOLUME

_TICK_S = 0.1
#: A pod prints changed files to its log every `_LIVE_S` seconds during the run, at most `_LIVE_BYTES` bytes in all. At
#: least the other half of the log's limit is left for the files at the end of the run.
_LIVE_S, _LIVE_BYTES = 1.0, messages.LOG_BYTES // 2
#: Maximum seconds that an ending pod waits to send its last messages, and for a reader to fetch files too large for the log.
_LAST_S, _LINGER_S = 5.0, 1800.0
_PAUSE_S = 0.3
#: Seconds after which a pod of `paceline compute doctor` ends, if it was not deleted.
_EXAMINED_S = 900.0
#: Seconds that a restarted pod of index 0 waits for the first connection from another pod.
_MEET_S = 20.0
#: If the pod of index 0 can't be reached, each other pod exits this many seconds after `gang_wait_s`, to free its node.
_LONELY_S = 60.0


def main(path: str, library: str) -> int:
    ticket, index = messages.PodTicket.read(path), messages.pod_index()
    # Remove these variables from os.environ, because workers inherit this process's environment.
    about = {name: os.environ.pop(name, "") for name in (ADDRESS_VARIABLE, FAILURES_VARIABLE)}
    processes.become_subreaper()
    os.makedirs(f"{TOP}/home", exist_ok=True)
    try:
        if ticket.volume:
            link_to_volume(TOP, VOLUME)
        if not ticket.run_id:
            return serve_agents(ticket)
        if index and not ticket.runs:
            return PodFollower(ticket, index, about[ADDRESS_VARIABLE]).run()
        return PodLeader(ticket, path, library, about).run()
    except (OSError, tarfile.TarError) as error:
        print(f"{messages.COMPLAINT}{error}", flush=True)
        return messages.EXIT_COMPLAINT


def link_to_volume(top: str, volume: str) -> None:
    """Create folders for environments and caches on `volume`, with symlinks in `top`.

    Raises:
        OSError: The pod's user can't write to one of the folders.
    """
    for name in ("environments", "home/.cache"):
        os.makedirs(f"{volume}/{name}", exist_ok=True)
        os.symlink(f"{volume}/{name}", f"{top}/{name}")


class PodLeader:
    """The first process of pod 0, which starts the run's supervisor."""

    def __init__(self, ticket: messages.PodTicket, path: str, library: str, about: Mapping[str, str]) -> None:
        self._ticket, self._path, self._library, self._about = ticket, path, library, about
        self._workspace = Path(TOP) / "workspace" / ticket.workspace
        self._folder = RunFolder(self._workspace / "runs" / ticket.run_id)
        self._hub = Hub(ticket, self._folder)
        self._supervisor = 0
        self._told_to_end = False
        self._part = 0
        #: `_kept`: folder on the volume for a copy of the user's files; None without a volume. `_is_kept`: copy is complete.
        self._kept = Path(VOLUME) / "runs" / ticket.run_id if ticket.volume else None
        self._is_kept = False

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._forward)
        if self._dropped() is not None:
            print(f"run {self._ticket.run_id} was canceled before it began", flush=True)
            return 0
        print(f"run {self._ticket.run_id}: `paceline logs {self._ticket.run_id}` shows its output", flush=True)
        if not self._fetch():
            return messages.EXIT_AGAIN
        pulled = Pulled(self._folder, _LIVE_BYTES)
        pulled.skip_present()
        self._note_lost_attempts()
        self._hub.begin()
        if not self._start():
            return messages.EXIT_AGAIN
        self._watch(pulled)
        status = (read_json(self._folder.state) or {}).get("status")
        has_ended = status in states.TERMINAL
        if has_ended:
            self._keep()  # copy the files before readers get the final record
        self._hub.end(is_over=has_ended, is_preempted=self._told_to_end)
        if not has_ended:
            self._keep()
        if has_ended or self._ticket.live:
            self._print_rest(pulled, has_ended=has_ended)
        if has_ended:
            self._hub.wait_for_readers(_LAST_S)
        elif self._told_to_end:
            self._hub.wait_for_others(_LAST_S)
        return 0 if has_ended else messages.EXIT_AGAIN

    def _fetch(self) -> bool:
        """Unpack the run's files. Return False if Kubernetes ends the pod."""
        incoming = self._workspace / f".incoming-{os.getpid()}"
        incoming.mkdir(parents=True, exist_ok=True)
        archive, size = Path(f"{START}/{self._ticket.archive}"), self._ticket.upload_bytes
        if size:
            archive = incoming / "run.tar.gz"
            archive.touch()
        while archive.stat().st_size < size:
            self._hub.receive(archive, size)
            if self._told_to_end:
                return False
            time.sleep(_TICK_S)
        parts = [Path(f"{CODE}/source.{number}").read_bytes() for number in range(self._ticket.source_parts)]
        for packed in (open(archive, "rb"), *([io.BytesIO(b"".join(parts))] if parts else ())):  # noqa: SIM115
            extract(packed, incoming)
        # Move the run's folder last, because its existence shows that all folders are complete. Equal names mean equal content.
        for name in ("snapshots", "carried", "runs"):
            (self._workspace / name).mkdir(exist_ok=True)
            for path in (incoming / name).glob("*"):
                if not (self._workspace / name / path.name).exists():
                    path.rename(self._workspace / name / path.name)
        shutil.rmtree(incoming, ignore_errors=True)
        if self._kept is not None and (self._kept / "checkpoints").is_dir():
            shutil.copytree(self._kept / "checkpoints", self._folder.checkpoints, symlinks=True, dirs_exist_ok=True)
        return True

    def _dropped(self) -> messages.Noted | None:
        """Return the request to cancel this run from the Job's Secret, or None."""
        found: messages.Noted = read_json(Path(START) / messages.DROPPED) or {}
        return found.get(self._ticket.run_id)

    def _keep(self) -> None:
        """Copy the run's outputs to the volume, for the next pod 0."""
        if self._kept is None:
            return
        new, old = (self._kept.with_name(f".{self._kept.name}.{word}") for word in ("new", "old"))
        try:
            for path in (new, old):
                shutil.rmtree(path, ignore_errors=True)
            new.mkdir(parents=True)
            for name in LARGE:
                if (self._folder.path / name).is_dir():
                    shutil.copytree(self._folder.path / name, new / name, symlinks=True)
            if self._kept.exists():
                self._kept.rename(old)
            new.rename(self._kept)
            self._is_kept = True
        except OSError as error:
            self._warn(f"The run's files could not be copied to the volume {self._ticket.volume}: {error}.")
        shutil.rmtree(old, ignore_errors=True)

    def _warn(self, text: str) -> None:
        record = store.stored(self._folder)
        store.replace_state(self._folder, replace(record, warnings=(*record.warnings, text)))

    def _note_lost_attempts(self) -> None:
        """Record the attempts that were lost with index 0's earlier pods.

        The other pods report their number of attempts, because a lost pod may have failed before an attempt began.
        """
        failures, preempted = int(self._about[FAILURES_VARIABLE] or 0), 0
        if failures and self._ticket.node_count > 1:
            attempts, preempted = self._hub.attempts(_MEET_S)
            failures = min(failures, attempts)
        record, now = store.stored(self._folder), utc_now()
        causes = ["node_lost"] * (failures - preempted) + ["preempted"] * preempted
        lost = [Attempt(number=n + 1, started_utc=now, ended_utc=now, cause=cause) for n, cause in enumerate(causes)]
        if lost:
            store.replace_state(self._folder, replace(record, attempts=tuple(lost)))

    def _start(self) -> bool:
        """Start the supervisor. Return False if Kubernetes ends the pod."""
        if self._told_to_end:
            return False
        write_json(self._folder.engine, {"engine": "kubernetes", "job_id": self._ticket.job})
        environment = {
            **os.environ,
            ADDRESS_VARIABLE: self._about[ADDRESS_VARIABLE],
            "PYTHONPATH": self._library,
            "PACELINE_SHELL_PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            processes.SUPERVISOR_VARIABLE: self._ticket.run_id,
            messages.TICKET_VARIABLE: self._path,
        }
        words = [sys.executable, "-m", "paceline.supervisor", str(self._folder.path)]
        with open(self._folder.driver_log, "ab") as log:
            process = subprocess.Popen(
                words, env=environment, cwd=self._folder.path, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        process.returncode = 0  # keep Popen from reaping the process, because `_watch` reaps it
        self._supervisor = process.pid
        return True

    def _watch(self, pulled: Pulled) -> None:
        looked = time.monotonic()
        while not has_reaped(self._supervisor):
            if self._hub.gives_back or self._told_to_end:
                processes.send(self._supervisor, signal.SIGTERM)
            if time.monotonic() - looked > _LIVE_S:
                looked = time.monotonic()
                if self._ticket.live:
                    self._print(pulled.frames(is_final=False, with_files=False))
                    self._print(pulled.files(has_ended=False))
                # After a change of the Secret, Kubernetes takes about a minute to update the file that `_dropped` reads.
                if not self._folder.cancel_request.exists() and (request := self._dropped()) is not None:
                    write_json(self._folder.cancel_request, request)
            time.sleep(_TICK_S)

    def _print(self, frames: Iterable[bytes], most: int = sys.maxsize) -> bool:
        """Print changes to the pod's log. Return False if they exceed `most` bytes."""
        packing, packed, size = zlib.compressobj(1), [], 0
        for one in frames:
            packed.append(packing.compress(one))
            size += len(packed[-1])
            if size > most:
                return False
        if packed:
            packed.append(packing.flush())
            for line in messages.log_lines(self._part, b"".join(packed)):
                print(line)
            sys.stdout.flush()
            self._part += 1
        return True

    def _print_rest(self, pulled: Pulled, *, has_ended: bool) -> None:
        """Print the remaining changes of the run's files to the pod's log.

        If the user's files are too large for the log, wait a limited time for another machine to fetch them.
        """
        known, most = dict(pulled.known), messages.LOG_BYTES - _LIVE_BYTES + pulled.room
        pulled.room = sys.maxsize
        if not self._print(pulled.files(has_ended=has_ended), most):
            self._leave_files(known, folders_of(has_ended=has_ended))
        self._print(itertools.chain(pulled.frames(is_final=True, with_files=False), [frame({"over": True})]))

    def _leave_files(self, known: Mapping[str, Stamp], folders: Sequence[str]) -> None:
        """Let another machine fetch files that the log can't hold; report unfetched files."""
        if not (self._ticket.live or self._is_kept):
            print(f"large files wait for a reader: paceline show {self._ticket.run_id}", flush=True)
            self._hub.wait_for_copy(_LINGER_S, lambda: self._told_to_end)
        top = os.fspath(self._folder.path)
        files = [entry for folder in folders for entry in entries(top, folder) if entry.kind == "file"]
        names = [one.name for one in files if known.get(one.name) != stamp_of(os.path.join(top, one.real))]
        where = f"They are in runs/{self._ticket.run_id} of the volume {self._ticket.volume}."
        self._warn(
            f"{len(names)} files of the run did not come back, such as {names[0]!r}: they do not fit into the pod's log, and no "
            f"reader fetched them in time. {where if self._is_kept else 'Store large files in a datastore.'}"
        )

    def _forward(self, number: int, frame: object) -> None:
        self._told_to_end = True  # `_watch` ends the supervisor


class PodFollower:
    """The first process of pods 1, 2, ..., which runs the agents."""

    def __init__(self, ticket: messages.PodTicket, index: int, address: str) -> None:
        self._ticket, self._index, self._address = ticket, index, address
        self._agent: int | None = None
        self._told_to_end = False
        #: The latest start time of a pod of index 0: this pod ignores an older pod of index 0 that is still running.
        self._incarnation = 0
        #: Number of attempts whose workers this pod has run. `_preempted`: attempts ended by a preemption of pod 0.
        self._attempts, self._preempted = 0, set[int]()

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._leave)
        alone_since = time.monotonic()
        while not self._told_to_end:
            for connection in self._connections(self._about()):
                with connection:
                    answer = self._wait(connection)
                    if "over" in answer:
                        return 0
                    if "give_back" in answer:
                        return messages.EXIT_AGAIN
                    if "go" in answer:
                        self._be_agent(connection)
                    alone_since = time.monotonic()
            if time.monotonic() - alone_since > self._ticket.gang_wait_s + _LONELY_S:
                return messages.EXIT_AGAIN
            processes.reap()
            time.sleep(_PAUSE_S)
        return messages.EXIT_AGAIN

    def _connections(self, request: messages.Noted) -> Iterator[Connection]:
        host = f"{self._ticket.job}-0.{self._ticket.job}"
        with contextlib.suppress(OSError):
            for address in {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}:
                with contextlib.suppress(OSError, EOFError, ValueError):
                    yield self._connect(str(address), request)

    def _connect(self, address: str, request: messages.Noted) -> Connection:
        sock = socket.create_connection((address, self._ticket.port), timeout=5)
        # Clear the timeout: it makes the descriptor non-blocking, and `Connection` needs a blocking descriptor.
        sock.settimeout(None)
        keep_alive(sock)
        connection = authenticate(sock, bytes.fromhex(self._ticket.key), is_client=True)
        connection.send_bytes(messages.message(request))
        return connection

    def _about(self) -> messages.Noted:
        about = {"what": "agent", "rank": self._index, "hostname": socket.gethostname(), "address": self._address}
        return {**about, "attempts": self._attempts, "preempted": len(self._preempted)}

    def _wait(self, connection: Connection) -> messages.Noted:
        with contextlib.suppress(OSError, EOFError, ValueError):
            while not self._told_to_end:
                if not connection.poll(_PAUSE_S):
                    processes.reap()
                    continue
                answer: messages.Noted = json.loads(connection.recv_bytes(1 << 16))
                if "preempted" in answer and self._attempts:
                    self._preempted.add(self._attempts)
                if "incarnation" not in answer:
                    return answer
                if answer["incarnation"] < self._incarnation:
                    return {}
                self._incarnation = answer["incarnation"]
        return {}

    def _be_agent(self, connection: Connection) -> None:
        self._attempts += 1
        self._agent = _start_agent(connection)
        connection.close()
        while not has_reaped(self._agent):
            time.sleep(_TICK_S)
        self._agent = None

    def _leave(self, number: int, frame: object) -> None:
        self._told_to_end = True
        if self._agent is not None:
            # Report that this pod leaves. The supervisor then lets workers save a checkpoint, and disconnects the pod.
            threading.Thread(target=self._tell_leaving, daemon=True).start()

    def _tell_leaving(self) -> None:
        for connection in self._connections({"what": "leaving", "rank": self._index}):
            connection.close()


def serve_agents(ticket: messages.PodTicket) -> int:
    """Start an agent for each connection of `paceline compute doctor`. Return 0."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    accept = (listen(ticket.port), bytes.fromhex(ticket.key), _start_agent)
    threading.Thread(target=serve_each, args=accept, daemon=True).start()
    deadline = time.monotonic() + _EXAMINED_S
    while time.monotonic() < deadline:
        processes.reap()
        time.sleep(_TICK_S)
    return 0


def _start_agent(connection: Connection) -> int:
    """Start an agent that communicates by this connection. Return its pid."""
    ends = connection.fileno()
    process = subprocess.Popen(list(bootstrap_words(sys.executable)), stdin=ends, stdout=ends, cwd="/")
    process.returncode = 0  # keep Popen from reaping the process, because `processes.reap` reaps it
    return process.pid


def extract(packed: IO[bytes], folder: Path) -> None:
    """Unpack an archive into a folder, and close it."""
    with packed, tarfile.open(fileobj=packed) as archive:
        # Trust the archive: the user who owns this pod made it.
        archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
        archive.extractall(folder)


def has_reaped(awaited: int | None) -> bool:
    """Reap all ended child processes. Return whether `awaited` was one of them."""
    return any(pid == awaited for pid, _ in processes.reap())
