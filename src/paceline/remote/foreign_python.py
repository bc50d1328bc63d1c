"""Ask a Python that has nothing of Paceline: a program goes to it as text, with JSON in it, and marked JSON comes back.

    one answer    `words`, and `program` as standard input; `answer_in` finds the answer in what came
    a stream      `bootstrap_words`; `stream_program` first, then what both sides like: how an agent is started

The program is the text of one module or several, on the standard library alone, which need no main part: a call of one of their
functions is put behind it. Nothing that lies in the folder where it starts is imported.
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

#: Before the line that counts: a login shell greets, and a module that is imported may print as it likes.
MARK = "PACELINE-ANSWERS "

# Of Python 3.6. Threads that still wait for a network are not waited for.
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
    """The command line of a Python that runs the `program` of its standard input. what: for who looks at processes.

    installed: with what is installed beside it; otherwise the standard library alone.
    """
    return [python, *(() if installed else ("-I", "-S")), "-", what]


def program(source: str, function: str, *given: Any, above: Sequence[str] = (), ends_at_once: bool = True) -> bytes:
    """The text of a file of ours that calls its `function` and prints the dict that it returns; nothing for None.

    source: the file's path. given: the arguments, as JSON. above: files whose texts it needs before its own. ends_at_once:
    without what a library has registered for the end.
    """
    last = _LAST.format(function=function, given=json.dumps(given), mark=MARK, ends_at_once=ends_at_once)
    return b"\n".join(Path(file).read_bytes() for file in (*above, source)) + last.encode()


def answer_in(output: bytes) -> dict[str, Any] | None:
    """What the program answered, among whatever else was printed; None for nothing."""
    for line in reversed(output.decode(errors="replace").splitlines()):
        if line.startswith(MARK):
            found = json.loads(line[len(MARK) :])
            return found if isinstance(found, dict) else {}
    return None


def bootstrap_words(python: str = "python3") -> tuple[str, ...]:
    """The command line of a Python that runs the `stream_program` that comes first. `shlex.join` of it passes through any
    shell.
    """
    # Without what is installed there: it has no use for it, and a large environment takes its time to be found.
    return (python, "-S", "-c", "import sys;exec(sys.stdin.buffer.readline())")


def stream_program(*sources: str, last: str) -> bytes:
    """The texts of these files, one after the other, then `last`; and before them the line that reads them. Only the first may
    have imports from `__future__`.
    """
    text = "\n".join([*(Path(source).read_text(encoding="utf-8") for source in sources), last, ""]).encode()
    line = "import sys;sys.path[:]=[p for p in sys.path if p];"
    return f"{line}exec(compile(sys.stdin.buffer.read({len(text)}),'paceline','exec'))\n".encode() + text


def library_files(library_dir: Path) -> dict[str, Path]:
    """Name in an archive, "paceline/errors.py" -> file, in order of name; without what Python makes of them."""
    top = Path(os.path.realpath(library_dir / "paceline"))
    files = (path for path in sorted(top.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {f"paceline/{path.relative_to(top).as_posix()}": path for path in files}


def library_digest(library_dir: Path) -> str:
    """The hash of the library as it was when this process first asked: all nodes of a run have the same, though another
    version may be installed here while it runs.
    """
    with _one_at_a_time:  # the nodes' threads ask at the same time
        return _digest(library_dir)


@functools.cache
def _digest(library_dir: Path) -> str:
    found = boot.digest_in(str(library_dir))
    assert found, f"no library in {library_dir}"
    return found


def packed_library(library_dir: Path) -> bytes:
    """A zip archive of `<library_dir>/paceline`: the same bytes for the same files.

    Ray takes nothing else, and a node unpacks it in a fifth of the time of a tar.gz, which is a quarter smaller.
    """
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
