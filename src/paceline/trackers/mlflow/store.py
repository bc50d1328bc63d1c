"""A tracking store for MLflow whose data are in a workspace.

Its URI is `paceline:///path/of/the/workspace`, or `paceline://` for the configured workspace.

In a worker, all values go into the worker's run, no matter which experiment the script names. So all ranks share one
run. If the script creates several MLflow runs, such as one for each fold, the metrics and parameters of later runs get
the MLflow run's name as a prefix. In other programs, a new MLflow run is a new run, as by `Experiment.start_logging`.

Only MLflow loads this module, by the entry point `mlflow.tracking_store` (https://mlflow.org/docs/latest/plugins.html).
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlflow.entities import (
    DatasetInput,
    Experiment,
    ExperimentTag,
    Metric,
    Param,
    Run,
    RunInfo,
    RunStatus,
    RunTag,
    ViewType,
)
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_DOES_NOT_EXIST
from mlflow.store.entities.paged_list import PagedList
from mlflow.store.tracking.abstract_store import AbstractStore
from mlflow.utils.search_utils import SearchExperimentsUtils, SearchUtils

from paceline.errors import MetricError, PacelineError, RunStateError
from paceline.runs import interactive, states, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.ids import check_experiment_name, check_run_id, plain_experiment_name
from paceline.runs.metrics import MetricLog
from paceline.trackers.mlflow import view
from paceline.trackers.mlflow.models import LoggedModels
from paceline.trackers.mlflow.search import search
from paceline.trackers.sink import Sink, sink
from paceline.workspace_dir import configured

TRACKER = "mlflow"
#: Prefix of the tags that MLflow's clients set by themselves.
_OWN_TAGS = "mlflow."
#: MLflow's state of an ended run -> Paceline's state. All other end states of MLflow mean that the run has failed.
_ENDS = {RunStatus.FINISHED: states.COMPLETED, RunStatus.KILLED: states.CANCELED}


def workspace_of(uri: str | None) -> Path:
    """Return the folder of the workspace in a URI `paceline:...`."""
    path = urllib.parse.unquote(urllib.parse.urlsplit(uri or "").path)
    return Path(os.path.abspath(os.path.expanduser(path))) if path else configured()


@dataclass
class _Open:
    """An MLflow run that this process writes to."""

    folder: RunFolder
    sink: Sink | None = None
    log: MetricLog | None = None
    prefix: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    #: Metrics of a logged model: name -> the numbers that were already logged by this name.
    known: dict[str, set[tuple[int, int, str]]] = field(default_factory=dict)


#: Id of a run -> the open run. All stores of this process use this one dictionary, because MLflow creates several stores.
_open: dict[str, _Open] = {}


class MlflowStore(LoggedModels, AbstractStore):  # type: ignore[misc,unused-ignore]
    """An MLflow tracking store of a workspace's runs, which can't delete runs."""

    def __init__(self, store_uri: str | None = None, artifact_uri: str | None = None) -> None:
        super().__init__()
        self._runs_dir = workspace_of(store_uri) / "runs"
        self._sink = sink()
        if self._sink is not None and store_uri:
            # Without this variable MLflow imports pyspark for each value, which takes ten times as long as logging the value. Set
            # it only in this store: a script with its own MLflow server has its model registry on that server.
            os.environ.setdefault("MLFLOW_REGISTRY_URI", store_uri)

    # --- methods for experiments. Paceline stores only the names of experiments.

    def search_experiments(  # type: ignore[no-untyped-def]
        self, view_type=ViewType.ACTIVE_ONLY, max_results=1000, filter_string=None, order_by=None, page_token=None
    ) -> PagedList:
        experiments = view.experiments(self._runs_dir) if view_type != ViewType.DELETED_ONLY else []
        kept = SearchExperimentsUtils.filter(experiments, filter_string)
        order = SearchExperimentsUtils.sort(kept, order_by or ["creation_time DESC", "experiment_id ASC"])
        return PagedList(*SearchUtils.paginate(order, page_token, max_results))

    def create_experiment(
        self, name: str, artifact_location: str | None = None, tags: Sequence[ExperimentTag] | None = None
    ) -> str:
        return _checked(name)

    def get_experiment(self, experiment_id: str) -> Experiment:
        return view.experiment(_checked(experiment_id), self._runs_dir)

    def get_experiment_by_name(self, experiment_name: str) -> Experiment:
        # Return an experiment for every name, existing or not. Otherwise several ranks would create it at the same time.
        experiment_id = view.DEFAULT if experiment_name == "Default" else _checked(experiment_name)
        return view.experiment(experiment_id, self._runs_dir)

    def delete_experiment(self, experiment_id: str) -> None:
        raise _refused("an experiment is a name; `paceline rm` removes its runs")

    def restore_experiment(self, experiment_id: str) -> None:
        raise _refused("nothing was deleted")

    def rename_experiment(self, experiment_id: str, new_name: str) -> None:
        raise _refused("an experiment's name is part of its runs' ids")

    # --- methods that create, read and end runs

    def create_run(
        self,
        experiment_id: str | None,
        user_id: str | None,
        start_time: int | None,
        tags: Sequence[RunTag] | None,
        run_name: str | None,
    ) -> Run:
        values = {tag.key: tag.value for tag in tags or ()}
        name = run_name or values.get("mlflow.runName")
        if self._sink is not None:
            return self._run_of_worker(self._sink, name, values)
        experiment = "default" if experiment_id in (None, view.DEFAULT) else _checked(experiment_id)
        self._runs_dir.mkdir(parents=True, exist_ok=True)
        folder = interactive.create(self._runs_dir, experiment)
        _open[folder.run_id] = _Open(folder, log=MetricLog(folder.metric_log(0)))
        if name:
            tags_and_properties.set_name(folder.notes, "display_name", str(name))
        self._set_tags(_open[folder.run_id], values)
        return view.run(folder)

    def _run_of_worker(self, to: Sink, name: str | None, tags: dict[str, str]) -> Run:
        own = to.folder.run_id
        if own not in _open:
            _open[own] = _Open(to.folder, sink=to)
            if name and to.context.rank == 0 and tags_and_properties.read(to.folder.notes).display_name is None:
                tags_and_properties.set_name(to.folder.notes, "display_name", name)
            self._set_tags(_open[own], tags)
            return self.get_run(own)
        number = len(_open) + 1
        run_id = f"{own}-{number}"
        _open[run_id] = _Open(to.folder, sink=to, prefix=f"{plain_experiment_name(name or f'run{number}')}/")
        self._set_tags(_open[run_id], tags)
        return self.get_run(run_id)

    def get_run(self, run_id: str) -> Run:
        run = view.run(self._folder(run_id))
        run.info._run_id = run_id
        if (writing := _open.get(run_id)) is not None:
            run.data.tags.update(writing.tags)
            for values in (run.data.metrics, run.data.params):
                own = {
                    key.removeprefix(writing.prefix): value
                    for key, value in values.items()
                    if key.startswith(writing.prefix)
                }
                values.clear()
                values.update(own)
        return run

    def update_run_info(
        self, run_id: str, run_status: int | None, end_time: int | None, run_name: str | None
    ) -> RunInfo:
        if (writing := _open.get(run_id)) is not None:
            if run_name and not writing.prefix:
                tags_and_properties.set_name(writing.folder.notes, "display_name", str(run_name))
            # Let MLflow end only a run that this script has created. A worker's run ends with the worker's script.
            if writing.log is not None and RunStatus.is_terminated(run_status):
                del _open[run_id]
                writing.log.close()
                interactive.end(writing.folder, _ENDS.get(run_status, states.FAILED))
        return self.get_run(run_id).info

    def delete_run(self, run_id: str) -> None:
        raise _refused(f"`paceline rm {run_id}` does that")

    def restore_run(self, run_id: str) -> None:
        raise _refused("nothing was deleted")

    def _search_runs(  # type: ignore[no-untyped-def]
        self, experiment_ids, filter_string, run_view_type, max_results, order_by, page_token
    ) -> tuple[list[Run], str | None]:
        names = set(experiment_ids) if run_view_type != ViewType.DELETED_ONLY else set()
        # Read one run more than the page shows, to find out whether there is a next page.
        stop = SearchUtils.parse_start_offset_from_page_token(page_token) + max_results + 1
        runs = search(self._runs_dir, names, filter_string, order_by, stop)
        page: tuple[list[Run], str | None] = SearchUtils.paginate(runs, page_token, max_results)
        return page

    def get_metric_history(
        self, run_id: str, metric_key: str, max_results: int | None = None, page_token: str | None = None
    ) -> PagedList:
        prefix = _open[run_id].prefix if run_id in _open else ""
        metrics = view.history(self._folder(run_id), prefix + metric_key)
        for metric in metrics:
            metric._key = metric_key
        return PagedList(metrics, None)

    def _search_datasets(self, experiment_ids: Collection[str]) -> list[object]:
        return []

    # --- methods that log metrics, parameters and tags

    def log_batch(
        self, run_id: str, metrics: Sequence[Metric], params: Sequence[Param], tags: Sequence[RunTag]
    ) -> None:
        to = self._writable(run_id)
        for metric in metrics:
            name, time_s = to.prefix + metric.key, metric.timestamp / 1000 if metric.timestamp else None
            if self._is_known(to, name, metric):
                continue
            if to.sink is not None:
                to.sink.log(TRACKER, name, metric.value, metric.step, time_s)
            elif to.log is not None:
                try:
                    to.log.scalar(name, metric.value, metric.step, time_s)
                except MetricError as error:
                    raise MlflowException(str(error), INVALID_PARAMETER_VALUE) from error
        if params:  # if there are no parameters, the run's notes are not needed
            _add_parameters(to, {f"{to.prefix}{param.key}": str(param.value) for param in params})
        self._set_tags(to, {tag.key: tag.value for tag in tags})

    def _is_known(self, to: _Open, name: str, metric: Metric) -> bool:
        """Return whether a model's metric value was logged before, and record the value."""
        if metric.model_id is not None and name not in to.known:
            to.known[name] = {_number(number) for number in view.history(to.folder, name)}
        if (known := to.known.get(name)) is None:
            return False
        number, count = _number(metric), len(known)
        known.add(number)
        return len(known) == count

    def delete_tag(self, run_id: str, key: str) -> None:
        to = self._writable(run_id)
        to.tags.pop(key, None)
        tags_and_properties.remove_tags(to.folder.notes, [key])

    def log_inputs(self, run_id: str, datasets: Sequence[DatasetInput] | None = None, models: object = None) -> None:
        """Store MLflow's datasets as tags of the run."""
        to = self._writable(run_id)
        if datasets:
            tags = {f"dataset {entry.dataset.name}": entry.dataset.digest for entry in datasets}
            tags_and_properties.set_tags(to.folder.notes, tags)

    def log_outputs(self, run_id: str, models: object) -> None:
        """Do nothing: each logged model already records which run made it."""

    def record_logged_model(self, run_id: str, mlflow_model: object) -> None:
        """Do nothing: each logged model already records which run made it."""

    def link_traces_to_run(self, trace_ids: list[str], run_id: str) -> None:
        raise _refused("traces are not kept")

    def _set_tags(self, to: _Open, tags: dict[str, str]) -> None:
        for key, value in tags.items():
            if key == "mlflow.note.content":
                tags_and_properties.set_name(to.folder.notes, "description", value)
            elif key.startswith(_OWN_TAGS):
                to.tags[key] = value
            else:
                tags_and_properties.set_tags(to.folder.notes, {f"{to.prefix}{key}": value})

    # --- methods that find a run by its id

    def _folder(self, run_id: str) -> RunFolder:
        if run_id in _open:
            return _open[run_id].folder
        if self._sink is not None and run_id == self._sink.folder.run_id:
            return self._sink.folder
        try:
            check_run_id(run_id)
            folder = RunFolder(self._runs_dir / run_id)
            store.stored(folder)
            return folder
        except PacelineError as error:
            raise MlflowException(f"Run '{run_id}' not found: {error}", RESOURCE_DOES_NOT_EXIST) from error

    def _writable(self, run_id: str) -> _Open:
        if run_id not in _open:
            if self._sink is None or run_id != self._sink.folder.run_id:
                self._folder(run_id)
                raise _refused(f"run {run_id} is logged by another program, or has ended")
            # The script uses the worker's run without opening it, for example by an id from MLFLOW_RUN_ID. Open the run now.
            _open[run_id] = _Open(self._sink.folder, sink=self._sink)
        return _open[run_id]


