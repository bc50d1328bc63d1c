"""The methods of a run for its files, tags, properties and names."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import IO

from paceline.errors import RunNotFoundError, UserError
from paceline.runs import artifacts, interactive, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.remote_status import reads


class HasFiles(ABC):
    """The methods for a run's files. Names are relative, with forward slashes: `outputs/model.pt`."""

    @property
    @abstractmethod
    def folder(self) -> RunFolder: ...

    @reads
    def upload_file(self, name: str, path_or_stream: str | os.PathLike[str] | IO[bytes]) -> str:
        """Copy a file or open stream into the run. Return its normalized name.

        Uploading equal bytes again is harmless. Names that begin with `outputs/` or `logs/` are files in these folders
        of the run. Other files are stored apart from Paceline's own files, so even the name `state.json` is allowed.

        Args:
            name: Name in the run.
            path_or_stream: File of this machine, or an open binary file.

        Raises:
            FileNameError: The name leaves the run's folder, perhaps by a link.
            RunStateError: Another file has this name.
            UserError: There is no such file.
        """
        return artifacts.put(self.folder, name, path_or_stream)

    def upload_files(self, names: Sequence[str], paths: Sequence[str | os.PathLike[str]]) -> list[str]:
        """Upload several files, as by `upload_file`.

        Args:
            names: Names in the run, one for each path.
            paths: Files of this machine.

        Raises:
            UserError: `names` and `paths` have different lengths, or a path is not a file.
        """
        if len(names) != len(paths):
            raise UserError(f"{len(names)} names but {len(paths)} paths. Give one name for each path.")
        return [self.upload_file(name, path) for name, path in zip(names, paths, strict=True)]

    @reads
    def upload_folder(self, name: str, path: str | os.PathLike[str]) -> list[str]:
        """Copy all files below `path` to `name/...`, and return their names.

        Raises:
            UserError: `path` is not a folder, or one of its files can't be uploaded.
        """
        return artifacts.put_folder(self.folder, name, path)

    @reads
    def get_file_names(self) -> list[str]:
        """Return the names of the run's files, sorted: outputs, logs and uploads.

        If the run's local folder is a copy, new files are fetched first. Links to other folders of the run are followed. Links
        that lead out of the run are excluded.
        """
        # If this program logs the run, first copy its new files in ./outputs into the run.
        interactive.keep_watched(self.folder)
        return artifacts.names(self.folder)

    @reads
    def download_file(self, name: str, output_file_path: str | os.PathLike[str] | None = None) -> str:
        """Copy a file of the run to a path or folder. Return the written path.

        output_file_path: File or folder to write; default: the file's own name in the current directory.

        Raises:
            RunNotFoundError: The run has no such file; the message lists the files that it has.
        """
        interactive.keep_watched(self.folder)
        return artifacts.get(self.folder, name, output_file_path)

    def download_files(
        self,
        prefix: str | None = None,
        output_directory: str | os.PathLike[str] | None = None,
        output_paths: Sequence[str] | None = None,
        append_prefix: bool = True,
    ) -> list[str]:
        """Copy all files whose names begin with `prefix`, and return the written paths.

        Args:
            prefix: Beginning of the names; default: all files.
            output_directory: Folder to write to; default: the current directory.
            output_paths: For each file, a path below `output_directory`; default: the file's name.
            append_prefix: Whether the written paths keep the prefix; if False, it is removed from the names.

        Raises:
            RunNotFoundError: No file's name begins with `prefix`.
            UserError: The numbers of `output_paths` and files differ.
        """
        names = [name for name in self.get_file_names() if prefix is None or name.startswith(prefix)]
        if not names:
            raise RunNotFoundError(f"run {self.folder.run_id} has no file that begins with {prefix!r}.")
        paths = list(output_paths) if output_paths is not None else names
        if output_paths is None and prefix and not append_prefix:
            # If the prefix is a file's whole name, nothing follows the prefix, so use the name without its folders.
            paths = [name[len(prefix) :].lstrip("/") or os.path.basename(name) for name in names]
        if len(paths) != len(names):
            raise UserError(f"{len(paths)} output_paths for {len(names)} files. Give one for each: {', '.join(names)}.")
        top = os.fspath(output_directory) if output_directory is not None else "."
        return [
            artifacts.get(self.folder, name, os.path.join(top, path)) for name, path in zip(names, paths, strict=True)
        ]


