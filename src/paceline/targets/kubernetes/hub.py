"""The server of pod 0 (index 0 of the Job), for other pods and for readers (programs on the submitting machine).

    other pods  ── TCP ──> hub ── Unix socket, passed descriptors ──> supervisor (`allocate`)
    readers     ── port-forward ──> hub ── files of the run's folder

Readers fetch the run's files. The server runs in threads of the pod's first process, not in the supervisor.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from paceline.remote.replica.changes import LARGE, RECORD, WORK, Changes, Stamp, small_names
from paceline.remote.wire import frame
from paceline.runs import states
from paceline.runs.execute import Files
from paceline.runs.folder import RunFolder
from paceline.runs.remote_status import ExecRequest
from paceline.system import listening
from paceline.system.files import write_json
from paceline.system.handshake import serve_each
from paceline.targets.kubernetes.ticket import HUB_SOCKET, Noted, PodTicket, message

_LOOK_S = 0.02
_REQUEST_BYTES = 64 << 20
#: Maximum bytes of data in one message to a reader. A reader is a program on a user's machine that fetches the run's files.
_MESSAGE_BYTES = 1 << 20


def folders_of(*, has_ended: bool) -> Sequence[str]:
    """Return the run's folders to copy to the submitting machine; in the end also `work`."""
    return (*LARGE, WORK) if has_ended else LARGE


class Pulled(Changes):
    """A tracker of a run's changed files, for a program that keeps a copy.

    Attributes:
        room: Number of bytes of the user's files that may still be sent. Larger files wait until the run has ended.
    """

    def __init__(self, folder: RunFolder, room: int = sys.maxsize) -> None:
        super().__init__(os.fspath(folder.path), {})
        self.room = room

    def skip_present(self) -> None:
        """Do not send the logs, metrics and reports that exist now."""
        self.skip(list(small_names(self.top)))

    def frames(self, *, is_final: bool, with_files: bool = True) -> Iterator[bytes]:
        """Yield the changes since the last call as messages to the copying program.

        is_final: Whether all processes have ended. Until then, the state file of an ended run is not yielded.
        """
        try:
            header, data, has_ended = self.record(states.TERMINAL)
        except (OSError, ValueError):
            return
        yield from itertools.starmap(frame, self.small(small_names(self.top)))
        if with_files:
            yield from self.files(has_ended=has_ended)
        if self.known.get(RECORD) != header["stamp"] and (is_final or not has_ended):
            self.known[RECORD] = header["stamp"]
            yield frame(header, data)

    def files(self, *, has_ended: bool) -> Iterator[bytes]:
        """Yield messages with the user's changed files. During the run, skip files that still change."""
        for header, data in filter(None, self.large(has_ended, folders_of(has_ended=has_ended))):
            self.room -= len(data)
            yield frame(header, data)

    def _rests(self, name: str, stamp: Stamp) -> bool:
        return super()._rests(name, stamp) and stamp[0] <= self.room


