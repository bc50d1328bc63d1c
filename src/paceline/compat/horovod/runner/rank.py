"""The parent process of each rank: runs the program and reports to `horovodrun`.

    python .../runner/rank.py [RANK]

mpirun or `horovodrun` starts this process. `horovodrun` gives the rank as argument and its address on standard input.
If the connection to `horovodrun` breaks, this process kills all its descendants. So no process of a job stays on any
host, however the job ends.
"""

import os
import sys

# Python has put this file's folder first on the path. Remove it, because its modules would hide modules of the same name.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]
_PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
# Append the package's parent folder last: it may be site-packages, and here only `paceline` should come from it.
sys.path.append(os.path.dirname(_PACKAGE))

import json  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import subprocess  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
from multiprocessing.connection import Connection  # noqa: E402
from typing import IO, TYPE_CHECKING, cast  # noqa: E402

from paceline.compat.horovod.runner import wire  # noqa: E402
from paceline.compat.horovod.runner.rank_command import python_command, with_names  # noqa: E402
from paceline.system import handshake, processes  # noqa: E402
from paceline.system.scratch import Scratch  # noqa: E402
from paceline.worker import scheduling  # noqa: E402

if TYPE_CHECKING:
    from paceline.supervisor.diagnosis.diagnose import ErrorFile

_GRACE_S = 5.0
#: Prefix of files in the rank's folder. The files contain commits of elastic state (`common.kept_commits`).
_COMMIT = "commit"
#: After the program's end, wait this many seconds for the end of its output: its child processes may keep the pipes open.
_PIPES_S = 1.0
#: Prefixes of environment variables that mpirun sets. Their values here override the values that `horovodrun` sends.
_LAUNCHERS = ("OMPI_", "PMIX_", "PRTE_", "OPAL_", "PMI_", "LD_LIBRARY_PATH")


def main(argv: list[str]) -> int:
    """Run this rank's program for `horovodrun`. Return 1 if `horovodrun` is gone, else 0."""
    # mpirun starts all ranks with the same command line, so read the rank's number from Open MPI's variable.
    rank = int(argv[0] if argv else os.environ["OMPI_COMM_WORLD_RANK"])
    contact = json.loads(sys.stdin.readline() if argv else os.environ.pop(wire.VARIABLE))
    key = bytes.fromhex(contact["key"])
    # Become the parent of orphaned descendants, so that `kill_descendants` finds them.
    processes.become_subreaper()
    # If this is rank 0, torch's store needs a free port. Find one here. Another program may still take the port before the store
    # does.
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    try:
        connection = wire.connect([(host, int(at)) for host, at in contact["addresses"]], key)
        hello: wire.RankHello = {
            "rank": rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "port": port,
            "cores": sorted(processes.cores()),
        }
        wire.send(connection, hello)
        message = wire.receive(connection)
        if "argv" not in message:
            return 1
        start = cast("wire.RankStart", message)
        files = {name: connection.recv_bytes() for name in start["files"]}
    except (OSError, EOFError) as error:
        print(f"rank {rank}: {error or 'horovodrun has gone'}", file=sys.stderr)
        return 1
    # Use a subfolder of `horovodrun`'s folder on the same host: `horovodrun` removes it even if this process is killed.
    top = next(iter(start["scratch"]), None)
    made = Scratch(f"horovodrun-rank-{rank}", top)
    scratch = str(made.path)
    # If `run` raises an exception, treat the driver as gone, and remove the driver's folders as well.
    is_deserted = True
    try:
        for name, content in files.items():
            with open(os.path.join(scratch, os.path.basename(name)), "wb") as file:
                file.write(content)
        del files
        is_deserted = _Rank(connection, key, rank, start, scratch).run()
    finally:
        made.close()
        for folder in start["scratch"] if is_deserted else ():
            shutil.rmtree(folder, ignore_errors=True)
    return int(is_deserted)


