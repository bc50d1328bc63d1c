"""Programs that start with torch, or TensorFlow, already loaded, which takes a processor two to five seconds in each of them.

    Warm(rank) ── starts once ──> this file as a program: loads torch, waits
    start(argv) ── argv, variables, output ──> it forks; the child runs the script as `python script` would
    below(mpirun) ── each rank is this file again: it has its script run by the program of its rank, and ends as that does
    tests.warm_python ── a `python` that has the workers of runs forked from such a program

Two such programs for most kinds, one for even and one for odd ranks: neighbours have other hash seeds than one another, as
they have when each is started by itself, so that an order which depends on them is found.

TensorFlow is loaded and no more: it makes its threads when something is first computed, which each child does for itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.put_away import PutAway

TORCH = "torch"
#: For what looks at which of torch's modules a script has loaded itself.
PLAIN_TORCH = "torch and no more"
KERAS_ON_TORCH = "keras on torch"
TENSORFLOW = "tensorflow"
OLDER_KERAS = "tf_keras"
#: For the tests of such programs themselves, whatever they load.
NUMPY = "numpy alone"
_OF_TORCH = (
    *("torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
    *("torch.distributed.checkpoint.state_dict", "torch.nn.parallel", "torch.optim", "torch.utils.data"),
    # What the first step of an optimizer loads.
    "torch._dynamo",
)
#: Kind of program -> what it loads. TensorFlow loads Keras 3 with itself, unless it is to take tf_keras.
_LOADED = {
    TORCH: _OF_TORCH,
    PLAIN_TORCH: ("torch", "torch._dynamo"),
    KERAS_ON_TORCH: ("torch", "torch.distributed", "torch._dynamo", "keras", "sklearn.datasets"),
    TENSORFLOW: ("tensorflow", "keras", "sklearn.datasets"),
    OLDER_KERAS: ("tensorflow", "tf_keras", "sklearn.datasets"),
    NUMPY: ("numpy",),
}
#: Of these one is enough: what may depend on an order in Paceline's code for Keras runs with TensorFlow as well.
_ONE_SEED = {PLAIN_TORCH, KERAS_ON_TORCH, OLDER_KERAS}
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
#: Kind of program -> the variables that count when this is loaded. What it starts has those that it is given.
_VARIABLES = {
    TORCH: {},
    PLAIN_TORCH: {},
    KERAS_ON_TORCH: {"KERAS_BACKEND": "torch"},
    TENSORFLOW: {"KERAS_BACKEND": "tensorflow", "TF_USE_LEGACY_KERAS": "0"} | _QUIET,
    OLDER_KERAS: {"TF_USE_LEGACY_KERAS": "1"} | _QUIET,
    NUMPY: {},
}
#: Of what is loaded, what a script imports anew and others in its process wait for.
_PUT_AWAY = ("torch", "tensorflow", "keras", "tf_keras", "tensorboard")


class Process:
    """A program under way. It ends with this object, or with this process, at the latest."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._code: int | None = None

    @property
    def has_ended(self) -> bool:
        try:
            self.wait(0.0)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait(self, timeout_s: float | None) -> int:
        """Its exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it has not ended by then.
        """
        if self._code is None:
            self._connection.settimeout(timeout_s)
            try:
                told = self._connection.recv(64)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("a warm program", timeout_s or 0.0) from None
            assert told, "the program that started it has ended"
            self._code = int(told)
            self._connection.close()
        return self._code

    def kill(self) -> None:
        """End it, if it has not ended, and wait until it has. Harmless the second time."""
        if self._code is None:
            self._connection.shutdown(socket.SHUT_WR)
            self.wait(60)


