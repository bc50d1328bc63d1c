"""`azureml.core.compute.aks`."""

from paceline.compat.azureml.core.compute.targets import *  # noqa: F403
