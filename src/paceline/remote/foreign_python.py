"""Run Paceline's code in a Python without Paceline, by sending modules or the whole library.

    one answer    run `words(...)` with `program(...)` as standard input; `answer_in` finds the answer in the output
    a stream      run `bootstrap_words(...)`, and send `stream_program(...)`; then send any bytes both ways (agents)

A program is the text of one or more modules that need the standard library only, followed by a call of one of their
functions. Files in its working directory are never imported.
"""

from __future__ import annotations

import functools
import io
import json
import os
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.remote.agent import boot

#: Prefix of the line with the program's answer. Login shells and imported modules may print lines without it.
MARK = "PACELINE-ANSWERS "

# These lines end each program that another Python (3.6 or later) runs. `os._exit` does not wait for threads that hang.
_LAST = """

import json as _json, os as _os, sys as _sys
_sys.path[:] = [folder for folder in _sys.path if folder not in ("", _os.getcwd())]
_answer = {function}(*_json.loads({given!r}))
if _answer is not None:
    _sys.stdout.write("\\n{mark}" + _json.dumps(_answer) + "\\n")
_sys.stdout.flush()
if {ends_at_once}:
    _os._exit(0)
"""

_one_at_a_time = threading.Lock()


def words(python: str, what: str, *, installed: bool = False) -> list[str]:
    """Return the command line of an interpreter that runs a `program` from standard input.

    what: An argument that is not used. Tools such as `ps` show it, so that users recognize the process.
    installed: Whether the program may import installed packages besides the standard library.
    """
    return [python, *(() if installed else ("-I", "-S")), "-", what]


def program(source: str, function: str, *given: Any, above: Sequence[str] = (), ends_at_once: bool = True) -> bytes:
    """Return the text of a program that calls a function and prints the result.

    source: The path of the file that defines `function`.
    given: The arguments of the function, which are sent as JSON.
    above: Paths of files whose text precedes the text of `source`.
    ends_at_once: Whether the program exits without running the exit handlers of libraries.
    """
    last = _LAST.format(function=function, given=json.dumps(given), mark=MARK, ends_at_once=ends_at_once)
    return b"\n".join(Path(file).read_bytes() for file in (*above, source)) + last.encode()


def answer_in(output: bytes) -> dict[str, Any] | None:
    """Return the JSON object that a `program` has printed, or None without one."""
    for line in reversed(output.decode(errors="replace").splitlines()):
        if line.startswith(MARK):
            found = json.loads(line[len(MARK) :])
            return found if isinstance(found, dict) else {}
    return None


def bootstrap_words(python: str = "python3") -> tuple[str, ...]:
    """Return the command line of an interpreter that runs a `stream_program`.

    Joined by `shlex.join`, the command line works in any shell.
    """
    # -S skips the site packages, which the program does not need. Scanning a large environment takes time.
    return (python, "-S", "-c", "import sys;exec(sys.stdin.buffer.readline())")


def stream_program(*sources: str, last: str) -> bytes:
    """Return the bytes to send to an interpreter started by `bootstrap_words`.

    The bytes are one line of code that reads the program, followed by the program.

    sources: Paths of files whose text makes up the program. Only the first file may import from `__future__`.
    last: Code that follows the files.
    """
    text = "\n".join([*(Path(source).read_text(encoding="utf-8") for source in sources), last, ""]).encode()
    line = "import sys;sys.path[:]=[p for p in sys.path if p];"
    return f"{line}exec(compile(sys.stdin.buffer.read({len(text)}),'paceline','exec'))\n".encode() + text


def library_files(library_dir: Path) -> dict[str, Path]:
    """Return {name in an archive, such as "paceline/errors.py": path} of the library's files, sorted."""
    top = Path(os.path.realpath(library_dir / "paceline"))
    files = sorted(map(Path, boot.files_of(str(top))))
    return {f"paceline/{path.relative_to(top).as_posix()}": path for path in files}


def library_digest(library_dir: Path) -> str:
    """Return the hash of the library `<library_dir>/paceline`, cached in this process.

    The cache gives all nodes of a run the same version, even if the library is updated during the run.
    """
    with _one_at_a_time:  # threads for several nodes may call this function at one time
        return _digest(library_dir)


@functools.cache
def _digest(library_dir: Path) -> str:
    found = boot.digest_in(str(library_dir))
    assert found, f"no library in {library_dir}"
    return found


def packed_library(library_dir: Path) -> bytes:
    """Return a reproducible zip archive, as Ray requires, of `<library_dir>/paceline`."""
    with _one_at_a_time:
        return _packed(library_dir, _digest(library_dir))


@functools.lru_cache(maxsize=1)
def _packed(library_dir: Path, digest: str) -> bytes:
    archived = io.BytesIO()
    with zipfile.ZipFile(archived, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in library_files(library_dir).items():
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, path.read_bytes())
    return archived.getvalue()
