"""`azureml.data`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.system.lazy_import import face

if TYPE_CHECKING:
    from paceline.compat.azureml.data.dataset_factory import DataType
    from paceline.compat.azureml.data.file_dataset import FileDataset
    from paceline.compat.azureml.data.output_dataset_config import OutputFileDatasetConfig
    from paceline.compat.azureml.data.tabular_dataset import TabularDataset

__all__ = ["DataType", "FileDataset", "OutputFileDatasetConfig", "TabularDataset"]

__getattr__ = face(
    __name__,
    {
        f"{__name__}.dataset_factory": ("DataType",),
        f"{__name__}.file_dataset": ("FileDataset",),
        f"{__name__}.output_dataset_config": ("OutputFileDatasetConfig",),
        f"{__name__}.tabular_dataset": ("TabularDataset",),
    },
)
