"""Push a model version to an MLflow model registry, with files, metrics, tags and aliases.

    MLflow run "digits:3"         in the run's experiment; artifacts `model/...`, last metric values, tags `paceline.*`
    registered model "digits"     a new version whose source is that run's artifacts, with tags and description

MLflow assigns its own version numbers. The tag `paceline.model` has Paceline's version number.

https://mlflow.org/docs/latest/python_api/mlflow.client.html
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ModelError, TransferError
from paceline.models import aliases, check, registry
from paceline.models.record import ModelRecord

_ARTIFACTS = "model"
_DIGEST, _MODEL = "paceline.digest", "paceline.model"


@dataclass(frozen=True, kw_only=True)
class PushedToMlflow:
    """The result of pushing a model, with the version number in MLflow."""

    name: str
    version: int
    uri: str
    is_new: bool


def push(workspace_dir: Path, record: ModelRecord, uri: str) -> PushedToMlflow:
    """Add a model version to MLflow's registry if missing. Return MLflow's version number.

    Args:
        workspace_dir: Folder of the workspace.
        record: The model version.
        uri: An MLflow URI: http://host:5000, sqlite:///mlflow.db, databricks.

    Raises:
        ModelError: mlflow-skinny is not installed.
        ModelChangedError: The version's files have changed.
        TransferError: The registry can't be reached, or refuses the version.
    """
    if importlib.util.find_spec("mlflow") is None:
        raise ModelError("pushing to MLflow needs mlflow-skinny, which is missing: pip install 'paceline[mlflow]'.")
    folder = registry.files_dir(workspace_dir, record)
    check.refuse(record, check.changes(folder, record))
    import mlflow
    from mlflow.exceptions import MlflowException

    try:
        client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
        existing = _there(client, record)
        is_new = existing is None
        if existing is None:
            existing = _registered(client, workspace_dir, record, folder)
        versions = registry.versions_of(workspace_dir)
        for alias, version in aliases.current(versions, record.name).items():
            if version == record.version:
                client.set_registered_model_alias(record.name, alias, str(existing.version))
        return PushedToMlflow(name=record.name, version=int(existing.version), uri=uri, is_new=is_new)
    except (MlflowException, OSError) as error:
        raise TransferError(f"MLflow at {uri} did not take {record.id}: {str(error).splitlines()[0]}") from error


def _there(client: Any, record: ModelRecord) -> Any:
    # Model names have no quotes, so a name can't end the filter string.
    for version in client.search_model_versions(f"name='{record.name}'"):
        if (
            version.tags.get(_DIGEST) == record.digest
            and version.tags.get(_MODEL) == record.id
            and version.status == "READY"
        ):
            return version
    return None


def _registered(client: Any, workspace_dir: Path, record: ModelRecord, folder: Path) -> Any:
    notes = registry.notes_of(workspace_dir, record)
    tags = _tags(record) | {key: value or "" for key, value in notes.tags.items()} | notes.properties
    run = client.create_run(
        _experiment(client, str(record.run.get("experiment") or record.name)), run_name=record.id, tags=tags
    )
    run_id = run.info.run_id
    try:
        client.log_artifacts(run_id, str(folder), _ARTIFACTS)
        _check(client, run_id, record)
        _log_metrics(client, run_id, record)
        with contextlib.suppress(Exception):
            client.create_registered_model(record.name)
        made = client.create_model_version(
            record.name,
            source=f"{run.info.artifact_uri}/{_ARTIFACTS}",
            run_id=run_id,
            tags=tags,
            description=notes.description,
        )
    except BaseException:
        client.set_terminated(run_id, "FAILED")
        raise
    client.set_terminated(run_id, "FINISHED")
    return made


def _experiment(client: Any, name: str) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        # Ignore an error: another process may create the experiment at the same time, and the next line then finds it.
        with contextlib.suppress(Exception):
            return str(client.create_experiment(name))
        experiment = client.get_experiment_by_name(name)
    if experiment is None or experiment.lifecycle_stage != "active":
        raise ModelError(f"MLflow's experiment {name!r} was deleted there. Restore it, then push again.")
    return str(experiment.experiment_id)


def _tags(record: ModelRecord) -> dict[str, str]:
    run = record.run
    tags = {
        _MODEL: record.id,
        _DIGEST: record.digest,
        "paceline.framework": record.framework,
        "paceline.framework_version": record.framework_version,
        "paceline.run_id": record.run_id,
        "paceline.snapshot_id": run.get("snapshot_id"),
        "mlflow.source.git.commit": (run.get("git") or {}).get("commit"),
        "mlflow.user": record.registered_by,
    }
    return {key: str(value) for key, value in tags.items() if value}


def _log_metrics(client: Any, run_id: str, record: ModelRecord) -> None:
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    metrics = [
        Metric(name, float(last), now, metric.get("last_step") or 0)
        for name, metric in (record.run.get("metrics") or {}).items()
        if isinstance(last := metric.get("last"), (int, float)) and type(last) is not bool and math.isfinite(last)
    ]
    for start in range(0, len(metrics), 1000):  # MLflow accepts at most 1,000 metrics per call
        client.log_batch(run_id, metrics=metrics[start : start + 1000])


def _check(client: Any, run_id: str, record: ModelRecord) -> None:
    sizes, waiting = {}, [_ARTIFACTS]
    while waiting:
        for artifact in client.list_artifacts(run_id, waiting.pop()):
            if artifact.is_dir:
                waiting.append(artifact.path)
            else:
                sizes[artifact.path] = artifact.file_size
    for file in record.files:
        if sizes.get(f"{_ARTIFACTS}/{file.name}") != file.size_bytes:
            raise TransferError(f"{file.name!r} of model {record.id} is not whole in MLflow's artifacts. Push again.")
