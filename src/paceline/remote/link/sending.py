"""Sends a run's files to nodes that do not see the supervisor's."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from paceline.errors import TargetError
from paceline.remote.agent.files import census
from paceline.remote.link.link import Link
from paceline.remote.link.messages import LinkError
from paceline.remote.replica.changes import stamp_of
from paceline.remote.staging.packing import FOLDER
from paceline.runs.folder import RunFolder

if TYPE_CHECKING:
    from paceline.remote.staging.packing import Packed

T = TypeVar("T")

#: What later attempts go on from; on a new node it is not there.
_CARRIED = ("checkpoints", "metrics", "outputs")
_EMPTY = ("logs", "outputs", "metrics", "checkpoints", "attempts", "prepared")


def on_each(links: Sequence[Link], work: Callable[[Link], T]) -> list[T | Exception]:
    """Call `work` for each link, all at once; the results in their order, an error in the place of what raised it.

    A slow node does not hold up the others.
    """
    if not links:
        return []

    def guarded(link: Link) -> T | Exception:
        try:
            return work(link)
        except (OSError, TargetError) as error:
            return error

    with ThreadPoolExecutor(max_workers=len(links)) as pool:
        return list(pool.map(guarded, links))


def all_or_error(
    links: Sequence[Link], found: Sequence[T | Exception], what: str, *, may_be_lost: bool = False
) -> list[T]:
    """The results of `on_each`, without errors; those of lost nodes are left out if they may be.

    Raises:
        TargetError: one failed; the first such node is named.
    """
    for link, one in zip(links, found, strict=True):
        # First, for a LinkError is an OSError, too.
        if isinstance(one, LinkError):
            if may_be_lost and link.lost:
                continue
            raise one
        if isinstance(one, OSError):
            where = f" ({one.filename})" if one.filename else ""
            raise TargetError(f"{link.name}: {what}: {one.strerror or one}{where}.") from one
        if isinstance(one, Exception):
            raise one
    return [one for one in found if not isinstance(one, Exception)]


def see_same(links: Sequence[Link], folder: Path) -> bool:
    """True if every node sees this very folder."""
    token = secrets.token_hex(16)
    mark = folder / f".seen-{token[:8]}"
    mark.write_text(token)
    try:
        found = on_each(links, lambda link: link.sees(str(mark), token))
    finally:
        mark.unlink(missing_ok=True)
    return all(all_or_error(links, found, "the run's folder could not be looked at"))


def send_run(link: Link, mark: str, folder: RunFolder, top: str, run_dir: str) -> None:
    """Give one node the run: its record, its snapshot, and what earlier attempts have left.

    mark: name of a file in `.nodes`, by which nodes that see one folder are known. It says where the run's record is.
    """
    # Closed to others: the folder may lie in /tmp, and holds the run's files.
    link.make_folders([top], 0o700)
    link.make_folders([f"{top}/snapshots", f"{top}/runs", *(f"{run_dir}/{name}" for name in _EMPTY)])
    link.put_file(f"{run_dir}/.nodes/{mark}", home_of(folder).encode())
    for path in (folder.record, folder.path / "target.json", folder.notes):
        if path.exists():
            link.put_file(f"{run_dir}/{path.name}", path.read_bytes())
    for name in _CARRIED:
        send_left(link, folder.path / name, f"{run_dir}/{name}")
    if folder.snapshot.exists():
        source = folder.snapshot.resolve()
        target = f"{top}/snapshots/{source.name}"
        if (there := link.census(target)) != census(os.fspath(source)):
            # Not whole: somebody has cleaned up in it, as happens in /tmp.
            link.put_tree(source, target, how="keep" if there == (-1, -1) else "replace")
        link.make_link(f"{run_dir}/snapshot", target)


def home_of(folder: RunFolder) -> str:
    """Return the name of the workspace's runs, by which a node's copies are told from those of other workspaces."""
    return f"{socket.gethostname()}:{folder.path.parent}"


def send_left(link: Link, source: Path, path: str) -> None:
    """Give one node what earlier attempts have left in a folder, beside what it has there."""
    if source.is_dir() and any(source.iterdir()):
        link.put_tree(source, path, how="merge", skip=_lies_in(source, link.have(path)))


def send_carried(link: Link, packed: Packed, top: str, run_dir: str) -> None:
    """Give one node what the job names on this machine; trees that it has are not sent again."""
    for tree, files in packed.files.items():
        target = f"{top}/{FOLDER}/{tree}"
        count, size = packed.size(tree)
        there = link.census(target)
        # More may be there: an install from a folder leaves files in it.
        if there[0] < count or there[1] < size:
            link.put_files(files, target)
    # Last: the manifest says where the trees lie, so they have to be there.
    link.put_file(f"{run_dir}/carried.json", json.dumps(packed.manifest.to_json()).encode())


def _lies_in(source: Path, have: Mapping[str, list[int]]) -> Callable[[str], bool]:
    """True if a file of `source` is on the node as it is here."""

    def is_there(name: str) -> bool:
        path = source / name
        # Size and time of change, not the inode, which is another one on each machine.
        return not path.is_dir() and (stamp_of(os.fspath(path)) or [])[:2] == have.get(name, [])[:2]

    return is_there
