"""The live handle on a run: its state, results, metrics, children, and calls that end it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast, overload

from paceline.errors import RunFailedError, RunStateError, UserError
from paceline.job.data_reference import PATH_VARIABLES, DataReference
from paceline.runs import interactive, metrics, read, removal, series, states, store, tags_and_properties, trash
from paceline.runs.context import WorkerContext
from paceline.runs.folder import RunFolder
from paceline.runs.follow import stream
from paceline.runs.metrics import MetricLog
from paceline.runs.offline import OfflineRun
from paceline.runs.read import matches
from paceline.runs.record import RunRecord, user_name
from paceline.runs.remote_status import reads
from paceline.runs.run_files import HasFiles, HasNotes
from paceline.runs.run_metrics import LogsMetrics
from paceline.system import step_clock
from paceline.system.files import read_json

if TYPE_CHECKING:
    import subprocess

    from matplotlib.figure import Figure
    from typing_extensions import Self

    from paceline.models.model import Model
    from paceline.observe.goodput import Goodput
    from paceline.observe.profile import RunProfile
    from paceline.observe.stacks import RunStacks
    from paceline.observe.stragglers import RunPace
    from paceline.runs.failure import FailureReport
    from paceline.runs.media import Source
    from paceline.workspace import Submittable, Workspace


class ExperimentLike(Protocol):
    """The methods of an experiment that a run uses; `paceline.Experiment` has them."""

    @property
    def name(self) -> str: ...

    @property
    def runs_dir(self) -> Path: ...

    def submit(self, config: Any, tags: Mapping[str, object] | None = None, **overrides: Any) -> Run: ...


class ExperimentMaker(Protocol):
    def __call__(self, runs_dir: Path, name: str) -> ExperimentLike: ...


class Run(LogsMetrics, HasFiles, HasNotes):
    """A live handle on a run, which reads the run's folder at each call.

    `Experiment.submit`, `Experiment.start_logging` and (in a worker) `Run.get_context` return a handle.
    `Run(experiment, run_id)` opens an existing run. Two handles on the same run are equal.

    Raises:
        RunNotFoundError: The experiment's workspace has no such run.
        FileNameError: `run_id` is not a valid id.

    Examples:
        >>> experiment = pl.Experiment(pl.Workspace("my_runs"), "notebook")
        >>> with experiment.start_logging() as run:
        ...     for step in range(3):
        ...         run.log("loss", 1 / (1 + step), step=step)
        >>> run.metrics("loss").values
        (1.0, 0.5, 0.3333333333333333)
    """

    #: A function that returns the experiment which a run's record names. `paceline.workspace` sets it.
    make_experiment: ExperimentMaker
    #: The class of the object that `get_context` returns in a process which belongs to no run.
    offline_class: ClassVar[type[OfflineRun]] = OfflineRun
    #: Kind of a run -> function that returns the class of such runs. `paceline.workspace` fills this dict.
    kinds: ClassVar[dict[str, Callable[[], type[Run]]]] = {}
    #: A function that opens an input of the job by name. `paceline.workspace` sets it.
    open_dataset: Callable[[DataReference, str], object]
    #: A function that registers a file or folder of a run as a model. `paceline.workspace` sets it.
    make_model: Callable[..., Model]
    #: Warnings that the submission has shown already. The run's output does not show them a second time.
    _said: Collection[str] = ()
    #: A function that finds the models of a run. `paceline.workspace` sets it.
    models_of: Callable[[RunFolder], list[Model]]
    #: A function that returns HTML with a run's curves, or "" if web packages are missing. `paceline.workspace` sets it.
    _charts_of: Callable[[RunFolder], str]

    def __init__(self, experiment: ExperimentLike, run_id: str) -> None:
        self._experiment = experiment
        self._folder = store.find(experiment.runs_dir, run_id)
        self._worker: WorkerContext | None = None
        self._metric_log: MetricLog | None = None

    def __repr__(self) -> str:
        record = self.record()
        return f"Run(experiment={record.experiment!r}, id={record.run_id!r}, status={record.status!r})"

    def _repr_html_(self) -> str:
        return self._table_html() + type(self)._charts_of(self._folder)

    def _table_html(self) -> str:
        from paceline.runs.notebook import run_html

        return run_html(self._folder)

    def show(self) -> None:
        """Show a live table in a notebook, or one line elsewhere. Return immediately.

        A saved notebook keeps the run's last table, with curves of the metrics if `paceline[ui]` is installed.
        """
        from paceline.runs import notebook

        if notebook.is_here():
            notebook.show(
                lambda: self._repr_html_() if self.record().is_terminal else self._table_html(),
                lambda: self.record().is_terminal,
            )
        else:
            print(f"Run {self.id}: {self.status}. paceline logs -f {self.id}")

    @reads
    def plot(
        self, *names: str, rank: int | Collection[int] | None = None, attempt: int | Collection[int] | None = None
    ) -> Figure:
        """Return a matplotlib figure of the metrics with a curve for each rank.

        names: Metrics to draw; by default, all metrics with numbers. rank, attempt: As for `metrics`.

        Raises:
            UserError: matplotlib is not installed, there are no numbers, or a metric, rank or attempt is missing.
        """
        from paceline.runs.series import plot

        found = self.metrics(rank=rank, attempt=attempt)
        if missing := [name for name in names if name not in found]:
            raise UserError(
                f"plot({missing[0]!r}): run {self.id} has no such metric. There are {', '.join(found) or 'none'}."
            )
        figure: Figure = plot({name: found[name] for name in names or found}, self.display_name)
        return figure

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and other.folder == self.folder

    def __hash__(self) -> int:
        return hash(self._folder)

    # --- finding a run

    @classmethod
    def get_context(cls, allow_offline: bool = True) -> Self:
        """Return this process's run or, outside a run, an `OfflineRun` that only prints.

        If this process lacks the run's environment variables, the environments of its parent processes are used.

        Raises:
            RunStateError: The process is outside a run, and allow_offline=False.
            RunContextError: The process is inside a run, but variables of its launcher are missing.
        """
        context = WorkerContext.of_process()
        if context is None:
            if not allow_offline:
                raise RunStateError(
                    "this process belongs to no run: PACELINE_RUN_DIR is not set. Submit the script with `paceline run`, "
                    "or call get_context() without allow_offline=False."
                )
            # The offline class has the same methods as Run, but is no subclass of Run.
            return cast("Self", cls.offline_class())
        folder = RunFolder(context.run_dir)
        # A worker knows the folder of its run, but no workspace. So read the name of the experiment from the run's record.
        run = cls(cls.make_experiment(context.run_dir.parent, store.experiment(folder)), folder.run_id)
        run._worker = context
        return run

    @classmethod
    def get(cls, workspace: Workspace, run_id: str) -> Run:
        """Return a run of a workspace by id or name.

        run_id: the run's id, a unique prefix of it, or its name.

        Raises:
            RunNotFoundError: No run matches, or several do.
        """
        record = read.record(store.find(workspace.runs_dir, run_id))
        found: Run = cls._handle(cls.make_experiment(workspace.runs_dir, record.experiment), record)
        return found

    @classmethod
    def _handle(cls, experiment: ExperimentLike, record: RunRecord) -> Any:
        # `kinds` has functions that return classes, so that the module of sweeps is imported only when needed.
        return cls.kinds.get(record.kind, lambda: cls)()(experiment, record.run_id)

    # --- the run's identity and results

    @property
    def folder(self) -> RunFolder:
        """Names and paths of the run's files; `folder.path` is the folder itself."""
        return self._folder

    @property
    def experiment(self) -> ExperimentLike:
        """The experiment to which the run belongs."""
        return self._experiment

    @property
    def id(self) -> str:
        """The run's id, `<experiment>_<unix seconds>_<8 hex>`."""
        return self._folder.run_id

    @property
    def name(self) -> str:
        """The display name, which the Azure SDK calls `name`."""
        return self.display_name

    @property
    def kind(self) -> str:
        """The kind: "script" for submitted runs, "interactive" if a program logs it.

        Sweeps have the kind "sweep", and pipelines "pipeline". The kind never changes.
        """
        return store.stored(self._folder).kind

    @property
    def number(self) -> int:
        """The run's number in its experiment, from 1, in order of submission."""
        records = read.all_records(self._folder.path.parent)
        ids = [record.run_id for record in records if record.experiment == self._experiment.name]
        # The list begins with the newest run, which has the highest number. So count from the end of the list.
        return len(ids) - ids.index(self.id)

    @property
    def parent(self) -> Run | None:
        """The run that this run is a child of, or None."""
        parent = self.record().parent_run_id
        if parent is None:
            return None
        above: Run = self._handle(self._experiment, read.record(store.find(self._folder.path.parent, parent)))
        return above

    @property
    def status(self) -> str:
        """The current state: one of the states in docs/runs.md."""
        return self.record().status

    @property
    def failure(self) -> FailureReport | None:
        """The failure report; None unless the run failed."""
        return self.record().failure

    @property
    def input_datasets(self) -> dict[str, Any]:
        """The run's inputs by name.

        In a worker, the value is the input's folder, or the dataset if the input's mode is "direct". Elsewhere, the
        value is a dict of stored facts: sources, dataset and version, files, bytes, and a fingerprint of the content.
        """
        if self._worker is None:
            return _of_all_nodes(self._data("inputs"))
        job = self.record().job
        return {
            reference.name: self.open_dataset(reference, os.environ[PATH_VARIABLES[1] + reference.name])
            for reference in (job.inputs if job else ())
            if not reference.is_output
        }

    @property
    def output_datasets(self) -> dict[str, Any]:
        """The outputs by name: in a worker the folder of each, elsewhere the stored files."""
        if self._worker is None:
            return {found["name"]: found for found in self._data("outputs")}
        job = self.record().job
        return {
            reference.name: os.environ[PATH_VARIABLES[1] + reference.name]
            for reference in (job.inputs if job else ())
            if reference.is_output
        }

    @reads
    def _data(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (read_json(self._folder.data) or {}).get(kind, [])
        return found

    def get_environment(self) -> dict[str, Any]:
        """Return the requested environment, and a built environment's exact versions."""
        job = self.record().job
        built: dict[str, Any] | None = read_json(self._folder.environment)
        return built or {"environment": job.environment.to_json() if job else {}}

    @reads
    def register_model(
        self,
        model_name: str,
        model_path: str | os.PathLike[str] | None = None,
        tags: Mapping[str, object] | None = None,
        properties: Mapping[str, object] | None = None,
        model_framework: str | None = None,
        model_framework_version: str | None = None,
        description: str | None = None,
        datasets: Sequence[tuple[str, object]] | None = None,
    ) -> Model:
        """Register a file or folder of this run as a new model version.

        The run's own script can call this method if its node sees the workspace's folder. Call the method on one rank
        only, because each call registers a new version.

        Args:
            model_name: Name of the model.
            model_path: Name of the file or folder in the run, such as "outputs/model"; default: the model's name.
            tags: Tags of the version, which can be changed later.
            properties: Properties of the version. Later calls can only add properties.
            model_framework: Framework of the model; default: detected from the files.
            model_framework_version: Version of the framework; default: the version in the run's environment.
            description: Text for people.
            datasets: Pairs of a purpose and a dataset; default: the run's inputs.

        Raises:
            ModelError: The name is invalid, the file is missing, the folder has a file that the run does not keep, or
                this process sees only a copy of the run's folder.
        """
        # Call the function through the class: through the instance, Python would pass the instance as the first argument.
        return Run.make_model(
            self._folder,
            model_name,
            model_path,
            tags=tags,
            properties=properties,
            model_framework=model_framework,
            model_framework_version=model_framework_version,
            description=description,
            datasets=datasets,
        )

    @property
    def models(self) -> list[Model]:
        """The model versions of this run, the newest first."""
        found: list[Model] = Run.models_of(self._folder)
        return found

    def record(self) -> RunRecord:
        """Return the run's current record (`RunRecord`)."""
        return read.record(self._folder)

    def get_all_logs(self, destination: str | os.PathLike[str] | None = None) -> list[str]:
        """Copy the logs into a folder, and return the written paths.

        Args:
            destination: Folder to copy the logs into; default: `./<run id>`.
        """
        top = Path(destination) if destination is not None else Path(self.id)
        names = [name for name in self.get_file_names() if name.startswith("logs/")]
        for name in names:
            self.download_file(name, str(top / name))
        return [str(top / name) for name in names]

    def restore_snapshot(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the run's submitted source into a new folder, and return its path.

        path: the new folder; default: `./<snapshot id>`.

        Raises:
            RunStateError: The run has no snapshot.
            UserError: The folder exists.
        """
        import shutil

        if not self._folder.snapshot.exists():
            raise RunStateError(f"run {self.id} has no snapshot.")
        target = Path(path) if path is not None else Path(str(self.record().snapshot_id))
        if target.exists():
            raise UserError(f"{str(target)!r} exists. Name a folder that does not.")
        # Copy links as links instead of copying their targets, because the snapshot has them as links.
        shutil.copytree(self._folder.snapshot.resolve(), target, symlinks=True)
        return str(target)

    # --- reading and logging metrics

    @reads
    def get_metrics(
        self, name: str | None = None, recursive: bool = False, *, rank: int | None = None, by_rank: bool = False
    ) -> dict[str, Any]:
        """Return {metric name: value}; a name with several values has a list.

        name: Return only this metric. recursive: Return {run id: metrics} for this run and its child runs. rank: Return
            only values of this rank. by_rank: Return {rank: metrics}. Values on other machines are fetched first.
        """
        if recursive:
            runs = [self, *self.get_children(recursive=True)]
            return {run.id: run.get_metrics(name, rank=rank, by_rank=by_rank) for run in runs}
        if by_rank:
            return {str(key): value for key, value in metrics.read_by_rank(self._folder.metrics, name=name).items()}
        return metrics.read(self._folder.metrics, name=name, rank=rank)

    @overload
    def metrics(
        self, name: str, *, rank: int | Collection[int] | None = None, attempt: int | Collection[int] | None = None
    ) -> series.MetricSeries: ...
    @overload
    def metrics(
        self,
        name: None = None,
        *,
        rank: int | Collection[int] | None = None,
        attempt: int | Collection[int] | None = None,
    ) -> dict[str, series.MetricSeries]: ...

    @reads  # type: ignore[misc]
    def metrics(
        self,
        name: str | None = None,
        *,
        rank: int | Collection[int] | None = None,
        attempt: int | Collection[int] | None = None,
    ) -> series.MetricSeries | dict[str, series.MetricSeries]:
        """Return the series of the metric `name`; without a name, {name: series} of all metrics.

        A series (`paceline.runs.series.MetricSeries`) has `steps`, `values` and `times`, which may be empty.

        rank: Return only values of these ranks, such as `rank=[0, 1]`. attempt: Return only values of these attempts.
        Several attempts are joined as if the run had not been interrupted.

        Raises:
            UserError: The run does not have this rank or attempt.
        """
        if rank is not None or attempt is not None:
            # Read the stored record without querying the engine, because the run was refreshed before this call.
            record = store.stored(self._folder)
            check_numbers("rank", rank, self._folder.ranks(record.world_size), self.id)
            check_numbers("attempt", attempt, range(1, max(1, len(record.attempts)) + 1), self.id)
        found = series.read(self._folder.metrics, name=name, rank=rank, attempt=attempt)
        return found if name is None else found.get(name, series.MetricSeries(name=name))

    def _write_scalar(self, name: str, value: object, step: int | None) -> None:
        self._log().scalar(name, value, step)
        # Don't count a value without a step as a training step, because it may be a result at the end of the script.
        if step is not None and (clock := step_clock.clock()) is not None:
            clock.tick(name)

    def _write_other(self, kind: str, name: str, value: object, step: int | None = None) -> None:
        self._log().other(kind, name, value, step)

    def _write_file(self, kind: str, name: str, file_name: str, source: Source, step: int | None = None) -> None:
        from paceline.runs.media import put

        put(self._folder, name, file_name, source)
        self._write_other(kind, name, file_name, step)

    def _log(self) -> MetricLog:
        if self._metric_log is None:
            # Read the rank at each call, because the process may join a process group after get_context().
            worker = self._worker and (WorkerContext.from_environment() or self._worker)
            rank, attempt = (worker.rank, worker.attempt) if worker else (0, 1)
            self._metric_log = MetricLog(self._folder.metric_log(rank, attempt), attempt=attempt)
        return self._metric_log

    # --- waiting for the run's end

    def wait_for_completion(self, show_output: bool = False, raise_on_error: bool = True) -> RunRecord:
        """Block until the run has ended, and return its record.

        Ctrl-C stops only the waiting, not the run. show_output: print the workers' output and changes of state.

        Raises:
            RunFailedError: The run failed, and raise_on_error=True. The error's text is the failure report.
        """
        try:
            record = stream(self._folder, sys.stdout, self._said) if show_output else _wait(self._folder)
        except KeyboardInterrupt:
            print(f"\nRun {self.id} goes on. Cancel it with: paceline cancel {self.id}", file=sys.stderr)
            raise
        if record.status == states.FAILED and raise_on_error:
            raise RunFailedError(f"Run {self.id} failed. {record.failure or ''}", record.failure)
        return record

    # --- commands beside the workers, and the load of the nodes

    def exec(
        self, command: Sequence[str], rank: int = 0, input: bytes | str = b""
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command beside a rank's worker. Return its exit code and output.

        The command runs on the worker's node, in its working directory and container, with its environment variables,
        until the run ends.

        input: sent to the command's standard input.

        Raises:
            UserError: The command is empty, or the run has no such rank.
            RunStateError: The run is not alive, or ended before the command.
        """
        from paceline.runs.execute import execute

        data = input.encode() if isinstance(input, str) else input
        return execute(self._folder, command, rank=rank, input=data)

    def stacks(self, *, native: bool = False) -> RunStacks:
        """Return all workers' stacks and collectives, and which worker waits for which worker.

        The workers continue to run.

        native: also return frames of C and C++. For this, py-spy stops each process for some milliseconds.

        Raises:
            RunStateError: The run is not alive, or its supervisor does not answer.
        """
        from paceline.observe.stacks import take

        return take(self._folder, native=native)

    def profile(self, *, seconds: float = 30.0, rate: float = 100.0) -> RunProfile:
        """Sample the workers' stacks while they run, and return where their time goes.

        rate: samples per second. py-spy takes the samples if it is installed and allowed. Otherwise signals sample only
            the main threads, at most 20 times per second, and the result's `notes` say so. `save(path)` of the result
            writes a file for https://www.speedscope.app.

        Raises:
            UserError: `seconds` is not from 1 to 600, or `rate` is not from 1 to 500.
            RunStateError: The run is not alive, or its supervisor does not answer.
        """
        from paceline.observe.profile import take

        return take(self._folder, seconds=seconds, rate=rate)

    @reads
    def pace(self) -> RunPace:
        """Return each rank's seconds per step, and its computing and waiting time.

        The result describes only the last attempt. Its `straggler` names the ranks that clearly delay the other ranks,
        or is None. If the script counts no steps (docs/when-it-is-slow.md), the result has no ranks.
        """
        from paceline.observe import loads

        return loads.pace(self._folder, store.stored(self._folder))

    @reads
    def goodput(self) -> Goodput:
        """Return core- and GPU-seconds by class of use, with the run's energy and price.

        docs/when-it-is-slow.md#what-a-run-cost defines the classes, and the ratio `ettr` of the result.
        """
        from paceline.observe import goodput

        return goodput.goodput(self._folder, store.stored(self._folder))

    @reads
    def resources(self) -> dict[str, dict[int, dict[str, series.MetricSeries]]]:
        """Return CPU, memory and GPU use: {"nodes": {rank: {name: series}}, "ranks": ...}.

        Samples are 5 seconds apart; steps are seconds since 1970. docs/when-it-is-slow.md lists names and units.
        """
        from paceline.observe import loads

        return loads.series(self._folder)

    # --- canceling, deleting, starting and ending the run

    def cancel(self) -> None:
        """Request the run's end, and return immediately.

        The workers get SIGTERM, and SIGKILL after the grace period. A run that has ended does not change.
        """
        # If this process logs the run, no supervisor exists, so this process itself ends the run.
        if interactive.is_ours(self._folder):
            interactive.end(self._folder, states.CANCELED)
        elif not self.record().is_terminal:
            read.request_cancel(self._folder, by=user_name())

    def delete(self, *, children: bool = False, purge: bool = False) -> None:
        """Move the run with its logs, metrics, outputs and checkpoints to the trash.

        `Workspace.restore` brings it back for 7 days. Data in datastores stays.

        children: also delete all runs below this run. purge: remove the runs for good, which frees the space at once.

        Raises:
            RunStateError: A run has not ended, or the run has children and children=False. Nothing is deleted.
        """
        below = [*self.get_children(recursive=True)]
        if below and not children:
            raise RunStateError(
                f"run {self.id} has {len(below)} child run{'s' if len(below) > 1 else ''}. delete(children=True) removes "
                f"{'them' if len(below) > 1 else 'it'} as well."
            )
        if not purge:
            trash.delete(self._folder.path.parent, [self._folder])
            return
        # Check for all runs that they can be deleted, before deleting the first run.
        for run in (*below, self):
            removal.check_removable(run.record())
        # Delete child runs first, because an interrupted call must not leave a child without its parent.
        for run in (*below, self):
            removal.remove(run.folder)

    def start(self) -> None:
        """Start a child made by `create_children`, unless it runs already."""
        if interactive.is_ours(self._folder):
            interactive.begin(self._folder)

    def complete(self) -> None:
        """End this run as Completed. Do nothing for a submitted run."""
        interactive.end(self._folder, states.COMPLETED)

    def fail(self, error_details: object = None, error_code: str | None = None) -> None:
        """End this run as Failed. For a submitted run, only request the end.

        In a submitted run's own script, this method does nothing, because the script's exit code decides the state.

        error_details: A text or an exception. error_code: A code that begins the failure's message.
        """
        record = self.record()
        if record.kind != "interactive" and self._worker is None:
            if not record.is_terminal:
                text = str(error_details) if error_details is not None else f"{user_name()} has called fail()."
                text = f"{error_code}: {text}" if error_code else text
                read.request_cancel(self._folder, by=user_name(), reason="fail()", fail=text)
            return
        interactive.end(self._folder, states.FAILED, error_details, error_code)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.complete()
        else:
            self.fail(error)

    # --- creating and finding child runs

    def child_run(self, name: str | None = None, run_id: str | None = None, outputs: str | None = None) -> Self:
        """Start a child run, which this process logs and ends.

        Args:
            name: Name of the new run, for people.
            run_id: Id of the new run; default: a new one.
            outputs: Ignored. The Azure SDK has this argument.
        """
        return self._child(name, run_id, begin=True)

    def create_children(
        self, count: int | None = None, tag_key: str | None = None, tag_values: list[object] | None = None
    ) -> list[Self]:
        """Create several child runs of this run, which are NotStarted.

        count: Number of runs. Each run's index becomes its tag `azureml.batch_child_number`. tag_values: One value for
            each run, stored as the run's tag `tag_key`.

        Raises:
            UserError: Neither or both of `count` and `tag_values` were given, or `tag_key` is missing.
        """
        if (count is None) == (tag_values is None) or (tag_values is not None and tag_key is None):
            raise UserError("create_children: give either count, or tag_key with tag_values.")
        if count is not None:
            tag_key, tag_values = "azureml.batch_child_number", [*range(count)]
        children = []
        for value in tag_values or ():
            child = self._child(None, None, begin=False)
            child.tag(str(tag_key), value)
            children.append(child)
        return children

    def get_children(
        self,
        recursive: bool = False,
        tags: Mapping[str, str] | str | None = None,
        properties: Mapping[str, str] | None = None,
        kind: str | None = None,
        status: str | None = None,
    ) -> Iterator[Self]:
        """Yield the child runs of this run, newest first.

        recursive: Include children of children too. tags: Only runs with these tags (name -> value, or one name).
        properties: Only runs with these properties. kind: Only runs of this kind, such as "script". status: Only runs
        in this state, such as "Failed".
        """
        runs_dir = self._folder.path.parent
        parents = {self.id}
        records = [record for record in read.all_records(runs_dir) if record.parent_run_id]
        if recursive:
            # A record names only the run's direct parent. So find the descendants one generation after the other.
            while grown := {r.run_id for r in records if r.parent_run_id in parents} - parents:
                parents |= grown
        for record in records:
            if record.parent_run_id in parents and matches(
                record,
                RunFolder(runs_dir / record.run_id),
                kind=kind,
                tags=tags,
                properties=properties,
                status=status,
                children=True,
            ):
                yield self._handle(self._experiment, record)

    def submit_child(self, config: Submittable, tags: Mapping[str, object] | None = None, **overrides: Any) -> Run:
        """Submit an estimator or a job as a child run of this run.

        Args:
            config: An estimator or a job, as for `Experiment.submit`.
            tags: Tags of the new run.
            overrides: As for `Experiment.submit`.
        """
        return self._experiment.submit(config, tags=tags, parent_run_id=self.id, **overrides)

    def _child(self, name: str | None, run_id: str | None, *, begin: bool) -> Self:
        folder = interactive.create(
            self._folder.path.parent, self._experiment.name, run_id=run_id, parent_run_id=self.id, begin=begin
        )
        child = type(self)(self._experiment, folder.run_id)
        if name:
            tags_and_properties.set_name(folder.notes, "display_name", name)
        return child


def _wait(folder: RunFolder) -> RunRecord:
    # Poll often at first, because some runs take only a second.
    pause = 0.02
    while not (record := read.record(folder)).is_terminal:
        time.sleep(pause)
        pause = min(pause * 1.2, 0.25)
    return record


def check_numbers(what: str, given: object, there: range, run_id: str) -> None:
    """Raise UserError unless `given`, the ranks or attempts of a call, are in `there`."""
    if given is None:
        return
    for number in given if isinstance(given, Collection) and not isinstance(given, str) else (given,):
        # Compare exact types, because otherwise True would count as rank 1.
        if type(number) is not int or number not in there:
            has = f"{there[0]} to {there[-1]}" if len(there) > 1 else f"{there[0]} alone"
            raise UserError(f"{what}={given!r}: run {run_id} has {what} {has}. Give one of these.")


def _of_all_nodes(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the nodes' facts on inputs to {input: {files, bytes, fingerprint, ...}}.

    If each node has a part of an input, add up the nodes' numbers. Otherwise use the numbers of one node.
    """
    together: dict[str, Any] = {}
    for one in found:
        known = together.setdefault(one["name"], dict(one))
        if one["node_rank"] != known["node_rank"] and one.get("partition"):
            known |= {name: known[name] + one[name] for name in ("files", "bytes", "fetched_bytes")}
    return together
