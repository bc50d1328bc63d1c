"""`azureml.core.compute.databricks`."""

from paceline.compat.azureml.core.compute.targets import *  # noqa: F403
