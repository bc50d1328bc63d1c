"""A model version as JSON for `--json`, and as text. New releases only add keys."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.models import formats, registry
from paceline.models.formats import HOLDS_PICKLE, TITLES
from paceline.models.model import Model
from paceline.models.record import ModelFile, ModelRecord
from paceline.system.files import read_json


def summary(model: Model) -> dict[str, Any]:
    """Return a model version's short JSON object, as in `paceline model list --json`."""
    record = model.record
    return {
        "id": model.id,
        "name": model.name,
        "version": model.version,
        "aliases": model.aliases,
        "framework": model.framework,
        "framework_version": model.framework_version,
        "size_bytes": record.size_bytes,
        "digest": record.digest,
        "run_id": model.run_id,
        "created_utc": model.created_utc,
        "registered_by": record.registered_by,
        "tags": model.tags,
        "properties": model.properties,
        "description": model.description,
        "path": str(_folder(model)),
    }


def details(model: Model) -> dict[str, Any]:
    """Return a model version's full JSON object, for `paceline model show --json`."""
    record = model.record
    return {
        **summary(model),
        "top": record.top,
        "is_folder": record.is_folder,
        "files": [_file(_folder(model), file) for file in record.files],
        "pickles": pickles(record),
        "run": dict(record.run),
        "can_be_made_again": can_be_made_again(model),
        "datasets": [dict(dataset) for dataset in record.datasets],
        "alias_history": model.alias_history(),
    }


def pickles(record: ModelRecord) -> list[str]:
    """Return the names of a model version's files that contain a pickle."""
    return [file.name for file in record.files if file.format in HOLDS_PICKLE]


def can_be_made_again(model: Model) -> bool:
    """Return whether `paceline rerun` can repeat the run that made the model."""
    workspace = Path(model.workspace.path)
    run = read_json(workspace / "runs" / str(model.run_id) / "job.json") if model.run_id else None
    if not isinstance(run, dict) or not run.get("job") or not run.get("snapshot_id"):
        return False
    return (workspace / "snapshots" / str(run["snapshot_id"])).is_dir()


def data_texts(record: ModelRecord) -> list[str]:
    """Return a text line for each training dataset of a model."""
    lines = []
    for data in record.run.get("datasets") or ():
        place = data.get("dataset") or ", ".join(
            f"{source['datastore']}:{source['path']}" if source.get("datastore") else str(source.get("path"))
            for source in data.get("sources") or ()
        )
        lines.append(_data_text(data["name"], place, data.get("content") or data.get("fingerprint")))
    named = record.datasets
    return lines + [_data_text(data["purpose"], data["dataset"], data.get("fingerprint")) for data in named]


def _data_text(what: str, place: str, fingerprint: str | None) -> str:
    return f"{what}: {place}{f', fingerprint {fingerprint[:16]}' if fingerprint else ''}"


def _file(folder: Path, file: ModelFile) -> dict[str, object]:
    described: dict[str, object] = {**asdict(file), "kind": TITLES.get(file.format, file.format)}
    if file.format == "safetensors":
        try:
            header = formats.header(folder / file.name)
        except OSError:
            header = None
        if header is not None:
            described["safetensors"] = {
                "parameters": header.parameters,
                "tensors": [asdict(tensor) for tensor in header.tensors],
                "metadata": dict(header.metadata),
            }
    return described


def _folder(model: Model) -> Path:
    return registry.files_dir(Path(model.workspace.path), model.record)
