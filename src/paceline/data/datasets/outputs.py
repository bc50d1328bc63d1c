"""Outputs of a run that become datasets once it is Completed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline.data.datasets.dataset import Dataset
from paceline.data.datasets.registered import check_dataset_name
from paceline.errors import PacelineError
from paceline.job.data_reference import DataReference


def check_wish(reference: DataReference) -> None:
    """Raises:
    DataError: the name under which an output is to be registered can't be one.
    """
    if reference.registered is not None:
        check_dataset_name(json.loads(reference.registered)["name"])


def register_outputs(references: Sequence[DataReference], workspace_dir: Path) -> tuple[dict[str, str], list[str]]:
    """Register the outputs that are to be; output -> "name:version", and a sentence for each that could not be."""
    made: dict[str, str] = {}
    said: list[str] = []
    for reference in references:
        if reference.registered is None:
            continue
        wish, source = json.loads(reference.registered), reference.sources[0]
        # All that a dataset asks of a workspace is its folder; the class stands above this layer.
        workspace: Any = SimpleNamespace(path=workspace_dir)
        try:
            found = Dataset.File.from_files((source.datastore, source.path), validate=False, workspace=workspace)
            version = found.register(
                workspace, wish["name"], wish["description"], wish["tags"], create_new_version=True
            ).version
            made[reference.name] = f"{wish['name']}:{version}"
        except PacelineError as error:
            said.append(f"The output {reference.name!r} is stored, but not registered as {wish['name']!r}: {error}")
    return made, said
