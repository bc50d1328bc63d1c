"""The part of a run that carries tags, properties, a display name and a description."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from paceline.runs import tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.remote_status import reads


class HasNotes(ABC):
    """The calls on tags (which may change) and properties (which never do). Any process may make them, any time."""

    @property
    @abstractmethod
    def folder(self) -> RunFolder: ...

    @reads
    def _notes(self) -> tags_and_properties.Notes:
        return tags_and_properties.read(self.folder.notes)

    @property
    def tags(self) -> dict[str, str | None]:
        """Tag -> value; None for a bare tag."""
        return self._notes().tags

    @property
    def properties(self) -> dict[str, str]:
        """Name -> value; unlike a tag, a property can't be changed or removed."""
        return self._notes().properties

    @property
    def display_name(self) -> str:
        """The name that lists show: a readable one such as "brave-otter-12" unless it was set.

        A run below another one, such as a sweep's trial, begins with its id as its name.
        """
        return self._notes().name or self.folder.run_id

    @display_name.setter
    def display_name(self, name: str) -> None:
        tags_and_properties.set_name(self.folder.notes, "display_name", name)

    @property
    def description(self) -> str | None:
        """What `description` was last set to, for people; None if it never was."""
        return self._notes().description

    @description.setter
    def description(self, text: str) -> None:
        tags_and_properties.set_name(self.folder.notes, "description", text)

    def tag(self, key: str, value: object = None) -> None:
        """Set a tag; a value of any type becomes a string. A later value replaces an earlier one.

        Args:
            key: Name of the tag.
        """
        tags_and_properties.set_tags(self.folder.notes, {key: value})

    def set_tags(self, tags: Mapping[str, object]) -> None:
        """Set several tags; those that are not named stay."""
        tags_and_properties.set_tags(self.folder.notes, tags)

    def remove_tags(self, tags: list[str] | str) -> None:
        """Remove a tag, or several, by key; keys that are not there are passed over.

        Args:
            tags: Key of a tag, or several.
        """
        tags_and_properties.remove_tags(self.folder.notes, [tags] if isinstance(tags, str) else list(tags))

    # Read anew first, for a property that was set elsewhere must be seen before it is set a second time.
    @reads
    def add_properties(self, properties: Mapping[str, object]) -> None:
        """Add properties for good.

        Raises:
            RunStateError: one of them is there already; none is added then.
        """
        tags_and_properties.add_properties(self.folder.notes, properties)
