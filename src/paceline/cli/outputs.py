"""The JSON that verbs print with `--json`, as types: `from paceline.cli.outputs import RunSummary`.

New releases only add keys. docs/command-line.md explains the keys of a run.
"""

# ruff: noqa: UP013 - small types take a line each.
from __future__ import annotations

from typing import TypedDict

from paceline.models.aliases import AliasChange
from paceline.observe.node.messages import WorkersReport
from paceline.pipelines.pipeline_run import StepRow
from paceline.runs.record import Hang
from paceline.runs.run_data import RunData
from paceline.trackers.imports.adopt import ImportedRun

FailureSummary = TypedDict("FailureSummary", {"cause": str, "message": str})
#: A file of a run that Paceline neither stored in its datastore nor copied back to this machine.
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
    """The JSON of `status`, `run`, `submit` and `rerun`, and of items of `list`."""

    failure: FailureSummary | None


GitState = TypedDict("GitState", {"commit": str, "branch": str, "dirty": bool, "repository_uri": str}, total=False)
#: The environment that Paceline has built for a run's script.
BuiltPackages = TypedDict(
    "BuiltPackages", {"key": str, "is_layered": bool, "pip": list[str], "conda": list[str]}, total=False
)


class _Load(TypedDict):
    time: float | None
    nodes: dict[str, dict[str, object]]
    ranks: dict[str, dict[str, object]]
    pace: dict[str, object] | None


class LoadSample(_Load, total=False):
    """The latest use of processors, memory and GPUs by a run.

    `pace` has each rank's training times. The first sample adds `attempt` and `every_s` (seconds between samples).
    """

    every_s: float
    attempt: int


class RunLoad(LoadSample):
    """The JSON of `top`: how a run uses processors, memory, GPUs, disk and network."""

    run_id: str
    status: str


class ShownRun(_Run):
    """The JSON of `show`: a run with all details."""

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
    """The JSON of `pipeline show` and `pipeline run`: a pipeline and its steps."""

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
    """An item of the JSON array of `metrics`; with --name, `series` replaces `metrics`."""

    run_id: str
    display_name: str
    metrics: dict[str, MetricRange]
    series: dict[str, MetricValues]


#: An item of the JSON array that `files` prints.
FileRow = TypedDict("FileRow", {"name": str, "size_bytes": int})
CopiedFile = TypedDict("CopiedFile", {"name": str, "path": str, "size_bytes": int})  # an item that `download` prints
RemovedRun = TypedDict("RemovedRun", {"run_id": str, "size_bytes": int})  # an item of the array that `rm` prints
DeletedRunJson = TypedDict(  # a run in the trash
    "DeletedRunJson",
    {"run_id": str, "display_name": str, "deleted_utc": str, "deleted_by": str, "kept_until_utc": str, "with_run": str},
)
CommentJson = TypedDict("CommentJson", {"id": str, "author": str, "time_utc": str, "text": str})
CanceledRun = TypedDict("CanceledRun", {"run_id": str, "status": str})
#: Bytes that a worker needs for model and optimizer, and bytes that are free under its memory limit.
NeededMemory = TypedDict("NeededMemory", {"needed_bytes": int, "free_bytes": int, "limit": str})


class StepComparison(TypedDict, total=False):
    """The JSON of `check`: two runs of a script, compared step by step."""

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
    """The JSON of `run --dry-run` and `submit --dry-run`: what they would start."""

    job: dict[str, object]
    source_directory: str
    not_copied: list[dict[str, object]]
    commands: list[PlannedCommand]
    script: str


