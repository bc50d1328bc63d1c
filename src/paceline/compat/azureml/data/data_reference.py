"""A place in a datastore for a run (`azureml.data.data_reference`).

https://learn.microsoft.com/python/api/azureml-core/azureml.data.data_reference.datareference
"""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.compat.azureml.core.runconfig import DataReferenceConfiguration
from paceline.compat.azureml.exceptions import UserErrorException
from paceline.job import data_reference

__all__ = ["DataReference"]


class SdkDataReference(data_reference.DataReference):
    """`paceline.DataReference` with the SDK's other calls."""

    @property
    def store(self) -> Any:
        """The datastore object that it was made of; None where that is not known."""
        return getattr(self, "_store", None)

    @property
    def data_reference_name(self) -> str:
        return self.name

    @property
    def path_on_datastore(self) -> str:
        return self.sources[0].path

    def path(self, path: str | None = None, data_reference_name: str | None = None) -> SdkDataReference:
        """A place below this one."""
        source = self.sources[0]
        inside = "/".join(part.strip("/") for part in (source.path, path or "") if part.strip("/"))
        return dataclasses.replace(
            self, name=data_reference_name or self.name, sources=(dataclasses.replace(source, path=inside),)
        )

    def as_upload(self, path_on_compute: str | None = None, overwrite: bool | None = None) -> SdkDataReference:
        """As `paceline.DataReference.as_upload`."""
        made = super().as_upload(overwrite=overwrite)
        return of_plain(dataclasses.replace(made, path_on_compute=inside(path_on_compute)))

    def as_download(self, path_on_compute: str | None = None, overwrite: bool = False) -> SdkDataReference:
        """As `paceline.DataReference.as_download`."""
        return of_plain(dataclasses.replace(super().as_download(), path_on_compute=inside(path_on_compute)))

    def to_config(self) -> DataReferenceConfiguration:
        """For `RunConfiguration.data_references`."""
        source = self.sources[0]
        return DataReferenceConfiguration(
            source.datastore, self.mode, source.path, self.path_on_compute, self.overwrite
        )


class DataReference:
    """DataReference(datastore, data_reference_name=None, path_on_datastore=None, mode="mount", path_on_compute=None,
    overwrite=False): a place in a store; `str()` is the word that a script's arguments have for it.
    """

    def __new__(  # type: ignore[misc]
        cls,
        datastore: Any,
        data_reference_name: str | None = None,
        path_on_datastore: str | None = None,
        mode: str = "mount",
        path_on_compute: str | None = None,
        overwrite: bool = False,
    ) -> SdkDataReference:
        if not hasattr(datastore, "path"):
            raise UserErrorException(f"datastore={datastore!r} is no datastore. Give Datastore.get(ws, 'name').")
        made: SdkDataReference = of_plain(datastore.path(path_on_datastore, data_reference_name))
        return dataclasses.replace(made, mode=mode, path_on_compute=inside(path_on_compute), overwrite=bool(overwrite))


def of_plain(reference: data_reference.DataReference, store: Any = None) -> SdkDataReference:
    """The same with the SDK's calls. store: the datastore that it lies in."""
    made = SdkDataReference(**{field.name: getattr(reference, field.name) for field in dataclasses.fields(reference)})
    # Beside the fields, for those go into the job.
    object.__setattr__(made, "_store", store or getattr(reference, "_store", None))
    return made


def inside(path: str | None) -> str | None:
    """A path below the working directory; an absolute one, which belongs to a container, is left out."""
    return None if path is None or path.startswith("/") else path.strip("./") or None
