"""`azureml.train.widgets`, where the widget of 2018 was."""

from paceline.compat.azureml.widgets import RunDetails

__all__ = ["RunDetails"]