StoreRow = TypedDict("StoreRow", {"name": str, "kind": str, "url": str, "is_default": bool})
DatasetRow = TypedDict("DatasetRow", {"name": str, "version": "int | None", "description": "str | None"})
#: Output of `data list`: the datastores and datasets of a workspace.
Stores = TypedDict("Stores", {"datastores": list[StoreRow], "datasets": list[DatasetRow]})
#: An environment whose packages are a layer on top of a container's image.
ImageEnvironment = TypedDict("ImageEnvironment", {"key": str, "prefix": str, "pip": list[str]})
#: The output of `export`. `made` lists the files that it has written, or the runs that it has created in MLflow.
Exported = TypedDict("Exported", {"to": str, "runs": list[str], "made": list[str]})
#: A folder, and the files that `init`, `examples NAME` or `package` has written into it.
WrittenFolder = TypedDict("WrittenFolder", {"folder": str, "files": list[str]})
#: An item of the array that `examples` prints.
ExampleRow = TypedDict("ExampleRow", {"name": str, "about": str})


class ListedRun(RunSummary, total=False):
    """An item of the JSON array of `list`. Only --long adds `size_bytes`."""

    script: str | None
    params: dict[str, object]
    main_metric: str | None
    metric_summaries: dict[str, dict[str, float | None]]
    resources: dict[str, float]
    size_bytes: int


SpreadJson = TypedDict("SpreadJson", {"mean": float, "deviation": "float | None", "count": int})
#: An item of the array that `list --group` prints. `columns` maps a field to the spread of its numbers, or to None.
GroupRow = TypedDict("GroupRow", {"value": object, "runs": list[str], "columns": "dict[str, SpreadJson | None]"})
ChangeJson = TypedDict("ChangeJson", {"name": str, "a": object, "b": object})
CodeChange = TypedDict("CodeChange", {"name": str, "status": str, "plus": int, "minus": int, "text": str})


class MetricChangeJson(ChangeJson):
    """A metric that differs between two runs."""

    step: int | None
    by_step: bool
    last_a: object
    last_b: object
    count_a: int
    count_b: int


class RunDiffJson(TypedDict):
    """The JSON of `diff`: the differences between two runs."""

    a: str
    b: str
    parameters: list[ChangeJson]
    settings: list[ChangeJson]
    code: list[CodeChange]
    code_note: str | None
    git: list[ChangeJson]
    environment: list[ChangeJson]
    data: list[ChangeJson]
    topology: list[ChangeJson]
    metrics: list[MetricChangeJson]
    same_metrics: list[str]
    parting: MetricChangeJson | None


class UsageRow(TypedDict):
    """An item of the JSON of `usage`: core hours and GPU hours of runs."""

    name: str
    runs: int
    core_hours: float
    gpu_hours: float
    failed_core_hours: float
    failed_gpu_hours: float
    canceled_core_hours: float
    canceled_gpu_hours: float
    preparing_core_hours: float
    preparing_gpu_hours: float
    data_core_hours: float
    data_gpu_hours: float
    idle_gpu_hours: float
    lost_core_hours: float
    lost_gpu_hours: float


#: Output of `usage`: the sums for each value of the field `by` ("user", "experiment", "target" or "week"), and of all runs.
UsageReport = TypedDict("UsageReport", {"by": str, "rows": list[UsageRow], "all": UsageRow})


class GoodputJson(TypedDict):
    """An item of the JSON array of `usage --goodput`.

    `percent`, `core_s` and `gpu_s` map classes such as "computing" and "hanging" to their part of the run's cost.
    """

    run_id: str
    seconds: float
    ettr: float
    percent: dict[str, float]
    core_s: dict[str, float]
    gpu_s: dict[str, float]
    energy_kwh: float
    energy_source: str
    price: float | None


class StacksJson(WorkersReport):
    """The JSON of `stacks`. `waiting` has sentences on which ranks wait for which."""

    waiting: list[str]


#: A function in a profile. own: its share of the time. whole: its share with called functions. by_rank: rank -> own.
FunctionShare = TypedDict(
    "FunctionShare",
    {"function": str, "file": str, "line": int, "own": float, "whole": float, "by_rank": dict[str, float]},
)


class ProfileJson(WorkersReport):
    """The JSON of `profile`. `file` is the path of the samples in speedscope's format."""

    functions: list[FunctionShare]
    file: str


