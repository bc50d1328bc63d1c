"""`azureml.data`: datasets, and data references of runs."""

from __future__ import annotations

from paceline.system.lazy_import import face

#: Module -> names in this module that can be imported from the package `azureml.data`.
_HOMES = {
    "core.dataset": "DataType",
    "data.file_dataset": "FileDataset",
    "data.output_dataset_config": "OutputFileDatasetConfig",
    "data.tabular_dataset": "TabularDataset",
}

__all__ = [*" ".join(_HOMES.values()).split()]  # noqa: PLE0604 - the names are strings

__getattr__ = face(__name__, {f"paceline.compat.azureml.{home}": names.split() for home, names in _HOMES.items()})
