"""Records of a service: its state, its revisions and its desired state.

    Transitioning -> Healthy <-> Unhealthy -> Stopped | Failed

The states have the same names as in the Azure Machine Learning SDK. A reader of the record reports NotResponding if the
service has no supervisor and the reader can't start one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, TypeVar

from paceline.job.environment import EnvironmentSpec
from paceline.runs.record import Owner
from paceline.system.serialization import known_fields, plain_fields

#: State of a service whose first server is starting.
TRANSITIONING = "Transitioning"
#: State of a service whose server answers requests.
HEALTHY = "Healthy"
#: State of a service whose server answered before, and is being restarted.
UNHEALTHY = "Unhealthy"
#: State of a service for which no server can be started; an update may help.
FAILED = "Failed"
#: State of a service that a user has stopped.
STOPPED = "Stopped"
NOT_RESPONDING = "NotResponding"

#: States in which a service has no supervisor and needs none.
AT_REST = frozenset({FAILED, STOPPED})


RECORD_VERSION = 1

#: Values of `DesiredState.state`.
UP, DOWN, GONE = "up", "stopped", "deleted"

T = TypeVar("T", bound="_Data")


class _Data:
    def to_json(self) -> dict[str, object]:
        return plain_fields(self)

    @classmethod
    def from_json(cls: type[T], data: Mapping[str, Any]) -> T:
        """Build the record, ignoring the fields of newer versions."""
        return cls(**known_fields(cls, data))


class ServingOptions(TypedDict, total=False):
    """Server settings that callers pass by name, with the names of `ServerConfig`."""

    max_batch: int
    max_queue: int
    max_body_bytes: int
    timeout_s: float
    load_timeout_s: float
    memory_limit_bytes: int | None
    drain_s: float
    threads: int | None
    log_level: Literal["debug", "info", "warning", "error"]
    allow_origins: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class RevisionModel(_Data):
    """A model of a revision.

    id: The version in the registry ("digits:3"); None for a model given by path.
    file: Name of the copied file or folder of a model given by path; None for a registered model.
    """

    id: str | None
    name: str
    version: str
    framework: str | None = None
    file: str | None = None


@dataclass(frozen=True, kw_only=True)
class Revision(_Data):
    """The models, script, environment and settings of a service, which never change once written.

    source_directory: The script's original folder. `source/` in the revision's folder is its copy.
    snapshot_id: The snapshot from which the copy was made.
    variables: Environment variables of the script.
    why: Reason for the revision, shown to people, such as "models digits:4" or "reload".
    """

    number: int
    models: tuple[RevisionModel, ...] = ()
    entry_script: str | None = None
    source_directory: str | None = None
    snapshot_id: str | None = None
    environment: EnvironmentSpec = field(default_factory=EnvironmentSpec)
    variables: Mapping[str, str] = field(default_factory=dict)
    settings: ServingOptions = field(default_factory=ServingOptions)
    created_utc: str = ""
    created_by: str = ""
    why: str = ""

    @property
    def model_names(self) -> list[str]:
        """The id of each registered model, such as "digits:3"; the file name of any other model."""
        return [model.id or model.name for model in self.models]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Revision:
        models = tuple(map(RevisionModel.from_json, data.get("models") or ()))
        environment = EnvironmentSpec.from_json(data.get("environment") or {})
        return cls(**known_fields(cls, {**data, "models": models, "environment": environment}))


@dataclass(frozen=True, kw_only=True)
class DesiredState(_Data):
    """The state, revision and number of processes that users want for a service.

    serial: A number that increases with each change that a user requests.
    state: UP, DOWN (stopped) or GONE (deleted).
    workers: Number of model processes.
    """

    serial: int = 1
    state: str = UP
    revision: int = 1
    workers: int = 1
    by: str = ""
    time_utc: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class ServiceRecord(_Data):
    """The current status of a service.

    port: Listening port; 0 until the first start if the service may choose it.
    revision, workers: The present revision and number of model processes; None before the first revision is served.
    served: All revisions that were ever served, oldest first.
    settled: Serial (`DesiredState`) of the last requested change of the service that has succeeded or failed.
    failure: Why the change `settled` or the whole service failed, or None.
    updating: The revision that is being prepared, or None.
    restarts: How often a server that had died was started again.
    last_end: How and when the server last died.
    outage_reported: Whether a message about the present outage was sent.
    run_id: The run that serves on another machine, or None.
    note: A sentence for users that says where the run `run_id` is.
    """

    name: str
    created_utc: str = ""
    deployed_by: str = ""
    target: str = "local"
    host: str = "127.0.0.1"
    port: int = 0
    scheme: str = "http"
    tls_cert: str | None = None
    tls_key: str | None = None
    has_keys: bool = False
    state: str = TRANSITIONING
    since_utc: str = ""
    revision: int | None = None
    workers: int | None = None
    served: tuple[int, ...] = ()
    settled: int = 0
    failure: str | None = None
    updating: int | None = None
    restarts: int = 0
    last_end: str | None = None
    owner: Owner = field(default_factory=Owner)
    server_pid: int | None = None
    outage_reported: bool = False
    note: str | None = None
    run_id: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    description: str = ""

    @property
    def url(self) -> str | None:
        """The base URL of the service, or None before it has a port."""
        if not self.port:
            return None
        host = (
            "localhost" if self.host in ("0.0.0.0", "::", "") else f"[{self.host}]" if ":" in self.host else self.host
        )
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def scoring_uri(self) -> str | None:
        return None if self.url is None else f"{self.url}/score"

    def to_json(self) -> dict[str, object]:
        return {"record_version": RECORD_VERSION, **super().to_json(), "scoring_uri": self.scoring_uri}
