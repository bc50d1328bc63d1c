"""Send a run's files to nodes that do not see the supervisor's folders."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from paceline.errors import TargetError
from paceline.remote.agent.files import census
from paceline.remote.link.link import Link
from paceline.remote.link.messages import LinkError, Pending
from paceline.remote.replica.changes import stamp_of
from paceline.remote.staging.packing import FOLDER
from paceline.remote.wire import Header
from paceline.runs.folder import RunFolder

if TYPE_CHECKING:
    from paceline.remote.staging.packing import Packed

T = TypeVar("T")

#: Folders of a run that are sent to each node, because later attempts need the files which earlier attempts have written.
_CARRIED = ("checkpoints", "metrics", "outputs")
_EMPTY = ("logs", "outputs", "metrics", "checkpoints", "attempts", "prepared")


#: At most this many threads talk to nodes at the same time. A thread waits for this many answers at once.
_AT_ONCE = 32


def ask_each(
    links: Sequence[Link], op: str, timeout_s: float, values: Callable[[Link], Mapping[str, object]] = lambda link: {}
) -> list[Header | Exception]:
    """Send each node the request `op`. Return answers or exceptions in order."""
    return answers(links, [link.send(op, values(link)) for link in links], op, timeout_s)


def answers(links: Sequence[Link], sent: Sequence[Pending], op: str, timeout_s: float) -> list[Header | Exception]:
    """Wait for the answers to the `sent` requests, one for each link.

    Return answers or exceptions in order.
    """
    deadline = time.monotonic() + timeout_s
    found: list[Header | Exception] = []
    for place, (link, pending) in enumerate(zip(links, sent, strict=True)):
        if place % _AT_ONCE == 0 and place + _AT_ONCE <= len(sent):
            # Wait for the last of the next 32 answers first. Waking for each would slow the thread that receives them.
            sent[place + _AT_ONCE - 1].wait(max(0.0, deadline - time.monotonic()))
        try:
            found.append(link.answer(pending, op, max(0.0, deadline - time.monotonic())))
        except (OSError, TargetError) as error:
            found.append(error)
        else:
            # Restart the timeout after each answer, because the answers of very many nodes may take long in total.
            deadline = time.monotonic() + timeout_s
    return found


def on_each(links: Sequence[Link], work: Callable[[Link], T]) -> list[T | Exception]:
    """Call `work` for each link in threads. Return results or exceptions in order."""
    if not links:
        return []

    def guarded(link: Link) -> T | Exception:
        try:
            return work(link)
        except (OSError, TargetError) as error:
            return error

    with ThreadPoolExecutor(max_workers=min(len(links), _AT_ONCE)) as pool:
        return list(pool.map(guarded, links))


def all_or_error(
    links: Sequence[Link], found: Sequence[T | Exception], what: str, *, may_be_lost: bool = False
) -> list[T]:
    """Return the results of `on_each` or `ask_each`, or raise the first exception.

    found: The result or the exception of each link, in order.
    what: The text of the error message that says what failed.
    may_be_lost: Leave out the results of lost nodes instead of raising an exception for them.

    Raises:
        TargetError: `found` has an exception; the message names the node.
    """
    for link, one in zip(links, found, strict=True):
        # Check for LinkError first, because it is a subclass of OSError.
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
    """Return whether the path is one folder, shared by this machine and all nodes."""
    token = secrets.token_hex(16)
    mark = folder / f".seen-{token[:8]}"
    mark.write_text(token)
    try:
        found = on_each(links, lambda link: link.sees(str(mark), token))
    finally:
        mark.unlink(missing_ok=True)
    return all(all_or_error(links, found, "the run's folder could not be looked at"))


def send_run(link: Link, mark: str, folder: RunFolder, top: str, run_dir: str) -> None:
    """Send a run's record, snapshot and files of earlier attempts to a node.

    mark: Name of a file to create in `.nodes` of `run_dir`. A node that sees another node's file there shares its file system.
    top: Absolute path of Paceline's folder on the node.
    run_dir: The run's folder on the node.
    """
    source = folder.snapshot.resolve() if folder.snapshot.exists() else None
    target = f"{top}/snapshots/{source.name}" if source else ""
    files = {f"{run_dir}/.nodes/{mark}": home_of(folder).encode()}
    own = (folder.job, folder.state, folder.target, folder.notes)
    files |= {f"{run_dir}/{path.name}": path.read_bytes() for path in own if path.exists()}
    folders = [f"{top}/snapshots", f"{top}/runs", *(f"{run_dir}/{name}" for name in _EMPTY)]
    # Send all requests before waiting for the first answer, because with thousands of nodes each wait adds up.
    there = link.all_answers(
        # Make the folder private, because it may be in /tmp, and it will contain the run's files.
        ("mkdirs", {"paths": [top], "mode": 0o700}, b""),
        ("mkdirs", {"paths": folders, "mode": 0o777}, b""),
        *(("file", {"path": path, "mode": 0o644}, data) for path, data in files.items()),
        *(
            [("census", {"path": target}, b""), ("link", {"path": f"{run_dir}/snapshot", "target": target}, b"")]
            if source
            else []
        ),
    )
    for name in _CARRIED:
        send_left(link, folder.path / name, f"{run_dir}/{name}")
    if source and there[-2]["found"] != list(census(os.fspath(source))):
        # The node's snapshot is missing or incomplete, because some machines delete old files in /tmp.
        link.put_tree(source, target, how="keep" if there[-2]["found"] == [-1, -1] else "replace")


def home_of(folder: RunFolder) -> str:
    """Return "host:runs folder", which identifies this workspace's copies of runs on nodes."""
    return f"{socket.gethostname()}:{folder.path.parent}"


def send_left(link: Link, source: Path, path: str) -> None:
    """Copy a folder of the run, such as its checkpoints, to a node."""
    if source.is_dir() and any(source.iterdir()):
        link.put_tree(source, path, how="merge", skip=_lies_in(source, link.have(path)))


def send_carried(link: Link, packed: Packed, top: str, run_dir: str) -> None:
    """Send a node the job's local files that are missing there."""
    for tree, files in packed.files.items():
        target = f"{top}/{FOLDER}/{tree}"
        count, size = packed.size(tree)
        there = link.census(target)
        # Accept more files than expected, because an installation from the folder adds files to the tree on the node.
        if there[0] < count or there[1] < size:
            link.put_files(files, target)
    # Send the manifest last, because it refers to the file trees that are sent above.
    link.put_file(f"{run_dir}/carried.json", json.dumps(packed.manifest.to_json()).encode())


def _lies_in(source: Path, have: Mapping[str, list[int]]) -> Callable[[str], bool]:
    def is_there(name: str) -> bool:
        path = source / name
        # Compare only size and mtime, because the inode differs between machines.
        return not path.is_dir() and (stamp_of(os.fspath(path)) or [])[:2] == have.get(name, [])[:2]

    return is_there
