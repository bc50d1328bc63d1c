"""Run a file or a module as the main module, as the interpreter does, or become another program."""

from __future__ import annotations

import builtins
import io
import os
import sys
import time
from types import CodeType, ModuleType, TracebackType

from paceline.worker import report

# Don't import typing: it takes longer to load than everything else before the script's first line.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import NoReturn

_GLOO_S = 0.05
#: Whether PYTHONSAFEPATH is set, which keeps the script's folder off sys.path. Python 3.10 has no such flag.
_IS_SAFE_PATH = getattr(sys.flags, "safe_path", False)


def run(path: str, arguments: list[str], *, is_module: bool = False) -> None:
    """Run a file as `__main__`, or a module as `python -m` does.

    If the script raises an exception, report it, print it without Paceline's frames, and exit with Python's exit code.
    """
    worker = os.getpid()
    # Keep a reference to the module that runs now, because the script's module replaces it in sys.modules.
    sys.modules["__paceline_main__"] = sys.modules["__main__"]
    try:
        main, code = _module(path, arguments) if is_module else _file(path, arguments)
        exec(code, main.__dict__)
        _end_well(worker)
    except SystemExit as error:
        # As in Python, sys.exit("some text") is a failure too; only None and 0 are successes.
        if error.code in (None, 0):
            _end_well(worker)
        else:
            _report(error, worker)
            _abandon_mpi()
        raise
    except BaseException as error:
        _fail(error, worker)


def _end_well(worker: int) -> None:
    # In a run of several workers, report a worker that has trained alone, without joining the other workers.
    if os.environ.get("PACELINE_WORLD_SIZE", "1") != "1" and os.getpid() == worker:
        from paceline.worker import alone

        alone.note()
    _let_gloo_finish()


def become(path: str, arguments: list[str]) -> NoReturn:
    """Replace this process by the program `path`, which then is the run's worker."""
    if "/" not in path and not os.path.isfile(path):
        _become_one_on_path(path, arguments)
    # exec keeps the pid, so the parent that waits for this worker gets the program's exit code.
    program = os.path.abspath(path)
    try:
        os.execv(program, [program, *arguments])
    except OSError as error:
        with open(program, "rb") as file:
            first = file.readline(200)
        by = f" by {first[2:].strip().decode(errors='replace')}" if first.startswith(b"#!") else ""
        print(f"{path} can't be run{by}: {error.strerror}.", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)  # a shell's codes: not found, not executable


def _become_one_on_path(name: str, arguments: list[str]) -> NoReturn:
    try:
        os.execvp(name, [name, *arguments])
    except FileNotFoundError:
        places = f"on the PATH of {os.uname().nodename}, nor a file of that name in the source folder"
        say = f"there is no program {name!r} {places}. If it is a script, write its whole name."
    except OSError as error:
        say = f"{name} can't be run: {error.strerror}."
    print(say, file=sys.stderr, flush=True)
    os._exit(127 if say.startswith("there") else 126)


def _file(path: str, arguments: list[str]) -> tuple[ModuleType, CodeType]:
    """Return a file's `__main__` module, already in sys.modules, and its code."""
    # Keep `..` in the path, as Python does.
    absolute = os.path.join(os.getcwd(), path)
    sys.argv = [path, *arguments]
    if not _IS_SAFE_PATH:
        # Resolve links, as `python script.py` does.
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    sys.modules["__main__"] = main = _main_module(absolute)
    # Open the file by io.open_code, as importlib does, so that audit hooks see it.
    with io.open_code(absolute) as file:
        return main, compile(file.read(), absolute, "exec", dont_inherit=True)


def _module(name: str, arguments: list[str]) -> tuple[ModuleType, CodeType]:
    """Return the `__main__` module of `python -m name`, and its code.

    As in Python, a package's `__main__` is run, the working directory comes first on the path, and sys.argv[0] is the module's
    file: https://docs.python.org/3/using/cmdline.html#cmdoption-m
    """
    sys.argv = ["-m", *arguments]
    if not _IS_SAFE_PATH:
        sys.path.insert(0, os.getcwd())
    spec = _found(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _found(f"{name}.__main__")
        if spec is None:
            raise ImportError(f"{name} is a package without a __main__ module, and can't be run by -m", name=name)
    if spec is None:
        raise ModuleNotFoundError(f"no module {name!r} in the source folder or in the environment", name=name)
    code = getattr(spec.loader, "get_code", lambda name: None)(spec.name)
    if code is None:
        raise ImportError(f"{name} has no code that -m could run", name=name)
    sys.argv[0] = str(spec.origin)
    main = _main_module(str(spec.origin))
    main.__dict__.update(__spec__=spec, __package__=spec.parent, __loader__=spec.loader, __cached__=spec.cached)
    sys.modules["__main__"] = main
    return main, code


def _found(name: str) -> ModuleSpec | None:
    from importlib.util import find_spec

    try:
        return find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return None


def _let_gloo_finish() -> None:
    """Wait for Gloo's threads: one that holds a tensor at exit aborts the process."""
    # On torch 2.13 a Gloo thread may hold a tensor at exit: https://github.com/pytorch/pytorch/pull/179291
    if "torch.distributed" in sys.modules:
        time.sleep(_GLOO_S)


def _main_module(path: str) -> ModuleType:
    from importlib.machinery import SourceFileLoader

    main = ModuleType("__main__")
    main.__dict__.update(
        __file__=path,
        __builtins__=builtins,
        __loader__=SourceFileLoader("__main__", path),
        __spec__=None,
        __cached__=None,
        __annotations__={},
    )
    return main


def _abandon_mpi() -> None:
    mpi = sys.modules.get("paceline.collectives.mpi")
    if mpi is not None:
        mpi.abandon()


def _report(error: BaseException, worker: int) -> None:
    # Only the worker's own process may report an error. A child that the script has forked also calls this function.
    if os.getpid() == worker:
        report.failed(error)


def _fail(error: BaseException, worker: int) -> NoReturn:
    error.__traceback__ = without_ours(error.__traceback__)
    _report(error, worker)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception as hooks:
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(hooks), hooks, without_ours(hooks.__traceback__))
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)
    finally:
        _let_gloo_finish()
        _abandon_mpi()
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def without_ours(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback without Paceline's frames before the script's first frame.

    Return None if all frames are Paceline's.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    ours = tuple(os.path.join(package, folder, "") for folder in ("worker", "functions", "sessions"))
    while traceback is not None and os.path.abspath(traceback.tb_frame.f_code.co_filename).startswith(ours):
        traceback = traceback.tb_next
    return traceback
