"""A run with the SDK's method names, details and AutoML metrics."""

from __future__ import annotations

import builtins
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, TypeAlias

import paceline
from paceline import runs
from paceline.compat.azureml.exceptions import (
    ExperimentExecutionException,
    RunEnvironmentException,
    UserErrorException,
    sdk_class,
)
from paceline.compat.azureml.offline import OfflineRun, SdkSpellings
from paceline.compat.azureml.records import late
from paceline.compat.azureml.run_details import DetailFields, check_not_failed, details_of, with_logs
from paceline.compat.azureml.stores import ARTIFACTS
from paceline.errors import RunNotFoundError, RunStateError
from paceline.runs import copy_out, files_below, image_source, page_of, plain_file_name

if TYPE_CHECKING:
    from paceline.compat.azureml.data.data_reference import DataPath
    from paceline.data import DataReference

    #: Tags to search for: a mapping from names to values, or only a name.
    Tags: TypeAlias = Mapping[str, str] | str | None

#: Kind of a run in Paceline -> type of a run in the SDK.
TYPES = {"script": "azureml.scriptrun", "sweep": "hyperdrive", "pipeline": "azureml.PipelineRun", "interactive": "run"}
#: Pattern of the SDK's names of log files -> name of Paceline's log file, with the rank in place of {}.
_LOGS = (
    (r"azureml-logs/70_driver_log_(?:worker_|rank_)?0*(\d+)\.txt", "logs/rank_{}.log"),
    (r"user_logs/std_log_process_0*(\d+)\.txt", "logs/rank_{}.log"),
    (r"azureml-logs/(?:(?:20|55|65|75)_\w[\w.-]*|hyperdrive)\.txt", "logs/driver.log"),
    (r"azureml-logs/\d\d_\w[\w.-]*\.txt|user_logs/std_log\.txt|(?:logs/azureml/)?azureml\.log", "logs/rank_0.log"),
)


#: A script outside of a run gets an object of this class from `get_context`. Scripts compare the class with this name.
_OfflineRun = OfflineRun


