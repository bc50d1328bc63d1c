"""Tags, properties, display name and description, which any process may add to a run.

They are in a file of their own, to which any process may append lines. The last line of a key counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import RunStateError, UserError
from paceline.system import locks
from paceline.system.files import append_line, json_lines

#: Seconds to wait for the lock on properties; processes hold it for milliseconds.
_PATIENCE_S = 30.0


@dataclass
class Notes:
    """A run's tags, properties, name and description.

    Attributes:
        drawn_name: The readable name given at submission (`paceline.runs.ids`).
        display_name: A name that a user or the script's tracker set later.
        description: Notes of people, in Markdown.
        is_archived: Whether lists leave the run out.
    """

    tags: dict[str, str | None] = field(default_factory=dict)
    properties: dict[str, str] = field(default_factory=dict)
    drawn_name: str | None = None
    display_name: str | None = None
    description: str | None = None
    is_archived: bool = False

    @property
    def name(self) -> str | None:
        """The name that lists show; None for a child run, or a run of an older version."""
        return self.display_name or self.drawn_name


def read(path: Path) -> Notes:
    notes = Notes()
    for line in json_lines(path):
        match line:
            case {"tag": str(key), "value": value}:
                notes.tags[key] = value
            case {"untag": str(key)}:
                notes.tags.pop(key, None)
            case {"property": str(key), "value": value}:
                # Keep the first value, since a property never changes.
                notes.properties.setdefault(key, value)
            case {"display_name": name}:
                notes.display_name = name
            case {"drawn_name": name}:
                notes.drawn_name = name
            case {"description": text}:
                notes.description = text
            case {"archived": bool(is_archived)}:
                notes.is_archived = is_archived
    return notes


def set_tags(path: Path, tags: Mapping[str, object]) -> None:
    """Set tags; values become strings, None stays None (a bare tag)."""
    for key, value in tags.items():
        _check_key("tag", key)
        append_line(path, {"tag": key, "value": None if value is None else str(value)})


def remove_tags(path: Path, keys: list[str]) -> None:
    for key in keys:
        append_line(path, {"untag": key})


def add_properties(path: Path, properties: Mapping[str, object], *, if_missing: bool = False) -> Mapping[str, str]:
    """Add properties, which never change. Return the properties that existed before.

    if_missing: Whether to keep the existing value of a property instead of raising.

    Raises:
        RunStateError: One of the properties exists; no property is added then.
    """
    for key in properties:
        _check_key("property", key)
    # Use a separate lock file: readers of the notes could hold a lock on the notes file itself.
    with locks.locked(path.with_name("notes.lock"), patience_s=_PATIENCE_S):
        # Check under the lock: two programs may add the same property at once. Tags need no lock, as their last line counts.
        there = read(path).properties
        if not if_missing and (again := sorted(set(there) & set(properties))):
            raise RunStateError(
                f"property {again[0]!r} is {there[again[0]]!r} already, and properties never change. Tags do."
            )
        for key, value in properties.items():
            if key not in there:
                append_line(path, {"property": key, "value": str(value)})
    return there


def check_display_name(name: object) -> None:
    """Raise UserError unless `name` is a name that people can read, or None."""
    if name is not None and not str(name).strip():
        raise UserError(f"display_name={name!r} is empty. Give a name, or leave it out.")


def set_name(path: Path, field_name: str, text: str) -> None:
    if field_name == "display_name":
        check_display_name(text)
    append_line(path, {field_name: str(text)})


def set_archived(path: Path, is_archived: bool) -> None:
    append_line(path, {"archived": is_archived})


def _check_key(what: str, key: object) -> None:
    if not isinstance(key, str) or not key:
        raise UserError(f"{what} {key!r} is not a non-empty string.")
