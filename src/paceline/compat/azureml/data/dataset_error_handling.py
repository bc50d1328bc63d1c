"""`azureml.data.dataset_error_handling`: what goes wrong with a dataset is one exception here."""

from paceline.compat.azureml.exceptions import UserErrorException

DatasetValidationError = DatasetExecutionError = UserErrorException

__all__ = ["DatasetExecutionError", "DatasetValidationError"]
