"""What a step leaves for later ones, and values that are given at submission: what stands for them where a step is described."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import PipelineError
from paceline.job.data_reference import DataReference, Source

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")
#: Nothing is ever looked for there: it is replaced before a job is submitted.
NOWHERE = (Source(path="/pipeline"),)


class PipelineData:
    """A folder that one step leaves in a datastore, and that later steps find.

    In the arguments of the step that has it among its outputs it is an empty folder; there and everywhere else it is the
    folder with what that step has left.

    name: letters, digits and `_`; the steps find it under this name (`$PACELINE_INPUT_<name>`, `run.input_datasets`).
    datastore: a `Datastore` or its name, where it is kept; default: the workspace's default store.
    path: folder in the store; `{run}` in it is the step's run id. Default: `pipelines/{run}/<name>`.
    overwrite: with a path of one's own, replace files that are there.

    Raises:
        PipelineError: the name is none.
    """

    def __init__(
        self, name: str, datastore: Any = None, *, path: str = "pipelines/{run}/{name}", overwrite: bool = False
    ) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PipelineError(
                f"the name {name!r} of a pipeline's data: letters, digits and '_', not starting with a digit."
            )
        if not isinstance(path, str):
            raise PipelineError(f"path={path!r} of {name!r} is no text, such as 'prepared/{{run}}'.")
        self.name = name
        self.datastore = getattr(datastore, "name", datastore)
        self.path = path
        self.overwrite = overwrite
        #: As of a `DataReference`: the script makes it itself.
        self.inside: str | None = None
        #: The step that leaves it.
        self.producer: Any = None

    def __repr__(self) -> str:
        return f"PipelineData({self.name!r})"

    def __str__(self) -> str:
        """The word that stands for the folder in arguments; each worker puts its own path there."""
        return str(self.as_reference())

    def as_reference(self) -> DataReference:
        """What stands for it in a job that is not submitted yet. Estimators call this."""
        return self.as_mount()

    def as_mount(self) -> DataReference:
        """The place itself where the store is a folder of the step's machine, else a download."""
        return PendingReference(name=self.name, sources=NOWHERE, inside=self.inside, data=self)

    def as_download(self, path_on_compute: str | None = None) -> DataReference:
        """A copy on each node of the step that finds it.

        Args:
            path_on_compute: Path below the script's working directory at which the files appear too.
        """
        return self.as_mount().as_download(path_on_compute)

    def as_partition(self, by: Literal["node", "rank"] = "node") -> DataReference:
        """A part of the files for each node (or each rank) of the step that finds it.

        Args:
            by: "node": a part for each node. "rank": a part for each rank.
        """
        return self.as_mount().as_partition(by)

    def destination(self, run_id: str, default_store: str) -> DataReference:
        """Where the step of this run id leaves it."""
        path = self.path.replace("{run}", run_id).replace("{name}", self.name).strip("/")
        # In a folder of the run's own there can be nothing but what an earlier attempt of the same run has left.
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
    """Stands in a job for data whose place is known once its pipeline is submitted. data: what stands for it in the steps."""

    data: Any


class PipelineParameter:
    """A value that is given when a pipeline is submitted: `submit(pipeline, pipeline_parameters={name: value})`.

    It stands in the `script_params`, `arguments` or `command` of a step.

    name: letters, digits, `_` and `-`. default_value: where none is given.

    Raises:
        PipelineError: the name is none.
    """

    def __init__(self, name: str, default_value: Any) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", name):
            raise PipelineError(f"the name {name!r} of a pipeline's parameter: letters, digits, '_' and '-'.")
        self.name = name
        self.default_value = default_value

    def __repr__(self) -> str:
        return f"PipelineParameter({self.name!r}, {self.default_value!r})"


def defaults(parameters: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Name -> default, of (name, default) of each place where a parameter stands.

    Raises:
        PipelineError: two of one name have different defaults.
    """
    found: dict[str, Any] = {}
    for name, default in parameters:
        if found.setdefault(name, default) != default:
            raise PipelineError(f"the parameter {name!r} has two defaults. Make it once.")
    return found


def check_parameters(known: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Each parameter's value: the given one, else its default.

    Raises:
        PipelineError: one is given that no step has.
    """
    if unknown := sorted(set(given) - set(known)):
        there = f"it has {', '.join(sorted(known))}" if known else "it has none"
        raise PipelineError(f"{unknown[0]!r} is given, which is no parameter of the pipeline: {there}.")
    return {**known, **given}
