"""A warm spare: a process that has imported the modules of the first workers, and forks later workers.

    worker      `record`: appends the name of each library module that it imports to <spare>.modules
    spare       `serve`: imports these modules, listens at <spare>.socket, and forks a worker for each request
    agent, or the process that mpirun starts      `paceline.system.spare_client.ask`, `hand_over`

A fork of a process with running threads, sockets or an open GPU is broken. A module that reads a worker's rank on import would
give all workers the same rank. So a child process tries to import each package first, and the spare leaves out packages
with one of these problems. If a package shows a problem later, the spare replaces itself by a new spare without that
package. It never imports the user's own modules.

The agent or supervisor is a subreaper. So it adopts each forked worker, and reaps the worker like its own child.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import time

from paceline.system import lazy_import
from paceline.system.kept_states import KeptStates
from paceline.system.memory import memory
from paceline.system.spare_client import ask, listen, modules_of, path_here, read_request, socket_of
from paceline.worker import report

# Don't import typing: it takes longer to load than everything else before the script's first line.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import FrameType, ModuleType
    from typing import Any

#: Variable with JSON that maps each package not to preload to the reason. It is kept when this process restarts.
_SKIP_VARIABLE = "PACELINE_SPARE_SKIP"
#: Modules never to load before this process forks into workers: mpi4py connects on import, and each worker loads the others.
_NEVER = (
    *("mpi4py.MPI", "paceline.collectives.mpi", "paceline.collectives.mpi_transport", "paceline.torch_mpi"),
    *("horovod", "azureml", "paceline.worker", "paceline.compat", "__main__"),
)
#: Names of variables whose values differ between the workers of a run.
_OF_WORKER = frozenset(
    (
        *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "PACELINE_RANK", "TF_CONFIG", "JAX_PROCESS_ID"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK"),
        *("SLURM_PROCID", "SLURM_LOCALID"),
    )
)
#: Signals that this process forwards to its fork. mpirun and schedulers send them to the process that mpirun has started.
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
#: Prefixes of the names of device files that a process opens when it initialises a GPU.
_GPUS = ("/dev/nvidia-uvm", "/dev/kfd", "/dev/dri")
#: Minimum bytes of free memory. With less, this process does not wait to fork into workers: it could cause an OOM kill.
_FREE_BYTES = 1 << 30
#: Packages to load without a trial in a child process, because a trial takes as long as the import. The result is checked.
_TRUSTED = ("numpy", "paceline", "sympy", "torch", "triton")
#: Time limit in seconds of a package's trial import in a child, and the text with which the child reports success.
_TRIAL_S, _FINE = 60.0, "fine"
#: Seconds without new imports in workers before modules are loaded; seconds between polls; maximum number of excluded packages.
_STEADY_S, _LOOK_S, _MOST = 2.0, 0.25, 5
#: Lowest number for this process's file descriptors. A script may close low numbers, or rely on the lowest free one.
_FIRST_FD = 200

#: In a fork: the socket to the process that called `hand_over` and waits until this socket is closed. None in other processes.
held: socket.socket | None = None
#: The newest training states of the workers, kept in this process's memory. The next attempt continues from them.
_states = KeptStates()
_is_fork = False


def record() -> None:
    """Record local rank 0's imports, so that the node's spare imports them too."""
    path = path_here()
    if not path or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    import fcntl

    try:
        low = os.open(modules_of(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        sys.meta_path.insert(0, _Recorder(fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)))  # type: ignore[arg-type,unused-ignore]
        os.close(low)
    except OSError:  # the disk is full, or the folder was removed: the next attempt then loads all modules itself
        pass


class _Recorder:
    """A meta path finder that records the names of imported modules."""

    def __init__(self, fd: int) -> None:
        self._fd, self._pid = fd, os.getpid()
        #: The module found last. It is recorded only once it is imported, because `importlib.util.find_spec` only searches.
        self._last, self._line = "", b""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None or (spec := find(name, path, target)) is None:
                continue
            if self._last in sys.modules and os.getpid() == self._pid:
                try:
                    os.write(self._fd, self._line)
                except OSError:
                    pass
            is_file = spec.has_location and spec.origin
            self._last, self._line = (
                name if is_file else "",
                f"{name}\t{spec.origin}\n".encode(errors="surrogateescape"),
            )
            return spec  # type: ignore[no-any-return]
        return None


def hand_over(argv: list[str]) -> None:
    """Let the node's warm spare fork this worker. Exit when the forked worker ends.

    mpirun has started this process, and treats the end of this process as the worker's end. The function returns only
    in the forked worker, or if no spare can fork the worker.
    """
    path = path_here()
    if _is_fork or not path or not os.path.exists(socket_of(path)):
        return
    try:
        pid, connection = ask(path, [sys.executable, *argv], os.environ, os.getcwd(), (0, 1, 2), follow=True)
    except OSError as error:
        print(f"paceline: rank {os.environ['PACELINE_RANK']} starts cold: {error.strerror or error}", file=sys.stderr)
        return
    forward_signals(pid)
    try:
        while connection.recv(1):
            pass
    finally:
        os._exit(0)


def forward_signals(pid: int | None) -> None:
    """Forward signals to the process `pid`. With None ignore signals."""

    def forward(number: int, frame: FrameType | None) -> None:
        try:
            if pid is not None:
                os.kill(pid, number)
        except ProcessLookupError:
            pass

    for number in _FORWARDED:
        signal.signal(number, forward)


def let_go() -> None:
    global held
    if held is not None:
        held.close()
        held = None


def serve() -> list[str]:
    """Fork workers on request. Return only in the workers, with their arguments."""
    parent = os.getppid()
    path = path_here()
    why = "" if sys.platform.startswith("linux") else "it needs Linux"
    if not why and (free := memory().available) < _FREE_BYTES:
        why = f"only {free >> 20} MiB of memory are free, and it needs {_FREE_BYTES >> 20} MiB"
    if why:
        _tell(path, failed=why)
        os._exit(0)
    library = _Library(modules_of(path))
    listener: socket.socket | None = None
    while True:
        try:
            is_new = library.load(listener)
        except UnsafeImportError as unsafe:
            _start_over(unsafe, path)
        if is_new:
            # Freeze the loaded objects, because a garbage collection in a fork would write to them, and so copy shared memory.
            gc.collect()
            gc.freeze()
            listener = listener or _listen(socket_of(path))
            _tell(path, modules=len(sys.modules), seconds=round(library.seconds, 2), memory_bytes=_memory_bytes())
        if os.getppid() != parent:
            os._exit(0)
        if not select.select([listener] if listener else [], [], [], _LOOK_S)[0] or listener is None:
            continue
        connection, _ = listener.accept()
        with connection:
            worker = _answer(connection, listener)
        if worker is not None:
            return worker


class UnsafeImportError(Exception):
    """The error that the import of a package makes later forks unsafe."""

    def __init__(self, package: str, reason: str) -> None:
        super().__init__(package, reason)
        self.package, self.reason = package, reason


class _Library:
    def __init__(self, path: str) -> None:
        self._path, self._read, self._size, self._since = path, 0, 0, time.monotonic()
        self.skipped: dict[str, str] = json.loads(os.environ.get(_SKIP_VARIABLE) or "{}")
        self._here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        self.seconds = 0.0
        self._queue: list[list[str]] = []
        self._tried = {*_TRUSTED, *sys.stdlib_module_names}
        lazy_import.load_triton_before_tensorflow()

    def load(self, listener: socket.socket | None) -> bool:
        """Import modules that earlier workers have recorded. Return True after the last module.

        Return False while the list of modules grows, since workers are starting, or if `listener` gets a request.

        Raises:
            UnsafeImportError: A module has made forks unsafe.
        """
        now = time.monotonic()
        try:
            size = os.stat(self._path).st_size
        except OSError:
            return False
        if size != self._size:
            self._size, self._since = size, now
        if now - self._since < _STEADY_S or (self._size == self._read and not self._queue):
            return False
        self._queue += self._new()
        for number, (name, origin) in enumerate(self._queue):
            if listener is not None and select.select([listener], [], [], 0)[0]:
                # A worker waits for a fork of this process, so stop loading modules, and load the other modules later.
                del self._queue[:number]
                return False
            is_wanted = name not in sys.modules and self._is_wanted(name, origin) and self._is_safe(name, origin)
            if is_wanted and (reason := self._load(name, origin)) is not None:
                raise UnsafeImportError(name.partition(".")[0], reason)
        self._queue.clear()
        self.seconds += time.monotonic() - now
        return True

    def _new(self) -> Iterator[list[str]]:
        with open(self._path, errors="surrogateescape") as file:
            file.seek(self._read)
            text = file.read(self._size - self._read)
        self._read = self._size
        return (line.split("\t") for line in text.splitlines() if line.count("\t") == 1)

    def _is_wanted(self, name: str, origin: str) -> bool:
        if any(f"{name}.".startswith(f"{one}.") for one in (*_NEVER, *self.skipped)):
            return False
        # Load only installed packages, the standard library and Paceline, not the user's own modules.
        of_paceline = name.partition(".")[0] == "paceline" and origin.startswith(f"{self._here}/")
        installed = "/site-packages/" in origin or "/dist-packages/" in origin
        return of_paceline or installed or origin.startswith(f"{os.path.dirname(os.__file__)}/")

    def _is_safe(self, name: str, origin: str) -> bool:
        """Try a package's import in a child. Return whether forks stay safe."""
        package = name.partition(".")[0]
        if package in self._tried:
            return True
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            reason = self._load(name, origin)
            os.write(write, (reason or _FINE).encode())
            os._exit(0)
        os.close(write)
        is_over = select.select([read], [], [], _TRIAL_S)[0]
        told = os.read(read, 1000).decode() if is_over else "takes too long to load"
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if told == _FINE:
            self._tried.add(package)
            return True
        self._note(package, told or "crashes while it loads")
        return False

    def _note(self, package: str, reason: str) -> None:
        self.skipped[package] = reason
        os.environ[_SKIP_VARIABLE] = json.dumps(self.skipped)

    def _load(self, name: str, origin: str) -> str | None:
        refuser = _Refuser(("mpi4py.MPI", *self.skipped))
        sys.meta_path.insert(0, refuser)  # type: ignore[arg-type,unused-ignore]
        try:
            reason = _load(name, origin)
        finally:
            sys.meta_path.remove(refuser)  # type: ignore[arg-type,unused-ignore]
        # If the package has tried to import MPI or a skipped package, skip this package, too.
        return f"imports {refuser.refused}" if refuser.refused else reason


