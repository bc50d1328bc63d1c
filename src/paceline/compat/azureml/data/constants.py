"""`azureml.data.constants`: datastore types and names of the default datastores."""

AZURE_BLOB = "AzureBlob"
AZURE_FILE = "AzureFile"
AZURE_DATA_LAKE = "AzureDataLake"
AZURE_DATA_LAKE_GEN2 = "AzureDataLakeGen2"
AZURE_SQL_DATABASE = "AzureSqlDatabase"
AZURE_POSTGRESQL = "AzurePostgreSql"
AZURE_MYSQL = "AzureMySql"
DBFS = "DBFS"
HDFS = "Hdfs"
ACCOUNT_KEY = "AccountKey"
SAS = "Sas"
CLIENT_CREDENTIALS = "ClientCredentials"
NONE = "None"
WORKSPACE_BLOB_DATASTORE = "workspaceblobstore"
WORKSPACE_FILE_DATASTORE = "workspacefilestore"

__all__ = [*filter(str.isupper, dir())]  # noqa: PLE0604 - the names are strings
