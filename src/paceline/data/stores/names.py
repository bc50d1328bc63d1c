"""Rules for file names in stores, and patterns.

A store accepts any name, such as "../a". These rules keep files within the folder of the run that downloads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from paceline.errors import DataError

#: Maximum length of one part of a path, in bytes.
_MAX_PART_BYTES = 255


def check_relative(path: str, where: str) -> str:
    """Return `path` if it can be a file below a folder, else raise DataError.

    `path` must be relative, without NUL and without empty, `.`, `..` or overlong parts. `where`: store, for messages.
    """
    for part in path.split("/"):
        if part in ("", ".", ".."):
            reason = f"has the part {part!r}, so it can't be a file below a folder"
        elif "\0" in part:
            reason = "has a NUL, which no file name may have"
        elif len(part.encode("utf-8", "surrogateescape")) > _MAX_PART_BYTES:
            reason = f"has a part of more than {_MAX_PART_BYTES} bytes, which no file system takes"
        else:
            continue
        raise DataError(f"the name {path!r} in {where} {reason}. Rename it there, or take a folder without it.")
    return path


def clean_path(path: str, where: str) -> str:
    """Return a path without leading `/`, repeated `/` and parts `.`.

    A trailing `/` stays, because it marks a folder. `where`: the store or folder, for messages.

    Raises:
        DataError: The path is not a string, or contains `..` or NUL.
    """
    if not isinstance(path, str):
        raise DataError(f"the path {path!r} in {where} must be text, such as 'train' or 'train/*.csv'.")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in path:
        raise DataError(f"the path {path!r} leaves {where}. Give a path below it, without '..'.")
    return "/".join(parts) + ("/" if parts and path.endswith("/") else "")


def check_tree(names: Iterable[str], where: str) -> None:
    """Raise DataError if one of these paths is both a file and a folder."""
    known = set(names)
    for name in sorted(known):
        folder = name.rpartition("/")[0]
        while folder:
            if folder in known:
                raise DataError(
                    f"{folder!r} in {where} is both a file and a folder, which has {name!r}. A folder on disk can't "
                    "hold both. Rename one of them, or name the files that you need."
                )
            folder = folder.rpartition("/")[0]


def is_pattern(path: str) -> bool:
    """Return whether the path contains `*` or `?`."""
    return "*" in path or "?" in path


def pattern_base(pattern: str) -> str:
    """Return the part of a pattern before its first wildcard: "a/b" for "a/b/*.csv"."""
    parts = pattern.split("/")
    fixed = 0
    # Stop before the last part, which always names a file and never a folder.
    while fixed < len(parts) - 1 and not is_pattern(parts[fixed]):
        fixed += 1
    return "/".join(parts[:fixed])


def pattern_regex(pattern: str) -> re.Pattern[str]:
    """Return the regular expression for a pattern.

    `*` and `?` match within one folder level, `**` across levels.
    """
    text = ""
    for token in re.findall(r"\*\*/|\*\*|\*|\?|[^*?]+", pattern):
        # `**/` may also match no folder: a/**/b matches a/b, as in a shell.
        text += {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(token) or re.escape(token)
    return re.compile(text + r"\Z", re.DOTALL)
