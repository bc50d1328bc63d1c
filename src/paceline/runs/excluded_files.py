"""Find files in a run's folders that the run does not keep, and replace links before `work` is removed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord
from paceline.system.files import json_lines, replacing
from paceline.system.links import KEPT, Entry, entries

#: A record lists at most this many names of excluded files. It has their total number as well.
LIMIT = 100


def find(folder: RunFolder) -> list[dict[str, str]]:
    """Return "name" and "why" (the reason) of each file that the run does not keep.

    Outputs, artifacts and checkpoints are scanned; remote nodes report the files that they did not send.
    """
    found = {str(line["name"]): str(line["why"]) for line in json_lines(folder.left_out)}
    # Leave out a file that a node has reported as excluded, but that has arrived since then.
    found = {name: why for name, why in found.items() if not os.path.lexists(folder.path / name)}
    for top in KEPT:
        found |= {entry.name: entry.why for entry in entries(os.fspath(folder.path), top) if entry.kind == "left"}
    found |= _outputs_elsewhere(folder)
    return [{"name": name, "why": found[name]} for name in sorted(found)]


def text(one: Mapping[str, str]) -> str:
    """Return an excluded file's `name` and `why` as text: "'outputs/a' is a pipe"."""
    return f"{one['name']!r} is {one['why']}"


def lines(record: RunRecord, limit: int = 5) -> list[str]:
    """Return lines for up to `limit` excluded files, and one that counts further files."""
    shown = [text(one) for one in record.left_out[:limit]]
    more = record.left_out_count - len(shown)
    return shown + ([f"and {more} more: paceline show {record.run_id} --json"] if more > 0 else [])


def settle(folder: RunFolder) -> None:
    """Replace links in the outputs by their targets, before the targets are removed.

    The function checks links in outputs, artifacts and checkpoints. A link to a file in the working directory `work`,
    or to an output stored elsewhere, becomes a copy of the file. A link to `work/outputs/a` becomes a link to
    `outputs/a`. Call this function when no worker runs.

    Raises:
        OSError: The disk is full, or access is denied.
    """
    for top in KEPT:
        # List all entries before changing any entry: to replace a link to a folder, this code needs the entries that follow it.
        found = list(entries(os.fspath(folder.path), top))
        for at, entry in enumerate(found):
            path = folder.path / entry.name
            # If a link can't stay a link, `entries` gives the kind of its target. Replace the link by a copy of its target.
            if entry.kind in ("file", "dir") and path.is_symlink():
                _replace(folder.path, entry, list(_inside(found, at)))
            elif entry.kind == "link" and os.readlink(path) != entry.target:
                _lead_straight(path, entry.target)


def _lead_straight(path: Path, target: str) -> None:
    # Create the new link under a temporary name and rename it over the old link, so that the link's name always exists.
    with replacing(path, f"{path.name}.") as beside:
        beside.symlink_to(target)


def _inside(found: list[Entry], at: int) -> Iterator[Entry]:
    for entry in found[at + 1 :]:
        # In this list, the entries inside a folder follow directly after the entry of the folder.
        if not entry.name.startswith(f"{found[at].name}/"):
            return
        yield entry


def _replace(top: Path, link: Entry, inside: list[Entry]) -> None:
    """Replace a link by a copy of its target. `inside`: a target folder's entries."""
    beside = top / f"{link.name}.{os.urandom(4).hex()}"
    try:
        for entry in (link, *inside):
            path = Path(str(beside) + entry.name[len(link.name) :])
            if entry.kind == "dir":
                path.mkdir()
            elif entry.kind == "link":
                path.symlink_to(entry.target)
            elif entry.kind == "file":
                try:
                    # Create a hard link if the file system allows it, else copy.
                    os.link(top / entry.real, path, follow_symlinks=False)
                except OSError:
                    shutil.copy2(top / entry.real, path, follow_symlinks=False)
        if beside.is_dir():
            # A rename can replace a link by a file, but not by a folder, so remove the link first.
            (top / link.name).unlink()
        os.rename(beside, top / link.name)
    finally:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(beside) if beside.is_dir() else beside.unlink()


def _outputs_elsewhere(folder: RunFolder) -> dict[str, str]:
    link = folder.work / "outputs"
    if not link.is_symlink() or os.path.realpath(link) == os.path.realpath(folder.outputs):
        return {}
    return {"work/outputs": f"a link in the place of the run's outputs, to {os.readlink(link)!r}"}
