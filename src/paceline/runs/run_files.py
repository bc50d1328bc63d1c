"""The part of a run that puts files in and takes them out."""

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
    """The calls on a run's files. Names are relative, with forward slashes: `outputs/model.pt`."""

    @property
    @abstractmethod
    def folder(self) -> RunFolder: ...

    @reads
    def upload_file(self, name: str, path_or_stream: str | os.PathLike[str] | IO[bytes]) -> str:
        """Copy a file, or the rest of an open binary stream, into the run under `name`; the name in its plain form.

        Uploading the same bytes under the same name again is harmless. Names below `outputs/` and `logs/` are files in
        these folders; all others are kept apart from the run's own files, so that `run.json` is a name like any other.

        Args:
            path_or_stream: File of this machine, or an open binary file.

        Raises:
            FileNameError: the name leaves the run's folder, or lies behind a link that does.
            RunStateError: another file has this name.
            UserError: there is no such file.
        """
        return artifacts.put(self.folder, name, path_or_stream)

    def upload_files(self, names: Sequence[str], paths: Sequence[str | os.PathLike[str]]) -> list[str]:
        """`upload_file` for each pair.

        Raises: as `upload_file`; UserError where the lengths differ.

        Args:
            names: Names in the run, one for each path.
            paths: Files of this machine.
        """
        if len(names) != len(paths):
            raise UserError(f"{len(names)} names but {len(paths)} paths. Give one name for each path.")
        return [self.upload_file(name, path) for name, path in zip(names, paths, strict=True)]

    @reads
    def upload_folder(self, name: str, path: str | os.PathLike[str]) -> list[str]:
        """Copy all files below the folder `path` to `name/...`; their names.

        Raises: as `upload_file`.
        """
        return artifacts.put_folder(self.folder, name, path)

    @reads
    def get_file_names(self) -> list[str]:
        """The names of the run's files, sorted: outputs, logs and what was uploaded.

        Where the run's folder is not shared with the machine that it runs on, what is new there is brought here first.
        Below a link to another of the run's folders are the files of that; what a link leads to elsewhere is no file of
        the run's.
        """
        # Where this very program logs the run, what it has just written into ./outputs is a file of the run's.
        interactive.keep_watched(self.folder)
        return artifacts.names(self.folder)

    @reads
    def download_file(self, name: str, output_file_path: str | os.PathLike[str] | None = None) -> str:
        """Copy a file of the run to a path (default: its own name, here) or into a folder; the path written.

        Args:
            output_file_path: File or folder to write; default: the file's own name, here.

        Raises:
            RunNotFoundError: the run has no such file; those it has are named.
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
        """Copy all files whose names begin with `prefix`; the paths written.

        output_directory: where to, default here. output_paths: one path below it for each file instead of its name.
        append_prefix: whether the prefix's folder is kept in the paths.

        Raises:
            RunNotFoundError: no name begins so.
            UserError: as many output_paths as there are files are needed.
        """
        names = [name for name in self.get_file_names() if prefix is None or name.startswith(prefix)]
        if not names:
            raise RunNotFoundError(f"run {self.folder.run_id} has no file that begins with {prefix!r}.")
        paths = list(output_paths) if output_paths is not None else names
        if output_paths is None and prefix and not append_prefix:
            # The prefix may be a whole name: its last part is left then.
            paths = [name[len(prefix) :].lstrip("/") or os.path.basename(name) for name in names]
        if len(paths) != len(names):
            raise UserError(f"{len(paths)} output_paths for {len(names)} files. Give one for each: {', '.join(names)}.")
        top = os.fspath(output_directory) if output_directory is not None else "."
        return [
            artifacts.get(self.folder, name, os.path.join(top, path)) for name, path in zip(names, paths, strict=True)
        ]


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
