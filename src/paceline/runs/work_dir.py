"""The workers' working directory: a private copy of the snapshot, with the run's `outputs`.

The copy of a job with a `working_directory` is surrounded by links, so that `..` and files that were not copied have their usual
paths:

    work/                          /
    work/home/ann/data             -> /home/ann/data
    work/home/ann/project/         the copy; the workers run here or in a folder of it
    work/home/ann/project/data     -> /home/ann/project/data, which .gitignore names
                                   (on machines without /home/ann: a copy that was sent there)
    work/home/ann/project/outputs  a folder, whose files move to the run's outputs at the end

So a path below `work` is the user's own path. Without a working directory, or on machines without the user's folders, `work`
itself is the copy, and its `outputs` is a link.

At the end, unchanged files of the snapshot are removed, so that a thousand runs of one source do not fill the disk. All
other files stay.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.runs import states
from paceline.runs.folder import RunFolder
from paceline.system import linked, links
from paceline.system.files import copy_file, copy_tree, read_json, write_json

#: Names to which the working directory gets no links: the workspace's own folder, and caches of interpreters.
NEVER_LINKED = frozenset({".paceline", "__pycache__"})
#: Maximum number of links that the working directory gets for each of the folders above the source folder.
_NAMES = 4096
#: Folder that receives, when the run has ended, the files that the script wrote above its copy of the source.
ABOVE = "above"


@dataclass(frozen=True)
class Place:
    """The place of the source's copy in the run's working directory `work`.

    Attributes:
        copy: The copy's path relative to `work`; "" for `work` itself.
        directory: The workers' current directory, relative to `work`.
        source: The user's own source folder.
        has_outputs: Whether `outputs` is a real folder and not a link, since `..` in a linked folder leads elsewhere.
    """

    copy: str
    directory: str
    source: str
    has_outputs: bool = True

    @property
    def outputs(self) -> str:
        return os.path.join(self.directory, "outputs")

    def original(self, path: str) -> str:
        """Return the user's own path of a file, given its path relative to `work`."""
        return os.path.join("/", path) if self.copy else os.path.join(self.source, path)

    def with_own_paths(self, text: str, run_dir: str | Path) -> str:
        """Replace paths in the working directory of the run's folder by the user's own paths."""
        return text.replace(f"{run_dir}/work/", self.original(""))


def place(record: Any, *, is_shared: bool = True) -> Place:
    """Return where in `work` a run's source copy is, from the record's JSON.

    is_shared: Whether this machine has the user's folders.
    """
    told = record if isinstance(record, dict) else {}
    source, within = str(told.get("source_directory") or "."), (told.get("job") or {}).get("working_directory")
    if within is None:
        return Place("", "", source, has_outputs=False)
    if not is_shared:
        return Place("", "" if within.split("/")[0] in ("..", ".") else within, source)
    copy = os.path.normpath(source).lstrip("/")
    return Place(copy, os.path.normpath(os.path.join(copy, within)), source)


def make(folder: RunFolder, *, is_shared: bool = True, sent: Mapping[str, Path | None] | None = None) -> Path:
    """Copy the snapshot and the job's files to the working directory. Return its path.

    Args:
        folder: The run's folder.
        is_shared: Whether this machine has the user's folders, so that the copy can link to files in them.
        sent: Path in the source folder -> local path of a file that was sent to this machine; None for an empty folder.

    Raises:
        OSError: The disk is full, or the snapshot is gone.
    """
    try:
        return _make(folder, is_shared=is_shared, sent=sent)
    finally:
        # Remove the incomplete copy after an error, because it would keep a full disk full.
        shutil.rmtree(folder.unfinished_work, ignore_errors=True)


def _make(folder: RunFolder, *, is_shared: bool, sent: Mapping[str, Path | None] | None) -> Path:
    source, target, beside = folder.snapshot.resolve(strict=True), folder.work, folder.unfinished_work
    # Remove both folders: an earlier supervisor of this run leaves them behind if it is killed in this function.
    for old in (beside, target):
        shutil.rmtree(old, ignore_errors=True)
    record = read_json(folder.job)
    at = place(record, is_shared=is_shared)
    copy = beside / at.copy
    copy.parent.mkdir(parents=True, exist_ok=True)
    _copy(str(source), str(copy))
    for path, text in _files(record).items():
        given = _inside(copy, path)
        # Replace the source's file instead of writing to it, because the path may be a link.
        given.unlink(missing_ok=True)
        given.write_text(text)
    for path, original in (sent or {}).items():
        _bring(original, _inside(copy, path))
    if sent:
        write_json(folder.sent, {path: str(original) for path, original in sent.items() if original is not None})
    if is_shared:
        _link(folder, beside, at)
    if at.has_outputs:
        (beside / at.outputs).mkdir(parents=True, exist_ok=True)
    else:
        # The link is relative, so that it works from every mount of the run's folder, also in a container.
        up = os.path.relpath(".", at.directory or ".")
        (beside / at.outputs).symlink_to(os.path.normpath(os.path.join(up, "..", folder.outputs.name)))
    # The rename makes the copy appear whole or not at all: a restarted run continues with an existing copy.
    os.rename(beside, target)
    if at.has_outputs and not folder.outputs.is_symlink():
        # Make a real folder in the copy, for scripts that use `..` in it, and link the run's `outputs` to this folder.
        for one in folder.outputs.iterdir() if folder.outputs.is_dir() else ():
            os.rename(one, target / at.outputs / one.name)
        with contextlib.suppress(FileNotFoundError):
            folder.outputs.rmdir()
        folder.outputs.symlink_to(os.path.join(target.name, at.outputs))
    return target


