"""`azureml.core.compute.remote`."""

from paceline.compat.azureml.core.compute.targets import *  # noqa: F403
