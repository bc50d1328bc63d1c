"""The Python of a file, or of a notebook cell by cell. What IPython adds is left out, and lines keep their numbers."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

#: Magics whose cells are Python, and that which writes a script.
_PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%prun", "%%python", "%%python3")
_WRITES = re.compile(r"%%(?:writefile|file)\b.*\.py\s*$")
#: A line of IPython's: its indentation, and the name that gets the result of a command.
_LINE = re.compile(r"(\s*)(?:(\w[\w, ]*=)\s*)?(?:[%!?].*|[\w.]+\?{1,2}\s*)$")


def programs(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (lines before it, text) of each part that is parsed by itself: of a notebook its code cells, else the file.

    A file that can't be read, or a notebook of another language, has none.
    """
    try:
        text = file.read_text(encoding="utf-8-sig", errors="replace")
        if file.suffix != ".ipynb":
            yield 0, text
            return
        book = json.loads(text)
        kernel = book.get("metadata", {}).get("kernelspec", {}).get("language", "python")
        cells = ["".join(cell.get("source", [])) for cell in book.get("cells", []) if cell.get("cell_type") == "code"]
    except (OSError, ValueError, AttributeError, TypeError):
        return
    before = 0
    for cell in cells if "python" in str(kernel).lower() else ():
        yield before, cell
        before += len(cell.splitlines())


def writes_script(text: str) -> bool:
    """Return whether a cell is a script that is written to a file, which has none of the notebook's variables."""
    return _WRITES.match(text.strip().partition("\n")[0]) is not None


def parsed(text: str) -> ast.Module:
    """Parse a program or a cell.

    Raises:
        SyntaxError: It is no Python 3.
    """
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if first.startswith("%%"):
        if not first.startswith(_PYTHON_CELLS) and not _WRITES.match(first):
            return ast.Module(body=[], type_ignores=[])
        text = text.replace(first, "", 1)
    text = textwrap.dedent(text)
    try:
        return _tree(text)
    except SyntaxError:
        return _tree(_plain(text))


def _tree(text: str) -> ast.Module:
    found = compile(text, "<cell>", "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    assert isinstance(found, ast.Module)
    return found


def _plain(text: str) -> str:
    """Return the text with `pass`, or an assignment of None, in the place of each line that only IPython knows."""
    # A first line that is indented, as IPython takes it though later lines are not.
    lines = text.splitlines()
    if lines and (indent := len(lines[0]) - len(lines[0].lstrip())):
        lines = [line[indent:] if not line[:indent].strip() else line for line in lines]
    kept: list[str] = []
    goes_on = False
    for line in lines:
        match = _LINE.match(line)
        if goes_on:
            kept.append("")
        elif match is not None:
            kept.append(f"{match[1]}{f'{match[2]} None' if match[2] else 'pass'}")
        else:
            kept.append(line)
        goes_on = (goes_on or match is not None) and line.rstrip().endswith("\\")
    return "\n".join(kept)
