"""What is known of a service, as frozen data: its record, one of its revisions, and what somebody wants it to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from paceline.system.serialization import known_fields

#: Its first server is being made ready.
TRANSITIONING = "Transitioning"
#: A server of it answers.
HEALTHY = "Healthy"
#: It has answered before, and its server is being started again.
UNHEALTHY = "Unhealthy"
#: Nothing of it can be started; an update may help.
FAILED = "Failed"
#: Somebody has stopped it.
STOPPED = "Stopped"
NOT_RESPONDING = "NotResponding"

#: Nobody looks after a service in one of these, and nobody has to.
AT_REST = frozenset({FAILED, STOPPED})


RECORD_VERSION = 1

#: What `DesiredState.state` may be.
UP, DOWN, GONE = "up", "stopped", "deleted"

T = TypeVar("T", bound="_Data")


class _Data:
    def to_json(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload,no-any-return]  # each of these is a dataclass

    @classmethod
    def from_json(cls: type[T], data: Mapping[str, Any]) -> T:
        """Fields of a newer version are left out.

        Raises:
            TypeError: something is missing.
        """
        return cls(**known_fields(cls, data))


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(_Data):
    """How a revision is served; the names are those of `paceline.serving.config.ServerConfig`. None: the server's default."""

    max_batch: int | None = None
    max_queue: int | None = None
    max_body_bytes: int | None = None
    timeout_s: float | None = None
    load_timeout_s: float | None = None
    memory_limit_bytes: int | None = None
    drain_s: float | None = None
    threads: int | None = None
    log_level: str | None = None
    allow_origins: Sequence[str] | None = None

    def given(self) -> dict[str, Any]:
        """Those that are not None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Revision(_Data):
    """What is served: models, script, environment, settings. Never changed once it is written.

    models: {"id", "name", "version", "framework"} of each. id: the version's in the registry ("digits:3"); None for files that
        were given by a path, of which the revision's folder has a copy, under the name "file".
    source_directory: where the script's folder lay; `source/` of the revision's folder has the copy. snapshot_id: of it.
    environment: of `paceline.job.environment.EnvironmentSpec`, as JSON. variables: for the script's processes.
    why: in words, such as "models digits:4" or "reload".
    """

    number: int
    models: tuple[Mapping[str, Any], ...] = ()
    entry_script: str | None = None
    source_directory: str | None = None
    snapshot_id: str | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    created_utc: str = ""
    created_by: str = ""
    why: str = ""

    @property
    def model_names(self) -> list[str]:
        """ "digits:3", or the name of a file or folder that is in no registry."""
        return [str(model["id"] or model["name"]) for model in self.models]


@dataclass(frozen=True, kw_only=True)
class DesiredState(_Data):
    """What a service should be. serial: one more with each wish; the supervisor's record says which it has settled.

    state: UP, DOWN or GONE. workers: model processes.
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
    """How a service stands.

    target: where it runs. host, port: where it listens; port 0 until the first time. has_keys: whether requests need a key.
    scheme: "http" or "https". tls_cert, tls_key: its files.
    state: of `paceline.services.record`. since_utc: of the last change of state.
    revision, workers: what is being served; None before anything was. served: revisions that have been, oldest first.
    settled: the serial of the wish that was last brought to its end. failure: why that one, or the service, failed.
    updating: the revision that is being made ready.
    restarts: how often its server was started again after it had died; last_end: how and when it died last.
    owner: the process that looks after it.
    run_id: of the run that serves it on another machine. note: where that is, for its users.
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
    owner: Mapping[str, Any] = field(default_factory=dict)
    server_pid: int | None = None
    note: str | None = None
    run_id: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    description: str = ""

    @property
    def url(self) -> str | None:
        """ "http://127.0.0.1:8123"; None while it is not known."""
        if not self.port:
            return None
        host = (
            "localhost" if self.host in ("0.0.0.0", "::", "") else f"[{self.host}]" if ":" in self.host else self.host
        )
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def scoring_uri(self) -> str | None:
        return None if self.url is None else f"{self.url}/score"

    def to_json(self) -> dict[str, Any]:
        return {"record_version": RECORD_VERSION, **super().to_json(), "scoring_uri": self.scoring_uri}
