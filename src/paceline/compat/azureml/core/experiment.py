"""Experiments with the SDK's methods (`azureml.core.experiment`).

https://learn.microsoft.com/python/api/azureml-core/azureml.core.experiment.experiment
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import paceline
from paceline.compat.azureml import records
from paceline.compat.azureml.core.run import TYPES, Run, ScriptRun
from paceline.compat.azureml.exceptions import UserErrorException, sdk_class
from paceline.compat.azureml.records import late
from paceline.errors import WorkspaceError
from paceline.runs import new_run_id, page_of

if TYPE_CHECKING:
    from paceline import Workspace, runs
    from paceline.compat.azureml.core.script_run_config import ScriptRunConfig

__all__ = ["Experiment", "Run"]


@sdk_class
class Experiment(paceline.Experiment):
    """An experiment whose runs are instances of this package's `Run`.

    Raises:
        UserErrorException: The name is not valid.
    """

    run_class: ClassVar[type[Run]] = Run

    def __init__(self, workspace: Workspace, name: str, **others: object) -> None:
        try:
            super().__init__(workspace, name)
        except WorkspaceError as error:
            raise UserErrorException(str(error)) from error

    def submit(self, config: Any, tags: Mapping[str, object] | None = None, **kwargs: Any) -> Any:
        """Submit a configuration and return the run.

        `config` is a ScriptRunConfig, an estimator, a HyperDriveConfig, a pipeline, or any configuration that
        `paceline.Experiment` accepts.

        Args:
            config: The configuration.
            tags: Tags of the run.
            kwargs: `run_id`. For an estimator also `script_params` and `inputs`, which override the estimator's values.
                For a pipeline also `pipeline_parameters` and `regenerate_outputs`.

        Raises:
            AzureMLException: A value is wrong. Nothing was started.
        """
        kwargs.pop("show_output", None)
        # HyperDriveConfig and Pipeline have the method `_submit_to`. Importing their modules here would be a circular import.
        if hasattr(config, "_submit_to"):
            return config._submit_to(self, tags, **kwargs)
        from paceline.compat.azureml.core.script_run_config import ScriptRunConfig

        if isinstance(config, (str, os.PathLike, dict)):
            raise UserErrorException(
                f"can't submit {config!r}. Submit a ScriptRunConfig, an estimator, a HyperDriveConfig or a Pipeline."
            )
        if not isinstance(config, ScriptRunConfig):
            return super().submit(config, tags, **kwargs)
        return self._submit_script(config, tags, **kwargs)

    def _submit_script(
        self,
        config: ScriptRunConfig,
        tags: Mapping[str, object] | None,
        *,
        run_id: str | None = None,
        parent_run_id: str | None = None,
        display_name: str | None = None,
        **others: object,
    ) -> ScriptRun:
        from paceline.compat.azureml.submission import prepared
        from paceline.environments import without_sdk_packages
        from paceline.submit import SourceCopy, submit

        if others:
            raise UserErrorException(f"submit can't take {', '.join(sorted(others))} with a {type(config).__name__}.")
        run_id = run_id or new_run_id(self.name)
        found = prepared(config, self.workspace, run_id=run_id)
        # Recognize another step's output by its attribute `data`: importing its class would slow down every submission.
        if pending := [one.name for one in found.job.inputs if hasattr(one, "data")]:
            raise UserErrorException(
                f"the input {pending[0]!r} is another step's output. Submit both as steps of one Pipeline."
            )
        folder = submit(
            found.job,
            SourceCopy(directory=found.source_directory.absolute()),
            self.workspace.path,
            self.name,
            tags=tags,
            parent_run_id=parent_run_id,
            display_name=display_name or getattr(config, "display_name", None),
            run_id=run_id,
            warnings=found.notes,
        )
        run = ScriptRun(self, folder.run_id)
        # Record all notes that were logged: `submit` also logs a note about the SDK's packages that it has removed.
        run._said = (*found.said, *without_sdk_packages(found.job.environment)[1])
        return run

    def start_logging(  # type: ignore[override]
        self,
        name: str | None = None,
        run_id: str | None = None,
        outputs: str | bool | None = None,
        snapshot_directory: str | None = ".",
        display_name: str | None = None,
        **others: object,
    ) -> Run:
        """Start a run to which this program logs.

        Paceline creates the folder `./outputs`, and collects files from `./outputs` and `./logs`. `outputs` names
        another folder to use, or is False to collect no files. The run gets a copy of `snapshot_directory` if not None.
        """
        return super().start_logging(  # type: ignore[return-value]  # of `run_class`
            outputs, snapshot_directory, display_name or name, run_id
        )

    def get_runs(  # type: ignore[override]  # the SDK's names, `type` in place of `kind`
        self,
        type: str | None = None,
        tags: Mapping[str, str] | str | None = None,
        properties: Mapping[str, str] | None = None,
        include_children: bool = False,
        **others: Any,
    ) -> Iterator[runs.Run]:
        """Yield the experiment's runs with this type, tags and properties, as HyperDriveRun or others."""
        kinds = {"azureml.StepRun": "script", **{name: kind for kind, name in TYPES.items()}}
        yield from super().get_runs(kinds.get(type or "", type), tags, properties, include_children, **others)

    # --- properties and tags of the experiment

    @property
    def id(self) -> str:
        return self.name

    @property
    def tags(self) -> dict[str, str | None]:
        return records.documents(self.workspace, "experiments").read(self.name) or {}

    @property
    def archived_time(self) -> None:
        return None

    def tag(self, key: str, value: object = None) -> None:
        self.set_tags({key: value})

    def set_tags(self, tags: Mapping[str, object]) -> None:
        if wrong := [key for key in tags if not isinstance(key, str) or not key]:
            raise UserErrorException(f"tag {wrong[0]!r} is not a non-empty string.")
        values = {key: None if value is None else str(value) for key, value in tags.items()}
        records.update(self.workspace, "experiments", self.name, values)

    def refresh(self) -> None:
        """Do nothing: every read of an experiment fetches its current state."""

    def archive(self) -> None:
        """Do nothing: an experiment exists as long as it has runs."""

    def reactivate(self, new_name: str | None = None) -> None:
        """Do nothing, because `archive` has no effect."""

    @staticmethod
    def list(
        workspace: Workspace, experiment_name: str | None = None, view_type: str = "ActiveOnly", tags: object = None
    ) -> builtins.list[paceline.Experiment]:
        return [one for name, one in workspace.experiments.items() if experiment_name in (None, name)]

    @staticmethod
    def delete(workspace: Workspace, experiment_id: str) -> None:
        """Raise UserErrorException if the experiment has runs, else return."""
        if any(Experiment(workspace, experiment_id).get_runs(include_children=True)):
            raise UserErrorException("Only empty Experiments can be deleted. This experiment contains runs.")

    def get_docs_url(self) -> str:
        return "https://learn.microsoft.com/python/api/azureml-core/azureml.core.experiment.experiment"

    def get_portal_url(self) -> str:
        """Return the URL of the experiment's runs.

        While `paceline ui` runs, the URL opens the live page. At other times it opens the workspace's folder.
        """
        page = page_of(self.workspace.path)
        return f"{page}/?experiment={self.name}" if page else self.workspace.path.as_uri()

    def __str__(self) -> str:
        return f"Experiment(Name: {self.name},\nWorkspace: {self.workspace.name})"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from html import escape

        cells = "".join(f"<td>{escape(text)}</td>" for text in (self.name, self.workspace.name))
        return f"<table><tr><th>Name</th><th>Workspace</th></tr><tr>{cells}</tr></table>"


def make_experiment(runs_dir: Path, name: str) -> Experiment:
    """Return the SDK's object for the experiment `name` of a workspace with this `runs_dir`."""
    # Use the SDK's Workspace if possible, because scripts get datasets, stores and secrets from it.
    make = late("core.workspace", "Workspace")
    folder = runs_dir.parent
    if own := os.environ.get("AZUREML_ARM_WORKSPACE_NAME"):
        names = (os.environ.get("AZUREML_ARM_SUBSCRIPTION"), os.environ.get("AZUREML_ARM_RESOURCEGROUP"), own)
    else:
        names = late("core.workspace", "names_near")(folder) or (None, None, paceline.Workspace(folder).name)
    return Experiment(make(names[0] or "local", names[1] or "local", names[2], _folder=folder), name)
