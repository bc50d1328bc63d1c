"""Datastores by the SDK's names (`azureml.core.datastore`).

https://learn.microsoft.com/python/api/azureml-core/azureml.core.datastore.datastore
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import paceline
from paceline.compat.azureml.data.data_reference import of_plain
from paceline.compat.azureml.exceptions import UserErrorException, sdk_class
from paceline.compat.azureml.records import NamedObjects
from paceline.compat.azureml.stores import DEFAULT_NAMES, place_in, real_name
from paceline.data import DataReference

if TYPE_CHECKING:
    from paceline import Workspace
    from paceline.compat.azureml.data.data_reference import SdkDataReference

__all__ = [
    "AbstractADLSDatastore",
    "AbstractAzureStorageDatastore",
    "AzureBlobDatastore",
    "AzureDataLakeDatastore",
    "AzureDataLakeGen2Datastore",
    "AzureFileDatastore",
    "Datastore",
]

_NO_TABLES = "stores hold only files here. Query it in the script: pandas.read_sql."


@sdk_class
class Datastore(paceline.Datastore):
    """A datastore of Paceline with the SDK's methods.

    `workspaceblobstore` and similar names refer to the workspace's default store.

    Raises:
        UserErrorException: No store has this name.
    """

    def __init__(self, workspace: Workspace, name: str | None = None) -> None:
        self._real = paceline.Datastore(workspace, real_name(workspace, name))
        self._shown = name
        super().__init__(workspace, self._real.name)

    @property
    def name(self) -> str:
        """The name under which the program requested the store."""
        return self._shown or self._real.name

    @property
    def datastore_type(self) -> str:
        """The kind of store. Programs expect "AzureBlob" for the default store."""
        if self._shown == "workspacefilestore":
            return "AzureFile"
        return "AzureBlob" if self.is_default or self._shown in DEFAULT_NAMES else self._real.datastore_type

    @property
    def container_name(self) -> str:
        """The name of the container or bucket; for a folder, the store's name."""
        return self._real.container_name or self.name

    @property
    def account_name(self) -> str:
        """The account's name, or "local" for a store without an account."""
        return self._real.account_name or "local"

    def path(self, path: str | None = None, data_reference_name: str | None = None) -> SdkDataReference:
        """Return a reference to a path in the store, for a script's arguments."""
        # A reference to a whole store has the name of the store, as in `$AZUREML_DATAREFERENCE_workspaceblobstore`.
        name = data_reference_name or (self._shown if not path and self._shown else None)
        place = place_in(self.workspace, self._shown, (path or "").strip("/"))
        if place.datastore is None:
            return of_plain(DataReference(name=name or re.sub(r"\W", "_", f"{self._shown}_{path}"), sources=(place,)))
        return of_plain(self._real.path(path, name), self._real)

    @property
    def account_key(self) -> str | None:
        """None: Paceline never reveals keys."""
        return None

    @property
    def sas_token(self) -> str | None:
        """None: Paceline never reveals tokens."""
        return None

    @property
    def protocol(self) -> str:
        return self.url.partition(":")[0]

    @property
    def endpoint(self) -> str:
        return "core.windows.net"

    @staticmethod
    def get(workspace: Workspace, datastore_name: str) -> Datastore:
        return Datastore(workspace, datastore_name)

    @staticmethod
    def get_default(workspace: Workspace) -> Datastore:
        return Datastore(workspace, "workspaceblobstore")

    @staticmethod
    def list(workspace: Workspace) -> NamedObjects[Datastore]:  # type: ignore[override]
        """Return the stores by name, including the SDK's names of the default store."""
        names = [*paceline.Datastore.list(workspace), *DEFAULT_NAMES]
        return NamedObjects({name: Datastore(workspace, name) for name in names})

    @staticmethod
    def register_azure_blob_container(
        workspace: Workspace,
        datastore_name: str,
        container_name: str,
        account_name: str,
        sas_token: str | None = None,
        account_key: str | None = None,
        protocol: str | None = None,
        endpoint: str | None = None,
        overwrite: bool = False,
        create_if_not_exists: bool = False,
        **others: object,
    ) -> Datastore:
        """Register a container of Azure's blob storage (`abfs://`), and return the store.

        Paceline stores the key among its credentials and never reveals the key. If the user has added a store under
        this name, such as a folder with the container's files, return the user's store instead.

        Raises:
            UserErrorException: A value is wrong, or the store exists and overwrite=False.
        """
        if (added := _elsewhere(workspace, datastore_name)) is not None:
            return added
        # Put the credentials into environment variables, because Paceline reads them from there, and log a note about it.
        credentials = {}
        if account_key or sas_token:
            variable = f"AZUREML_STORE_{''.join(c if c.isalnum() else '_' for c in datastore_name).upper()}"
            os.environ[variable] = str(account_key or sas_token)
            credentials = {"account_key" if account_key else "sas_token": f"env:{variable}"}
        url = f"abfs://{container_name}@{account_name}.dfs.core.windows.net"
        paceline.Datastore.register(
            workspace, datastore_name, url, credentials=credentials or None, overwrite=overwrite
        )
        return Datastore(workspace, datastore_name)

    @staticmethod
    def register_azure_file_share(
        workspace: Workspace,
        datastore_name: str,
        file_share_name: str,
        account_name: str,
        *others: object,
        **named: object,
    ) -> Datastore:
        """Return the user's store of this name, which replaces the file share.

        Raises:
            UserErrorException: The user has added no store of this name.
        """
        return _added(workspace, datastore_name, f"the file share {file_share_name!r}")

    @staticmethod
    def register_azure_data_lake(
        workspace: Workspace, datastore_name: str, *others: object, **named: object
    ) -> Datastore:
        """Return the user's store of this name, which replaces a Data Lake."""
        return _added(workspace, datastore_name, "a Data Lake of the first generation")

    @staticmethod
    def register_dbfs(workspace: Workspace, datastore_name: str) -> Datastore:
        return _added(workspace, datastore_name, "Databricks' file system")

    @staticmethod
    def register_hdfs(workspace: Workspace, datastore_name: str, *others: object, **named: object) -> Datastore:
        return _added(workspace, datastore_name, "HDFS")

    @staticmethod
    def register_azure_sql_database(
        workspace: Workspace, datastore_name: str, *others: object, **named: object
    ) -> Datastore:
        """Raise UserErrorException: a datastore of Paceline has files, not tables."""
        raise UserErrorException(f"{datastore_name!r} is a database, and {_NO_TABLES}")

    register_azure_sql_database.__func__.refused = _NO_TABLES  # type: ignore[attr-defined]
    register_azure_postgre_sql = register_azure_my_sql = register_azure_sql_database

    @staticmethod
    def register_azure_data_lake_gen2(
        workspace: Workspace,
        datastore_name: str,
        filesystem: str,
        account_name: str,
        *login: object,
        overwrite: bool = False,
        **others: object,
    ) -> Datastore:
        """Register a file system of Azure's data lake (`abfs://`), and return the store.

        If the user has added a store under this name, return the user's store instead.
        """
        if (added := _elsewhere(workspace, datastore_name)) is not None:
            return added
        url = f"abfs://{filesystem}@{account_name}.dfs.core.windows.net"
        paceline.Datastore.register(workspace, datastore_name, url, overwrite=overwrite)
        return Datastore(workspace, datastore_name)


def _elsewhere(workspace: Workspace, name: str) -> Datastore | None:
    """Return the user's store of this name if it is outside Azure."""
    known = paceline.Datastore.list(workspace).get(name)
    return Datastore(workspace, name) if known is not None and known.kind != "azure" else None


def _added(workspace: Workspace, name: str, what: str) -> Datastore:
    if (found := _elsewhere(workspace, name)) is not None:
        return found
    raise UserErrorException(
        f"{what} can't be read from here. Mount it or copy its files, then add the folder under the store's name before "
        f"running this line: paceline data add {name} /mnt/{name}"
    )


# The SDK has a class for each kind of store. Here, one class serves all kinds under all these names.
AbstractADLSDatastore = AzureDataLakeDatastore = AzureDataLakeGen2Datastore = Datastore
AbstractAzureStorageDatastore = AzureBlobDatastore = AzureFileDatastore = Datastore
