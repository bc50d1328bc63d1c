"""Paths of a service's files.

<workspace>/services/<name>/
  service.json        the record: state, revision, address; written by the holder of the lock
  events.jsonl        every change of state, append only
  load.jsonl          the load of the last day, a point every 30 s
  wanted.json         the desired state: revision, workers, up or stopped
  wanted.lock         held while wanted.json or a revision is written
  supervisor.lock     held by the supervisor
  keys.json           the two keys, private
  receivers.json      receivers of messages, with the URLs of their webhooks, private
  logs/service.log    output of supervisor and servers; service.log.1: the previous log
  revisions/<n>/      revision.json; source/: the copy in which the script runs; models/: copies of models given by path; hashes/:
                      SHA-256 of the models' files; prepared.json: the environment
  cluster.json        the service's Secrets and compute target, while it has objects in a Kubernetes cluster
  server/             the server's configuration and state (server.json), while it runs
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.system.files import PathAttribute

#: Environment variable of all processes that a supervisor starts. Its value is the path of the service's folder.
MARK = "PACELINE_SERVICE_DIR"


@dataclass(frozen=True)
class ServiceFolder:
    """The folder of one service."""

    path: Path
    called: str | None = None

    record = PathAttribute("service.json")
    events = PathAttribute("events.jsonl")
    load = PathAttribute("load.jsonl")
    wanted = PathAttribute("wanted.json")
    wanted_lock = PathAttribute("wanted.lock")
    lock = PathAttribute("supervisor.lock")
    keys = PathAttribute("keys.json")
    receivers = PathAttribute("receivers.json")
    logs = PathAttribute("logs")
    log = PathAttribute("logs/service.log")
    old_log = PathAttribute("logs/service.log.1")
    revisions = PathAttribute("revisions")
    cluster = PathAttribute("cluster.json")
    server = PathAttribute("server")
    server_config = PathAttribute("server/config.json")

    @property
    def name(self) -> str:
        return self.called or self.path.name

    @property
    def workspace_dir(self) -> Path:
        return self.path.parents[1]

    def revision(self, number: int) -> RevisionFolder:
        return RevisionFolder(self.revisions / str(number))


@dataclass(frozen=True)
class RevisionFolder:
    """The folder of one revision of a service."""

    path: Path

    description = PathAttribute("revision.json")
    source = PathAttribute("source")
    models = PathAttribute("models")
    prepared = PathAttribute("prepared.json")

    @property
    def number(self) -> int:
        return int(self.path.name)

    def model(self, index: int) -> Path:
        """Return the path of a model's copy. Registered models have no copy."""
        return self.models / str(index)

    def hashes(self, index: int) -> Path:
        """Return the path of a model's SHA-256 digests, a file in the format of sha256sum."""
        return self.path / "hashes" / str(index)
