"""`azureml.core.compute.hdinsight`."""

from paceline.compat.azureml.core.compute.targets import *  # noqa: F403
