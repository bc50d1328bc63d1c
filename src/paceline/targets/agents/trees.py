"""Send a tree to a node, without ever holding more than a piece of it (the node's side: `paceline.agent.arrival`)."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.agent.wire import CHUNK_BYTES


def entries(source: Path, skip: Callable[[str], bool] = lambda name: False) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Frames of everything below `source` that `skip` does not name: folders before what is in them.

    What vanishes meanwhile is left out; what shrinks comes as far as it goes.
    """
    yield _about(".", "dir", os.stat(source)), b""
    yield from _below(str(source), "", skip)


def _below(folder: str, name: str, skip: Callable[[str], bool]) -> Iterator[tuple[dict[str, Any], bytes]]:
    with os.scandir(folder) as found:
        inside = sorted(found, key=lambda entry: entry.name)
    for entry in inside:
        mine = os.path.join(name, entry.name)
        if skip(mine):
            continue
        try:
            if entry.is_symlink():
                yield {"name": mine, "kind": "link", "target": os.readlink(entry.path)}, b""
            elif entry.is_dir():
                yield _about(mine, "dir", entry.stat()), b""
                yield from _below(entry.path, mine, skip)
            elif entry.is_file():
                yield from _file(entry.path, mine)
        except FileNotFoundError:
            continue


def _file(path: str, name: str) -> Iterator[tuple[dict[str, Any], bytes]]:
    with open(path, "rb", buffering=0) as file:
        about = _about(name, "file", os.fstat(file.fileno()))
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
