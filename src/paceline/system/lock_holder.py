"""Find the holder of a file lock in /proc/locks.

Hosts without Paceline run the text of this file and of `paceline.targets.host_leases` with their own Python, 3.6 or
later. So the file uses only the standard library, and quotes its annotations.
"""

import os

# ruff: noqa: UP031


def holder(path: "str | os.PathLike[str]") -> str:
    """Return a text about a lock's holder: "process 41 (python train.py) of user alice"."""
    # Skip pid 0, a process outside this container. A listed process may have ended, while its children still hold the lock.
    for pid in filter(None, pids(path, rows() or [])):
        try:
            with open("/proc/%d/cmdline" % pid, "rb") as file:
                words = file.read(200).replace(b"\0", b" ").decode(errors="replace").strip()
            uid = os.stat("/proc/%d" % pid).st_uid
        except OSError:
            return "process %d, which has ended and left it to one that it had started," % pid
        shown = "".join(char if char.isprintable() else "?" for char in words)[:80]
        return "process %d (%s) of user %s" % (pid, shown or "?", user_name(uid))
    return "a process that can't be seen from here"


def user_name(uid: int) -> str:
    """Return a user's name, or the number if there is no name."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def rows() -> "list[list[str]] | None":
    """Return the rows of /proc/locks, or None if it can't be read."""
    try:
        with open("/proc/locks") as file:
            return [line.split() for line in file]
    except OSError:
        return None


def pids(path: "str | os.PathLike[str]", rows: "list[list[str]]") -> "list[int]":
    """Return the pids of processes that hold a file's lock, or [].

    rows: Lines of /proc/locks, such as "1: FLOCK  ADVISORY  WRITE 4711 fe:00:123 0 EOF", each split into words. For a
        process that waits for the lock, the second word is "->".
    """
    try:
        inode = str(os.stat(path).st_ino)
    except OSError:
        return []
    found = [row for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5].rpartition(":")[2] == inode]
    return [int(row[4]) for row in found if row[4].isdecimal()]
