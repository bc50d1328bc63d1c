"""Datastores by the SDK's names (`azureml.core.datastore`).

https://learn.microsoft.com/python/api/azureml-core/azureml.core.datastore.datastore
"""

from __future__ import annotations

import os
import re
from typing import Any

from paceline.compat.azureml.data.data_reference import of_plain
from paceline.compat.azureml.exceptions import UserErrorException, sdk_class
from paceline.compat.azureml.records import NamedObjects
from paceline.compat.azureml.stores import DEFAULT_NAMES, place_in, real_name
from paceline.data.stores import datastore
from paceline.job.data_reference import DataReference

__all__ = [
    "AbstractADLSDatastore",
    "AbstractAzureStorageDatastore",
    "AzureBlobDatastore",
    "AzureDataLakeDatastore",
    "AzureDataLakeGen2Datastore",
    "AzureFileDatastore",
    "Datastore",
]

_NO_TABLES = "stores are files here. Query it in the script: pandas.read_sql."


@sdk_class
class Datastore(datastore.Datastore):
    """`paceline.Datastore`; `workspaceblobstore` and its like mean the workspace's default store.

    Raises:
        UserErrorException: there is none of this name.
    """

    def __init__(self, workspace: Any, name: str | None = None) -> None:
        self._real = datastore.Datastore(workspace, real_name(workspace, name))
        self._shown = name
        super().__init__(workspace, self._real.name)

    @property
    def name(self) -> str:
        """The name by which it was asked for."""
        return self._shown or self._real.name

    @property
    def datastore_type(self) -> str:
        """ "AzureBlob" for the workspace's own, which drivers print and compare; else the kind."""
        if self._shown == "workspacefilestore":
            return "AzureFile"
        return "AzureBlob" if self.is_default or self._shown in DEFAULT_NAMES else self._real.datastore_type

    @property
    def container_name(self) -> str:
        """The container's or bucket's name; of a folder, the store's own."""
        return self._real.container_name or self.name

    @property
    def account_name(self) -> str:
        """The account's name; of a store that has none, "local"."""
        return self._real.account_name or "local"

    def path(self, path: str | None = None, data_reference_name: str | None = None) -> Any:
        """A place in the store, for a script's arguments."""
        # Of the whole store, the store's name: `$AZUREML_DATAREFERENCE_workspaceblobstore`.
        name = data_reference_name or (self._shown if not path and self._shown else None)
        place = place_in(self.workspace, self._shown, (path or "").strip("/"))
        if place.datastore is None:
            return of_plain(DataReference(name=name or re.sub(r"\W", "_", f"{self._shown}_{path}"), sources=(place,)))
        return of_plain(self._real.path(path, name), self._real)

    @property
    def account_key(self) -> str | None:
        """None: keys are never shown."""
        return None

    @property
    def sas_token(self) -> str | None:
        """None: tokens are never shown."""
        return None

    @property
    def protocol(self) -> str:
        return self.url.partition(":")[0]

    @property
    def endpoint(self) -> str:
        return "core.windows.net"

    @staticmethod
    def get(workspace: Any, datastore_name: str) -> Datastore:
        """The store of this name."""
        return Datastore(workspace, datastore_name)

    @staticmethod
    def get_default(workspace: Any) -> Datastore:
        """The workspace's default store."""
        return Datastore(workspace, "workspaceblobstore")

    @staticmethod
    def list(workspace: Any) -> NamedObjects[Datastore]:  # type: ignore[override]
        """Name -> store; the old names of the default store as well."""
        names = [*datastore.Datastore.list(workspace), *DEFAULT_NAMES]
        return NamedObjects({name: Datastore(workspace, name) for name in names})

    @staticmethod
    def register_azure_blob_container(
        workspace: Any,
        datastore_name: str,
        container_name: str,
        account_name: str,
        sas_token: str | None = None,
        account_key: str | None = None,
        protocol: str | None = None,
        endpoint: str | None = None,
        overwrite: bool = False,
        create_if_not_exists: bool = False,
        skip_validation: bool = False,
        **others: Any,
    ) -> Datastore:
        """Register a container of Azure's blob storage (`abfs://`); a key is kept where paceline keeps credentials, never shown.

        A store that was added under this name, a folder with the container's files, is used as it is.

        Raises:
            UserErrorException: a wrong value, or there is a store of this name and overwrite=False.
        """
        if (added := _elsewhere(workspace, datastore_name)) is not None:
            return added
        # Credentials are read from where they lie: the values are put into this program's environment, and that is noted.
        credentials = {}
        if account_key or sas_token:
            variable = f"AZUREML_STORE_{''.join(c if c.isalnum() else '_' for c in datastore_name).upper()}"
            os.environ[variable] = str(account_key or sas_token)
            credentials = {"account_key" if account_key else "sas_token": f"env:{variable}"}
        url = f"abfs://{container_name}@{account_name}.dfs.core.windows.net"
        datastore.Datastore.register(
            workspace, datastore_name, url, credentials=credentials or None, overwrite=overwrite
        )
        return Datastore(workspace, datastore_name)

    @staticmethod
    def register_azure_file_share(
        workspace: Any, datastore_name: str, file_share_name: str, account_name: str, *others: Any, **named: Any
    ) -> Datastore:
        """The store that was added under this name: the folder at which the share, or a copy of it, lies here.

        Raises:
            UserErrorException: none was; so also in the three below.
        """
        return _added(workspace, datastore_name, f"the file share {file_share_name!r}")

    @staticmethod
    def register_azure_data_lake(workspace: Any, datastore_name: str, *others: Any, **named: Any) -> Datastore:
        """The store that was added under this name; the first Data Lake has ended."""
        return _added(workspace, datastore_name, "a Data Lake of the first generation")

    @staticmethod
    def register_dbfs(workspace: Any, datastore_name: str) -> Datastore:
        """The store that was added under this name."""
        return _added(workspace, datastore_name, "Databricks' file system")

    @staticmethod
    def register_hdfs(workspace: Any, datastore_name: str, *others: Any, **named: Any) -> Datastore:
        """The store that was added under this name."""
        return _added(workspace, datastore_name, "HDFS")

    @staticmethod
    def register_azure_sql_database(workspace: Any, datastore_name: str, *others: Any, **named: Any) -> Datastore:
        """Raise UserErrorException, as the two below: a store is files."""
        raise UserErrorException(f"{datastore_name!r} is a database, and {_NO_TABLES}")

    register_azure_sql_database.__func__.refused = _NO_TABLES  # type: ignore[attr-defined]
    register_azure_postgre_sql = register_azure_my_sql = register_azure_sql_database

    @staticmethod
    def register_azure_data_lake_gen2(
        workspace: Any,
        datastore_name: str,
        filesystem: str,
        account_name: str,
        tenant_id: str | None = None,
        client_id: str | None = None,
        client_secret: str | None = None,
        resource_url: str | None = None,
        authority_url: str | None = None,
        protocol: str | None = None,
        endpoint: str | None = None,
        overwrite: bool = False,
        **others: Any,
    ) -> Datastore:
        """Register a file system of Azure's data lake (`abfs://`); one that was added under this name is used as it is."""
        if (added := _elsewhere(workspace, datastore_name)) is not None:
            return added
        url = f"abfs://{filesystem}@{account_name}.dfs.core.windows.net"
        datastore.Datastore.register(workspace, datastore_name, url, overwrite=overwrite)
        return Datastore(workspace, datastore_name)


def _elsewhere(workspace: Any, name: str) -> Datastore | None:
    """The store of this name, where the user has added one that is not on Azure: the driver means that, as with targets."""
    known = datastore.Datastore.list(workspace).get(name)
    return Datastore(workspace, name) if known is not None and known.kind != "azure" else None


def _added(workspace: Any, name: str, what: str) -> Datastore:
    if (found := _elsewhere(workspace, name)) is not None:
        return found
    raise UserErrorException(
        f"{what} can't be read from here. Mount it, or copy its files, and add the folder under the store's name before "
        f"this line is run: paceline data add {name} /mnt/{name}"
    )


# All stores are of one class here.
AbstractADLSDatastore = AzureDataLakeDatastore = AzureDataLakeGen2Datastore = Datastore
AbstractAzureStorageDatastore = AzureBlobDatastore = AzureFileDatastore = Datastore
