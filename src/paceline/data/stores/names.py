"""Names of files: which may be made below a folder, and which a pattern means.

A store's names are whatever somebody put there; none may lead out of the folder that a run is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from paceline.errors import DataError

#: A file system's limit on one part of a path, in bytes: Linux, macOS, and all that they mount.
_MAX_PART_BYTES = 255


def check_relative(path: str, where: str) -> str:
    """The same path, if it names a file below a folder: relative, without `..`, `.` or an empty part.

    where: the store, for the message.

    Raises:
        DataError: it does not, has a NUL, or a part that is too long for a file system.
    """
    for part in path.split("/"):
        reason = ""
        if part in ("", ".", ".."):
            reason = f"has the part {part!r}, so it can't be a file below a folder"
        elif "\0" in part:
            reason = "has a NUL, which no file name may have"
        elif len(part.encode("utf-8", "surrogateescape")) > _MAX_PART_BYTES:
            reason = f"has a part of more than {_MAX_PART_BYTES} bytes, which no file system takes"
        if reason:
            raise DataError(f"the name {path!r} in {where} {reason}. Rename it there, or take a folder without it.")
    return path


def clean_path(path: str, where: str) -> str:
    """A path as a caller gives it, in the form in which stores are asked: no leading `/`, no `.`, no doubled `/`.

    A `/` at the end stays: it says that a folder is meant.

    Raises:
        DataError: it has a `..` or a NUL.
    """
    if not isinstance(path, str):
        raise DataError(f"the path {path!r} in {where} is no text. Give one such as 'train' or 'train/*.csv'.")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in path:
        raise DataError(f"the path {path!r} leaves {where}. Give a path below it, without '..'.")
    return "/".join(parts) + ("/" if parts and path.endswith("/") else "")


def check_tree(names: Iterable[str], where: str) -> None:
    """Refuse relative names that can't all be files of one folder.

    Raises:
        DataError: one name is a file as well as the folder of another, as object stores allow.
    """
    known = set(names)
    for name in sorted(known):
        folder = name.rpartition("/")[0]
        while folder:
            if folder in known:
                raise DataError(
                    f"{folder!r} in {where} is a file, and a folder too: {name!r} lies in it. A folder on disk can't "
                    "hold both. Rename one of them, or name the files that you need."
                )
            folder = folder.rpartition("/")[0]


def is_pattern(path: str) -> bool:
    """True if the path has a `*` or a `?`."""
    return "*" in path or "?" in path


def pattern_base(pattern: str) -> str:
    """The deepest folder of a pattern that has no `*` or `?` in it; "" for the top."""
    parts = pattern.split("/")
    fixed = 0
    # The last part is always the file's, with a pattern in it or without.
    while fixed < len(parts) - 1 and not is_pattern(parts[fixed]):
        fixed += 1
    return "/".join(parts[:fixed])


def pattern_regex(pattern: str) -> re.Pattern[str]:
    """The regular expression of the paths that a pattern means: `*` and `?` stay within a folder's level, `**` crosses levels."""
    # a/**/b  also means a/b, as in a shell.
    text = ""
    for token in re.findall(r"\*\*/|\*\*|\*|\?|[^*?]+", pattern):
        text += {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(token) or re.escape(token)
    return re.compile(text + r"\Z", re.DOTALL)
