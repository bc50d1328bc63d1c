"""Who holds a lock on a file, as the kernel's list tells.

A host that has nothing of Paceline is given this text, in front of `paceline.targets.leases`, for its own Python, 3.6 or later:
standard library alone, and annotations in quotes.
"""

import os

# ruff: noqa: UP031


def holder(path: "str | os.PathLike[str]") -> str:
    """The holder of the lock in words: "process 41 (python train.py) of user alice"; as far as it can be seen from here."""
    # 0 stands for a process that this container does not see. One that is named may have ended: its children hold the lock
    # then.
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
    """The name of the user of this number; the number where it has none."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def rows() -> "list[list[str]] | None":
    """The kernel's list of locks; None where it gives none."""
    try:
        with open("/proc/locks") as file:
            return [line.split() for line in file]
    except OSError:
        return None


def pids(path: "str | os.PathLike[str]", rows: "list[list[str]]") -> "list[int]":
    """The processes that have taken the lock of this file: "1: FLOCK  ADVISORY  WRITE 4711 fe:00:123 0 EOF"; those that wait
    have "->" in the second place.
    """
    try:
        inode = str(os.stat(path).st_ino)
    except OSError:
        return []
    found = [row for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5].rpartition(":")[2] == inode]
    return [int(row[4]) for row in found if row[4].isdigit()]
