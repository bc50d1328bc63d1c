"""The handle on a registered model version, with the Azure SDK's methods."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from paceline.data.transfer.progress import Progress
from paceline.errors import ModelError, ModelNotFoundError
from paceline.models import aliases, check, lineage, mlflow_registry, names, on_store, registry, sources
from paceline.models.record import ModelRecord
from paceline.runs import tags_and_properties
from paceline.runs.folder import RunFolder

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from paceline.runs.run import Run
    from paceline.services.service import DeployOptions, Service
    from paceline.workspace import Workspace

# An alias of list[str], because inside the class `list` is a method.
_Names: TypeAlias = "list[str]"
_Changes: TypeAlias = "list[aliases.AliasChange]"


class Model:
    """A registered version of a model.

    Args:
        workspace: Workspace that the model is registered in.
        name: Name of the model, or a reference such as "digits:3" or "digits@production".
        version: Version number.
        alias: Alias of the version.

    Raises:
        ModelError: The name, version or alias is invalid.
        ModelNotFoundError: The model, version or alias does not exist. The message lists the alternatives.

    Examples:
        >>> ws = pl.Workspace("my_runs")
        >>> pl.Model.register(ws, "model.pt", "digits").version
        1
        >>> pl.Model(ws, "digits:1").name
        'digits'
    """

    def __init__(
        self, workspace: Workspace, name: str, *, version: int | str | None = None, alias: str | None = None
    ) -> None:
        self._workspace = workspace
        self._dir = registry.workspace_dir_of(workspace)
        self._record = registry.resolve(self._dir, names.reference(name, version, alias))

    @classmethod
    def _of(cls, workspace: Workspace, record: ModelRecord) -> Model:
        model = cls.__new__(cls)
        model._workspace, model._dir, model._record = workspace, registry.workspace_dir_of(workspace), record
        return model

    @staticmethod
    def register(
        workspace: Workspace,
        model_path: str | os.PathLike[str],
        model_name: str,
        tags: Mapping[str, object] | None = None,
        properties: Mapping[str, object] | None = None,
        description: str | None = None,
        datasets: Sequence[tuple[str, object]] | None = None,
        model_framework: str | None = None,
        model_framework_version: str | None = None,
        *,
        run: Run | str | None = None,
        progress: Progress | None = None,
    ) -> Model:
        """Register a copy of a local file or folder as a new model version.

        Args:
            workspace: Workspace to register the copy in.
            model_path: Local file or folder.
            model_name: Name of the model.
            tags: Values that may change later.
            properties: Values that can't change later.
            description: Text for people.
            datasets: (purpose, dataset) pairs, for training data that is not among the run's inputs.
            model_framework: Name of the framework. Default: detected from the files and the run.
            model_framework_version: Its version. Default: detected from the files and the run.
            run: The `Run` that made the files, or the run's id.
            progress: Called with (bytes done, total bytes, files done, total files).

        Raises:
            ModelError: The name is invalid, or the path is missing or contains an entry that is not a file.
            RunNotFoundError: The run does not exist.
        """
        folder = registry.workspace_dir_of(workspace)
        names.check_model_name(model_name)
        came_from = None if run is None else lineage.run_folder(folder, run)
        return Model._of(
            workspace,
            lineage.add_with_lineage(
                folder,
                model_name,
                sources.local(model_path),
                came_from,
                tags=tags,
                properties=properties,
                description=description,
                datasets=datasets,
                framework=model_framework,
                framework_version=model_framework_version,
                progress=progress,
            ),
        )

    @staticmethod
    def list(
        workspace: Workspace,
        name: str | None = None,
        tags: Mapping[str, object] | Sequence[object] | str | None = None,
        properties: Mapping[str, object] | None = None,
        run_id: str | None = None,
        latest: bool = False,
    ) -> list[Model]:
        """List model versions, newest first.

        Args:
            workspace: Workspace that the models are registered in.
            name: Only versions of this model.
            tags: A dict from tag to value, a tag's name (with any value), or a list of names and pairs. All must match.
            properties: Only versions that have all these properties with these values.
            run_id: Only versions of this run.
            latest: Only the latest version of each name.
        """
        folder = registry.workspace_dir_of(workspace)
        models, seen = [], set()
        for record in registry.records(folder, name):
            if latest and record.name in seen:
                continue
            seen.add(record.name)
            if run_id not in (None, record.run_id) or (
                (tags or properties) and not registry.matches(registry.notes_of(folder, record), tags, properties)
            ):
                continue
            models.append(Model._of(workspace, record))
        return sorted(models, key=lambda model: (model.record.created_utc, model.version), reverse=True)

    def deploy(self, workspace: Workspace, name: str, **options: Unpack[DeployOptions]) -> Service:
        """Deploy a new service of this model, and return it before it is ready.

        Args:
            workspace: Workspace that the service belongs to.
            name: Name of the service.
            options: entry_script, environment, workers, port and so on, as for `Service.deploy`.

        Raises:
            UserError: A value is invalid. No process has been started.
        """
        return workspace.deploy(name, self, **options)

    def __repr__(self) -> str:
        return f"Model({self._workspace!r}, {self.name!r}, version={self.version})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Model) and (other._dir, other.id) == (self._dir, self.id)

    def __hash__(self) -> int:
        return hash((self._dir, self.id))

    @property
    def workspace(self) -> Workspace:
        """The workspace that the model is registered in."""
        return self._workspace

    @property
    def record(self) -> ModelRecord:
        """The model version's unchangeable record: files with SHA-256, framework, and lineage."""
        return self._record

    @property
    def name(self) -> str:
        """The model's name."""
        return self._record.name

    @property
    def version(self) -> int:
        """The number of this version of the model, from 1."""
        return self._record.version

    @property
    def id(self) -> str:
        """The model version's reference, such as "digits:3"."""
        return self._record.id

    @property
    def created_utc(self) -> str:
        """The time when the model version was registered, in UTC."""
        return self._record.created_utc

    @property
    def framework(self) -> str | None:
        """The model's framework, such as "pytorch", or None if unknown."""
        return self._record.framework

    @property
    def framework_version(self) -> str | None:
        """The version of the model's framework, or None if unknown."""
        return self._record.framework_version

    @property
    def run_id(self) -> str | None:
        """The id of the run that made the model, or None."""
        return self._record.run_id

    @property
    def run(self) -> Run | None:
        """The `Run` that made the model, or None.

        Raises:
            RunNotFoundError: The run was removed. The record still has its lineage.
        """
        return None if self.run_id is None else self._workspace.get_run(self.run_id)

    @property
    def tags(self) -> dict[str, str | None]:
        """The model version's tags, by name."""
        return registry.notes_of(self._dir, self._record).tags

    @property
    def properties(self) -> dict[str, str]:
        """The model version's properties, by name. Existing properties never change."""
        return registry.notes_of(self._dir, self._record).properties

    @property
    def description(self) -> str | None:
        """The model version's description, or None."""
        return registry.notes_of(self._dir, self._record).description

    @property
    def aliases(self) -> _Names:
        """The aliases of this model version, sorted."""
        there = aliases.current(registry.versions_of(self._dir), self.name)
        return [alias for alias, version in there.items() if version == self.version]

    @property
    def path(self) -> Path:
        """The local, read-only folder that contains the registered file or folder.

        Each access checks that the files exist with their size and modification time. `verify` reads every byte.

        Raises:
            ModelChangedError: A file is missing, was added, or has another size or modification time.
        """
        folder = self._files()
        check.refuse(self._record, check.changes(folder, self._record, whole=False))
        return folder

    @property
    def artifact(self) -> Path:
        """The path of the registered file or folder, in the folder `path`."""
        return self.path / self._record.top

    def verify(self) -> None:
        """Check every byte of the model's files against the registered hashes.

        Raises:
            ModelChangedError: A file has changed, is missing, or was not registered; the message lists these files.
        """
        check.refuse(self._record, check.changes(self._files(), self._record))

    def download(self, target_dir: str | os.PathLike[str] = ".", exist_ok: bool = False) -> str:
        """Copy the model's files to a folder, and verify the copy.

        Args:
            target_dir: Destination folder.
            exist_ok: Replace an existing copy.

        Returns:
            The path of the copy.

        Raises:
            ModelError: The copy exists and exist_ok is False, or the copy can't be written.
            ModelChangedError: A file has changed.
        """
        return str(check.copy(self._files(), self._record, Path(target_dir), exist_ok=exist_ok))

    def push(self, to: str, verify: bool = False) -> bool:
        """Store this model version in a datastore. Return False if already stored.

        A second call resumes an interrupted push.

        Args:
            to: "STORE", "STORE:PATH" or a URL such as "s3://bucket/models".
            verify: Read every stored byte, and store again files that have changed.

        Raises:
            ModelError: The datastore has a different model of this name and version.
            DataError, TransferError: The store can't be written.
        """
        return on_store.push(self._dir, self._record, on_store.place(to), verify=verify).is_new

    @staticmethod
    def pull(workspace: Workspace, place: str, name: str, version: int) -> Model:
        """Fetch and register a model version from a datastore, and return it.

        Args:
            workspace: Workspace to register the version in.
            place: The datastore: "STORE", "STORE:PATH" or a URL, as for `push`.
            name: Name of the model.
            version: Version number.

        Raises:
            ModelNotFoundError: The datastore does not have the version.
            ModelError: The workspace has a different model of this name and version.
            DataError, TransferError: The store can't be read.
        """
        names.check_model_name(name)
        record = on_store.pull(
            registry.workspace_dir_of(workspace), on_store.place(place), name, names.check_version(version)
        )
        return Model._of(workspace, record)

    def push_to_mlflow(self, uri: str) -> int:
        """Push this model version to MLflow's registry, and return its number there.

        Args:
            uri: Address of MLflow's registry.

        Raises:
            ModelError: mlflow-skinny is not installed.
            TransferError: The registry refuses the version.
        """
        return mlflow_registry.push(self._dir, self._record, uri).version

    def add_tags(self, tags: Mapping[str, object]) -> None:
        """Set tags of this model version, replacing existing values."""
        tags_and_properties.set_tags(self._notes(), tags)

    def remove_tags(self, tags: str | Sequence[str]) -> None:
        """Remove tags of this model version by name."""
        tags_and_properties.remove_tags(self._notes(), [tags] if isinstance(tags, str) else [*tags])

    def add_properties(self, properties: Mapping[str, object]) -> None:
        """Add properties, which can't be changed later, to this model version.

        Raises:
            RunStateError: A property exists already.
        """
        tags_and_properties.add_properties(self._notes(), properties)

    def update(self, tags: Mapping[str, object] | None = None, description: str | None = None) -> None:
        """Set tags and, unless None, the description of this model version."""
        if tags:
            self.add_tags(tags)
        if description is not None:
            tags_and_properties.set_name(self._notes(), "description", description)

    def set_alias(self, alias: str) -> int | None:
        """Point an alias at this model version. Return its previous version, or None.

        Args:
            alias: The alias, such as "production".

        Raises:
            ModelError: The alias is invalid.
        """
        return aliases.move(registry.versions_of(self._dir), self.name, alias, self.version)

    def remove_alias(self, alias: str) -> None:
        """Remove an alias of this model version.

        Args:
            alias: The alias.

        Raises:
            ModelError: The alias does not point at this version.
        """
        names.check_alias(alias)
        if alias not in self.aliases:
            raise ModelNotFoundError(f"{self.id} has no alias {alias!r}. It has: {', '.join(self.aliases) or 'none'}.")
        aliases.move(registry.versions_of(self._dir), self.name, alias, None)

    def alias_history(self, alias: str | None = None) -> _Changes:
        """Return the changes of one alias, or of all, oldest first."""
        return aliases.history(registry.versions_of(self._dir), self.name, alias)

    def delete(self) -> None:
        """Remove this model version permanently. Its number is never reused.

        Raises:
            ModelError: An alias points at this version, or a service serves it.
        """
        remove(self)

    def _files(self) -> Path:
        return registry.files_dir(self._dir, self._record)

    def _notes(self) -> Path:
        if not self._files().exists():
            raise ModelNotFoundError(f"model {self.id} was removed meanwhile.")
        return registry.notes_path(self._dir, self._record)


