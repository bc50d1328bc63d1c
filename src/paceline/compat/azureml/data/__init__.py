"""`azureml.data`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.system.lazy import face

if TYPE_CHECKING:
    from paceline.compat.azureml.data.dataset_factory import DataType
    from paceline.compat.azureml.data.output_dataset_config import OutputFileDatasetConfig
    from paceline.data.datasets.file import FileDataset
    from paceline.data.datasets.table import TabularDataset

__all__ = ["DataType", "FileDataset", "OutputFileDatasetConfig", "TabularDataset"]

__getattr__ = face(
    __name__,
    {
        "paceline.data.datasets.file": ("FileDataset",),
        "paceline.data.datasets.table": ("TabularDataset",),
        f"{__name__}.dataset_factory": ("DataType",),
        f"{__name__}.output_dataset_config": ("OutputFileDatasetConfig",),
    },
)
