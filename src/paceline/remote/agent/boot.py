"""The program that is sent to a node before anything of Paceline is there; it needs nothing but Python.

The supervisor (paceline.remote.link.bootstrap) sends this file's text and has `boot` called with these settings:

    nonce       marks the lines that are meant for the supervisor among what the node's shell says
    digest      of the library
    shared      a folder that holds the library if the node sees the supervisor's files, or None
    folder      where the library lies otherwise: <folder>/lib/<digest>/paceline
    agent       settings of the agent

It answers with one line if it needs the library, and with one when it has it, or why it has not. Written in the words
of Python 3.6, so that one that is too old can say so.
"""

import io
import json
import os
import stat
import struct
import sys
import time

TYPE_CHECKING = False  # typing's own takes its time to load
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, Optional, Tuple  # noqa: UP035

OLDEST = (3, 10)

#: Beside the package: what `state_of` told of it when its hash was last made, and the hash.
_KNOWN = ".paceline-digest"
#: A file written so shortly ago may be written again without a trace: file systems count time in steps, of 2 s at most.
_STEADY_S = 3.0


def boot(settings: "Dict[str, Any]") -> None:  # noqa: UP006
    """Find or take the library, then be the agent."""
    # Frames go over a copy of standard output.
    link = os.dup(1)
    # What anything here prints must not get between the frames.
    os.dup2(2, 1)

    def say(**told: "Any") -> None:
        told["python"] = [sys.executable, *sys.version_info[:3]]
        os.write(link, f"\n{settings['nonce']} {json.dumps(told)}\n".encode())

    if sys.version_info[:2] < OLDEST:
        say(error="old")
        return
    top = os.path.expanduser(settings["folder"])
    mine = os.path.join(top, "lib", settings["digest"])
    found = None
    try:
        os.makedirs(top, 0o700, exist_ok=True)
        # Made first: once the folder is there, and ours, no other user can put anything at its place.
        check_owner(top)
        for folder in (settings["shared"], mine):
            if folder and found is None and digest_in(folder, is_ours=folder == mine) == settings["digest"]:
                found = folder
        if found is None:
            os.makedirs(os.path.join(top, "lib"), exist_ok=True)
            say(wanted=True)
            (size,) = struct.unpack(">Q", sys.stdin.buffer.read(8))
            unpack(sys.stdin.buffer.read(size), mine, settings["digest"])
            found = mine
    except (OSError, EOFError, struct.error) as error:
        say(error=str(error), folder=top)
        return
    say(ready=found)
    sys.path.insert(0, found)
    from paceline.remote.agent.guardian import be_agent

    be_agent(0, link, {**settings["agent"], "library": found, "folder": top})


def digest_in(folder: str, is_ours: bool = False) -> "Optional[str]":  # noqa: UP045
    """The `digest` of the package in a folder. It is kept (`known_digest`) in a folder of our own, and in a workspace's, which
    has a link to the package. Beside an installation nothing is written.
    """
    package = os.path.join(folder, "paceline")
    return known_digest(folder) if is_ours or os.path.islink(package) else digest(package)


def known_digest(folder: str) -> "Optional[str]":  # noqa: UP045
    """The `digest` of the package in a folder of our own. A file beside it keeps it, and it is made again only when the package's
    files are no longer as they were: to read a thousand files takes ten times as long as to look at them.
    """
    package, path = os.path.join(folder, "paceline"), os.path.join(folder, _KNOWN)
    try:
        # Looked at before they are read: what is written between the two is then seen as a change.
        now, (files, changed) = time.time(), state_of(package)
    except OSError:
        return digest(package)
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            told, _, kept = file.read().partition("\n")
        if files and kept == files:
            return told
    except (OSError, ValueError):
        pass
    found = digest(package)
    if found and changed < now - _STEADY_S:
        beside = f"{path}-{os.getpid()}-{int(time.time() * 1e6)}"
        try:
            with open(beside, "w", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
                file.write(f"{found}\n{files}")
            os.rename(beside, path)
        except OSError:  # a full disk, or one that is not to be written to: it goes without
            try:
                os.unlink(beside)
            except OSError:
                pass
    return found


def state_of(package: str) -> "Tuple[str, float]":  # noqa: UP006
    """A line for each file of a package, which is another one when the file has been changed; and when the last of them was."""
    lines, last = [], 0.0
    for path in files_of(package):
        about = os.stat(path)
        # Nobody can set the time of a change, as whoever copies files may set that of their contents.
        lines.append(f"{path[len(package) :]!r} {about.st_size} {about.st_ino} {about.st_ctime_ns}")
        last = max(last, about.st_ctime)
    return "\n".join(lines), last


def files_of(package: str) -> "Iterator[str]":
    """The path of each file of a package, without what Python makes of them."""
    for directory, folders, files in os.walk(package):
        # Sorted, for os.walk gives the names in the order of the disk, and the same library has to have the same hash.
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            if not name.endswith((".pyc", ".pyo")):
                yield os.path.join(directory, name)


def digest(package: str) -> "Optional[str]":  # noqa: UP045
    """A hash of the names and contents of a package's files; None where there is no such package."""
    if not os.path.isdir(package):
        return None
    import hashlib  # loads OpenSSL, which few agents need

    total = hashlib.sha256()
    try:
        for path in files_of(package):
            with open(path, "rb") as file:
                content = hashlib.sha256(file.read()).hexdigest()
            total.update(f"{os.path.relpath(path, package)}\0{content}\0".encode())
    except OSError:
        return None
    return total.hexdigest()[:20]


def check_owner(folder: str) -> None:
    """Refuse a folder that somebody else has made where everybody can, such as /tmp: it holds programs that are run."""
    found = os.lstat(folder)
    parent = os.stat(os.path.dirname(os.path.abspath(folder)))
    if not parent.st_mode & stat.S_IWOTH:
        return
    if found.st_uid != os.geteuid():
        raise PermissionError(
            f"{folder!r} belongs to another user (number {found.st_uid}), who or an administrator has to remove it"
        )
    if stat.S_ISLNK(found.st_mode) or found.st_mode & stat.S_IWOTH:
        raise PermissionError(f"{folder!r} is {'a link' if stat.S_ISLNK(found.st_mode) else 'open to everybody'}")


def unpack(data: bytes, folder: str, wanted: str) -> None:
    """Put the library into `folder`, whole or not at all."""
    import shutil
    import zipfile

    beside = os.path.join(os.path.dirname(folder), f".new-{os.getpid()}-{int(time.time() * 1e6)}")
    os.mkdir(beside)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            archive.extractall(beside)
        package = os.path.join(folder, "paceline")
        if os.path.isdir(folder) and digest(package) != wanted:
            # Somebody has cleaned up in it: /tmp on many machines loses its older files.
            os.rename(folder, beside + "-old")
            shutil.rmtree(beside + "-old", ignore_errors=True)
        try:
            os.rename(beside, folder)
        except OSError:
            # Another run may have put the same library there at the same moment.
            if digest(package) != wanted:
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
