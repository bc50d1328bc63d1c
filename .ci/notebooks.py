"""Makes the tutorials' notebooks from their pages: `python .ci/notebooks.py` writes docs/tutorials/*.ipynb.

A page is the one source. Its text and its console blocks become text of the notebook, each Python block a cell. A block whose
first line names a file, as in `# digits/train.py`, becomes a cell that writes this file; a text block right below a Python
block is what the cell prints.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

TUTORIALS = Path(__file__).resolve().parents[1] / "docs" / "tutorials"

#: A Python block, and what it prints where that stands right below it.
_CODE = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
#: The line of a page that leads to its own notebook.
_OWN_LINK = re.compile(r"^.*\]\([\w.-]+\.ipynb\).*\n", re.MULTILINE)
_FILE = re.compile(r"# ([\w/]+\.py)\n")


def file_of(code: str) -> tuple[str, str] | None:
    """Name and content of the file that a block is; None for a block that is run."""
    named = _FILE.match(code)
    return (named[1], code[named.end() :]) if named else None


def cells(page: str) -> list[dict[str, Any]]:
    """The notebook's cells of a page's text, in order."""
    found: list[dict[str, Any]] = []
    page = _OWN_LINK.sub("", page)
    end = 0
    for match in _CODE.finditer(page):
        _add_text(found, page[end : match.start()])
        end = match.end()
        file = file_of(match[1])
        source = f"%%writefile {file[0]}\n{file[1]}" if file else match[1]
        printed = [{"name": "stdout", "output_type": "stream", "text": _lines(match[2])}] if match[2] else []
        found.append(
            {
                "cell_type": "code",
                "execution_count": None,
                "id": f"cell-{len(found)}",
                "metadata": {},
                "outputs": printed,
                "source": _lines(source.rstrip("\n")),
            }
        )
    _add_text(found, page[end:])
    return found


def notebook(page: str) -> str:
    """The page as the text of an .ipynb file."""
    content = {
        "cells": cells(page),
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def pages() -> list[Path]:
    """The tutorials, in each language."""
    return sorted(TUTORIALS.glob("[0-9]*.md"))


def _add_text(found: list[dict[str, Any]], text: str) -> None:
    if text.strip():
        source = _lines(text.strip("\n"))
        found.append({"cell_type": "markdown", "id": f"cell-{len(found)}", "metadata": {}, "source": source})


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    for path in pages():
        path.with_suffix(".ipynb").write_text(notebook(path.read_text()))