@sdk_class
class Run(SdkSpellings, runs.Run):
    """A run of Paceline with all methods of the SDK's class.

    Raises:
        ExperimentNotFoundException: The experiment's workspace has no such run.
    """

    offline_class: ClassVar[type[runs.OfflineRun]] = OfflineRun
    kinds: ClassVar[dict[str, Callable[[], builtins.type[runs.Run]]]] = {
        "sweep": lambda: late("train.hyperdrive.run", "HyperDriveRun"),
        "pipeline": lambda: late("pipeline.core.run", "PipelineRun"),
    }

    def __init__(
        self, experiment: runs.ExperimentLike, run_id: str, outputs: str | None = None, **others: object
    ) -> None:
        super().__init__(experiment, run_id)

    @staticmethod
    def make_experiment(runs_dir: Path, name: str) -> runs.ExperimentLike:
        # Import core.experiment late, because it imports this module, and because most scripts don't need it.
        made: runs.ExperimentLike = late("core.experiment", "make_experiment")(runs_dir, name)
        return made

    @staticmethod
    def open_dataset(reference: DataReference, path: str) -> object:
        found = runs.Run.open_dataset(reference, path)
        return found if isinstance(found, str) else late("data.tabular_dataset", "of_native")(found)

    @classmethod
    def get_context(cls, allow_offline: bool = True, used_for_context_manager: bool = False, **others: object) -> Any:
        """Return this process's run. Outside a run, return an OfflineRun or raise an error."""
        try:
            return super().get_context(allow_offline)
        except RunStateError as error:
            raise RunEnvironmentException(
                f"Could not load a submitted run, if outside of an execution context, use experiment.start_logging to initialize "
                f"an azureml.core.Run. ({error})"
            ) from error

    #: Older name of `get_context`, from 2018.
    get_submitted_run = get_context

    def __str__(self) -> str:
        record = self.record()
        return (
            f"Run(Experiment: {record.experiment},\nId: {record.run_id},\nType: {self.type},\nStatus: {record.status})"
        )

    __repr__ = __str__

    # --- metrics of the run

    def log_image(
        self, name: str, path: object = None, plot: object = None, description: str = "", step: int | None = None
    ) -> None:
        """Log an image. The metric's value is the SDK's address, `aml://artifactId/ExperimentRun/dcid.<run>/<file>`."""
        if (path is None) == (plot is None):
            raise UserErrorException("log_image takes either path= or plot=.")
        source = image_source(name, path, plot)
        default = f"{plain_file_name(name)}_{int(time.time())}.png"
        file = os.path.basename(source) if isinstance(source, str) else default
        taken = set(super().get_file_names())
        while file in taken:
            stem, ending = os.path.splitext(file)
            file = f"{stem}_{time.time_ns()}{ending}"
        self._write_file("image", name, file, source, step)

    def _write_other(self, kind: str, name: str, value: object, step: int | None = None) -> None:
        if kind == "image":
            value = f"aml://artifactId/ExperimentRun/dcid.{self.id}/{value}"
        super()._write_other(kind, name, value, step)

    def get_metrics(
        self,
        name: str | None = None,
        recursive: bool = False,
        run_type: object = None,
        populate: bool = False,
        **others: Any,
    ) -> dict[str, Any]:
        """Return the metrics by name.

        The metrics of a sweep include `best_child_by_primary_metric`: which trial was the best, and when.
        """
        found: dict[str, object] = super().get_metrics(name, recursive, **others)
        if self.kind == "sweep" and not recursive:
            # A sweep that was opened by its id has this class instead of HyperDriveRun. Add the metric of the best child here.
            found |= late("train.hyperdrive.run", "best_child_metric")(self, name)
        return found

    # --- files of the run

    def upload_file(
        self, name: str, path_or_stream: str | os.PathLike[str] | IO[bytes], datastore_name: str | None = None
    ) -> str:
        """Upload a file to the run. `datastore_name` has no effect."""
        return super().upload_file(name, path_or_stream)

    def upload_files(  # type: ignore[override]
        self,
        names: builtins.list[str],
        paths: builtins.list[str],
        return_artifacts: bool = False,
        timeout_seconds: float | None = None,
        datastore_name: str | None = None,
    ) -> builtins.list[str]:
        return super().upload_files(names, paths)

    def upload_folder(  # type: ignore[override]
        self, name: str, path: str, datastore_name: str | None = None
    ) -> builtins.list[str]:
        return super().upload_folder(name, path)

    def get_file_names(self) -> builtins.list[str]:
        """Return the names of the run's outputs, logs, uploads and files in `./logs`."""
        return sorted({*super().get_file_names(), *self._script_logs()})

    def download_file(  # type: ignore[override]
        self, name: str, output_file_path: str | os.PathLike[str] | None = None, _validate_checksum: bool = False
    ) -> None:
        """Copy a file of the run to a path or into a folder.

        By default the file is copied into the working directory. The SDK's names of logs refer to Paceline's logs:
        `azureml-logs/70_driver_log.txt` means `logs/rank_0.log`.

        Raises:
            UserErrorException: The run has no such file.
        """
        target = os.fspath(output_file_path) if output_file_path is not None else os.path.basename(name)
        if target.endswith("/") or os.path.isdir(target):
            target = os.path.join(target, os.path.basename(name))
        try:
            real = self._real_name(name)
            place = self._script_logs().get(real) if real.startswith("logs/") else None
            if place is None or real in super().get_file_names():
                super().download_file(real, target)
            else:
                copy_out(self.folder, place, Path(target))
        except RunNotFoundError as error:
            raise UserErrorException(f"File with path {name} was not found: {error}") from error

    def download_files(  # type: ignore[override]
        self,
        prefix: str | None = None,
        output_directory: str | None = None,
        output_paths: builtins.list[str] | None = None,
        batch_size: int = 100,
        append_prefix: bool = True,
        timeout_seconds: float | None = None,
        **others: object,
    ) -> None:
        """Copy files whose names begin with `prefix`. append_prefix=False removes the prefix from the copies' names."""
        names = [name for name in self.get_file_names() if name.startswith(prefix or "")]
        for number, name in enumerate(names):
            inside = name if append_prefix or not prefix else name[len(prefix) :].lstrip("/")
            target = output_paths[number] if output_paths else os.path.join(output_directory or ".", inside)
            self.download_file(name, target)

    def _real_name(self, name: str) -> str:
        matches = ((re.fullmatch(pattern, name), real) for pattern, real in _LOGS)
        real = next((real.format(*match.groups()) for match, real in matches if match), name)
        return name if real == name or name in self.get_file_names() else real

    def _script_logs(self) -> dict[str, Path]:
        """Return the files in the script's `./logs`, by name."""
        top = f"{self.folder.work.name}/logs"
        if os.path.islink(self.folder.path / top):
            return {}
        return {name.partition("/")[2]: path for name, path in files_below(self.folder, top)}

    def _get_outputs_datapath(self) -> DataPath:
        """Return a DataPath of the run's outputs, from which another run can continue."""
        store = late("core.datastore", "Datastore")(self._workspace(), ARTIFACTS)
        place: DataPath = late("data.data_reference", "DataPath")(store, f"ExperimentRun/dcid.{self.id}/outputs")
        return place

    def restore_snapshot(self, snapshot_id: str | None = None, path: str | None = None) -> str:  # type: ignore[override]
        """Write the run's source to `<path>/<snapshot id>.zip`, and return that path.

        Raises:
            UserErrorException: The run has no snapshot of this id.
        """
        own = self.record().snapshot_id
        if own is None or (snapshot_id is not None and snapshot_id != own):
            raise UserErrorException(f"run {self.id} has no snapshot{f' {snapshot_id}' if snapshot_id else ''}.")
        folder = os.path.abspath(path or tempfile.gettempdir())
        os.makedirs(folder, exist_ok=True)
        archive = os.path.join(folder, f"{own}.zip")
        # Build the archive in a private folder first: in a shared folder, another user may have created a link of this name.
        with tempfile.TemporaryDirectory(dir=folder) as made:
            whole = shutil.make_archive(os.path.join(made, own), "zip", self.folder.snapshot.resolve())
            try:
                os.replace(whole, archive)
            except PermissionError as error:
                raise UserErrorException(
                    f"{archive!r} belongs to another user. Give another folder: path=..."
                ) from error
        return archive

    def take_snapshot(self, path: str, _raise_on_validation_failure: bool = True) -> str:
        """Store a copy of a folder in the workspace and return its id."""
        from paceline.submit import snapshot_folder

        return snapshot_folder(Path(path), self.folder.path.parents[1])

    # --- secrets and models of the run

    def get_secret(self, name: str) -> str | None:
        return self.get_secrets([name])[name]

    def get_secrets(self, secrets: builtins.list[str]) -> dict[str, str | None]:
        found: dict[str, str | None] = late("core.keyvault", "Keyvault")(self._workspace()).get_secrets(secrets)
        return found

    def _workspace(self) -> paceline.Workspace:
        found: paceline.Workspace = self.experiment.workspace  # type: ignore[attr-defined]
        return found

    def register_model(  # type: ignore[override]
        self,
        model_name: str,
        model_path: str | None = None,
        tags: object = None,
        properties: object = None,
        model_framework: str | None = None,
        model_framework_version: str | None = None,
        description: str | None = None,
        datasets: object = None,
        sample_input_dataset: object = None,
        sample_output_dataset: object = None,
        resource_configuration: object = None,
        **others: object,
    ) -> paceline.Model:
        """Register a run's file or folder as a model's next version.

        Return the model. `model_path` is relative to the run: `outputs/model.pkl` or `./outputs/model.pkl`.

        Raises:
            ModelPathNotFoundException: The run has no such file.
            WebserviceException: The name is not valid.
        """
        made: paceline.Model = late("core.model", "registered_of_run")(
            self,
            model_name,
            model_path,
            tags=dict(tags) if isinstance(tags, Mapping) else None,
            properties=properties,
            model_framework=model_framework,
            model_framework_version=model_framework_version,
            description=description,
            datasets=datasets,
        )
        return made

    def get_environment(self) -> Any:
        job = self.record().job
        return late("core.environment", "environment_of")(self._workspace(), job and job.environment)

    def clean(self) -> None:
        """Do nothing: a run leaves no files outside its folder."""

    # --- end of the run

    def cancel(self) -> None:
        """Cancel the run. In the run's own script, only print a message as the SDK does."""
        if self._worker is not None and self.kind != "interactive":
            logging.getLogger("paceline.azureml").warning(
                "cancel() does nothing in the run's own script: end it with sys.exit(), or cancel it from the driver."
            )
            return
        super().cancel()

    @classmethod
    def list(
        cls,
        experiment: paceline.Experiment,
        type: str | None = None,
        tags: Tags = None,
        properties: Mapping[str, str] | None = None,
        status: str | None = None,
        include_children: bool = False,
    ) -> Iterator[Run]:
        """Yield the experiment's runs with this type, tags, properties and status, newest first."""
        found = experiment.get_runs(type, tags, properties, include_children, status=status)
        # If `cls` is a subclass of Run, return runs of this subclass.
        return (cls(experiment, one.id) for one in found)

    def get_children(  # parameters have the SDK's names, such as `type` instead of `kind`
        self,
        recursive: bool = False,
        tags: Tags = None,
        properties: Mapping[str, str] | None = None,
        type: str | None = None,
        status: str | None = None,
    ) -> Iterator[Run]:
        return super().get_children(recursive, tags, properties, type, status)

    @property
    def type(self) -> str:
        """The SDK's name of the run's kind, such as "azureml.scriptrun"."""
        return TYPES.get(self.kind, self.kind)

    def get_detailed_status(self) -> dict[str, str]:
        """Return a dict with "status", and "details": why the run waits or failed."""
        record = self.record()
        why = record.waiting_for or (record.failure.message if record.failure else "")
        return {"status": record.status, "details": why}

    def get_details(self) -> DetailFields:
        return details_of(
            self.record(),
            self._workspace(),
            self.get_properties(),
            self._data("inputs"),
            self._data("outputs"),
            {f"logs/{path.name}": str(path) for path in sorted(self.folder.logs.glob("*.log"))},
        )

    def get_details_with_logs(self) -> DetailFields:
        """Return `get_details()` with the logs' last MiB instead of their paths."""
        return with_logs(self.get_details())

    def get_portal_url(self) -> str:
        """Return the URL of the run's page while `paceline ui` runs, else of its folder."""
        page = page_of(self.folder.path.parents[1])
        return f"{page}/runs/{self.id}" if page else self.folder.path.absolute().as_uri()

    def get_snapshot_id(self) -> str | None:
        return self.record().snapshot_id

    def wait_for_completion(  # type: ignore[override]  # the SDK's details in place of a record
        self, show_output: bool = False, wait_post_processing: bool = False, raise_on_error: bool = True
    ) -> DetailFields:
        """Wait until the run ends and its outputs are stored. Return its details."""
        if runs.is_ours(self.folder):
            # A script must not wait for its own run, because this wait would never end.
            return self.get_details()
        if show_output:
            print(f"RunId: {self.id}\nWeb View: {self.get_portal_url()}\n", flush=True)
        try:
            record = super().wait_for_completion(show_output, raise_on_error=False)
        except KeyboardInterrupt:
            raise ExperimentExecutionException(
                "The output streaming for the run interrupted.\nBut the run is still executing on the compute target. \n"
                f"Details for canceling the run: paceline cancel {self.id}"
            ) from None
        if show_output:
            title = "\nExecution Summary\n================="
            print(f"{title}\nRunId: {self.id}\nWeb View: {self.get_portal_url()}\n", flush=True)
        if raise_on_error:
            check_not_failed(record)
        return self.get_details()


class ScriptRun(Run):
    """A run of a script, returned by `Experiment.submit`."""


#: In a run, `get_context` returns an object of this class, outside of a run an `_OfflineRun`. Scripts compare the class's name.
_SubmittedRun = Run


def get_run(experiment: paceline.Experiment, run_id: str, rehydrate: bool = True, clean_up: bool = True) -> runs.Run:
    return Run.get(experiment.workspace, run_id)
