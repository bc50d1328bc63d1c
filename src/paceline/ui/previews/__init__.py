"""Previews of files, made in a process of its own with limits of time and memory.

Files come from scripts and other machines: an archive may unpack to a terabyte, a regular expression of a syntax highlighter may
take for years. All formats are read in that process, so that no file can stop or fill the server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Literal, TypedDict

#: Limits of the process that reads a file. CPU seconds also end a process whose parent has died.
LIMIT_S, LIMIT_BYTES = 15, 4 << 30
#: Most bytes that a preview reads of a text, and of a file that makes sense only as a whole.
TEXT_BYTES, WHOLE_BYTES = 1 << 18, 1 << 24
#: Most rows, columns and characters in a cell of a table.
ROWS, COLUMNS, CELL = 200, 60, 300
#: Previews that are made at the same time.
_AT_ONCE = threading.Semaphore(4)


class PreviewBlock(TypedDict, total=False):
    """A part of a preview.

    text: for "text". html: for "html"; escaped by its maker. columns, rows: for "table". source: of a "picture", an address with
    its data. output: of a "frame", the number of a notebook's HTML output.
    """

    kind: Literal["text", "html", "table", "picture", "frame"]
    title: str
    text: str
    html: str
    columns: list[str]
    rows: list[list[str]]
    source: str
    output: int


class FilePreview(TypedDict):
    """The blocks of a preview, and notes about missing parts."""

    blocks: list[PreviewBlock]
    notes: list[str]


def preview(file: int, name: str, output: int | None = None) -> FilePreview:
    """Return the preview of an open file.

    Args:
        file: A descriptor at the file's start.
        name: The file's name, whose ending tells the format.
        output: Of a notebook, return only this HTML output.
    """
    words = [sys.executable, "-m", "paceline.ui.previews.reader", name, *([] if output is None else [str(output)])]
    # Modules must not be found in the current folder, which may be that of a script.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with _AT_ONCE:
        try:
            done = subprocess.run(
                words, cwd="/", env=environment, stdin=file, capture_output=True, timeout=LIMIT_S, check=False
            )
            found: FilePreview = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            return _failed(f"A preview may take at most {LIMIT_S} s, and this file takes longer.")
        except ValueError:
            return _failed(f"A preview may use at most {LIMIT_BYTES >> 30} GiB of memory, and this file needs more.")
    return found


def _failed(reason: str) -> FilePreview:
    return {"blocks": [], "notes": [f"{reason} Download the file instead."]}
