"""`azureml.data.azure_data_lake_datastore`: all stores are of one class here."""

from paceline.compat.azureml.core.datastore import Datastore

AbstractADLSDatastore = AzureDataLakeDatastore = AzureDataLakeGen2Datastore = Datastore

__all__ = ["AbstractADLSDatastore", "AzureDataLakeDatastore", "AzureDataLakeGen2Datastore"]