def remove(model: Model) -> int:
    """Remove a model version from disk, and return the freed bytes."""
    # Refuse while a service uses the version: the service reads the files at each restart of a process.
    if services := model.workspace.services_of(model.id):
        raise ModelError(
            f"{model.id} is served by {' and '.join(map(repr, services))}. Let it serve another model first: paceline service "
            f"update {services[0]} --model {model.name}:VERSION, or delete it: paceline service delete {services[0]}."
        )
    return registry.remove(model._dir, model.record)


def register_of_run(
    workspace: Workspace,
    folder: RunFolder,
    model_name: str,
    model_path: str | os.PathLike[str] | None = None,
    *,
    tags: Mapping[str, object] | None = None,
    properties: Mapping[str, object] | None = None,
    description: str | None = None,
    datasets: Sequence[tuple[str, object]] | None = None,
    model_framework: str | None = None,
    model_framework_version: str | None = None,
    progress: Progress | None = None,
) -> Model:
    """Register a run's file or folder as a new model version.

    model_path: Path in the run, such as "outputs/model"; default: the name of the model.

    Raises:
        ModelError: The name is invalid, the path is missing or contains an entry that is not a file of the run, or this process
            sees only a copy of the run's folder.
    """
    names.check_model_name(model_name)
    lineage.check_home(folder)
    source = sources.of_run(folder, model_path if model_path is not None else model_name)
    record = lineage.add_with_lineage(
        registry.workspace_dir_of(workspace),
        model_name,
        source,
        folder,
        tags=tags,
        properties=properties,
        description=description,
        datasets=datasets,
        framework=model_framework,
        framework_version=model_framework_version,
        progress=progress,
    )
    return Model._of(workspace, record)
