"""Datasets of files by the SDK's parameters (`azureml.data.file_dataset`).

https://learn.microsoft.com/python/api/azureml-core/azureml.data.filedataset
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from paceline.compat.azureml.data.abstract_dataset import AbstractDataset
from paceline.compat.azureml.exceptions import UserErrorException, sdk_class
from paceline.data.datasets import file
from paceline.data.datasets.read import path_parts, path_pattern
from paceline.data.datasets.sources import local_files

__all__ = ["FileDataset"]


@sdk_class
class FileDataset(AbstractDataset, file.FileDataset):
    """`paceline`'s dataset of files."""

    def mount(self, mount_point: str | None = None, **others: Any) -> MountContext:
        """The files as a folder of this machine while the context lasts: `with dataset.mount() as mounted`, or start and stop.

        mount_point: a folder that is empty or not there; default a temporary one.
        """
        return MountContext(self, mount_point)

    def to_path(self, **others: Any) -> list[str]:
        """The files' paths below the dataset's folder, each beginning with `/`."""
        return super().to_path()

    def get_partition_key_values(self, partition_keys: list[str] | None = None) -> list[dict[str, Any]]:
        """Each combination of the keys' values that a file has."""
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
        """The paths of copies in a folder; default a new temporary one."""
        return super().download(target_path, overwrite)


def key_values(form: str, relative: str, path: Path) -> dict[str, Any]:
    """What a file's path says by a partition_format: texts, and moments."""
    moments = path_pattern(form)[1]
    return {
        name: dt.datetime.strptime(text, moments[name]) if name in moments else text
        for name, text in path_parts(form, relative, path).items()
    }


class MountContext:
    """`mount_point` has the files between start and stop, as links to where they lie or to copies in the cache.

    Raises:
        UserErrorException: there is something in the folder.
    """

    def __init__(self, dataset: FileDataset, mount_point: str | None) -> None:
        self._dataset, self._held = dataset, contextlib.ExitStack()
        self._is_made = mount_point is None or not os.path.exists(mount_point)
        self._given = mount_point
        self.mount_point = os.path.abspath(mount_point) if mount_point is not None else ""

    def start(self) -> None:
        """Let the files appear."""
        if self._given is None:
            self.mount_point = tempfile.mkdtemp(prefix="paceline-mount-")
        elif os.path.isdir(self.mount_point) and os.listdir(self.mount_point):
            raise UserErrorException(f"mount_point={self._given!r} is not empty. Name another folder.")
        top = Path(self.mount_point)
        top.mkdir(parents=True, exist_ok=True)
        # Removed first, for the files of the cache may go once they are not held any more.
        files = self._held.enter_context(
            local_files(self._dataset.native_input("mounted").sources, self._dataset._workspace_dir())
        )
        self._held.callback(self._remove)
        for found in files:
            link = top / found.relative
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(found.path.absolute())

    def stop(self) -> None:
        """Take them away again."""
        self._held.close()

    def _remove(self) -> None:
        if self._is_made:
            shutil.rmtree(self.mount_point, ignore_errors=True)
            return
        for entry in os.scandir(self.mount_point):
            # Links alone, and folders that were made for them.
            shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)

    def __enter__(self) -> MountContext:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
