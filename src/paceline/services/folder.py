"""The names of all files of a service.

<workspace>/services/<name>/
  service.json        the record: state, revision, address; one writer: the holder of the lock
  events.jsonl        every change of state, append only
  wanted.json         what it should be: which revision, how many workers, up or stopped; written by whoever asks
  wanted.lock         held for moments, while wanted.json or a revision is written
  supervisor.lock     held by the supervisor
  keys.json           its two keys, for its user alone
  logs/service.log    what its supervisor says and its servers print; service.log.1: what was before
  revisions/<n>/      revision.json; source/: a copy, in which the script runs; models/: those given by a path; hashes/;
                      prepared.json: the environment
  server/             the server's configuration and what it says of itself (server.json); gone when it has ended
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: In the environment of all that a service's supervisor starts, with the service's folder.
MARK = "PACELINE_SERVICE_DIR"


@dataclass(frozen=True)
class ServiceFolder:
    """The folder of one service. called: its name, while the folder has another."""

    path: Path
    called: str | None = None

    @property
    def name(self) -> str:
        return self.called or self.path.name

    @property
    def workspace_dir(self) -> Path:
        return self.path.parents[1]

    @property
    def record(self) -> Path:
        return self.path / "service.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def wanted(self) -> Path:
        return self.path / "wanted.json"

    @property
    def wanted_lock(self) -> Path:
        return self.path / "wanted.lock"

    @property
    def lock(self) -> Path:
        return self.path / "supervisor.lock"

    @property
    def keys(self) -> Path:
        return self.path / "keys.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def log(self) -> Path:
        return self.logs / "service.log"

    @property
    def old_log(self) -> Path:
        return self.logs / "service.log.1"

    @property
    def revisions(self) -> Path:
        return self.path / "revisions"

    def revision(self, number: int) -> RevisionFolder:
        return RevisionFolder(self.revisions / str(number))

    @property
    def server(self) -> Path:
        return self.path / "server"

    @property
    def server_config(self) -> Path:
        return self.server / "config.json"


@dataclass(frozen=True)
class RevisionFolder:
    """The folder of one revision of a service."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def description(self) -> Path:
        return self.path / "revision.json"

    @property
    def source(self) -> Path:
        return self.path / "source"

    @property
    def models(self) -> Path:
        return self.path / "models"

    def model(self, index: int) -> Path:
        """The folder with the copy of a model that was given by a path. index: among the revision's models, from 0."""
        return self.models / str(index)

    def hashes(self, index: int) -> Path:
        """The SHA-256 of a registered model's files, as `sha256sum` writes them."""
        return self.path / "hashes" / str(index)

    @property
    def prepared(self) -> Path:
        return self.path / "prepared.json"
