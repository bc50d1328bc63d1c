"""Send a tree to a node, without ever holding more than a piece of it (the node's side: `paceline.remote.agent.atomic_write`)."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.remote.wire import CHUNK_BYTES


def entries(source: Path, skip: Callable[[str], bool] = lambda name: False) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Frames of everything below `source` that `skip` does not name: folders before what is in them.

    What vanishes meanwhile is left out; what shrinks comes as far as it goes.
    """
    yield _about(".", "dir", os.stat(source)), b""
    yield from _below(str(source), "", skip)


def entries_of(files: Mapping[str, Path]) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Frames of a tree of these files, by their names in it: read-only, and what a link leads to in the link's place.

    Raises:
        OSError: one can't be read. A tree of which something is missing would pass for whole.
    """
    yield {"name": ".", "kind": "dir", "mode": 0o755, "mtime": 0}, b""
    made = set()
    for name, path in sorted(files.items()):
        # `parents` begins with the innermost folder, and the node makes them from the outside in.
        for folder in reversed(Path(name).parents):
            if str(folder) != "." and folder not in made:
                made.add(folder)
                yield {"name": str(folder), "kind": "dir", "mode": 0o755, "mtime": 0}, b""
        for header, data in _file(os.path.realpath(path), name):
            # Runs share such a tree, so nobody may write to it; all that is kept of the modes is whether a file can be
            # executed.
            mode = 0o555 if header.get("mode", 0) & 0o100 else 0o444
            yield header | ({"mode": mode} if "mode" in header else {}), data


def _below(folder: str, name: str, skip: Callable[[str], bool]) -> Iterator[tuple[dict[str, Any], bytes]]:
    with os.scandir(folder) as found:
        # Listed whole and closed before going down: a deep tree would hold a descriptor for each level otherwise.
        inside = sorted(found, key=lambda entry: entry.name)
    for entry in inside:
        mine = os.path.join(name, entry.name)
        if skip(mine):
            continue
        try:
            # Asked first, for is_dir and is_file follow links: a link to a folder would be sent as a folder.
            if entry.is_symlink():
                yield {"name": mine, "kind": "link", "target": os.readlink(entry.path)}, b""
            elif entry.is_dir():
                yield _about(mine, "dir", entry.stat()), b""
                yield from _below(entry.path, mine, skip)
            elif entry.is_file():
                yield from _file(entry.path, mine)
        except FileNotFoundError:
            # It went while the tree was read, such as a temporary file of a script that runs.
            continue


def _file(path: str, name: str) -> Iterator[tuple[dict[str, Any], bytes]]:
    with open(path, "rb", buffering=0) as file:
        about = _about(name, "file", os.fstat(file.fileno()))
        # One piece is read ahead, so that the last one can say that it is; an empty file is one empty piece.
        data = file.read(CHUNK_BYTES) or b""
        is_first = True
        while True:
            after = file.read(CHUNK_BYTES) if len(data) == CHUNK_BYTES else b""
            head = about if is_first else {"name": name, "kind": "more"}
            yield {**head, "end": not after}, data
            if not after:
                return
            data, is_first = after, False


def _about(name: str, kind: str, found: os.stat_result) -> dict[str, Any]:
    return {"name": name, "kind": kind, "mode": stat.S_IMODE(found.st_mode), "mtime": found.st_mtime_ns}
