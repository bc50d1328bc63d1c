"""The live handle on a run: what it is, how far it is, what came of it, and its end."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast, overload

from paceline.errors import RunFailedError, RunStateError, UserError
from paceline.job.data_reference import PATH_VARIABLES, DataReference
from paceline.runs import (
    artifacts,
    interactive,
    metrics,
    read,
    removal,
    series,
    states,
    store,
    tags_and_properties,
)
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
    from paceline.observe.profile import RunProfile
    from paceline.observe.stacks import RunStacks
    from paceline.observe.stragglers import RunPace
    from paceline.runs.failure import FailureReport
    from paceline.workspace import Submittable, Workspace


class ExperimentLike(Protocol):
    """The part of an experiment that a run uses; `paceline.Experiment` is one."""

    @property
    def name(self) -> str: ...

    @property
    def runs_dir(self) -> Path: ...

    def submit(self, config: Any, tags: Mapping[str, object] | None = None, **overrides: Any) -> Run: ...


class ExperimentMaker(Protocol):
    def __call__(self, runs_dir: Path, name: str) -> ExperimentLike: ...


class Run(LogsMetrics, HasFiles, HasNotes):
    """A run of an experiment, live: every question is answered from the run's folder at the time it is asked.

    Made by `Experiment.submit`, `Experiment.start_logging`, `Run.get_context()` in a worker, or by
    `Run(experiment, run_id)` to take up a run again. Of several handles on one run, none is special.

    Raises:
        RunNotFoundError: the experiment's workspace has no such run.
        FileNameError: `run_id` has not the form of a run's id.
    """

    #: Set by `paceline.workspace`: what makes an experiment where a run has to name its own.
    make_experiment: ExperimentMaker
    #: What `get_context` gives a script that belongs to no run.
    offline_class: ClassVar[type[OfflineRun]] = OfflineRun
    #: Set by `paceline.workspace`: kind -> what gives the class of runs of this kind, where they have one of their own.
    kinds: ClassVar[dict[str, Callable[[], type[Run]]]] = {}
    #: Set by `paceline.workspace`: what a script gets for an input that it asks for by name.
    open_dataset: Callable[[DataReference, str], object]
    #: Set by `paceline.workspace`: what registers a run's file or folder as a model.
    make_model: Callable[..., Model]
    #: Warnings of the run that its submission has shown already.
    _said: Collection[str] = ()
    #: Set by `paceline.workspace`: the models that came of a run.
    models_of: Callable[[RunFolder], list[Model]]

    def __init__(self, experiment: ExperimentLike, run_id: str) -> None:
        self._experiment = experiment
        self._folder = store.find(experiment.runs_dir, run_id)
        self._worker: WorkerContext | None = None
        self._metric_log: MetricLog | None = None

    def __repr__(self) -> str:
        record = self.record()
        return f"Run(experiment={record.experiment!r}, id={record.run_id!r}, status={record.status!r})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: state, folder, and why the run failed. The script's words are escaped."""
        from paceline.runs.notebook import run_html

        return run_html(self._folder)

    def show(self) -> None:
        """Show the run: in a notebook as a table that is replaced as the run goes on, and stays in the saved notebook as it was
        at the end; elsewhere as a line. Returns at once.
        """
        from paceline.runs import notebook

        if notebook.is_here():
            notebook.show(self._repr_html_, lambda: self.record().is_terminal)
        else:
            print(f"Run {self.id}: {self.status}. paceline logs -f {self.id}")

    @reads
    def plot(
        self,
        *names: str,
        rank: int | Collection[int] | None = None,
        attempt: int | Collection[int] | None = None,
    ) -> Figure:
        """The metrics as curves, a curve for each rank: a matplotlib figure, which a notebook shows by itself.

        names: these metrics alone; default all that have numbers. rank, attempt: as for `metrics`.

        Raises:
            UserError: matplotlib is not installed; no such metric, or none that has numbers; no such rank or attempt.
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
        """The run that this process works for; outside a run one that prints what is logged.

        Raises:
            RunStateError: outside a run, with allow_offline=False.
            RunContextError: inside a run, but the variables that a launcher sets for each worker are not all there. Where whoever
                started this process has cleared its environment, those of the processes above it count.
        """
        context = WorkerContext.of_process()
        if context is None:
            if not allow_offline:
                raise RunStateError(
                    "this process belongs to no run: PACELINE_RUN_DIR is not set. Submit the script with `paceline run`, "
                    "or call get_context() without allow_offline=False."
                )
            # It takes the same calls.
            return cast("Self", cls.offline_class())
        folder = RunFolder(context.run_dir)
        # The experiment is named in the record: a worker is told its run's folder, and nothing of workspaces.
        run = cls(cls.make_experiment(context.run_dir.parent, read.record(folder).experiment), folder.run_id)
        run._worker = context
        return run

    @classmethod
    def get(cls, workspace: Workspace, run_id: str) -> Run:
        """A run of the workspace by its id, or by the beginning of it that no other run has.

        Args:
            run_id: The run's id, the beginning of it, or its name.

        Raises:
            RunNotFoundError: there is none, or there are several.
        """
        record = read.record(store.find(workspace.runs_dir, run_id))
        found: Run = cls._handle(cls.make_experiment(workspace.runs_dir, record.experiment), record)
        return found

    @classmethod
    def _handle(cls, experiment: ExperimentLike, record: RunRecord) -> Any:
        """A handle on another run: of its kind's own class, where there is one, else of this class."""
        # A function gives the class, so that what makes sweeps is imported only where there is one.
        return cls.kinds.get(record.kind, lambda: cls)()(experiment, record.run_id)

    # --- what it is

    @property
    def folder(self) -> RunFolder:
        """Names and paths of the run's files; `folder.path` is the folder itself."""
        return self._folder

    @property
    def experiment(self) -> ExperimentLike:
        """The experiment that the run belongs to."""
        return self._experiment

    @property
    def id(self) -> str:
        """The run's id, `<experiment>_<unix seconds>_<8 hex>`."""
        return self._folder.run_id

    @property
    def name(self) -> str:
        """`display_name`, under the name that the SDK has for it."""
        return self.display_name

    @property
    def kind(self) -> str:
        """ "script" for a submitted run, "interactive" for one that a program logs by itself. Never changes, so that no engine is
        asked.
        """
        return store.stored(self._folder).kind

    @property
    def number(self) -> int:
        """Its number among the experiment's runs, from 1, in order of submission."""
        records = read.all_records(self._folder.path.parent)
        ids = [record.run_id for record in records if record.experiment == self._experiment.name]
        # The newest comes first in the list, and has the highest number.
        return len(ids) - ids.index(self.id)

    @property
    def parent(self) -> Run | None:
        """The run that this one is below; None where there is none."""
        parent = self.record().parent_run_id
        if parent is None:
            return None
        above: Run = self._handle(self._experiment, read.record(store.find(self._folder.path.parent, parent)))
        return above

    @property
    def status(self) -> str:
        """The state, looked up now: one of those in docs/runs.md."""
        return self.record().status

    @property
    def failure(self) -> FailureReport | None:
        """The report on why the run failed; None unless it did."""
        return self.record().failure

    @property
    def input_datasets(self) -> dict[str, Any]:
        """Name -> what the run found under it. In a worker the path of the folder, or the dataset where one was asked for
        directly; elsewhere what is kept with the run: sources, dataset and version, files, bytes, the
        fingerprint of their content.
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
        """Name -> in a worker the folder whose files are stored at the end; elsewhere what was stored, and where."""
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
        """Return what the script's environment was made of: as asked for, and, where it was built, with the exact versions."""
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
        """A new version of a model, of a file or a folder of this run: the `Model`.

        model_path: its name in the run, such as "outputs/model"; default: the model's name. tags: may be changed later;
        properties: may only be added to. model_framework, model_framework_version: else they are seen from the files and the
        run's environment. datasets: (purpose, dataset), where the run's inputs do not say it.

        In the run's own script it works where the run's folder is the workspace's, which is so on this machine and where a
        target shares it; on one rank alone, for each call makes a version.

        Args:
            model_name: Name of the model.
            description: Text for people.

        Raises:
            ModelError: a wrong name, no such file, something in the folder that is no file of the run's, or a process that
                sees a copy of the run's folder alone.
        """
        # Looked up on the class, for a function that is an attribute of an object would be given it.
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
        """The versions of models that came of this run, the newest first, as `Model`s."""
        found: list[Model] = Run.models_of(self._folder)
        return found

    def record(self) -> RunRecord:
        """The frozen record of the run as it is now."""
        return read.record(self._folder)

    def get_all_logs(self, destination: str | os.PathLike[str] | None = None) -> list[str]:
        """Copy the logs into a folder (default `./<run id>`); the paths written.

        Args:
            destination: Folder to copy them into; default: `./<run id>`.
        """
        top = Path(destination) if destination is not None else Path(self.id)
        names = [name for name in self.get_file_names() if name.startswith("logs/")]
        return [artifacts.get(self._folder, name, top / name) for name in names]

    def restore_snapshot(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the run's source, as it was submitted, into a new folder (default `./<snapshot id>`); its path.

        Raises:
            RunStateError: the run has no snapshot.
            UserError: the folder exists.
        """
        import shutil

        if not self._folder.snapshot.exists():
            raise RunStateError(f"run {self.id} has no snapshot.")
        target = Path(path) if path is not None else Path(str(self.record().snapshot_id))
        if target.exists():
            raise UserError(f"{str(target)!r} exists. Name a folder that does not.")
        # Links stay links, as in the snapshot.
        shutil.copytree(self._folder.snapshot.resolve(), target, symlinks=True)
        return str(target)

    # --- metrics

    @reads
    def get_metrics(
        self, name: str | None = None, recursive: bool = False, *, rank: int | None = None, by_rank: bool = False
    ) -> dict[str, Any]:
        """Metric name -> value: a scalar that was logged once, else a list, in order of time over all ranks.

        name: this metric alone. recursive: run id -> metrics, for this run and its children.
        rank: what this rank logged. by_rank: rank -> metrics.
        Where the run's folder is not shared with the machine that it runs on, what is new there is brought here first.
        """
        if recursive:
            runs = [self, *self.get_children(recursive=True)]
            return {run.id: run.get_metrics(name, rank=rank, by_rank=by_rank) for run in runs}
        if by_rank:
            return {str(key): value for key, value in metrics.read_by_rank(self._folder.metrics, name=name).items()}
        return metrics.read(self._folder.metrics, name=name, rank=rank)

    @overload
    def metrics(
        self,
        name: str,
        *,
        rank: int | Collection[int] | None = None,
        attempt: int | Collection[int] | None = None,
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
        """The series that was logged under `name`, however often: its `steps`, `values` and `times`, and `to_pandas()`; one
        that was not logged is empty. Without a name, metric name -> series. See `paceline.runs.series.MetricSeries`.

        rank: what this rank logged, or these: `rank=[0, 1]`. attempt: what this attempt logged, whole; of several, and
        of all by default, the series of a run that was never interrupted.

        Raises:
            UserError: a rank that the run does not have, or an attempt that it has not had.
        """
        if rank is not None or attempt is not None:
            # As it is written: size and number of attempts are there, and the folder was brought up to date before this call.
            record = store.stored(self._folder)
            _check_numbers("rank", rank, self._folder.ranks(record.world_size), self.id)
            _check_numbers("attempt", attempt, range(1, max(1, len(record.attempts)) + 1), self.id)
        found = series.read(self._folder.metrics, name=name, rank=rank, attempt=attempt)
        return found if name is None else found.get(name, series.MetricSeries(name=name))

    def _write_scalar(self, name: str, value: object, step: int | None) -> None:
        self._log().scalar(name, value, step)
        if (clock := step_clock.clock()) is not None:
            clock.tick(name)

    def _write_other(self, kind: str, name: str, value: object, step: int | None = None) -> None:
        self._log().other(kind, name, value, step)

    def _write_image(self, name: str, file_name: str, path: str | None, plot: Any, step: int | None = None) -> None:
        if path is not None:
            artifacts.put(self._folder, file_name, path)
        else:
            with tempfile.TemporaryDirectory(prefix="paceline-") as made:
                drawn = Path(made, "plot.png")
                plot.savefig(drawn, format="png")
                artifacts.put(self._folder, file_name, drawn)
        self._write_other("image", name, file_name, step)

    def _log(self) -> MetricLog:
        if self._metric_log is None:
            # A program that logs its own run is the only one, and counts as rank 0.
            # Its rank as it is now: a process that a script has started may have joined the others since get_context().
            worker = self._worker and (WorkerContext.from_environment() or self._worker)
            rank, attempt = (worker.rank, worker.attempt) if worker else (0, 1)
            self._metric_log = MetricLog(self._folder.metric_log(rank, attempt), attempt=attempt)
        return self._metric_log

    # --- waiting for it

    def wait_for_completion(self, show_output: bool = False, raise_on_error: bool = True) -> RunRecord:
        """Block until the run has ended; its record.

        show_output: print the workers' output and each change of state as they come. Ctrl-C only stops the waiting.

        Raises:
            RunFailedError: the run failed, unless raise_on_error=False; its text is the failure report.
        """
        try:
            record = stream(self._folder, sys.stdout, self._said) if show_output else _wait(self._folder)
        except KeyboardInterrupt:
            print(f"\nRun {self.id} goes on. Cancel it with: paceline cancel {self.id}", file=sys.stderr)
            raise
        if record.status == states.FAILED and raise_on_error:
            raise RunFailedError(f"Run {self.id} failed. {record.failure or ''}", record.failure)
        return record

    # --- beside it

    def exec(
        self, command: Sequence[str], rank: int = 0, input: bytes | str = b""
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command beside the worker of a rank: on its node, in its working folder and container, with its environment
        variables. How it ended, with what it has printed (`returncode`, `stdout`, `stderr`).

        input: for its standard input. It ends with the run.

        Raises:
            UserError: no command, or no such rank.
            RunStateError: the run does not run, or has ended before the command did.
        """
        from paceline.runs.execute import execute

        data = input.encode() if isinstance(input, str) else input
        return execute(self._folder, command, rank=rank, input=data)

    def stacks(self, *, native: bool = False) -> RunStacks:
        """Where each worker is at this moment: the stacks of all its threads, the collectives that it is in, and who waits for
        whom. The workers run on.

        native: frames of C and C++ too, by py-spy, which stops each process for some milliseconds.

        Raises:
            RunStateError: the run does not run, or its supervisor does not answer.
        """
        from paceline.observe.stacks import take

        return take(self._folder, native=native)

    def profile(self, *, seconds: float = 30.0, rate: float = 100.0) -> RunProfile:
        """Where the time of the workers goes: their stacks, sampled for so many seconds while they run on.

        rate: samples a second. By py-spy where it is installed and allowed on the nodes, else the main threads alone, by signal,
        20 times a second at most; `notes` says which. `save(path)` writes a file for https://www.speedscope.app.

        Raises:
            UserError: seconds not from 1 to 600, or rate not from 1 to 500.
            RunStateError: the run does not run, or its supervisor does not answer.
        """
        from paceline.observe.profile import take

        return take(self._folder, seconds=seconds, rate=rate)

    @reads
    def pace(self) -> RunPace:
        """How the time of each rank goes: seconds a step, and shares of it in computing, in waiting for data and in waiting for
        other ranks; and `straggler`, the ranks that hold up the others, None where none does for sure. Of the last attempt;
        without ranks where nothing is known yet, or nothing counts the script's steps (docs/when-it-is-slow.md).
        """
        from paceline.observe import loads

        return loads.pace(self._folder, store.stored(self._folder))

    @reads
    def resources(self) -> dict[str, dict[int, dict[str, series.MetricSeries]]]:
        """What nodes and workers took, sampled every 5 seconds: {"nodes": node's rank -> name -> series, "ranks": rank -> name ->
        series}. Names and units are in docs/when-it-is-slow.md; steps are seconds since 1970.
        """
        from paceline.observe import loads

        return loads.series(self._folder)

    # --- ending it

    def cancel(self) -> None:
        """Ask for the run's end: its workers get SIGTERM, after the grace period SIGKILL. Returns at once.

        A run that has ended stays as it is.
        """
        # The run is looked after by this very process, so there is nobody who could be asked.
        if interactive.is_ours(self._folder):
            interactive.end(self._folder, states.CANCELED)
        elif not self.record().is_terminal:
            read.request_cancel(self._folder, by=user_name())

    def delete(self, *, children: bool = False) -> None:
        """Remove the run for good: its record, logs, metrics, outputs and checkpoints. What it stored in datastores stays.

        children: remove the runs below it, too.

        Raises:
            RunStateError: it, or one below it, has not ended; or it has children, and children=False. Nothing is removed then.
        """
        below = [*self.get_children(recursive=True)]
        if below and not children:
            raise RunStateError(
                f"run {self.id} has {len(below)} child run{'s' if len(below) > 1 else ''}. delete(children=True) removes "
                f"{'them' if len(below) > 1 else 'it'} as well."
            )
        # All are looked at first: where one of them has not ended, all stay.
        for run in (*below, self):
            removal.check_removable(run.record())
        # From the youngest on, and this one last: a removal that breaks off leaves no child whose parent is gone.
        for run in (*below, self):
            removal.remove(run.folder)

    def start(self) -> None:
        """Begin a child made by `create_children`; harmless on a run that runs."""
        if interactive.is_ours(self._folder):
            interactive.begin(self._folder)

    def complete(self) -> None:
        """End a run of `start_logging` or `child_run` as Completed. On a submitted run, whose end is its script's, harmless."""
        interactive.end(self._folder, states.COMPLETED)

    def fail(self, error_details: object = None, error_code: str | None = None) -> None:
        """End a run of `start_logging` or `child_run` as Failed. A submitted run is asked to end, as by `cancel`, and is Failed
        then; in its own script this is harmless, for its end is the script's.

        error_details: a text or an exception. error_code: kept in front of it.
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

    # --- children

    def child_run(self, name: str | None = None, run_id: str | None = None, outputs: str | None = None) -> Self:
        """A new run below this one, Running, which this process logs and ends.

        Args:
            name: Name of the new run, for people.
            run_id: Id of the new run; default: a fresh one.
            outputs: Not used; the Azure SDK has it.
        """
        return self._child(name, run_id, begin=True)

    def create_children(
        self, count: int | None = None, tag_key: str | None = None, tag_values: list[object] | None = None
    ) -> list[Self]:
        """Several new runs below this one, NotStarted: `count` of them, tagged with their number, or one for each of
        `tag_values`, tagged `tag_key=value`.

        Raises:
            UserError: neither or both ways of saying how many.
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
        """The runs below this one, newest first; with recursive=True also those below them.

        Args:
            tags: Only runs with these tags: name -> value, or one name.
            properties: Only runs with these properties.
            kind: Only runs of this kind, such as "script".
            status: Only runs in this state, such as "Failed".
        """
        runs_dir = self._folder.path.parent
        parents = {self.id}
        records = [record for record in read.all_records(runs_dir) if record.parent_run_id]
        if recursive:
            # A record names its parent alone, so each generation is found by the one above it.
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
        """Submit an estimator or a job as a run below this one.

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
    # Short at first, for runs that take a second; in a long one nobody notices a quarter.
    pause = 0.02
    while not (record := read.record(folder)).is_terminal:
        time.sleep(pause)
        pause = min(pause * 1.2, 0.25)
    return record


def _check_numbers(what: str, given: object, there: range, run_id: str) -> None:
    """Refuse numbers of ranks or attempts that the run does not have."""
    if given is None:
        return
    for number in given if isinstance(given, Collection) and not isinstance(given, str) else (given,):
        # By the exact type, for True would pass for rank 1.
        if type(number) is not int or number not in there:
            has = f"{there[0]} to {there[-1]}" if len(there) > 1 else f"{there[0]} alone"
            raise UserError(f"{what}={given!r}: run {run_id} has {what} {has}. Give one of these, or a list of them.")


def _of_all_nodes(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Name -> what all nodes have of an input together: those of a partition add up, else each has the same."""
    together: dict[str, Any] = {}
    for one in found:
        known = together.setdefault(one["name"], dict(one))
        if one["node_rank"] != known["node_rank"] and one.get("partition"):
            known |= {name: known[name] + one[name] for name in ("files", "bytes", "fetched_bytes")}
    return together
