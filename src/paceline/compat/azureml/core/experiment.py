"""Experiments (`azureml.core.experiment`): what is submitted decides what runs.

https://learn.microsoft.com/python/api/azureml-core/azureml.core.experiment.experiment
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from paceline import workspace
from paceline.compat.azureml.core.run import TYPES, Run, ScriptRun
from paceline.compat.azureml.exceptions import UserErrorException, sdk_class
from paceline.compat.azureml.records import late
from paceline.errors import WorkspaceError
from paceline.runs import tags_and_properties
from paceline.runs.ids import new_run_id
from paceline.runs.page_address import page_of

__all__ = ["Experiment", "Run"]


@sdk_class
class Experiment(workspace.Experiment):
    """`paceline.Experiment`; what it submits or starts to log is a `Run` of this package.

    Raises:
        UserErrorException: the name is none.
    """

    run_class: ClassVar[type[Run]] = Run

    def __init__(self, workspace: Any, name: str, **others: Any) -> None:
        try:
            super().__init__(workspace, name)
        except WorkspaceError as error:
            raise UserErrorException(str(error)) from error

    def submit(
        self,
        config: Any,
        tags: Mapping[str, object] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Submit a ScriptRunConfig, an estimator, a HyperDriveConfig or a pipeline; or what `paceline.Experiment` takes.

        kwargs: script_params and inputs of an estimator, over its own; run_id; pipeline_parameters and regenerate_outputs of a
            pipeline.

        Raises:
            AzureMLException: a wrong value. Nothing has been started then.
        """
        kwargs.pop("show_output", None)
        # Whoever knows how to be submitted does it: HyperDriveConfig and Pipeline, which stand above this module.
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
        config: Any,
        tags: Mapping[str, object] | None,
        *,
        run_id: str | None = None,
        parent_run_id: str | None = None,
        display_name: str | None = None,
        **others: Any,
    ) -> ScriptRun:
        from paceline.compat.azureml.submission import prepared
        from paceline.environments import sdk_packages
        from paceline.submit import SourceCopy, submit

        if others:
            raise UserErrorException(f"submit can't take {', '.join(sorted(others))} with a {type(config).__name__}.")
        run_id = run_id or new_run_id(self.name)
        found = prepared(config, self.workspace, run_id=run_id)
        # A submission is quicker without what pipelines need: told by a name.
        if pending := [one.name for one in found.job.inputs if hasattr(one, "data")]:
            raise UserErrorException(
                f"the input {pending[0]!r} is what another step of a pipeline leaves. Submit both as steps of one Pipeline."
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
        # The packages of the SDK that are left out are said by the submission itself.
        run._said = (*found.said, *sdk_packages.without(found.job.environment)[1])
        return run

    def start_logging(  # type: ignore[override]
        self,
        name: str | None = None,
        run_id: str | None = None,
        outputs: str | bool | None = None,
        snapshot_directory: str | None = ".",
        display_name: str | None = None,
        **others: Any,
    ) -> Run:
        """A run that this program logs by itself. `./outputs` is made, and what appears in it and in `./logs` is kept.

        outputs: another folder, or False for none. snapshot_directory: kept with the run; None for none.
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
    ) -> Iterator[Any]:
        """As `paceline.Experiment.get_runs`; each run of its kind's own class, such as HyperDriveRun."""
        kinds = {"azureml.StepRun": "script", **{name: kind for kind, name in TYPES.items()}}
        yield from super().get_runs(kinds.get(type or "", type), tags, properties, include_children, **others)

    # --- beside its runs

    @property
    def id(self) -> str:
        return self.name

    @property
    def tags(self) -> dict[str, str | None]:
        return dict(tags_and_properties.read(self._notes()).tags)

    @property
    def archived_time(self) -> None:
        return None

    def tag(self, key: str, value: object = None) -> None:
        """Set a tag on the experiment."""
        self.set_tags({key: value})

    def set_tags(self, tags: Mapping[str, object]) -> None:
        """Set tags on the experiment."""
        self._notes().parent.mkdir(parents=True, exist_ok=True)
        tags_and_properties.set_tags(self._notes(), tags)

    def refresh(self) -> None:
        """Does nothing: everything is read when it is asked for."""

    def archive(self) -> None:
        """Does nothing: an experiment is there as long as it has runs."""

    def reactivate(self, new_name: str | None = None) -> None:
        """Does nothing."""

    @staticmethod
    def list(
        workspace: Any, experiment_name: str | None = None, view_type: str = "ActiveOnly", tags: Any = None
    ) -> Any:
        """The experiments of the workspace."""
        return [one for name, one in workspace.experiments.items() if experiment_name in (None, name)]

    @staticmethod
    def delete(workspace: Any, experiment_id: str) -> None:
        """Raise UserErrorException while it has runs."""
        if any(Experiment(workspace, experiment_id).get_runs(include_children=True)):
            raise UserErrorException("Only empty Experiments can be deleted. This experiment contains runs.")

    def get_docs_url(self) -> str:
        return "https://learn.microsoft.com/python/api/azureml-core/azureml.core.experiment.experiment"

    def get_portal_url(self) -> str:
        """Its runs on the live page, while `paceline ui` serves it; else the workspace's folder, as a URL."""
        page = page_of(self.workspace.path)
        return f"{page}/?experiment={self.name}" if page else self.workspace.path.as_uri()

    def __str__(self) -> str:
        return f"Experiment(Name: {self.name},\nWorkspace: {self.workspace.name})"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from html import escape

        cells = "".join(f"<td>{escape(text)}</td>" for text in (self.name, self.workspace.name))
        return f"<table><tr><th>Name</th><th>Workspace</th></tr><tr>{cells}</tr></table>"

    def _notes(self) -> Path:
        return self.workspace.path / "azureml" / "experiments" / f"{self.name}.jsonl"


def make_experiment(runs_dir: Path, name: str) -> Experiment:
    """The experiment of a run that is found by its id, or of a script's own."""
    # A workspace of the SDK's, where that can be told: scripts ask it for data sets, stores and secrets.
    make = late("core.workspace", "Workspace")
    folder = runs_dir.parent
    if own := os.environ.get("AZUREML_ARM_WORKSPACE_NAME"):
        names = (os.environ.get("AZUREML_ARM_SUBSCRIPTION"), os.environ.get("AZUREML_ARM_RESOURCEGROUP"), own)
    else:
        names = late("core.workspace", "names_near")(folder) or (None, None, workspace.Workspace(folder).name)
    return Experiment(make(names[0] or "local", names[1] or "local", names[2], _folder=folder), name)
