"""What is known of a run's outputs once they are stored: `data.json` in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.runs.folder import RunFolder
from paceline.system.files import read_json, write_json


def note(folder: RunFolder, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Add to what is kept of outputs. found: output -> values."""
    told = read_json(folder.data) or {}
    outputs = [one | dict(found.get(one["name"], {})) for one in told.get("outputs", ())]
    write_json(folder.data, told | {"outputs": outputs})


def note_datasets(folder: RunFolder, made: Mapping[str, str]) -> None:
    """Keep what the outputs were registered as. made: output -> "name:version"."""
    if made:
        note(folder, {name: {"dataset": dataset} for name, dataset in made.items()})
