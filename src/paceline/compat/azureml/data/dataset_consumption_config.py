"""A dataset as an input of a run (`azureml.data.dataset_consumption_config`)."""

from __future__ import annotations

import dataclasses

from paceline.compat.azureml.data.data_reference import inside
from paceline.compat.azureml.exceptions import UserErrorException
from paceline.data import DataReference

__all__ = ["DatasetConsumptionConfig"]


class DatasetConsumptionConfig:
    """A dataset with its input name and mode.

    With mode "direct" the script receives the dataset by name; with "mount" or "download", a folder.

    Raises:
        UserErrorException: `dataset` is not a dataset, or the mode is unknown.
    """

    def __init__(self, name: str, dataset: object, mode: str = "direct", path_on_compute: str | None = None) -> None:
        if not hasattr(dataset, "as_named_input"):
            raise UserErrorException(f"dataset={dataset!r} is no dataset.")
        if mode not in ("direct", "mount", "download", "hdfs"):
            raise UserErrorException(f"mode={mode!r} must be direct, mount or download.")
        self.name, self.dataset, self.mode, self.path_on_compute = name, dataset, mode, path_on_compute

    def as_mount(self, path_on_compute: str | None = None) -> DatasetConsumptionConfig:
        """Return the input as a folder."""
        return DatasetConsumptionConfig(self.name, self.dataset, "mount", path_on_compute)

    def as_download(self, path_on_compute: str | None = None) -> DatasetConsumptionConfig:
        """Return the input as a copy on each node."""
        return DatasetConsumptionConfig(self.name, self.dataset, "download", path_on_compute)

    def as_reference(self) -> DataReference:
        """Return the reference for a job."""
        native = getattr(self.dataset, "native_input", self.dataset.as_named_input)
        found: DataReference = native(self.name)
        mode = "mount" if self.mode == "hdfs" else self.mode
        return dataclasses.replace(found, mode=mode, path_on_compute=inside(self.path_on_compute))

    def __str__(self) -> str:
        return str(self.as_reference())