class SweepDetails(RunSummary, total=False):
    """The JSON of `sweep show` and `sweep run`, with the best trial first.

    `runs`, a row for each run of each trial, is present only for sweeps that pause trials.
    """

    sweep: dict[str, object]
    trials: list[dict[str, object]]
    runs: list[dict[str, object]]


#: Output of `sweep run --dry-run`: the first points of the search space, and the script's arguments for each point.
SweepPoints = TypedDict(
    "SweepPoints", {"sweep": dict[str, object], "points": list[dict[str, object]], "arguments": list[list[str]]}
)


class PipelinePlan(TypedDict):
    """The JSON of `pipeline run --dry-run`: the steps that it would run."""

    steps: list[dict[str, object]]
    parameters: dict[str, object]
    outputs: dict[str, list[object]]
    continue_on_step_failure: bool
    regenerate_outputs: bool
    description: str | None


class ModelRow(TypedDict):
    """The JSON of `model register` and `model update`, and of items of `model list`."""

    id: str
    name: str
    version: int
    aliases: list[str]
    framework: str | None
    framework_version: str | None
    size_bytes: int
    digest: str
    run_id: str | None
    created_utc: str
    registered_by: str
    tags: dict[str, str | None]
    properties: dict[str, str]
    description: str | None
    path: str


class ModelDetails(ModelRow):
    """The JSON of `model show`: a model's version with all details."""

    top: str
    is_folder: bool
    files: list[dict[str, object]]
    pickles: list[str]
    run: dict[str, object]
    can_be_made_again: bool
    datasets: list[dict[str, object]]
    alias_history: list[AliasChange]


#: A property that `model diff` compares. part: the property's group, such as "metrics". values: one value for each version.
ModelFact = TypedDict("ModelFact", {"part": str, "name": str, "values": list[str], "is_different": bool})
ModelComparison = TypedDict("ModelComparison", {"models": list[str], "facts": list[ModelFact]})
ChangedFile = TypedDict("ChangedFile", {"name": str, "why": str})
#: An item of the array that `model verify` prints.
VerifiedModel = TypedDict("VerifiedModel", {"id": str, "changed": list[ChangedFile]})
#: An item of the array that `model list --at` prints.
StoredModel = TypedDict("StoredModel", {"name": str, "version": int})


class ServiceRow(TypedDict):
    """The JSON of subcommands that change a service, and of items of `service list`."""

    record_version: int
    name: str
    created_utc: str
    deployed_by: str
    target: str
    host: str
    port: int
    scheme: str
    tls_cert: str | None
    tls_key: str | None
    has_keys: bool
    state: str
    since_utc: str
    revision: int | None
    workers: int | None
    served: list[int]
    settled: int
    failure: str | None
    updating: int | None
    restarts: int
    last_end: str | None
    owner: dict[str, object]
    server_pid: int | None
    outage_reported: bool
    note: str | None
    run_id: str | None
    tags: dict[str, str]
    description: str
    scoring_uri: str | None
    models: list[str]


class ServiceDetails(ServiceRow):
    """The JSON of `service show`: a service with its revisions."""

    revisions: list[dict[str, object]]


#: Output of `service logs`.
ServiceLog = TypedDict("ServiceLog", {"name": str, "lines": list[str]})
ServiceKeys = TypedDict("ServiceKeys", {"primary": str, "secondary": str})  # output of `service keys`
DeletedService = TypedDict("DeletedService", {"name": str, "deleted": bool})  # output of `service delete`
UnitFile = TypedDict("UnitFile", {"path": str, "text": str})  # output of `service unit`
ServiceLoad = TypedDict(  # an item of the array that `service bench` prints
    "ServiceLoad",
    {
        "clients": int,
        "requests": int,
        "failures": int,
        "per_second": float,
        "p50_ms": float,
        "p95_ms": float,
        "p99_ms": float,
    },
)


class UserShareRow(TypedDict):
    """A user's share of a machine, and the weighted GPU-hours used."""

    user: str
    group: str
    share: float
    used_hours: float


