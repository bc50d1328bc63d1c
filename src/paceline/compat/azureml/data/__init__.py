"""`azureml.data`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.system.lazy import face

if TYPE_CHECKING:
    from paceline.data.datasets.file import FileDataset
    from paceline.data.datasets.table import TabularDataset

__all__ = ["FileDataset", "TabularDataset"]

__getattr__ = face(
    __name__,
    {
        "paceline.data.datasets.file": ("FileDataset",),
        "paceline.data.datasets.table": ("TabularDataset",),
    },
)
