"""Tags, properties, display name, description and comments, which any process may add to a run.

One file has a line for each change. For a property, the first line counts; for other values, the last line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paceline.errors import RunStateError, UserError
from paceline.runs.record import user_name, utc_now
from paceline.system import locks
from paceline.system.files import append_line, json_lines

#: Seconds to wait for the lock on properties; processes hold it for milliseconds.
_PATIENCE_S = 30.0
#: Maximum number of characters of a comment, and of its author's name.
LONGEST_COMMENT, _LONGEST_AUTHOR = 2_000, 200


@dataclass(frozen=True, kw_only=True)
class Comment:
    """A comment on a run: a short text of one author."""

    id: str
    author: str
    time_utc: str
    text: str


@dataclass
class Notes:
    """A run's tags, properties, name, description and comments.

    Attributes:
        drawn_name: The readable name given at submission (`paceline.runs.ids`).
        display_name: A name that was set later, by a user or by the script's calls of a tracking library.
        description: Notes of people, in Markdown.
        is_archived: Whether lists leave the run out.
        comments: Comments by id, oldest first.
    """

    tags: dict[str, str | None] = field(default_factory=dict)
    properties: dict[str, str] = field(default_factory=dict)
    drawn_name: str | None = None
    display_name: str | None = None
    description: str | None = None
    is_archived: bool = False
    comments: dict[str, Comment] = field(default_factory=dict)

    @property
    def name(self) -> str | None:
        """The name that lists show; None if none was given or set."""
        return self.display_name or self.drawn_name


def read(path: Path) -> Notes:
    notes = Notes()
    for line in json_lines(path):
        match line:
            case {"tag": str(key), "value": str() | None as value}:
                notes.tags[key] = value
            case {"untag": str(key)}:
                notes.tags.pop(key, None)
            case {"property": str(key), "value": str(value)}:
                # Keep the first value, since a property never changes.
                notes.properties.setdefault(key, value)
            case {"display_name": str() | None as name}:
                notes.display_name = name
            case {"drawn_name": str() | None as name}:
                notes.drawn_name = name
            case {"description": str() | None as text}:
                notes.description = text
            case {"archived": bool(is_archived)}:
                notes.is_archived = is_archived
            case {"comment": {"id": str(key), "author": str(author), "time_utc": str(time_utc), "text": str(text)}}:
                author, text = author[:_LONGEST_AUTHOR], text[:LONGEST_COMMENT]
                notes.comments.setdefault(key, Comment(id=key, author=author, time_utc=time_utc[:30], text=text))
            case {"uncomment": str(key)}:
                notes.comments.pop(key, None)
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
    # Lock a separate file, because programs that only read the notes could hold a lock on the notes file itself.
    with locks.locked(path.with_name("notes.lock"), patience_s=_PATIENCE_S):
        # Check under the lock: two programs may add the same property at once. Tags need no lock, as the last value counts.
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
    """Raise UserError unless a display name is None or has visible characters."""
    if name is not None and not str(name).strip():
        raise UserError(f"display_name={name!r} is empty. Give a name, or leave it out.")


def set_name(path: Path, field_name: str, text: str) -> None:
    if field_name == "display_name":
        check_display_name(text)
    append_line(path, {field_name: str(text)})


def set_archived(path: Path, is_archived: bool) -> None:
    append_line(path, {"archived": is_archived})


def add_comment(path: Path, text: str) -> Comment:
    """Add a comment of the current user to a run's notes.

    Raises:
        UserError: The text is empty or too long.
    """
    # Convert CR LF to LF: the text field of a browser sends CR LF as line breaks.
    text = str(text).replace("\r\n", "\n").strip()
    if not 0 < len(text) <= LONGEST_COMMENT:
        raise UserError(f"a comment has 1 to {LONGEST_COMMENT} characters, got {len(text)}. Longer texts are notes.")
    comment = Comment(id=os.urandom(4).hex(), author=user_name(), time_utc=utc_now(), text=text)
    append_line(path, {"comment": asdict(comment)})
    return comment


def remove_comment(path: Path, comment_id: str, *, is_admin: bool = False) -> None:
    """Remove a comment from a run's notes.

    is_admin: Whether the user may remove comments of others, as the owner of the run's folder may.

    Raises:
        UserError: There is no such comment, or it belongs to another user.
    """
    found = read(path).comments.get(comment_id)
    if found is None:
        raise UserError(f"there is no comment {comment_id[:80]!r}. `paceline comment RUN` prints the ids.")
    if not is_admin and found.author != user_name() and os.stat(path.parent).st_uid != os.geteuid():
        raise UserError(f"comment {comment_id} is of {found.author}. Its author and the owner of the run remove it.")
    append_line(path, {"uncomment": comment_id})


def _check_key(what: str, key: object) -> None:
    if not isinstance(key, str) or not key:
        raise UserError(f"{what} {key!r} is not a non-empty string.")
