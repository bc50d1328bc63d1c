"""`azureml.data.dataset_factory`."""

from __future__ import annotations

from paceline.compat.azureml.core.dataset import FileDatasetFactory, TabularDatasetFactory

__all__ = ["DataType", "FileDatasetFactory", "TabularDatasetFactory"]


class DataType:
    """Column types for `set_column_types`."""

    @staticmethod
    def to_string() -> str:
        return "str"

    @staticmethod
    def to_long() -> str:
        return "int"

    @staticmethod
    def to_float(decimal_mark: str = ".") -> str:
        return "float"

    @staticmethod
    def to_bool() -> str:
        return "bool"

    @staticmethod
    def to_datetime(formats: object = None) -> str:
        """Return the type of dates; only the first strptime format counts."""
        first = formats if isinstance(formats, (str, type(None))) else next(iter(formats), None)  # type: ignore[call-overload]
        return f"datetime:{first}" if first else "datetime"
