"""A run with the SDK's method names, details and AutoML metrics."""

from __future__ import annotations

import builtins
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from paceline import runs
from paceline.compat.azureml._restclient.constants import RunStatus
from paceline.compat.azureml.data import outputs
from paceline.compat.azureml.exceptions import (
    ActivityFailedException,
    ExperimentExecutionException,
    RunEnvironmentException,
    UserErrorException,
    sdk_class,
)
from paceline.compat.azureml.records import late
from paceline.compat.azureml.stores import ARTIFACTS
from paceline.errors import MetricError, RunNotFoundError, RunStateError
from paceline.runs import LogsMetrics, copy_out, files_below, page_of, plain_file_name

if TYPE_CHECKING:
    from paceline.data import DataReference
    from paceline.runs import RunRecord

#: Kind of a run -> type in the SDK.
TYPES = {"script": "azureml.scriptrun", "sweep": "hyperdrive", "pipeline": "azureml.PipelineRun", "interactive": "run"}
#: The SDK's name for an environment without a name.
_UNNAMED = "default-environment"
#: `get_details_with_logs` returns at most this much of each log, so that a log of gigabytes does not fill the memory.
_TAIL_BYTES = 1 << 20


class SdkSpellings(LogsMetrics):
    """SDK methods that submitted runs and OfflineRun share.

    The subclasses define `status`, `tags` and `properties`.
    """

    status: Any
    tags: Any
    properties: Any

    def get_status(self) -> str:
        """Return the status: a state of `paceline.runs.states`, such as "Queued"."""
        return str(self.status)

    def get_tags(self) -> dict[str, str | None]:
        """Return the tags."""
        return dict(self.tags)

    def get_properties(self) -> dict[str, str]:
        """Return the properties."""
        return dict(self.properties)

    def flush(self, timeout_seconds: float = 300) -> None:
        """Do nothing: each call writes its value before it returns."""

    def log_confusion_matrix(self, name: str, value: object, description: str = "") -> None:
        """Log a confusion matrix: a dict, or its JSON.

        Raises:
            MetricError: The value is neither a dict nor JSON. The three methods below raise it as well.
        """
        # The SDK stores the description beside the chart. Here, and in the three methods below, it is ignored.
        self._write_other("confusion_matrix", name, _json_value(name, value))

    def log_accuracy_table(self, name: str, value: object, description: str = "") -> None:
        """Log an accuracy table: a dict, or its JSON."""
        self._write_other("accuracy_table", name, _json_value(name, value))

    def log_residuals(self, name: str, value: object, description: str = "") -> None:
        """Log residuals: a dict, or its JSON."""
        self._write_other("residuals", name, _json_value(name, value))

    def log_predictions(self, name: str, value: object, description: str = "") -> None:
        """Log predictions: a dict, or its JSON."""
        self._write_other("predictions", name, _json_value(name, value))


