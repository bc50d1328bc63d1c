"""What a run has left in datastores, as the SDK tells of it; and its registration as datasets, if that was asked for."""

from __future__ import annotations

import json
from typing import Any

from paceline.runs import tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord

#: Of the run: output's name -> what it is to be registered as.
PROPERTY = "azureml.outputs.register"


def note(folder: RunFolder, config: Any) -> None:
    """Keep with the run what of its outputs is to be registered."""
    from paceline.compat.azureml.core.script_run_config import argument_list

    run = config.run_config
    values = [*argument_list(run.arguments), *(run.output_data or {}).values()]
    if isinstance(run.command, list):
        values += run.command
    wanted = {value.name: value.registered for value in values if getattr(value, "registered", None)}
    if wanted:
        tags_and_properties.add_properties(folder.notes, {PROPERTY: json.dumps(wanted)})


def register(run: Any, record: RunRecord) -> None:
    """Register what was asked for; what is registered already stays as it is. record: the run's, as it is now."""
    text = run.properties.get(PROPERTY)
    if text is None:
        return
    workspace = run.experiment.workspace
    for name, wish in json.loads(text).items():
        if (made := _dataset(run, record, name)) is not None:
            made.register(workspace, wish["name"], wish["description"], wish["tags"], create_new_version=True)


def details(run: Any, record: RunRecord) -> list[dict[str, Any]]:
    """`dataset`, `outputDetails` and `identifier` of each."""
    found = []
    for one in run._data("outputs"):
        dataset = _dataset(run, record, one["name"])
        if dataset is not None:
            found.append(
                {
                    "identifier": {"savedId": None},
                    "outputType": "RunOutput",
                    "outputDetails": {"outputName": one["name"]},
                    "dataset": dataset,
                    **one,
                }
            )
    return found


def _dataset(run: Any, record: RunRecord, name: str) -> Any:
    from paceline.data.datasets.dataset import Dataset

    for reference in record.job.inputs if record.job else ():
        if reference.name == name and reference.is_output:
            source = reference.sources[0]
            return Dataset.File.from_files(
                (source.datastore, source.path), validate=False, workspace=run.experiment.workspace
            )
    return None
