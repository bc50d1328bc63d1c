"""Files of a run: their tree, and their bytes in a form that no browser executes.

A user's script may write HTML, or pictures that contain scripts. So the server sends files as attachments, with a policy that
blocks execution. Only pictures, sounds and videos get their own content type.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TypedDict
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from paceline.errors import RunNotFoundError
from paceline.runs import artifacts, downloads
from paceline.runs.downloads import RunFile
from paceline.runs.folder import RunFolder, check_file_name
from paceline.system import links
from paceline.ui.previews import preview

_CHUNK = 1 << 18
#: Content types of pictures, which a page shows in an <img>. An SVG in an <img> runs no script.
PICTURES = {
    **{f".{kind}": f"image/{kind}" for kind in ("png", "jpeg", "gif", "webp", "bmp", "avif")},
    **{".jpg": "image/jpeg", ".svg": "image/svg+xml"},
}
_SOUNDS = {
    **{f".{kind}": f"audio/{kind}" for kind in ("wav", "ogg", "flac", "aac")},
    **{".mp3": "audio/mpeg", ".m4a": "audio/mp4", ".opus": "audio/ogg"},
}
_VIDEOS = {
    ".mp4": "video/mp4",
    ".m4v": "video/mp4",
    ".webm": "video/webm",
    ".ogv": "video/ogg",
    ".mov": "video/quicktime",
}
_KINDS = {
    **dict.fromkeys(PICTURES, "picture"),
    **dict.fromkeys(_SOUNDS, "audio"),
    **dict.fromkeys(_VIDEOS, "video"),
    **dict.fromkeys((".html", ".htm"), "page"),
    ".pdf": "pdf",
}
#: Content-Security-Policy of a file that a user opens in the browser by the file's URL.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
#: Content-Security-Policy of HTML files in a frame: no script, no request, no form, and a separate origin.
_FRAME_POLICY = (
    "sandbox; default-src 'none'; img-src data:; font-src data:; style-src 'unsafe-inline'; frame-ancestors 'self'"
)
#: Content-Security-Policy of PDFs. A sandbox would block the browser's viewer. Scripts in a PDF can't access pages.
_PDF_POLICY = "default-src 'none'; style-src 'unsafe-inline'; object-src 'self'; plugin-types application/pdf"
#: Number of rows up to which the page expands folders; maximum number of rows on the page.
_OPEN_ROWS, _MOST_ROWS = 200, 2000
#: A page shows the files in these folders of a run, and the run's artifacts.
_OTHER_FOLDERS = ("checkpoints", "work")
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


class FileRow(TypedDict):
    """A row of a run's file tree.

    files: Number of files in a folder; 0 for a file. is_open: Whether the next rows show the content of this folder.
    """

    name: str
    label: str
    depth: int
    files: int
    size: int
    is_open: bool


class FileTree(TypedDict):
    """The file tree of a run or folder.

    below: Path of the folder, or "". above: (path, name) of the folder and its parents. wanted: Text that all shown
    paths contain. more: Number of rows left out. count, total: Number and bytes of the shown files.
    """

    below: str
    above: list[tuple[str, str]]
    wanted: str
    rows: list[FileRow]
    more: int
    count: int
    total: int


def kind_of(name: str) -> str:
    """Return a file's kind by its extension, such as "pdf" or "page"."""
    return _KINDS.get(_ending(name), "other")


def files_of(folder: RunFolder) -> list[RunFile]:
    """Return the files of a run, its checkpoints included, sorted by name."""
    found = {file.name: file for file in downloads.files(folder)}
    for name, path in artifacts.files_below(folder, "checkpoints"):
        with contextlib.suppress(OSError):
            size = os.lstat(path).st_size
            found.setdefault(name, RunFile(name=name, path=path, size_bytes=size, top=folder.path))
    return [found[name] for name in sorted(found)]


