"""Ask a Python that has nothing of Paceline: a program goes to it as text, with JSON in it, and marked JSON comes back.

    one answer    `words`, and `program` as standard input; `answer_in` finds the answer in what came
    a stream      `bootstrap_words`; `stream_program` first, then what both sides like: how an agent is started

The program is the text of one module or several, on the standard library alone, which need no main part: a call of one of their
functions is put behind it. Nothing that lies in the folder where it starts is imported.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
