"""Details of a run's outputs in datastores, in the SDK's form."""

from __future__ import annotations

import contextlib
from typing import Any

from paceline.runs import RunRecord


def details(run: Any, record: RunRecord) -> list[dict[str, Any]]:
    """Return `dataset`, `outputDetails` and `identifier` of each output."""
    found = []
    for one in run._data("outputs"):
        dataset = _dataset(run, record, one)
        if dataset is not None:
            found.append(
                {
                    **one,
                    "identifier": {"savedId": dataset.id},
                    "outputType": "RunOutput",
                    "outputDetails": {"outputName": one["name"]},
                    "dataset": dataset,
                }
            )
    return found


def _dataset(run: Any, record: RunRecord, stored: dict[str, Any]) -> Any:
    from paceline.compat.azureml.core.dataset import Dataset
    from paceline.compat.azureml.data.tabular_dataset import of_native
    from paceline.data import Dataset as NativeDataset
    from paceline.errors import DataError

    workspace = run.experiment.workspace
    if registered := stored.get("dataset"):
        name, _, version = registered.rpartition(":")
        # The dataset may have been unregistered; its files still exist.
        with contextlib.suppress(DataError):
            return Dataset.get_by_name(workspace, name, int(version))
    for reference in record.job.inputs if record.job else ():
        if reference.name == stored["name"] and reference.is_output:
            source = reference.sources[0]
            place = (source.datastore, source.path)
            return of_native(NativeDataset.File.from_files(place, validate=False, workspace=workspace))
    return None
