"""Workspaces (`azureml.core.workspace`): a local folder that stands for an Azure workspace.

https://learn.microsoft.com/python/api/azureml-core/azureml.core.workspace.workspace
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import paceline
from paceline.compat.azureml import records
from paceline.compat.azureml.core.compute import WorkspaceTargets
from paceline.compat.azureml.core.datastore import Datastore
from paceline.compat.azureml.core.environment import Environment
from paceline.compat.azureml.core.keyvault import Keyvault
from paceline.compat.azureml.exceptions import UserErrorException, WorkspaceException, sdk_class
from paceline.compat.azureml.records import NamedObjects
from paceline.runs import all_records
from paceline.workspace_dir import WORKSPACE_VARIABLE, configured, nearest_sdk_config, project_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline import runs
    from paceline.compat.azureml.core.compute import ComputeTarget
    from paceline.compat.azureml.core.image import Image
    from paceline.compat.azureml.core.webservice import Webservice
    from paceline.compat.azureml.data.file_dataset import AbstractDataset

__all__ = ["Workspace"]

_KEYS = ("subscription_id", "resource_group", "workspace_name")
_LOCAL = "local"


@sdk_class
class Workspace(paceline.Workspace):
    """A workspace created on this machine, or named by a local `config.json`.

    Workspaces of different names use the same folder. This folder comes from the variable `PACELINE_WORKSPACE` or from
    paceline.toml; the default is `.paceline` beside config.json.

    Raises:
        WorkspaceException: The name is not valid, or this user has neither created nor trusted the folder's workspace.
    """

    def __init__(
        self,
        subscription_id: str,
        resource_group: str,
        workspace_name: str,
        auth: object = None,
        _location: str | None = None,
        sku: str = "basic",
        tags: dict[str, str] | None = None,
        _folder: Path | None = None,
        **others: object,
    ) -> None:
        super().__init__(_folder or configured())
        self._ids = (str(subscription_id or _LOCAL), str(resource_group or _LOCAL), str(workspace_name))
        self._location, self.sku, self.tags = _location, sku, dict(tags or {})
        # Accept any name for this machine's workspace, because programs use the names of workspaces in Azure.
        if not records.RULE.fullmatch(self._ids[2]):
            raise WorkspaceException(
                f"workspace_name={workspace_name!r} can't be a workspace's name: letters, digits, '-', '_' and '.'."
            )

    # --- finding and creating a workspace

    @staticmethod
    def from_config(  # type: ignore[override]  # the SDK's
        path: str | os.PathLike[str] | None = None,
        auth: object = None,
        _logger: object = None,
        _file_name: str | None = None,
    ) -> Workspace:
        """Return the workspace of the nearest config.json.

        The search covers `path` and its parents: in each, `.azureml/`, `aml_config/` and the folder itself. `path` may
        also be the file. Without a config.json, return the workspace that is configured for Paceline.

        Raises:
            UserErrorException: The file does not exist, or lacks the subscription, the resource group or the name.
        """
        start = Path(path or ".").absolute()
        found = start if start.is_file() else nearest_sdk_config(start, _file_name)
        if found is None or found.suffix == ".toml":
            if found is None and path is not None and not start.is_dir():
                raise UserErrorException(f"{str(path)!r} does not exist. Give a config.json or a folder.")
            folder = configured(found or (start if path is not None else None))
            return Workspace(_LOCAL, _LOCAL, paceline.Workspace(folder).name, _folder=folder)
        return Workspace(*_read(found), _folder=_folder_for(project_of(found) if start.is_file() else start))

    @staticmethod
    def create(
        name: str,
        auth: object = None,
        subscription_id: str | None = None,
        resource_group: str | None = None,
        location: str | None = None,
        create_resource_group: bool = True,
        sku: str = "basic",
        tags: dict[str, str] | None = None,
        *settings: object,
        exist_ok: bool = False,
        show_output: bool = True,
        **others: object,
    ) -> Workspace:
        """Create a workspace in the folder that Paceline is configured for, and return it.

        Raises:
            WorkspaceException: The name is not valid, or the workspace exists and exist_ok=False.
        """
        if not isinstance(name, str) or not records.RULE.fullmatch(name):
            raise WorkspaceException(f"{name!r} can't be a workspace's name.")
        made = Workspace(
            subscription_id or _LOCAL,
            resource_group or _LOCAL,
            name,
            _folder=configured(),
            _location=location,
            sku=sku,
            tags=tags,
        )
        kept = records.documents(made, "workspaces")
        if kept.read(name) is not None and not exist_ok:
            raise WorkspaceException(
                f"the workspace {name!r} exists already. Use exist_ok=True, or Workspace.get({name!r})."
            )
        kept.put(
            name,
            {**dict(zip(_KEYS, made._ids, strict=True)), "location": location, "sku": sku, "tags": dict(tags or {})},
        )
        if show_output:
            print(f"Workspace {name}: {made.path}")
        return made

    @staticmethod
    def setup() -> Workspace:
        """Return the workspace of `from_config()`, which needs no other setup."""
        return Workspace.from_config()

    @staticmethod
    def _get_or_create(name: str, *others: Any, **named: Any) -> Workspace:
        return Workspace.create(name, *others, **{**named, "exist_ok": True})

    @staticmethod
    def get(
        name: str,
        auth: object = None,
        subscription_id: str | None = None,
        resource_group: str | None = None,
        location: str | None = None,
        **others: object,
    ) -> Workspace:
        """Return this machine's workspace under a name.

        The workspace may have been created under this name on this machine or in Azure.

        Raises:
            WorkspaceException: The name is not valid.
        """
        kept = Workspace.list(subscription_id or "").get(name)
        if kept:
            return kept[0]
        return Workspace(subscription_id or _LOCAL, resource_group or _LOCAL, name)

    @staticmethod
    def list(
        subscription_id: str, auth: object = None, resource_group: str | None = None
    ) -> dict[str, list[Workspace]]:
        """Return this machine's workspaces by name, ignoring the subscription."""
        folder = configured()
        kept = records.documents(paceline.Workspace(folder), "workspaces")
        found: dict[str, records.Document] = {name: kept.read(name) or {} for name in kept.names()}
        return {
            name: [
                Workspace(
                    data.get("subscription_id") or _LOCAL,
                    data.get("resource_group") or _LOCAL,
                    name,
                    _folder=folder,
                    _location=data.get("location"),
                    sku=data.get("sku") or "basic",
                    tags=data.get("tags"),
                )
            ]
            for name, data in found.items()
        }

    def write_config(self, path: str | None = None, file_name: str | None = None) -> None:
        """Write `<path>/.azureml/config.json`, which `from_config` reads."""
        top = Path(path or ".")
        folder = top / ("aml_config" if (top / "aml_config").is_dir() else ".azureml")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / (file_name or "config.json")).write_text(
            json.dumps(dict(zip(_KEYS, self._ids, strict=True)), indent=4)
        )

    # --- properties of the workspace

    @property
    def name(self) -> str:
        return self._ids[2]

    @property
    def subscription_id(self) -> str:
        return self._ids[0]

    @property
    def resource_group(self) -> str:
        return self._ids[1]

    @property
    def location(self) -> str:
        """The region passed to `create`, or "local"."""
        return self._location or _LOCAL

    @property
    def workspace_id(self) -> str:
        return str(self.path)

    def get_details(self) -> dict[str, object]:
        """Return the SDK's dict of details, as far as it applies to a folder."""
        import datetime as dt

        made = self.path.stat().st_ctime
        return {
            "id": f"/subscriptions/{self.subscription_id}/resourceGroups/{self.resource_group}/workspaces/{self.name}",
            "name": self.name,
            "location": self.location,
            "type": "Microsoft.MachineLearningServices/workspaces",
            "workspaceid": str(self.path),
            "friendlyName": self.name,
            "creationTime": dt.datetime.fromtimestamp(made, dt.timezone.utc).isoformat(),
            "storageAccount": str(self.path / "data"),
            "keyVault": str(self.path / "azureml" / "secrets"),
            "sku": self.sku,
            "tags": dict(self.tags),
        }

    def __repr__(self) -> str:
        return (
            f"Workspace.create(name={self.name!r}, subscription_id={self.subscription_id!r}, "
            f"resource_group={self.resource_group!r})"
        )

    # --- objects in the workspace, such as datasets

    @property
    def compute_targets(self) -> WorkspaceTargets:  # type: ignore[override]
        """The compute targets by name. `ws.compute_targets()` returns the same dict, for old programs."""
        return WorkspaceTargets(self)

    @property
    def datastores(self) -> NamedObjects[Datastore]:  # type: ignore[override]
        return Datastore.list(self)

    @property
    def datasets(self) -> NamedObjects[AbstractDataset]:
        """The latest versions of the registered datasets, by name."""
        from paceline.compat.azureml.core.dataset import Dataset

        found: NamedObjects[AbstractDataset] = Dataset.get_all(self)
        return found

    @property
    def environments(self) -> NamedObjects[Environment]:  # type: ignore[override]
        """The environments by name, including the curated ones."""
        return Environment.list(self)

    @property
    def experiments(self) -> NamedObjects[paceline.Experiment]:
        from paceline.compat.azureml.core.experiment import Experiment

        found = sorted({record.experiment for record in all_records(self.runs_dir)})
        return NamedObjects({name: Experiment(self, name) for name in found})

    @property
    def models(self) -> NamedObjects[paceline.Model]:
        """The latest versions of the registered models, by name."""
        from paceline.compat.azureml.core.model import Model

        return NamedObjects({one.name: one for one in Model.list(self, latest=True)})

    @property
    def webservices(self) -> NamedObjects[Webservice]:
        from paceline.compat.azureml.core.webservice import Webservice

        return NamedObjects({one.name: one for one in Webservice.list(self)})

    @property
    def images(self) -> NamedObjects[Image]:
        """The latest versions of images (SDK of 2018), by name."""
        from paceline.compat.azureml.core.image import Image

        return NamedObjects({one.name: one for one in Image.list(self)})

    @property
    def linked_services(self) -> NamedObjects[object]:
        """Empty: Paceline has no linked services."""
        return NamedObjects()

    def get_default_datastore(self) -> Datastore:
        """Return the default store, named `workspaceblobstore` as in Azure."""
        return Datastore.get_default(self)

    def set_default_datastore(self, name: str) -> None:
        Datastore(self, name).set_as_default()

    def get_default_keyvault(self) -> Keyvault:
        return Keyvault(self)

    def get_default_compute_target(self, type: str) -> ComputeTarget:
        """Return the target `cpu-cluster` or `gpu-cluster`.

        `type` is "CPU" or "GPU". The target is this machine, unless a target of this name was added to Paceline.
        """
        return self.compute_targets[f"{str(type).lower()}-cluster"]

    def get_run(self, run_id: str) -> runs.Run:
        from paceline.compat.azureml.core.run import Run

        return Run.get(self, run_id)

    def get_mlflow_tracking_uri(self, _with_auth: bool = False) -> str:
        """Return the URI through which MLflow reads and writes the workspace's runs."""
        return f"paceline://{quote(str(self.path.absolute()))}"

    def delete(self, delete_dependent_resources: bool = False, no_wait: bool = False) -> None:
        """Unregister the workspace's name. delete_dependent_resources=True also removes its folder."""
        if records.RULE.fullmatch(self.name):
            records.documents(self, "workspaces").remove(self.name)
        if delete_dependent_resources:
            shutil.rmtree(self.path, ignore_errors=True)

    def update(
        self,
        friendly_name: str | None = None,
        description: str | None = None,
        tags: Mapping[str, str] | None = None,
        **others: object,
    ) -> dict[str, object]:
        self.tags.update(tags or {})
        return self.get_details()

    def sync_keys(self) -> None:
        """Do nothing: a workspace has no keys."""


