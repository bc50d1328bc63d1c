"""Write a worker's reports for the supervisor: on its start, its end, and the exception that ended it."""

from __future__ import annotations

import os
import sys
import time

#: Suffix of a file that only reserves disk space for a report. The rest of the file's name is the name of that report.
HELD = ".held"
#: Bytes to reserve: one block of most file systems. Even a shorter report occupies a whole block.
_HELD_BYTES = 4096


#: The worker's rank. It is stored when the worker starts, because the script may change the environment later.
_rank: str | None = None


def started() -> None:
    """Write `start_<rank>.json` with the worker's pid."""
    global _rank
    _rank = os.environ["PACELINE_RANK"]
    hold_space(f"error_{_rank}.json")
    host = os.uname().nodename
    value: dict[str, object] = {"pid": os.getpid(), "host": host, "time": time.time()}
    # For a plain host name, Python's repr with double quotes is valid JSON. Importing json would take longer than this function.
    is_plain = host.isascii() and host.replace("-", "").replace(".", "").isalnum()
    write(f"start_{os.environ['PACELINE_RANK']}.json", value, str(value).replace("'", '"') if is_plain else None)


def ended(exit_code: int, peak_bytes: int = 0) -> None:
    """Write `end_<rank>.json`, from the process that waited for the script's process.

    peak_bytes: Peak memory of the script's process.
    """
    write(
        f"end_{os.environ['PACELINE_RANK']}.json",
        {"exit_code": exit_code, "time": time.time(), "peak_bytes": peak_bytes},
    )


def note_alone(library: str) -> None:
    """Write `alone_<rank>.json`: this worker has trained a model alone with `library`."""
    write(f"alone_{os.environ['PACELINE_RANK']}.json", {"library": library})


def failed(error: BaseException) -> None:
    """Write the exception that ended the script to the error file.

    The file has the path and the format that torchelastic's decorator `record` uses.
    """
    line, last, text = _texts(error)
    now = time.time()
    path = os.environ.get("TORCHELASTIC_ERROR_FILE") or f"error_{_rank or os.environ.get('PACELINE_RANK')}.json"
    write(
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
    try:
        import traceback

        shown = traceback.format_exception_only(type(error), error)
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception:
        # If a user's module has the name of a module that `traceback` imports, `traceback` fails. Report without the traceback.
        shown = [f"{type(error).__name__}: {error}"]
        text = shown[0]
    # Skip indented lines: for a syntax error, they show the position, and precede the line that names the exception.
    line = next((part for part in shown if not part.startswith(" ")), type(error).__name__)
    return _printable(line.splitlines()[0]), _printable("".join(shown).strip()), _printable(text)


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def hold_space(name: str) -> None:
    """Reserve disk space for a report of this name."""
    try:
        with open(_path(name) + HELD, "wb") as file:
            file.write(b" " * _HELD_BYTES)
    except OSError:
        pass


def write(name: str, value: dict[str, object], text: str | None = None) -> None:
    """Write a report into the attempt's folder atomically. On an error, print it.

    text: The value as JSON, if the caller has it already.
    """
    path = _path(name)
    beside = f"{path}.{os.getpid()}"
    data = (text or _json(value)).encode()
    try:
        with open(beside, "wb") as file:
            file.write(data)
        os.replace(beside, path)
    except OSError as error:
        # Ignore an error of this print, because a full disk must not keep the script from ending normally.
        try:
            print(f"paceline: {path} could not be written: {error}", file=sys.stderr)
        except OSError:
            pass
        _write_held(path, data, value)


def _write_held(path: str, data: bytes, value: dict[str, object]) -> None:
    """Write a report into the disk space that `hold_space` reserved, shortened if necessary."""
    if len(data) > _HELD_BYTES:
        data = _json({**value, "message": None, "exception": str(value.get("exception"))[:500]}).encode()
    try:
        with open(path + HELD, "r+b", buffering=0) as file:
            file.write(data.ljust(_HELD_BYTES))
        os.replace(path + HELD, path)
    except OSError:
        pass


def _json(value: dict[str, object]) -> str:
    # json is imported only now. The script's folder may be first on sys.path and contain a json.py, which must not be loaded.
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