class Warm:
    """A Python that has torch loaded, or what its kind says, and starts programs. also: modules that it loads besides."""

    def __init__(self, environment: dict[str, str], kind: str = TORCH, *also: str) -> None:
        # Not in a test's folder: the path of a socket may have 107 bytes.
        self._folder = tempfile.TemporaryDirectory(prefix="pl-warm-", dir="/tmp")
        self.path = os.path.join(self._folder.name, "socket")
        # It ends when its standard input does, and so with this process, however that ends.
        self._process = subprocess.Popen(
            [sys.executable, __file__, self.path, kind, *also],
            stdin=subprocess.PIPE,
            env=environment | _VARIABLES[kind],
            cwd="/",
        )

    def start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        directory: Path | None = None,
        errors: int | None = None,
    ) -> Process:
        """Run a script with these arguments. output: a descriptor, for all that it prints; errors: for its standard error.

        directory: in which it runs, this process's own by default.
        """
        self.wait()
        directory = directory or Path.cwd()
        errors = output if errors is None else errors
        return Process(_ask(self.path, argv, environment, str(directory), output, errors))

    def wait(self) -> None:
        """Return once it takes programs to start."""
        while not os.path.exists(self.path):
            assert self._process.poll() is None, "the program that loads it has ended"
            time.sleep(0.02)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_there(self) -> bool:
        return self._process.poll() is None

    def close(self) -> int:
        """Its exit code, once it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.wait()
        self._folder.cleanup()
        return code


def _ask(
    path: str, argv: Sequence[str], environment: Mapping[str, str], directory: str, output: int, errors: int
) -> socket.socket:
    """The connection over which the program at this socket, asked to run a script, tells its end."""
    told = {"argv": list(argv), "environment": dict(environment), "directory": directory}
    with contextlib.ExitStack() as on_failure:
        connection = on_failure.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connection.connect(path)
        with tempfile.TemporaryFile() as file:
            # By a file, for a packet has a largest size.
            file.write(json.dumps(told).encode())
            file.flush()
            socket.send_fds(connection, [b"start"], [file.fileno(), output, errors])
        on_failure.pop_all()
    return connection


def below_mpirun(ranks: int, *command: str, kind: str = TORCH, also: str | None = None) -> list[str]:
    """The words by which mpirun, or horovodrun, starts a rank that runs a script with torch, or what the kind says, loaded.

    Without it they would be `python *command`.
    """
    started = [warm(rank, kind, also) for rank in range(ranks)]
    for one in started:
        one.wait()
    # Without the packages: it uses none.
    return [sys.executable, "-S", __file__, "rank", json.dumps([one.path for one in started]), *command]


def run_alone(
    *command: str, loaded: str, environment: Mapping[str, str], timeout_s: float = 2700
) -> subprocess.CompletedProcess[str]:
    """What `python *command` has printed and returned, in a process that has this loaded already.

    Raises:
        subprocess.TimeoutExpired: it has not ended by then, and is killed.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = warm(0, loaded).start(command, environment, output.fileno(), errors=errors.fileno())
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess(command, code, *texts)


def be_a_rank(paths: str, *argv: str) -> None:
    """Have the script run in this rank's place, and end as it does; it ends with this process."""
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["HOROVOD_RANK"]
    path = json.loads(paths)[int(rank)]
    code = Process(_ask(path, argv, os.environ, os.getcwd(), 1, 2)).wait(None)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


_started: dict[tuple[int, str, str | None], Warm] = {}
#: Worlds may be started in several threads at once.
_starting = threading.Lock()


def warm(rank: int, kind: str = TORCH, also: str | None = None) -> Warm:
    """The program that has this loaded for this rank, and this module too. It gives its hash seed to what it starts."""
    # Not for this file as a program, which knows nothing of the other tests.
    from tests.ranks import clean_environment

    with _starting:
        place = 0 if kind in _ONE_SEED else rank % 2, kind, also
        if place in _started and not _started[place].is_there:
            # A test that kills at random may hit it; those after it are not to fail for that.
            print(f"the program that has {kind} loaded ended with {_started.pop(place).close()}", file=sys.stderr)
        if place not in _started:
            _started[place] = Warm(clean_environment(), kind, *([also] if also else []))
        return _started[place]


