"""`azureml.core.compute_target`, from where most drivers take the exception."""

from paceline.compat.azureml.core.compute.targets import ComputeTarget
from paceline.compat.azureml.exceptions import ComputeTargetException

__all__ = ["ComputeTarget", "ComputeTargetException"]
