"""Workspaces, which hold runs, and experiments, which group them under a name."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, overload

from paceline import workspace_dir
from paceline.environments.environment import Environment
from paceline.errors import JobError, PacelineError, PipelineError, SweepError, UserError, WorkspaceError
from paceline.job.job import Job
from paceline.runs import interactive, read, store, tags_and_properties, trash
from paceline.runs.folder import RunFolder
from paceline.runs.ids import check_experiment_name, check_run_id
from paceline.runs.read import matches
from paceline.runs.run import Run
from paceline.system import units
from paceline.workspace_dir import CONFIG_FILE, DEFAULT_FOLDER, WORKSPACE_VARIABLE, configured, note_made

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from paceline.data.stores.datastore import Datastore
    from paceline.estimator import _Script as Script
    from paceline.job.data_reference import DataReference
    from paceline.job.environment import EnvironmentSpec
    from paceline.job.template import Templates
    from paceline.models.model import Model
    from paceline.pipelines.pipeline import Pipeline
    from paceline.pipelines.pipeline_run import PipelineRun
    from paceline.pruning import Pruned
    from paceline.reports.compare import RunTable
    from paceline.runs.search.saved_views import SavedViews
    from paceline.runs.trash import DeletedRun
    from paceline.schedules.schedules import Schedules
    from paceline.services.record import ServingOptions
    from paceline.services.service import DeployOptions, Models, Service
    from paceline.snapshot import Progress
    from paceline.sweeps.sweep import Sweep
    from paceline.sweeps.sweep_run import SweepRun
    from paceline.targets.configured import Configured

#: The types of objects that an experiment can submit.
Submittable: TypeAlias = "Script | Job | Sweep | Pipeline"

__all__ = ["Experiment", "Run", "Workspace"]


class Workspace:
    """A folder with the experiments and runs of a person or a team.

    Args:
        path: The folder, which is created on first use.
        create: Whether to create a missing folder. Without a folder, the workspace has no runs.

    Raises:
        WorkspaceError: The folder can't be created, is a file, contains sources, or has a `:` in its path.

    Examples:
        >>> ws = pl.Workspace("my_runs")
        >>> sorted(ws.datastores)
        ['default']
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool = True) -> None:
        # Don't resolve symbolic links: messages and records should have the path that the user has named.
        self._path = Path(os.path.abspath(os.path.expanduser(path)))
        if os.pathsep in str(self._path):
            raise WorkspaceError(
                f"the workspace {str(self._path)!r} has a {os.pathsep!r} in its path, and PYTHONPATH, by which workers find "
                f"paceline, can't carry one. Name another folder with {WORKSPACE_VARIABLE} or in {CONFIG_FILE}."
            )
        try:
            if not create:
                # Raise an error if the folder can't be read: otherwise it would seem to have no runs. Create nothing.
                with contextlib.suppress(FileNotFoundError):
                    os.stat(self.runs_dir)
                return
            if not self.runs_dir.exists():
                self._refuse_sources()
                self._path.mkdir(parents=True, exist_ok=True)
                # Mark a new workspace before creating folders in it, because another process may use the workspace at once.
                if all(name.startswith(".") for name in os.listdir(self._path)):
                    note_made(self._path)
            self.runs_dir.mkdir(parents=True, exist_ok=True)
            # The workspace has its own .gitignore, so a repository around it stays clean.
            ignore = self._path / ".gitignore"
            if not ignore.exists():
                ignore.write_text("*\n")
        except OSError as error:
            raise WorkspaceError(
                f"the workspace {str(self._path)!r} can't be made: {error.strerror}. "
                f"Name another folder with {WORKSPACE_VARIABLE} or in {CONFIG_FILE}."
            ) from error

    def _refuse_sources(self) -> None:
        """Raise WorkspaceError if the folder contains source files or `.git`."""
        names = sorted(os.listdir(self._path)) if self._path.is_dir() else []
        own = [name for name in names if name == ".git" or name.endswith((".py", ".ipynb"))]
        if own:
            raise WorkspaceError(
                f"{str(self._path)!r} has files of its own ({', '.join(own[:3])}), among which no workspace is made. Name a "
                f"folder for it alone, such as {str(self._path / DEFAULT_FOLDER)!r}."
            )

    @classmethod
    def from_config(cls, path: str | os.PathLike[str] | None = None, *, create: bool = True) -> Workspace:
        """Return the workspace configured for the working directory.

        Without `path`, the variable `PACELINE_WORKSPACE` names it. Otherwise the nearest `paceline.toml`, here or in a
        parent folder, names it (`[workspace]`, `path = "..."`, relative to that file). The default is `.paceline`
        beside that file, or `./.paceline` without such a file.

        Args:
            path: A `paceline.toml`, or a folder in which to look instead of the working directory.
            create: Create a missing workspace.

        Raises:
            WorkspaceError: The configuration can't be read, the folder can't be created, or this user has neither
                created the workspace on this machine nor trusted it (`paceline trust`).
        """
        made = cls(found := configured(Path(path) if path is not None else None), create=create)
        if workspace_dir.only_shows and not workspace_dir.is_known(found):
            store.only_shown.add(made.path)
        return made

    def __repr__(self) -> str:
        return f"Workspace({str(self._path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Workspace) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self._path)

    @property
    def path(self) -> Path:
        """The workspace's folder."""
        return self._path

    @property
    def name(self) -> str:
        """The folder's name, or the name of its parent folder for a `.paceline`."""
        return self._path.parent.name if self._path.name == DEFAULT_FOLDER else self._path.name

    @property
    def runs_dir(self) -> Path:
        """The folder that has a subfolder for each run."""
        return self._path / "runs"

    @property
    def views(self) -> SavedViews:
        """Views saved on the web page, by name: `get_runs(workspace.views["best"].where)`."""
        from paceline.runs.search.saved_views import SavedViews

        return SavedViews(self._path)

    @property
    def templates(self) -> Templates:
        """Job files stored in the workspace by name, for `paceline run --template NAME`."""
        from paceline.job.template import Templates

        return Templates(self._path)

    @property
    def schedules(self) -> Schedules:
        """Schedules by name, which start runs at times and after events."""
        from paceline.schedules.schedules import Schedules

        return Schedules(self._path)

    @property
    def experiments(self) -> dict[str, Experiment]:
        """The experiments that have a run, by name."""
        names = sorted({record.experiment for record in read.all_records(self.runs_dir)})
        return {name: Experiment(self, name) for name in names}

    @property
    def compute_targets(self) -> Mapping[str, Configured]:
        """Compute targets by name: `local`, and the targets of `paceline compute add`."""
        from paceline.targets.configured import ComputeTargets

        return ComputeTargets(self._path)

    @property
    def services(self) -> dict[str, Service]:
        """Services by name, without deleted services."""
        from paceline.services.service import Service

        return Service.list(self)

    def deploy(self, name: str, models: Models, **options: Unpack[DeployOptions]) -> Service:
        """Deploy a new service of one model or several.

        Args:
            name: Name of the service.
            models: One model or several: registered models, references such as "digits:3", or paths.
            options: As for `Service.deploy`.
        """
        from paceline.services.service import Service

        return Service.deploy(self, name, models, **options)

    def services_of(self, model: str) -> list[str]:
        """Return names of services that serve, or will serve, a model version.

        `model` is a reference such as "digits:3".
        """
        from paceline.services import store

        return store.services_using(self.path, model)

    def package(
        self,
        models: Models,
        directory: str | os.PathLike[str],
        *,
        entry_script: str | os.PathLike[str] | None = None,
        source_directory: str | os.PathLike[str] | None = None,
        environment: EnvironmentSpec | None = None,
        environment_variables: Mapping[str, object] | None = None,
        name: str | None = None,
        workers: int = 1,
        base: str | None = None,
        overwrite: bool = False,
        **settings: Unpack[ServingOptions],
    ) -> Path:
        """Write a folder from which any machine can serve models. Return its path.

        Args:
            models: As for `deploy`.
            directory: Folder to write. It must be empty or missing, unless `overwrite` is True.
            entry_script: Script with init() and run().
            source_directory: Folder with the script and its imports.
            environment: Environment of the script; default: the environment of the run which made the first model.
            environment_variables: Variables of the script.
            name: Name of the service; default: the name of the model.
            base: Base image; default: python, in the version of the run that made the first model.
            workers: Number of processes that serve the models.
            overwrite: Replace an existing folder.
            settings: As for `Service.deploy`.

        Raises:
            UserError: A model or script is missing, the environment can't be installed elsewhere, or the folder is not empty.
        """
        from paceline.services.package.write import package
        from paceline.services.revision_spec import make_spec

        spec = make_spec(
            models,
            entry_script=entry_script,
            source_directory=source_directory,
            environment=environment,
            environment_variables=environment_variables,
            settings=settings,
        )
        return package(self._path, spec, Path(directory), name=name, workers=workers, base=base, overwrite=overwrite)

    @property
    def environments(self) -> dict[str, Environment]:
        """Registered environments by name, in their latest versions."""
        return Environment.list(self)

    @property
    def datastores(self) -> dict[str, Datastore]:
        """Datastores by name; `default`, a folder of the workspace, always exists."""
        from paceline.data.stores.datastore import Datastore

        return Datastore.list(self)

    def get_default_datastore(self) -> Datastore:
        """Return the default datastore: as set by `set_default_datastore`, else the workspace's folder `data`."""
        from paceline.data.stores.datastore import Datastore

        return Datastore.get_default(self)

    def set_default_datastore(self, name: str) -> None:
        """Make a registered datastore the default.

        Raises:
            DataError: There is no datastore of this name.
        """
        from paceline.data.stores.datastore import Datastore

        Datastore.get(self, name).set_as_default()

    @property
    def datasets(self) -> dict[str, Any]:
        """Registered datasets by name, in their latest versions."""
        from paceline.data.datasets.dataset import Dataset

        return {**Dataset.get_all(self)}

    @property
    def models(self) -> dict[str, Model]:
        """Registered models by name, in their latest versions."""
        from paceline.models.model import Model

        return {model.name: model for model in sorted(Model.list(self, latest=True), key=lambda one: one.name)}

    def prune(
        self,
        *,
        older_than: str | float | dt.timedelta | None = None,
        keep_last: int | None = None,
        max_size: str | int | None = None,
        status: str | None = None,
        experiment: str | None = None,
        kinds: Collection[str] = (),
        dry_run: bool = False,
    ) -> Pruned:
        """Remove old items that no live run uses, and return them.

        Remove only items that match all given criteria. Runs with the tag `keep`, and runs that made a model, stay.

        Args:
            older_than: "30d", "12h", seconds or a timedelta since a run's end, or since the last use of another item.
            keep_last: Number of newest runs of each experiment to keep.
            max_size: "20GB" or bytes that may remain of each kind. The oldest items are removed first.
            status: Only runs in this state.
            experiment: Only runs of this experiment.
            kinds: Any of "runs", "snapshots", "environments", "data" and "models". Default: unused snapshots and
                models; runs if any criterion is given; environments and data if an age or a size is given.
            dry_run: Remove nothing.

        Raises:
            UserError: A value is wrong, or runs are selected without a criterion.
        """
        from paceline import pruning
        from paceline.data.transfer.cache import parse_size

        try:
            older_than_s = units.seconds(older_than) if older_than is not None else None
        except ValueError as error:
            raise WorkspaceError(f"older_than: {error}") from None
        policy = pruning.PrunePolicy(
            older_than_s=older_than_s,
            keep_last=keep_last,
            max_bytes=parse_size(max_size) if isinstance(max_size, str) else max_size,
            status=status,
            experiment=experiment,
        )
        return pruning.prune(self._path, policy, kinds, dry_run=dry_run)

    def rerun(
        self,
        run_id: str,
        parameters: Mapping[str, object] | None = None,
        *,
        arguments: Sequence[str] = (),
        compute_target: str | None = None,
        node_count: int | str | None = None,
        process_count_per_node: int | None = None,
        distributed_backend: str | None = None,
        resume: bool = False,
        display_name: str | None = None,
    ) -> Run:
        """Submit a run's job again, with changes.

        Args:
            run_id: The run's id, the beginning of it, or its name.
            parameters: Option of the script -> new value. True and False are for a switch. None leaves the option out.
            arguments: Further arguments of the script.
            compute_target: Another compute target; None for the run's target.
            node_count: Another number of nodes, or a range such as "2..4".
            process_count_per_node: Another number of processes on each node.
            distributed_backend: Another backend, such as "gloo" or "mpi".
            resume: Start from the checkpoints of the run.
            display_name: Name of the new run.

        Raises:
            JobError: A change is wrong, such as an option that the script does not declare. Nothing has started then.
            RunStateError: The run is a sweep or a pipeline, or was not submitted.
        """
        from paceline.rerun import RerunChanges, rerun

        changes = RerunChanges(
            parameters={name: None if value is None else str(value) for name, value in (parameters or {}).items()},
            arguments=arguments,
            compute_target=compute_target,
            node_count=node_count,
            process_count_per_node=process_count_per_node,
            distributed_backend=distributed_backend,
            resume=resume,
        )
        before = store.find(self.runs_dir, run_id)
        return self.get_run(rerun(before, self._path, changes=changes, display_name=display_name).run_id)

    @property
    def deleted_runs(self) -> list[DeletedRun]:
        """Runs in the trash (kept for 7 days), the most recently deleted first."""
        return trash.deleted(self._path)

    def restore(self, run_id: str) -> list[Run]:
        """Restore a deleted run and the runs deleted with it.

        Args:
            run_id: The run's id, the beginning of it, or its name.

        Raises:
            RunNotFoundError: The trash has no such run, or several runs match.

        Examples:
            >>> ws = pl.Workspace("my_runs")
            >>> with pl.Experiment(ws, "notebook").start_logging() as run:
            ...     run.log("loss", 0.5)
            >>> run.delete()
            >>> [restored] = ws.restore(run.id)
            >>> restored.metrics("loss").last
            0.5
        """
        return [self.get_run(folder.run_id) for folder in trash.restore(self._path, run_id)]

    def get_runs(
        self, where: str = "", *, sort: str = "", include_children: bool = False, archived: bool | None = False
    ) -> Iterator[Run]:
        """Return the workspace's runs that match a query, newest first or sorted.

        Args:
            where: A query, such as `metrics.acc > 0.9 and params.lr < 1e-3 and state = failed and created > -7d`;
                docs/runs.md describes the language. "" for all runs.
            sort: A field, such as "metrics.acc.best" (the best run first) or "-created" (descending).
            include_children: Whether to include trials of sweeps and steps of pipelines.
            archived: True for archived runs only, False for other runs only, None for all runs.

        Raises:
            QueryError: The query is wrong. The error's `at` is the position, and `expected` a correct text there.

        Examples:
            >>> ws = pl.Workspace("my_runs")
            >>> with pl.Experiment(ws, "search").start_logging() as run:
            ...     run.log("acc", 0.95)
            >>> [found.metrics("acc").last for found in ws.get_runs("metrics.acc > 0.9", sort="metrics.acc.best")]
            [0.95]
        """
        from paceline.runs.search.index import find_runs

        for facts in find_runs(self.runs_dir, where, sort, children=include_children, archived=archived):
            yield self.get_run(facts.run_id)

    def get_run(self, run_id: str) -> Run:
        """Return a run by its id or name.

        Args:
            run_id: The run's id, the beginning of it, or its name.

        Raises:
            RunNotFoundError: There is no such run, or there are several.
        """
        run: Run = Run.get(self, run_id)
        return run

    def compare(self, *runs: Run | str) -> RunTable:
        """Return a table that compares runs, with differing values first.

        Args:
            runs: Two or more runs, or their ids or names.

        Raises:
            RunNotFoundError: There is no such run, or several have this name.

        Examples:
            >>> table = workspace.compare("brave-otter-12", "calm-heron-3").differences()
            >>> [(fact.title, fact.values) for fact in table.facts][:1]
            [('lr', (0.1, 0.01))]
        """
        from paceline.reports.compare import run_table

        if not runs:
            raise WorkspaceError("compare() needs runs: workspace.compare(run, other).")
        return run_table(self._folders(runs))

    def report(
        self,
        runs: Sequence[Run | str],
        path: str | os.PathLike[str],
        *,
        metrics: Collection[str] = (),
        anonymous: bool = False,
    ) -> None:
        """Write a report of runs: one HTML file that needs no server or network.

        Args:
            runs: Runs, or their ids or names; 200 at most.
            path: The file, of 32 MiB at most. An existing file is replaced.
            metrics: Names or patterns of metrics, such as `val/*`. Default: all.
            anonymous: Leave out images, and texts that may name people, hosts, folders or projects.

        Raises:
            RunNotFoundError: There is no such run, or several have this name.
            UserError: No metric matches, the file would be too large or can't be written, or `paceline[ui]` is not installed.

        Examples:
            >>> workspace.report(["brave-otter-12", "calm-heron-3"], "report.html", metrics=["loss"])
        """
        try:
            from paceline.ui.report import write_report
        except ImportError as error:
            raise UserError("a report needs the parts of the page: pip install 'paceline[ui]'.") from error
        write_report(self._folders(runs), Path(path), metrics=metrics, anonymous=anonymous)

    def _folders(self, runs: Sequence[Run | str]) -> list[RunFolder]:
        """Return the folders of the runs, without duplicates."""
        ids = [run.id if isinstance(run, Run) else run for run in runs]
        return list(dict.fromkeys(store.find(self.runs_dir, run_id) for run_id in ids))