def names_near(folder: Path) -> tuple[str, str, str] | None:
    """Return the names in the working directory's nearest config.json.

    The names are subscription, resource group and workspace. None: no such file, or the file is for another folder.
    """
    near = nearest_sdk_config(Path.cwd())
    return _read(near) if near is not None and _folder_for(Path.cwd()) == folder else None


def _folder_for(start: Path) -> Path:
    """Return the workspace folder for commands in the folder `start`."""
    return configured(None if os.environ.get(WORKSPACE_VARIABLE) else start)


def _read(file: Path) -> tuple[str, str, str]:
    """Return the subscription, resource group and name in a config.json."""
    try:
        data = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise UserErrorException(f"{str(file)!r} can't be read: {error}.") from error
    if not isinstance(data, dict):
        raise UserErrorException(f"{str(file)!r} is not a workspace configuration: it has no names.")
    if "Scope" in data:  # project.json of 2018: /subscriptions/<id>/resourceGroups/<group>/.../workspaces/<name>
        parts = str(data["Scope"]).strip("/").split("/")
        data = dict(zip([part.lower() for part in parts[::2]], parts[1::2], strict=False))
        data = {
            "subscription_id": data.get("subscriptions"),
            "resource_group": data.get("resourcegroups"),
            "workspace_name": data.get("workspaces"),
        }
    if missing := [key for key in _KEYS if not data.get(key)]:
        raise UserErrorException(f"{str(file)!r} has no {' and no '.join(missing)}.")
    subscription, group, name = (str(data[key]) for key in _KEYS)
    return subscription, group, name
