"""Previews of files, made in a child process with limits of time and memory.

Files come from scripts and other machines. For example, an archive may unpack to a terabyte, and syntax highlighting of
a text may take years. A child process reads all formats, so no file can block the server or fill its memory.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Literal, TypedDict

from paceline.ui.children import output_of

#: Maximum CPU seconds, and maximum bytes of memory, of the process that reads a file. The CPU limit also ends an orphan.
LIMIT_S, LIMIT_BYTES = 15, 4 << 30
#: Maximum bytes to read of a text file; maximum bytes of a file that has to be read as a whole.
TEXT_BYTES, WHOLE_BYTES = 1 << 18, 1 << 24
#: Maximum number of rows and of columns of a table, and of characters in a cell.
ROWS, COLUMNS, CELL = 200, 60, 300


class PreviewBlock(TypedDict, total=False):
    """A part of a file's preview, such as a table.

    Other keys depend on `kind`. "text" has `text`, "html" has `html` with escaped foreign text, "table" has `columns`
    and `rows`, "picture" has `source` (a data: URL), and "frame" has `output`, the number of a notebook's output.
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
        name: The file's name, whose extension tells the format.
        check_reader: Called repeatedly. It raises an error, which ends the preview, if the browser has disconnected.
        output: Return only the HTML output of this number in a notebook; None for the whole preview.
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
