"""Datasets of files (`azureml.data.file_dataset`).

https://learn.microsoft.com/python/api/azureml-core/azureml.data.filedataset
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from paceline import data
from paceline.compat.azureml.data.data_reference import DatasetConsumptionConfig
from paceline.compat.azureml.exceptions import UserErrorException, sdk_class
from paceline.data import AnyDataset, DataReference, local_files, path_parts, path_pattern

__all__ = ["AbstractDataset", "FileDataset"]


D = TypeVar("D", bound="AbstractDataset")


class AbstractDataset(AnyDataset):
    """Base class of datasets, with the SDK's methods that make run inputs."""

    @classmethod
    def of(cls: type[D], native: AnyDataset) -> D:
        return cls(**{field.name: getattr(native, field.name) for field in dataclasses.fields(native)})

    def as_named_input(self, name: str) -> DatasetConsumptionConfig:  # type: ignore[override]
        """Return the dataset as an input of this name.

        With `.as_mount()` or `.as_download()` the script gets a folder with the files.
        """
        return DatasetConsumptionConfig(name, self)

    def as_mount(self, path_on_compute: str | None = None) -> DatasetConsumptionConfig:  # type: ignore[override]
        return self.as_named_input(self._input_name()).as_mount(path_on_compute)

    def as_download(self, path_on_compute: str | None = None) -> DatasetConsumptionConfig:  # type: ignore[override]
        """Return the dataset as an input that is downloaded to each node."""
        return self.as_named_input(self._input_name()).as_download(path_on_compute)

    def as_reference(self) -> DataReference:
        """Return a data reference that stands for the dataset in script arguments."""
        return self.as_mount().as_reference()

    def native_input(self, name: str) -> DataReference:
        """Return a data reference that gives a script the dataset itself, not a folder."""
        return super().as_named_input(name)

    @property
    def partition_keys(self) -> list[str]:
        """The partition keys: names in partition_format, or columns of partition_by."""
        reading = self._reading() or {}
        if form := reading.get("partition_format"):
            return [*re.compile(path_pattern(form)[0]).groupindex]
        return [*reading.get("partition_keys", ())]

    def checked_keys(self, keys: str | Sequence[str] | None) -> list[str]:
        """Return `keys`, or all partition keys by default, as a checked list.

        Raises:
            UserErrorException: A name is not a partition key.
        """
        own = self.partition_keys
        found = own if keys is None else [keys] if isinstance(keys, str) else [*keys]
        if unknown := [key for key in found if key not in own]:
            raise UserErrorException(f"the dataset is not partitioned by {unknown[0]!r}; its partition_keys are {own}.")
        return found

    def add_tags(self: D, tags: Mapping[str, str] | None = None) -> D:
        return self.update(tags={**self.tags, **(tags or {})})

    def remove_tags(self: D, tags: list[str] | None = None) -> D:
        return self.update(tags={name: value for name, value in self.tags.items() if name not in (tags or ())})

    def _input_name(self) -> str:
        # Name the input after the registered dataset's id, or (without an id) after the dataset's definition.
        own = self.id.replace("-", "")[:8] if self.id else super()._input_name().rpartition("_")[2]
        return f"input__{own}"


@sdk_class
class FileDataset(AbstractDataset, data.FileDataset):
    """A dataset of files."""

    def mount(self, mount_point: str | None = None, **others: object) -> MountContext:
        """Return a context manager that shows the files as a local folder.

        Write `with dataset.mount() as mounted`, or call the methods `start` and `stop`. The folder `mount_point` must
        be empty or missing. None means a temporary folder.
        """
        return MountContext(self, mount_point)

    def to_path(self, **others: object) -> list[str]:
        """Return the files' paths in the dataset, each beginning with `/`."""
        return super().to_path()

    def get_partition_key_values(self, partition_keys: list[str] | None = None) -> list[dict[str, object]]:
        """Return the distinct combinations of the partition keys' values."""
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
        """Copy the files into a folder, by default temporary, and return their paths."""
        return super().download(target_path, overwrite)


def key_values(form: str, relative: str, path: Path) -> dict[str, object]:
    """Return the values (strings, datetimes) that a partition_format finds in a path."""
    moments = path_pattern(form)[1]
    return {
        name: dt.datetime.strptime(text, moments[name]) if name in moments else text
        for name, text in path_parts(form, relative, path).items()
    }


class MountContext:
    """A context manager that shows a dataset's files in the folder `mount_point`.

    From `start` to `stop` the folder has links to the files or to cached copies.

    Raises:
        UserErrorException: The folder is not empty.
    """

    def __init__(self, dataset: FileDataset, mount_point: str | None) -> None:
        self._dataset, self._held = dataset, contextlib.ExitStack()
        self._is_made = mount_point is None or not os.path.exists(mount_point)
        self._given = mount_point
        self.mount_point = os.path.abspath(mount_point) if mount_point is not None else ""

    def start(self) -> None:
        """Show the dataset's files in the folder, as links."""
        if self._given is None:
            self.mount_point = tempfile.mkdtemp(prefix="paceline-mount-")
        elif os.path.isdir(self.mount_point) and os.listdir(self.mount_point):
            raise UserErrorException(f"mount_point={self._given!r} is not empty. Name another folder.")
        top = Path(self.mount_point)
        top.mkdir(parents=True, exist_ok=True)
        # The exit stack undoes its entries in reverse order: it removes the links first, and then lets the cache evict the files.
        files = self._held.enter_context(
            local_files(self._dataset.native_input("mounted").sources, self._dataset._workspace_dir())
        )
        self._held.callback(self._remove)
        for found in files:
            link = top / found.relative
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(found.path.absolute())

    def stop(self) -> None:
        """Remove the links, and release the dataset's files."""
        self._held.close()

    def _remove(self) -> None:
        if self._is_made:
            shutil.rmtree(self.mount_point, ignore_errors=True)
            return
        for entry in os.scandir(self.mount_point):
            # Delete each entry: the mount point has only links, and folders that start() has created for these links.
            shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)

    def __enter__(self) -> MountContext:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