class NodeRow(TypedDict):
    """A node of a compute target."""

    name: str
    cores: int | None
    used_cores: int | None
    gpus: int | None
    used_gpus: int | None
    is_up: bool
    state: str
    message: str
    outside: list[str]
    shared_by: str
    shares: list[UserShareRow]


class _TargetStatus(TypedDict):
    state: str
    cores: int | None
    used_cores: int | None
    gpus: int | None
    used_gpus: int | None
    queued: int | None
    running: int | None
    message: str


class TargetCounts(_TargetStatus):
    """A compute target's status, with counts of all nodes and running nodes."""

    nodes: int
    nodes_up: int


class JobRow(TypedDict):
    """A run's cores and GPUs on a node. `starts_in_s` estimates the run's wait."""

    run_id: str
    user: str
    node: str
    cores: int | None
    gpus: str
    is_waiting: bool
    reason: str
    priority: str
    starts_in_s: float | None


class TargetStatus(_TargetStatus):
    """A compute target's status, with its nodes and the runs on them."""

    nodes: list[NodeRow]
    jobs: list[JobRow]


class _Target(TypedDict):
    name: str
    kind: str | None
    settings: dict[str, object]
    state: str
    error: str | None


class TargetRow(_Target):
    """A compute target in the JSON array of `compute list`, with its status."""

    status: TargetCounts | None


class TargetDetails(_Target):
    """The JSON of `compute show`: a compute target."""

    status: TargetStatus | None


#: Output of `queue`.
Queues = TypedDict("Queues", {"targets": list[TargetDetails]})
#: Output of `compute list`. `load_errors` maps each kind of target that could not be loaded to the error.
Targets = TypedDict("Targets", {"targets": list[TargetRow], "load_errors": dict[str, str]})
#: A result of `compute doctor`. level: "ok", "warn", "fail" or "skipped".
FindingJson = TypedDict("FindingJson", {"check": str, "level": str, "seen": str, "node": "str | None", "advice": str})
#: Output of `compute doctor`. `result` is the worst level of all findings.
Diagnosis = TypedDict("Diagnosis", {"target": str, "kind": str, "result": str, "findings": list[FindingJson]})


class BuiltRow(TypedDict):
    """A built environment: an item of the JSON array of `env prune`."""

    key: str
    prefix: str
    python: str
    bin_dir: str
    variables: dict[str, str]
    base_python: str
    is_layered: bool
    environment: dict[str, object]
    locked: dict[str, object]
    pip: list[str]
    conda: list[str]
    created_utc: str
    build_s: float
    size_bytes: int
    last_used_utc: str


#: Output of `env list`. The next two classes are the outputs of `env show` and `env build`.
Environments = TypedDict(
    "Environments",
    {"environments": list[BuiltRow], "on_images": list[ImageEnvironment], "registered": dict[str, dict[str, object]]},
)
ShownEnvironment = TypedDict("ShownEnvironment", {"registered": "dict[str, object] | None", "built": "BuiltRow | None"})
BuiltEnvironment = TypedDict("BuiltEnvironment", {"environment": dict[str, object], "built": "BuiltRow | None"})
#: Output of `data cache`.
CacheState = TypedDict(
    "CacheState", {"folder": str, "files": int, "bytes": int, "linked_bytes": int, "limit_bytes": int}
)
#: An item of the array that `data ls` prints. The size is -1 if it is unknown.
DataFile = TypedDict("DataFile", {"datastore": "str | None", "path": str, "size": int, "version": str, "relative": str})
SnapshotSize = TypedDict("SnapshotSize", {"snapshot_id": str, "size_bytes": int})
EnvironmentSize = TypedDict("EnvironmentSize", {"key": str, "size_bytes": int})


class PrunedJson(TypedDict):
    """The JSON of `prune` and `data prune`: removed things and their bytes."""

    dry_run: bool
    runs: list[RemovedRun]
    snapshots: list[SnapshotSize]
    environments: list[EnvironmentSize]
    data_bytes: int
    models_bytes: int
    size_bytes: int
    failed: list[str]


