"""Aliases: words that point at a version. Each change is one line, and the last one for an alias counts.

    {"alias": "production", "version": 3, "was": 2, "time_utc": "...", "by": "ada"}

So a change is there or not, whenever its process is killed, and the history is what was written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import ModelError, ModelNotFoundError
from paceline.models.names import check_alias
from paceline.runs.record import user_name, utc_now
from paceline.system.files import append_line, json_lines
from paceline.system.registry import VersionFolders

_LOG = "aliases.jsonl"


def current(versions: VersionFolders, name: str) -> dict[str, int]:
    """Alias -> version, sorted by alias."""
    found: dict[str, int] = {}
    for change in history(versions, name):
        if change["version"] is None:
            found.pop(change["alias"], None)
        else:
            found[change["alias"]] = change["version"]
    return dict(sorted(found.items()))


def history(versions: VersionFolders, name: str, alias: str | None = None) -> list[dict[str, Any]]:
    """Every change, the oldest first: alias, version (None: removed), was (None: new), time_utc, by. alias: of this one alone."""
    changes = []
    for line in json_lines(_log(versions, name)):
        match line:
            case {"alias": str(word), "version": int() | None} if alias in (None, word):
                changes.append(line)
    return changes


def move(versions: VersionFolders, name: str, alias: str, version: int | None) -> int | None:
    """Let an alias point at a version, or None for nowhere; where it did before. Of two at once, one is after the other.

    Raises:
        ModelNotFoundError: there is no such version, or no such alias to be removed.
        ModelError: a wrong alias, or it can't be written.
    """
    check_alias(alias)
    try:
        # Under the lock that a removal takes as well: an alias never points at a version that is gone.
        with versions.locked():
            known = versions.versions(name)
            if version is not None and version not in known:
                raise ModelNotFoundError(
                    f"model {name!r} has no version {version}, so {alias!r} can't point at it. It has: "
                    f"{', '.join(map(str, known)) or 'none'}."
                )
            there = current(versions, name)
            was = there.get(alias)
            if version is None and was is None:
                raise ModelNotFoundError(
                    f"model {name!r} has no alias {alias!r}. It has: {', '.join(there) or 'none'}."
                )
            if version != was:
                change = {"alias": alias, "version": version, "was": was, "time_utc": utc_now(), "by": user_name()}
                append_line(_log(versions, name), change)
    except OSError as error:
        raise ModelError(f"alias {alias!r} of model {name!r} can't be written: {error.strerror}.") from error
    return was


def _log(versions: VersionFolders, name: str) -> Path:
    return versions.folder / name / _LOG
