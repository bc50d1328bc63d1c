"""List the files that a run leaves, without following links out of the run's folder.

A script may create any link in its folders. Paceline resolves links on the machine where the script has run. A link
into the run's own folders is kept, or replaced by its target. Other links, pipes, sockets and devices are excluded.

    <run>/outputs/latest -> /home/me/.../<run>/outputs/step-9       the link  latest -> step-9
    <run>/outputs/best.pt -> ../checkpoints/9.pt                    the link, unchanged
    <run>/outputs/config.yaml -> ../work/config.yaml                the file: `work` does not outlive the run
    <run>/uploads/model/best.pt -> ../../checkpoints/9.pt           the link, and the file where the output is stored
    <run>/outputs/data -> /datasets/a                               excluded

Login hosts run this file with their own Python 3.6 or later. So it uses only the standard library and quotes annotations.
"""

import os
import stat
from typing import Iterator, NamedTuple  # noqa: UP035

#: Names of the folders in a run's folder that hold the user's files. Links in them may lead only to these folders.
FOLDERS = ("outputs", "artifacts", "checkpoints", "uploads", "work")
#: Folders that are transferred with the run and are kept after its end, so a link into them need not become a copy.
KEPT = ("outputs", "artifacts", "checkpoints")
_SPECIAL = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISCHR, "a device"),
)


class Entry(NamedTuple):
    """A file, folder, link or excluded name below a run's folder.

    Attributes:
        name: Path relative to the run's folder.
        kind: "file", "dir", "link" or "left" (excluded).
        real: The path of a file or folder after all links are resolved, relative to the run's folder.
        target: The relative and normalized target of a link.
        why: The reason for the exclusion, as the end of the sentence "NAME is ...".
    """

    name: str
    kind: str
    real: str = ""
    target: str = ""
    why: str = ""


def entries(top: str, start: str, follow: bool = False) -> "Iterator[Entry]":
    """Yield every entry at and below `start`, folders before their content.

    Args:
        top: The run's folder.
        start: A path relative to `top`.
        follow: Yield the target of each link instead of the link.
    """
    real_top = os.path.realpath(top)
    parts = start.split("/")
    above = tuple(os.path.join(real_top, *parts[:count]) for count in range(len(parts)))
    waiting: list[tuple[str, str, tuple[str, ...]]] = [(start, start, above)]
    while waiting:
        name, real, above = waiting.pop()
        entry = _entry(real_top, name, real, above, follow)
        if entry is None:
            continue
        if entry.kind != "dir":
            yield entry
            continue
        inside = os.path.join(real_top, entry.real)
        try:
            below = sorted(os.listdir(inside), reverse=True)
        except FileNotFoundError:
            continue
        except OSError as error:
            yield Entry(name, "left", why=f"a folder that can't be read: {error.strerror}")
            continue
        yield entry
        waiting += [(name + "/" + one, entry.real + "/" + one, (*above, inside)) for one in below]


def target_in(name: str, target: str) -> "str | None":
    """Return the normalized target of link `name`; None if outside the run.

    No folder above `name` may be a link. If all links of a run pass this check, no chain of links leads out of the run.
    """
    folder = os.path.dirname(name)
    meant = os.path.normpath(os.path.join(folder, target))
    if os.path.isabs(target) or "\0" in target or _top_of(meant) == "..":
        return None
    tops = {"logs": ("attempts",)}.get(_top_of(name), FOLDERS if _top_of(name) in FOLDERS else ())
    if _top_of(meant) not in tops or name == _top_of(name):
        return None
    return os.path.relpath(meant, folder)


def find(top: str, name: str) -> "Entry | None":
    """Return the file or folder at a path, following links; None if missing."""
    real_top = os.path.realpath(top)
    place = os.path.relpath(os.path.realpath(os.path.join(real_top, name)), real_top)
    if not may_be_had(name, place):
        return Entry(name, "left", why="behind a link that leads out of the run")
    try:
        mode = os.lstat(os.path.join(real_top, place)).st_mode
    except OSError:
        return None
    if stat.S_ISDIR(mode):
        return Entry(name, "dir", real=place)
    if stat.S_ISREG(mode):
        return Entry(name, "file", real=place)
    return None if stat.S_ISLNK(mode) else Entry(name, "left", why=special(mode))


def may_be_had(name: str, place: str) -> bool:
    """Return whether `place` is in a folder that a run's link `name` may point into."""
    tops = ("logs", "attempts") if _top_of(name) == "logs" else ()
    return _top_of(place) in FOLDERS + tops


def open_below(top: str, name: str) -> int:
    """Open a file below `top` without following links, and return its descriptor.

    Raises:
        OSError: The file can't be opened, or is not a regular file.
    """
    folder, _, last = name.rpartition("/")
    at = open_folder_below(top, folder)
    try:
        # With O_NONBLOCK, opening a pipe in the file's place does not wait for a writer.
        fd = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=at)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(22, "is no file any more", name)
    return fd


def open_folder_below(top: str, name: str) -> int:
    """Open a folder below `top` ("": `top` itself) without following links. Return its fd.

    Raises:
        OSError: The folder is missing, or its path contains a link.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    at = os.open(os.path.realpath(top), flags)
    for part in name.split("/") if name else ():
        try:
            inner = os.open(part, flags | os.O_NOFOLLOW, dir_fd=at)
        finally:
            os.close(at)
        # Open each folder relative to its parent's descriptor, because a path could lead through a parent that has become a link.
        at = inner
    return at


def _entry(top: str, name: str, real: str, above: "tuple[str, ...]", follow: bool) -> "Entry | None":
    path = os.path.join(top, real)
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return None  # the path has been removed in the meantime
    if stat.S_ISDIR(mode):
        return Entry(name, "dir", real=real)
    if stat.S_ISREG(mode):
        return Entry(name, "file", real=real)
    if not stat.S_ISLNK(mode):
        return Entry(name, "left", why=special(mode))
    try:
        said = f"a link to {os.readlink(path)!r}"
    except OSError:
        return None
    place = os.path.relpath(os.path.realpath(path), top)
    if not may_be_had(name, place):
        return Entry(name, "left", why=said.replace("a link", "a link that leads out of the run,", 1))
    try:
        found = os.lstat(os.path.join(top, place)).st_mode
    except OSError:
        return Entry(name, "left", why=said + ", where there is nothing")
    if stat.S_ISLNK(found):
        return Entry(name, "left", why=said + ", which leads in a circle")
    if not (stat.S_ISDIR(found) or stat.S_ISREG(found)):
        return Entry(name, "left", why=said + ", " + special(found))
    if not follow and name != _top_of(name) and (_top_of(place) in KEPT or _share_of(name) == _share_of(place)):
        return Entry(name, "link", target=os.path.relpath(place, os.path.dirname(name)))
    if stat.S_ISREG(found):
        return Entry(name, "file", real=place)
    if os.path.join(top, place) in above:
        return Entry(name, "left", why=said + ", a folder that it lies in")
    return Entry(name, "dir", real=place)


def special(mode: int) -> str:
    """Return the type of a special file, such as "a pipe"; "no file" if unknown."""
    return next((text for is_it, text in _SPECIAL if is_it(mode)), "no file")


def _share_of(name: str) -> "list[str]":
    return name.split("/")[: 2 if name.startswith("uploads/") else 1]


def _top_of(name: str) -> str:
    return name.split("/", 1)[0]
