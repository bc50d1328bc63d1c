"""`azureml.core.compute.amlcompute`."""

from paceline.compat.azureml.core.compute.targets import *  # noqa: F403
