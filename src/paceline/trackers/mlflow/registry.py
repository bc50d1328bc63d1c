"""A read-only MLflow registry of a workspace's models.

`mlflow ui` shows the models, and scripts load them as `models:/name/3`. MLflow can't create versions in this registry;
`run.register_model(...)` and `paceline model register` do.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NoReturn

from mlflow.entities.model_registry import ModelVersion, ModelVersionTag, RegisteredModel, RegisteredModelAlias
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_DOES_NOT_EXIST
from mlflow.store.entities.paged_list import PagedList
from mlflow.store.model_registry.abstract_store import AbstractStore
from mlflow.utils.search_utils import SearchModelUtils, SearchModelVersionUtils, SearchUtils

from paceline.models import aliases, registry
from paceline.models.record import ModelRecord
from paceline.runs import tags_and_properties
from paceline.runs.record import parse_utc
from paceline.trackers.mlflow.store import workspace_of


class MlflowRegistry(AbstractStore):  # type: ignore[misc,unused-ignore]
    """The versions and aliases of a workspace's models."""

    def __init__(self, store_uri: str | None = None, tracking_uri: str | None = None) -> None:
        super().__init__(store_uri, tracking_uri)
        self._workspace = workspace_of(store_uri)

    def get_registered_model(self, name: str) -> RegisteredModel:
        records = [record for record in registry.records(self._workspace) if record.name == name]
        if not records:
            raise MlflowException(f"Registered Model with name={name} not found", RESOURCE_DOES_NOT_EXIST)
        return self._model(name, records)

    def search_registered_models(
        self,
        filter_string: str | None = None,
        max_results: int | None = 100,
        order_by: Sequence[str] | None = None,
        page_token: str | None = None,
    ) -> PagedList:
        by_name: dict[str, list[ModelRecord]] = {}
        for record in registry.records(self._workspace):
            by_name.setdefault(record.name, []).append(record)
        models = [self._model(name, records) for name, records in by_name.items()]
        chosen = SearchModelUtils.sort(SearchModelUtils.filter(models, filter_string), order_by)
        return PagedList(*SearchUtils.paginate(chosen, page_token, max_results or 100))

    def search_model_versions(
        self,
        filter_string: str | None = None,
        max_results: int | None = 1000,
        order_by: Sequence[str] | None = None,
        page_token: str | None = None,
    ) -> PagedList:
        versions = [self._version(record) for record in registry.records(self._workspace)]
        kept = SearchModelVersionUtils.filter(versions, filter_string)
        chosen = SearchModelVersionUtils.sort(kept, order_by or ["last_updated_timestamp DESC"])
        return PagedList(*SearchUtils.paginate(chosen, page_token, max_results or 1000))

    def get_latest_versions(self, name: str, stages: object = None) -> list[ModelVersion]:
        return list(self.get_registered_model(name).latest_versions)

    def get_model_version(self, name: str, version: int | str) -> ModelVersion:
        for record in registry.records(self._workspace):
            if record.name == name and str(record.version) == str(version):
                return self._version(record)
        raise MlflowException(f"Model Version (name={name}, version={version}) not found", RESOURCE_DOES_NOT_EXIST)

    def get_model_version_by_alias(self, name: str, alias: str) -> ModelVersion:
        version = self._aliases(name).get(alias)
        if version is None:
            raise MlflowException(f"Registered model alias {alias} not found.", RESOURCE_DOES_NOT_EXIST)
        return self.get_model_version(name, version)

    def get_model_version_download_uri(self, name: str, version: int | str) -> str:
        return str(self.get_model_version(name, version).source)

    def _model(self, name: str, records: list[ModelRecord]) -> RegisteredModel:
        records = sorted(records, key=lambda record: record.version)
        there = self._aliases(name)
        return RegisteredModel(
            name=name,
            creation_timestamp=_ms(records[0].created_utc),
            last_updated_timestamp=_ms(records[-1].created_utc),
            latest_versions=[self._version(records[-1])],
            aliases=[RegisteredModelAlias(alias, str(version)) for alias, version in there.items()],
        )

    def _version(self, record: ModelRecord) -> ModelVersion:
        notes = tags_and_properties.read(registry.notes_path(self._workspace, record))
        there = self._aliases(record.name)
        return ModelVersion(
            name=record.name,
            version=str(record.version),
            creation_timestamp=_ms(record.created_utc),
            last_updated_timestamp=_ms(record.created_utc),
            description=notes.description,
            source=registry.files_dir(self._workspace, record).absolute().as_uri(),
            run_id=record.run_id,
            tags=[ModelVersionTag(key, value or "") for key, value in notes.tags.items()],
            aliases=[alias for alias, version in there.items() if version == record.version],
        )

    def _aliases(self, name: str) -> dict[str, int]:
        return aliases.current(registry.versions_of(self._workspace), name)


def _ms(utc: str) -> int:
    return int(parse_utc(utc).timestamp() * 1000)


def _refuse(self: MlflowRegistry, *args: object, **options: object) -> NoReturn:
    raise MlflowException(
        "paceline's registry is only read through MLflow. Register with run.register_model(...) or `paceline model register`, "
        "and set aliases and tags with `paceline model`.",
        INVALID_PARAMETER_VALUE,
    )


# Refuse all methods that change the registry. This class must define them, because they are abstract in MLflow.
for _name, _method in vars(AbstractStore).items():
    if getattr(_method, "__isabstractmethod__", False) and _name not in vars(MlflowRegistry):
        setattr(MlflowRegistry, _name, _refuse)
abc.update_abstractmethods(MlflowRegistry)
