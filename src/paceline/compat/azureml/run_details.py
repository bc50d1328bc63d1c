"""The details of a run in the SDK's form: `Run.get_details`."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, TypedDict

from paceline.compat.azureml._restclient.constants import RunStatus
from paceline.compat.azureml.exceptions import ActivityFailedException
from paceline.compat.azureml.records import late

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline import Job, Workspace
    from paceline.data import AnyDataset
    from paceline.runs import RunRecord

#: Name that the SDK shows for an environment without a name.
UNNAMED = "default-environment"
#: `get_details_with_logs` returns at most this many bytes of the end of a log: a log may have gigabytes.
_TAIL_BYTES = 1 << 20
_FRAMEWORKS = {"pytorch": "PyTorch", "tensorflow": "TensorFlow"}
_COMMUNICATORS = {"mpi": "IntelMpi", "ps": "ParameterServer", None: "None"}


class DetailFields(TypedDict, total=False):
    runId: str
    target: str | None
    status: str
    startTimeUtc: str | None
    endTimeUtc: str | None
    properties: dict[str, object]
    inputDatasets: Sequence[Mapping[str, object]]
    outputDatasets: list[dict[str, object]]
    runDefinition: dict[str, object]
    logFiles: dict[str, str]
    submittedBy: str
    error: dict[str, object]
    warnings: list[dict[str, str]]


def details_of(
    record: RunRecord,
    workspace: Workspace,
    properties: Mapping[str, str],
    inputs: Sequence[Mapping[str, object]],
    outputs: Sequence[Mapping[str, str]],
    logs: dict[str, str],
) -> DetailFields:
    """Return the details of a run.

    `inputs` and `outputs` come from the run's file `data.json`. `logs` maps the names of logs to their paths.
    """
    snapshot = {"ContentSnapshotId": record.snapshot_id} if record.snapshot_id else {}
    git = {f"azureml.git.{key}": value for key, value in record.git.items()}
    details: DetailFields = {
        "runId": record.run_id,
        "target": record.target,
        "status": record.status,
        "startTimeUtc": record.started_utc,
        "endTimeUtc": record.ended_utc,
        "properties": {**properties, **snapshot, **git},
        "inputDatasets": inputs,
        "outputDatasets": [
            {
                **one,
                "identifier": {"savedId": dataset.id},
                "outputType": "RunOutput",
                "outputDetails": {"outputName": one["name"]},
                "dataset": dataset,
            }
            for one in outputs
            if (dataset := _dataset(workspace, record, one)) is not None
        ],
        "runDefinition": _definition(record.job) if record.job else {},
        "logFiles": logs,
        "submittedBy": record.submitted_by,
    }
    if record.failure is not None:
        details["error"] = {"error": {"code": record.failure.cause, "message": str(record.failure)}}
    if record.failure is not None or record.warnings:
        details["warnings"] = [{"source": "paceline", "message": warning} for warning in record.warnings]
    return details


def with_logs(details: DetailFields) -> DetailFields:
    """Return a run's details, with the last MiB of each log instead of its path."""
    return {**details, "logFiles": {name: _tail_text(path) for name, path in details["logFiles"].items()}}


def check_not_failed(record: RunRecord) -> None:
    """Raise if the run has failed.

    Raises:
        ActivityFailedException: The run has failed. The message is JSON.
    """
    if record.status == RunStatus.FAILED:
        report = record.failure
        error = {"code": report.cause if report else "Failed", "message": str(report or "The run failed.")}
        raise ActivityFailedException(json.dumps({"error": error}, indent=4))


def _dataset(workspace: Workspace, record: RunRecord, stored: Mapping[str, str]) -> AnyDataset | None:
    from paceline.data import Dataset
    from paceline.errors import DataError

    if registered := stored.get("dataset"):
        name, _, version = registered.rpartition(":")
        # Ignore an error if the dataset is no longer registered: the code below then uses its files, which still exist.
        with contextlib.suppress(DataError):
            return _of_native(Dataset.get_by_name(workspace, name, int(version)))
    for reference in record.job.inputs if record.job else ():
        if reference.name == stored["name"] and reference.is_output:
            source = reference.sources[0]
            place = (source.datastore, source.path)
            return _of_native(Dataset.File.from_files(place, validate=False, workspace=workspace))
    return None


def _of_native(native: AnyDataset) -> AnyDataset:
    found: AnyDataset = late("data.tabular_dataset", "of_native")(native)
    return found


def _definition(job: Job) -> dict[str, object]:
    shown, environment = job.shown(), job.environment
    backend = job.distributed_backend
    return {
        "script": job.entry_script or job.entry_module,
        "command": "",
        "arguments": list(job.arguments),
        "target": job.compute_target,
        "framework": _FRAMEWORKS.get(job.framework or "", "Python"),
        "communicator": _COMMUNICATORS.get(backend, str(backend).capitalize()),
        "nodeCount": job.node_count,
        "maxRunDurationSeconds": job.max_run_duration_seconds,
        "environmentVariables": shown["environment_variables"],
        "environment": {
            "name": environment.name or UNNAMED,
            "version": str(environment.version) if environment.version else None,
            "python": shown["environment"],
            "docker": {"baseImage": environment.docker_image},
        },
        "dataReferences": {one.name: one.to_json() for one in job.inputs},
        "data": {one.name: one.to_json() for one in job.inputs if one.dataset},
        "mpi": {"processCountPerNode": job.process_count_per_node},
    }


def _tail_text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            # Replace bytes that can't be decoded, because this part of the log may begin in the middle of a character.
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""  # the log was removed in the meantime