class _Refuser:
    """A meta path finder that makes imports of the modules `names` fail."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names, self.refused = names, ""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._names:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self)  # type: ignore[arg-type,unused-ignore]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self.refused = spec.name
        raise ImportError(f"{spec.name} is not imported in a warm process", name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        raise NotImplementedError


def _load(name: str, origin: str) -> str | None:
    """Import a module. Return why forks are unsafe afterwards, or None."""
    asked: set[str] = set()
    environ: Any = type(os.environ)
    getter = environ.__getitem__

    def noting(self: object, key: str) -> object:
        if key in _OF_WORKER:
            asked.add(key)
        return getter(self, key)

    environ.__getitem__ = noting
    try:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin != origin:
            return None  # a worker would load another module of this name
        importlib.import_module(name)
    except BaseException:  # ignore the error, because a worker that imports the module gets it, too
        return None
    finally:
        environ.__getitem__ = getter
    return f"reads {min(asked)} while it loads" if asked else _hazard()


def _hazard() -> str | None:
    """Return why forks of this process would be unsafe, or None."""
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # `listdir` has closed its own descriptor
        if target.startswith(_GPUS):
            return "initialises a GPU while it loads"
        if target.startswith("socket:") and int(name) != _listening:
            return "opens a socket while it loads"
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return "starts a process while it loads"
    except ChildProcessError:
        pass
    if _threads() > 1:
        # Fork a child and count threads again there: OpenBLAS's idle threads, which do no harm, end at a fork.
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return "starts a thread while it loads" if _threads() > 1 else None


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _start_over(unsafe: UnsafeImportError, path: str) -> None:
    """Restart this process so that it does not load the unsafe package."""
    skipped: dict[str, str] = json.loads(os.environ.get(_SKIP_VARIABLE) or "{}")
    skipped[unsafe.package] = unsafe.reason
    if len(skipped) > _MOST:
        _tell(path, skipped=skipped, failed=f"{unsafe.package} {unsafe.reason}")
        os._exit(0)
    os.environ[_SKIP_VARIABLE] = json.dumps(skipped)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _tell(path: str, **values: object) -> None:
    skipped: dict[str, str] = json.loads(os.environ.get(_SKIP_VARIABLE) or "{}")
    report.write(f"{os.path.basename(path)}.json", {"skipped": skipped, **values})


def _memory_bytes() -> int:
    try:
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:
        return 0
    return 1024 * sum(int(words[1]) for words in lines if words[0] in ("Private_Clean:", "Private_Dirty:"))


_listening = -1


def _listen(path: str) -> socket.socket:
    global _listening
    listener = listen(path)
    _listening = listener.fileno()
    return listener


def _answer(connection: socket.socket, listener: socket.socket) -> list[str] | None:
    """Answer a request to fork a worker, or to store or return a training state.

    Return the worker's arguments in the forked worker, and None in the spare.
    """
    connection.settimeout(2.0)
    fds: list[int] = []
    what = "fork"
    try:
        connection.sendall(b"+")
        fds, request = _request(connection)
        if "state" in request:
            what = "keep a state"
            _states.answer(connection, request, fds)
            for fd in fds:
                os.close(fd)
            return None
        pid = _fork()
    except (OSError, ValueError, KeyError, TypeError) as error:
        for fd in fds:
            os.close(fd)
        _say(connection, {"error": f"the warm process could not {what}: {error}"})
        return None
    if pid == 0:
        listener.close()
        return _take_over(request, fds, connection)
    for fd in fds:
        os.close(fd)
    if not _say(connection, {"pid": pid}):
        # The client is gone, and may have started the worker itself. So kill the fork, which would be a second worker.
        os.kill(pid, signal.SIGKILL)
    return None


def _say(connection: socket.socket, answer: dict[str, object]) -> bool:
    try:
        connection.sendall(json.dumps(answer).encode() + b"\n")
    except OSError:
        return False
    return True


def _request(connection: socket.socket) -> tuple[list[int], dict[str, Any]]:
    fds, request = read_request(connection)
    if "state" in request:
        return fds, request
    if len(fds) != 3 or not all(isinstance(word, str) for word in (*request["argv"], request["cwd"])):
        raise ValueError("the request has other types")
    return fds, {**request, "env": {str(name): str(value) for name, value in request["env"].items()}}


def _fork() -> int:
    read, write = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            child = os.fork()
        except OSError:
            os._exit(1)
        if child == 0:
            os.close(read)
            os.close(write)
            return 0
        os.write(write, str(child).encode())
        os._exit(0)
    os.close(write)
    # Reap the process in the middle. Its end makes the agent or the supervisor the parent of the fork.
    os.waitpid(middle, 0)
    told = os.read(read, 32)
    os.close(read)
    if not told:
        raise OSError("fork(2) failed")
    return int(told)


def _take_over(request: dict[str, Any], fds: list[int], connection: socket.socket) -> list[str]:
    """Turn this fork into the requested worker. Return the worker's arguments."""
    global held, _is_fork
    _is_fork = True
    _states.close()
    os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    if request["follow"]:
        held = connection.dup()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    # Seed numpy in this fork, because otherwise all forks would draw the same numbers.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    lazy_import.take_loaded()
    argv: list[str] = request["argv"]
    sys.orig_argv = argv
    return argv[2:]