class Experiment:
    """A name for runs that belong together.

    Args:
        workspace: Workspace of its runs.
        name: Name of the experiment: a letter or digit, then letters, digits, `_` and `-`.

    Raises:
        WorkspaceError: The name is wrong.

    Examples:
        >>> experiment = pl.Experiment(pl.Workspace("my_runs"), "digits")
        >>> run = experiment.submit(pl.Estimator(entry_script="train.py"))
        >>> run.wait_for_completion().status
        'Completed'
    """

    #: The class of run objects that this experiment creates.
    run_class: ClassVar[type[Run]] = Run

    def __init__(self, workspace: Workspace, name: str) -> None:
        if not isinstance(workspace, Workspace):
            raise WorkspaceError(f"{workspace!r} is not a workspace. Give Workspace.from_config() or Workspace(dir).")
        self._workspace = workspace
        self._name = check_experiment_name(name)

    def __repr__(self) -> str:
        return f"Experiment({self._workspace!r}, {self._name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Experiment) and (other.workspace, other.name) == (self.workspace, self.name)

    def __hash__(self) -> int:
        return hash((self._workspace, self._name))

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self._name

    @property
    def workspace(self) -> Workspace:
        """The experiment's workspace."""
        return self._workspace

    @property
    def runs_dir(self) -> Path:
        """The workspace's folder of runs."""
        return self._workspace.runs_dir

    @overload
    def submit(self, config: Sweep, tags: Mapping[str, object] | None = None, **overrides: Any) -> SweepRun: ...
    @overload
    def submit(self, config: Pipeline, tags: Mapping[str, object] | None = None, **overrides: Any) -> PipelineRun: ...
    @overload
    def submit(self, config: Script | Job, tags: Mapping[str, object] | None = None, **overrides: Any) -> Run: ...

    def submit(
        self,
        config: Submittable,
        tags: Mapping[str, object] | None = None,
        *,
        source_directory: str | os.PathLike[str] | None = None,
        parent_run_id: str | None = None,
        progress: Progress | None = None,
        display_name: str | None = None,
        run_id: str | None = None,
        **overrides: Any,
    ) -> Run:
        """Submit an estimator, `Job`, sweep or pipeline, and return the run immediately.

        Args:
            config: Estimator, `Job`, sweep or pipeline.
            tags: Tags of the run.
            source_directory: Source folder of a `Job`.
            parent_run_id: Parent of the new run.
            progress: Called with (bytes done, total bytes) while the source is hashed.
            run_id: Id of the run: letters, digits, `_`, `-`, `.`; default: made of the experiment's name and the time.
            display_name: Name of the run for people, beside its id.
            overrides: An estimator's arguments or inputs, or single script_params, for this run only. For a pipeline,
                pipeline_parameters (name -> value) and regenerate_outputs (run each step without reusing results).

        Raises:
            UserError: A value is wrong, the source can't be copied, or the target can't hold the job. Nothing starts.
        """
        # Import these modules only for a submission, because a program that only reads runs does not need them.
        from paceline.estimator import _Script, with_overrides
        from paceline.pipelines.pipeline import Pipeline
        from paceline.pipelines.pipeline_run import PipelineRun
        from paceline.submit import SourceCopy, submit
        from paceline.sweeps.sweep import Sweep
        from paceline.sweeps.sweep_run import SweepRun

        if isinstance(config, Job):
            if overrides or source_directory is None:
                raise JobError("a Job is submitted with its source_directory and without overrides.")
            job, directory = config, Path(source_directory)
        elif isinstance(config, _Script):
            config = with_overrides(config, overrides)
            job, directory = config.job(), Path(source_directory or config.source_directory or ".")
        elif isinstance(config, Sweep):
            if overrides or parent_run_id is not None or source_directory is not None:
                raise SweepError("a sweep takes no overrides: its estimator says what the trials run.")
            swept = config.submit(
                self._workspace.path, self._name, tags=tags, progress=progress, display_name=display_name
            )
            return SweepRun(self, swept.run_id)
        elif isinstance(config, Pipeline):
            if unknown := sorted(set(overrides) - {"pipeline_parameters", "regenerate_outputs"}):
                raise PipelineError(
                    f"a pipeline is submitted without {unknown[0]}; it takes pipeline_parameters and regenerate_outputs."
                )
            if parent_run_id is not None or source_directory is not None:
                raise PipelineError("a pipeline has no parent, and its steps have sources of their own.")
            begun = config.submit(
                self._workspace.path,
                self._name,
                tags=tags,
                progress=progress,
                display_name=display_name,
                run_id=run_id,
                **overrides,
            )
            return PipelineRun(self, begun.run_id)
        else:
            raise JobError(
                f"can't submit a {type(config).__name__}. Submit an Estimator, PyTorch, TensorFlow, SKLearn, Job, Sweep or "
                "Pipeline."
            )
        folder = submit(
            job,
            # Make the path absolute: the record keeps it, and the program may change its working directory.
            SourceCopy(directory=directory.absolute()),
            self._workspace.path,
            self._name,
            tags=tags,
            parent_run_id=parent_run_id,
            progress=progress,
            display_name=display_name,
            run_id=None if run_id is None else check_run_id(run_id),
        )
        return self.run_class(self, folder.run_id)

    def start_logging(
        self,
        outputs: str | bool | None = None,
        snapshot_directory: str | None = None,
        display_name: str | None = None,
        run_id: str | None = None,
    ) -> Run:
        """Start a run that this program logs, and ends with `complete()`, `fail()` or a `with` block.

        Without such a call, the run ends when the program ends. If the program is killed, the run is Failed.

        Args:
            outputs: A folder of the working directory, created if missing. The run keeps the files of this folder and
                of `./logs`. Default: "outputs"; False keeps no files.
            snapshot_directory: A folder of sources, of which the run keeps a snapshot; None keeps no snapshot.
            display_name: Name of the run, for people.
            run_id: Default: made of the experiment's name and the time.

        Raises:
            SnapshotError: The folder can't be copied.
            RunStateError: A run with this id already exists.
        """
        # Copy the folder first: if the copy fails, no run has been created.
        taken = None
        if snapshot_directory is not None:
            from paceline import snapshot

            taken = snapshot.take(Path(snapshot_directory), self._workspace.path / "snapshots", self._workspace.path)
        folder = interactive.create(self.runs_dir, self._name, run_id=run_id, snapshot_id=taken.id if taken else None)
        if outputs is not False:
            interactive.watch_folders(folder, Path("outputs" if outputs in (None, True) else str(outputs)))
        if taken is not None:
            folder.snapshot.symlink_to(os.path.relpath(taken.path, folder.path))
        if display_name is not None:
            tags_and_properties.set_name(folder.notes, "display_name", display_name)
        return self.run_class(self, folder.run_id)

    def get_runs(
        self,
        kind: str | None = None,
        tags: Mapping[str, str] | str | None = None,
        properties: Mapping[str, str] | None = None,
        include_children: bool = False,
        *,
        status: str | None = None,
        archived: bool | None = False,
        where: str = "",
    ) -> Iterator[Run]:
        """Return the experiment's runs, newest first.

        Args:
            kind: "script", "interactive", "sweep" (a `SweepRun`) or "pipeline" (a `PipelineRun`); None for all kinds.
            tags: Tag -> value, or the name of a tag with any value.
            properties: Property -> value.
            status: A state such as "Completed".
            include_children: Include child runs.
            archived: True for archived runs only, False for other runs only, None for all runs.
            where: A query, such as `metrics.acc > 0.9`, as for `Workspace.get_runs`.

        Raises:
            QueryError: The query is wrong.

        Examples:
            >>> experiment = pl.Experiment(pl.Workspace("my_runs"), "rates")
            >>> with experiment.start_logging() as run:
            ...     run.log("acc", 0.95)
            >>> [found.metrics("acc").last for found in experiment.get_runs(where="metrics.acc > 0.9")]
            [0.95]
        """
        from paceline.runs.search.index import find_runs

        ids = [facts.run_id for facts in find_runs(self.runs_dir, where)] if where else store.ids(self.runs_dir)
        # Compare the experiments in the records, because an id that a user has chosen need not begin with the experiment's name.
        for record in read.records_of(self.runs_dir, ids):
            folder = RunFolder(self.runs_dir / record.run_id)
            if record.experiment == self.name and matches(
                record,
                folder,
                kind=kind,
                tags=tags,
                properties=properties,
                status=status,
                children=include_children,
                archived=archived,
            ):
                yield self.run_class._handle(self, record)


