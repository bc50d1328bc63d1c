"""A path in a datastore, independent of a run (`azureml.data.datapath`)."""

from __future__ import annotations

from paceline.compat.azureml.data.data_reference import DataReference, SdkDataReference

__all__ = ["DataPath", "DataPathComputeBinding"]


class DataPathComputeBinding:
    """The way a run receives a DataPath."""

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
        self,
        data_reference_name: str | None = None,
        datapath_compute_binding: DataPathComputeBinding | None = None,
    ) -> SdkDataReference:
        """Return a reference to the path for a run."""
        binding = datapath_compute_binding or DataPathComputeBinding()
        return DataReference(
            self.datastore,
            data_reference_name or self.name,
            self.path_on_datastore,
            binding.mode,
            binding.path_on_compute,
            binding.overwrite,
        )
