"""Logged models of MLflow 3 in a run's outputs: `outputs/mlflow_models/<id>/`."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TypedDict

from mlflow.entities import LoggedModel, LoggedModelParameter, LoggedModelStatus, LoggedModelTag
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_DOES_NOT_EXIST
from mlflow.store.entities.paged_list import PagedList

from paceline.runs.folder import RunFolder
from paceline.runs.ids import experiment_of
from paceline.system.files import read_json, write_json
from paceline.trackers.sink import Sink

_FOLDER = "mlflow_models"
_DOCUMENT = "logged_model.json"


class _Document(TypedDict):
    """The JSON file of a logged model."""

    experiment_id: str
    model_id: str
    name: str
    artifact_location: str
    creation_timestamp: int
    last_updated_timestamp: int
    model_type: str | None
    source_run_id: str
    status: str
    tags: dict[str, str]
    params: dict[str, str]


class LoggedModels:
    """The methods of MLflow's tracking store that create and change logged models."""

    _runs_dir: Path
    _sink: Sink | None

    def _folder(self, run_id: str) -> RunFolder:
        raise NotImplementedError

    def create_logged_model(
        self,
        experiment_id: str = "0",
        name: str | None = None,
        source_run_id: str | None = None,
        tags: Iterable[LoggedModelTag] | None = None,
        params: Iterable[LoggedModelParameter] | None = None,
        model_type: str | None = None,
    ) -> LoggedModel:
        run_id = source_run_id or (self._sink.folder.run_id if self._sink is not None else None)
        if run_id is None:
            raise MlflowException("A model is logged in a run: call mlflow.start_run() first.", INVALID_PARAMETER_VALUE)
        model_id = f"m-{uuid.uuid4().hex}"
        place = self._folder(run_id).outputs / _FOLDER / model_id
        place.mkdir(parents=True)
        now = _now_ms()
        document: _Document = {
            "experiment_id": experiment_id,
            "model_id": model_id,
            "name": name or model_id,
            "artifact_location": place.absolute().as_uri(),
            "creation_timestamp": now,
            "last_updated_timestamp": now,
            "model_type": model_type,
            "source_run_id": run_id,
            "status": str(LoggedModelStatus.PENDING),
            "tags": {tag.key: tag.value for tag in tags or ()},
            "params": {param.key: param.value for param in params or ()},
        }
        write_json(place / _DOCUMENT, document)
        return _model(document, place)

    def log_logged_model_params(self, model_id: str, params: Iterable[LoggedModelParameter]) -> None:
        with self._changed(model_id) as document:
            document["params"] |= {param.key: param.value for param in params}

    def set_logged_model_tags(self, model_id: str, tags: Iterable[LoggedModelTag]) -> None:
        with self._changed(model_id) as document:
            document["tags"] |= {tag.key: tag.value for tag in tags}

    def delete_logged_model_tag(self, model_id: str, key: str) -> None:
        with self._changed(model_id) as document:
            document["tags"].pop(key, None)

    def finalize_logged_model(self, model_id: str, status: LoggedModelStatus) -> LoggedModel:
        with self._changed(model_id) as document:
            document["status"] = str(LoggedModelStatus(status))
        return self.get_logged_model(model_id)

    def get_logged_model(self, model_id: str, allow_deleted: bool = False) -> LoggedModel:
        place = self._model_place(model_id)
        return _model(read_json(place / _DOCUMENT), place)

    def search_logged_models(
        self,
        experiment_ids: Collection[str],
        filter_string: str | None = None,
        datasets: object = None,
        max_results: int | None = None,
        order_by: object = None,
        page_token: str | None = None,
    ) -> PagedList:
        models = [
            _model(document, path.parent)
            for path in sorted(self._runs_dir.glob(f"*/outputs/{_FOLDER}/*/{_DOCUMENT}"))
            if (document := read_json(path)) and experiment_of(path.parents[3].name) in experiment_ids
        ]
        return PagedList(models[:max_results], None)

    @contextlib.contextmanager
    def _changed(self, model_id: str) -> Iterator[_Document]:
        """Yield a logged model's JSON document; store it after the `with` block."""
        path = self._model_place(model_id) / _DOCUMENT
        document: _Document = read_json(path)
        yield document
        document["last_updated_timestamp"] = _now_ms()
        write_json(path, document)

    def _model_place(self, model_id: str) -> Path:
        # Refuse an id with a slash or a star: the code makes a path or a pattern of the id, which could match another file.
        if model_id.replace("-", "").isalnum():
            for top in self._runs_dir.glob("*") if self._sink is None else (self._sink.folder.path,):
                place = top / "outputs" / _FOLDER / model_id
                if (place / _DOCUMENT).is_file():
                    return place
        raise MlflowException(f"Logged model with ID '{model_id}' not found.", RESOURCE_DOES_NOT_EXIST)


def _now_ms() -> int:
    return int(time.time() * 1000)


def _model(document: _Document, place: Path) -> LoggedModel:
    own: dict[str, object] = {
        **document,
        # Return the present path, because the run may have been copied from another machine.
        "artifact_location": place.absolute().as_uri(),
        "status": LoggedModelStatus(document["status"]),
        "tags": [LoggedModelTag(key, value) for key, value in document["tags"].items()],
        "params": [LoggedModelParameter(key, value) for key, value in document["params"].items()],
    }
    return LoggedModel(**own)