def tree(files: Sequence[RunFile], below: str = "", wanted: str = "") -> FileTree:
    """Return the files and folders below a folder as rows.

    The tree expands folders until it has `_OPEN_ROWS` rows; other folders stay closed.

    below: Path of the folder; "" for all files. wanted: Text that all paths must contain; with it, rows are files only.
    """
    inside = [file for file in files if not below or file.name.startswith(f"{below}/")]
    shown = [file for file in inside if wanted.lower() in file.name.lower()]
    start = len(below) + 1 if below else 0
    rows = [_file_row(file, file.name[start:], 0) for file in shown] if wanted else _tree_rows(shown, below)
    parts = below.split("/") if below else []
    return {
        "below": below,
        "above": [("/".join(parts[: number + 1]), part) for number, part in enumerate(parts)],
        "wanted": wanted,
        "rows": rows[:_MOST_ROWS],
        "more": max(0, len(rows) - _MOST_ROWS),
        "count": len(shown),
        "total": sum(file.size_bytes for file in shown),
    }


def _tree_rows(files: Sequence[RunFile], top: str) -> list[FileRow]:
    counts, sizes = Counter[str](), Counter[str]()
    content: dict[str, dict[str, RunFile | None]] = {top: {}}
    for file in files:
        name: str = file.name
        content.setdefault(name.rpartition("/")[0], {})[name] = file
        while (name := name.rpartition("/")[0]) != top:
            counts[name] += 1
            sizes[name] += file.size_bytes
            content.setdefault(name.rpartition("/")[0], {})[name] = None
    opened, room, waiting = {top}, _OPEN_ROWS - len(content[top]), [top]
    for name in waiting:
        for one in (one for one, file in content[name].items() if file is None and len(content[one]) <= room):
            opened.add(one)
            waiting.append(one)
            room -= len(content[one])

    def rows(name: str, depth: int) -> Iterator[FileRow]:
        for one, file in sorted(content[name].items()):
            label = one.rpartition("/")[2]
            if file is not None:
                yield _file_row(file, label, depth)
                continue
            yield FileRow(name=one, label=label, depth=depth, files=counts[one], size=sizes[one], is_open=one in opened)
            if one in opened:
                yield from rows(one, depth + 1)

    return [*rows(top, 0)]


def _file_row(file: RunFile, label: str, depth: int) -> FileRow:
    return FileRow(name=file.name, label=label, depth=depth, files=0, size=file.size_bytes, is_open=False)


def opened(folder: RunFolder, name: str) -> tuple[BinaryIO, str]:
    """Open a file of the run.

    Return the file and its normalized name. A link that leads out of the run's folder counts as missing.

    Raises:
        FileNameError: The name leaves the run's folder.
        RunNotFoundError: The run has no file of this name.
    """
    plain = check_file_name(name)
    where = folder.file(plain).relative_to(folder.path).as_posix()
    # If an artifact and a checkpoint have the same name, return the artifact.
    if plain.partition("/")[0] in _OTHER_FOLDERS and not os.path.lexists(folder.path / where):
        where = plain
    found = links.find(os.fspath(folder.path), where)
    try:
        if found is not None and found.kind == "file":
            return os.fdopen(links.open_below(os.fspath(folder.path), found.real), "rb"), plain
    except OSError:
        pass
    raise RunNotFoundError(f"run {folder.run_id} has no file {plain!r}.")


def download(folder: RunFolder, name: str, asked: Mapping[str, str]) -> Response:
    """Return a response with a file, or bytes of it, as an attachment.

    asked: Headers of the request, which may ask for a range of bytes.

    Raises:
        RunNotFoundError, FileNameError: The run has no file of this name.
        HTTPException: The file does not have the requested range (416).
    """
    file, plain = opened(folder, name)
    about = os.fstat(file.fileno())
    headers = {**headers_of(plain), "etag": f'"{about.st_mtime_ns:x}-{about.st_size:x}"', "accept-ranges": "bytes"}
    begin, end, status = 0, about.st_size, 200
    wanted = _RANGE.fullmatch(asked.get("range", ""))
    # If the file has changed since the player's last request, ignore the range, because the player needs the whole new file.
    if wanted and any(wanted.groups()) and asked.get("if-range", headers["etag"]) == headers["etag"]:
        first, last = wanted.groups()
        begin = int(first) if first else max(0, end - int(last))
        end = min(end, int(last) + 1) if first and last else end
        if begin >= end:
            file.close()
            raise HTTPException(416, f"The file has {about.st_size:,} bytes, and no range {wanted[0]!r}.")
        status = 206
        headers["content-range"] = f"bytes {begin}-{end - 1}/{about.st_size}"
    file.seek(begin)
    headers["content-length"] = str(end - begin)
    return StreamingResponse(_chunks(file, end - begin), status, headers)


