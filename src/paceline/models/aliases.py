"""Aliases of model versions, in an append-only log. The last line of each alias counts.

    {"alias": "production", "version": 3, "was": 2, "time_utc": "...", "by": "ada"}

Appending a line is atomic, even if the process is killed. The log is also the history of the aliases.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from paceline.errors import ModelError, ModelNotFoundError
from paceline.models.names import check_alias
from paceline.runs.record import user_name, utc_now
from paceline.system.files import append_line, json_lines
from paceline.system.names import did_you_mean
from paceline.system.registry import VersionFolders

_LOG = "aliases.jsonl"


class AliasChange(TypedDict):
    """A change, removal or creation of an alias: a line of the log."""

    alias: str
    version: int | None
    was: int | None
    time_utc: str
    by: str


def current(versions: VersionFolders, name: str) -> dict[str, int]:
    """Return the aliases of a model and their versions, sorted by alias."""
    found: dict[str, int] = {}
    for change in history(versions, name):
        if change["version"] is None:
            found.pop(change["alias"], None)
        else:
            found[change["alias"]] = change["version"]
    return dict(sorted(found.items()))


def history(versions: VersionFolders, name: str, alias: str | None = None) -> list[AliasChange]:
    """Return every change of one alias, or of all aliases, oldest first."""
    changes: list[AliasChange] = []
    for line in json_lines(_log(versions, name)):
        match line:
            case {"alias": str(word), "version": int() | None} if alias in (None, word):
                changes.append(line)
    return changes


def move(versions: VersionFolders, name: str, alias: str, version: int | None) -> int | None:
    """Point an alias at a model version; None removes it. Return the previous version.

    Raises:
        ModelNotFoundError: The version, or the alias to remove, does not exist.
        ModelError: The alias is invalid, or can't be written.
    """
    check_alias(alias)
    try:
        # Removing a version takes this lock too, so an alias never points at a removed version.
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
                    f"model {name!r} has no alias {alias!r}.{did_you_mean(alias, there)} It has: {', '.join(there) or 'none'}."
                )
            if version != was:
                change: AliasChange = {
                    "alias": alias,
                    "version": version,
                    "was": was,
                    "time_utc": utc_now(),
                    "by": user_name(),
                }
                append_line(_log(versions, name), change)
    except OSError as error:
        raise ModelError(f"alias {alias!r} of model {name!r} can't be written: {error.strerror}.") from error
    return was


def _log(versions: VersionFolders, name: str) -> Path:
    return versions.folder / name / _LOG
