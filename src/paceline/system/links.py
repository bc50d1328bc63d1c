"""The files that a run leaves, seen without ever being led out of it: what each link stands for, and what is left out.

A script may put links into its folders, and it may be anybody's. A link is resolved where the script has run, by the
folders there: one that leads to another of the run's own folders of files stands for what is there; any other is left
out, by name, and never opened. So are links that lead nowhere, pipes, sockets and devices.

    <run>/outputs/latest -> /home/me/.../<run>/outputs/step-9       the link  latest -> step-9
    <run>/outputs/best.pt -> ../checkpoints/9.pt                    the link, as it is
    <run>/outputs/config.yaml -> ../work/config.yaml                the file: `work` does not outlive the run
    <run>/uploads/model/best.pt -> ../../checkpoints/9.pt           the link, and the file where the output is stored
    <run>/outputs/data -> /datasets/a                               left out

Login hosts run this text with their own Python, 3.6 or later: standard library alone, and annotations in quotes.
"""

import os
import stat
from typing import Iterator, NamedTuple  # noqa: UP035

#: Folders of the user's files in a run's folder; nothing else of it may be read through a link.
FOLDERS = ("outputs", "artifacts", "checkpoints", "uploads", "work")
#: Those that travel with the run and stay: a link into one can stay a link.
KEPT = ("outputs", "artifacts", "checkpoints")
_SPECIAL = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISCHR, "a device"),
)


class Entry(NamedTuple):
    """One name below a run's folder.

    name: relative to the run's folder. kind: "file", "dir", "link" or "left". real: of a file or folder, where it lies,
    relative to the run's folder too, by a way without links. target: of a link, relative, without a detour.
    why: of what is left out, for "NAME is ...".
    """

    name: str
    kind: str
    real: str = ""
    target: str = ""
    why: str = ""


def entries(top: str, start: str, follow: bool = False) -> "Iterator[Entry]":
    """Everything at and below `start`, a name relative to the run's folder `top`; folders before what is in them.

    follow: give what links stand for in their place, as files and folders, never a link.
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
    """The target of a link `name` as it may be made here: relative, with `..` in front alone; None where it leads out of
    the run's files. `name` itself lies behind no link.

    For who takes links from another machine, whatever that says: chains of such links never lead out.
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
    """The entry that the run has under this one name, which may lie behind links; None where there is nothing."""
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
    """True if what lies at `place` may be had under `name`, both relative to the run's folder."""
    tops = ("logs", "attempts") if _top_of(name) == "logs" else ()
    return _top_of(place) in FOLDERS + tops


def open_below(top: str, name: str) -> int:
    """Open a file by a way on which no link is followed: what was a folder or file a moment ago may be a link now.

    Raises:
        OSError: also where it is no file any more.
    """
    folder, _, last = name.rpartition("/")
    at = open_folder_below(top, folder)
    try:
        # NONBLOCK: a pipe in the file's place would keep this waiting until somebody writes to it.
        fd = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=at)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(22, "is no file any more", name)
    return fd


def open_folder_below(top: str, name: str) -> int:
    """Open a folder likewise; "" is the top itself, which may be reached through links.

    Raises:
        OSError: there is none, or a link is on the way.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    at = os.open(os.path.realpath(top), flags)
    for part in name.split("/") if name else ():
        try:
            inner = os.open(part, flags | os.O_NOFOLLOW, dir_fd=at)
        finally:
            os.close(at)
        # Each step starts at the folder that was opened before, by its descriptor: no name above is looked up a second time.
        at = inner
    return at


def _entry(top: str, name: str, real: str, above: "tuple[str, ...]", follow: bool) -> "Entry | None":
    path = os.path.join(top, real)
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return None  # gone meanwhile
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
    """What a file of this mode is, that is neither file, folder nor link: "a pipe", for "NAME is ..."."""
    return next((text for is_it, text in _SPECIAL if is_it(mode)), "no file")


def _share_of(name: str) -> "list[str]":
    """The beginning of a name by which files come and go as one: `work`, and each output for itself."""
    return name.split("/")[: 2 if name.startswith("uploads/") else 1]


def _top_of(name: str) -> str:
    return name.split("/", 1)[0]