def _inside(copy: Path, path: str) -> Path:
    found = copy / path
    found.parent.mkdir(parents=True, exist_ok=True)
    if not found.parent.resolve().is_relative_to(copy.resolve()):
        raise OSError(errno.ELOOP, "a link of the source leads out of it", path)
    return found


def _bring(original: Path | None, target: Path) -> None:
    if os.path.lexists(target):
        return
    if original is None:
        target.mkdir()
    elif original.is_dir():
        copy_tree(original, target)
    else:
        copy_file(str(original), str(target))
    for path in (target, *target.rglob("*")) if original else ():
        path.chmod(path.stat().st_mode | stat.S_IWUSR)


def _link(folder: RunFolder, top: Path, at: Place) -> None:
    """Link files that the snapshot lacks, and folders around the copy, into `work`."""
    for one in linked.read(folder.linked):
        path, original = top / at.copy / one.path, os.path.join(at.source, one.path)
        if one.is_linked and os.path.lexists(original) and not os.path.lexists(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(original)
    if not at.copy:
        return
    if os.path.lexists(os.path.join(at.source, ".git")) and not os.path.lexists(top / at.copy / ".git"):
        (top / at.copy / ".git").symlink_to(os.path.join(at.source, ".git"))
    is_inside = f"{at.directory}/".startswith(f"{at.copy}/")
    opened = {*_above(at.copy), *(() if is_inside else (*_above(at.directory), at.directory))}
    for name in opened:
        (top / name).mkdir(parents=True, exist_ok=True)
    for name in opened:
        _link_names(top, name, linked.RESULTS if name == at.directory else frozenset())


def _link_names(top: Path, name: str, results: frozenset[str]) -> None:
    """Link the entries of the folder `/name` into `top/name`, except names in `results`."""
    with contextlib.suppress(OSError), os.scandir(f"/{name}") as found:
        names = [entry.name for entry in islice(found, _NAMES)]
        # Create the links relative to the open folder, because this takes a third less time than using whole paths.
        target = os.open(top / name, os.O_DIRECTORY)
        try:
            for one in names:
                if one not in NEVER_LINKED and one not in results:
                    with contextlib.suppress(FileExistsError):
                        os.symlink(f"/{name}/{one}" if name else f"/{one}", one, dir_fd=target)
        finally:
            os.close(target)


def _above(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(len(parts))]


def _found(folder: RunFolder, record: Any) -> Place:
    """Return where the source's copy is now; `clean` may have moved it."""
    at = place(record)
    # Check the whole path, because the source may contain a folder with the name of the path's first folder, such as `home`.
    is_among_links = at.copy and (folder.work / at.copy).is_dir()
    return at if is_among_links else place(record, is_shared=False)


def clean(folder: RunFolder) -> None:
    """Remove unchanged files of snapshot and job, links that `make` created, and empty folders.

    If the copy was surrounded by links, its remaining files move to `work`, and files beside it to `work/above`.
    """
    work = folder.work
    if not work.is_dir() or work.is_symlink():
        return
    record = read_json(folder.job)
    at = _found(folder, record)
    with contextlib.suppress(OSError):
        rescue_outputs(folder)
        if (work / at.outputs).is_symlink():
            (work / at.outputs).unlink()
        copy = work / at.copy
        for path, text in _files(record).items():
            if _has(copy / path, text):
                (copy / path).unlink()
        source = folder.snapshot.resolve(strict=True)
        sent = {copy / path: original for path, original in (read_json(folder.sent) or {}).items()}
        # Walk bottom-up, because only empty folders can be removed. `os.walk` lists links to folders, but does not follow them.
        for directory, folders, files in os.walk(work, topdown=False):
            inside = os.path.relpath(directory, work)
            original = source / os.path.relpath(directory, copy)
            # Skip __pycache__, which holds no results: interpreters write it beside the sources.
            is_cache = "__pycache__" in Path(inside).parts
            for name in (*files, *(name for name in folders if os.path.islink(os.path.join(directory, name)))):
                path = os.path.join(directory, name)
                own = at.original(os.path.normpath(os.path.join(inside, name)))
                if (
                    is_cache
                    or _leads_to(path, own)
                    or _same(path, original / name)
                    or (sent and (came := _original(Path(path), sent)) and _same(path, came))
                ):
                    os.unlink(path)
            with contextlib.suppress(OSError):
                os.rmdir(directory)  # fails unless the folder is empty
        _flatten(folder, at)


def _flatten(folder: RunFolder, at: Place) -> None:
    """Move the copy's remaining files to `work`, and its parents' files to `work/above`."""
    if not at.copy or not folder.work.is_dir():
        return
    beside = folder.work.with_name(f".{ABOVE}")
    os.rename(folder.work, beside)
    if (beside / at.copy).is_dir():
        os.rename(beside / at.copy, folder.work)
    for name in reversed(_above(at.copy)):
        with contextlib.suppress(OSError):
            os.rmdir(beside / name)
    if beside.is_dir():
        folder.work.mkdir(exist_ok=True)
        os.rename(beside, folder.work / ABOVE)


def left_files(folder: RunFolder) -> Iterator[tuple[str, Path]]:
    """Yield name ("work/out/model.pt") and path of each file that the script left.

    Yield nothing during the run, because `work` then also contains the source.
    """
    if states.is_final(read_json(folder.state)):
        found = links.entries(os.fspath(folder.path), folder.work.name)
        yield from ((entry.name, folder.path / entry.real) for entry in found if entry.kind == "file")


def rescue_outputs(folder: RunFolder) -> None:
    """Move the files of the script's `outputs` into the run's own `outputs` folder.

    Follow no links, because a link made in a container could lead to files that only the supervisor may write.

    Raises:
        OSError: The disk is full, or access is denied.
    """
    outputs, top = folder.work / _found(folder, read_json(folder.job)).outputs, os.path.realpath(folder.path)
    # Check the parent folders for links too, because the files would move to wherever such a link leads.
    is_own = os.path.realpath(outputs) == os.path.join(top, os.path.relpath(outputs, folder.path))
    if folder.outputs.is_symlink():
        folder.outputs.unlink()
        if is_own and outputs.is_dir():
            _keep_links(outputs, folder.outputs)
            os.rename(outputs, folder.outputs)
        folder.outputs.mkdir(exist_ok=True)
    if not is_own:
        return
    for directory, folders, files in os.walk(outputs):
        linked_folders = [name for name in folders if os.path.islink(os.path.join(directory, name))]
        for name in (*files, *linked_folders):
            target = folder.outputs / os.path.relpath(directory, outputs) / name
            place = os.path.relpath(os.path.realpath(target.parent), top)
            # Use the path without links, because a link in the run's outputs may lead out of them.
            if not os.path.lexists(target) and place.split(os.sep)[0] in links.KEPT:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(os.path.join(directory, name), target)


def _keep_links(outputs: Path, target: Path) -> None:
    """Rewrite relative links that lead out of `outputs`, which moves to the path `target`."""
    for directory, folders, files in os.walk(outputs):
        for path in (os.path.join(directory, name) for name in (*folders, *files)):
            if not os.path.islink(path) or os.path.isabs(link := os.readlink(path)):
                continue
            meant = os.path.normpath(os.path.join(directory, link))
            if not f"{meant}/".startswith(f"{outputs}/"):
                moved = target / os.path.relpath(directory, outputs)
                os.unlink(path)
                os.symlink(os.path.relpath(meant, moved), path)


def _files(record: Any) -> dict[str, str]:
    return ((record.get("job") or {}).get("files") or {}) if isinstance(record, dict) else {}


def _has(path: Path, text: str) -> bool:
    try:
        return not path.is_symlink() and path.read_text() == text
    except (OSError, ValueError):
        return False


def _copy(source: str, target: str) -> None:
    os.mkdir(target)
    with os.scandir(source) as entries:
        for entry in entries:
            path = os.path.join(target, entry.name)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), path)
            elif entry.is_dir():
                _copy(entry.path, path)
            else:
                found = entry.stat()
                shutil.copyfile(entry.path, path)
                os.chmod(path, stat.S_IMODE(found.st_mode))
                os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def _original(path: Path, sent: Mapping[Path, str]) -> Path | None:
    for above in (path, *path.parents):
        if above in sent:
            return Path(sent[above]) / path.relative_to(above)
    return None


def _leads_to(path: str, original: str) -> bool:
    try:
        return os.readlink(path) == original
    except OSError:
        return False


def _same(path: str, original: Path) -> bool:
    try:
        mine, theirs = os.lstat(path), os.lstat(original)
    except OSError:
        return False
    if stat.S_ISLNK(mine.st_mode):
        return stat.S_ISLNK(theirs.st_mode) and os.readlink(path) == os.readlink(original)
    # Copies keep the files' times, so an equal time means an unchanged file.
    return (mine.st_size, mine.st_mtime_ns) == (theirs.st_size, theirs.st_mtime_ns)
