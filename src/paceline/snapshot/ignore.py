"""The names that a snapshot leaves out: by the patterns of `.amlignore`, or where there is none of `.gitignore`, and a few more.

The syntax is git's, ignore files in subfolders included; pathspec reads it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

#: Never part of a source tree, at any depth.
ALWAYS = frozenset({".git", ".paceline", "__pycache__", ".ipynb_checkpoints"})
#: The script's `outputs` folder is the run's, so one in the source could not be seen there.
AT_THE_TOP = frozenset({"outputs"})


class Ignore:
    """Decides for one tree. Patterns are compiled when a name is first asked for that no cache knows."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self.file_name = ".amlignore" if (source / ".amlignore").is_file() else ".gitignore"
        self._texts: dict[str, bytes] = {}
        #: Git's own list for this repository, whose patterns count less than those of the top's file.
        self._excluded = b""
        if self.file_name == ".gitignore":
            try:
                self._excluded = (source / ".git" / "info" / "exclude").read_bytes().rstrip() + b"\n"
                self._texts[""] = self._excluded
            except OSError:
                pass
        self._specs: dict[str, GitIgnoreSpec] = {}

    def enter(self, directory: str) -> None:
        """Read the ignore file of a folder of the tree ("" is its top), known to have one."""
        path = self._source / directory / self.file_name
        try:
            # Some editors begin a file with a byte-order mark, which would become a part of the first pattern.
            text = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
        except OSError:
            return
        self._texts[directory] = text if directory else self._excluded + text

    def key(self) -> list[list[str]]:
        """Equal for equal patterns: what a cache of decisions goes by."""
        import hashlib

        return [[directory, hashlib.sha256(text).hexdigest()] for directory, text in sorted(self._texts.items())]

    def ignores(self, path: str, *, is_directory: bool) -> str | None:
        """Return the pattern that leaves out `path` (relative, forward slashes), with its file, or None where none does.

        The deepest folder's patterns count first.
        """
        if not self._texts:
            return None
        directory = os.path.dirname(path)
        while True:
            if directory in self._texts:
                inside = path[len(directory) + 1 :] if directory else path
                # A pattern that ends with a slash means folders alone; the matcher knows a folder by such a slash.
                found = self._spec(directory).check_file(inside + "/" * is_directory)
                if found.include is not None:
                    if not found.include:
                        return None
                    pattern = self._texts[directory].splitlines()[found.index or 0].decode(errors="replace").strip()
                    return f"ignored by {pattern!r} in {os.path.join(directory, self.file_name)}"
            if not directory:
                return None
            directory = os.path.dirname(directory)

    def _spec(self, directory: str) -> GitIgnoreSpec:
        if directory not in self._specs:
            from pathspec import GitIgnoreSpec

            lines = self._texts[directory].decode("utf-8", errors="surrogateescape").splitlines()
            self._specs[directory] = GitIgnoreSpec.from_lines(lines)
        return self._specs[directory]