class HasNotes(ABC):
    """The methods for tags and properties, which any process may call."""

    @property
    @abstractmethod
    def folder(self) -> RunFolder: ...

    @reads
    def _notes(self) -> tags_and_properties.Notes:
        return tags_and_properties.read(self.folder.notes)

    @property
    def tags(self) -> dict[str, str | None]:
        """The value of each tag; None for a tag without a value."""
        return self._notes().tags

    @property
    def properties(self) -> dict[str, str]:
        """The value of each property. Unlike a tag, a property cannot change."""
        return self._notes().properties

    @property
    def display_name(self) -> str:
        """The name that lists show, such as "brave-otter-12".

        The display name of a child run, such as a sweep's trial, is its id unless another name was set.
        """
        return self._notes().name or self.folder.run_id

    @display_name.setter
    def display_name(self, name: str) -> None:
        tags_and_properties.set_name(self.folder.notes, "display_name", name)

    @property
    def description(self) -> str | None:
        """The run's notes in Markdown, or None."""
        return self._notes().description

    @description.setter
    def description(self, text: str) -> None:
        tags_and_properties.set_name(self.folder.notes, "description", text)

    @property
    def is_archived(self) -> bool:
        """Whether lists leave the run out. Set it to archive or restore the run."""
        return self._notes().is_archived

    @is_archived.setter
    def is_archived(self, is_archived: bool) -> None:
        tags_and_properties.set_archived(self.folder.notes, bool(is_archived))

    @property
    def comments(self) -> tuple[tags_and_properties.Comment, ...]:
        """The comments of users on the run, oldest first."""
        return tuple(self._notes().comments.values())

    def comment(self, text: str) -> tags_and_properties.Comment:
        """Add a comment of the current user to the run.

        Args:
            text: Plain text of at most 2,000 characters.

        Raises:
            UserError: The text is empty or too long.
        """
        return tags_and_properties.add_comment(self.folder.notes, text)

    def remove_comment(self, comment_id: str) -> None:
        """Remove a comment. Only its author and the run's owner may remove it.

        Args:
            comment_id: The `id` of a comment in `comments`.

        Raises:
            UserError: There is no such comment, or another user wrote it.
        """
        self._notes()  # get the comments written on other machines first, since `comment_id` may be one of them
        tags_and_properties.remove_comment(self.folder.notes, comment_id)

    def tag(self, key: str, value: object = None) -> None:
        """Set a tag to a value, which becomes a string.

        Args:
            key: Name of the tag.
            value: Value of the tag; None for a tag without a value.
        """
        tags_and_properties.set_tags(self.folder.notes, {key: value})

    def set_tags(self, tags: Mapping[str, object]) -> None:
        """Set several tags of the run; its other tags stay."""
        tags_and_properties.set_tags(self.folder.notes, tags)

    def remove_tags(self, tags: list[str] | str) -> None:
        """Remove tags of the run by key, ignoring missing keys.

        Args:
            tags: Key of a tag, or several.
        """
        tags_and_properties.remove_tags(self.folder.notes, [tags] if isinstance(tags, str) else list(tags))

    # Refresh the run first: another process may have set a property, and a property can't be set twice.
    @reads
    def add_properties(self, properties: Mapping[str, object]) -> None:
        """Add properties to the run. A property never changes.

        Raises:
            RunStateError: One of the properties exists; no property is added then.
        """
        tags_and_properties.add_properties(self.folder.notes, properties)