def close_all() -> None:
    """End those that `warm` has started."""
    for started in _started.values():
        started.close()
    _started.clear()


def serve(path: str) -> dict[str, Any]:
    """Take programs to start until standard input ends. Returns in each child, with what it was told."""
    running: dict[int, tuple[int, socket.socket]] = {}  # descriptor of the connection -> pid, connection
    # A child that ends writes into this pipe; the handler is there because an ignored signal would not.
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Under its name only when it listens: whoever sees it may connect.
    listener.bind(f"{path}~")
    listener.listen(64)
    os.rename(f"{path}~", path)
    try:
        while True:
            ready, _, _ = select.select([0, woken, listener, *running], [], [])
            if 0 in ready:
                sys.exit()
            for fd in set(ready) & set(running):
                # Whoever has started it wants its end.
                kill(running[fd][0])
            if woken in ready:
                os.read(woken, 4096)
            for fd, (pid, connection) in list(running.items()):
                ended, status = os.waitpid(pid, 0 if fd in ready else os.WNOHANG)
                if ended:
                    del running[fd]
                    # Nobody hears it where whoever has started it is gone.
                    with connection, contextlib.suppress(ConnectionError):
                        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            if listener in ready:
                connection, _ = listener.accept()
                _, given, _, _ = socket.recv_fds(connection, 64, 3)
                if not given:
                    # Whoever connected was killed before it asked, as mpirun kills the ranks that are left.
                    connection.close()
                    continue
                file, output, errors = given
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    with os.fdopen(file, "rb") as told:
                        told.seek(0)
                        found: dict[str, Any] = json.load(told)
                    os.dup2(output, 1)
                    os.dup2(errors, 2)
                    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                    if "python" in found:
                        # Whoever asks passes signals on.
                        os.setpgid(0, 0)
                        connection.send(str(os.getpid()).encode())
                    others = [one for _, one in running.values()]
                    for one in (*others, connection, listener):
                        one.close()
                    for fd in (output, errors, woken, wake):
                        os.close(fd)
                    # Those of the parent are none of its.
                    running.clear()
                    return found
                os.close(file)
                os.close(output)
                os.close(errors)
                running[connection.fileno()] = (pid, connection)
    finally:
        for pid, _ in running.values():
            kill(pid)
            os.waitpid(pid, 0)


def kill(pid: int) -> None:
    """End a child, and with one that leads a group, those that it has started."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _run(told: dict[str, Any], loaded: PutAway) -> None:
    """As the interpreter itself would run a script."""
    import random
    import runpy

    import numpy

    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["directory"])
    # The folder for temporary files is the child's own, by its variables.
    tempfile.tempdir = None
    sys.argv = told["argv"]
    if python := told.get("python"):
        # All is as in a Python that has just started, of this path.
        sys.executable = python
        loaded.put_away(_PUT_AWAY)
        sys.stdout.reconfigure(write_through=bool(os.environ.get("PYTHONUNBUFFERED")))  # type: ignore[union-attr]
    path = os.environ.get("PYTHONPATH")
    sys.path[:1] = [str(Path(sys.argv[0]).parent.absolute()), *(path.split(os.pathsep) if path else ())]
    # Each process has its own, unless it asks for a seed.
    random.seed()
    numpy.random.seed()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__" and sys.argv[1] == "rank":
    be_a_rank(*sys.argv[2:])
elif __name__ == "__main__":
    import gc
    import warnings

    # In the place of which a child has the folder of its script.
    sys.path[0] = str(Path(__file__).parents[1])
    from tests.put_away import PutAway

    _away = PutAway()
    with warnings.catch_warnings():
        # As for a script: the filters are those of the interpreter, and the script sets its own.
        warnings.simplefilter("ignore")
        for name in (*_LOADED[sys.argv[2]], *sys.argv[3:]):
            _away.load(name)
    # What is loaded stays: children's collections pass it over, which would touch, and so copy, all its pages.
    gc.collect()
    gc.freeze()
    _run(serve(sys.argv[1]), _away)
