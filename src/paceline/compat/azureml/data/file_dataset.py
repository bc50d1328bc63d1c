"""Datasets of files (`azureml.data.file_dataset`).

https://learn.microsoft.com/python/api/azureml-core/azureml.data.filedataset
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import shutil
import tempfile
from pathlib import Path

from paceline import data
from paceline.compat.azureml.data.abstract_dataset import AbstractDataset
from paceline.compat.azureml.exceptions import UserErrorException, sdk_class
from paceline.data import local_files, path_parts, path_pattern

__all__ = ["FileDataset"]


@sdk_class
class FileDataset(AbstractDataset, data.FileDataset):
    """A dataset of files."""

    def mount(self, mount_point: str | None = None, **others: object) -> MountContext:
        """Return a context that shows the files as a local folder.

        Use it as `with dataset.mount() as mounted`, or call start and stop. `mount_point` must be empty or missing; the
        default is a temporary folder.
        """
        return MountContext(self, mount_point)

    def to_path(self, **others: object) -> list[str]:
        """Return the files' paths in the dataset, each beginning with `/`."""
        return super().to_path()

    def get_partition_key_values(self, partition_keys: list[str] | None = None) -> list[dict[str, object]]:
        """Return the distinct combinations of the keys' values."""
        keys = self.checked_keys(partition_keys)
        found = [
            key_values(self.reading["partition_format"], info.relative, Path(info.path)) for info in self.list_files()
        ]
        return [
            dict(zip(keys, values, strict=True)) for values in dict.fromkeys(tuple(map(one.get, keys)) for one in found)
        ]

    def download(
        self, target_path: str | os.PathLike[str] | None = None, overwrite: bool = False, ignore_not_found: bool = False
    ) -> list[str]:
        """Copy the files into a folder and return their paths.

        The default is a new temporary folder.
        """
        return super().download(target_path, overwrite)


def key_values(form: str, relative: str, path: Path) -> dict[str, object]:
    """Parse a file's path by a partition_format into strings and datetimes."""
    moments = path_pattern(form)[1]
    return {
        name: dt.datetime.strptime(text, moments[name]) if name in moments else text
        for name, text in path_parts(form, relative, path).items()
    }


class MountContext:
    """A folder, `mount_point`, that shows a dataset's files from start to stop.

    They are links to the files or to cached copies.

    Raises:
        UserErrorException: The folder is not empty.
    """

    def __init__(self, dataset: FileDataset, mount_point: str | None) -> None:
        self._dataset, self._held = dataset, contextlib.ExitStack()
        self._is_made = mount_point is None or not os.path.exists(mount_point)
        self._given = mount_point
        self.mount_point = os.path.abspath(mount_point) if mount_point is not None else ""

    def start(self) -> None:
        """Create the folder's links."""
        if self._given is None:
            self.mount_point = tempfile.mkdtemp(prefix="paceline-mount-")
        elif os.path.isdir(self.mount_point) and os.listdir(self.mount_point):
            raise UserErrorException(f"mount_point={self._given!r} is not empty. Name another folder.")
        top = Path(self.mount_point)
        top.mkdir(parents=True, exist_ok=True)
        # Entered first, so closed last: the cache may evict its files once they are released.
        files = self._held.enter_context(
            local_files(self._dataset.native_input("mounted").sources, self._dataset._workspace_dir())
        )
        self._held.callback(self._remove)
        for found in files:
            link = top / found.relative
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(found.path.absolute())

    def stop(self) -> None:
        """Remove the links and release the files."""
        self._held.close()

    def _remove(self) -> None:
        if self._is_made:
            shutil.rmtree(self.mount_point, ignore_errors=True)
            return
        for entry in os.scandir(self.mount_point):
            # The folder holds only links, and folders that start() has created for them.
            shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)

    def __enter__(self) -> MountContext:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