class Hub:
    """The server in pod 0 for other pods and the submitting machine."""

    def __init__(self, ticket: PodTicket, folder: RunFolder) -> None:
        self._ticket, self._folder = ticket, folder
        #: This pod's start time. If Kubernetes has replaced a pod of index 0 that still runs, other pods ignore the older pod.
        self._incarnation = time.time_ns()
        self._guard = threading.Lock()
        #: Rank of a connected pod that the supervisor has not taken yet -> the pod's connection and description.
        self._agents: dict[int, tuple[Connection, Noted]] = {}
        self._supervisor: socket.socket | None = None
        self._answer: dict[str, bool] | None = None
        #: Ranks of the pods that have received `_answer`, the message that tells them to exit.
        self._told: set[int] = set()
        self._readers = 0
        #: `_has_run`: readers are served. `_is_over`: they get the final record. `_is_copied`: a reader has it.
        self._has_run = self._is_over = self._is_copied = False
        self._archive: tuple[Path, int] | None = None
        #: Whether the supervisor has asked to end all pods, because some did not start in time.
        self.gives_back = False
        accept = (listen(ticket.port), bytes.fromhex(ticket.key), self._serve)
        threading.Thread(target=serve_each, args=accept, daemon=True).start()

    def begin(self) -> None:
        """Begin to serve the supervisor and programs on the submitting machine."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(HUB_SOCKET)
        local = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        local.bind(HUB_SOCKET)
        local.listen(4)
        self._has_run = True
        threading.Thread(target=listening.accept_each, args=(local, self._serve_supervisor), daemon=True).start()

    def attempts(self, limit_s: float) -> tuple[int, int]:
        """Return (attempts, preemptions) as other pods report; (0, 0) after `limit_s` without reports."""
        _wait(lambda: self._agents, limit_s)
        with self._guard:
            told = [(int(request["attempts"]), int(request["preempted"])) for _, request in self._agents.values()]
        return max(told, default=(0, 0))

    def end(self, *, is_over: bool, is_preempted: bool = False) -> None:
        """Tell the other pods to exit, and whether Kubernetes has to replace them."""
        with self._guard:
            reasons = {"over": is_over, "give_back": self.gives_back, "preempted": is_preempted}
            self._answer = next(({reason: True} for reason, holds in reasons.items() if holds), None)
            waiting, self._agents = self._agents, {}
        self._is_over = is_over
        for rank, (connection, _) in waiting.items():
            self._dismiss(rank, connection)

    def wait_for_others(self, limit_s: float) -> None:
        """Wait until the other pods have received the message of `end`."""
        _wait(lambda: len(self._told) >= self._ticket.node_count - 1, limit_s)

    def receive(self, archive: Path, size: int) -> None:
        """Accept an upload of the run's files (`size` bytes) into `archive`."""
        self._archive = (archive, size)

    def wait_for_readers(self, limit_s: float) -> None:
        """Wait until no program on the submitting machine is connected."""
        _wait(lambda: not self._readers, limit_s)

    def wait_for_copy(self, limit_s: float, stop: Callable[[], bool]) -> None:
        """Wait until the submitting machine has the run's files, or `stop` returns True."""
        _wait(lambda: self._is_copied or stop(), limit_s)

    # --- methods that handle requests of the supervisor and of the other pods

    def _serve(self, connection: Connection) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError, KeyError, TypeError):
            request = json.loads(connection.recv_bytes(_REQUEST_BYTES))
            what = request["what"]
            if what == "agent":
                # Duplicate the connection, because the original is closed at the end of this method.
                self._take_agent(Connection(os.dup(connection.fileno())), request)
            elif what == "leaving":
                with self._guard:
                    if self._supervisor is not None:
                        self._supervisor.send(message({"leaving": True, "rank": int(request["rank"])}))
            elif what == "put":
                self._take_archive(connection)
            elif self._has_run:
                self._serve_reader(connection, what, request)

    def _take_agent(self, connection: Connection, request: Noted) -> None:
        connection.send_bytes(message({"incarnation": self._incarnation}))
        with self._guard:
            if self._answer is None:
                earlier = self._agents.pop(int(request["rank"]), None)
                self._agents[int(request["rank"])] = (connection, request)
        if self._answer is not None:
            self._dismiss(int(request["rank"]), connection)
            return
        if earlier is not None:
            earlier[0].close()
        self._deliver()

    def _dismiss(self, rank: int, connection: Connection) -> None:
        with contextlib.suppress(OSError), connection:
            if self._answer is not None:
                connection.send_bytes(message(self._answer))
                self._told.add(rank)

    def _deliver(self) -> None:
        with self._guard:
            while self._supervisor is not None and self._agents:
                rank, (connection, request) = self._agents.popitem()
                with contextlib.suppress(OSError), connection:
                    connection.send_bytes(message({"go": True}))
                    try:
                        socket.send_fds(self._supervisor, [message({**request, "rank": rank})], [connection.fileno()])
                    except OSError:
                        self._supervisor = None

    def _serve_supervisor(self, sock: socket.socket) -> None:
        with self._guard:
            self._supervisor = sock
        self._deliver()
        with contextlib.suppress(OSError):
            while data := sock.recv(1 << 12):
                if "give_back" in json.loads(data):
                    self.gives_back = True
        with self._guard:
            if self._supervisor is sock:
                self._supervisor = None

    # --- methods that serve readers, the programs on a user's machine that fetch the run's status and files

    def _serve_reader(self, connection: Connection, what: str, request: Noted) -> None:
        if what == "cancel":
            write_json(self._folder.cancel_request, request["request"])
            connection.send_bytes(b"{}")
        elif what == "exec":
            self._exec(connection, request["request"])
        elif what == "pull":
            self._readers += 1
            try:
                self._serve_pulls(connection)
            finally:
                self._readers -= 1

    def _serve_pulls(self, connection: Connection) -> None:
        pulled = Pulled(self._folder)
        while True:
            asked = json.loads(connection.recv_bytes(_REQUEST_BYTES))
            if asked.get("bye"):
                self._is_copied = True
                return
            pulled.known = asked["known"]
            is_final = self._is_over
            piece = bytearray()
            for one in pulled.frames(is_final=is_final):
                piece += one
                if len(piece) >= _MESSAGE_BYTES:
                    connection.send_bytes(piece)
                    piece = bytearray()
            connection.send_bytes(piece + frame({"over": True, "final": is_final}))

    def _exec(self, connection: Connection, request: ExecRequest) -> None:
        files = Files(self._folder)
        try:
            files.begin(request)
            while not files.is_over:
                while connection.poll(_LOOK_S):
                    for one in json.loads(connection.recv_bytes(_REQUEST_BYTES)):
                        files.send(one)
                if found := files.receive():
                    connection.send_bytes(json.dumps(found).encode())
                    if any("error" in one for one in found):
                        return
        finally:
            files.close()

    def _take_archive(self, connection: Connection) -> None:
        if self._archive is None:
            connection.send_bytes(message({"have": -1}))
            return
        path, size = self._archive
        have = path.stat().st_size
        connection.send_bytes(message({"have": have}))
        with open(path, "r+b") as file:
            file.seek(have)
            while have < size:
                have += file.write(connection.recv_bytes(_REQUEST_BYTES))
                file.flush()
        connection.send_bytes(message({"have": have}))


def _wait(is_done: Callable[[], object], limit_s: float) -> None:
    """Wait until `is_done` returns a true value, for at most `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not is_done() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def listen(port: int) -> socket.socket:
    """Return a socket listening on IPv4 and, if the pod has it, IPv6."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512)
    return socket.create_server(("", port), backlog=512)
