"""Handle requirements that name a folder or archive on this machine: `./pkg`, `-e .`, `dist/pkg-1.0-py3-none-any.whl`.

Paths are made absolute immediately, because the process that builds the environment runs in another folder.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

ARCHIVES = (".whl", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip", ".tar")

# Matches the option in `-e .`, `--editable=./pkg` and `-e./pkg`, which pip accepts without a space.
_EDITABLE = re.compile(r"(?:-e|--editable)(?:\s+|=|(?=[./~]))")
# Matches a direct reference of PEP 508, such as `pkg[extra] @ file:///path`.
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*(?P<extras>\[[^\]]*\])?\s*@\s*(?P<target>\S.*)")
# pip expands variables with capitals, digits and underscores in braces, and no others.
_VARIABLE = re.compile(r"\$\{[A-Z0-9_]+\}")
# Matches a marker or options. Without the space before the semicolon, PEP 508 takes the semicolon as part of the URL.
_TAIL = re.compile(r"(?P<tail>\s+;.*|\s+--[a-z].*)$")
_EXTRAS = re.compile(r"(?P<extras>\[[A-Za-z0-9,._\s-]*\])$")


@dataclass(frozen=True, kw_only=True)
class LocalPath:
    """A requirement that names a path on this machine.

    Attributes:
        name: Name of the package, or "" if the requirement has only a path.
        extras: Extras, such as "[gpu]".
        tail: Environment marker, or options such as `--hash`.
    """

    path: Path
    is_editable: bool = False
    name: str = ""
    extras: str = ""
    tail: str = ""

    def __str__(self) -> str:
        if self.name:
            return f"{self.name}{self.extras} @ {self._url()}{self.tail}"
        return f"{'-e ' if self.is_editable else ''}{self.path}{self.extras}{self.tail}"

    def line(self) -> str:
        """Return the requirement as a requirements-file line for pip and uv."""
        # Percent-encode a path with characters such as spaces, because a space ends the path in a requirements file.
        if self.name or re.fullmatch(r"[\w./+~-]*", str(self.path), re.ASCII):
            return str(self)
        return f"{'-e ' if self.is_editable else ''}{self._url()}{self.extras}{self.tail}"

    def _url(self) -> str:
        return f"file://{quote(str(self.path))}"


def is_editable(requirement: str) -> bool:
    """Return whether the requirement is an editable install (`-e PATH`)."""
    return _EDITABLE.match(requirement.strip()) is not None


def local_path(requirement: str, folder: Path | None = None) -> LocalPath | None:
    """Return the local path that a requirement names, or None for other requirements.

    Make the path absolute. A relative path starts from `folder` or, if it does not exist there, from the working
    directory, as in pip. Return None too if the requirement contains a variable.
    """
    text = requirement.strip()
    if _VARIABLE.search(text):
        return None  # pip expands the variable when it reads the line
    editable = _EDITABLE.match(text)
    text = text[editable.end() :].strip() if editable else text
    name = extras = tail = ""
    if found := _TAIL.search(text):
        text, tail = text[: found.start()].rstrip(), found["tail"]
    if found := _NAMED.fullmatch(text):
        name, extras, text = found["name"], found["extras"] or "", found["target"].strip()
    if text.lower().startswith("file:"):
        if not name and (found := _EXTRAS.search(text)):
            text, extras = text[: found.start()].rstrip(), found["extras"]
        path = Path(unquote(urlsplit(text).path))
    # A URL such as `https://...` or `git+ssh://...` does not depend on the folder.
    elif re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", text) or "://" in text:
        return None
    else:
        if not name and (found := _EXTRAS.search(text)):
            text, extras = text[: found.start()].rstrip(), found["extras"]
        # `einops` is a package's name, even if a folder has this name. A requirement for the folder is `./einops`.
        if not (editable or name or _looks_like_a_path(text)):
            return None
        path = Path(os.path.expanduser(text))
    return LocalPath(path=_absolute(path, folder), is_editable=bool(editable), name=name, extras=extras, tail=tail)


def absolute(requirement: str, folder: Path | None = None) -> str:
    """Return the requirement with its path, if any, made absolute."""
    found = local_path(requirement, folder)
    return requirement if found is None else str(found)


def _looks_like_a_path(text: str) -> bool:
    return (
        text in (".", "..")
        or text.startswith(("./", "../", "/", "~"))
        or "/" in text
        or text.lower().endswith(ARCHIVES)
    )


def _absolute(path: Path, folder: Path | None) -> Path:
    there = Path(os.path.abspath((folder or Path.cwd()) / path))
    if folder is None or there.exists():
        return there
    # Look in the working directory only now, because it may be missing or unreadable.
    here = Path(os.path.abspath(path))
    return here if here.exists() else there
