"""`azureml.train.hyperdrive.exceptions`."""

from paceline.compat.azureml.exceptions import HyperDriveConfigException, HyperDriveRuntimeException

__all__ = ["HyperDriveConfigException", "HyperDriveRuntimeException"]
