"""Names that are no files of the run's though they lie in its folders; and links set right before the working folder goes."""

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

#: As many names as a record takes; it says how many there are in all.
LIMIT = 100


def find(folder: RunFolder) -> list[dict[str, str]]:
    """{"name": ..., "why": ...} of each name that is left out of the run's files, sorted: of outputs, artifacts and
    checkpoints by a look at them, and what nodes elsewhere have not sent.
    """
    found = {str(line["name"]): str(line["why"]) for line in json_lines(folder.left_out)}
    # What came later after all is not left out.
    found = {name: why for name, why in found.items() if not os.path.lexists(folder.path / name)}
    for top in KEPT:
        found |= {entry.name: entry.why for entry in entries(os.fspath(folder.path), top) if entry.kind == "left"}
    found |= _outputs_elsewhere(folder)
    return [{"name": name, "why": found[name]} for name in sorted(found)]


def text(one: Mapping[str, str]) -> str:
    """One of them in words, a piece of a sentence."""
    return f"{one['name']!r} is {one['why']}"


def lines(record: RunRecord, limit: int = 5) -> list[str]:
    """The names that a run has left out, for people: a line each, and one for the rest."""
    shown = [text(one) for one in record.left_out[:limit]]
    more = record.left_out_count - len(shown)
    return shown + ([f"and {more} more: paceline show {record.run_id} --json"] if more > 0 else [])


def settle(folder: RunFolder) -> None:
    """Put files in the place of links from outputs, artifacts and checkpoints to what does not outlive the run: its working
    folder, and outputs that are stored elsewhere. For when no worker runs any more. A link that stays leads straight to what it
    stands for: `work/outputs/a`, which is `outputs/a`, is a way that goes with the working folder.

    Raises:
        OSError: no space, or no right to.
    """
    for top in KEPT:
        # As a list, for what takes a link's place is made by the names that follow it.
        found = list(entries(os.fspath(folder.path), top))
        for at, entry in enumerate(found):
            path = folder.path / entry.name
            # A link that is listed as the file or folder behind it is one that could not stay a link.
            if entry.kind in ("file", "dir") and path.is_symlink():
                _replace(folder.path, entry, list(_inside(found, at)))
            elif entry.kind == "link" and os.readlink(path) != entry.target:
                _lead_straight(path, entry.target)


def _lead_straight(path: Path, target: str) -> None:
    # The new link is renamed over the old one, so that the name leads somewhere at every moment.
    with replacing(path, f"{path.name}.") as beside:
        beside.symlink_to(target)


def _inside(found: list[Entry], at: int) -> Iterator[Entry]:
    for entry in found[at + 1 :]:
        # What is in a folder follows right behind it in the list, and the first name that is not ends it.
        if not entry.name.startswith(f"{found[at].name}/"):
            return
        yield entry


def _replace(top: Path, link: Entry, inside: list[Entry]) -> None:
    """Put what a link stands for in its place, whole or not at all."""
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
                    # A second name takes no space. What lies in another file system, or can't have one, is copied.
                    os.link(top / entry.real, path, follow_symlinks=False)
                except OSError:
                    shutil.copy2(top / entry.real, path, follow_symlinks=False)
        if beside.is_dir():
            # A rename puts a file in the place of a link, but no folder.
            (top / link.name).unlink()
        os.rename(beside, top / link.name)
    finally:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(beside) if beside.is_dir() else beside.unlink()


def _outputs_elsewhere(folder: RunFolder) -> dict[str, str]:
    """The link of a script's own that it has put in the place of `outputs` in its working folder; empty where there is none."""
    link = folder.work / "outputs"
    if not link.is_symlink() or os.path.realpath(link) == os.path.realpath(folder.outputs):
        return {}
    return {"work/outputs": f"a link in the place of the run's outputs, to {os.readlink(link)!r}"}
