"""A path in a datastore, for a run (`azureml.data.data_reference`).

https://learn.microsoft.com/python/api/azureml-core/azureml.data.data_reference.datareference
"""

from __future__ import annotations

import dataclasses
from typing import Any

import paceline
from paceline.compat.azureml.core.runconfig import DataReferenceConfiguration
from paceline.compat.azureml.exceptions import UserErrorException

__all__ = ["DataReference"]


class SdkDataReference(paceline.DataReference):
    """A reference of Paceline's with the SDK's other methods."""

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
        """Return a reference to a path below this one."""
        source = self.sources[0]
        inside = "/".join(part.strip("/") for part in (source.path, path or "") if part.strip("/"))
        return dataclasses.replace(
            self, name=data_reference_name or self.name, sources=(dataclasses.replace(source, path=inside),)
        )

    def as_upload(self, path_on_compute: str | None = None, overwrite: bool | None = None) -> SdkDataReference:
        """Return the reference in upload mode."""
        made = super().as_upload(overwrite=overwrite)
        return of_plain(dataclasses.replace(made, path_on_compute=inside(path_on_compute)))

    def as_download(self, path_on_compute: str | None = None, overwrite: bool = False) -> SdkDataReference:
        """Return the reference in download mode."""
        return of_plain(dataclasses.replace(super().as_download(), path_on_compute=inside(path_on_compute)))

    def to_config(self) -> DataReferenceConfiguration:
        """Return the entry for `RunConfiguration.data_references`."""
        source = self.sources[0]
        return DataReferenceConfiguration(
            source.datastore, self.mode, source.path, self.path_on_compute, self.overwrite
        )


class DataReference:
    """A path in a datastore; `str()` returns its placeholder in script arguments.

    Takes `(datastore, data_reference_name=None, path_on_datastore=None, mode="mount", path_on_compute=None,
    overwrite=False)`.
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
    """Return a reference of Paceline's with the SDK's methods.

    `store` is its datastore.
    """
    made = SdkDataReference(**{field.name: getattr(reference, field.name) for field in dataclasses.fields(reference)})
    # Set it outside the fields, because the fields are part of the job.
    object.__setattr__(made, "_store", store or getattr(reference, "_store", None))
    return made


def inside(path: str | None) -> str | None:
    """Return a relative path, or None for an absolute one.

    An absolute path belongs to one of Azure's containers.
    """
    return None if path is None or path.startswith("/") else path.strip("./") or None
