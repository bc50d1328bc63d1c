"""The process that reads a file from standard input and prints its preview as JSON."""

from __future__ import annotations

import csv
import io
import json
import os
import posixpath
import resource
import sys
from collections.abc import Callable
from typing import BinaryIO

from paceline.data.transfer.progress import size_text
from paceline.runs.visible import visible
from paceline.ui import markup, previews
from paceline.ui.previews import FilePreview, arrays
from paceline.ui.previews.notebook import notebook

_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def read_preview(file: BinaryIO, name: str, output: int | None = None) -> FilePreview:
    r"""Return the preview of a file, whose extension tells the format.

    Example:
        >>> read_preview(io.BytesIO(b"a,b\n1,2\n"), "scores.csv")["blocks"][0]["rows"]
        [['1', '2']]
    """
    read = _READERS.get(os.path.splitext(name)[1].lower())
    try:
        if read is not None:
            return read(file, name)
        return _notebook(file, output) if name.lower().endswith(".ipynb") else _text(file, name)
    # The library that reads the file may raise any exception if the file is malformed.
    except Exception as error:
        file.seek(0)
        found = _text(file, "")
        reason = visible(f"{type(error).__name__}: {error}")[: previews.CELL]
        return {**found, "notes": [f"The content does not match the ending of the name: {reason}.", *found["notes"]]}


def _text(file: BinaryIO, name: str) -> FilePreview:
    data, notes = _start(file)
    if b"\0" in data:
        return {"blocks": [], "notes": ["The page can't show this binary file. Download it."]}
    text = data.decode("utf-8-sig", errors="replace")
    if name.lower().endswith(".json") and not notes:
        text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    html = markup.highlighted(text, name)
    block: previews.PreviewBlock = {"kind": "html", "html": html} if html else {"kind": "text", "text": text}
    return {"blocks": [block], "notes": notes}


def _table(file: BinaryIO, name: str) -> FilePreview:
    data, notes = _start(file)
    text = data.decode("utf-8-sig", errors="replace")
    if notes:
        # A file that was read only in part may end with an incomplete line. Drop this line.
        text = text[: text.rfind("\n") + 1]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_DELIMITERS[os.path.splitext(name)[1].lower()])
    rows = [row for row, _ in zip(reader, range(previews.ROWS + 2), strict=False)]
    return shown_table(rows[0] if rows else [], rows[1:], notes)


def shown_table(columns: list[str], rows: list[list[str]], notes: list[str]) -> FilePreview:
    """Return the preview of a table, cut to the limits of a page."""
    widest = max(map(len, (columns, *rows)))
    if len(rows) > previews.ROWS:
        notes = [*notes, f"The page shows the first {previews.ROWS} rows."]
    if widest > previews.COLUMNS:
        notes = [*notes, f"The page shows {previews.COLUMNS} of {widest:,} columns."]
    cut = [[cell[: previews.CELL] for cell in row[: previews.COLUMNS]] for row in (columns, *rows[: previews.ROWS])]
    return {"blocks": [{"kind": "table", "columns": cut[0], "rows": cut[1:]}], "notes": notes}


def _markdown(file: BinaryIO, name: str) -> FilePreview:
    data, notes = _start(file)

    def image(source: str) -> str | None:
        # A notebook's page has the URL `look/<name>`. An image in the notebook's folder has the URL `file/<name of the image>`.
        place = posixpath.normpath(posixpath.join(posixpath.dirname(name), source.partition("?")[0]))
        is_here = ":" not in source and not source.startswith("/") and not place.startswith("..")
        return "../" * (name.count("/") + 1) + "file/" + place if is_here else None

    html = markup.render_markdown(data.decode("utf-8-sig", errors="replace"), image)
    return {"blocks": [{"kind": "html", "html": f'<div class="card markdown">{html}</div>'}], "notes": notes}


def _notebook(file: BinaryIO, output: int | None) -> FilePreview:
    data = file.read(previews.WHOLE_BYTES + 1)
    if len(data) > previews.WHOLE_BYTES:
        return _too_large("notebook")
    return notebook(json.loads(data), output)


def _too_large(what: str) -> FilePreview:
    return {
        "blocks": [],
        "notes": [f"The page shows a {what} of at most {size_text(previews.WHOLE_BYTES)}. Download it."],
    }


def _start(file: BinaryIO) -> tuple[bytes, list[str]]:
    data, size = file.read(previews.TEXT_BYTES), file.seek(0, os.SEEK_END)
    if size <= len(data):
        return data, []
    return data, [
        f"The page shows the first {size_text(previews.TEXT_BYTES)} of {size_text(size)}. Download the file for the rest."
    ]


_READERS: dict[str, Callable[[BinaryIO, str], FilePreview]] = {
    **dict.fromkeys(_DELIMITERS, _table),
    **dict.fromkeys((".md", ".markdown"), _markdown),
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".bin", ".zip", ".whl", ".keras", ".npz"), arrays.archive),
    ".npy": arrays.numpy_header,
    ".safetensors": arrays.tensors,
    ".parquet": arrays.parquet,
}


def main(words: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (previews.LIMIT_BYTES, previews.LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (previews.LIMIT_S, previews.LIMIT_S))
    name, output = words[0], int(words[1]) if len(words) > 1 else None
    json.dump(read_preview(sys.stdin.buffer, name, output), sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
