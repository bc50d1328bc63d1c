"""Loads what scripts import, hides it, and forks for each script that is handed over (site/sitecustomize.py, `forked.run`).

In a child nothing seems loaded. `import torch` finds the module that is there already, with all that came with it; whoever
watches for a module (`paceline.collectives.when_loaded`) hears of it, and what is changed in it then is changed where others have
taken it from there: all as if the child had loaded it.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import select
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

#: Head -> the modules that its import has loaded, in their order.
groups: dict[str, list[str]] = {}
hidden: dict[str, Any] = {}
#: Module -> who has taken which names from it, `*` for all.
takers: dict[str, list[tuple[ModuleType, tuple[str, ...]]]] = {}


def load(heads: Sequence[str]) -> None:
    """Load the heads, each with all that it loads, and hide them with all that is not the standard library's."""
    original = builtins.__import__

    def noting(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        module = original(name, globals, locals, fromlist, level)
        # One that is not done with its own import has nothing yet that others could have changed.
        if fromlist and globals and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            taker = sys.modules.get(globals.get("__name__", ""))
            if taker is not None and getattr(module, "__name__", None):
                takers.setdefault(module.__name__, []).append((taker, tuple(fromlist)))
        return module

    builtins.__import__ = noting
    try:
        for head in heads:
            if importlib.util.find_spec(head.partition(".")[0]) is not None:
                before = set(sys.modules)
                importlib.import_module(head)
                groups[head] = [name for name in sys.modules if name not in before and not is_standard(name)]
    finally:
        builtins.__import__ = original
    for names in groups.values():
        for name in names:
            hidden[name] = sys.modules.pop(name)


def is_standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names


class Found(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is hidden."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in hidden:
            return None
        is_package = hasattr(hidden[fullname], "__path__")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        self._name, self._own = spec.name, getattr(hidden[spec.name], "__spec__", None)
        return hidden[spec.name]  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        # The import system has put its own there.
        module.__spec__ = self._own
        if self._own is not None:
            module.__loader__ = self._own.loader
        show(self._name)


def show(name: str) -> None:
    """Put what came with this module beside it; who watches for one of them hears of it."""
    group = next((group for group in groups.values() if name in group), [])
    top = name.partition(".")[0]
    with_it = group if name in groups else [one for one in group if one.partition(".")[0] == top]
    watched = {getattr(finder, "name", None) for finder in sys.meta_path}
    before = {one: dict(vars(hidden[one])) for one in with_it if one in watched}
    for one in with_it:
        if one not in sys.modules:
            if one in watched:
                importlib.import_module(one)
                for other, values in before.items():
                    pass_on(hidden[other], values)
                    before[other] = dict(vars(hidden[other]))
            else:
                sys.modules[one] = hidden[one]


def pass_on(module: ModuleType, before: dict[str, Any]) -> None:
    """Give what has changed in a module to those that have taken it from there, and to those that took it from them."""
    changed = {
        name: (before[name], value)
        for name, value in vars(module).items()
        if name in before and before[name] is not value and name[:2] != "__"
    }
    if not changed:
        return
    for taker, names in takers.get(module.__name__, ()):
        taken = {id(old): new for name, (old, new) in changed.items() if name in names or "*" in names}
        values = dict(vars(taker))
        for name, value in values.items():
            if id(value) in taken and taker is not module:
                setattr(taker, name, taken[id(value)])
        pass_on(taker, values)


def serve(path: str) -> dict[str, Any]:
    """Take scripts until standard input ends. Returns in each child, with what it was told."""
    running: dict[int, tuple[int, socket.socket]] = {}  # descriptor of the process -> pid, connection
    listener = socket.socket(socket.AF_UNIX)
    # Under its name only when it listens: whoever sees it may connect.
    listener.bind(f"{path}~")
    listener.listen(64)
    os.rename(f"{path}~", path)
    try:
        while True:
            of_connection = {connection.fileno(): pidfd for pidfd, (_, connection) in running.items()}
            ready, _, _ = select.select([0, listener, *running, *of_connection], [], [])
            if 0 in ready:
                sys.exit()
            for fd in ready:
                if fd in of_connection:
                    # Whoever has started it is gone: so are it and what it has started.
                    kill(running[of_connection[fd]][0])
            for fd in ready:
                if fd in running:
                    pid, connection = running.pop(fd)
                    os.close(fd)
                    _, status = os.waitpid(pid, 0)
                    with connection:
                        try:
                            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
                        except OSError:  # nobody hears it
                            pass
            if listener in ready:
                connection, _ = listener.accept()
                taken = take(connection)
                if taken is None:
                    connection.close()
                    continue
                told, fds = taken
                pid = os.fork()
                if pid == 0:
                    for other in (listener, connection, *(one for _, one in running.values())):
                        other.close()
                    for pidfd in running:
                        os.close(pidfd)
                    running.clear()
                    os.setpgid(0, 0)
                    put(fds, told["fds"])
                    return told
                for fd in fds:
                    os.close(fd)
                running[os.pidfd_open(pid)] = (pid, connection)
                try:
                    connection.sendall(b"%d\n" % pid)
                except OSError:
                    kill(pid)
    finally:
        for pid, _ in running.values():
            kill(pid)
            os.waitpid(pid, 0)


def take(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """What is to be run, and its descriptors; None where whoever connected has ended before it said it."""
    try:
        head, fds, _, _ = socket.recv_fds(connection, 8, 250)
        text = b""
        while head and len(text) < int(head):
            more = connection.recv(int(head) - len(text))
            if not more:
                return None
            text += more
    except ConnectionError:
        return None
    return (json.loads(text), fds) if head else None


def kill(pid: int) -> None:
    for end in (os.killpg, os.kill):
        try:
            end(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def put(fds: list[int], numbers: list[int]) -> None:
    """Give the descriptors the numbers that they have where they come from; nothing else is left open."""
    free = max(*fds, *numbers) + 1
    moved = [os.dup2(fd, free + place) for place, fd in enumerate(fds)]
    os.closerange(0, free)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def run(told: dict[str, Any]) -> None:
    """As the interpreter itself would run the script."""
    import faulthandler

    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["folder"])
    os.umask(told["umask"])
    words: list[str] = told["words"]
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(
        io.BufferedReader(io.FileIO(0, closefd=False)), encoding=sys.stdin.encoding
    )  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = stream(1, "strict", is_unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = stream(2, "backslashreplace", is_unbuffered)  # type: ignore[misc]
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.argv = words
    sys.orig_argv = [sys.executable, *words]
    path = os.environ.get("PYTHONPATH")
    sys.path[:1] = [os.path.dirname(os.path.realpath(words[0])), *(path.split(os.pathsep) if path else ())]
    # Each process has its own, unless it asks for a seed.
    if "numpy" in hidden:
        hidden["numpy"].random.seed()
    sys.meta_path.insert(0, Found())
    main = ModuleType("__main__")
    main.__dict__.update(
        __file__=words[0],
        __builtins__=builtins,
        __loader__=importlib.machinery.SourceFileLoader("__main__", words[0]),
    )
    sys.modules["__main__"] = main
    # Its globals outlive it, as those of a script do.
    hidden["__main__"] = main
    with io.open_code(words[0]) as file:
        code = compile(file.read(), words[0], "exec", dont_inherit=True)
    exec(code, main.__dict__)


def end(script: Callable[..., None], *given: Any) -> None:
    """Run it, and end this process as the interpreter would, but for freeing all that is loaded: that would first copy it."""
    import atexit
    import threading

    code = 0
    try:
        script(*given)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
            traceback = traceback.tb_next
        error.__traceback__ = traceback
        sys.excepthook(type(error), error, traceback)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for one in (sys.stdout, sys.stderr):
        one.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def stream(fd: int, errors: str, is_unbuffered: bool) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),  # type: ignore[arg-type]
        encoding=sys.stdout.encoding,
        errors=errors,
        line_buffering=fd == 2 or os.isatty(fd),
        write_through=is_unbuffered,
    )


if __name__ == "__main__":
    with warnings.catch_warnings():
        # As for a script: the filters are those of the interpreter, and the script sets its own.
        warnings.simplefilter("ignore")
        load(sys.argv[2:])
    # What is loaded stays: children's collections pass it over, which would touch, and so copy, all its pages.
    gc.collect()
    gc.freeze()
    end(run, serve(sys.argv[1]))
