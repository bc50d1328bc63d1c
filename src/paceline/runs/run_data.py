"""Link inputs into the script's folder, and record stored outputs in `data.json`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from paceline.errors import DataError
from paceline.job.job import Job
from paceline.job.plan import NodeSetup
from paceline.runs.folder import RunFolder
from paceline.system.files import read_json, write_json


def link_inputs(job: Job, prepared: NodeSetup, work_dir: Path) -> None:
    """Create links to inputs at their `path_on_compute` in the working directory.

    Raises:
        DataError: The snapshot has a file of this path.
    """
    for reference in job.inputs:
        if reference.path_on_compute is not None:
            link = work_dir / reference.path_on_compute
            try:
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(prepared.inputs[reference.name])
            except OSError as error:
                raise DataError(
                    f"path_on_compute={reference.path_on_compute!r} of input {reference.name!r} can't be made in the "
                    f"script's folder: {error.strerror}. Choose a path that the source does not have."
                ) from error


def unlink_inputs(job: Job, folder: RunFolder) -> None:
    """Remove the links of inputs, and the empty folders above these links."""
    for reference in job.inputs:
        if reference.path_on_compute is not None:
            link = folder.work / reference.path_on_compute
            # Remove only the link that Paceline has made: the script may have put a file in its place.
            if link.is_symlink():
                link.unlink()
                with contextlib.suppress(OSError):
                    # Remove the link's folder and its parent folders, as far as they are empty.
                    os.removedirs(link.parent)


class OutputData(TypedDict, total=False):
    """A stored output: its mode, where its files are, their number, and its dataset."""

    name: str
    mode: str
    sources: list[dict[str, str | None]]
    dataset: str
    files: int
    bytes: int
    partition: str
    node_rank: int


class InputData(OutputData, total=False):
    """An input on one node: its files, and the bytes and seconds of fetching them."""

    fingerprint: str
    content: str
    source: str
    path: str
    given_as: str
    fetched_bytes: int
    fetch_s: float


class RunData(TypedDict):
    """The content of a run's `data.json`: its inputs and outputs."""

    inputs: list[InputData]
    outputs: list[OutputData]


def read_data(folder: RunFolder) -> RunData:
    """Return the content of `data.json`, empty before it is written."""
    content = read_json(folder.data)
    known = content if isinstance(content, dict) else {}
    return {"inputs": known.get("inputs") or [], "outputs": known.get("outputs") or []}


def inputs_by_name(folder: RunFolder) -> dict[str, InputData]:
    """Return the inputs by name, as the first node reports them."""
    return {data["name"]: data for data in reversed(read_data(folder)["inputs"])}


def write_data(folder: RunFolder, data: RunData) -> None:
    write_json(folder.data, data)


def note(folder: RunFolder, values_by_output: Mapping[str, OutputData]) -> None:
    """Add values to the outputs in a run's `data.json`, by the outputs' names."""
    data = read_data(folder)
    outputs: list[OutputData] = [{**output, **values_by_output.get(output["name"], {})} for output in data["outputs"]]
    write_data(folder, {"inputs": data["inputs"], "outputs": outputs})


def note_datasets(folder: RunFolder, made: Mapping[str, str]) -> None:
    """Record in `data.json` the dataset that each output was registered as.

    made: For each output's name, the dataset as "name:version".
    """
    if made:
        note(folder, {name: {"dataset": dataset} for name, dataset in made.items()})
