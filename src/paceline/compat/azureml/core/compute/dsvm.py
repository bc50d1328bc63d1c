"""`azureml.core.compute.dsvm`."""

from paceline.compat.azureml.core.compute.targets import *  # noqa: F403
