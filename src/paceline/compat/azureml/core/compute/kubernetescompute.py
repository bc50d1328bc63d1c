"""`azureml.core.compute.kubernetescompute`."""

from paceline.compat.azureml.core.compute.targets import *  # noqa: F403
