"""Paths in datastores, and datasets, as inputs of a run (`azureml.data.data_reference` and others).

https://learn.microsoft.com/python/api/azureml-core/azureml.data.data_reference.datareference
"""

from __future__ import annotations

import dataclasses
from typing import Any

import paceline
from paceline.compat.azureml.core.runconfig import DataReferenceConfiguration
from paceline.compat.azureml.exceptions import UserErrorException

__all__ = ["DataPath", "DataPathComputeBinding", "DataReference", "DatasetConsumptionConfig"]


class SdkDataReference(paceline.DataReference):
    """A data reference of Paceline with all methods of the SDK's class."""

    @property
    def store(self) -> Any:
        """The datastore object of the reference, or None if it is unknown."""
        return getattr(self, "_store", None)

    @property
    def data_reference_name(self) -> str:
        return self.name

    @property
    def path_on_datastore(self) -> str:
        return self.sources[0].path

    def path(self, path: str | None = None, data_reference_name: str | None = None) -> SdkDataReference:
        """Return a reference to a path below this reference's path."""
        source = self.sources[0]
        inside = "/".join(part.strip("/") for part in (source.path, path or "") if part.strip("/"))
        return dataclasses.replace(
            self, name=data_reference_name or self.name, sources=(dataclasses.replace(source, path=inside),)
        )

    def as_upload(self, path_on_compute: str | None = None, overwrite: bool | None = None) -> SdkDataReference:
        made = super().as_upload(overwrite=overwrite)
        return of_plain(dataclasses.replace(made, path_on_compute=inside(path_on_compute)))

    def as_download(self, path_on_compute: str | None = None, overwrite: bool = False) -> SdkDataReference:
        return of_plain(dataclasses.replace(super().as_download(), path_on_compute=inside(path_on_compute)))

    def to_config(self) -> DataReferenceConfiguration:
        """Return this reference as an entry of `RunConfiguration.data_references`."""
        source = self.sources[0]
        return DataReferenceConfiguration(
            source.datastore, self.mode, source.path, self.path_on_compute, self.overwrite
        )


class DataReference:
    """A path in a datastore.

    The constructor takes `(datastore, data_reference_name=None, path_on_datastore=None, mode="mount", path_on_compute=None,
    overwrite=False)`. `str(reference)` returns a placeholder for script arguments.
    """

    def __new__(  # type: ignore[misc]
        cls,
        datastore: object,
        data_reference_name: str | None = None,
        path_on_datastore: str | None = None,
        mode: str = "mount",
        path_on_compute: str | None = None,
        overwrite: bool = False,
    ) -> SdkDataReference:
        if not hasattr(datastore, "path"):
            raise UserErrorException(f"datastore={datastore!r} is not a datastore. Give Datastore.get(ws, 'name').")
        made: SdkDataReference = of_plain(datastore.path(path_on_datastore, data_reference_name))
        return dataclasses.replace(made, mode=mode, path_on_compute=inside(path_on_compute), overwrite=bool(overwrite))


def of_plain(reference: paceline.DataReference, store: object = None) -> SdkDataReference:
    """Convert a reference of Paceline to one with the SDK's methods, in the datastore `store`."""
    made = SdkDataReference(**{field.name: getattr(reference, field.name) for field in dataclasses.fields(reference)})
    # Don't declare `_store` as a field of the dataclass, because the reference's fields are stored in the job's record.
    object.__setattr__(made, "_store", store or getattr(reference, "_store", None))
    return made


def inside(path: str | None) -> str | None:
    """Return a relative path; None for an absolute path, which Paceline ignores."""
    return None if path is None or path.startswith("/") else path.strip("./") or None


class DataPathComputeBinding:
    """The mode and path by which a run receives a DataPath."""

    def __init__(self, mode: str = "mount", path_on_compute: str | None = None, overwrite: bool = False) -> None:
        self.mode, self.path_on_compute, self.overwrite = mode, path_on_compute, overwrite


class DataPath:
    """A path in a datastore."""

    def __init__(self, datastore: object = None, path_on_datastore: str | None = None, name: str | None = None) -> None:
        self.datastore, self.path_on_datastore, self.name = datastore, path_on_datastore, name

    @property
    def datastore_name(self) -> str | None:
        return getattr(self.datastore, "name", None)

    def create_data_reference(
        self, data_reference_name: str | None = None, datapath_compute_binding: DataPathComputeBinding | None = None
    ) -> SdkDataReference:
        """Return a reference to this path, to pass to a script as an argument."""
        binding = datapath_compute_binding or DataPathComputeBinding()
        return DataReference(
            self.datastore,
            data_reference_name or self.name,
            self.path_on_datastore,
            binding.mode,
            binding.path_on_compute,
            binding.overwrite,
        )


class DatasetConsumptionConfig:
    """A dataset with its input name and mode.

    With mode "direct", the script gets the dataset by its input name. With "mount" or "download", it gets a folder.

    Raises:
        UserErrorException: `dataset` is not a dataset, or the mode is unknown.
    """

    def __init__(self, name: str, dataset: object, mode: str = "direct", path_on_compute: str | None = None) -> None:
        if not hasattr(dataset, "as_named_input"):
            raise UserErrorException(f"dataset={dataset!r} must be a dataset.")
        if mode not in ("direct", "mount", "download", "hdfs"):
            raise UserErrorException(f"mode={mode!r} must be direct, mount or download.")
        self.name, self.dataset, self.mode, self.path_on_compute = name, dataset, mode, path_on_compute

    def as_mount(self, path_on_compute: str | None = None) -> DatasetConsumptionConfig:
        return DatasetConsumptionConfig(self.name, self.dataset, "mount", path_on_compute)

    def as_download(self, path_on_compute: str | None = None) -> DatasetConsumptionConfig:
        """Return this dataset as an input that is downloaded to each node."""
        return DatasetConsumptionConfig(self.name, self.dataset, "download", path_on_compute)

    def as_reference(self) -> paceline.DataReference:
        native = getattr(self.dataset, "native_input", self.dataset.as_named_input)
        found: paceline.DataReference = native(self.name)
        mode = "mount" if self.mode == "hdfs" else self.mode
        return dataclasses.replace(found, mode=mode, path_on_compute=inside(self.path_on_compute))

    def __str__(self) -> str:
        return str(self.as_reference())