def _add_parameters(to: _Open, values: dict[str, str]) -> None:
    """Store parameters as the run's properties. Several ranks may store the same value."""
    for _ in range(2):
        there = tags_and_properties.read(to.folder.notes).properties
        for key, value in values.items():
            if there.get(key, value) != value:
                raise MlflowException(
                    f"Changing param values is not allowed. Param with key='{key}' was already logged with "
                    f"value='{there[key]}' for run {to.folder.run_id}. Attempted logging new value '{value}'.",
                    INVALID_PARAMETER_VALUE,
                )
        new = {key: value for key, value in values.items() if key not in there}
        try:
            if new:
                tags_and_properties.add_properties(to.folder.notes, new)
            return
        except RunStateError:
            continue  # another rank has already stored this parameter
        except PacelineError as error:
            raise MlflowException(str(error), INVALID_PARAMETER_VALUE) from error


def _number(metric: Metric) -> tuple[int, int, str]:
    return metric.step, metric.timestamp, repr(float(metric.value))


def _checked(name: object) -> str:
    """Return an experiment's id: its name, with dashes for invalid characters."""
    plain = plain_experiment_name(name)
    try:
        return check_experiment_name(plain)
    except PacelineError as error:
        raise MlflowException(str(error), INVALID_PARAMETER_VALUE) from error


def _refused(why: str) -> MlflowException:
    return MlflowException(f"paceline's store does not do that: {why}.", INVALID_PARAMETER_VALUE)