def frame(folder: RunFolder, name: str, output: int | None, check_reader: Callable[[], None]) -> Response:
    """Return a response for an <iframe> that shows a file without its scripts.

    The file is an HTML page, a PDF, or a notebook. output: Number of a notebook's HTML output; None for other files.
    check_reader: Called repeatedly; raises an error if the browser has disconnected.

    Raises:
        RunNotFoundError, FileNameError: The run has no file of this name.
        HTTPException: Files of this kind are not shown in frames (404).
    """
    file, plain = opened(folder, name)
    kind, size = kind_of(plain), os.fstat(file.fileno()).st_size
    headers = {"content-security-policy": _FRAME_POLICY, "x-frame-options": "SAMEORIGIN"}
    if output is not None:
        with file:
            blocks = preview(file.fileno(), plain, check_reader, output)["blocks"]
        text = blocks[0].get("html", "") if blocks else ""
        return Response(text.encode("utf-8", "replace"), media_type="text/html; charset=utf-8", headers=headers)
    if kind == "page":
        return StreamingResponse(_chunks(file, size), media_type="text/html", headers=headers)
    # Serve a file as PDF only if it begins with `%PDF-`. Otherwise the browser might show its content as a web page.
    if kind == "pdf" and file.read(5) == b"%PDF-":
        file.seek(0)
        headers = {"content-security-policy": _PDF_POLICY, "content-disposition": "inline"}
        return StreamingResponse(_chunks(file, size), media_type="application/pdf", headers=headers)
    file.close()
    raise HTTPException(404, f"{plain!r} is not an HTML page, a notebook's output or a PDF.")


def headers_of(name: str) -> dict[str, str]:
    types = {**PICTURES, **_SOUNDS, **_VIDEOS}
    return {
        "content-type": types.get(_ending(name), "application/octet-stream"),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(Path(name).name, safe='', errors='replace')}",
        "content-security-policy": _POLICY,
        "cache-control": "private, no-cache",
        # Switch off compression: compressing the bytes of a model takes longer than sending them uncompressed.
        "content-encoding": "identity",
    }


def archive(folder: RunFolder, below: str) -> Response:
    """Stream the files of a folder as a zip archive.

    Raises:
        RunNotFoundError: The run has no files in this folder.
    """
    names = [file.name for file in files_of(folder) if not below or file.name.startswith(f"{below}/")]
    if not names:
        raise RunNotFoundError(f"run {folder.run_id} has no files in {below!r}.")
    name = f"{folder.run_id}-{below.replace('/', '-')}.zip" if below else f"{folder.run_id}.zip"
    return StreamingResponse(_zipped(folder, names), headers=headers_of(name))


class _Sink(io.RawIOBase):
    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        self._pieces.append(bytes(data))  # type: ignore[call-overload]
        return len(self._pieces[-1])

    def take(self) -> bytes:
        data, self._pieces = b"".join(self._pieces), []
        return data


def _zipped(folder: RunFolder, names: Sequence[str]) -> Iterator[bytes]:
    sink = _Sink()
    with zipfile.ZipFile(sink, "w") as made:
        for name in names:
            try:
                file, _ = opened(folder, name)
            # Skip a file that a running script has removed after the files were listed.
            except RunNotFoundError:
                continue
            entry = name.encode("utf-8", "replace").decode()
            with file, made.open(entry, "w", force_zip64=True) as into:
                while data := file.read(_CHUNK):
                    into.write(data)
                    yield sink.take()
    yield sink.take()


def _ending(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    with file:
        while size > 0 and (data := file.read(min(_CHUNK, size))):
            size -= len(data)
            yield data
