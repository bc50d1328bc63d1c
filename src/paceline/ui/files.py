"""Previews and downloads of a run's files, in a form that no browser executes.

Scripts may write HTML, or pictures with scripts in them. So a file is sent as an attachment, with a policy that blocks all
execution, and with its own content type only if it is a picture.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from starlette.responses import StreamingResponse

from paceline.errors import RunNotFoundError
from paceline.runs.folder import RunFolder, check_file_name
from paceline.system import links

_CHUNK = 1 << 18
#: Most bytes and most rows that a preview shows.
_SHOWN_BYTES, _SHOWN_ROWS = 1 << 16, 200
#: Content types that a page shows as a picture. An SVG in an <img> runs no script.
PICTURES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".svg": "image/svg+xml",
}
_TABLES = {".csv": ",", ".tsv": "\t"}
#: Content policy of files that a browser opens by their address.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; sandbox"


def kind_of(name: str) -> str:
    """Return "picture", "table" or "other" by the ending of a file's name."""
    ending = os.path.splitext(name)[1].lower()
    return "picture" if ending in PICTURES else "table" if ending in _TABLES else "other"


@dataclass(frozen=True)
class Look:
    """A preview of a file: text, table rows or a picture. is_cut: the end is missing."""

    name: str
    size: int
    kind: str
    text: str = ""
    rows: tuple[tuple[str, ...], ...] = ()
    is_cut: bool = False


def look(folder: RunFolder, name: str) -> Look:
    """Return a preview of a file of a run.

    Raises:
        RunNotFoundError, FileNameError: As for `opened`.
    """
    file, plain = opened(folder, name)
    with os.fdopen(file, "rb") as read:
        size = os.fstat(read.fileno()).st_size
        if (kind := kind_of(plain)) == "picture":
            return Look(plain, size, kind)
        data = read.read(_SHOWN_BYTES)
    is_cut = size > len(data)
    if b"\0" in data:
        return Look(plain, size, "binary")
    text = data.decode("utf-8", errors="replace")
    if kind == "table":
        # Drop the last line of a cut file, which may be incomplete.
        lines = text.splitlines()[: -1 if is_cut else None]
        delimiter = _TABLES[os.path.splitext(plain)[1].lower()]
        try:
            rows = [*csv.reader(io.StringIO("\n".join(lines)), delimiter=delimiter)]
        except csv.Error:
            return Look(plain, size, "text", text, is_cut=is_cut)
        shown = tuple(tuple(cell[:300] for cell in row[:60]) for row in rows[: _SHOWN_ROWS + 1])
        return Look(plain, size, kind, rows=shown, is_cut=is_cut or len(rows) > len(shown))
    if plain.endswith(".json") and not is_cut:
        try:
            text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
        except ValueError:
            pass
    return Look(plain, size, "text", text, is_cut=is_cut)


def opened(folder: RunFolder, name: str) -> tuple[int, str]:
    """Open a file of the run, without following links that lead out of the run's folder.

    Return descriptor and name.

    Raises:
        FileNameError: The name leaves the run's folder.
        RunNotFoundError: The run has no file of this name.
    """
    plain = check_file_name(name)
    where = folder.file(plain).relative_to(folder.path).as_posix()
    found = links.find(os.fspath(folder.path), where)
    try:
        if found is not None and found.kind == "file":
            return links.open_below(os.fspath(folder.path), found.real), plain
    except OSError:
        pass
    raise RunNotFoundError(f"run {folder.run_id} has no file {plain!r}.")


def download(folder: RunFolder, name: str) -> StreamingResponse:
    """Return a response with the unchanged file as an attachment.

    Raises:
        RunNotFoundError, FileNameError: As for `opened`.
    """
    file, plain = opened(folder, name)
    size = os.fstat(file).st_size
    return StreamingResponse(_chunks(file, size), headers=headers_of(plain, size))


def headers_of(name: str, size: int) -> dict[str, str]:
    ending = os.path.splitext(name)[1].lower()
    return {
        "content-type": PICTURES.get(ending, "application/octet-stream"),
        "content-length": str(size),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(Path(name).name, safe='', errors='replace')}",
        "content-security-policy": _POLICY,
        "cache-control": "private, no-cache",
    }


def _chunks(file: int, size: int) -> Iterator[bytes]:
    """Yield exactly `size` bytes of the file, even if it changes meanwhile."""
    with os.fdopen(file, "rb") as read:
        while size > 0 and (data := read.read(min(_CHUNK, size))):
            size -= len(data)
            yield data
