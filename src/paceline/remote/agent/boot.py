"""The first program on a node, which finds or receives Paceline's library, then starts the agent.

The supervisor (paceline.remote.link.bootstrap) sends this file's text and calls `boot` with these settings:

    nonce       random prefix of the lines that this program writes for the supervisor, among other output of the shell
    digest      hash of the library
    shared      a folder with the library if the node may see the supervisor's files, or None
    folder      if `shared` does not have the library, it is in <folder>/lib/<digest>/paceline
    agent       settings of the agent

The program writes a line if it needs the library, and a line once it has the library or has failed. The code runs on
Python 3.6, so that an interpreter that is too old for the library can report its version.
"""

import io
import json
import os
import stat
import struct
import sys
import time

TYPE_CHECKING = False  # Python's module `typing` is slow to load
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, Optional, Tuple  # noqa: UP035

OLDEST = (3, 10)

#: A file beside the package that caches the package's hash and the state of the files from which the hash was computed.
_KNOWN = ".paceline-digest"
#: At this age in seconds a file's timestamps prove that it is unchanged. Timestamps may be as coarse as 2 s.
_STEADY_S = 3.0


def boot(settings: "Dict[str, Any]") -> None:  # noqa: UP006
    """Find or receive the library, then become the node's agent."""
    # The agent sends its frames to this copy of standard output.
    link = os.dup(1)
    # Redirect standard output to standard error. Otherwise text that other code prints would mix with the agent's frames.
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
        # First create the folder, then check its owner: other users can't replace a folder that this user owns.
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
    """Return the hash of the files in `<folder>/paceline`, or None.

    Cache the hash in `folder` only if Paceline made this folder: `is_ours` is true, or `paceline` is a symbolic link.
    """
    package = os.path.join(folder, "paceline")
    return known_digest(folder) if is_ours or os.path.islink(package) else digest(package)


def known_digest(folder: str) -> "Optional[str]":  # noqa: UP045
    """Return the hash of a package's files, cached until a file changes."""
    package, path = os.path.join(folder, "paceline"), os.path.join(folder, _KNOWN)
    try:
        # Get the state of the files before hashing them, so that a write during the hashing counts as a change.
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
        except OSError:  # the disk is full or read-only, so cache nothing
            try:
                os.unlink(beside)
            except OSError:
                pass
    return found


def state_of(package: str) -> "Tuple[str, float]":  # noqa: UP006
    """Return a text that changes with any file, and the last change's time."""
    lines, last = [], 0.0
    for path in files_of(package):
        about = os.stat(path)
        # Use ctime, because users can set mtime to any value.
        lines.append(f"{path[len(package) :]!r} {about.st_size} {about.st_ino} {about.st_ctime_ns}")
        last = max(last, about.st_ctime)
    return "\n".join(lines), last


def files_of(package: str) -> "Iterator[str]":
    """Yield the path of each file of a package, except bytecode, documentation and examples."""
    for directory, folders, files in os.walk(package):
        skipped = {"__pycache__", "docs", "examples"} if directory == package else {"__pycache__"}
        # Sort the names: os.walk uses the disk's order, on which the hash must not depend.
        folders[:] = sorted(set(folders) - skipped)
        for name in sorted(files):
            if not name.endswith((".pyc", ".pyo")):
                yield os.path.join(directory, name)


def digest(package: str) -> "Optional[str]":  # noqa: UP045
    """Return a hash of a package's file names and contents; None if unreadable."""
    if not os.path.isdir(package):
        return None
    import hashlib  # imported here because it loads OpenSSL, which few agents need

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
    """Raise OSError if other users can change the folder: the agent runs programs from it."""
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
    """Unpack the library's zip archive into `folder` atomically. `wanted` is the library's digest."""
    import shutil
    import zipfile

    beside = os.path.join(os.path.dirname(folder), f".new-{os.getpid()}-{int(time.time() * 1e6)}")
    os.mkdir(beside)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            archive.extractall(beside)
        package = os.path.join(folder, "paceline")
        if os.path.isdir(folder) and digest(package) != wanted:
            # Many machines delete old files in /tmp, so the library in the folder may be incomplete: replace it.
            os.rename(folder, beside + "-old")
            shutil.rmtree(beside + "-old", ignore_errors=True)
        try:
            os.rename(beside, folder)
        except OSError:
            # The rename fails if another run has just stored the same library.
            if digest(package) != wanted:
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
