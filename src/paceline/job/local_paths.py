"""Requirements that name a folder or an archive on this machine: `./pkg`, `-e .`, `dist/pkg-1.0-py3-none-any.whl`.

They are made absolute as soon as they are given, for the environment is built by another process in another folder.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

ARCHIVES = (".whl", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip", ".tar")

# `-e .`, `--editable=./pkg`, and without a blank `-e./pkg`, as pip takes them.
_EDITABLE = re.compile(r"(?:-e|--editable)(?:\s+|=|(?=[./~]))")
# `pkg[extra] @ file:///path`, a direct reference as PEP 508 writes it.
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*(?P<extras>\[[^\]]*\])?\s*@\s*(?P<target>\S.*)")
# pip fills in variables that are written with capitals, digits and underscores in braces, and leaves all others.
_VARIABLE = re.compile(r"\$\{[A-Z0-9_]+\}")
# The blank before the semicolon belongs to it: without one, PEP 508 takes the semicolon for a part of the URL.
_TAIL = re.compile(r"(?P<tail>\s+;.*|\s+--[a-z].*)$")
_EXTRAS = re.compile(r"(?P<extras>\[[A-Za-z0-9,._\s-]*\])$")


@dataclass(frozen=True, kw_only=True)
class LocalPath:
    """A requirement's path. extras: with their brackets. tail: a marker behind ` ;`, options such as `--hash`."""

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
        """The requirement as a line of a requirements file that pip and uv read alike, blanks in the path included."""
        # Any other character, a blank for one, goes into a URL as an escape: a line of a requirements file ends the path at a
        # blank.
        if self.name or re.fullmatch(r"[\w./+~-]*", str(self.path), re.ASCII):
            return str(self)
        return f"{'-e ' if self.is_editable else ''}{self._url()}{self.extras}{self.tail}"

    def _url(self) -> str:
        return f"file://{quote(str(self.path))}"


def is_editable(requirement: str) -> bool:
    """True if the requirement is `-e something`."""
    return _EDITABLE.match(requirement.strip()) is not None


def local_path(requirement: str, folder: Path | None = None) -> LocalPath | None:
    """The absolute path that a requirement names; None for a requirement of another kind.

    folder: what relative paths are relative to; the working directory where nothing lies there, as pip has it.
    """
    text = requirement.strip()
    if _VARIABLE.search(text):
        return None  # filled in when the line is read
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
    # `https://...` or `git+ssh://...`: it is the same from every folder.
    elif re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", text) or "://" in text:
        return None
    else:
        if not name and (found := _EXTRAS.search(text)):
            text, extras = text[: found.start()].rstrip(), found["extras"]
        # `einops` is the name of a package, also where a folder is called so; that folder is `./einops`.
        if not (editable or name or _looks_like_a_path(text)):
            return None
        path = Path(os.path.expanduser(text))
    return LocalPath(path=_absolute(path, folder), is_editable=bool(editable), name=name, extras=extras, tail=tail)


def absolute(requirement: str, folder: Path | None = None) -> str:
    """The requirement with its path made absolute; any other requirement as it is."""
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
    # Only now: the working directory may be gone, or closed to this user, and nothing is looked for there before.
    here = Path(os.path.abspath(path))
    return here if here.exists() else there
