"""The JSON that verbs print with `--json`, as types: `from paceline.cli.outputs import RunSummary`.

Keys are only ever added. docs/command-line.md says what each one means.
"""

# ruff: noqa: UP013 - small types take a line each.
from __future__ import annotations

from typing import TypedDict

from paceline.pipelines.pipeline_run import StepRow
from paceline.runs.record import Hang

FailureSummary = TypedDict("FailureSummary", {"cause": str, "message": str})
#: A file of a run that is neither stored in its datastore nor brought back to this machine.
LeftOut = TypedDict("LeftOut", {"name": str, "why": str})


class _Run(TypedDict):
    run_id: str
    status: str
    experiment: str
    display_name: str
    type: str
    target: str | None
    node_count: int | None
    world_size: int | None
    distributed_backend: str | None
    size: str | None
    command: str
    latest_metrics: dict[str, object]
    attempts: int
    created_utc: str
    started_utc: str | None
    ended_utc: str | None
    duration_s: float | None
    waiting_for: str | None
    exit_code: int | None
    hang: Hang | None
    warnings: list[str]
    left_out: list[LeftOut]
    left_out_count: int
    parent_run_id: str | None
    tags: dict[str, str | None]
    folder: str


class RunSummary(_Run):
    """A run: `status`, `run`, `submit`, `rerun`, `list` (an array)."""

    failure: FailureSummary | None


GitState = TypedDict("GitState", {"commit": str, "branch": str, "dirty": bool, "repository_uri": str}, total=False)
#: The environment that Paceline has built for a run's script.
BuiltPackages = TypedDict(
    "BuiltPackages", {"key": str, "is_layered": bool, "pip": list[str], "conda": list[str]}, total=False
)
DataSource = TypedDict("DataSource", {"datastore": "str | None", "path": str}, total=False)


class RunDataset(TypedDict, total=False):
    """An input or an output of a run."""

    name: str
    mode: str
    dataset: str
    sources: list[DataSource]
    files: int
    bytes: int
    partition: str
    node_rank: int


RunData = TypedDict("RunData", {"inputs": list[RunDataset], "outputs": list[RunDataset]}, total=False)


class LoadSample(TypedDict):
    """The last load sample of a run's nodes and workers, and how the ranks spent their time."""

    time: float | None
    nodes: dict[str, dict[str, object]]
    ranks: dict[str, dict[str, object]]
    pace: dict[str, object] | None


class RunLoad(LoadSample):
    """The load of a run: `top`."""

    run_id: str
    status: str


class ShownRun(_Run):
    """All facts about a run: `show`."""

    failure: dict[str, object] | None
    properties: dict[str, str]
    description: str | None
    submitted_by: str
    canceled_by: str | None
    source_directory: str | None
    snapshot_id: str | None
    not_copied: list[dict[str, object]]
    git: GitState
    job: dict[str, object] | None
    environment: BuiltPackages | None
    data: RunData
    load: LoadSample | None
    attempt_records: list[dict[str, object]]
    trial: dict[str, object] | None
    step: dict[str, object] | None
    models: list[str]
    metrics: dict[str, object]
    files: list[str]
    size_bytes: int


class PipelineDetails(RunSummary):
    """A pipeline and its steps: `pipeline show`, `pipeline run`."""

    parameters: dict[str, object]
    description: str | None
    steps: list[StepRow]


#: A line of a worker's log: `logs` prints one such object on each line.
LogLineJson = TypedDict("LogLineJson", {"attempt": int, "rank": int, "text": str})
MetricRange = TypedDict(
    "MetricRange",
    {"last": object, "min": "float | None", "max": "float | None", "last_step": "int | None", "count": int},
)
MetricValues = TypedDict(
    "MetricValues", {"steps": "list[int | None]", "values": list[object], "times_utc": "list[str | None]"}
)


class RunMetrics(TypedDict, total=False):
    """Metrics of a run: `metrics` (an array). With --name, `series` stands for `metrics`."""

    run_id: str
    display_name: str
    metrics: dict[str, MetricRange]
    series: dict[str, MetricValues]


#: Items of the arrays that these verbs print: `files`, `download`, `rm`, and `cancel`, with the run's present state.
FileRow = TypedDict("FileRow", {"name": str, "size_bytes": int})
CopiedFile = TypedDict("CopiedFile", {"name": str, "path": str, "size_bytes": int})
RemovedRun = TypedDict("RemovedRun", {"run_id": str, "size_bytes": int})
DeletedRunJson = TypedDict(
    "DeletedRunJson",
    {
        "run_id": str,
        "display_name": str,
        "deleted_utc": str,
        "deleted_by": str,
        "kept_until_utc": str,
        "with_run": str,
    },
)
CanceledRun = TypedDict("CanceledRun", {"run_id": str, "status": str})
#: The bytes that a worker needs for model and optimizer, and the free bytes under a memory limit.
NeededMemory = TypedDict("NeededMemory", {"needed_bytes": int, "free_bytes": int, "limit": str})


class StepComparison(TypedDict, total=False):
    """Two runs of a script, compared step by step: `check`."""

    equal: bool
    runs: list[str]
    workers: int
    problem: str
    layout: str
    steps: int
    precision: str
    losses: list[float]
    one_losses: list[float]
    losses_apart: float
    limit: float
    parameters_apart: float
    parameter: str
    memory: NeededMemory
    missing: list[str]


PlannedCommand = TypedDict(
    "PlannedCommand", {"node_rank": int, "ranks": list[int], "argv": list[str], "environment": dict[str, str]}
)


class DryRun(TypedDict, total=False):
    """What a submission would start: `run --dry-run`, `submit --dry-run`."""

    job: dict[str, object]
    source_directory: str
    not_copied: list[dict[str, object]]
    commands: list[PlannedCommand]
    script: str


StoreRow = TypedDict("StoreRow", {"name": str, "kind": str, "url": str, "is_default": bool})
DatasetRow = TypedDict("DatasetRow", {"name": str, "version": "int | None", "description": "str | None"})
#: The datastores and datasets of a workspace: `data list`.
Stores = TypedDict("Stores", {"datastores": list[StoreRow], "datasets": list[DatasetRow]})
#: An environment whose packages are a layer on top of a container's image.
ImageEnvironment = TypedDict("ImageEnvironment", {"key": str, "prefix": str, "pip": list[str]})
#: The result of `export`: the created files or, in MLflow, the created runs.
Exported = TypedDict("Exported", {"to": str, "runs": list[str], "made": list[str]})
#: A folder, and the files that were created in it: `init`, `examples NAME`, `package`.
WrittenFolder = TypedDict("WrittenFolder", {"folder": str, "files": list[str]})
#: An example: `examples` (an array).
ExampleRow = TypedDict("ExampleRow", {"name": str, "about": str})