class OfflineRun(SdkSpellings, runs.OfflineRun):
    """The result of `Run.get_context()` outside a run.

    Scripts test `hasattr(run, "experiment")` to see whether they are in a run.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        del self.experiment, self.input_datasets, self.output_datasets

    def child_run(self, name: str | None = None, run_id: str | None = None, outputs: str | None = None) -> OfflineRun:
        """Return another OfflineRun, whose id is this id plus the name."""
        made = super().child_run(name)
        if name or run_id:
            made.id = run_id or f"{self.id}.{name}"
        return made

    def upload_file(self, name: str, path_or_stream: object, datastore_name: str | None = None) -> str:
        """Print the name of the file that a run would upload."""
        return super().upload_file(name, path_or_stream)

    def get_environment(self) -> None:
        """Return None."""

    def get_file_names(self) -> builtins.list[str]:
        """Return an empty list: an OfflineRun stores no files."""
        return []


#: Scripts use this name to see whether they are in a run.
_OfflineRun = OfflineRun

#: Names of the log across the SDK's versions; all refer to the log of rank 0.
_FIRST_LOG = (
    "azureml-logs/70_driver_log.txt",
    "azureml-logs/80_driver_log.txt",
    "azureml-logs/60_control_log.txt",
    "azureml-logs/70_mpi_log.txt",
    "azureml-logs/hyperdrive.txt",
    "user_logs/std_log.txt",
    "logs/azureml/azureml.log",
    "azureml.log",
)
#: Numbered logs: preparation, image build, messages about the run, and the script's output.
_NUMBERED_LOG = re.compile(r"azureml-logs/(\d\d)_\w[\w.-]*\.txt")
_PREPARED = ("20", "55", "65", "75")
_RANK_LOG = re.compile(r"(?:azureml-logs/70_driver_log_(?:worker_|rank_)?(\d+)|user_logs/std_log_process_0*(\d+))\.txt")


@sdk_class
class Run(SdkSpellings, runs.Run):
    """A run of Paceline's with the SDK's other methods.

    Raises:
        ExperimentNotFoundException: The experiment's workspace has no such run.
    """

    offline_class: ClassVar[type[runs.OfflineRun]] = OfflineRun
    kinds: ClassVar[dict[str, Callable[[], builtins.type[runs.Run]]]] = {
        "sweep": lambda: late("train.hyperdrive.run", "HyperDriveRun"),
        "pipeline": lambda: late("pipeline.core.run", "PipelineRun"),
    }

    def __init__(self, experiment: Any, run_id: str, outputs: str | None = None, **others: object) -> None:
        super().__init__(experiment, run_id)

    @staticmethod
    def make_experiment(runs_dir: Path, name: str) -> Any:
        """Return the experiment of a run."""
        # That module imports this one, and most scripts need only this one.
        return late("core.experiment", "make_experiment")(runs_dir, name)

    @staticmethod
    def open_dataset(reference: DataReference, path: str) -> object:
        """Return the object that a script receives for an input name."""
        found = runs.Run.open_dataset(reference, path)
        return found if isinstance(found, str) else late("data.tabular_dataset", "of_native")(found)

    @classmethod
    def get_context(cls, allow_offline: bool = True, used_for_context_manager: bool = False, **others: object) -> Any:
        """Return the run of this process, or an OfflineRun outside a run.

        Raises:
            RunEnvironmentException: The process is outside a run and allow_offline=False.
        """
        try:
            return super().get_context(allow_offline)
        except RunStateError as error:
            raise RunEnvironmentException(
                f"Could not load a submitted run, if outside of an execution context, use experiment.start_logging to initialize "
                f"an azureml.core.Run. ({error})"
            ) from error

    @classmethod
    def get_submitted_run(cls, **others: object) -> Any:
        """Return `get_context()`, under its name of 2018."""
        return cls.get_context()

    def __str__(self) -> str:
        record = self.record()
        return (
            f"Run(Experiment: {record.experiment},\nId: {record.run_id},\nType: {self.type},\nStatus: {record.status})"
        )

    __repr__ = __str__

    # --- metrics

    def log_image(
        self, name: str, path: object = None, plot: object = None, description: str = "", step: int | None = None
    ) -> None:
        """Log an image.

        The metric's value is the SDK's address of the image, `aml://artifactId/ExperimentRun/dcid.<run>/<file>`.
        """
        if (path is None) == (plot is None):
            raise UserErrorException("log_image takes either path= or plot=.")
        path, plot = self._image(name, path, plot)
        file = os.path.basename(path) if path is not None else f"{plain_file_name(name)}_{int(time.time())}.png"
        taken = set(super().get_file_names())
        while file in taken:
            stem, ending = os.path.splitext(file)
            file = f"{stem}_{time.time_ns()}{ending}"
        self._write_image(name, file, path, plot, step)

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
        """Return the metrics, as `paceline.Run.get_metrics` does.

        The metrics of a sweep include which trial was the best, and when.
        """
        found: dict[str, object] = super().get_metrics(name, recursive, **others)
        if self.kind == "sweep" and not recursive:
            # A run of this class may be a sweep if the caller created it by id.
            found |= late("train.hyperdrive.run", "best_child_metric")(self, name)
        return found

    # --- files

    def upload_file(self, name: str, path_or_stream: Any, datastore_name: str | None = None) -> str:
        """Upload a file, as `paceline.Run.upload_file` does.

        `datastore_name` is accepted; the file stays with the run.
        """
        return super().upload_file(name, path_or_stream)

    def upload_files(  # type: ignore[override]
        self,
        names: builtins.list[str],
        paths: builtins.list[str],
        return_artifacts: bool = False,
        timeout_seconds: float | None = None,
        datastore_name: str | None = None,
    ) -> builtins.list[str]:
        """Upload files, as `paceline.Run.upload_files` does."""
        return super().upload_files(names, paths)

    def upload_folder(  # type: ignore[override]
        self, name: str, path: str, datastore_name: str | None = None
    ) -> builtins.list[str]:
        """Upload a folder, as `paceline.Run.upload_folder` does."""
        return super().upload_folder(name, path)

    def get_file_names(self) -> builtins.list[str]:
        """Return the names of the run's files.

        They include outputs, logs, the script's own files in `./logs`, and uploads.
        """
        return sorted({*super().get_file_names(), *self._script_logs()})

    def get_all_logs(self, destination: str | os.PathLike[str] | None = None) -> builtins.list[str]:
        """Copy all logs into a folder and return their paths.

        They include the script's own logs. The default folder is `./<run id>`.
        """
        top = Path(destination) if destination is not None else Path(self.id)
        names = [name for name in self.get_file_names() if name.startswith("logs/")]
        for name in names:
            self.download_file(name, str(top / name))
        return [str(top / name) for name in names]

    def download_file(  # type: ignore[override]
        self, name: str, output_file_path: str | None = None, _validate_checksum: bool = False
    ) -> None:
        """Copy a file of the run to a path or into a folder.

        By default it goes into the working directory. The SDK's names of logs refer to Paceline's:
        `azureml-logs/70_driver_log.txt` is `logs/rank_0.log`.

        Raises:
            UserErrorException: The run has no such file.
        """
        target: Any = output_file_path if output_file_path is not None else os.path.basename(name)
        if str(target).endswith("/") or os.path.isdir(target):
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
        """Copy all files whose names begin with `prefix` into a folder.

        With append_prefix=False the copies' names lack the prefix.
        """
        names = [name for name in self.get_file_names() if name.startswith(prefix or "")]
        for number, name in enumerate(names):
            inside = name if append_prefix or not prefix else name[len(prefix) :].lstrip("/")
            target = output_paths[number] if output_paths else os.path.join(output_directory or ".", inside)
            self.download_file(name, target)

    def _real_name(self, name: str) -> str:
        if name in _FIRST_LOG and name not in self.get_file_names():
            return "logs/driver.log" if name.endswith("hyperdrive.txt") else "logs/rank_0.log"
        if (match := _RANK_LOG.fullmatch(name)) is not None:
            return f"logs/rank_{int(match[1] or match[2])}.log"
        if (match := _NUMBERED_LOG.fullmatch(name)) is not None:
            return "logs/driver.log" if match[1] in _PREPARED else "logs/rank_0.log"
        return name

    def _script_logs(self) -> dict[str, Path]:
        """Return the files of the script's `./logs`: name -> path.

        The SDK stores these files as well.
        """
        top = f"{self.folder.work.name}/logs"
        if os.path.islink(self.folder.path / top):
            return {}
        return {name.partition("/")[2]: path for name, path in files_below(self.folder, top)}

    def _get_outputs_datapath(self) -> Any:
        """Return a DataPath of the run's outputs, for a run that continues them."""
        store = late("core.datastore", "Datastore")(self._workspace(), ARTIFACTS)
        return late("data.data_reference", "DataPath")(store, f"ExperimentRun/dcid.{self.id}/outputs")

    def restore_snapshot(self, snapshot_id: str | None = None, path: str | None = None) -> str:  # type: ignore[override]
        """Write the run's source as `<path>/<snapshot id>.zip` and return its path.

        The default path is the system's temporary folder.

        Raises:
            UserErrorException: The run has no snapshot of this id.
        """
        own = self.record().snapshot_id
        if own is None or (snapshot_id is not None and snapshot_id != own):
            raise UserErrorException(f"run {self.id} has no snapshot{f' {snapshot_id}' if snapshot_id else ''}.")
        folder = os.path.abspath(path or tempfile.gettempdir())
        os.makedirs(folder, exist_ok=True)
        archive = os.path.join(folder, f"{own}.zip")
        # Build it in a private folder first: in a shared folder another user may have planted a link.
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

    # --- secrets and models

    def get_secret(self, name: str) -> str | None:
        """Return a secret of the workspace."""
        return self._workspace().get_default_keyvault().get_secret(name)  # type: ignore[no-any-return]

    def get_secrets(self, secrets: builtins.list[str]) -> dict[str, str | None]:
        """Return secrets of the workspace by name."""
        return self._workspace().get_default_keyvault().get_secrets(secrets)  # type: ignore[no-any-return]

    def _workspace(self) -> Any:
        return self.experiment.workspace  # type: ignore[attr-defined]

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
    ) -> Any:
        """Register a file or folder of the run as a model's next version.

        `model_path` is relative to the run: `outputs/model.pkl` or `./outputs/model.pkl`.

        Raises:
            ModelPathNotFoundException: The run has no such file.
            WebserviceException: The name is not valid.
        """
        return late("core.model", "registered_of_run")(
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

    def get_environment(self) -> Any:
        """Return the `Environment` that the run was submitted with."""
        from paceline.compat.azureml.core.environment import Environment
        from paceline.compat.azureml.curated import is_curated

        job = self.record().job
        spec = job.environment if job is not None else None
        name = (spec.name if spec else None) or _UNNAMED
        if spec is not None and (spec.version or is_curated(name)):
            try:
                return Environment.get(self._workspace(), name, str(spec.version) if spec.version else None)
            except UserErrorException:
                pass  # the registration has been removed
        made = Environment(name)
        if spec is not None:
            made.environment_variables = dict(spec.environment_variables)
            if made.python.conda_dependencies is not None:
                lines = [*(spec.pip_requirements or "").splitlines(), *spec.pip_packages]
                made.python.conda_dependencies.set_pip_requirements(lines)
            made.docker.base_image = spec.docker_image
        return made

    def clean(self) -> None:
        """Do nothing: a run leaves no files outside its folder."""

    # --- end

    def cancel(self) -> None:
        """Cancel the run.

        In the run's own script this only prints a message, as in the SDK.
        """
        if self._worker is not None and self.kind != "interactive":
            logging.getLogger("paceline.azureml").warning(
                "cancel() does nothing in the run's own script: end it with sys.exit(), or cancel it from the driver."
            )
            return
        super().cancel()

    def submit_child(self, config: object, tags: Mapping[str, object] | None = None, **overrides: object) -> Any:
        """Submit a child of this run."""
        return self.experiment.submit(config, tags=tags, parent_run_id=self.id, **overrides)

    @classmethod
    def list(
        cls,
        experiment: Any,
        type: str | None = None,
        tags: Mapping[str, str] | str | None = None,
        properties: Mapping[str, str] | None = None,
        status: str | None = None,
        include_children: bool = False,
    ) -> Iterator[Any]:
        """Yield the matching runs of the experiment, newest first."""
        found = experiment.get_runs(type, tags, properties, include_children, status=status)
        # Create each as `cls`, so a subclass of Run lists runs of that subclass.
        return (cls(experiment, one.id) for one in found)

    def get_children(  # the SDK's names, `type` in place of `kind`
        self,
        recursive: bool = False,
        tags: Mapping[str, str] | str | None = None,
        properties: Mapping[str, str] | None = None,
        type: str | None = None,
        status: str | None = None,
    ) -> Iterator[Run]:
        """Yield the children, as `paceline.Run.get_children` does."""
        return super().get_children(recursive, tags, properties, type, status)

    @property
    def type(self) -> str:
        """The SDK's name of the kind: "azureml.scriptrun", "hyperdrive" or "run".

        "run" is a run that logs from an ordinary program.
        """
        return TYPES.get(self.kind, self.kind)

    def get_detailed_status(self) -> dict[str, Any]:
        """Return the status and its details.

        The details say what the run waits for, or why it failed.
        """
        record = self.record()
        return {
            "status": record.status,
            "details": record.waiting_for or (record.failure.message if record.failure else ""),
        }

    def get_details(self) -> dict[str, Any]:
        """Return the SDK's dict of details.

        Its keys are runId, target, status, startTimeUtc, endTimeUtc, properties, inputDatasets, outputDatasets,
        runDefinition, logFiles (name -> path) and submittedBy. A failed run adds error; a failed run or a run with
        warnings adds warnings.
        """
        record = self.record()
        properties: dict[str, object] = dict(self.get_properties())
        if record.snapshot_id:
            properties["ContentSnapshotId"] = record.snapshot_id
        # The SDK stores the source's git data under these property names.
        properties |= {f"azureml.git.{key}": value for key, value in record.git.items()}
        details: dict[str, object] = {
            "runId": record.run_id,
            "target": record.target,
            "status": record.status,
            "startTimeUtc": record.started_utc,
            "endTimeUtc": record.ended_utc,
            "properties": properties,
            "inputDatasets": self._data("inputs"),
            "outputDatasets": outputs.details(self, record),
            "runDefinition": _definition(record.job) if record.job else {},
            "logFiles": {f"logs/{path.name}": str(path) for path in sorted(self.folder.logs.glob("*.log"))},
            "submittedBy": record.submitted_by,
        }
        if record.failure is not None:
            details["error"] = {"error": {"code": record.failure.cause, "message": str(record.failure)}}
        if record.failure is not None or record.warnings:
            details["warnings"] = [{"source": "paceline", "message": warning} for warning in record.warnings]
        return details

    def get_details_with_logs(self) -> dict[str, Any]:
        """Return `get_details()` with the logs' last MiB instead of their paths."""
        details = self.get_details()
        details["logFiles"] = {name: _tail_text(path) for name, path in details["logFiles"].items()}
        return details

    def get_portal_url(self) -> str:
        """Return the URL of the run's page, or of its folder.

        The page exists while `paceline ui` runs.
        """
        page = page_of(self.folder.path.parents[1])
        return f"{page}/runs/{self.id}" if page else self.folder.path.absolute().as_uri()

    def get_snapshot_id(self) -> str | None:
        """Return the id of the run's source snapshot, or None."""
        return self.record().snapshot_id

    def wait_for_completion(  # type: ignore[override]  # the SDK's details in place of a record
        self, show_output: bool = False, wait_post_processing: bool = False, raise_on_error: bool = True
    ) -> dict[str, Any]:
        """Wait until the run ends, and return its details.

        `wait_post_processing` is accepted: a run ends only when its outputs are stored.
        """
        if runs.is_ours(self.folder):
            # This program would wait for its own end.
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
            print(
                f"\nExecution Summary\n=================\nRunId: {self.id}\nWeb View: {self.get_portal_url()}\n",
                flush=True,
            )
        if raise_on_error:
            check_not_failed(record)
        return self.get_details()


class ScriptRun(Run):
    """A run of a script, returned by `Experiment.submit`."""


#: Scripts use this name to see whether they are in a run; outside a run they have an `_OfflineRun`.
_SubmittedRun = Run


def get_run(experiment: Any, run_id: str, rehydrate: bool = True, clean_up: bool = True) -> Any:
    """Return the run of this id in the class of its kind."""
    return Run.get(experiment.workspace, run_id)


def check_not_failed(record: RunRecord) -> None:
    """Raise if the run has failed.

    Raises:
        ActivityFailedException: The run has failed. The message is JSON.
    """
    if record.status == RunStatus.FAILED:
        report = record.failure
        error = {"code": report.cause if report else "Failed", "message": str(report or "The run failed.")}
        raise ActivityFailedException(json.dumps({"error": error}, indent=4))


def _definition(job: Any) -> dict[str, object]:
    """Return the job as the SDK's runDefinition."""
    shown = job.shown()
    return {
        "script": job.entry_script or job.entry_module,
        "command": "",
        "arguments": builtins.list(job.arguments),
        "target": job.compute_target,
        "framework": {"pytorch": "PyTorch", "tensorflow": "TensorFlow"}.get(job.framework or "", "Python"),
        "communicator": {"mpi": "IntelMpi", "ps": "ParameterServer", None: "None"}.get(
            job.distributed_backend, str(job.distributed_backend).capitalize()
        ),
        "nodeCount": job.node_count,
        "maxRunDurationSeconds": job.max_run_duration_seconds,
        "environmentVariables": shown["environment_variables"],
        "environment": {
            "name": job.environment.name or _UNNAMED,
            "version": str(job.environment.version) if job.environment.version else None,
        }
        | {"python": shown["environment"], "docker": {"baseImage": job.environment.docker_image}},
        "dataReferences": {one.name: one.to_json() for one in job.inputs},
        "data": {one.name: one.to_json() for one in job.inputs if one.dataset},
        "mpi": {"processCountPerNode": job.process_count_per_node},
    }


def _json_value(name: str, value: object) -> object:
    try:
        # Parse a string as JSON. Convert any other value to JSON and back, which rejects values that JSON can't
        # represent.
        plain = json.loads(value if isinstance(value, (str, bytes)) else json.dumps(value))
    except (TypeError, ValueError) as error:
        raise MetricError(f"metric {name!r}: a {type(value).__name__} that is not JSON: {error}.") from error
    if not isinstance(plain, dict):
        raise MetricError(f"metric {name!r}: a {type(plain).__name__} must be a dict.")
    return plain


def _tail_text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            # The cut may split a multi-byte character, so replace undecodable bytes.
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        # The log was removed in the meantime; the caller still needs the other details.
        return ""
