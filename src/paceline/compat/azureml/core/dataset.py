"""`azureml.core.dataset`: Paceline's datasets have the SDK's calls."""

from paceline.data.datasets.dataset import Dataset

__all__ = ["Dataset"]
