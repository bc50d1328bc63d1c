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
        self._specs: dict[str, GitIgnoreSpec] = {}

    def enter(self, directory: str) -> None:
        """Read the ignore file of a folder of the tree ("" is its top), known to have one."""
        path = self._source / directory / self.file_name
        try:
            self._texts[directory] = path.read_bytes()
        except OSError:
            return

    def key(self) -> list[list[str]]:
        """Equal for equal patterns: what a cache of decisions goes by."""
        import hashlib

        return [[directory, hashlib.sha256(text).hexdigest()] for directory, text in sorted(self._texts.items())]

    def ignores(self, path: str, *, is_directory: bool) -> bool:
        """True if the patterns leave out `path` (relative, forward slashes). The deepest folder's patterns count first."""
        if not self._texts:
            return False
        directory = os.path.dirname(path)
        while True:
            if directory in self._texts:
                inside = path[len(directory) + 1 :] if directory else path
                # A pattern that ends with a slash means folders alone; the matcher knows a folder by such a slash.
                decision = self._spec(directory).check_file(inside + "/" * is_directory).include
                if decision is not None:
                    return decision
            if not directory:
                return False
            directory = os.path.dirname(directory)

    def _spec(self, directory: str) -> GitIgnoreSpec:
        if directory not in self._specs:
            from pathspec import GitIgnoreSpec

            lines = self._texts[directory].decode("utf-8", errors="surrogateescape").splitlines()
            self._specs[directory] = GitIgnoreSpec.from_lines(lines)
        return self._specs[directory]
