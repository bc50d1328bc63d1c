"""Previews of files, made in a process of its own with limits of time and memory.

Files come from scripts and other machines: an archive may unpack to a terabyte, a regular expression of a syntax highlighter may
take for years. All formats are read in that process, so that no file can stop or fill the server.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Literal, TypedDict

from paceline.ui.children import output_of

#: Limits of the process that reads a file. CPU seconds also end a process whose parent has died.
LIMIT_S, LIMIT_BYTES = 15, 4 << 30
#: Maximum number of bytes that a preview reads of a text, and of a file that makes sense only as a whole.
TEXT_BYTES, WHOLE_BYTES = 1 << 18, 1 << 24
#: Maximum number of rows and of columns of a table, and of characters in a cell.
ROWS, COLUMNS, CELL = 200, 60, 300


class PreviewBlock(TypedDict, total=False):
    """A part of a file's preview, such as a table.

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


def preview(file: int, name: str, check_reader: Callable[[], None], output: int | None = None) -> FilePreview:
    """Return the preview of an open file.

    Args:
        file: A descriptor at the file's start.
        name: The file's name, whose ending tells the format.
        check_reader: Called repeatedly. An error of it ends the process.
        output: Of a notebook, return only this HTML output.
    """
    words = ["paceline.ui.previews.reader", name, *([] if output is None else [str(output)])]
    try:
        found: FilePreview = json.loads(output_of(words, LIMIT_S, check_reader, stdin=file))
    except subprocess.TimeoutExpired:
        return _failed(f"A preview may take at most {LIMIT_S} s, and this file takes longer.")
    except ValueError:
        return _failed(f"A preview may use at most {LIMIT_BYTES >> 30} GiB of memory, and this file needs more.")
    return found


def _failed(reason: str) -> FilePreview:
    return {"blocks": [], "notes": [f"{reason} Download the file instead."]}