#: Output of `data freeze`.
FrozenDataset = TypedDict("FrozenDataset", {"name": str, "version": int, "place": str, "fingerprint": str})
CheckedDataset = TypedDict(  # output of `data check`
    "CheckedDataset", {"dataset": str, "added": list[str], "removed": list[str], "changed": list[str]}
)
#: An item of the array that `backup list` prints. `left_out_count` is the number of files that the backup excludes.
BackupRow = TypedDict(
    "BackupRow",
    {
        "id": str,
        "created_utc": str,
        "created_by": str,
        "host": str,
        "workspace": str,
        "files": int,
        "size_bytes": int,
        "left_out_count": int,
    },
)


class CreatedBackup(TypedDict):
    """The JSON of `backup create`.

    `stored` is the number of file contents that were new. `removed` has the ids of the backups that --keep removed.
    """

    backup: BackupRow
    stored: int
    stored_bytes: int
    left_out: list[LeftOut]
    removed: list[str]
    freed_bytes: int


class RestoredBackup(TypedDict):
    """The JSON of `backup restore`.

    `ended` are unfinished runs, which are Failed now. `kept` are existing files, which were not replaced.
    """

    backup: BackupRow
    folder: str
    files: int
    size_bytes: int
    ended: list[str]
    kept: list[str]


#: Output of `backup verify`.
VerifiedBackup = TypedDict("VerifiedBackup", {"backup": BackupRow, "damaged": list[str]})
RemovedBackups = TypedDict("RemovedBackups", {"removed": list[str], "freed_bytes": int})  # output of `backup remove`
#: Output of `prune --compute`. The next two classes are the outputs of `import` and `azureml check`.
PrunedNodes = TypedDict("PrunedNodes", {"dry_run": bool, "nodes": list[dict[str, object]]})
ImportedStore = TypedDict("ImportedStore", {"tracker": str, "counts": dict[str, int], "runs": list[ImportedRun]})
UsesOfAzure = TypedDict("UsesOfAzure", {"uses": list[dict[str, object]], "counts": dict[str, int]})


#: An item of the array that `account list` prints.
AccountRow = TypedDict("AccountRow", {"name": str, "role": str, "created_utc": str, "expires_utc": str})
MemberChange = TypedDict(  # an item of the array that `account log` prints; origin: how the member logged in
    "MemberChange", {"time_utc": str, "member": str, "role": str, "verb": str, "on": str, "origin": str}
)


class AddedAccount(AccountRow):
    """The JSON of `account add`: a service account with its token, which isn't stored."""

    token: str


class TemplateRow(TypedDict):
    """An item of the JSON of `template list`. Parameters without a default have null."""

    name: str
    path: str
    parameters: dict[str, str | None]


class TemplateDetails(TemplateRow):
    """The JSON of `template show`: a template with its text."""

    text: str


class MissedTimes(TypedDict):
    """A schedule's missed times, for which Paceline started no separate runs."""

    count: int
    first_utc: str
    last_utc: str


class OccurrenceRow(TypedDict):
    """The JSON of `schedule run`: an event of a schedule, and the started run."""

    kind: str
    what: str
    time_utc: str
    status: str
    run_id: str | None
    run_status: str | None
    reason: str
    late: bool
    missed: MissedTimes | None


class ScheduleRow(TypedDict):
    """The JSON of `schedule add` and of each item of `schedule list`."""

    name: str
    when: str
    cron: str | None
    time_zone: str | None
    on_dataset: list[str]
    on_model: list[str]
    after: list[str]
    ended: str
    job: str
    parameters: dict[str, str]
    overlap: str
    missed: str
    user: str
    paused: bool
    state: str
    next_utc: str | None
    waiting: int
    last: OccurrenceRow | None


class ScheduleDetails(ScheduleRow):
    """The JSON of `schedule show`: a schedule with its latest events, newest first."""

    occurrences: list[OccurrenceRow]
