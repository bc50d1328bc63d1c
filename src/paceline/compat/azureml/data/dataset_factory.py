"""`azureml.data.dataset_factory`."""

from __future__ import annotations

from paceline.data.datasets.dataset import Dataset

FileDatasetFactory = Dataset.File
TabularDatasetFactory = Dataset.Tabular

__all__ = ["DataType", "FileDatasetFactory", "TabularDatasetFactory"]


class DataType:
    """Types of columns, as pandas names them."""

    @staticmethod
    def to_string() -> str:
        return "str"

    @staticmethod
    def to_long() -> str:
        return "int64"

    @staticmethod
    def to_float(decimal_mark: str = ".") -> str:
        return "float64"

    @staticmethod
    def to_bool() -> str:
        return "bool"

    @staticmethod
    def to_datetime(formats: object = None) -> str:
        return "datetime64[ns]"
