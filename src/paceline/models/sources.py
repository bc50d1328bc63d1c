"""The files from which a model is registered, local or in a run."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import FileNameError, ModelError
from paceline.runs import artifacts
from paceline.runs.folder import RunFolder, check_file_name
from paceline.system import links
from paceline.system.names import some

_MAX_LISTED = 5


@dataclass(frozen=True, kw_only=True)
class ModelSourceFile:
    """A file from which a model is registered.

    name: The file's name in the model. top: A folder above the file, or None. `open` follows no link below this folder.
    """

    name: str
    path: Path
    top: Path | None = None

    def open(self) -> int:
        """Open the file for reading, and return its descriptor.

        Raises:
            OSError: The file can't be opened, or a link or pipe has replaced it.
        """
        if self.top is not None:
            return links.open_below(os.fspath(self.top), self.path.relative_to(self.top).as_posix())
        # O_NONBLOCK, because opening a pipe that has replaced the file would block.
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "is no longer a file", os.fspath(self.path))
        return fd


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The files from which a model is registered.

    top: Name of the file or folder in the model. label: The text by which the caller named the files, for messages.
    """

    top: str
    is_folder: bool
    files: tuple[ModelSourceFile, ...]
    label: str

    @property
    def size_bytes(self) -> int:
        """The total size of the source's files that can be read."""
        total = 0
        for file in self.files:
            with contextlib.suppress(OSError):
                total += os.stat(file.path).st_size
        return total


def local(path: object) -> ModelSource:
    """Return a local file or folder as the source of a model.

    Raises:
        ModelError: The path is missing, empty, or contains an entry that is not a file.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ModelError(f"the path {path!r}: give the path of a model's file or folder.")
    absolute = Path(os.path.abspath(os.path.expanduser(path)))
    label, top = os.fspath(path), absolute.name
    try:
        mode = os.stat(absolute).st_mode
    except OSError as error:
        if os.path.islink(absolute):
            raise ModelError(f"{label!r} is a link that leads nowhere. Name the model's own file or folder.") from None
        raise ModelError(
            f"there is no {label!r} here: {error.strerror}. Name the file or folder that holds the model."
        ) from None
    if not top:
        raise ModelError(f"{label!r} can't be a model's folder. Give a folder that contains only the model.")
    if stat.S_ISREG(mode):
        return ModelSource(top=top, is_folder=False, files=(ModelSourceFile(name=top, path=absolute),), label=label)
    if not stat.S_ISDIR(mode):
        raise ModelError(f"{label!r} is {links.special(mode)}, and no file or folder. Name the model's own.")
    return _whole(top, label, _below(absolute, top, label))


def of_run(folder: RunFolder, name: object) -> ModelSource:
    """Return a run's file or folder as the source of a model.

    A link to another file of the run counts as its target.

    Raises:
        ModelError: The path is missing, empty, or contains an entry that is not a file of the run.
    """
    label = os.fspath(name) if isinstance(name, os.PathLike) else name
    try:
        plain = check_file_name(label)
    except FileNameError as error:
        raise ModelError(
            f"{label!r} is not a file of run {folder.run_id}: {error} For a file of this machine there is "
            "Model.register(workspace, path, name, run=run) (paceline model register NAME PATH --run RUN)."
        ) from None
    place = folder.file(plain).relative_to(folder.path).as_posix()
    place_found = links.find(os.fspath(folder.path), place)
    if place_found is None:
        there = artifacts.names(folder)
        shown = some(there, _MAX_LISTED) or "none"
        raise ModelError(f"run {folder.run_id} has no file or folder {plain!r}. Its files: {shown}.")
    if place_found.kind == "left":
        raise ModelError(f"{plain!r} of run {folder.run_id} is {place_found.why}, and no file of the run's.")
    top, real = plain.rpartition("/")[2], Path(os.path.realpath(folder.path))
    if place_found.kind == "file":
        file = ModelSourceFile(name=top, path=real / place_found.real, top=real)
        return ModelSource(top=top, is_folder=False, files=(file,), label=plain)
    files = []
    for entry in links.entries(os.fspath(folder.path), place, follow=True):
        inside = entry.name[len(place) + 1 :]
        if entry.kind == "left":
            raise ModelError(
                f"{plain}/{inside} of run {folder.run_id} is {entry.why}: a model keeps files alone. "
                "Have the script put a copy in its place, or register the folder without it."
            )
        if entry.kind == "file":
            files.append(ModelSourceFile(name=f"{top}/{inside}", path=real / entry.real, top=real))
    return _whole(top, plain, files)


def _whole(top: str, label: str, files: list[ModelSourceFile]) -> ModelSource:
    if not files:
        raise ModelError(f"there is no file in the folder {label!r}. Name the one that holds the model.")
    for file in files:
        try:
            file.name.encode()
        except UnicodeEncodeError:
            raise ModelError(f"the file name {file.name!r} is not UTF-8. Rename the file.") from None
    return ModelSource(top=top, is_folder=True, files=tuple(sorted(files, key=lambda file: file.name)), label=label)


def _below(folder: Path, top: str, label: str) -> list[ModelSourceFile]:
    files: list[ModelSourceFile] = []
    # Folders to visit, each with the real paths of its parent folders. A link to a parent folder is a cycle.
    waiting: list[tuple[Path, str, tuple[str, ...]]] = [(folder, top, ())]
    while waiting:
        at, name, above = waiting.pop()
        real = os.path.realpath(at)
        if real in above:
            raise ModelError(f"{str(at)!r} is a link to a folder that contains the link. Remove it and register again.")
        try:
            entries = sorted(os.listdir(at))
        except OSError as error:
            raise ModelError(f"the folder {str(at)!r} can't be read: {error.strerror}.") from error
        for entry in entries:
            path, inside = at / entry, f"{name}/{entry}"
            try:
                mode = os.stat(path).st_mode
            except OSError as error:
                why = "is a link that leads nowhere" if path.is_symlink() else f"can't be read: {error.strerror}"
                raise ModelError(f"{str(path)!r} {why}. Remove it, or register {label!r} without it.") from None
            if stat.S_ISDIR(mode):
                waiting.append((path, inside, (*above, real)))
            elif stat.S_ISREG(mode):
                files.append(ModelSourceFile(name=inside, path=path))
            else:
                raise ModelError(
                    f"{str(path)!r} is {links.special(mode)}: a model keeps files alone. Remove it, or register {label!r} "
                    "without it."
                )
    return files
