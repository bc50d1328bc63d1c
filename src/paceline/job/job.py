"""Define the job: what to run, as frozen data that converts to JSON and back.

Estimators make jobs; targets, supervisors and launchers read them. This module checks rules on the job's own values.
Targets and launchers check rules on the machine, such as whether it has a GPU or mpirun.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

from paceline.errors import JobError
from paceline.job.data_reference import PATH_VARIABLES, DataReference
from paceline.job.environment import EnvironmentSpec
from paceline.job.notify import DEFAULT_EVENTS, check_notify, check_notify_on
from paceline.job.secret_values import Secret, check_place, shown
from paceline.job.sizes import node_range, range_text
from paceline.system.gaps import DEFAULT_LIMIT, LEAST_LIMIT
from paceline.system.names import did_you_mean
from paceline.system.serialization import plain_fields

#: Version of the JSON format of a job; readers refuse newer versions.
JOB_VERSION = 2

#: Distributed backend -> launcher of its workers.
BACKENDS: dict[str, str] = {
    "mpi": "mpi",
    "gloo": "processes",
    "nccl": "processes",
    "ps": "processes",
    "tensorflow": "processes",
}
Backend: TypeAlias = Literal["mpi", "gloo", "nccl", "ps", "tensorflow"]

#: Variables that the launcher sets for each worker: a value for all workers would be wrong.
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "TF_CONFIG",
    "JAX_PROCESS_ID",
    "JAX_NUM_PROCESSES",
    "HOROVOD_RANK",
    "HOROVOD_LOCAL_RANK",
)
#: Names of the environment variables that every worker gets.
RUN_VARIABLES = ("PACELINE_ATTEMPT", "PACELINE_RUN_ID", "PACELINE_RUN_DIR", "PACELINE_RANK", "PACELINE_WORLD_SIZE")

#: Whether a worker sees only its own GPU, or all GPUs of its node and selects one by its local rank.
GPU_VISIBILITIES = ("worker", "node")
GpuVisibility: TypeAlias = Literal["worker", "node"]
PRIORITIES = ("low", "normal", "high", "urgent")
Priority: TypeAlias = Literal["low", "normal", "high", "urgent"]

#: Seconds between SIGTERM and SIGKILL, as in Slurm, Kubernetes and torchrun.
DEFAULT_GRACE_S = 30.0
#: Seconds without progress that count as a hang: torch's timeout for NCCL collectives (for Gloo it is 1,800 s).
DEFAULT_HANG_S = 600.0
#: Minimum seconds between two restarts of an elastic run for more nodes. A guess: each restart costs half a minute.
DEFAULT_ELASTIC_S = 300.0
#: Values of `on_hang`: what Paceline does when a run hangs. "restart" starts another attempt.
ON_HANG = ("report", "fail", "restart")
OnHang: TypeAlias = Literal["report", "fail", "restart"]
#: Values of `on_failure`: after a loss, start all workers again ("restart"), or only the lost workers ("replace").
ON_FAILURE = ("restart", "replace")
OnFailure: TypeAlias = Literal["restart", "replace"]
#: Values of `warm`: whether workers of later attempts are forked from a process that has already loaded libraries.
WARM = ("auto", "off")
Warm: TypeAlias = Literal["auto", "off"]

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job: what to run, with which environment, on how many nodes and processes.

    Args:
        entry_script: A file, relative to the source directory, with forward slashes: Python (`.py`), a binary, or an
            executable script with `#!`. Any other name is a program on the nodes' PATH, such as "nvidia-smi".
        entry_module: A module to run instead, as `python -m` does in the source directory.
        working_directory: The workers' directory, relative to the source directory. On machines with the user's folders, links
            lead to ".." and to files that are not copied. None: the copy itself, without links.
        arguments: The script's arguments, in order.
        framework: "pytorch", "tensorflow", "sklearn" or None.
        distributed_backend: None for one process; "mpi" (Open MPI); "gloo" or "nccl" (processes with torch's variables);
            "tensorflow" or "ps" (processes with `TF_CONFIG`, without and with parameter servers).
        compute_target: Name of the compute target.
        process_count_per_node: Number of workers on each node.
        node_count: Number of nodes. For an elastic run, its minimum and maximum: (2, 4) or "2..4". These become
            `node_range`, and `node_count` becomes the maximum. An attempt's job has the attempt's number of nodes instead.
        node_range: (minimum, maximum) of an elastic run, set from `node_count`. None for other runs.
        elastic_seconds: Minimum seconds between two restarts of an elastic run for more nodes.
        worker_count: Number of workers; only with "ps".
        parameter_server_count: Number of parameter servers; only with "ps". World size is the sum of both.
        use_gpu: Whether each worker gets a GPU.
        gpu_visibility: "worker": each worker sees only its own GPU. "node": each worker sees all GPUs of its node, for scripts
            that call `torch.cuda.set_device(LOCAL_RANK)`.
        gpu_share: Each worker's share of its GPU, above 0 and up to 1. Other runs may use the rest of the GPU.
        cores: Cores of this machine to reserve for each worker; 0 for none. Only on `local`.
        priority: Position among waiting runs: "low", "normal", "high", or "urgent", which also preempts runs of a lower
            priority. Only on `local` and `ssh`.
        environment: The script's interpreter and packages.
        environment_variables: Variables of every worker. They override Paceline's variables. A `secret(...)` among them moves
            to `secrets`.
        secrets: Variable -> source of its value ("env:HF_TOKEN"), which is read at submission and never recorded.
        inputs: Data that the workers read, and output folders whose files Paceline stores at the end.
        send: Paths in the source directory that are not copied. Paceline sends them, in any size, to nodes that do not see
            the submitter's folders.
        files: Path in the working directory -> text of a file to write there, in place of the source's file if one exists.
        max_run_duration_seconds: Limit from the start of the first attempt; None for no limit.
        grace_period_seconds: Seconds between SIGTERM and SIGKILL. Workers that wait in a collective for a lost node get none.
        max_restarts: Number of further attempts after the loss of a node, worker or launcher, or a port conflict. An
            attempt after a preemption does not count.
        on_failure: "restart" starts all workers again. "replace" starts only lost workers again if the script allows it, while
            other workers continue. Each replacement is one of `max_restarts`.
        restart_on_exception: Also restart after the script's own exception.
        notify: Receivers of messages, such as "mail:ann@example.com" and "slack:env:SLACK_URL".
        notify_on: Events that send messages: "allocated" (the run has left the queue), "start" (the workers run), "end",
            "failure", "hang", "quota" (the quota is used up), "best" (a sweep has a new best trial), and conditions on metrics
            in the query language of runs, such as "metrics.loss > 10".
        log_limit: Bytes to keep of each worker's log, from its beginning and its end; 0 for no limit.
        hang_seconds: Seconds without output, metrics or progress of any worker until the run counts as hanging; 0: never.
        on_hang: Reaction to a hang: "report", "fail", or "restart" (one of `max_restarts`). Each hang is reported.
        warm: "auto": if the run may restart, each node keeps a process that has loaded the script's libraries. The next
            attempt forks its workers from this process. "off": each attempt starts cold.

    Raises:
        JobError: A value is invalid; the message has the value, the rule and a correct value.

    Examples:
        >>> job = pl.Job(
        ...     entry_script="train.py", node_count=2, process_count_per_node=4, distributed_backend="gloo"
        ... )
        >>> job.world_size
        8
    """

    entry_script: str = ""
    entry_module: str | None = None
    working_directory: str | None = None
    arguments: tuple[str, ...] = ()
    framework: str | None = None
    compute_target: str = "local"
    node_count: int = 1
    process_count_per_node: int = 1
    worker_count: int | None = None
    parameter_server_count: int = 0
    distributed_backend: Backend | None = None
    use_gpu: bool = False
    gpu_visibility: GpuVisibility = "worker"
    gpu_share: float = 1.0
    cores: int = 1
    priority: Priority = "normal"
    environment: EnvironmentSpec = field(default_factory=EnvironmentSpec)
    environment_variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[DataReference, ...] = ()
    send: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    max_run_duration_seconds: float | None = None
    grace_period_seconds: float = DEFAULT_GRACE_S
    max_restarts: int = 0
    on_failure: OnFailure = "restart"
    restart_on_exception: bool = False
    log_limit: int = DEFAULT_LIMIT
    notify: tuple[str, ...] = ()
    notify_on: tuple[str, ...] = DEFAULT_EVENTS
    hang_seconds: float = DEFAULT_HANG_S
    on_hang: OnHang = "report"
    warm: Warm = "auto"
    node_range: tuple[int, int] | None = None
    elastic_seconds: float = DEFAULT_ELASTIC_S

    def __post_init__(self) -> None:
        _check_entry(self.entry_script, self.entry_module)
        _check_working_directory(self.working_directory)
        _check_strings("arguments", self.arguments)
        # Check the numbers of nodes and workers before the backend, whose rules use these numbers.
        _take_range(self)
        _check_count("process_count_per_node", self.process_count_per_node, 1)
        _check_count("max_restarts", self.max_restarts, 0)
        _check_backend(self)
        # Move secrets out of the variables before the check that all values of variables are strings.
        _take_secrets(self)
        _check_variables(self.environment_variables)
        _check_secrets(self)
        _check_own_variables(self)
        if self.max_run_duration_seconds is not None:
            _check_seconds("max_run_duration_seconds", self.max_run_duration_seconds, zero=False)
        _check_seconds("grace_period_seconds", self.grace_period_seconds, zero=True)
        # Check inputs after secrets: a secret must not have the name of an input's variable.
        _check_inputs(self)
        _check_send(self.send)
        _check_files(self.files)
        _check_log_limit(self.log_limit)
        object.__setattr__(self, "notify", check_notify(self.notify))
        object.__setattr__(self, "notify_on", check_notify_on(self.notify_on))
        _check_seconds("hang_seconds", self.hang_seconds, zero=True)
        _check_on_hang(self)
        if self.warm not in WARM:
            raise JobError(f"warm={self.warm!r}: write 'auto' or 'off'.{did_you_mean(str(self.warm), WARM)}")
        _check_seconds("elastic_seconds", self.elastic_seconds, zero=True)
        if self.gpu_visibility not in GPU_VISIBILITIES:
            near = did_you_mean(str(self.gpu_visibility), GPU_VISIBILITIES)
            raise JobError(f"gpu_visibility={self.gpu_visibility!r}: write 'worker' or 'node'.{near}")
        if self.priority not in PRIORITIES:
            near = did_you_mean(str(self.priority), PRIORITIES)
            raise JobError(f"priority={self.priority!r} is not one of {', '.join(PRIORITIES)}.{near}")
        if not isinstance(self.restart_on_exception, bool):
            raise JobError(f"restart_on_exception={self.restart_on_exception!r} is not a bool. Write True or False.")
        if self.restart_on_exception and not self.max_restarts:
            raise JobError("restart_on_exception=True with max_restarts=0: say how often, such as max_restarts=3.")
        if not isinstance(self.use_gpu, bool):
            raise JobError(f"use_gpu={self.use_gpu!r} is not a bool. Write use_gpu=True or use_gpu=False.")
        _check_share(self.gpu_share, use_gpu=self.use_gpu)
        _check_count("cores", self.cores, 0)
        if not isinstance(self.compute_target, str) or not self.compute_target:
            raise JobError(f"compute_target={self.compute_target!r} is not a compute target's name, such as 'local'.")
        if not isinstance(self.environment, EnvironmentSpec):
            raise JobError(
                f"environment={self.environment!r} is not an Environment. Make one with paceline.Environment(...)."
            )
        _check_on_failure(self)

    @property
    def world_size(self) -> int:
        """The number of workers, including parameter servers."""
        if self.distributed_backend == "ps":
            return (self.worker_count or 1) + self.parameter_server_count
        return self.node_count * self.process_count_per_node

    @property
    def least_nodes(self) -> int:
        """The minimum number of nodes that the run accepts."""
        return self.node_range[0] if self.node_range else self.node_count

    @property
    def size_text(self) -> str:
        """The numbers of nodes and of processes per node, such as "2..4x2"."""
        return f"{range_text(*(self.node_range or (self.node_count,) * 2))}x{self.process_count_per_node}"

    def resized(self, node_count: int) -> Job:
        """Return the job for an attempt with exactly `node_count` nodes."""
        return self if node_count == self.node_count else replace(self, node_count=node_count)

    def at_most(self, node_count: int) -> Job:
        """Return the job with at most `node_count` nodes, but no fewer than its minimum."""
        most = max(self.least_nodes, min(node_count, self.node_count))
        return replace(self, node_range=None, node_count=range_text(self.least_nodes, most))  # type: ignore[arg-type]

    @property
    def entry_words(self) -> tuple[str, ...]:
        """The command line of the entry: ("train.py",) or ("-m", "package.train")."""
        return ("-m", self.entry_module) if self.entry_module else (self.entry_script,)

    @property
    def is_python(self) -> bool:
        """Whether the script's interpreter runs the job's entry (script or module)."""
        return self.entry_module is not None or self.entry_script.endswith(".py")

    @property
    def may_be_on_path(self) -> bool:
        """Whether the entry may be a program on the nodes' PATH."""
        return not self.is_python and "/" not in self.entry_script

    @property
    def launcher(self) -> str:
        """The name of the launcher: "processes" (also without a backend), or "mpi"."""
        return BACKENDS[self.distributed_backend] if self.distributed_backend else "processes"

    @property
    def has_launcher(self) -> bool:
        """Whether workers get a launcher's variables (`RANK`, `MASTER_ADDR`, ...)."""
        return self.distributed_backend is not None

    @property
    def uses_tf_config(self) -> bool:
        """Whether workers get `TF_CONFIG`."""
        return self.distributed_backend in ("ps", "tensorflow")

    def with_values(self, values: Mapping[str, str]) -> Job:
        """Return the job with secret `values` as variables. Never write it to disk."""
        if not self.secrets:
            return self
        # Leave out the URLs of `notify`, which `values` also has. Empty the field `secrets`: its names are variables now.
        own = {name: value for name, value in values.items() if name in self.secrets}
        return replace(self, environment_variables={**self.environment_variables, **own}, secrets={})

    def shown(self) -> dict[str, Any]:
        """Return the result of `to_json` with likely secrets hidden."""
        return {**self.to_json(), "environment_variables": shown(self.environment_variables)}

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, with the format's version."""
        return {"version": JOB_VERSION, **plain_fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Job:
        """Return the job that `to_json` wrote.

        Raises:
            JobError: A newer Paceline wrote it, a field is unknown to this version, or a value is invalid.
        """
        values = dict(data)
        version = values.pop("version", None)
        if version == 1:
            values = _of_version_1(values)
        elif version != JOB_VERSION:
            raise JobError(
                f"job version {version!r}, but this Paceline reads version {JOB_VERSION}. Read it with the one that wrote it."
            )
        # Refuse unknown fields: a job that is read without one of its fields would run as a different job.
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise JobError(f"unknown job fields {unknown}; known are {sorted(known)}.")
        for name in ("arguments", "send"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        if isinstance(values.get("environment"), dict):
            values["environment"] = EnvironmentSpec.from_json(values["environment"])
        values["inputs"] = tuple(DataReference.from_json(reference) for reference in values.get("inputs") or ())
        return cls(**values)


def _take_range(job: Job) -> None:
    """Move a range in `node_count` to `node_range`. A range with equal ends becomes a number."""
    given = job.node_count
    if job.node_range is None:
        least, most = node_range(given)
        object.__setattr__(job, "node_count", most)
        object.__setattr__(job, "node_range", (least, most) if least < most else None)
    else:
        least, most = node_range(job.node_range)
        object.__setattr__(job, "node_range", (least, most))
        _check_count("node_count", given, least)
        if given > most:
            raise JobError(f"node_count={given!r} is not among node_range={range_text(least, most)}.")
    if job.node_range and job.distributed_backend == "ps":
        raise JobError(
            f"node_count={range_text(*job.node_range)} with distributed_backend='ps': there the numbers of workers and "
            "parameter servers are fixed. Write one number, or choose another backend."
        )


def _check_entry(entry_script: object, module: object) -> None:
    if module is not None:
        if not isinstance(module, str) or not all(part.isidentifier() for part in module.split(".")):
            raise JobError(f"entry_module={module!r} is not a module's name. Write it as for python -m: package.train.")
        if entry_script:
            raise JobError(f"entry_script={entry_script!r} and entry_module={module!r}: only one can run. Remove one.")
        return
    if not isinstance(entry_script, str) or not entry_script:
        raise JobError(
            "entry_script is missing. Name the Python file or program to run, relative to source_directory, or an entry_module."
        )
    if "\0" in entry_script:
        raise JobError(f"entry_script={entry_script!r} holds a NUL character. Rename the file.")
    # Normalize the path first: `a/../../x` leaves the folder.
    if os.path.isabs(entry_script) or os.path.normpath(entry_script).split(os.sep)[0] == "..":
        raise JobError(
            f"entry_script={entry_script!r} lies outside source_directory. "
            "Give a path relative to source_directory, or a source_directory that holds the script."
        )


def _check_working_directory(given: object) -> None:
    if given is None:
        return
    if not isinstance(given, str) or not given or "\0" in given or os.path.isabs(given):
        raise JobError(
            f"working_directory={given!r} is not a path relative to source_directory. Write such as '.' or 'examples/mnist'."
        )


def _check_on_hang(job: Job) -> None:
    if job.on_hang not in ON_HANG:
        raise JobError(
            f"on_hang={job.on_hang!r}: write 'report', 'fail' or 'restart'.{did_you_mean(str(job.on_hang), ON_HANG)}"
        )
    if job.on_hang != "report" and not job.hang_seconds:
        raise JobError(f"on_hang={job.on_hang!r} with hang_seconds=0: a hang is never seen then. Say after how long.")
    if job.on_hang == "restart" and not job.max_restarts:
        raise JobError("on_hang='restart' with max_restarts=0: say how often, such as max_restarts=3.")


def _check_on_failure(job: Job) -> None:
    """Raise JobError for on_failure="replace" if lost workers could never be replaced."""
    if job.on_failure not in ON_FAILURE:
        near = did_you_mean(str(job.on_failure), ON_FAILURE)
        raise JobError(f"on_failure={job.on_failure!r}: write 'restart' or 'replace'.{near}")
    if job.on_failure == "restart":
        return
    if not job.max_restarts:
        raise JobError("on_failure='replace' with max_restarts=0: say how often, such as max_restarts=3.")
    size = range_text(*job.node_range) if job.node_range else ""
    for is_refused, given, rule in (
        (job.distributed_backend != "gloo", f"distributed_backend={job.distributed_backend!r}", "it needs 'gloo'"),
        (bool(size), f"node_count={size}", "an elastic run starts all workers again at each change"),
        (job.world_size == 1, "one worker", "no other worker would continue"),
        (job.use_gpu, "use_gpu=True", "it works on CPUs only"),
        (not job.is_python, f"entry_script={job.entry_script!r}", "it needs a Python script or module"),
        (job.environment.docker_image is not None, "a container image", "workers in containers start again together"),
    ):
        if is_refused:
            raise JobError(f"on_failure='replace' with {given}: {rule}. Change that, or write on_failure='restart'.")


def _check_strings(name: str, values: object) -> None:
    if not isinstance(values, tuple) or not all(isinstance(v, str) for v in values):
        raise JobError(f"{name}={values!r} is not a tuple of strings.")
    if bad := [v for v in values if "\0" in v]:
        raise JobError(f"{name} has a NUL character in {bad[0]!r}: no command line can carry one. Remove it.")


def _check_inputs(job: Job) -> None:
    if bad := [value for value in job.inputs if not isinstance(value, DataReference)]:
        raise JobError(
            f"inputs has {bad[0]!r}, which is not data. Give datastore.path(...).as_download(), or a dataset's "
            "as_named_input(...).as_mount()."
        )
    names = [reference.name for reference in job.inputs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise JobError(
            f"two inputs are called {twice[0]!r}. Rename one of them with as_named_input(...) or data_reference_name=."
        )
    for reference in job.inputs:
        _check_path_on_compute(job, reference)
        for prefix in PATH_VARIABLES:
            if prefix + reference.name in (*job.environment_variables, *job.secrets):
                raise JobError(
                    f"environment_variables sets {prefix}{reference.name}, by which the script finds the input "
                    f"{reference.name!r}. Remove one of them."
                )


def _check_send(send: object) -> None:
    _check_strings("send", send)
    for path in send:  # type: ignore[attr-defined]
        if path == ".":
            raise JobError(
                "send='.' is the whole source folder, whose code is sent anyway. Name what else is to be sent, such as 'data'."
            )
        if os.path.isabs(path) or path.split("/")[0] == ".." or path != os.path.normpath(path):
            raise JobError(
                f"send={path!r} is not a path below the source folder, of which nodes have a copy. Write it relative to that "
                "folder, such as 'data/train'."
            )


def _check_files(files: object) -> None:
    if not isinstance(files, Mapping) or not all(isinstance(text, str) for text in files.values()):
        raise JobError(f"files={files!r} is not a dict of strings.")
    for path in files:
        if not isinstance(path, str) or not _is_below(path):
            raise JobError(f"files has {path!r}, which is not a path below the script's working directory.")


def _is_below(path: str) -> bool:
    parts = path.split("/")
    # Refuse `outputs`: in the working directory it is a link to the run's own outputs.
    return not ("" in parts or ".." in parts or "." in parts or parts[0] == "outputs" or "\0" in path)


def _check_path_on_compute(job: Job, reference: DataReference) -> None:
    path = reference.path_on_compute
    if path is None:
        return
    if not isinstance(path, str) or not _is_below(path):
        raise JobError(
            f"path_on_compute={path!r} of input {reference.name!r} is not a path below the script's working directory. "
            "Give one such as 'data/train', or leave it out and take the path that the script is given."
        )
    if reference.partition is not None:
        raise JobError(
            f"path_on_compute={path!r} of input {reference.name!r} with as_partition(by={reference.partition!r}): "
            "the parts can't all appear at one path. Leave it out and take the path that the script is given."
        )


def _of_version_1(values: dict[str, Any]) -> dict[str, Any]:
    """Convert a job's fields from format version 1 to the current version."""
    kept = dict(values)
    python = kept.pop("python", None)
    for name in ("pip_packages", "pip_requirements", "conda_packages", "conda_dependencies", "inputs"):
        kept.pop(name, None)
    # Workers of a version 1 job saw all GPUs of their node, and must see all of them in a rerun, too.
    return kept | {"environment": {"python": python} if python else {}, "gpu_visibility": "node"}


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise JobError(f"{name}={value!r} is not an integer of {least} or more.")


def _check_seconds(name: str, value: object, *, zero: bool) -> None:
    # Check for NaN first: the comparisons with 0 would accept it.
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or value < 0 or (value == 0 and not zero):  # type: ignore[operator]
        raise JobError(f"{name}={value!r} is not a number of seconds {'of 0 or more' if zero else 'above 0'}.")


def _check_share(share: object, *, use_gpu: bool) -> None:
    # `not 0 < share <= 1` is also true for NaN.
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise JobError(f"gpu_share={share!r} is not a number above 0 and up to 1. Write 0.5 for two runs on each GPU.")
    if share != 1 and not use_gpu:
        raise JobError(
            f"gpu_share={share!r} without use_gpu=True: there is no GPU to share. Set use_gpu=True, or leave it out."
        )


def _check_log_limit(limit: object) -> None:
    is_number = isinstance(limit, int) and not isinstance(limit, bool)
    if not is_number or (limit != 0 and limit < LEAST_LIMIT):  # type: ignore[operator]
        raise JobError(
            f"log_limit={limit!r} is not a number of bytes, {LEAST_LIMIT:,} at least. Write it as '500MB', or 0 for no limit."
        )


def _check_backend(job: Job) -> None:
    backend = job.distributed_backend
    if backend is not None and backend not in BACKENDS:
        known = ", ".join(repr(b) for b in BACKENDS)
        near = did_you_mean(str(backend), BACKENDS)
        raise JobError(
            f"distributed_backend={backend!r} is unknown.{near} Choose one of {known}, or leave it out for one process."
        )
    if backend == "ps":
        _check_count("worker_count", job.worker_count if job.worker_count is not None else 1, 1)
        _check_count("parameter_server_count", job.parameter_server_count, 1)
        if job.process_count_per_node != 1:
            raise JobError(
                f"process_count_per_node={job.process_count_per_node} with distributed_backend='ps': there the number of "
                "processes is worker_count + parameter_server_count, spread over node_count nodes. "
                "Leave process_count_per_node at 1."
            )
        if job.node_count > job.world_size:
            raise JobError(
                f"node_count={job.node_count}, but worker_count + parameter_server_count = {job.world_size}: "
                "some nodes would have nothing to run. Ask for fewer nodes."
            )
    elif job.worker_count is not None or job.parameter_server_count:
        raise JobError(
            f"worker_count={job.worker_count}, parameter_server_count={job.parameter_server_count} with "
            f"distributed_backend={backend!r}: these belong to 'ps'. Use node_count and process_count_per_node."
        )
    if backend is None and job.world_size > 1:
        raise JobError(
            f"node_count={job.node_count} and process_count_per_node={job.process_count_per_node} make "
            f"{job.world_size} processes, which need a distributed_backend. "
            "Choose 'mpi', 'gloo', 'nccl' or 'tensorflow', so that the processes can find each other."
        )
    if backend == "nccl" and not job.use_gpu:
        raise JobError(
            "distributed_backend='nccl' without use_gpu=True: NCCL runs on GPUs alone. Set use_gpu=True, or choose 'gloo'."
        )


def _take_secrets(job: Job) -> None:
    """Move secrets from the variables to `secrets`, without changing the caller's dicts."""
    given: dict[str, Any] = {"environment_variables": job.environment_variables, "secrets": job.secrets}
    for name, value in given.items():
        if not isinstance(value, Mapping):
            # Never show an invalid value of `secrets`, because the user may have passed the secret itself.
            raise JobError(f"{name}={repr(value) if name != 'secrets' else '...'} is not a dict of strings.")
    variables: dict[str, Any] = dict(job.environment_variables)
    secrets = dict(job.secrets)
    # Make a list first, because the loop removes entries from the dictionary.
    for name in [name for name, given_value in variables.items() if isinstance(given_value, Secret)]:
        place = variables.pop(name).place
        # A secret may be in both `secrets` and `environment_variables` if both name the same source.
        if secrets.setdefault(name, place) != place:
            raise JobError(f"secrets and environment_variables both set {name}. Remove one of them.")
    object.__setattr__(job, "environment_variables", variables)
    object.__setattr__(job, "secrets", secrets)


def _check_secrets(job: Job) -> None:
    # A secret's name follows the rules of variables; the secret's value is unknown here, so use "".
    _check_variables(dict.fromkeys(job.secrets, ""))
    for name, place in job.secrets.items():
        if name in job.environment_variables:
            raise JobError(f"secrets and environment_variables both set {name}. Remove one of them.")
        if name.startswith(("SLURM_", "SRUN_")):
            # Slurm's srun takes variables with these prefixes as its options, and would show their values in a command line.
            raise JobError(f"secrets sets {name}, a name that Slurm reads itself. Give the value another name.")
        check_place(place)


def _check_variables(variables: object) -> None:
    if not isinstance(variables, Mapping):
        raise JobError(f"environment_variables={variables!r} is not a dict of strings.")
    for name, value in variables.items():
        if not isinstance(name, str) or not _VARIABLE_NAME.fullmatch(name):
            raise JobError(
                f"environment_variables has the name {name!r}; a name is letters, digits and '_', and starts with no digit."
            )
        if not isinstance(value, str) or "\0" in value:
            raise JobError(
                f"environment_variables[{name!r}]={value!r} is not a string without NUL. Write it as {str(value)!r}."
            )


def _check_own_variables(job: Job) -> None:
    """Raise JobError if the job sets a variable that Paceline sets per worker."""
    for name in (*job.environment_variables, *job.secrets):
        if name in RUN_VARIABLES:
            raise JobError(f"environment_variables sets {name}, which Paceline sets for each worker. Remove it.")
        if name in RANK_VARIABLES and job.has_launcher:
            raise JobError(
                f"environment_variables sets {name}, which the launcher sets for each worker. Remove it; "
                "node_count and process_count_per_node say how many workers there are. A single process without a "
                "distributed_backend has no launcher, and may have any value."
            )
