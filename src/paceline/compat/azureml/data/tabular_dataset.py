"""`azureml.data.tabular_dataset`."""

from paceline.data.datasets.table import TabularDataset

__all__ = ["TabularDataset"]
