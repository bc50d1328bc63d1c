"""`azureml.data.azure_storage_datastore`: all stores are of one class here."""

from paceline.compat.azureml.core.datastore import Datastore

AzureBlobDatastore = AzureFileDatastore = AbstractAzureStorageDatastore = Datastore

__all__ = ["AbstractAzureStorageDatastore", "AzureBlobDatastore", "AzureFileDatastore"]
