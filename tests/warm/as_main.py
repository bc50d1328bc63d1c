"""Runs a script in a process that has been forked for it, as the interpreter would."""

from __future__ import annotations

import atexit
import builtins
import faulthandler
import io
import os
import signal
import sys
import tempfile
import threading
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

#: This list keeps the globals of a script alive after its end, as in plain Python.
_kept: list[ModuleType] = []


def run(request: dict[str, Any]) -> None:
    """Run the script of a request (`hand_over.ask`). Return, or raise SystemExit, if the interpreter shall end by itself."""
    words: list[str] = request["words"]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    os.umask(request["umask"])
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(  # type: ignore[misc]
        io.BufferedReader(io.FileIO(0, closefd=False)), encoding=sys.stdin.encoding
    )
    sys.stdout = sys.__stdout__ = _stream(1, "strict", is_unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "backslashreplace", is_unbuffered)  # type: ignore[misc]
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.executable = request["python"]
    sys.argv = words
    sys.orig_argv = [sys.executable, *words]
    own = os.path.dirname(os.path.realpath(words[0]))
    if request["path"] is not None:
        sys.path[:] = [own, *request["path"]]
    else:
        path = os.environ.get("PYTHONPATH")
        sys.path[:1] = [own, *(path.split(os.pathsep) if path else ())]
    # The variables of the fork decide which folder it uses for temporary files.
    tempfile.tempdir = None
    main = ModuleType("__main__")
    main.__dict__.update(__file__=words[0], __builtins__=builtins, __loader__=SourceFileLoader("__main__", words[0]))
    sys.modules["__main__"] = main
    _kept.append(main)
    code = _run(words[0], main)
    if request["frees"]:
        sys.exit(code)
    _end(code)


def _run(path: str, main: ModuleType) -> Any:
    """Run the script. Return the argument for `sys.exit`."""
    try:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)
    except SystemExit as error:
        return error.code
    except BaseException as error:
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
            traceback = traceback.tb_next
        error.__traceback__ = traceback
        sys.excepthook(type(error), error, traceback)
        if isinstance(error, KeyboardInterrupt):
            _end(-signal.SIGINT)
        return 1
    return 0


def _end(code: Any) -> None:
    """End this process as the interpreter would, but without freeing the loaded objects: that would first copy them."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


def _stream(fd: int, errors: str, is_unbuffered: bool) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),  # type: ignore[arg-type]
        encoding=sys.stdout.encoding,
        errors=errors,
        line_buffering=fd == 2 or os.isatty(fd),
        write_through=is_unbuffered,
    )