def _make_experiment(runs_dir: Path, name: str) -> Experiment:
    return Experiment(Workspace(runs_dir.parent), name)


def _open_dataset(reference: DataReference, path: str) -> object:
    """Return an input's path, or its dataset if the input has mode "direct"."""
    if reference.mode != "direct":
        return path
    from paceline.data.datasets.dataset import opened

    return opened(reference, path)


def _make_model(folder: RunFolder, model_name: str, model_path: Any, **given: Any) -> Model:
    from paceline.models.model import register_of_run

    # Don't create the workspace: it exists, because it holds the run.
    return register_of_run(Workspace(folder.path.parent.parent, create=False), folder, model_name, model_path, **given)


def _charts_of(folder: RunFolder) -> str:
    with contextlib.suppress(ImportError, PacelineError):
        from paceline.ui.report import charts_frame

        return charts_frame(folder)
    return ""


def _models_of(folder: RunFolder) -> list[Model]:
    from paceline.models.model import Model

    return Model.list(Workspace(folder.path.parent.parent, create=False), run_id=folder.run_id)


def _sweep_run() -> type[Run]:
    from paceline.sweeps.sweep_run import SweepRun

    return SweepRun


def _pipeline_run() -> type[Run]:
    from paceline.pipelines.pipeline_run import PipelineRun

    return PipelineRun


# Set these functions from this module, because `paceline.runs` must not import workspaces, data, sweeps or pipelines.
Run.kinds["sweep"] = _sweep_run
Run.kinds["pipeline"] = _pipeline_run
Run.make_experiment = staticmethod(_make_experiment)
Run.open_dataset = staticmethod(_open_dataset)
Run.make_model = staticmethod(_make_model)
Run.models_of = staticmethod(_models_of)
Run._charts_of = staticmethod(_charts_of)
