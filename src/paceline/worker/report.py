"""The reports that a worker writes about itself: that it has started, and the exception that ended it."""

from __future__ import annotations

import os
import sys
import time

#: Ends the name of a file that holds the space for another.
HELD = ".held"
#: A block of most file systems, which a smaller report would take as well.
_HELD_BYTES = 4096


#: Of the worker that has said that it started: a script may change the environment.
_rank: str | None = None


def started() -> None:
    """Say that this rank's process is there, and which one it is."""
    global _rank
    _rank = os.environ["PACELINE_RANK"]
    hold_space(f"error_{_rank}.json")
    host = os.uname().nodename
    value: dict[str, object] = {"pid": os.getpid(), "host": host, "time": time.time()}
    # Numbers and words look in Python as in JSON, and to load json would take longer than all else that is done here.
    is_plain = host.isascii() and host.replace("-", "").replace(".", "").isalnum()
    _write(f"start_{os.environ['PACELINE_RANK']}.json", value, str(value).replace("'", '"') if is_plain else None)


def ended(exit_code: int, peak_bytes: int = 0) -> None:
    """Say how the script's process ended; written by the process that waited for it. peak_bytes: its memory at most."""
    _write(
        f"end_{os.environ['PACELINE_RANK']}.json",
        {"exit_code": exit_code, "time": time.time(), "peak_bytes": peak_bytes},
    )


def note_alone(library: str) -> None:
    """Say that this worker has trained a model with `library`, and no other has taken part in it."""
    _write(f"alone_{os.environ['PACELINE_RANK']}.json", {"library": library})


def failed(error: BaseException) -> None:
    """Write down the exception, at the moment it leaves the script: long before the process has ended, perhaps.

    In the shape of torchelastic's error files, where its `record` decorator would put it too.
    """
    line, last, text = _texts(error)
    now = time.time()
    path = os.environ.get("TORCHELASTIC_ERROR_FILE") or f"error_{_rank or os.environ.get('PACELINE_RANK')}.json"
    _write(
        path,
        {
            "message": {"message": last, "extraInfo": {"py_callstack": text, "timestamp": str(int(now))}},
            "exception": line,
            "type": type(error).__name__,
            "exit_code": _exit_code(error),
            "is_memory": isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError",
            "time": now,
        },
    )


def _texts(error: BaseException) -> tuple[str, str, str]:
    """The exception's own line ("ValueError: bad batch"), all that Python says of it, and that with the traceback."""
    try:
        import traceback

        shown = traceback.format_exception_only(type(error), error)
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception:
        # A module of the user's stands in the way of one that traceback needs; what is left is better than nothing.
        shown = [f"{type(error).__name__}: {error}"]
        text = shown[0]
    # A syntax error's place stands before its line, indented; notes and further lines of the message stand after it.
    line = next((part for part in shown if not part.startswith(" ")), type(error).__name__)
    return _printable(line.splitlines()[0]), _printable("".join(shown).strip()), _printable(text)


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _exit_code(error: BaseException) -> int:
    """The code that Python ends the process with."""
    if isinstance(error, SystemExit):
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def hold_space(name: str) -> None:
    """Take the space of a report now, so that it can be written when the disk is full. The run's end gives it back."""
    try:
        with open(_path(name) + HELD, "wb") as file:
            file.write(b" " * _HELD_BYTES)
    except OSError:
        pass


def _write(name: str, value: dict[str, object], text: str | None = None) -> None:
    """Write a report into the attempt's folder, whole or not at all. text: the value as JSON, where that is known."""
    path = _path(name)
    beside = f"{path}.{os.getpid()}"
    data = (text or _json(value)).encode()
    try:
        with open(beside, "wb") as file:
            file.write(data)
        os.replace(beside, path)
    except OSError as error:
        # A full disk must not keep the script from its own end.
        try:
            print(f"paceline: {path} could not be written: {error}", file=sys.stderr)
        except OSError:
            pass
        _write_held(path, data, value)


def _write_held(path: str, data: bytes, value: dict[str, object]) -> None:
    """Write into the space that is held: no new block is asked for. A traceback that is too long for it is left out.

    A file system that copies on write (btrfs, ZFS) asks for one all the same, and may refuse it.
    """
    if len(data) > _HELD_BYTES:
        data = _json({**value, "message": None, "exception": str(value.get("exception"))[:500]}).encode()
    try:
        with open(path + HELD, "r+b", buffering=0) as file:
            file.write(data.ljust(_HELD_BYTES))
        os.replace(path + HELD, path)
    except OSError:
        pass


def _json(value: dict[str, object]) -> str:
    """The value as JSON, by the standard library's module, whatever the script has under its name."""
    # It is loaded no earlier than this, so the script's folder may be first on the path, and a json.py of its own loaded.
    path, theirs = sys.path[:], {name: sys.modules.pop(name) for name in _json_modules()}
    sys.path[:] = [os.path.dirname(os.__file__)]
    try:
        import json

        return json.dumps(value)
    finally:
        sys.path[:] = path
        for name in _json_modules():
            del sys.modules[name]
        sys.modules.update(theirs)


def _json_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "json"]


def _path(name: str) -> str:
    return os.path.join(os.environ["PACELINE_RUN_DIR"], "attempts", os.environ["PACELINE_ATTEMPT"], name)
