"""Placeholders in the steps of a pipeline: data of other steps, and parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import PipelineError
from paceline.job.data_reference import DataReference, Source

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")
#: A placeholder for data whose location is not known yet. Paceline replaces it before the job is submitted.
NOWHERE = (Source(path="/pipeline"),)


class PipelineData:
    """A folder in a datastore that one step writes and other steps read.

    In the arguments of the step that writes it, the object stands for an empty folder to write into. In the arguments
    of all other steps it stands for the written folder.

    Args:
        name: Letters, digits, `_`; no digit first. Steps find it by `$PACELINE_INPUT_<name>` or `run.input_datasets`.
        datastore: A `Datastore` or its name. Default: the workspace's default store.
        path: Folder in the store. `{run}` is the step's run id. Default: `pipelines/{run}/<name>`.
        overwrite: Replace existing files at a `path` without `{run}`.

    Raises:
        PipelineError: The name is not valid.

    Examples:
        >>> clean = pl.PipelineData("clean")
        >>> first = pl.Step("prepare", pl.Estimator(entry_script="train.py", script_params={"--out": clean}), outputs=[clean])
        >>> second = pl.Step("train", pl.Estimator(entry_script="train.py", script_params={"--data": clean}))
        >>> pipeline = pl.Pipeline([second])
    """

    def __init__(
        self, name: str, datastore: Any = None, *, path: str = "pipelines/{run}/{name}", overwrite: bool = False
    ) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PipelineError(
                f"the name {name!r} of a pipeline's data: letters, digits and '_', not starting with a digit."
            )
        if not isinstance(path, str):
            raise PipelineError(f"path={path!r} of {name!r} is not a text, such as 'prepared/{{run}}'.")
        self.name = name
        self.datastore = getattr(datastore, "name", datastore)
        self.path = path
        self.overwrite = overwrite
        #: Name of a single file in the folder, or None. The script gets the path of this file instead of the folder's path.
        self.inside: str | None = None
        #: The step that writes this data, or None if no step writes it.
        self.producer: Any = None

    def __repr__(self) -> str:
        return f"PipelineData({self.name!r})"

    def __str__(self) -> str:
        """Return a placeholder for arguments. Each worker replaces it by the folder's path."""
        return str(self.as_reference())

    def as_reference(self) -> DataReference:
        """Return the data as a job's input: the result of `as_mount`."""
        return self.as_mount()

    def as_mount(self) -> DataReference:
        """Return the data as an input, used in place if possible, else downloaded."""
        return PendingReference(name=self.name, sources=NOWHERE, inside=self.inside, data=self)

    def as_download(self, path_on_compute: str | None = None) -> DataReference:
        """Return the data as an input that is copied to each node.

        Args:
            path_on_compute: Path below the script's working directory at which the files appear too.
        """
        return self.as_mount().as_download(path_on_compute)

    def as_partition(self, by: Literal["node", "rank"] = "node") -> DataReference:
        """Return the data as an input that is split among nodes or ranks.

        Args:
            by: "node": a part for each node. "rank": a part for each rank.
        """
        return self.as_mount().as_partition(by)

    def destination(self, run_id: str, default_store: str) -> DataReference:
        """Return the place in a datastore where the step writes this data.

        Args:
            run_id: Id of the run that writes the data.
            default_store: Name of the datastore to use if this object names none.
        """
        path = self.path.replace("{run}", run_id).replace("{name}", self.name).strip("/")
        # The path contains the run's id, so the folder can only hold files of an earlier attempt of this run: allow overwriting.
        overwrite = self.overwrite or "{run}" in self.path
        return DataReference(
            name=self.name,
            sources=(Source(datastore=self.datastore or default_store, path=path),),
            mode="upload",
            overwrite=overwrite,
            inside=self.inside,
        )


@dataclass(frozen=True, kw_only=True)
class PendingReference(DataReference):
    """A reference to data whose location is known only after the submission."""

    data: Any


class PipelineParameter:
    """A value in a pipeline's steps that each submission can set.

    Set it by `submit(pipeline, pipeline_parameters={name: value})`. It may stand in the `script_params`, `arguments` or
    `command` of a step.

    Args:
        name: Letters, digits, `_` and `-`, beginning with a letter or `_`.
        default_value: The value if the submission sets no value.

    Raises:
        PipelineError: The name is not valid.

    Examples:
        >>> lr = pl.PipelineParameter("lr", 0.1)
        >>> train = pl.Estimator(entry_script="train.py", script_params={"--lr": lr})
        >>> pipeline = pl.Pipeline([pl.Step("train", train)])
        >>> pipeline.parameters
        {'lr': 0.1}
    """

    def __init__(self, name: str, default_value: object) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", name):
            raise PipelineError(f"the name {name!r} of a pipeline's parameter: letters, digits, '_' and '-'.")
        self.name = name
        self.default_value = default_value

    def __repr__(self) -> str:
        return f"PipelineParameter({self.name!r}, {self.default_value!r})"


def defaults(parameters: Iterable[tuple[str, object]]) -> dict[str, object]:
    """Return {name: default value} of pipeline parameters.

    Raises:
        PipelineError: A parameter has two defaults.
    """
    values: dict[str, object] = {}
    for name, default in parameters:
        if values.setdefault(name, default) != default:
            raise PipelineError(f"the parameter {name!r} has two defaults. Make it once.")
    return values


def check_parameters(known: dict[str, object], given: dict[str, object]) -> dict[str, object]:
    """Return the value of each parameter: the given value, or else the default.

    Raises:
        PipelineError: No step uses a parameter in `given`.
    """
    if unknown := sorted(set(given) - set(known)):
        there = f"it has {', '.join(sorted(known))}" if known else "it has none"
        raise PipelineError(f"{unknown[0]!r} is given, which is not a parameter of the pipeline: {there}.")
    return {**known, **given}
