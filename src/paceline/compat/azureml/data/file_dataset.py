"""`azureml.data.file_dataset`."""

from paceline.data.datasets.file import FileDataset

__all__ = ["FileDataset"]