class _Rank:
    def __init__(self, connection: Connection, key: bytes, rank: int, start: wire.RankStart, scratch: str) -> None:
        self._connection, self._rank, self._start, self._scratch = connection, rank, start, scratch
        self._key = key
        self._lock = threading.Lock()
        self._deserted = False
        self._process: subprocess.Popen[bytes] | None = None
        self._request = os.path.join(scratch, "more_hosts")

    def run(self) -> bool:
        """Run the program. Return True if `horovodrun` is gone."""
        # If the script raises an exception, `paceline.worker.report` writes the exception to this folder.
        os.makedirs(os.path.join(self._scratch, "attempts", "1"))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # `_end` waits for the grace period. Call it in a new thread, so that this thread detects the program's end.
            signal.signal(number, lambda *_: threading.Thread(target=self._end, daemon=True).start())
        try:
            process = self._process = self._started()
        except (OSError, ValueError) as error:
            self._tell_end(127, {"exception": _why_not_started(error, self._start)})
            return False
        pumps = [
            threading.Thread(target=self._pump, args=(stream, mark), daemon=True)
            for stream, mark in ((process.stdout, b"o"), (process.stderr, b"e"))
        ]
        # Start threads only after the program: a fork in a process with threads may deadlock before exec.
        for thread in (*pumps, threading.Thread(target=self._listen, daemon=True)):
            thread.start()
        code = process.wait()
        processes.kill_descendants(os.getpid())
        deadline = time.monotonic() + _PIPES_S
        for thread in pumps:
            thread.join(max(0.0, deadline - time.monotonic()))
        # Send the files before the end message, because the driver expects nothing after the end message.
        self._send_files(code)
        self._tell_end(processes.shell_code(code), self._error(processes.shell_code(code)))
        return self._deserted

    def _started(self) -> "subprocess.Popen[bytes]":
        # Take HOME, USER and similar variables from this host, and all other variables from the driver.
        environment = {name: value for name, value in os.environ.items() if wire.is_of_host(name)}
        environment |= {**self._start["environment"], "HOROVODRUN_SCRATCH": self._scratch}
        if self._start["is_elastic"]:
            environment["HOROVOD_ELASTIC"] = "1"
            environment["HOROVODRUN_COMMITS"] = os.path.join(self._scratch, _COMMIT)
            environment["PACELINE_ELASTIC_REQUEST"] = self._request
        # Each host derives the secret from the launcher's key, so that the secret is never sent over an unencrypted connection.
        environment[handshake.RUN_SECRET_VARIABLE] = handshake.tag(self._key, "ranks", b"").hex()
        environment |= {name: value for name, value in os.environ.items() if name.startswith(_LAUNCHERS)}
        # Change the directory first, because `python_command` searches for the script in the working directory.
        os.chdir(self._start["directory"])
        with_names(environment, _PACKAGE, self._scratch)
        argv = self._start["argv"]
        # For a function, the command is Paceline's own script. Its argument is the folder that holds the function.
        argv = [*argv, self._scratch] if wire.CALL in self._start["files"] else python_command(argv, environment)
        # Set this process's scheduling policy now, because the program inherits it, even if the program is a shell.
        scheduling.begin(environment)
        return subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # In a new session, the program does not get signals for this process's group: this process ends the program itself.
            start_new_session=True,
            # The kernel ends the program when the thread that starts it ends. So this must be the main thread.
            preexec_fn=processes.ends_with_parent(),  # noqa: PLW1509
        )

    def _pump(self, stream: IO[bytes], mark: bytes) -> None:
        # os.read returns available data at once, but the stream's own read would wait until a buffer is full.
        while data := os.read(stream.fileno(), wire.PIECE_BYTES):
            self._send(mark + data)

    def _listen(self) -> None:
        try:
            while True:
                message = wire.receive(self._connection)
                # As with SIGTERM, send the signal only to the program. The program has to end its child processes.
                if message.get("interrupt") and self._process is not None:
                    processes.send(self._process.pid, signal.SIGINT)
                if message.get("hosts"):
                    with open(self._request, "wb"):
                        pass
                if message.get("end"):
                    # `_end` sleeps, so call it in another thread: this loop must detect the end of the connection.
                    threading.Thread(target=self._end, daemon=True).start()
        except EOFError:
            # `horovodrun` or its host has died. Kill all processes of the rank, because no rank may outlive `horovodrun`.
            self._deserted = True
            processes.kill_descendants(os.getpid())

    def _end(self) -> None:
        """Send SIGTERM to the program, and later SIGKILL to all descendants."""
        if self._process is not None:
            processes.send(self._process.pid, signal.SIGTERM)
            time.sleep(_GRACE_S)
        processes.kill_descendants(os.getpid())

    def _send_files(self, code: int) -> None:
        """Send `horovodrun` the result file, and elastic states that a failed program committed."""
        for name in sorted(os.listdir(self._scratch)):
            # Send only newer commits: the driver itself has sent this rank the commits in `files`.
            is_new_commit = name.startswith(_COMMIT) and name not in self._start["files"]
            if name == wire.RESULT or (is_new_commit and code != 0):
                with open(os.path.join(self._scratch, name), "rb") as file:
                    self._send(b"f" + os.fstat(file.fileno()).st_size.to_bytes(8, "little") + name.encode())
                    while piece := file.read(wire.PIECE_BYTES * 16):
                        self._send(b"k" + piece)

    def _error(self, code: int) -> "ErrorFile | None":
        from paceline.supervisor.diagnosis.diagnose import error_of

        try:
            with open(os.path.join(self._scratch, "attempts", "1", f"error_{self._rank}.json"), "rb") as file:
                return error_of(json.loads(file.read()), code)
        except (OSError, ValueError, RecursionError):
            return None

    def _tell_end(self, exit_code: int, error: "ErrorFile | None") -> None:
        end: wire.RankEndMessage = {"exit_code": exit_code, "error": error, "time": time.time()}
        self._send(b"E" + json.dumps(end).encode())

    def _send(self, data: bytes) -> None:
        # Several threads send messages. Without the lock, parts of two messages could be mixed.
        with self._lock:
            try:
                self._connection.send_bytes(data)
            except OSError:
                # The connection to the driver is broken. `_listen` detects this too, and kills the program.
                self._deserted = True


def _why_not_started(error: Exception, start: "wire.RankStart") -> str:
    if isinstance(error, OSError) and not os.path.isdir(start["directory"]):
        return f"the folder {start['directory']!r} is not on host {socket.gethostname()}: it has to be on every host."
    if isinstance(error, FileNotFoundError):
        return f"there is no program {start['argv'][0]!r} on host {socket.gethostname()}. Check its name, and PATH."
    return f"{start['argv'][0]!r} can't be started on host {socket.gethostname()}: {error}."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
