"""`azureml.core.compute.computeinstance`."""

from paceline.compat.azureml.core.compute.targets import *  # noqa: F403
