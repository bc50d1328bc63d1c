"""`azureml.train.sklearn`."""

from paceline.compat.azureml.train.estimator import SKLearn

__all__ = ["SKLearn"]
