"""Rules that exclude files from a snapshot: a few fixed names, and patterns in `.amlignore`, else in `.gitignore`.

The patterns have git's syntax, which the package pathspec parses. Subfolders may have ignore files too.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

#: Names that are excluded at any depth.
ALWAYS = frozenset({".git", ".paceline", "__pycache__", ".ipynb_checkpoints"})
#: Names that are excluded in the source folder itself: the run has its own `outputs` folder, which replaces the source's.
AT_THE_TOP = frozenset({"outputs"})


class Ignore:
    """The exclusion rules of one source folder."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self.file_name = ".amlignore" if (source / ".amlignore").is_file() else ".gitignore"
        self._texts: dict[str, bytes] = {}
        #: Patterns of git's exclude file (.git/info/exclude). Patterns of the topmost ignore file overrule them.
        self._excluded = b""
        if self.file_name == ".gitignore":
            with contextlib.suppress(OSError):
                self._excluded = (source / ".git" / "info" / "exclude").read_bytes().rstrip() + b"\n"
                self._texts[""] = self._excluded
        self._specs: dict[str, tuple[GitIgnoreSpec, list[str]]] = {}

    def enter(self, directory: str) -> None:
        """Read the ignore file of a folder, a path relative to the source."""
        path = self._source / directory / self.file_name
        try:
            # Strip a UTF-8 BOM: it would become part of the first pattern.
            text = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
        except OSError:
            return
        self._texts[directory] = text if directory else self._excluded + text

    def key(self) -> list[list[str]]:
        """Return hashes of the ignore files, to detect changed rules."""
        import hashlib

        return [[directory, hashlib.sha256(text).hexdigest()] for directory, text in sorted(self._texts.items())]

    def ignores(self, path: str, *, is_directory: bool) -> str | None:
        """Return "ignored by PATTERN in FILE" if a pattern excludes `path`.

        Patterns in the deepest folder take precedence.
        """
        if not self._texts:
            return None
        directory = os.path.dirname(path)
        while True:
            if directory in self._texts:
                inside = path[len(directory) + 1 :] if directory else path
                # A pattern with a trailing slash matches folders only; the matcher recognizes a folder by a trailing slash.
                spec, lines = self._spec(directory)
                match = spec.check_file(inside + "/" * is_directory)
                if match.include is not None:
                    if not match.include:
                        return None
                    return (
                        f"ignored by {lines[match.index or 0].strip()!r} in {os.path.join(directory, self.file_name)}"
                    )
            if not directory:
                return None
            directory = os.path.dirname(directory)

    def _spec(self, directory: str) -> tuple[GitIgnoreSpec, list[str]]:
        if directory not in self._specs:
            from pathspec import GitIgnoreSpec

            # Split as git does, so not at a form feed. Leave out empty lines, which pathspec does not count.
            text = self._texts[directory].decode("utf-8", errors="surrogateescape") + "\n"
            lines = [*filter(None, text.replace("\r\n", "\n").split("\n"))]
            self._specs[directory] = GitIgnoreSpec.from_lines(lines), lines
        return self._specs[directory]
